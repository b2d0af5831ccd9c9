"""Ranks connected by TCP that die, stop, never come or raise: named on every other rank, soon."""

from __future__ import annotations

import itertools
import random
import signal
import sys
import time
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import CollectiveMismatch, CollectiveTimeout, GroupAborted, RankLost
from jobs import LIMIT, error_and_time
from tcp_jobs import QUICK
from test_shared_memory_faults import WAITS, call_for_ever, greet_survivors, tell_of_long_waits

pytest_plugins = ["tcp_jobs"]
pytestmark = pytest.mark.timeout(90)

MEGABYTE = 1 << 20
SOON = 2.0  # seconds: across hosts, a death is known to all by then


def all_ready(job: Any) -> None:
    for rank in job:
        assert rank.hear() == "ready"


# -- death -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [30, 8 * MEGABYTE])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_killed_rank_is_named_by_all_soon_and_they_live_on(start_tcp_job, nbytes, culprit):
    def body(backend, pipe):
        pipe.send("ready")
        error, when = error_and_time(call_for_ever, backend, nbytes)
        later, _ = error_and_time(ferrodist.barrier, backend)
        return error, when, later, greet_survivors(backend, culprit)

    with start_tcp_job(3, body) as job:
        all_ready(job)
        killed = job[culprit].send_signal(signal.SIGKILL)
        assert job[culprit].has_ended()
        for number in {0, 1, 2} - {culprit}:
            error, when, later, greetings = job[number].end().result
            assert isinstance(error, RankLost)
            assert error.rank == culprit
            assert f"rank {culprit} was killed by SIGKILL" in str(error)
            assert when - killed < SOON
            assert (type(later), later.rank) == (RankLost, culprit)
            peer = 3 - culprit - number
            assert greetings == [100 * peer + number]


def kill_at_some_moment(start_tcp_job: Any, seed: int) -> list[float]:
    """Kill a rank that is somewhere in its calls; return how late each other one has named it."""
    rng = random.Random(seed)
    world, nbytes = rng.choice([3, 4]), rng.choice([12, 1200, 60_000, 6 * MEGABYTE])
    culprit, moment = rng.randrange(world), rng.uniform(0, 0.03)

    def body(backend, pipe):
        pipe.send("ready")
        return error_and_time(call_for_ever, backend, nbytes)

    with start_tcp_job(world, body) as job:
        all_ready(job)
        end = time.monotonic() + moment
        while time.monotonic() < end:
            pass  # the moment is what is random
        killed = job[culprit].send_signal(signal.SIGKILL)
        ends = [rank.end().result for rank in job.others(culprit)]
    for error, _ in ends:
        assert isinstance(error, RankLost), f"seed {seed}: {error!r}"
        assert error.rank == culprit, f"seed {seed}: {error}"
    return [when - killed for _, when in ends]


