# SPDX-License-Identifier: MIT OR Apache-2.0
"""Recursive doubling: in each round partners swap all they have and so double it.

Fewest rounds and most bytes: for small arrays. Both partners reduce the run of lower ranks on the
left and so hold the same bits. Guests of the core: see core.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from ferrodist.call import Kind
from ferrodist.schedules.core import core_bits, core_place, core_rank, has_guest, is_guest
from ferrodist.schedules.steps import (
    Cell,
    Recv,
    Reduce,
    Schedule,
    Send,
    Step,
    keep_own,
    mine,
    one_chunk,
    out,
    scratch,
)


def allreduce(rank: int, world: int, root: int) -> Iterator[Step]:
    """Swap and reduce with the partner at distance 1, 2, 4, ..."""
    if world == 1:
        yield keep_own(0)
    if is_guest(rank, world):
        yield Step(send=Send(rank - 1, (mine(0),)))
        yield Step(recv=Recv(rank - 1, (out(0),)))
        return
    held = mine(0)
    if has_guest(rank, world):
        yield Step(recv=Recv(rank + 1, (scratch(0),)), then=(Reduce(out(0), (held, scratch(0))),))
        held = out(0)
    for bit in core_bits(world):
        yield _swap(rank, core_rank(core_place(rank, world) ^ bit, world), held)
        held = out(0)
    if has_guest(rank, world):
        yield Step(send=Send(rank + 1, (held,)))


def _swap(rank: int, partner: int, held: Cell) -> Step:
    theirs = scratch(0)
    operands = (held, theirs) if rank < partner else (theirs, held)
    return Step(Send(partner, (held,)), Recv(partner, (theirs,)), (Reduce(out(0), operands),))


SCHEDULES = (
    Schedule(
        "recursive_doubling",
        Kind.ALLREDUCE,
        allreduce,
        chunks=one_chunk,
        in_order=False,
        partials=True,
        alias_safe=True,
    ),
)
