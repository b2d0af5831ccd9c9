# SPDX-License-Identifier: MIT OR Apache-2.0
"""Backends that others write: the example, installed, and providers that do as little as they may.

The example's ranks are processes; those of the provider here are threads, whose requests can only
be tested, and it never knows what has become of a rank.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import CollectiveMismatch, CollectiveTimeout, Evicted, GroupAborted, RankLost
from ferrodist.backends import registry
from ferrodist.backends.provider import Provider, RankStatus, Request
from ferrodist.backends.provider_backend import ProviderBackend
from ferrodist.backends.running_call import CollectiveArgs
from ferrodist.buffer import Buffer, DType
from ferrodist.call import Kind
from ferrodist.config import DefaultTimeout
from ferrodist.deadline import Deadline
from ferrodist.reduce_op import ReduceOp
from ferrodist.testing import contract_cases, run_contract

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


def keep_contract(site: Path, world: int, cases: str) -> None:
    done = run_program(
        site,
        world,
        f"""
        import sys, ferrodist
        from ferrodist.testing import contract_cases, run_contract

        backend = ferrodist.init("sockets")
        assert type(backend).__name__ == "SocketsBackend"
        report = run_contract(backend, {cases})
        print(report, flush=True)
        sys.exit(not report.is_clean)
        """,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("none failed") == world
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_example_keeps_the_contract(installed: Path) -> None:
    """With half of it, and without what takes seconds to import."""
    cases = "contract_cases(3, libraries=['numpy'])[::2]"
    keep_contract(installed, 3, f"[case for case in {cases} if case.detail != 'libraries']")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3])
def test_the_example_keeps_the_whole_contract(installed: Path, world: int) -> None:
    keep_contract(installed, world, f"contract_cases({world})")


def test_the_example_is_among_the_names_of_backends(installed: Path) -> None:
    code = "from ferrodist.backends.registry import backend_names; print(backend_names())"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    output = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert "'sockets'" in output


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_on_the_others(installed: Path) -> None:
    done = run_program(
        installed,
        3,
        f"""
        import os, ferrodist

        backend = ferrodist.init("sockets")
        backend.barrier()
        if backend.rank == 1:
            os.kill(os.getpid(), {int(signal.SIGKILL)})
        try:
            backend.allreduce(1, timeout=60)
        except ferrodist.RankLost as error:
            print("lost", error.rank, error.sequence, flush=True)
        try:
            backend.send(1, 1)
        except ferrodist.RankLost as error:
            print("gone", error.rank, flush=True)
        peer = 2 - backend.rank
        print("left", backend.sendrecv(backend.rank, peer, peer), flush=True)
        """,
    )
    assert done.stdout.count("lost 1 2") == 2, done.stdout + done.stderr
    assert done.stdout.count("gone 1") == 2
    assert {"left 2", "left 0"} <= {line.split(": ")[-1] for line in done.stdout.splitlines()}


# -- a provider that does as little as it may ------------------------------------------------------


class Hub:
    """What the ranks of a world of threads share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.messages: dict[Any, deque[bytes]] = defaultdict(deque)
        self.receives: dict[Any, deque[Receive]] = defaultdict(deque)


class Receive:
    def __init__(self, hub: Hub, memory: memoryview, key: Any) -> None:
        self._hub, self._memory, self._key = hub, memory, key
        self._is_done = False

    def take(self, data: bytes) -> None:
        fitting = data[: len(self._memory)]
        self._memory[: len(fitting)] = fitting
        self._is_done = True

    def test(self) -> bool:
        return self._is_done

    def cancel(self) -> bool:
        with self._hub.lock:
            if not self._is_done:
                self._hub.receives[self._key].remove(self)
            return not self._is_done


class Sent:
    def test(self) -> bool:
        return True

    def cancel(self) -> bool:
        return False


