# SPDX-License-Identifier: MIT OR Apache-2.0
"""Check ``result``: every collective of arrays, in every way it can be called, against NumPy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import ferrodist
from ferrodist import Backend, ReduceOp, Work
from ferrodist.testing.contract.case import Case, Trial, digest
from ferrodist.testing.contract.inputs import (
    COUNTED,
    JOINED,
    ROOTED,
    SAME_EVERYWHERE,
    SCATTERS,
    all_values,
    counts_of,
    exchange_uneven,
    expected_result,
    make_input,
    result_library,
    rows_before,
    rows_of,
    values_of,
)
from ferrodist.testing.contract.values import (
    Array,
    find_wrong_kind,
    numpy_dtype,
    to_library,
    to_numpy,
)

_ASIDE = 500_000  # added to a case's number for further inputs that must not be its own


def check_result(trial: Trial) -> None:
    """Make the call in the style of the case and compare what it gives."""
    _STYLES[trial.case.style](trial)


def call(case: Case, backend: Backend, x: Any, **options: Any) -> Any:
    """Call the function of a case with its options."""
    function = getattr(ferrodist, case.function)
    if case.op:  # ranks agree whichever way they name it
        options["op"] = ReduceOp[case.op] if backend.rank % 2 == 0 else case.op.lower()
    if case.function in ROOTED:
        options["root"] = case.root
    if case.algorithm:
        options["algorithm"] = case.algorithm
    if case.style == "reproducible":
        options["reproducible"] = True
    if case.function not in COUNTED:
        return function(x, backend, **options)
    if case.function != "all_to_all_uneven":
        return function(x, _counts_for(case, backend), backend, **options)
    counts = counts_of(case, backend.world_size)
    if case.style == "counts":
        options["recv_counts"] = [row[backend.rank] for row in counts]
    return function(x, counts[backend.rank], backend, **options)


def _counts_for(case: Case, backend: Backend) -> list[int] | None:
    """Return what a rank passes as counts; in scatter_uneven only the root has to."""
    is_needed = case.function == "reduce_scatter_uneven" or case.style == "counts"
    if not is_needed and backend.rank != case.root:
        return None
    return rows_of(case, backend.world_size)


def expect_result_of(trial: Trial, case: Case, got: Any, library: str | None = None) -> None:
    """Compare what a call gave with what it must give on this rank."""
    rank, world = trial.rank, trial.world
    wanted: Array | None
    bound: Array | None = None
    if case.function == "all_to_all_uneven":
        inputs, counts = all_values(case, rank, world), counts_of(case, world)
        wanted, received = exchange_uneven(inputs, counts, rank)
        got, got_counts = got
        trial.expect_equal(got_counts, received, "recv_counts")
    else:
        wanted, bound = expected_result(case, rank, world)
    trial.expect_array(
        got,
        wanted,
        library=result_library(case, rank) if library is None else library,
        dtype=case.dtype,
        bound=bound,
        # NumPy does not say which of two zeros is the smaller; the digests say that ranks agree.
        signs_of_zero=case.op not in ("MIN", "MAX"),
    )
    if case.function in SAME_EVERYWHERE and not trial.problems:
        trial.note_same(got, case.dtype)


# -- the plain ways --------------------------------------------------------------------------------


def _plain(trial: Trial) -> None:
    case = trial.case
    x = make_input(case, trial.rank, trial.world)
    got = call(case, trial.backend, x)
    expect_result_of(trial, case, got)
    _expect_untouched(trial, x)
    _expect_apart(trial, got, x)


def _expect_untouched(trial: Trial, x: Any) -> None:
    case = trial.case
    if x is None or (case.function in SCATTERS and trial.rank != case.root):
        return
    before = values_of(case, trial.rank, trial.world)
    library = case.library_of(trial.rank)
    trial.expect_array(x, before, library=library, dtype=case.dtype, what="the input afterwards")


def _expect_apart(trial: Trial, got: Any, x: Any) -> None:
    """A new array comes back, not the input or a view of it."""
    got = got[0] if isinstance(got, tuple) else got
    if got is None or x is None or trial.case.library_of(trial.rank) == "python":
        return
    mine, given = to_numpy(got, trial.case.dtype), to_numpy(x, trial.case.dtype)
    shares = np.may_share_memory(mine, given)
    trial.expect(not shares, "the result shares memory with the input")


def _list(trial: Trial) -> None:
    """The parts of all ranks, one behind the other in one piece of memory."""
    case, rank, world = trial.case, trial.rank, trial.world
    got = call(case, trial.backend, make_input(case, rank, world), as_list=True)
    parts, *counts = got if isinstance(got, tuple) else (got,)
    if parts is None:
        expect_result_of(trial, case, None)
        return
    trial.expect_equal(len(parts), world, "the number of parts")
    library = case.library_of(rank) if case.function == "all_gather" else result_library(case, rank)
    for part in parts:
        wrong = find_wrong_kind(part, library, case.dtype)
        trial.expect(wrong is None, f"a part is {wrong}")
    if trial.problems:
        return
    arrays = [np.atleast_1d(to_numpy(part, case.dtype)) for part in parts]
    if library in ("numpy", "torch"):
        _expect_one_buffer(trial, arrays)
    joined = to_library(np.concatenate(arrays), result_library(case, rank))
    expect_result_of(trial, case, (joined, *counts) if counts else joined)


def _expect_one_buffer(trial: Trial, parts: Sequence[Array]) -> None:
    filled = [part for part in parts if part.size]
    for left, right in itertools.pairwise(filled):
        begins = [part.__array_interface__["data"][0] for part in (left, right)]
        trial.expect_equal(begins[1] - begins[0], left.nbytes, "from one part to the next, bytes")


def _with_counts(trial: Trial) -> None:
    case = trial.case
    x = make_input(case, trial.rank, trial.world)
    got = call(case, trial.backend, x, with_counts=True)
    if got is not None:
        got, counts = got
        trial.expect_equal(counts, rows_of(case, trial.world), "the counts")
    expect_result_of(trial, case, got)


def _twice(trial: Trial) -> None:
    case = trial.case
    digests = []
    for _ in range(2):
        got = call(case, trial.backend, make_input(case, trial.rank, trial.world))
        digests.append(0 if got is None else digest(to_numpy(got, case.dtype)))
    expect_result_of(trial, case, got)
    trial.expect(digests[0] == digests[1], "the same call gave other bits the second time")


# -- out -------------------------------------------------------------------------------------------


def _result_shape(trial: Trial) -> tuple[int, ...] | None:
    case, rank, world = trial.case, trial.rank, trial.world
    if case.function == "all_to_all_uneven":
        return (sum(row[rank] for row in counts_of(case, world)), *case.shape[1:])
    wanted, _ = expected_result(case, rank, world)
    return None if wanted is None else wanted.shape


def _make_out(trial: Trial) -> Any:
    """Make room full of ones; where there is no result, something that must be ignored."""
    shape = _result_shape(trial)
    dtype = numpy_dtype(trial.case.dtype)
    room = np.ones((3, 1) if shape is None else shape, dtype)
    return to_library(room, _out_library(trial))


def _out_library(trial: Trial) -> str:
    library = trial.case.library_of(trial.rank)
    return "torch" if library == "torch" else "numpy"  # jax arrays cannot be written


def _out(trial: Trial) -> None:
    case = trial.case
    x, out = make_input(case, trial.rank, trial.world), _make_out(trial)
    got = call(case, trial.backend, x, out=out)
    _expect_out(trial, got, out)
    _expect_untouched(trial, x)


def _expect_out(trial: Trial, got: Any, out: Any) -> None:
    case = trial.case
    if _result_shape(trial) is None:
        trial.expect(got is None, "a rank without a result must get None")
        trial.expect(bool((to_numpy(out, case.dtype) == 1).all()), "out was not ignored")
        return
    returned = got[0] if isinstance(got, tuple) else got
    trial.expect(returned is out, "out was not returned")
    result = (out, got[1]) if isinstance(got, tuple) else out
    expect_result_of(trial, case, result, library=_out_library(trial))


def _in_place(trial: Trial) -> None:
    case = trial.case
    x = make_input(case, trial.rank, trial.world)
    got = call(case, trial.backend, x, out=x)
    if _result_shape(trial) is None:
        trial.expect(got is None, "a rank without a result must get None")
        _expect_untouched(trial, x)
    else:
        trial.expect(got is x, "out was not returned")
        expect_result_of(trial, case, x)


def _part(trial: Trial) -> None:
    """The smaller of the two arrays is this rank's part of the larger one."""
    case, rank, world = trial.case, trial.rank, trial.world
    values = values_of(case, rank, world)
    if case.function in JOINED:
        rows, begin = rows_of(case, world), rows_before(case, rank, world)
        out = np.ones((sum(rows), *values.shape[1:]), values.dtype)
        x = out[begin : begin + rows[rank]].reshape(values.shape)
        x[...] = values
    else:
        x = values.copy()
        shape = _result_shape(trial) or ()
        if case.function in COUNTED:
            out = x[rows_before(case, rank, world) :][: shape[0]]
        else:
            out = _block(x, rank, shape)
    x, out = (to_library(array, case.library_of(rank)) for array in (x, out))
    got = call(case, trial.backend, x, out=out)
    if _result_shape(trial) is None:
        trial.expect(got is None, "a rank without a result must get None")
        trial.expect_array(x, values, library=case.library_of(rank), dtype=case.dtype)
        return
    trial.expect(got is out, "out was not returned")
    expect_result_of(trial, case, out)


