"""Faults that were once there, each kept from coming back."""

import contextlib
import gc
import threading
from typing import ClassVar

import numpy as np
import pytest

import ferrodist
from ferrodist import (
    BackendClosed,
    CollectiveTimeout,
    Config,
    GroupAborted,
    InvalidArgument,
    RankLost,
    SimulatedBackend,
    SizeMismatch,
)
from ferrodist.call import Kind
from ferrodist.schedules import Copy, Fold, Recv, Schedule, Send, Step, mine, out, scratch, verify
from ferrodist.testing import Faults, run_ranks
from helpers import Gate, errors_by_rank


def test_all_to_all_uneven_in_place_sends_what_was_passed():
    def body(backend):
        x = np.arange(6.0) + 100 * backend.rank
        ferrodist.all_to_all_uneven(x, [2, 2, 2], backend, out=x)
        return x.tolist()

    assert run_ranks(3, body)[0] == [0, 1, 100, 101, 200, 201]


def test_a_rank_behind_a_final_verdict_still_gets_one_of_its_own():
    """Ranks 0 and 1 time out in the second call while 2 and 3 are still stuck in the first."""

    def body(backend):
        timeout = 0.5 if backend.rank >= 2 else 0.2
        ferrodist.broadcast(np.ones(3), backend, algorithm="tree", timeout=timeout)
        ferrodist.barrier(backend, timeout=timeout)

    # In the tree rank 0 serves rank 2 before rank 1; rank 2 stops before it serves rank 3.
    errors = errors_by_rank(4, body, faults=Faults(freeze={2: 2}), timeout=20)
    assert {type(error) for error in errors} <= {CollectiveTimeout, GroupAborted}
    assert all(error is not None for error in errors)


def receives_one_chunk_and_folds_another(rank, world, root):
    other = 1 - rank
    yield Step(Send(other, (mine(1),)), Recv(other, (scratch(1),)))
    first, second = (mine(1), scratch(1)) if rank == 0 else (scratch(1), mine(1))
    yield Step(
        Send(other, (mine(0),)), Recv(other, (scratch(0),)), (Fold(out(1), (first, second)),)
    )
    first, second = (mine(0), scratch(0)) if rank == 0 else (scratch(0), mine(0))
    yield Step(then=(Fold(out(0), (first, second)),))


def sends_two_chunks_while_folding_one(rank, world, root):
    """Rank 1 must have sent all of chunk 1 before it folds what arrives into it."""
    if rank == 1:
        yield Step(then=(Copy(out(0), mine(0)),))
        yield Step(then=(Copy(out(1), mine(1)),))
        fold = Fold(out(1), (scratch(1), out(1)))
        yield Step(Send(0, (out(0), out(1))), Recv(0, (scratch(1),)), (fold,))
        yield Step(recv=Recv(0, (out(0),)))
        return
    yield Step(Send(1, (mine(1),)), Recv(1, (scratch(0), scratch(1))))
    for chunk in (0, 1):
        yield Step(then=(Fold(out(chunk), (mine(chunk), scratch(chunk))),))
    yield Step(send=Send(1, (out(0),)))


@pytest.mark.parametrize("count", [1, 5, 7, 4099])
@pytest.mark.parametrize(
    "steps", [receives_one_chunk_and_folds_another, sends_two_chunks_while_folding_one]
)
@pytest.mark.parametrize("in_place", [False, True])
def test_whatever_the_verifier_proves_the_walker_does(steps, count, in_place):
    schedule = Schedule(steps.__name__, Kind.ALLREDUCE, steps, chunks=lambda world: 2)
    verify(schedule, 2)
    config = Config(piece_nbytes=4096, segment_nbytes=1 << 20)

    def body(backend):
        x = np.arange(count, dtype=np.float64) + backend.rank
        return ferrodist.allreduce(x, backend, algorithm=schedule, out=x if in_place else None)

    for result in run_ranks(2, body, config=config):
        np.testing.assert_array_equal(result, 2 * np.arange(count) + 1.0)


