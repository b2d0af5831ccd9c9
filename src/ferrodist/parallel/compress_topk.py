# SPDX-License-Identifier: MIT OR Apache-2.0
"""Top-k: of every bucket a rank sends only its largest gradients, by number and value.

The others it keeps as its *error*, and adds it to its next gradients, so that nothing is lost, only
late (Stich et al. 2018, arXiv 1809.07599). What all ranks sent is added up in rank order.
"""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import torch

import ferrodist
from ferrodist.parallel.bucket import Bucket, Steps, allreduce_bucket


class TopK:
    """A hook for DDP that sends the share ``ratio`` of every bucket, one number at least.

    One call per bucket, an all_gather: every rank receives what all others send, so it pays while
    world_size * ratio is well below 1. Errors belong to a bucket and begin at zero with it: when
    DDP makes new ones (after the first step, and when parameters are frozen or thawed), and where
    ``join()`` begins or ends. Where something is inf or nan the whole bucket becomes nan. What
    is not float32 or float64 travels in full.

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

    def __call__(self, bucket: Bucket) -> Steps:
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
        num_ranks, new, dtype = bucket.backend.world_size, bucket.backend.empty, bucket.layout.dtype
        number = torch.int32 if bucket.layout.size < 2**31 else torch.int64
        self.numbers = new((num_ranks, self.num_sent), number, "torch")
        self.values = new((num_ranks, self.num_sent), dtype, "torch")
        self.tails = new((num_ranks, len(bucket.tail)), dtype, "torch")


def _reduce(bucket: Bucket, state: _State) -> Steps:
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
    """Keep what was not sent; of a gradient that nobody has used, what was kept before."""
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
