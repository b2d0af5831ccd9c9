# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checks ``object`` and ``tree``: what was put in comes back, type by type, leaf by leaf."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np

import ferrodist
from ferrodist.testing.contract.case import Case, Trial, find_difference
from ferrodist.testing.contract.inputs import expected_result, make_input, result_library
from ferrodist.testing.contract.results import call, expect_result_of
from ferrodist.testing.contract.values import (
    COMPLEX,
    FLOATS,
    available_dtypes,
    available_libraries,
    distinct_values,
    numpy_dtype,
    to_library,
)

OBJECT_FUNCTIONS = ("broadcast_object", "all_gather_object", "gather_object", "scatter_object")

# What a rank passes; all of it depends on the rank, so that a wrong source shows.
OBJECTS: dict[str, Callable[[int], Any]] = {
    "none": lambda rank: None if rank % 2 == 0 else [None],
    "numbers": lambda rank: [rank, -rank, rank + 0.5, rank % 2 == 0, complex(rank, -rank)],
    "small_ints": lambda rank: [rank + sign * 2**bits for bits in range(8, 64) for sign in (1, -1)],
    "big_ints": lambda rank: [rank + 2**63, rank - 2**63, 10**60 + rank, -(3**400) - rank],
    "odd_floats": lambda rank: [
        math.nan,
        math.inf,
        -math.inf,
        -0.0,
        5e-324,
        complex(-0.0, math.nan),
    ],
    "text": lambda rank: ["", "ä" * rank, "日本", "\0", chr(0x1F600) * 300],
    "bytes": lambda rank: [b"", bytes([rank]), bytes(range(256)) * 300 + bytes([rank])],
    "sequences": lambda rank: [(), (rank,), [], [[], ()], ((rank, [rank]), (None,))],
    "dicts": lambda rank: {"a": rank, 1: "b", None: [], (rank, "c"): {b"d": {}}, 2.5: True},
    "sets": lambda rank: [set(), {rank, "a", (1, 2)}, {None}],
    "arrays": lambda rank: [
        distinct_values(rank, (2, 3), dtype, 1) for dtype in available_dtypes()
    ],
    "scalars": lambda rank: [np.float32(rank + 0.5), np.int8(rank), np.empty((0, 3))],
    "libraries": lambda rank: [
        to_library(np.arange(3, dtype=np.float32) + rank, name) for name in available_libraries()
    ],
    "ordered": lambda rank: OrderedDict([("b", rank), ("a", [rank, bytearray([rank])])]),
    "ranges": lambda rank: [range(rank), range(1, 9, rank + 1), slice(rank), slice(None, 2, -1)],
    "times": lambda rank: [
        datetime(2026, 11, 17, 8, rank, 1, 5, tzinfo=UTC),
        datetime(2026, 3, 29, 2, 30, fold=rank % 2),
        date(2000 + rank, 2, 29) if rank % 4 == 0 else date(2001, 1, 1 + rank),
        time(23, 59, rank, tzinfo=timezone(timedelta(hours=rank % 12), "there")),
        timedelta(days=-rank, microseconds=1),
    ],
    "values": lambda rank: [
        Path("data") / str(rank),
        UUID(int=2**127 + rank),
        Decimal("1.50") + rank,
        Fraction(rank, 7),
    ],
    "dtypes": lambda rank: [np.dtype(label) for label in ("float32", "<M8[ns]", ">i4")],
    "deep": lambda rank: _nest(rank, 30),
    "long": lambda rank: [rank] * 1000 * (rank + 1),
}


def _nest(value: Any, depth: int) -> Any:
    for level in range(depth):
        value = {"in": (value, [value])} if level < 4 else [value]
    return value


