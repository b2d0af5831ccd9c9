# SPDX-License-Identifier: MIT OR Apache-2.0
"""Dissemination: a barrier in ceil(log2(world)) rounds, for any world.

After the round with distance d a rank has heard from the 2 * d - 1 ranks below it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ferrodist.call import Kind
from ferrodist.schedules.steps import Recv, Schedule, Send, Step


def barrier(rank: int, world: int, root: int) -> Iterator[Step]:
    """Send a token to the rank 1, 2, 4, ... above and wait for the one as far below."""
    distance = 1
    while distance < world:
        yield Step(Send((rank + distance) % world), Recv((rank - distance) % world))
        distance *= 2


SCHEDULES = (
    Schedule(
        "dissemination", Kind.BARRIER, barrier, in_order=True, partials=False, alias_safe=True
    ),
)
