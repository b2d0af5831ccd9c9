# SPDX-License-Identifier: MIT OR Apache-2.0
"""Recursive halving, then doubling (Rabenseifner): few rounds and few bytes.

Partners at distance 1, 2, 4, ... split the run of chunks they both hold: each sends the half it
gives up and reduces the half it keeps, lower ranks on the left. At the end every rank of the core
has one finished chunk; the same rounds backwards join the halves again. Guests of the core (see
core.py) cost one more message of the whole array each way; without them no algorithm sends less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ferrodist.call import Kind
from ferrodist.schedules.core import (
    core_bits,
    core_place,
    core_rank,
    core_size,
    has_guest,
    is_guest,
)
from ferrodist.schedules.steps import (
    Cell,
    Recv,
    Reduce,
    Schedule,
    Send,
    Step,
    keep_own,
    mine,
    out,
    scratch,
)

Home = Callable[[int], Cell]


def allreduce(rank: int, world: int, root: int) -> Iterator[Step]:
    """Halve down to one chunk, double up to all."""
    everything = range(core_size(world))
    if world == 1:
        yield keep_own(0)
    if is_guest(rank, world):
        yield Step(send=Send(rank - 1, _cells(mine, everything)))
        yield Step(recv=Recv(rank - 1, _cells(out, everything)))
        return
    if has_guest(rank, world):
        yield Step(recv=Recv(rank + 1, _cells(scratch, everything)))
        yield from _reduces(mine, scratch, everything)
    yield from _halve_and_double(rank, world, out if has_guest(rank, world) else mine)
    if has_guest(rank, world):
        yield Step(send=Send(rank + 1, _cells(out, everything)))


def _halve_and_double(rank: int, world: int, home: Home) -> Iterator[Step]:
    place, kept = core_place(rank, world), range(core_size(world))
    given_up = []
    for bit in core_bits(world):
        partner = core_rank(place ^ bit, world)
        lower, upper = kept[: len(kept) // 2], kept[len(kept) // 2 :]
        kept, given = (upper, lower) if place & bit else (lower, upper)
        yield Step(Send(partner, _cells(home, given)), Recv(partner, _cells(scratch, kept)))
        yield from _reduces(scratch, home, kept) if place & bit else _reduces(home, scratch, kept)
        home = out
        given_up.append((partner, given))
    for partner, missing in reversed(given_up):
        yield Step(Send(partner, _cells(out, kept)), Recv(partner, _cells(out, missing)))
        kept = range(min(kept[0], missing[0]), max(kept[-1], missing[-1]) + 1)


def _reduces(left: Home, right: Home, chunks: range) -> Iterator[Step]:
    for chunk in chunks:
        yield Step(then=(Reduce(out(chunk), (left(chunk), right(chunk))),))


def _cells(home: Home, chunks: range) -> tuple[Cell, ...]:
    return tuple(home(chunk) for chunk in chunks)


SCHEDULES = (
    Schedule(
        "halving_doubling",
        Kind.ALLREDUCE,
        allreduce,
        chunks=core_size,
        in_order=False,
        partials=True,
        alias_safe=True,
    ),
)
