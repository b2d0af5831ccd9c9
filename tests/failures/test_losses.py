"""Differences and losses between ranks: named on every rank, at once, with what to do."""

import logging
import threading
import time

import numpy as np
import pytest

import ferrodist
from ferrodist import (
    CollectiveMismatch,
    CollectiveTimeout,
    Config,
    GroupAborted,
    RankLost,
    SimulatedBackend,
    SizeMismatch,
)
from ferrodist.call import Kind
from ferrodist.schedules import Recv, Reduce, Schedule, Send, Step, mine, out, scratch
from ferrodist.testing import Faults, run_ranks
from helpers import Gate, errors_by_rank


def assert_in_step(backend):
    """Show that the group still works."""
    assert ferrodist.allreduce(backend.rank, backend) == sum(range(backend.world_size))


DIFFERENCES = {
    "shape": (
        lambda b: ferrodist.allreduce(np.ones(3), b),
        lambda b: ferrodist.allreduce(np.ones(4), b),
    ),
    "dtype": (
        lambda b: ferrodist.allreduce(np.ones(3), b),
        lambda b: ferrodist.allreduce(np.ones(3, int), b),
    ),
    "op": (
        lambda b: ferrodist.allreduce(np.ones(3), b),
        lambda b: ferrodist.allreduce(np.ones(3), b, "max"),
    ),
    "root": (
        lambda b: ferrodist.broadcast(np.ones(3), b),
        lambda b: ferrodist.broadcast(np.ones(3), b, 1),
    ),
    "kind": (lambda b: ferrodist.allreduce(np.ones(3), b), lambda b: ferrodist.barrier(b)),
    "algorithm": (
        lambda b: ferrodist.allreduce(np.ones(3), b),
        lambda b: ferrodist.allreduce(np.ones(3), b, algorithm="ring"),
    ),
    "reproducible": (
        lambda b: ferrodist.allreduce(np.ones(3), b),
        lambda b: ferrodist.allreduce(np.ones(3), b, reproducible=True),
    ),
    "tree keys": (
        lambda b: ferrodist.allreduce({"a": np.ones(3), "b": np.ones(2)}, b),
        lambda b: ferrodist.allreduce({"a": np.ones(3), "c": np.ones(2)}, b),
    ),
    "number of leaves": (
        lambda b: ferrodist.allreduce([np.ones(3)], b),
        lambda b: ferrodist.allreduce([np.ones(3), np.ones(3)], b),
    ),
    "pickle": (
        lambda b: ferrodist.all_gather_object(1, b),
        lambda b: ferrodist.all_gather_object(1, b, pickle=True),
    ),
}


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_difference_is_raised_on_every_rank_and_the_group_goes_on(world, what):
    usual, other = DIFFERENCES[what]

    def body(backend):
        assert_in_step(backend)
        with pytest.raises(CollectiveMismatch) as caught:
            (other if backend.rank == world - 1 else usual)(backend)
        assert_in_step(backend)
        return caught.value

    errors = run_ranks(world, body)
    assert len({str(error) for error in errors}) == 1
    assert {error.sequence for error in errors} == {2}
    assert [error.this_rank for error in errors] == list(range(world))
    assert {type(error) for error in errors} == {
        SizeMismatch if what == "shape" else CollectiveMismatch
    }
    for rank in range(world):
        assert f"  rank {rank}  " in str(errors[0])
    assert "test_losses.py:" in str(errors[0])


def test_the_table_shows_each_ranks_call_with_file_and_line():
    def body(backend):
        if backend.rank == 2:
            ferrodist.broadcast(np.zeros(10, np.float32), backend)
        else:
            ferrodist.allreduce(np.zeros(1024, np.float32), backend)

    text = str(errors_by_rank(3, body)[0])
    line = body.__code__.co_firstlineno
    assert text.splitlines() == [
        "allreduce #1: ranks disagree",
        f"  rank 0  allreduce(float32[1024], sum)   test_losses.py:{line + 4}",
        f"  rank 1  allreduce(float32[1024], sum)   test_losses.py:{line + 4}",
        f"  rank 2  broadcast(float32[10], root=0)  test_losses.py:{line + 2}",
        "every rank must make the same calls in the same order",
    ]


def test_in_large_worlds_equal_rows_are_shown_once():
    def body(backend):
        ferrodist.allreduce(np.ones(3 if backend.rank != 7 else 4), backend)

    text = str(errors_by_rank(12, body)[0])
    assert "ranks 0-6 " in text
    assert "ranks 8-11" in text


def test_a_tree_that_differs_says_at_which_leaf():
    def body(backend):
        name = "weight" if backend.rank else "bias"
        ferrodist.allreduce({"a": np.ones(2), name: np.ones(1)}, backend)

    text = str(errors_by_rank(2, body)[0])
    assert "first difference at leaf ['bias']: ['bias']: float64[1] against absent" in text


