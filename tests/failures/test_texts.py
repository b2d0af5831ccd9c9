"""What errors say: whom they name, where, and what to do about it."""

import threading

import numpy as np
import pytest

import ferrodist
from ferrodist import (
    InvalidArgument,
    InvalidRank,
    SimulatedBackend,
    UnsupportedArray,
)
from ferrodist.testing import Faults, run_ranks
from helpers import Gate, errors_by_rank


@pytest.fixture
def alone():
    with SimulatedBackend.create_group(1)[0] as backend:
        yield backend


def test_a_message_with_another_tag_is_mentioned():
    done = threading.Barrier(2)

    def body(backend):
        try:
            if backend.rank == 0:
                return ferrodist.send(1, 1, backend, tag=7)
            return ferrodist.recv(0, backend, tag=8, timeout=0.2)
        finally:
            done.wait(20)

    text = str(errors_by_rank(2, body)[1])
    line = body.__code__.co_firstlineno + 4
    assert f"recv(src=0, tag=8) at test_texts.py:{line}: rank 0 did not answer" in text
    assert "(what it sent has other tags: [7])" in text


def test_two_groups_called_in_crossed_order_say_where_the_other_rank_is():
    def body(backend):
        one, other = backend.split([0, 1]), backend.split([1, 0])
        first, second = (one, other) if backend.rank == 0 else (other, one)
        ferrodist.allreduce(1, first, timeout=0.3 if backend.rank == 0 else 5)
        ferrodist.allreduce(1, second)

    text = str(errors_by_rank(2, body)[0])
    assert "rank 1 is in allreduce #1 at test_texts.py:" in text
    assert "(in the group of world ranks [1, 0])" in text


def test_splits_with_different_lists_name_each_other():
    done = threading.Barrier(2)

    def body(backend):
        try:
            ranks = [0, 1] if backend.rank == 0 else [1, 0]
            backend.split(ranks, timeout=0.3 if backend.rank == 0 else 5)
        finally:
            if backend.rank == 0:
                backend.abort("enough")
            done.wait(20)

    text = str(errors_by_rank(2, body)[0])
    assert (
        "rank 1 did not call it within 0.3 s (waiting elsewhere: rank 1 in split([1, 0]))" in text
    )


def test_what_differs_besides_sizes_gets_its_own_advice():
    def body(backend):
        ferrodist.allreduce(np.ones(2, [int, float][backend.rank]), backend)

    assert "every rank must pass the same dtype, op, root and options" in str(
        errors_by_rank(2, body)[0]
    )


def test_an_out_of_a_tree_is_named_with_its_leaf(alone):
    words = r"allreduce: in out\['b'\], out has shape \(3,\)"
    with pytest.raises(InvalidArgument, match=words):
        ferrodist.allreduce({"b": np.ones(2)}, alone, out={"b": np.ones(3)})


def test_an_op_in_the_place_of_the_root_says_root(alone):
    with pytest.raises(InvalidRank, match="reduce: root 'sum' is not a rank: they go from 0 to 0"):
        ferrodist.reduce(1, alone, "sum")


def test_what_cannot_be_cut_is_given_advice_that_exists():
    def body(backend):
        with pytest.raises(ValueError, match=r"pad it or use reduce_scatter_uneven$"):
            ferrodist.reduce_scatter(np.ones(3), backend)
        with pytest.raises(ValueError, match="pad it or use all_to_all_uneven"):
            ferrodist.all_to_all(np.ones(3), backend)

    run_ranks(2, body)


def test_other_advice(alone):
    with pytest.raises(UnsupportedArray, match=r"pass list\(x\)"):
        ferrodist.allreduce((n for n in range(3)), alone)
    with pytest.raises(UnsupportedArray, match="an array of the root's dtype and shape"):
        ferrodist.broadcast(None, alone)
    with pytest.raises(InvalidArgument, match="expected a list of ranks"):
        alone.split(0)


def test_a_name_that_is_nearly_right_is_suggested():
    with pytest.raises(AttributeError) as caught:
        _ = ferrodist.all_reduce
    assert (caught.value.name, caught.value.obj) == ("all_reduce", ferrodist)


