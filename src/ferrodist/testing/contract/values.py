# SPDX-License-Identifier: MIT OR Apache-2.0
"""Inputs derived from (rank, seed) alone, so that every rank knows those of all others.

A value can only come from its own place: it differs from those of the same place on other ranks
and, where the dtype has enough of them, from all others. Floats use all their digits, so that
another order of folding, or one more rounding, shows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from ferrodist.testing.contract.dtypes import (
    COMPLEX,
    HALVES,
    INTEGERS,
    MANTISSA_BITS,
    Array,
    numpy_dtype,
)

# Odd, so that multiplying by it modulo a power of two loses nothing.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
# Larger than the arrays, and no multiples of 256: ranks differ in the smallest dtype too.
_RANK_STRIDE, _LARGE_RANK_STRIDE = 8229, 1_000_003
_SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0])


@functools.lru_cache(maxsize=256)
def distinct_values(
    rank: int, shape: tuple[int, ...], dtype: str, seed: int, values: str = "distinct"
) -> Array:
    """Return the values of one rank, read-only; ``values`` as in Case."""
    keys = _keys(rank, math.prod(shape), seed)
    if dtype == "bool":
        flat = (_scramble(keys) >> np.uint64(40)) % np.uint64(2) == 1
    elif dtype in INTEGERS:
        flat = _integers(keys, dtype, values)
    elif dtype in COMPLEX:
        flat = _complex(keys, dtype, values)
    else:
        flat = _floats(keys, dtype, values)
    array: Array = flat.reshape(shape)
    array.flags.writeable = False
    return array


def _keys(rank: int, count: int, seed: int) -> Array:
    """Number the elements: no two of one call, of whatever rank, have the same key."""
    stride = _RANK_STRIDE if count <= _RANK_STRIDE else _LARGE_RANK_STRIDE
    first = np.uint64(rank * stride) + np.uint64(seed % 1_000_003) * np.uint64(104_729)
    return np.arange(count, dtype=np.uint64) + first


def _scramble(keys: Array) -> Array:
    """Mix the bits (the finaliser of splitmix64)."""
    keys = keys * _SPREAD
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = keys ^ (keys >> np.uint64(31))
    return mixed


def _integers(keys: Array, dtype: str, values: str) -> Array:
    found = np.dtype(dtype)
    if values == "wrapping":
        limits = np.iinfo(found)
        steps = (keys % np.uint64(3)).astype(found)
        is_high = _scramble(keys) % np.uint64(2) == 1
        wrapped: Array = np.where(
            is_high, found.type(limits.max) - steps, found.type(limits.min) + steps
        )
        return wrapped
    return (keys * _SPREAD).astype(f"uint{8 * found.itemsize}").view(found)


def _floats(keys: Array, dtype: str, values: str) -> Array:
    bits = MANTISSA_BITS[dtype]
    fraction = (keys * _SPREAD % np.uint64(1 << bits)).astype(np.float64)
    mixed = _scramble(keys)
    sign = np.where(mixed % np.uint64(2) == 0, 1.0, -1.0)
    if values == "tiny":
        return (sign * fraction * _smallest(dtype)).astype(numpy_dtype(dtype))
    # Products over eight ranks must stay finite in float16.
    span, lowest = (2, -1) if dtype in HALVES else (8, -4)
    exponent = (mixed >> np.uint64(8)) % np.uint64(span)
    numbers = np.ldexp(sign * (1 + fraction / (1 << bits)), exponent.astype(np.int64) + lowest)
    if values == "special":
        _put_special(numbers, mixed)
    return numbers.astype(numpy_dtype(dtype))


def _smallest(dtype: str) -> float:
    """Return the smallest number above zero."""
    lowest_exponent = {"float16": -24, "bfloat16": -133, "float32": -149, "float64": -1074}
    return math.ldexp(1.0, lowest_exponent[dtype])


def _put_special(numbers: Array, mixed: Array) -> None:
    is_special = (mixed >> np.uint64(16)) % np.uint64(10) == 0
    which = (mixed >> np.uint64(32)) % np.uint64(len(_SPECIAL))
    numbers[is_special] = _SPECIAL[which[is_special].astype(np.int64)]
    # On every rank: a fold that starts from zero makes a positive zero of these.
    numbers[:1] = -0.0


def _complex(keys: Array, dtype: str, values: str) -> Array:
    part = "float32" if dtype == "complex64" else "float64"
    numbers = np.empty(keys.size, dtype)
    numbers.real = _floats(keys, part, values)
    numbers.imag = _floats(keys + np.uint64(1 << 21), part, values)
    return numbers


def lay_out(array: Array, layout: str) -> Array:
    """Copy an array to new memory that lies in the given way."""
    return _LAYOUTS[layout](array)


def _strided(array: Array) -> Array:
    gaps = np.full((*array.shape[:-1], 2 * array.shape[-1]), 1, array.dtype)
    view = gaps[..., ::2]
    view[...] = array
    return view


def _read_only(array: Array) -> Array:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def _unaligned(array: Array) -> Array:
    memory = bytearray(array.nbytes + 1)
    view: Array = np.ndarray(array.shape, array.dtype, buffer=memory, offset=1)
    view[...] = array
    return view


_LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "plain": lambda array: np.array(array, order="C"),
    "strided": _strided,
    "reversed": lambda array: array[::-1].copy()[::-1],
    "transposed": lambda array: np.array(array, order="F"),
    "broadcast": lambda array: np.broadcast_to(array[:1].copy(), array.shape),
    "read_only": _read_only,
    "unaligned": _unaligned,
}
