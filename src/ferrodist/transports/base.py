# SPDX-License-Identifier: MIT OR Apache-2.0
"""The two interfaces of the room: Transport moves bytes, Watch says when waiting is over."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ferrodist.transports.framing import Frame


class Watch(Protocol):
    """The side of a wait that knows about deadlines, losses and verdicts.

    Called by the transport while it holds its lock, each time a wait is about to sleep.
    """

    def look(self, peer: int) -> float:
        """Raise if waiting for ``peer`` is over, else give the seconds until the next look."""

    def arrived(self) -> None:
        """Hear that what was waited for is here."""

    def foreign(self, peer: int, frame: Frame) -> None:
        """Hear that ``peer`` sent a frame of this call with another fingerprint."""

    def damaged(self, peer: int, reason: str) -> None:
        """Hear that bytes from ``peer`` cannot be right; raises."""


class Expected(NamedTuple):
    """Which frame a collective waits for; older ones are dropped, newer ones left alone."""

    group: int
    sequence: int
    fingerprint: int


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