class ThreadsProvider:
    """Ranks are threads; ``allreduce`` of int64 is done here, all else is left to the base."""

    def __init__(self, hub: Hub, rank: int, world: int, group: tuple[Any, ...] = ()) -> None:
        self.rank = self.local_rank = rank
        self.world_size = self.local_world_size = world
        self.hub, self.group = hub, group
        self.kinds: list[Kind] = []
        self.aborted: list[str] = []
        self.is_closed = False
        self._splits: dict[tuple[int, ...], int] = defaultdict(int)

    def collective(
        self,
        kind: Kind,
        input: Buffer | None,
        output: Buffer | None,
        args: CollectiveArgs,
        deadline: Deadline,
    ) -> Any:
        self.kinds.append(kind)
        if kind is not Kind.ALLREDUCE or args.op is not ReduceOp.SUM:
            return NotImplemented
        assert input is not None
        assert output is not None
        if input.dtype is not DType.INT64:
            return NotImplemented
        mine = bytes(input.memory)
        for peer in range(self.world_size):
            if peer != self.rank:
                self.isend(memoryview(mine), peer, -1)
        total = np.frombuffer(mine, np.int64).copy()
        for peer in range(self.world_size):
            if peer != self.rank:
                memory = bytearray(len(mine))
                request = self.irecv(memoryview(memory), peer, -1)
                while not request.test():
                    if deadline.remaining() <= 0:
                        raise TimeoutError
                total += np.frombuffer(memory, np.int64)
        output.memory[:] = total.tobytes()
        return None

    def isend(self, data: memoryview, peer: int, tag: int) -> Request:
        assert not self.is_closed
        key = (self.group, self.rank, peer, tag)
        with self.hub.lock:
            if self.hub.receives[key]:
                self.hub.receives[key].popleft().take(bytes(data))
            else:
                self.hub.messages[key].append(bytes(data))
        return Sent()

    def irecv(self, memory: memoryview, peer: int, tag: int) -> Request:
        assert not self.is_closed
        key = (self.group, peer, self.rank, tag)
        request = Receive(self.hub, memory, key)
        with self.hub.lock:
            if self.hub.messages[key]:
                request.take(self.hub.messages[key].popleft())
            else:
                self.hub.receives[key].append(request)
        return request

    def iprobe(self, peer: int, tag: int) -> int | None:
        with self.hub.lock:
            found = self.hub.messages.get((self.group, peer, self.rank, tag))
            return len(found[0]) if found else None

    def split(self, ranks: Sequence[int]) -> ThreadsProvider:
        ranks = tuple(ranks)
        self._splits[ranks] += 1
        group = (self.group, ranks, self._splits[ranks])
        return ThreadsProvider(self.hub, ranks.index(self.rank), len(ranks), group)

    def abort(self, reason: str) -> None:
        self.aborted.append(reason)

    def close(self) -> None:
        self.is_closed = True

    def status(self, rank: int) -> RankStatus:
        return "unknown"


def run(world: int, fn: Callable[[Any], Any], kind: type[ThreadsProvider] = ThreadsProvider) -> Any:
    hub = Hub()
    providers: list[Provider] = [kind(hub, rank, world) for rank in range(world)]
    backends = [ProviderBackend(provider) for provider in providers]

    def one(backend: ProviderBackend) -> Any:
        try:
            with backend:
                return fn(backend)
        except ferrodist.DistributedError as error:
            return error

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(one, backends, timeout=100))


@pytest.mark.slow
def test_a_provider_of_threads_keeps_the_contract() -> None:
    def body(backend: ProviderBackend) -> Any:
        return run_contract(backend, contract_cases(2, libraries=["numpy"])[::4])

    reports = run(2, body)
    assert all(report.is_clean for report in reports), "\n".join(map(str, reports))


def test_collectives_of_the_provider_are_used_unless_an_algorithm_is_named() -> None:
    def body(backend: Any) -> Any:
        x = np.arange(5) + backend.rank
        assert backend.allreduce(x).tolist() == [3, 6, 9, 12, 15]
        assert backend.allreduce(x, algorithm="ring").tolist() == [3, 6, 9, 12, 15]
        assert backend.broadcast(x, 2).tolist() == [2, 3, 4, 5, 6]
        assert backend.allreduce(x, async_op=True).wait(30).tolist() == [3, 6, 9, 12, 15]
        return backend._provider.kinds

    assert run(3, body) == [[Kind.ALLREDUCE, Kind.BROADCAST, Kind.ALLREDUCE]] * 3


def test_ranks_that_differ_are_named_on_all_and_go_on() -> None:
    def body(backend: Any) -> Any:
        call = backend.barrier if backend.rank == 1 else lambda: backend.allreduce(1)
        with pytest.raises(CollectiveMismatch) as found:
            call()
        assert backend.allreduce(backend.rank) == 3
        return str(found.value)

    texts = run(3, body)
    assert len(set(texts)) == 1
    assert "rank 0  allreduce(int64[], sum)" in texts[0]
    assert "rank 1  barrier()" in texts[0]


