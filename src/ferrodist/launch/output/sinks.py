# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sinks: what bytes are written to in the end. A sink that fails keeps the error and goes quiet.

Nobody may keep the launcher waiting, which has ranks to look after: what a file does not take now
is its *backlog*. While that is long the sink has no room, and nobody should give it more.
"""

from __future__ import annotations

import codecs
import math
import os
import select
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

MOST_BACKLOG = 1 << 20
STALL_SECONDS = 2.0  # in which nobody has read: in a hurry that is enough
_SHORTEST_WAIT, _LONGEST_WAIT = 0.001, 0.05  # for a file to take more


class Sink:
    """No place at all, as a program may have no stdout; other places do more than this."""

    error: Exception | None = None
    has_room = True

    def write(self, data: bytes) -> None:
        """Take all of it."""

    def write_due(self) -> None:
        """Write what can be written now of all that was taken before."""

    def wait_seconds(self) -> float:
        """Return how long ``write_due`` need not be tried."""
        return math.inf

    def finish(self, is_hurried: Callable[[], bool]) -> None:
        """Wait until all is written; in a hurry, only while somebody reads."""


class FileSink(Sink):
    """An open file, by its number."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._backlog = bytearray()
        self._wait = _SHORTEST_WAIT

    def write(self, data: bytes) -> None:
        """Write what the file takes now, and keep the rest."""
        if self.error is None:
            self._backlog += data
            self.write_due()

    def write_due(self) -> None:
        """Write as much of the backlog as the file takes now."""
        before = len(self._backlog)
        if not before:
            return
        try:
            _write_nowait(self._file, self._backlog)
        except OSError as error:
            self._fail(error)
        has_taken = len(self._backlog) < before
        self._wait = _SHORTEST_WAIT if has_taken else min(2 * self._wait, _LONGEST_WAIT)
        self.has_room = len(self._backlog) < MOST_BACKLOG

    def wait_seconds(self) -> float:
        """Return a moment while there is a backlog, a longer one after each try in vain."""
        return self._wait if self._backlog else math.inf

    def finish(self, is_hurried: Callable[[], bool]) -> None:
        """Wait until all is written; in a hurry, only while somebody reads."""
        last_taken = time.monotonic()
        while self._backlog:
            before = len(self._backlog)
            time.sleep(self._wait)
            self.write_due()
            if len(self._backlog) < before:
                last_taken = time.monotonic()
            elif is_hurried() and time.monotonic() > last_taken + STALL_SECONDS:
                self._fail(TimeoutError(f"nobody has read on for {STALL_SECONDS:g} s"))

    def _fail(self, error: Exception) -> None:
        self.error, self.has_room = error, True
        self._backlog.clear()


def _write_nowait(file: int, backlog: bytearray) -> None:
    """Move bytes from the backlog to the file, as long as it takes them at once."""
    poll = select.poll()
    poll.register(file, select.POLLOUT)
    with _opened(file) as (own, most):
        while backlog and poll.poll(0):
            data = bytes(backlog[:most])
            del backlog[:most]  # before it is written: it must not come twice after a Ctrl-C
            num_written = _try_write(own, data)
            backlog[:0] = data[num_written:]
            if not num_written:
                return


def _try_write(file: int, data: bytes) -> int:
    """Write what the file takes and return how much that was."""
    try:
        return os.write(file, data)
    except BlockingIOError:
        return 0


@contextmanager
def _opened(file: int) -> Iterator[tuple[int, int]]:
    """Give a number of the file, and how many bytes it takes without waiting when it is ready.

    Others share the file, so that O_NONBLOCK, which would be theirs too, must not be set on it.
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
    """Open a terminal for ourselves; one that is ready may still take less than is written."""
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
    try:
        return os.open(f"/proc/self/fd/{terminal}", flags)
    except OSError:  # it may be another user's, or gone
        return None


class TextSink(Sink):
    """A stream of Python's, such as a notebook's, that takes text only."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: bytes) -> None:
        """Write it as text; what ends within a character waits for the rest of that."""
        if self.error is not None:
            return
        try:
            self._write_text(self._decoder.decode(data))
            self._stream.flush()
        except (OSError, ValueError) as error:  # ValueError: it has been closed
            self.error = error

    def _write_text(self, text: str) -> None:
        """Write it, with other characters for those that the stream does not have."""
        try:
            self._stream.write(text)
        except UnicodeEncodeError as error:
            self._stream.write(
                text.encode(error.encoding, "backslashreplace").decode(error.encoding)
            )
