# SPDX-License-Identifier: MIT OR Apache-2.0
"""cupy.ndarray, through host memory and back to its device.

Loaded only when the caller's array is CuPy's, so cupy is imported already. The project's machines
have no GPU: this file is tested against a stand-in for cupy only.
"""

from __future__ import annotations

import functools
from typing import Any

import cupy
import numpy as np

from ferrodist.arrays.host_arrays import known_buffer
from ferrodist.arrays.library import (
    InputArray,
    Library,
    OutputArray,
    Span,
    buffer_of,
    check_out,
    check_out_contiguous,
    find_dtype,
    fresh,
)
from ferrodist.buffer import DType


class _CupyArrays:
    """Arrays on a GPU, staged in host memory."""

    def as_input(self, x: Any, where: str) -> InputArray:
        return InputArray(known_buffer(cupy.asnumpy(x), where), self, x)

    def new_result(self, taken: InputArray, shape: tuple[int, ...]) -> OutputArray:
        host = np.empty(shape, taken.array.dtype)
        return fresh(host, taken.buffer.dtype, functools.partial(_move, taken.array.device))

    def as_output(self, out: Any, dtype: DType, shape: tuple[int, ...]) -> OutputArray:
        check_out(out, find_dtype(out.dtype), dtype, shape)
        check_out_contiguous(out.flags.c_contiguous, out.strides)
        host = np.empty(shape, out.dtype)
        return OutputArray(
            buffer_of(host, dtype), host, functools.partial(_copy_into, out), self.span(out)
        )

    def span(self, x: Any) -> Span:
        return Span(x.data.ptr, x.shape, x.strides, x.itemsize, f"cuda:{x.device.id}")


LIBRARY: Library = _CupyArrays()


def _move(device: Any, host: np.ndarray[Any, Any]) -> Any:
    with device:
        return cupy.asarray(host)


def _copy_into(out: Any, host: np.ndarray[Any, Any]) -> Any:
    with out.device:
        out.set(host)
    return out
