# SPDX-License-Identifier: MIT OR Apache-2.0
"""Fold: what several ranks say alike is held for a moment and comes out once, with all their ranks.

Words used below: an *entry* is a line together with the ranks that have said it. Entries have
running numbers and are written from the front only. A rank's line joins the first entry of the
same text behind the last one of that rank; so the lines of each rank stay in their order.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections import Counter, deque

from ferrodist.backends.verdict import names_of_ranks

HOLD_SECONDS = 0.2  # for other ranks to say the same
MOST_LINES = 10_000
MOST_NBYTES = 4 << 20


class Entry:
    """A line, who has said it, and when it was said first."""

    __slots__ = ("ranks", "text", "when")

    def __init__(self, text: bytes, ranks: list[int], when: float) -> None:
        self.text = text
        self.ranks = ranks
        self.when = when

    def to_line(self) -> bytes:
        """Write it out, after the names of its ranks."""
        if not self.ranks:
            return self.text + b"\n"
        prefix = _prefix(tuple(self.ranks))
        return prefix + b" " + self.text + b"\n" if self.text else prefix + b"\n"


class Fold:
    """The lines that wait to be written, in order."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()
        self._front = 0  # the number of the first entry
        self._places: dict[bytes, deque[int]] = {}  # a text, and the numbers of its entries
        self._last: dict[int, int] = {}  # a rank, and the number of its last entry
        self._open: Counter[int] = Counter()  # ranks, and how many streams each may still write to
        self._nbytes = 0

    def open(self, rank: int) -> None:
        """Expect lines of a rank: from now on others' lines are held for it."""
        self._open[rank] += 1

    def close(self, rank: int) -> None:
        """Undo one ``open``."""
        self._open[rank] -= 1
        if not self._open[rank]:
            del self._open[rank]

    def add(self, rank: int, text: bytes, now: float) -> None:
        """Hold a line: as part of an entry that is here already, or as a new one."""
        places = self._places.setdefault(text, deque())
        at = bisect_right(places, self._last.get(rank, -1))
        if at < len(places):
            number = places[at]
            self._entries[number - self._front].ranks.append(rank)
        else:
            number = self._front + len(self._entries)
            self._entries.append(Entry(text, [rank], now))
            self._nbytes += len(text)
            places.append(number)
        self._last[rank] = number

    def add_unnamed(self, text: bytes, now: float) -> None:
        """Hold a line that comes with all names it needs; no other joins it."""
        self._entries.append(Entry(text, [], now))
        self._nbytes += len(text)

    @property
    def is_full(self) -> bool:
        """True if more is held than should be."""
        return len(self._entries) > MOST_LINES or self._nbytes > MOST_NBYTES

    @property
    def oldest(self) -> float:
        """When the first line that is held was said; infinite if none is."""
        return self._entries[0].when if self._entries else math.inf

    def ready_at(self) -> float:
        """Return when the first entry may be written; infinite if there is none."""
        if self._entries and (self.is_full or self._front <= self._settled()):
            return self.oldest
        return self.oldest + HOLD_SECONDS

    def take(self, now: float) -> list[Entry]:
        """Give out what has been held long enough, what nobody can join, and what is too much."""
        settled, taken = self._settled(), []
        while self._entries and (
            self._front <= settled or self.oldest + HOLD_SECONDS <= now or self.is_full
        ):
            taken.append(self._pop())
        return taken

    def take_all(self) -> list[Entry]:
        """Give out everything."""
        return [self._pop() for _ in range(len(self._entries))]

    def _settled(self) -> float:
        """Return the number up to which none can join: all have said that, or something later."""
        return min((self._last.get(rank, -1) for rank in self._open), default=math.inf)

    def _pop(self) -> Entry:
        entry = self._entries.popleft()
        self._front += 1
        self._nbytes -= len(entry.text)
        if entry.ranks:
            places = self._places[entry.text]
            places.popleft()
            if not places:
                del self._places[entry.text]
        return entry


@functools.lru_cache(maxsize=1024)
def _prefix(ranks: tuple[int, ...]) -> bytes:
    return f"{names_of_ranks(ranks)}:".encode()
