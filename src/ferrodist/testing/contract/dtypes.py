# SPDX-License-Identifier: MIT OR Apache-2.0
"""The dtypes and the operations each of them has, as the contract lists them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
HALVES = ("float16", "bfloat16")
FLOATS = (*HALVES, "float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *FLOATS, *COMPLEX)

OPS = ("SUM", "MEAN", "PROD", "MIN", "MAX", "BAND", "BOR", "BXOR")
_ORDER = ("MIN", "MAX")
BITS = ("BAND", "BOR", "BXOR")

MANTISSA_BITS = {"bfloat16": 7, "float16": 10, "float32": 23, "float64": 52}


def legal_ops(dtype: str) -> tuple[str, ...]:
    """Name the operations that are defined for a dtype."""
    if dtype in COMPLEX:
        return ("SUM", "MEAN", "PROD")
    if dtype in FLOATS:
        return ("SUM", "MEAN", "PROD", *_ORDER)
    return ("SUM", "PROD", *_ORDER, *BITS)


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
