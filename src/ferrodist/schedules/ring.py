# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ring and direct exchange: every rank sends and receives in every round, all at once.

*ring*: each sends to its right neighbour and receives from its left one. A chunk starts at one
rank, gathers a contribution at each stop and is finished after world - 1 rounds; finished chunks
then travel once more round the ring. Every rank sends the fewest bytes there can be, in the most
rounds. The reduction of a chunk begins at a rank of its own, so it is not in rank order.

*direct*: in round d a rank sends to the rank d above it and receives from the rank d below; nothing
is relayed. The owner of a chunk keeps every raw contribution in scratch, slot = rank, and reduces
them once, in rank order: as few bytes as a ring, and reproducible.
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
    reduce_or_copy,
    scratch,
)


def _round(rank: int, world: int, sent: Cell, received: Cell) -> Step:
    return Step(Send((rank + 1) % world, (sent,)), Recv((rank - 1) % world, (received,)))


def ring_allreduce(rank: int, world: int, root: int) -> Iterator[Step]:
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


def ring_all_gather(rank: int, world: int, root: int) -> Iterator[Step]:
    """Every block travels round the ring."""
    yield keep_own(rank)
    for behind in range(world - 1):
        yield _round(rank, world, out((rank - behind) % world), out((rank - behind - 1) % world))


def ring_reduce_scatter(rank: int, world: int, root: int) -> Iterator[Step]:
    """Do the first half of allreduce, one chunk earlier, so that the rank ends with its own."""
    if world == 1:
        yield keep_own(0)
    held = mine((rank - 1) % world)
    for behind in range(2, world + 1):
        chunk = (rank - behind) % world
        step = _round(rank, world, held, scratch(chunk))
        held = out(rank) if chunk == rank else scratch(chunk)
        yield step._replace(then=(Reduce(held, (scratch(chunk), mine(chunk))),))


# -- direct ----------------------------------------------------------------------------------------


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


def direct_allreduce(rank: int, world: int, root: int) -> Iterator[Step]:
    """Each rank reduces one chunk and sends it to all."""
    yield from _reduce_own_chunk(rank, world, out(rank))
    yield from _exchange_own_chunk(rank, world)


def direct_reduce_scatter(rank: int, world: int, root: int) -> Iterator[Step]:
    """Each rank reduces its own block."""
    yield from _reduce_own_chunk(rank, world, out(rank))


def direct_reduce(rank: int, world: int, root: int) -> Iterator[Step]:
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


def direct_all_gather(rank: int, world: int, root: int) -> Iterator[Step]:
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
    Schedule("ring", Kind.ALLREDUCE, ring_allreduce, chunk_per_rank, **PARTIAL),
    Schedule("ring", Kind.ALL_GATHER, ring_all_gather, chunk_per_rank, **IN_ORDER),
    Schedule("ring", Kind.REDUCE_SCATTER, ring_reduce_scatter, chunk_per_rank, **PARTIAL),
    Schedule("direct", Kind.ALLREDUCE, direct_allreduce, chunk_per_rank, **IN_ORDER),
    Schedule("direct", Kind.REDUCE, direct_reduce, chunk_per_rank, **IN_ORDER),
    Schedule("direct", Kind.ALL_GATHER, direct_all_gather, chunk_per_rank, **IN_ORDER),
    Schedule("direct", Kind.REDUCE_SCATTER, direct_reduce_scatter, chunk_per_rank, **IN_ORDER),
    # Not safe with one array: what arrives for out(i) would overwrite mine(i) before it is sent.
    Schedule(
        "pairwise", Kind.ALL_TO_ALL, all_to_all, chunk_per_rank, **IN_ORDER | {"alias_safe": False}
    ),
)
