# SPDX-License-Identifier: MIT OR Apache-2.0
"""What each rank passes in a case, and what it must get: known on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ferrodist.testing.contract.case import Case
from ferrodist.testing.contract.values import (
    LOGIC,
    NUMBERS,
    Array,
    distinct_values,
    is_half,
    lay_out,
    numpy_dtype,
    real_view,
    to_library,
)

# -- what is expected ------------------------------------------------------------------------------
#
# What every call must give, by NumPy alone; no code of ferrodist is used to find it.

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": np.add,
    "MEAN": np.add,
    "PROD": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
    "LAND": np.logical_and,
    "LOR": np.logical_or,
    "LXOR": np.logical_xor,
}


def local_reduce(inputs: Sequence[Array], op: str) -> Array:
    """Reduce from left to right; a mean divides once, 16-bit floats are rounded once."""
    dtype = inputs[0].dtype
    combine = _multiply_complex if (op, dtype.kind) == ("PROD", "c") else _COMBINE[op]
    with np.errstate(all="ignore"):
        wide = [np.asarray(x, np.float32 if is_half(dtype) else dtype) for x in inputs]
        wide = [x != 0 for x in wide] if op in LOGIC else wide  # of one rank, too
        reduced = np.asarray(functools.reduce(combine, wide))
        if op == "MEAN":
            reduced = _divide(reduced, len(inputs))
        return reduced.astype(dtype)


def _multiply_complex(left: Array, right: Array) -> Array:
    """Multiply by the plain formula: NumPy's own loops may use fused operations."""
    left, right = np.asarray(left), np.asarray(right)
    product = np.empty_like(left)
    product.real = left.real * right.real - left.imag * right.imag
    product.imag = left.real * right.imag + left.imag * right.real
    return product


def _divide(total: Array, divisor: int) -> Array:
    parts = real_view(total)
    quotient: Array = np.asarray(parts / parts.dtype.type(divisor))
    return quotient.view(total.dtype).reshape(total.shape)


def join(inputs: Sequence[Array]) -> Array:
    """Join along axis 0; numbers become rows of one."""
    return np.concatenate([np.atleast_1d(x) for x in inputs])


def part(array: Array, rank: int, world: int) -> Array:
    """Cut along axis 0 and take one part; in a world of one there is nothing to cut."""
    if world == 1:
        return array
    rows = array.shape[0] // world
    return array[rank * rows : (rank + 1) * rows]


def expect_moved(
    function: str, inputs: Sequence[Array], rank: int, *, root: int = 0
) -> Array | None:
    """Return what a rank gets of a collective that only moves data; None where it gets None."""
    if function == "broadcast":
        return inputs[root]
    if function == "all_to_all":
        return _exchange(inputs, rank)
    return None if function.startswith("gather") and rank != root else join(inputs)


def _exchange(inputs: Sequence[Array], rank: int) -> Array:
    if len(inputs) == 1:
        return inputs[0]
    return join([part(x, rank, len(inputs)) for x in inputs])


def exchange_uneven(
    inputs: Sequence[Array], counts: Sequence[Sequence[int]], rank: int
) -> tuple[Array, list[int]]:
    """Return what all_to_all_uneven gives a rank: ``counts[i][j]`` rows go from i to j."""
    blocks = []
    for x, row in zip(inputs, counts, strict=True):
        begin = sum(row[:rank])
        blocks.append(x[begin : begin + row[rank]])
    return join(blocks), [row[rank] for row in counts]


# How far a reduction in another order may be from the one in rank order. Each of the W - 1
# operations rounds by at most half an epsilon, in both reductions: relative to the sum of the
# magnitudes for sums, to the product for products. A complex product errs by sqrt(5) half epsilons
# of its magnitude (Brent, Percival, Zimmermann 2007); one of NaN or infinite factors may come out
# as any of these. A mean rounds once more and is divided. 16-bit floats are reduced in float32 and
# rounded once: to the same number or to the one beside it.


def reduce_bound(inputs: Sequence[Array], op: str, reduced: Array) -> Array | None:
    """Return the difference another order may make, per real part; None if it may make none."""
    dtype = inputs[0].dtype
    if dtype.kind in "biu" or op in ("MIN", "MAX", *LOGIC):
        return None
    epsilon = float(np.finfo(np.float32 if is_half(dtype) else dtype).eps)
    with np.errstate(all="ignore"):
        if op == "PROD" and dtype.kind == "c":
            return _product_bound(inputs, 3 * (len(inputs) - 1) * epsilon)
        sizes = [np.abs(real_view(x).astype(np.float64)) for x in inputs]
        whole = functools.reduce(np.multiply if op == "PROD" else np.add, sizes)
        steps = 1 if op == "MEAN" else len(inputs) - 1
        bound = np.asarray(1.01 * steps * epsilon * whole)
        if is_half(dtype):
            spacing = 2.0**-10 if dtype.name == "float16" else 2.0**-7
            bound = bound + spacing * np.abs(reduced.astype(np.float64))
    return np.where(np.isfinite(bound), bound, 0.0)


