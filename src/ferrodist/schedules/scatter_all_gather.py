# SPDX-License-Identifier: MIT OR Apache-2.0
"""Broadcast of large arrays (van de Geijn): scatter down a binomial tree, then ring all-gather.

Chunks are numbered by place in the tree: the root has place 0. After the scatter a rank holds the
chunks of its subtree, and in the ring nobody is sent what it holds already, so the root receives
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from ferrodist.call import Kind
from ferrodist.schedules.steps import Cell, Recv, Schedule, Send, Step, keep_own, mine, out
from ferrodist.schedules.tree import node, tokens_up


def broadcast(rank: int, world: int, root: int) -> Iterator[Step]:
    """Tokens up, chunks down, then round the ring."""
    yield from tokens_up(node(rank, world, root))
    yield from _scatter(rank, world, root)
    yield from _all_gather(rank, world, root)
    if rank == root:
        for chunk in range(world):
            yield keep_own(chunk)


def _scatter(rank: int, world: int, root: int) -> Iterator[Step]:
    here = node(rank, world, root)
    if here.parent is not None:
        chunks = _held(rank, world, root)
        yield Step(recv=Recv(here.parent, tuple(out(chunk) for chunk in chunks)))
    for child in reversed(here.children):
        chunks = _held(child, world, root)
        yield Step(send=Send(child, tuple(_home(rank, root, chunk) for chunk in chunks)))


def _all_gather(rank: int, world: int, root: int) -> Iterator[Step]:
    right, left = (rank + 1) % world, (rank - 1) % world
    held, held_by_right = _held(rank, world, root), _held(right, world, root)
    for behind in range(world - 1):
        sent = (rank - root - behind) % world
        received = (sent - 1) % world
        send = None if sent in held_by_right else Send(right, (_home(rank, root, sent),))
        recv = None if received in held else Recv(left, (out(received),))
        if send or recv:
            yield Step(send, recv)


def _held(rank: int, world: int, root: int) -> range:
    """Return the chunks a rank has after the scatter."""
    place = (rank - root) % world
    return range(place, place + len(node(rank, world, root).below))


def _home(rank: int, root: int, chunk: int) -> Cell:
    return mine(chunk) if rank == root else out(chunk)


SCHEDULES = (
    Schedule(
        "scatter_all_gather",
        Kind.BROADCAST,
        broadcast,
        in_order=True,
        partials=False,
        alias_safe=True,
    ),
)
