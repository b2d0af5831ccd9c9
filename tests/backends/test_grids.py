"""Groups by color, grids, and memory that the ranks of a host share, where ranks are processes.

What they do is in the contract; here is what becomes of them when ranks are late, die or leave.
"""

from __future__ import annotations

import inspect
import os
import signal
import threading
from typing import Any

import numpy as np
import pytest

from ferrodist import (
    CollectiveTimeout,
    Grid,
    GroupAborted,
    HybridBackend,
    OutOfMemory,
    RankLost,
    SharedMemoryBackend,
    SimulatedBackend,
    TcpBackend,
    UnsupportedOp,
)
from ferrodist.backends.linked import LinkedBackend
from ferrodist.testing import contract_cases, run_contract, run_ranks

pytestmark = pytest.mark.timeout(60)


@pytest.mark.slow
@pytest.mark.parametrize(
    "world", [1, 4, *(pytest.param(n, marks=pytest.mark.long) for n in (6, 8))]
)
def test_grids_keep_the_contract(start, world):
    def body(backend, pipe):
        cases = contract_cases(backend.world_size, libraries=["numpy"])
        return str(run_contract(backend, [case for case in cases if case.check == "grid"]))

    with start(world, body) as job:
        for report in job.results():
            assert "none failed" in report, report


def test_a_grid_is_a_backend_of_its_groups_class():
    def look(backend):
        grid = backend.grid((2, 1), True)
        assert isinstance(grid, SimulatedBackend)
        assert {"shape", "coords", "shift", "sub", "allreduce", "split"} <= set(dir(grid))
        assert not {"shape", "shift"} & set(dir(backend))
        assert not hasattr(backend, "shape")
        for plain in (grid.split([grid.rank]), grid.split_by(0)):
            assert type(plain) is SimulatedBackend
        twin = grid.dup()
        assert (twin.shape, twin.periodic, twin.coords) == (grid.shape, grid.periodic, grid.coords)
        assert twin.neighbor_all_gather(twin.rank)[0] == 1 - twin.rank
        return repr(grid)

    shown = "<SimulatedBackend grid (2, 1) rank 1 of 2 at (1, 0)>"
    assert run_ranks(2, look)[1] == shown


@pytest.mark.parametrize(
    "kind", [SimulatedBackend, SharedMemoryBackend, TcpBackend, HybridBackend, LinkedBackend]
)
def test_a_grid_hides_nothing_of_its_groups_class(kind):
    """Not its attributes either, which only an instance has."""
    files = [inspect.getsource(inspect.getmodule(one)) for one in kind.__mro__[:-3]]
    meant = {"split", "dup", "_abc_impl"}  # and what Python puts into every class
    own = {name for name in {*vars(Grid), *Grid.__annotations__} - meant if name[:2] != "__"}
    assert own
    for name in own:
        assert not hasattr(kind, name), name
        assert not any(f"self.{name} " in text or f"self.{name}:" in text for text in files), name


def test_a_rank_that_does_not_split_by_color_is_named():
    given_up = threading.Event()

    def join(backend):
        if backend.rank == 2:
            assert given_up.wait(20)
            with pytest.raises(GroupAborted, match="split_by #1"):
                backend.split_by(0)
            return None
        with pytest.raises(CollectiveTimeout, match=r"split_by #1 .*: rank 2 did not") as caught:
            backend.split_by(0, timeout=0.2)
        given_up.set()
        return caught.value.missing

    assert run_ranks(3, join) == [[2], [2], None]


def test_arrays_in_cpu_memory_are_exchanged_by_native_code(start):
    def body(backend, pipe):
        from ferrodist.backends import grid as module

        module._exchange_in_python = None  # would raise
        grid = backend.grid((3, 1), True)
        x = np.arange(12.0).reshape(3, 4) + 100 * backend.rank
        rooms = [np.empty(3), None, np.empty(3), None]
        found = grid.neighbor_all_to_all([x[:, 0], x[:, 1], x[:, 2], x[:, 3]], out=rooms)
        assert found[0] is rooms[0]
        numbers = grid.neighbor_all_gather(backend.rank)
        return numbers, [int(column[1]) for column in found]

    with start(3, body) as job:
        results = job.results()
    for rank, (numbers, columns) in enumerate(results):
        lower, higher = (rank - 1) % 3, (rank + 1) % 3
        assert numbers == [lower, higher, rank, rank]
        assert columns == [5 + 100 * lower, 4 + 100 * higher, 7 + 100 * rank, 6 + 100 * rank]


