"""Faults injected into the links of thread ranks: absorbed or named, never a wrong sum."""

import gc
import itertools
import os

import numpy as np
import pytest

import ferrodist
from ferrodist import CollectiveTimeout, Config, GroupAborted, ProtocolError, RankLost
from ferrodist.call import Kind
from ferrodist.schedules import known
from ferrodist.testing import Faults, run_ranks
from helpers import await_until, errors_by_rank

WORLDS = [2, 3, 5]
ALGORITHMS = [schedule.name for schedule in known(Kind.ALLREDUCE)]


def several_sums(backend, algorithm=None, calls=4, timeout=20.0):
    """Make a few calls whose results depend on every rank and on the call; return the sums."""
    sums = []
    for call in range(calls):
        x = np.arange(50, dtype=np.float64) * (backend.rank + 1) + call
        sums.append(ferrodist.allreduce(x, backend, algorithm=algorithm, timeout=timeout))
    return sums


def expected_sums(world, calls=4):
    ranks = range(1, world + 1)
    return [
        sum(np.arange(50, dtype=np.float64) * rank + call for rank in ranks)
        for call in range(calls)
    ]


def first_link_of(algorithm, world, rank):
    """Find a rank to which this one sends data, by looking at what a run delays."""
    faults = Faults(delay=1e-9)
    run_ranks(world, lambda b: several_sums(b, algorithm, calls=1), faults=faults)
    return min(link for link in faults.log if link[0] == rank)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("seed", range(3))
def test_delays_are_absorbed(world, algorithm, seed):
    faults = Faults(seed=seed, delay=0.0005, jitter=0.002)
    for sums in run_ranks(world, lambda b: several_sums(b, algorithm), faults=faults):
        np.testing.assert_array_equal(sums, expected_sums(world))
    assert all("delay" in fault for link in faults.log.values() for fault in link)
    assert sum(map(len, faults.log.values())) >= 4 * world


@pytest.mark.parametrize(
    "times", [10, pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
def test_the_log_is_a_function_of_the_seed(times):
    def log(seed):
        faults = Faults(seed=seed, jitter=0.001)
        run_ranks(4, lambda b: several_sums(b, "ring"), faults=faults)
        return faults.log

    first = log(1)
    assert len(first) == 4
    assert all(log(1) == first for _ in range(times))
    assert log(2) != first


@pytest.mark.parametrize(
    "times", [5, pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"flip": {(1, 2): 3}}, {(1, 2): ["3: flip bit"]}),
        ({"cut": {(1, 2): 3}}, {(1, 2): ["3: cut"]}),
        ({"kill": {1: 5}}, {(1, 1): ["5: kill"]}),
        ({"freeze": {1: 5}}, {(1, 1): ["5: freeze"]}),
    ],
)
def test_what_ends_a_group_is_in_the_log_once_whatever_the_threads_do(fault, expected, times):
    logs = []
    for _ in range(times):
        faults = Faults(seed=4, **fault)
        errors_by_rank(4, lambda b: several_sums(b, "ring", timeout=0.5), faults=faults)
        logs.append(faults.log)
    assert all(log == logs[0] for log in logs)
    assert logs[0].keys() == expected.keys()
    (found,), (first,) = logs[0].values(), expected.values()
    assert [one.startswith(start) for one, start in zip(found, first, strict=True)] == [True]


def test_a_delay_and_a_bit_depend_on_seed_link_and_frame_alone():
    faults, links = Faults(seed=7, delay=1, jitter=2), list(itertools.permutations(range(3), 2))
    lags = [faults.lag(link, number) for link in links for number in range(64)]
    again = Faults(seed=7, delay=1, jitter=2)
    assert lags == [again.lag(link, number) for link in links for number in range(64)]
    assert len(set(lags)) == len(lags)
    assert 1 <= min(lags) < 1.1
    assert 2.9 < max(lags) <= 3
    assert {faults.flipped_bit((0, 1), number, 16) for number in range(400)} == set(range(16))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_flipped_bit_is_a_protocol_error_naming_its_sender(algorithm):
    link = first_link_of(algorithm, 4, 2)
    errors = errors_by_rank(
        4, lambda b: several_sums(b, algorithm, timeout=5), faults=Faults(flip={link: 1})
    )
    assert {type(error) for error in errors} <= {ProtocolError, GroupAborted}
    assert ProtocolError in {type(error) for error in errors}
    assert {error.rank for error in errors} == {2}


