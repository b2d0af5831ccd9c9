# SPDX-License-Identifier: MIT OR Apache-2.0
"""Deadline: one moment for a whole call, however many messages it takes."""

from __future__ import annotations

import math
import threading
import time


class Deadline:
    """The moment at which a call gives up; ``seconds`` is what the caller asked for."""

    __slots__ = ("end", "seconds")

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.end = math.inf if seconds is None else time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds left; zero or less when it has passed, infinite when there is no limit."""
        return self.end - time.monotonic()

    def timeout(self) -> float:
        """Return what threads and locks take: seconds left, never below zero nor endless."""
        return min(max(self.remaining(), 0.0), threading.TIMEOUT_MAX)

    def __str__(self) -> str:
        return "no limit" if self.seconds is None else f"{self.seconds:g} s"
