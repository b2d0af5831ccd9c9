# SPDX-License-Identifier: MIT OR Apache-2.0
"""Algorithms of log2(world) rounds, with partners at distance 1, 2, 4, ...

*recursive_doubling*: partners swap all they have and so double it. Fewest rounds and most bytes:
for small arrays. *halving_doubling* (Rabenseifner) sends few bytes as well: for large ones.
*dissemination* and *bruck* do the same for barrier and all_gather, in any world.

The first two need a power of two. The *core* is the largest that the world has; the ranks beyond it
are *extra*: of the first 2 * extra ranks every odd one is left to its left neighbour, which reduces
its input behind its own before the algorithm and sends it the result afterwards. So places in the
core follow the ranks, and neighbours in it hold neighbouring runs of ranks. Partners reduce the run
of lower ranks on the left, and so hold the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
    one_chunk,
    out,
    scratch,
)

Home = Callable[[int], Cell]


# -- the core --------------------------------------------------------------------------------------


def _core_size(world: int) -> int:
    return 1 << (world.bit_length() - 1)


def _is_extra(rank: int, world: int) -> bool:
    return rank % 2 == 1 and rank < 2 * (world - _core_size(world))


def _has_extra(rank: int, world: int) -> bool:
    """Tell whether the right neighbour is an extra rank, which this one acts for."""
    return rank + 1 < world and _is_extra(rank + 1, world)


def _partners(rank: int, world: int) -> Iterator[tuple[int, bool]]:
    """Yield the partners of a rank of the core, nearest first, and whether each is below it."""
    num_extra = world - _core_size(world)
    place = rank // 2 if rank < 2 * num_extra else rank - num_extra
    for bit in range(_core_size(world).bit_length() - 1):
        there = place ^ (1 << bit)
        partner = 2 * there if there < num_extra else there + num_extra
        yield partner, partner < rank


# -- recursive doubling ----------------------------------------------------------------------------


def doubling_allreduce(rank: int, world: int, root: int) -> Iterator[Step]:
    """Swap and reduce with the partner at distance 1, 2, 4, ..."""
    if world == 1:
        yield keep_own(0)
    if _is_extra(rank, world):
        yield Step(send=Send(rank - 1, (mine(0),)))
        yield Step(recv=Recv(rank - 1, (out(0),)))
        return
    held, theirs = mine(0), scratch(0)
    if _has_extra(rank, world):
        yield Step(recv=Recv(rank + 1, (theirs,)), then=(Reduce(out(0), (held, theirs)),))
        held = out(0)
    for partner, is_below in _partners(rank, world):
        operands = (theirs, held) if is_below else (held, theirs)
        then = (Reduce(out(0), operands),)
        yield Step(Send(partner, (held,)), Recv(partner, (theirs,)), then)
        held = out(0)
    if _has_extra(rank, world):
        yield Step(send=Send(rank + 1, (held,)))


# -- recursive halving, then doubling --------------------------------------------------------------
#
# Partners split the run of chunks they both hold: each sends the half it gives up and reduces the
# half it keeps. At the end every rank of the core has one finished chunk; the same rounds backwards
# join the halves again. Extra ranks cost one more message of the whole array each way; without them
# no algorithm sends less.


def halving_allreduce(rank: int, world: int, root: int) -> Iterator[Step]:
    """Halve down to one chunk, double up to all."""
    everything = range(_core_size(world))
    if world == 1:
        yield keep_own(0)
    if _is_extra(rank, world):
        yield Step(send=Send(rank - 1, _cells(mine, everything)))
        yield Step(recv=Recv(rank - 1, _cells(out, everything)))
        return
    if _has_extra(rank, world):
        yield Step(recv=Recv(rank + 1, _cells(scratch, everything)))
        yield from _reduces(mine, scratch, everything)
    yield from _halve_and_double(rank, world, out if _has_extra(rank, world) else mine)
    if _has_extra(rank, world):
        yield Step(send=Send(rank + 1, _cells(out, everything)))


def _halve_and_double(rank: int, world: int, home: Home) -> Iterator[Step]:
    kept = range(_core_size(world))
    given_up = []
    for partner, is_below in _partners(rank, world):
        lower, upper = kept[: len(kept) // 2], kept[len(kept) // 2 :]
        kept, given = (upper, lower) if is_below else (lower, upper)
        yield Step(Send(partner, _cells(home, given)), Recv(partner, _cells(scratch, kept)))
        yield from _reduces(scratch, home, kept) if is_below else _reduces(home, scratch, kept)
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


# -- any world -------------------------------------------------------------------------------------


def barrier(rank: int, world: int, root: int) -> Iterator[Step]:
    """Send a token to the rank 1, 2, 4, ... above and wait for the one as far below.

    After the round with distance d a rank has heard from the 2 * d - 1 ranks below it.
    """
    distance = 1
    while distance < world:
        yield Step(Send((rank + distance) % world), Recv((rank - distance) % world))
        distance *= 2


def bruck_all_gather(rank: int, world: int, root: int) -> Iterator[Step]:
    """Double the run of blocks that begins with the own one, the last time by what is missing.

    Cells are named by the rank they come from, so no rotation is needed at the end.
    """

    def run(first: int, count: int) -> tuple[Cell, ...]:
        return tuple(out((first + index) % world) for index in range(count))

    yield keep_own(rank)
    held = 1
    while held < world:
        count = min(held, world - held)
        above, below = (rank + held) % world, (rank - held) % world
        yield Step(Send(below, run(rank, count)), Recv(above, run(above, count)))
        held += count


SCHEDULES = (
    Schedule("recursive_doubling", Kind.ALLREDUCE, doubling_allreduce, one_chunk, **PARTIAL),
    Schedule("halving_doubling", Kind.ALLREDUCE, halving_allreduce, _core_size, **PARTIAL),
    Schedule("dissemination", Kind.BARRIER, barrier, chunk_per_rank, **IN_ORDER),
    Schedule("bruck", Kind.ALL_GATHER, bruck_all_gather, chunk_per_rank, **IN_ORDER),
)
