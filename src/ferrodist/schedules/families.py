# SPDX-License-Identifier: MIT OR Apache-2.0
"""The built-in schedules, found by kind and name, and what may be relied on of any schedule."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ferrodist.call import Kind
from ferrodist.errors import InvalidArgument
from ferrodist.schedules import doubling, ring, scan, star, tree
from ferrodist.schedules.cost import Line, LinkModel, computed_once, line
from ferrodist.schedules.steps import Schedule, Space
from ferrodist.schedules.table import compile_table
from ferrodist.schedules.verify import verify

BUILT_IN: tuple[Schedule, ...] = (
    *star.SCHEDULES,
    *ring.SCHEDULES,
    *tree.SCHEDULES,
    *doubling.SCHEDULES,
    *scan.SCHEDULES,
)

_BY_NAME: dict[Kind, dict[str, Schedule]] = {
    kind: {schedule.name: schedule for schedule in BUILT_IN if schedule.kind is kind}
    for kind in Kind
}


class Traits(NamedTuple):
    """What a backend must know of a schedule before it runs it; see Schedule."""

    in_order: bool
    partials: bool
    alias_safe: bool
    relays: bool
    """Whether ranks hold blocks of others on the way: not possible where sizes differ by pair."""


def known(kind: Kind) -> tuple[Schedule, ...]:
    """Return the built-in schedules of a kind."""
    return tuple(_BY_NAME[kind].values())


def find(kind: Kind, algorithm: str | Schedule) -> Schedule:
    """Return the schedule called ``algorithm``, or ``algorithm`` itself if it is one of this kind.

    Raises InvalidArgument if there is none of this name or the schedule does something else.
    """
    if isinstance(algorithm, str):
        schedules = _BY_NAME[kind]
        if algorithm not in schedules:
            names = ", ".join(sorted(schedules)) or "none"
            raise InvalidArgument(
                f"no {kind.label} algorithm {algorithm!r}; known: {names}", got=algorithm
            )
        return schedules[algorithm]
    if not isinstance(algorithm, Schedule):
        raise InvalidArgument(
            f"algorithm must be a name or a Schedule, got {algorithm!r}", got=algorithm
        )
    if algorithm.kind is not kind:
        raise InvalidArgument(
            f"schedule {algorithm.name!r} does {algorithm.kind.label}, expected {kind.label}",
            got=algorithm.kind.label,
            expected=kind.label,
        )
    return algorithm


@computed_once
def traits(schedule: Schedule, world: int, root: int = 0) -> Traits:
    """Return what may be relied on; cached.

    Built-in schedules are proved by the test suite and taken at their word. Any other is verified
    here, at this world, for root 0 and the given one, and held to what it declares,
    which takes about 10 us for each message; InvalidArgument if it is wrong.
    """
    if schedule not in BUILT_IN:
        return _proved(schedule, world, root)
    return Traits(
        in_order=bool(schedule.in_order),
        partials=bool(schedule.partials),
        alias_safe=bool(schedule.alias_safe),
        relays=False,
    )


def _proved(schedule: Schedule, world: int, root: int) -> Traits:
    found = [verify(schedule, world, at) for at in sorted({0, root})]
    proved = Traits(
        in_order=all(facts.in_order for facts in found),
        partials=any(facts.partials for facts in found),
        alias_safe=all(facts.alias_safe for facts in found),
        relays=_relays(schedule, world, root),
    )
    for name, better in (("in_order", True), ("partials", False), ("alias_safe", True)):
        if getattr(schedule, name) is better and getattr(proved, name) is not better:
            raise InvalidArgument(
                f"schedule {schedule.name!r} at world {world}: declares {name}={better}, "
                f"found {not better}"
            )
    return proved


def _relays(schedule: Schedule, world: int, root: int) -> bool:
    if schedule.kind is not Kind.ALL_TO_ALL:
        return False
    return any(
        cell.space is Space.SCRATCH and rank not in divmod(cell.chunk, world)
        for rank in range(world)
        for cell in compile_table(schedule, world, rank, root).cells
    )


# -- the cheapest that is allowed ------------------------------------------------------------------
#
# A pure function of the call, the world and the model, never of a timing of the moment: all ranks
# choose the same, and so does the next run.


@lru_cache(maxsize=4096)
def choose(
    kind: Kind, world: int, nbytes: int, *, half: bool, in_order: bool, model: LinkModel
) -> Schedule:
    """Return the schedule predicted to be fastest, the first by name among equals.

    ``nbytes`` is the whole array: all chunks, or the blocks of all ranks together. ``half`` says
    that elements are 16-bit floats, ``in_order`` that a reduction must reduce in rank order.
    """
    best = min(
        _candidates(kind, world, half, in_order, model),
        key=lambda candidate: candidate[1].fixed + candidate[1].per_byte * nbytes,
    )
    return best[0]


@computed_once
def _candidates(
    kind: Kind, world: int, half: bool, in_order: bool, model: LinkModel
) -> tuple[tuple[Schedule, Line], ...]:
    """Return the legal schedules with their lines, in order of names."""
    legal = [
        (schedule, _line(schedule, world, half, model))
        for schedule in sorted(known(kind), key=lambda schedule: schedule.name)
        if schedule.in_order or not (in_order and kind.is_reduction)
    ]
    if not legal:
        raise InvalidArgument(f"{kind.label} has no schedules of its own", op=kind.label)
    return tuple(legal)


def _line(schedule: Schedule, world: int, half: bool, model: LinkModel) -> Line:
    fixed, per_byte = line(schedule, world, model)
    # Unfinished reductions of 16-bit floats are held in float32: twice the bytes.
    return Line(fixed, 2 * per_byte if half and schedule.partials else per_byte)
