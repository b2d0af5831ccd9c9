# SPDX-License-Identifier: MIT OR Apache-2.0
"""Dissemination: a barrier in ceil(log2(world)) rounds, for any world.

After the round with distance d a rank has heard from the 2 * d - 1 ranks below it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ferrodist.call import Kind
from ferrodist.schedules.steps import Cell, Recv, Schedule, Send, Step, keep_own, mine, out


def barrier(rank: int, world: int, root: int) -> Iterator[Step]:
    """Send a token to the rank 1, 2, 4, ... above and wait for the one as far below."""
    distance = 1
    while distance < world:
        yield Step(Send((rank + distance) % world), Recv((rank - distance) % world))
        distance *= 2


SCHEDULES = (
    Schedule(
        "dissemination", Kind.BARRIER, barrier, in_order=True, partials=False, alias_safe=True
    ),
)


# -- Bruck -----------------------------------------------------------------------------------------
#
# Bruck: all-gather in ceil(log2(world)) rounds, for any world.
#
# Before a round a rank holds a run of blocks that begins with its own; it appends the run of the
# rank that many places above. Cells are named by the rank they come from, so no rotation is
# needed at the end.


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


BRUCK = (
    Schedule("bruck", Kind.ALL_GATHER, all_gather, in_order=True, partials=False, alias_safe=True),
)


# -- pairwise --------------------------------------------------------------------------------------
#
# Pairwise exchange: all-to-all in world - 1 rounds, every block straight to its rank.


def all_to_all(rank: int, world: int, root: int) -> Iterator[Step]:
    """In round d send to the rank d above and receive from the rank d below."""
    yield keep_own(rank)
    for distance in range(1, world):
        above, below = (rank + distance) % world, (rank - distance) % world
        yield Step(Send(above, (mine(above),)), Recv(below, (out(below),)))


PAIRWISE = (
    # What arrives for out(i) would overwrite mine(i) before it is sent.
    Schedule(
        "pairwise", Kind.ALL_TO_ALL, all_to_all, in_order=True, partials=False, alias_safe=False
    ),
)
