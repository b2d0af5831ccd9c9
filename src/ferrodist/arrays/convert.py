# SPDX-License-Identifier: MIT OR Apache-2.0
"""Find the library an array belongs to, convert the array, and make results of the same kind."""

from __future__ import annotations

import array
import importlib
import math
import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from ferrodist.arrays.host_arrays import (
    DLPACK_ARRAYS,
    NUMBER_TYPES,
    NUMPY_ARRAYS,
    NUMPY_SCALARS,
    PYTHON_BUFFERS,
    PYTHON_NUMBERS,
    exports_memory,
)
from ferrodist.arrays.library import (
    SUPPORTED,
    InputArray,
    Library,
    OutputArray,
    advise_objects,
    find_dtype,
    fresh,
    numpy_dtype,
    refuse,
    refuse_out,
    type_name,
)
from ferrodist.buffer import DTYPES_BY_LABEL, ArrayKind, DType
from ferrodist.errors import (
    BackendUnavailable,
    InvalidArgument,
    UnsupportedArray,
    lacks_memory,
    out_of_memory,
)

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


# Calls that cut x, and take no number.
_CUT_INTO_ROWS = ("scatter:", "scatter_uneven:", "reduce_scatter_uneven:")


def as_input(x: Any, where: str = "x") -> InputArray:
    """Take an array in: its bytes, and what results need to become the same kind of array.

    ``where`` names the array in errors. Raises UnsupportedArray.
    """
    library = _find_library(x)
    if library is None:
        raise refuse(where, _describe(x), _advise(x, where))
    try:
        return library.as_input(x, where)
    except (MemoryError, RuntimeError) as error:
        if lacks_memory(error):  # for a copy, of what has gaps or is on a device
            raise out_of_memory(x.nbytes) from error
        raise


def is_on_device(x: Any, device: str) -> bool:
    """Tell whether ``x`` is a tensor of torch's on a device of this type, such as "cuda"."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return kind is not None and isinstance(x, kind) and bool(x.device.type == device)


def as_device_input(x: Any, where: str) -> InputArray:
    """Take a tensor in where it is, without its bytes."""
    taken: InputArray = _torch_tensors().as_device_input(x, where)
    return taken


def new_result(taken: InputArray, shape: tuple[int, ...]) -> OutputArray:
    """Make room for a result of the same kind, dtype and device as ``taken``."""
    try:
        return taken.library.new_result(taken, shape)
    except (MemoryError, RuntimeError) as error:
        if lacks_memory(error):
            raise out_of_memory(math.prod(shape) * taken.buffer.dtype.itemsize) from error
        raise


def numpy_result(dtype: DType, shape: tuple[int, ...]) -> OutputArray:
    """Make room for a NumPy result, where the caller gave no array to go by."""
    try:
        return fresh(np.empty(shape, numpy_dtype(dtype)), dtype)
    except MemoryError as error:
        raise out_of_memory(math.prod(shape) * dtype.itemsize) from error


def as_output(out: Any, dtype: DType, shape: tuple[int, ...]) -> OutputArray:
    """Make the caller's ``out`` the place of a result; ``finish`` returns it.

    Raises InvalidArgument unless it is writable, C-contiguous, of this dtype and shape.
    """
    library = _find_library(out)
    if library is None:
        raise refuse_out(_describe(out), "pass a writable array")
    return library.as_output(out, dtype, shape)


def as_output_of_its_form(out: Any) -> OutputArray:
    """Make the caller's ``out`` the place of what has its dtype and shape.

    Raises InvalidArgument for what cannot be written, UnsupportedArray for a dtype that no rank can
    send.
    """
    if _find_library(out) is None:  # before its dtype is looked at: no number is asked for here
        raise refuse_out(_describe(out), "pass a writable array")
    buffer = as_input(out, "out").buffer
    return as_output(out, buffer.dtype, buffer.shape)


def as_device_output(out: Any, dtype: DType, shape: tuple[int, ...]) -> OutputArray:
    """Make the caller's tensor the place of a result where it is."""
    made: OutputArray = _torch_tensors().as_device_output(out, dtype, shape)
    return made


def _torch_tensors() -> Any:
    return importlib.import_module("ferrodist.arrays.torch_tensors")


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


def _advise(x: Any, where: str) -> str:
    if hasattr(x, "__cuda_array_interface__"):
        return "pass cupy.asarray(x), or copy it to the host"
    if hasattr(x, "__array__") or hasattr(x, "__array_interface__"):
        return "pass np.asarray(x)"
    if hasattr(x, "__next__"):
        return "pass list(x)"
    is_cut = where.startswith(_CUT_INTO_ROWS)
    what = "an array" if is_cut else "an array or a number"
    return f"pass {what}, or {advise_objects(where)}"


# -- parts of results ------------------------------------------------------------------------------


def split_rows(joined: Any, counts: Iterable[int]) -> list[Any]:
    """Cut an array along axis 0, into views where its library has them."""
    parts, end = [], 0
    rows = np.asarray(joined) if isinstance(joined, memoryview) else joined
    for count in counts:
        part = rows[end : end + count]
        parts.append(part.data if isinstance(joined, memoryview) else part)
        end += count
    return parts


