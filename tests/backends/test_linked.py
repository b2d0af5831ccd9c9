# SPDX-License-Identifier: MIT OR Apache-2.0
"""Backends whose ranks others connect: the example, a pump, an engine, and links that lie."""

from __future__ import annotations

import gc
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import ferrodist
from ferrodist import (
    Config,
    GroupAborted,
    InvalidArgument,
    ProtocolError,
    RankLost,
    RendezvousError,
)
from ferrodist.backends.linked import LinkedBackend
from ferrodist.call import Kind
from ferrodist.reduce_op import ReduceOp
from ferrodist.rendezvous import Job
from ferrodist.testing import contract_cases, run_contract
from jobs import QUICK

pytestmark = pytest.mark.timeout(150)

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_backend.py"


# -- the example, installed by its entry point -----------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Install the example as pip would, in a directory of its own."""
    site = tmp_path / "site"
    facts = site / "own_backend-1.0.dist-info"
    facts.mkdir(parents=True)
    shutil.copy(EXAMPLE, site)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: own-backend\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[ferrodist.backends]\nsockets = own_backend:SocketsBackend\n"
    )
    return site


def run_program(site: Path, ranks: int, program: str) -> subprocess.CompletedProcess[str]:
    script = site.parent / "program.py"
    script.write_text(textwrap.dedent(program))
    return subprocess.run(
        [sys.executable, "-m", "ferrodist", "run", "-n", str(ranks), str(script)],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )


@pytest.mark.slow
def test_the_example_keeps_the_contract_where_no_extra_is_installed(installed: Path) -> None:
    """As docs/own_backend.md tells its readers to try it."""
    done = run_program(
        installed,
        3,
        """
        import sys

        for name in ("torch", "jax", "jaxlib", "cupy", "ml_dtypes", "optax", "mpi4py", "ray"):
            sys.modules[name] = None
        import ferrodist
        from ferrodist.testing import contract_cases, run_contract

        backend = ferrodist.init("sockets")
        assert type(backend).__name__ == "SocketsBackend"
        report = run_contract(backend, contract_cases(backend.world_size, in_order=False)[::2])
        print(report, flush=True)
        sys.exit(not report.is_clean)
        """,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("none failed") == 3
    assert "Traceback" not in done.stderr


def test_the_example_is_among_the_names_of_backends(installed: Path) -> None:
    code = "from ferrodist.backends.registry import backend_names; print(backend_names())"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    output = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert "'sockets'" in output


# -- the example and its links as pipes, in processes ----------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["sockets", "pipes"])
def test_links_of_others_keep_the_contract(start_linked_job: Any, name: str, world: int) -> None:
    def body(backend: Any, pipe: Any) -> Any:
        return run_contract(backend, contract_cases(world, in_order=False)[world % 2 :: 2])

    with start_linked_job(name, world, body) as job:
        reports = [rank.hear(140).result for rank in job]
    assert all(report is not None and report.is_clean for report in reports), "\n".join(
        map(str, reports)
    )


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("name", ["sockets", "pipes"])
def test_links_of_others_keep_the_whole_contract(
    start_linked_job: Any, name: str, world: int
) -> None:
    def body(backend: Any, pipe: Any) -> Any:
        return run_contract(backend, contract_cases(world, in_order=False))

    with start_linked_job(name, world, body) as job:
        reports = [rank.hear(580).result for rank in job]
    assert all(report is not None and report.is_clean for report in reports)


@pytest.mark.parametrize("name", ["sockets", "pipes"])
def test_a_killed_rank_is_named_on_the_others_who_go_on(start_linked_job: Any, name: str) -> None:
    def body(backend: Any, pipe: Any) -> Any:
        backend.barrier()
        pipe.send("ready")

        def go_on() -> None:
            while True:
                backend.allreduce(np.ones(50_000), timeout=60)

        with pytest.raises(RankLost, match="SIGKILL") as caught:
            go_on()
        assert caught.value.rank == 1
        when = time.monotonic()
        with pytest.raises(RankLost):
            backend.send(1, 1)
        peer = 1 - backend.split([0, 2]).rank
        group = backend.split([0, 2])
        return when, group.sendrecv(backend.rank, peer, peer), group.allreduce(backend.rank)

    with start_linked_job(name, 3, body) as job:
        for rank in job:
            assert rank.hear() == "ready"
        killed = time.monotonic()
        job[1].send_signal(signal.SIGKILL)
        ends = [rank.end() for rank in job.others(1)]
    assert [end.result[1:] for end in ends] == [(2, 2), (0, 2)]
    assert max(end.result[0] for end in ends) - killed < 2


def test_a_stopped_rank_is_found_by_its_heartbeat(start_linked_job: Any) -> None:
    def body(backend: Any, pipe: Any) -> Any:
        backend.barrier()
        pipe.send("ready")
        if backend.rank == 1:
            time.sleep(60)  # until it is killed: it is stopped meanwhile
        with pytest.raises(RankLost, match="no heartbeat") as caught:
            backend.barrier()
        return caught.value.rank

    with start_linked_job("sockets", 3, body, **QUICK) as job:
        for rank in job:
            assert rank.hear() == "ready"
        job[1].send_signal(signal.SIGSTOP)
        assert [rank.end().result for rank in job.others(1)] == [1, 1]


def test_calls_take_the_path_through_native_code(start_linked_job: Any) -> None:
    def body(backend: Any, pipe: Any) -> Any:
        x = np.ones(3)
        backend.allreduce(x)
        counts = []
        for _ in range(20):  # in a long wait Python is asked
            calls: list[Any] = []
            sys.setprofile(
                lambda frame, event, what, calls=calls: event == "call" and calls.append(frame)
            )
            backend.allreduce(x)
            sys.setprofile(None)
            counts.append(len(calls))
        return min(counts)

    with start_linked_job("sockets", 2, body) as job:
        assert max(job.results()) <= 3


# -- links that lie, on threads --------------------------------------------------------------------


class Wired(LinkedBackend):
    """Its links are made before, and kept here by rank and peer."""

    wires: ClassVar[dict[tuple[int, int], Any]] = {}

    @classmethod
    def connect(cls, job: Job, config: Config) -> list[Any]:
        return [cls.wires.get((job.rank, peer)) for peer in range(job.world_size)]


def wire_up(world: int) -> dict[tuple[int, int], Any]:
    wires: dict[tuple[int, int], Any] = {}
    for low, high in itertools.combinations(range(world), 2):
        wires[low, high], wires[high, low] = socket.socketpair()
    return wires


def job_of(rank: int, world: int, secret: bytes = bytes(range(32))) -> Job:
    return Job("wired", rank, world, secret)


def on_threads(world: int, fn: Callable[[int], Any]) -> list[Any]:
    """Run ``fn(rank)`` on threads; return results, or errors."""

    def one(rank: int) -> Any:
        try:
            return fn(rank)
        except ferrodist.DistributedError as error:
            return error

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(one, range(world), timeout=60))


