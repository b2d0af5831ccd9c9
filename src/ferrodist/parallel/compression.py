# SPDX-License-Identifier: MIT OR Apache-2.0
"""Communication hooks that send less: 16-bit floats, the largest elements, low-rank factors."""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakKeyDictionary

import torch

import ferrodist
from ferrodist.parallel.bucket import Bucket, HookSteps, allreduce_bucket

# -- 16-bit floats ---------------------------------------------------------------------------------
#
# Gradients travel as 16-bit floats: half the bytes of float32.
#
# Every rank rounds its own once, sums are made in float32, and the result is rounded once more.
# The tail travels as it is, and so do gradients that are not float32 or float64.

_WIRES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_LARGEST = 8  # float16 carries up to 2**16; what was largest in the last round is put below 2**8
_MAX_SHIFT = 64  # so that scaling itself stays within float32


class Compress:
    """A hook for DDP that sends gradients as ``"bfloat16"`` or ``"float16"``.

    bfloat16 keeps 8 bits of precision and the range of float32. float16 keeps 11 bits; gradients
    are scaled by a power of two that all ranks derive from the previous step. The first step, and
    a step with values that do not fit, is sent uncompressed, so no value is ever clipped.

    Example:
        >>> import torch, ferrodist
        >>> from ferrodist import Compress
        >>> from ferrodist.testing import run_ranks
        >>> def body(backend):
        ...     layer = torch.nn.Linear(2, 1, bias=False)
        ...     model = ferrodist.DDP(layer, backend, hook=Compress("bfloat16"))
        ...     model(torch.full((1, 2), float(backend.rank))).backward()
        ...     return model.weight.grad.tolist()
        >>> run_ranks(3, body)
        [[[1.0, 1.0]], [[1.0, 1.0]], [[1.0, 1.0]]]
    """

    def __init__(self, dtype: str = "bfloat16") -> None:
        if dtype not in _WIRES:
            raise ferrodist.InvalidArgument(
                f"Compress: dtype {dtype!r} is not one of {', '.join(map(repr, _WIRES))}"
            )
        self._name, self._dtype = dtype, _WIRES[dtype]
        self._reduce = _reduce_scaled if dtype == "float16" else _reduce_rounded
        self._wires: WeakKeyDictionary[Bucket, _Wire] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return Compress, (self._name,)

    def __call__(self, bucket: Bucket) -> HookSteps:
        """Reduce a bucket: one call."""
        if bucket.array.dtype not in (torch.float32, torch.float64):
            return allreduce_bucket(bucket)
        if bucket not in self._wires:
            self._wires[bucket] = _Wire(bucket, self._dtype)
        return self._reduce(bucket, self._wires[bucket])


class _Wire:
    """What a bucket travels in: made once, used in every round."""

    def __init__(self, bucket: Bucket, dtype: Any) -> None:
        self.array = bucket.backend.empty(bucket.gradients.shape, dtype, "torch")
        self.shift: int | None = None  # binary places by which gradients are scaled

    def learn_shift(self, largest: float) -> None:
        """Take from the largest number of a round by how much to scale the next."""
        if 0 < largest < math.inf:
            shift = _LARGEST - math.frexp(largest)[1]
            self.shift = max(-_MAX_SHIFT, min(shift, _MAX_SHIFT))


def _reduce_rounded(bucket: Bucket, wire: _Wire) -> HookSteps:
    wire.array.copy_(bucket.gradients)
    yield _allreduce(bucket, [wire.array, bucket.tail])
    bucket.gradients.copy_(wire.array)


def _reduce_scaled(bucket: Bucket, wire: _Wire) -> HookSteps:
    if wire.shift is None:
        yield from allreduce_bucket(bucket)
        wire.learn_shift(_largest(bucket.gradients))
        return
    scale = 2.0**wire.shift  # a power of two: no digit is lost, there or back
    bucket.gradients *= scale
    wire.array.copy_(bucket.gradients)
    yield _allreduce(bucket, [wire.array, bucket.tail])
    largest = _largest(wire.array)
    if math.isfinite(largest):
        bucket.gradients.copy_(wire.array)
    else:  # on every rank, as all have the same: too large for the scale, or not finite in itself
        yield _allreduce(bucket, bucket.gradients)
        largest = _largest(bucket.gradients)
    bucket.gradients /= scale
    wire.learn_shift(largest / scale)


def _allreduce(bucket: Bucket, arrays: Any) -> ferrodist.Work[Any]:
    return ferrodist.allreduce(arrays, bucket.backend, op=bucket.op, out=arrays, async_op=True)


def _largest(array: torch.Tensor) -> float:
    """Return the largest magnitude; inf or nan if there is one."""
    if array.numel() == 0:
        return 0.0
    least, most = torch.aminmax(array)
    return float(max(-least, most))


# -- the largest elements --------------------------------------------------------------------------
#
# Top-k: of every bucket a rank sends only its largest gradients, by number and value.
#
# The others it keeps as its *error*, and adds it to its next gradients, so that nothing is lost,
# only late (Stich et al. 2018, arXiv 1809.07599). What all ranks sent is added up in rank order.


