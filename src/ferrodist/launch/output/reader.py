# SPDX-License-Identifier: MIT OR Apache-2.0
"""Stream: one output stream of one process, from its pipe or terminal to the console.

A ``Reader`` reads the pipe, and a ``Prefixer`` turns the bytes into output: the lines of a rank get
its name. Rank 0 is left as it is, by a ``PassThrough``. A stream is *retired* when its process has
ended, although what that has started may still write to it, and *ended* when nothing can arrive any
more.
"""

from __future__ import annotations

import errno
import math
import os
import select
import time
from collections.abc import Callable, Iterable
from typing import Any

from ferrodist.launch.output.logs import Tail
from ferrodist.launch.output.writer import QUIET_SECONDS, FileSink, Writer
from ferrodist.launch.processes import ProcessSet

LONGEST_LINE = 1 << 20
FULL_BUFFER = 4096  # the least that C and Python collect before they write to a pipe
FULL_PIPE = 1 << 15  # a pipe that holds less accepts more: its writer is not in mid-write
_READ_NBYTES = 1 << 16  # at once: the turn of the others comes soon
_REST_SECONDS = 0.005
_TRACEBACK = b"Traceback (most recent call last):"
_GROUP_TRACEBACK = b"  + Exception Group " + _TRACEBACK
_LONGEST_TRACEBACK = 10_000  # lines
_PIPE_NBYTES = 1 << 20  # the most that a pipe can hold


class Stream:
    """What is read from a file and where it goes: to the console, a log file and the tail."""

    def __init__(self, file: int, prefixer: Prefixer, log: FileSink | None = None) -> None:
        self.log = log
        self.tail = Tail()
        self._prefixer = prefixer
        self._reader = Reader(file, self._take, waits_for_lines=prefixer.waits_for_lines)
        self._processes: ProcessSet[Any] | None = None
        self._is_paused = False  # not watched, because there was no room
        self._has_ended = False

    def watch(self, processes: ProcessSet[Any]) -> None:
        self._processes = processes
        processes.watch(self._reader.file, self._read)

    def write_due(self) -> None:
        """Write what was held long enough; resume reading if it was paused and there is room."""
        if not self._is_paused:
            self._prefixer.write_due()
        elif self._processes is not None and self._prefixer.has_room:
            self._is_paused = False
            self.watch(self._processes)

    def wait_seconds(self) -> float:
        return math.inf if self._is_paused else self._prefixer.wait_seconds()

    def retire(self) -> None:
        self._reader.drain()
        self._prefixer.retire()

    def end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._reader.drain()
            self._end_output()

    def close(self) -> None:
        self._reader.close()

    def _read(self) -> bool:
        if not self._prefixer.has_room:
            self._is_paused = True  # or we would be called immediately, again and again
            return False
        if self._reader.read():
            return True
        self.end()
        return False

    def _take(self, data: bytes) -> None:
        self.tail.add(data)
        if self.log is not None:
            self.log.write(data)
        self._prefixer.take(data)

    def _end_output(self) -> None:
        self._prefixer.end()


class Prefixer:
    """Turns the bytes of a stream into whole lines, each after the name of its rank.

    ``rank`` is None for the stream of another launcher, whose lines name their ranks already.
    """

    waits_for_lines = False  # it makes whole ones itself

    def __init__(self, rank: int | None, writer: Writer) -> None:
        self._rank = rank
        self._writer = writer
        self._lines = LineSplitter()
        self._tracebacks = TracebackJoiner()
        self._last_taken = -math.inf
        self._is_open = rank is not None  # nobody's lines wait for those of a launcher
        if rank is not None:
            writer.open(rank)

    @property
    def has_room(self) -> bool:
        return self._writer.has_room_for_lines

    def take(self, data: bytes) -> None:
        self._last_taken = self._writer.clock()
        self._writer.add_lines(self._rank, self._tracebacks.join(self._lines.split(data)))

    def write_due(self) -> None:
        if self.wait_seconds() <= 0:
            self._write_held()

    def wait_seconds(self) -> float:
        if not self._is_holding:
            return math.inf
        return max(0.0, self._last_taken + QUIET_SECONDS - self._writer.clock())

    @property
    def _is_holding(self) -> bool:
        return self._tracebacks.has_begun

    def _write_held(self) -> None:
        self._writer.add_lines(self._rank, self._tracebacks.end())

    def retire(self) -> None:
        """Let no other rank's lines wait for this one's."""
        if self._is_open:
            self._is_open = False
            self._close_writer()

    def _close_writer(self) -> None:
        assert self._rank is not None
        self._writer.close(self._rank)

    def end(self) -> None:
        """Pass on the rest, a last line that has no newline."""
        self._writer.add_lines(self._rank, self._tracebacks.join(self._lines.end()))
        self._write_held()
        self.retire()


