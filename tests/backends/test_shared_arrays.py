"""Arrays that other ranks reach in place: made by ``backend.empty``, found by address."""

from __future__ import annotations

import gc
import itertools
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import BackendClosed, InvalidArgument, SimulatedBackend, UnsupportedArray
from ferrodist.backends.shared_memory import SharedMemoryBackend
from ferrodist.rendezvous import Job
from ferrodist.testing.contract.values import DTYPES, numpy_dtype

pytestmark = pytest.mark.timeout(60)

LARGE = 1 << 20  # bytes; beyond some KB memory that is not shared goes through a stage


def join_alone() -> SharedMemoryBackend:
    return SharedMemoryBackend.join(Job(f"test-{secrets.token_hex(8)}", 0, 1, bytes(32)))


@pytest.fixture(params=["shared_memory", "simulated"])
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A world of one, in shared memory and as a thread: callers see no difference."""
    made = join_alone() if request.param == "shared_memory" else None
    with made or SimulatedBackend.create_group(1)[0] as backend:
        yield backend


@pytest.fixture
def alone() -> Iterator[SharedMemoryBackend]:
    with join_alone() as backend:
        yield backend


def holds(backend: Any, array: Any) -> bool:
    """Tell whether an array lies where other ranks reach it."""
    return backend.arena.holds(memoryview(array.reshape(-1).view(np.uint8)))


# -- making them -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_arrays_of_every_dtype_can_be_made(backend, dtype):
    for shape in [(), 5, (2, 3), (0,), (1 << 16,)]:
        x = backend.empty(shape, dtype)
        assert type(x) is np.ndarray
        assert x.shape == np.empty(shape).shape
        assert x.dtype == numpy_dtype(dtype)
        x[...] = 1
        zeros = backend.zeros(shape, dtype)
        assert not zeros.any()
        same = backend.like(zeros)
        assert (same.dtype, same.shape) == (x.dtype, x.shape)
        assert not np.shares_memory(zeros, same)
        assert (x == 1).all()
        if isinstance(backend, SharedMemoryBackend) and x.size:
            assert all(holds(backend, one) for one in (x, zeros, same))


@pytest.mark.slow
def test_torch_tensors_of_every_dtype_can_be_made(backend):
    torch = pytest.importorskip("torch", reason="makes torch tensors")
    for dtype in DTYPES:
        x = backend.zeros((2, 3), getattr(torch, dtype), "torch")
        assert isinstance(x, torch.Tensor)
        assert (x.dtype, tuple(x.shape)) == (getattr(torch, dtype), (2, 3))
        same = backend.like(x)
        assert (type(same), same.dtype, same.shape) == (type(x), x.dtype, x.shape)
        assert backend.empty((0, 2), dtype, "torch").shape == (0, 2)
        if isinstance(backend, SharedMemoryBackend):
            assert holds(backend, x.view(torch.uint8).numpy())


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((2, "float8"), UnsupportedArray, "dtype 'float8' is not one of bool, int8"),
        ((2, ">f8"), UnsupportedArray, "dtype '>f8' is not one of"),
        ((2, object), UnsupportedArray, "is not one of"),
        ((2, None), UnsupportedArray, "is not one of"),
        ((-1, "float32"), InvalidArgument, "no negative lengths, got -1"),
        (((2, 1.5), "float32"), InvalidArgument, r"made of integers, got \(2, 1.5\)"),
        ((2, "float32", "jax"), InvalidArgument, "kind 'jax' .* known: 'numpy', 'torch'"),
    ],
)
def test_what_cannot_be_made_is_refused_with_what_can(backend, arguments, error, words):
    with pytest.raises(error, match=words):
        backend.empty(*arguments)


@pytest.mark.parametrize("shape", [1 << 50, (1 << 40, 1 << 40), (1 << 32, (1 << 29) - 1), 1 << 61])
def test_too_large_an_array_is_a_memory_error_that_says_how_much(backend, shape):
    with pytest.raises(MemoryError, match=r"\d+(\.\d*)? .iB"):
        backend.empty(shape, "float64")


def test_nothing_is_taken_when_there_is_not_enough(alone):
    arena = alone.arena
    before = arena.num_blocks, arena.allocated_nbytes
    with pytest.raises(MemoryError, match=r"shared memory of .* MiB was asked for, but only"):
        alone.zeros(arena.nbytes + 1, "uint8")
    assert (arena.num_blocks, arena.allocated_nbytes) == before
    assert alone.zeros(10, "uint8").sum() == 0


def test_a_closed_backend_makes_none(backend):
    backend.close()
    with pytest.raises(BackendClosed):
        backend.empty(3, "float32")


# -- using them ------------------------------------------------------------------------------------


def shares(rank: int, count: int) -> list[int]:
    """How many elements a rank sends to each of three, where it may differ."""
    sizes = [count // 4, count // 2, count - count // 4 - count // 2]
    return sizes[rank:] + sizes[:rank]


# The shape of the result where it is not that of x.
RESULT: dict[str, Callable[[int, int], int]] = {
    "all_gather": lambda count, world: count * world,
    "gather": lambda count, world: count * world,
    "scatter": lambda count, world: count // world,
    "reduce_scatter": lambda count, world: count // world,
}
NAMES = ["allreduce", "broadcast", "reduce", *RESULT, "all_to_all"]
UNEVEN = ["all_gather_uneven", "all_to_all_uneven"]


def call(name: str, backend: Any, x: Any, **options: Any) -> Any:
    rank = backend.rank
    if name in ("broadcast", "reduce", "gather", "scatter"):
        options["root"] = 1
    if name == "all_to_all_uneven":
        return ferrodist.all_to_all_uneven(x, shares(rank, len(x)), backend, **options)[0]
    if name == "scatter" and rank != 1:
        x = None
    return getattr(ferrodist, name)(x, backend, **options)


def values(rank: int, count: int, turn: int) -> Any:
    return np.arange(count, dtype=np.int32) * (rank + 1) + 1000 * rank + turn


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [6, 1026, 100_002])
def test_any_mixture_of_shared_and_ordinary_memory_gives_the_same(start_job, name, count):
    """Which ranks share their input, which their output: all of it, with results that are right."""

    def body(backend, pipe):
        rank, world, wrong = backend.rank, backend.world_size, []
        result = RESULT.get(name, lambda count, world: count)(count, world)
        room = backend.empty(count, "int32"), np.empty(count, np.int32)
        rooms = backend.empty(result, "int32"), np.empty(result, np.int32)
        masks = itertools.product([False, True], repeat=2 * world)
        for turn, mask in enumerate(masks if count < LARGE // 16 else [*masks][::5]):
            expected = call(name, backend, values(rank, count, turn))
            x, out = room[mask[rank]], rooms[mask[world + rank]]
            x[:], out[:] = values(rank, count, turn), -1
            got = call(name, backend, x, out=out)
            is_unchanged = (x == values(rank, count, turn)).all()
            x[:] = -2  # its owner's again: nobody reads it any more
            is_right = np.array_equal(got, expected) and (got is out or got is None)
            if not is_right or not is_unchanged:
                wrong.append(mask)
        return wrong

    with start_job(3, body) as job:
        assert job.results() == [[]] * 3


@pytest.mark.parametrize("name", UNEVEN)
def test_shares_of_different_sizes_may_lie_in_shared_memory(start_job, name):
    def body(backend, pipe):
        rank, wrong = backend.rank, []
        for turn, mask in enumerate(itertools.product([False, True], repeat=3)):
            count = [60_000, 0, 40_001][(rank + turn) % 3]
            mine = values(rank, count, turn)
            expected = call(name, backend, mine)
            x = backend.like(mine) if mask[rank] else mine.copy()
            x[:] = mine
            got = call(name, backend, x)
            x[:] = -2
            if not np.array_equal(got, expected):
                wrong.append(mask)
        return wrong

    with start_job(3, body) as job:
        assert job.results() == [[]] * 3


@pytest.mark.parametrize("is_shared", [True, False])
def test_shared_arrays_and_parts_of_them_need_no_stage(start_job, is_shared):
    """Two rounds, whatever the size: one to meet, one to part. A stage needs one per 512 KB."""

    def body(backend, pipe):
        world, rounds = backend.world_size, {}
        make = backend.zeros if is_shared else np.zeros
        rows = make((6, 5 * LARGE), "uint8")
        parts = {
            "all": (rows[:world], rows[world:]),
            "in the middle": (rows[0, 64 * world :], rows[3, 64 * world :]),
            "odd": (rows[0, 5 : 5 + 4 * LARGE], rows[1, 1 : 1 + 4 * LARGE]),
            "other dtype": (rows[2].view("float64"), rows[3].view("float64")),
            "reshaped": (rows[2:4].reshape(-1, 8), rows[4:].reshape(-1, 8)),
        }
        for place, (x, out) in parts.items():
            x[...] = backend.rank + 1
            before = backend.group.num_rounds
            ferrodist.allreduce(x, backend, out=out)
            rounds[place] = backend.group.num_rounds - before
            assert (out == sum(range(world + 1))).all(), place
        x = rows[0, : 5 * LARGE // world * world]
        for name in ("broadcast", "reduce", "all_gather", "scatter", "reduce_scatter"):
            before = backend.group.num_rounds
            call(name, backend, x)
            rounds[name] = backend.group.num_rounds - before
        return rounds

    with start_job(3, body) as job:
        for rounds in job.results():
            if is_shared:
                assert rounds.pop("scatter") == 3  # of which one tells the shape
                assert set(rounds.values()) == {2}
            else:
                assert min(rounds.values()) > 3


def test_what_is_staged_is_counted_and_what_is_shared_is_only_folded(start_job):
    def body(backend, pipe):
        found = []
        for make in (backend.zeros, np.zeros):
            x, out = make(LARGE, "uint8"), make(LARGE, "uint8")
            before = backend.statistics().sent_nbytes
            ferrodist.allreduce(x, backend, out=out)
            found.append(backend.statistics().sent_nbytes - before)
        return found

    with start_job(2, body) as job:
        assert job.results() == [[LARGE // 2, LARGE]] * 2


def test_strided_parts_of_shared_arrays_are_packed(start_job):
    def body(backend, pipe):
        x = backend.empty((2, 50_000), "float64")
        x[...] = np.arange(100_000.0).reshape(2, 50_000) * (backend.rank + 1)
        return [
            ferrodist.allreduce(part, backend).sum() == part.sum() / (backend.rank + 1) * 6
            for part in (x[:, ::2], x.T, x[::-1], x[:, 10:20])
        ]

    with start_job(3, body) as job:
        assert job.results() == [[True] * 4] * 3


def test_shared_arrays_work_in_place(start_job):
    def body(backend, pipe):
        rank, world, wrong = backend.rank, backend.world_size, []
        count = 30_000 * world
        for name in ("allreduce", "broadcast", "reduce", "all_to_all"):
            expected = call(name, backend, values(rank, count, 0))
            x = backend.like(values(rank, count, 0))
            x[:] = values(rank, count, 0)
            got = call(name, backend, x, out=x)
            if not np.array_equal(got, expected):
                wrong.append(name)
        x = backend.zeros((world, count), "int32")
        x[rank] = values(rank, count, 0)
        ferrodist.all_gather(x[rank], backend, out=x.reshape(-1))
        if not all((x[other] == values(other, count, 0)).all() for other in range(world)):
            wrong.append("all_gather")
        ferrodist.reduce_scatter(x, backend, out=x[rank : rank + 1])
        if not (x[rank] == world * values(rank, count, 0)).all():
            wrong.append("reduce_scatter")
        return wrong

    with start_job(3, body) as job:
        assert job.results() == [[]] * 3


@pytest.mark.slow
def test_torch_tensors_in_shared_memory_need_no_stage(start_job):
    pytest.importorskip("torch", reason="makes torch tensors")

    def body(backend, pipe):
        import torch

        x = backend.empty(LARGE, "bfloat16", "torch")
        x[:] = backend.rank + 1
        before = backend.group.num_rounds
        got = ferrodist.allreduce(x, backend, out=backend.like(x))
        rounds = backend.group.num_rounds - before
        return isinstance(got, torch.Tensor), bool((got == 3).all()), rounds

    with start_job(2, body) as job:
        assert job.results() == [(True, True, 2)] * 2


# -- how long they live ----------------------------------------------------------------------------


def test_an_array_dropped_in_flight_lives_until_its_work_is_done(start_job):
    def body(backend, pipe):
        arena = backend.arena
        ferrodist.allreduce(np.zeros(LARGE, np.uint8), backend)  # takes a stage, once
        if backend.rank == 1:
            assert pipe.recv() == "go"  # rank 0 has dropped everything
            total = ferrodist.allreduce(np.full(LARGE, 2, np.uint8), backend).sum()
            return int(total), ferrodist.allreduce(1, backend)
        before = arena.num_blocks
        x, out = backend.zeros(LARGE, "uint8"), backend.empty(LARGE, "uint8")
        work = ferrodist.allreduce(x, backend, out=out, async_op=True)
        del x, out
        gc.collect()
        during = arena.num_blocks - before
        pipe.send("dropped")
        total = work.wait(20).sum()
        del work
        ferrodist.allreduce(1, backend, async_op=True).wait(20)  # the thread has left the first one
        return int(total), during, arena.num_blocks - before

    with start_job(2, body) as job:
        assert job[0].hear() == "dropped"
        job[1].tell()
        assert job.results() == [(2 * LARGE, 2, 0), (2 * LARGE, 2)]


def test_an_array_outlives_its_backend(alone):
    x = alone.zeros(LARGE, "uint8")
    view = x[100:200].reshape(10, 10)
    arena = alone.arena
    del x
    alone.close()
    gc.collect()
    view[...] = 7
    assert view.sum() == 700
    assert arena.num_blocks >= 1
    made = join_alone()
    y = made.zeros(1000, "int64")
    made.close()
    del made
    gc.collect()
    y += 5
    assert y.sum() == 5000


def test_a_forked_child_that_drops_an_array_leaves_the_parents_alone(start_job):
    def body(backend, pipe):
        x = backend.zeros(LARGE, "uint8")
        x[:] = 7
        blocks = backend.arena.num_blocks
        child = os.fork()
        if child == 0:
            is_readable = bool((x == 7).all())
            del x
            gc.collect()
            os._exit(0 if is_readable else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert backend.arena.num_blocks == blocks
        return int(ferrodist.allreduce(x, backend).sum())

    with start_job(3, body) as job:
        assert job.results() == [21 * LARGE] * 3


def shared_kilobytes() -> int:
    """How much shared memory this process has touched and not given back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssShmem:"))


@pytest.mark.slow
def test_ten_thousand_arrays_made_and_dropped_leave_no_memory_behind(alone):
    arena = alone.arena
    before = arena.num_blocks, arena.allocated_nbytes, shared_kilobytes()
    for number in range(10_000):
        x = alone.empty(1 + number * 37 % 100_000, "uint8")
        x[:] = 1
    assert arena.num_blocks == before[0] + 1
    del x
    assert (arena.num_blocks, arena.allocated_nbytes) == before[:2]
    assert shared_kilobytes() <= before[2] + 64  # some pages of the header; the arrays took 500 MB
