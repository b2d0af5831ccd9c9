# SPDX-License-Identifier: MIT OR Apache-2.0
"""Pump: a socket for a byte stream that is none, as a pipe, a queue or a library's channel.

Native code reads and writes sockets. A pump has a pair of them: one is for native code, and two
threads move bytes between the other and the stream.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

from ferrodist.deadline import Deadline

logger = logging.getLogger("ferrodist")

_CHUNK_NBYTES = 1 << 18
_LINGER_SECONDS = 0.5  # to read what has come on a stream that takes nothing more


class Stream(Protocol):
    """Bytes to and from one rank, in order; ``read`` and ``write`` are called by two threads."""

    def read(self) -> bytes | memoryview:
        """Wait for some bytes; empty, or any exception, at the end."""

    def write(self, data: memoryview) -> None:
        """Write all of it; may wait. Any exception says that it has failed."""

    def close(self) -> None:
        """End both directions: what was written arrives, and a ``read`` that waits returns."""


class Pump:
    """Moves the bytes of one stream; ``socket`` is the end for native code."""

    def __init__(self, stream: Stream) -> None:
        self.socket, self._inner = socket.socketpair()
        self._stream = stream
        self._has_read = threading.Event()  # all there is
        self._writer = threading.Thread(target=self._write, name="ferrodist-pump", daemon=True)
        self._reader = threading.Thread(target=self._read, name="ferrodist-pump", daemon=True)
        self._writer.start()
        self._reader.start()

    def finish(self, deadline: Deadline) -> None:
        """Wait until all is written, when native code has closed its end."""
        self._writer.join(deadline.timeout())

    def _write(self) -> None:
        """Write what native code sends, until it closes its end; then end the stream."""
        is_up = True
        try:
            while data := self._inner.recv(_CHUNK_NBYTES):
                if is_up and not self._try(partial(self._stream.write, memoryview(data))):
                    is_up = False  # what has come may still be read
                    self._has_read.wait(_LINGER_SECONDS)
                    self._try(self._stream.close)
        except OSError:
            pass  # native code has gone
        finally:
            if is_up:
                self._try(self._stream.close)

    def _read(self) -> None:
        try:
            self._try(self._read_all)
        finally:
            self._has_read.set()
            with suppress(OSError):  # native code has read all and finds the end
                self._inner.shutdown(socket.SHUT_WR)
            self._writer.join()
            self._inner.close()

    def _read_all(self) -> None:
        while data := self._stream.read():
            self._inner.sendall(data)

    def _try(self, act: Callable[[], None]) -> bool:
        """Do something with the stream; a failure of any class is its end, and is logged."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 -- somebody else's code
            logger.debug("a link has ended: %r", error)
            return False
        return True
