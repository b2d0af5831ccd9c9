# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which collectives Gloo and NCCL do as we promise, and how they are called; schedules do the rest.

They are not used where they promise less. Gloo adds 16-bit floats in 16 bits, drops a NaN in MIN
and MAX or keeps it, depending on its rank, counts True + True as 2, and knows no int16, uint16,
uint32, uint64 nor products of complex numbers; both choose the order of a reduction themselves.
Tensors that come here are contiguous: of strided ones Gloo reads other memory (pytorch#192920).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from ferrodist import _native
from ferrodist.backends.running_call import CollectiveArgs
from ferrodist.backends.torch_messages import FOREVER, tensor_over, torch
from ferrodist.buffer import Buffer, DeviceBuffer, DType
from ferrodist.call import Kind
from ferrodist.reduce_op import ReduceOp

_c10d = torch.distributed.distributed_c10d
_Op = torch.distributed.ReduceOp

# What each dtype is to the engine: for sums and products of integers, the sign makes no difference.
_AS_INTEGERS = {
    DType.INT8: torch.int8,
    DType.UINT8: torch.uint8,
    DType.INT32: torch.int32,
    DType.INT64: torch.int64,
}
_SAME_BITS = {DType.UINT32: torch.int32, DType.UINT64: torch.int64}
_AS_FLOATS = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT64: torch.float64,
    DType.COMPLEX64: torch.float32,
    DType.COMPLEX128: torch.float64,
}
_AS_HALVES = {DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16}
_SUMS = {ReduceOp.SUM: _Op.SUM, ReduceOp.PROD: _Op.PRODUCT}
_EXTREMES = {ReduceOp.MIN: _Op.MIN, ReduceOp.MAX: _Op.MAX}
_BITS = {ReduceOp.BAND: _Op.BAND, ReduceOp.BOR: _Op.BOR, ReduceOp.BXOR: _Op.BXOR}
_BOOLS = {  # the bytes are 0 and 1
    ReduceOp.SUM: _Op.MAX,
    ReduceOp.PROD: _Op.MIN,
    ReduceOp.MIN: _Op.MIN,
    ReduceOp.MAX: _Op.MAX,
    ReduceOp.BAND: _Op.MIN,
    ReduceOp.BOR: _Op.MAX,
    ReduceOp.BXOR: _Op.BXOR,
    ReduceOp.LAND: _Op.MIN,
    ReduceOp.LOR: _Op.MAX,
    ReduceOp.LXOR: _Op.BXOR,
}
_MOVES = (
    Kind.BROADCAST,
    Kind.ALL_GATHER,
    Kind.GATHER,
    Kind.SCATTER,
    Kind.ALL_TO_ALL,
    Kind.BARRIER,
)
_REDUCTIONS = (Kind.ALLREDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER)


class Reduction(NamedTuple):
    """How an engine reduces a dtype: as which dtype of torch's, by which operation."""

    dtype: Any
    op: Any


@lru_cache(maxsize=1024)
def find_reduction(
    dtype: DType, op: ReduceOp | None, in_order: bool, world: int, on_device: bool
) -> Reduction | None:
    """Return how the engine gives what we promise; None if it does not.

    ``on_device`` is NCCL, which has no bit operations, and adds 16-bit floats as torch users know.
    """
    if op is None:
        return None
    if dtype is DType.BOOL and op in _BOOLS:
        found = _BOOLS[op]
        return None if on_device and found is _Op.BXOR else Reduction(torch.uint8, found)
    if op in _BITS and dtype.is_integer and not on_device:
        return Reduction(torch.uint8, _BITS[op])
    if dtype in _AS_INTEGERS and op in _SUMS | _EXTREMES:
        return Reduction(_AS_INTEGERS[dtype], (_SUMS | _EXTREMES)[op])
    if dtype in _SAME_BITS and op in _SUMS:
        return Reduction(_SAME_BITS[dtype], _SUMS[op])
    if in_order and world > 2:
        return None
    known = _AS_FLOATS | _AS_HALVES if on_device else _AS_FLOATS
    if dtype not in known or not (op in _SUMS or op is ReduceOp.MEAN):
        return None
    if dtype.is_complex and op is ReduceOp.PROD:
        return None
    return Reduction(known[dtype], _SUMS.get(op, _Op.SUM))


