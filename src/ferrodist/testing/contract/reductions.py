# SPDX-License-Identifier: MIT OR Apache-2.0
"""Check ``pair`` and ``custom``: MINLOC and MAXLOC, and operations that are functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import ferrodist
from ferrodist import Backend, ReduceOp, UnsupportedOp
from ferrodist.testing.contract.case import Case, Trial
from ferrodist.testing.contract.inputs import all_values
from ferrodist.testing.contract.values import (
    COMPLEX,
    INTEGERS,
    NUMBERS,
    PAIR_OPS,
    Array,
    available_dtypes,
    can_hold,
    numpy_dtype,
    to_library,
)

PAIR_FUNCTIONS = ("allreduce", "reduce", "scan")
CUSTOM_FUNCTIONS = (*PAIR_FUNCTIONS, "exscan")


# -- values with their indices ---------------------------------------------------------------------


def pair_cases(world: int, libraries: Sequence[str]) -> Iterator[Case]:
    """Give every dtype that has an order, in turn every shape, library and way to call."""
    forms = (((), (0, 3), (7,), (4097,), (12, 3)), ("plain", "out", "async", "in_place"))
    number = 0
    for dtype in available_dtypes():
        for values in (
            ("distinct", "special") if dtype not in (*INTEGERS, *COMPLEX, "bool") else ("distinct",)
        ):
            for op in PAIR_OPS if dtype not in COMPLEX else ():
                number += 1
                function = PAIR_FUNCTIONS[number % 3]
                shape, style = forms[0][number % 5], forms[1][number % 4]
                yield Case(
                    function,
                    "pair",
                    shape=shape,
                    dtype=dtype,
                    values=values,
                    op=op,
                    root=number % world,
                    style=style,
                    library=_library(libraries, number, dtype, shape, style),
                )


def _library(libraries: Sequence[str], number: int, dtype: str, shape: Any, style: str) -> str:
    names = [*libraries, "+".join(libraries)]
    if shape == () and style in ("plain", "async"):
        names = list(NUMBERS)
    found = names[number % len(names)]
    is_written = style in ("out", "in_place") and "jax" in found
    return "numpy" if is_written or not can_hold(found, dtype) else found


def check_pair(trial: Trial) -> None:
    """Reduce values with indices that tie, in the style of the case."""
    case, rank, world = trial.case, trial.rank, trial.world
    pairs = _pairs(case, rank, world)
    wanted = _least(pairs[: rank + 1] if case.function == "scan" else pairs, case.op)
    x = [to_library(np.array(one), case.library_of(rank)) for one in pairs[rank]]
    out: Any = None
    if case.style in ("out", "in_place"):
        copies = [to_library(np.empty_like(one), case.library_of(rank)) for one in pairs[rank]]
        out = tuple(x if case.style == "in_place" else copies)
    got = _reduce(trial, x if rank % 2 else tuple(x), out)
    if case.function == "reduce" and rank != case.root:
        trial.expect(got is None, "a rank without a result must get None")
        return
    trial.expect(type(got) is tuple and len(got) == 2, f"not a pair but a {type(got).__name__}")
    trial.expect(out is None or got is out, "out was not returned")
    for one, right, what in zip(got, wanted, ("values", "indices"), strict=False):
        library = case.library_of(rank)
        dtype = right.dtype.name
        trial.expect_array(one, right, library=library, dtype=dtype, signs_of_zero=False, what=what)


def _reduce(trial: Trial, x: Any, out: Any) -> Any:
    case, options = trial.case, {} if out is None else {"out": out}
    if case.function == "reduce":
        options["root"] = case.root
    op = ReduceOp[case.op] if trial.rank % 2 else case.op.lower()
    function = getattr(ferrodist, case.function)
    if case.style != "async":
        return function(x, trial.backend, op=op, **options)
    return function(x, trial.backend, op=op, async_op=True, **options).wait(trial.backend.timeout)


def _pairs(case: Case, rank: int, world: int) -> list[tuple[Array, Array]]:
    """Pair the values of each rank with indices; every third value is the same on all ranks."""
    kinds = [name for name in INTEGERS if can_hold(case.library, name)]
    kind = kinds[case.number % len(kinds)]
    inputs, pairs = all_values(case, rank, world), []
    for peer, values in enumerate(inputs):
        tied = np.arange(values.size).reshape(values.shape) % 3 == 0
        indices = (np.arange(values.size) + 5 * (world - peer)) % 97
        mixed = np.where(tied, inputs[0], values).astype(values.dtype)
        pairs.append((mixed, indices.reshape(values.shape).astype(numpy_dtype(kind))))
    return pairs


def _least(pairs: Sequence[tuple[Array, Array]], op: str) -> tuple[Array, Array]:
    """Find the winners by the rule of np.argmin, element by element; lower indices win ties."""
    best, places = pairs[0]
    for values, indices in pairs[1:]:
        is_tie = (values == best) | ((values != values) & (best != best))
        is_better = values < best if op == "MINLOC" else values > best
        is_better = (is_better & (best == best)) | ((values != values) & (best == best))
        takes = is_better | (is_tie & (indices < places))
        best, places = np.where(takes, values, best), np.where(takes, indices, places)
    return np.asarray(best, pairs[0][0].dtype), np.asarray(places, pairs[0][1].dtype)


# -- functions -------------------------------------------------------------------------------------


def _multiply(left: Any, right: Any) -> Any:
    return left @ right


def _shrink(left: Any, right: Any) -> Any:
    return left[:1]


def _widen(left: Any, right: Any) -> Any:
    return (left @ right).astype("complex128")


def _fail(left: Any, right: Any) -> Any:
    raise ValueError("not today")


_CUSTOM: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "product": (_multiply, ""),
    "other shape": (_shrink, "float64[1,3]"),
    "other dtype": (_widen, "complex128"),
    "no array": (lambda left, right: "text", "str"),
    "raises": (_fail, "ValueError: not today"),
}


def custom_cases(world: int) -> Iterator[Case]:
    """Give every function and every way that a function can go wrong."""
    for function in CUSTOM_FUNCTIONS:
        for detail in _CUSTOM:
            for style in ("plain", "async") if detail in ("product", "raises") else ("plain",):
                root = world - 1 if function == "reduce" else 0
                yield Case(function, "custom", detail, style=style, root=root)


def check_custom(trial: Trial) -> None:
    """Multiply matrices, which do not commute; or be told by all what went wrong on which."""
    case, rank, world = trial.case, trial.rank, trial.world
    fn, says = _CUSTOM[case.detail]
    op = ReduceOp.custom(fn, name=f"contract {case.detail}")
    matrices = [np.arange(9.0).reshape(3, 3) % (peer + 2) for peer in range(world)]
    if says and world > 1:
        error = trial.expect_error(
            UnsupportedOp, lambda: _call_custom(trial, matrices[rank], op), says
        )
        if error is not None:
            trial.expect_equal(error.rank, case.root, "the rank that the operation failed on")
        trial.expect_in_step()
        return
    got = _call_custom(trial, matrices[rank], op)
    number = {"scan": rank + 1, "exscan": rank}.get(case.function, world)
    is_none = number == 0 or (case.function == "reduce" and rank != case.root)
    wanted = None if is_none else functools.reduce(np.matmul, matrices[:number])
    trial.expect_array(got, wanted)


def _call_custom(trial: Trial, x: Array, op: Any) -> Any:
    case, backend = trial.case, trial.backend
    options = {"root": case.root} if case.function == "reduce" else {}
    function = getattr(ferrodist, case.function)
    if case.style != "async":
        return function(x, backend, op=op, **options)
    return function(x, backend, op=op, async_op=True, **options).wait(backend.timeout)


def custom_of(name: str) -> Callable[[Backend], object]:
    """Reduce by an operation of this name."""
    op = ReduceOp.custom(_multiply, name=name)
    return lambda backend: ferrodist.allreduce(np.eye(2), backend, op)
