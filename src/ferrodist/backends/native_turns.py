# SPDX-License-Identifier: MIT OR Apache-2.0
"""NativeTurns: the tickets of a group whose calls native code may number without asking."""

from __future__ import annotations

from collections.abc import Callable

from ferrodist.backends.native_group import NativeGroup
from ferrodist.backends.turns import Turns


class NativeTurns(Turns):
    """As Turns, with the numbers in native code."""

    def __init__(self, group: NativeGroup) -> None:
        self._group = group

    def take(self) -> int:
        """Draw the next number."""
        return self._group.take_ticket()

    def wait(self, number: int, look: Callable[[], float | None]) -> None:
        """Wait for the turn of ``number``; ``look`` may raise, or says how long to sleep."""
        self._group.wait_for_ticket(number, look)

    def end(self, number: int) -> None:
        """End a turn, also one that never came: whoever is next goes on."""
        self._group.end_ticket(number)

    @property
    def is_idle(self) -> bool:
        """True while nobody has or awaits a turn."""
        return self._group.ended_tickets == self._group.last_ticket

    @property
    def last_ended(self) -> int:
        """The number of the last turn that ended with all before it."""
        return self._group.ended_tickets