def test_a_rank_that_does_not_come_is_missing_by_name_on_all() -> None:
    is_over = threading.Barrier(3)

    def body(backend: Any) -> Any:
        if backend.rank == 1:
            is_over.wait(60)
            return backend.barrier()
        with pytest.raises(CollectiveTimeout) as found:
            backend.allreduce(1.5, timeout=0.2)
        is_over.wait(60)
        with pytest.raises(GroupAborted):
            backend.barrier()
        return found.value.missing, backend._provider.aborted

    first, late, other = run(3, body)
    assert first[0] == other[0] == [1]
    assert type(late) is GroupAborted
    assert any("rank 1 did not get through" in reason for reason in first[1] + other[1])


def test_nothing_is_sent_to_a_rank_that_has_left() -> None:
    def body(backend: Any) -> Any:
        if backend.rank == 1:
            backend.send(7, 0)
            return backend.close()
        assert backend.recv(1) == 7
        with pytest.raises(RankLost):
            backend.recv(1)
        return backend.send(1, 1)

    error = run(2, body)[0]
    assert type(error) is RankLost
    assert error.rank == 1


def test_leaving_is_told_by_the_base_with_place_and_number() -> None:
    def body(backend: Any) -> Any:
        backend.barrier()
        if backend.rank == 1:
            backend.close()
            return None
        backend.recv(1)
        return None

    error = run(2, body)[0]
    assert type(error) is RankLost
    assert error.rank == 1
    assert "left after #1 (closed at test_provider.py:" in str(error)


class Broken(ThreadsProvider):
    """Loses a rank, or its patience, in its own collectives."""

    def collective(self, *args: Any) -> Any:
        if args[0] is Kind.ALLREDUCE:
            raise ConnectionError(2)
        if args[0] is Kind.BROADCAST:
            raise TimeoutError
        return NotImplemented


@pytest.mark.parametrize(
    ("name", "error"), [("allreduce", RankLost), ("broadcast", CollectiveTimeout)]
)
def test_what_a_provider_raises_becomes_the_error_of_all(name: str, error: type) -> None:
    def body(backend: Any) -> Any:
        backend.barrier()
        getattr(backend, name)(np.ones(3))

    found = run(3, body, Broken)
    last = Evicted if error is RankLost else error  # on the rank that is lost to the others
    assert [type(one) for one in found] == [error, error, last]
    assert {one.sequence for one in found} == {2}
    if error is RankLost:
        assert {one.rank for one in found} == {2}
    else:
        assert all(one.missing for one in found)


def test_abort_ends_the_groups_of_a_group_too() -> None:
    def body(backend: Any) -> Any:
        pair = backend.split([1, 0])
        assert pair.rank == 1 - backend.rank
        backend.barrier()
        if backend.rank == 0:
            backend.abort("enough")
        with pytest.raises(GroupAborted, match="enough") as found:
            pair.barrier()
        return found.value.rank

    assert run(2, body) == [1, 1]


def test_a_backend_that_is_dropped_leaves_its_group() -> None:
    def body(backend: Any) -> Any:
        group = backend.split([0, 1])
        backend.barrier()
        if backend.rank == 0:
            del group
            return None
        with pytest.raises(RankLost, match="dropped its backend"):
            group.barrier(timeout=60)
        return None

    assert run(2, body) == [None, None]


def test_statistics_count_messages_and_calls() -> None:
    def body(backend: Any) -> Any:
        backend.broadcast(np.zeros(1000))
        return backend.statistics()

    counts = run(2, body)
    assert [one.collectives for one in counts] == [1, 1]
    assert counts[0].sent_nbytes > 8000 > counts[1].sent_nbytes
    assert counts[1].received_nbytes > 8000


# -- what concerns them in joining and waiting -----------------------------------------------------


def test_a_default_deadline_begins_again_when_a_call_in_flight_has_its_turn():
    """A provider may not know who lives, and yet a queue of calls may take longer than one."""
    begun = time.monotonic() - 61
    default = Deadline(DefaultTimeout(60.0), start=begun)
    assert default.remaining() < 0 < default.from_now().remaining()
    chosen = Deadline(60.0, start=begun)
    assert chosen.from_now().remaining() < 0


def test_an_engine_that_knows_its_job_is_told_nothing_by_a_process_without_launcher(monkeypatch):
    monkeypatch.setattr(registry, "environment", dict)
    assert registry._try_find_job() is None
    of_torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    monkeypatch.setattr(registry, "environment", lambda: dict(of_torchrun))
    assert registry._try_find_job().rank == 1
