# SPDX-License-Identifier: MIT OR Apache-2.0
"""New arrays over memory that a backend gives: what ``backend.empty`` returns."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from ferrodist.arrays.door import take
from ferrodist.arrays.host_memory import SUPPORTED, find_dtype, numpy_dtype
from ferrodist.buffer import DTYPES_BY_LABEL, DType
from ferrodist.errors import BackendUnavailable, InvalidArgument, UnsupportedArray


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
    taken = take(x)
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
