# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which collectives MPI does as we promise, and how they are called; the rest is by schedules.

MPI is not used where it promises less: 16-bit floats it can only move, MIN and MAX of floats may
drop a NaN, a product of complex numbers may follow another formula, sums of 8- and 16-bit integers
end at the largest number instead of wrapping (Open MPI 5), and it chooses the order of a reduction
itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from ferrodist import _native
from ferrodist.backends.executor import lengths_of
from ferrodist.backends.running_call import CollectiveArgs
from ferrodist.buffer import Buffer, DType
from ferrodist.call import Kind
from ferrodist.errors import BackendUnavailable
from ferrodist.reduce_op import ReduceOp

try:
    from mpi4py import MPI as MPI
except ModuleNotFoundError:
    raise  # the registry says what to install
except (ImportError, RuntimeError) as _error:  # there is no MPI library to load
    _why = (str(_error).splitlines() or ["?"])[0]
    raise BackendUnavailable(
        f"backend 'mpi' needs mpi4py 4 and an MPI ({_why}): pip install 'ferrodist[mpi]' mpich"
    ) from _error

if not hasattr(MPI, "ERR_PROC_FAILED"):
    import mpi4py

    raise BackendUnavailable(
        f"backend 'mpi' needs mpi4py 4, found {mpi4py.__version__}: pip install 'mpi4py>=4'"
    )

LARGEST_COUNT = (1 << 31) - 1
"""The most elements of one call: not every MPI can take more."""

_MOVED = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}
_REDUCED = {
    DType.BOOL: MPI.UINT8_T,
    DType.INT8: MPI.INT8_T,
    DType.INT16: MPI.INT16_T,
    DType.INT32: MPI.INT32_T,
    DType.INT64: MPI.INT64_T,
    DType.UINT8: MPI.UINT8_T,
    DType.UINT16: MPI.UINT16_T,
    DType.UINT32: MPI.UINT32_T,
    DType.UINT64: MPI.UINT64_T,
    DType.FLOAT32: MPI.FLOAT,
    DType.FLOAT64: MPI.DOUBLE,
    DType.COMPLEX64: MPI.C_FLOAT_COMPLEX,
    DType.COMPLEX128: MPI.C_DOUBLE_COMPLEX,
}
_AUTOMATIC = _REDUCED.keys() - {DType.BOOL}
"""The dtypes of which mpi4py itself knows what they are called in MPI."""

_INTEGER_OPS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.PROD: MPI.PROD,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.BAND: MPI.BAND,
    ReduceOp.BOR: MPI.BOR,
    ReduceOp.BXOR: MPI.BXOR,
    ReduceOp.LAND: MPI.LAND,
    ReduceOp.LOR: MPI.LOR,
    ReduceOp.LXOR: MPI.LXOR,
}
_BOOL_OPS = {  # the bytes are 0 and 1
    ReduceOp.SUM: MPI.LOR,
    ReduceOp.PROD: MPI.LAND,
    ReduceOp.MIN: MPI.LAND,
    ReduceOp.MAX: MPI.LOR,
    ReduceOp.BAND: MPI.LAND,
    ReduceOp.BOR: MPI.LOR,
    ReduceOp.BXOR: MPI.LXOR,
    ReduceOp.LAND: MPI.LAND,
    ReduceOp.LOR: MPI.LOR,
    ReduceOp.LXOR: MPI.LXOR,
}
_FLOAT_OPS = {ReduceOp.SUM: MPI.SUM, ReduceOp.MEAN: MPI.SUM, ReduceOp.PROD: MPI.PROD}
_COMPLEX_OPS = {ReduceOp.SUM: MPI.SUM, ReduceOp.MEAN: MPI.SUM}


class Plan(NamedTuple):
    """Methods of a communicator with their arguments, and what to do when all are done."""

    parts: list[tuple[str, tuple[Any, ...]]]
    finish: Callable[[], None] | None = None


