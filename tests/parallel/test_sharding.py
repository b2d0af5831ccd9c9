"""Samples are dealt to ranks: none is lost, none comes twice, whatever the worlds in between."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ferrodist
from ferrodist import InvalidArgument, InvalidRank
from ferrodist.parallel.sharding import (
    IndexShards,
    ShardedSampler,
    order_of,
    shard_indices,
    share_of,
)
from ferrodist.testing import run_ranks

ORDER = [6, 3, 8, 1, 4, 5, 9, 2, 7, 0]
OTHER_ORDER = [0, 5, 2, 8, 1, 7, 6, 3, 9, 4]


def world_of(world: int, num_samples: int, **options: Any) -> list[IndexShards]:
    return [IndexShards(num_samples, rank, world, **options) for rank in range(world)]


def drawn(shards: IndexShards, num_batches: int | None = None) -> list[list[int]]:
    return [batch.tolist() for batch in itertools.islice(shards, num_batches)]


segments = st.lists(
    st.tuples(st.integers(1, 7), st.integers(0, 6), st.integers(1, 9), st.booleans()), max_size=6
)


# -- none is lost, none comes twice ----------------------------------------------------------------


@given(
    num_samples=st.integers(0, 120),
    segments=segments,
    seed=st.integers(0, 2**64),
    shuffle=st.booleans(),
)
def test_every_sample_comes_once_whatever_the_worlds_in_between(
    num_samples, segments, seed, shuffle
):
    """Each segment is a job of some world that makes some steps and stops; the last one ends."""
    found: list[int] = []
    state: Any = None
    for world, num_steps, size, is_by_rank in [*segments, (3, None, 4, False)]:
        batch = {"rank_batch_size": size} if is_by_rank else {"global_batch_size": size + world}
        ranks = world_of(world, num_samples, seed=seed, shuffle=shuffle, **batch)
        for shards in ranks:
            if state is not None:
                shards.load_state_dict(state)
        if ranks[0].epoch > 0:  # the epoch ended with the last segment
            break
        lots = [drawn(shards, num_steps) for shards in ranks]
        assert len({len(lot) for lot in lots}) == 1  # all ranks make the same steps
        found += [index for lot in lots for share in lot for index in share]
        states = [shards.state_dict() for shards in ranks]
        assert states == states[:1] * world
        state = states[0]
    assert sorted(found) == list(range(num_samples))


@given(
    num_samples=st.integers(0, 80),
    first=st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(1, 6)),
    second=st.tuples(st.integers(1, 5), st.integers(1, 6)),
)
def test_dropping_the_last_batch_drops_less_than_one_and_repeats_nothing(
    num_samples, first, second
):
    world, num_steps, size = first
    ranks = world_of(world, num_samples, rank_batch_size=size, drop_last=True)
    found = [i for shards in ranks for share in drawn(shards, num_steps) for i in share]
    state = ranks[0].state_dict()
    if state["epoch"] == 0:
        world, size = second
    for shards in world_of(world, num_samples, rank_batch_size=size, drop_last=True):
        shards.load_state_dict(state)
        if shards.epoch == 0:
            shares = drawn(shards)
            assert all(len(share) == size for share in shares)
            found += [i for share in shares for i in share]
    assert len(set(found)) == len(found)
    assert num_samples - len(found) < size * world


@given(world=st.integers(1, 9), length=st.integers(0, 40), first=st.integers(0, 20))
def test_shares_joined_in_rank_order_are_the_batch(world, length, first):
    batch = np.arange(length) * 3
    shares = [share_of(batch, rank, world, first) for rank in range(world)]
    assert np.concatenate(shares).tolist() == batch.tolist()
    lengths = [len(shares[(first + n) % world]) for n in range(world)]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)  # the longer ones begin with rank ``first``


@given(
    world=st.integers(1, 7),
    num_samples=st.integers(1, 90),
    size=st.integers(0, 6),
    epoch=st.integers(0, 9),
)
def test_no_share_is_empty_unless_there_are_fewer_samples_than_ranks(
    world, num_samples, size, epoch
):
    ranks = world_of(world, num_samples, global_batch_size=world + size)
    for shards in ranks:
        shards.set_epoch(epoch)
    lengths = [len(share) for shards in ranks for share in drawn(shards)]
    assert min(lengths) >= (num_samples >= world)
    assert max(lengths) <= -(-(2 * world + size - 1) // world)


def test_the_extra_sample_is_of_another_rank_every_time():
    ranks = world_of(3, 10, rank_batch_size=2)  # a batch of six and one of four
    num_epochs = 3
    totals = [sum(len(share) for _ in range(num_epochs) for share in drawn(one)) for one in ranks]
    assert totals == [num_epochs * 10 // 3] * 3
    ranks = world_of(3, 12, global_batch_size=4)  # every batch has one too much
    assert [[len(share) for share in drawn(one)] for one in ranks] == [
        [2, 1, 1],
        [1, 2, 1],
        [1, 1, 2],
    ]


@given(
    num_samples=st.integers(1, 60),
    world=st.integers(1, 5),
    size=st.integers(1, 5),
    remainder=st.sampled_from(["pad", "drop"]),
)
def test_shares_are_equal_if_the_remainder_is_padded_or_dropped(
    num_samples, world, size, remainder
):
    """So that the mean of the ranks' means, which plain DDP makes, is that of the batch."""
    ranks = world_of(world, num_samples, rank_batch_size=size, remainder=remainder)
    assert len(ranks[0]) == len(drawn(ranks[0]))
    ranks[0].set_epoch(0)
    lots = [drawn(shards) for shards in ranks]
    for shares in zip(*lots, strict=True):
        assert len({len(share) for share in shares}) == 1
        assert shares[0]
    found = [i for lot in lots for share in lot for i in share]
    if remainder == "pad":
        assert set(found) == set(range(num_samples))
        assert len(found) - num_samples < world
    else:
        assert len(set(found)) == len(found)
        assert num_samples - len(found) < world


