"""At the deadline a call succeeds on all ranks, or fails on all with the same ranks missing."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist.errors import CollectiveTimeout, GroupAborted
from ferrodist.testing import run_ranks

pytestmark = pytest.mark.timeout(120)

WORLD, LATE = 4, 2
TIMEOUT = 0.05
TRIES = 48

Outcome = tuple[str, Any, Any]
"""What came of a call: its name, its value or who is missing, its text."""


def call(group: Any, number: int, timeout: float) -> float:
    """Make one of several kinds of calls, with its own timeout or that of the group."""
    x = np.full(3, group.rank + 1.0)
    options: dict[str, Any] = {"timeout": timeout} if number % 2 else {}
    group.timeout = timeout
    kind = number // 2 % 6
    if kind == 0:
        return float(ferrodist.allreduce(x, group, **options)[-1])
    if kind == 1:
        return float(ferrodist.broadcast(x, group, root=LATE, **options)[-1])
    if kind == 2:
        return float(ferrodist.broadcast(x, group, root=0, **options)[-1])
    if kind == 3:
        found = ferrodist.reduce(x, group, root=1, **options)
        return 10.0 if found is None else float(found[-1])
    if kind == 4:
        return float(ferrodist.allreduce(np.full(200_000, x[0]), group, **options)[-1])
    return float(ferrodist.all_gather(x, group, **options).sum() / 3)


EXPECTED = (10.0, LATE + 1.0, 1.0, 10.0, 10.0, 10.0)


def outcome_of(group: Any, number: int, timeout: float) -> Outcome:
    try:
        return "done", call(group, number, timeout), None
    except (CollectiveTimeout, GroupAborted) as error:
        text = error.reason if isinstance(error, GroupAborted) else str(error)
        return type(error).__name__, getattr(error, "missing", None), text


def come_late(backend: Any, timeouts: list[float], tries: int) -> list[Outcome]:
    """Let one rank come within a hair of the shortest deadline, again and again, in a new group."""
    found = []
    for number in range(tries):
        group = backend.split(range(WORLD))
        group.barrier()
        start = time.monotonic()
        if backend.rank == LATE:
            lateness = 0.95 + 0.15 * (number * 7 % 16) / 15
            time.sleep(max(0.0, start + lateness * min(timeouts) - time.monotonic()))
        found.append(outcome_of(group, number, timeouts[backend.rank]))
        backend.barrier()
        group.close()
    return found


def check_uniform(by_rank: list[list[Outcome]]) -> int:
    """Check that ranks agree in every try; return how many succeeded.

    On a busy host others than the late one may miss the deadline, too.
    """
    num_done = 0
    for number, outcomes in enumerate(zip(*by_rank, strict=True)):
        if "done" in [one[0] for one in outcomes]:
            assert [one[:2] for one in outcomes] == [("done", EXPECTED[number // 2 % 6])] * WORLD
            num_done += 1
            continue
        given = next(one for one in outcomes if one[0] == "CollectiveTimeout")
        missing, text = given[1:]
        assert missing, (number, outcomes)
        for rank, one in enumerate(outcomes):
            name, facts = "CollectiveTimeout", missing
            if rank in missing:
                name, facts = "GroupAborted", None
            assert one == (name, facts, text), (number, outcomes)
    return num_done


@pytest.fixture(params=["simulated", "shared_memory", "tcp", "hybrid", "sockets"])
def run(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Give what runs a function on all ranks of a backend and returns their results."""
    if request.param == "simulated":
        return lambda fn: run_ranks(WORLD, lambda backend: fn(backend), timeout=100)
    names = {"shared_memory": "start_job", "tcp": "start_tcp_job", "hybrid": "start_hybrid_job"}
    if request.param in names:
        start = request.getfixturevalue(names[request.param])
    else:
        start = functools.partial(request.getfixturevalue("start_linked_job"), request.param)

    def run_job(fn: Callable[[Any], Any]) -> list[Any]:
        world = "0011" if request.param == "hybrid" else WORLD
        with start(world, lambda backend, pipe: fn(backend)) as job:
            results: list[Any] = job.results()
            return results

    return run_job


@pytest.mark.slow
def test_a_rank_that_comes_at_the_deadline_is_in_time_for_all_or_for_none(run):
    by_rank = run(lambda backend: come_late(backend, [TIMEOUT] * WORLD, TRIES))
    num_done = check_uniform(by_rank)
    assert 0 < num_done < TRIES, "no try was close enough to the deadline to show anything"


@pytest.mark.slow
def test_the_deadlines_of_several_ranks_that_end_at_once_name_the_same(run):
    timeouts = [TIMEOUT, 1.02 * TIMEOUT, 30.0, 1.05 * TIMEOUT]
    check_uniform(run(lambda backend: come_late(backend, timeouts, TRIES)))


@pytest.mark.slow
def test_all_who_have_not_come_are_missing_on_all(run):
    def body(backend):
        found = []
        for number in range(12):
            group = backend.split(range(WORLD))
            group.barrier()
            if backend.rank in (1, 2):  # they come after the deadline, or about then
                time.sleep(TIMEOUT * (1.0 if number % 2 else 1.5))
            found.append(outcome_of(group, number, TIMEOUT))
            backend.barrier()
            group.close()
        return found

    check_uniform(run(body))