class EngineCall(NamedTuple):
    """A call that was started: the Work of torch, and what to do when it is done."""

    work: Any  # None if there is nothing to wait for
    finish: Callable[[], object] | None = None
    stream: Any = None  # of the device; what is done there is done for those who use the stream


class Caller:
    """Starts the collectives of one process group of torch's, on flat tensors.

    ``device`` is where its tensors are: NCCL's are on "cuda".
    """

    def __init__(self, process_group: Any, rank: int, world: int, device: str) -> None:
        self._group, self._rank, self._world = process_group, rank, world
        self._on_device = device != "cpu"
        self._methods: dict[Kind, Callable[..., EngineCall]] = {
            Kind.ALLREDUCE: self._allreduce,
            Kind.REDUCE: self._reduce,
            Kind.REDUCE_SCATTER: self._reduce_scatter,
            Kind.BROADCAST: self._broadcast,
            Kind.ALL_GATHER: self._all_gather,
            Kind.GATHER: self._gather,
            Kind.SCATTER: self._scatter,
            Kind.ALL_TO_ALL: self._all_to_all,
        }

    def does(self, kind: Kind, dtype: DType, args: CollectiveArgs) -> bool:
        """Tell whether the engine gives what we promise; all ranks come to one answer."""
        if kind in _REDUCTIONS and args.counts is None:
            how = find_reduction(dtype, args.op, args.in_order, self._world, self._on_device)
            return how is not None
        return kind in _MOVES and (args.counts is None or kind is Kind.ALL_TO_ALL)

    def start(
        self, kind: Kind, input: Buffer | None, output: Buffer | None, args: CollectiveArgs
    ) -> EngineCall | None:
        """Start a collective; None if the engine has none that gives what we promise."""
        if kind is Kind.BARRIER:
            return EngineCall(self._group.barrier(_options("Barrier")))
        sample = input if input is not None else output
        assert sample is not None, "every rank has a buffer"
        if not self.does(kind, sample.dtype, args):
            return None
        if not sample.count and args.counts is None:
            return EngineCall(None)
        if kind not in _REDUCTIONS:
            if args.counts is not None:
                args = args._replace(counts=_nbytes(args.counts, sample.dtype.itemsize))
            return self._methods[kind](_flat(input), _flat(output), args)
        how = find_reduction(sample.dtype, args.op, args.in_order, self._world, self._on_device)
        assert how is not None
        given, result = _flat(input, how.dtype), _flat(output, how.dtype)
        started = self._methods[kind](given, result, how, args)
        if args.op is not ReduceOp.MEAN or output is None:
            return started
        return EngineCall(started.work, partial(self._make_mean, started.finish, output, result))

    # -- reductions -----------------------------------------------------------------------------

    def _allreduce(
        self, given: Any, result: Any, how: Reduction, args: CollectiveArgs
    ) -> EngineCall:
        if not args.in_place:
            result.copy_(given)
        return EngineCall(self._group.allreduce([result], _options("Allreduce", reduceOp=how.op)))

    def _reduce(self, given: Any, result: Any, how: Reduction, args: CollectiveArgs) -> EngineCall:
        if result is None or not args.in_place:
            # Where there is no result, partial ones would be left in what was given.
            result = given.clone() if result is None else result.copy_(given)
        options = _options("Reduce", reduceOp=how.op, rootRank=args.root)
        return EngineCall(self._group.reduce([result], options))

    def _reduce_scatter(
        self, given: Any, result: Any, how: Reduction, args: CollectiveArgs
    ) -> EngineCall:
        if self._on_device:
            given = given.clone() if args.in_place else given
            options = _options("ReduceScatter", reduceOp=how.op)
            return EngineCall(self._group._reduce_scatter_base(result, given, options))
        # Gloo's own is this, and cannot be polled.
        whole = given.clone()
        work = self._group.allreduce([whole], _options("Allreduce", reduceOp=how.op))
        return EngineCall(work, partial(_copy_part, result, whole, self._rank))

    def _make_mean(self, finish: Callable[[], object] | None, output: Buffer, result: Any) -> None:
        """Divide the sum: exactly, also where torch would multiply with the reciprocal."""
        if finish is not None:
            finish()
        if len(output.memory):
            memory = output.memory
            _native.local_reduce(output.dtype, ReduceOp.MEAN, memory, [memory], self._world)
        else:
            result.div_(torch.full((), self._world, dtype=result.dtype, device=result.device))

    # -- moves ----------------------------------------------------------------------------------

    def _broadcast(self, given: Any, result: Any, args: CollectiveArgs) -> EngineCall:
        options = _options("Broadcast", rootRank=args.root)
        if self._rank != args.root or args.in_place:
            return EngineCall(self._group.broadcast([result], options))
        work = self._group.broadcast([given], options)
        result.copy_(given)
        return EngineCall(work)

    def _all_gather(self, given: Any, result: Any, args: CollectiveArgs) -> EngineCall:
        given = given.clone() if args.in_place else given
        return EngineCall(self._group._allgather_base(result, given, _options("Allgather")))

    def _gather(self, given: Any, result: Any, args: CollectiveArgs) -> EngineCall:
        given = given.clone() if args.in_place else given
        parts = [] if result is None else [list(result.chunk(self._world))]
        return EngineCall(
            self._group.gather(parts, [given], _options("Gather", rootRank=args.root))
        )

    def _scatter(self, given: Any, result: Any, args: CollectiveArgs) -> EngineCall:
        parts = []
        if self._rank == args.root:
            given = given.clone() if args.in_place else given
            parts = [list(given.chunk(self._world))]
        options = _options("Scatter", rootRank=args.root)
        return EngineCall(self._group.scatter([result], parts, options))

    def _all_to_all(self, given: Any, result: Any, args: CollectiveArgs) -> EngineCall:
        given = given.clone() if args.in_place else given
        sent: list[int] = []
        received: list[int] = []
        if args.counts is not None:
            rows: Any = args.counts
            sent = list(rows[self._rank])
            received = [row[self._rank] for row in rows]
        work = self._group.alltoall_base(result, given, received, sent, _options("AllToAll"))
        return EngineCall(work)