@lru_cache(maxsize=1024)
def find_op(kind: Kind, dtype: DType, op: ReduceOp | None, in_order: bool, world: int) -> Any:
    """Return MPI's operation if it gives what we promise, else None."""
    if op is None or dtype not in _REDUCED:
        return None
    if kind.is_prefix and op is ReduceOp.MEAN:
        return None  # which is refused
    if op.is_logical and (kind.is_prefix or world == 1):
        return None  # where an input is the result as it is, it would not become 0 or 1
    if dtype is DType.BOOL:
        return _BOOL_OPS.get(op)
    if dtype.is_integer:
        is_clipped = op is ReduceOp.SUM and dtype.itemsize <= 2
        return None if is_clipped else _INTEGER_OPS.get(op)
    if in_order and world > 2:
        return None
    return (_COMPLEX_OPS if dtype.is_complex else _FLOAT_OPS).get(op)


def does(kind: Kind, dtype: DType, args: CollectiveArgs, world: int) -> bool:
    """Tell whether MPI does a collective as we promise, at any size that it can take at once."""
    if not kind.is_reduction:
        return True
    return find_op(kind, dtype, args.op, args.in_order, world) is not None


def plan_call(
    kind: Kind,
    input: Buffer | None,
    output: Buffer | None,
    args: CollectiveArgs,
    rank: int,
    world: int,
) -> Plan | None:
    """Say how MPI does a collective; None if a schedule has to. All ranks come to one answer."""
    sample = input if input is not None else output
    assert sample is not None, "every rank has a buffer"
    if not does(kind, sample.dtype, args, world):
        return None
    op = find_op(kind, sample.dtype, args.op, args.in_order, world)
    if kind.is_cut_by_rank:
        return _by_rank(kind, input, output, args, op, rank, world)
    return _elementwise(kind, input, output, args, op, rank, world)


def bind(
    kind: Kind, dtype: DType, shape: tuple[int, ...], args: CollectiveArgs, rank: int, world: int
) -> Callable[[Any, Any, bool], Plan] | None:
    """Say how MPI does a common collective on NumPy arrays ``(x, out, in_place)``, else None."""
    if math.prod(shape) > LARGEST_COUNT or dtype not in _AUTOMATIC or args.op is ReduceOp.MEAN:
        return None
    if kind is Kind.ALLREDUCE:
        op = find_op(kind, dtype, args.op, args.in_order, world)
        return lambda x, out, in_place: Plan(
            [("Iallreduce", (MPI.IN_PLACE if in_place else x, out, op))]
        )
    if kind is not Kind.BROADCAST:
        return None
    if rank != args.root:
        return lambda x, out, in_place: Plan([("Ibcast", (out, args.root))])

    def send(x: Any, out: Any, in_place: bool) -> Plan:
        copy = None if in_place else partial(np.copyto, out, x)
        return Plan([("Ibcast", (x, args.root))], copy)

    return send


def _elementwise(
    kind: Kind,
    input: Buffer | None,
    output: Buffer | None,
    args: CollectiveArgs,
    op: Any,
    rank: int,
    world: int,
) -> Plan:
    """Cut an array into calls that fit; they are independent of each other."""
    if kind is Kind.EXSCAN and output is None:  # MPI may use it all the same
        assert input is not None
        output = Buffer.empty(input.dtype, input.shape)
    sends = _pieces(input, kind)
    receives = _pieces(output, kind)
    finish = _mean(args, output, world)
    if kind is Kind.BROADCAST:
        is_root = rank == args.root
        if is_root and not args.in_place:
            finish = partial(_copy, output, input)
        pieces = sends if is_root else receives
        return Plan([("Ibcast", (piece, args.root)) for piece in pieces], finish)
    if args.in_place and output is not None and kind is not Kind.EXSCAN:
        sends = [MPI.IN_PLACE] * len(receives)
    elif args.in_place:
        sends = _pieces(None if input is None else input.copy(), kind)
    if kind is Kind.REDUCE:
        root = args.root
        if rank != root:
            return Plan([("Ireduce", (one, None, op, root)) for one in sends])
        pairs = zip(sends, receives, strict=True)
        return Plan([("Ireduce", (a, b, op, root)) for a, b in pairs], finish)
    name = {Kind.ALLREDUCE: "Iallreduce", Kind.SCAN: "Iscan", Kind.EXSCAN: "Iexscan"}[kind]
    pairs = zip(sends, receives, strict=True)
    return Plan([(name, (a, b, op)) for a, b in pairs], finish)


