# SPDX-License-Identifier: MIT OR Apache-2.0
"""Bruck: all-gather in ceil(log2(world)) rounds, for any world.

Before a round a rank holds a run of blocks that begins with its own; it appends the run of the rank
that many places above. Cells are named by the rank they come from, so no rotation is needed at the
end.
"""

from __future__ import annotations

from collections.abc import Iterator

from ferrodist.call import Kind
from ferrodist.schedules.steps import Cell, Recv, Schedule, Send, Step, keep_own, out


def all_gather(rank: int, world: int, root: int) -> Iterator[Step]:
    """Double the run of blocks, the last time only by what is missing."""
    yield keep_own(rank)
    held = 1
    while held < world:
        count = min(held, world - held)
        above, below = (rank + held) % world, (rank - held) % world
        yield Step(Send(below, _run(rank, count, world)), Recv(above, _run(above, count, world)))
        held += count


def _run(first: int, count: int, world: int) -> tuple[Cell, ...]:
    return tuple(out((first + index) % world) for index in range(count))


SCHEDULES = (
    Schedule("bruck", Kind.ALL_GATHER, all_gather, in_order=True, partials=False, alias_safe=True),
)
