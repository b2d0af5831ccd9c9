# SPDX-License-Identifier: MIT OR Apache-2.0
"""Outlet: a place that the ranks' output goes to, and the rules by which they share it.

Rank 0 is passed through as it comes, also in the middle of a line; the lines of the others wait
until its line ends. All that is written to one place goes through one outlet, so that it knows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from ferrodist.launch.output.folding import Entry, Fold
from ferrodist.launch.output.sinks import Sink

QUIET_SECONDS = 0.2  # in which a line of rank 0 has not grown: it is a prompt or a progress bar
PATIENCE_SECONDS = 1.0  # with a line of rank 0 that grows and grows


class Outlet:
    """One destination of output."""

    def __init__(self, sink: Sink, clock: Callable[[], float] = time.monotonic) -> None:
        self._sink = sink
        self._clock = clock
        self._fold = Fold()
        self._num_passing = 0  # streams of rank 0 that may still be written to
        self._is_mid_line = False
        self._last_passed = -math.inf
        self._lines_at_end: dict[int, int] = {}

    @property
    def error(self) -> Exception | None:
        """Why nothing can be written any more: a broken pipe, a full disk."""
        return self._sink.error

    @property
    def has_room(self) -> bool:
        """False while so much waits for the end of rank 0's line that no more should be read."""
        return not (self._fold.is_full and self._is_blocked(self._clock()))

    def lines_at_end(self, rank: int) -> int:
        """Count the lines at the very end that are this rank's (too): nothing came after them."""
        return self._lines_at_end.get(rank, 0)

    def open_passing(self) -> None:
        """Expect a stream of rank 0."""
        self._num_passing += 1

    def close_passing(self) -> None:
        """Undo one ``open_passing``."""
        self._num_passing -= 1

    def pass_through(self, data: bytes) -> None:
        """Write what rank 0 has written, at once."""
        cut = data.rfind(b"\n") + 1
        if cut:
            self._write(data[:cut], is_mid_line=False)
            self._count([0], data.count(b"\n"))
            self.write_due()  # else a line that is begun at once would keep them waiting
        if cut < len(data):
            self._write(data[cut:], is_mid_line=True)
            self._count([0], 0)
            self._last_passed = self._clock()

    def open_lines(self, rank: int) -> None:
        """Expect a stream of another rank."""
        self._fold.open(rank)

    def close_lines(self, rank: int) -> None:
        """Undo one ``open_lines``."""
        self._fold.close(rank)

    def add_lines(self, rank: int, lines: Iterable[bytes]) -> None:
        """Take lines of another rank, without their newlines."""
        now = self._clock()
        for line in lines:
            self._fold.add(rank, line, now)
        self.write_due()

    def write_due(self) -> None:
        """Write the lines that need to wait no longer."""
        now = self._clock()
        if self._fold.ready_at() <= now and not self._is_blocked(now):
            self._write_entries(self._fold.take(now))

    def wait_seconds(self) -> float:
        """Return how long ``write_due`` will have nothing to do, unless something comes."""
        ready = self._fold.ready_at()
        if self._has_open_line:
            ready = max(ready, self._unblocked_at())
        return max(0.0, ready - self._clock())

    def flush(self) -> None:
        """Write all lines that are held."""
        self._write_entries(self._fold.take_all())

    def say(self, text: str) -> None:
        """Write lines of the launcher's own, after all that ranks have said."""
        self.flush()
        self._write_lines(text.encode(errors="replace").rstrip(b"\n") + b"\n")
        self._lines_at_end = {}

    @property
    def _has_open_line(self) -> bool:
        return self._is_mid_line and self._num_passing > 0

    def _is_blocked(self, now: float) -> bool:
        return self._has_open_line and now < self._unblocked_at()

    def _unblocked_at(self) -> float:
        quiet = self._last_passed + QUIET_SECONDS
        return min(quiet, self._fold.oldest + PATIENCE_SECONDS)

    def _write_entries(self, entries: list[Entry]) -> None:
        if entries:
            self._write_lines(b"".join(entry.to_line() for entry in entries))
            for entry in entries:
                self._count(entry.ranks, 1)

    def _write_lines(self, lines: bytes) -> None:
        """Write whole lines, and never into the middle of another."""
        self._write(b"\n" + lines if self._is_mid_line else lines, is_mid_line=False)

    def _write(self, data: bytes, *, is_mid_line: bool) -> None:
        self._sink.write(data)
        self._is_mid_line = is_mid_line

    def _count(self, ranks: Iterable[int], num_lines: int) -> None:
        before = self._lines_at_end
        self._lines_at_end = {rank: before.get(rank, 0) + num_lines for rank in ranks}