def test_a_rank_that_never_calls_is_named_by_all_that_wait():
    def body(backend):
        if backend.rank != 1:
            ferrodist.allreduce(np.ones(3), backend, timeout=0.2)

    def stay(backend):
        try:
            return body(backend)
        finally:
            done.wait(20)

    done = threading.Barrier(3)
    errors = errors_by_rank(3, stay)
    assert errors[1] is None
    for rank in (0, 2):
        assert isinstance(errors[rank], CollectiveTimeout)
        assert errors[rank].missing == [1]
        assert "rank 1 has made no call yet" in str(errors[rank])
        assert "FERRODIST_TIMEOUT" in str(errors[rank])


def test_the_shortest_deadline_ends_the_call_for_all():
    done = threading.Barrier(4)

    def body(backend):
        start = time.monotonic()
        try:
            if backend.rank != 3:
                ferrodist.barrier(backend, timeout=0.2 if backend.rank == 0 else 30)
        finally:
            waited = time.monotonic() - start
            done.wait(20)
            assert waited < 5

    errors = errors_by_rank(4, body)
    assert [getattr(error, "missing", None) for error in errors] == [[3], [3], [3], None]


def test_a_late_rank_is_refused_after_the_others_gave_up():
    gave_up = threading.Event()

    def body(backend):
        if backend.rank == 1:
            assert gave_up.wait(20)
        try:
            ferrodist.barrier(backend, timeout=0.2)
        finally:
            gave_up.set()

    errors = errors_by_rank(2, body)
    assert isinstance(errors[0], CollectiveTimeout)
    assert isinstance(errors[1], GroupAborted)
    assert "rank 1 did not get through within 0.2 s" in str(errors[1])


def test_a_long_wait_is_logged_with_the_ranks_it_waits_for(caplog):
    gate = threading.Event()

    class Opens(logging.Handler):
        def emit(self, record):
            if "still waiting for rank 2 " in record.getMessage():
                gate.set()

    handler = Opens()
    logging.getLogger("ferrodist").addHandler(handler)

    def body(backend):
        if backend.rank == 2:
            assert gate.wait(20)
        assert_in_step(backend)

    try:
        run_ranks(3, body, config=Config(log_wait_after=0.05))
    finally:
        logging.getLogger("ferrodist").removeHandler(handler)
    assert "still waiting for rank 2 in allreduce #1 at test_losses.py:" in caplog.text


def test_an_exception_on_one_rank_is_told_to_the_others_with_its_words():
    def body(backend):
        if backend.rank == 1:
            raise ValueError("no such file: data.npy")
        ferrodist.allreduce(1, backend)

    with pytest.raises(ExceptionGroup) as caught:
        run_ranks(3, body)
    first, *others = caught.value.exceptions
    assert isinstance(first, ValueError)
    assert [type(error) for error in others] == [RankLost, RankLost]
    assert {error.rank for error in others} == {1}
    assert "rank 1 raised ValueError: no such file: data.npy" in str(others[0])


def test_a_rank_that_ends_while_others_still_call_is_lost():
    def body(backend):
        for _ in range(3 if backend.rank == 2 else 4):
            ferrodist.barrier(backend)

    errors = errors_by_rank(3, body)
    assert errors[2] is None
    assert [error.rank for error in errors[:2]] == [2, 2]
    assert "rank 2 left after #3 (its program ended)" in str(errors[0])


def test_a_rank_that_closes_while_others_still_call_is_lost_with_the_place():
    def body(backend):
        ferrodist.barrier(backend)
        if backend.rank == 0:
            backend.close()
            return
        ferrodist.barrier(backend)

    errors = errors_by_rank(3, body)
    line = body.__code__.co_firstlineno + 3
    assert f"rank 0 left after #1 (closed at test_losses.py:{line})" in str(errors[1])
    assert isinstance(errors[2], RankLost)


def test_the_same_loss_answers_every_later_call():
    def body(backend):
        if backend.rank == 0:
            return None
        texts = set()
        for _ in range(3):
            with pytest.raises(RankLost) as caught:
                ferrodist.allreduce(1, backend)
            texts.add(str(caught.value))
        return texts

    assert len(run_ranks(3, body)[1]) == 1


@pytest.mark.parametrize(
    "kind", ["allreduce", "broadcast", "gather", "scatter", "all_to_all", "barrier"]
)
@pytest.mark.parametrize("world", [2, 3, 5])
def test_leaving_right_after_the_last_call_harms_nobody(world, kind):
    calls = {
        "allreduce": lambda b: ferrodist.allreduce(np.ones(3), b),
        "broadcast": lambda b: ferrodist.broadcast(np.ones(3), b),
        "gather": lambda b: ferrodist.gather(np.ones(3), b),
        "scatter": lambda b: ferrodist.scatter(np.ones(world) if b.rank == 0 else None, b),
        "all_to_all": lambda b: ferrodist.all_to_all(np.ones(world), b),
        "barrier": lambda b: ferrodist.barrier(b),
    }

    def body(backend):
        with backend:
            for _ in range(5):
                calls[kind](backend)

    for _ in range(10):
        run_ranks(world, body)


