"""Ranks, groups and threads of real processes that do different things: told, never mixed."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import CollectiveMismatch, SizeMismatch

pytestmark = pytest.mark.timeout(90)

# What ranks must agree on; every call has all of it, and uses what its kind has a use for.
RELEVANT: dict[str, set[str]] = {
    "allreduce": {"shape", "dtype", "op"},
    "broadcast": {"shape", "dtype", "root"},
    "reduce": {"shape", "dtype", "op", "root"},
    "all_gather": {"shape", "dtype"},
    "gather": {"shape", "dtype", "root"},
    "reduce_scatter": {"shape", "dtype", "op"},
    "all_to_all": {"shape", "dtype"},
    "tree": {"shape", "dtype", "op", "keys"},
    "barrier": set(),
}


def random_call(rng: random.Random, world: int) -> dict[str, Any]:
    """Draw a call as data."""
    rows = world * rng.randint(0, 2)
    return {
        "kind": rng.choice([*RELEVANT]),
        "shape": rng.choice([(rows,), (rows, 2), (world, 40_000)]),
        "dtype": rng.choice(["float32", "int64", "uint8"]),
        "op": rng.choice(list(ferrodist.ReduceOp)[2:5]),
        "root": rng.randrange(world),
        "keys": rng.choice(["ab", "ac", "abc"]),
    }


def another_call(rng: random.Random, world: int, usual: dict[str, Any]) -> dict[str, Any]:
    """Change one thing about a call, or everything."""
    other = random_call(rng, world)
    if rng.random() < 0.3:
        return other
    name = rng.choice([*usual])
    return {**usual, name: other[name]}


def what_counts(call: dict[str, Any]) -> dict[str, Any]:
    return {"kind": call["kind"], **{name: call[name] for name in RELEVANT[call["kind"]]}}


def make_call(call: dict[str, Any], backend: Any, **options: Any) -> Any:
    kind = call["kind"]
    if kind == "barrier":
        return ferrodist.barrier(backend)
    x = np.ones(call["shape"], call["dtype"])
    if kind == "tree":
        return ferrodist.allreduce(dict.fromkeys(call["keys"], x), backend, call["op"])
    names = RELEVANT[kind] - {"shape", "dtype"}
    options |= {name: call[name] for name in names}
    return getattr(ferrodist, kind)(x, backend, **options)


def differences(backend: Any, seed: int, number: int) -> list[tuple[int, str, str]]:
    """Make calls that differ on some ranks; return sequence, class and text of every error."""
    world, rng, found = backend.world_size, random.Random(seed), []
    for turn in range(number):
        usual = random_call(rng, world)
        other = another_call(rng, world, usual)
        odd = {rank for rank in range(world) if rng.random() < 0.5}
        way = {"timeout": 20} if rng.randrange(2) and backend.rank in odd else {}
        mine = other if backend.rank in odd else usual
        if not odd or len(odd) == world or what_counts(usual) == what_counts(other):
            make_call(mine, backend, **way)
            continue
        start = time.monotonic()
        with pytest.raises(CollectiveMismatch) as caught:
            make_call(mine, backend, **way)
        assert time.monotonic() - start < 5
        assert caught.value.sequence == turn + 1
        assert caught.value.this_rank == backend.rank
        found.append((turn, type(caught.value).__name__, str(caught.value)))
    assert ferrodist.allreduce(1, backend) == world
    return found


@pytest.mark.parametrize("world", [2, 3, 5])
def test_every_difference_is_caught_by_every_rank_with_one_text_and_the_group_goes_on(
    start_job, world
):
    with start_job(
        world, lambda backend, pipe: differences(backend, seed=world, number=400)
    ) as job:
        results = job.results()
    assert len(results[0]) > 100
    assert all(found == results[0] for found in results)
    assert {name for _, name, _ in results[0]} == {"CollectiveMismatch", "SizeMismatch"}


def test_a_difference_is_told_within_a_second_of_the_last_call(start_job):
    """Rank 2 comes last, when the others have long been asleep."""

    def body(backend, pipe):
        if backend.rank == 2:
            pipe.recv()
        start = time.monotonic()
        with pytest.raises(SizeMismatch):
            ferrodist.allreduce(np.ones(3 + (backend.rank == 2)), backend)
        return start, time.monotonic()

    with start_job(3, body) as job:
        for rank in job.others(2):
            rank.await_sleep()
        job[2].tell()
        results = job.results()
    assert max(end for _, end in results) - results[2][0] < 1


@pytest.mark.parametrize("is_async", [False, True])
def test_two_groups_used_in_different_orders_do_not_mix(start_job, is_async):
    """Ranks 0 and 3 use rows before columns, 1 and 2 the other way round."""

    def body(backend, pipe):
        rank, sums = backend.rank, {"rows": [], "columns": []}
        groups = {
            "rows": backend.split([0, 1] if rank < 2 else [2, 3]),
            "columns": backend.split([rank % 2, rank % 2 + 2]),
        }
        for number in range(50):
            names = ["rows", "columns"]
            x = np.full(5000 if number % 2 else 5, rank + 10 * number)
            if is_async:
                names = names if rank in (0, 3) else names[::-1]
            works = [(name, ferrodist.allreduce(x, groups[name], async_op=True)) for name in names]
            if not is_async:  # the next one waits its turn, in each group on its own
                works += [(name, None) for name in names]
            for name, work in works:
                total = ferrodist.allreduce(x, groups[name]) if work is None else work.wait(20)
                sums[name].append(int(total[-1]) == int(total[0]) and int(total[0]))
        return sums

    with start_job(4, body) as job:
        results = job.results()
    for rank, sums in enumerate(results):
        row, column = ([0, 1] if rank < 2 else [2, 3]), [rank % 2, rank % 2 + 2]
        for name, members in (("rows", row), ("columns", column)):
            times = 1 if is_async else 2
            expected = [sum(members) + 20 * number for number in range(50) for _ in range(times)]
            assert sums[name] == expected


def test_a_difference_in_one_group_leaves_another_alone(start_job):
    def body(backend, pipe):
        pair = backend.split([0, 1]) if backend.rank < 2 else None
        if pair is not None:
            with pytest.raises(SizeMismatch, match=r"in the group of world ranks \[0, 1\]"):
                ferrodist.allreduce(np.ones(3 + pair.rank), pair)
        total = ferrodist.allreduce(backend.rank, backend)
        return total, None if pair is None else ferrodist.allreduce(1, pair)

    with start_job(3, body) as job:
        assert job.results() == [(3, 2), (3, 2), (3, None)]


def on_threads(number: int, work: Any) -> list[Any]:
    """Run ``work(i)`` on threads; return their results."""
    results: list[Any] = [None] * number

    def run(i: int) -> None:
        results[i] = work(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("count", [3, 20_000])
def test_eight_threads_on_one_group_get_right_results(start_job, count):
    """Equal calls of several threads are matched by number, whoever makes them."""

    def body(backend, pipe):
        def work(thread):
            right = 0
            for number in range(40):
                x = np.full(count, backend.rank + 1)
                options = {"timeout": 20} if (thread + number) % 3 == 0 else {}
                if (thread + number) % 5 == 0:
                    total = ferrodist.allreduce(x, backend, async_op=True).wait(20)
                else:
                    total = ferrodist.allreduce(x, backend, **options)
                right += bool((total == 6).all())
            return right

        return on_threads(8, work), backend.statistics().collectives

    with start_job(3, body) as job:
        assert job.results() == [([40] * 8, 320)] * 3


def test_threads_without_an_agreed_order_end_in_a_mismatch_not_in_wrong_data(start_job):
    def body(backend, pipe):
        def work(thread):
            found = set()
            for _ in range(40):
                try:
                    if thread == 0:
                        found.add(int(ferrodist.allreduce(np.array([backend.rank]), backend)[0]))
                    else:
                        found.add(float(ferrodist.allreduce(np.ones(2), backend, "max")[0]))
                except CollectiveMismatch:
                    found.add("mismatch")
            return found

        return on_threads(2, work)

    with start_job(2, body) as job:
        for sums, largest in job.results():
            assert sums <= {1, "mismatch"}
            assert largest <= {1.0, "mismatch"}


def test_messages_and_collectives_of_several_threads_do_not_hold_each_other_up(start_job):
    """A receive waits until the collectives of another thread are done: they need no turn of it."""

    def body(backend, pipe):
        peer = 1 - backend.rank

        def work(thread):
            if thread == 0:
                return int(ferrodist.recv(np.zeros(1, int), peer, backend)[0])
            totals = [ferrodist.allreduce(1, backend) for _ in range(200)]
            ferrodist.send(np.array([sum(totals)]), peer, backend)
            return sum(totals)

        return on_threads(2, work)

    with start_job(2, body) as job:
        assert job.results() == [[400, 400]] * 2


def test_several_jobs_at_once_do_not_meet(start_job):
    def body(backend, pipe):
        return [ferrodist.allreduce(int(backend.rank + 1), backend) for _ in range(200)]

    worlds = [2, 3, 1, 2, 3, 4]
    jobs = []
    try:
        jobs = [start_job(world, body) for world in worlds]
        for world, job in zip(worlds, jobs, strict=True):
            assert job.results() == [[world * (world + 1) // 2] * 200] * world
    finally:
        for job in jobs:
            job.close()
