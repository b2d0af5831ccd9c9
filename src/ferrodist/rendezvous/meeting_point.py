# SPDX-License-Identifier: MIT OR Apache-2.0
"""MeetingPoint: where the ranks of a job come together, on one host or between hosts."""

from __future__ import annotations

import socket
from typing import Protocol

from ferrodist.rendezvous.reception import Peer


class MeetingPoint(Protocol):
    """What host and guest need of a kind of socket."""

    longest_pause: float  # seconds between two tries to connect

    @property
    def address(self) -> str:
        """Where rank 0 listens, in words."""

    @property
    def towards(self) -> str:
        """The address of rank 0, when it listens or was reached; '' if it needs none."""

    def where(self) -> str:
        """Complete the sentence 'whoever listens ...', if there is something to add."""

    def open_listener(self) -> socket.socket:
        """Listen as rank 0; raises RendezvousError if somebody else does."""

    def try_connect(self) -> socket.socket | None:
        """Connect to rank 0; None if it does not listen, or not yet."""

    def identify(self, connection: socket.socket) -> Peer:
        """Say who is at the other end; raises AuthenticationError if it may not be there."""

    def describe_self(self) -> str:
        """Say who rank 0 is, as the others are named."""