def join_all(
    wires: dict[tuple[int, int], Any], world: int, ranks: list[int] | None = None, **settings: Any
) -> list[Any]:
    config = Config(**{"join_timeout": 10.0, "heartbeat": 0.1, **settings})

    class Here(Wired):
        pass

    Here.wires = wires
    chosen = list(range(world)) if ranks is None else ranks
    joined = on_threads(len(chosen), lambda i: Here.join(job_of(chosen[i], world), config=config))
    for wire in wires.values():
        if isinstance(wire, socket.socket):
            wire.close()
    return joined


def test_ranks_that_are_wired_up_well_join() -> None:
    backends = join_all(wire_up(3), 3)
    assert on_threads(3, lambda rank: backends[rank].allreduce(rank)) == [3, 3, 3]
    on_threads(3, lambda rank: backends[rank].close())


def test_a_link_that_leads_to_another_rank_is_refused_at_both_ends() -> None:
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    wires = wire_up(3)
    wires[0, 1], wires[0, 2] = wires[0, 2], wires[0, 1]
    errors = join_all(wires, 3)
    assert len(os.listdir("/proc/self/fd")) <= files
    assert all(isinstance(error, (ProtocolError, RendezvousError)) for error in errors)
    assert isinstance(errors[0], ProtocolError)
    there, other = errors[0].rank, 3 - errors[0].rank
    assert there in (1, 2)
    text = str(errors[0])
    assert f"the link of rank 0 to rank {there} does not lead there" in text
    assert f"rank {other} of 3 is at its other end, expected rank {there} of 3" in text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_link_with_bytes_of_a_stranger_is_refused(rank: int) -> None:
    wires = wire_up(2)
    stranger = wires[1 - rank, rank]
    stranger.sendall(random.Random(rank).randbytes(500))
    (error,) = join_all({(rank, 1 - rank): wires[rank, 1 - rank]}, 2, [rank])
    stranger.close()
    assert isinstance(error, ProtocolError)
    assert error.rank == 1 - rank


