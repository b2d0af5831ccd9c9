# SPDX-License-Identifier: MIT OR Apache-2.0
"""NativeTurns: the turns of a group whose calls native code may number without asking."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ferrodist.backends.native_group import NativeGroup
from ferrodist.backends.turns import Turns


class NativeTurns(Turns):
    """As Turns, with the numbers in native code, where the GIL guards them."""

    def __init__(self, group: NativeGroup) -> None:
        self._group = group
        self._changed = threading.Condition()

    def take(self) -> int:
        """Draw the next number."""
        return self._group.take_turn()

    def wait(self, number: int, look: Callable[[], float | None]) -> None:
        """Wait for the turn of ``number``; ``look`` may raise, or says how long to sleep."""
        if self._group.ended_turns == number - 1:
            return
        with self._changed:
            while self._group.ended_turns < number - 1:
                self._changed.wait(look())

    def end(self, number: int) -> None:
        """End a turn, also one that never came: whoever is next goes on."""
        self._group.end_turn(number)
        if not self.is_idle:
            self.wake()

    def wake(self) -> None:
        """Let those who wait for their turn look again."""
        with self._changed:
            self._changed.notify_all()

    @property
    def is_idle(self) -> bool:
        """True while nobody has or awaits a turn."""
        return self._group.ended_turns == self._group.last_turn

    @property
    def last_ended(self) -> int:
        """The number of the last turn that ended with all before it."""
        return self._group.ended_turns
