# SPDX-License-Identifier: MIT OR Apache-2.0
"""Receive: what a receive asks for, and MatchQueue: which receive gets which message.

The queue serves backends whose messages Python moves; ``native/core/match_queue.hpp`` is the same
for the others.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from ferrodist.arrays import OutputArray, received_array
from ferrodist.backends.framing import unpack_message, unpack_shape
from ferrodist.buffer import ArrayKind, DType
from ferrodist.call import MAX_TAG, Leaf
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

    def finish_message(self, payload: memoryview, source: int, tag: int) -> Any:
        """Put a whole message where it goes; raise FrameError or Misfit if it is not right."""
        dtype, shape, kind, content = unpack_message(payload)
        header = payload[: len(payload) - len(content)]
        if self.target is None:
            memory = np.frombuffer(bytearray(content), np.uint8)
            return self.finish(received_array(memory, dtype, shape, kind), source, tag, header)
        found, expected = Leaf("", dtype, shape), leaf_of_target(self.target)
        if found != expected and not (self.takes_shorter and _is_shorter(found, expected)):
            raise Misfit(found, expected)
        self.target.buffer.memory[: len(content)] = content
        return self.finish(None, source, tag, header)


class Misfit(Exception):
    """A message is not what its receiver expects."""

    def __init__(self, found: Leaf, expected: Leaf) -> None:
        super().__init__(found, expected)
        self.found, self.expected = found, expected


def leaf_of_target(target: OutputArray) -> Leaf:
    return Leaf("", target.buffer.dtype, target.buffer.shape)


def _is_shorter(found: Leaf, expected: Leaf) -> bool:
    have_rows = bool(found.shape) and bool(expected.shape)
    are_alike = found.dtype == expected.dtype and found.shape[1:] == expected.shape[1:]
    return have_rows and are_alike and found.shape[0] <= expected.shape[0]


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


# -- matching --------------------------------------------------------------------------------------


class Message(Protocol):
    """A message that has come."""

    source: int
    tag: int
    is_object: bool

    @property
    def payload(self) -> bytes | memoryview:
        """Header and content."""

    def take(self) -> None:
        """Called when a receive has the message."""


@dataclass(slots=True, eq=False, repr=False)
class PostedReceive:
    """A receive, or a probe, that is waiting for its message."""

    peer: int
    tag: int
    takes_object: bool = False
    is_probe: bool = False
    message: Message | None = None  # the one that it has taken, or seen
    is_refused: bool = False  # the message is an object, or no object, and stays
    is_cancelled: bool = False

    @property
    def is_over(self) -> bool:
        return self.message is not None or self.is_cancelled

    def matches(self, source: int, tag: int) -> bool:
        return self.peer in (ANY, source) and _takes_tag(self.tag, tag)


class MatchQueue:
    """The posted receives and the unexpected messages of one rank in one group.

    A message goes to the oldest receive that takes it, a receive takes the oldest message that it
    matches. The caller holds the lock that guards it.
    """

    def __init__(self) -> None:
        self._posted: list[PostedReceive] = []
        self._unexpected: dict[tuple[int, int], deque[tuple[int, Message]]] = {}
        self._arrivals = itertools.count()

    def post(self, receive: PostedReceive) -> None:
        """Give a receive its message if that is there, else let it wait."""
        message = self.find(receive.peer, receive.tag)
        if message is None:
            self._posted.append(receive)
        elif _is_taken(receive, message):
            self.remove(message)

    def deliver(self, message: Message) -> bool:
        """Give a message to its receive, or keep it; tell whether a receive waited for it."""
        matching = [one for one in self._posted if one.matches(message.source, message.tag)]
        for receive in sorted(matching, key=lambda one: one.is_probe):  # what is taken is not seen
            self._posted.remove(receive)
            if _is_taken(receive, message):
                return True
        key = message.source, message.tag
        self._unexpected.setdefault(key, deque()).append((next(self._arrivals), message))
        return bool(matching)

    def withdraw(self, receive: PostedReceive) -> bool:
        """Withdraw a receive; False if it has its message."""
        if receive not in self._posted:
            return False
        self._posted.remove(receive)
        receive.is_cancelled = True
        return True

    def find(self, peer: int, tag: int) -> Message | None:
        """Return the message that a receive would get, which stays; None if there is none."""
        if ANY not in (peer, tag):
            queue = self._unexpected.get((peer, tag))
            return queue[0][1] if queue else None
        heads = (
            queue[0]
            for (source, its_tag), queue in self._unexpected.items()
            if peer in (ANY, source) and _takes_tag(tag, its_tag)
        )
        first = min(heads, key=lambda head: head[0], default=None)
        return None if first is None else first[1]

    def remove(self, message: Message) -> None:
        key = message.source, message.tag
        queue = self._unexpected.get(key, deque())
        found = next((one for one in queue if one[1] is message), None)
        if found is not None:
            queue.remove(found)
        if not queue:  # tags may be many: an empty queue is not kept
            self._unexpected.pop(key, None)

    def tags_of(self, sources: Iterable[int]) -> list[int]:
        """List the tags of the messages of these sources that are not received yet."""
        wanted = set(sources)
        return sorted({tag for source, tag in self._unexpected if source in wanted})


def _takes_tag(wanted: int, tag: int) -> bool:
    """Tell whether a tag is wanted; any stands for those that users have."""
    return wanted == tag or (wanted == ANY and tag <= MAX_TAG)


def _is_taken(receive: PostedReceive, message: Message) -> bool:
    """Show a message to the receive that it goes to; False if the message stays."""
    receive.message = message
    receive.is_refused = not receive.is_probe and receive.takes_object != message.is_object
    if receive.is_probe or receive.is_refused:
        return False
    message.take()
    return True
