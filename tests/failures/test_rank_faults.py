"""Ranks that die, stop, never come or raise: named on every other rank, soon, on every backend."""

from __future__ import annotations

import itertools
import logging
import os
import random
import signal
import sys
import time
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import CollectiveMismatch, CollectiveTimeout, Evicted, GroupAborted, RankLost
from ferrodist.backends.failures import GroupError
from ferrodist.backends.hybrid import HybridBackend
from jobs import LIMIT, QUICK, error_and_time

pytestmark = pytest.mark.timeout(90)

MEGABYTE = 1 << 20
LARGE = {"shared_memory": 64 * MEGABYTE, "tcp": 8 * MEGABYTE, "hybrid": 8 * MEGABYTE}


def call_for_ever(backend: Any, nbytes: int, pipe: Any) -> None:
    """Go through the collectives, again and again, until one raises.

    A rank is ready after the first round: until then it waits for memory, which takes long on some
    machines, and is in nobody's call.
    """
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
        if number == 0:
            pipe.send("ready")


def greet_survivors(backend: Any, lost: int) -> list[int]:
    """Exchange messages with every other rank that is left."""
    peers = [rank for rank in range(backend.world_size) if rank not in (backend.rank, lost)]
    for peer in peers:
        ferrodist.send(100 * backend.rank + peer, peer, backend)
    return [ferrodist.recv(peer, backend) for peer in peers]


def tell_of_long_waits(pipe: Any) -> None:
    """Send what is logged to the test."""

    class Tells(logging.Handler):
        def emit(self, record):
            pipe.send(record.getMessage())

    logging.getLogger("ferrodist").addHandler(Tells())


def all_ready(job: Any) -> None:
    for rank in job:
        assert rank.hear() == "ready"


# -- death -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("failed_rank", [0, 1])
def test_a_killed_rank_is_named_by_all_soon_and_they_live_on(
    start, backend_name, soon, is_large, failed_rank
):
    nbytes = LARGE[backend_name] if is_large else 30

    def body(backend, pipe):
        error, when = error_and_time(call_for_ever, backend, nbytes, pipe)
        later, _ = error_and_time(ferrodist.barrier, backend)
        return error, when, later, greet_survivors(backend, failed_rank)

    with start(3, body) as job:
        all_ready(job)
        killed = job[failed_rank].send_signal(signal.SIGKILL)
        assert job[failed_rank].has_ended()
        for number in {0, 1, 2} - {failed_rank}:
            error, when, later, greetings = job[number].end().result
            assert isinstance(error, RankLost)
            assert error.rank == failed_rank
            if backend_name != "hybrid":  # there, the first to tell of it may be on another host
                assert f"rank {failed_rank} was killed by SIGKILL" in str(error)
            assert when - killed < soon
            assert (type(later), later.rank) == (RankLost, failed_rank)
            peer = 3 - failed_rank - number
            assert greetings == [100 * peer + number]


def kill_at_some_moment(start: Any, seed: int) -> list[float]:
    """Kill a rank that is somewhere in its calls; return how late each other one has named it."""
    rng = random.Random(seed)
    world, nbytes = rng.choice([2, 3, 4]), rng.choice([12, 1200, 60_000, 6 * MEGABYTE])
    failed_rank, moment = rng.randrange(world), rng.uniform(0, 0.03)

    def body(backend, pipe):
        return error_and_time(call_for_ever, backend, nbytes, pipe)

    with start(world, body) as job:
        all_ready(job)
        end = time.monotonic() + moment
        while time.monotonic() < end:
            pass  # the moment is what is random
        killed = job[failed_rank].send_signal(signal.SIGKILL)
        ends = [rank.end().result for rank in job.others(failed_rank)]
    for error, _ in ends:
        assert isinstance(error, RankLost), f"seed {seed}: {error!r}"
        assert error.rank == failed_rank, f"seed {seed}: {error}"
    return [when - killed for _, when in ends]


@pytest.mark.parametrize(
    "seeds",
    [
        range(5),
        pytest.param(range(5, 20), marks=pytest.mark.slow),
        pytest.param(range(20, 200), marks=[pytest.mark.slow, pytest.mark.long]),
    ],
    ids=["few", "many", "most"],
)
def test_kills_at_any_moment_are_noticed_by_all(start, soon, seeds):
    late = sorted(seconds for seed in seeds for seconds in kill_at_some_moment(start, seed))
    p99 = late[int(len(late) * 0.99)]
    assert p99 < soon, f"half within {late[len(late) // 2]:.3f} s, 99 % within {p99:.3f} s"


@pytest.mark.parametrize("backend_name", ["tcp", "hybrid"])  # what is sent no longer needs its rank
def test_a_rank_that_died_after_its_part_of_a_call_is_lost_only_to_the_next_one(start, soon):
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

    with start(3, body, FERRODIST_LOG_WAIT_AFTER="0.3") as job:
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
        assert when - told < soon