def check_object(trial: Trial) -> None:
    """Pass one of the objects through one of the calls; with ``pickle`` anything goes."""
    is_pickled = trial.case.style == "pickle"
    make = only_for_pickle if is_pickled else OBJECTS[trial.case.detail]
    options = {"pickle": True} if is_pickled else {}
    got = _call(trial, make, options)
    wanted = _wanted(trial, make)
    wrong = find_wrong_object(got, wanted)
    trial.expect(wrong is None, f"{wrong}")


def only_for_pickle(rank: int) -> Any:
    """Return something only pickle can carry."""
    return {"counts": Counter([rank]), "file": PurePosixPath(f"/data/{rank}")}


def _call(trial: Trial, make: Callable[[int], Any], options: dict[str, Any]) -> Any:
    case, rank, backend = trial.case, trial.rank, trial.backend
    function = getattr(ferrodist, case.function)
    if case.function == "all_gather_object":
        return function(make(rank), backend, **options)
    if case.function == "scatter_object":
        values = [make(peer) for peer in range(trial.world)] if rank == case.root else None
        return function(values, backend, case.root, **options)
    return function(make(rank), backend, case.root, **options)


def _wanted(trial: Trial, make: Callable[[int], Any]) -> Any:
    case, rank = trial.case, trial.rank
    if case.function == "broadcast_object":
        return make(case.root)
    if case.function == "scatter_object":
        return make(rank)
    if case.function == "gather_object" and rank != case.root:
        return None
    return [make(peer) for peer in range(trial.world)]


def find_wrong_object(got: Any, wanted: Any, path: str = "the object") -> str | None:
    """Say where and how an object is not the one wanted; types count, so do signs of zero."""
    if type(got) is not type(wanted):
        return f"{path} is a {type(got).__name__}, expected {type(wanted).__name__}"
    if hasattr(wanted, "dtype"):
        return _wrong_array(got, wanted, path)
    if isinstance(wanted, dict):
        pairs = [(list(got), list(wanted), "keys"), *((got.get(k), wanted[k], k) for k in wanted)]
        return _first(find_wrong_object(a, b, f"{path}[{key!r}]") for a, b, key in pairs)
    if isinstance(wanted, (list, tuple)):
        if len(got) != len(wanted):
            return f"{path} has length {len(got)}, expected {len(wanted)}"
        pairs_by_place = enumerate(zip(got, wanted, strict=True))
        return _first(find_wrong_object(a, b, f"{path}[{i}]") for i, (a, b) in pairs_by_place)
    same = got == wanted if isinstance(wanted, set) else repr(got) == repr(wanted)
    return None if same else f"{path} is {got!r}, expected {wanted!r}"


def _first(answers: Any) -> str | None:
    return next((answer for answer in answers if answer is not None), None)


def _wrong_array(got: Any, wanted: Any, path: str) -> str | None:
    problem = find_difference(np.asarray(got), np.asarray(wanted))
    return None if problem is None else f"{path}: {problem}"


# -- trees: every leaf is a case of its own --------------------------------------------------------


