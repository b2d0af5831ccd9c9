"""Ranks, groups, threads and messages that do different things at once: told, never mixed."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import CollectiveMismatch, CollectiveTimeout, SizeMismatch
from jobs import SMALL_PIECES, error_and_time

pytestmark = pytest.mark.timeout(90)

MEGABYTE = 1 << 20
slow = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]
PYTHON = {"FERRODIST_EXECUTOR": "python", **SMALL_PIECES}

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


# -- differences -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "number", "environment"),
    [
        (2, 400, {}),
        (3, 400, {}),
        (5, 400, {}),
        (3, 150, PYTHON),
        pytest.param(4, 4000, {}, marks=slow),
        pytest.param(3, 4000, SMALL_PIECES, marks=slow),
    ],
)
def test_every_difference_is_caught_by_every_rank_with_one_text_and_the_group_goes_on(
    start, world, number, environment
):
    def body(backend, pipe):
        return differences(backend, seed=world, number=number)

    with start(world, body, **environment) as job:
        results = [rank.hear(250) for rank in job]
    assert all(end.error is None for end in results), [end.trace for end in results if end.error]
    results = [end.result for end in results]
    assert len(results[0]) > number // 4
    assert all(found == results[0] for found in results)
    assert {name for _, name, _ in results[0]} == {"CollectiveMismatch", "SizeMismatch"}


def test_a_difference_is_told_within_a_second_of_the_last_call(start):
    """Rank 2 comes last, when the others have long been asleep."""

    def body(backend, pipe):
        if backend.rank == 2:
            pipe.recv()
        start = time.monotonic()
        with pytest.raises(SizeMismatch):
            ferrodist.allreduce(np.ones(3 + (backend.rank == 2)), backend)
        return start, time.monotonic()

    with start(3, body) as job:
        for rank in job.others(2):
            rank.await_sleep()
        job[2].tell()
        results = job.results()
    assert max(end for _, end in results) - results[2][0] < 1


def test_a_difference_deep_in_a_large_tree_is_named(start):
    def body(backend, pipe):
        tree = [np.zeros(1, np.float32) for _ in range(300)]
        if backend.rank == 1:
            tree[250] = np.zeros(1, np.float64)
        return error_and_time(ferrodist.allreduce, tree, backend)[0]

    with start(2, body) as job:
        for error in job.results():
            assert type(error) is CollectiveMismatch
            assert "[250]" in str(error)


def test_a_part_that_does_not_fit_is_an_error_of_all_and_the_group_goes_on(start):
    def body(backend, pipe):
        x = np.arange(6.0) if backend.rank == 0 else np.zeros(5, np.float32)
        error, _ = error_and_time(ferrodist.scatter, x, backend)
        return type(error), float(ferrodist.allreduce(np.ones(1), backend)[0])

    with start(3, body) as job:
        assert job.results() == [(CollectiveMismatch, 3.0)] * 3


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_pieces_of_a_call_that_failed_are_in_nobody_elses_way(start, odd):
    """Ranks differ in calls of megabytes, of which much has been sent when they find out."""

    def body(backend, pipe):
        for number in range(6):
            x = np.full(500_000 + (backend.rank == odd), float(number))
            with pytest.raises(SizeMismatch):
                ferrodist.allreduce(x, backend, algorithm=["ring", "star"][number % 2])
            total = ferrodist.allreduce(np.full(300_000, number), backend)
            assert (total == 3 * number).all()
        return backend.rank

    with start(3, body) as job:
        assert job.results() == [0, 1, 2]


def test_rooted_calls_whose_root_differs_are_told_though_nobody_waits_for_somebody_else(
    start,
):
    """Each rank is its own root: all send, or all wait, and no piece shows the difference."""

    def body(backend, pipe):
        texts = []
        for name in ("broadcast", "reduce", "gather"):
            call = getattr(ferrodist, name)
            with pytest.raises(CollectiveMismatch) as caught:
                call(np.ones(3), backend, backend.rank)
            texts.append(str(caught.value))
        assert ferrodist.allreduce(1, backend) == 3
        return texts

    with start(3, body) as job:
        first, *others = job.results()
    assert others == [first, first]


# -- groups ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_two_groups_used_in_different_orders_do_not_mix(start, is_async):
    """Ranks 0 and 3 use rows before columns, 1 and 2 the other way round."""

    def body(backend, pipe):
        rank, sums = backend.rank, {"rows": [], "columns": []}
        groups = {
            "rows": backend.split([0, 1] if rank < 2 else [2, 3]),
            "columns": backend.split([rank % 2, rank % 2 + 2]),
        }
        for number in range(50):
            names = ["rows", "columns"] if rank in (0, 3) or not is_async else ["columns", "rows"]
            x = np.full(5000 if number % 2 else 5, rank + 10 * number)
            works = [(name, ferrodist.allreduce(x, groups[name], async_op=True)) for name in names]
            for name, work in works:
                total = work.wait(20) if is_async else ferrodist.allreduce(x, groups[name])
                sums[name].append(int(total[-1]) == int(total[0]) and int(total[0]))
            assert all(work.wait(20)[0] == sums[name][-1] for name, work in works)
        return sums

    with start(4, body) as job:
        results = job.results()
    for rank, sums in enumerate(results):
        row, column = ([0, 1] if rank < 2 else [2, 3]), [rank % 2, rank % 2 + 2]
        for name, members in (("rows", row), ("columns", column)):
            assert sums[name] == [sum(members) + 20 * number for number in range(50)]


def test_a_difference_in_one_group_leaves_another_alone(start):
    def body(backend, pipe):
        pair = backend.split([0, 1]) if backend.rank < 2 else None
        if pair is not None:
            with pytest.raises(SizeMismatch, match=r"in the group of world ranks \[0, 1\]"):
                ferrodist.allreduce(np.ones(3 + pair.rank), pair)
        total = ferrodist.allreduce(backend.rank, backend)
        return total, None if pair is None else ferrodist.allreduce(1, pair)

    with start(3, body) as job:
        assert job.results() == [(3, 2), (3, 2), (3, None)]


@pytest.mark.slow
def test_several_jobs_at_once_do_not_meet(start):
    def body(backend, pipe):
        return [ferrodist.allreduce(int(backend.rank + 1), backend) for _ in range(200)]

    worlds = [2, 3, 1, 2, 3, 4]
    jobs = []
    try:
        jobs = [start(world, body) for world in worlds]
        for world, job in zip(worlds, jobs, strict=True):
            assert job.results() == [[world * (world + 1) // 2] * 200] * world
    finally:
        for job in jobs:
            job.close()


# -- threads ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 20_000])
def test_eight_threads_on_one_group_get_right_results(start, count):
    """Equal calls of several threads match by sequence number, whatever thread makes them."""

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

    with start(3, body) as job:
        assert job.results() == [([40] * 8, 320)] * 3


def test_threads_without_an_agreed_order_end_in_a_mismatch_not_in_wrong_data(start):
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

    with start(2, body) as job:
        for sums, largest in job.results():
            assert sums <= {1, "mismatch"}
            assert largest <= {1.0, "mismatch"}


def test_messages_and_collectives_of_several_threads_do_not_hold_each_other_up(start):
    """A receive waits until the collectives of another thread are done: they need no turn of it."""

    def body(backend, pipe):
        peer = 1 - backend.rank

        def work(thread):
            if thread == 0:
                return int(ferrodist.recv(peer, backend, like=np.zeros(1, int))[0])
            totals = [ferrodist.allreduce(1, backend) for _ in range(200)]
            ferrodist.send(np.array([sum(totals)]), peer, backend)
            return sum(totals)

        return on_threads(2, work)

    with start(2, body) as job:
        assert job.results() == [[400, 400]] * 2


def test_groups_of_several_threads_work_at_once(start):
    """Each thread has a group of its own, and messages in it, over one and the same links."""

    def body(backend, pipe):
        groups = [backend.split([0, 1]) for _ in range(4)]

        def work(thread):
            group, peer = groups[thread], 1 - backend.rank
            for number in range(15):
                x = np.full(40_000 * (1 + thread), 10 * thread + number)
                if (ferrodist.allreduce(x, group) != 2 * x).any():
                    return "wrong sum"
                if (ferrodist.sendrecv(x, peer, peer, group, like=x) != x).any():
                    return "wrong message"
            return "right"

        return on_threads(4, work)

    with start(2, body) as job:
        assert job.results() == [["right"] * 4] * 2


# -- messages --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "nbytes"),
    [
        ("send first", 1000),
        ("send first", 3 * MEGABYTE),
        ("receive first", 3 * MEGABYTE),
        ("exchange", 3 * MEGABYTE),
    ],
)
def test_messages_go_to_and_fro_while_a_large_collective_is_in_flight(start, order, nbytes):
    """Rank 2 joins in only when the messages have arrived, so they cannot have waited for it."""

    def body(backend, pipe):
        x = np.full(64 * MEGABYTE // 8, float(backend.rank))
        if backend.rank == 2:
            pipe.recv()
        work = ferrodist.allreduce(x, backend, async_op=True)
        peer = 1 - backend.rank
        if backend.rank < 2:
            message = np.full(nbytes // 8, 7.0 + backend.rank)
            is_first = (order == "send first") == (backend.rank == 0)
            if order == "exchange":
                came = ferrodist.sendrecv(message, peer, peer, backend, like=message)
            elif is_first:
                ferrodist.send(message, peer, backend)
                came = ferrodist.recv(peer, backend, like=message)
            else:
                came = ferrodist.recv(peer, backend, like=message)
                ferrodist.send(message, peer, backend)
            assert (came == 7 + peer).all()
            pipe.send("came")
        total = work.wait(60)
        return float(total[0]), bool((total == total[0]).all())

    with start(3, body) as job:
        for rank in job.others(2):
            assert rank.hear() == "came"
        job[2].tell()
        assert job.results() == [(3.0, True)] * 3


def test_a_ring_of_large_exchanges_never_deadlocks(start):
    def body(backend, pipe):
        right, left = (backend.rank + 1) % 4, (backend.rank - 1) % 4
        x = np.full(MEGABYTE, float(backend.rank))
        for _ in range(5):
            x = ferrodist.sendrecv(x, right, left, backend, like=x)
        return float(x[0]), bool((x == x[0]).all())

    with start(4, body) as job:
        assert job.results() == [(float((rank - 5) % 4), True) for rank in range(4)]


@pytest.mark.slow
def test_a_ring_of_large_sends_is_named_by_all_though_they_give_up_at_once(start):
    limit = 0.1

    def body(backend, pipe):
        x, rounds = np.ones(MEGABYTE), []
        for _ in range(8):
            ferrodist.barrier(backend)
            began = time.monotonic()
            with pytest.raises(CollectiveTimeout) as found:
                ferrodist.send(x, (backend.rank + 1) % 3, backend, timeout=limit)
            rounds.append((began, str(found.value)))
        return rounds, ferrodist.allreduce(1, backend)

    with start(3, body) as job:
        results = job.results()
        assert [total for _, total in results] == [3, 3, 3]
        num_together = 0
        for turn in zip(*(rounds for rounds, _ in results), strict=True):
            begins = [began for began, _ in turn]
            if max(begins) - min(begins) < limit / 2:  # else some had no core, and sent too late
                num_together += 1
                for _, text in turn:
                    assert "ranks 0 -> 1 -> 2 -> 0 all send and none receives" in text
        assert num_together > 0


def test_ten_thousand_messages_nobody_has_asked_for_yet_wait_and_keep_their_order(start):
    def body(backend, pipe):
        if backend.rank == 0:
            for number in range(10_000):
                ferrodist.send(number, 1, backend, tag=number % 3)
            return ferrodist.allreduce(1, backend)
        total = ferrodist.allreduce(1, backend)
        tags = random.Random(0).sample([0, 1, 2], 3)
        found = {tag: [ferrodist.recv(0, backend, tag=tag) for _ in range(3333)] for tag in tags}
        assert found == {tag: list(range(tag, 9999, 3)) for tag in range(3)}
        assert ferrodist.recv(0, backend) == 9999
        return total

    with start(2, body) as job:
        assert job.results() == [2, 2]


@pytest.mark.parametrize("count", [3, 200_000])
def test_a_message_of_another_shape_is_the_receivers_own_error(start, count):
    def body(backend, pipe):
        x = np.ones(count)
        if backend.rank == 0:
            ferrodist.send(x, 1, backend)
            ferrodist.send(x, 1, backend)
            return ferrodist.allreduce(1, backend)
        with pytest.raises(SizeMismatch, match=rf"float64\[{count}\]"):
            ferrodist.recv(0, backend, like=np.ones(count + 1))
        assert ferrodist.recv(0, backend, like=x).sum() == count
        return ferrodist.allreduce(1, backend)

    with start(2, body) as job:
        assert job.results() == [2, 2]


@pytest.mark.slow
def test_a_large_message_that_is_given_up_in_the_middle_leaves_the_next_ones_whole(start):
    """Either side may run out of time at any moment of a transfer; what comes later is right."""

    def body(backend, pipe):
        x, outcomes = np.arange(4 * MEGABYTE), []
        for number in range(12):
            is_hasty = number % 2 == backend.rank  # the other one gives up later
            limit = 0.0005 * (1 + number % 6) if is_hasty else 0.2
            try:
                if backend.rank == 0:
                    ferrodist.send(x, 1, backend, tag=number, timeout=limit)
                else:
                    came = ferrodist.recv(0, backend, like=x, tag=number, timeout=limit)
                    assert np.array_equal(came, x)
                outcomes.append("done")
            except CollectiveTimeout:
                outcomes.append("late")
            except ferrodist.DistributedError as error:
                outcomes.append(repr(error))
            ferrodist.barrier(backend)
        if backend.rank == 0:
            ferrodist.send(x + 1, 1, backend, tag=99)
            return outcomes, True
        return outcomes, np.array_equal(ferrodist.recv(0, backend, like=x, tag=99), x + 1)

    with start(2, body, FERRODIST_TIMEOUT="10") as job:
        for outcomes, is_right in job.results():
            assert set(outcomes) <= {"done", "late"}, outcomes
            assert is_right


def large_call_in_flight(backend: Any) -> Any:
    return ferrodist.allreduce(np.ones(MEGABYTE), backend, async_op=True)


def test_closing_waits_for_what_is_in_flight(start):
    def body(backend, pipe):
        works = [large_call_in_flight(backend) for _ in range(3)]
        backend.close()
        return [float(work.result()[-1]) for work in works]

    with start(3, body) as job:
        assert job.results() == [[3.0] * 3] * 3
