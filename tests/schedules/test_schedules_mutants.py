# SPDX-License-Identifier: MIT OR Apache-2.0
"""The verifier is right about thousands of damaged schedules.

Every mutant of a built-in schedule is judged twice: by the verifier, and by the plain executor of
test_schedules_executor.py, which runs it. The two must agree on each mutant. So no mutant that
changes the outcome is accepted, and one that is accepted does not change it: it reads the same
value elsewhere, does twice what may be done twice, or takes an order that does not matter.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from ferrodist.errors import InvalidArgument
from ferrodist.schedules import (
    BUILT_IN,
    Cell,
    Copy,
    Facts,
    Recv,
    Reduce,
    Schedule,
    Send,
    Step,
    mine,
    out,
    scratch,
    verify,
)
from test_schedules_executor import Plan, executed, plan_of


def verified(schedule: Schedule, plan: Plan, root: int) -> Facts | None:
    try:
        return verify(replace(schedule, steps=lambda rank, *_: plan[rank]), len(plan), root)
    except InvalidArgument:
        return None


# The mutations: each yields what may stand in the place of one step.


def with_message(step: Step, name: str, message: Send | Recv | None) -> Step:
    fields: dict[str, Any] = {name: message}
    return step._replace(**fields)


def messages(step: Step) -> Iterator[tuple[str, Send | Recv]]:
    if step.send is not None:
        yield "send", step.send
    if step.recv is not None:
        yield "recv", step.recv


def drop_step(step: Step, rank: int, world: int) -> Iterator[list[Step]]:
    yield []


def drop_message(step: Step, rank: int, world: int) -> Iterator[list[Step]]:
    for name, _ in messages(step):
        yield [with_message(step, name, None)]


def other_peer(step: Step, rank: int, world: int) -> Iterator[list[Step]]:
    for name, message in messages(step):
        for shift in range(1, world + 1):
            peer = (message.peer + shift) % world if shift < world else rank
            yield [with_message(step, name, message._replace(peer=peer))]


def other_cell(step: Step, rank: int, world: int) -> Iterator[list[Step]]:
    for name, message in messages(step):
        for index, cell in enumerate(message.cells):
            for changed in neighbours(cell, world):
                cells = (*message.cells[:index], changed, *message.cells[index + 1 :])
                yield [with_message(step, name, message._replace(cells=cells))]


def neighbours(cell: Cell, world: int) -> list[Cell]:
    homes = [home(cell.chunk) for home in (mine, out, scratch)]
    return [
        cell._replace(chunk=(cell.chunk + 1) % world),
        *(home for home in homes if home != cell),
    ]


def repeat_cell(step: Step, rank: int, world: int) -> Iterator[list[Step]]:
    for name, message in messages(step):
        if message.cells:
            cells = (*message.cells, message.cells[0])
            yield [with_message(step, name, message._replace(cells=cells))]


def repeat_step(step: Step, rank: int, world: int) -> Iterator[list[Step]]:
    yield [step, step]


def split_step(step: Step, rank: int, world: int) -> Iterator[list[Step]]:
    """Not at once but one after the other, in both orders."""
    if step.send is not None and step.recv is not None:
        send, rest = step._replace(recv=None, then=()), step._replace(send=None)
        yield [send, rest]
        yield [rest._replace(then=()), send._replace(then=step.then)]


def drop_work(step: Step, rank: int, world: int) -> Iterator[list[Step]]:
    for index in range(len(step.then)):
        yield [step._replace(then=step.then[:index] + step.then[index + 1 :])]


def swap_operands(step: Step, rank: int, world: int) -> Iterator[list[Step]]:
    for work in step.then:
        if isinstance(work, Reduce):
            first, second, *rest = work.operands
            yield [step._replace(then=(work._replace(operands=(second, first, *rest)),))]


def repeat_operand(step: Step, rank: int, world: int) -> Iterator[list[Step]]:
    for work in step.then:
        if isinstance(work, Reduce):
            first, _, *rest = work.operands
            yield [step._replace(then=(work._replace(operands=(first, first, *rest)),))]
            yield [step._replace(then=(work._replace(operands=(*work.operands, first)),))]


def work_elsewhere(step: Step, rank: int, world: int) -> Iterator[list[Step]]:
    for work in step.then:
        for changed in neighbours(work.into, world):
            yield [step._replace(then=(work._replace(into=changed),))]
        if isinstance(work, Copy):
            for changed in neighbours(work.source, world):
                yield [step._replace(then=(work._replace(source=changed),))]


Mutation = Callable[[Step, int, int], Iterator[list[Step]]]

MUTATIONS: list[Mutation] = [
    drop_step,
    drop_message,
    other_peer,
    other_cell,
    repeat_cell,
    repeat_step,
    split_step,
    drop_work,
    swap_operands,
    repeat_operand,
    work_elsewhere,
]


def step_mutants(plan: Plan, mutation: Mutation) -> Iterator[Plan]:
    for rank, steps in enumerate(plan):
        for index, step in enumerate(steps):
            for changed in mutation(step, rank, len(plan)):
                if changed != [step]:
                    yield replaced(plan, rank, index, changed)


def replaced(plan: Plan, rank: int, index: int, changed: list[Step]) -> Plan:
    steps = [*plan[rank][:index], *changed, *plan[rank][index + 1 :]]
    return [*plan[:rank], steps, *plan[rank + 1 :]]


def plans_without_one_message(plan: Plan) -> Iterator[Plan]:
    """Drop a send together with its receive: no rank gets stuck, but one hears less."""
    for sender, steps in enumerate(plan):
        seen: Counter[int] = Counter()
        for index, step in enumerate(steps):
            if step.send is not None:
                receiver = step.send.peer
                there = nth_receive(plan[receiver], sender, seen[receiver])
                seen[receiver] += 1
                without = replaced(plan, sender, index, [step._replace(send=None)])
                receive = plan[receiver][there]._replace(recv=None)
                yield replaced(without, receiver, there, [receive])


def nth_receive(steps: list[Step], sender: int, number: int) -> int:
    places = [i for i, step in enumerate(steps) if step.recv and step.recv.peer == sender]
    return places[number]


def plans_with_steps_swapped(plan: Plan) -> Iterator[Plan]:
    for rank, steps in enumerate(plan):
        for index, (step, after) in enumerate(pairwise(steps)):
            if step != after:
                swapped = replaced(plan, rank, index, [after])
                yield replaced(swapped, rank, index + 1, [step])


def plans_without_exchanges(plan: Plan) -> Iterator[Plan]:
    """On every rank, first send and then receive, and the other way round."""
    for order in (0, 1):
        yield [[part for step in steps for part in split(step, order)] for steps in plan]


def split(step: Step, order: int) -> list[Step]:
    ways = list(split_step(step, 0, 0))
    return ways[order] if ways else [step]


def mutants(plan: Plan) -> Iterator[tuple[str, list[Plan]]]:
    for mutation in MUTATIONS:
        yield mutation.__name__, list(step_mutants(plan, mutation))
    yield "split_all", [split for split in plans_without_exchanges(plan) if split != plan]
    yield "drop_pair", list(plans_without_one_message(plan))
    yield "swap_steps", list(plans_with_steps_swapped(plan))


def judge(schedule: Schedule, world: int, root: int, most: int, seed: int) -> Counter[str]:
    """Compare both verifiers on at most ``most`` mutants of each mutation; count the accepted."""
    plan = plan_of(schedule, world, root)
    choice = random.Random(f"{seed} {schedule.kind} {schedule.name} {world} {root}")
    counts: Counter[str] = Counter()
    for name, plans in mutants(plan):
        for mutant in choice.sample(plans, min(most, len(plans))):
            facts = verified(schedule, mutant, root)
            in_order = executed(schedule, mutant, root, alias=False, seed=seed)
            assert (facts is None) == (in_order is None), (name, mutant)
            counts[name] += 1
            if facts is not None:
                counts[f"{name} accepted"] += 1
                assert facts.in_order == in_order, (name, mutant)
                if facts.alias_safe:
                    assert executed(schedule, mutant, root, alias=True, seed=seed) is not None
    return counts


def judge_all(worlds: list[int], most: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for schedule in BUILT_IN:
        for world in worlds:
            for root in {0, world - 1} if schedule.kind.is_rooted else {0}:
                counts += judge(schedule, world, root, most, seed=7)
    return counts


# Damage that can never be harmless: a message without its partner, a message longer than its
# partner, a contribution reduced twice. Damage that always is: one rank alone that does not send
# and receive at once, for a circle of waits takes all of them ("split_all").
NEVER_ACCEPTED = ("drop_message", "repeat_cell", "repeat_operand")
ALWAYS_ACCEPTED = ("split_step",)


def check_counts(counts: Counter[str]) -> None:
    names = {name for name, _ in mutants([[]])}
    assert {name for name in counts if not name.endswith("accepted")} == names
    for name in NEVER_ACCEPTED:
        assert counts[f"{name} accepted"] == 0
    for name in ALWAYS_ACCEPTED:
        assert counts[f"{name} accepted"] == counts[name]
    for name in names.difference(ALWAYS_ACCEPTED):
        assert counts[f"{name} accepted"] < counts[name], name


@pytest.mark.parametrize(
    "worlds", [[2, 3, 5], pytest.param([4, 6, 7], marks=pytest.mark.slow)], ids=str
)
def test_verifier_agrees_with_execution_on_a_sample_of_mutants(worlds: list[int]) -> None:
    check_counts(judge_all(worlds, most=4))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_verifier_agrees_with_execution_on_many_mutants() -> None:
    counts = judge_all([2, 3, 4, 5, 6, 7], most=40)
    print(dict(sorted(counts.items())))
    check_counts(counts)


def test_swapped_operands_of_a_hub_are_accepted_but_not_in_order() -> None:
    for schedule in BUILT_IN:
        if schedule.name == "star" and schedule.kind.is_reduction:
            plan = plan_of(schedule, 4)
            for mutant in step_mutants(plan, swap_operands):
                facts = verified(schedule, mutant, 0)
                assert facts is not None
                assert not facts.in_order


def test_no_confirmation_of_a_rooted_call_may_be_left_out() -> None:
    for schedule in BUILT_IN:
        if schedule.kind.is_rooted and schedule.name in ("star", "tree"):
            for world in (2, 3, 6):
                plan = plan_of(schedule, world)
                for mutant in plans_without_one_message(plan):
                    assert verified(schedule, mutant, 0) is None
