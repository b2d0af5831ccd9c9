# SPDX-License-Identifier: MIT OR Apache-2.0
"""WorkerGroup: the processes of one job on this host. They are started, watched and ended here.

Each rank is in a process group of its own: a Ctrl-C reaches only the launcher, which decides what
to do, and what a rank has started itself is ended along with it.
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
from typing import Generic, NamedTuple, Self, TypeVar

from ferrodist.deadline import Deadline
from ferrodist.launch.cores import share_cores, threads_per_rank
from ferrodist.launch.node_spec import FIRST_ATTEMPT, Attempt, NodeSpec
from ferrodist.rendezvous.find_job import run_variables
from ferrodist.rendezvous.watch import FinalError, StatusBoard, describe_exit

# -I and -S: it needs no paths and no packages, and starts in half the time without.
_SHIM = [sys.executable, "-I", "-S", str(Path(__file__).with_name("shim.py"))]
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# The ranks know what the last two mean, and the launcher goes on.
FORWARDED_SIGNALS = (*ENDING_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)
_POLL_SECONDS = 0.05  # between looks at processes that cannot be watched
KILL_SECONDS = 1.0  # from SIGTERM to SIGKILL


class StandardFiles(NamedTuple):
    """The standard streams of a process.

    ``has_terminal``: they are a terminal of its own, which is to be its controlling terminal.
    """

    stdin: int = subprocess.DEVNULL  # a process in the background must not read from a terminal
    stdout: int | None = None
    stderr: int | None = None
    has_terminal: bool = False


class ProcessSpec(NamedTuple):
    """What to start as one rank: a command, its standard streams, and other files it inherits."""

    command: Sequence[str]
    standard: StandardFiles = StandardFiles()
    inherited: Sequence[int] = ()


class ChildProcess:
    """A child process in a process group of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.pidfd = _try_pidfd(process.pid)

    def has_ended(self) -> bool:
        """Tell whether it has ended."""
        return self.process.poll() is not None

    def send_signal(self, number: int) -> None:
        """Signal it, and what it has started. Takes no lock: signal handlers call it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Release what belongs to it: it has ended."""
        if self.pidfd is not None:
            os.close(self.pidfd)


P = TypeVar("P", bound=ChildProcess)


class ProcessSet(Generic[P]):
    """Processes that are waited for together, and files that are read meanwhile."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.running: list[P] = []

    def add(self, process: P) -> None:
        """Wait for one more."""
        self.running.append(process)
        if process.pidfd is not None:
            self._selector.register(process.pidfd, selectors.EVENT_READ)

    def watch(self, file: int, callback: Callable[[], bool]) -> None:
        """Call back, within ``wait``, whenever a file can be read, until that returns False."""
        self._selector.register(file, selectors.EVENT_READ, callback)

    def wait(self, seconds: float) -> list[P]:
        """Wait until something happens, but not longer; return the processes that have ended."""
        if any(process.pidfd is None for process in self.running):
            seconds = min(seconds, _POLL_SECONDS)
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.data is not None and not key.data():
                self._selector.unregister(key.fileobj)
        ended = [process for process in self.running if process.has_ended()]
        for process in ended:
            self._forget(process)
        return ended

    def wait_for_all(self, seconds: float) -> None:
        """Wait until none is running, but not longer."""
        end = time.monotonic() + seconds
        while self.running and time.monotonic() < end:
            self.wait(end - time.monotonic())

    def send_signal(self, number: int) -> None:
        """Signal all that are running."""
        for process in self.running:
            process.send_signal(number)

    def close(self) -> None:
        """Kill what is still running."""
        self._kill()
        self._selector.close()

    def _kill(self) -> None:
        raise NotImplementedError

    def _forget(self, process: P) -> None:
        self.running.remove(process)
        if process.pidfd is not None:
            self._selector.unregister(process.pidfd)
        process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Worker(ChildProcess):
    """A process that is one rank."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], reaper: Reaper) -> None:
        super().__init__(process)
        self.rank = rank
        self._reaper = reaper
        self._is_to_end = False
        reaper.add(process.pid)

    @property
    def how(self) -> str:
        """Complete the sentence 'rank 2 ...'."""
        return describe_exit(self.process.returncode)

    def has_ended(self) -> bool:
        """Tell whether it has ended; if not well or not by itself, what it has started ends too."""
        if self.process.returncode is not None:
            return True
        # Looked at, not waited for: its pid cannot become another process's before we are done.
        try:
            end = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is None:
                return False
            if end.si_status != 0 or self._is_to_end:
                super().send_signal(signal.SIGKILL)
        except ChildProcessError:
            pass  # this program ignores SIGCHLD, so the kernel has waited, and told nobody
        self._reaper.remove(self.process.pid)
        self.process.wait()
        return True

    def send_signal(self, number: int) -> None:
        """Signal it, and what it has started. Takes no lock: signal handlers call it."""
        if self.process.returncode is None:
            is_ending = number in ENDING_SIGNALS or number == signal.SIGKILL
            self._is_to_end = self._is_to_end or is_ending
            super().send_signal(number)


