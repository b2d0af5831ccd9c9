# SPDX-License-Identifier: MIT OR Apache-2.0
"""Crew: the processes of one job on this host. They are started, watched and ended here.

Each rank is in a process group of its own: a Ctrl-C reaches the launcher alone, which decides, and
what a rank has started itself is ended along with it.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from ferrodist.deadline import Deadline
from ferrodist.launch.cores import share_cores, threads_per_rank
from ferrodist.launch.environment import master_of, rank_environment
from ferrodist.launch.part import FIRST_ATTEMPT, Attempt, Part
from ferrodist.rendezvous.ends import Ends, LastWords, how_ended
from ferrodist.rendezvous.launch import Launch

# -I and -S: these need no paths and no packages, and start in half the time without.
_BARE_PYTHON = [sys.executable, "-I", "-S"]
_SHIM = [*_BARE_PYTHON, str(Path(__file__).with_name("shim.py"))]
_KEEPER = [*_BARE_PYTHON, str(Path(__file__).with_name("keeper.py"))]
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL)
_POLL_SECONDS = 0.05  # between looks at processes that cannot be watched
KILL_SECONDS = 1.0  # from SIGTERM to SIGKILL


class Order(NamedTuple):
    """What to start as one rank: a command, the files it inherits, and its standard streams.

    ``has_terminal``: its standard streams are a terminal of its own, which is to control it.
    """

    command: Sequence[str]
    files: Sequence[int] = ()
    stdin: int = subprocess.DEVNULL  # a process in the background must not read from a terminal
    stdout: int | None = None
    stderr: int | None = None
    has_terminal: bool = False


class Keeper:
    """A process that ends what ranks have started, should this one be killed without a word."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            _KEEPER, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def add(self, group: int) -> None:
        """Say that a process group has begun."""
        self._write(f"+ {group}\n")

    def remove(self, group: int) -> None:
        """Say that one is over; to be said before its number can become another's."""
        self._write(f"- {group}\n")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody killed it; ranks still die with this process
            os.write(self._process.stdin.fileno(), line.encode())

    def close(self) -> None:
        """End it; another process may have inherited the pipe, so it is told in words."""
        assert self._process.stdin is not None
        self._write("quit\n")
        self._process.stdin.close()
        try:
            self._process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Rank:
    """A process that is one rank."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], keeper: Keeper) -> None:
        self.rank = rank
        self.process = process
        self.pidfd = _try_pidfd(process.pid)
        self._keeper = keeper
        self._is_to_end = False
        keeper.add(process.pid)

    @property
    def how(self) -> str:
        """Complete the sentence 'rank 2 ...'."""
        return how_ended(self.process.returncode)

    def has_ended(self) -> bool:
        """Tell whether it has ended; if not well or not by itself, what it has started ends too."""
        if self.process.returncode is not None:
            return True
        # Looked at, not waited for: its number cannot become another process's before we are done.
        try:
            end = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is None:
                return False
            if end.si_status != 0 or self._is_to_end:
                self._signal_group(signal.SIGKILL)
        except ChildProcessError:
            pass  # this program ignores SIGCHLD, so the kernel has waited, and told nobody
        self._keeper.remove(self.process.pid)
        self.process.wait()
        return True

    def send_signal(self, number: int) -> None:
        """Signal it, and what it has started. Takes no lock: signal handlers call it."""
        if self.process.returncode is None:
            self._is_to_end = self._is_to_end or number in _ENDING
            self._signal_group(number)

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Crew:
    """The ranks of a new job, those of this host. Leaving the context leaves none alive.

    ``part`` says which they are, if they are not all.
    """

    def __init__(
        self,
        orders: Sequence[Order],
        attempt: Attempt = FIRST_ATTEMPT,
        *,
        part: Part | None = None,
        binds: bool = False,
    ) -> None:
        self._part = Part.whole(len(orders)) if part is None else part
        self._selector = selectors.DefaultSelector()
        self._ends = Ends.create(self._part.world_size)
        self._keeper = Keeper()
        self.running: list[Rank] = []
        try:
            self._start(orders, attempt, binds)
        except BaseException:
            self.close()
            raise

    def _start(self, orders: Sequence[Order], attempt: Attempt, binds: bool) -> None:
        part, size = self._part, len(orders)
        job, secret, master = part.job(attempt), part.secret_of_job(), master_of(part)
        all_cores = (share_cores(size) if binds else None) or [set()] * size
        for number, order, cores in zip(part.ranks, orders, all_cores, strict=True):
            secret_file = _pipe_with(secret)
            launch = part.launch(number, job, secret_file, self._ends.file)
            environment = rank_environment(launch, part, attempt, master, threads_per_rank(size))
            try:
                process = _start_process(order, launch, environment, cores)
            finally:
                os.close(secret_file)
            rank = Rank(number, process, self._keeper)
            self.running.append(rank)
            if rank.pidfd is not None:
                self._selector.register(rank.pidfd, selectors.EVENT_READ)

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
        ended = [rank for rank in self.running if rank.has_ended()]
        for rank in ended:
            self._forget(rank)
        return ended

    def _forget(self, rank: Rank) -> None:
        """Note how a process ended, for the others and for good."""
        self._ends.note(rank.rank, rank.process.returncode)
        self.running.remove(rank)
        if rank.pidfd is not None:
            self._selector.unregister(rank.pidfd)
            os.close(rank.pidfd)

    def last_words(self, rank: int) -> LastWords | None:
        """Return what a rank said when its program raised, if it did."""
        return self._ends.last_words(rank)

    def send_signal(self, number: int) -> None:
        """Signal all that are running."""
        for rank in self.running:
            rank.send_signal(number)

    def stop(self) -> list[Rank]:
        """End all that are running, by SIGTERM and, soon after, SIGKILL; return them."""
        stopped = list(self.running)
        self.send_signal(signal.SIGTERM)
        end = time.monotonic() + KILL_SECONDS
        while self.running and time.monotonic() < end:
            self.wait(end - time.monotonic())
        self._kill()
        return stopped

    def _kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        for rank in list(self.running):
            while not rank.has_ended():
                os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOWAIT)
            self._forget(rank)

    def close(self) -> None:
        """Kill what is still running."""
        self._kill()
        self._keeper.close()
        self._selector.close()
        self._ends.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def standard_files_taken() -> Iterator[None]:
    """Keep the numbers 0 to 2 taken, if they are free: what a rank inherits must not get them."""
    with ExitStack() as stack:
        while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
            stack.callback(os.close, file)
        os.close(file)
        yield


def sooner(one: Deadline, other: Deadline) -> Deadline:
    """Return the deadline that passes first."""
    return one if one.end < other.end else other


def _start_process(
    order: Order, launch: Launch, environment: dict[str, str], cores: set[int]
) -> subprocess.Popen[bytes]:
    shown_cores = ",".join(map(str, sorted(cores)))
    terminal = "terminal" if order.has_terminal else ""
    return subprocess.Popen(
        [*_SHIM, str(os.getpid()), shown_cores, terminal, *order.command],
        pass_fds=[*order.files, launch.secret_fd, launch.ends_fd],
        env=environment,
        stdin=order.stdin,
        stdout=order.stdout,
        stderr=order.stderr,
        process_group=None if order.has_terminal else 0,
        start_new_session=order.has_terminal,
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