class TopK:
    """A hook for DDP that sends the largest values of each bucket, a share ``ratio`` of them.

    At least one value per bucket is sent; what is not sent is added to the next step's gradients
    (error feedback). It makes one all_gather per bucket, so it pays off if world_size * ratio is
    well below 1. The stored errors are reset when DDP makes new buckets (after the first step, and
    when parameters are frozen or unfrozen) and where ``join()`` begins or ends. If a bucket has an
    inf or nan, it becomes nan. Dtypes other than float32 and float64 are sent uncompressed.

    Example:
        >>> import torch, ferrodist
        >>> from ferrodist import TopK
        >>> from ferrodist.testing import run_ranks
        >>> def body(backend):
        ...     layer = torch.nn.Linear(4, 1, bias=False)
        ...     model = ferrodist.DDP(layer, backend, hook=TopK(ratio=0.25))
        ...     model(torch.tensor([[1.0, 2.0, 8.0 + backend.rank, 3.0]])).backward()
        ...     return model.weight.grad.tolist()
        >>> run_ranks(3, body)[0]
        [[0.0, 0.0, 9.0, 0.0]]
    """

    def __init__(self, ratio: float = 0.01) -> None:
        if not 0 < ratio <= 1:
            raise ferrodist.InvalidArgument(f"TopK: ratio is {ratio}; it must be in (0, 1]")
        self._ratio = ratio
        self._states: WeakKeyDictionary[Bucket, _State] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return TopK, (self._ratio,)

    def __call__(self, bucket: Bucket) -> HookSteps:
        """Reduce a bucket."""
        if bucket.array.dtype not in (torch.float32, torch.float64):
            return allreduce_bucket(bucket)
        state = self._states.get(bucket)
        if state is None or state.op != bucket.op:  # in join() gradients are of another magnitude
            state = self._states[bucket] = _State(bucket, self._ratio)
        return _reduce(bucket, state)


class _State:
    """What a bucket travels in, and what stays of it on this rank."""

    def __init__(self, bucket: Bucket, ratio: float) -> None:
        self.op = bucket.op
        self.error = torch.zeros_like(bucket.gradients)
        self.num_sent = math.ceil(ratio * bucket.layout.size)
        num_ranks, new, dtype = bucket.backend.world_size, bucket.backend.empty, bucket.array.dtype
        number = torch.int32 if bucket.layout.size < 2**31 else torch.int64
        self.numbers = new((num_ranks, self.num_sent), number, "torch")
        self.values = new((num_ranks, self.num_sent), dtype, "torch")
        self.tails = new((num_ranks, len(bucket.tail)), dtype, "torch")


def _reduce(bucket: Bucket, state: _State) -> HookSteps:
    rank = bucket.backend.rank
    bucket.gradients += state.error
    largest = bucket.gradients.abs().topk(state.num_sent, sorted=False).indices
    state.numbers[rank] = largest
    state.values[rank] = bucket.gradients[largest]
    state.tails[rank] = bucket.tail
    everybodys = [state.numbers, state.values, state.tails]
    mine = [one[rank : rank + 1] for one in everybodys]
    yield ferrodist.all_gather(mine, bucket.backend, out=everybodys, async_op=True)
    _sum_rows(state.tails, bucket.tail, bucket.op)
    if not torch.isfinite(state.values).all():  # on every rank: the error stays what it was
        bucket.gradients.fill_(torch.nan)
        return
    _keep_unsent(bucket, state, largest)
    bucket.gradients.zero_()
    for numbers, values in zip(state.numbers, state.values, strict=True):
        bucket.gradients.index_add_(0, numbers, values)
    if bucket.op == "mean":
        bucket.gradients /= bucket.backend.world_size


def _keep_unsent(bucket: Bucket, state: _State, sent: torch.Tensor) -> None:
    """Keep what was not sent; of a gradient that no rank has used, what was kept before."""
    bucket.gradients[sent] = 0
    cells = bucket.tail.tolist()
    for start, number, cell in zip(bucket.layout.starts, bucket.layout.leaves, cells, strict=False):
        if cell > 0:
            place = slice(start, start + bucket.views[number].numel())
            state.error[place] = bucket.gradients[place]


def _sum_rows(rows: torch.Tensor, into: torch.Tensor, op: str) -> None:
    into.zero_()
    for row in rows:
        into += row
    if op == "mean":
        into /= len(rows)


# -- PowerSGD --------------------------------------------------------------------------------------
#
# PowerSGD: a matrix of gradients travels as thin factors (Vogels et al. 2019, arXiv 1905.13727).
#
# One step of power iteration per round: P = M Q is reduced and made orthonormal, then Q = Mᵀ P is
# reduced, and P Qᵀ is close to the reduced M. The next round begins with this Q. What a rank had
# and the factors could not carry is its *error*, which it adds to its next gradient.


