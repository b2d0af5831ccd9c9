# SPDX-License-Identifier: MIT OR Apache-2.0
"""Inlets and pipes: what other processes write is read in this one, in bounded bites."""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Callable
from typing import Protocol

BITE_NBYTES = 1 << 16  # at one go: the others' turn comes soon
SMALL_NBYTES = 4096  # less than a full buffer
REST_SECONDS = 0.005
_MOST_NBYTES = 1 << 20  # what a pipe can hold


class Watcher(Protocol):
    """What waits for processes, and for files meanwhile."""

    def watch(self, file: int, callback: Callable[[], bool]) -> None:
        """Call back, while it waits, whenever a file can be read, until that returns False."""
        ...


class Inlet:
    """A pipe or a terminal that can be read; hands on what arrives, as it arrives.

    ``waits_for_lines``: a line that has begun gets a moment to end.
    """

    def __init__(
        self, file: int, take: Callable[[bytes], object], *, waits_for_lines: bool = False
    ) -> None:
        self._take = take
        self._file = file
        self._waits_for_lines = waits_for_lines
        self._poll = select.poll()
        self._poll.register(file, select.POLLIN)
        self.is_open = True  # until all who could write to it are gone
        os.set_blocking(file, False)

    def watch(self, crew: Watcher, callback: Callable[[], bool]) -> None:
        """Have the crew call back, while it is waited for, when there is something to read."""
        crew.watch(self._file, callback)

    def read(self) -> bool:
        """Hand on some of what has arrived; tell whether more can come."""
        self._read_bite()
        return self.is_open

    def drain(self) -> None:
        """Hand on all that has arrived, and wait for nobody who may still write."""
        num_read = 0
        while self.is_open and num_read < _MOST_NBYTES:
            nbytes = self._read_bite()
            if not nbytes:
                return
            num_read += nbytes

    def close(self) -> None:
        """Read no more."""
        os.close(self._file)

    def _read_bite(self) -> int:
        """Hand on what one read gives, and return how much that was."""
        data = self._read()
        if self._waits_for_lines:
            data = self._read_rest(data)
        if data:
            self._take(data)
        return len(data)

    def _read_rest(self, data: bytes) -> bytes:
        """Wait a moment for the end of a line; Python writes an unbuffered print word by word."""
        end = time.monotonic() + REST_SECONDS
        while 0 < len(data) < SMALL_NBYTES and data[-1:] != b"\n":
            left = end - time.monotonic()
            if left <= 0 or not self._poll.poll(1000 * left) or not (more := self._read()):
                break
            data += more
        return data

    def _read(self) -> bytes:
        try:
            data = os.read(self._file, BITE_NBYTES)
        except BlockingIOError:
            return b""
        except OSError as error:
            if error.errno != errno.EIO:  # how a terminal tells that nobody has it open
                raise
            data = b""
        self.is_open = bool(data)
        return data


class Pipe:
    """A pipe into this process; ``end`` is for another to write to."""

    def __init__(self, take: Callable[[bytes], object]) -> None:
        read, self.end = os.pipe()
        self.inlet = Inlet(read, take)
        self._is_end_open = True

    def attach(self, crew: Watcher) -> None:
        """Leave the write end to the crew, and read while it is waited for."""
        self._close_end()
        self.inlet.watch(crew, self.inlet.read)

    def close(self) -> None:
        """Hand on the rest, and wait for nobody who may still hold the write end."""
        self._close_end()
        self.inlet.drain()
        self.inlet.close()

    def _close_end(self) -> None:
        if self._is_end_open:
            self._is_end_open = False
            os.close(self.end)