@pytest.mark.parametrize("rank", [0, 1])
def test_a_link_that_has_ended_or_stays_silent_names_its_rank(rank: int) -> None:
    for is_silent in (False, True):
        wires = wire_up(2)
        other = wires[1 - rank, rank]
        if not is_silent:
            other.close()
        found = {(rank, 1 - rank): wires[rank, 1 - rank]}
        (error,) = join_all(found, 2, [rank], join_timeout=0.3)
        other.close()
        assert isinstance(error, RendezvousError)
        assert error.rank == 1 - rank
        how = "stayed silent for 0.3 s" if is_silent else "ended while the two shook hands"
        assert how in str(error)


def test_a_rank_that_stays_silent_is_the_one_that_all_others_name() -> None:
    wires = wire_up(4)
    silent = [wires.pop((1, peer)) for peer in (0, 2, 3)]
    errors = join_all(wires, 4, [0, 2, 3], join_timeout=1.0)
    for wire in silent:
        wire.close()
    assert all(isinstance(error, RendezvousError) for error in errors)
    assert [error.rank for error in errors] == [1, 1, 1]


class Spoiled:
    """A stream over a socket, which raises what no socket does when it is told to."""

    def __init__(self, link: socket.socket) -> None:
        self.link, self.is_spoiled = link, False

    def read(self) -> bytes:
        data = self.link.recv(1 << 16)
        if self.is_spoiled:
            raise ValueError("read of closed file")
        return data

    def write(self, data: memoryview) -> None:
        if self.is_spoiled:
            raise ValueError("write to closed file")
        self.link.sendall(data)

    def close(self) -> None:
        with suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)


def test_a_stream_that_fails_in_a_way_of_its_own_is_a_link_that_ends() -> None:
    wires = wire_up(2)
    streams = [Spoiled(wires[0, 1]), Spoiled(wires[1, 0])]
    backends = join_all({(0, 1): streams[0], (1, 0): streams[1]}, 2)
    assert on_threads(2, lambda rank: backends[rank].allreduce(rank)) == [1, 1]
    streams[0].is_spoiled = True
    begin = time.monotonic()
    errors = on_threads(
        2, lambda rank: [backends[rank].allreduce(np.ones(3), timeout=30) for _ in range(9)]
    )
    assert all(isinstance(error, (RankLost, GroupAborted)) for error in errors)
    assert time.monotonic() - begin < 5
    on_threads(2, lambda rank: backends[rank].close())
    for stream in streams:
        stream.link.close()


def test_ranks_of_another_secret_are_refused() -> None:
    wires = wire_up(2)
    config = Config(join_timeout=5.0)

    class Here(Wired):
        pass

    Here.wires = wires
    errors = on_threads(
        2, lambda rank: Here.join(job_of(rank, 2, bytes([rank]) * 32), config=config)
    )
    assert isinstance(errors[1], ProtocolError)
    assert "does not know its secret" in str(errors[1])
    assert isinstance(errors[0], (ProtocolError, RendezvousError))


@pytest.mark.parametrize(
    "links", [[], [None, None], [None], [socket.socket, None], [None, socket.socket, None]]
)
def test_what_connect_returns_is_looked_at(links: list[Any]) -> None:
    made = [one and one(socket.AF_UNIX) for one in links]

    class Here(LinkedBackend):
        @classmethod
        def connect(cls, job: Job, config: Config) -> list[Any]:
            return made

    with pytest.raises(InvalidArgument, match=r"Here.connect\(\) on rank 0 of 2: expected a link"):
        Here.join(job_of(0, 2), config=Config())
    for one in made:
        if one is not None:
            one.close()


