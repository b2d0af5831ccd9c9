# SPDX-License-Identifier: MIT OR Apache-2.0
"""The collectives in which ranks may pass different sizes: these are told round before data moves.

Fingerprints leave out what may differ; it is checked when it arrives, and a rank that finds it
wrong tells all others, so that the call fails on every rank alike.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack, overload

import numpy as np

from ferrodist.arrays import InputArray, OutputArray, as_input, as_output, new_result, numpy_result
from ferrodist.backends.running_call import (
    Algorithm,
    CollectiveArgs,
    Counts,
    Prepared,
    RunningCall,
)
from ferrodist.buffer import MAX_AXES, Buffer, DType
from ferrodist.call import Kind, Leaf
from ferrodist.collectives.fast_path import SCATTER, fast_path, fast_start
from ferrodist.collectives.methods import hide_mistaken, refuse_keyword
from ferrodist.collectives.plan import (
    Group,
    No,
    Options,
    Request,
    Yes,
    is_in_place,
    leaf_of,
    result_shape,
)
from ferrodist.collectives.refusals import share_refusal, size_of_refusal
from ferrodist.config import DEFAULT, Timeout
from ferrodist.errors import (
    CollectiveMismatch,
    DistributedError,
    InvalidArgument,
    SizeMismatch,
    UnsupportedArray,
)
from ferrodist.work import Work

_MANY = 1 << 62  # no array has so many rows, and the sum of two such counts fits an int64


@overload
def scatter(
    x: Any, backend: Group = None, root: int = ..., *, async_op: Yes, **rest: Unpack[Options]
) -> Work[Any]: ...
@overload
def scatter(
    x: Any, backend: Group = None, root: int = ..., *, async_op: No = ..., **rest: Unpack[Options]
) -> Any: ...
@hide_mistaken
def scatter(
    x: Any,
    backend: Group = None,
    root: int = 0,
    *,
    out: Any = None,
    timeout: Timeout = DEFAULT,
    async_op: bool = False,
    algorithm: Algorithm = None,
    reproducible: bool | None = None,
    **mistaken: Any,
) -> Any:
    """Cut the array of ``root`` along axis 0 and give part r to rank r.

    The other ranks pass None, and get NumPy, or an array of the kind, dtype and shape they want.

    Example:
        >>> import numpy as np, ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> inputs = {0: np.arange(4)}  # the root has it, the others pass None
        >>> run_ranks(2, lambda b: ferrodist.scatter(inputs.get(b.rank), b))
        [array([0, 1]), array([2, 3])]
    """
    if mistaken:
        raise refuse_keyword("scatter", mistaken)
    if timeout is DEFAULT and algorithm is None and reproducible is None:
        done = (fast_start if async_op else fast_path)(SCATTER, backend, x, out, None, root)
        if done is not NotImplemented:
            return done
    request = Request(
        Kind.SCATTER,
        backend,
        root=root,
        timeout=timeout,
        is_async=async_op,
        algorithm=algorithm,
        reproducible=reproducible,
    )
    return request.execute(_prepare_scatter(request, x, out))


@dataclass(slots=True, eq=False)
class _SizedCall(Prepared[Any]):
    """A call that makes room for its result when it knows the size."""

    request: Request
    taken: InputArray | None
    out: Any
    result: OutputArray | None = None

    def finish(self) -> Any:
        assert self.result is not None
        return self.result.finish()


def _prepare_scatter(request: Request, x: Any, out: Any) -> _Scatter:
    taken, part, refused = None, None, None
    try:
        if x is not None or request.is_root:
            taken = as_input(x, "scatter: x")
        if request.is_root:
            assert taken is not None
            part = Leaf("", taken.buffer.dtype, result_shape(request, taken))
            if out is not None:
                is_in_place(request, taken, as_output(out, part.dtype, part.shape))
    except DistributedError as error:
        if not request.is_root:
            raise
        refused = error  # the others wait for their parts: they are told
    call = request.call(() if taken is None else (leaf_of(taken),), compared=())
    return _Scatter(call, request.deadline, request, taken, out, part=part, refused=refused)


@dataclass(slots=True, eq=False)
class _Scatter(_SizedCall):
    part: Leaf | None = None  # known to the root
    refused: BaseException | None = None  # by the root; after the call, what this rank raises

    def run(self, running: RunningCall) -> None:
        request, taken = self.request, self.taken
        numbers = self._tell_part(running, request.args.root)
        if numbers[0] < 0:
            size = int(numbers[0])
            self.refused = share_refusal(running, request.args.root, size, self.refused)
            return
        found = _read_part(numbers)
        self.result = _room_for_part(running, request.args.root, found, taken, self.out)
        source = taken.buffer if request.is_root and taken is not None else None
        running.collective(Kind.SCATTER, source, self.result.buffer, request.args)

    def _tell_part(self, running: RunningCall, root: int) -> np.ndarray[Any, Any]:
        """Tell every rank the dtype and shape of its part, or that there is none."""
        numbers, part = np.zeros(2 + MAX_AXES, np.int64), self.part
        if self.refused is not None:
            numbers[0] = size_of_refusal(self.refused)
        elif part is not None:
            numbers[: 2 + len(part.shape)] = (part.dtype, len(part.shape), *part.shape)
        buffer = as_buffer(numbers)
        args = CollectiveArgs(root=root, in_place=True)
        running.collective(Kind.BROADCAST, buffer, buffer, args)
        return numbers

    def finish(self) -> Any:
        if self.refused is not None:
            raise self.refused
        return _SizedCall.finish(self)


def _read_part(numbers: np.ndarray[Any, Any]) -> Leaf:
    dtype, axes = DType(int(numbers[0])), int(numbers[1])
    return Leaf("", dtype, tuple(int(length) for length in numbers[2 : 2 + axes]))


def refuse_part(
    running: RunningCall, root: int, told: bytes, x: Any, out: Any
) -> BaseException | None:
    """Tell all ranks that what this one passed on the fast path does not fit its part.

    If it is the root that refuses, return what to raise after the call.
    """
    numbers = np.frombuffer(told, np.int64)
    if numbers[0] < 0:
        return share_refusal(running, root, int(numbers[0]), None)
    found = _read_part(numbers)
    taken = None if x is None else as_input(x, "scatter: x")
    _room_for_part(running, root, found, taken, out)
    return None


def _room_for_part(
    running: RunningCall, root: int, found: Leaf, taken: InputArray | None, out: Any
) -> OutputArray:
    rank = running.backend.rank
    if taken is not None and rank != root and leaf_of(taken) != found:
        same_dtype = taken.buffer.dtype is found.dtype
        raise running.mismatch(
            SizeMismatch if same_dtype else CollectiveMismatch,
            f"rank {rank} passed {leaf_of(taken)}, its part of the array of rank {root} is {found}",
        )
    try:
        if out is not None:
            return as_output(out, found.dtype, found.shape)
        return (
            numpy_result(found.dtype, found.shape)
            if taken is None
            else new_result(taken, found.shape)
        )
    except (InvalidArgument, UnsupportedArray) as error:
        text = f"rank {rank}: {error}"
        raise running.mismatch(CollectiveMismatch, text) from error


@overload
def all_gather_uneven(
    x: Any, backend: Group = None, *, async_op: Yes, **rest: Unpack[Options]
) -> Work[Any]: ...
@overload
def all_gather_uneven(
    x: Any, backend: Group = None, *, async_op: No = ..., **rest: Unpack[Options]
) -> Any: ...
@hide_mistaken
def all_gather_uneven(
    x: Any,
    backend: Group = None,
    *,
    out: Any = None,
    timeout: Timeout = DEFAULT,
    async_op: bool = False,
    algorithm: Algorithm = None,
    reproducible: bool | None = None,
    **mistaken: Any,
) -> Any:
    """Join the arrays of all ranks along axis 0; that axis may differ in length between ranks.

    Example:
        >>> import numpy as np, ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> run_ranks(3, lambda b: ferrodist.all_gather_uneven(np.full(b.rank, b.rank), b))[0]
        array([1, 2, 2])
    """
    if mistaken:
        raise refuse_keyword("all_gather_uneven", mistaken)
    request = Request(
        Kind.ALL_GATHER_UNEVEN,
        backend,
        timeout=timeout,
        is_async=async_op,
        algorithm=algorithm,
        reproducible=reproducible,
    )
    taken = as_input(x, "all_gather_uneven: x")
    compared = (Leaf("", taken.buffer.dtype, _rows(taken)[1]),)
    call = request.call((leaf_of(taken),), compared=compared)
    return request.execute(_AllGatherUneven(call, request.deadline, request, taken, out))


@dataclass(slots=True, eq=False)
class _AllGatherUneven(_SizedCall):
    taken: InputArray

    def run(self, running: RunningCall) -> None:
        rows, row = _rows(self.taken)
        counts = tell_numbers(running, [rows])[:, 0].tolist()
        sizes = [count * _count(row) for count in counts]
        self.result, args = _room(running, self, (sum(counts), *row), sizes)
        running.collective(Kind.ALL_GATHER, self.taken.buffer, self.result.buffer, args)


@hide_mistaken
def all_to_all_uneven(
    x: Any,
    send_counts: Sequence[int],
    backend: Group = None,
    *,
    recv_counts: Sequence[int] | None = None,
    out: Any = None,
    timeout: Timeout = DEFAULT,
    async_op: bool = False,
    algorithm: Algorithm = None,
    reproducible: bool | None = None,
    **mistaken: Any,
) -> Any:
    """Send ``send_counts[i]`` rows of ``x`` to rank i; return what came, and the rows from each.

    The counts of all ranks are exchanged and checked before data moves; ``recv_counts``, if given,
    must be what the others send. With ``async_op`` the pair is the result of the Work.

    Example:
        >>> import numpy as np, ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def swap(backend):
        ...     counts = [0, 2] if backend.rank == 0 else [1, 0]
        ...     return ferrodist.all_to_all_uneven(np.arange(sum(counts)), counts, backend)
        >>> run_ranks(2, swap)
        [(array([0]), [0, 1]), (array([0, 1]), [2, 0])]
    """
    if mistaken:
        raise refuse_keyword("all_to_all_uneven", mistaken)
    request = Request(
        Kind.ALL_TO_ALL_UNEVEN,
        backend,
        timeout=timeout,
        is_async=async_op,
        algorithm=algorithm,
        reproducible=reproducible,
    )
    taken = as_input(x, "all_to_all_uneven: x")
    rows, row = _rows(taken)
    sends = _check_counts(request, send_counts, "send_counts")
    if sum(sends) != rows:
        raise InvalidArgument(
            f"all_to_all_uneven: send_counts add up to {sum(sends)}, but x has {rows} rows",
            expected=rows,
            got=sum(sends),
            this_rank=request.backend.rank,
        )
    expects = (
        [-1] * len(sends)
        if recv_counts is None
        else _check_counts(request, recv_counts, "recv_counts")
    )

    compared = (Leaf("", taken.buffer.dtype, row),)
    call = request.call((leaf_of(taken),), compared=compared)
    return request.execute(
        _AllToAllUneven(call, request.deadline, request, taken, out, sends=sends, expects=expects)
    )


@dataclass(slots=True, eq=False)
class _AllToAllUneven(_SizedCall):
    taken: InputArray
    sends: list[int] = field(default_factory=list)
    expects: list[int] = field(default_factory=list)  # -1 where anything is welcome
    received: list[int] = field(default_factory=list)

    def run(self, running: RunningCall) -> None:
        row, world = _rows(self.taken)[1], len(self.sends)
        table = tell_numbers(running, [*self.sends, *self.expects])
        counts, expected = table[:, :world], table[:, world:]
        _check_expected(running, counts, expected)
        self.received = counts[:, self.request.backend.rank].tolist()
        sizes = (counts * _count(row)).tolist()
        self.result, args = _room(running, self, (sum(self.received), *row), sizes)
        running.collective(Kind.ALL_TO_ALL, self.taken.buffer, self.result.buffer, args)

    def finish(self) -> tuple[Any, list[int]]:
        return _SizedCall.finish(self), self.received


def _rows(taken: InputArray) -> tuple[int, tuple[int, ...]]:
    """Split a shape into rows and the shape of a row; a number is one row."""
    shape = taken.buffer.shape
    return (shape[0], shape[1:]) if shape else (1, ())


def _count(row: tuple[int, ...]) -> int:
    return int(np.prod(row, dtype=np.int64))


def _check_counts(request: Request, counts: Sequence[int], name: str) -> list[int]:
    world = request.backend.world_size
    try:
        numbers = [operator.index(count) for count in counts]
    except TypeError as error:
        raise InvalidArgument(
            f"all_to_all_uneven: {name} must be integers, got {counts!r}"
        ) from error
    if len(numbers) != world or not all(0 <= number < _MANY for number in numbers):
        raise InvalidArgument(
            f"all_to_all_uneven: {name} must be {world} numbers >= 0, one per rank, got {numbers}",
            expected=world,
            got=len(numbers),
            this_rank=request.backend.rank,
        )
    return numbers


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


def tell_numbers(running: RunningCall, numbers: Sequence[int]) -> Any:
    """Gather a few integers of every rank on every rank, one row per rank."""
    table = np.empty((running.backend.world_size, len(numbers)), np.int64)
    running.collective(Kind.ALL_GATHER, as_buffer(np.array(numbers, np.int64)), as_buffer(table))
    return table


def _room(
    running: RunningCall,
    call: _AllGatherUneven | _AllToAllUneven,
    shape: tuple[int, ...],
    counts: Counts,
) -> tuple[OutputArray, CollectiveArgs]:
    """Make room once the sizes are known; a wrong ``out`` shows only now, so all are told."""
    request, taken = call.request, call.taken
    args = request.args._replace(counts=counts)
    if call.out is None:
        return new_result(taken, shape), args
    try:
        result = as_output(call.out, taken.buffer.dtype, shape)
        return result, args._replace(in_place=is_in_place(request, taken, result))
    except InvalidArgument as error:
        text = f"rank {request.backend.rank}: {error}"
        raise running.mismatch(CollectiveMismatch, text) from error


def as_buffer(numbers: Any) -> Buffer:
    """Show an array of int64 to a backend."""
    return Buffer(
        memoryview(numbers.reshape(-1).view(np.uint8)), DType.INT64, numbers.shape, numbers
    )
