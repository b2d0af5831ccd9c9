# SPDX-License-Identifier: MIT OR Apache-2.0
"""Layout: which gradients travel together. Pure: names, shapes and sizes, no arrays.

A *leaf* is one gradient. A *bucket* is a run of leaves of one dtype that are reduced as one array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

MIB = 1 << 20


class Leaf(NamedTuple):
    """One gradient: its name, its shape, and what ``backend.empty`` is to make for it."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    itemsize: int

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return self.size * self.itemsize


class BucketSizes(NamedTuple):
    """How large buckets become, in bytes.

    The first one is small, so that there is something to send soon after backward has begun.
    """

    first: int = MIB
    rest: int = 25 * MIB


class BucketLayout(NamedTuple):
    """The leaves of a bucket, by number, and where each begins in its array."""

    dtype: Any
    leaves: tuple[int, ...]
    starts: tuple[int, ...]
    size: int


def lay_out(leaves: Sequence[Leaf], order: Sequence[int], sizes: BucketSizes) -> list[BucketLayout]:
    """Fill buckets in the order in which leaves become ready, and list them in that order too.

    A bucket is closed by the leaf that fills it. It is ready with its last leaf, so that is what
    buckets are sorted by.
    """
    filling: dict[Any, list[int]] = {}
    nbytes: dict[Any, int] = {}
    closed: list[list[int]] = []
    for number in order:
        leaf = leaves[number]
        filling.setdefault(leaf.dtype, []).append(number)
        nbytes[leaf.dtype] = nbytes.get(leaf.dtype, 0) + leaf.nbytes
        if nbytes[leaf.dtype] >= (sizes.rest if closed else sizes.first):
            closed.append(filling.pop(leaf.dtype))
            del nbytes[leaf.dtype]
    place = {number: at for at, number in enumerate(order)}
    buckets = [*closed, *filling.values()]
    return [_layout(leaves, one) for one in sorted(buckets, key=lambda one: place[one[-1]])]


def _layout(leaves: Sequence[Leaf], numbers: Sequence[int]) -> BucketLayout:
    starts, size = [], 0
    for number in numbers:
        starts.append(size)
        size += leaves[number].size
    return BucketLayout(leaves[numbers[0]].dtype, tuple(numbers), tuple(starts), size)
