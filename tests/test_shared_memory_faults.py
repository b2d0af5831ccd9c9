"""Ranks that die, stop, never come, raise or leave: named on every other rank, in good time."""

from __future__ import annotations

import itertools
import logging
import random
import signal
import time
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import CollectiveTimeout, GroupAborted, RankLost
from jobs import LIMIT, error_and_time

pytestmark = pytest.mark.timeout(90)

QUICK = {"FERRODIST_HEARTBEAT": "0.2", "FERRODIST_SILENCE": "1"}
MEGABYTE = 1 << 20


def call_for_ever(backend: Any, nbytes: int) -> None:
    """Go through the collectives, again and again, until one raises."""
    world = backend.world_size
    x = np.full((world, nbytes // world), backend.rank, np.uint8)
    out = np.empty_like(x)
    for number in itertools.count():
        ferrodist.allreduce(x, backend, "max", out=out)
        ferrodist.broadcast(x, backend, number % world, out=out)
        ferrodist.reduce_scatter(x, backend, "max")
        ferrodist.gather(x[:1], backend, number % world)
        ferrodist.all_to_all(x, backend)
        ferrodist.barrier(backend)


def greet_survivors(backend: Any, lost: int) -> list[int]:
    """Exchange messages with every other rank that is left."""
    peers = [rank for rank in range(backend.world_size) if rank not in (backend.rank, lost)]
    for peer in peers:
        ferrodist.send(100 * backend.rank + peer, peer, backend)
    return [ferrodist.recv(0, peer, backend) for peer in peers]


def tell_of_long_waits(pipe: Any) -> None:
    """Send what is logged to the test."""

    class Tells(logging.Handler):
        def emit(self, record):
            pipe.send(record.getMessage())

    logging.getLogger("ferrodist").addHandler(Tells())


# -- death -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [30, 64 * MEGABYTE])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_killed_rank_is_named_by_all_within_a_second_and_they_live_on(start_job, nbytes, culprit):
    def body(backend, pipe):
        pipe.send("ready")
        error, when = error_and_time(call_for_ever, backend, nbytes)
        later, _ = error_and_time(ferrodist.barrier, backend)
        return error, when, later, greet_survivors(backend, culprit)

    with start_job(3, body) as job:
        for rank in job:
            assert rank.hear() == "ready"
        killed = job[culprit].send_signal(signal.SIGKILL)
        assert job[culprit].has_ended()
        for number in {0, 1, 2} - {culprit}:
            error, when, later, greetings = job[number].end().result
            assert isinstance(error, RankLost)
            assert error.rank == culprit
            assert f"rank {culprit} was killed by SIGKILL" in str(error)
            assert when - killed < 1
            assert (type(later), later.rank) == (RankLost, culprit)
            peer = 3 - culprit - number
            assert greetings == [100 * peer + number]


def test_a_rank_that_died_after_its_part_of_a_call_is_lost_only_to_the_next_one(start_job):
    def body(backend, pipe):
        pipe.send("ready")
        if backend.rank == 2:
            pipe.recv()
        elif backend.rank == 0:
            tell_of_long_waits(pipe)
        total = ferrodist.allreduce(np.full(3, backend.rank + 1), backend).tolist()
        return total, *error_and_time(ferrodist.barrier, backend)

    with start_job(3, body, FERRODIST_NOTICE="0.3") as job:
        for rank in job:
            assert rank.hear() == "ready"
        for rank in job.others(2):
            rank.await_sleep()
        job[1].send_signal(signal.SIGKILL)
        assert "still waiting for rank 2" in job[0].hear()  # has looked round, and not for rank 1
        told = time.monotonic()
        job[2].tell()
        for rank in job.others(1):
            total, error, when = rank.end().result
            assert total == [6, 6, 6]
            assert isinstance(error, RankLost)
            assert error.rank == 1
            assert when - told < 1


@pytest.mark.slow
def test_two_hundred_kills_at_any_moment_are_all_noticed(start_job):
    late = []
    for seed in range(200):
        rng = random.Random(seed)
        world, nbytes = rng.choice([2, 3]), rng.choice([6, 600, 60_000, 6 * MEGABYTE])
        culprit, moment = rng.randrange(world), rng.uniform(0, 0.02)

        def body(backend, pipe, nbytes=nbytes):
            pipe.send("ready")
            return error_and_time(call_for_ever, backend, nbytes)

        with start_job(world, body) as job:
            for rank in job:
                assert rank.hear() == "ready"
            end = time.monotonic() + moment
            while time.monotonic() < end:
                pass  # the moment is what is random
            killed = job[culprit].send_signal(signal.SIGKILL)
            for rank in job.others(culprit):
                error, when = rank.end().result
                assert isinstance(error, RankLost), f"seed {seed}: {error!r}"
                assert error.rank == culprit, f"seed {seed}: {error}"
                late.append(when - killed)
    late.sort()
    print(f"half within {late[len(late) // 2]:.3f} s, all within {late[-1]:.3f} s")
    assert late[int(len(late) * 0.99)] < 1


# -- silence ---------------------------------------------------------------------------------------


def test_a_stopped_rank_is_given_up_at_the_silence_limit_and_may_not_come_back(start_job):
    def body(backend, pipe):
        pipe.send("ready")
        error, when = error_and_time(call_for_ever, backend, 30)
        if backend.rank == 1:
            pipe.send((error, error_and_time(ferrodist.allreduce, 1000, backend)[0]))
            return None
        pair = backend.split([0, 2])
        pipe.send((error, when))
        assert pipe.recv() == "the stopped one is awake"
        return ferrodist.allreduce(backend.rank + 1, pair)

    with start_job(3, body, **QUICK) as job:
        for rank in job:
            assert rank.hear() == "ready"
        stopped = job[1].send_signal(signal.SIGSTOP)
        for rank in job.others(1):
            error, when = rank.hear()
            assert isinstance(error, RankLost)
            assert error.rank == 1
            assert "rank 1 shows no sign of life: no heartbeat for 1 s" in str(error)
            assert abs(when - stopped - 1) < 0.5
        job[1].send_signal(signal.SIGCONT)
        for error in job[1].hear():
            assert isinstance(error, (RankLost, GroupAborted))
            assert "rank 1 shows no sign of life" in str(error)
        for rank in job.others(1):
            rank.tell("the stopped one is awake")
        assert [rank.end().result for rank in job.others(1)] == [4, 4]  # nothing of rank 1 in it


def test_a_job_that_is_stopped_as_a_whole_goes_on_when_it_is_continued(start_job):
    def body(backend, pipe):
        if backend.rank == 2:
            pipe.recv()
        else:
            tell_of_long_waits(pipe)
        return ferrodist.allreduce(backend.rank, backend)

    with start_job(3, body, FERRODIST_NOTICE="0.3", **QUICK) as job:
        for rank in job.others(2):
            assert "still waiting for rank 2" in rank.hear()
        for rank in job:
            rank.send_signal(signal.SIGSTOP)
        time.sleep(1.3)  # longer than silence may be: it is what must not matter
        for rank in job.others(2):
            rank.send_signal(signal.SIGCONT)
        time.sleep(0.1)  # they look round, and rank 2 has shown no sign of life for long
        job[2].send_signal(signal.SIGCONT)
        job[2].tell()
        assert job[2].end().result == 3


def test_a_rank_that_holds_the_gil_is_alive_and_only_late(start_job):
    def body(backend, pipe):
        ferrodist.barrier(backend)
        if backend.rank == 1:
            sum(itertools.repeat(1, 1 << 60))  # never lets go
        ferrodist.barrier(backend, timeout=1.6)

    with start_job(3, body, **QUICK) as job:
        for rank in job.others(1):
            error = rank.end().error
            assert isinstance(error, CollectiveTimeout)
            assert error.missing == [1]


def test_a_rank_that_never_calls_is_named_by_all_and_refused_when_it_comes(start_job):
    limits = [0.4, LIMIT, LIMIT]  # the shortest ends it for all

    def body(backend, pipe):
        ferrodist.broadcast(1, backend)
        start = time.monotonic()
        if backend.rank == 1:
            pipe.recv()
        backend.timeout = limits[backend.rank]
        error, when = error_and_time(ferrodist.barrier, backend)
        return error, when - start, error_and_time(ferrodist.barrier, backend)[0]

    with start_job(3, body) as job:
        ends = [rank.end().result for rank in job.others(1)]
        job[1].tell()
        late, _, again = job[1].end().result
    seen = "rank 1 did not get through within 0.4 s (rank 1 last call was broadcast #1)"
    for error, seconds, later in ends:
        assert isinstance(error, CollectiveTimeout)
        assert error.missing == [1]
        assert "barrier #2" in str(error)
        assert seen in str(error)
        assert 0.3 < seconds < 1.4
        assert isinstance(later, GroupAborted)
    for error in (late, again):
        assert isinstance(error, GroupAborted)
        assert seen in str(error)


@pytest.mark.parametrize("options", [{}, {"timeout": 20}])
def test_a_long_wait_is_logged_with_the_rank_it_waits_for(start_job, options):
    def body(backend, pipe):
        tell_of_long_waits(pipe)
        ferrodist.barrier(backend)
        if backend.rank == 2:
            pipe.recv()
        ferrodist.allreduce(np.ones(3), backend, **options)

    with start_job(3, body, FERRODIST_NOTICE="0.2") as job:
        words = "rank {}: still waiting for rank 2 in allreduce #2 at test_shared_memory_faults.py:"
        for number in (0, 1):
            assert job[number].hear().startswith(words.format(number))
        job[2].tell()
        assert job[2].end().error is None


def test_a_slow_rank_within_the_timeout_harms_nobody_and_is_named_by_the_statistics(start_job):
    def body(backend, pipe):
        for _ in range(20):
            if backend.rank == 2:
                time.sleep(0.005)  # this rank is slow on purpose: it is what is measured
            ferrodist.barrier(backend)
        ferrodist.barrier(backend)
        return backend.statistics()

    with start_job(3, body) as job:
        for statistics in job.results():
            assert statistics.slowest == 2
            assert statistics.lateness[2] > 0.05
            assert statistics.collectives == 21


# -- errors and interrupts -------------------------------------------------------------------------


def test_an_exception_on_one_rank_is_told_to_the_others_within_a_second(start_job):
    def body(backend, pipe):
        ferrodist.barrier(backend)
        if backend.rank == 1:
            raise ValueError("no such file: data.npy")
        ferrodist.allreduce(np.ones(3), backend)

    with start_job(3, body) as job:
        ends = [rank.end() for rank in job]
    assert isinstance(ends[1].error, ValueError)
    for end in (ends[0], ends[2]):
        assert isinstance(end.error, RankLost)
        assert end.error.rank == 1
        assert "rank 1 raised ValueError: no such file: data.npy" in str(end.error)
        assert end.when - ends[1].when < 1


WAITS = {
    "small": lambda backend: ferrodist.allreduce(np.ones(3), backend),
    "large": lambda backend: ferrodist.allreduce(np.ones(MEGABYTE), backend),
    "general": lambda backend: ferrodist.barrier(backend, timeout=None),
    "object": lambda backend: ferrodist.broadcast_object(None, backend, 2),
    "message": lambda backend: ferrodist.recv(np.ones(3), 2, backend),
    "split": lambda backend: backend.split([0, 1, 2]),
}


@pytest.mark.parametrize("what", WAITS)
def test_ctrl_c_in_a_wait_is_raised_there_and_aborts_the_others(start_job, what):
    def body(backend, pipe):
        pipe.send("ready")
        if backend.rank == 2:
            pipe.recv()
        return error_and_time(WAITS["general" if backend.rank == 2 else what], backend)

    with start_job(3, body) as job:
        for rank in job:
            assert rank.hear() == "ready"
        for rank in job.others(2):
            rank.await_sleep()
        interrupted = job[1].send_signal(signal.SIGINT)
        error, when = job[1].end().result
        assert isinstance(error, KeyboardInterrupt)
        assert when - interrupted < 0.5
        job[2].tell()
        for rank in job.others(1):
            error, when = rank.end().result
            assert isinstance(error, GroupAborted)
            assert error.rank == 1
            assert "rank 1 aborted the group: KeyboardInterrupt (in " in str(error)
            assert when - interrupted < 2
