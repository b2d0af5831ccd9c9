# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every built-in schedule is right at many worlds; a wrong one is refused with a useful text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

import pytest

from ferrodist.call import Kind
from ferrodist.errors import InvalidArgument, InvalidRank, InvalidWorldSize
from ferrodist.schedules import (
    BUILT_IN,
    Copy,
    Facts,
    Recv,
    Reduce,
    Schedule,
    Send,
    Step,
    find,
    keep_own,
    known,
    mine,
    one_chunk,
    out,
    scratch,
    traits,
    verify,
)

SOME_WORLDS = [*range(1, 10), 16, 17]
MANY_WORLDS = [*range(10, 34), 63, 64, 65]
ALL_WORLDS = [*range(34, 63), 127, 128, 129]

each_schedule = pytest.mark.parametrize(
    "schedule", BUILT_IN, ids=[f"{schedule.kind.label}-{schedule.name}" for schedule in BUILT_IN]
)


def roots(schedule: Schedule, world: int) -> list[int]:
    return sorted({0, world * 2 // 3}) if schedule.kind.is_rooted else [0]


def check(schedule: Schedule, worlds: Iterable[int]) -> None:
    for world in worlds:
        found = [verify(schedule, world, root) for root in roots(schedule, world)]
        assert all(facts.in_order for facts in found) >= bool(schedule.in_order)
        assert any(facts.partials for facts in found) <= bool(schedule.partials)
        assert all(facts.alias_safe for facts in found) >= bool(schedule.alias_safe)
        # In tiny worlds more is true than a schedule can promise for all.
        if world > (4 if schedule.kind is Kind.EXSCAN else 3):
            assert all(facts.in_order for facts in found) == schedule.in_order
            assert any(facts.partials for facts in found) == schedule.partials
            assert all(facts.alias_safe for facts in found) == schedule.alias_safe


@each_schedule
def test_schedule_is_proved_and_keeps_what_it_declares(schedule: Schedule) -> None:
    check(schedule, SOME_WORLDS)


@pytest.mark.slow
@each_schedule
def test_schedule_is_proved_in_many_worlds(schedule: Schedule) -> None:
    check(schedule, MANY_WORLDS)


@pytest.mark.long
@each_schedule
def test_schedule_is_proved_in_all_worlds(schedule: Schedule) -> None:
    check(schedule, ALL_WORLDS)


@each_schedule
def test_schedule_works_for_every_root(schedule: Schedule) -> None:
    for world in (2, 5, 8) if schedule.kind.is_rooted else ():
        for root in range(world):
            verify(schedule, world, root)


def facts_of(kind: Kind, name: str, world: int, root: int = 0) -> Facts:
    return verify(find(kind, name), world, root)


@pytest.mark.parametrize("world", [2, 3, 8, 13])
def test_ring_takes_as_many_rounds_as_theory_says(world: int) -> None:
    assert facts_of(Kind.ALLREDUCE, "ring", world).rounds == 2 * (world - 1)
    assert facts_of(Kind.ALL_GATHER, "ring", world).rounds == world - 1
    assert facts_of(Kind.REDUCE_SCATTER, "ring", world).rounds == world - 1
    assert facts_of(Kind.ALL_TO_ALL, "pairwise", world).rounds == world - 1


@pytest.mark.parametrize("world", [2, 3, 4, 7, 8, 9, 16])
def test_logarithmic_schedules_take_logarithmic_rounds(world: int) -> None:
    up, down = math.ceil(math.log2(world)), math.floor(math.log2(world))
    extra = 0 if up == down else 2
    assert facts_of(Kind.ALL_GATHER, "bruck", world).rounds == up
    assert facts_of(Kind.BARRIER, "dissemination", world).rounds == up
    assert facts_of(Kind.ALLREDUCE, "recursive_doubling", world).rounds == down + extra
    assert facts_of(Kind.ALLREDUCE, "halving_doubling", world).rounds == 2 * down + extra
    for kind in (Kind.ALLREDUCE, Kind.BROADCAST, Kind.REDUCE, Kind.GATHER, Kind.SCATTER):
        assert down <= facts_of(kind, "tree", world).rounds <= 2 * up


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_number_of_messages_is_as_theory_says(world: int) -> None:
    others = world - 1
    for schedule in BUILT_IN:
        num_messages = verify(schedule, world).num_messages
        if schedule.name in ("star", "tree"):
            assert num_messages == 2 * others
        if schedule.name == "ring":
            assert num_messages == world * others * (2 if schedule.kind is Kind.ALLREDUCE else 1)
    assert facts_of(Kind.ALLREDUCE, "direct", world).num_messages == 2 * world * others
    assert facts_of(Kind.REDUCE, "direct", world).num_messages == world * others + others


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8, 13, 16])
def test_no_rank_sends_more_than_it_must(world: int) -> None:
    least = Fraction(world - 1, world)
    assert facts_of(Kind.ALLREDUCE, "ring", world).max_sent == 2 * least
    assert facts_of(Kind.ALLREDUCE, "direct", world).max_sent == 2 * least
    assert facts_of(Kind.REDUCE_SCATTER, "direct", world).max_sent == least
    assert facts_of(Kind.ALL_GATHER, "bruck", world).max_sent == least
    assert facts_of(Kind.BROADCAST, "scatter_all_gather", world).max_sent <= 2 * least
    extra = 0 if world & (world - 1) == 0 else 1
    assert facts_of(Kind.ALLREDUCE, "halving_doubling", world).max_sent <= 2 * least + extra


