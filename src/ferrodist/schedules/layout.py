# SPDX-License-Identifier: MIT OR Apache-2.0
"""Layout: where the cells of a table lie, in bytes, for arrays of a given length.

Large arrays are worked on in *segments*, one after the other, so that scratch memory stays bounded.
A segment is a run of the array, which is then cut into chunks; where the array is made of one block
per rank it is the same run of every block. How many segments there are depends only on lengths
every rank knows, never on the rank. Kinds whose built-in schedules need no scratch are not
segmented.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from ferrodist.call import Kind
from ferrodist.errors import InvalidArgument
from ferrodist.schedules.cells import INPUT_IS_ONE_BLOCK, RESULT_IS_ONE_BLOCK
from ferrodist.schedules.steps import Cell, Space
from ferrodist.schedules.table import NO_AREA, Table

Span = tuple[int, int]

_ALIGNMENT = 64
_SEGMENTED = (Kind.ALLREDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER, Kind.GATHER, Kind.SCATTER)


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
    table: Table, lengths: Lengths, itemsize: int, *, segment_nbytes: int
) -> Iterator[Layout]:
    """Yield the layouts of all segments, at least one; they may share their scratch memory."""
    segments = num_segments(table.kind, table.world, lengths, segment_nbytes // itemsize)
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
    return kind in (INPUT_IS_ONE_BLOCK if space is Space.MINE else RESULT_IS_ONE_BLOCK)


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
