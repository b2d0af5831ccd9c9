# SPDX-License-Identifier: MIT OR Apache-2.0
"""Join: ranks with different numbers of steps, and what each counts for in the mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import ferrodist
from ferrodist.parallel import replicas

_UNIT = 1024.0  # of samples: large batches of 16-bit gradients stay finite, and no bit changes


class Join:
    """Weighs this rank's gradients: 1 for a step, or the samples it has seen since the last.

    ``is_done``: this rank has no further steps. ``buffers()`` are those that all ranks share.
    """

    def __init__(
        self,
        backend: ferrodist.Backend,
        buffers: Callable[[], Sequence[torch.Tensor]],
        *,
        by_samples: bool,
    ) -> None:
        self._backend = backend
        self._buffers = buffers
        self._by_samples = by_samples
        self._num_samples = 0
        self._is_weighed = False
        self.is_done = False

    def count(self, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        """See a batch: its length is that of the first tensor."""
        if not self._by_samples:
            return
        batch = next((x for x in [*args, *options.values()] if isinstance(x, torch.Tensor)), None)
        if batch is None or batch.dim() == 0:
            raise ferrodist.InvalidArgument(
                "DDP.join(by_samples=True): forward was given no tensor with a length, so there "
                "is no telling how many samples it has"
            )
        if len(batch) == 0:
            raise ferrodist.InvalidArgument(
                "DDP.join(by_samples=True): forward was given a batch of no samples; leave such "
                "a step out, ranks need not have the same number of steps here"
            )
        self._num_samples = len(batch) + (0 if self._is_weighed else self._num_samples)
        self._is_weighed = False

    def weigh(self) -> float:
        """Return what this rank counts for now; a further backward counts the same."""
        self._is_weighed = True
        return self._num_samples / _UNIT if self._by_samples else 1.0

    def share_buffers(self, _: int) -> None:
        """Give all ranks the buffers of the first one that still trains; called after a round."""
        buffers = self._buffers()
        if not buffers:
            return
        num_ranks = self._backend.world_size
        candidate = num_ranks if self.is_done else self._backend.rank
        root = ferrodist.allreduce(candidate, self._backend, op="min")
        if root < num_ranks:
            replicas.broadcast(buffers, self._backend, root)