@given(
    num_samples=st.integers(0, 60),
    world=st.integers(1, 4),
    size=st.integers(1, 5),
    num_steps=st.integers(0, 20),
    drop_last=st.booleans(),
)
def test_length_is_the_number_of_batches(num_samples, world, size, num_steps, drop_last):
    shards = IndexShards(num_samples, 0, world, rank_batch_size=size, drop_last=drop_last)
    assert len(shards) == len(drawn(shards))
    assert len(shards) == len(drawn(shards, num_steps)) or num_steps < len(shards)
    other = IndexShards(num_samples, 0, world, rank_batch_size=size, drop_last=drop_last)
    other.load_state_dict(shards.state_dict())
    assert len(other) == len(drawn(other))


def test_length_stays_that_of_the_pass_while_it_lasts():
    shards = IndexShards(10, 0, 1, global_batch_size=3)
    drawn(shards, 2)
    assert [len(shards) for _ in shards] == [2, 2]
    assert len(shards) == 4


# -- order -----------------------------------------------------------------------------------------


def test_order_is_the_same_for_ever():
    """These numbers must never change: jobs that were stopped go on by them."""
    assert order_of(10, 0, 0).tolist() == ORDER
    assert order_of(10, 2**70, 12345).tolist() == OTHER_ORDER
    assert order_of(10, 0, 0).dtype == np.int64


