"""Jobs: ranks that are processes in the hands of a test, which signals them and talks to them.

A *nursery* has processes that have imported what ranks need and fork them: a job of three ranks
starts in some milliseconds instead of a second. Each rank has a pipe to the test.

The fixtures of tests/conftest.py start jobs: ``start_job(3, fn, **environment)`` on shared memory,
``start_tcp_job(3, fn, ...)`` on TCP, ``start_hybrid_job("0011", fn, ...)`` on both, where the
letters say which host a rank pretends to be on, and ``start(3, fn, ...)`` on each of the three in
turn. A variable of one rank alone has that rank's number before its name:
``**{"1:FERRODIST_EXECUTOR": "python"}``.
"""

from __future__ import annotations

import gc
import os
import pickle
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Self

import cloudpickle
import pytest  # noqa: F401 -- as the next: what the files with the ranks' functions import

import ferrodist
import ferrodist.testing.contract
from ferrodist.backends.hybrid import HybridBackend
from ferrodist.backends.registry import backend_class
from ferrodist.backends.shared_memory import SharedMemoryBackend
from ferrodist.backends.tcp import TcpBackend
from ferrodist.rendezvous import Job as Place
from linked_backends import PipesBackend, SocketsBackend
from templates import Template

LIMIT = 30.0  # seconds after which a rank that says nothing fails the test
QUICK = {"FERRODIST_HEARTBEAT": "0.2", "FERRODIST_HEARTBEAT_TIMEOUT": "1"}
SMALL_PIECES = {"FERRODIST_MESSAGE_NBYTES": "4096", "FERRODIST_CHUNK_NBYTES": "16384"}

BACKENDS = {
    "shared_memory": SharedMemoryBackend,
    "tcp": TcpBackend,
    "hybrid": HybridBackend,
    "sockets": SocketsBackend,
    "pipes": PipesBackend,
}
USE_HEAVY = {"torch", "jax", "optax"}  # names in a file, or words in a function, that uses them


class End(NamedTuple):
    """How the function of a rank ended: with a result or an error, and when, by a common clock."""

    result: Any
    error: BaseException | None
    when: float
    trace: str = ""


class Nursery:
    """Forks ranks: those that use torch or JAX from a process that has imported both.

    It is large, and a fork copies its page tables: the others start in a third of the time.
    ``addresses`` are those of templates that are there already.
    """

    def __init__(self, addresses: dict[str, str] | None = None) -> None:
        self._addresses = addresses or {}
        self._templates: list[Template] = []
        self._servers: dict[str, RankServer] = {}

    def server_for(self, fn: bytes) -> RankServer:
        """Choose the process to fork for a pickled function."""
        kind = "heavy" if needs_heavy(fn) else "light"
        if kind not in self._addresses:
            self._templates.append(Template(is_heavy=kind == "heavy"))
            self._addresses[kind] = self._templates[-1].address
        if kind not in self._servers:
            self._servers[kind] = RankServer(self._addresses[kind])
        return self._servers[kind]

    def close(self) -> None:
        for one in [*self._servers.values(), *self._templates]:
            one.close()


def needs_heavy(fn: bytes) -> bool:
    """Guess whether a function imports what takes seconds: itself, what it calls, or its file."""
    words = {word.decode() for word in re.findall(rb"\w+", fn)}
    files = [vars(sys.modules[word]) for word in words & sys.modules.keys()]
    for names in files:
        for called in words & names.keys():
            words |= {*getattr(getattr(names[called], "__code__", None), "co_names", ())}
    uses = {*USE_HEAVY, "run_contract"}
    return bool(words & uses) or any(names.keys() & USE_HEAVY for names in files)


class RankServer:
    """A fork of a template, which forks ranks and ends with this process."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(address)
        socket.send_fds(self._socket, [b"output"], [1, 2])  # ranks write where we do

    def start(
        self, backend: str, task: Path, place: Place, environment: dict[str, str], pipe: int
    ) -> int:
        """Fork a rank and return its pid, which is its own until the next rank is started."""
        facts = (place.name, place.rank, place.world_size, place.secret)
        order = pickle.dumps((backend, str(task), facts, environment))
        socket.send_fds(self._socket, [order], [pipe])
        return int(self._socket.recv(100))

    def close(self) -> None:
        self._socket.close()


class Rank:
    """A process that is one rank, seen from the test."""

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.pipe = pipe

    def hear(self, seconds: float = LIMIT) -> Any:
        """Wait for what the rank says next."""
        assert self.pipe.poll(seconds), f"rank process {self.pid} says nothing"
        return self.pipe.recv()

    def tell(self, what: Any = "go") -> None:
        self.pipe.send(what)

    def send_signal(self, number: int) -> float:
        """Signal the process and return the time just before."""
        now = time.monotonic()
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)
        return now

    def has_ended(self, seconds: float = LIMIT) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def await_sleep(self) -> None:
        """Return when the rank's main thread sleeps: it waits for somebody."""
        end = time.monotonic() + LIMIT
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < end, "the rank never waits"

    def end(self) -> End:
        """Wait for the end of the rank's function."""
        return self.hear()

    def close(self) -> None:
        self.send_signal(signal.SIGKILL)
        assert self.has_ended()
        os.close(self.pidfd)
        self.pipe.close()


