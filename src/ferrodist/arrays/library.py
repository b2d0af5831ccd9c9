# SPDX-License-Identifier: MIT OR Apache-2.0
"""What every array library implements, and the records that pass through the door."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ferrodist.buffer import Buffer, DType
from ferrodist.errors import DistributedError, InvalidArgument, UnsupportedArray

HOST = "host"


class Span(NamedTuple):
    """The user's own memory, strides in bytes. It is only compared, never read."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    device: str = HOST


class Taken(NamedTuple):
    """An array that came in through the door.

    ``buffer`` is the user's memory, or a packed copy of it. ``array`` is the user's object; results
    take their kind, dtype and device from it.
    """

    buffer: Buffer
    library: Library
    array: Any
    is_number: bool = False

    @property
    def span(self) -> Span | None:
        """The user's own memory; None where there is none to share."""
        return self.library.span(self.array)


def as_it_is(array: Any) -> Any:
    """Return ``array``: the result needs no conversion."""
    return array


class Result(NamedTuple):
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


class Library(Protocol):
    """One array library, as the door sees it. Implementations hold no state."""

    def take(self, x: Any, where: str) -> Taken:
        """Give the bytes of ``x``, or raise UnsupportedArray."""

    def new_result(self, taken: Taken, shape: tuple[int, ...]) -> Result:
        """Make room for a result of the kind, dtype and device of ``taken``."""

    def take_out(self, out: Any, dtype: DType, shape: tuple[int, ...]) -> Result:
        """Make the user's ``out`` the place of a result, or raise InvalidArgument."""

    def span(self, x: Any) -> Span | None:
        """Tell which memory ``x`` occupies."""


# Given what an array is and what to do about it, makes the error.
Refusal = Callable[[str, str], DistributedError]


def refuse(where: str, what: str, advice: str) -> UnsupportedArray:
    """Make the error for an array that cannot be sent: where it is, what it is, what to do."""
    return UnsupportedArray(f"{where} is {what}; {advice}", got=what)


def refuse_out(what: str, advice: str) -> InvalidArgument:
    """Make the error for an ``out`` that cannot be written."""
    return InvalidArgument(f"out is {what}; {advice}", got=what)


def type_name(x: Any) -> str:
    """Name the type of ``x`` as a user writes it, such as ``torch.Tensor``."""
    kind = type(x)
    module = "" if kind.__module__ == "builtins" else kind.__module__ + "."
    return module + kind.__qualname__