def test_schedules_that_differ_on_other_ranks_than_the_first_are_a_mismatch():
    def hub_folds(order):
        def steps(rank, world, root):
            if rank != 0:
                yield Step(send=Send(0, (mine(0),)))
                yield Step(recv=Recv(0, (out(0),)))
                if rank == order:  # a difference that only this rank's steps show
                    yield Step(then=())
                return
            for peer in range(1, world):
                yield Step(recv=Recv(peer, (scratch(0, peer),)))
            raw = (mine(0), *(scratch(0, peer) for peer in range(1, world)))
            yield Step(then=(Fold(out(0), raw),))
            for peer in range(1, world):
                yield Step(send=Send(peer, (out(0),)))

        return Schedule("hub", Kind.ALLREDUCE, steps, chunks=lambda world: 1)

    first, second = hub_folds(1), hub_folds(2)

    def body(backend):
        with pytest.raises(ferrodist.CollectiveMismatch, match="hub@"):
            ferrodist.allreduce(1.0, backend, algorithm=second if backend.rank == 1 else first)
        return ferrodist.allreduce(1.0, backend, algorithm=first)

    assert run_ranks(3, body) == [3.0] * 3


def test_two_schedules_of_one_name_are_a_mismatch():
    first = Schedule("mine", Kind.ALLREDUCE, sends_two_chunks_while_folding_one, lambda world: 2)
    second = Schedule("mine", Kind.ALLREDUCE, receives_one_chunk_and_folds_another, lambda world: 2)

    def body(backend):
        schedule = first if backend.rank == 0 else second
        with pytest.raises(ferrodist.CollectiveMismatch, match="mine@"):
            ferrodist.allreduce(np.ones(4), backend, algorithm=schedule)
        return ferrodist.allreduce(1, backend)

    assert run_ranks(2, body) == [2, 2]


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


def test_a_callback_that_fails_or_waits_does_not_stop_the_calls_behind_it(caplog):
    def body(backend):
        second = []

        def leaves(work):
            raise SystemExit

        def waits(work):
            with pytest.raises(InvalidArgument, match="its own thread"):
                second[0].wait(5)

        gate = threading.Event()
        first = ferrodist.allreduce(1, backend, async_op=True)
        first.add_done_callback(lambda work: gate.wait(10))
        blocked = ferrodist.allreduce(2, backend, async_op=True)
        blocked.add_done_callback(leaves)
        third = ferrodist.allreduce(3, backend, async_op=True)
        third.add_done_callback(waits)
        second.append(ferrodist.allreduce(4, backend, async_op=True))
        gate.set()
        return second[0].wait(20)

    assert run_ranks(2, body) == [8, 8]


def test_a_send_in_flight_that_expires_does_not_fail_the_others():
    def body(backend):
        large, other = np.ones(100_000), 1 - backend.rank
        timeout = 0.2 if backend.rank == 0 else 20
        work = ferrodist.send(large, other, backend, async_op=True, timeout=timeout)
        ferrodist.barrier(backend)
        if backend.rank == 0:
            assert isinstance(work.exception(10), CollectiveTimeout)
            return ferrodist.recv(large, other, backend).sum()
        return work.wait(10)

    assert run_ranks(2, body) == [100_000, None]


def test_an_abort_after_a_mismatch_leaves_the_mismatch_to_all():
    def body(backend):
        try:
            ferrodist.allreduce(np.ones(1 + backend.rank), backend)
        except SizeMismatch:
            if backend.rank == 0:
                backend.abort("enough")
            raise

    for _ in range(20):
        assert {type(error) for error in errors_by_rank(4, body)} == {SizeMismatch}


def test_split_speaks_of_ranks_of_the_parent_and_gives_all_one_error():
    def body(backend):
        if backend.rank == 3:
            raise ValueError("boom")
        if backend.rank > 0:
            backend.split([1, 2, 3])

    with pytest.raises(ExceptionGroup) as caught:
        run_ranks(4, body)
    _, *others = caught.value.exceptions
    assert [type(error) for error in others] == [RankLost, RankLost]
    assert {error.rank for error in others} == {3}
    assert all("rank 3 raised ValueError: boom" in str(error) for error in others)


