# SPDX-License-Identifier: MIT OR Apache-2.0
"""The words an algorithm is written in: cells, moves, steps, schedules. Nothing here does anything.

A *cell* is a named piece of memory of one rank. ``mine(i)`` is chunk i of what the rank passed in,
``out(i)`` chunk i of its result, ``scratch(i, slot)`` private memory as large as chunk i. Inputs
are never written. Which chunks there are depends on the kind of the collective:

::

    allreduce, broadcast, reduce   the array, cut into ``schedule.chunks(world)`` chunks of nearly
                                   equal size, some maybe empty; mine(i) and out(i) are chunk i
    all_gather, gather             chunk i is the block of rank i: a rank has mine(rank) and
                                   out(0..W-1) (gather: out on the root only)
    scatter, reduce_scatter        a rank has mine(0..W-1) (scatter: on the root only) and out(rank)
    all_to_all                     mine(i) goes to rank i, out(i) came from rank i; chunk s * W + d
                                   of scratch is as large as what rank s has for rank d
    barrier                        none
    scan, exscan                   as allreduce; in exscan rank 0 has no out

The caller may pass one array as input and result: out(i) and mine(i) are then the same memory. A
schedule that never reads mine(i) after writing out(i) does not notice; for the others the backend
copies first.

A *step* is one round of one rank: it sends at most one message and receives at most one, both at
the same time, and then works locally. It ends when all of that is done. A message of no cells is a
token: it proves that its sender has come this far. Steps are counted from 0.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ferrodist.call import Kind
from ferrodist.errors import InvalidArgument, InvalidRank, InvalidWorldSize


class Space(enum.IntEnum):
    """Which memory a cell lies in."""

    MINE = 0
    OUT = 1
    SCRATCH = 2


class Cell(NamedTuple):
    """A named piece of memory: ``chunk`` gives the size, ``slot`` tells scratch cells apart."""

    space: Space
    chunk: int
    slot: int = 0

    def __str__(self) -> str:
        slot = f", {self.slot}" if self.slot else ""
        return f"{self.space.name.lower()}({self.chunk}{slot})"


def mine(chunk: int) -> Cell:
    """Chunk of the rank's input; read only."""
    return Cell(Space.MINE, chunk)


def out(chunk: int) -> Cell:
    """Chunk of the rank's result."""
    return Cell(Space.OUT, chunk)


def scratch(chunk: int, slot: int = 0) -> Cell:
    """Private memory of the size of a chunk."""
    return Cell(Space.SCRATCH, chunk, slot)


class Send(NamedTuple):
    """One message to ``peer`` with the content of ``cells``, in that order."""

    peer: int
    cells: tuple[Cell, ...] = ()


class Recv(NamedTuple):
    """One message from ``peer``, laid into ``cells``, in that order."""

    peer: int
    cells: tuple[Cell, ...] = ()


class Reduce(NamedTuple):
    """``into`` = ((first ∘ second) ∘ third) ... of ``operands``; ``into`` may be one of them."""

    into: Cell
    operands: tuple[Cell, ...]


class Copy(NamedTuple):
    """``into`` = ``source``."""

    into: Cell
    source: Cell

    @property
    def operands(self) -> tuple[Cell, ...]:
        """The source, as of a Reduce."""
        return (self.source,)


class Step(NamedTuple):
    """Send and receive at once, then reduce and copy. Cells named in ``then`` have one size."""

    send: Send | None = None
    recv: Recv | None = None
    then: tuple[Reduce | Copy, ...] = ()


def reduce_or_copy(into: Cell, operands: tuple[Cell, ...]) -> Reduce | Copy:
    """Reduce ``operands`` from left to right; a single one has nothing to be reduced with."""
    return Reduce(into, operands) if len(operands) > 1 else Copy(into, operands[0])


def keep_own(chunk: int) -> Step:
    """Make the rank's own input its result, without any other rank."""
    return Step(then=(Copy(out(chunk), mine(chunk)),))


Steps = Callable[[int, int, int], Iterable[Step]]
"""``(rank, world, root)`` to the steps of that rank; root is 0 where the kind has none."""


def one_chunk(world: int) -> int:
    """Do not cut the array."""
    return 1


def chunk_per_rank(world: int) -> int:
    """Cut the array into as many chunks as there are ranks."""
    return world


@dataclass(frozen=True, slots=True)
class Schedule:
    """A collective algorithm as data.

    ``in_order`` says that every result is the left-to-right reduction of ranks 0, 1, 2, ...;
    ``partials`` that unfinished reductions are stored and passed on (16-bit floats are then held in
    float32); ``alias_safe`` that input and result may be the same memory. What is True of in_order
    and alias_safe and False of partials holds at every world. Leave them None to have the verifier
    find out.
    """

    name: str
    kind: Kind
    steps: Steps
    chunks: Callable[[int], int] = chunk_per_rank
    in_order: bool | None = None
    partials: bool | None = None
    alias_safe: bool | None = None

    def num_chunks(self, world: int) -> int:
        """How many chunks the array is cut into."""
        if self.kind is Kind.BARRIER:
            return 0
        return world if self.kind.is_cut_by_rank else self.chunks(world)


# What most schedules declare: raw inputs reduced once in rank order, or partial sums passed on.
IN_ORDER = {"in_order": True, "partials": False, "alias_safe": True}
PARTIAL = {"in_order": False, "partials": True, "alias_safe": True}


# -- which cells a rank has, and which of them are equally large: the table above as code ----------


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
        if schedule.kind > Kind.EXSCAN:
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
        if not self.kind.has_input(rank, self.root):
            return range(0)
        if self.kind.input_is_block:
            return range(rank, rank + 1)
        return range(self.num_chunks)

    def results(self, rank: int) -> range:
        """Return the chunks of ``out``."""
        if not self.kind.has_result(rank, self.root):
            return range(0)
        if self.kind.result_is_block:
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
