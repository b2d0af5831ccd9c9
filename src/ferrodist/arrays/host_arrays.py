# SPDX-License-Identifier: MIT OR Apache-2.0
"""Arrays in host memory: NumPy's, numbers, what exports a buffer, and what speaks DLPack.

All become NumPy views, and results are made of new NumPy arrays.
"""

from __future__ import annotations

import array
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ferrodist import _native
from ferrodist.arrays.library import (
    SUPPORTED,
    InputArray,
    Library,
    OutputArray,
    Refusal,
    Span,
    advise_objects,
    as_it_is,
    buffer_of,
    check_out,
    check_out_memory,
    find_dtype,
    fresh,
    numpy_dtype,
    refuse,
    refuse_out,
    span_of,
    type_name,
)
from ferrodist.buffer import ArrayKind, Buffer, DType
from ferrodist.reduce_op import ReduceOp

# -- NumPy -----------------------------------------------------------------------------------------


class _NumpyArrays:
    """numpy.ndarray; subclasses come back as ndarray."""

    def as_input(self, x: Any, where: str) -> InputArray:
        if type(x) is not np.ndarray:
            if _is_masked(x):
                raise refuse(where, "a masked array", "pass x.filled(value), or [x.data, x.mask]")
            x = np.asarray(x)
        return InputArray(known_buffer(x, where), self, x)

    def new_result(self, taken: InputArray, shape: tuple[int, ...]) -> OutputArray:
        return fresh(np.empty(shape, taken.array.dtype), taken.buffer.dtype)

    def as_output(self, out: Any, dtype: DType, shape: tuple[int, ...]) -> OutputArray:
        if _is_masked(out):
            raise refuse_out("a masked array", "pass out.data")
        return _out_result(out, np.asarray(out), dtype, shape)

    def span(self, x: Any) -> Span:
        return span_of(x)


class _NumpyScalars:
    """numpy.generic, such as numpy.float32(1): immutable, without memory to share."""

    def as_input(self, x: Any, where: str) -> InputArray:
        array = np.asarray(x)
        return InputArray(known_buffer(array, where), self, array, ArrayKind.NUMPY_SCALAR)

    def new_result(self, taken: InputArray, shape: tuple[int, ...]) -> OutputArray:
        array = np.empty(shape, taken.array.dtype)
        return fresh(array, taken.buffer.dtype, as_it_is if shape else lambda made: made[()])

    def as_output(self, out: Any, dtype: DType, shape: tuple[int, ...]) -> OutputArray:
        raise refuse_out(f"a NumPy scalar ({out.dtype})", "pass a 0-d array, such as np.empty(())")

    def span(self, x: Any) -> None:
        return None


NUMPY_ARRAYS: Library = _NumpyArrays()
NUMPY_SCALARS: Library = _NumpyScalars()


