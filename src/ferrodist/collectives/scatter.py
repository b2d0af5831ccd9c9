# SPDX-License-Identifier: MIT OR Apache-2.0
"""scatter and scatter_uneven: only the root knows what there is, and tells it before data moves.

What a rank refuses, it refuses in the call: the others wait for their parts, or for the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack, overload

import numpy as np

from ferrodist.arrays import InputArray, OutputArray, as_input, as_output, new_result, numpy_result
from ferrodist.backends.call_methods import AllOptions, InPlaceOptions, No, Options, Yes
from ferrodist.backends.running_call import RunningCall
from ferrodist.buffer import MAX_AXES, Buffer, DType
from ferrodist.call import Kind, Leaf
from ferrodist.collectives.fast_path import SCATTER, fast_path, fast_start
from ferrodist.collectives.plan import is_in_place, result_shape, take_out, take_single
from ferrodist.collectives.request import (
    Group,
    Request,
    leaf_of,
    public,
)
from ferrodist.collectives.uneven import SizedCall, check_counts, check_sum, split_shape
from ferrodist.errors import (
    CollectiveMismatch,
    DistributedError,
    InvalidArgument,
    SizeMismatch,
    UnsupportedArray,
)
from ferrodist.work import Work


@overload
def scatter(
    x: Any, backend: Group = None, root: int = ..., *, async_op: Yes, **rest: Unpack[Options]
) -> Work[Any]: ...
@overload
def scatter(
    x: Any, backend: Group = None, root: int = ..., *, async_op: No = ..., **rest: Unpack[Options]
) -> Any: ...
@public(Options)
def scatter(
    x: Any,
    backend: Group = None,
    root: int = 0,
    *,
    out: Any = None,
    async_op: bool = False,
    **options: Unpack[InPlaceOptions],
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
    done = (fast_start if async_op else fast_path)(SCATTER, backend, x, out, None, root, options)
    if done is not NotImplemented:
        return done
    request = Request(Kind.SCATTER, backend, options, root=root, is_async=async_op)
    try:
        call = _prepare(request, x, out)
    except DistributedError as error:
        return request.refuse(error)
    return request.execute(call)


@public(AllOptions)
def scatter_uneven(
    x: Any,
    counts: Sequence[int] | None,
    backend: Group = None,
    root: int = 0,
    **options: Unpack[AllOptions],
) -> Any:
    """Cut the array of ``root`` along axis 0: rank i gets ``counts[i]`` rows.

    The other ranks pass None, or an array as in ``scatter``; and as counts None, or those of the
    root.

    Example:
        >>> import numpy as np, ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> inputs = {0: (np.arange(3), [1, 2])}  # the root has them, the others pass None
        >>> run_ranks(2, lambda b: ferrodist.scatter_uneven(*inputs.get(b.rank, (None, None)), b))
        [array([0]), array([1, 2])]
    """
    request = Request(Kind.SCATTER_UNEVEN, backend, options, root=root)
    try:
        call = _prepare(request, x, options.get("out"), counts)
        if not request.is_root and counts is not None:
            call.given = check_counts(request, counts, "counts")
    except DistributedError as error:
        return request.refuse(error)
    return request.execute(call)


def _prepare(request: Request, x: Any, out: Any, counts: Sequence[int] | None = None) -> _Scatter:
    taken, told = None, None
    if x is not None or request.is_root:
        taken = take_single(request, x)
    if request.is_root:
        assert taken is not None
        told = _what_to_tell(request, taken, counts)
        if out is not None:
            part = told.part_of(request.backend.rank)
            is_in_place(request, taken, take_out(request, out, "", taken, part.shape))
    call = request.call(() if taken is None else (leaf_of(taken),), compared=())
    scatter = _Scatter(call, request.deadline, request, taken, out)
    scatter.told = told
    return scatter


class _Told(NamedTuple):
    """What the root tells: dtype and shape of a part, or of a row if ``counts`` are the rows."""

    dtype: DType
    shape: tuple[int, ...]
    counts: list[int] | None = None

    def part_of(self, rank: int) -> Leaf:
        """Describe what a rank gets."""
        rows = () if self.counts is None else (self.counts[rank],)
        return Leaf("", self.dtype, (*rows, *self.shape))

    def to_numbers(self, world: int) -> np.ndarray[Any, Any]:
        """Write it down; as native code does, which has no counts."""
        numbers = _no_numbers(world if self.counts is not None else 0)
        numbers[: 2 + len(self.shape)] = (self.dtype, len(self.shape), *self.shape)
        numbers[2 + MAX_AXES :] = self.counts or ()
        return numbers

    @classmethod
    def from_numbers(cls, numbers: np.ndarray[Any, Any]) -> _Told:
        """Read what the root has written."""
        dtype, axes, *rest = numbers.tolist()
        counts = rest[MAX_AXES:]
        return cls(DType(dtype), tuple(rest[:axes]), counts or None)


def _no_numbers(num_counts: int) -> np.ndarray[Any, Any]:
    return np.zeros(2 + MAX_AXES + num_counts, np.int64)


def _what_to_tell(request: Request, taken: InputArray, counts: Sequence[int] | None) -> _Told:
    dtype = taken.buffer.dtype
    if request.kind is Kind.SCATTER:
        return _Told(dtype, result_shape(request, taken))
    if counts is None:
        text = "counts are None on the root; pass the rows of each rank"
        raise request.refusal(InvalidArgument, text)
    rows, row = split_shape(request, taken)
    return _Told(dtype, row, check_sum(request, check_counts(request, counts, "counts"), rows))


class _Scatter(SizedCall):
    told: _Told | None = None  # by the root
    given: list[int] | None = None  # counts passed by another rank

    def run(self, running: RunningCall) -> None:
        request, taken = self.request, self.taken
        root, rank = request.args.root, request.backend.rank
        told = _Told.from_numbers(self._tell(running))
        self._compare_counts(running, told)
        self.result = _room_for_part(running, root, told.part_of(rank), taken, self.out)
        source = taken.buffer if request.is_root and taken is not None else None
        self.collective(running, Kind.SCATTER, source, told.counts, told.shape)

    def _tell(self, running: RunningCall) -> np.ndarray[Any, Any]:
        """Tell every rank dtype and shape of the parts."""
        world = running.backend.world_size
        numbers = _no_numbers(world if self.request.kind is Kind.SCATTER_UNEVEN else 0)
        if self.told is not None:
            numbers = self.told.to_numbers(world)
        running.broadcast(Buffer.of_numbers(numbers), self.request.args.root)
        return numbers

    def _compare_counts(self, running: RunningCall, told: _Told) -> None:
        if self.given is not None and self.given != told.counts:
            raise running.mismatch(
                SizeMismatch,
                f"rank {running.backend.rank} passed counts {self.given}, those of root "
                f"{self.request.args.root} are {told.counts}",
            )


def refuse_part(running: RunningCall, root: int, told: bytes, x: Any, out: Any) -> None:
    """Tell all ranks that what this one passed on the fast path does not fit its part."""
    found = _Told.from_numbers(np.frombuffer(told, np.int64)).part_of(running.backend.rank)
    taken = None if x is None else as_input(x, "scatter: x")
    _room_for_part(running, root, found, taken, out)


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