def test_a_wait_that_ran_out_has_a_text():
    gate = Gate()

    def body(backend):
        if backend.rank == 0:
            with pytest.raises(
                TimeoutError, match=r"allreduce #1 is still in flight after 0\.01 s"
            ):
                ferrodist.allreduce(1, backend, async_op=True).wait(0.01)
        gate.pass_through(backend.rank)
        if backend.rank == 1:
            ferrodist.allreduce(1, backend)

    run_ranks(2, body)


@pytest.mark.parametrize(
    "faults",
    [
        {"delay": -0.1},
        {"jitter": float("inf")},
        {"kill": [1]},
        {"freeze": 3},
        {"kill": {1: 0}},
        {"flip": {1: 3}},
        {"cut": {(0, 1): 1.5}},
        {"cut": {(0, 1, 2): 1}},
    ],
    ids=str,
)
def test_faults_that_make_no_sense_are_refused(faults):
    with pytest.raises(InvalidArgument):
        Faults(**faults)


def test_faults_of_a_rank_that_does_not_exist_are_refused():
    with pytest.raises(InvalidRank, match="rank 9 is not in a world of 2"):
        run_ranks(2, ferrodist.barrier, faults=Faults(kill={9: 1}))
    with pytest.raises(InvalidRank, match="rank 9 is not in a world of 2"):
        run_ranks(2, ferrodist.barrier, faults=Faults(cut={(1, 9): 1}))


def test_the_slower_of_two_ranks_is_named_and_nobody_where_there_is_one():
    gate = Gate()

    def body(backend):
        if backend.rank == 1:
            gate.pass_through(1)
        work = ferrodist.allreduce(1, backend, async_op=True)
        if backend.rank == 0:
            while backend.statistics().waiting_for is None:  # until rank 0 waits in its call
                pass
            gate.pass_through(0)
        work.wait(20)
        return backend.statistics().slowest

    assert run_ranks(2, body)[0] == 1
    assert run_ranks(1, lambda b: (ferrodist.barrier(b), b.statistics().slowest)) == [(None, None)]


def test_a_frozen_rank_does_not_log_that_it_waits_for_itself(caplog):
    config = ferrodist.Config(log_wait_after=0.05)
    errors_by_rank(
        2,
        lambda b: ferrodist.barrier(b, timeout=0.3),
        faults=Faults(freeze={1: 1}),
        config=config,
    )
    assert "rank 0: still waiting for rank 1" in caplog.text
    assert "still waiting for rank 1 in" in caplog.text
    assert "rank 1: still waiting for rank 1" not in caplog.text


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


def test_errors_of_a_group_say_which_group():
    def body(backend):
        group = backend.split([3, 1]) if backend.rank in (1, 3) else None
        if group is not None:
            ferrodist.allreduce(np.ones(1 + group.rank), group)

    errors = errors_by_rank(4, body)
    assert "(in the group of world ranks [3, 1])" in str(errors[1])


def test_a_split_of_a_group_says_whose_ranks_it_names(start):
    def body(backend, pipe):
        if backend.rank == 0:
            return []
        group = backend.split([2, 1])
        found = []
        for call in (
            lambda: group.split([group.rank, 5]),
            lambda: group.split([1 - group.rank]),
            lambda: group.split([0, 0, 1]),
            lambda: group.split([]),
        ):
            with pytest.raises(ferrodist.InvalidArgument) as caught:
                call()
            found.append(str(caught.value))
        if group.rank == 0:
            with pytest.raises(ferrodist.CollectiveTimeout) as late:
                group.split([0, 1], timeout=0.2)
            found.append(str(late.value))
        ferrodist.barrier(group)
        return found

    with start(3, body) as job:
        _, first, second = job.results()
    name = "(in the group of world ranks [2, 1]):"
    assert all(name in text for text in (*first, *second))
    assert f"split([0, 1]) {name} rank 1 did not call it" in second[-1]


def test_a_split_of_a_group_of_threads_says_whose_ranks_it_names():
    def body(backend):
        if backend.rank == 0:
            return ""
        group = backend.split([2, 1])
        if group.rank == 1:
            ferrodist.recv(0, group)
            return ""
        with pytest.raises(ferrodist.CollectiveTimeout) as late:
            group.split([0, 1], timeout=0.2)
        ferrodist.send(1, 1, group)
        return str(late.value)

    text = run_ranks(3, body)[2]
    assert "split([0, 1]) (in the group of world ranks [2, 1]): rank 1 did not call it" in text
    assert text.count("in the group") == 1