def _product_bound(inputs: Sequence[Array], relative: float) -> Array:
    sizes = [np.abs(x.astype(np.complex128)) for x in inputs]
    bound = np.asarray(relative * functools.reduce(np.multiply, sizes))
    return np.repeat(np.where(np.isfinite(bound), bound, np.inf), 2)


# -- inputs ----------------------------------------------------------------------------------------


ROOTED = ("broadcast", "reduce", "gather", "scatter", "gather_uneven", "scatter_uneven")
PREFIXES = ("scan", "exscan")
REDUCTIONS = ("allreduce", "reduce", "reduce_scatter", "reduce_scatter_uneven", *PREFIXES)
CUT = ("scatter", "reduce_scatter", "all_to_all")
COUNTED = ("scatter_uneven", "reduce_scatter_uneven", "all_to_all_uneven")  # what takes counts
JOINED = ("all_gather", "all_gather_uneven", "gather", "gather_uneven")
SCATTERS = ("scatter", "scatter_uneven")
SAME_EVERYWHERE = ("allreduce", "broadcast", "all_gather", "all_gather_uneven")
_MAX_UNEVEN = 5


def values_of(case: Case, rank: int, world: int) -> Array:
    """Return the values a rank passes, in plain memory."""
    shape = shape_of(case, rank, world)
    seed = case.seed * 1_000_000 + case.number
    array = distinct_values(rank, shape, case.dtype, seed, case.values)
    if case.library == "python" and case.dtype == "int64":
        return np.asarray(array % 50 + 1)  # their products and sums must stay within int64
    if case.op in LOGIC:  # which have nothing to do without zeros
        places = (np.arange(array.size) * (rank + 2)).reshape(array.shape) % 3
        array = np.where(places == 0, array.dtype.type(0), array)
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
    if case.function in ("all_gather_uneven", "gather_uneven") and case.shape:
        return (_uneven(case, rank, case.shape[0]), *case.shape[1:])
    if case.function in COUNTED:
        return (sum(rows_of(case, world)), *case.shape[1:])
    return case.shape


def rows_of(case: Case, world: int) -> list[int]:
    """Return how many rows of the whole each rank gets, or of the joined array each has passed."""
    if case.function in JOINED:
        shapes = [shape_of(case, rank, world) for rank in range(world)]
        return [shape[0] if shape else 1 for shape in shapes]
    return [_uneven(case, rank, -(-case.shape[0] // world)) for rank in range(world)]


def rows_before(case: Case, rank: int, world: int) -> int:
    """Return where the part of a rank begins."""
    return sum(rows_of(case, world)[:rank])


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
    if case.function in SCATTERS and rank != case.root:
        return _scatter_template(case, rank, world) if case.style == "template" else None
    array = lay_out(values_of(case, rank, world), case.layout)
    return to_library(array, case.library_of(rank))


def _scatter_template(case: Case, rank: int, world: int) -> Any:
    shape = _part_of(case, np.empty(shape_of(case, rank, world)), rank, world).shape
    return to_library(np.zeros(shape, numpy_dtype(case.dtype)), case.library_of(rank))


@functools.lru_cache(maxsize=64)
def reduced_values(case: Case, world: int, num_ranks: int) -> tuple[Array, Array | None]:
    """Return the reduction of the first inputs and the bound on another order.

    The bound is None where bits count.
    """
    inputs = all_values(case, 0, world)[:num_ranks]
    reduced = local_reduce(inputs, case.op)
    return reduced, None if case.in_order else reduce_bound(inputs, case.op, reduced)


def expected_result(case: Case, rank: int, world: int) -> tuple[Array | None, Array | None]:
    """Return what a rank must get, None where it gets None, and the bound on the difference."""
    if case.function in SCATTERS:
        return _part_of(case, values_of(case, case.root, world), rank, world), None
    if case.function not in REDUCTIONS:
        inputs = all_values(case, rank, world)
        return expect_moved(case.function, inputs, rank, root=case.root), None
    num_ranks = {"scan": rank + 1, "exscan": rank}.get(case.function, world)
    if num_ranks == 0 or (case.function == "reduce" and rank != case.root):
        return None, None
    reduced, bound = reduced_values(case, world, num_ranks)
    if case.function not in ("reduce_scatter", "reduce_scatter_uneven"):
        return reduced, bound
    if bound is not None and reduced.shape and reduced.size:  # every row has as many real parts
        bound = _part_of(case, bound.reshape(reduced.shape[0], -1), rank, world)
    return _part_of(case, reduced, rank, world), bound


def _part_of(case: Case, whole: Array, rank: int, world: int) -> Array:
    """Take the rows of one rank."""
    if case.function not in COUNTED:
        return part(whole, rank, world)
    begin = rows_before(case, rank, world)
    return whole[begin : begin + rows_of(case, world)[rank]]


def result_library(case: Case, rank: int) -> str:
    """Name the library of a rank's result."""
    library = case.library_of(rank)
    if case.function in JOINED and library in NUMBERS:
        return "numpy"
    if case.function in SCATTERS and rank != case.root and case.style != "template":
        return "numpy"
    return library