class WorkerGroup(ProcessSet[Worker]):
    """The ranks of a new job, those of this host. Leaving the context leaves none alive.

    ``node`` says which they are, if they are not all.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        attempt: Attempt = FIRST_ATTEMPT,
        *,
        node: NodeSpec | None = None,
        binds: bool = False,
    ) -> None:
        super().__init__()
        self._node = NodeSpec.single(len(specs)) if node is None else node
        self._status_board = StatusBoard.create(self._node.world_size)
        self._reaper = Reaper()
        try:
            self._start(specs, attempt, binds)
        except BaseException:
            self.close()
            raise

    def _start(self, specs: Sequence[ProcessSpec], attempt: Attempt, binds: bool) -> None:
        node, size = self._node, len(specs)
        name, secret, master = node.job(attempt), node.secret_of_job(), node.master()
        all_cores = (share_cores(size) if binds else None) or [set()] * size
        for rank, spec, cores in zip(node.ranks, specs, all_cores, strict=True):
            secret_file = _pipe_with(secret)
            files = secret_file, self._status_board.file
            job = node.job_of(rank, name, secret)
            environment = node.environment(job, attempt, master, threads_per_rank(size))
            environment |= run_variables(job, *files)
            try:
                process = _start_process(spec, files, environment, cores)
            finally:
                os.close(secret_file)
            self.add(Worker(rank, process, self._reaper))

    def final_error(self, rank: int) -> FinalError | None:
        """Return the error that a rank noted when its program raised, if it did."""
        return self._status_board.final_error(rank)

    def stop(self) -> list[Worker]:
        """End all that are running, by SIGTERM and, soon after, SIGKILL; return them."""
        stopped = list(self.running)
        self.send_signal(signal.SIGTERM)
        self.wait_for_all(KILL_SECONDS)
        self._kill()
        return stopped

    def close(self) -> None:
        """Kill what is still running."""
        super().close()
        self._reaper.close()
        self._status_board.close()

    def _forget(self, process: Worker) -> None:
        """Note how a process ended, for the others and for good."""
        self._status_board.set_exit_code(process.rank, process.process.returncode)
        super()._forget(process)

    def _kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        for worker in list(self.running):
            while not worker.has_ended():
                os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)
            self._forget(worker)


class Reaper:
    """A process that ends what ranks have started, should this one be killed by SIGKILL."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [*_SHIM, "reaper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """Say that a process group has begun."""
        self._write(f"+ {group}\n")

    def remove(self, group: int) -> None:
        """Say that one is over; must be said before its number can become another's."""
        self._write(f"- {group}\n")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it was killed; ranks still die with this process
            os.write(self._process.stdin.fileno(), line.encode())

    def close(self) -> None:
        """End it by a message: another process may have inherited the pipe, and keep it open."""
        assert self._process.stdin is not None
        self._write("quit\n")
        self._process.stdin.close()
        try:
            self._process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def standard_files_taken() -> Iterator[None]:
    """Keep descriptors 0 to 2 taken, if they are free: files for ranks must not get them."""
    with ExitStack() as stack:
        while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
            stack.callback(os.close, file)
        os.close(file)
        yield


def sooner(one: Deadline, other: Deadline) -> Deadline:
    """Return the deadline that passes first."""
    return one if one.end < other.end else other


def _start_process(
    spec: ProcessSpec, files: Sequence[int], environment: dict[str, str], cores: set[int]
) -> subprocess.Popen[bytes]:
    standard = spec.standard
    core_list = ",".join(map(str, sorted(cores)))
    terminal = "terminal" if standard.has_terminal else ""
    return subprocess.Popen(
        [*_SHIM, "rank", str(os.getpid()), core_list, terminal, *spec.command],
        pass_fds=[*spec.inherited, *files],
        env=environment,
        stdin=standard.stdin,
        stdout=standard.stdout,
        stderr=standard.stderr,
        process_group=None if standard.has_terminal else 0,
        start_new_session=standard.has_terminal,
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
