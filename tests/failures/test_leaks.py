"""What calls, groups and backends leave behind: no files, no threads, no memory."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import secrets
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
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


# -- Works that failed -----------------------------------------------------------------------------


def failing_works(backend) -> dict[str, Callable[[], Any]]:
    """Give calls in flight that fail alike on all ranks; the group goes on."""
    x = np.ones(3 + backend.rank)  # a difference
    return {
        "collective": lambda: backend.allreduce(x, async_op=True),
        "tree": lambda: backend.allreduce({"a": x, "b": 1}, async_op=True),
        "receive": lambda: backend.recv(1 - backend.rank, tag=5, timeout=0.01, async_op=True),
        "receive of an object": lambda: backend.recv_object(tag=6, timeout=0.01, async_op=True),
        "cancelled": lambda: cancelled(backend.recv(tag=7, async_op=True)),
    }


def num_left(found: list[weakref.ref[Any]], seconds: float = 5.0) -> int:
    """Count what is not collected; the callbacks thread lets go of a Work a moment later."""
    end = time.monotonic() + seconds
    while True:
        gc.collect()
        number = sum(one() is not None for one in found)
        if number == 0 or time.monotonic() > end:
            return number


def cancelled(work):
    assert work.cancel()
    return work


def wait_in_vain(start: Callable[[], Any], with_callback: bool) -> list[weakref.ref[Any]]:
    """Wait for a Work in a function that has a large array."""
    local = np.ones(100_000)
    work = start()
    if with_callback:
        work.add_done_callback(lambda work: local.sum())
    with pytest.raises((ferrodist.DistributedError, CancelledError)):
        work.wait()
    return [weakref.ref(local), weakref.ref(work)]


def test_works_that_failed_are_collected_with_what_their_functions_held(start):
    def body(backend, pipe):
        left = {}
        for name, begin in failing_works(backend).items():
            found = []
            for number in range(20):
                found += wait_in_vain(begin, number % 2 == 1)
            backend.barrier()  # the callbacks thread has let go of the last one
            left[name] = num_left(found)
        return left

    with start(2, body) as job:
        for left in job.results():
            # A Work that failed before it was asked stays with its group, for close(), until the
            # next one does; the array is its function's.
            assert max(left.values()) <= 2, left


def test_a_tensor_that_knows_the_work_it_is_in_is_collected_with_it(start_job):
    def body(backend, pipe):
        import torch

        found = []
        for _ in range(20):
            x = torch.ones(100_000)
            x.work = backend.allreduce(x, async_op=True)
            found.append(weakref.ref(x))
            backend.barrier()  # it is done, and never asked for its result
        del x
        backend.allreduce(1, async_op=True).wait()
        return num_left(found[:-2])  # the last ones are in the registry

    with start_job(2, body) as job:
        assert job.results() == [0, 0]
