# SPDX-License-Identifier: MIT OR Apache-2.0
"""Deadline: one moment for a whole call, however many messages it takes."""

from __future__ import annotations

import math
import threading
import time

from ferrodist.config import DefaultTimeout, Timeout

_LEAST = 1e-6  # seconds: a timeout is above zero
_SLACK = 0.5  # seconds after which a wait on the fast path is surely noticed


class Deadline:
    """The moment at which a call gives up; ``seconds`` is its timeout.

    If that is the default timeout, and there is a ``late_timeout``, the call goes on until that,
    as long as the ranks it waits for are alive and not held in another call for ``seconds``.
    """

    __slots__ = ("end", "late_seconds", "seconds")

    def __init__(
        self,
        seconds: float | None,
        late_timeout: float | None = None,
        *,
        start: float | None = None,
    ) -> None:
        start = time.monotonic() if start is None else start
        self.seconds = seconds
        self.end = math.inf if seconds is None else start + seconds
        self.late_seconds = 0.0  # exact
        if isinstance(seconds, DefaultTimeout) and late_timeout is not None:
            self.late_seconds = late_timeout

    def from_now(self) -> Deadline:
        """Return the deadline of a call whose ticket has come up; an exact one stays."""
        if not isinstance(self.seconds, DefaultTimeout):
            return self
        return Deadline(self.seconds, self.late_seconds or None)

    @property
    def is_patient(self) -> bool:
        """Whether a call may go on after ``end``, for ranks that are alive."""
        return self._waited() < self.late_seconds

    def remaining(self) -> float:
        """Seconds left; zero or less when it has passed, infinite when there is no limit."""
        return self.end - time.monotonic()

    def rest_of(self, timeout: Timeout) -> Timeout:
        """Return the rest of a timeout for the second part of a call; a default stays as it is."""
        is_limited = self.end != math.inf and not isinstance(self.seconds, DefaultTimeout)
        return max(self.remaining(), _LEAST) if is_limited else timeout

    def timeout(self) -> float:
        """Return what threads and locks take: seconds left, never below zero nor endless."""
        return min(max(self.remaining(), 0.0), threading.TIMEOUT_MAX)

    def _waited(self) -> float:
        return (self.seconds or 0.0) - self.remaining()

    def __str__(self) -> str:
        if self.seconds is None:
            return "no limit"
        if self.late_seconds > self.seconds and self._waited() > self.late_seconds - _SLACK:
            return f"{self.late_seconds:g} s (FERRODIST_LATE_TIMEOUT)"
        return f"{self.seconds:g} s"
