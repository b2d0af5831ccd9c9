# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which collectives Gloo and NCCL do as we promise, and how they are called; schedules do the rest.

They are not used where they promise less. Gloo adds 16-bit floats in 16 bits, drops a NaN in MIN
and MAX or keeps it, depending on its rank, counts True + True as 2, and knows no int16, uint16,
uint32, uint64 nor products of complex numbers; both choose the order of a reduction themselves.
Tensors that come here are contiguous: of strided ones Gloo reads other memory (pytorch#192920).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch as torch
import torch.distributed

from ferrodist import _native
from ferrodist.backends.engines.engine import EngineFailure
from ferrodist.backends.running_call import CollectiveArgs
from ferrodist.buffer import Buffer, DeviceBuffer, DType
from ferrodist.call import Kind
from ferrodist.reduce_op import ReduceOp

FOREVER = timedelta(days=3650)
"""A timeout of torch's that never passes: its own would close the connections."""

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
)
_REDUCTIONS = (Kind.ALLREDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER)


class Reduction(NamedTuple):
    """How an engine reduces a dtype: as which dtype of torch, with which operation."""

    dtype: Any
    op: Any


@lru_cache(maxsize=1024)
def find_reduction(
    dtype: DType, op: ReduceOp | None, in_order: bool, world: int, on_device: bool
) -> Reduction | None:
    """Return how the engine computes what we promise; None if it does not.

    ``on_device`` means NCCL, which has no bit operations and adds 16-bit floats in 16 bits.
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


@dataclass(slots=True, eq=False)
class Started:
    """A collective that torch has started: its Work, and what is left to do after it."""

    work: Any  # None if there is nothing to wait for
    then: Callable[[], object] | None = None
    device_stream: AbstractContextManager[Any] | None = None  # which waits, not the program
    hang_up: Callable[[], None] | None = None  # ends all calls of a group that is ferrodist's own

    def wait(self, seconds: float) -> bool:
        """Wait for some seconds; tell whether it is done."""
        if self.work is None:
            return True
        try:
            if self.device_stream is None:
                self.work.wait(timedelta(seconds=seconds))
            else:
                with self.device_stream:
                    self.work.wait()
        except RuntimeError:  # time is up, or it has failed: torch has no narrower class
            if not self.work.is_completed():
                return False
            try:
                self.work.wait()
            except RuntimeError as error:
                raise EngineFailure(str(error)) from error
        return True

    def finish(self) -> None:
        """Do what is left when it is done."""
        if self.then is not None:
            with self.device_stream or nullcontext():
                self.then()

    def abandon(self) -> None:
        """Give it up; torch would else wait for it at the end of the program."""
        if self.hang_up is not None:
            self.hang_up()


class Caller:
    """Starts the collectives of one process group of torch, on flat tensors.

    ``on_device`` means NCCL, whose tensors are on GPUs.
    """

    def __init__(
        self, process_group: Any, rank: int, world: int, *, on_device: bool, is_own: bool = True
    ) -> None:
        self.group, self._rank, self._world = process_group, rank, world
        self._on_device, self.is_own = on_device, is_own

    def does(self, kind: Kind, dtype: DType, args: CollectiveArgs) -> bool:
        """Tell whether the engine meets our guarantees; the answer is the same on all ranks."""
        if args.algorithm is not None:
            return False
        if kind in _REDUCTIONS and args.counts is None:
            return self._find(kind, dtype, args) is not None
        return kind in _MOVES and (args.counts is None or kind is Kind.ALL_TO_ALL)

    def bind(
        self, kind: Kind, dtype: DType, shape: tuple[int, ...], args: CollectiveArgs
    ) -> Callable[[Any, Any, bool], Started]:
        """Return a function that starts this collective on NumPy arrays."""
        how = self._find(kind, dtype, args)
        seen = np.dtype("uint8" if how is None else str(how.dtype).removeprefix("torch."))
        in_place_args = args._replace(in_place=True)

        def start(x: Any, out: Any, in_place: bool) -> Started:
            given = _tensor_of(x, seen)
            if in_place:
                return self._start(kind, dtype, given, given, how, in_place_args)
            return self._start(kind, dtype, given, _tensor_of(out, seen), how, args)

        return start

    def prepare(
        self, kind: Kind, input: Buffer | None, output: Buffer | None, args: CollectiveArgs
    ) -> Callable[[], Started] | None:
        """Return what starts a collective on buffers; None if schedules do it."""
        sample = input if input is not None else output
        assert sample is not None, "every rank has a buffer"
        if not self.does(kind, sample.dtype, args):
            return None
        if not sample.count and args.counts is None:
            return lambda: Started(None)
        if args.counts is not None:
            args = args._replace(counts=_nbytes(args.counts, sample.dtype.itemsize))
        how = self._find(kind, sample.dtype, args)
        seen = torch.uint8 if how is None else how.dtype
        stream = getattr(sample, "stream", None)

        def start() -> Started:
            given, result = _flat(input, seen), _flat(output, seen)
            return self._start(kind, sample.dtype, given, result, how, args, stream)

        return start

    def _find(self, kind: Kind, dtype: DType, args: CollectiveArgs) -> Reduction | None:
        if kind not in _REDUCTIONS:
            return None
        return find_reduction(dtype, args.op, args.in_order, self._world, self._on_device)

    def _start(
        self,
        kind: Kind,
        dtype: DType,
        given: Any,
        result: Any,
        how: Reduction | None,
        args: CollectiveArgs,
        stream: Any = None,
    ) -> Started:
        current = nullcontext() if stream is None else torch.cuda.stream(stream)
        with current:
            try:
                started = _METHODS[kind](self, given, result, how, args)
            except RuntimeError as error:  # torch has no narrower class
                raise EngineFailure(str(error)) from error
        if args.op is ReduceOp.MEAN and result is not None:
            started.then = partial(self._make_mean, started.then, dtype, result)
        if self._on_device:
            started.device_stream = current
        elif self.is_own:
            started.hang_up = self.hang_up
        return started

    def hang_up(self) -> None:
        """Close the connections of a Gloo group, so that all that waits in it ends.

        Gloo has no call for that, but a receive that times out does it.
        """
        nothing = torch.empty(1, dtype=torch.uint8)
        for peer in range(self._world):
            if peer != self._rank:  # one whose process is gone raises at once, and closes nothing
                with suppress(RuntimeError):
                    self.group.recv([nothing], peer, 0).wait(timedelta(milliseconds=1))

    # -- reductions -----------------------------------------------------------------------------

    def _allreduce(self, given: Any, result: Any, how: Any, args: CollectiveArgs) -> Started:
        if not args.in_place:
            result.copy_(given)
        return Started(self.group.allreduce([result], _options("Allreduce", reduceOp=how.op)))

    def _reduce(self, given: Any, result: Any, how: Any, args: CollectiveArgs) -> Started:
        if result is None or not args.in_place:
            # Where there is no result, partial ones would be left in what was given.
            result = given.clone() if result is None else result.copy_(given)
        options = _options("Reduce", reduceOp=how.op, rootRank=args.root)
        return Started(self.group.reduce([result], options))

    def _reduce_scatter(self, given: Any, result: Any, how: Any, args: CollectiveArgs) -> Started:
        if self._on_device:
            given = given.clone() if args.in_place else given
            options = _options("ReduceScatter", reduceOp=how.op)
            return Started(self.group._reduce_scatter_base(result, given, options))
        # Gloo's own is this, and cannot be polled.
        whole = given.clone()
        work = self.group.allreduce([whole], _options("Allreduce", reduceOp=how.op))
        return Started(work, partial(_copy_part, result, whole, self._rank))

    def _make_mean(self, finish: Callable[[], object] | None, dtype: DType, result: Any) -> None:
        """Divide the sum: exactly, also where torch would multiply with the reciprocal."""
        if finish is not None:
            finish()
        if self._on_device:
            result.div_(torch.full((), self._world, dtype=result.dtype, device=result.device))
        else:
            memory = result.numpy().reshape(-1).view(np.uint8).data
            _native.local_reduce(dtype, ReduceOp.MEAN, memory, [memory], self._world)

    # -- moves ----------------------------------------------------------------------------------

    def _broadcast(self, given: Any, result: Any, how: None, args: CollectiveArgs) -> Started:
        options = _options("Broadcast", rootRank=args.root)
        if self._rank != args.root or args.in_place:
            return Started(self.group.broadcast([result], options))
        work = self.group.broadcast([given], options)
        result.copy_(given)
        return Started(work)

    def _all_gather(self, given: Any, result: Any, how: None, args: CollectiveArgs) -> Started:
        given = given.clone() if args.in_place else given
        return Started(self.group._allgather_base(result, given, _options("Allgather")))

    def _gather(self, given: Any, result: Any, how: None, args: CollectiveArgs) -> Started:
        given = given.clone() if args.in_place else given
        parts = [] if result is None else [list(result.chunk(self._world))]
        return Started(self.group.gather(parts, [given], _options("Gather", rootRank=args.root)))

    def _scatter(self, given: Any, result: Any, how: None, args: CollectiveArgs) -> Started:
        parts = []
        if self._rank == args.root:
            given = given.clone() if args.in_place else given
            parts = [list(given.chunk(self._world))]
        options = _options("Scatter", rootRank=args.root)
        return Started(self.group.scatter([result], parts, options))

    def _all_to_all(self, given: Any, result: Any, how: None, args: CollectiveArgs) -> Started:
        given = given.clone() if args.in_place else given
        sent: list[int] = []
        received: list[int] = []
        if args.counts is not None:
            rows: Any = args.counts
            sent = list(rows[self._rank])
            received = [row[self._rank] for row in rows]
        work = self.group.alltoall_base(result, given, received, sent, _options("AllToAll"))
        return Started(work)


_METHODS: dict[Kind, Callable[..., Started]] = {
    Kind.ALLREDUCE: Caller._allreduce,
    Kind.REDUCE: Caller._reduce,
    Kind.REDUCE_SCATTER: Caller._reduce_scatter,
    Kind.BROADCAST: Caller._broadcast,
    Kind.ALL_GATHER: Caller._all_gather,
    Kind.GATHER: Caller._gather,
    Kind.SCATTER: Caller._scatter,
    Kind.ALL_TO_ALL: Caller._all_to_all,
}


@lru_cache(maxsize=1024)
def _options(name: str, **values: Any) -> Any:
    made = getattr(_c10d, f"{name}Options")()
    made.timeout = FOREVER  # deadlines are ours
    for key, value in values.items():
        setattr(made, key, value)
    return made


def _flat(buffer: Buffer | None, dtype: Any) -> Any:
    """View a buffer as a flat tensor."""
    if buffer is None:
        return None
    if isinstance(buffer, DeviceBuffer):
        return buffer.owner.reshape(-1).view(torch.uint8).view(dtype)
    return _tensor_of(np.frombuffer(buffer.memory, np.uint8), np.dtype(np.uint8)).view(dtype)


def _tensor_of(array: Any, dtype: np.dtype[Any]) -> Any:
    """View an array as a flat tensor, which keeps it; a read-only one is not to be written."""
    if array is None:
        return None
    flat = array.reshape(-1).view(dtype)
    return torch.from_numpy(flat if flat.flags.writeable else np.asarray(_Unlocked(flat)))


class _Unlocked:
    """A read-only array as torch wants it: it warns of any that could not be written."""

    def __init__(self, array: Any) -> None:
        self._owner, facts = array, array.__array_interface__
        self.__array_interface__ = {**facts, "data": (facts["data"][0], False)}


def _nbytes(counts: Any, itemsize: int) -> list[list[int]]:
    return [[count * itemsize for count in row] for row in counts]


def _copy_part(result: Any, whole: Any, rank: int) -> None:
    size = result.numel()
    result.copy_(whole[rank * size : (rank + 1) * size])
