"""Hybrid groups that lose ranks: those that speak for their hosts, others, whole hosts."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import CollectiveTimeout, DistributedError, Evicted, GroupAborted, RankLost
from jobs import LIMIT, QUICK, error_and_time
from test_rank_faults import call_for_ever, greet_survivors, tell_of_long_waits

pytestmark = pytest.mark.timeout(90)

TWO_AND_TWO = "0011"
MEGABYTE = 1 << 20
WHO = {
    "rank 0": [0],
    "beside rank 0": [1],
    "a node leader": [2],
    "beside a node leader": [3],
    "a whole host": [2, 3],
    "the host of rank 0": [0, 1],
}


# -- death -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [32, 8 * MEGABYTE])
@pytest.mark.parametrize("who", WHO)
def test_killed_ranks_are_named_by_all_within_two_seconds_and_they_live_on(
    start_hybrid_job, nbytes, who
):
    dead = WHO[who]

    def body(backend, pipe):
        error, when = error_and_time(call_for_ever, backend, nbytes, pipe)
        later, _ = error_and_time(ferrodist.barrier, backend)
        greetings = greet_survivors(backend, dead[0]) if len(dead) == 1 else []
        with backend.split([rank for rank in range(4) if rank not in dead]) as group:
            total = ferrodist.allreduce(1, group)
        return error, when, later, greetings, total

    with start_hybrid_job(TWO_AND_TWO, body) as job:
        for rank in job:
            assert rank.hear() == "ready"
        killed = time.monotonic()
        for rank in dead:
            job[rank].send_signal(signal.SIGKILL)
        for number in {0, 1, 2, 3} - {*dead}:
            error, when, later, greetings, total = job[number].end().result
            assert isinstance(error, RankLost), error
            assert error.rank in dead
            assert when - killed < 2
            assert (type(later), later.rank) == (RankLost, error.rank)
            peers = [rank for rank in range(4) if rank not in (number, *dead)]
            assert greetings == ([100 * peer + number for peer in peers] if len(dead) == 1 else [])
            assert total == 4 - len(dead)


def test_all_ranks_name_the_same_dead_one_with_how_it_died(start_hybrid_job):
    """On its host that is known; the first who tells it tells it to all."""

    def body(backend, pipe):
        if backend.rank == 3:
            pipe.send("ready")
            pipe.recv()
        return error_and_time(ferrodist.barrier, backend)[0]

    with start_hybrid_job(TWO_AND_TWO, body) as job:
        assert job[3].hear() == "ready"
        for rank in job.others(3):
            rank.await_sleep()
        job[3].send_signal(signal.SIGKILL)
        errors = [rank.end().result for rank in job.others(3)]
    assert len({str(error) for error in errors}) == 1
    assert [error.rank for error in errors] == [3, 3, 3]
    assert "rank 3 was killed by SIGKILL" in str(errors[0])


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 60), marks=pytest.mark.long)])
def test_kills_at_any_moment_are_all_noticed(start_hybrid_job, seeds):
    late = []
    for seed in seeds:
        rng = random.Random(seed)
        hosts = rng.choice(["0011", "001", "010", "0112"])
        world, nbytes = len(hosts), rng.choice([12, 1200, 120_000, 6 * MEGABYTE])
        failed_rank, moment = rng.randrange(world), rng.uniform(0, 0.02)

        def body(backend, pipe, nbytes=nbytes):
            return error_and_time(call_for_ever, backend, nbytes, pipe)

        with start_hybrid_job(hosts, body) as job:
            for rank in job:
                assert rank.hear() == "ready"
            end = time.monotonic() + moment
            while time.monotonic() < end:
                pass  # the moment is what is random
            killed = job[failed_rank].send_signal(signal.SIGKILL)
            for rank in job.others(failed_rank):
                error, when = rank.end().result
                assert isinstance(error, RankLost), f"seed {seed}: {error!r}"
                assert error.rank == failed_rank, f"seed {seed}: {error}"
                late.append(when - killed)
    late.sort()
    print(f"half within {late[len(late) // 2]:.3f} s, all within {late[-1]:.3f} s")
    assert late[int(len(late) * 0.99)] < 2


def test_a_rank_that_died_after_its_part_of_a_call_is_lost_only_to_the_next_one(start_hybrid_job):
    """Rank 3 is late. Rank 1 is in the last round of its host, and nothing more is needed of it."""

    def body(backend, pipe):
        pipe.send("ready")
        if backend.rank == 3:
            pipe.recv()
        elif backend.rank == 0:
            tell_of_long_waits(pipe)
        total = ferrodist.allreduce(np.full(3, backend.rank + 1), backend).tolist()
        return total, error_and_time(ferrodist.barrier, backend)[0]

    with start_hybrid_job(TWO_AND_TWO, body, FERRODIST_LOG_WAIT_AFTER="0.3") as job:
        for rank in job:
            assert rank.hear() == "ready"
        for rank in job.others(3):
            rank.await_sleep()
        job[1].send_signal(signal.SIGKILL)
        assert "still waiting for rank 3" in str(job[0].hear())  # has looked round, not for rank 1
        job[3].tell()
        for rank in job.others(1):
            total, error = rank.end().result
            assert total == [10, 10, 10]
            assert isinstance(error, RankLost)
            assert error.rank == 1


def test_dying_right_after_the_last_call_harms_nobody(start_hybrid_job):
    def body(backend, pipe):
        ferrodist.barrier(backend)
        total = ferrodist.allreduce(np.full(3, backend.rank + 1), backend).tolist()
        if backend.rank == failed_rank:
            os._exit(0)
        return total

    for number in range(8):
        failed_rank = number % 4
        with start_hybrid_job(TWO_AND_TWO, body) as job:
            assert [rank.end().result for rank in job.others(failed_rank)] == [[10, 10, 10]] * 3


# -- silence ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_a_stopped_rank_is_given_up_at_the_silence_limit_and_may_not_come_back(
    start_hybrid_job, stopped
):
    others = [rank for rank in range(4) if rank != stopped]

    def body(backend, pipe):
        error, when = error_and_time(call_for_ever, backend, 32, pipe)
        if backend.rank == stopped:
            pipe.send((error, error_and_time(ferrodist.allreduce, 1000, backend)[0]))
            return None
        pipe.send((error, when))
        assert pipe.recv() == "the stopped one is awake"
        return ferrodist.allreduce(backend.rank + 1, backend.split(others))

    with start_hybrid_job(TWO_AND_TWO, body, **QUICK) as job:
        for rank in job:
            assert rank.hear() == "ready"
        begin = job[stopped].send_signal(signal.SIGSTOP)
        for rank in job.others(stopped):
            error, when = rank.hear()
            assert isinstance(error, RankLost)
            assert error.rank == stopped
            assert f"rank {stopped} has sent no heartbeat for 1 s" in str(error)
            assert abs(when - begin - 1) < 0.7
        job[stopped].send_signal(signal.SIGCONT)
        for error in job[stopped].hear():
            assert isinstance(error, Evicted)
            assert f"rank {stopped} has sent no heartbeat" in str(error)
        for rank in job.others(stopped):
            rank.tell("the stopped one is awake")
        total = sum(others) + 3
        assert [rank.end().result for rank in job.others(stopped)] == [total] * 3


@pytest.mark.parametrize("absent", [0, 1, 2, 3])
def test_a_rank_that_never_calls_is_named_by_all_and_refused_when_it_comes(
    start_hybrid_job, absent
):
    shortest = (absent + 2) % 4  # its deadline, on the other host, ends it for all

    def body(backend, pipe):
        ferrodist.broadcast(1, backend)
        if backend.rank == absent:
            pipe.recv()
        backend.timeout = 0.4 if backend.rank == shortest else LIMIT
        error = error_and_time(ferrodist.barrier, backend)[0]
        return error, error_and_time(ferrodist.barrier, backend)[0]

    with start_hybrid_job(TWO_AND_TWO, body) as job:
        ends = [rank.end().result for rank in job.others(absent)]
        job[absent].tell()
        late, again = job[absent].end().result
    seen = f"rank {absent} did not get through within 0.4 s"
    for error, later in ends:
        assert isinstance(error, CollectiveTimeout)
        assert error.missing == [absent]
        assert "barrier #2" in str(error)
        assert f"{seen} (rank {absent} last call was broadcast #1)" in str(error)
        assert isinstance(later, GroupAborted)
    for error in (late, again):
        assert isinstance(error, GroupAborted)
        assert seen in str(error)


def test_a_long_wait_is_logged_with_the_rank_it_waits_for(start_hybrid_job):
    def body(backend, pipe):
        tell_of_long_waits(pipe)
        ferrodist.barrier(backend)
        if backend.rank == 3:
            pipe.recv()
        ferrodist.allreduce(np.ones(3), backend)

    with start_hybrid_job(TWO_AND_TWO, body, FERRODIST_LOG_WAIT_AFTER="0.2") as job:
        for number in (0, 1, 2):
            words = f"rank {number}: still waiting for rank 3 in allreduce #2 at "
            while "waiting for ranks" in (heard := job[number].hear()):
                pass  # others of the three are late, too: the machine is busy
            assert heard.startswith(words)
        job[3].tell()
        assert job[3].end().error is None


def test_a_slow_rank_is_named_by_the_statistics_of_its_host(start_hybrid_job):
    """Late once and by much: on a busy machine a rank that is woken is late for its next call, too.

    After a barrier its leader goes on at once, and waits for it in the next one.
    """

    def body(backend, pipe):
        found = []
        for slow in (1, 2):
            with backend.split([0, 1, 2, 3]) as group:
                if backend.rank == slow:
                    time.sleep(0.4)  # this rank is slow on purpose: it is what is measured
                ferrodist.barrier(group)
                found.append(group.statistics().slowest)
        return found

    with start_hybrid_job(TWO_AND_TWO, body) as job:
        results = job.results()
    assert results[0] == [1, 2]
    assert results[3][1] == 2


# -- errors, interrupts, leave reasons -------------------------------------------------------------


@pytest.mark.parametrize("failed_rank", [0, 1, 2])
def test_an_exception_on_one_rank_is_told_to_the_others(start_hybrid_job, failed_rank):
    def body(backend, pipe):
        ferrodist.barrier(backend)
        if backend.rank == failed_rank:
            raise ValueError("no such file: data.npy")
        ferrodist.allreduce(np.ones(3), backend)

    with start_hybrid_job(TWO_AND_TWO, body) as job:
        ends = [rank.end() for rank in job]
    assert isinstance(ends[failed_rank].error, ValueError)
    for rank, end in enumerate(ends):
        if rank != failed_rank:
            assert isinstance(end.error, RankLost)
            assert end.error.rank == failed_rank
            assert f"rank {failed_rank} raised ValueError: no such file: data.npy" in str(end.error)
            assert end.when - ends[failed_rank].when < 2


def close_here(backend: Any) -> None:
    backend.close()


LINE = close_here.__code__.co_firstlineno + 1


@pytest.mark.parametrize("failed_rank", [0, 1, 2])
@pytest.mark.parametrize("how", ["closes", "ends"])
def test_a_rank_that_leaves_while_others_still_call_is_lost(start_hybrid_job, how, failed_rank):
    def body(backend, pipe):
        group = backend.split([0, 1, 2, 3]) if how == "closes" else backend
        for _ in range(3):
            ferrodist.barrier(group)
        left = time.monotonic()
        if backend.rank != failed_rank:
            return error_and_time(ferrodist.allreduce, np.ones(3), group)
        if how == "closes":
            close_here(group)
            with contextlib.suppress(DistributedError):
                ferrodist.barrier(backend, timeout=LIMIT)  # until the others are gone
        return None, left

    words = {
        "closes": f"left after #3 (closed at test_hybrid_losses.py:{LINE}); every",
        "ends": "left after #3 (its program ended); every rank must make the same number of calls",
    }
    with start_hybrid_job(TWO_AND_TWO, body) as job:
        results = [rank.end().result for rank in job]
    for rank, (error, when) in enumerate(results):
        if rank != failed_rank:
            assert isinstance(error, RankLost)
            assert error.rank == failed_rank
            assert f"rank {failed_rank} {words[how]}" in str(error)
            assert when - results[failed_rank][1] < 2


@pytest.mark.parametrize("nbytes", [24, 4 * MEGABYTE])
def test_leaving_right_after_the_last_call_harms_nobody(start_hybrid_job, nbytes):
    """The rank that is first out of a group's last call leaves it at once."""

    def body(backend, pipe):
        x = backend.zeros(nbytes // 8, "float64") if backend.rank % 2 else np.zeros(nbytes // 8)
        calls = [
            lambda group: ferrodist.allreduce(x, group),
            lambda group: ferrodist.broadcast(x, group, 3),
            lambda group: ferrodist.reduce(x, group, 2),
            lambda group: ferrodist.gather(x, group),
            lambda group: ferrodist.all_to_all(x[: len(x) // 4 * 4], group),
            lambda group: ferrodist.all_gather_object(group.rank, group),
            lambda group: ferrodist.barrier(group),
        ]
        for number in range(105 if nbytes < MEGABYTE else 21):
            with backend.split([0, 1, 2, 3]) as group:
                calls[number % 7](group)

    with start_hybrid_job(TWO_AND_TWO, body) as job:
        job.results()


WAITS = {
    "inside": (1, lambda backend: ferrodist.allreduce(np.ones(3), backend)),
    "between": (2, lambda backend: ferrodist.allreduce(np.ones(3), backend)),
    "large": (2, lambda backend: ferrodist.allreduce(np.ones(MEGABYTE), backend)),
    "object": (1, lambda backend: ferrodist.broadcast_object(None, backend, 3)),
    "message": (2, lambda backend: ferrodist.recv(3, backend, like=np.ones(3))),
    "split": (0, lambda backend: backend.split([0, 1, 2, 3])),
}


@pytest.mark.parametrize("what", WAITS)
def test_ctrl_c_in_a_wait_is_raised_there_and_aborts_the_others(start_hybrid_job, what):
    failed_rank, wait = WAITS[what]

    def body(backend, pipe):
        pipe.send("ready")
        if backend.rank == 3:
            pipe.recv()
        return error_and_time(ferrodist.barrier if backend.rank == 3 else wait, backend)

    with start_hybrid_job(TWO_AND_TWO, body) as job:
        for rank in job:
            assert rank.hear() == "ready"
        for rank in job.others(3):
            rank.await_sleep()
        interrupted = job[failed_rank].send_signal(signal.SIGINT)
        error, when = job[failed_rank].end().result
        assert isinstance(error, KeyboardInterrupt)
        assert when - interrupted < 0.5
        job[3].tell()
        for rank in job.others(failed_rank):
            error, when = rank.end().result
            assert isinstance(error, GroupAborted), error
            assert error.rank == failed_rank
            assert f"rank {failed_rank} aborted the group: KeyboardInterrupt (in " in str(error)
            assert when - interrupted < 2


def test_abort_reaches_ranks_that_wait_inside_and_between(start_hybrid_job):
    def body(backend, pipe):
        if backend.rank == 3:
            pipe.recv()
            backend.abort("loss is not a number")
            return None
        return error_and_time(ferrodist.barrier, backend)[0]

    with start_hybrid_job(TWO_AND_TWO, body) as job:
        for rank in job.others(3):
            rank.await_sleep()
        job[3].tell()
        for rank in job.others(3):
            error = rank.end().result
            assert isinstance(error, GroupAborted)
            assert (error.rank, error.reason) == (3, "loss is not a number")
