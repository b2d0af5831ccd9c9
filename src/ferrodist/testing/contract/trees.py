# SPDX-License-Identifier: MIT OR Apache-2.0
"""Check ``tree``: lists, tuples and dicts of arrays; every leaf of a tree is a case of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

import ferrodist
from ferrodist.testing.contract.case import Case
from ferrodist.testing.contract.inputs import expected_result, make_input, result_library
from ferrodist.testing.contract.results import call, expect_result_of
from ferrodist.testing.contract.trial import Trial
from ferrodist.testing.contract.values import COMPLEX, FLOATS, numpy_dtype, to_library

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
