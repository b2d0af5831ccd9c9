# SPDX-License-Identifier: MIT OR Apache-2.0
"""Check ``group``: sub-groups have ranks, data and troubles of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

import ferrodist
from ferrodist import Backend, CollectiveTimeout, GroupAborted, InvalidRank, RankLost
from ferrodist.testing.contract.case import Trial

_SHORT = 0.1  # seconds; for calls that must run out of time


def check_group(trial: Trial) -> None:
    """Run one scenario of sub-groups, then see that the parent group is in step."""
    SCENARIOS[trial.case.detail](trial)
    trial.expect_in_step()


def expect_group(trial: Trial, group: Backend, ranks: Sequence[int]) -> None:
    """See that a group has its members in order, and moves data between the right ones."""
    trial.expect_equal(group.world_size, len(ranks), "the size of the group")
    trial.expect_equal(group.rank, list(ranks).index(trial.rank), "the rank in the group")
    mine = np.array([[trial.rank, group.rank]])
    wanted = np.array([[rank, place] for place, rank in enumerate(ranks)])
    trial.expect_array(ferrodist.all_gather(mine, group), wanted, what="all_gather in the group")
    last = len(ranks) - 1
    got = ferrodist.broadcast(mine, group, root=last)
    trial.expect_array(got, np.array([[ranks[last], last]]), what="broadcast in the group")
    total = ferrodist.allreduce(float(trial.rank), group)
    trial.expect_equal(total, float(sum(ranks)), "allreduce in the group")
    if last > 0:
        right, left = (group.rank + 1) % len(ranks), (group.rank - 1) % len(ranks)
        got = ferrodist.sendrecv(mine, right, left, group, like=mine)
        trial.expect_array(got, np.array([[ranks[left], left]]), what="sendrecv in the group")


def _check_split(trial: Trial, ranks: Sequence[int]) -> None:
    if trial.rank in ranks:
        with trial.backend.split(ranks) as group:
            expect_group(trial, group, ranks)


def _halves(trial: Trial) -> None:
    middle = (trial.world + 1) // 2
    everyone = range(trial.world)
    for ranks in (everyone[:middle], everyone[middle:]):
        _check_split(trial, ranks)


def _alternating(trial: Trial) -> None:
    everyone = range(trial.world)
    for ranks in (everyone[::2], everyone[1::2]):
        _check_split(trial, ranks)


def _reordered(trial: Trial) -> None:
    everyone = list(range(trial.world))
    _check_split(trial, everyone[::-1])
    _check_split(trial, everyone[1:] + everyone[:1])


def _alone(trial: Trial) -> None:
    _check_split(trial, [trial.rank])


def _same_list_twice(trial: Trial) -> None:
    """Two groups of the same ranks are two groups."""
    everyone = list(range(trial.world))
    with trial.backend.split(everyone) as first, trial.backend.split(everyone) as second:
        works = [
            ferrodist.allreduce(np.array([weight]), group, async_op=True)
            for group, weight in _in_own_order(trial, [(first, 1), (second, 100)])
        ]
        weights = [int(work.wait(trial.backend.timeout)[0]) for work in works]
        expect_group(trial, second, everyone)
        expect_group(trial, first, everyone)
    trial.expect_equal(sorted(weights), [trial.world, 100 * trial.world], "sums of two groups")


def _in_own_order(trial: Trial, items: list[tuple[Backend, int]]) -> list[tuple[Backend, int]]:
    """Odd ranks go through the groups in the other order."""
    return items if trial.rank % 2 == 0 else items[::-1]


def _interleaved_with_parent(trial: Trial) -> None:
    """Calls of a group and of its parent do not mix, in whatever order ranks make them."""
    everyone = list(range(trial.world))[::-1]
    with trial.backend.split(everyone) as group:
        both = _in_own_order(trial, [(trial.backend, 1), (group, 2)])
        works = {
            weight: ferrodist.all_gather(np.array([weight, trial.rank]), backend, async_op=True)
            for backend, weight in both
        }
        for weight, order in ((1, everyone[::-1]), (2, everyone)):
            wanted = np.array([[weight, rank] for rank in order]).reshape(-1)
            trial.expect_array(works[weight].wait(trial.backend.timeout), wanted)


def _nested(trial: Trial) -> None:
    """Ranks of a group's group are ranks of the group, not of the world."""
    everyone = list(range(trial.world))[::-1]
    with trial.backend.split(everyone) as group:
        inner = list(range(group.world_size))[::2]
        if group.rank in inner:
            with group.split(inner) as smallest:
                expect_group(trial, smallest, [everyone[rank] for rank in inner])


def _every_pair(trial: Trial) -> None:
    """Each rank is in a group with every other one; only members call split."""
    for first in range(trial.world):
        for second in range(first + 1, trial.world):
            _check_split(trial, [second, first])


def _roots_are_sub_ranks(trial: Trial) -> None:
    """A rank of the world that the group does not have is no root."""
    if trial.rank == trial.world - 1:
        with trial.backend.split([trial.rank]) as group:
            trial.expect_error(
                InvalidRank, lambda: ferrodist.broadcast(1, group, root=trial.rank or 1)
            )


# -- troubles stay in the group they arose in ------------------------------------------------------


def _pair(trial: Trial) -> list[int]:
    return [trial.world - 1, 0]


def _late_member(trial: Trial) -> None:
    """A late rank is named; the group is given up, its parent is not."""
    if trial.rank not in _pair(trial):
        return
    group = trial.backend.split(_pair(trial))
    if group.rank == 0:
        error = trial.expect_error(
            CollectiveTimeout, lambda: ferrodist.allreduce(1, group, timeout=_SHORT)
        )
        trial.expect_equal(getattr(error, "missing", None), [1], "missing")
        ferrodist.send(0, 0, trial.backend, tag=1)
    else:
        ferrodist.recv(trial.world - 1, trial.backend, tag=1)  # until the other has given up
    trial.expect_error(GroupAborted, lambda: ferrodist.allreduce(1, group))


def _aborted(trial: Trial) -> None:
    """abort() ends a group on every rank, with its reason, and no other group."""
    with trial.backend.split(list(range(trial.world))) as group:
        expect_group(trial, group, range(trial.world))
        ferrodist.barrier(trial.backend)  # until all are through with it
        if trial.rank == 0:
            group.abort("enough of it")
        error = trial.expect_error(
            GroupAborted, lambda: ferrodist.barrier(group), says="enough of it"
        )
        trial.expect_equal(getattr(error, "rank", None), 0, "the rank at fault")


def _closed_member(trial: Trial) -> None:
    """A rank that has left is named on the ranks that still call."""
    group = trial.backend.split(list(range(trial.world)))
    expect_group(trial, group, range(trial.world))
    ferrodist.barrier(trial.backend)  # until all are through with it
    if trial.rank == 0:
        group.close()
        return
    error = trial.expect_error(RankLost, lambda: ferrodist.allreduce(1, group))
    trial.expect_equal(getattr(error, "rank", None), 0, "the rank at fault")


SCENARIOS: dict[str, Callable[[Trial], None]] = {
    "halves": _halves,
    "alternating": _alternating,
    "reordered": _reordered,
    "alone": _alone,
    "same_list_twice": _same_list_twice,
    "interleaved_with_parent": _interleaved_with_parent,
    "nested": _nested,
    "every_pair": _every_pair,
    "roots_are_sub_ranks": _roots_are_sub_ranks,
    "aborted": _aborted,
}

NEEDS_TWO: dict[str, Callable[[Trial], None]] = {
    "late_member": _late_member,
    "closed_member": _closed_member,
}
SCENARIOS |= NEEDS_TWO
