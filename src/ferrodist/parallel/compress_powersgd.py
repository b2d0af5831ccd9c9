# SPDX-License-Identifier: MIT OR Apache-2.0
"""PowerSGD: a matrix of gradients travels as thin factors (Vogels et al. 2019, arXiv 1905.13727).

One step of power iteration per round: P = M Q is reduced and made orthonormal, then Q = Mᵀ P is
reduced, and P Qᵀ is close to the reduced M. The next round begins with this Q. What a rank had and
the factors could not carry is its *error*, which it adds to its next gradient.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

import ferrodist
from ferrodist.parallel.bucket import Bucket, Steps, allreduce_bucket


class PowerSGD:
    """A hook for DDP that sends matrices as two factors of ``rank`` columns.

    Gradients with fewer than two axes, and those that factors would not make smaller, travel as
    they are, in the same call as the P; so do those that are not float32 or float64. That makes two
    calls per bucket. Errors belong to a bucket and begin at zero with it: when DDP makes new
    ones (after the first step, and when parameters are frozen or thawed), and where ``join()``
    begins or ends. Where something is inf or nan all matrices of the bucket become nan.

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
        self._states: WeakKeyDictionary[Bucket, _State] = WeakKeyDictionary()

    def __call__(self, bucket: Bucket) -> Steps:
        """Reduce a bucket."""
        if bucket.array.dtype not in (torch.float32, torch.float64):
            return allreduce_bucket(bucket)
        state = self._states.get(bucket)
        if state is None or state.op != bucket.op:  # in join() gradients are of another magnitude
            state = self._states[bucket] = _State(bucket, self._rank, self._seed)
        return _reduce(bucket, state)


class _Matrix:
    """A gradient as a matrix M, and what stays of it on this rank."""

    def __init__(self, cell: int, gradient: torch.Tensor, rank: int, seed: int) -> None:
        self.cell = cell  # its place in the tail
        self.gradient = gradient.flatten(1)
        self.error = torch.zeros_like(self.gradient)
        random = torch.Generator().manual_seed(seed)  # the same on every rank
        shape = (self.gradient.shape[1], rank)
        self.start = torch.randn(shape, generator=random, dtype=gradient.dtype)


class _State:
    """What a bucket travels in, and what it leaves for its next round."""

    def __init__(self, bucket: Bucket, rank: int, seed: int) -> None:
        self.op = bucket.op
        self.matrices: list[_Matrix] = []
        self.others = [bucket.tail]
        for cell, number in enumerate(bucket.layout.leaves):
            view = bucket.views[number]
            if view.dim() > 1 and rank * sum(view.flatten(1).shape) < view.numel():
                self.matrices.append(_Matrix(cell, view, rank, seed + number))
            else:
                self.others.append(view)
        heights, widths = (
            [rank * matrix.gradient.shape[axis] for matrix in self.matrices] for axis in (0, 1)
        )
        self.all_left = bucket.backend.empty(sum(heights), bucket.layout.dtype, "torch")
        self.all_right = bucket.backend.empty(sum(widths), bucket.layout.dtype, "torch")
        self.left = [part.view(-1, rank) for part in self.all_left.split(heights)]  # every P
        self.right = [part.view(-1, rank) for part in self.all_right.split(widths)]  # every Q


def _reduce(bucket: Bucket, state: _State) -> Steps:
    for matrix, left in zip(state.matrices, state.left, strict=True):
        matrix.gradient += matrix.error
        torch.matmul(matrix.gradient, matrix.start, out=left)
    yield _allreduce(bucket, [state.all_left, *state.others])
    if not torch.isfinite(state.all_left).all():  # on every rank: the errors stay what they were
        for matrix in state.matrices:
            matrix.gradient.fill_(torch.nan)
        return
    state.all_right.zero_()  # that of a matrix nobody has used stays so
    used = [
        parts
        for parts in zip(state.matrices, state.left, state.right, strict=True)
        if bucket.tail[parts[0].cell] > 0
    ]
    for matrix, left, right in used:
        left.copy_(torch.linalg.qr(left).Q)
        torch.matmul(matrix.gradient.T, left, out=right)
        torch.addmm(matrix.gradient, left, right.T, alpha=-1, out=matrix.error)
    if used:
        yield _allreduce(bucket, state.all_right)
    for matrix, left, right in used:
        torch.matmul(left, right.T, out=matrix.gradient)
        matrix.start.copy_(right)


def _allreduce(bucket: Bucket, arrays: Any) -> ferrodist.Work[Any]:
    return ferrodist.allreduce(arrays, bucket.backend, op=bucket.op, out=arrays, async_op=True)
