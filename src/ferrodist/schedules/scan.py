# SPDX-License-Identifier: MIT OR Apache-2.0
"""Scans: rank r gets the reduction of ranks 0 .. r, or in exscan of the ranks below it.

*chain*: every rank receives the prefix of its left neighbour, reduces its own input behind it and
passes that on, chunk by chunk, so that all ranks are busy at once. In rank order; for large arrays.

*recursive_doubling*: after rounds 1, 2, 4, ... a rank holds the reduction of as many ranks up to
its own. Fewest rounds; for small arrays. Messages that would wrap around are tokens, by which every
rank hears from every other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ferrodist.call import Kind
from ferrodist.schedules.doubling import barrier
from ferrodist.schedules.steps import (
    PARTIAL,
    Cell,
    Copy,
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

_CHUNKS_PER_RANK = 4  # of the chain: a rank waits for its first chunk, then works on all others


def _num_chunks(world: int) -> int:
    return _CHUNKS_PER_RANK * world


# -- chain -----------------------------------------------------------------------------------------


def chain_scan(rank: int, world: int, root: int) -> Iterator[Step]:
    """Reduce behind what comes from the left, pass it on; then tokens, for the lower ranks."""
    chunks = range(_num_chunks(world))
    for chunk in chunks if rank == 0 else ():
        yield keep_own(chunk)
    for chunk in chunks if rank > 0 else ():
        came = scratch(chunk)
        reduced = Reduce(out(chunk), (came, mine(chunk)))
        yield _pass_on(rank, world, chunk - 1, out, Recv(rank - 1, (came,)), reduced)
    yield from _last_of_chain(rank, world, out)


def chain_exscan(rank: int, world: int, root: int) -> Iterator[Step]:
    """Keep what comes from the left, pass it on with the own input behind it."""
    for chunk in range(_num_chunks(world)) if rank > 0 else ():
        came, is_last = scratch(chunk), rank == world - 1
        kept = Copy(out(chunk), came)
        works = (kept,) if is_last else (Reduce(_inclusive(chunk), (came, mine(chunk))), kept)
        yield _pass_on(rank, world, chunk - 1, _inclusive, Recv(rank - 1, (came,)), *works)
    yield from _last_of_chain(rank, world, _inclusive)


def _inclusive(chunk: int) -> Cell:
    return scratch(chunk, 1)


def _pass_on(
    rank: int,
    world: int,
    chunk: int,
    held: Callable[[int], Cell],
    recv: Recv | None = None,
    *works: Reduce | Copy,
) -> Step:
    """Send a chunk to the right, if there is one and somebody there, while the next comes."""
    is_sent = chunk >= 0 and rank + 1 < world
    return Step(Send(rank + 1, (held(chunk),)) if is_sent else None, recv, works)


def _last_of_chain(rank: int, world: int, held: Callable[[int], Cell]) -> Iterator[Step]:
    """Pass on what is left: rank 0 its whole input, the others their last chunk; then tokens."""
    if rank == 0:
        for chunk in range(_num_chunks(world)):
            yield _pass_on(rank, world, chunk, mine)
    else:
        yield _pass_on(rank, world, _num_chunks(world) - 1, held)
    yield from barrier(rank, world, 0)


# -- recursive doubling ----------------------------------------------------------------------------


def doubling_scan(rank: int, world: int, root: int) -> Iterator[Step]:
    """Reduce what comes from distance 1, 2, 4, ... before what is held."""
    held = mine(0)
    for distance in _distances(world):
        came = scratch(0)
        works = (Reduce(out(0), (came, held)),) if rank >= distance else ()
        yield _swap(rank, world, distance, held, works)
        held = out(0) if works else held
    if rank == 0:
        yield keep_own(0)


def doubling_exscan(rank: int, world: int, root: int) -> Iterator[Step]:
    """Do the same twice: with the own input, to pass it on, and without, to keep it."""
    held, inclusive, came = mine(0), scratch(0, 1), scratch(0)
    for distance in _distances(world):
        works: tuple[Reduce | Copy, ...] = ()
        if rank >= distance:
            kept = Copy(out(0), came) if distance == 1 else Reduce(out(0), (came, out(0)))
            is_passed_on = rank + 2 * distance < world
            works = (Reduce(inclusive, (came, held)), kept) if is_passed_on else (kept,)
        yield _swap(rank, world, distance, held, works)
        held = inclusive if len(works) > 1 else held


def _distances(world: int) -> list[int]:
    return [1 << bit for bit in range((world - 1).bit_length())]


def _swap(
    rank: int, world: int, distance: int, held: Cell, works: tuple[Reduce | Copy, ...]
) -> Step:
    is_wanted = rank + distance < world
    return Step(
        Send((rank + distance) % world, (held,) if is_wanted else ()),
        Recv((rank - distance) % world, (scratch(0),) if works else ()),
        works,
    )


SCHEDULES = (
    Schedule("chain", Kind.SCAN, chain_scan, _num_chunks, **PARTIAL | {"in_order": True}),
    Schedule("chain", Kind.EXSCAN, chain_exscan, _num_chunks, **PARTIAL | {"in_order": True}),
    Schedule("recursive_doubling", Kind.SCAN, doubling_scan, one_chunk, **PARTIAL),
    Schedule("recursive_doubling", Kind.EXSCAN, doubling_exscan, one_chunk, **PARTIAL),
)