def test_threads_that_split_the_same_list_at_once_get_different_groups():
    def body(backend):
        groups = []
        threads = [
            threading.Thread(target=lambda: groups.append(backend.split([0, 1]))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {group._control.group for group in groups}

    first, second = run_ranks(2, body)
    assert first == second
    assert len(first) == 8


def test_survivors_may_split_off_after_a_loss_but_not_after_an_abort():
    def body(backend):
        if backend.rank == 2:
            return None
        with pytest.raises(RankLost):
            ferrodist.barrier(backend)
        group = backend.split([0, 1])
        total = ferrodist.allreduce(1, group)
        if backend.rank == 0:
            backend.abort("enough")
        with pytest.raises(GroupAborted):
            ferrodist.recv(0, 1 - group.rank, group)
        with pytest.raises(GroupAborted):
            backend.split([0, 1])
        return total

    assert run_ranks(3, body) == [2, 2, None]


def test_small_sends_notice_a_dead_group_and_a_rank_that_left():
    left = threading.Event()

    def body(backend):
        if backend.rank == 1:
            backend.close()
            left.set()
            return
        assert left.wait(20)
        with pytest.raises(RankLost):
            ferrodist.send(1, 1, backend)

    run_ranks(2, body)
    (one, other) = SimulatedBackend.create_group(2)
    other.abort("enough")
    with pytest.raises(GroupAborted):
        ferrodist.send(1, 1, one)


def test_exactly_64_kilobytes_do_not_wait():
    def body(backend):
        if backend.rank == 0:
            ferrodist.send(np.zeros(65536, np.uint8), 1, backend, timeout=5)
        ferrodist.barrier(backend)
        if backend.rank == 1:
            ferrodist.recv(np.zeros(65536, np.uint8), 0, backend)

    run_ranks(2, body)


def test_close_waits_for_messages_in_flight():
    def body(backend):
        if backend.rank == 0:
            with backend:
                work = ferrodist.recv(0, 1, backend, async_op=True)
                ferrodist.barrier(backend)
            return work.wait(1)
        ferrodist.barrier(backend)
        return ferrodist.send(7, 0, backend)

    assert run_ranks(2, body)[0] == 7


def test_a_callback_that_takes_too_long_is_named_by_the_call_behind_it():
    def body(backend):
        release = threading.Event()
        work = ferrodist.allreduce(1, backend, async_op=True)
        work.add_done_callback(lambda work: release.wait(20))
        ferrodist.allreduce(1, backend, async_op=True, timeout=None)
        try:
            with pytest.raises(CollectiveTimeout, match="a callback of an earlier Work is still"):
                ferrodist.barrier(backend, timeout=0.3)
        finally:
            release.set()

    (backend,) = SimulatedBackend.create_group(1)
    body(backend)


def test_unpickling_runs_when_the_call_is_over():
    def body(backend):
        return ferrodist.all_gather_object(Rebuilds(backend), backend, pickle=True)

    assert run_ranks(2, body) == [[2, 2], [2, 2]]


class Rebuilds:
    """Makes a call of its own when it is rebuilt, which must not wait for the call it came with."""

    backends: ClassVar[dict[str, SimulatedBackend]] = {}

    def __init__(self, backend):
        self.backends[threading.current_thread().name] = backend

    def __reduce__(self):
        return _rebuild, ()


def _rebuild():
    backend = Rebuilds.backends[threading.current_thread().name]
    return ferrodist.allreduce(1, backend, timeout=5)


@pytest.mark.parametrize("faults", [None, Faults(delay=1.0, max_delay=0.2)])
def test_a_sendrecv_that_fails_takes_its_large_message_back(faults):
    large = np.ones(100_000)

    def body(backend):
        if backend.rank == 0:
            with pytest.raises(CollectiveTimeout):
                ferrodist.sendrecv(large, 1, large, 1, backend, timeout=0.05)
            work = ferrodist.send(2 * large, 1, backend, async_op=True)
        ferrodist.barrier(backend)
        return ferrodist.recv(large, 0, backend)[0] if backend.rank == 1 else work.wait(10)

    assert run_ranks(2, body, faults=faults)[1] == 2.0


def test_a_sendrecv_that_got_the_wrong_shape_still_sends():
    def body(backend):
        other = 1 - backend.rank
        like = np.ones(2 + backend.rank)
        return ferrodist.sendrecv(np.ones(2), other, like, other, backend, timeout=5)

    first, second = errors_by_rank(2, body)
    assert first is None
    assert isinstance(second, SizeMismatch)


def test_ranks_that_close_while_each_waits_for_the_other_do_not_hang():
    def body(backend):
        backend.timeout = None
        other = 1 - backend.rank
        works = [
            ferrodist.recv(0, other, backend, async_op=True),
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

    def interrupt():
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


def test_closing_in_the_middle_of_a_call_does_not_wait_for_what_is_in_flight():
    """As a finalizer or a signal handler would, in a thread that holds the lock of the world."""
    one, other = SimulatedBackend.create_group(2)
    work = ferrodist.allreduce(1, one, async_op=True)
    with one._world.switch.lock:
        one.close()
    assert ferrodist.allreduce(1, other) == 2
    assert work.wait(20) == 2
    with pytest.raises(RankLost, match="rank 0 left after #1"):
        ferrodist.barrier(other)


def test_a_callback_that_holds_up_a_queue_is_named_on_the_ranks_that_wait_too():
    gate, told = Gate(), threading.Event()

    def body(backend):
        if backend.rank == 1:
            gate.pass_through(1)
            ferrodist.allreduce(1, backend)
            try:
                ferrodist.allreduce(1, backend, timeout=None)
            finally:
                told.set()
        work = ferrodist.allreduce(1, backend, async_op=True)
        work.add_done_callback(lambda work: told.wait(5))
        gate.pass_through(0)
        queued = [ferrodist.allreduce(1, backend, async_op=True, timeout=None) for _ in range(2)]
        try:
            ferrodist.barrier(backend, timeout=0.3)
        finally:
            assert all(one.exception(10) is not None for one in queued)

    errors = errors_by_rank(2, body, timeout=20)
    assert [type(error) for error in errors] == [CollectiveTimeout, CollectiveTimeout]
    assert [error.missing for error in errors] == [[0], [0]]


def test_numbers_of_numpy_are_numbers():
    def body(backend):
        ferrodist.barrier(backend, timeout=np.float32(5))
        one = np.int64(1)
        if backend.rank == 0:
            return ferrodist.send(3, one, backend, tag=one)
        return ferrodist.recv(0, np.int64(0), backend, tag=one)

    assert run_ranks(np.int64(2), body) == [None, 3]


def test_an_error_pickles_whatever_was_passed():
    import pickle

    (backend,) = SimulatedBackend.create_group(1)
    with pytest.raises(InvalidArgument) as caught:
        ferrodist.allreduce(1, backend, algorithm=lambda: None)
    assert "lambda" in pickle.loads(pickle.dumps(caught.value)).got


def test_an_error_whose_text_cannot_be_had_is_told_all_the_same():
    class Odd(Exception):
        def __str__(self):
            raise ValueError

    def body(backend):
        if backend.rank == 0:
            raise Odd
        ferrodist.barrier(backend)

    with pytest.raises(ExceptionGroup) as caught:
        run_ranks(2, body)
    assert "rank 0 raised Odd" in str(caught.value.exceptions[1])


def test_many_tags_and_asked_errors_leave_nothing_behind():
    def body(backend):
        other = 1 - backend.rank
        for tag in range(200):
            ferrodist.sendrecv(1, other, 0, other, backend, tag=tag)
        for size in range(20):
            x = np.ones(1 + size + backend.rank)
            assert ferrodist.allreduce(x, backend, async_op=True).exception(10) is not None
        return len(backend._messenger._lanes), len(backend._unasked)

    for lanes, unasked in run_ranks(2, body):
        assert lanes == 0
        assert unasked <= 1


def test_a_backend_dropped_without_close_leaves_its_group():
    def body(backend):
        backend.split([0, 1])
        gc.collect()
        ferrodist.barrier(backend)
        return len(backend._world._groups)

    assert run_ranks(2, body) == [1, 1]


def test_counts_out_of_all_proportion_are_refused():
    (backend,) = SimulatedBackend.create_group(1)
    with pytest.raises(InvalidArgument, match="recv_counts"):
        ferrodist.all_to_all_uneven(np.ones(1), [1], backend, recv_counts=[2**70])


def test_errors_of_a_group_say_which_group():
    def body(backend):
        group = backend.split([3, 1]) if backend.rank in (1, 3) else None
        if group is not None:
            ferrodist.allreduce(np.ones(1 + group.rank), group)

    errors = errors_by_rank(4, body)
    assert "(in the group of world ranks [3, 1])" in str(errors[1])


def test_wait_of_zero_asks_without_waiting():
    gate = Gate()

    def body(backend):
        if backend.rank == 1:
            gate.pass_through(1)
            return ferrodist.barrier(backend)
        work = ferrodist.allreduce(1, backend, async_op=True)
        with pytest.raises(TimeoutError):
            work.wait(0)
        gate.pass_through(0)
        assert work.exception(10) is not None
        return None

    errors_by_rank(2, body)