def _block(array: Array, rank: int, shape: tuple[int, ...]) -> Array:
    """View one rank's block of an array that is made of one per rank."""
    count = math.prod(shape)
    return array.reshape(-1)[rank * count : (rank + 1) * count].reshape(shape)


# -- in flight -------------------------------------------------------------------------------------


def _async(trial: Trial) -> None:
    """Two calls in flight, one made meanwhile that must wait its turn, answers in reverse."""
    trials = [Trial(trial.backend, _aside(trial.case, number)) for number in range(3)]
    inputs = [make_input(one.case, one.rank, one.world) for one in trials]
    works = [call(trials[i].case, trial.backend, inputs[i], async_op=True) for i in (0, 1)]
    last = call(trials[2].case, trial.backend, inputs[2])
    trial.expect(all(isinstance(work, Work) for work in works), "async_op=True must give a Work")
    results = [work.wait(trial.backend.timeout) for work in reversed(works)][::-1]
    for one, got in zip(trials, [*results, last], strict=True):
        expect_result_of(one, one.case, got)
        trial.problems += one.problems
        trial.digest ^= one.digest
    trial.expect(all(work.done() for work in works), "a Work that gave its result must be done")


def _async_out(trial: Trial) -> None:
    case = trial.case
    x, out = make_input(case, trial.rank, trial.world), _make_out(trial)
    got = call(case, trial.backend, x, out=out, async_op=True).wait(trial.backend.timeout)
    _expect_out(trial, got, out)
    _expect_untouched(trial, x)


def _aside(case: Case, number: int) -> Case:
    return replace(case, number=case.number + number * _ASIDE)


Check = Callable[[Trial], None]

_STYLES: dict[str, Check] = {
    "plain": _plain,
    "reproducible": _plain,
    "template": _plain,
    "counts": _plain,
    "list": _list,
    "with_counts": _with_counts,
    "twice": _twice,
    "out": _out,
    "in_place": _in_place,
    "part": _part,
    "async": _async,
    "async_out": _async_out,
}
