"""Calls in flight between processes: their thread, their order, and what they cost."""

from __future__ import annotations

import gc
import resource
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ferrodist

pytestmark = pytest.mark.timeout(90)

LARGE = 16 << 20  # float32: 64 MB
CALLS = {
    "allreduce": lambda x, backend: ferrodist.allreduce(x, backend),
    "broadcast": lambda x, backend: ferrodist.broadcast(x, backend, 1),
    "reduce": lambda x, backend: ferrodist.reduce(x, backend, 1),
    "all_gather": lambda x, backend: ferrodist.all_gather(x, backend),
    "gather": lambda x, backend: ferrodist.gather(x, backend, 1),
    "reduce_scatter": lambda x, backend: ferrodist.reduce_scatter(x, backend),
    "all_to_all": lambda x, backend: ferrodist.all_to_all(x, backend),
    "barrier": lambda x, backend: ferrodist.barrier(backend),
}


def progress_threads() -> list[Path]:
    """List the native threads that run calls in flight."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # one that ends meanwhile
            if (task / "comm").read_text() == "ferrodist-calls\n":
                found.append(task)
    return found


def cpu_seconds(thread: Path) -> float:
    """How long a thread has run on a core."""
    return int((thread / "schedstat").read_text().split()[0]) * 1e-9


def num_sleeps(thread: Path) -> int:
    """How often a thread has gone to sleep."""
    status = (thread / "status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


# -- the thread ------------------------------------------------------------------------------------


def test_calls_in_flight_run_in_program_order_on_one_thread_that_ends_with_close(start_job):
    def body(backend, pipe):
        assert ferrodist.allreduce(1, backend) == 3
        assert progress_threads() == []  # a call that is waited for needs none
        works = []
        for number in range(20):
            x = np.full([3, 50_000][number % 2], number + backend.rank)
            works.append(ferrodist.allreduce(x, backend, async_op=True))
        last = ferrodist.allreduce(np.array([backend.rank]), backend, timeout=20)  # in its turn
        assert all(work.done() for work in works)
        assert len(progress_threads()) == 1
        backend.close()
        return [int(work.result()[-1]) for work in works], int(last[0]), progress_threads()

    with start_job(3, body) as job:
        assert job.results() == [([3 * number + 3 for number in range(20)], 3, [])] * 3


def test_a_wait_that_runs_out_leaves_the_call_going(start_job):
    def body(backend, pipe):
        if backend.rank == 1:
            pipe.recv()
            return ferrodist.allreduce(2, backend)
        work = ferrodist.allreduce(1, backend, async_op=True)
        with pytest.raises(TimeoutError):
            work.wait(0.01)
        pipe.send("gone on")
        return work.wait(20)

    with start_job(2, body) as job:
        assert job[0].hear() == "gone on"
        job[1].tell()
        assert job.results() == [3, 3]


@pytest.mark.parametrize("is_async", [True, False])
def test_the_caller_computes_while_a_large_call_waits_and_while_it_moves_data(start_job, is_async):
    """Nobody takes the GIL from a thread here: did the call keep it, nothing would be counted."""

    def body(backend, pipe):
        x, found, done = np.ones(LARGE, np.float32), [], threading.Event()
        if backend.rank == 1:
            pipe.recv()
            return float(ferrodist.allreduce(x, backend)[-1])

        def call():
            found.append(ferrodist.allreduce(x, backend))
            done.set()

        sys.setswitchinterval(1000)
        if is_async:
            work = ferrodist.allreduce(x, backend, async_op=True)
            work.add_done_callback(lambda work: done.set())
        else:
            threading.Thread(target=call).start()
        while backend.group.last_call(backend.rank)[0] == 0:
            time.sleep(0)  # lets go of the GIL, until the call has begun to wait
        waiting = moving = 0
        while waiting < 100_000:
            waiting += 1
        pipe.send(waiting)  # now the other rank may come
        while not done.is_set():
            moving += 1
            time.sleep(0)
        total = work.wait(20) if is_async else found[0]
        return float(total[-1]), moving > 50

    with start_job(2, body) as job:
        assert job[0].hear() == 100_000
        job[1].tell()
        assert job.results() == [(2.0, True), 2.0]


@pytest.mark.slow
def test_the_progress_thread_and_a_waiting_caller_use_no_cpu(start_job):
    """Rank 1 is late by a second, twice: once in flight, once with the caller in the call."""

    def body(backend, pipe):
        used = []
        ferrodist.allreduce(1, backend, async_op=True).wait(20)
        (thread,) = progress_threads()
        ferrodist.barrier(backend)
        if backend.rank == 1:
            time.sleep(1)  # what the other waits for
            ferrodist.allreduce(1, backend)
            time.sleep(1)
            ferrodist.allreduce(np.ones(3), backend)
            return used
        before = cpu_seconds(thread)
        ferrodist.allreduce(1, backend, async_op=True).wait(20)
        used.append(cpu_seconds(thread) - before)
        start = time.process_time()
        ferrodist.allreduce(np.ones(3), backend)
        used.append(time.process_time() - start)
        return used

    with start_job(2, body) as job:
        for used in job.results()[0]:
            assert used < 0.1


# -- costs -----------------------------------------------------------------------------------------


def test_small_calls_take_one_round_and_move_what_they_must(start_job):
    def body(backend, pipe):
        found = {}
        x = np.arange(30.0)
        for name, call in CALLS.items():
            before, rounds = backend.statistics(), backend.group.num_rounds
            call(x, backend)
            after = backend.statistics()
            assert backend.group.num_rounds - rounds == 1, name
            assert after.collectives - before.collectives == 1
            found[name] = (
                after.sent_nbytes - before.sent_nbytes,
                after.received_nbytes - before.received_nbytes,
            )
        return found

    n = 30 * 8
    with start_job(3, body) as job:
        for rank, found in enumerate(job.results()):
            root = rank == 1
            assert found == {
                "allreduce": (n, 2 * n),
                "broadcast": (n, 0) if root else (0, n),
                "reduce": (0, 2 * n) if root else (n, 0),
                "all_gather": (n, 2 * n),
                "gather": (0, 2 * n) if root else (n, 0),
                "reduce_scatter": (2 * n // 3, 2 * n // 3),
                "all_to_all": (2 * n // 3, 2 * n // 3),
                "barrier": (0, 0),
            }


def test_large_calls_move_no_more_than_they_must(start_job):
    """Each rank shows what others reduce, and its own part of the result: no byte twice."""

    def body(backend, pipe):
        x = np.ones(3 << 18, np.float32)
        before = backend.statistics()
        ferrodist.allreduce(x, backend)
        after = backend.statistics()
        return (
            (after.sent_nbytes - before.sent_nbytes) / x.nbytes,
            (after.received_nbytes - before.received_nbytes) / x.nbytes,
        )

    with start_job(3, body) as job:
        for sent, received in job.results():
            assert sent == pytest.approx(1, rel=0.01)
            assert received == pytest.approx(4 / 3, rel=0.01)


@pytest.mark.parametrize("is_async", [False, True])
def test_calls_leave_no_objects_behind(start_job, is_async):
    def body(backend, pipe):
        x, number = np.full(3, backend.rank), []

        def call_often():
            for call in CALLS.values():
                for _ in range(30):
                    call(x, backend)
            for _ in range(100):
                work = ferrodist.allreduce(x, backend, async_op=is_async)
            if is_async:
                work.wait(20)

        for _ in range(4):
            call_often()
            ferrodist.allreduce(x, backend)
            gc.collect()
            number.append(len(gc.get_objects()))
        return number

    with start_job(3, body) as job:
        for number in job.results():
            assert number[-1] <= number[1]


def waiting_costs(backend: Any, late: int) -> float:
    """Let one rank be late by a second; return the CPU time of the wait."""
    ferrodist.barrier(backend)
    start = time.process_time()
    if backend.rank == late:
        time.sleep(1)  # what the others wait for
    ferrodist.allreduce(np.ones(3), backend)
    return time.process_time() - start


@pytest.mark.slow
def test_more_ranks_than_cores_finish_and_wait_without_using_them(start_job):
    def body(backend, pipe):
        x = np.full(3, backend.rank)
        totals = {int(ferrodist.allreduce(x, backend)[0]) for _ in range(2000)}
        return totals, waiting_costs(backend, late=5)

    with start_job(8, body) as job:
        for totals, seconds in job.results():
            assert totals == {28}
            assert seconds < 0.2


def test_the_thread_of_calls_sleeps_while_calls_are_waited_for(start_job):
    def body(backend, pipe):
        x = np.full(3, backend.rank)
        for _ in range(2000):  # it starts, and sees that it is not needed
            ferrodist.allreduce(x, backend, async_op=True).wait()
        while not (found := progress_threads()):  # a new thread has its name when it first runs
            time.sleep(0.001)
        [thread] = found
        wakes, start = num_sleeps(thread), time.perf_counter()
        for _ in range(20_000):
            ferrodist.allreduce(x, backend, async_op=True).wait()
        return num_sleeps(thread) - wakes, time.perf_counter() - start

    with start_job(2, body) as job:
        for wakes, seconds in job.results():
            assert wakes < 100 + 2000 * seconds


@pytest.mark.parametrize("nbytes", [24, 1 << 20])
def test_a_call_nobody_waits_for_is_done_after_many_that_were_waited_for(start_job, nbytes):
    def body(backend, pipe):
        x = np.full(nbytes // 8, backend.rank + 1)
        for _ in range(50):
            ferrodist.allreduce(x[:3], backend, async_op=True).wait()
        if backend.rank == 1:
            return pipe.send(int(ferrodist.allreduce(x, backend)[-1]))
        work = ferrodist.allreduce(x, backend, async_op=True)
        pipe.recv()
        return int(work.result()[-1])

    with start_job(2, body) as job:
        assert job[1].hear() == 3
        job[0].tell()
        assert job.results()[0] == 3


def test_a_short_call_is_done_at_once_where_all_others_have_come(start_job):
    def body(backend, pipe):
        met = []
        for number in range(20):
            for nbytes in (24, 1 << 20):  # a long one is worth a thread
                x = np.full(nbytes // 8, backend.rank + number)
                if backend.rank != 0:
                    ferrodist.allreduce(x, backend)
                    continue
                pipe.recv()
                work = ferrodist.allreduce(x, backend, async_op=True)
                met.append(work._meet())
                assert work.result()[-1] == 3 + 3 * number
        return met

    with start_job(3, body) as job:
        for _ in range(40):
            for rank in job.others(0):
                rank.await_sleep()
            job[0].tell()
        met = job.results()[0]
        assert sum(met[::2]) > sum(met[1::2])  # on a busy machine the thread is quicker with some


def test_a_call_that_others_do_not_come_to_goes_on_without_its_program(start_job):
    def body(backend, pipe):
        if backend.rank == 0:
            work = ferrodist.allreduce(1, backend, async_op=True)
            pipe.send(work._meet())
            pipe.recv()
            return work.result()
        pipe.recv()
        return pipe.send(ferrodist.allreduce(1, backend))

    with start_job(2, body) as job:
        assert job[0].hear() is False
        job[1].tell()
        assert job[1].hear() == 2
        job[0].tell()
        assert job.results()[0] == 2


def test_many_messages_in_flight_take_no_new_memory(start_job):
    """New pages of shared memory take longer than the copy: a sender keeps those it has."""

    def body(backend, pipe):
        arrays = [np.full(64 << 10, number, np.uint8) for number in range(64)]
        faults = []
        for _ in range(12):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            if backend.rank == 0:
                works = [backend.send(array, 1, async_op=True) for array in arrays]
                backend.barrier()
            else:
                backend.barrier()
                works = [backend.recv(0, async_op=True) for _ in arrays]
            found = ferrodist.wait_all(works)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        return faults, [int(array[-1]) for array in found if array is not None]

    with start_job(2, body) as job:
        (faults, _), (_, received) = job.results()
    assert received == list(range(64))
    assert sum(faults[2:]) < 10 * 64 * 8  # half of the pages of the messages


@pytest.mark.parametrize("nbytes", [24, 1 << 20])
def test_results_do_not_depend_on_who_comes_late(start_job, nbytes):
    """A different rank comes last in every call, when all others have posted and sleep."""

    def body(backend, pipe):
        totals = []
        for number in range(6):
            if number % 3 == backend.rank:
                pipe.recv()
            x = np.full(nbytes // 8, backend.rank + 10 * number)
            total = ferrodist.allreduce(x, backend)
            totals.append(int(total[0]) if (total == total[0]).all() else None)
        return totals

    with start_job(3, body) as job:
        for number in range(6):
            for rank in job.others(number % 3):
                rank.await_sleep()
            job[number % 3].tell()
        assert job.results() == [[3 + 30 * number for number in range(6)]] * 3
