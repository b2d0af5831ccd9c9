# SPDX-License-Identifier: MIT OR Apache-2.0
"""Arrays of any other library that speaks DLPack, on the host."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ferrodist import _native
from ferrodist.arrays.library import (
    InputArray,
    Library,
    OutputArray,
    Refusal,
    Span,
    as_it_is,
    fresh,
    numpy_dtype,
    refuse,
    refuse_out,
    span_of,
    type_name,
)
from ferrodist.arrays.numpy_arrays import known_buffer, out_result
from ferrodist.buffer import ArrayKind, DType

_CPU = 1  # kDLCPU in dlpack.h


class DlpackArrays:
    """Arrays with ``__dlpack__``; results go back through their library's ``from_dlpack``."""

    def as_input(self, x: Any, where: str) -> InputArray:
        """View the array's bytes, or a packed copy of them."""
        buffer = known_buffer(_open(x, functools.partial(refuse, where)), where)
        # From the second one on it is native code's.
        _native.register_adapted(type(x), _from_numpy, ArrayKind.NUMPY)
        return InputArray(buffer, self, x)

    def new_result(self, taken: InputArray, shape: tuple[int, ...]) -> OutputArray:
        """Allocate memory that the array's own library takes over without a copy."""
        dtype = taken.buffer.dtype
        return fresh(np.empty(shape, numpy_dtype(dtype)), dtype, _importer(taken.array))

    def as_output(self, out: Any, dtype: DType, shape: tuple[int, ...]) -> OutputArray:
        """Write into the user's array."""
        return out_result(out, _open(out, refuse_out), dtype, shape)

    def span(self, x: Any) -> Span:
        """Tell which memory the array occupies."""
        return span_of(np.from_dlpack(x))


DLPACK_ARRAYS: Library = DlpackArrays()


def _open(x: Any, refusal: Refusal) -> np.ndarray[Any, Any]:
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
    return _importer(x)(array)


def _importer(x: Any) -> Callable[[Any], Any]:
    """Find ``from_dlpack`` of the library ``x`` comes from; without one NumPy arrays come back."""
    namespace = getattr(x, "__array_namespace__", None)
    if namespace is not None:
        return _from_dlpack(namespace())
    return _from_dlpack(sys.modules.get(type(x).__module__.partition(".")[0]))


def _from_dlpack(module: Any) -> Callable[[Any], Any]:
    importer: Callable[[Any], Any] = getattr(module, "from_dlpack", as_it_is)
    return importer
