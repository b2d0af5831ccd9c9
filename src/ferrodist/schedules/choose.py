# SPDX-License-Identifier: MIT OR Apache-2.0
"""Choose: the cheapest built-in schedule that is legal for a call.

A pure function of the call, the world and the model, never of a timing of the moment: all ranks
choose the same, and so does the next run.
"""

from __future__ import annotations

from functools import lru_cache

from ferrodist.call import Kind
from ferrodist.errors import InvalidArgument
from ferrodist.schedules.cost import Line, LinkModel, line
from ferrodist.schedules.families import known
from ferrodist.schedules.once import computed_once
from ferrodist.schedules.steps import Schedule


@lru_cache(maxsize=4096)
def choose(
    kind: Kind, world: int, nbytes: int, *, half: bool, in_order: bool, model: LinkModel
) -> Schedule:
    """Return the schedule predicted to be fastest, the first by name among equals.

    ``nbytes`` is the whole array: all chunks, or the blocks of all ranks together. ``half`` says
    that elements are 16-bit floats, ``in_order`` that a reduction must fold in rank order.
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
    # Unfinished folds of 16-bit floats are held in float32: twice the bytes.
    return Line(fixed, 2 * per_byte if half and schedule.partials else per_byte)
