# SPDX-License-Identifier: MIT OR Apache-2.0
"""Star: everybody sends to the hub, which does the work and sends back. The reference.

The hub is the root, or rank 0 where there is none. It keeps every raw contribution in scratch,
slot = rank, and reduces them once, in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ferrodist.call import Kind
from ferrodist.schedules.steps import (
    IN_ORDER,
    Cell,
    Recv,
    Schedule,
    Send,
    Step,
    keep_own,
    mine,
    one_chunk,
    out,
    reduce_or_copy,
    scratch,
)

CellTuple = tuple[Cell, ...]

_TOKEN: CellTuple = ()


def _ask(hub: int, sent: CellTuple, answer: CellTuple) -> Iterator[Step]:
    # Two steps, not one: an answer may then overwrite what was sent.
    yield Step(send=Send(hub, sent))
    yield Step(recv=Recv(hub, answer))


def _collect(hub: int, world: int, cells_for: Callable[[int], CellTuple]) -> Iterator[Step]:
    for peer in range(world):
        if peer != hub:
            yield Step(recv=Recv(peer, cells_for(peer)))


def _hand_out(hub: int, world: int, cells_for: Callable[[int], CellTuple]) -> Iterator[Step]:
    for peer in range(world):
        if peer != hub:
            yield Step(send=Send(peer, cells_for(peer)))


def _contributions(hub: int, world: int, chunk: int) -> CellTuple:
    return tuple(mine(chunk) if rank == hub else scratch(chunk, rank) for rank in range(world))


def allreduce(rank: int, world: int, root: int) -> Iterator[Step]:
    """Rank 0 reduces and sends everybody the result."""
    if rank != 0:
        yield from _ask(0, (mine(0),), (out(0),))
        return
    yield from _collect(0, world, lambda peer: (scratch(0, peer),))
    yield Step(then=(reduce_or_copy(out(0), _contributions(0, world, 0)),))
    yield from _hand_out(0, world, lambda peer: (out(0),))


def broadcast(rank: int, world: int, root: int) -> Iterator[Step]:
    """Tokens to the root, then its array to everybody."""
    if rank != root:
        yield from _ask(root, _TOKEN, (out(0),))
        return
    yield from _collect(root, world, lambda peer: _TOKEN)
    yield from _hand_out(root, world, lambda peer: (mine(0),))
    yield keep_own(0)


def reduce(rank: int, world: int, root: int) -> Iterator[Step]:
    """Reduce at the root, which confirms with tokens."""
    if rank != root:
        yield from _ask(root, (mine(0),), _TOKEN)
        return
    yield from _collect(root, world, lambda peer: (scratch(0, peer),))
    yield Step(then=(reduce_or_copy(out(0), _contributions(root, world, 0)),))
    yield from _hand_out(root, world, lambda peer: _TOKEN)


def all_gather(rank: int, world: int, root: int) -> Iterator[Step]:
    """Rank 0 collects the blocks and sends everybody all of them."""
    everything = tuple(out(block) for block in range(world))
    if rank != 0:
        yield from _ask(0, (mine(rank),), everything)
        return
    yield keep_own(0)
    yield from _collect(0, world, lambda peer: (out(peer),))
    yield from _hand_out(0, world, lambda peer: everything)


def gather(rank: int, world: int, root: int) -> Iterator[Step]:
    """Collect the blocks at the root, which confirms with tokens."""
    if rank != root:
        yield from _ask(root, (mine(rank),), _TOKEN)
        return
    yield keep_own(root)
    yield from _collect(root, world, lambda peer: (out(peer),))
    yield from _hand_out(root, world, lambda peer: _TOKEN)


def scatter(rank: int, world: int, root: int) -> Iterator[Step]:
    """Tokens to the root, then a block to each."""
    if rank != root:
        yield from _ask(root, _TOKEN, (out(rank),))
        return
    yield from _collect(root, world, lambda peer: _TOKEN)
    yield from _hand_out(root, world, lambda peer: (mine(peer),))
    yield keep_own(root)


def reduce_scatter(rank: int, world: int, root: int) -> Iterator[Step]:
    """Rank 0 reduces everything and sends each rank its block."""
    blocks = range(world)
    if rank != 0:
        yield from _ask(0, tuple(mine(block) for block in blocks), (out(rank),))
        return
    yield from _collect(0, world, lambda peer: tuple(scratch(block, peer) for block in blocks))
    for block in blocks:
        reduced = scratch(block) if block else out(0)
        yield Step(then=(reduce_or_copy(reduced, _contributions(0, world, block)),))
    yield from _hand_out(0, world, lambda peer: (scratch(peer),))


def scan(rank: int, world: int, root: int) -> Iterator[Step]:
    """Rank 0 reduces once for every rank and sends it the result."""
    return _prefixes(rank, world, 1)


def exscan(rank: int, world: int, root: int) -> Iterator[Step]:
    """Do as scan does, without the contribution of the rank itself."""
    return _prefixes(rank, world, 0)


def _prefixes(rank: int, world: int, num_own: int) -> Iterator[Step]:
    if rank != 0:
        yield from _ask(0, (mine(0),), (out(0),))
        return
    yield from _collect(0, world, lambda peer: (scratch(0, peer),))
    for peer in range(1, world):
        reduced = scratch(0, world)
        operands = _contributions(0, world, 0)[: peer + num_own]
        yield Step(then=(reduce_or_copy(reduced, operands),))
        yield Step(send=Send(peer, (reduced,)))
    if num_own:
        yield keep_own(0)


def barrier(rank: int, world: int, root: int) -> Iterator[Step]:
    """Tokens to rank 0 and back."""
    if rank != 0:
        yield from _ask(0, _TOKEN, _TOKEN)
        return
    yield from _collect(0, world, lambda peer: _TOKEN)
    yield from _hand_out(0, world, lambda peer: _TOKEN)


SCHEDULES = tuple(
    Schedule("star", kind, steps, one_chunk, **IN_ORDER)
    for kind, steps in (
        (Kind.ALLREDUCE, allreduce),
        (Kind.BROADCAST, broadcast),
        (Kind.REDUCE, reduce),
        (Kind.ALL_GATHER, all_gather),
        (Kind.GATHER, gather),
        (Kind.SCATTER, scatter),
        (Kind.REDUCE_SCATTER, reduce_scatter),
        (Kind.BARRIER, barrier),
        (Kind.SCAN, scan),
        (Kind.EXSCAN, exscan),
    )
)
