# SPDX-License-Identifier: MIT OR Apache-2.0
"""Gradients travel as 16-bit floats: half the bytes of float32.

Every rank rounds its own once, sums are made in float32, and the result is rounded once more. The
tail travels as it is, and so do gradients that are not float32 or float64.
"""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakKeyDictionary

import torch

import ferrodist
from ferrodist.parallel.bucket import Bucket, Steps, allreduce_bucket

_WIRES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_LARGEST = 8  # float16 carries up to 2**16; what was largest in the last round is put below 2**8
_MAX_SHIFT = 64  # so that scaling itself stays within float32


class Compress:
    """A hook for DDP that sends gradients as ``"bfloat16"`` or as ``"float16"``.

    bfloat16 keeps 8 binary digits and the range of float32. float16 keeps 11 of them; numbers are
    scaled by a power of two that all ranks derive from the round before. A round without one, the
    first, and one in which something does not fit, travels in full, so nothing is ever clipped.

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
        self._dtype = _WIRES[dtype]
        self._reduce = _reduce_scaled if dtype == "float16" else _reduce_rounded
        self._wires: WeakKeyDictionary[Bucket, _Wire] = WeakKeyDictionary()

    def __call__(self, bucket: Bucket) -> Steps:
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


def _reduce_rounded(bucket: Bucket, wire: _Wire) -> Steps:
    wire.array.copy_(bucket.gradients)
    yield _allreduce(bucket, [wire.array, bucket.tail])
    bucket.gradients.copy_(wire.array)


def _reduce_scaled(bucket: Bucket, wire: _Wire) -> Steps:
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
