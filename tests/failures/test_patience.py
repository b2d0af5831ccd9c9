"""The default timeout is patient: it waits for ranks that are alive and not stuck elsewhere."""

from __future__ import annotations

import logging
import re
import signal
import threading
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist.config import Config, DefaultTimeout
from ferrodist.errors import CollectiveMismatch, CollectiveTimeout, GroupAborted, RankLost
from ferrodist.testing import run_ranks
from jobs import QUICK

pytestmark = pytest.mark.timeout(60)

DEFAULT = DefaultTimeout(0.4)  # as the 60 s that nobody chose
LONG_AFTER = 3  # lines of the log: at 0.2 s, 0.4 s, and then every 0.4 s
EARLY_LOG = {"FERRODIST_LOG_WAIT_AFTER": "0.2"} | QUICK


class Tells(logging.Handler):
    """Hands on what is logged."""

    def __init__(self, tell: Any) -> None:
        super().__init__()
        self.tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self.tell(record.getMessage())


def be_patient(backend: Any, pipe: Any, late_rank: int | None = None) -> None:
    """Use the default timeout, and tell of long waits; a late rank waits until it is told."""
    backend.barrier()
    backend.timeout = DEFAULT
    logging.getLogger("ferrodist").addHandler(Tells(pipe.send))
    if backend.rank == late_rank:
        pipe.recv()


def hear_of_long_wait(rank: Any, words: str) -> list[str]:
    """Return when a rank has waited for much longer than the default timeout."""
    lines = [rank.hear() for _ in range(LONG_AFTER)]
    assert all(words in line for line in lines), lines
    return lines


def outcome_of(call: Any, *args: Any, **options: Any) -> Any:
    try:
        return call(*args, **options)
    except (CollectiveTimeout, GroupAborted) as error:
        return type(error).__name__, getattr(error, "missing", None), str(error)


CALLS = {
    "allreduce": lambda backend, x: ferrodist.allreduce(x, backend),
    "tree": lambda backend, x: ferrodist.allreduce({"a": x, "b": [x]}, backend)["b"][0],
    "async": lambda backend, x: ferrodist.allreduce(x, backend, async_op=True).wait(),
    "broadcast": lambda backend, x: ferrodist.broadcast(x, backend, root=2),
    "named": lambda backend, x: ferrodist.allreduce(x, backend, algorithm="ring"),
}


@pytest.mark.slow
def test_a_rank_that_computes_is_waited_for_beyond_the_default(start):
    """In jobs that wait at the same time, one for each call."""

    def body_of(call):
        def body(backend, pipe):
            be_patient(backend, pipe, late_rank=2)
            return float(call(backend, np.full(3, backend.rank + 1.0))[-1])

        return body

    with ExitStack() as stack:
        jobs = {
            name: stack.enter_context(start(3, body_of(call), **EARLY_LOG))
            for name, call in CALLS.items()
        }
        for name, job in jobs.items():
            lines = hear_of_long_wait(job[0], "still waiting for rank 2 in ")
            assert "rank 2 last call was barrier #1" in lines[-1], name
            job[2].tell()
            expected = 3.0 if name == "broadcast" else 6.0
            assert [last_of(rank) for rank in job] == [expected] * 3, name


def last_of(rank: Any) -> Any:
    """Return what a rank returns, whatever it has said before."""
    while isinstance(said := rank.hear(), str):
        pass
    if said.error is not None:
        raise said.error
    return said.result


