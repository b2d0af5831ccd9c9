"""Hybrid groups: differences inside hosts and between them, splits, messages, training."""

from __future__ import annotations

import functools
import random
import threading
import time
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import CollectiveMismatch, SizeMismatch
from test_differences import differences

pytestmark = pytest.mark.timeout(90)

TWO_AND_TWO, TWO_AND_ONE = "0011", "001"


def assert_in_step(backend: Any) -> None:
    assert ferrodist.allreduce(backend.rank, backend) == sum(range(backend.world_size))


# -- differences -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [TWO_AND_TWO, TWO_AND_ONE, "01120"])
def test_every_difference_is_caught_by_every_rank_with_one_text_and_the_group_goes_on(
    start_hybrid_job, hosts
):
    def body(backend, pipe):
        return differences(backend, seed=len(hosts), number=250)

    with start_hybrid_job(hosts, body) as job:
        results = job.results()
    assert len(results[0]) > 80
    assert all(found == results[0] for found in results)
    assert {name for _, name, _ in results[0]} == {"CollectiveMismatch", "SizeMismatch"}


@pytest.mark.parametrize("odd", [0, 1, 2, 3])
def test_a_difference_is_told_within_a_second_of_the_last_call(start_hybrid_job, odd):
    """The odd one comes last, when the others have long been asleep."""

    def body(backend, pipe):
        if backend.rank == odd:
            pipe.recv()
        start = time.monotonic()
        with pytest.raises(SizeMismatch):
            ferrodist.allreduce(np.ones(3 + (backend.rank == odd)), backend)
        end = time.monotonic()
        assert_in_step(backend)
        return start, end

    with start_hybrid_job(TWO_AND_TWO, body) as job:
        for rank in job.others(odd):
            rank.await_sleep()
        job[odd].tell()
        results = job.results()
    assert max(end for _, end in results) - results[odd][0] < 1


def test_hosts_that_differ_as_wholes_are_told(start_hybrid_job):
    """Inside each host all is well; only the node leaders can find it."""

    def body(backend, pipe):
        is_first = backend.rank < 2
        calls = [
            lambda: ferrodist.allreduce(np.ones(3 if is_first else 4), backend),
            lambda: ferrodist.allreduce(np.ones(300_000 if is_first else 300_002), backend),
            lambda: ferrodist.allreduce(np.ones(3 if is_first else 300_000), backend),
            lambda: ferrodist.broadcast(np.ones(3), backend, 0 if is_first else 3),
            lambda: ferrodist.barrier(backend) if is_first else ferrodist.allreduce(1, backend),
            lambda: (ferrodist.reduce if is_first else ferrodist.gather)(np.ones(3), backend),
            lambda: ferrodist.allreduce(1, backend, algorithm="star" if is_first else None),
        ]
        texts = []
        for call in calls * 3:
            with pytest.raises(CollectiveMismatch) as caught:
                call()
            texts.append(str(caught.value))
            assert_in_step(backend)
        return texts

    with start_hybrid_job(TWO_AND_TWO, body) as job:
        results = job.results()
    assert all(texts == results[0] for texts in results)


def test_ranks_may_leave_right_after_a_difference(start_hybrid_job):
    """Two hundred times: the rank that learns first what all have called leaves at once."""

    def body(backend, pipe):
        for number in range(200):
            with backend.split([0, 1, 2, 3]) as group:
                with pytest.raises(SizeMismatch):
                    ferrodist.allreduce(np.ones(3 + (group.rank == number % 4)), group)

    with start_hybrid_job(TWO_AND_TWO, body) as job:
        job.results()


# -- mismatches that fingerprints do not show ------------------------------------------------------


def wrong_out(backend: Any, is_odd: bool, rows: int) -> Any:
    out = np.zeros(1 if is_odd else rows * backend.world_size)
    return ferrodist.all_gather_uneven(np.zeros(rows), backend, out=out)


def wrong_counts(backend: Any, is_odd: bool, rows: int) -> Any:
    world = backend.world_size
    expected = [rows + is_odd] * world
    sent = np.zeros(rows * world)
    return ferrodist.all_to_all_uneven(sent, [rows] * world, backend, recv_counts=expected)


def wrong_out_size(backend: Any, is_odd: bool, rows: int) -> Any:
    world = backend.world_size
    out = np.zeros((rows + is_odd) * world)
    return ferrodist.all_to_all_uneven(np.zeros(rows * world), [rows] * world, backend, out=out)