def test_world_of_one_sends_nothing() -> None:
    for schedule in BUILT_IN:
        assert verify(schedule, 1).num_messages == 0


def test_every_kind_has_a_schedule_and_reductions_have_one_in_order() -> None:
    for kind in list(Kind)[:9]:
        assert known(kind)
        assert any(schedule.in_order for schedule in known(kind))


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        InvalidArgument, match=r"no broadcast algorithm 'ring'; known: scatter_all_"
    ):
        find(Kind.BROADCAST, "ring")
    with pytest.raises(InvalidArgument, match="does allreduce, expected broadcast"):
        find(Kind.BROADCAST, find(Kind.ALLREDUCE, "ring"))
    with pytest.raises(InvalidArgument, match="a name or a Schedule, got 3"):
        find(Kind.BROADCAST, 3)  # type: ignore[arg-type]  # the point of the test


def test_world_and_root_must_be_possible() -> None:
    with pytest.raises(InvalidWorldSize):
        verify(find(Kind.BARRIER, "star"), 0)
    with pytest.raises(InvalidRank):
        verify(find(Kind.BROADCAST, "star"), 3, root=3)


# The error says what is wrong with a schedule; each case below breaks one rule.

Plan = dict[int, list[Step]]


def planned(kind: Kind, plan: Plan, chunks: int = 1) -> Schedule:
    return Schedule(
        "mine", kind, lambda rank, world, root: plan.get(rank, []), chunks=lambda world: chunks
    )


