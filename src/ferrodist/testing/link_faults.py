# SPDX-License-Identifier: MIT OR Apache-2.0
"""LinkFaults: what the connections through a FaultProxy suffer.

All of it depends on the seed and on positions in a connection's bytes, never on how TCP cuts them.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal, get_args

from ferrodist.errors import InvalidArgument

Direction = Literal["both", "to_target", "from_target"]

BLOCK = 64 * 1024  # bytes that share one jitter


@dataclass(frozen=True, kw_only=True)
class LinkFaults:
    """What happens to every connection through a FaultProxy.

    ``delay`` and up to ``jitter`` seconds are added to everything, order kept; ``rate`` limits the
    bytes per second. The others strike a connection when N bytes of payload have passed it:
    ``freeze_after`` stops forwarding both ways and keeps the sockets open, ``cut_after`` ends both
    sides with an end-of-file, ``reset_after`` with a reset; ``flip_after`` flips a bit of the byte
    behind those N. ``direction`` says which way is slowed, counted and damaged.
    """

    seed: int = 0
    delay: float = 0.0
    jitter: float = 0.0
    rate: float | None = None
    freeze_after: int | None = None
    cut_after: int | None = None
    reset_after: int | None = None
    flip_after: int | None = None
    direction: Direction = "both"

    def __post_init__(self) -> None:
        for name in ("delay", "jitter"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidArgument(f"{name}={getattr(self, name)!r}: expected seconds >= 0")
        if self.rate is not None and not self.rate > 0:
            raise InvalidArgument(f"rate={self.rate!r}: expected bytes per second, or None")
        for name in ("freeze_after", "cut_after", "reset_after", "flip_after"):
            count = getattr(self, name)
            if count is not None and not (isinstance(count, int) and count >= 0):
                raise InvalidArgument(f"{name}={count!r}: expected a number of bytes, or None")
        if self.direction not in get_args(Direction):
            known = ", ".join(get_args(Direction))
            raise InvalidArgument(f"direction={self.direction!r}: expected one of {known}")

    def flipped_bit(self, direction: Direction) -> int:
        """Choose the bit that flip_after flips; pure."""
        return random.Random(f"{self.seed} {direction} flip").randrange(8)

    def lag(self, direction: Direction, offset: int) -> float:
        """Choose the seconds added to the byte at ``offset`` of a connection; pure."""
        if not self.jitter:
            return self.delay
        chance = random.Random(f"{self.seed} {direction} {offset // BLOCK}").random()
        return self.delay + self.jitter * chance
