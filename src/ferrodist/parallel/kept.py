# SPDX-License-Identifier: MIT OR Apache-2.0
"""Kept: gradients that a program still holds when the next round begins.

It may keep ``.grad``, or anything that shares its memory, and go on. Before a round would write to
what is kept, the bucket moves to another array and leaves the old one to the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub
from sys import getrefcount

import torch

from ferrodist.parallel.bucket import Bucket, BucketMemory


class Memories:
    """The memory of a bucket, and the one it had before, to go back to once that is free."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._now = _Uses(bucket.memory)
        self._before: _Uses | None = None

    def are_kept(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Tell whether a round would overwrite what somebody keeps.

        A ``.grad`` that still is a view is no such thing: bare torch adds to it in place too.
        """
        if self._now.are_all_ours(1):
            return False
        counts = self._now.others_by_view(1)
        replaced = [
            count
            for (number, view), count in zip(self.bucket.views.items(), counts, strict=True)
            if parameters[number].grad is not view
        ]
        return any(replaced) or (bool(replaced) and self._now.others_by_alias() > 0)

    def are_free(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Tell whether nobody has any of it, not even a parameter as its gradient."""
        views = self.bucket.views.items()
        return self._now.are_all_ours(1) and not any(parameters[n].grad is v for n, v in views)

    def change(self) -> None:
        """Give the bucket other memory."""
        before = self._before
        if before is None or not before.are_all_ours(0):
            before = _Uses(self.bucket.new_memory())
        self._before, self._now = self._now, before
        self.bucket.use(before.memory)


class _Uses:
    """Who holds memory besides DDP itself, which holds each view once, and ``more`` times.

    What a program makes of a gradient, such as ``.detach()`` and ``.numpy()``, is a use of the
    storage. The gradient itself is one object with the view that is in here: references count.
    """

    def __init__(self, memory: BucketMemory) -> None:
        self.memory = memory
        self._storage = memory.array.untyped_storage()._cdata
        self._num_uses: int = torch._C._storage_Use_Count(self._storage)
        once = list(map(getrefcount, memory.views.values()))
        self._counts = [once, [count + 1 for count in once]]

    def are_all_ours(self, more: int) -> bool:
        counts = list(map(getrefcount, self.memory.views.values()))
        return counts == self._counts[more] and self.others_by_alias() == 0

    def others_by_view(self, more: int) -> list[int]:
        return list(map(sub, map(getrefcount, self.memory.views.values()), self._counts[more]))

    def others_by_alias(self) -> int:
        return int(torch._C._storage_Use_Count(self._storage)) - self._num_uses
