# SPDX-License-Identifier: MIT OR Apache-2.0
"""Join: ranks with different numbers of steps, and what each counts for in the mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

import ferrodist
from ferrodist.backends.failures import names_of_ranks
from ferrodist.parallel.replicas import SharedBuffers


class Join:
    """Weighs this rank's gradients: 1 for a step, or the samples it has seen since the last.

    ``is_done``: this rank has no further steps. ``raises_early``: the first rank that is done makes
    all raise.
    """

    def __init__(
        self,
        backend: ferrodist.Backend,
        buffers: SharedBuffers,
        *,
        by_samples: bool,
        raises_early: bool,
    ) -> None:
        self._backend = backend
        self._buffers = buffers
        self._by_samples = by_samples
        self._raises_early = raises_early
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
        return float(self._num_samples) if self._by_samples else 1.0

    def after_round(self, _: int) -> None:
        """Give all ranks the buffers of the first one that still trains."""
        if self._raises_early:
            self._check_all_train()
        if not self._buffers.tensors():
            return
        num_ranks = self._backend.world_size
        candidate = num_ranks if self.is_done else self._backend.rank
        root = ferrodist.allreduce(candidate, self._backend, op="min")
        if root < num_ranks:
            self._buffers.broadcast(root)

    def _check_all_train(self) -> None:
        are_done = ferrodist.all_gather(np.array([self.is_done]), self._backend)
        if are_done.any() and not are_done.all():
            ranks = np.flatnonzero(are_done).tolist()
            raise ferrodist.DistributedError(
                f"DDP.join(throw_on_early_termination=True): {names_of_ranks(ranks)} ran out of "
                "batches before the others; every rank raises this",
                rank=ranks[0],
                this_rank=self._backend.rank,
            )