@pytest.mark.slow
def test_ranks_that_differ_after_a_long_wait_are_told_of_that(start):
    def body(backend, pipe):
        be_patient(backend, pipe, late_rank=2)
        with pytest.raises(CollectiveMismatch):
            ferrodist.allreduce(np.ones(3 + backend.rank // 2), backend)
        return float(ferrodist.allreduce(1.0, backend))

    with start(3, body, **EARLY_LOG) as job:
        hear_of_long_wait(job[0], "still waiting for rank 2 in ")
        job[2].tell()
        assert [last_of(rank) for rank in job] == [3.0] * 3


def test_a_chosen_timeout_of_the_same_length_is_exact(start):
    def body(backend, pipe):
        backend.barrier()
        backend.timeout = float(DEFAULT)
        if backend.rank == 2:
            pipe.recv()
        return outcome_of(ferrodist.allreduce, np.ones(3), backend)

    with start(3, body, **EARLY_LOG) as job:
        began = time.monotonic()
        for rank in job.others(2):
            name, missing, _ = last_of(rank)
            assert (name, missing) == ("CollectiveTimeout", [2])
        assert time.monotonic() - began < 5 * DEFAULT + 1


@pytest.mark.slow
def test_a_timeout_that_one_rank_chose_ends_the_call_for_all(start):
    def body(backend, pipe):
        backend.barrier()
        backend.timeout = DEFAULT
        if backend.rank == 2:
            pipe.recv()
        options = {"timeout": 1.0} if backend.rank == 1 else {}
        return outcome_of(ferrodist.allreduce, np.ones(3), backend, **options)

    with start(3, body, **EARLY_LOG) as job:
        found = [last_of(rank) for rank in job.others(2)]
        assert [one[:2] for one in found] == [("CollectiveTimeout", [2])] * 2
        assert "within 1 s" in found[0][2]
        assert found[0] == found[1]


def test_a_rank_that_is_held_in_another_call_is_named(start):
    def body(backend, pipe):
        backend.barrier()
        backend.timeout = DEFAULT
        if backend.rank == 1:
            ferrodist.recv(0, backend, like=np.ones(3), timeout=20)
        ferrodist.allreduce(np.ones(3), backend)

    with start(3, body, **EARLY_LOG) as job:
        first, second, third = job.errors()
        assert isinstance(first, CollectiveTimeout)
        assert isinstance(second, RankLost)  # one of the others, which have raised
        assert first.missing == third.missing == [1]
        assert "within 0.4 s (rank 1 is in recv(src=0, tag=0) at test_patience.py:" in str(first)


def test_a_receive_from_a_rank_that_is_held_in_another_call_names_it(start):
    def body(backend, pipe):
        backend.barrier()
        backend.timeout = DEFAULT
        if backend.rank == 1:
            ferrodist.recv(0, backend, like=np.ones(3))
        ferrodist.allreduce(np.ones(3), backend, timeout=20)

    with start(3, body, **EARLY_LOG) as job:
        first, second, third = job.errors()
        assert isinstance(second, CollectiveTimeout)
        assert second.missing == [0]
        assert isinstance(first, RankLost)
        assert isinstance(third, RankLost)


def test_ranks_that_wait_for_each_other_in_two_groups_are_named(start):
    def body(backend, pipe):
        group = backend.split(range(2)) if backend.rank < 2 else backend
        backend.barrier()
        backend.timeout = group.timeout = DEFAULT
        if backend.rank == 2:
            pipe.recv()
        ferrodist.allreduce(np.ones(3), group if backend.rank == 1 else backend)

    with start(3, body, **EARLY_LOG) as job:
        ends = [rank.end() for rank in job.others(2)]
        first = min(ends, key=lambda end: end.when).error
        assert isinstance(first, CollectiveTimeout)
        assert first.rank == (1 if first.this_rank == 0 else 0)
        # The others if that one has just given up, too; rank 0 made no call in the group of two.
        states = "is in allreduce #|last call was |has made no call yet"
        found = re.search(rf"rank {first.rank} ({states})", str(first))
        assert found, str(first)
        for end in ends:
            assert isinstance(end.error, (CollectiveTimeout, RankLost))


def test_a_rank_that_waits_for_a_work_is_stuck(start):
    def body(backend, pipe):
        backend.barrier()
        backend.timeout = DEFAULT
        if backend.rank == 2:
            group_less = ferrodist.recv(1, backend, like=np.ones(3), async_op=True, timeout=20)
            return outcome_of(group_less.wait)
        return outcome_of(ferrodist.allreduce, np.ones(3), backend)

    with start(3, body, **EARLY_LOG) as job:
        for rank in job.others(2):
            assert last_of(rank)[:2] == ("CollectiveTimeout", [2])


@pytest.mark.slow
def test_a_call_in_flight_that_nobody_waits_for_holds_nobody(start):
    def body(backend, pipe):
        be_patient(backend, pipe)
        if backend.rank == 2:
            other = ferrodist.recv(1, backend, like=np.ones(1), async_op=True, timeout=20)
            pipe.recv()
        total = float(ferrodist.allreduce(np.ones(3), backend)[0])
        if backend.rank == 1:
            ferrodist.send(np.full(1, 7.0), 2, backend)
        return total if backend.rank < 2 else total + float(other.wait()[0])

    with start(3, body, **EARLY_LOG) as job:
        hear_of_long_wait(job[0], "still waiting for rank 2 in ")
        job[2].tell()
        assert [last_of(rank) for rank in job] == [3.0, 3.0, 10.0]


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
def test_a_receive_and_a_large_send_are_patient(start, is_async):
    def body(backend, pipe):
        be_patient(backend, pipe)
        x = np.arange(100_000.0)
        if backend.rank == 2:
            pipe.recv()
            got = ferrodist.recv(0, backend, like=x)
            ferrodist.send(np.full(3, 5.0), 1, backend)
            return float(got[-1])
        if backend.rank == 0:
            done = ferrodist.send(x, 2, backend, async_op=is_async)
            return done.wait() if is_async else done
        got = ferrodist.recv(2, backend, like=np.ones(3), async_op=is_async)
        return float((got.wait() if is_async else got)[0])

    with start(3, body, **EARLY_LOG) as job:
        hear_of_long_wait(job[0], "still waiting for rank 2 in send(dst=2, tag=0) at test_patience")
        hear_of_long_wait(job[1], "still waiting for rank 2 in recv(src=2, tag=0) at test_patience")
        job[2].tell()
        assert [last_of(rank) for rank in job] == [None, 5.0, 99_999.0]


@pytest.mark.slow
def test_a_split_is_patient(start):
    def body(backend, pipe):
        be_patient(backend, pipe, late_rank=2)
        group = backend.split([2, 0, 1])
        assert group.timeout is backend.timeout
        return group.rank

    with start(3, body, **EARLY_LOG) as job:
        hear_of_long_wait(job[0], "still waiting for rank 2 in split([2, 0, 1]) at test_patience")
        job[2].tell()
        assert [last_of(rank) for rank in job] == [1, 2, 0]


@pytest.mark.slow
def test_in_the_end_a_rank_that_lives_is_given_up(start):
    def body(backend, pipe):
        backend.barrier()
        backend.timeout = DEFAULT
        if backend.rank == 2:
            pipe.recv()
        return outcome_of(ferrodist.allreduce, np.ones(3), backend)

    with start(3, body, **EARLY_LOG, FERRODIST_LATE_TIMEOUT="1.2") as job:
        found = [last_of(rank) for rank in job.others(2)]
        assert [one[:2] for one in found] == [("CollectiveTimeout", [2])] * 2
        assert "within 1.2 s (FERRODIST_LATE_TIMEOUT)" in found[0][2]


@pytest.mark.slow
def test_a_rank_without_a_heartbeat_is_lost_as_ever(start):
    def body(backend, pipe):
        backend.barrier()
        backend.timeout = DEFAULT
        pipe.send("ready")
        if backend.rank == 2:
            pipe.recv()
        ferrodist.allreduce(np.ones(3), backend)

    with start(3, body, **EARLY_LOG) as job:
        for rank in job:
            assert rank.hear() == "ready"
        job[2].send_signal(signal.SIGSTOP)
        for rank in job.others(2):
            error = rank.end().error
            assert isinstance(error, RankLost)
            assert error.rank == 2


@pytest.mark.slow
def test_a_call_queued_behind_one_that_waits_is_patient_too(start):
    def body(backend, pipe):
        be_patient(backend, pipe, late_rank=2)
        first = ferrodist.allreduce(np.ones(3), backend, async_op=True)
        second = float(ferrodist.allreduce({"a": np.full(2, 2.0)}, backend)["a"][0])
        return float(first.wait()[0]) + second

    with start(3, body, **EARLY_LOG) as job:
        hear_of_long_wait(job[0], "still waiting for rank 2 in ")
        job[2].tell()
        assert [last_of(rank) for rank in job] == [9.0] * 3


# -- ranks as threads ------------------------------------------------------------------------------


class LongWaits:
    """Counts lines of the log about long waits; ``is_over`` when one has lasted for long."""

    def __enter__(self) -> LongWaits:
        self.lines: list[str] = []
        self.is_over = threading.Event()
        self.handler = Tells(self.hear)
        logging.getLogger("ferrodist").addHandler(self.handler)
        return self

    def hear(self, line: str) -> None:
        self.lines.append(line)
        if len([one for one in self.lines if one.startswith("rank 0: still waiting")]) > LONG_AFTER:
            self.is_over.set()

    def __exit__(self, *about: object) -> None:
        logging.getLogger("ferrodist").removeHandler(self.handler)


THREADS = {"config": Config(timeout=DEFAULT, log_wait_after=0.2), "timeout": 30}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_thread_that_computes_is_waited_for_beyond_the_default(name):
    with LongWaits() as waits:

        def body(backend):
            backend.barrier()
            if backend.rank == 2:
                assert waits.is_over.wait(20)
            return float(CALLS[name](backend, np.full(3, backend.rank + 1.0))[-1])

        expected = 3.0 if name == "broadcast" else 6.0
        assert run_ranks(3, body, **THREADS) == [expected] * 3
        assert any("rank 2 last call was barrier #1" in line for line in waits.lines)


@pytest.mark.slow
def test_messages_and_splits_between_threads_are_patient():
    with LongWaits() as waits:

        def body(backend):
            backend.barrier()
            if backend.rank == 2:
                assert waits.is_over.wait(20)
                got = ferrodist.recv(0, backend, like=np.ones(100_000))
                ferrodist.send(got[:3], 1, backend)
            elif backend.rank == 0:
                ferrodist.send(np.full(100_000, 4.0), 2, backend)
            else:
                got = ferrodist.recv(2, backend, like=np.ones(3), async_op=True).wait()
            waits.is_over.clear()
            waits.lines.clear()
            backend.barrier()
            if backend.rank == 1:
                assert waits.is_over.wait(20)
            return backend.split([2, 1, 0]).rank

        assert run_ranks(3, body, **THREADS) == [2, 1, 0]


def test_a_thread_that_waits_for_a_work_is_stuck():
    def body(backend):
        backend.barrier()
        if backend.rank == 1:
            work = ferrodist.recv(0, backend, like=np.ones(3), async_op=True, timeout=20)
            with pytest.raises((RankLost, GroupAborted)):  # the others give up, and end
                work.wait()
            return None
        return outcome_of(ferrodist.allreduce, np.ones(3), backend)

    first, _, third = run_ranks(3, body, **THREADS)
    assert first[:2] == third[:2] == ("CollectiveTimeout", [1])


def test_a_chosen_timeout_between_threads_is_exact():
    def body(backend):
        backend.barrier()
        if backend.rank == 2:
            done.wait(20)
            return None
        try:
            return outcome_of(ferrodist.allreduce, np.ones(3), backend, timeout=0.4)
        finally:
            done.set()

    done = threading.Event()
    found = run_ranks(3, body, **THREADS)
    assert [one[:2] for one in found[:2]] == [("CollectiveTimeout", [2])] * 2


# -- what is chosen --------------------------------------------------------------------------------


def test_a_timeout_that_is_set_is_chosen_also_if_it_is_60():
    backend = ferrodist.SimulatedBackend.create_group(1)[0]
    assert backend._deadline().is_patient
    assert not backend._deadline(60).is_patient
    before, backend.timeout = backend.timeout, 60
    assert not backend._deadline().is_patient
    backend.timeout = before
    assert backend._deadline().is_patient
    for config in (Config(timeout=60), Config.from_environment({"FERRODIST_TIMEOUT": "60"})):
        (backend,) = ferrodist.SimulatedBackend.create_group(1, config=config)
        assert not backend._deadline().is_patient