class Job:
    """Ranks that run ``fn(backend, pipe)``; leaving the context leaves none of them alive.

    ``world`` is their number, or a letter for each that says which host it pretends to be on.
    """

    def __init__(
        self,
        nursery: Nursery,
        backend: str,
        world: int | str,
        fn: Callable[[Any, Connection], Any],
        **environment: str,
    ) -> None:
        if isinstance(world, str):
            hosts = {f"{n}:FERRODIST_HOST_ID": f"pretended-{host}" for n, host in enumerate(world)}
            world, environment = len(world), environment | hosts
        self.ranks: list[Rank] = []
        self.name = f"test-{os.getpid()}-{secrets.token_hex(8)}"
        secret, pickled = secrets.token_bytes(32), cloudpickle.dumps(fn)
        server = nursery.server_for(pickled)
        task = os.memfd_create("test-task")
        try:
            os.write(task, cloudpickle.dumps((sys.path, pickled)))
            path = Path(f"/proc/{os.getpid()}/fd/{task}")
            for rank in range(world):
                ours, theirs = (Connection(one.detach()) for one in socket.socketpair())
                place = Place(self.name, rank, world, secret)
                pid = server.start(backend, path, place, environment, theirs.fileno())
                theirs.close()
                self.ranks.append(Rank(pid, ours))
            for rank in self.ranks:  # all have read what they are to do
                assert rank.hear() == "joined"
        except BaseException:  # Ctrl-C too: ranks that were started must not be left behind
            self.close()
            raise
        finally:
            os.close(task)

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def __iter__(self) -> Iterator[Rank]:
        return iter(self.ranks)

    def others(self, *ranks: int) -> list[Rank]:
        return [one for rank, one in enumerate(self.ranks) if rank not in ranks]

    def results(self, seconds: float = LIMIT) -> list[Any]:
        """Return what all ranks return; raise the first error there was."""
        ends = [rank.hear(seconds) for rank in self.ranks]
        failed = [(end.when, rank) for rank, end in enumerate(ends) if end.error is not None]
        for _, rank in sorted(failed):
            ends[rank].error.add_note(f"on rank {rank}\n{ends[rank].trace}")
            raise ends[rank].error
        return [end.result for end in ends]

    def errors(self) -> list[BaseException | None]:
        """Return the error of every rank, None where it went well."""
        return [rank.end().error for rank in self.ranks]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *about: object) -> None:
        self.close()


def error_and_time(call: Any, *args: Any) -> tuple[BaseException, float]:
    """Return the error a call ends with, and when it did."""
    try:
        call(*args)
    except BaseException as error:  # noqa: BLE001 -- whatever it is, the test looks at it
        return error, time.monotonic()
    raise AssertionError("nothing was raised")


def run_program(text: str, *launcher: str, **options: Any) -> Any:
    command = [sys.executable, *launcher, "-c", textwrap.dedent(text)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


# -- in the nursery, and in the ranks --------------------------------------------------------------


def be_a_template(listener: socket.socket, control: socket.socket, libraries: list[str]) -> None:
    """Fork a server for everybody who connects, until who has started this process is gone."""
    poll = select.poll()
    for one in (listener, control):
        poll.register(one, select.POLLIN)
    while control.fileno() not in dict(poll.poll()):
        orders, _ = listener.accept()
        for library in libraries:  # once, not in every rank
            import_module(library)
        gc.freeze()  # what is there now is no garbage: collections of ranks are quick
        if os.fork() == 0:
            listener.close()
            control.close()
            _, files, _, _ = socket.recv_fds(orders, 100, 2)
            for ours, file in zip((1, 2), files, strict=True):
                os.dup2(file, ours)
                os.close(file)
            serve(orders)
            os._exit(0)
        orders.close()
    with suppress(ChildProcessError):
        while True:  # the CPU time of ranks counts as this test run's
            os.wait()


def serve(orders: socket.socket) -> None:
    """Fork a rank for every order, until there is nobody to give any."""
    children: set[int] = set()
    while True:
        order, files, _, _ = socket.recv_fds(orders, 10_000, 1)
        # Only now: until here the test may have looked a pid up.
        children -= {pid for pid in children if os.waitpid(pid, os.WNOHANG)[0]}
        if not order:
            break
        child = os.fork()
        if child == 0:
            orders.close()
            be_a_rank(*pickle.loads(order), Connection(files[0]))
        os.close(files[0])
        children.add(child)
        orders.send(str(child).encode())
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def environment_of(rank: int, environment: dict[str, str]) -> dict[str, str]:
    """Choose the variables of a rank: those of all, and those with its number before the name."""
    own = {name: value for name, value in environment.items() if ":" not in name}
    for name, value in environment.items():
        number, colon, own_name = name.partition(":")
        if colon and int(number) == rank:
            own[own_name] = value
    return own


def be_a_rank(
    backend_name: str,
    task: str,
    facts: Sequence[Any],
    environment: dict[str, str],
    pipe: Connection,
) -> None:
    """Join the job, do the task, tell how it went, and be gone."""
    place = Place(*facts)
    os.environ.update(environment_of(place.rank, environment))
    sys.path[:], fn = pickle.loads(Path(task).read_bytes())
    body = pickle.loads(fn)
    kind: Any = BACKENDS.get(backend_name) or backend_class(backend_name)
    backend = kind.join(place)
    pipe.send("joined")
    try:
        end = End(body(backend, pipe), None, time.monotonic())
        backend._end()
    except BaseException as error:  # noqa: BLE001 -- the top of a rank: the test looks at it
        end = End(None, error, time.monotonic(), traceback.format_exc())
        with suppress(ferrodist.DistributedError):
            backend._fail(error)
    with suppress(OSError):
        pipe.send(end)
    os._exit(0)


if __name__ == "__main__":
    import jobs  # so that what is pickled here is known there by the same name

    files = [socket.socket(fileno=int(number)) for number in sys.argv[1:3]]
    jobs.be_a_template(*files, sys.argv[3:])
