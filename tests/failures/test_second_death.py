"""A second rank dies while survivors of the first make a group: they end in one, or raise."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import DistributedError, RankLost
from jobs import error_and_time
from test_rank_faults import all_ready

pytestmark = pytest.mark.timeout(90)

WORLD = 4
STEPS = 20


def train(backend: Any, pipe: Any) -> list[int]:
    """Make steps, and go on without ranks that are lost as docs/errors.md says; return who is left.

    A group that has made some steps after the last loss has trained on.
    """
    pipe.send("ready")
    members, group = list(range(backend.world_size)), backend
    while True:
        try:
            for _ in range(STEPS if group is not backend else 10**9):
                ferrodist.allreduce(np.ones(3), group)
            return members
        except RankLost as error:
            members.pop(error.rank)
        group = split_off(backend, members, pipe)


def split_off(backend: Any, members: list[int], pipe: Any) -> Any:
    while True:
        pipe.send("splits")
        try:
            return backend.split(members, timeout=20)
        except RankLost as error:
            members.remove(error.rank)


def kill_two(start: Any, seed: int) -> list[Any]:
    """Kill a rank, and another one in its split or soon after; return what those left return."""
    rng = random.Random(seed)
    (first, second), moment = rng.sample(range(WORLD), 2), rng.uniform(0, 0.004)
    with start(WORLD, train) as job:
        all_ready(job)
        job[first].send_signal(signal.SIGKILL)
        assert job[second].hear() == "splits"
        end = time.monotonic() + moment
        while time.monotonic() < end:
            pass  # the moment is what is random
        job[second].send_signal(signal.SIGKILL)
        return [end_of(rank) for rank in job.others(first, second)]


def end_of(rank: Any) -> Any:
    while (end := rank.hear()) == "splits":
        pass
    assert end.error is None or isinstance(end.error, DistributedError), end
    return end.result


@pytest.mark.parametrize(
    "seeds",
    [range(7), pytest.param(range(7, 200), marks=[pytest.mark.long, pytest.mark.timeout(900)])],
    ids=["few", "most"],
)
def test_a_second_death_during_a_split_leaves_one_group_or_an_error(start, seeds):
    num_whole = 0
    for seed in seeds:
        groups = [members for members in kill_two(start, seed) if members is not None]
        assert all(members == groups[0] for members in groups), f"seed {seed}: {groups}"
        num_whole += len(groups) == WORLD - 2
    assert num_whole > 0.9 * len(seeds)  # an error is allowed, but is not what happens


def test_a_rank_that_dies_before_its_host_shares_memory_is_named_by_its_rank_in_each_group(
    start_hybrid_job,
):
    """Rank 2 misses it in shared memory, and gives up the group that ranks 0 and 1 have."""

    def body(backend, pipe):
        order = [3, 0, 2, 1]
        if backend.rank == 3:
            type(backend)._complete = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        if backend.rank == 2:
            error, _ = error_and_time(backend.split, order)
            assert isinstance(error, RankLost), error
            assert str(error).startswith("split([3, 0, 2, 1]): rank 3 was killed by SIGKILL")
            named = error.rank
        else:
            error, _ = error_and_time(ferrodist.barrier, backend.split(order))
            assert isinstance(error, RankLost), error
            named = order[error.rank]
        survivors = backend.split([0, 1, 2])
        return named, ferrodist.allreduce(backend.rank, survivors)

    with start_hybrid_job("0011", body) as job:
        assert [rank.end().result for rank in job.others(3)] == [(3, 3)] * 3


def test_a_split_that_one_rank_gives_up_is_no_loss_of_that_rank(start_hybrid_job):
    """Rank 3 comes late to share memory with rank 2, whose timeout is over; both are alive."""

    def body(backend, pipe):
        if backend.rank == 3:
            complete = type(backend)._complete

            def complete_late(*args):
                pipe.send("ready")
                assert pipe.recv() == "go"
                complete(*args)

            type(backend)._complete = complete_late
        if backend.rank >= 2:
            limit = 0.5 if backend.rank == 2 else 20
            error, _ = error_and_time(lambda: backend.split(range(4), timeout=limit))
        else:
            error, _ = error_and_time(ferrodist.barrier, backend.split(range(4)))
            pipe.send(type(error).__name__)
            pipe.recv()  # the other must not hear first that this rank's program has ended
        return type(error).__name__, error.missing

    with start_hybrid_job("0011", body) as job:
        assert job[3].hear() == "ready"
        assert job[2].end().result == ("CollectiveTimeout", [3])
        assert [job[rank].hear() for rank in (0, 1)] == ["GroupAborted"] * 2
        job[0].tell()
        job[1].tell()
        job[3].tell()
        assert job[3].end().result[0] == "GroupAborted"