def split_blocks(joined: Any, x: Any, num_parts: int) -> list[Any]:
    """Cut what was joined of as many arrays of the kind and shape of ``x``, numbers too."""
    if isinstance(x, np.generic):  # before numbers: numpy.float64 is a float
        return list(joined)
    if isinstance(x, NUMBER_TYPES):
        return list(joined.tolist())
    parts = split_rows(joined, [len(joined) // num_parts] * num_parts)
    return [part.reshape(()) for part in parts] if getattr(x, "shape", None) == () else parts


# -- new arrays ------------------------------------------------------------------------------------
#
# New arrays over memory that a backend gives: what ``backend.empty`` returns.


class Form(NamedTuple):
    """What an array is: element type, shape, and whose array."""

    dtype: DType
    shape: tuple[int, ...]
    kind: str


def parse_form(shape: Any, dtype: Any, kind: str) -> Form:
    """Read what a caller asks for; raise before any memory is taken."""
    if kind not in _MAKERS:
        known = ", ".join(map(repr, _MAKERS))
        raise InvalidArgument(f"no arrays of kind {kind!r} can be made; known: {known}", got=kind)
    return Form(_parse_dtype(dtype), _parse_shape(shape), kind)


def form_like(x: Any) -> Form:
    """Take the form of an existing array."""
    taken = as_input(x)
    is_torch = type(taken.array).__module__.partition(".")[0] == "torch"
    return Form(taken.buffer.dtype, taken.buffer.shape, "torch" if is_torch else "numpy")


def array_over(memory: np.ndarray[Any, Any], form: Form) -> Any:
    """Make an array of flat bytes, which live as long as it does."""
    return _MAKERS[form.kind](memory, form)


def _numpy_over(memory: np.ndarray[Any, Any], form: Form) -> Any:
    return memory.view(numpy_dtype(form.dtype)).reshape(form.shape)


def _torch_over(memory: np.ndarray[Any, Any], form: Form) -> Any:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise BackendUnavailable(
            "arrays of kind 'torch' need torch: pip install 'ferrodist[torch]'"
        ) from error
    dtype = getattr(torch, form.dtype.label)
    if not memory.size:  # torch cannot see no bytes as elements
        return torch.empty(form.shape, dtype=dtype)
    return torch.from_numpy(memory).view(dtype).reshape(form.shape)


_MAKERS: dict[str, Callable[[np.ndarray[Any, Any], Form], Any]] = {
    "numpy": _numpy_over,
    "torch": _torch_over,
}


def received_array(
    memory: np.ndarray[Any, Any], dtype: DType, shape: tuple[int, ...], kind: ArrayKind
) -> Any:
    """Make what a message holds of its bytes, which are nobody else's.

    It is what was sent where its library is imported here, else a NumPy array.
    """
    if kind is ArrayKind.TORCH and "torch" in sys.modules:
        return _torch_over(memory, Form(dtype, shape, "torch"))
    array = _numpy_over(memory, Form(dtype, shape, "numpy"))
    return _FROM_NUMPY[kind](array) if kind in _FROM_NUMPY else array


def _jax_of(array: np.ndarray[Any, Any]) -> Any:
    if "jax" not in sys.modules:
        return array
    return importlib.import_module("ferrodist.arrays.jax_arrays").from_numpy(array)


_FROM_NUMPY: dict[ArrayKind, Callable[[np.ndarray[Any, Any]], Any]] = {
    ArrayKind.NUMPY_SCALAR: lambda one: one[()],
    ArrayKind.NUMBER: lambda one: one.item(),
    ArrayKind.JAX: _jax_of,
    ArrayKind.BYTES: lambda one: one.tobytes(),
    ArrayKind.BYTEARRAY: lambda one: bytearray(one.data),
    ArrayKind.PYTHON_ARRAY: lambda one: array.array(one.dtype.char, one.tobytes()),
    ArrayKind.MEMORY: lambda one: one.data,
}


def _parse_dtype(dtype: Any) -> DType:
    """Read a name, a dtype of NumPy or torch, or a type such as float."""
    label = str(dtype).removeprefix("torch.")
    if label in DTYPES_BY_LABEL:
        return DTYPES_BY_LABEL[label]
    try:
        found = None if dtype is None else find_dtype(np.dtype(dtype))
    except TypeError:
        found = None
    if found is None:
        raise UnsupportedArray(f"dtype {dtype!r} is not one of {SUPPORTED}", got=str(dtype))
    return found


def _parse_shape(shape: Any) -> tuple[int, ...]:
    try:
        lengths = shape if isinstance(shape, Iterable) else (shape,)
        numbers = tuple(operator.index(length) for length in lengths)
    except TypeError as error:
        raise InvalidArgument(f"a shape is made of integers, got {shape!r}", got=shape) from error
    if any(number < 0 for number in numbers):
        raise InvalidArgument(f"a shape has no negative lengths, got {shape!r}", got=shape)
    return numbers
