# SPDX-License-Identifier: MIT OR Apache-2.0
"""Deadline: one moment for a whole call, however many messages it takes."""

from __future__ import annotations

import math
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

    def __str__(self) -> str:
        return "no limit" if self.seconds is None else f"{self.seconds:g} s"