def test_order_depends_on_seed_and_epoch():
    orders = {tuple(order_of(50, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    # No mixing up of one with the other: 2**32 is written as the words 0 and 1.
    assert order_of(50, 2**32, 0).tolist() != order_of(50, 0, 1).tolist()


def test_every_place_is_as_likely_for_every_sample():
    num_epochs, size = 4000, 6
    counts = np.zeros((size, size))
    for epoch in range(num_epochs):
        counts[np.arange(size), order_of(size, 1, epoch)] += 1
    expected = num_epochs / size
    assert ((counts - expected) ** 2 / expected).sum() < 60  # chi-square, 25 degrees: p < 1e-4


def test_every_pass_is_of_a_new_epoch():
    shards = IndexShards(20, 0, 1, global_batch_size=20)
    (first,), (second,) = drawn(shards), drawn(shards)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(20))
    assert shards.epoch == 2
    shards.set_epoch(0)
    assert drawn(shards) == [first]


@pytest.mark.parametrize("num_samples", [0, 3])
def test_epoch_without_a_batch_is_an_epoch_all_the_same(num_samples):
    shards = IndexShards(num_samples, 0, 1, global_batch_size=4, drop_last=True)
    assert (drawn(shards), shards.epoch) == ([], 1)
    assert (drawn(shards), shards.epoch) == ([], 2)


def test_without_shuffling_the_order_is_that_of_the_samples():
    ranks = world_of(3, 8, global_batch_size=4, shuffle=False)
    assert [drawn(one) for one in ranks] == [[[0, 1], [4]], [[2], [5, 6]], [[3], [7]]]


def test_end_of_fewer_samples_than_ranks_is_part_of_the_batch_before():
    ranks = world_of(3, 4, rank_batch_size=1, shuffle=False)
    assert [drawn(one) for one in ranks] == [[[0, 1]], [[2]], [[3]]]
    assert [len(one) for one in ranks] == [1, 1, 1]
    assert [one.state_dict(1)["consumed"] for one in ranks] == [4, 4, 4]


# -- stop and resume -------------------------------------------------------------------------------


def test_state_in_the_loop_counts_the_batch_at_hand():
    shards = IndexShards(10, 0, 2, global_batch_size=4)
    consumed = [(shards.state_dict()["epoch"], shards.state_dict()["consumed"]) for _ in shards]
    assert consumed == [(0, 4), (0, 8), (0, 10)]
    assert (shards.epoch, shards.consumed) == (1, 0)


def test_state_of_the_last_batch_resumes_in_the_next_epoch():
    shards = IndexShards(10, 0, 1, global_batch_size=5)
    states = [shards.state_dict() for _ in shards]
    other = IndexShards(10, 0, 1, global_batch_size=5)
    other.load_state_dict(states[-1])
    assert (other.epoch, other.consumed) == (1, 0)
    assert drawn(other) == drawn(shards)


def test_loop_over_epochs_with_set_epoch_resumes_in_the_middle():
    def all_from(shards: IndexShards) -> list[list[int]]:
        found = []
        for epoch in range(shards.epoch, 3):
            shards.set_epoch(epoch)
            found += drawn(shards)
        return found

    whole = all_from(IndexShards(10, 0, 1, global_batch_size=4))
    for num_batches in range(7):
        shards = IndexShards(10, 0, 1, global_batch_size=4)
        before = [batch for _ in range(3) for batch in drawn(shards)][:num_batches]
        again = IndexShards(10, 0, 1, global_batch_size=4)
        for _ in range(num_batches // 3):
            drawn(again)
        drawn(again, num_batches % 3)
        other = IndexShards(10, 0, 1, global_batch_size=4, seed=9)  # the state has the seed
        other.load_state_dict(again.state_dict())
        assert before + all_from(other) == whole


def test_batches_fetched_but_not_used_are_not_lost():
    shards = IndexShards(10, 0, 1, global_batch_size=3)
    used = drawn(shards)[:2]  # all four were fetched, as a loader with workers does
    other = IndexShards(10, 0, 1, global_batch_size=3)
    other.load_state_dict(shards.state_dict(num_batches=2))
    assert sorted(i for batch in used + drawn(other) for i in batch) == list(range(10))
    assert shards.state_dict(num_batches=4)["consumed"] == 10
    with pytest.raises(InvalidArgument, match="num_batches must be an integer from 0 to 4, got 5"):
        shards.state_dict(num_batches=5)


def test_loop_that_was_left_goes_on_where_it_was():
    shards = IndexShards(10, 0, 1, global_batch_size=3)
    found = [drawn(shards, 1), drawn(shards, 2), drawn(shards)]
    assert sorted(i for lot in found for batch in lot for i in batch) == list(range(10))


def test_state_is_plain_data():
    shards = IndexShards(np.int64(10), np.int64(0), np.int64(1), rank_batch_size=np.int64(2))
    shards.set_epoch(np.int64(3))
    expected = {"epoch": 3, "consumed": 0, "seed": 0, "shuffle": True, "num_samples": 10}
    assert shards.state_dict() == expected
    assert {type(value) for value in shards.state_dict().values()} == {int, bool}


def test_state_of_other_samples_is_refused():
    state = IndexShards(10, 0, 1, rank_batch_size=2).state_dict()
    with pytest.raises(InvalidArgument, match="of num_samples=10, but here it is 11; it can only"):
        IndexShards(11, 0, 1, rank_batch_size=2).load_state_dict(state)
    with pytest.raises(InvalidArgument, match="of shuffle=True, but here it is False"):
        IndexShards(10, 0, 1, rank_batch_size=2, shuffle=False).load_state_dict(state)


def test_state_that_is_none_is_refused_and_changes_nothing():
    shards = IndexShards(10, 0, 1, rank_batch_size=2, seed=5)
    state = shards.state_dict()
    with pytest.raises(InvalidArgument, match=r"the state has no 'num_samples', only \['step'\]"):
        shards.load_state_dict({"step": 3})
    with pytest.raises(InvalidArgument, match="consumed must be an integer from 0 to 10, got 11"):
        shards.load_state_dict({**state, "consumed": 11})
    with pytest.raises(InvalidArgument, match="seed must be an integer at least 0, got -1"):
        shards.load_state_dict({**state, "seed": -1, "epoch": 7})
    assert shards.state_dict() == state


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "pass either global_batch_size or rank_batch_size, got none of them"),
        ({"global_batch_size": 4, "rank_batch_size": 2}, "got both of them"),
        ({"global_batch_size": 2}, "global_batch_size is 2, which leaves some of the 3 ranks"),
        ({"global_batch_size": 4, "remainder": "pad"}, "which 3 ranks cannot share evenly in any"),
        ({"rank_batch_size": 1, "remainder": "lose"}, "one of 'pad', 'drop', 'uneven', got 'lose'"),
        ({"rank_batch_size": 0}, "rank_batch_size must be an integer at least 1, got 0"),
        ({"rank_batch_size": 1.5}, "rank_batch_size must be an integer at least 1, got 1.5"),
        ({"rank_batch_size": 1, "seed": -1}, "seed must be an integer at least 0, got -1"),
    ],
)
def test_wrong_options_are_refused(options, text):
    with pytest.raises(InvalidArgument) as caught:
        IndexShards(10, 0, 3, **options)
    assert text in str(caught.value)


