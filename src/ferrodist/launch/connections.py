# SPDX-License-Identifier: MIT OR Apache-2.0
"""Connections: one ssh per host, at whose other end a launcher runs the ranks of that host.

A launcher there ends when its standard input does. So it is enough to close that, or to be killed:
nothing is left behind on any host.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from ferrodist.launch.hosts import Host
from ferrodist.launch.output.host_streams import HostStreams
from ferrodist.launch.processes import KILL_SECONDS
from ferrodist.launch.signals import HANDED_ON

_LEAVE_SECONDS = KILL_SECONDS + 2.0  # for a launcher to end its ranks, and for the network
_POLL_SECONDS = 0.05  # between looks at processes that cannot be watched


class Connection:
    """A host, and the ssh that leads there."""

    def __init__(
        self, host: Host, command: Sequence[str], secret: bytes, streams: HostStreams
    ) -> None:
        self.host = host
        self.streams = streams
        read, self._stdin = os.pipe()
        os.set_blocking(self._stdin, False)  # a signal handler writes to it
        try:
            os.write(self._stdin, secret)
            stdout, stderr = streams.files
            # A Ctrl-C is for this process, which decides.
            self.process = subprocess.Popen(
                command, stdin=read, stdout=stdout, stderr=stderr, process_group=0
            )
        except BaseException:
            os.close(self._stdin)
            raise
        finally:
            os.close(read)
        self.pidfd = _try_pidfd(self.process.pid)

    def send_signal(self, number: int) -> None:
        """Have the launcher there signalled. Takes no lock: signal handlers call it."""
        if self._stdin >= 0:
            with suppress(BrokenPipeError, BlockingIOError):
                os.write(self._stdin, bytes([number]))

    def let_go(self) -> None:
        """Have the launcher there end its ranks at once, and itself."""
        if self._stdin >= 0:
            file, self._stdin = self._stdin, -1
            os.close(file)

    def has_ended(self) -> bool:
        """Tell whether ssh has ended."""
        return self.process.poll() is not None

    def send_to_ssh(self, number: int) -> None:
        """Signal ssh itself, and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Forget it: it has ended."""
        self.let_go()
        if self.pidfd is not None:
            os.close(self.pidfd)


class Connections:
    """All hosts of a job. Leaving the context leaves none of the ssh alive."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.running: list[Connection] = []

    def add(self, one: Connection) -> None:
        """Wait for one more, and read what it writes."""
        self.running.append(one)
        one.streams.attach(self)
        if one.pidfd is not None:
            self._selector.register(one.pidfd, selectors.EVENT_READ)

    def watch(self, file: int, callback: Callable[[], bool]) -> None:
        """Call back, within ``wait``, whenever a file can be read, until that returns False."""
        self._selector.register(file, selectors.EVENT_READ, callback)

    def wait(self, seconds: float) -> list[Connection]:
        """Wait until something happens, but not longer; return those that have ended."""
        if any(one.pidfd is None for one in self.running):
            seconds = min(seconds, _POLL_SECONDS)
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.data is not None and not key.data():
                self._selector.unregister(key.fileobj)
        ended = [one for one in self.running if one.has_ended()]
        for one in ended:
            self._forget(one)
        return ended

    def send_signal(self, number: int) -> None:
        """Hand a signal on to all ranks of all hosts, if it is one that travels."""
        if number in HANDED_ON:
            for one in self.running:
                one.send_signal(number)

    def stop(self) -> None:
        """End all hosts that are running, and wait for it; not for ever."""
        for one in self.running:
            one.let_go()
        self._wait_for_all(_LEAVE_SECONDS)
        self._kill()

    def _wait_for_all(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.running and time.monotonic() < end:
            self.wait(end - time.monotonic())

    def _kill(self) -> None:
        """End every ssh that is left; the launcher at its other end then ends by itself."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for one in self.running:
                one.send_to_ssh(number)
            self._wait_for_all(KILL_SECONDS)
        for one in list(self.running):
            one.process.wait()
            self._forget(one)

    def _forget(self, one: Connection) -> None:
        self.running.remove(one)
        if one.pidfd is not None:
            self._selector.unregister(one.pidfd)
        one.close()
        one.streams.retire()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one in self.running:
            one.let_go()
        self._kill()
        self._selector.close()


def _try_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