def wrong_part(backend: Any, is_odd: bool, rows: int, dtype: str = "float64") -> Any:
    """Scatter from rank 0, which cannot be wrong."""
    if backend.rank == 0:
        return ferrodist.scatter(np.zeros(rows * backend.world_size), backend)
    part = np.zeros(rows + (is_odd and dtype == "float64"), dtype if is_odd else "float64")
    return ferrodist.scatter(part, backend)


def wrong_dtype(backend: Any, is_odd: bool, rows: int) -> Any:
    return wrong_part(backend, is_odd, rows, "float32")


def wrong_object(backend: Any, is_odd: bool, rows: int) -> Any:
    """Whether objects may be pickled is part of the fingerprint."""
    return ferrodist.all_gather_object([0] * rows, backend, pickle=is_odd)


MISMATCHES = [wrong_out, wrong_counts, wrong_out_size, wrong_part, wrong_dtype, wrong_object]


def mismatched_calls(backend: Any, seed: int, number: int) -> list[str]:
    """Make calls in which some ranks have a mismatch, or none; return the texts of all errors."""
    rng, texts, world = random.Random(seed), [], backend.world_size
    for _ in range(number):
        call, rows = rng.choice(MISMATCHES), rng.choice([1, 3, 20_000])
        odd = {rank for rank in range(1, world) if rng.random() < 0.4}
        attempt = functools.partial(call, backend, backend.rank in odd, rows)
        if not odd:
            attempt()
            continue
        with pytest.raises(CollectiveMismatch) as caught:
            attempt()
        texts.append(str(caught.value))
    assert_in_step(backend)
    return texts


@pytest.mark.parametrize("hosts", [TWO_AND_TWO, TWO_AND_ONE, "0101", "01120"])
def test_every_mismatch_reaches_every_rank_with_one_text_and_the_group_goes_on(
    start_hybrid_job, hosts
):
    def body(backend, pipe):
        return mismatched_calls(backend, seed=len(hosts), number=80)

    with start_hybrid_job(hosts, body) as job:
        results = job.results()
    assert len(results[0]) > 50
    assert all(texts == results[0] for texts in results)


# -- splits ----------------------------------------------------------------------------------------

MEMBERS = {
    "one host": [0, 1],
    "the other host": [3, 2],
    "one of each": [2, 0],
    "all but one": [3, 0, 1],
    "another order": [3, 1, 0, 2],
    "one rank": [1],
}


