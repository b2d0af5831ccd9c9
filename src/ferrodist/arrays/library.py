# SPDX-License-Identifier: MIT OR Apache-2.0
"""What every array library implements, and the records of conversion."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from ferrodist.buffer import ARRAY_DTYPES, DTYPES_BY_LABEL, ArrayKind, Buffer, DType
from ferrodist.errors import DistributedError, InvalidArgument, UnsupportedArray

HOST = "host"


class Span(NamedTuple):
    """The user's own memory, strides in bytes. It is only compared, never read."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    device: str = HOST


class InputArray(NamedTuple):
    """An array that a caller passed in.

    ``buffer`` is the user's memory, or a packed copy of it. ``array`` is the user's object; results
    take their kind, dtype and device from it. ``kind`` is what a message says that it is.
    """

    buffer: Buffer
    library: Library
    array: Any
    kind: ArrayKind = ArrayKind.NUMPY

    @property
    def is_number(self) -> bool:
        return self.kind is ArrayKind.NUMBER

    @property
    def span(self) -> Span | None:
        """The user's own memory; None where there is none to share."""
        return self.library.span(self.array)


def as_it_is(array: Any) -> Any:
    """Return ``array``: the result needs no conversion."""
    return array


class OutputArray(NamedTuple):
    """Where a result will be written, and how it becomes the caller's array.

    ``buffer`` is the memory of ``array``; ``span`` is the user's memory if ``out=`` was given.
    """

    buffer: Buffer
    array: Any
    convert: Callable[[Any], Any] = as_it_is
    span: Span | None = None

    def finish(self) -> Any:
        """Return the array for the caller; to be called once, when ``buffer`` is complete."""
        return self.convert(self.array)


def is_writable_in_part(target: OutputArray | None) -> bool:
    """Tell whether what is not written stays as it was: memory of a device is copied as a whole."""
    return target is not None and target.span is not None and target.span.device == HOST


class Library(Protocol):
    """One array library, as conversion sees it. Implementations hold no state."""

    def as_input(self, x: Any, where: str) -> InputArray:
        """Give the bytes of ``x``, or raise UnsupportedArray."""

    def new_result(self, taken: InputArray, shape: tuple[int, ...]) -> OutputArray:
        """Make room for a result of the kind, dtype and device of ``taken``."""

    def as_output(self, out: Any, dtype: DType, shape: tuple[int, ...]) -> OutputArray:
        """Make the user's ``out`` the place of a result, or raise InvalidArgument."""

    def span(self, x: Any) -> Span | None:
        """Tell which memory ``x`` occupies."""


# Given what an array is and what to do about it, makes the error.
Refusal = Callable[[str, str], DistributedError]


def refuse(where: str, what: str, advice: str) -> UnsupportedArray:
    """Make the error for an array that cannot be sent: where it is, what it is, what to do."""
    return UnsupportedArray(f"{where} is {what}; {advice}", got=what)


# Calls that objects have, too.
_TWINS = {
    **{call: f"{call}_object" for call in ("broadcast", "all_gather", "gather", "scatter")},
    **{call: f"{call}_object" for call in ("send", "recv")},
    "sendrecv": "send_object and recv_object",
}


def advise_objects(where: str) -> str:
    """Say what sends an object that is no array, by the call that ``where`` begins with."""
    if "the object" in where:  # it is inside one
        return "pass pickle=True on every rank"
    call = where.partition(":")[0].removesuffix("_uneven")
    return "use " + _TWINS.get(call, "broadcast_object or all_gather_object")


def refuse_out(what: str, advice: str) -> InvalidArgument:
    """Make the error for an ``out`` that cannot be written."""
    return InvalidArgument(f"out is {what}; {advice}", got=what)


def type_name(x: Any) -> str:
    """Name the type of ``x`` as a user writes it, such as ``torch.Tensor``."""
    kind = type(x)
    module = "" if kind.__module__ == "builtins" else kind.__module__ + "."
    return module + kind.__qualname__


