# SPDX-License-Identifier: MIT OR Apache-2.0
"""Pump: a socket for a byte stream that is none, as a pipe, a queue or a library's channel.

Native code reads and writes sockets. A pump has a pair of them: one is for native code, and two
threads move bytes between the other and the stream.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Protocol

from ferrodist.deadline import Deadline

_CHUNK_NBYTES = 1 << 18


class Stream(Protocol):
    """Bytes to and from one rank, in order; ``read`` and ``write`` are called by two threads."""

    def read(self) -> bytes | memoryview:
        """Wait for some bytes; empty at the end. Raises OSError or EOFError if it has failed."""

    def write(self, data: memoryview) -> None:
        """Write all of it; may wait. Raises OSError if it has failed."""

    def close(self) -> None:
        """End both directions: what was written arrives, and a ``read`` that waits returns."""


class Pump:
    """Moves the bytes of one stream; ``socket`` is the end for native code."""

    def __init__(self, stream: Stream) -> None:
        self.socket, self._inner = socket.socketpair()
        self._stream = stream
        self._writer = threading.Thread(target=self._write, name="ferrodist-pump", daemon=True)
        self._reader = threading.Thread(target=self._read, name="ferrodist-pump", daemon=True)
        self._writer.start()
        self._reader.start()

    def finish(self, deadline: Deadline) -> None:
        """Wait until all is written, when native code has closed its end."""
        self._writer.join(deadline.timeout())

    def _write(self) -> None:
        with suppress(OSError):
            while data := self._inner.recv(_CHUNK_NBYTES):
                self._stream.write(memoryview(data))
        with suppress(OSError):
            self._stream.close()

    def _read(self) -> None:
        with suppress(OSError, EOFError):
            while data := self._stream.read():
                self._inner.sendall(data)
        with suppress(OSError):  # native code has read all and finds the end
            self._inner.shutdown(socket.SHUT_WR)
        self._writer.join()
        self._inner.close()
