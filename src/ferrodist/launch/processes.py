# SPDX-License-Identifier: MIT OR Apache-2.0
"""WorkerGroup: the processes of one job on this host. They are started, watched and ended here.

Their parent is a process of ours, the reaper, through which everything goes. Each rank is in a
process group of its own: a Ctrl-C reaches only the launcher, which decides what to do.
"""

from __future__ import annotations

import marshal
import os
import random
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from ferrodist.config import environment, variable
from ferrodist.deadline import Deadline
from ferrodist.launch.machine import share_cores, threads_per_rank
from ferrodist.launch.reaper import (
    ENDING_SIGNALS,
    EVERYTHING,
    KILL_LIMIT,
    LEAVE,
    RankSpec,
    descendants,
    files_of,
    name_of,
)
from ferrodist.rendezvous.find_job import mark_outer_jobs, run_variables
from ferrodist.rendezvous.job import SECRET_NBYTES, Endpoint, Job
from ferrodist.rendezvous.watch import FinalError, StatusBoard, describe_exit

# -I and -S: it needs no paths and no packages, and starts in half the time without.
_REAPER = [sys.executable, "-I", "-S", str(Path(__file__).with_name("reaper.py"))]
# The ranks know what the last two mean, and the launcher goes on.
FORWARDED_SIGNALS = (*ENDING_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)
_POLL_SECONDS = 0.05  # between looks at the reaper
_ORPHAN_POLL = 0.01
_REAPER_SECONDS = 2 * KILL_LIMIT
_EVENTS_NBYTES = 1 << 16  # as much as a pipe holds, so that lines come whole
KILL_SECONDS = 1.0  # from SIGTERM to SIGKILL
_LOOPBACK = "127.0.0.1"
_FREE_PORTS = range(20_000, 32_768)  # below those the kernel gives to outgoing connections

# What an outer torchrun has told its own workers, and would mislead ours.
# Of ranks that wait for one in a debugger, which may also stop its heartbeat.
_WITHOUT_LIMITS = {
    variable("timeout"): "none",
    variable("join_timeout"): "1e6",
    variable("heartbeat_timeout"): "1e6",
}
_NOT_OURS = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE")


# -- which ranks there are, and what each is told by its environment ------------------------------


class Attempt(NamedTuple):
    """Which start of the whole job this is, of how many at most."""

    restarts: int = 0
    most_restarts: int = 0