TREE_FUNCTIONS = ("allreduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
_ASIDE = 100_000


class Pair(NamedTuple):
    """A named tuple, which must come back as one."""

    left: Any
    right: Any


def leaves_of(case: Case, world: int) -> list[Case]:
    """Describe the four leaves: two of the case's dtype, two of another one."""
    other = _other_dtype(case.dtype)
    is_large = max(case.shape, default=0) > 4000
    rows = 4 * case.shape[0] if is_large else 2 * world  # larger than what is packed, or small
    number = () if case.function != "reduce_scatter" else (world, 2)
    return [
        case,
        replace(case, shape=(rows,), layout="plain", number=case.number + _ASIDE),
        replace(
            case, shape=(world, 3), layout="plain", dtype=other, number=case.number + 2 * _ASIDE
        ),
        replace(case, shape=number, layout="plain", dtype=other, number=case.number + 3 * _ASIDE),
    ]


def _other_dtype(dtype: str) -> str:
    """Choose another dtype that has the same operations."""
    if dtype in COMPLEX:
        return "complex64"
    if dtype in FLOATS:
        return "float16" if dtype == "float32" else "float32"
    return "int16" if dtype == "int32" else "int32"


def build(leaves: Sequence[Any], rank: int) -> dict[str, Any]:
    """Make the tree; ranks insert the keys in different orders, which must not matter."""
    parts = {"b": [leaves[0], None, (leaves[1],)], "a": Pair(leaves[2], {"only": leaves[3]})}
    return parts if rank % 2 == 0 else dict(reversed(parts.items()))


def take_apart(trial: Trial, tree: Any, rank: int) -> list[Any] | None:
    """Return the leaves if the structure came back as it was."""
    kinds = _kinds(tree)
    trial.expect_equal(kinds, _kinds(build([0.0] * 4, rank)), "the structure of the result")
    if trial.problems:
        return None
    return [tree["b"][0], tree["b"][2][0], tree["a"].left, tree["a"].right["only"]]


def _kinds(tree: Any) -> Any:
    """Describe a structure: types, keys in their order, None; leaves are all alike."""
    if isinstance(tree, dict):
        return [type(tree), {key: _kinds(tree[key]) for key in tree}, list(tree)]
    if isinstance(tree, (list, tuple)):
        return [type(tree), *(_kinds(item) for item in tree)]
    return None if tree is None else "leaf"


def check_tree(trial: Trial) -> None:
    """Pass a tree, in the style of the case, and compare leaf by leaf."""
    case, rank, world = trial.case, trial.rank, trial.world
    leaves = leaves_of(case, world)
    x = build([make_input(leaf, rank, world) for leaf in leaves], rank)
    if case.style == "tree_out":
        out = build([_room(leaf, rank, world) for leaf in leaves], rank)
        got = call(case, trial.backend, x, out=out)
        _expect_leaves(trial, leaves, got, is_out=True)
        trial.expect(got is None or got is out, "out was not returned")
    elif case.style == "tree_async":
        got = call(case, trial.backend, x, async_op=True).wait(trial.backend.timeout)
        _expect_leaves(trial, leaves, got)
    else:
        _expect_leaves(trial, leaves, call(case, trial.backend, x))


def _expect_leaves(trial: Trial, leaves: list[Case], got: Any, *, is_out: bool = False) -> None:
    case = trial.case
    if case.function == "reduce" and trial.rank != case.root:
        trial.expect(got is None, "a rank without a result must get None")
        return
    for leaf, part in zip(leaves, take_apart(trial, got, trial.rank) or [], strict=False):
        one = Trial(trial.backend, leaf)
        library = _out_library(leaf, trial.rank) if is_out else None
        expect_result_of(one, leaf, part, library=library)
        trial.problems += one.problems
        trial.digest ^= one.digest


def _out_library(leaf: Case, rank: int) -> str:
    library = result_library(leaf, rank)
    return "numpy" if library == "jax" else library


def _room(leaf: Case, rank: int, world: int) -> Any:
    wanted, _ = expected_result(leaf, rank, world)
    shape = (1,) if wanted is None else wanted.shape
    return to_library(np.ones(shape, numpy_dtype(leaf.dtype)), _out_library(leaf, rank))


def check_empty_tree(trial: Trial) -> None:
    """Trees without leaves come back as they are; a tree of numbers is no array."""
    trees: tuple[Any, ...] = ({}, [], [None, ()])
    for tree in trees:
        got = call(trial.case, trial.backend, tree)
        is_none = trial.case.function == "reduce" and trial.rank != trial.case.root
        trial.expect_equal(got, None if is_none else tree, "an empty tree")
    rank, world = trial.rank, trial.world
    got = ferrodist.allreduce([rank, rank + 0.5, True], trial.backend)
    wanted = [sum(range(world)), sum(range(world)) + 0.5 * world, True]
    trial.expect_equal([*got, *map(type, got)], [*wanted, int, float, bool], "a list of numbers")
