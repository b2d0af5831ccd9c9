# SPDX-License-Identifier: MIT OR Apache-2.0
"""Table: the steps of one rank, compiled for executors: nothing is left but integers.

As 32-bit integers, for a native executor (a list is its length followed by its items):

    kind, world, rank, root, number of chunks, number of scratch areas
    list of cells     each: space, chunk, slot, area
    list of steps     each: send_to, list of cells sent, recv_from, list of cells received,
                            list of works, each: into, list of operands;
                            1 if the works may be done piece by piece, else 0;
                            1 if what is sent must be copied before anything is received, else 0

Peers and areas that are not there are -1. Cells are named by their place in the list of cells. A
work with one operand is a copy, with more a reduction from left to right. Scratch cells that are
never in use at the same time share an *area*, which is as large as the largest of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from ferrodist.call import Kind
from ferrodist.errors import InvalidArgument
from ferrodist.schedules.steps import (
    Cell,
    Copy,
    Reduce,
    Schedule,
    Space,
    Step,
)

NOBODY = -1
NO_AREA = -1


class Work(NamedTuple):
    """Reduce ``operands`` into ``into``; a single operand is copied."""

    into: int
    operands: tuple[int, ...]


class Row(NamedTuple):
    """One step: send and receive at once, then work. Peers may be NOBODY."""

    send_to: int
    sent: tuple[int, ...]
    recv_from: int
    received: tuple[int, ...]
    works: tuple[Work, ...]
    is_piecewise: bool
    """Whether the works may be done on each piece as it arrives, while later ones are unsent."""
    is_entangled: bool
    """Whether pieces that arrive may fall on memory that is still to be sent."""


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The steps of one rank. Compared by identity, so that it is a cheap key of caches."""

    kind: Kind
    world: int
    rank: int
    root: int
    num_chunks: int
    num_areas: int
    cells: tuple[Cell, ...]
    areas: tuple[int, ...]
    """The scratch area of each cell, NO_AREA for input and result."""
    rows: tuple[Row, ...]

    def to_ints(self) -> array[int]:
        """Write the table as the 32-bit integers described above."""
        ints = array("i", (self.kind, self.world, self.rank, self.root))
        ints.extend((self.num_chunks, self.num_areas, len(self.cells)))
        for cell, area in zip(self.cells, self.areas, strict=True):
            ints.extend((*cell, area))
        ints.append(len(self.rows))
        for row in self.rows:
            ints.extend((row.send_to, len(row.sent), *row.sent))
            ints.extend((row.recv_from, len(row.received), *row.received))
            ints.append(len(row.works))
            for work in row.works:
                ints.extend((work.into, len(work.operands), *work.operands))
            ints.extend((row.is_piecewise, row.is_entangled))
        return ints


@lru_cache(maxsize=4096)
def compile_table(schedule: Schedule, world: int, rank: int, root: int = 0) -> Table:
    """Compile the steps of one rank; cached."""
    numbers: dict[Cell, int] = {}
    rows = tuple(_compile(step, numbers) for step in schedule.steps(rank, world, root))
    cells = tuple(numbers)
    areas = _areas(cells, rows)
    return Table(
        kind=schedule.kind,
        world=world,
        rank=rank,
        root=root,
        num_chunks=schedule.num_chunks(world),
        num_areas=max(areas, default=NO_AREA) + 1,
        cells=cells,
        areas=areas,
        rows=rows,
    )


def _compile(step: Step, numbers: dict[Cell, int]) -> Row:
    def number(cells: Iterable[Cell]) -> tuple[int, ...]:
        return tuple(numbers.setdefault(cell, len(numbers)) for cell in cells)

    def work(what: Reduce | Copy) -> Work:
        into, *sources = number((what.into, *what.operands))
        return Work(into, tuple(sources))

    return Row(
        send_to=step.send.peer if step.send else NOBODY,
        sent=number(step.send.cells if step.send else ()),
        recv_from=step.recv.peer if step.recv else NOBODY,
        received=number(step.recv.cells if step.recv else ()),
        works=tuple(work(what) for what in step.then),
        is_piecewise=_is_piecewise(step),
        is_entangled=_is_entangled(step),
    )


