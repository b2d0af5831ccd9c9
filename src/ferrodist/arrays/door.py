# SPDX-License-Identifier: MIT OR Apache-2.0
"""Find the library an array belongs to, and pass the array through it."""

from __future__ import annotations

import array
import importlib
import sys
from typing import Any

import numpy as np

from ferrodist.arrays.dlpack_arrays import DLPACK_ARRAYS
from ferrodist.arrays.host_memory import fresh, numpy_dtype
from ferrodist.arrays.library import Library, Result, Taken, refuse, refuse_out, type_name
from ferrodist.arrays.numpy_arrays import NUMPY_ARRAYS, NUMPY_SCALARS
from ferrodist.arrays.python_buffers import PYTHON_BUFFERS, exports_memory
from ferrodist.arrays.python_numbers import NUMBER_TYPES, PYTHON_NUMBERS
from ferrodist.buffer import DType

# The common types, found in one step.
_BY_TYPE: dict[type, Library] = {
    np.ndarray: NUMPY_ARRAYS,
    **dict.fromkeys(NUMBER_TYPES, PYTHON_NUMBERS),
    **dict.fromkeys((bytes, bytearray, memoryview, array.array), PYTHON_BUFFERS),
}

# Module and class of a framework's arrays, and the file here that knows them.
_FRAMEWORKS = (
    ("torch", "Tensor", "torch_tensors"),
    ("jax", "Array", "jax_arrays"),
    ("cupy", "ndarray", "cupy_arrays"),
)


def take(x: Any, where: str = "x") -> Taken:
    """Take an array in: its bytes, and what results need to become the same kind of array.

    ``where`` names the array in errors. Raises UnsupportedArray.
    """
    library = _find_library(x)
    if library is None:
        raise refuse(where, _describe(x), _advise(x))
    return library.take(x, where)


def new_result(taken: Taken, shape: tuple[int, ...]) -> Result:
    """Make room for a result of the same kind, dtype and device as ``taken``."""
    return taken.library.new_result(taken, shape)


def numpy_result(dtype: DType, shape: tuple[int, ...]) -> Result:
    """Make room for a NumPy result, where the caller gave no array to go by."""
    return fresh(np.empty(shape, numpy_dtype(dtype)), dtype)


def take_out(out: Any, dtype: DType, shape: tuple[int, ...]) -> Result:
    """Make the caller's ``out`` the place of a result; ``finish`` returns it.

    Raises InvalidArgument unless it is writable, C-contiguous, of this dtype and shape.
    """
    library = _find_library(out)
    if library is None:
        raise refuse_out(_describe(out), "pass a writable array")
    return library.take_out(out, dtype, shape)


def _find_library(x: Any) -> Library | None:
    """Return the library of ``x``; the more a library gives back of an array, the earlier it is."""
    return _BY_TYPE.get(type(x)) or _find_by_base(x) or _find_framework(x) or _find_protocol(x)


def _find_by_base(x: Any) -> Library | None:
    if isinstance(x, np.ndarray):
        return NUMPY_ARRAYS
    if isinstance(x, np.generic):  # before numbers: numpy.float64 is a float
        return NUMPY_SCALARS
    return PYTHON_NUMBERS if isinstance(x, NUMBER_TYPES) else None


def _find_framework(x: Any) -> Library | None:
    # A framework that is not imported cannot have made x.
    for module, name, file in _FRAMEWORKS:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(x, kind):
            library: Library = importlib.import_module(f"ferrodist.arrays.{file}").LIBRARY
            return library
    return None


def _find_protocol(x: Any) -> Library | None:
    if isinstance(x, type):  # a class has the methods of its instances, but no data
        return None
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return DLPACK_ARRAYS
    return PYTHON_BUFFERS if exports_memory(x) else None


def _describe(x: Any) -> str:
    if x is None:
        return "None"
    return f"the type {x.__qualname__}" if isinstance(x, type) else f"a {type_name(x)}"


def _advise(x: Any) -> str:
    if hasattr(x, "__cuda_array_interface__"):
        return "pass cupy.asarray(x), or copy it to the host"
    if hasattr(x, "__array__") or hasattr(x, "__array_interface__"):
        return "pass np.asarray(x)"
    if hasattr(x, "__next__"):
        return "pass list(x)"
    return "pass an array or a number, or use broadcast_object or all_gather_object"
