# SPDX-License-Identifier: MIT OR Apache-2.0
"""How a collective runs that is made of messages: which schedule, over which memory, step by step.

The Planner picks and checks a schedule and keeps plans; ``execute_plan`` does what a plan says in
Python, over any way of exchanging messages. Native code executes the same plans over TCP.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from ferrodist import _native
from ferrodist.backends.running_call import Algorithm, CollectiveArgs, Counts
from ferrodist.buffer import Buffer, DType
from ferrodist.call import Kind
from ferrodist.config import Config
from ferrodist.errors import InvalidArgument, ProtocolError, UnsupportedOp
from ferrodist.reduce_op import ReduceOp
from ferrodist.schedules import (
    NOBODY,
    Layout,
    Lengths,
    LinkModel,
    Row,
    Schedule,
    Space,
    Table,
    Traits,
    Work,
    choose,
    compile_table,
    find,
    layouts,
    traits,
)

_SCHEDULED_AS = {
    Kind.ALL_GATHER_UNEVEN: Kind.ALL_GATHER,
    Kind.ALL_TO_ALL_UNEVEN: Kind.ALL_TO_ALL,
    Kind.GATHER_UNEVEN: Kind.GATHER,
    Kind.SCATTER_UNEVEN: Kind.SCATTER,
    Kind.REDUCE_SCATTER_UNEVEN: Kind.REDUCE_SCATTER,
}
MOST_PLANS = 256


@dataclass(eq=False, repr=False)
class Planner:
    """Plans the executions of one rank.

    ``reduces_in_order`` says whether reductions reduce in rank order unless the caller names an
    algorithm that does not. ``peers`` are the ranks of the group that take part, unless all do.
    """

    rank: int
    world: int
    config: Config
    model: LinkModel
    _: KW_ONLY
    reduces_in_order: bool = True
    peers: Sequence[int] = ()
    _plans: dict[tuple[Any, ...], ExecutionPlan] = field(default_factory=dict)

    def check(self, kind: Kind, algorithm: Algorithm, root: int, reproducible: bool) -> str | None:
        """Refuse an algorithm that is unknown, wrong, or out of order where order is asked for."""
        if algorithm is None:
            return None
        schedule = find(_SCHEDULED_AS.get(kind, kind), algorithm)
        found = traits(schedule, self.world, root)
        if reproducible and kind.is_reduction and not found.in_order:
            raise UnsupportedOp(
                f"{kind.label}: algorithm {schedule.name!r} does not reduce in rank order, which "
                "reproducible=True asks for; leave one of the two out",
                op=kind.label,
                this_rank=self.rank,
            )
        if kind is Kind.ALL_TO_ALL_UNEVEN and found.relays:
            raise InvalidArgument(
                f"{kind.label}: algorithm {schedule.name!r} relays blocks through ranks that do "
                "not know how large they are; name another",
                this_rank=self.rank,
            )
        if isinstance(algorithm, str):
            return schedule.name
        return _signed_name(schedule, self.world, root)

    def _pick(
        self, kind: Kind, nbytes: int, dtype: DType, algorithm: Algorithm, in_order: bool
    ) -> Schedule:
        if algorithm is not None:
            return find(kind, algorithm)
        in_order = in_order or self.reduces_in_order
        return choose(
            kind, self.world, nbytes, half=dtype.is_half, in_order=in_order, model=self.model
        )

    def plan(
        self, kind: Kind, input: Buffer | None, output: Buffer | None, args: CollectiveArgs
    ) -> ExecutionPlan:
        """Work out what a collective needs besides its buffers; kept, for it will come again."""
        lengths = lengths_of(kind, self.rank, self.world, input, output, args.counts)
        sample = input or output
        return self.plan_lengths(kind, sample.dtype if sample else DType.UINT8, lengths, args)

    def plan_lengths(
        self, kind: Kind, dtype: DType, lengths: Lengths, args: CollectiveArgs
    ) -> ExecutionPlan:
        """Do as ``plan`` does where only the lengths of the arrays are known."""
        op, root, _, algorithm, in_order, _ = args
        key = (kind, op, root, dtype, lengths, algorithm, in_order)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            schedule = self._pick(kind, lengths.count * dtype.itemsize, dtype, algorithm, in_order)
            table = compile_table(schedule, self.world, self.rank, root)
            found = traits(schedule, self.world, root)
            chunk_nbytes = self.config.chunk_nbytes
            plan = make_plan(table, found, op, dtype, lengths, chunk_nbytes, self.peers)
            self._plans[key] = plan
        return plan


def execute_plan(
    plan: ExecutionPlan,
    input: Buffer | None,
    output: Buffer | None,
    in_place: bool,
    config: Config,
    exchange: Move,
) -> None:
    if in_place and not plan.alias_safe and input is not None:
        in_place, input = False, input.copy()
    for layout in plan.layouts:
        segment = _Segment(plan, layout, input, output, in_place, config.message_nbytes)
        for row in plan.table.rows:
            _execute_instruction(segment, row, exchange)
        segment.narrow_results()
    if plan.last_op is not None and output is not None:
        _native.local_reduce(plan.dtype, plan.last_op, output.memory, [output.memory], plan.divisor)


@lru_cache(maxsize=256)
def _signed_name(schedule: Schedule, world: int, root: int) -> str:
    """Name a user's own schedule so that two different ones of one name do not match."""
    tables = [compile_table(schedule, world, rank, root) for rank in range(world)]
    steps = [number for table in tables for number in table.to_ints()]
    return f"{schedule.name}@{_native.fingerprint(steps) & 0xFFFFFFFF:08x}"


