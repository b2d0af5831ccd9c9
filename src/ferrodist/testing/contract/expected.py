# SPDX-License-Identifier: MIT OR Apache-2.0
"""What every call must give, by NumPy alone; no code of ferrodist is used to find it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ferrodist.testing.contract.dtypes import Array, is_half, real_view

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": np.add,
    "MEAN": np.add,
    "PROD": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def fold(inputs: Sequence[Array], op: str) -> Array:
    """Fold from left to right; a mean divides once, 16-bit floats are rounded once."""
    dtype = inputs[0].dtype
    combine = _multiply_complex if (op, dtype.kind) == ("PROD", "c") else _COMBINE[op]
    with np.errstate(all="ignore"):
        wide = [np.asarray(x, np.float32 if is_half(dtype) else dtype) for x in inputs]
        folded = np.asarray(functools.reduce(combine, wide))
        if op == "MEAN":
            folded = _divide(folded, len(inputs))
        return folded.astype(dtype)


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


def expect_result(
    function: str, inputs: Sequence[Array], rank: int, *, op: str = "", root: int = 0
) -> Array | None:
    """Return what a rank gets of an even collective; None where it gets None."""
    world = len(inputs)
    if function in ("reduce", "gather") and rank != root:
        return None
    results: dict[str, Callable[[], Array]] = {
        "allreduce": lambda: fold(inputs, op),
        "reduce": lambda: fold(inputs, op),
        "broadcast": lambda: inputs[root],
        "all_gather": lambda: join(inputs),
        "all_gather_uneven": lambda: join(inputs),
        "gather": lambda: join(inputs),
        "scatter": lambda: part(inputs[root], rank, world),
        "reduce_scatter": lambda: part(fold(inputs, op), rank, world),
        "all_to_all": lambda: _exchange(inputs, rank),
    }
    return results[function]()


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


# How far a fold in another order may be from the one in rank order. Each of the W - 1 operations
# rounds by at most half an epsilon, in both folds: relative to the sum of the magnitudes for sums,
# to the product for products. A complex product errs by sqrt(5) half epsilons of its magnitude
# (Brent, Percival, Zimmermann 2007); one of NaN or infinite factors may come out as any of these.
# A mean rounds once more and is divided. 16-bit floats are folded in float32 and rounded once: to
# the same number or to the one beside it.


def fold_bound(inputs: Sequence[Array], op: str, folded: Array) -> Array | None:
    """Return the difference another order may make, per real part; None if it may make none."""
    dtype = inputs[0].dtype
    if dtype.kind in "biu" or op in ("MIN", "MAX"):
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
            bound = bound + spacing * np.abs(folded.astype(np.float64))
    return np.where(np.isfinite(bound), bound, 0.0)


def _product_bound(inputs: Sequence[Array], relative: float) -> Array:
    sizes = [np.abs(x.astype(np.complex128)) for x in inputs]
    bound = np.asarray(relative * functools.reduce(np.multiply, sizes))
    return np.repeat(np.where(np.isfinite(bound), bound, np.inf), 2)