FIRST_ATTEMPT = Attempt()


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """The ranks of one host.

    ``sizes`` are the numbers of ranks of all hosts. A job on several hosts has an endpoint, which
    is where rank 0 listens; its name and its secret are the same on all of them. On one host the
    name and the secret are made here, new for every attempt. ``debug_rank`` is a rank that the user
    debugs: the others wait for it without a limit.
    """

    sizes: tuple[int, ...]
    node_rank: int = 0
    endpoint: Endpoint | None = None
    name: str = ""
    secret: bytes = field(default=b"", repr=False)
    debug_rank: int | None = None

    @property
    def num_ranks(self) -> int:
        return self.sizes[self.node_rank]

    @property
    def world_size(self) -> int:
        return sum(self.sizes)

    @property
    def ranks(self) -> range:
        first = sum(self.sizes[: self.node_rank])
        return range(first, first + self.num_ranks)

    def jobs(self, attempt: Attempt) -> list[Job]:
        """Return the assignment of each rank: one name on all hosts, another in every attempt."""
        name = f"{self.name}-{attempt.restarts}"
        if self.endpoint is None:
            name = f"run-{os.getpid()}-{secrets.token_hex(8)}"
        secret = self.secret or secrets.token_bytes(SECRET_NBYTES)
        return [
            Job(
                name,
                rank,
                self.world_size,
                secret,
                endpoint=self.endpoint,
                local_rank=local_rank,
                local_world_size=self.num_ranks,
            )
            for local_rank, rank in enumerate(self.ranks)
        ]

    def master(self) -> Endpoint:
        """Return where rank 0 of a torch program listens: at the port after ferrodist's."""
        if self.endpoint is None:
            return Endpoint(_LOOPBACK, _free_port())
        return Endpoint(self.endpoint.host, self.endpoint.port + 1)

    def environment(
        self, job: Job, attempt: Attempt, master: Endpoint, num_threads: int
    ) -> dict[str, str]:
        """Return the environment of a rank.

        ``master`` is where rank 0 of a torch program listens. Numerical libraries get
        ``num_threads`` threads, unless the user has chosen a number.
        """
        inherited = {name: value for name, value in environment().items() if name not in _NOT_OURS}
        rank, size = str(job.rank), str(job.world_size)
        return {
            "OMP_NUM_THREADS": str(num_threads),
            **(_WITHOUT_LIMITS if self.debug_rank is not None else {}),
            **inherited,
            **mark_outer_jobs(inherited),
            "RANK": rank,
            "LOCAL_RANK": str(job.local_rank),
            "ROLE_RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": str(job.local_world_size),
            "ROLE_WORLD_SIZE": size,
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(len(self.sizes)),
            "ROLE_NAME": "default",
            "MASTER_ADDR": master.host,
            "MASTER_PORT": str(master.port),
            "TORCHELASTIC_RUN_ID": job.name,
            "TORCHELASTIC_RESTART_COUNT": str(attempt.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(attempt.most_restarts),
        }


def random_port() -> int:
    """Choose a port for another host, from a range that is rarely used, with the next one free."""
    return random.choice(_FREE_PORTS[::2])


def _free_port() -> int:
    for port in random.sample(_FREE_PORTS, 100):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((_LOOPBACK, port))
            except OSError:
                continue
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])


# -- processes ------------------------------------------------------------------------------------


class StandardFiles(NamedTuple):
    """The standard streams of a process: descriptors above 2, or DEVNULL.

    ``has_terminal``: they are a terminal of its own, which is to be its controlling terminal.
    """

    stdin: int = subprocess.DEVNULL  # a process in the background must not read from a terminal
    stdout: int = subprocess.DEVNULL
    stderr: int = subprocess.DEVNULL
    has_terminal: bool = False


class ProcessSpec(NamedTuple):
    """What to start as one rank: a command, its standard streams, and other files it inherits."""

    command: Sequence[str]
    standard: StandardFiles = StandardFiles()
    inherited: Sequence[int] = ()


class _Awaited(Protocol):
    def has_ended(self) -> bool: ...


P = TypeVar("P", bound=_Awaited)


class ProcessSet(Generic[P]):
    """Processes that are waited for together, and files that are read meanwhile."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.running: list[P] = []

    def watch(self, file: int, callback: Callable[[], bool]) -> None:
        """Call back, within ``wait``, whenever a file can be read, until that returns False."""
        self._selector.register(file, selectors.EVENT_READ, callback)

    def wait(self, seconds: float) -> list[P]:
        """Wait until something happens, but not longer; return the processes that have ended."""
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.data is not None and not key.data():
                self._selector.unregister(key.fileobj)
        ended = [process for process in self.running if process.has_ended()]
        for process in ended:
            self._forget(process)
        return ended

    def send_signal(self, number: int) -> None:
        """Signal all that are running. Takes no lock: signal handlers call it."""
        raise NotImplementedError

    def close(self) -> None:
        self.kill()
        self._selector.close()

    def kill(self) -> None:
        """Kill what is still running, and wait for it."""
        raise NotImplementedError

    def _forget(self, process: P) -> None:
        self.running.remove(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Worker:
    """A process that is one rank."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.returncode: int | None = None  # minus a signal that killed it

    @property
    def how(self) -> str:
        assert self.returncode is not None
        return describe_exit(self.returncode)

    def has_ended(self) -> bool:
        return self.returncode is not None


