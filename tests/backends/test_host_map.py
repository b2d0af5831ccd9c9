"""HostMap: which ranks are on which host, who speaks for each, and who is on one rail."""

from __future__ import annotations

import random

import pytest

from ferrodist.backends.two_levels import HostMap


def maps_of(names: str) -> list[HostMap]:
    """Return the map of every rank; letters are names of hosts."""
    return [HostMap.of(list(names), rank) for rank in range(len(names))]


def test_hosts_are_in_the_order_of_their_lowest_ranks():
    assert maps_of("baab")[0].hosts == ((0, 3), (1, 2))
    assert maps_of("zay")[0].hosts == ((0,), (1,), (2,))


def test_all_ranks_see_the_same_hosts_each_from_its_own():
    maps = maps_of("abbacb")
    assert {one.hosts for one in maps} == {((0, 3), (1, 2, 5), (4,))}
    assert [one.here for one in maps] == [0, 1, 1, 0, 2, 1]
    assert [one.rank for one in maps] == list(range(6))


def test_a_rank_knows_its_number_among_those_of_its_host():
    maps = maps_of("abbacb")
    assert [one.local for one in maps] == [(0, 3), (1, 2, 5), (1, 2, 5), (0, 3), (4,), (1, 2, 5)]
    assert [one.local_rank for one in maps] == [0, 0, 1, 1, 0, 2]


@pytest.mark.parametrize(
    ("names", "are_equal"),
    [("a", True), ("aaa", True), ("abc", True), ("aabb", True), ("abab", True), ("aab", False)],
)
def test_hosts_are_equal_if_all_have_as_many_ranks(names, are_equal):
    assert maps_of(names)[0].are_equal is are_equal


@pytest.mark.parametrize(
    ("names", "are_in_order"),
    [("a", True), ("aab", True), ("baa", True), ("abbbcc", True), ("abab", False), ("aba", False)],
)
def test_hosts_are_in_order_if_the_ranks_of_each_follow_each_other(names, are_in_order):
    assert maps_of(names)[0].are_in_order is are_in_order


def test_the_lowest_rank_speaks_for_its_host_unless_the_root_is_on_it():
    for one in maps_of("abbacb"):
        assert one.node_leaders() == [0, 1, 4]
        assert one.node_leaders(0) == [0, 1, 4]
        assert one.node_leaders(3) == [3, 1, 4]
        assert one.node_leaders(5) == [0, 5, 4]
        assert [one.host_of(rank) for rank in range(6)] == [0, 1, 1, 0, 2, 1]


def test_a_rail_has_one_rank_of_each_host():
    assert [one.rail() for one in maps_of("abab")] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [one.rail() for one in maps_of("aabb")] == [[0, 2], [1, 3], [0, 2], [1, 3]]


@pytest.mark.parametrize("seed", range(20))
def test_every_rank_is_on_one_host_and_has_one_speaker(seed):
    rng = random.Random(seed)
    names = "".join(rng.choice("abcd") for _ in range(rng.randint(1, 12)))
    root = rng.randrange(len(names))
    for rank, one in enumerate(maps_of(names)):
        assert sorted(sum(one.hosts, ())) == list(range(len(names)))
        assert rank in one.local
        assert one.local[one.local_rank] == rank
        assert one.node_leaders()[one.here] == min(one.local)
        assert root in one.node_leaders(root)
        for host, leader in enumerate(one.node_leaders(root)):
            assert one.host_of(leader) == host