def _by_rank(
    kind: Kind,
    input: Buffer | None,
    output: Buffer | None,
    args: CollectiveArgs,
    op: Any,
    rank: int,
    world: int,
) -> Plan | None:
    """Make the one call of a collective whose array has a block for each rank."""
    counts = args.counts
    if _total(kind, input, output, counts, world) > LARGEST_COUNT:
        return None
    if args.in_place and kind is Kind.ALL_GATHER and counts is None:
        return Plan([("Iallgather", (MPI.IN_PLACE, _spec(output, kind)))])
    if args.in_place and input is not None:
        input = input.copy()
    sent, got = _spec(input, kind), _spec(output, kind)
    if kind is Kind.REDUCE_SCATTER:
        finish = _mean(args, output, world)
        if counts is None:
            return Plan([("Ireduce_scatter_block", (sent, got, op))], finish)
        return Plan([("Ireduce_scatter", (sent, got, list(counts), op))], finish)
    v = "" if counts is None else "v"
    if kind is Kind.ALL_TO_ALL:
        if counts is not None:
            rows: Any = counts
            sent = _with_counts(sent, rows[rank])
            got = _with_counts(got, [row[rank] for row in rows])
        return Plan([(f"Ialltoall{v}", (sent, got))])
    if kind is Kind.ALL_GATHER:
        return Plan([(f"Iallgather{v}", (sent, _with_counts(got, counts)))])
    if kind is Kind.GATHER:
        received = _with_counts(got, counts) if rank == args.root else None
        return Plan([(f"Igather{v}", (sent, received, args.root))])
    given = _with_counts(sent, counts) if rank == args.root else None
    return Plan([(f"Iscatter{v}", (given, got, args.root))])


def _total(kind: Kind, input: Buffer | None, output: Buffer | None, counts: Any, world: int) -> int:
    """Count the elements of all blocks, as every rank does."""
    if counts is not None:
        rows = counts if kind is Kind.ALL_TO_ALL else [counts]
        return sum(map(sum, rows))
    return lengths_of(kind, 0, world, input, output, None).count


def _type(buffer: Buffer, kind: Kind) -> Any:
    return _REDUCED[buffer.dtype] if kind.is_reduction else _MOVED[buffer.dtype.itemsize]


def _spec(buffer: Buffer | None, kind: Kind) -> list[Any] | None:
    return None if buffer is None else [buffer.memory, _type(buffer, kind)]


def _with_counts(spec: list[Any] | None, counts: Any) -> list[Any] | None:
    return spec if spec is None or counts is None else [spec[0], list(counts), spec[1]]


def _pieces(buffer: Buffer | None, kind: Kind) -> list[Any]:
    """Cut an array; nothing is left of an empty one."""
    if buffer is None:
        return []
    size = LARGEST_COUNT * buffer.dtype.itemsize
    return [[part, _type(buffer, kind)] for part in _cut(buffer.memory, size)]


def _cut(memory: memoryview, size: int) -> Iterator[memoryview]:
    for begin in range(0, len(memory), size):
        yield memory[begin : begin + size]


def _mean(args: CollectiveArgs, output: Buffer | None, world: int) -> Callable[[], None] | None:
    """Return what makes a mean of the sum."""
    if args.op is not ReduceOp.MEAN or output is None or not output.nbytes:
        return None
    memory = output.memory
    return partial(_native.local_reduce, output.dtype, ReduceOp.MEAN, memory, [memory], world)


def _copy(into: Buffer | None, source: Buffer | None) -> None:
    assert into is not None
    assert source is not None
    into.memory[:] = source.memory
