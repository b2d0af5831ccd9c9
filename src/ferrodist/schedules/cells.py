# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which cells a rank has, and which of them are equally large: the table in steps.py as code."""

from __future__ import annotations

from dataclasses import dataclass

from ferrodist.call import Kind
from ferrodist.errors import InvalidArgument, InvalidRank, InvalidWorldSize
from ferrodist.schedules.steps import Cell, Schedule, Space

INPUT_IS_ONE_BLOCK = (Kind.ALL_GATHER, Kind.GATHER)
RESULT_IS_ONE_BLOCK = (Kind.SCATTER, Kind.REDUCE_SCATTER)
_INPUT_ON_ROOT_ONLY = (Kind.SCATTER,)
_RESULT_ON_ROOT_ONLY = (Kind.REDUCE, Kind.GATHER)
ROOTED = (Kind.BROADCAST, Kind.REDUCE, Kind.GATHER, Kind.SCATTER)


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of every rank in one world."""

    kind: Kind
    world: int
    root: int
    num_chunks: int

    @classmethod
    def of(cls, schedule: Schedule, world: int, root: int) -> Cells:
        """Describe the cells ``schedule`` may name; refuse a world or root that cannot be."""
        if world < 1:
            raise InvalidWorldSize(f"a world has at least one rank, got {world}", got=world)
        if not 0 <= root < world:
            raise InvalidRank(
                f"root {root} is outside a world of {world}", rank=root, world_size=world
            )
        if schedule.kind > Kind.BARRIER:
            raise InvalidArgument(
                f"schedule {schedule.name!r}: {schedule.kind.label} has no schedules of its own"
            )
        num_chunks = schedule.num_chunks(world)
        if num_chunks < 1 and schedule.kind is not Kind.BARRIER:
            raise InvalidArgument(
                f"schedule {schedule.name!r} at world {world}: cuts the array into {num_chunks} "
                "chunks, expected at least 1"
            )
        return cls(schedule.kind, world, root, num_chunks)

    def inputs(self, rank: int) -> range:
        """Return the chunks of ``mine``."""
        if self.kind in _INPUT_ON_ROOT_ONLY and rank != self.root:
            return range(0)
        if self.kind in INPUT_IS_ONE_BLOCK:
            return range(rank, rank + 1)
        return range(self.num_chunks)

    def results(self, rank: int) -> range:
        """Return the chunks of ``out``."""
        if self.kind in _RESULT_ON_ROOT_ONLY and rank != self.root:
            return range(0)
        if self.kind in RESULT_IS_ONE_BLOCK:
            return range(rank, rank + 1)
        return range(self.num_chunks)

    def chunks(self, rank: int, space: Space) -> range:
        """Return the chunks a rank may name in a space."""
        if space is Space.MINE:
            return self.inputs(rank)
        if space is Space.OUT:
            return self.results(rank)
        pairs = self.kind is Kind.ALL_TO_ALL
        return range(self.num_chunks * self.num_chunks if pairs else self.num_chunks)

    def size_key(self, rank: int, cell: Cell) -> int:
        """Return a number that only cells of equal size share, whatever rank they are on."""
        if self.kind is not Kind.ALL_TO_ALL or cell.space is Space.SCRATCH:
            return cell.chunk
        pair = (rank, cell.chunk) if cell.space is Space.MINE else (cell.chunk, rank)
        return pair[0] * self.world + pair[1]