def test_wrong_places_are_refused():
    with pytest.raises(InvalidRank, match="rank must be an integer from 0 to 2, got 3"):
        IndexShards(10, 3, 3, rank_batch_size=1)
    with pytest.raises(InvalidArgument, match="num_samples must be an integer at least 0, got -1"):
        IndexShards(-1, 0, 3, rank_batch_size=1)
    with pytest.raises(InvalidArgument, match="world_size must be an integer at least 1, got 0"):
        IndexShards(1, 0, 0, rank_batch_size=1)
    shards = IndexShards(1, 0, 1, rank_batch_size=1)
    with pytest.raises(InvalidArgument, match="epoch must be an integer at least 0, got -1"):
        shards.set_epoch(-1)


def test_rank_and_world_are_those_of_the_backend():
    def body(backend):
        shards = shard_indices(7, backend, rank_batch_size=2, seed=4)
        return shards.rank, shards.world_size, drawn(shards)

    found = run_ranks(2, body)
    assert [one[:2] for one in found] == [(0, 2), (1, 2)]
    assert sorted(i for *_, lot in found for share in lot for i in share) == list(range(7))
    with pytest.raises(ferrodist.NotInitialized, match=r"^shard_indices: call ferrodist\.init"):
        shard_indices(7, rank_batch_size=2)


# -- ShardedSampler --------------------------------------------------------------------------------


class Place(NamedTuple):
    """All that a sampler asks a backend for."""

    rank: int
    world_size: int


def samplers(world: int, num_samples: int, **options: Any) -> list[ShardedSampler]:
    return [
        ShardedSampler(range(num_samples), Place(rank, world), **options) for rank in range(world)
    ]


@given(
    num_samples=st.integers(1, 60),
    world=st.integers(1, 5),
    remainder=st.sampled_from(["pad", "drop", "uneven"]),
    epoch=st.integers(0, 7),
)
def test_sampler_gives_every_sample_but_for_the_remainder(num_samples, world, remainder, epoch):
    ranks = samplers(world, num_samples, remainder=remainder)
    for sampler in ranks:
        sampler.set_epoch(epoch)
    lengths = [len(sampler) for sampler in ranks]
    lots = [list(sampler) for sampler in ranks]
    assert [len(lot) for lot in lots] == lengths
    found = [i for lot in lots for i in lot]
    if remainder == "uneven":
        assert sorted(found) == list(range(num_samples))
        assert max(lengths) - min(lengths) <= 1
        return
    assert len(set(lengths)) == 1
    if remainder == "pad":
        assert set(found) == set(range(num_samples))
        assert len(found) - num_samples < world
    else:
        assert len(set(found)) == len(found) == num_samples // world * world


@given(
    num_samples=st.integers(1, 80),
    jobs=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), max_size=5),
    remainder=st.sampled_from(["pad", "drop", "uneven"]),
)
def test_sampler_goes_on_in_other_worlds(num_samples, jobs, remainder):
    """Each job is a world whose ranks use some samples and stop; the last one ends the epoch."""
    found: list[int] = []
    state: Any = None
    for world, num_used in [*jobs, (2, None)]:
        ranks = samplers(world, num_samples, remainder=remainder, seed=3)
        for sampler in ranks:
            if state is not None:
                sampler.load_state_dict(state)
        if ranks[0].epoch > 0:
            break
        if num_used is not None:
            num_used = min(num_used, *map(len, ranks))
        found += [i for one in ranks for i in itertools.islice(one, num_used)]
        states = [one.state_dict() for one in ranks]
        assert states == states[:1] * world
        state = states[0]
    if remainder == "drop":
        assert len(set(found)) == len(found)
        assert num_samples - len(found) < 5
    else:
        assert set(found) == set(range(num_samples))
        assert len(found) == num_samples or remainder == "pad"


