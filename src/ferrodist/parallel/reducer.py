# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reducer: gradients become means over all ranks, some while others are still being computed.

It knows gradients by number, and views to put them in; what a module or autograd is, it does not.
The rule that keeps the ranks in step: in every *round* all ranks start all buckets, in one order. A
bucket is started when its last leaf is ready and those before it have been started; what is left
then is started when the round is finished. So is a small last bucket, ready or not: as a rule that
is a moment later, and the caller reduces it without another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

import ferrodist
from ferrodist.parallel.bucket import (
    MIB,
    Bucket,
    BucketSizes,
    GradientSpec,
    Hook,
    allreduce_at_once,
    allreduce_bucket,
    lay_out,
)
from ferrodist.profiler import profiled

_OUT_OF_STEP = (ferrodist.CollectiveMismatch, ferrodist.CollectiveTimeout)
_LARGEST_LATE = MIB  # bytes; reducing more takes so long that it is begun as soon as it can be


class Reducer:
    """The buckets of all leaves; ``kind`` is that of their arrays, as of ``backend.empty``.

    Errors begin with the name of its ``owner`` and end with ``advice``.
    """

    def __init__(
        self,
        leaves: Sequence[GradientSpec],
        backend: ferrodist.Backend,
        *,
        kind: str,
        owner: str,
        advice: str,
        sizes: BucketSizes,
        hook: Hook = allreduce_bucket,
    ) -> None:
        self.leaves = leaves
        self.backend = backend
        self._owner = owner
        self._advice = advice
        self._kind = kind
        self._sizes = sizes
        self._hook = hook
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self.late: tuple[int, ...] = ()  # the leaves that are reduced only when a round is finished
        self._num_early = 0
        self._next = 0
        self.use_order(range(len(leaves))[::-1])  # what is used last has its gradient first

    def use_order(self, order: Sequence[int]) -> None:
        """Make buckets for leaves that become ready in this order; new ones hold zeros."""
        layouts = lay_out(self.leaves, order, self._sizes)
        if layouts == [bucket.layout for bucket in self.buckets]:
            return
        self.buckets = [
            Bucket(index, layout, self.leaves, self.backend, self._kind)
            for index, layout in enumerate(layouts)
        ]
        self._bucket_of = {
            number: bucket for bucket in self.buckets for number in bucket.layout.leaves
        }
        self._next = len(self.buckets)
        last = self.buckets[-1] if self.buckets else None
        self.late = last.layout.leaves if last and last.array.nbytes <= _LARGEST_LATE else ()
        self._num_early = len(self.buckets) - bool(self.late)

    def view(self, number: int) -> Any:
        """Return where a leaf's gradient goes, and comes out."""
        return self._bucket_of[number].views[number]

    def begin(self, weight: float | None = None, divisor: float | None = None) -> None:
        """Begin a round; with a ``weight``, of a mean that is weighted by those of all ranks.

        With a ``divisor`` the weighted sum is divided by that instead.
        """
        self._next = 0
        for bucket in self.buckets:
            bucket.begin(weight, divisor)

    def set_ready(self, numbers: Sequence[int]) -> None:
        """Say that leaves of one bucket have gradients in their views that will not change."""
        if numbers:
            self._bucket_of[numbers[0]].set_ready(numbers)
        while self._next < self._num_early and self.buckets[self._next].is_ready:
            self._start_next(self._hook)

    def has_started(self, number: int) -> bool:
        """Tell whether a leaf is on its way, so that its view must be left alone."""
        return self._bucket_of[number].index < self._next

    def finish(self, fill: Callable[[int], bool]) -> AbstractSet[int]:
        """Reduce all that is left, and wait; return the leaves that some rank has a gradient for.

        ``fill(number)`` is called for leaves that are not ready: it puts into the view what they
        contribute, and tells whether that is a gradient of this round.
        """
        for bucket in self.buckets[self._next :]:
            if not bucket.is_ready:
                bucket.set_ready([number for number in bucket.not_ready if fill(number)])
            if bucket is not self.buckets[-1] or self._hook is not allreduce_bucket:
                self._start_next(self._hook)
        used = [self._wait(bucket) for bucket in self.buckets[: self._next]]
        if self._next < len(self.buckets):  # the last one, and nothing to do meanwhile
            self._start_next(allreduce_at_once)
            used.append(self._wait(self.buckets[-1]))
        return used[0] if len(used) == 1 else set[int]().union(*used)

    @property
    def weight(self) -> float:
        """The weight of all ranks together in the last weighted round; 0 if there are no leaves."""
        return self.buckets[0].weight if self.buckets else 0.0

    def _start_next(self, hook: Hook) -> None:
        bucket = self.buckets[self._next]
        self._next += 1
        try:
            with profiled(f"ferrodist.{self._owner}.start_bucket"):
                bucket.start(hook)
        except ferrodist.DistributedError as error:
            self._explain(error, bucket)
            raise

    def _wait(self, bucket: Bucket) -> AbstractSet[int]:
        try:
            with profiled(f"ferrodist.{self._owner}.wait_for_bucket"):
                return bucket.wait()
        except ferrodist.DistributedError as error:
            self._explain(error, bucket)
            raise

    def _explain(self, error: ferrodist.DistributedError, bucket: Bucket) -> None:
        first, *rest = (self.leaves[number].name for number in bucket.layout.leaves)
        names = f"{first} to {rest[-1]}" if rest else first
        where = f"gradients of {names} (bucket {bucket.index + 1} of {len(self.buckets)})"
        explain(error, f"{self._owner}: {where}", self._advice)


def drifted_ranks(hashes: np.ndarray[Any, Any]) -> list[int]:
    """Name the ranks that differ from most of them, or from rank 0 where none are most."""
    values, counts = np.unique(hashes, return_counts=True)
    are_most = (counts == counts.max()).sum() == 1
    ranks: list[int] = np.flatnonzero(
        hashes != (values[counts.argmax()] if are_most else hashes[0])
    ).tolist()
    return ranks


def explain(error: ferrodist.DistributedError, what: str, advice: str) -> None:
    """Put before an error's text what was being done and, if ranks are not in step, the advice."""
    text, *rest = error.args
    how = getattr(error, "how", "")
    if isinstance(error, _OUT_OF_STEP) or how.startswith("left"):
        text += ("\n" if "\n" in text else "; ") + advice
    error.args = (f"{what}: {text}", *rest)
