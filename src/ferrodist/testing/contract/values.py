# SPDX-License-Identifier: MIT OR Apache-2.0
"""Inputs derived from (rank, seed) alone, so that every rank knows those of all others.

A value can only come from its own place: it differs from those of the same place on other ranks
and, where the dtype has enough of them, from all others. Floats use all their digits, so that
another order of reducing, or one more rounding, shows.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import numpy as np

# -- dtypes ----------------------------------------------------------------------------------------


Array = np.ndarray[Any, Any]

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
HALVES = ("float16", "bfloat16")
FLOATS = (*HALVES, "float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *FLOATS, *COMPLEX)

_ORDER = ("MIN", "MAX")
BITS = ("BAND", "BOR", "BXOR")
LOGIC = ("LAND", "LOR", "LXOR")
OPS = ("SUM", "MEAN", "PROD", *_ORDER, *BITS, *LOGIC)
PAIR_OPS = ("MINLOC", "MAXLOC")

MANTISSA_BITS = {"bfloat16": 7, "float16": 10, "float32": 23, "float64": 52}


def legal_ops(dtype: str) -> tuple[str, ...]:
    """Name the operations that are defined for a dtype."""
    if dtype in COMPLEX:
        return ("SUM", "MEAN", "PROD", *LOGIC)
    if dtype in FLOATS:
        return ("SUM", "MEAN", "PROD", *_ORDER, *LOGIC)
    return ("SUM", "PROD", *_ORDER, *BITS, *LOGIC)


@functools.cache
def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype; bfloat16 is not NumPy's own."""
    if dtype != "bfloat16":
        return np.dtype(dtype)
    found: np.dtype[Any] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    return found


@functools.cache  # NumPy takes its time over the name of a dtype
def is_half(dtype: np.dtype[Any]) -> bool:
    """Tell whether it is one of the 16-bit floats."""
    return dtype.name in HALVES


def available_dtypes() -> tuple[str, ...]:
    """Name the dtypes NumPy can hold here: bfloat16 needs ml_dtypes."""
    if importlib.util.find_spec("ml_dtypes") is not None:
        return DTYPES
    return tuple(dtype for dtype in DTYPES if dtype != "bfloat16")


def real_view(array: Array) -> Array:
    """Show a complex array as its real and imaginary parts, any other as it is."""
    if array.dtype.kind != "c":
        return array
    return np.ascontiguousarray(array).reshape(-1).view(array.real.dtype)


# -- array libraries -------------------------------------------------------------------------------


NUMBERS = ("python", "scalar")
_PYTHON_TYPES = {"bool": bool, "int64": int, "float64": float, "complex128": complex}


@functools.cache
def available_libraries() -> tuple[str, ...]:
    """Name the array libraries that are installed, NumPy first."""
    optional = [name for name in ("torch", "jax") if importlib.util.find_spec(name) is not None]
    return ("numpy", *optional)


def can_hold(library: str, dtype: str) -> bool:
    """Tell whether every library named in ``numpy+torch+...`` has a dtype."""
    return all(_can_hold(name, dtype) for name in library.split("+"))


def _can_hold(library: str, dtype: str) -> bool:
    if library == "python":
        return dtype in _PYTHON_TYPES
    if library == "jax":  # without its x64 switch it has nothing wider
        return dtype not in ("int64", "uint64", "float64", "complex128")
    return True


def to_library(array: Array, library: str) -> Any:
    """Make an array, or a number, of a library; NumPy's is the array itself."""
    if library == "torch":
        return _to_torch(array)
    if library == "jax":
        return importlib.import_module("jax").device_put(array)
    if library == "python":
        return array.item()
    return array[()] if library == "scalar" else array


def _to_torch(array: Array) -> Any:
    torch = importlib.import_module("torch")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(x: Any, dtype: str) -> Array:
    """Read an array of any library; a torch tensor is seen in place."""
    if isinstance(x, np.ndarray):
        return x
    if type(x).__module__.partition(".")[0] != "torch":
        return np.asarray(x, numpy_dtype(dtype) if type(x) in _PYTHON_TYPES.values() else None)
    if dtype == "bfloat16":
        torch = importlib.import_module("torch")
        seen: Array = x.view(torch.int16).numpy().view(numpy_dtype(dtype))
        return seen
    array: Array = x.numpy()
    return array


def find_wrong_kind(x: Any, library: str, dtype: str) -> str | None:
    """Say what ``x`` is instead of an array of this library and dtype; None if it is one."""
    if library == "python":
        is_right = type(x) is _PYTHON_TYPES[dtype]
    elif library == "torch":
        is_right = isinstance(x, _array_type(library)) and str(x.dtype) == f"torch.{dtype}"
    else:
        is_right = isinstance(x, _array_type(library)) and x.dtype == numpy_dtype(dtype)
    if is_right:
        return None
    found = f"{type(x).__module__}.{type(x).__qualname__} {getattr(x, 'dtype', '')}"
    return f"a {found.rstrip()}, expected {library} {dtype}"


def _array_type(library: str) -> Any:
    """Return the class of a library's arrays."""
    if library in ("numpy", "scalar"):
        return np.ndarray if library == "numpy" else np.generic
    name = {"torch": "Tensor", "jax": "Array"}[library]
    return getattr(importlib.import_module(library), name)


# -- values ----------------------------------------------------------------------------------------


# Odd, so that multiplying by it modulo a power of two loses nothing.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
# Larger than the arrays, and no multiples of 256: ranks differ in the smallest dtype too.
_RANK_STRIDE, _LARGE_RANK_STRIDE = 8229, 1_000_003
_SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0])


@functools.lru_cache(maxsize=256)
def distinct_values(
    rank: int, shape: tuple[int, ...], dtype: str, seed: int, values: str = "distinct"
) -> Array:
    """Return a read-only array of test values that differ by rank; ``values`` as in Case."""
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
    numbers = (keys * _SPREAD & np.uint64((1 << bits) - 1)).astype(np.float64)
    mixed = _scramble(keys)
    if values == "tiny":
        numbers *= np.where(mixed & np.uint64(1), -1.0, 1.0) * _smallest(dtype)
        return numbers.astype(numpy_dtype(dtype))
    scales = _scales(dtype)
    which = mixed & np.uint64(1) | mixed >> np.uint64(7) & np.uint64(scales.size - 2)
    numbers *= 2.0**-bits  # in place, and scales from a table: large arrays are made often
    numbers += 1
    numbers *= scales.take(which.view(np.int64))
    if values == "special":
        _put_special(numbers, mixed)
    return numbers.astype(numpy_dtype(dtype))


@functools.cache
def _scales(dtype: str) -> Array:
    """Return some powers of two, each followed by itself below zero."""
    # Products over eight ranks must stay finite in float16.
    span, lowest = (2, -1) if dtype in HALVES else (8, -4)
    return np.outer(np.ldexp(1.0, np.arange(lowest, lowest + span)), [1.0, -1.0]).ravel()


def _smallest(dtype: str) -> float:
    """Return the smallest number above zero."""
    lowest_exponent = {"float16": -24, "bfloat16": -133, "float32": -149, "float64": -1074}
    return math.ldexp(1.0, lowest_exponent[dtype])


def _put_special(numbers: Array, mixed: Array) -> None:
    is_special = (mixed >> np.uint64(16)) % np.uint64(10) == 0
    which = (mixed >> np.uint64(32)) % np.uint64(len(_SPECIAL))
    numbers[is_special] = _SPECIAL[which[is_special].astype(np.int64)]
    # On every rank: a reduction that starts from zero makes a positive zero of these.
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