def test_sampler_gives_the_extra_sample_to_another_rank_in_every_epoch():
    ranks = samplers(3, 10, remainder="uneven")
    assert [[len(list(one)) for _ in range(3)] for one in ranks] == [
        [4, 3, 3],
        [3, 4, 3],
        [3, 3, 4],
    ]


def test_sampler_has_a_new_order_in_every_pass_also_after_one_that_was_left():
    (sampler,) = samplers(1, 20)
    first = list(sampler)
    assert sampler.epoch == 1
    part = list(itertools.islice(sampler, 5))
    assert (sampler.epoch, sampler.consumed) == (1, 5)
    third = list(sampler)
    assert len({tuple(first[:5]), tuple(part), tuple(third[:5])}) == 3
    sampler.set_epoch(1)
    assert list(sampler)[:5] == part
    sampler.set_epoch(2)
    assert list(sampler) == third


def test_sampler_without_shuffling_deals_in_turn():
    assert [list(one) for one in samplers(3, 7, shuffle=False)] == [[0, 3, 6], [1, 4, 0], [2, 5, 1]]
    ranks = samplers(3, 7, shuffle=False, remainder="drop")
    assert [list(one) for one in ranks] == [[0, 3], [1, 4], [2, 5]]


def test_sampler_resumes_from_what_was_used_not_from_what_was_fetched():
    (sampler,) = samplers(1, 10, seed=4)
    order = list(sampler)  # all fetched, as a loader with workers does
    for num_used in range(12):
        other = samplers(1, 10)[0]  # the state has the seed
        other.load_state_dict(sampler.state_dict(num_used))
        if num_used < 10:
            assert (other.epoch, len(other), list(other)) == (0, 10 - num_used, order[num_used:])
        assert other.epoch == 1


def test_state_of_sampler_and_shards_is_the_same():
    shards = IndexShards(10, 0, 2, rank_batch_size=2, seed=5)
    drawn(shards, 1)
    sampler = samplers(2, 10)[1]
    sampler.load_state_dict(shards.state_dict())
    assert sampler.state_dict() == shards.state_dict()
    assert list(sampler) == order_of(10, 5, 0)[5::2].tolist()


def test_sampler_refuses_what_it_cannot_do():
    with pytest.raises(InvalidArgument, match=r"^ShardedSampler: remainder is one of 'pad'"):
        samplers(1, 4, remainder=True)
    with pytest.raises(InvalidArgument, match=r"^ShardedSampler: the state is of num_samples=4"):
        samplers(1, 5)[0].load_state_dict(samplers(1, 4)[0].state_dict())
    with pytest.raises(ferrodist.NotInitialized, match=r"^ShardedSampler: call ferrodist\.init"):
        ShardedSampler(range(3))


# -- torch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 3])
def test_torch_loader_takes_it_as_a_batch_sampler(world):
    torch = pytest.importorskip("torch", reason="its DataLoader is given the shards")
    data = torch.utils.data.TensorDataset(torch.arange(20) * 10)
    found = []
    for shards in world_of(world, 20, global_batch_size=8):
        loader = torch.utils.data.DataLoader(data, batch_sampler=shards)
        assert len(loader) == 3
        found += [value // 10 for (batch,) in loader for value in batch.tolist()]
    assert sorted(found) == list(range(20))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world", [1, 3])
def test_torch_loader_takes_the_sampler(world, num_workers):
    torch = pytest.importorskip("torch", reason="its DataLoader is given the sampler")
    data = torch.utils.data.TensorDataset(torch.arange(22) * 10)
    epochs = []
    for sampler in samplers(world, 22):
        loader = torch.utils.data.DataLoader(data, 4, sampler=sampler, num_workers=num_workers)
        lots = [[batch // 10 for (batch,) in loader] for _ in range(2)]
        assert [len(batch) for batch in lots[0]] == ([4, 4, 4, 4, 4, 2] if world == 1 else [4, 4])
        epochs.append([torch.cat(lot).tolist() for lot in lots])
    for found in zip(*epochs, strict=True):
        assert {i for lot in found for i in lot} == set(range(22))
    assert epochs[0][0] != epochs[0][1]


def test_torch_is_not_imported():
    program = (
        "import sys; from ferrodist.parallel.sharding import IndexShards\n"
        "from ferrodist.parallel.data_parallel import DataParallel\n"
        "list(IndexShards(4, 0, 1, rank_batch_size=4)); print({'torch', 'jax'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "set()\n"
