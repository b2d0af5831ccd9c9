# SPDX-License-Identifier: MIT OR Apache-2.0
"""Writer: one destination of output, and the rules by which the ranks share it.

The *front rank*, rank 0 unless the user debugs another, is passed through as it comes, also in the
middle of a line; the lines of the others wait until its line ends. Lines that several ranks write
alike are de-duplicated. Everything written to one destination goes through one writer, so that it
knows. At its end is a *sink*, the file or the Python stream. Nothing here blocks: the launcher has
ranks to look after. What a file does not accept now is its *backlog*; while that is long, the sink
has no room and no more should be read.
"""

from __future__ import annotations

import codecs
import functools
import math
import os
import select
import stat
import sys
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TextIO

from ferrodist.backends.failures import names_of_ranks
from ferrodist.launch.output.logs import Tail, is_at_end

QUIET_SECONDS = 0.2  # a line of rank 0 that has not grown for so long is a prompt or progress bar
MOST_SECONDS = 1.0  # that lines of others wait for a line of rank 0 that keeps growing
HOLD_SECONDS = 0.2  # for other ranks to write the same line
MOST_LINES = 10_000  # held for de-duplication
MOST_NBYTES = 4 << 20
MOST_BACKLOG = 1 << 20
STALL_SECONDS = 2.0  # without a reader: enough if the launcher was told to stop
_THE_SAME = b"the same traceback"
_SHORTEST_WAIT, _LONGEST_WAIT = 0.001, 0.05  # between attempts to write a backlog