def _out_result(
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
        kind, advice = _why_not(array.dtype, where)
        raise refuse(where, f"an array of {kind} dtype {array.dtype}", advice)
    return buffer_of(array, dtype)


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


def _is_masked(x: Any) -> bool:
    # NumPy loads numpy.ma late, and a program that has a masked array has loaded it.
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(x, masked.MaskedArray)


# -- numbers ---------------------------------------------------------------------------------------

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

# bool stands before int because it is a subclass of it.
_DTYPES = {
    bool: DType.BOOL,
    int: DType.INT64,
    float: DType.FLOAT64,
    complex: DType.COMPLEX128,
}
NUMBER_TYPES = tuple(_DTYPES)


class _PythonNumbers:
    """Numbers, as 0-d arrays of the dtype NumPy gives them."""

    def as_input(self, x: Any, where: str) -> InputArray:
        number, dtype = next((kind(x), _DTYPES[kind]) for kind in _DTYPES if isinstance(x, kind))
        if dtype is DType.INT64 and not INT64_MIN <= number <= INT64_MAX:
            raise refuse(where, f"the int {_short(number)}, outside int64", "pass float(x)")
        array = np.array(number, numpy_dtype(dtype))
        return InputArray(buffer_of(array, dtype), self, number, ArrayKind.NUMBER)

    def new_result(self, taken: InputArray, shape: tuple[int, ...]) -> OutputArray:
        dtype = taken.buffer.dtype
        array = np.empty(shape, numpy_dtype(dtype))
        return fresh(array, dtype, as_it_is if shape else lambda made: made.item())

    def as_output(self, out: Any, dtype: DType, shape: tuple[int, ...]) -> OutputArray:
        raise refuse_out(f"a Python {type_name(out)}", "pass a 0-d array, such as np.empty(())")

    def span(self, x: Any) -> None:
        return None


PYTHON_NUMBERS: Library = _PythonNumbers()


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
    return op is not ReduceOp.PROD or int(abs(number) ** world_size) <= INT64_MAX


def _short(number: int) -> str:
    # An int of millions of digits takes minutes to print, and nobody reads it.
    return str(number) if number.bit_length() <= 256 else f"of {number.bit_length()} bits"


# -- what exports a buffer -------------------------------------------------------------------------

_KINDS: dict[type, ArrayKind] = {
    bytes: ArrayKind.BYTES,
    bytearray: ArrayKind.BYTEARRAY,
    array.array: ArrayKind.PYTHON_ARRAY,
}


class _PythonBuffers:
    """bytes, bytearray, array.array; others, such as mmap and ctypes, come back as memoryview."""

    def as_input(self, x: Any, where: str) -> InputArray:
        buffer = known_buffer(_open_buffer(x, functools.partial(refuse, where)), where)
        return InputArray(buffer, self, x, _KINDS.get(type(x), ArrayKind.MEMORY))

    def new_result(self, taken: InputArray, shape: tuple[int, ...]) -> OutputArray:
        result, convert = _allocate(taken.array, shape)
        return OutputArray(buffer_of(_view(result), taken.buffer.dtype), result, convert)

    def as_output(self, out: Any, dtype: DType, shape: tuple[int, ...]) -> OutputArray:
        if isinstance(out, bytes):
            raise refuse_out("bytes, which cannot be written", "pass a bytearray")
        return _out_result(out, _open_buffer(out, refuse_out), dtype, shape)

    def span(self, x: Any) -> Span:
        return span_of(_view(x))


PYTHON_BUFFERS: Library = _PythonBuffers()


def exports_memory(x: Any) -> bool:
    """Tell whether ``x`` speaks the buffer protocol."""
    try:
        memoryview(x)
    except TypeError:
        return False
    except (ValueError, BufferError):  # it does, but has nothing to show, such as a closed mmap
        return True
    return True


def _open_buffer(x: Any, refusal: Refusal) -> np.ndarray[Any, Any]:
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


# -- what speaks DLPack ----------------------------------------------------------------------------

_CPU = 1  # kDLCPU in dlpack.h


class _DlpackArrays:
    """Arrays with ``__dlpack__``; results go back through their library's ``from_dlpack``."""

    def as_input(self, x: Any, where: str) -> InputArray:
        buffer = known_buffer(_open_dlpack(x, functools.partial(refuse, where)), where)
        # From the second one on it is native code's.
        _native.register_adapted(type(x), _from_numpy, ArrayKind.NUMPY)
        return InputArray(buffer, self, x)

    def new_result(self, taken: InputArray, shape: tuple[int, ...]) -> OutputArray:
        made = np.empty(shape, numpy_dtype(taken.buffer.dtype))
        return fresh(made, taken.buffer.dtype, functools.partial(_from_numpy, taken.array))

    def as_output(self, out: Any, dtype: DType, shape: tuple[int, ...]) -> OutputArray:
        return _out_result(out, _open_dlpack(out, refuse_out), dtype, shape)

    def span(self, x: Any) -> Span:
        return span_of(np.from_dlpack(x))


DLPACK_ARRAYS: Library = _DlpackArrays()


def _open_dlpack(x: Any, refusal: Refusal) -> np.ndarray[Any, Any]:
    device = x.__dlpack_device__()[0]
    if device != _CPU:
        what = f"a {type_name(x)} on DLPack device {int(device)}"
        raise refusal(what, "copy it to the host first")
    try:
        return np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        what = f"a {type_name(x)} that NumPy cannot import ({error})"
        raise refusal(what, "convert it to a supported dtype first") from error


def _from_numpy(x: Any, array: np.ndarray[Any, Any]) -> Any:
    """Make an array of the library ``x`` comes from; NumPy's if that has no ``from_dlpack``."""
    namespace = getattr(x, "__array_namespace__", None)
    package = type(x).__module__.partition(".")[0]
    module = sys.modules.get(package) if namespace is None else namespace()
    return getattr(module, "from_dlpack", as_it_is)(array)