def test_a_rank_that_died_after_its_part_of_an_allreduce_is_lost_only_to_the_next_call(start_job):
    def body(backend, pipe):
        pipe.send("ready")
        if backend.rank == 2:
            pipe.recv()
        elif backend.rank == 0:
            tell_of_long_waits(pipe)
        total = ferrodist.allreduce(np.full(3, backend.rank + 1), backend).tolist()
        return total, *error_and_time(ferrodist.barrier, backend)

    with start_job(3, body, FERRODIST_LOG_WAIT_AFTER="0.3") as job:
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


def differ_for_ever(backend: Any) -> None:
    """Make calls of which every other one differs between ranks, until a rank is lost."""
    for number in itertools.count():
        ferrodist.allreduce(np.ones(3 + number % 7), backend)
        try:
            ferrodist.allreduce(np.ones(3 + backend.rank % 2), backend)
        except CollectiveMismatch:
            continue
        raise AssertionError("a difference was not noticed")


@pytest.mark.parametrize("failed_rank", [0, 1, 2])
def test_a_rank_that_dies_while_ranks_differ_is_named_all_the_same(start, soon, failed_rank):
    """The rank that collects all descriptors, rank 0 or the next one, may be the one that dies."""

    def body(backend, pipe):
        pipe.send("ready")
        return error_and_time(differ_for_ever, backend)

    for turn in range(3):
        with start(3, body) as job:
            all_ready(job)
            end = time.monotonic() + 0.005 * turn
            while time.monotonic() < end:
                pass  # the moment is what differs
            killed = job[failed_rank].send_signal(signal.SIGKILL)
            for rank in job.others(failed_rank):
                error, when = rank.end().result
                assert isinstance(error, RankLost), repr(error)
                assert error.rank == failed_rank
                assert when - killed < soon


MESSAGES = {
    "receives": lambda backend: ferrodist.recv(1, backend, like=np.ones(3)),
    "sends much": lambda backend: ferrodist.send(np.ones(MEGABYTE), 1, backend),
    "exchanges": lambda backend: ferrodist.sendrecv(1, 2, 1, backend),
    "splits": lambda backend: backend.split([2, 1, 0]),
}


@pytest.mark.parametrize("what", MESSAGES)
def test_a_rank_that_dies_is_named_by_who_waits_for_a_message_or_a_group(start, soon, what):
    def body(backend, pipe):
        ferrodist.barrier(backend)
        pipe.send("ready")
        if backend.rank > 0:
            pipe.recv()
        return error_and_time(MESSAGES[what], backend)

    with start(3, body) as job:
        all_ready(job)
        job[0].await_sleep()
        killed = job[1].send_signal(signal.SIGKILL)
        error, when = job[0].end().result
    assert isinstance(error, RankLost)
    assert error.rank == 1
    assert "rank 1 was killed by SIGKILL" in str(error)
    assert when - killed < soon


@pytest.mark.slow
def test_a_loss_in_a_named_algorithm_is_seen_by_ranks_that_wait_for_others() -> None:
    def body(backend: Any) -> tuple[str, float]:
        ferrodist.barrier(backend)
        if backend.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        error, end = error_and_time(
            lambda: ferrodist.allreduce(np.ones(5), backend, algorithm="ring")
        )
        assert isinstance(error, RankLost), error
        assert end - start < 5
        return str(error), end - start

    with pytest.raises(RankLost, match="SIGKILL") as raised:
        ferrodist.run(body, 4, timeout=40)
    assert raised.value.rank == 3


# -- silence ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("failed_rank", [1, 0])
def test_a_stopped_rank_is_given_up_at_the_silence_limit_and_may_not_come_back(
    start, backend_name, failed_rank
):
    def body(backend, pipe):
        error, when = error_and_time(call_for_ever, backend, 30, pipe)
        if backend.rank == failed_rank:
            pipe.send((error, error_and_time(ferrodist.allreduce, 1000, backend)[0]))
            return None
        pipe.send((error, when))
        assert pipe.recv() == "the stopped one is awake"
        pair = backend.split([rank for rank in range(3) if rank != failed_rank])
        return ferrodist.allreduce(backend.rank + 1, pair)

    silent = f"rank {failed_rank} has sent no heartbeat for 1 s"
    if backend_name != "hybrid":  # there, the first to tell of it may be on another host
        silent += ": it is stopped, by Ctrl-Z or SIGSTOP"
    with start(3, body, **QUICK) as job:
        all_ready(job)
        stopped = job[failed_rank].send_signal(signal.SIGSTOP)
        for rank in job.others(failed_rank):
            error, when = rank.hear()
            assert isinstance(error, RankLost)
            assert error.rank == failed_rank
            assert silent in str(error)
            assert abs(when - stopped - 1) < (0.7 if backend_name == "hybrid" else 0.5)
        job[failed_rank].send_signal(signal.SIGCONT)
        for error in job[failed_rank].hear():
            assert isinstance(error, Evicted)
            assert silent in str(error)
        for rank in job.others(failed_rank):
            rank.tell("the stopped one is awake")
        total = 6 - (failed_rank + 1)  # nothing of the stopped rank is in it
        assert [rank.end().result for rank in job.others(failed_rank)] == [total] * 2