@pytest.mark.parametrize(
    "seeds", [range(5), pytest.param(range(5, 55), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_kills_at_any_moment_are_noticed_by_all(start_tcp_job, seeds):
    late = sorted(seconds for seed in seeds for seconds in kill_at_some_moment(start_tcp_job, seed))
    p99 = late[int(len(late) * 0.99)]
    assert p99 < SOON, f"half within {late[len(late) // 2]:.3f} s, 99 % within {p99:.3f} s"


def test_a_rank_that_died_after_its_part_of_a_call_is_lost_only_to_the_next_one(start_tcp_job):
    """Rank 1 has sent what rank 0 gathers; that rank 0 would thank it does not make it needed."""

    def body(backend, pipe):
        pipe.send("ready")
        if backend.rank == 2:
            pipe.recv()
        elif backend.rank == 0:
            tell_of_long_waits(pipe)
        x = np.full(3, backend.rank)
        found = ferrodist.gather(x, backend, algorithm="star")
        return found is None or found.tolist(), *error_and_time(ferrodist.barrier, backend)

    with start_tcp_job(3, body, FERRODIST_NOTICE="0.3") as job:
        all_ready(job)
        for rank in job.others(2):
            rank.await_sleep()
        job[1].send_signal(signal.SIGKILL)
        assert "still waiting for rank 2 in" in job[0].hear()  # has looked round since, not for 1
        told = time.monotonic()
        job[2].tell()
        ends = [rank.end().result for rank in job.others(1)]
    assert [found for found, _, _ in ends] == [[0, 0, 0, 1, 1, 1, 2, 2, 2], True]
    for _, error, when in ends:
        assert isinstance(error, RankLost)
        assert error.rank == 1
        assert when - told < SOON


def differ_for_ever(backend: Any) -> None:
    """Make calls of which every other one differs between ranks, until a rank is lost."""
    for number in itertools.count():
        ferrodist.allreduce(np.ones(3 + number % 7), backend)
        try:
            ferrodist.allreduce(np.ones(3 + backend.rank % 2), backend)
        except CollectiveMismatch:
            continue
        raise AssertionError("a difference was not noticed")


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_rank_that_dies_while_ranks_differ_is_named_all_the_same(start_tcp_job, culprit):
    """Whoever collects what all have called, rank 0 or the next one, may be the one that dies."""

    def body(backend, pipe):
        pipe.send("ready")
        return error_and_time(differ_for_ever, backend)

    for turn in range(3):
        with start_tcp_job(3, body) as job:
            all_ready(job)
            end = time.monotonic() + 0.005 * turn
            while time.monotonic() < end:
                pass  # the moment is what differs
            killed = job[culprit].send_signal(signal.SIGKILL)
            for rank in job.others(culprit):
                error, when = rank.end().result
                assert isinstance(error, RankLost), repr(error)
                assert error.rank == culprit
                assert when - killed < SOON


MESSAGES = {
    "receives": lambda backend: ferrodist.recv(np.ones(3), 1, backend),
    "sends much": lambda backend: ferrodist.send(np.ones(MEGABYTE), 1, backend),
    "exchanges": lambda backend: ferrodist.sendrecv(1, 2, 0, 1, backend),
    "splits": lambda backend: backend.split([2, 1, 0]),
}


@pytest.mark.parametrize("what", MESSAGES)
def test_a_rank_that_dies_is_named_by_who_waits_for_a_message_or_a_group(start_tcp_job, what):
    def body(backend, pipe):
        ferrodist.barrier(backend)
        pipe.send("ready")
        if backend.rank > 0:
            pipe.recv()
        return error_and_time(MESSAGES[what], backend)

    with start_tcp_job(3, body) as job:
        all_ready(job)
        job[0].await_sleep()
        killed = job[1].send_signal(signal.SIGKILL)
        error, when = job[0].end().result
    assert isinstance(error, RankLost)
    assert error.rank == 1
    assert "rank 1 was killed by SIGKILL" in str(error)
    assert when - killed < SOON


# -- silence ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [1, 0])
def test_a_stopped_rank_is_given_up_at_the_silence_limit_and_may_not_come_back(
    start_tcp_job, culprit
):
    def body(backend, pipe):
        pipe.send("ready")
        error, when = error_and_time(call_for_ever, backend, 30)
        if backend.rank == culprit:
            pipe.send((error, error_and_time(ferrodist.allreduce, 1000, backend)[0]))
            return None
        pair = backend.split([rank for rank in range(3) if rank != culprit])
        pipe.send((error, when))
        assert pipe.recv() == "the stopped one is awake"
        return ferrodist.allreduce(backend.rank + 1, pair)

    silent = f"rank {culprit} shows no sign of life: no heartbeat for 1 s"
    with start_tcp_job(3, body, **QUICK) as job:
        all_ready(job)
        stopped = job[culprit].send_signal(signal.SIGSTOP)
        for rank in job.others(culprit):
            error, when = rank.hear()
            assert isinstance(error, RankLost)
            assert error.rank == culprit
            assert silent in str(error)
            assert abs(when - stopped - 1) < 0.5
        job[culprit].send_signal(signal.SIGCONT)
        for error in job[culprit].hear():
            assert isinstance(error, (RankLost, GroupAborted))
            assert silent in str(error)
        for rank in job.others(culprit):
            rank.tell("the stopped one is awake")
        total = 6 - (culprit + 1)  # nothing of the stopped rank is in it
        assert [rank.end().result for rank in job.others(culprit)] == [total] * 2


def test_a_job_that_is_stopped_as_a_whole_goes_on_when_it_is_continued(start_tcp_job):
    def body(backend, pipe):
        if backend.rank == 2:
            pipe.recv()
        else:
            tell_of_long_waits(pipe)
        return ferrodist.allreduce(backend.rank, backend)

    with start_tcp_job(3, body, FERRODIST_NOTICE="0.3", **QUICK) as job:
        for rank in job.others(2):
            assert "still waiting for rank" in rank.hear()
        for rank in job:
            rank.send_signal(signal.SIGSTOP)
        time.sleep(1.3)  # longer than silence may be: it is what must not matter
        for rank in job.others(2):
            rank.send_signal(signal.SIGCONT)
        time.sleep(0.1)  # they look round, and rank 2 has shown no sign of life for long
        job[2].send_signal(signal.SIGCONT)
        job[2].tell()
        assert job[2].end().result == 3


def test_a_rank_that_holds_the_gil_is_alive_and_only_late(start_tcp_job):
    def body(backend, pipe):
        ferrodist.barrier(backend)
        if backend.rank == 1:
            sum(itertools.repeat(1, 1 << 60))  # never lets go
        ferrodist.barrier(backend, timeout=1.6)

    with start_tcp_job(3, body, **QUICK) as job:
        for rank in job.others(1):
            error = rank.end().error
            assert isinstance(error, CollectiveTimeout)
            assert error.missing == [1]


def hold_the_gil(seconds: float) -> None:
    """Keep all other threads of this process from running Python."""
    before, end = sys.getswitchinterval(), time.monotonic() + seconds
    sys.setswitchinterval(1000)
    while time.monotonic() < end:
        pass
    sys.setswitchinterval(before)


def test_a_rank_whose_other_thread_holds_the_gil_accuses_nobody(start_tcp_job):
    """It could not listen for long, but then it is not for it to say that others were silent."""

    def body(backend, pipe):
        if backend.rank == 1:
            work = ferrodist.allreduce(1, backend, async_op=True)
            while backend.group.last_call(1)[0] == 0:
                time.sleep(0)  # lets go of the GIL, until the call has begun
            hold_the_gil(1.6)
            pipe.send("done")
            return work.wait(20)
        if backend.rank == 2:
            pipe.recv()
        return ferrodist.allreduce(1, backend)

    with start_tcp_job(3, body, **QUICK) as job:
        assert job[1].hear() == "done"
        job[2].tell()
        assert job.results() == [3, 3, 3]


def test_a_rank_that_never_calls_is_named_by_all_and_refused_when_it_comes(start_tcp_job):
    limits = [LIMIT, LIMIT, 0.4]  # the shortest ends it for all

    def body(backend, pipe):
        ferrodist.broadcast(1, backend)
        start = time.monotonic()
        if backend.rank == 1:
            pipe.recv()
        backend.timeout = limits[backend.rank]
        error, when = error_and_time(ferrodist.barrier, backend)
        return error, when - start, error_and_time(ferrodist.barrier, backend)[0]

    with start_tcp_job(3, body) as job:
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


def test_a_late_rank_is_told_with_what_it_waits_in_meanwhile(start_tcp_job):
    """Rank 2 waits in a pair for rank 1, which waits in the world for rank 2."""

    def body(backend, pipe):
        pair = backend.split([1, 2]) if backend.rank else None
        if backend.rank == 2:
            return error_and_time(ferrodist.barrier, pair)[0]
        backend.timeout = 0.6
        return error_and_time(ferrodist.allreduce, 1, backend)[0]

    with start_tcp_job(3, body, **{"2:FERRODIST_TIMEOUT": "1.5"}) as job:
        first, second, third = job.results()
    for error in (first, second):
        assert isinstance(error, CollectiveTimeout)
        assert error.missing == [2]
        assert "rank 2 is in barrier #1 at " in str(error)
        assert "in the group of world ranks [1, 2]" in str(error)
    assert isinstance(third, (CollectiveTimeout, RankLost))


@pytest.mark.parametrize("options", [{}, {"timeout": 20}])
def test_a_long_wait_is_logged_with_the_rank_it_waits_for(start_tcp_job, options):
    def body(backend, pipe):
        tell_of_long_waits(pipe)
        for _ in range(2):
            ferrodist.allreduce(np.ones(3), backend, **options)
        if backend.rank == 2:
            pipe.recv()
        ferrodist.allreduce(np.ones(3), backend, **options)

    with start_tcp_job(3, body, FERRODIST_NOTICE="0.2") as job:
        words = "rank {}: still waiting for rank 2 in allreduce #3 at test_tcp_faults.py:"
        for number in (0, 1):
            assert job[number].hear().startswith(words.format(number))
        job[2].tell()
        assert job[2].end().error is None


def test_a_slow_rank_within_the_timeout_harms_nobody_and_is_named_by_the_statistics(start_tcp_job):
    """Over TCP a rank knows what it has waited for itself: those that rank 2 sends to name it."""

    def body(backend, pipe):
        for _ in range(20):
            if backend.rank == 2:
                time.sleep(0.005)  # this rank is slow on purpose: it is what is measured
            ferrodist.all_gather(1, backend, algorithm="direct")
        return backend.statistics()

    with start_tcp_job(3, body) as job:
        for statistics in job.results()[:2]:
            assert statistics.slowest == 2
            assert statistics.lateness[2] > 0.05
            assert statistics.collectives == 20


# -- errors and interrupts -------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_exception_on_one_rank_is_told_to_the_others_soon(start_tcp_job, culprit):
    def body(backend, pipe):
        ferrodist.barrier(backend)
        if backend.rank == culprit:
            raise ValueError("no such file: data.npy")
        ferrodist.allreduce(np.ones(3), backend)

    with start_tcp_job(3, body) as job:
        ends = [rank.end() for rank in job]
    raised = ends.pop(culprit)
    assert isinstance(raised.error, ValueError)
    for end in ends:
        assert isinstance(end.error, RankLost)
        assert end.error.rank == culprit
        assert f"rank {culprit} raised ValueError: no such file: data.npy" in str(end.error)
        assert end.when - raised.when < SOON


@pytest.mark.parametrize("what", WAITS)
@pytest.mark.parametrize("culprit", [0, 1])
def test_ctrl_c_in_a_wait_is_raised_there_and_aborts_the_others(start_tcp_job, what, culprit):
    def body(backend, pipe):
        ferrodist.allreduce(np.ones(3), backend)  # the next like it goes the short way
        pipe.send("ready")
        if backend.rank == 2:
            pipe.recv()
        return error_and_time(WAITS["general" if backend.rank == 2 else what], backend)

    with start_tcp_job(3, body) as job:
        all_ready(job)
        for rank in job.others(2):
            rank.await_sleep()
        interrupted = job[culprit].send_signal(signal.SIGINT)
        error, when = job[culprit].end().result
        assert isinstance(error, KeyboardInterrupt)
        assert when - interrupted < 0.5
        job[2].tell()
        for rank in job.others(culprit):
            error, when = rank.end().result
            assert isinstance(error, GroupAborted)
            assert error.rank == culprit
            assert f"rank {culprit} aborted the group: KeyboardInterrupt (in " in str(error)
            assert when - interrupted < 2
