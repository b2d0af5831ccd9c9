# SPDX-License-Identifier: MIT OR Apache-2.0
"""Fusing: the leaves of a tree travel as few messages.

Small leaves of one dtype are packed into one buffer; large ones and lone ones go as they are. In
reduce_scatter the packing is by part, so that a rank's part of the packed buffer holds its part of
every leaf; in all_gather the results are unpacked block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ferrodist.arrays import Result, Taken
from ferrodist.buffer import Buffer, DType


class Item(NamedTuple):
    """One leaf of a call: its input, where its result goes (None where there is none)."""

    taken: Taken
    result: Result | None
    in_place: bool = False


class Bundle(NamedTuple):
    """Leaves of one dtype that travel together."""

    items: tuple[Item, ...]
    source_parts: int  # into how many equal parts each input is cut: W in reduce_scatter, else 1
    target_parts: int  # into how many equal parts each result is cut: W in all_gather, else 1

    @property
    def is_lone(self) -> bool:
        """True if there is nothing to pack."""
        return len(self.items) == 1

    def source(self) -> Buffer:
        """Give the input of the collective, packed if there are several leaves."""
        if self.is_lone:
            return self.items[0].taken.buffer
        inputs = [item.taken.buffer for item in self.items]
        packed = _room_for(inputs)
        _copy(inputs, packed, self.source_parts, is_packing=True)
        return packed

    def target(self) -> Buffer | None:
        """Give the place for the result, None on ranks that have none."""
        if self.items[0].result is None:
            return None
        if self.is_lone:
            return self.items[0].result.buffer
        return _room_for(self._results())

    def unpack(self, target: Buffer | None) -> None:
        """Distribute a packed result to the leaves."""
        if target is not None and not self.is_lone:
            _copy(self._results(), target, self.target_parts, is_packing=False)

    def _results(self) -> list[Buffer]:
        return [item.result.buffer for item in self.items if item.result is not None]


def bundle(
    items: Sequence[Item], fuse_nbytes: int, source_parts: int, target_parts: int
) -> list[Bundle]:
    """Decide which leaves travel together: depends only on what all ranks agree on."""
    small: dict[DType, list[Item]] = {}
    bundles = []
    for item in items:
        if item.taken.buffer.nbytes <= fuse_nbytes and len(items) > 1:
            small.setdefault(item.taken.buffer.dtype, []).append(item)
        else:
            bundles.append(Bundle((item,), source_parts, target_parts))
    bundles += [Bundle(tuple(small[dtype]), source_parts, target_parts) for dtype in sorted(small)]
    return bundles


def _room_for(buffers: Sequence[Buffer]) -> Buffer:
    return Buffer.empty(buffers[0].dtype, (sum(buffer.count for buffer in buffers),))


def _copy(leaves: Sequence[Buffer], packed: Buffer, parts: int, *, is_packing: bool) -> None:
    """Copy leaves to packed memory or back: part 0 of every leaf, then part 1 of every leaf, ..."""
    place = 0
    for part in range(parts):
        for leaf in leaves:
            size = leaf.nbytes // parts
            outer, inner = slice(place, place + size), slice(part * size, (part + 1) * size)
            if is_packing:
                packed.memory[outer] = leaf.memory[inner]
            else:
                leaf.memory[inner] = packed.memory[outer]
            place += size
