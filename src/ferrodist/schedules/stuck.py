# SPDX-License-Identifier: MIT OR Apache-2.0
"""Say why the ranks of a walk cannot go on: a message without a partner, or a circle of waits."""

from __future__ import annotations

from itertools import islice

from ferrodist.errors import InvalidArgument
from ferrodist.schedules.steps import Cell, Step
from ferrodist.schedules.walk import NOBODY, Walk

_LOOK_AHEAD = 100_000


def explain(walk: Walk, stuck: list[int]) -> InvalidArgument:
    """Return the error for a walk in which ``stuck`` ranks were left over."""
    later = [list(islice(steps, _LOOK_AHEAD)) for steps in walk.remaining]
    for rank in stuck:
        lonely = _lonely_message(walk, rank, later)
        if lonely:
            return walk.error(lonely, rank)
    return walk.error("deadlock: " + _circle(walk, stuck[0]), stuck[0])


def describe(cells: tuple[Cell, ...]) -> str:
    """Name the content of a message."""
    if not cells:
        return "a token"
    more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
    return f"{cells[0]}{more}"


def _lonely_message(walk: Walk, rank: int, later: list[list[Step]]) -> str | None:
    where, waits = f"rank {rank}, step {walk.number[rank]}", _waits(walk, rank)
    receiver, sender = walk.send_to[rank], walk.recv_from[rank]
    if receiver != NOBODY and not any(
        step.recv is not None and step.recv.peer == rank for step in later[receiver]
    ):
        return f"{where} {waits[0]}, which never receives it"
    if sender != NOBODY and not any(
        step.send is not None and step.send.peer == rank for step in later[sender]
    ):
        return f"{where} {waits[-1]}, which never sends it"
    return None


def _circle(walk: Walk, first: int) -> str:
    """Follow who waits for whom until a rank comes again."""
    path: list[int] = []
    rank = first
    while rank not in path:
        path.append(rank)
        rank = walk.send_to[rank] if walk.send_to[rank] != NOBODY else walk.recv_from[rank]
    circle = path[path.index(rank) :]
    return "; ".join(
        f"rank {rank}, step {walk.number[rank]} {_waits(walk, rank)[0]}" for rank in circle
    )


def _waits(walk: Walk, rank: int) -> list[str]:
    """Describe what the current step still waits for, the send first."""
    step = walk.current[rank]
    assert step is not None
    waits = []
    if step.send is not None and walk.send_to[rank] != NOBODY:
        waits.append(f"sends {describe(step.send.cells)} to rank {step.send.peer}")
    if step.recv is not None and walk.recv_from[rank] != NOBODY:
        waits.append(f"waits for {describe(step.recv.cells)} from rank {step.recv.peer}")
    return waits
