# SPDX-License-Identifier: MIT OR Apache-2.0
"""The core: as many ranks as the largest power of two in the world, for algorithms that need one.

The ranks beyond it are *guests*: of the first 2 * guests ranks every odd one is the guest of its
left neighbour, which reduces the guest's input behind its own before the algorithm and sends it the
result afterwards. So places in the core follow the ranks, and neighbours in it hold neighbouring
runs of ranks.
"""

from __future__ import annotations


def core_size(world: int) -> int:
    """Return the largest power of two that is not above ``world``."""
    return 1 << (world.bit_length() - 1)


def is_guest(rank: int, world: int) -> bool:
    """Tell whether the rank stays outside the core."""
    return rank % 2 == 1 and rank < 2 * (world - core_size(world))


def has_guest(rank: int, world: int) -> bool:
    """Tell whether the right neighbour is this rank's guest."""
    return rank + 1 < world and is_guest(rank + 1, world)


def core_place(rank: int, world: int) -> int:
    """Return the place in the core of a rank that is no guest."""
    guests = world - core_size(world)
    return rank // 2 if rank < 2 * guests else rank - guests


def core_rank(place: int, world: int) -> int:
    """Return the rank at a place of the core."""
    guests = world - core_size(world)
    return 2 * place if place < guests else place + guests


def core_bits(world: int) -> list[int]:
    """Return the distances between partners, nearest first: 1, 2, 4, ..."""
    return [1 << bit for bit in range(core_size(world).bit_length() - 1)]