def _is_piecewise(step: Step) -> bool:
    """Tell whether piece i of the works needs piece i of the message alone, and harms no other.

    All cells must be of the chunk that arrives. What is written may be what is sent only if that is
    one cell, whose pieces then leave in step; input and result count as one, in case they are.
    """
    if step.recv is None or len(step.recv.cells) != 1:
        return False
    chunk = step.recv.cells[0].chunk
    sent = step.send.cells if step.send is not None else ()
    if any(cell.chunk != chunk for work in step.then for cell in (work.into, *work.operands)):
        return False
    return len(sent) <= 1 or all(cell.chunk != chunk for cell in sent)


def _is_entangled(step: Step) -> bool:
    """Tell whether a chunk is both sent and received, other than as one cell for one cell."""
    if step.send is None or step.recv is None or len(step.send.cells) == len(step.recv.cells) == 1:
        return False
    received = {cell.chunk for cell in step.recv.cells}
    return any(cell.chunk in received for cell in step.send.cells)


def _areas(cells: tuple[Cell, ...], rows: tuple[Row, ...]) -> tuple[int, ...]:
    """Give every scratch cell an area that no other cell uses between its first and last step."""
    last_use = {cell: index for index, row in enumerate(rows) for cell in _cells_of(row)}
    areas = [NO_AREA] * len(cells)
    free: list[int] = []
    num_areas = 0
    in_use: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        for cell in _cells_of(row):
            if cells[cell].space is not Space.SCRATCH or areas[cell] != NO_AREA:
                continue
            if not free:
                free.append(num_areas)
                num_areas += 1
            areas[cell] = free.pop()
            in_use.setdefault(last_use[cell], []).append(areas[cell])
        free.extend(in_use.pop(index, ()))
    return tuple(areas)


def _cells_of(row: Row) -> Iterator[int]:
    yield from row.sent
    yield from row.received
    for work in row.works:
        yield work.into
        yield from work.operands


# -- where the cells of a table lie ----------------------------------------------------------------
#
# Layout: where the cells of a table lie, in bytes, for arrays of a given length.
#
# Large arrays are worked on in *segments*, one after the other, so that scratch memory stays
# bounded. A segment is a run of the array, which is then cut into chunks; where the array is made
# of one block per rank it is the same run of every block. How many segments there are depends
# only on lengths every rank knows, never on the rank. Kinds whose built-in schedules need no
# scratch are not segmented.

Span = tuple[int, int]

_ALIGNMENT = 64
_SEGMENTED = (
    Kind.ALLREDUCE,
    Kind.REDUCE,
    Kind.REDUCE_SCATTER,
    Kind.GATHER,
    Kind.SCATTER,
    Kind.SCAN,
    Kind.EXSCAN,
)