def swap(peer: int, kept: int = 0) -> list[Step]:
    """A right allreduce of two ranks."""
    operands = (mine(0), scratch(0)) if peer else (scratch(0), mine(0))
    step = Step(Send(peer, (mine(0),)), Recv(peer, (scratch(0),)), (Reduce(out(kept), operands),))
    return [step]


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({0: swap(1)}, r"rank 0, step 0 sends mine\(0\) to rank 1, which never receives it"),
        (
            {0: swap(1), 1: [Step(recv=Recv(0, (scratch(0),)))]},
            r"rank 0, step 0 waits for scratch\(0\) from rank 1, which never sends it",
        ),
        (
            {0: swap(1), 1: [Step(recv=Recv(0)), Step(send=Send(0, (mine(0),)))]},
            r"rank 0, step 0 sends mine\(0\) to rank 1, whose step 0 expects a token",
        ),
        (
            {
                0: [Step(send=Send(1)), Step(recv=Recv(1))],
                1: [Step(send=Send(0)), Step(recv=Recv(0))],
            },
            "deadlock: rank 0, step 0 sends a token to rank 1; rank 1, step 0 sends a token to",
        ),
        ({0: [Step(send=Send(0))]}, "rank 0, step 0 sends to itself"),
        ({0: [Step(recv=Recv(2))]}, "receives from rank 2, which is outside the world"),
        ({0: [Step(then=(Copy(out(0), scratch(0)),))]}, r"reads scratch\(0\) before anything"),
        ({0: [Step(then=(Copy(mine(0), mine(0)),))]}, r"writes mine\(0\), but inputs are never"),
        (
            {0: swap(1, kept=1), 1: swap(0)},
            r"names out\(1\), which a rank of allreduce does not have",
        ),
        ({0: swap(1), 1: []}, "never receives it"),
        (
            {0: [Step(Send(1, (mine(0),)), Recv(1, (out(0), out(0))))]},
            "receives into one cell twice",
        ),
        (
            {0: [keep_own(0), Step(Send(1, (out(0),)), Recv(1, (out(0),)))]},
            r"rank 0, step 1 receives into out\(0\) while it is being sent",
        ),
        (
            {0: [Step(then=(Reduce(out(0), (mine(0), mine(0))),))]},
            r"reduces the contribution of rank 0 into out\(0\) twice",
        ),
        ({0: [Step(then=(Reduce(out(0), (mine(0),)),))]}, "reduces 1 cells"),
        ({0: [keep_own(0)], 1: [keep_own(0)]}, r"made of rank 0, expected ranks 0, 1"),
        ({}, r"rank 0 ends without out\(0\)"),
        (
            {0: swap(1), 1: [swap(0)[0]._replace(then=(Reduce(out(0), (mine(0), scratch(0))),))]},
            r"ranks 0 and 1 reduce out\(0\) in different orders",
        ),
        ({0: ["send"]}, "step 0 is 'send', expected a Step"),
    ],
)
def test_mistake_in_an_allreduce_is_named(plan: Plan, text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^schedule 'mine' at world 2: .*" + text):
        verify(planned(Kind.ALLREDUCE, plan), 2)


def test_right_plan_is_accepted() -> None:
    facts = verify(planned(Kind.ALLREDUCE, {0: swap(1), 1: swap(0)}), 2)
    assert facts == Facts(True, False, True, 1, 2, Fraction(1))


def test_cells_of_different_sizes_are_not_joined() -> None:
    def crossed(target: int) -> Plan:
        return {0: [Step(send=Send(1, (mine(0),)))], 1: [Step(recv=Recv(0, (scratch(target),)))]}

    with pytest.raises(InvalidArgument, match=r"receives it into scratch\(1\), a cell of another"):
        verify(planned(Kind.ALLREDUCE, crossed(1), chunks=2), 2)
    with pytest.raises(InvalidArgument, match=r"works on out\(0\) and mine\(1\), cells of diff"):
        verify(planned(Kind.ALLREDUCE, {0: [Step(then=(Copy(out(0), mine(1)),))]}, chunks=2), 2)


def test_only_reductions_fold() -> None:
    plan = {0: [Step(then=(Reduce(out(0), (mine(0), mine(0))),))]}
    with pytest.raises(InvalidArgument, match="broadcast has nothing to reduce"):
        verify(planned(Kind.BROADCAST, plan), 2)


def test_broadcast_without_tokens_does_not_synchronise() -> None:
    plan = {
        0: [keep_own(0), Step(send=Send(1, (mine(0),)))],
        1: [Step(recv=Recv(0, (out(0),)))],
    }
    with pytest.raises(InvalidArgument, match="rank 0 ends without having heard from rank 1"):
        verify(planned(Kind.BROADCAST, plan), 2)


def test_generator_without_end_is_stopped() -> None:
    def forever(rank: int, world: int, root: int) -> Iterable[Step]:
        while True:
            yield keep_own(0)

    with pytest.raises(InvalidArgument, match="does the generator end"):
        verify(Schedule("mine", Kind.ALLREDUCE, forever, chunks=one_chunk), 2)


def test_kinds_made_of_others_and_no_chunks_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="all_gather_uneven has no schedules of its own"):
        verify(planned(Kind.ALL_GATHER_UNEVEN, {}), 2)
    with pytest.raises(InvalidArgument, match="into 0 chunks, expected at least 1"):
        verify(planned(Kind.ALLREDUCE, {}, chunks=0), 2)


def test_traits_of_built_in_schedules_are_what_they_declare() -> None:
    for schedule in BUILT_IN:
        declared = (schedule.in_order, schedule.partials, schedule.alias_safe)
        assert traits(schedule, 1000, 7)[:3] == declared


def test_traits_of_a_foreign_schedule_are_found_by_proof() -> None:
    schedule = planned(Kind.ALLREDUCE, {0: swap(1), 1: swap(0)})
    assert traits(schedule, 2) == (True, False, True, False)
    with pytest.raises(InvalidArgument, match="schedule 'mine' at world 3"):
        traits(schedule, 3)


def test_foreign_schedule_is_held_to_what_it_declares() -> None:
    ring = find(Kind.ALLREDUCE, "ring")
    boasting = Schedule("mine", Kind.ALLREDUCE, ring.steps, in_order=True)
    with pytest.raises(InvalidArgument, match="declares in_order=True, found False"):
        traits(boasting, 4)
