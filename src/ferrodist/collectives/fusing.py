# SPDX-License-Identifier: MIT OR Apache-2.0
"""Fusing: the leaves of a tree travel as few messages.

Small leaves of one dtype are packed into one buffer; large ones and lone ones go as they are. In
reduce_scatter the packing is by part, so that a rank's part of the packed buffer holds its part of
every leaf; in all_gather the results are unpacked block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ferrodist.arrays import InputArray, OutputArray
from ferrodist.backends.running_call import CollectiveArgs, Part
from ferrodist.buffer import Buffer, DeviceBuffer, DType
from ferrodist.call import Kind


class Item(NamedTuple):
    """One leaf of a call: its input, where its result goes (None where there is none)."""

    taken: InputArray
    result: OutputArray | None
    in_place: bool = False

    def alone(self, kind: Kind, args: CollectiveArgs) -> Part:
        """Make the collective of a leaf that travels as it is."""
        output = None if self.result is None else self.result.buffer
        args = args._replace(in_place=True) if self.in_place else args
        return Part(kind, self.taken.buffer, output, args)


class Packed(NamedTuple):
    """Results of leaves that travel together."""

    leaves: list[Buffer]
    output: Buffer
    parts: int  # into how many equal parts each result is cut: W in all_gather, else 1

    def unpack(self) -> None:
        """Distribute the packed result to the leaves."""
        _copy(self.leaves, self.output, self.parts, is_packing=False)


def fuse(
    items: Sequence[Item], kind: Kind, args: CollectiveArgs, world: int, fuse_nbytes: int
) -> tuple[list[Part], list[Packed]]:
    """Make the collectives of a call and say what to unpack when they are done.

    Which leaves travel together depends only on what all ranks agree on.
    """
    if len(items) == 1:
        return [items[0].alone(kind, args)], []
    small: dict[DType, list[Item]] = {}
    parts: list[Part] = []
    packed: list[Packed] = []
    for item in items:
        is_packable = not isinstance(item.taken.buffer, DeviceBuffer)
        if is_packable and item.taken.buffer.memory.nbytes <= fuse_nbytes:
            small.setdefault(item.taken.buffer.dtype, []).append(item)
        else:
            parts.append(item.alone(kind, args))
    for dtype in sorted(small):
        if len(small[dtype]) == 1:
            parts.append(small[dtype][0].alone(kind, args))
            continue
        inputs = [item.taken.buffer for item in small[dtype]]
        outputs = [item.result.buffer for item in small[dtype] if item.result is not None]
        together, output = _room_for(inputs), _room_for(outputs) if outputs else None
        _copy(inputs, together, world if kind is Kind.REDUCE_SCATTER else 1, is_packing=True)
        parts.append(Part(kind, together, output, args))
        if output is not None:
            packed.append(Packed(outputs, output, world if kind is Kind.ALL_GATHER else 1))
    return parts, packed


def _room_for(buffers: Sequence[Buffer]) -> Buffer:
    nbytes, dtype = sum([buffer.memory.nbytes for buffer in buffers]), buffers[0].dtype
    return Buffer.empty(dtype, (nbytes // dtype.itemsize,))


def _copy(leaves: Sequence[Buffer], packed: Buffer, parts: int, *, is_packing: bool) -> None:
    """Copy leaves to packed memory or back: part 0 of every leaf, then part 1 of every leaf, ..."""
    place = 0
    for part in range(parts):
        for leaf in leaves:
            size = leaf.memory.nbytes // parts
            outer, inner = slice(place, place + size), slice(part * size, (part + 1) * size)
            if is_packing:
                packed.memory[outer] = leaf.memory[inner]
            else:
                leaf.memory[inner] = packed.memory[outer]
            place += size
