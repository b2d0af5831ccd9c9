# SPDX-License-Identifier: MIT OR Apache-2.0
"""WalkPlan: what a collective needs besides its buffers, worked out once for like calls."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ferrodist import _native
from ferrodist.backends.running_call import Counts
from ferrodist.buffer import Buffer, DType
from ferrodist.call import Kind
from ferrodist.reduce_op import ReduceOp
from ferrodist.schedules import Layout, Lengths, Table, Traits, layouts


@dataclass(frozen=True, eq=False)
class WalkPlan:
    """The steps of one rank, where its cells lie, and how to reduce.

    ``peers`` are the ranks of the group behind those of the table, unless they are the same.
    """

    table: Table
    dtype: DType
    layouts: tuple[Layout, ...]
    op: ReduceOp
    divisor: int
    is_wide: bool
    divides_at_end: bool
    alias_safe: bool
    peers: Sequence[int]

    @cached_property
    def native(self) -> _native.Plan:
        """The same as native code takes it."""
        ranges = array("Q")
        for layout in self.layouts:
            for span in layout.ranges:
                ranges.extend(span)
        return _native.Plan(
            self.table.to_ints(),
            ranges,
            array("Q", [layout.scratch_nbytes for layout in self.layouts]),
            self.dtype,
            self.op,
            self.divisor,
            self.is_wide,
            self.divides_at_end,
            list(self.peers),
        )


def make_plan(
    table: Table,
    traits: Traits,
    op: ReduceOp | None,
    dtype: DType,
    lengths: Lengths,
    segment_nbytes: int,
    peers: Sequence[int] = (),
) -> WalkPlan:
    """Decide how a table is walked over arrays of these lengths."""
    is_mean, is_wide = op is ReduceOp.MEAN, dtype.is_half and traits.partials
    itemsize = 4 if is_wide else dtype.itemsize
    return WalkPlan(
        table=table,
        dtype=dtype,
        layouts=tuple(layouts(table, lengths, itemsize, segment_nbytes=segment_nbytes)),
        # Unfinished sums that travel are plain sums; the division comes at the end.
        op=ReduceOp.SUM if op is None or (is_mean and traits.partials) else op,
        divisor=table.world if is_mean else 1,
        is_wide=is_wide,
        divides_at_end=is_mean and traits.partials and not is_wide,
        alias_safe=traits.alias_safe,
        peers=peers,
    )


def lengths_of(
    kind: Kind,
    rank: int,
    world: int,
    input: Buffer | None,
    output: Buffer | None,
    counts: Counts | None,
) -> Lengths:
    """Say how long the arrays of a call are; the same on every rank but for its own blocks."""
    if kind is Kind.BARRIER:
        return Lengths(0)
    if counts is not None:
        return _uneven_lengths(kind, rank, counts)
    if kind in (Kind.ALL_GATHER, Kind.GATHER):
        assert input is not None
        return Lengths(input.count * world)
    if kind is Kind.SCATTER:
        assert output is not None
        return Lengths(output.count * world)
    array = input if input is not None else output
    assert array is not None
    return Lengths(array.count)


def _uneven_lengths(kind: Kind, rank: int, counts: Counts) -> Lengths:
    if kind is not Kind.ALL_TO_ALL:
        blocks = tuple(int(count) for count in counts)  # type: ignore[arg-type]  # one row
        return Lengths(sum(blocks), blocks)
    rows = [tuple(row) for row in counts]  # type: ignore[arg-type]  # one row per sender
    total = sum(map(sum, rows)) // len(rows)
    return Lengths(total, rows[rank], tuple(row[rank] for row in rows))
