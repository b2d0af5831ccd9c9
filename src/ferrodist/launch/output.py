# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where the ranks of ``ferrodist.run`` write: straight to where this process writes, if it can be.

A notebook's streams are no files; there the ranks write into a pipe, and what comes out of it is
written to the stream line by line.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TextIO

from ferrodist.launch.processes import Crew

_MOST_NBYTES = 1 << 16


class Output:
    """One stream of this process as the ranks see it; ``file`` is what they write to."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._pipe: Pipe | None = None
        try:
            stream.flush()
            self.file = stream.fileno()
        except (AttributeError, OSError, ValueError):
            self._pipe = Pipe(self._write)
            self.file = self._pipe.end
        self._line = b""

    def attach(self, crew: Crew) -> None:
        """Begin to write what ranks write."""
        if self._pipe is not None:
            self._pipe.attach(crew)

    def close(self) -> None:
        """Write what is left."""
        if self._pipe is not None:
            self._pipe.close()
            self._write(b"\n" if self._line else b"")

    def _write(self, data: bytes) -> None:
        """Write whole lines; the ranks share the pipe and would get mixed otherwise."""
        lines, newline, rest = (self._line + data).rpartition(b"\n")
        self._line = rest
        if newline:
            self._stream.write((lines + newline).decode(errors="replace"))
            self._stream.flush()


class Pipe:
    """A pipe into this process; hands on what arrives, as it arrives."""

    def __init__(self, take: Callable[[bytes], object]) -> None:
        self._take = take
        self._file, self.end = os.pipe()
        self._is_end_open = True
        os.set_blocking(self._file, False)

    def attach(self, crew: Crew) -> None:
        """Leave the write end to the crew, and read while it is waited for."""
        self._close_end()
        crew.watch(self._file, self.read)

    def read(self) -> bool:
        """Hand on all that has arrived; tell whether more can come."""
        while True:
            try:
                data = os.read(self._file, _MOST_NBYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._take(data)

    def close(self) -> None:
        """Hand on the rest, and wait for nobody who may still hold the write end."""
        self._close_end()
        self.read()
        os.close(self._file)

    def _close_end(self) -> None:
        if self._is_end_open:
            self._is_end_open = False
            os.close(self.end)
