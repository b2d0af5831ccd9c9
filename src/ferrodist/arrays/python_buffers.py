# SPDX-License-Identifier: MIT OR Apache-2.0
"""What speaks the buffer protocol: bytes, bytearray, array.array, memoryview and other exporters.

Others, such as mmap and ctypes arrays, come back as memoryview.
"""

from __future__ import annotations

import array
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ferrodist.arrays.host_memory import buffer_of, span_of
from ferrodist.arrays.library import (
    Library,
    Refusal,
    Result,
    Span,
    Taken,
    as_it_is,
    refuse,
    refuse_out,
    type_name,
)
from ferrodist.arrays.numpy_arrays import known_buffer, out_result
from ferrodist.buffer import DType


class PythonBuffers:
    """Exporters of memory, seen through a NumPy view that understands format and strides."""

    def take(self, x: Any, where: str) -> Taken:
        """View the exporter's bytes, or a packed copy of them."""
        return Taken(known_buffer(_open(x, functools.partial(refuse, where)), where), self, x)

    def new_result(self, taken: Taken, shape: tuple[int, ...]) -> Result:
        """Allocate an object of the same type and format."""
        result, convert = _allocate(taken.array, shape)
        return Result(buffer_of(_view(result), taken.buffer.dtype), result, convert)

    def take_out(self, out: Any, dtype: DType, shape: tuple[int, ...]) -> Result:
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
