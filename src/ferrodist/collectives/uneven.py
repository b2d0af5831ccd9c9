# SPDX-License-Identifier: MIT OR Apache-2.0
"""The collectives in which ranks may pass different sizes: these are told round before data moves.

Fingerprints leave out what may differ; it is checked when it arrives, and a rank that finds it
wrong tells all others, so that the call fails on every rank alike.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import numpy as np

from ferrodist.arrays import (
    InputArray,
    OutputArray,
    as_output,
    new_result,
    split_rows,
)
from ferrodist.backends.call_methods import AllOptions, Op
from ferrodist.backends.running_call import Part, Prepared, RunningCall
from ferrodist.buffer import Buffer
from ferrodist.call import Kind, Leaf
from ferrodist.collectives.plan import DenseCall, is_in_place, take_out, take_single
from ferrodist.collectives.request import Group, Request, leaf_of, public
from ferrodist.errors import CollectiveMismatch, InvalidArgument, InvalidShape, SizeMismatch
from ferrodist.reduce_op import ReduceOp

_MANY = 1 << 62  # no array has so many rows, and the sum of two such counts fits an int64
_SHOWN_COUNTS = 16


@public(AllOptions)
def all_gather_uneven(
    x: Any,
    backend: Group = None,
    *,
    as_list: bool = False,
    with_counts: bool = False,
    **options: Unpack[AllOptions],
) -> Any:
    """Join the arrays of all ranks along axis 0; that axis may differ in length between ranks.

    ``x`` may be this rank's part of ``out``. ``as_list`` gives a list of the parts instead, one per
    rank: views of the joined array. ``with_counts`` gives a pair: the result, and how many rows
    each rank has passed.

    Example:
        >>> import numpy as np, ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> run_ranks(3, lambda b: ferrodist.all_gather_uneven(np.full(b.rank, b.rank), b))[0]
        array([1, 2, 2])
        >>> def gather(backend):
        ...     return backend.all_gather_uneven(np.full(backend.rank, 7), as_list=True)
        >>> run_ranks(3, gather)[0]
        [array([], dtype=int64), array([7]), array([7, 7])]
    """
    request = Request(Kind.ALL_GATHER_UNEVEN, backend, options)
    return _gather(request, x, options.get("out"), as_list, with_counts)


@public(AllOptions)
def gather_uneven(
    x: Any,
    backend: Group = None,
    root: int = 0,
    *,
    as_list: bool = False,
    with_counts: bool = False,
    **options: Unpack[AllOptions],
) -> Any:
    """Do as ``all_gather_uneven`` does on ``root``; the other ranks get None.

    ``as_list`` gives the root a list of the parts instead of the joined array, one per rank;
    ``with_counts`` gives a pair: the result, and how many rows each rank has passed.

    Example:
        >>> import numpy as np, ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def gather(backend):
        ...     return ferrodist.gather_uneven(np.full(backend.rank, 7), backend, with_counts=True)
        >>> run_ranks(3, gather)
        [(array([7, 7, 7]), [0, 1, 2]), None, None]
    """
    request = Request(Kind.GATHER_UNEVEN, backend, options, root=root)
    return _gather(request, x, options.get("out"), as_list, with_counts)


def _gather(request: Request, x: Any, out: Any, as_list: bool, with_counts: bool) -> Any:
    taken = take_single(request, x)
    call = request.call((leaf_of(taken),), compared=(_row_of(taken),))
    gather = _GatherUneven(call, request.deadline, request, taken, out, as_list=as_list)
    gather.with_counts = with_counts
    return request.execute(gather)


@dataclass(slots=True, eq=False, repr=False)
class SizedCall(Prepared[Any]):
    """A call that makes room for its result when it knows the size."""

    request: Request
    taken: InputArray | None
    out: Any
    result: OutputArray | None = None  # None where this rank has none
    in_place: bool = False
    as_list: bool = False
    with_counts: bool = False
    counts: list[int] = field(default_factory=list)  # rows of the result, by the rank they are from

    def collective(
        self,
        running: RunningCall,
        kind: Kind,
        input: Buffer | None,
        counts: Sequence[Any] | None,
        row: tuple[int, ...],
    ) -> None:
        """Move the data, of which ``counts`` are the rows."""
        args, output = self.request.args, None if self.result is None else self.result.buffer
        if counts is not None:
            args = args._replace(counts=(np.array(counts) * math.prod(row)).tolist())
        running.collective(kind, input, output, args._replace(in_place=self.in_place))

    def make_room(self, running: RunningCall, row: tuple[int, ...]) -> None:
        """Make room for all rows; a wrong ``out`` shows only now, so all are told."""
        assert self.taken is not None
        shape = (sum(self.counts), *row)
        if self.out is None:
            self.result = new_result(self.taken, shape)
            return
        try:
            self.result = as_output(self.out, self.taken.buffer.dtype, shape)
            self.in_place = is_in_place(self.request, self.taken, self.result, self.counts)
        except InvalidArgument as error:
            text = f"rank {self.request.backend.rank}: {error}"
            raise running.mismatch(CollectiveMismatch, text) from error

    def finish(self) -> Any:
        """Return the result, or its parts, with the counts if asked for."""
        if self.result is None:
            return None
        found = self.result.finish()
        found = split_rows(found, self.counts) if self.as_list else found
        return (found, self.counts) if self.with_counts else found


class _GatherUneven(SizedCall):
    taken: InputArray

    def run(self, running: RunningCall) -> None:
        rows, row = _rows(self.taken)
        self.counts = running.tell_numbers(rows)[:, 0].tolist()
        is_rooted = self.request.kind is Kind.GATHER_UNEVEN
        if not is_rooted or self.request.is_root:
            self.make_room(running, row)
        kind = Kind.GATHER if is_rooted else Kind.ALL_GATHER
        self.collective(running, kind, self.taken.buffer, self.counts, row)


@public(AllOptions)
def reduce_scatter_uneven(
    x: Any,
    counts: Sequence[int],
    backend: Group = None,
    op: Op = ReduceOp.SUM,
    **options: Unpack[AllOptions],
) -> Any:
    """Combine the arrays of all ranks; rank i gets ``counts[i]`` rows of the result.

    All ranks pass the same counts, which add up to the rows of ``x``. ``out`` may be this rank's
    part of ``x``.

    Example:
        >>> import numpy as np, ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> run_ranks(2, lambda b: ferrodist.reduce_scatter_uneven(np.arange(3), [1, 2], b))
        [array([0]), array([2, 4])]
    """
    request, out = Request(Kind.REDUCE_SCATTER_UNEVEN, backend, options, op=op), options.get("out")
    taken = take_single(request, x)
    request.check_op(taken, "x")
    rows, row = split_shape(request, taken)
    request.counts = check_sum(request, check_counts(request, counts, "counts"), rows)
    shape = (request.counts[request.backend.rank], *row)
    try:
        result = (
            new_result(taken, shape) if out is None else take_out(request, out, "", taken, shape)
        )
        in_place = is_in_place(request, taken, result, request.counts)
    except InvalidArgument as error:  # another rank, whose part has another size, may accept it
        return request.refuse(error)
    counted = [count * math.prod(row) for count in request.counts]
    args = request.args._replace(counts=counted, in_place=in_place)
    part = Part(Kind.REDUCE_SCATTER, taken.buffer, result.buffer, args)
    call = request.call((leaf_of(taken),))
    dense = DenseCall(call, request.deadline, parts=[part], results=[result])
    dense.rebuild = operator.itemgetter(0)
    return request.execute(dense)


@public(AllOptions)
def all_to_all_uneven(
    x: Any,
    send_counts: Sequence[int],
    backend: Group = None,
    *,
    recv_counts: Sequence[int] | None = None,
    as_list: bool = False,
    **options: Unpack[AllOptions],
) -> Any:
    """Send ``send_counts[i]`` rows of ``x`` to rank i; return what came, and the rows from each.

    The counts of all ranks are exchanged and checked before data moves; ``recv_counts``, if given,
    must be what the others send. ``as_list`` gives what came as a list of parts, one per rank. With
    ``async_op`` the pair is the result of the Work.

    Example:
        >>> import numpy as np, ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def swap(backend):
        ...     counts = [0, 2] if backend.rank == 0 else [1, 0]
        ...     return ferrodist.all_to_all_uneven(np.arange(sum(counts)), counts, backend)
        >>> run_ranks(2, swap)
        [(array([0]), [0, 1]), (array([0, 1]), [2, 0])]
    """
    request, out = Request(Kind.ALL_TO_ALL_UNEVEN, backend, options), options.get("out")
    taken = take_single(request, x)
    sends = check_counts(request, send_counts, "send_counts")
    check_sum(request, sends, _rows(taken)[0], "send_counts")
    call = request.call((leaf_of(taken),), compared=(_row_of(taken),))
    exchange = _AllToAllUneven(call, request.deadline, request, taken, out, as_list=as_list)
    exchange.sends, exchange.with_counts = sends, True
    if recv_counts is not None:
        exchange.expects = check_counts(request, recv_counts, "recv_counts")
    return request.execute(exchange)


class _AllToAllUneven(SizedCall):
    taken: InputArray
    sends: list[int]
    expects: list[int] | None = None

    def run(self, running: RunningCall) -> None:
        row, world = _rows(self.taken)[1], len(self.sends)
        expects = self.expects or [-1] * world  # where anything is welcome
        table = running.tell_numbers(*self.sends, *expects)
        counts, expected = table[:, :world], table[:, world:]
        _check_expected(running, counts, expected)
        self.counts = counts[:, self.request.backend.rank].tolist()
        self.make_room(running, row)
        self.collective(running, Kind.ALL_TO_ALL, self.taken.buffer, counts, row)


def _rows(taken: InputArray) -> tuple[int, tuple[int, ...]]:
    """Split a shape into rows and the shape of a row; a number is one row."""
    shape = taken.buffer.shape
    return (shape[0], shape[1:]) if shape else (1, ())


def _row_of(taken: InputArray) -> Leaf:
    """Describe what must be alike on all ranks."""
    return Leaf("", taken.buffer.dtype, _rows(taken)[1])


def split_shape(request: Request, taken: InputArray) -> tuple[int, tuple[int, ...]]:
    """Split the shape of an array that is to be cut; a number has nothing to cut."""
    if not taken.buffer.shape:
        text = "x is a number or has no axes, and cannot be cut into rows"
        raise request.refusal(InvalidShape, text)
    return _rows(taken)


def check_counts(request: Request, counts: Sequence[int], name: str) -> list[int]:
    """Read the rows of each rank."""
    world = request.backend.world_size
    try:
        numbers = [operator.index(count) for count in counts]
    except TypeError as error:
        text = f"{name} must be integers, got {counts!r}"
        raise request.refusal(InvalidArgument, text) from error
    if len(numbers) != world or not all(0 <= number < _MANY for number in numbers):
        text = f"{name} must be {world} numbers >= 0, one per rank, got {numbers}"
        raise request.refusal(InvalidArgument, text, expected=world, got=len(numbers))
    return numbers


def check_sum(request: Request, counts: list[int], rows: int, name: str = "counts") -> list[int]:
    """Refuse counts that do not add up to the rows of ``x``, with that of each rank."""
    if sum(counts) != rows:
        shown = [f"rank {rank}: {count}" for rank, count in enumerate(counts[:_SHOWN_COUNTS])]
        shown += ["..."] if len(counts) > _SHOWN_COUNTS else []
        total = sum(counts)
        text = f"{name} add up to {total} ({', '.join(shown)}), but x has {rows} rows"
        raise request.refusal(InvalidArgument, text, expected=rows, got=total)
    return counts


def _check_expected(running: RunningCall, counts: Any, expected: Any) -> None:
    """Every rank sees the same table, so every rank comes to the same answer."""
    wrong = np.argwhere((expected >= 0) & (expected != counts.T))
    if len(wrong):
        receiver, sender = wrong[0].tolist()
        raise running.mismatch(
            SizeMismatch,
            f"rank {receiver} expects {expected[receiver, sender]} rows from rank {sender}, "
            f"which sends {counts[sender, receiver]}",
        )
