"""Backends that are closed, dropped or finalized while calls are in flight: nobody hangs."""

import contextlib
import gc
import threading
import time

import numpy as np
import pytest

import ferrodist
from ferrodist import BackendClosed, RankLost, SimulatedBackend
from ferrodist.testing import run_ranks


@pytest.mark.slow
def test_a_finalizer_may_close_a_backend_at_any_moment():
    class Owner:
        def __init__(self, backend):
            self.backend, self.myself = backend, self

        def __del__(self):
            self.backend.close()

    def body(backend):
        for _ in range(30):
            Owner(backend.split([0, 1]))
            with backend.split([1, 0]) as group:
                gc.collect()
                ferrodist.barrier(group)
        return True

    assert run_ranks(2, body, timeout=30) == [True, True]


def test_a_call_started_while_another_thread_closes_ends_or_is_refused():
    for _ in range(100):
        (backend,) = SimulatedBackend.create_group(1)
        ferrodist.allreduce(1, backend, async_op=True).wait(10)
        closer = threading.Thread(target=backend.close)
        closer.start()
        try:
            while True:
                assert ferrodist.allreduce(1, backend, async_op=True).wait(10) == 1
        except BackendClosed:
            pass
        closer.join()


def test_ranks_that_close_while_each_waits_for_the_other_do_not_hang():
    def body(backend):
        backend.timeout = None
        other = 1 - backend.rank
        works = [
            ferrodist.recv(other, backend, async_op=True),
            ferrodist.send(np.ones(100_000), other, backend, tag=1, async_op=True),
        ]
        ferrodist.barrier(backend)
        with contextlib.suppress(RankLost):
            backend.close()
        return [type(work.exception(5)) for work in works]

    assert run_ranks(2, body, timeout=20) == [[RankLost, RankLost]] * 2


def test_an_interrupt_inside_close_is_told_to_the_others(monkeypatch):
    def body(backend):
        if backend.rank == 0:
            monkeypatch.setattr(backend, "_await_works", interrupt)
            backend.close()
        ferrodist.barrier(backend)

    def interrupt(deadline):
        raise KeyboardInterrupt

    with pytest.raises(BaseExceptionGroup) as caught:
        run_ranks(2, body, timeout=20)
    first, second = caught.value.exceptions
    assert isinstance(first, KeyboardInterrupt)
    assert isinstance(second, RankLost)
    assert "rank 0 raised KeyboardInterrupt" in str(second)


def test_a_group_outlives_the_variable_of_its_parent():
    def body(backend):
        group = backend.split([0, 1]).split([1, 0])
        gc.collect()
        return ferrodist.allreduce(1, group)

    assert run_ranks(2, body) == [2, 2]


def test_close_waits_for_messages_in_flight():
    def body(backend):
        if backend.rank == 0:
            with backend:
                work = ferrodist.recv(1, backend, async_op=True)
                ferrodist.barrier(backend)
            return work.wait(1)
        ferrodist.barrier(backend)
        return ferrodist.send(7, 0, backend)

    assert run_ranks(2, body)[0] == 7


def test_a_backend_dropped_without_close_leaves_its_group():
    def body(backend):
        group = backend.split([0, 1])
        if backend.rank == 0:
            with pytest.raises(RankLost, match=r"rank 1 dropped its backend without close\(\)"):
                ferrodist.barrier(group)
        del group
        gc.collect()
        ferrodist.barrier(backend)
        return len(backend.groups_of_process())

    assert run_ranks(2, body) == [1, 1]


@pytest.mark.parametrize(
    "num_closes",
    [200, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(600)])],
)
def test_groups_close_while_another_thread_has_calls_of_another_group_in_flight(
    start_job, num_closes
):
    def body(backend, pipe):
        other, is_over, called = backend.dup(), threading.Event(), []

        def call_on() -> None:
            while not is_over.is_set():
                work = other.allreduce(1, async_op=True)
                work.add_done_callback(lambda work: called.append(work.result()))
                work.wait()

        thread = threading.Thread(target=call_on)
        thread.start()
        for _ in range(num_closes):
            with backend.dup() as group:
                work = group.allreduce(1, async_op=True)
                work.add_done_callback(lambda work: None)
        is_over.set()
        thread.join()
        return set(called)

    with start_job(1, body) as job:
        assert job.results(500) == [{1}]


def test_close_does_not_wait_for_callbacks_of_another_group_for_ever(start):
    """That callback waits for this very thread."""

    def body(backend, pipe):
        group, is_closed, is_called = backend.dup(), threading.Event(), threading.Event()
        if backend.rank == 1:
            backend.recv(0)
            return float(backend.allreduce(1.0) - 2)
        work = backend.allreduce(1.0, async_op=True)
        work.add_done_callback(lambda work: (is_called.set(), is_closed.wait(20)))
        backend.send(0, 1)  # only now the other rank makes the call
        assert is_called.wait(20)
        begun = time.monotonic()
        group.close()
        took = time.monotonic() - begun
        is_closed.set()
        return took

    with start(2, body) as job:
        assert max(job.results()) < 10
