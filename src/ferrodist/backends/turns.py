# SPDX-License-Identifier: MIT OR Apache-2.0
"""Turns: calls of several threads run one at a time, in the order they were made."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Turns:
    """Numbers from 1; each number's turn comes when all smaller ones have ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # reentrant, as everything a finalizer may touch
        self._last = 0
        self._ended = 0
        self._skipped: set[int] = set()

    def take(self) -> int:
        """Draw the next number."""
        with self._changed:
            self._last += 1
            return self._last

    def wait(self, number: int, look: Callable[[], float | None]) -> None:
        """Wait for the turn of ``number``; ``look`` may raise, or says how long to sleep."""
        with self._changed:
            while self._ended < number - 1:
                self._changed.wait(look())

    def end(self, number: int) -> None:
        """End a turn, also one that never came: whoever is next goes on."""
        with self._changed:
            self._skipped.add(number)
            while self._ended + 1 in self._skipped:
                self._ended += 1
                self._skipped.remove(self._ended)
            self._changed.notify_all()

    @property
    def is_idle(self) -> bool:
        """True while nobody has or awaits a turn."""
        return self._ended == self._last

    @property
    def last_ended(self) -> int:
        """The number of the last turn that ended with all before it."""
        return self._ended