class PassThrough(Prefixer):
    """A stream of the front rank: written as it comes, except for what is certainly not meant so.

    A long write that ends in mid-line is a buffer that was full. The begun line is held until the
    rest arrives, and others can write meanwhile. If it does not arrive soon, the line is a prompt.
    On a terminal, where people wait, nothing is held.
    """

    def __init__(self, writer: Writer, *, is_terminal: bool = False) -> None:
        super().__init__(None, writer)
        self._is_open = True
        writer.open_front()
        self._is_terminal = is_terminal
        self.waits_for_lines = not is_terminal
        self._held = b""
        self._last_nbytes = 0

    @property
    def has_room(self) -> bool:
        return self._writer.has_room

    def take(self, data: bytes) -> None:
        # What follows a full pipe is the rest of what filled it.
        is_long = len(data) >= FULL_BUFFER or self._last_nbytes >= FULL_PIPE
        is_buffer = is_long and not self._is_terminal
        self._last_nbytes = len(data)
        self._last_taken = self._writer.clock()
        data = self._held + data
        cut = data.rfind(b"\n") + 1 if is_buffer else len(data)
        if len(data) - cut > LONGEST_LINE:
            cut = len(data)
        self._held = data[cut:]
        self._writer.pass_through(data[:cut])

    def end(self) -> None:
        self._write_held()
        self.retire()

    def _close_writer(self) -> None:
        self._writer.close_front()

    @property
    def _is_holding(self) -> bool:
        return bool(self._held)

    def _write_held(self) -> None:
        held, self._held = self._held, b""
        self._writer.pass_through(held)


class TracebackJoiner:
    """Makes one entry of the lines of a traceback.

    De-duplication compares it as a whole then: ranks write the same header, and what follows may
    differ. An error's message may have more lines, which nothing marks.
    """

    def __init__(self) -> None:
        self._lines: list[bytes] = []

    @property
    def has_begun(self) -> bool:
        return bool(self._lines)

    def join(self, lines: Iterable[bytes]) -> list[bytes]:
        done: list[bytes] = []
        for line in lines:
            is_indented = line.startswith(b" ")
            if self._lines and (is_indented or self._lines[0] == _TRACEBACK):
                self._lines.append(line)
                done += [] if is_indented and len(self._lines) < _LONGEST_TRACEBACK else self.end()
            elif line in (_TRACEBACK, _GROUP_TRACEBACK):
                done += self.end()
                self._lines = [line]
            else:
                done += [*self.end(), line]
        return done

    def end(self) -> list[bytes]:
        lines, self._lines = self._lines, []
        return [b"\n".join(lines)] if lines else []


class LineSplitter:
    """Splits bytes into lines, as a terminal would show them: a carriage return starts again."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def split(self, data: bytes) -> list[bytes]:
        """Return the lines that these bytes complete, without their newlines."""
        self._rest += data
        lines: list[bytes] = []
        if b"\n" in data:
            whole, _, self._rest = self._rest.rpartition(b"\n")
            lines = bytes(whole).split(b"\n")
            if b"\r" in whole:
                lines = [_shown(line).rstrip(b"\r") for line in lines]
        if b"\r" in data:
            self._rest = bytearray(_shown(bytes(self._rest)))
        if len(self._rest) > LONGEST_LINE:
            lines += self.end()
        return lines

    def end(self) -> list[bytes]:
        rest, self._rest = bytes(self._rest).rstrip(b"\r"), bytearray()
        return [rest] if rest else []


def _shown(line: bytes) -> bytes:
    """Remove what has been overwritten; keep a carriage return that ends the line."""
    text = line.rstrip(b"\r")
    return text[text.rfind(b"\r") + 1 :] + line[len(text) : len(text) + 1]


class Reader:
    """Reads a pipe or a terminal, a bounded amount at a time, and passes on what arrives.

    ``waits_for_lines``: a line that has begun gets a moment to end.
    """

    def __init__(
        self, file: int, take: Callable[[bytes], object], *, waits_for_lines: bool = False
    ) -> None:
        self._take = take
        self.file = file
        self._waits_for_lines = waits_for_lines
        self._poll = select.poll()
        self._poll.register(file, select.POLLIN)
        self.is_open = True  # until all who could write to it are gone
        os.set_blocking(file, False)

    def read(self) -> bool:
        self._read_some()
        return self.is_open

    def drain(self) -> None:
        """Pass on all that has arrived, without waiting for anybody who may still write."""
        num_read = 0
        while self.is_open and num_read < _PIPE_NBYTES:
            nbytes = self._read_some()
            if not nbytes:
                return
            num_read += nbytes

    def close(self) -> None:
        os.close(self.file)

    def _read_some(self) -> int:
        data = self._read()
        if self._waits_for_lines:
            data = self._read_rest(data)
        if data:
            self._take(data)
        return len(data)

    def _read_rest(self, data: bytes) -> bytes:
        """Wait a moment for the end of a line; Python writes an unbuffered print word by word."""
        end = time.monotonic() + _REST_SECONDS
        while 0 < len(data) < FULL_BUFFER and data[-1:] != b"\n":
            left = end - time.monotonic()
            if left <= 0 or not self._poll.poll(1000 * left) or not (more := self._read()):
                break
            data += more
        return data

    def _read(self) -> bytes:
        try:
            data = os.read(self.file, _READ_NBYTES)
        except BlockingIOError:
            return b""
        except OSError as error:
            if error.errno != errno.EIO:  # how a terminal says that nobody has it open
                raise
            data = b""
        self.is_open = bool(data)
        return data