class Relay:
    """Stands between two ranks, and does what it likes with the bytes of one."""

    def __init__(self, wires: dict[tuple[int, int], Any]) -> None:
        self.ends = wires[0, 1], wires[1, 0]
        wires[0, 1], first = socket.socketpair()
        wires[1, 0], second = socket.socketpair()
        for end in self.ends:
            end.close()
        self.ends = first, second
        self.spoil: Callable[[bytes], bytes | None] = lambda data: data
        for source, sink in ((first, second), (second, first)):
            threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):  # one of the ranks has gone
            while data := source.recv(1 << 16):
                spoiled = self.spoil(data) if source is self.ends[0] else data
                if spoiled is None:
                    break
                sink.sendall(spoiled)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in self.ends:
            end.close()


@pytest.mark.parametrize("how", ["garbage", "flipped", "short", "repeated"])
def test_a_link_that_spoils_what_it_carries_is_named(how: str) -> None:
    wires = wire_up(2)
    relay = Relay(wires)
    backends = join_all(wires, 2)
    assert on_threads(2, lambda rank: backends[rank].allreduce(rank)) == [1, 1]
    relay.spoil = {
        "garbage": lambda data: bytes(len(data)),
        "flipped": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        "short": lambda data: None,
        "repeated": lambda data: data + data,
    }[how]  # type: ignore[assignment]  # of different lambdas
    errors = on_threads(
        2, lambda rank: [backends[rank].allreduce(np.ones(99), timeout=20) for _ in range(3)]
    )
    expected = RankLost if how == "short" else ProtocolError
    assert isinstance(errors[1], expected)
    assert errors[1].rank == 0
    assert isinstance(errors[0], (RankLost, ProtocolError, GroupAborted))
    on_threads(2, lambda rank: backends[rank].close())
    relay.close()


# -- an engine of a third party -------------------------------------------------------------------


class Adder:
    """Adds int64 on threads that share memory; ``log`` has what it was asked to do."""

    def __init__(self, place: dict[str, Any], rank: int, world: int) -> None:
        self.place, self.rank, self.world = place, rank, world
        self.log: list[Kind] = []

    def does(self, kind: Kind, dtype: Any, args: Any) -> bool:
        return kind is Kind.ALLREDUCE and args.op is ReduceOp.SUM and dtype.label == "int64"

    def prepare(self, kind: Kind, input: Any, output: Any, args: Any) -> Any:
        if not self.does(kind, input.dtype, args):
            return None

        def start() -> Any:
            self.log.append(kind)
            return Addition(self.place, self.rank, self.world, input, output)

        return start

    def bind(self, *facts: Any) -> None:
        return None


class Addition:
    def __init__(self, place: dict[str, Any], rank: int, world: int, x: Any, out: Any) -> None:
        self.place, self.world, self.out = place, world, out
        place.setdefault("parts", {})[rank] = np.frombuffer(x.memory, np.int64).copy()

    def wait(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while len(self.place["parts"]) < self.world:
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True

    def finish(self) -> None:
        self.out.memory[:] = sum(self.place["parts"].values()).tobytes()

    def abandon(self) -> None:
        pass


def test_an_engine_runs_what_it_does_of_large_arrays_and_no_more() -> None:
    place: dict[str, Any] = {}

    class WithAdder(Wired):
        def open_engine(self) -> Any:
            return Adder(place, self.rank, self.world_size)

    WithAdder.wires = wire_up(3)
    config = Config(join_timeout=10.0)
    backends = on_threads(3, lambda rank: WithAdder.join(job_of(rank, 3), config=config))

    def body(rank: int) -> list[Kind]:
        backend = backends[rank]
        large, small = np.full(10_000, rank), np.full(10, rank)
        assert backend.allreduce(large)[-1] == 3
        assert backend.allreduce(small)[-1] == 3
        assert backend.allreduce(large * 1.5)[-1] == 4.5
        assert backend.allreduce(large, op="max")[-1] == 2
        assert backend.allreduce(large, algorithm="ring")[-1] == 3
        with pytest.raises(ferrodist.CollectiveMismatch):
            backend.allreduce(large[rank:])
        backend.close()
        return list(backend_log[rank])

    backend_log = [backend.engine.log for backend in backends]
    assert on_threads(3, body) == [[Kind.ALLREDUCE]] * 3
