# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sinks: what bytes are written to in the end. A sink that fails keeps the error and goes quiet."""

from __future__ import annotations

import codecs
import os
import select
from typing import Protocol, TextIO


class Sink(Protocol):
    """Something that takes all bytes it is given, or has an ``error``."""

    error: Exception | None

    def write(self, data: bytes) -> None:
        """Write all of it."""
        ...


class NullSink:
    """No place at all: a program may have no stdout."""

    error: Exception | None = None

    def write(self, data: bytes) -> None:
        """Forget it."""


class FileSink:
    """An open file, by its number."""

    def __init__(self, file: int) -> None:
        self._file = file
        self.error: Exception | None = None

    def write(self, data: bytes) -> None:
        """Write all of it, however many calls that takes."""
        rest = memoryview(data)
        while rest and self.error is None:
            try:
                rest = rest[os.write(self._file, rest) :]
            except BlockingIOError:
                self._wait_writable()
            except OSError as error:
                self.error = error

    def _wait_writable(self) -> None:
        """Wait; another program that shares the file may have made it one that does not wait."""
        poll = select.poll()
        poll.register(self._file, select.POLLOUT)
        poll.poll()


class TextSink:
    """A stream of Python's, such as a notebook's, that takes text only."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.error: Exception | None = None

    def write(self, data: bytes) -> None:
        """Write it as text; what ends within a character waits for the rest of that."""
        if self.error is not None:
            return
        try:
            self._stream.write(self._decoder.decode(data))
            self._stream.flush()
        except (OSError, ValueError) as error:  # ValueError: it has been closed
            self.error = error