@pytest.mark.slow
def test_a_job_that_is_stopped_as_a_whole_goes_on_when_it_is_continued(start, backend_name):
    def body(backend, pipe):
        if backend.rank == 2:
            pipe.recv()
        else:
            tell_of_long_waits(pipe)
        return ferrodist.allreduce(backend.rank, backend)

    with start(3, body, FERRODIST_LOG_WAIT_AFTER="0.3", **QUICK) as job:
        late = " 2" if backend_name == "shared_memory" else ""  # or one that waits for it
        for rank in job.others(2):
            assert f"still waiting for rank{late}" in rank.hear()
        for rank in job:
            rank.send_signal(signal.SIGSTOP)
        time.sleep(1.3)  # longer than silence may be: it is what must not matter
        for rank in job.others(2):
            rank.send_signal(signal.SIGCONT)
        time.sleep(0.1)  # they look round, and rank 2 has sent none for long
        job[2].send_signal(signal.SIGCONT)
        job[2].tell()
        assert job[2].end().result == 3


@pytest.mark.slow
def test_a_rank_that_holds_the_gil_is_alive_and_only_late(start):
    def body(backend, pipe):
        ferrodist.barrier(backend)
        if backend.rank == 1:
            sum(itertools.repeat(1, 1 << 60))  # never lets go
        ferrodist.barrier(backend, timeout=1.6)

    with start(3, body, **QUICK) as job:
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


@pytest.mark.slow
def test_a_rank_whose_other_thread_holds_the_gil_accuses_nobody(start):
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

    with start(3, body, **QUICK) as job:
        assert job[1].hear() == "done"
        job[2].tell()
        assert job.results() == [3, 3, 3]


@pytest.mark.parametrize("limits", [[0.4, LIMIT, LIMIT], [LIMIT, LIMIT, 0.4]])
def test_a_rank_that_never_calls_is_named_by_all_and_refused_when_it_comes(start, limits):
    """The shortest limit ends it for all."""

    def body(backend, pipe):
        ferrodist.broadcast(1, backend)
        start = time.monotonic()
        if backend.rank == 1:
            pipe.recv()
        backend.timeout = limits[backend.rank]
        error, when = error_and_time(ferrodist.barrier, backend)
        return error, when - start, error_and_time(ferrodist.barrier, backend)[0]

    with start(3, body) as job:
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


def test_a_late_rank_is_told_with_what_it_waits_in_meanwhile(start):
    """Rank 2 waits in a pair for rank 1, which waits in the world for rank 2."""

    def body(backend, pipe):
        pair = backend.split([1, 2]) if backend.rank else None
        if backend.rank == 2:
            return error_and_time(ferrodist.barrier, pair)[0]
        backend.timeout = 0.6
        return error_and_time(ferrodist.allreduce, 1, backend)[0]

    with start(3, body, **{"2:FERRODIST_TIMEOUT": "1.5"}) as job:
        first, second, third = job.results()
    for error in (first, second):
        assert isinstance(error, CollectiveTimeout)
        assert error.missing == [2]
        assert "rank 2 is in barrier #1 at " in str(error)
        assert "in the group of world ranks [1, 2]" in str(error)
    assert isinstance(third, (CollectiveTimeout, RankLost))


@pytest.mark.parametrize("options", [{}, {"timeout": 20}])
@pytest.mark.parametrize("calls_before", [0, 2])
def test_a_long_wait_is_logged_with_the_rank_it_waits_for(start, options, calls_before):
    def body(backend, pipe):
        tell_of_long_waits(pipe)
        ferrodist.barrier(backend)
        for _ in range(calls_before):
            ferrodist.allreduce(np.ones(3), backend, **options)
        if backend.rank == 2:
            pipe.recv()
        ferrodist.allreduce(np.ones(3), backend, **options)

    with start(3, body, FERRODIST_LOG_WAIT_AFTER="0.2") as job:
        call = f"allreduce #{2 + calls_before} at test_rank_faults.py:"
        for number in (0, 1):
            words = f"rank {number}: still waiting for rank 2 in {call}"
            assert job[number].hear().startswith(words)
        job[2].tell()
        assert job[2].end().error is None


