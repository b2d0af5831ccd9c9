"""What calls, groups and backends leave behind: no files, no threads, no memory."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist.rendezvous import Job as Place
from jobs import BACKENDS, SMALL_PIECES

pytestmark = pytest.mark.timeout(90)

slow = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


def resources() -> tuple[int, int]:
    """Count open files and threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def memory_nbytes() -> int:
    """How much memory this process has to itself or shares with others, and has touched."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def growth(work: Any, number: int) -> tuple[tuple[int, int], tuple[int, int], int]:
    """Do something often; return files and threads before and after, and the growth of memory."""
    for _ in range(max(100, number // 100)):  # what is made once is made now
        work()
    before, nbytes = resources(), memory_nbytes()
    for _ in range(number):
        work()
    return before, resources(), memory_nbytes() - nbytes


def assert_no_growth(results: list[Any]) -> None:
    for before, after, nbytes in results:
        assert before == after
        assert nbytes < 5e6


@pytest.mark.slow
@pytest.mark.parametrize("number", [100_000, pytest.param(1_000_000, marks=slow)])
def test_many_small_collectives_leave_nothing_behind(start, number):
    def body(backend, pipe):
        x = np.full(3, backend.rank)

        def work():
            assert ferrodist.allreduce(x, backend)[0] == 1

        return growth(work, number)

    with start(2, body) as job:
        assert_no_growth([rank.hear(500).result for rank in job])


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [{}, pytest.param({"FERRODIST_EXECUTOR": "python", **SMALL_PIECES}, marks=slow)],
    ids=["native", "python"],
)
def test_calls_of_other_kinds_and_errors_leave_nothing_behind(start, environment):
    def body(backend, pipe):
        peer, large = 1 - backend.rank, np.zeros(150_000)

        def work():
            ferrodist.allreduce(large, backend)
            ferrodist.allreduce(large, backend, async_op=True).wait(20)
            ferrodist.allreduce({"a": large, "b": 1}, backend)
            ferrodist.sendrecv(large, peer, peer, backend, like=large)
            ferrodist.all_gather_object("x", backend)
            with pytest.raises(ferrodist.CollectiveMismatch):
                ferrodist.allreduce(np.ones(2 + backend.rank), backend)
            with pytest.raises(ferrodist.CollectiveMismatch):
                ferrodist.allreduce(large[backend.rank :], backend)

        return growth(work, 100)

    with start(2, body, **environment) as job:
        assert_no_growth(job.results())


@pytest.mark.slow
@pytest.mark.parametrize("number", [300, pytest.param(10_000, marks=slow)])
def test_groups_made_and_closed_leave_nothing_behind(start, backend_name, number):
    def body(backend, pipe):
        large = np.zeros(10_000)

        def work():
            with backend.split([0, 1]) as group:
                ferrodist.allreduce(1, group)
                ferrodist.allreduce(large, group)  # takes a stage in shared memory
                ferrodist.sendrecv(1, 1 - group.rank, 1 - group.rank, group)  # and a queue

        if backend_name != "shared_memory":
            return growth(work, number), 0
        before = backend.arena.num_blocks
        found = growth(work, number)
        for _ in range(2):  # a group's own block goes when all others have swept
            ferrodist.barrier(backend)
            backend.world.sweep()
        return found, backend.arena.num_blocks - before

    with start(2, body) as job:
        results = [rank.hear(500).result for rank in job]
    assert_no_growth([found for found, _ in results])
    assert [blocks for _, blocks in results] == [0, 0]


@pytest.mark.parametrize("world", [1, 3])
def test_backends_give_their_files_and_threads_back_closed_or_not(start, backend_name, world):
    secret = secrets.token_bytes(32)

    def body(backend, pipe):
        def join_and_leave(number):
            with contextlib.ExitStack() as stack:
                place = Place(f"test-{secret.hex()[:20]}-{number}", backend.rank, world, secret)
                another = BACKENDS[backend_name].join(place)
                if number % 3:
                    stack.enter_context(another)
                ferrodist.allreduce(np.ones(50_000), another, async_op=True).wait(20)

        before = resources()
        for number in range(20):
            join_and_leave(number)
        end = time.monotonic() + 5
        while resources() != before and time.monotonic() < end:
            pass  # threads that were told to end need a moment
        return before, resources()

    with start(world, body) as job:
        for before, after in job.results():
            assert before == after
