# SPDX-License-Identifier: MIT OR Apache-2.0
"""The Python walker: reads a compiled step table and does what it says, over any Transport.

A message of a step is cut into pieces of at most ``piece_nbytes``; what a piece brings is folded
while the next is on its way. 16-bit floats whose unfinished sums travel are *wide*: inputs are
converted to float32 when first read, results back when the segment is done, and float32 is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ferrodist import _native
from ferrodist.buffer import Buffer, DType
from ferrodist.errors import ProtocolError
from ferrodist.reduce_op import ReduceOp
from ferrodist.schedules import NOBODY, Layout, Row, Space, Table, Work

Move = Callable[[int, memoryview | None, int, int | None], memoryview | None]
"""``(to, payload, peer, expected_nbytes)``: send and receive one message at once; either may lack
(None)."""


class Task(NamedTuple):
    """What one walk works on, the same for all its segments."""

    table: Table
    source: Buffer | None
    target: Buffer | None
    dtype: DType
    op: ReduceOp
    divisor: int
    is_wide: bool
    is_in_place: bool
    piece_nbytes: int


def walk(task: Task, layout: Layout, exchange: Move) -> None:
    """Walk the table over one segment of the array."""
    segment = _Segment(task, layout)
    for row in task.table.rows:
        _walk_row(segment, row, exchange)
    segment.narrow_results()


def _walk_row(segment: _Segment, row: Row, exchange: Move) -> None:
    """Send and receive piece by piece; fold each piece at once where that is safe."""
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
                begin = index * segment.task.piece_nbytes
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

    def __init__(self, task: Task, layout: Layout) -> None:
        self.task = task
        self._layout = layout
        self._scratch = memoryview(bytearray(layout.scratch_nbytes))
        self._views: dict[int, memoryview] = {}

    def view(self, cell: int) -> memoryview:
        """Show the memory of a cell."""
        found = self._views.get(cell)
        if found is None:
            found = self._views[cell] = self._open(cell)
        return found

    def pieces(self, cells: tuple[int, ...]) -> Iterator[list[memoryview]]:
        """Cut a message into pieces, each a list of memory to join; at least one, maybe empty."""
        size, piece, room = self.task.piece_nbytes, [], self.task.piece_nbytes
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
        """Fold and copy, on a part of each cell."""
        for into, operands in works:
            if self._is_there_already(into, operands):
                continue
            target = self.view(into)[part]
            sources = [self.view(operand)[part] for operand in operands]
            if len(sources) == 1:
                target[:] = sources[0]
            else:
                self._fold(target, sources)

    def _is_there_already(self, into: int, operands: tuple[int, ...]) -> bool:
        """Tell whether a copy goes from an input to the result that is the same memory."""
        cells = self.task.table.cells
        return (
            self.task.is_in_place
            and len(operands) == 1
            and cells[into].chunk == cells[operands[0]].chunk
            and (cells[operands[0]].space, cells[into].space) == (Space.MINE, Space.OUT)
            and not self.task.is_wide
        )

    def narrow_results(self) -> None:
        """Round wide results to the caller's 16-bit floats, once."""
        if not self.task.is_wide or self.task.target is None:
            return
        for cell, view in self._views.items():
            if self.task.table.cells[cell].space is Space.OUT:
                begin, end = self._layout.ranges[cell]
                if self.task.divisor > 1:
                    _native.fold(DType.FLOAT32, ReduceOp.MEAN, view, [view], self.task.divisor)
                _native.narrow(
                    self.task.dtype, self.task.target.memory[begin // 2 : end // 2], view
                )

    def _fold(self, into: memoryview, operands: list[memoryview]) -> None:
        task = self.task
        dtype = DType.FLOAT32 if task.is_wide else task.dtype
        _native.fold(
            dtype, task.op, into, operands, task.divisor if task.op is ReduceOp.MEAN else 1
        )

    def _open(self, cell: int) -> memoryview:
        begin, end = self._layout.ranges[cell]
        space = self.task.table.cells[cell].space
        if space is Space.SCRATCH:
            return self._scratch[begin:end]
        buffer = self.task.source if space is Space.MINE else self.task.target
        assert buffer is not None, f"rank {self.task.table.rank} has no memory for {space.name}"
        if not self.task.is_wide:
            return buffer.memory[begin:end]
        wide = memoryview(bytearray(end - begin))
        if space is Space.MINE:
            _native.widen(self.task.dtype, wide, buffer.memory[begin // 2 : end // 2])
        return wide