@pytest.mark.parametrize("seed", range(16))
def test_no_rank_ever_gets_a_wrong_sum(seed):
    links = list(itertools.permutations(range(4), 2))
    link, frame = links[seed * 5 % len(links)], 1 + seed % 4
    how = {("flip", "cut")[seed % 2]: {link: frame}}
    faults = Faults(seed=seed, jitter=0.001, **how)
    results = {}

    def body(backend):
        for call in range(6):
            x = np.full(5, float(backend.rank + call))
            results[backend.rank, call] = ferrodist.allreduce(
                x, backend, timeout=2, algorithm="direct"
            )

    errors = errors_by_rank(4, body, faults=faults)
    for (_, call), value in results.items():
        np.testing.assert_array_equal(value, np.full(5, 6.0 + 4 * call))
    assert all(isinstance(error, (RankLost, ProtocolError, GroupAborted)) for error in errors)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("message", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rank_killed_at_its_nth_message_is_lost_to_all(world, message, algorithm):
    faults = Faults(kill={1: message})
    errors = errors_by_rank(world, lambda b: several_sums(b, algorithm, calls=4), faults=faults)
    assert {type(error) for error in errors} == {RankLost}
    assert {error.rank for error in errors} == {1}
    how = f"killed by an injected fault at its message {message}"
    assert all(how in error.how for error in errors)


def test_the_next_calls_of_a_killed_rank_raise_too_and_the_others_go_on():
    def body(backend):
        with pytest.raises(RankLost) as caught:
            several_sums(backend)
        assert caught.value.rank == 1
        if backend.rank == 1:
            for call in (
                lambda: backend.allreduce(1),
                lambda: backend.allreduce(1, async_op=True).wait(20),
                lambda: backend.send(1, 0),
                lambda: backend.recv(2),
                lambda: backend.split([1, 2]),
            ):
                with pytest.raises(RankLost, match="rank 1 was killed by an injected fault"):
                    call()
            return None
        return backend.split([0, 2]).allreduce(backend.rank)

    assert run_ranks(3, body, faults=Faults(kill={1: 2})) == [2, None, 2]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_frozen_rank_is_a_timeout_that_names_it(algorithm):
    faults = Faults(freeze={2: 2})
    errors = errors_by_rank(3, lambda b: several_sums(b, algorithm, timeout=0.5), faults=faults)
    assert {type(error) for error in errors} == {CollectiveTimeout}
    assert [error.missing for error in errors[:2]] == [[2]] * 2
    assert errors[2].missing  # it hears nothing of the others


def test_a_frozen_rank_that_nobody_waits_for_by_a_deadline_is_lost():
    config = Config(heartbeat=0.1, heartbeat_timeout=0.6)
    faults = Faults(freeze={2: 2})
    errors = errors_by_rank(3, several_sums, faults=faults, config=config)
    assert {type(error) for error in errors} == {RankLost}
    assert [error.rank for error in errors[:2]] == [2, 2]
    assert "has sent no heartbeat for 0.6 s" in str(errors[0])


def test_after_a_timeout_every_later_call_is_refused_with_the_reason():
    def body(backend):
        with pytest.raises(CollectiveTimeout):
            several_sums(backend, timeout=0.3)
        with pytest.raises(GroupAborted, match="rank 2" if backend.rank < 2 else "rank"):
            ferrodist.barrier(backend)
        return True

    assert run_ranks(3, body, faults=Faults(freeze={2: 1})) == [True] * 3


def test_a_cut_link_is_a_loss_that_names_the_other_end():
    def body(backend):
        other = 1 - backend.rank

        def talk():
            while True:
                backend.sendrecv(backend.rank, other, other)

        with pytest.raises(RankLost, match="is not connected any more") as caught:
            talk()
        return caught.value.rank

    assert run_ranks(2, body, faults=Faults(cut={(0, 1): 3})) == [1, 0]


def test_large_messages_survive_delays_piece_by_piece():
    config = Config(message_nbytes=4096, chunk_nbytes=16384)
    faults = Faults(seed=3, jitter=0.0005)

    def body(backend):
        return ferrodist.allreduce(np.arange(20_000.0) * (backend.rank + 1), backend)

    for result in run_ranks(3, body, faults=faults, config=config):
        np.testing.assert_array_equal(result, np.arange(20_000.0) * 6)
    assert max(map(len, faults.log.values())) > 10


def test_point_to_point_messages_survive_delays():
    faults = Faults(seed=1, jitter=0.002)

    def body(backend):
        if backend.rank == 0:
            for number in range(30):
                ferrodist.send(
                    np.full(3 if number % 3 else 30_000, number), 1, backend, tag=number % 2
                )
            return []
        return [int(ferrodist.recv(0, backend, tag=n % 2)[0]) for n in range(30)]

    assert run_ranks(2, body, faults=faults)[1] == list(range(30))
    assert len(faults.log[0, 1]) == 30


def test_a_flipped_bit_of_a_message_is_a_protocol_error():
    def body(backend):
        if backend.rank == 0:
            return ferrodist.send(np.arange(9), 1, backend)
        with pytest.raises(ProtocolError, match="bytes from rank 0 cannot be right") as caught:
            ferrodist.recv(0, backend, like=np.empty(9, int))
        return caught.value.rank

    assert run_ranks(2, body, faults=Faults(flip={(0, 1): 1})) == [None, 0]


def test_nothing_of_the_links_is_left_when_the_ranks_are():
    def resources():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    gc.collect()
    before = resources()
    for how in ({}, {"kill": {1: 2}}, {"freeze": {1: 2}}, {"cut": {(0, 1): 2}}):
        errors_by_rank(3, lambda b: several_sums(b, timeout=0.3), faults=Faults(**how))
    gc.collect()
    await_until(lambda: all(now <= then for now, then in zip(resources(), before, strict=True)))