def test_in_shared_memory_a_slow_rank_harms_nobody_and_is_named_by_the_statistics(start_job):
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


def test_over_tcp_a_slow_rank_harms_nobody_and_is_named_by_the_statistics(start_tcp_job):
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


@pytest.mark.parametrize("failed_rank", [0, 1])
def test_an_exception_on_one_rank_is_told_to_the_others_soon(start, soon, failed_rank):
    def body(backend, pipe):
        ferrodist.barrier(backend)
        if backend.rank == failed_rank:
            raise ValueError("no such file: data.npy")
        ferrodist.allreduce(np.ones(3), backend)

    with start(3, body) as job:
        ends = [rank.end() for rank in job]
    raised = ends.pop(failed_rank)
    assert isinstance(raised.error, ValueError)
    for end in ends:
        assert isinstance(end.error, RankLost)
        assert end.error.rank == failed_rank
        assert f"rank {failed_rank} raised ValueError: no such file: data.npy" in str(end.error)
        assert end.when - raised.when < soon


WAITS = {
    "small": lambda backend: ferrodist.allreduce(np.ones(3), backend),
    "large": lambda backend: ferrodist.allreduce(np.ones(MEGABYTE), backend),
    "general": lambda backend: ferrodist.barrier(backend, timeout=None),
    "object": lambda backend: ferrodist.broadcast_object(None, backend, 2),
    "message": lambda backend: ferrodist.recv(2, backend, like=np.ones(3)),
    "split": lambda backend: backend.split([0, 1, 2]),
}


@pytest.mark.parametrize("what", WAITS)
@pytest.mark.parametrize(("failed_rank", "is_first"), [(0, False), (1, False), (1, True)])
def test_ctrl_c_in_a_wait_is_raised_there_and_aborts_the_others(start, what, failed_rank, is_first):
    def body(backend, pipe):
        if not is_first:
            ferrodist.allreduce(np.ones(3), backend)  # the next like it has its plan
        pipe.send("ready")
        if backend.rank != 2:
            return error_and_time(WAITS[what], backend)
        pipe.recv()
        if isinstance(backend, HybridBackend):
            # The node leader of the others has said that they are here, so this rank may have all
            # it needs before it hears of the abort: then its next call fails.
            return error_and_time(lambda: [WAITS["general"](backend) for _ in range(2)])
        return error_and_time(WAITS["general"], backend)

    with start(3, body) as job:
        all_ready(job)
        for rank in job.others(2):
            rank.await_sleep()
        interrupted = job[failed_rank].send_signal(signal.SIGINT)
        error, when = job[failed_rank].end().result
        assert isinstance(error, KeyboardInterrupt)
        assert when - interrupted < 0.5
        job[2].tell()
        for rank in job.others(failed_rank):
            error, when = rank.end().result
            assert isinstance(error, GroupAborted)
            assert error.rank == failed_rank
            assert f"rank {failed_rank} aborted the group: KeyboardInterrupt (in " in str(error)
            assert when - interrupted < 2


@pytest.mark.parametrize("letter", ["x", "ж", "漢", "🦀"])
def test_final_errors_in_any_script_reach_the_others(start, letter):
    def body(backend, pipe):
        if backend.rank == 0:
            raise ValueError(letter * 5000)
        ferrodist.barrier(backend)

    with start(2, body) as job:
        own, lost = job.errors()
    assert isinstance(own, ValueError)
    assert letter in str(own)
    assert isinstance(lost, RankLost)
    assert letter * 100 in str(lost)


def test_a_long_reason_of_an_abort_reaches_groups_split_off(start):
    def body(backend, pipe):
        pair = backend.split([0, 1])
        ferrodist.barrier(pair)  # both have it
        if backend.rank == 0:
            backend.abort("because " * 1000)
        return error_and_time(ferrodist.barrier, pair)[0]

    with start(2, body) as job:
        for error in job.results():
            assert isinstance(error, GroupAborted)
            assert "because" in str(error)


def test_send_to_a_rank_that_another_rank_has_seen_die_is_refused(start):
    """The link of this rank may still seem to be there when it is told of a loss."""

    def body(backend, pipe):
        ferrodist.barrier(backend)
        if backend.rank == 1:
            return pipe.recv()
        facts = {"rank": 1, "how": "was killed by SIGKILL"}
        backend.set_error(GroupError(RankLost, 2, "barrier #2: rank 1 was killed", facts))
        for options in ({}, {"timeout": 20.0}, {"async_op": True}):
            with pytest.raises(RankLost, match=r"send\(dst=1, .*rank 1 was killed by SIG") as found:
                backend.send(1, 1, **options)
            assert found.value.rank == 1
        return "refused"

    with start(2, body) as job:
        assert job[0].end().result == "refused"
        job[1].tell("done")
        job[1].end()
