"""Collectives in flight: native progress, seen through the Work."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import threading

import numpy as np
import pytest

import ferrodist

pytestmark = pytest.mark.timeout(90)


def test_groups_in_opposite_order_do_not_wait_for_each_other(start):
    def body(backend, pipe):
        groups = [backend.split([0, 1]), backend.split([0, 1])]
        order = (0, 1) if backend.rank == 0 else (1, 0)
        works = {}
        for number in order:
            x = np.full(70_000, backend.rank + 10.0 * number)
            works[number] = ferrodist.allreduce(x, groups[number], async_op=True)
        return [float(works[number].wait(60)[-1]) for number in order]

    with start(2, body) as job:
        assert job.results() == [[1.0, 21.0], [21.0, 1.0]]


def test_a_call_that_nobody_waits_for_is_done_and_told_of(start):
    def body(backend, pipe):
        works = [
            ferrodist.allreduce(np.array([number + backend.rank]), backend, async_op=True)
            for number in range(5)
        ]
        called: concurrent.futures.Future[int] = concurrent.futures.Future()
        works[2].add_done_callback(lambda work: called.set_result(int(work.result()[0])))
        done, pending = concurrent.futures.wait(works, timeout=60)
        in_order = [work.result()[0] for work in works]
        assert set(concurrent.futures.as_completed(works, timeout=60)) == done
        return len(done), len(pending), called.result(60), [int(x) for x in in_order]

    with start(3, body) as job:
        assert job.results() == [(5, 0, 9, [3, 6, 9, 12, 15])] * 3


def test_a_barrier_in_flight_is_done_when_all_have_come(start):
    def body(backend, pipe):
        if backend.rank == 1:
            assert pipe.recv() == "go"
            ferrodist.barrier(backend)  # the others' is the same call
            return True
        work = ferrodist.barrier(backend, async_op=True)
        with pytest.raises(TimeoutError, match="barrier #1 is still in flight"):
            work.wait(0.01)
        pipe.send("waits")
        return work.wait(60) is None

    with start(3, body) as job:
        for rank in job.others(1):
            assert rank.hear() == "waits"
        job[1].tell("go")
        assert job.results() == [True] * 3


def test_a_work_can_be_awaited(start):
    def body(backend, pipe):
        async def main() -> list[float]:
            one = ferrodist.allreduce(1.5 + backend.rank, backend, async_op=True)
            two = ferrodist.all_gather(np.array([backend.rank]), backend, async_op=True)
            return [await one, *(float(x) for x in await asyncio.wrap_future(two))]

        return asyncio.run(main())

    with start(2, body) as job:
        assert job.results() == [[4.0, 0.0, 1.0]] * 2


def test_a_difference_is_told_to_the_works_of_all_ranks_and_the_group_goes_on(start):
    def body(backend, pipe):
        x = np.ones(3 + (backend.rank == 1))
        work = ferrodist.allreduce(x, backend, async_op=True)
        later = ferrodist.allreduce(backend.rank, backend, async_op=True)
        with pytest.raises(
            ferrodist.SizeMismatch, match=r"test_collectives_in_flight\.py"
        ) as found:
            work.result(60)
        return found.value.sequence, later.wait()

    with start(3, body) as job:
        assert job.results() == [(1, 3)] * 3


def test_the_loss_of_a_rank_ends_the_works_of_the_others(start):
    def body(backend, pipe):
        ferrodist.barrier(backend)
        if backend.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        work = ferrodist.allreduce(np.ones(3), backend, async_op=True)
        with pytest.raises(ferrodist.RankLost) as found:
            work.result(60)
        return found.value.rank

    with start(3, body) as job:
        assert [job.ranks[rank].end().result for rank in (0, 2)] == [1, 1]


def test_a_forked_child_leaves_the_calls_in_flight_alone(start):
    def body(backend, pipe):
        work = ferrodist.allreduce(np.ones(200_000), backend, async_op=True)
        child = os.fork()
        if child == 0:
            del work
            os._exit(7)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return status, float(work.wait()[-1])

    with start(2, body) as job:
        assert job.results() == [(7, 2.0)] * 2


def test_results_are_kept_though_all_arrays_are_dropped(start):
    def body(backend, pipe):
        works = []
        for number in range(50):
            works.append(
                ferrodist.allreduce(np.full(3_000, number + backend.rank), backend, async_op=True)
            )
        return [int(work.wait()[-1]) for work in works]

    with start(2, body) as job:
        assert job.results() == [[2 * number + 1 for number in range(50)]] * 2


def test_every_kind_of_call_in_flight_is_run_by_native_progress(start):
    def body(backend, pipe):
        rank, world = backend.rank, backend.world_size
        x = np.arange(3.0) + rank
        works = [
            ferrodist.allreduce({"a": x, "b": np.arange(5) + rank}, backend, async_op=True),
            ferrodist.scatter(np.arange(world) if rank == 1 else None, backend, 1, async_op=True),
            ferrodist.all_gather_uneven(np.full(rank, rank), backend, async_op=True),
            ferrodist.broadcast_object({"of": rank}, backend, 2, async_op=True),
        ]
        names = [thread.name for thread in threading.enumerate()]
        found = works[0].wait(60)
        values = [found["a"].tolist(), found["b"].tolist(), works[1].wait(60).tolist()]
        values += [works[2].wait().tolist(), works[3].wait()]
        return values, [name for name in names if "progress" in name]

    with start(3, body) as job:
        for rank, (values, threads) in enumerate(job.results()):
            assert values == [
                [3, 6, 9],
                [3, 6, 9, 12, 15],
                [rank],
                [1, 2, 2],
                {"of": 2},
            ]
            assert threads == []


def test_a_tree_in_flight_that_nobody_else_runs_is_run_by_who_waits(start):
    def body(backend, pipe):
        def thread_of_call(*args):
            used.append(threading.get_ident())
            return usual(*args)

        used, usual = [], backend._run_collective
        backend._run_collective = thread_of_call
        for _ in range(20):
            x = {"a": np.ones(3), "b": np.ones(3, np.float32)}
            ferrodist.allreduce(x, backend, async_op=True).wait()
        return threading.get_ident() in used

    with start(2, body) as job:
        assert all(job.results())


def test_a_call_in_flight_that_cannot_end_does_not_hold_up_the_end_of_its_rank(start):
    def body(backend, pipe):
        if backend.rank == 0:
            work = ferrodist.all_gather_object("x", backend, async_op=True)
            pipe.send("started")
            pipe.recv()
            backend._fail(ValueError("the program has failed"))
            with pytest.raises(ferrodist.BackendClosed, match="left the group before it was done"):
                work.wait(30)
            pipe.send("left")
            return
        pipe.recv()
        with pytest.raises(ferrodist.RankLost, match="the program has failed"):
            ferrodist.barrier(backend)
        return

    with start(2, body) as job:
        assert job[0].hear() == "started"
        job[0].tell()
        assert job[0].hear() == "left"
        job[1].tell()
        job.results()


def test_calls_that_have_not_begun_when_their_rank_leaves_end_too(start):
    def body(backend, pipe):
        if backend.rank == 0:
            x = {"a": np.ones(3), "b": np.ones(3, np.float32)}
            works = [ferrodist.allreduce(one, backend, async_op=True) for one in (x, x, x["a"])]
            backend._fail(ValueError("the program has failed"))
            for work in works:
                with pytest.raises(ferrodist.BackendClosed, match="left the group before"):
                    work.wait(30)
            pipe.send("left")
        pipe.recv()

    with start(2, body) as job:
        assert job[0].hear() == "left"
        job[0].tell()
        job[1].tell()
        job.results()