class WorkerGroup(ProcessSet[Worker]):
    """The ranks of a new job, those of this host. Leaving the context leaves none alive.

    Nor does it leave anything that they have started, but for ``leave_children``. ``node`` says
    which they are, if they are not all. ``reaper.py`` says what is written to the reaper and what
    it reports.
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
        self._node = NodeSpec((len(specs),)) if node is None else node
        self._workers: dict[int, Worker] = {}  # by pid
        self._start_error = 0
        self.asked: dict[int, str] = {}  # what ranks had left, when ``terminate`` asked it to end
        self.stayed: dict[int, str] = {}  # what could not be ended
        self._status_board = StatusBoard.create(self._node.world_size)
        try:
            with ExitStack() as stack:
                self._start_reaper(self._rank_specs(specs, attempt, binds, stack))
        except BaseException:  # Ctrl-C too: nobody else closes them
            self._selector.close()
            self._status_board.close()
            raise
        try:
            self._wait_for_start([spec.command[0] for spec in specs])
        except BaseException:  # Ctrl-C too: ranks that were started must not be left behind
            self.close()
            raise

    def _rank_specs(
        self, specs: Sequence[ProcessSpec], attempt: Attempt, binds: bool, stack: ExitStack
    ) -> list[RankSpec]:
        """Return what each rank is started with; the stack closes the files made for it here."""
        node, size = self._node, len(specs)
        jobs, master = node.jobs(attempt), node.master()
        all_cores = (share_cores(size) if binds else None) or [set()] * size
        null = os.open(os.devnull, os.O_RDWR)
        stack.callback(os.close, null)
        found: list[RankSpec] = []
        for job, spec, cores in zip(jobs, specs, all_cores, strict=True):
            secret_file, write = os.pipe()
            os.write(write, job.secret)
            os.close(write)
            stack.callback(os.close, secret_file)
            files = secret_file, self._status_board.file
            environment = node.environment(job, attempt, master, threads_per_rank(size))
            environment |= run_variables(job, *files)
            *standard, has_terminal = spec.standard
            standard = [null if file == subprocess.DEVNULL else file for file in standard]
            inherited = [*spec.inherited, *files]
            command = list(spec.command)
            found.append((command, environment, standard, inherited, sorted(cores), has_terminal))
        return found

    def _start_reaper(self, specs: list[RankSpec]) -> None:
        files = {file for spec in specs for file in files_of(spec)}
        with ExitStack() as stack, ExitStack() as on_error:
            source = os.memfd_create("ferrodist-ranks")
            stack.callback(os.close, source)
            os.pwrite(source, marshal.dumps(specs), 0)
            commands, self._commands = os.pipe()
            self._events, events = os.pipe()
            for end in (commands, events):
                stack.callback(os.close, end)
            for end in (self._commands, self._events):
                on_error.callback(os.close, end)
                os.set_blocking(end, False)
            ends = source, commands, events
            self._reaper = subprocess.Popen(
                [*_REAPER, *map(str, [os.getpid(), *ends])],
                pass_fds=[*ends, *files],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # a Ctrl-C is for this process
            )
            on_error.pop_all()

    def _wait_for_start(self, programs: Sequence[str]) -> None:
        """Learn the pids of the ranks, or why one could not be started."""
        self.watch(self._events, self._read_events)
        while len(self._workers) < len(programs):
            self._selector.select(_POLL_SECONDS)
            has_ended = self.is_empty
            self._read_events()
            if self._start_error:
                program = programs[len(self._workers)]
                raise OSError(self._start_error, os.strerror(self._start_error), program)
            if has_ended and len(self._workers) < len(programs):
                how = describe_exit(self._reaper.returncode)
                raise ChildProcessError(f"the process that starts them {how}")

    def final_error(self, rank: int) -> FinalError | None:
        return self._status_board.final_error(rank)

    @property
    def is_empty(self) -> bool:
        """True if no rank is left, nor anything that ranks have started."""
        return self._reaper.poll() is not None

    def is_rank(self, pid: int) -> bool:
        return pid in self._workers

    @property
    def reaper_end(self) -> str | None:
        """How the reaper was killed, and the ranks with it; None if it was not."""
        code = self._reaper.poll()
        return f"(pid {self._reaper.pid}) {describe_exit(code)}" if code else None

    def end_orphans(self) -> None:
        """Kill what a reaper that was killed has left to this process, which is a subreaper.

        Fills ``asked`` and ``stayed`` as the reaper would.
        """
        end = time.monotonic() + KILL_LIMIT
        while left := self._take_orphans():
            if time.monotonic() > end:
                self.stayed = left
                return
            self.asked |= left
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_ORPHAN_POLL)

    def _take_orphans(self) -> dict[int, str]:
        """Take the ends of children that were adopted; name the processes that still run."""
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        found = {}
        for pid in descendants():
            with suppress(OSError):  # it has ended meanwhile
                found[pid] = name_of(pid)
        return found

    def wait(self, seconds: float) -> list[Worker]:
        if self.is_empty:  # its pipe need not say so: other processes may have inherited it
            self._read_events()
            for worker in self.running:
                if worker.returncode is None:  # the reaper was killed, and the rank with it
                    worker.returncode = -signal.SIGKILL
        return super().wait(seconds)

    def send_signal(self, number: int) -> None:
        """Signal all that are running, and what is in their process groups."""
        self._send(number)

    def _send(self, command: int) -> None:
        with suppress(BrokenPipeError, BlockingIOError):  # the reaper has ended, or is stopped
            os.write(self._commands, bytes([command]))

    def terminate(self) -> None:
        self._send(EVERYTHING + signal.SIGTERM)

    def leave_children(self) -> None:
        self._send(LEAVE)

    def stop(self, seconds: float = KILL_SECONDS) -> None:
        """End everything that is left, by SIGTERM and, so many seconds later, SIGKILL."""
        end = time.monotonic() + seconds
        self.terminate()
        while not self.is_empty and time.monotonic() < end:
            self.wait(min(_POLL_SECONDS, end - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        self._send(EVERYTHING + signal.SIGKILL)
        end = time.monotonic() + _REAPER_SECONDS
        while not self.is_empty:
            self.wait(_POLL_SECONDS)
            if time.monotonic() > end:
                self._reaper.kill()
        self.wait(0.0)

    def close(self) -> None:
        super().close()
        os.close(self._commands)
        os.close(self._events)
        self._status_board.close()

    def _forget(self, process: Worker) -> None:
        assert process.returncode is not None
        self._status_board.set_exit_code(process.rank, process.returncode)
        super()._forget(process)

    def _read_events(self) -> bool:
        """Take what the reaper reports; return whether more may come."""
        try:
            data = os.read(self._events, _EVENTS_NBYTES)
        except BlockingIOError:
            return True
        if not data:
            self._reaper.wait()  # it is about to end
        for line in data.decode(errors="replace").splitlines():
            what, pid, fact = line.split(" ", 2)
            self._take_event(what, int(pid), fact)
        return bool(data)

    def _take_event(self, what: str, pid: int, fact: str) -> None:
        if what == "started":
            rank = self._node.ranks[len(self._workers)]
            self._workers[pid] = Worker(rank, pid)
            self.running.append(self._workers[pid])
        elif what == "ended":
            self._workers[pid].returncode = os.waitstatus_to_exitcode(int(fact))
        elif what == "failed":
            self._start_error = int(fact)
        else:
            (self.asked if what == "asked" else self.stayed)[pid] = fact


@contextmanager
def standard_files_taken() -> Iterator[None]:
    """Keep descriptors 0 to 2 taken, if they are free: files for ranks must not get them."""
    with ExitStack() as stack:
        while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
            stack.callback(os.close, file)
        os.close(file)
        yield


def sooner(one: Deadline, other: Deadline) -> Deadline:
    return one if one.end < other.end else other