class Layout(NamedTuple):
    """Byte ranges of one segment."""

    ranges: tuple[Span, ...]
    """For each cell of the table (begin, end) in the input, the result or the scratch memory."""
    scratch_nbytes: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long the arrays of a call are, in elements.

    ``count`` is the whole array: all chunks, or the blocks of all ranks together. ``blocks`` are
    the lengths of the blocks where they may differ; for all_to_all what this rank sends to each,
    and ``received`` what it receives from each.
    """

    count: int
    blocks: tuple[int, ...] | None = None
    received: tuple[int, ...] | None = None


def layouts(
    table: Table, lengths: Lengths, itemsize: int, *, chunk_nbytes: int
) -> Iterator[Layout]:
    """Yield the layouts of all segments, at least one; they may share their scratch memory."""
    segments = num_segments(table.kind, table.world, lengths, chunk_nbytes // itemsize)
    for index in range(segments):
        yield _layout(table, lengths, itemsize, index, segments)


def num_segments(kind: Kind, world: int, lengths: Lengths, most: int) -> int:
    """Return how many segments of at most ``most`` elements there are."""
    if kind not in _SEGMENTED:
        return 1
    length = lengths.count
    if kind.is_cut_by_rank:
        length, most = max(_block_lengths(lengths.blocks, lengths.count, world)), most // world
    return max(1, -(-length // max(1, most)))


@lru_cache(maxsize=4096)
def _layout(table: Table, lengths: Lengths, itemsize: int, index: int, segments: int) -> Layout:
    span_of = _by_rank(table, lengths) if table.kind.is_cut_by_rank else _by_chunk(table, lengths)
    spans = [span_of(cell, index, segments) for cell in table.cells]
    ranges = [(begin * itemsize, end * itemsize) for begin, end in spans]
    return _place_scratch(table, ranges)


SpanOf = Callable[[Cell, int, int], Span]


def _by_chunk(table: Table, lengths: Lengths) -> SpanOf:
    def span(cell: Cell, index: int, segments: int) -> Span:
        begin, end = part(lengths.count, index, segments)
        first, last = part(end - begin, cell.chunk, table.num_chunks)
        return begin + first, begin + last

    return span


def _by_rank(table: Table, lengths: Lengths) -> SpanOf:
    if table.kind is Kind.ALL_TO_ALL:
        return _by_pair(table, lengths)
    blocks = _block_lengths(lengths.blocks, lengths.count, table.world)
    begins = [0, *accumulate(blocks)]

    def span(cell: Cell, index: int, segments: int) -> Span:
        first, last = part(blocks[cell.chunk], index, segments)
        begin = 0 if _is_alone(table.kind, cell.space) else begins[cell.chunk]
        return begin + first, begin + last

    return span


def _is_alone(kind: Kind, space: Space) -> bool:
    """Tell whether the rank's array is this block and no other."""
    return kind.input_is_block if space is Space.MINE else kind.result_is_block


def _by_pair(table: Table, lengths: Lengths) -> SpanOf:
    rank, world = table.rank, table.world
    sent = _block_lengths(lengths.blocks, lengths.count, world)
    received = _block_lengths(lengths.received, lengths.count, world)
    sent_begins, received_begins = [0, *accumulate(sent)], [0, *accumulate(received)]

    def span(cell: Cell, index: int, segments: int) -> Span:
        if cell.space is Space.MINE:
            return sent_begins[cell.chunk], sent_begins[cell.chunk + 1]
        if cell.space is Space.OUT:
            return received_begins[cell.chunk], received_begins[cell.chunk + 1]
        source, target = divmod(cell.chunk, world)
        if rank not in (source, target) and lengths.blocks is not None:
            raise InvalidArgument(
                f"all_to_all_uneven: rank {rank} cannot relay from rank {source} to rank {target}, "
                "it does not know how much that is; name another algorithm"
            )
        return 0, sent[target] if source == rank else received[source]

    return span


def _block_lengths(blocks: Sequence[int] | None, count: int, world: int) -> Sequence[int]:
    if blocks is None:
        return [end - begin for begin, end in (part(count, index, world) for index in range(world))]
    if len(blocks) != world:
        raise InvalidArgument(
            f"{len(blocks)} block lengths in a world of {world}", got=len(blocks), expected=world
        )
    return blocks


def part(count: int, index: int, parts: int) -> Span:
    """Return where part ``index`` of ``count`` elements in ``parts`` nearly equal parts lies."""
    return index * count // parts, (index + 1) * count // parts


def _place_scratch(table: Table, ranges: list[Span]) -> Layout:
    """Lay the scratch areas one behind the other."""
    nbytes = [0] * table.num_areas
    for area, (begin, end) in zip(table.areas, ranges, strict=True):
        if area != NO_AREA:
            nbytes[area] = max(nbytes[area], end - begin)
    begins = [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in nbytes)]
    for cell, area in enumerate(table.areas):
        if area != NO_AREA:
            begin, end = ranges[cell]
            ranges[cell] = begins[area], begins[area] + end - begin
    return Layout(tuple(ranges), begins[-1])