# -- plans -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ExecutionPlan:
    """The steps of one rank, where its cells lie, and how to reduce.

    ``last_op`` is done to the result at last: the mean of unfinished sums that have travelled, or a
    logical operation, where the result may be an input as it is. ``peers`` are the ranks of the
    group behind those of the table, unless they are the same.
    """

    table: Table
    dtype: DType
    layouts: tuple[Layout, ...]
    op: ReduceOp
    divisor: int
    is_float32: bool
    last_op: ReduceOp | None
    alias_safe: bool
    peers: Sequence[int]

    @cached_property
    def native(self) -> _native.Plan:
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
            self.is_float32,
            self.last_op,
            list(self.peers),
        )


def make_plan(
    table: Table,
    traits: Traits,
    op: ReduceOp | None,
    dtype: DType,
    lengths: Lengths,
    chunk_nbytes: int,
    peers: Sequence[int] = (),
) -> ExecutionPlan:
    """Decide how a table is executed over arrays of these lengths."""
    is_mean, is_logical = op is ReduceOp.MEAN, op is not None and op.is_logical
    is_float32 = dtype.is_half and traits.partials and not is_logical
    last_op = ReduceOp.MEAN if is_mean and traits.partials and not is_float32 else None
    if is_logical and (table.world == 1 or table.kind.is_prefix):
        last_op = op
    itemsize = 4 if is_float32 else dtype.itemsize
    return ExecutionPlan(
        table=table,
        dtype=dtype,
        layouts=tuple(layouts(table, lengths, itemsize, chunk_nbytes=chunk_nbytes)),
        # Unfinished sums that travel are plain sums; the division comes at the end.
        op=ReduceOp.SUM if op is None or (is_mean and traits.partials) else op,
        divisor=table.world if is_mean else 1,
        is_float32=is_float32,
        last_op=last_op,
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
    array = output if kind.result_is_block or input is None else input
    assert array is not None
    is_block = kind.input_is_block or kind.result_is_block
    return Lengths(array.count * world if is_block else array.count)


def _uneven_lengths(kind: Kind, rank: int, counts: Counts) -> Lengths:
    if kind is not Kind.ALL_TO_ALL:
        blocks = tuple(int(count) for count in counts)  # type: ignore[arg-type]  # one row
        return Lengths(sum(blocks), blocks)
    rows = [tuple(row) for row in counts]  # type: ignore[arg-type]  # one row per sender
    total = sum(map(sum, rows)) // len(rows)
    return Lengths(total, rows[rank], tuple(row[rank] for row in rows))


# -- executing a table -----------------------------------------------------------------------------


Move = Callable[[int, memoryview | None, int, int | None], memoryview | None]
"""``(to, payload, peer, expected_nbytes)``: send and receive one message at once; either may be
None."""


def _execute_instruction(segment: _Segment, row: Row, exchange: Move) -> None:
    """Send and receive piece by piece; reduce each piece at once where that is safe."""
    outgoing = list(segment.pieces(row.sent)) if row.send_to != NOBODY else []
    if row.is_entangled:
        outgoing = [[memoryview(b"".join(piece))] for piece in outgoing]
    incoming = list(segment.pieces(row.received)) if row.recv_from != NOBODY else []
    for index in range(max(len(outgoing), len(incoming))):
        payload = _join(outgoing[index]) if index < len(outgoing) else None
        expected = sum(map(len, incoming[index])) if index < len(incoming) else None
        arrived = exchange(row.send_to, payload, row.recv_from, expected)
        if arrived is not None:
            _spread(arrived, incoming[index], row.recv_from)
            if row.is_piecewise:
                begin = index * segment.message_nbytes
                segment.work(row.works, slice(begin, begin + len(arrived)))
    if not row.is_piecewise:
        segment.work(row.works, slice(None))


def _join(parts: list[memoryview]) -> memoryview:
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def _spread(arrived: memoryview, parts: list[memoryview], peer: int) -> None:
    expected = sum(map(len, parts))
    if len(arrived) != expected:
        raise ProtocolError(
            f"rank {peer} sent {len(arrived)} bytes where {expected} were expected",
            rank=peer,
            expected=expected,
            got=len(arrived),
        )
    place = 0
    for part in parts:
        part[:] = arrived[place : place + len(part)]
        place += len(part)


class _Segment:
    """The memory of the cells of one segment."""

    def __init__(
        self,
        plan: ExecutionPlan,
        layout: Layout,
        source: Buffer | None,
        target: Buffer | None,
        is_in_place: bool,
        message_nbytes: int,
    ) -> None:
        self._plan, self._layout = plan, layout
        self._source, self._target, self._is_in_place = source, target, is_in_place
        self.message_nbytes = message_nbytes
        self._scratch = memoryview(bytearray(layout.scratch_nbytes))
        self._views: dict[int, memoryview] = {}

    def view(self, cell: int) -> memoryview:
        found = self._views.get(cell)
        if found is None:
            found = self._views[cell] = self._open(cell)
        return found

    def pieces(self, cells: tuple[int, ...]) -> Iterator[list[memoryview]]:
        """Cut a message into pieces, each a list of memory to join; at least one, maybe empty."""
        size, piece, room = self.message_nbytes, [], self.message_nbytes
        for cell in cells:
            view = self.view(cell)
            while len(view) > room:
                piece.append(view[:room])
                yield piece
                view, piece, room = view[room:], [], size
            piece.append(view)
            room -= len(view)
        yield piece

    def work(self, works: tuple[Work, ...], part: slice) -> None:
        """Reduce and copy, on a part of each cell."""
        for into, operands in works:
            if self._is_there_already(into, operands):
                continue
            target = self.view(into)[part]
            sources = [self.view(operand)[part] for operand in operands]
            if len(sources) == 1:
                target[:] = sources[0]
            else:
                self._reduce(target, sources)

    def _is_there_already(self, into: int, operands: tuple[int, ...]) -> bool:
        """Tell whether a copy goes from an input to the result that is the same memory."""
        cells = self._plan.table.cells
        return (
            self._is_in_place
            and len(operands) == 1
            and cells[into].chunk == cells[operands[0]].chunk
            and (cells[operands[0]].space, cells[into].space) == (Space.MINE, Space.OUT)
            and not self._plan.is_float32
        )

    def narrow_results(self) -> None:
        """Round float32 results to the caller's 16-bit floats, once."""
        if not self._plan.is_float32 or self._target is None:
            return
        for cell, view in self._views.items():
            if self._plan.table.cells[cell].space is Space.OUT:
                begin, end = self._layout.ranges[cell]
                if self._plan.divisor > 1:
                    _native.local_reduce(
                        DType.FLOAT32, ReduceOp.MEAN, view, [view], self._plan.divisor
                    )
                _native.narrow(self._plan.dtype, self._target.memory[begin // 2 : end // 2], view)

    def _reduce(self, into: memoryview, operands: list[memoryview]) -> None:
        plan = self._plan
        dtype = DType.FLOAT32 if plan.is_float32 else plan.dtype
        _native.local_reduce(
            dtype, plan.op, into, operands, plan.divisor if plan.op is ReduceOp.MEAN else 1
        )

    def _open(self, cell: int) -> memoryview:
        begin, end = self._layout.ranges[cell]
        space = self._plan.table.cells[cell].space
        if space is Space.SCRATCH:
            return self._scratch[begin:end]
        buffer = self._source if space is Space.MINE else self._target
        assert buffer is not None, f"rank {self._plan.table.rank} has no memory for {space.name}"
        if not self._plan.is_float32:
            return buffer.memory[begin:end]
        wide = memoryview(bytearray(end - begin))
        if space is Space.MINE:
            _native.widen(self._plan.dtype, wide, buffer.memory[begin // 2 : end // 2])
        return wide