@pytest.mark.parametrize("name", MEMBERS)
def test_groups_split_off_have_ranks_hosts_and_data_of_their_own(start_hybrid_job, name):
    members = MEMBERS[name]

    def body(backend, pipe):
        found = None
        if backend.rank in members:
            with backend.split(members) as group:
                x = np.full(200_000, backend.rank + 1)
                found = (
                    group.rank,
                    group.local_world_size,
                    set(ferrodist.allreduce(x, group).tolist()),
                    ferrodist.all_gather(np.array([backend.rank]), group).tolist(),
                    ferrodist.broadcast(backend.rank, group, group.world_size - 1),
                    ferrodist.all_gather_object(backend.rank, group),
                )
                shared = group.empty(3, "int64")
                shared[:] = group.rank
                assert ferrodist.allreduce(shared, group, "max")[0] == group.world_size - 1
        assert_in_step(backend)
        return found

    with start_hybrid_job(TWO_AND_TWO, body) as job:
        results = job.results()
    for rank, found in enumerate(results):
        if rank not in members:
            assert found is None
            continue
        local = sum(member // 2 == rank // 2 for member in members)
        total = {sum(members) + len(members)}
        expected = (members.index(rank), local, total, members, members[-1], members)
        assert found == expected


@pytest.mark.parametrize("count", [5, 100_000])
def test_groups_used_in_different_orders_do_not_mix(start_hybrid_job, count):
    """Rows are hosts, columns go across; half of the ranks start the one first, half the other."""

    def body(backend, pipe):
        rank, right = backend.rank, 0
        row = [rank // 2 * 2, rank // 2 * 2 + 1]
        column = [rank % 2, rank % 2 + 2]
        groups = [(backend.split(row), row), (backend.split(column), column), (backend, range(4))]
        for number in range(30):
            x = np.full(count, rank + 10 * number)
            order = groups if rank in (0, 3) else groups[::-1]
            works = [(ferrodist.allreduce(x, g, async_op=True), ranks) for g, ranks in order]
            for work, ranks in works:
                total = sum(ranks) + 10 * number * len(ranks)
                right += bool((work.wait(20) == total).all())
        return right

    with start_hybrid_job(TWO_AND_TWO, body) as job:
        assert job.results() == [90] * 4


def let_draw_first(first: str, backend: Any) -> None:
    """Let the thread of this name be the first of all to ask for memory that ranks share."""
    usual_complete, usual_split = type(backend)._complete, backend.inside._new_split
    has_drawn = threading.Event()

    def complete(*args):
        assert threading.current_thread().name == first or has_drawn.wait(20)
        return usual_complete(*args)

    def new_split(*args):
        has_drawn.set()
        return usual_split(*args)

    type(backend)._complete, backend.inside._new_split = complete, new_split


def test_groups_made_at_once_by_threads_do_not_mix(start_hybrid_job):
    """Both groups have ranks 0 and 1 of this host, which come to share memory in another order."""

    def body(backend, pipe):
        lists = {"two": [0, 1, 2], "three": [0, 1, 3]}
        groups, first = {}, "three" if backend.rank == 1 else "two"
        if backend.rank < 2:
            let_draw_first(first, backend)

        def make(name):
            groups[name] = backend.split(lists[name])

        threads = [
            threading.Thread(target=make, args=(name,), name=name)
            for name, ranks in lists.items()
            if backend.rank in ranks
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        weights = {"two": 1, "three": 100}
        works = {
            name: ferrodist.allreduce(np.full(3, weights[name]), groups[name], async_op=True)
            for name in sorted(groups)
        }
        return {name: work.wait(20).tolist() for name, work in works.items()}

    with start_hybrid_job("0012", body) as job:
        two, three = {"two": [3, 3, 3]}, {"three": [300, 300, 300]}
        assert job.results() == [two | three, two | three, two, three]


def test_a_difference_in_one_group_leaves_another_alone(start_hybrid_job):
    def body(backend, pipe):
        pair = backend.split([0, 2]) if backend.rank in (0, 2) else None
        if pair is not None:
            with pytest.raises(SizeMismatch, match=r"in the group of world ranks \[0, 2\]"):
                ferrodist.allreduce(np.ones(3 + pair.rank), pair)
        assert_in_step(backend)
        return None if pair is None else ferrodist.allreduce(1, pair)

    with start_hybrid_job(TWO_AND_TWO, body) as job:
        assert job.results() == [2, None, 2, None]


# -- calls in flight, trees, messages --------------------------------------------------------------


def test_trees_and_calls_in_flight(start_hybrid_job):
    def body(backend, pipe):
        rank = backend.rank
        tree = {"a": np.full(3, rank), "b": [np.full(200_000, float(rank)), 2.0], "c": None}
        works = [ferrodist.allreduce(tree, backend, async_op=True) for _ in range(5)]
        ferrodist.barrier(backend)
        found = [work.wait(20) for work in works]
        gathered = ferrodist.all_gather({"x": np.array([rank])}, backend)
        return [(set(t["a"]), set(t["b"][0]), t["b"][1], t["c"]) for t in found], gathered["x"][-1]

    with start_hybrid_job(TWO_AND_TWO, body) as job:
        assert job.results() == [([({6}, {6.0}, 8.0, None)] * 5, 3)] * 4


@pytest.mark.parametrize("count", [3, 100_000])
def test_messages_go_inside_hosts_and_between_them(start_hybrid_job, count):
    def body(backend, pipe):
        rank, world = backend.rank, backend.world_size
        found = []
        for distance in range(1, world):
            to, source = (rank + distance) % world, (rank - distance) % world
            x = np.full(count, 10 * rank + to)
            got = ferrodist.sendrecv(x, to, source, backend, like=x, tag=distance)
            found.append(set(got.tolist()) == {10 * source + rank})
        return found

    with start_hybrid_job(TWO_AND_TWO, body) as job:
        assert job.results() == [[True] * 3] * 4


# -- training --------------------------------------------------------------------------------------


def gradients(backend: Any) -> list[Any]:
    """Go through a small model with this rank's part of the samples, twice; return gradients."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 2))
    x, y = torch.randn(16, 20), torch.randn(16, 2)
    rank, world = (0, 1) if backend is None else (backend.rank, backend.world_size)
    trained = model if backend is None else ferrodist.DDP(model, backend)
    for _ in range(2):
        ((trained(x[rank::world]) - y[rank::world]) ** 2).mean().backward()
    return [parameter.grad.numpy().copy() for parameter in model.parameters()]


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_ddp_has_the_gradients_of_one_process(start_hybrid_job):
    def body(backend, pipe):
        return gradients(backend), gradients(None)

    with start_hybrid_job(TWO_AND_TWO, body) as job:
        results = job.results()
    for found, alone in results:
        for one, wanted, first in zip(found, alone, results[0][0], strict=True):
            np.testing.assert_allclose(one, wanted, rtol=1e-4, atol=1e-6)
            np.testing.assert_array_equal(one, first)
