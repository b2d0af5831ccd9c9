# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ring: every rank sends to its right neighbour and receives from its left one, all at once.

A chunk starts at one rank, gathers a contribution at each stop and is finished after world - 1
rounds; finished chunks then travel once more round the ring. Every rank sends the fewest bytes
there can be, in the most rounds. The reduction of a chunk begins at a rank of its own, so it is not
in rank order.
"""

from __future__ import annotations

from collections.abc import Iterator

from ferrodist.call import Kind
from ferrodist.schedules.steps import (
    IN_ORDER,
    PARTIAL,
    Cell,
    Recv,
    Reduce,
    Schedule,
    Send,
    Step,
    chunk_per_rank,
    keep_own,
    mine,
    out,
    scratch,
)


def _round(rank: int, world: int, sent: Cell, received: Cell) -> Step:
    return Step(Send((rank + 1) % world, (sent,)), Recv((rank - 1) % world, (received,)))


def allreduce(rank: int, world: int, root: int) -> Iterator[Step]:
    """Reduce-scatter, after which the rank owns chunk rank + 1, then all-gather."""
    if world == 1:
        yield keep_own(0)
    held = mine(rank)
    for behind in range(1, world):
        chunk = (rank - behind) % world
        step = _round(rank, world, held, scratch(chunk))
        held = out(chunk)
        yield step._replace(then=(Reduce(held, (scratch(chunk), mine(chunk))),))
    for behind in range(world - 1):
        yield _round(rank, world, out((rank + 1 - behind) % world), out((rank - behind) % world))


def all_gather(rank: int, world: int, root: int) -> Iterator[Step]:
    """Every block travels round the ring."""
    yield keep_own(rank)
    for behind in range(world - 1):
        yield _round(rank, world, out((rank - behind) % world), out((rank - behind - 1) % world))


def reduce_scatter(rank: int, world: int, root: int) -> Iterator[Step]:
    """Do the first half of allreduce, one chunk earlier, so that the rank ends with its own."""
    if world == 1:
        yield keep_own(0)
    held = mine((rank - 1) % world)
    for behind in range(2, world + 1):
        chunk = (rank - behind) % world
        step = _round(rank, world, held, scratch(chunk))
        held = out(rank) if chunk == rank else scratch(chunk)
        yield step._replace(then=(Reduce(held, (scratch(chunk), mine(chunk))),))


SCHEDULES = (
    Schedule("ring", Kind.ALLREDUCE, allreduce, chunk_per_rank, **PARTIAL),
    Schedule("ring", Kind.ALL_GATHER, all_gather, chunk_per_rank, **IN_ORDER),
    Schedule("ring", Kind.REDUCE_SCATTER, reduce_scatter, chunk_per_rank, **PARTIAL),
)
