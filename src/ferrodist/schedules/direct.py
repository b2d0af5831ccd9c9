# SPDX-License-Identifier: MIT OR Apache-2.0
"""Direct: everybody sends everybody their part, by pairwise exchange; nothing is relayed.

In round d a rank sends to the rank d above it and receives from the rank d below. The owner of a
chunk keeps every raw contribution in scratch, slot = rank, and reduces them once, in rank order: as
few bytes as a ring, and reproducible.
"""

from __future__ import annotations

from collections.abc import Iterator

from ferrodist.call import Kind
from ferrodist.schedules.steps import (
    IN_ORDER,
    Cell,
    Recv,
    Schedule,
    Send,
    Step,
    chunk_per_rank,
    keep_own,
    mine,
    out,
    reduce_or_copy,
    scratch,
)


def _reduce_own_chunk(rank: int, world: int, into: Cell) -> Iterator[Step]:
    for distance in range(1, world):
        above, below = (rank + distance) % world, (rank - distance) % world
        yield Step(Send(above, (mine(above),)), Recv(below, (scratch(rank, below),)))
    raw = tuple(mine(rank) if peer == rank else scratch(rank, peer) for peer in range(world))
    yield Step(then=(reduce_or_copy(into, raw),))


def _exchange_own_chunk(rank: int, world: int) -> Iterator[Step]:
    for distance in range(1, world):
        above, below = (rank + distance) % world, (rank - distance) % world
        yield Step(Send(above, (out(rank),)), Recv(below, (out(below),)))


def allreduce(rank: int, world: int, root: int) -> Iterator[Step]:
    """Each rank reduces one chunk and sends it to all."""
    yield from _reduce_own_chunk(rank, world, out(rank))
    yield from _exchange_own_chunk(rank, world)


def reduce_scatter(rank: int, world: int, root: int) -> Iterator[Step]:
    """Each rank reduces its own block."""
    yield from _reduce_own_chunk(rank, world, out(rank))


def reduce(rank: int, world: int, root: int) -> Iterator[Step]:
    """Each rank reduces one chunk and sends it to the root; all have heard from all by then."""
    if rank != root:
        reduced = scratch(rank, rank)
        yield from _reduce_own_chunk(rank, world, reduced)
        yield Step(send=Send(root, (reduced,)))
        return
    yield from _reduce_own_chunk(rank, world, out(rank))
    for distance in range(1, world):
        peer = (rank + distance) % world
        yield Step(recv=Recv(peer, (out(peer),)))


def all_gather(rank: int, world: int, root: int) -> Iterator[Step]:
    """Each rank sends its block to all."""
    yield keep_own(rank)
    yield from _exchange_own_chunk(rank, world)


def all_to_all(rank: int, world: int, root: int) -> Iterator[Step]:
    """Send every block straight to its rank."""
    yield keep_own(rank)
    for distance in range(1, world):
        above, below = (rank + distance) % world, (rank - distance) % world
        yield Step(Send(above, (mine(above),)), Recv(below, (out(below),)))


SCHEDULES = (
    Schedule("direct", Kind.ALLREDUCE, allreduce, chunk_per_rank, **IN_ORDER),
    Schedule("direct", Kind.REDUCE, reduce, chunk_per_rank, **IN_ORDER),
    Schedule("direct", Kind.ALL_GATHER, all_gather, chunk_per_rank, **IN_ORDER),
    Schedule("direct", Kind.REDUCE_SCATTER, reduce_scatter, chunk_per_rank, **IN_ORDER),
    # Not safe with one array: what arrives for out(i) would overwrite mine(i) before it is sent.
    Schedule(
        "pairwise", Kind.ALL_TO_ALL, all_to_all, chunk_per_rank, **IN_ORDER | {"alias_safe": False}
    ),
)
