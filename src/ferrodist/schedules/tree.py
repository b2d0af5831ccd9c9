# SPDX-License-Identifier: MIT OR Apache-2.0
"""Binomial tree: log2(world) rounds to the root, or from it.

Ranks are placed relative to the root, which has place 0. The parent of a place is the place with
its lowest set bit cleared; below a place lies the run of places that begins with it and ends before
the next multiple of that bit. Upwards the nearest child (the smallest subtree) comes first,
downwards last.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import NamedTuple

from ferrodist.call import Kind
from ferrodist.schedules.steps import (
    IN_ORDER,
    PARTIAL,
    Cell,
    Copy,
    Recv,
    Reduce,
    Schedule,
    Send,
    Step,
    chunk_per_rank,
    keep_own,
    mine,
    one_chunk,
    out,
    scratch,
)


class TreePlace(NamedTuple):
    """Where a rank stands in the tree."""

    parent: int | None
    children: tuple[int, ...]
    below: tuple[int, ...]
    """The ranks of the subtree, this one first."""


def node(rank: int, world: int, root: int) -> TreePlace:
    """Find a rank's parent, children and subtree."""
    place = (rank - root) % world
    reach = place & -place or world
    distances = [1 << bit for bit in range(world.bit_length()) if 1 << bit < reach]
    return TreePlace(
        parent=(root + place - reach) % world if place else None,
        children=tuple((rank + far) % world for far in distances if place + far < world),
        below=tuple((root + p) % world for p in range(place, min(place + reach, world))),
    )


def tokens_up(here: TreePlace) -> Iterator[Step]:
    """Tell the root that all have come."""
    for child in here.children:
        yield Step(recv=Recv(child))
    if here.parent is not None:
        yield Step(send=Send(here.parent))


def down(here: TreePlace, received: tuple[Cell, ...], sent: tuple[Cell, ...]) -> Iterator[Step]:
    """Pass the same cells to the whole tree; no cells make a token."""
    if here.parent is not None:
        yield Step(recv=Recv(here.parent, received))
    for child in reversed(here.children):
        yield Step(send=Send(child, sent))


def _reduce_up(here: TreePlace, into: Cell) -> Generator[Step, None, Cell]:
    """Reduce the children's results behind the rank's own input; return where the reduction is."""
    held = mine(0)
    for child in here.children:
        yield Step(recv=Recv(child, (scratch(0),)), then=(Reduce(into, (held, scratch(0))),))
        held = into
    if here.parent is not None:
        yield Step(send=Send(here.parent, (held,)))
    return held


def allreduce(rank: int, world: int, root: int) -> Iterator[Step]:
    """Reduce to rank 0, then broadcast."""
    if world == 1:
        yield keep_own(0)
    here = node(rank, world, 0)
    yield from _reduce_up(here, out(0))
    yield from down(here, (out(0),), (out(0),))


def broadcast(rank: int, world: int, root: int) -> Iterator[Step]:
    """Tokens up, then the array down."""
    here = node(rank, world, root)
    yield from tokens_up(here)
    yield from down(here, (out(0),), (mine(0) if rank == root else out(0),))
    if rank == root:
        yield keep_own(0)


def reduce(rank: int, world: int, root: int) -> Iterator[Step]:
    """Reduces up, then tokens down."""
    here = node(rank, world, root)
    held = yield from _reduce_up(here, out(0) if rank == root else scratch(0, 1))
    if world == 1:
        yield Step(then=(Copy(out(0), held),))
    yield from down(here, (), ())


def gather(rank: int, world: int, root: int) -> Iterator[Step]:
    """Blocks up, whole subtrees at a time, then tokens down."""
    here = node(rank, world, root)
    home = out if rank == root else scratch
    if rank == root:
        yield keep_own(rank)
    for child in here.children:
        blocks = node(child, world, root).below
        yield Step(recv=Recv(child, tuple(home(block) for block in blocks)))
    if here.parent is not None:
        rest = tuple(scratch(block) for block in here.below[1:])
        yield Step(send=Send(here.parent, (mine(rank), *rest)))
    yield from down(here, (), ())


def scatter(rank: int, world: int, root: int) -> Iterator[Step]:
    """Tokens up, then blocks down, whole subtrees at a time."""
    here = node(rank, world, root)
    home = mine if rank == root else scratch
    yield from tokens_up(here)
    if here.parent is not None:
        rest = tuple(scratch(block) for block in here.below[1:])
        yield Step(recv=Recv(here.parent, (out(rank), *rest)))
    for child in reversed(here.children):
        blocks = node(child, world, root).below
        yield Step(send=Send(child, tuple(home(block) for block in blocks)))
    if rank == root:
        yield keep_own(rank)


# -- broadcast of large arrays (van de Geijn) ------------------------------------------------------
#
# Scatter down the tree, then all-gather in a ring. Chunks are numbered by place in the tree. After
# the scatter a rank holds the chunks of its subtree, and in the ring nobody is sent what it holds
# already, so the root receives nothing.


def scatter_all_gather(rank: int, world: int, root: int) -> Iterator[Step]:
    """Tokens up, chunks down, then round the ring."""
    here, held = node(rank, world, root), _held(rank, world, root)
    yield from tokens_up(here)
    if here.parent is not None:
        yield Step(recv=Recv(here.parent, tuple(out(chunk) for chunk in held)))
    for child in reversed(here.children):
        chunks = _held(child, world, root)
        yield Step(send=Send(child, tuple(_home(rank, root, chunk) for chunk in chunks)))
    right, left = (rank + 1) % world, (rank - 1) % world
    held_by_right = _held(right, world, root)
    for behind in range(world - 1):
        sent = (rank - root - behind) % world
        received = (sent - 1) % world
        send = None if sent in held_by_right else Send(right, (_home(rank, root, sent),))
        recv = None if received in held else Recv(left, (out(received),))
        if send or recv:
            yield Step(send, recv)
    if rank == root:
        for chunk in range(world):
            yield keep_own(chunk)


def _held(rank: int, world: int, root: int) -> range:
    """Return the chunks a rank has after the scatter."""
    place = (rank - root) % world
    return range(place, place + len(node(rank, world, root).below))


def _home(rank: int, root: int, chunk: int) -> Cell:
    return mine(chunk) if rank == root else out(chunk)


SCHEDULES = (
    Schedule("tree", Kind.ALLREDUCE, allreduce, one_chunk, **PARTIAL),
    Schedule("tree", Kind.BROADCAST, broadcast, one_chunk, **IN_ORDER),
    Schedule("tree", Kind.REDUCE, reduce, one_chunk, **PARTIAL),
    Schedule("tree", Kind.GATHER, gather, chunk_per_rank, **IN_ORDER),
    Schedule("tree", Kind.SCATTER, scatter, chunk_per_rank, **IN_ORDER),
    Schedule("scatter_all_gather", Kind.BROADCAST, scatter_all_gather, chunk_per_rank, **IN_ORDER),
)