def test_a_rank_inside_the_last_call_is_not_failed_by_one_that_goes_on_and_finds_a_loss():
    """Rank 0 leaves, rank 1 runs ahead and loses rank 0, rank 2 is still behind."""
    for _ in range(30):
        errors = errors_by_rank(
            3, lambda b: [ferrodist.barrier(b) for _ in range(1 + (b.rank == 1))]
        )
        assert errors[0] is None
        assert errors[2] is None
        assert isinstance(errors[1], RankLost)


def test_abort_reaches_every_rank_with_who_and_why():
    gate = Gate()

    def body(backend):
        if backend.rank == 1:
            gate.pass_through(0)
            backend.abort("loss is not a number")
        else:
            if backend.rank == 0:
                gate.pass_through(0)
            ferrodist.barrier(backend)

    errors = errors_by_rank(3, body)
    for rank in (0, 2):
        assert isinstance(errors[rank], GroupAborted)
        assert (errors[rank].rank, errors[rank].reason) == (1, "loss is not a number")


def test_a_keyboard_interrupt_inside_a_call_aborts_the_others(monkeypatch):
    interrupted = threading.Event()

    def body(backend):
        if backend.rank == 1:  # as a signal handler would, which waits look for
            monkeypatch.setattr(backend, "look_in_wait", interrupt)
        else:
            assert interrupted.wait(20)
        ferrodist.barrier(backend)  # of which rank 1 may have done its part
        ferrodist.barrier(backend)

    def interrupt(*args):
        interrupted.set()
        raise KeyboardInterrupt

    with pytest.raises(BaseExceptionGroup) as caught:
        run_ranks(3, body)
    first, *others = caught.value.exceptions
    assert isinstance(first, KeyboardInterrupt)
    assert [type(error) for error in others] == [GroupAborted, GroupAborted]
    assert "KeyboardInterrupt (in barrier #1)" in str(others[0])


def test_a_local_refusal_uses_no_sequence_number():
    def body(backend):
        if backend.rank == 0:
            with pytest.raises(ferrodist.InvalidRank):
                ferrodist.broadcast(1, backend, root=9)
            with pytest.raises(ferrodist.UnsupportedOp):
                ferrodist.allreduce(np.ones(2, int), backend, "mean")
        assert_in_step(backend)

    run_ranks(3, body)


def test_the_slow_rank_can_be_named_by_the_statistics():
    def body(backend):
        for _ in range(20):
            if backend.rank == 2:
                time.sleep(0.003)  # this rank is slow on purpose: it is what is measured
            ferrodist.barrier(backend)
        return backend.statistics()

    found = run_ranks(4, body)
    assert (
        found[0].slowest == 2
    )  # a rank knows for whom it has waited itself: the others for rank 0
    assert found[0].lateness[2] > 0.02
    assert [statistics.collectives for statistics in found] == [20] * 4


def test_statistics_count_bytes():
    def body(backend):
        ferrodist.allreduce(np.ones(100), backend, algorithm="star")
        return backend.statistics()

    hub, spoke, _ = run_ranks(3, body)
    headers = 10 * 72  # of the frames that carry the data, and of some that do not
    for nbytes in (hub.sent_nbytes, hub.received_nbytes):
        assert 1600 < nbytes < 1600 + 2 * headers
    for nbytes in (spoke.sent_nbytes, spoke.received_nbytes):
        assert 800 < nbytes < 800 + headers


def test_a_closed_backend_says_so():
    backend = SimulatedBackend.create_group(1)[0]
    backend.close()
    backend.close()
    with pytest.raises(ferrodist.BackendClosed, match="rank 0 has closed"):
        ferrodist.allreduce(1, backend)
    with pytest.raises(ferrodist.BackendClosed):
        ferrodist.send(1, 0, backend)


def test_every_error_pickles_with_its_facts():
    import pickle

    error = errors_by_rank(2, lambda b: ferrodist.allreduce(np.ones(2 + b.rank), b))[1]
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert (again.sequence, again.this_rank, again.op) == (1, 1, "allreduce")


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
            yield Step(then=(Reduce(out(0), raw),))
            for peer in range(1, world):
                yield Step(send=Send(peer, (out(0),)))

        return Schedule("hub", Kind.ALLREDUCE, steps, chunks=lambda world: 1)

    first, second = hub_folds(1), hub_folds(2)

    def body(backend):
        with pytest.raises(ferrodist.CollectiveMismatch, match="hub@"):
            ferrodist.allreduce(1.0, backend, algorithm=second if backend.rank == 1 else first)
        return ferrodist.allreduce(1.0, backend, algorithm=first)

    assert run_ranks(3, body) == [3.0] * 3


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
            ferrodist.recv(1 - group.rank, group)
        with pytest.raises(GroupAborted):
            backend.split([0, 1])
        return total

    assert run_ranks(3, body) == [2, 2, None]