class PowerSGD:
    """A hook for DDP that sends each gradient matrix as two factors P and Q of ``rank`` columns.

    It makes two calls per bucket. Gradients with fewer than two axes, those that factors would not
    make smaller, and dtypes other than float32 and float64 are sent uncompressed together with P.
    Errors are fed back; they are reset when DDP makes new buckets (after the first step, and when
    parameters are frozen or unfrozen) and where ``join()`` begins or ends. If a bucket has an inf
    or nan, all its matrices become nan.

    Example:
        >>> import torch, ferrodist
        >>> from ferrodist import PowerSGD
        >>> from ferrodist.testing import run_ranks
        >>> def body(backend):
        ...     model = ferrodist.DDP(torch.nn.Linear(8, 8), backend, hook=PowerSGD(rank=1))
        ...     model(torch.full((1, 8), float(backend.rank))).sum().backward()
        ...     return round(model.weight.grad.mean().item(), 4)  # a matrix of rank 1: no loss
        >>> run_ranks(3, body)
        [1.0, 1.0, 1.0]
    """

    def __init__(self, rank: int = 4, *, seed: int = 0) -> None:
        if rank < 1:
            raise ferrodist.InvalidArgument(f"PowerSGD: rank is {rank}; it must be at least 1")
        self._rank = rank
        self._seed = seed
        self._states: WeakKeyDictionary[Bucket, _LowRankState] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return _power_sgd, (self._rank, self._seed)

    def __call__(self, bucket: Bucket) -> HookSteps:
        """Reduce a bucket."""
        if bucket.array.dtype not in (torch.float32, torch.float64):
            return allreduce_bucket(bucket)
        state = self._states.get(bucket)
        if state is None or state.op != bucket.op:  # in join() gradients are of another magnitude
            state = self._states[bucket] = _LowRankState(bucket, self._rank, self._seed)
        return _reduce_low_rank(bucket, state)


def _power_sgd(rank: int, seed: int) -> PowerSGD:
    return PowerSGD(rank, seed=seed)


class _Matrix:
    """A gradient as a matrix M, and what stays of it on this rank."""

    def __init__(
        self, cell: int, start: int, shape: tuple[int, int], dtype: Any, *, rank: int, seed: int
    ) -> None:
        self.cell = cell  # its place in the tail
        self._place = slice(start, start + math.prod(shape))
        self.error = torch.zeros(shape, dtype=dtype)
        random = torch.Generator().manual_seed(seed)  # the same on every rank
        self.start = torch.randn((shape[1], rank), generator=random, dtype=dtype)

    def gradient_in(self, bucket: Bucket) -> torch.Tensor:
        """View M in the array that the bucket has in this round."""
        return bucket.gradients[self._place].view(self.error.shape)


class _LowRankState:
    """What a bucket travels in, and what it leaves for its next round."""

    def __init__(self, bucket: Bucket, rank: int, seed: int) -> None:
        self.op = bucket.op
        self.matrices: list[_Matrix] = []
        self._others: list[slice] = []  # what travels as it is
        layout, dtype, new = bucket.layout, bucket.array.dtype, bucket.backend.empty
        for cell, (number, start) in enumerate(zip(layout.leaves, layout.starts, strict=True)):
            view = bucket.views[number]
            size, height = view.numel(), view.shape[0] if view.dim() > 1 else 0
            if size and height and rank * (height + size // height) < size:
                shape = height, size // height
                matrix = _Matrix(cell, start, shape, dtype, rank=rank, seed=seed + number)
                self.matrices.append(matrix)
            else:
                self._others.append(slice(start, start + size))
        heights, widths = (
            [rank * matrix.error.shape[axis] for matrix in self.matrices] for axis in (0, 1)
        )
        self.all_left, self.all_right = (new(sum(s), dtype, "torch") for s in (heights, widths))
        self.left = [part.view(-1, rank) for part in self.all_left.split(heights)]  # every P
        self.right = [part.view(-1, rank) for part in self.all_right.split(widths)]  # every Q

    def others_in(self, bucket: Bucket) -> list[torch.Tensor]:
        """View what travels as it is."""
        return [bucket.tail, *(bucket.gradients[place] for place in self._others)]


def _reduce_low_rank(bucket: Bucket, state: _LowRankState) -> HookSteps:
    gradients = [matrix.gradient_in(bucket) for matrix in state.matrices]
    for matrix, gradient, left in zip(state.matrices, gradients, state.left, strict=True):
        gradient += matrix.error
        torch.matmul(gradient, matrix.start, out=left)
    yield _allreduce(bucket, [state.all_left, *state.others_in(bucket)])
    if not torch.isfinite(state.all_left).all():  # on every rank: the errors stay what they were
        for gradient in gradients:
            gradient.fill_(torch.nan)
        return
    state.all_right.zero_()  # that of a matrix no rank has used stays so
    used = [
        parts
        for parts in zip(state.matrices, gradients, state.left, state.right, strict=True)
        if bucket.tail[parts[0].cell] > 0
    ]
    for matrix, gradient, left, right in used:
        left.copy_(torch.linalg.qr(left).Q)
        torch.matmul(gradient.T, left, out=right)
        torch.addmm(gradient, left, right.T, alpha=-1, out=matrix.error)
    if used:
        yield _allreduce(bucket, state.all_right)
    for matrix, gradient, left, right in used:
        torch.matmul(left, right.T, out=gradient)
        matrix.start.copy_(right)