# -- memory of the host ----------------------------------------------------------------------------
#
# NumPy views of host memory: the one road from any library's array to a Buffer and back.

SUPPORTED = ", ".join(DTYPES_BY_LABEL)

# bfloat16 is the one NumPy does not have by itself.
_NUMPY_DTYPES: dict[DType, np.dtype[Any]] = {
    dtype: np.dtype(dtype.label) for dtype in ARRAY_DTYPES if dtype != DType.BFLOAT16
}
_DTYPES: dict[np.dtype[Any], DType] = {found: dtype for dtype, found in _NUMPY_DTYPES.items()}


def find_dtype(dtype: np.dtype[Any]) -> DType | None:
    """Return the DType of a NumPy dtype, None if there is none."""
    found = _DTYPES.get(dtype)
    # ml_dtypes need not be installed here: who made the array has it, and its name is enough.
    if found is None and dtype.type.__module__ == "ml_dtypes":
        found = DTYPES_BY_LABEL.get(dtype.name)
    return found


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the NumPy dtype of a DType; bfloat16 needs ml_dtypes."""
    if dtype is not DType.BFLOAT16:
        return _NUMPY_DTYPES[dtype]
    try:
        bfloat16: np.dtype[Any] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError as error:
        raise UnsupportedArray(
            "a NumPy array of bfloat16 needs the package ml_dtypes; install it, or import torch "
            "and use its tensors",
            got="bfloat16",
        ) from error
    return bfloat16


def buffer_of(array: np.ndarray[Any, Any], dtype: DType) -> Buffer:
    """Make a Buffer of an array's own memory, or of a packed copy if it has gaps.

    Memory that is not aligned is copied too: native code may load whole vectors from it.
    """
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned):
        array = array.copy()
    # Not memoryview.cast: it fails on zero-size arrays, and bfloat16 exports no memoryview.
    return Buffer(array.reshape(-1).view(np.uint8).data, dtype, array.shape, array)


def fresh(
    array: np.ndarray[Any, Any], dtype: DType, convert: Callable[[Any], Any] = as_it_is
) -> OutputArray:
    """Make a new host array the place of a result; ``convert`` makes the caller's array of it."""
    return OutputArray(buffer_of(array, dtype), array, convert)


def span_of(array: np.ndarray[Any, Any]) -> Span:
    address = array.__array_interface__["data"][0]
    return Span(address, array.shape, array.strides, array.itemsize)


def check_out(out: Any, found: DType | None, dtype: DType, shape: tuple[int, ...]) -> None:
    """Refuse an ``out`` whose dtype (``found``, None for a foreign one) or shape is not right."""
    if found is not dtype:
        raise _wrong_out("dtype", out.dtype if found is None else found.label, dtype.label)
    if tuple(out.shape) != shape:
        raise _wrong_out("shape", tuple(out.shape), shape)


def _wrong_out(fact: str, got: object, expected: object) -> InvalidArgument:
    text = f"out has {fact} {got}, expected {expected}"
    return InvalidArgument(text, got=got, expected=expected)


def check_out_memory(array: np.ndarray[Any, Any]) -> None:
    """Refuse an ``out`` that cannot be written as one piece of memory."""
    if not array.flags.writeable:
        raise InvalidArgument("out is read-only; pass a writable array", got="read-only")
    if not array.flags.aligned:
        raise InvalidArgument("out is not aligned in memory; pass a fresh array", got="unaligned")
    check_out_contiguous(array.flags.c_contiguous, array.strides)


def check_out_contiguous(contiguous: bool, strides: tuple[int, ...]) -> None:
    """Refuse an ``out`` with gaps or in another order."""
    if not contiguous:
        raise InvalidArgument(
            f"out is not C-contiguous (strides {strides}); pass a C-contiguous array and copy "
            "from it, or omit out=",
            got=strides,
        )
