# SPDX-License-Identifier: MIT OR Apache-2.0
"""Receive: what a receive asks for, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ferrodist.arrays import OutputArray
from ferrodist.backends.framing import unpack_shape
from ferrodist.buffer import ArrayKind, DType
from ferrodist.call import Leaf
from ferrodist.message_status import Status

ANY = -1
"""Below the public functions: any source, or any tag."""


class Receive(NamedTuple):
    """What a receive asks for.

    ``peer`` and ``tag`` may be ANY. Without a ``target`` the message says itself what it is; with
    ``takes_shorter`` it may have fewer rows than the target. One with ``decode`` takes objects, and
    nothing else does: it is given their bytes, and whether they are pickled.
    """

    peer: int
    tag: int
    target: OutputArray | None = None
    decode: Callable[[Any, bool, int], Any] | None = None
    with_status: bool = False
    takes_shorter: bool = False

    @property
    def takes_object(self) -> bool:
        return self.decode is not None

    def finish(self, array: Any, source: int, tag: int, header: bytes | memoryview) -> Any:
        """Return what the call returns; ``array`` is what came where there is no target."""
        if self.decode is not None:
            value = self.decode(array.data, header[-1] == ArrayKind.PICKLE, source)
        elif self.target is None:
            value = array
        else:
            shape, value = unpack_shape(header)[1], self.target.finish()
            value = value if shape == self.target.buffer.shape else value[: shape[0]]
        return (value, status_of(source, tag, header)) if self.with_status else value


def leaf_of_target(target: OutputArray) -> Leaf:
    return Leaf("", target.buffer.dtype, target.buffer.shape)


def status_of(source: int, tag: int, header: bytes | memoryview) -> Status:
    """Read what a header says of a message."""
    dtype, shape = unpack_shape(header)
    if is_object(header):
        return Status(source, tag, "object", shape)
    return make_status(source, tag, dtype, shape)


def make_status(source: int, tag: int, dtype: int, shape: tuple[int, ...]) -> Status:
    return Status(source, tag, DType(dtype).label, shape)


def is_object(header: bytes | memoryview) -> bool:
    """Tell whether a message is an object, by the last byte of its header."""
    return len(header) > 0 and header[-1] >= ArrayKind.OBJECT
