"""Faults injected between simulated ranks: absorbed or named, never a wrong sum."""

import numpy as np
import pytest

import ferrodist
from ferrodist import CollectiveTimeout, Config, GroupAborted, ProtocolError, RankLost
from ferrodist.call import Kind
from ferrodist.schedules import known
from ferrodist.testing import Faults, run_ranks
from helpers import errors_by_rank

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


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("seed", range(3))
def test_delays_copies_and_overtaking_are_absorbed(world, algorithm, seed):
    faults = Faults(seed=seed, delay=0.3, duplicate=0.3, reorder=0.3, max_delay=0.002)
    for sums in run_ranks(world, lambda b: several_sums(b, algorithm), faults=faults):
        np.testing.assert_array_equal(sums, expected_sums(world))
    fates = [fate for link in faults.log.values() for fate in link]
    assert any("duplicate" in fate for fate in fates)
    assert any("delay" in fate for fate in fates)


def test_the_log_of_every_link_is_a_function_of_the_seed():
    def log(seed):
        faults = Faults(seed=seed, delay=0.2, duplicate=0.2, reorder=0.2, max_delay=0.001)
        run_ranks(4, lambda b: several_sums(b, "ring"), faults=faults)
        return faults.log

    assert log(1) == log(1)
    assert log(1) != log(2)


def test_a_fate_depends_on_seed_link_and_number_alone():
    faults = Faults(seed=7, drop=0.5)
    fates = [faults.fate(0, 1, number).drop for number in range(64)]
    assert fates == [Faults(seed=7, drop=0.5).fate(0, 1, number).drop for number in range(64)]
    assert fates != [faults.fate(1, 0, number).drop for number in range(64)]
    assert 10 < sum(fates) < 54


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("failed_rank", [0, 1])
def test_a_dropped_message_is_a_timeout_that_names_its_sender_on_all_ranks(world, failed_rank):
    class DropFirstOf(Faults):
        def fate(self, sender, receiver, number):
            fate = super().fate(sender, receiver, number)
            return fate._replace(drop=True) if sender == failed_rank else fate

    errors = errors_by_rank(
        world, lambda b: several_sums(b, "ring", timeout=0.3), faults=DropFirstOf()
    )
    assert {type(error) for error in errors} == {CollectiveTimeout}
    assert [error.missing for error in errors] == [[failed_rank]] * world
    assert len({str(error) for error in errors}) == 1
    assert {error.this_rank for error in errors} == set(range(world))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_corrupted_message_is_a_protocol_error_naming_its_sender(algorithm):
    class CorruptOne(Faults):
        def fate(self, sender, receiver, number):
            fate = super().fate(sender, receiver, number)
            return fate._replace(corrupt=sender == 2 and number == 1)

    errors = errors_by_rank(4, lambda b: several_sums(b, algorithm, timeout=5), faults=CorruptOne())
    assert {type(error) for error in errors} <= {ProtocolError, GroupAborted}
    assert ProtocolError in {type(error) for error in errors}
    assert {error.rank for error in errors} == {2}


@pytest.mark.parametrize("seed", range(8))
def test_no_rank_ever_gets_a_wrong_sum(seed):
    faults = Faults(
        seed=seed, delay=0.1, duplicate=0.1, reorder=0.1, drop=0.02, corrupt=0.02, max_delay=0.001
    )
    results = {}

    def body(backend):
        for call in range(6):
            x = np.full(5, float(backend.rank + call))
            results[backend.rank, call] = ferrodist.allreduce(x, backend, timeout=0.5)

    errors = errors_by_rank(4, body, faults=faults)
    for (_, call), value in results.items():
        np.testing.assert_array_equal(value, np.full(5, 6.0 + 4 * call))
    assert {type(e) for e in errors} <= {type(None), CollectiveTimeout, ProtocolError, GroupAborted}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("message", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rank_killed_at_its_nth_message_is_lost_to_all(world, message, algorithm):
    faults = Faults(kill={1: message})
    errors = errors_by_rank(world, lambda b: several_sums(b, algorithm, calls=4), faults=faults)
    assert {type(error) for error in errors} == {RankLost}
    assert {error.rank for error in errors} == {1}
    assert all(
        f"killed by an injected fault at its message {message}" in error.how for error in errors
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_frozen_rank_is_a_timeout_that_names_it(algorithm):
    faults = Faults(freeze={2: 2})
    errors = errors_by_rank(3, lambda b: several_sums(b, algorithm, timeout=0.3), faults=faults)
    assert {type(error) for error in errors} == {CollectiveTimeout}
    assert [error.missing for error in errors] == [[2]] * 3


def test_after_a_timeout_every_later_call_is_refused_with_the_reason():
    def body(backend):
        with pytest.raises(CollectiveTimeout):
            several_sums(backend, timeout=0.2)
        with pytest.raises(GroupAborted, match="rank 2 did not get through"):
            ferrodist.barrier(backend)
        return True

    assert run_ranks(3, body, faults=Faults(freeze={2: 1})) == [True] * 3


def test_large_messages_survive_faults_piece_by_piece():
    config = Config(message_nbytes=4096, chunk_nbytes=16384)
    faults = Faults(seed=3, delay=0.05, duplicate=0.2, reorder=0.1, max_delay=0.001)

    def body(backend):
        return ferrodist.allreduce(np.arange(20_000.0) * (backend.rank + 1), backend)

    for result in run_ranks(3, body, faults=faults, config=config):
        np.testing.assert_array_equal(result, np.arange(20_000.0) * 6)


def test_point_to_point_messages_survive_delays_copies_and_overtaking():
    faults = Faults(seed=1, delay=0.3, duplicate=0.3, reorder=0.3, max_delay=0.002)

    def body(backend):
        if backend.rank == 0:
            for number in range(30):
                ferrodist.send(np.full(3, number), 1, backend, tag=number % 2)
            return []
        return [ferrodist.recv(0, backend, like=np.empty(3, int), tag=n % 2)[0] for n in range(30)]

    assert run_ranks(2, body, faults=faults)[1] == list(range(30))


def test_a_corrupted_point_to_point_message_is_a_protocol_error():
    def body(backend):
        if backend.rank == 0:
            return ferrodist.send(np.arange(9), 1, backend)
        with pytest.raises(ProtocolError, match="bytes from rank 0 cannot be right") as caught:
            ferrodist.recv(0, backend, like=np.empty(9, int))
        return caught.value.rank

    assert run_ranks(2, body, faults=Faults(corrupt=1.0)) == [None, 0]