class Exchange:
    """A minimum over all ranks of a few 64-bit numbers, in half the time of Gloo's allreduce.

    Every rank sends its numbers to all at once, where that goes around a ring twice.
    """

    def __init__(self, process_group: Any, world: int, count: int) -> None:
        self._group, self._options = process_group, _options("AllToAll")
        self._sent, self._received = (np.empty((world, count), np.int64) for _ in range(2))
        self._tensors = [torch.from_numpy(one) for one in (self._received, self._sent)]

    def start(self, words: memoryview) -> EngineCall:
        """Start to replace each number by the least that any rank passes."""
        numbers = np.frombuffer(words, np.int64)
        self._sent[:] = numbers
        work = self._group.alltoall_base(*self._tensors, [], [], self._options)
        return EngineCall(work, partial(self._received.min, axis=0, out=numbers))


def _options(name: str, **values: Any) -> Any:
    made = getattr(_c10d, f"{name}Options")()
    made.timeout = FOREVER  # deadlines are ours
    for key, value in values.items():
        setattr(made, key, value)
    return made


def _flat(buffer: Buffer | None, dtype: Any = None) -> Any:
    """View a buffer as a flat tensor, of bytes if no dtype is given."""
    if buffer is None:
        return None
    if isinstance(buffer, DeviceBuffer):
        tensor: Any = buffer.owner.reshape(-1).view(torch.uint8)
    else:
        tensor = tensor_over(buffer.memory)
    return tensor if dtype is None else tensor.view(dtype)


def _nbytes(counts: Any, itemsize: int) -> list[list[int]]:
    return [[count * itemsize for count in row] for row in counts]


def _copy_part(result: Any, whole: Any, rank: int) -> None:
    size = result.numel()
    result.copy_(whole[rank * size : (rank + 1) * size])
