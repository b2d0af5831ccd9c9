# SPDX-License-Identifier: MIT OR Apache-2.0
"""Crew: the processes of one job on this host. They are started, watched and ended here.

Each rank is in a process group of its own: a Ctrl-C reaches the launcher alone, which decides, and
what a rank has started itself is ended along with it.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from ferrodist.config import SECRET_NBYTES, Launch, child_environment
from ferrodist.deadline import Deadline

_SHIM = Path(__file__).with_name("shim.py")
_POLL_SECONDS = 0.05  # between looks at processes that cannot be watched
KILL_SECONDS = 1.0  # from SIGTERM to SIGKILL


class Order(NamedTuple):
    """What to start as one rank: a command, the files it inherits, where its output goes."""

    command: Sequence[str]
    files: Sequence[int] = ()
    stdout: int | None = None
    stderr: int | None = None


class Rank:
    """A process that is one rank."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.process = process
        self.pidfd = _try_pidfd(process.pid)

    @property
    def exit_code(self) -> int:
        """What a shell would report for it."""
        code = self.process.returncode
        return 128 - code if code < 0 else code

    @property
    def how(self) -> str:
        """Complete the sentence 'rank 2 ...'."""
        code = self.process.returncode
        if code < 0:
            return f"was killed by {_signal_name(-code)}"
        return f"ended with exit code {code}"

    def send_signal(self, number: int) -> None:
        """Signal it, and what it has started."""
        # Not yet waited for, so the number cannot have become another process's.
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


class Crew:
    """All ranks of a new job. Leaving the context leaves none of them alive."""

    def __init__(self, orders: Sequence[Order]) -> None:
        self._selector = selectors.DefaultSelector()
        self.running: list[Rank] = []
        try:
            self.ranks = self._start(orders)
        except BaseException:
            self.close()
            raise

    def _start(self, orders: Sequence[Order]) -> list[Rank]:
        job = f"run-{os.getpid()}-{secrets.token_hex(8)}"
        secret = secrets.token_bytes(SECRET_NBYTES)
        num_threads = max(1, usable_cores() // len(orders))
        for number, order in enumerate(orders):
            secret_file = _pipe_with(secret)
            launch = Launch(number, len(orders), job, secret_file)
            try:
                rank = Rank(number, _start_process(order, launch, num_threads))
            finally:
                os.close(secret_file)
            self.running.append(rank)
            if rank.pidfd is not None:
                self._selector.register(rank.pidfd, selectors.EVENT_READ)
        return list(self.running)

    def watch(self, file: int, callback: Callable[[], bool]) -> None:
        """Call back, within ``wait``, whenever a file can be read, until that returns False."""
        self._selector.register(file, selectors.EVENT_READ, callback)

    def wait(self, seconds: float) -> list[Rank]:
        """Wait until something happens, but not longer; return the ranks that have ended."""
        if any(rank.pidfd is None for rank in self.running):
            seconds = min(seconds, _POLL_SECONDS)
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.data is not None and not key.data():
                self._selector.unregister(key.fileobj)
        ended = [rank for rank in self.running if rank.process.poll() is not None]
        for rank in ended:
            self._forget(rank)
        return ended

    def _forget(self, rank: Rank) -> None:
        self.running.remove(rank)
        if rank.pidfd is not None:
            self._selector.unregister(rank.pidfd)
            os.close(rank.pidfd)

    def send_signal(self, number: int) -> None:
        """Signal all that are running."""
        for rank in self.running:
            rank.send_signal(number)

    def stop(self) -> None:
        """End all that are running: SIGTERM and, soon after, SIGKILL."""
        self.send_signal(signal.SIGTERM)
        end = time.monotonic() + KILL_SECONDS
        while self.running and time.monotonic() < end:
            self.wait(end - time.monotonic())
        self._kill()

    def _kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        for rank in list(self.running):
            rank.process.wait()
            self._forget(rank)

    def close(self) -> None:
        """Kill what is still running."""
        self._kill()
        self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def sooner(one: Deadline, other: Deadline) -> Deadline:
    """Return the deadline that passes first."""
    return one if one.end < other.end else other


def usable_cores() -> int:
    """Count the cores this process may use."""
    return len(os.sched_getaffinity(0))


def _start_process(order: Order, launch: Launch, num_threads: int) -> subprocess.Popen[bytes]:
    # -I and -S: the shim needs no paths and no packages, and starts in half the time without.
    shim = [sys.executable, "-I", "-S", str(_SHIM), str(os.getpid())]
    return subprocess.Popen(
        [*shim, *order.command],
        pass_fds=[*order.files, launch.secret_fd],
        env=child_environment(launch, num_threads),
        stdin=subprocess.DEVNULL,  # a process in the background must not read from a terminal
        stdout=order.stdout,
        stderr=order.stderr,
        process_group=0,
    )


def _pipe_with(data: bytes) -> int:
    """Return the read end of a pipe that holds these few bytes and nothing more."""
    read, write = os.pipe()
    os.write(write, data)
    os.close(write)
    return read


def _try_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