# -- neighbors that do not come --------------------------------------------------------------------


def gather(grid: Any, x: Any, is_async: bool, **options: Any) -> list[Any]:
    """Exchange with the neighbors, as a call or as a Work."""
    found = grid.neighbor_all_gather(x, async_op=is_async, **options)
    return found.wait() if is_async else found


@pytest.mark.parametrize("is_async", [False, True])
def test_a_late_neighbor_is_named_and_ends_the_grid_but_not_its_parent(start, is_async):
    def body(backend, pipe):
        grid = backend.grid(3)
        if backend.rank == 1:
            backend.recv(0)  # until the first has given up
        else:
            with pytest.raises((CollectiveTimeout, GroupAborted)) as caught:
                gather(grid, np.arange(3), is_async, timeout=0.2 if backend.rank == 0 else 20)
            if backend.rank == 0:
                assert type(caught.value) is CollectiveTimeout
                said = str(caught.value)
                backend.send(0, 1)
            else:
                said = str(caught.value)
            assert "neighbor_all_gather, the higher neighbor along axis 0, rank 1" in said, said
            assert "tag" not in said, said
        with pytest.raises(GroupAborted, match="higher neighbor along axis 0"):
            gather(grid, 1, is_async)
        return backend.allreduce(1)

    with start(3, body) as job:
        assert job.results() == [3] * 3


def exchange_for_ever(grid: Any, is_async: bool) -> None:
    while True:
        gather(grid, grid.rank, is_async)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_dead_neighbor_is_named_to_those_who_are_not_its_neighbors(start, is_async):
    def body(backend, pipe):
        grid = backend.grid((1, 4))
        grid.neighbor_all_gather(backend.rank)
        pipe.send("ready")
        if backend.rank == 3:
            signal.pause()
        with pytest.raises((RankLost, GroupAborted), match=r"rank 3.*(died|killed|SIGKILL)"):
            exchange_for_ever(grid, is_async)
        survivors = backend.split([0, 1, 2])
        return survivors.grid(3).neighbor_all_gather(survivors.rank)

    with start(4, body) as job:
        for rank in job:
            assert rank.hear() == "ready"
        job[3].send_signal(signal.SIGKILL)
        found = [rank.end() for rank in job.others(3)]
    assert [end.result for end in found] == [[None, 1], [0, 2], [1, None]], found


# -- memory that ranks share -----------------------------------------------------------------------


@pytest.fixture(params=["shared_memory", "hybrid"])
def start_sharing(request, start_job, start_hybrid_job):
    """Start three ranks on one host; with hybrid there is another host with a fourth."""
    if request.param == "hybrid":
        return lambda body: start_hybrid_job("0001", body)
    return lambda body: start_job(3, body)


def arena_of(backend: Any) -> Any:
    return getattr(backend, "inside", backend).arena


def world_of(backend: Any) -> Any:
    return getattr(backend, "inside", backend).world


def test_memory_is_given_back_when_the_last_rank_has_dropped_it(start_sharing):
    def body(backend, pipe):
        arena = arena_of(backend)
        backend.barrier()
        before = arena.allocated_nbytes
        for _ in range(10):
            table = backend.shared(1 << 22, "uint8")
            table[backend.rank] = 1
            del table
            backend.barrier()
        assert arena.allocated_nbytes - before < 2 << 22
        kept = backend.shared((1 << 20,), "uint8")
        view = kept[10:]
        del kept
        backend.barrier()
        holds_one = arena.allocated_nbytes > before
        backend.barrier()
        del view
        backend.barrier()
        world_of(backend).sweep()
        return backend.local_rank, holds_one, arena.allocated_nbytes - before

    with start_sharing(body) as job:
        for local_rank, holds_one, more in job.results():
            assert (holds_one, more) == (local_rank == 0, 0)


