# SPDX-License-Identifier: MIT OR Apache-2.0
"""Python numbers, and objects that export a buffer: bytes, bytearray, memoryview, array.array."""

from __future__ import annotations

import array
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ferrodist.arrays.library import (
    InputArray,
    Library,
    OutputArray,
    Refusal,
    Span,
    as_it_is,
    buffer_of,
    fresh,
    numpy_dtype,
    refuse,
    refuse_out,
    span_of,
    type_name,
)
from ferrodist.arrays.numpy_arrays import known_buffer, out_result
from ferrodist.buffer import ArrayKind, DType
from ferrodist.reduce_op import ReduceOp

# -- numbers ---------------------------------------------------------------------------------------
#
# Python's bool, int, float and complex: numbers in, numbers out.

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

# bool stands before int because it is a subclass of it.
_DTYPES = {
    bool: DType.BOOL,
    int: DType.INT64,
    float: DType.FLOAT64,
    complex: DType.COMPLEX128,
}
NUMBER_TYPES = tuple(_DTYPES)


class PythonNumbers:
    """Numbers, as 0-d arrays of the dtype NumPy gives them."""

    def as_input(self, x: Any, where: str) -> InputArray:
        """Copy the number."""
        number, dtype = next((kind(x), _DTYPES[kind]) for kind in _DTYPES if isinstance(x, kind))
        if dtype is DType.INT64 and not INT64_MIN <= number <= INT64_MAX:
            raise refuse(where, f"the int {_short(number)}, outside int64", "pass float(x)")
        array = np.array(number, numpy_dtype(dtype))
        return InputArray(buffer_of(array, dtype), self, number, ArrayKind.NUMBER)

    def new_result(self, taken: InputArray, shape: tuple[int, ...]) -> OutputArray:
        """Make room for a number, or for a NumPy array of them."""
        dtype = taken.buffer.dtype
        array = np.empty(shape, numpy_dtype(dtype))
        return fresh(array, dtype, _number if shape == () else as_it_is)

    def as_output(self, out: Any, dtype: DType, shape: tuple[int, ...]) -> OutputArray:
        """Refuse: a number cannot be written."""
        raise refuse_out(f"a Python {type_name(out)}", "pass a 0-d array, such as np.empty(())")

    def span(self, x: Any) -> None:
        """Tell that nothing can share a number's memory."""


PYTHON_NUMBERS: Library = PythonNumbers()


def check_number(taken: InputArray, op: ReduceOp, world_size: int, where: str = "x") -> None:
    """Refuse a Python int whose reduction over the ranks could leave int64.

    A rank knows only its own number. If each of W numbers passes, so does what they give together.
    """
    if not taken.is_number or taken.buffer.dtype is not DType.INT64:
        return
    if not _stays_in_int64(taken.array, op, world_size):
        fate = f"{op.name} over {world_size} ranks could leave int64"
        what = f"the int {_short(taken.array)}, whose {fate}"
        raise refuse(where, what, "pass float(x), or an int64 array if it may wrap")


def _stays_in_int64(number: int, op: ReduceOp, world_size: int) -> bool:
    if op is ReduceOp.SUM:
        return INT64_MIN <= number * world_size <= INT64_MAX
    if op is ReduceOp.PROD:
        return int(abs(number) ** world_size) <= INT64_MAX
    return True


def _short(number: int) -> str:
    # An int of millions of digits takes minutes to print, and nobody reads it.
    return str(number) if number.bit_length() <= 256 else f"of {number.bit_length()} bits"


def _number(array: np.ndarray[Any, Any]) -> Any:
    return array.item()


# -- buffers ---------------------------------------------------------------------------------------
#
# What speaks the buffer protocol: bytes, bytearray, array.array, memoryview and other exporters.
#
# Others, such as mmap and ctypes arrays, come back as memoryview.


_KINDS: dict[type, ArrayKind] = {
    bytes: ArrayKind.BYTES,
    bytearray: ArrayKind.BYTEARRAY,
    array.array: ArrayKind.PYTHON_ARRAY,
}


class PythonBuffers:
    """Exporters of memory, seen through a NumPy view that understands format and strides."""

    def as_input(self, x: Any, where: str) -> InputArray:
        """View the exporter's bytes, or a packed copy of them."""
        buffer = known_buffer(_open(x, functools.partial(refuse, where)), where)
        return InputArray(buffer, self, x, _KINDS.get(type(x), ArrayKind.MEMORY))

    def new_result(self, taken: InputArray, shape: tuple[int, ...]) -> OutputArray:
        """Allocate an object of the same type and format."""
        result, convert = _allocate(taken.array, shape)
        return OutputArray(buffer_of(_view(result), taken.buffer.dtype), result, convert)

    def as_output(self, out: Any, dtype: DType, shape: tuple[int, ...]) -> OutputArray:
        """Write into the user's object, which cannot be resized meanwhile."""
        if isinstance(out, bytes):
            raise refuse_out("bytes, which cannot be written", "pass a bytearray")
        return out_result(out, _open(out, refuse_out), dtype, shape)

    def span(self, x: Any) -> Span:
        """Tell which memory the exporter shows."""
        return span_of(_view(x))


PYTHON_BUFFERS: Library = PythonBuffers()


def exports_memory(x: Any) -> bool:
    """Tell whether ``x`` speaks the buffer protocol."""
    try:
        memoryview(x)
    except TypeError:
        return False
    except (ValueError, BufferError):  # it does, but has nothing to show, such as a closed mmap
        return True
    return True


def _open(x: Any, refusal: Refusal) -> np.ndarray[Any, Any]:
    try:
        return _view(x)
    except (ValueError, BufferError) as error:
        what = f"a {type_name(x)} whose memory cannot be read ({error})"
        raise refusal(what, "pass bytes or an array") from error


def _view(x: Any) -> np.ndarray[Any, Any]:
    return np.asarray(memoryview(x))


def _allocate(like: Any, shape: tuple[int, ...]) -> tuple[Any, Callable[[Any], Any]]:
    count = math.prod(shape)
    if isinstance(like, bytes):
        return bytearray(count), bytes
    if isinstance(like, bytearray):
        return bytearray(count), as_it_is
    if isinstance(like, array.array):
        return array.array(like.typecode, bytes(count * like.itemsize)), as_it_is
    return np.empty(shape, _view(like).dtype).data, as_it_is
