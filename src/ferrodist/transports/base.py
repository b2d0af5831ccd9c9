# SPDX-License-Identifier: MIT OR Apache-2.0
"""The two interfaces of the room: Transport moves bytes, Watch says when waiting is over."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from ferrodist.transports.framing import Frame


class Watch(Protocol):
    """The side of a wait that knows about deadlines, losses and verdicts.

    Called by the transport while it holds its lock, each time a wait is about to sleep.
    """

    def look(self, peer: int) -> float:
        """Raise if waiting for ``peer`` is over, else give the seconds until the next look."""

    def arrived(self) -> None:
        """Hear that what was waited for is here."""

    def damaged(self, peer: int, reason: str) -> None:
        """Hear that bytes from ``peer`` cannot be right; raises."""


class Expected(NamedTuple):
    """Which frame a collective waits for; older ones are dropped, newer ones left alone."""

    group: int
    sequence: int
    fingerprint: int


class Letter(Protocol):
    """A point-to-point message on its way; ``is_taken`` when its memory may change."""

    is_taken: bool


class Transport(Protocol):
    """Moves frames between the ranks of a world. Frames of one link stay in order."""

    rank: int
    size: int

    def send(self, peer: int, frame: Frame, watch: Watch) -> None:
        """Send a frame of a collective; its payload may change when this returns."""

    def recv(self, peer: int, expected: Expected, watch: Watch) -> memoryview:
        """Wait for the next frame of the call from ``peer`` and return its payload."""

    def exchange(
        self, to: int, frame: Frame, peer: int, expected: Expected, watch: Watch
    ) -> memoryview:
        """Send and receive at once, so that two ranks doing the same never wait in a circle."""

    def sleep(self, peer: int, watch: Watch) -> None:
        """Sleep until something changes or it is time to look."""

    def post(
        self, peer: int, group: int, tag: int, header: bytes, content: memoryview, watch: Watch
    ) -> Letter:
        """Send a point-to-point message without waiting for its receiver."""

    def settle(self, letter: Any, watch: Watch) -> None:
        """Wait until the memory of a message may change; if that fails take it back."""

    def take_back(self, letter: Any) -> None:
        """Remove a message that its receiver has not looked at yet."""

    def collect(self, peer: int, group: int, tag: int, watch: Watch) -> bytes | memoryview:
        """Wait for the next point-to-point message with this tag and return its payload."""