def test_an_owner_that_drops_closes_or_dies_leaves_the_memory_to_the_others(start_sharing):
    """Not only what was written stays: the others go on writing to each other."""

    def body(backend, pipe):
        tables = [backend.shared(2, "int64") for _ in range(2)]
        group = backend.split([1, 2]) if backend.rank in (1, 2) else None
        if backend.rank == 0:
            tables[0][:] = tables[1][:] = 7
            backend.barrier()
            del tables[0]
            spare = backend.zeros(1 << 20, "uint8")  # would lie where the first one did
            spare += 1
            pipe.send("dropped")
            pipe.recv()
            backend.close()
            pipe.send("closed")
            signal.pause()
        backend.barrier()
        seen = []
        for _ in ("dropped", "closed", "dead"):
            if group is None:
                break
            pipe.recv()
            for number, table in enumerate(tables):
                seen.append(int(table[0]) == 7)
                table[1] = 0
                group.barrier()
                if group.rank == 0:
                    table[1] = number + 1
                group.barrier()
                seen.append(int(table[1]) == number + 1)
            pipe.send("seen")
        return all(seen)

    def tell_both(job):
        for rank in (1, 2):
            job[rank].tell()
        for rank in (1, 2):
            assert job[rank].hear() == "seen"

    with start_sharing(body) as job:
        assert job[0].hear() == "dropped"
        tell_both(job)
        job[0].tell()
        assert job[0].hear() == "closed"
        tell_both(job)
        job[0].send_signal(signal.SIGKILL)
        assert job[0].has_ended()
        tell_both(job)
        assert [job[rank].end().result for rank in (1, 2)] == [True, True]


def test_memory_of_a_rank_that_died_holding_it_is_given_back(start_job):
    def body(backend, pipe):
        before = backend.arena.allocated_nbytes
        table = backend.shared(1 << 20, "uint8")
        pipe.send("ready")
        if backend.rank == 1:
            signal.pause()
        pipe.recv()
        del table
        backend.world.sweep()
        return backend.arena.allocated_nbytes - before

    with start_job(2, body) as job:
        for rank in job:
            assert rank.hear() == "ready"
        job[1].send_signal(signal.SIGKILL)
        assert job[1].has_ended()
        job[0].tell()
        assert job[0].end().result == 0


def test_a_forked_child_that_drops_the_array_leaves_it_to_its_parent(start_job):
    def body(backend, pipe):
        table = backend.shared(4, "int64")
        table[backend.rank] = 1
        backend.barrier()
        child = os.fork()
        if child == 0:
            del table
            os._exit(0)
        os.waitpid(child, 0)
        backend.barrier()
        blocks = backend.shared(4, "int64")  # sweeps
        return table.tolist(), blocks.tolist()

    with start_job(2, body) as job:
        assert job.results() == [([1, 1, 0, 0], [0, 0, 0, 0])] * 2


def test_one_host_without_memory_is_an_error_on_all_ranks(start_hybrid_job):
    def body(backend, pipe):
        arena = arena_of(backend)
        before = arena.num_blocks
        if backend.rank == 2:  # the first of the second host
            backend.inside._allocate_shared = lambda nbytes: backend.inside.group.allocate_block(
                1 << 60
            )
        with pytest.raises(
            OutOfMemory, match=r"shared #1: rank 2 could not take 64 bytes"
        ) as caught:
            backend.shared(8, "int64")
        assert caught.value.rank == 2
        assert ("was asked for, but only" in str(caught.value)) == (backend.rank == 2)
        assert arena.num_blocks == before
        return backend.allreduce(1)

    with start_hybrid_job("0011", body) as job:
        assert job.results() == [4] * 4


def test_ranks_over_tcp_share_no_memory_and_are_told_what_does(start_tcp_job):
    def body(backend, pipe):
        with pytest.raises(
            UnsupportedOp, match="ranks of a TcpBackend share no memory; use hybrid"
        ):
            backend.shared(8, "int64")
        return backend.allreduce(1)

    with start_tcp_job(2, body) as job:
        assert job.results() == [2] * 2


def test_shared_tensors_of_torch():
    pytest.importorskip("torch", reason="makes torch tensors")

    def fill(backend):
        table = backend.shared((2, 2), "bfloat16", "torch")
        table[backend.rank] = backend.rank + 1
        backend.barrier()
        return str(table.dtype), table.tolist()

    assert run_ranks(2, fill) == [("torch.bfloat16", [[1.0, 1.0], [2.0, 2.0]])] * 2
