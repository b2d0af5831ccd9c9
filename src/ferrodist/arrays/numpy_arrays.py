# SPDX-License-Identifier: MIT OR Apache-2.0
"""NumPy arrays and NumPy scalars, in without a copy and out as ndarray and scalar."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ferrodist.arrays.library import (
    SUPPORTED,
    InputArray,
    Library,
    OutputArray,
    Span,
    advise_objects,
    as_it_is,
    buffer_of,
    check_out,
    check_out_memory,
    find_dtype,
    fresh,
    refuse,
    refuse_out,
    span_of,
)
from ferrodist.buffer import ArrayKind, Buffer, DType
from ferrodist.errors import UnsupportedArray


class NumpyArrays:
    """numpy.ndarray; subclasses come back as ndarray."""

    def as_input(self, x: Any, where: str) -> InputArray:
        """View the array's bytes, or a packed copy of them."""
        if type(x) is not np.ndarray:
            x = _plain(x, where)
        return InputArray(known_buffer(x, where), self, x)

    def new_result(self, taken: InputArray, shape: tuple[int, ...]) -> OutputArray:
        """Allocate an array of the same dtype."""
        return fresh(np.empty(shape, taken.array.dtype), taken.buffer.dtype)

    def as_output(self, out: Any, dtype: DType, shape: tuple[int, ...]) -> OutputArray:
        """Write into the user's array."""
        if _is_masked(out):
            raise refuse_out("a masked array", "pass out.data")
        return out_result(out, np.asarray(out), dtype, shape)

    def span(self, x: Any) -> Span:
        """Tell which memory the array occupies."""
        return span_of(x)


class NumpyScalars:
    """numpy.generic, such as numpy.float32(1): immutable, without memory to share."""

    def as_input(self, x: Any, where: str) -> InputArray:
        """Copy the scalar."""
        array = np.asarray(x)
        return InputArray(known_buffer(array, where), self, array, ArrayKind.NUMPY_SCALAR)

    def new_result(self, taken: InputArray, shape: tuple[int, ...]) -> OutputArray:
        """Make room for a scalar, or for an array of them."""
        array = np.empty(shape, taken.array.dtype)
        return fresh(array, taken.buffer.dtype, _scalar if shape == () else as_it_is)

    def as_output(self, out: Any, dtype: DType, shape: tuple[int, ...]) -> OutputArray:
        """Refuse: a scalar cannot be written."""
        raise refuse_out(f"a NumPy scalar ({out.dtype})", "pass a 0-d array, such as np.empty(())")

    def span(self, x: Any) -> None:
        """Tell that nothing can share a scalar's memory."""


NUMPY_ARRAYS: Library = NumpyArrays()
NUMPY_SCALARS: Library = NumpyScalars()


def out_result(
    out: Any, array: np.ndarray[Any, Any], dtype: DType, shape: tuple[int, ...]
) -> OutputArray:
    """Make ``out`` the place of a result; ``array`` is the NumPy view of it."""
    check_out(array, find_dtype(array.dtype), dtype, shape)
    check_out_memory(array)
    return OutputArray(buffer_of(array, dtype), out, span=span_of(array))


def known_buffer(array: np.ndarray[Any, Any], where: str) -> Buffer:
    """Make a Buffer of ``array``, or raise UnsupportedArray naming its dtype."""
    dtype = find_dtype(array.dtype)
    if dtype is None:
        raise refuse_dtype(array.dtype, where)
    return buffer_of(array, dtype)


def refuse_dtype(dtype: np.dtype[Any], where: str) -> UnsupportedArray:
    """Make the error for a dtype ferrodist does not move, with what to do about it."""
    kind, advice = _why_not(dtype, where)
    return refuse(where, f"an array of {kind} dtype {dtype}", advice)


def _why_not(dtype: np.dtype[Any], where: str) -> tuple[str, str]:
    if dtype.names is not None:
        return "structured", "pass its fields one by one, such as {'a': x['a'], 'b': x['b']}"
    if dtype.kind in "OSUT":
        kind = "object" if dtype.kind == "O" else "string"
        return kind, f"convert it to numbers, or {advise_objects(where)}"
    if dtype.kind in "mM":
        return "datetime", "call .astype('int64') first"
    if not dtype.isnative:
        return "big-endian", f"call .astype('{dtype.newbyteorder('<').str}') first"
    if dtype.kind in "fc":
        narrower = "float64" if dtype.kind == "f" else "complex128"
        return "longdouble", f"call .astype('{narrower}') first"
    return "unsupported", f"convert it first to one of {SUPPORTED}"


def _plain(x: Any, where: str) -> np.ndarray[Any, Any]:
    if _is_masked(x):
        raise refuse(where, "a masked array", "pass x.filled(value), or [x.data, x.mask]")
    return np.asarray(x)


def _is_masked(x: Any) -> bool:
    # NumPy loads numpy.ma late, and whoever has a masked array has loaded it.
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(x, masked.MaskedArray)


def _scalar(array: np.ndarray[Any, Any]) -> Any:
    return array[()]
