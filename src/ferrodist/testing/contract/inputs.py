# SPDX-License-Identifier: MIT OR Apache-2.0
"""What each rank passes in a case, and what it must get: known on every rank."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ferrodist.testing.contract.case import Case
from ferrodist.testing.contract.dtypes import Array, numpy_dtype
from ferrodist.testing.contract.expected import expect_result, fold, fold_bound, part
from ferrodist.testing.contract.libraries import NUMBERS, to_library
from ferrodist.testing.contract.values import distinct_values, lay_out

ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")
CUT = ("scatter", "reduce_scatter", "all_to_all")
JOINED = ("all_gather", "all_gather_uneven", "gather")
SAME_EVERYWHERE = ("allreduce", "broadcast", "all_gather", "all_gather_uneven")
_MAX_UNEVEN = 5


def values_of(case: Case, rank: int, world: int) -> Array:
    """Return the values a rank passes, in plain memory."""
    shape = shape_of(case, rank, world)
    seed = case.seed * 1_000_000 + case.number
    array = distinct_values(rank, shape, case.dtype, seed, case.values)
    if case.library == "python" and case.dtype == "int64":
        return np.asarray(array % 50 + 1)  # their products and sums must stay within int64
    if case.layout == "broadcast":
        return np.array(lay_out(array, case.layout))
    return array


def all_values(case: Case, rank: int, world: int) -> list[Array]:
    """Return the values of all ranks in rank order."""
    # Ranks that are threads share a cache: each begins with its own and finds the others made.
    found = {
        peer % world: values_of(case, peer % world, world) for peer in range(rank, rank + world)
    }
    return [found[peer] for peer in range(world)]


def shape_of(case: Case, rank: int, world: int) -> tuple[int, ...]:
    """Return the shape of a rank's input."""
    if case.function == "all_to_all_uneven":
        return (sum(counts_of(case, world)[rank]), *case.shape[1:])
    if case.function == "all_gather_uneven" and case.shape:
        return (_uneven(case, rank, case.shape[0]), *case.shape[1:])
    return case.shape


@functools.lru_cache(maxsize=64)
def counts_of(case: Case, world: int) -> list[list[int]]:
    """Return how many rows go from each rank (the outer list) to each (the inner)."""
    most = min(case.shape[0], _MAX_UNEVEN)
    return [[_uneven(case, 7 * i + j, most) for j in range(world)] for i in range(world)]


def _uneven(case: Case, place: int, most: int) -> int:
    """Return a number of rows: everything from none to ``most``."""
    if most > _MAX_UNEVEN:
        return most - (place + case.number) % 3
    return (3 * place + case.number) % (most + 1)


def make_input(case: Case, rank: int, world: int) -> Any:
    """Make the array a rank passes; None where it passes none."""
    if case.function == "scatter" and rank != case.root:
        return _scatter_template(case, rank, world) if case.style == "template" else None
    array = lay_out(values_of(case, rank, world), case.layout)
    return to_library(array, case.library_of(rank))


def _scatter_template(case: Case, rank: int, world: int) -> Any:
    shape = part(np.empty(case.shape), rank, world).shape
    return to_library(np.zeros(shape, numpy_dtype(case.dtype)), case.library_of(rank))


@functools.lru_cache(maxsize=64)
def folded_values(case: Case, world: int) -> tuple[Array, Array | None]:
    """Return the fold of all inputs and the bound on another order, None where bits count."""
    inputs = all_values(case, 0, world)
    folded = fold(inputs, case.op)
    return folded, None if case.in_order else fold_bound(inputs, case.op, folded)


def expected_result(case: Case, rank: int, world: int) -> tuple[Array | None, Array | None]:
    """Return what a rank must get, None where it gets None, and the bound on the difference."""
    if case.function not in REDUCTIONS:
        inputs = all_values(case, rank, world)
        return expect_result(case.function, inputs, rank, root=case.root), None
    folded, bound = folded_values(case, world)
    if case.function == "reduce" and rank != case.root:
        return None, None
    if case.function != "reduce_scatter":
        return folded, bound
    return part(folded, rank, world), None if bound is None else _part_of_bound(bound, rank, world)


def _part_of_bound(bound: Array, rank: int, world: int) -> Array:
    flat = bound.reshape(-1)  # equal parts of an array are equal parts of its elements
    return flat.reshape(world, -1)[rank] if world > 1 else flat


def result_library(case: Case, rank: int) -> str:
    """Name the library of a rank's result."""
    library = case.library_of(rank)
    if case.function in JOINED and library in NUMBERS:
        return "numpy"
    if case.function == "scatter" and rank != case.root and case.style != "template":
        return "numpy"
    return library
