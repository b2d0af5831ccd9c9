# SPDX-License-Identifier: MIT OR Apache-2.0
"""Bucket: some gradients in one array, reduced by one call.

The array ends in a *tail*: one cell per leaf, 1 where this rank has a gradient for it, and one for
the weight of this rank. They are reduced along with the gradients, so that all ranks learn which
leaves nobody has used, and by how much to divide, without another call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from operator import sub
from sys import getrefcount
from typing import Any, NamedTuple

import ferrodist

# -- which gradients travel together: names, shapes and sizes, no arrays ---------------------------
#
# A *leaf* is one gradient. A *bucket* is a run of leaves of one dtype that are reduced as one
# array.

MIB = 1 << 20


class GradientSpec(NamedTuple):
    """One gradient: its name, its shape, and what ``backend.empty`` is to make for it.

    ``strides``, as torch counts them, where its elements are not in C order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    itemsize: int
    strides: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return self.size * self.itemsize


class BucketSizes(NamedTuple):
    """How large buckets become, in bytes.

    The first one is small, so that there is something to send soon after backward has begun.
    """

    first: int = MIB
    rest: int = 25 * MIB


class BucketLayout(NamedTuple):
    """The leaves of a bucket, by number, and where each begins in its array."""

    dtype: Any
    leaves: tuple[int, ...]
    starts: tuple[int, ...]
    size: int


def lay_out(
    leaves: Sequence[GradientSpec], order: Sequence[int], sizes: BucketSizes
) -> list[BucketLayout]:
    """Fill buckets in the order in which leaves become ready, and list them in that order too.

    A bucket is closed by the leaf that fills it. It is ready with its last leaf, so that is what
    buckets are sorted by.
    """
    filling: dict[Any, list[int]] = {}
    nbytes: dict[Any, int] = {}
    closed: list[list[int]] = []
    for number in order:
        leaf = leaves[number]
        filling.setdefault(leaf.dtype, []).append(number)
        nbytes[leaf.dtype] = nbytes.get(leaf.dtype, 0) + leaf.nbytes
        if nbytes[leaf.dtype] >= (sizes.rest if closed else sizes.first):
            closed.append(filling.pop(leaf.dtype))
            del nbytes[leaf.dtype]
    place = {number: at for at, number in enumerate(order)}
    buckets = [*closed, *filling.values()]
    return [_layout(leaves, one) for one in sorted(buckets, key=lambda one: place[one[-1]])]


def _layout(leaves: Sequence[GradientSpec], numbers: Sequence[int]) -> BucketLayout:
    starts, size = [], 0
    for number in numbers:
        starts.append(size)
        size += leaves[number].size
    return BucketLayout(leaves[numbers[0]].dtype, tuple(numbers), tuple(starts), size)


# -- buckets ---------------------------------------------------------------------------------------


HookSteps = Generator[ferrodist.Work[Any], Any, None]
"""What reduces a bucket: it yields calls in flight and is sent the result of each."""

Hook = Callable[["Bucket"], HookSteps]
"""A function of a bucket that leaves in ``bucket.array`` what all ranks have, reduced by ``op``."""


class BucketMemory:
    """An array of shared memory, where there is such, and the views of what is in it."""

    def __init__(
        self,
        layout: BucketLayout,
        leaves: Sequence[GradientSpec],
        backend: ferrodist.Backend,
        kind: str,
    ) -> None:
        self.array = backend.zeros(layout.size + len(layout.leaves) + 1, layout.dtype, kind)
        self.gradients = self.array[: layout.size]
        self.tail = self.array[layout.size :]
        self.views = {
            number: _view(self.array, start, leaves[number])
            for number, start in zip(layout.leaves, layout.starts, strict=True)
        }


def _view(array: Any, start: int, leaf: GradientSpec) -> Any:
    part = array[start : start + leaf.size]
    if leaf.strides is None:
        return part.reshape(leaf.shape)
    return part.as_strided(leaf.shape, leaf.strides)