class Writer:
    """One destination of output; ``terminal`` is its file, if that is a terminal."""

    def __init__(
        self,
        sink: Sink,
        *,
        terminal: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink = sink
        self.terminal = terminal
        self.clock = clock
        self._held = Deduplicator()
        self._num_passing = 0  # streams of rank 0 that may still be written to
        self._is_mid_line = False
        self._last_passed = -math.inf
        self._last_stall = -math.inf  # when rank 0 was not read, so that its line could not go on
        self._seen = Tail()  # what has been written, without the names of ranks

    @property
    def error(self) -> Exception | None:
        return self._sink.error

    @property
    def has_room(self) -> bool:
        """False while the backlog is long, and no more of any rank should be read."""
        return self._sink.has_room

    @property
    def has_room_for_lines(self) -> bool:
        """False also while too many lines wait for the end of rank 0's."""
        return self.has_room and not (self._held.is_full and self._is_blocked(self.clock()))

    def shows_at_end(self, trace: str) -> bool:
        return is_at_end(trace, self._seen.read().decode(errors="replace"))

    def open_front(self) -> None:
        """Expect a stream of the front rank: lines of others wait for the end of its line."""
        self._num_passing += 1

    def close_front(self) -> None:
        self._num_passing -= 1

    def open(self, rank: int) -> None:
        """Expect a stream of another rank: lines of others wait for equal ones of it."""
        self._held.open(rank)

    def close(self, rank: int) -> None:
        self._held.close(rank)

    def pass_through(self, data: bytes) -> None:
        cut = data.rfind(b"\n") + 1
        if cut:
            self._pass(data[:cut])
            self._write_lines_due()  # or the line that begins now would keep them waiting
        if cut < len(data):
            self._pass(data[cut:])
            self._last_passed = self.clock()

    def add_lines(self, rank: int | None, lines: Iterable[bytes]) -> None:
        """Take lines without their newlines; rank None if they already name their ranks."""
        now = self.clock()
        for line in lines:
            self._held.add(rank, line, now)
        self._write_lines_due()

    def write_report(self, data: bytes) -> None:
        """Write what is not output, and is removed from it by the reader."""
        self._sink.write(data)

    def write_due(self) -> None:
        if not self._sink.has_room:
            self._last_stall = self.clock()
        self._sink.write_due()
        self._write_lines_due()

    def wait_seconds(self) -> float:
        ready = self._held.ready_at()
        if self._has_open_line:
            ready = max(ready, self._unblocked_at())
        return max(0.0, min(ready - self.clock(), self._sink.wait_seconds()))

    def flush(self) -> None:
        self._write_entries(self._held.take_all())

    def finish(self, is_hurried: Callable[[], bool]) -> None:
        self.flush()
        self._sink.finish(is_hurried)

    def say(self, text: str) -> None:
        """Write lines of the launcher's own, after everything that ranks have written."""
        self.flush()
        lines = text.encode(errors="replace").rstrip(b"\n") + b"\n"
        self._write_lines(lines, b"")

    @property
    def _has_open_line(self) -> bool:
        return self._is_mid_line and self._num_passing > 0

    def _is_blocked(self, now: float) -> bool:
        return self._has_open_line and now < self._unblocked_at()

    def _unblocked_at(self) -> float:
        quiet = max(self._last_passed, self._last_stall) + QUIET_SECONDS
        return min(quiet, max(self._held.oldest, self._last_stall) + MOST_SECONDS)

    def _write_lines_due(self) -> None:
        now = self.clock()
        if self._held.ready_at() <= now and not self._is_blocked(now):
            self._write_entries(self._held.take(now))

    def _write_entries(self, entries: list[HeldEntry]) -> None:
        if entries:
            texts = b"".join(entry.text + b"\n" for entry in entries)
            self._write_lines(b"".join(self._in_short(e).to_line() for e in entries), texts)

    def _in_short(self, entry: HeldEntry) -> HeldEntry:
        """Return an entry to write; of a traceback that is the last thing shown, only a word."""
        is_traceback = b"\n" in entry.text
        if is_traceback and self._seen.read().rstrip().endswith(entry.text.rstrip()):
            return entry._replace(text=_THE_SAME)
        return entry

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


# -- de-duplication -------------------------------------------------------------------------------


class HeldEntry(NamedTuple):
    """A line or a whole traceback, the ranks that have written it, and when the first did."""

    text: bytes
    ranks: list[int]
    when: float

    def to_line(self) -> bytes:
        if not self.ranks:
            return self.text + b"\n"
        prefix = _prefix(tuple(self.ranks))
        # A line that names its rank, as our log lines do, is not given the name again.
        lines = [line.removeprefix(prefix + b" ") for line in self.text.split(b"\n")]
        return b"".join(prefix + (b" " + line if line else b"") + b"\n" for line in lines)


class Deduplicator:
    """Holds lines for a moment, so that what several ranks write alike comes out once.

    Entries are numbered and written from the front only. A rank's line joins the first entry with
    the same text after the last entry of that rank, so that the lines of each rank stay in order.
    """

    def __init__(self) -> None:
        self._entries: deque[HeldEntry] = deque()
        self._front = 0  # the number of the first entry
        self._places: dict[bytes, deque[int]] = {}  # text -> the numbers of its entries
        self._last: dict[int, int] = {}  # rank -> the number of its last entry
        self._open: Counter[int] = Counter()  # rank -> streams that may still be written to
        self._nbytes = 0

    def open(self, rank: int) -> None:
        self._open[rank] += 1

    def close(self, rank: int) -> None:
        self._open[rank] -= 1
        if not self._open[rank]:
            del self._open[rank]

    def add(self, rank: int | None, text: bytes, now: float) -> None:
        """Hold a line, in an existing entry or a new one; without a rank, always a new one."""
        if rank is None:
            self._append(HeldEntry(text, [], now))
            return
        places = self._places.setdefault(text, deque())
        at = bisect_right(places, self._last.get(rank, -1))
        if at < len(places):
            number = places[at]
            self._entries[number - self._front].ranks.append(rank)
        else:
            number = self._append(HeldEntry(text, [rank], now))
            places.append(number)
        self._last[rank] = number

    def _append(self, entry: HeldEntry) -> int:
        self._entries.append(entry)
        self._nbytes += len(entry.text)
        return self._front + len(self._entries) - 1

    @property
    def is_full(self) -> bool:
        return len(self._entries) > MOST_LINES or self._nbytes > MOST_NBYTES

    @property
    def oldest(self) -> float:
        return self._entries[0].when if self._entries else math.inf

    def ready_at(self) -> float:
        if self._entries and (self.is_full or self._front <= self._settled()):
            return self.oldest
        return self.oldest + HOLD_SECONDS

    def take(self, now: float) -> list[HeldEntry]:
        """Remove what was held long enough, what nobody can join, and what is too much."""
        settled, taken = self._settled(), []
        while self._entries and (
            self._front <= settled or self.oldest + HOLD_SECONDS <= now or self.is_full
        ):
            taken.append(self._pop())
        return taken

    def take_all(self) -> list[HeldEntry]:
        return [self._pop() for _ in range(len(self._entries))]

    def _settled(self) -> float:
        """Return the number up to which nobody can join: all ranks have written that or more."""
        return min((self._last.get(rank, -1) for rank in self._open), default=math.inf)

    def _pop(self) -> HeldEntry:
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


# -- sinks ----------------------------------------------------------------------------------------


class Sink:
    """Discards everything, as a program may have no stdout; the base of sinks that do not.

    A sink that fails keeps the error and discards what follows.
    """

    error: Exception | None = None
    has_room = True

    def write(self, data: bytes) -> None:
        """Take all of it."""

    def write_due(self) -> None:
        """Write what can be written now of everything taken before."""

    def wait_seconds(self) -> float:
        """Return how long ``write_due`` need not be called."""
        return math.inf

    def finish(self, is_hurried: Callable[[], bool]) -> None:
        """Wait until everything is written; in a hurry, only while somebody reads."""


class FileSink(Sink):
    """An open file, by its descriptor."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._backlog = bytearray()
        self._wait = _SHORTEST_WAIT

    def write(self, data: bytes) -> None:
        if self.error is None:
            self._backlog += data
            self.write_due()

    def write_due(self) -> None:
        before = len(self._backlog)
        if not before:
            return
        try:
            _write_nowait(self._file, self._backlog)
        except OSError as error:
            self._fail(error)
        has_progressed = len(self._backlog) < before
        self._wait = _SHORTEST_WAIT if has_progressed else min(2 * self._wait, _LONGEST_WAIT)
        self.has_room = len(self._backlog) < MOST_BACKLOG

    def wait_seconds(self) -> float:
        return self._wait if self._backlog else math.inf

    def finish(self, is_hurried: Callable[[], bool]) -> None:
        last_progress = time.monotonic()
        while self._backlog:
            before = len(self._backlog)
            time.sleep(self._wait)
            self.write_due()
            if len(self._backlog) < before:
                last_progress = time.monotonic()
            elif is_hurried() and time.monotonic() > last_progress + STALL_SECONDS:
                self._fail(TimeoutError(f"nobody has read for {STALL_SECONDS:g} s"))

    def _fail(self, error: Exception) -> None:
        self.error, self.has_room = error, True
        self._backlog.clear()


def _write_nowait(file: int, backlog: bytearray) -> None:
    poll = select.poll()
    poll.register(file, select.POLLOUT)
    with _opened(file) as (own, most):
        while backlog and poll.poll(0):
            data = bytes(backlog[:most])
            del backlog[:most]  # before it is written: a Ctrl-C must not make it appear twice
            num_written = _try_write(own, data)
            backlog[:0] = data[num_written:]
            if not num_written:
                return


def _try_write(file: int, data: bytes) -> int:
    try:
        return os.write(file, data)
    except BlockingIOError:
        return 0


@contextmanager
def _opened(file: int) -> Iterator[tuple[int, int]]:
    """Yield a descriptor of the file, and how many bytes it accepts without blocking when ready.

    Others share the file: O_NONBLOCK must not be set on it, because it would be set for them too.
    """
    if stat.S_ISREG(os.fstat(file).st_mode):
        yield file, sys.maxsize
    elif not os.isatty(file):
        yield file, select.PIPE_BUF
    elif (own := _try_open_again(file)) is None:
        yield file, 1
    else:
        try:
            yield own, select.PIPE_BUF
        finally:
            os.close(own)


def _try_open_again(terminal: int) -> int | None:
    """Open a terminal for ourselves; a ready one may still accept less than is written."""
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
    try:
        return os.open(f"/proc/self/fd/{terminal}", flags)
    except OSError:  # it may be another user's, or gone
        return None


class TextSink(Sink):
    """A Python stream, such as a notebook's, that takes text only."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: bytes) -> None:
        """Write it as text; an incomplete character waits for the rest of it."""
        if self.error is not None:
            return
        try:
            self._write_text(self._decoder.decode(data))
            self._stream.flush()
        except (OSError, ValueError) as error:  # ValueError: it has been closed
            self.error = error

    def _write_text(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError as error:
            self._stream.write(
                text.encode(error.encoding, "backslashreplace").decode(error.encoding)
            )
