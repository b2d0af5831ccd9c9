# SPDX-License-Identifier: MIT OR Apache-2.0
"""Outlet: a place that the ranks' output goes to, and the rules by which they share it.

Rank 0 is passed through as it comes, also in the middle of a line; the lines of the others wait
until its line ends. All that is written to one place goes through one outlet, so that it knows.
Nothing here waits for the place to take what is written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from ferrodist.launch.output.folding import Entry, Fold
from ferrodist.launch.output.last_words import Tail, is_at_end
from ferrodist.launch.output.sinks import Sink

QUIET_SECONDS = 0.2  # in which a line of rank 0 has not grown: it is a prompt or a progress bar
PATIENCE_SECONDS = 1.0  # with a line of rank 0 that grows and grows


class Outlet:
    """One destination of output."""

    def __init__(self, sink: Sink, clock: Callable[[], float] = time.monotonic) -> None:
        self._sink = sink
        self.clock = clock
        self._fold = Fold()
        self._num_passing = 0  # streams of rank 0 that may still be written to
        self._is_mid_line = False
        self._last_passed = -math.inf
        self._last_stall = -math.inf  # when rank 0 was not read, so that its line could not go on
        self._seen = Tail()  # what has been written, without the names of ranks

    @property
    def error(self) -> Exception | None:
        """Why nothing can be written any more: a broken pipe, a full disk."""
        return self._sink.error

    @property
    def has_room(self) -> bool:
        """False while nobody takes what is written, and no more of any rank should be read."""
        return self._sink.has_room

    @property
    def has_room_for_lines(self) -> bool:
        """False also while too many lines wait for the end of rank 0's."""
        return self.has_room and not (self._fold.is_full and self._is_blocked(self.clock()))

    def shows_at_end(self, trace: str) -> bool:
        """Tell whether a traceback is the last that is seen, whoever has said it."""
        return is_at_end(trace, self._seen.read().decode(errors="replace"))

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
            self._pass(data[:cut])
            self._write_lines_due()  # else a line that is begun at once would keep them waiting
        if cut < len(data):
            self._pass(data[cut:])
            self._last_passed = self.clock()

    def open_lines(self, rank: int) -> None:
        """Expect a stream of another rank."""
        self._fold.open(rank)

    def close_lines(self, rank: int) -> None:
        """Undo one ``open_lines``."""
        self._fold.close(rank)

    def add_lines(self, rank: int, lines: Iterable[bytes]) -> None:
        """Take lines of another rank, without their newlines."""
        now = self.clock()
        for line in lines:
            self._fold.add(rank, line, now)
        self._write_lines_due()

    def add_unnamed_lines(self, lines: Iterable[bytes]) -> None:
        """Take lines that come with the names of their ranks, as another launcher writes them."""
        now = self.clock()
        for line in lines:
            self._fold.add_unnamed(line, now)
        self._write_lines_due()

    def write_aside(self, data: bytes) -> None:
        """Write what is no output, and is taken out of it by whoever reads."""
        self._sink.write(data)

    def write_due(self) -> None:
        """Write what the place takes now, and the lines that need to wait no longer."""
        if not self._sink.has_room:
            self._last_stall = self.clock()
        self._sink.write_due()
        self._write_lines_due()

    def wait_seconds(self) -> float:
        """Return how long ``write_due`` will have nothing to do, unless something comes."""
        ready = self._fold.ready_at()
        if self._has_open_line:
            ready = max(ready, self._unblocked_at())
        return max(0.0, min(ready - self.clock(), self._sink.wait_seconds()))

    def flush(self) -> None:
        """Write all lines that are held."""
        self._write_entries(self._fold.take_all())

    def finish(self, is_hurried: Callable[[], bool]) -> None:
        """Wait until the place has taken all; in a hurry, only while it takes something."""
        self.flush()
        self._sink.finish(is_hurried)

    def say(self, text: str) -> None:
        """Write lines of the launcher's own, after all that ranks have said."""
        self.flush()
        lines = text.encode(errors="replace").rstrip(b"\n") + b"\n"
        self._write_lines(lines, lines)

    @property
    def _has_open_line(self) -> bool:
        return self._is_mid_line and self._num_passing > 0

    def _is_blocked(self, now: float) -> bool:
        return self._has_open_line and now < self._unblocked_at()

    def _unblocked_at(self) -> float:
        quiet = max(self._last_passed, self._last_stall) + QUIET_SECONDS
        return min(quiet, max(self._fold.oldest, self._last_stall) + PATIENCE_SECONDS)

    def _write_lines_due(self) -> None:
        now = self.clock()
        if self._fold.ready_at() <= now and not self._is_blocked(now):
            self._write_entries(self._fold.take(now))

    def _write_entries(self, entries: list[Entry]) -> None:
        if entries:
            texts = b"".join(entry.text + b"\n" for entry in entries)
            self._write_lines(b"".join(entry.to_line() for entry in entries), texts)

    def _write_lines(self, lines: bytes, texts: bytes) -> None:
        """Write whole lines, never into the middle of another; the texts are without names."""
        before = b"\n" if self._is_mid_line else b""
        self._sink.write(before + lines)
        self._seen.add(before + texts)
        self._is_mid_line = False

    def _pass(self, data: bytes) -> None:
        self._sink.write(data)
        self._seen.add(data)
        self._is_mid_line = not data.endswith(b"\n")