class Bucket:
    """Several gradients in one array, as a DDP ``hook`` gets them.

    ``array`` is the whole memory; ``gradients`` and ``tail`` are parts of it. ``views`` are the
    gradients in their own shapes, by number. ``op`` is how the arrays of the ranks are reduced.
    """

    def __init__(
        self,
        index: int,
        layout: BucketLayout,
        leaves: Sequence[GradientSpec],
        backend: ferrodist.Backend,
        kind: str,
    ) -> None:
        self.index = index
        self.layout = layout
        self.backend = backend
        self.op = "mean"
        self.new_memory = partial(BucketMemory, layout, leaves, backend, kind)
        self.use(self.new_memory())
        self._leaves = frozenset(layout.leaves)
        self._ones = [1.0] * len(self.tail)  # what the tail holds where every leaf is used
        self._ready: set[int] = set()
        self.weight = 0.0  # that of all ranks together, after a round
        self._weight: float | None = None
        self._divisor: float | None = None
        self._steps: HookSteps | None = None
        self._work: ferrodist.Work[Any] | None = None

    def use(self, memory: BucketMemory) -> None:
        """Have gradients in this memory from now on."""
        self.memory = memory
        self.array, self.gradients = memory.array, memory.gradients
        self.tail, self.views = memory.tail, memory.views
        self._is_tail_ones = False

    def begin(self, weight: float | None, divisor: float | None) -> None:
        """Begin a round: nothing is ready. With a weight the mean becomes a weighted one.

        It is divided by the weights of all ranks, or by ``divisor``.
        """
        self._ready.clear()
        self._weight, self._divisor = weight, divisor
        self.op = "mean" if weight is None else "sum"

    def set_ready(self, numbers: Iterable[int]) -> None:
        """Say that leaves have their gradients in their views."""
        self._ready.update(numbers)

    @property
    def is_ready(self) -> bool:
        """True if every leaf has."""
        return len(self._ready) == len(self.layout.leaves)

    @property
    def not_ready(self) -> list[int]:
        """The leaves that have none."""
        return [number for number in self.layout.leaves if number not in self._ready]

    def start(self, hook: Hook) -> None:
        """Begin to reduce it."""
        if self._weight is not None and self.array.dtype.itemsize == 2:
            self._widen()
        self._fill_tail()
        if self._weight == 0:
            self.gradients[...] = 0  # also what is not finite
        elif self._weight not in (None, 1.0):
            self.gradients *= self._weight
        self._steps = hook(self)
        self._note(next(self._steps, None))

    def _widen(self) -> None:
        """Have float32 in place of 16 bits for this round: weights and products fit into that."""
        self.array = self.array.float()
        self.gradients, self.tail = self.array[: self.layout.size], self.array[self.layout.size :]

    def _fill_tail(self) -> None:
        was_ones, self._is_tail_ones = self._is_tail_ones, False
        if was_ones and self.is_ready and self._weight is None:
            return  # as the last round has left it
        self.tail[...] = 1
        if self._weight is not None:
            self.tail[-1] = self._weight
        for at, number in enumerate(self.layout.leaves):
            if number not in self._ready:
                self.tail[at] = 0

    def wait(self) -> AbstractSet[int]:
        """Wait until it is reduced; return the leaves that some rank has a gradient for."""
        assert self._steps is not None
        while self._work is not None:
            result = self._work.result()
            try:
                self._note(self._steps.send(result))
            except StopIteration:
                self._work = None
        found = self.tail.tolist()
        if found == self._ones and self._weight is None:
            self._is_tail_ones = True
            return self._leaves
        *cells, self.weight = (cell.real for cell in found)
        if self._weight is not None and self.weight > 0:
            self.gradients /= self._divisor or self.weight
        if self.array is not self.memory.array:  # it was widened
            self.memory.gradients.copy_(self.gradients)
            self.use(self.memory)
        return {number for number, cell in zip(self.layout.leaves, cells, strict=True) if cell > 0}

    def _note(self, work: ferrodist.Work[Any] | None) -> None:
        self._work = work
        if work is not None:
            work.is_asked = True  # by the round, or that has failed already, of something else


def allreduce_bucket(bucket: Bucket) -> HookSteps:
    """Reduce a bucket as it is: one call, in place."""
    yield ferrodist.allreduce(
        bucket.array, bucket.backend, op=bucket.op, out=bucket.array, async_op=True
    )


def allreduce_at_once(bucket: Bucket) -> HookSteps:
    """Do the same, in a call that blocks."""
    ferrodist.allreduce(bucket.array, bucket.backend, op=bucket.op, out=bucket.array)
    yield from ()


# -- gradients that a program still holds when the next round begins -------------------------------
#
# It may keep ``.grad``, or anything that shares its memory, and go on. Before a round would write
# to what is kept, the bucket moves to another array and leaves the old one to the program.


class Memories:
    """The memory of a bucket, and the one it had before, to go back to once that is free."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._now = _Uses(bucket.memory)
        self._before: _Uses | None = None

    def are_kept(self, parameters: Sequence[Any]) -> bool:
        """Tell whether a round would overwrite memory that the program still holds.

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

    def are_free(self, parameters: Sequence[Any]) -> bool:
        """Tell whether nothing refers to any of it, not even a parameter's gradient."""
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
        import torch  # here, because trees of other arrays have buckets too

        self.memory = memory
        self._count_uses = partial(
            torch._C._storage_Use_Count, memory.array.untyped_storage()._cdata
        )
        self._num_uses: int = self._count_uses()
        once = list(map(getrefcount, memory.views.values()))
        self._counts = [once, [count + 1 for count in once]]

    def are_all_ours(self, more: int) -> bool:
        counts = list(map(getrefcount, self.memory.views.values()))
        return counts == self._counts[more] and self.others_by_alias() == 0

    def others_by_view(self, more: int) -> list[int]:
        return list(map(sub, map(getrefcount, self.memory.views.values()), self._counts[more]))

    def others_by_alias(self) -> int:
        return int(self._count_uses()) - self._num_uses
