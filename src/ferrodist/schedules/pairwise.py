# SPDX-License-Identifier: MIT OR Apache-2.0
"""Pairwise exchange: all-to-all in world - 1 rounds, every block straight to its rank."""

from __future__ import annotations

from collections.abc import Iterator

from ferrodist.call import Kind
from ferrodist.schedules.steps import Recv, Schedule, Send, Step, keep_own, mine, out


def all_to_all(rank: int, world: int, root: int) -> Iterator[Step]:
    """In round d send to the rank d above and receive from the rank d below."""
    yield keep_own(rank)
    for distance in range(1, world):
        above, below = (rank + distance) % world, (rank - distance) % world
        yield Step(Send(above, (mine(above),)), Recv(below, (out(below),)))


SCHEDULES = (
    # What arrives for out(i) would overwrite mine(i) before it is sent.
    Schedule(
        "pairwise", Kind.ALL_TO_ALL, all_to_all, in_order=True, partials=False, alias_safe=False
    ),
)
