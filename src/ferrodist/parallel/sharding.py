# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sharding: the numbers of samples, dealt to ranks so that none is lost and none comes twice.

An epoch is one order of all samples, the same on every rank. A *global batch* is the next run of
it, and every rank has a *share* of each. So a position is one number, the samples consumed, and
means the same in a world of any size.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

import ferrodist
from ferrodist.backends.registry import current_backend

Indices = np.ndarray[Any, np.dtype[np.int64]]


def order_of(num_samples: int, seed: int, epoch: int) -> Indices:
    """Return the shuffled order of an epoch: the same on every platform and with every NumPy."""
    # NumPy promises to keep the bits of SeedSequence and PCG64, and not those of permutation().
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    return np.argsort(bits.random_raw(num_samples), kind="stable").astype(np.int64, copy=False)


def share_of(batch: Indices, rank: int, world_size: int) -> Indices:
    """Return a rank's part of a batch; those of the first ranks may be longer by one."""
    size, longer = divmod(len(batch), world_size)
    start = rank * size + min(rank, longer)
    return batch[start : start + size + (rank < longer)]


class _Position(NamedTuple):
    epoch: int
    consumed: int


class IndexShards:
    """Give a rank its share of every global batch, as NumPy arrays of sample numbers.

    Iterating goes from the position at hand to the end of the epoch; then the position is the begin
    of the next one. All ranks get the same number of batches. In one that cannot be shared evenly
    the shares differ by one, and are empty on some ranks if there are fewer samples than ranks:
    weigh gradients by ``len(batch)``. With ``drop_last`` the last batch of an epoch is left out if
    it is not full. Either ``global_batch_size`` or ``rank_batch_size`` is given.

    For torch: ``DataLoader(dataset, batch_sampler=shards)``.

    Example:
        >>> from ferrodist.parallel.sharding import IndexShards
        >>> shards = IndexShards(7, 0, 2, global_batch_size=4, shuffle=False)
        >>> [batch.tolist() for batch in shards]
        [[0, 1], [4, 5]]
        >>> shards.state_dict()["epoch"]
        1
    """

    def __init__(
        self,
        num_samples: int,
        rank: int,
        world_size: int,
        *,
        global_batch_size: int | None = None,
        rank_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.num_samples = _check(num_samples, 0, "num_samples")
        self.world_size = _check(world_size, 1, "world_size")
        self.rank = _check_rank(rank, self.world_size)
        self.global_batch_size = _global_size(global_batch_size, rank_batch_size, self.world_size)
        self.seed = _check(seed, 0, "seed")
        self.shuffle = bool(shuffle)
        self._least = self.global_batch_size if drop_last else 1
        self._position = self._begin = _Position(0, 0)

    @property
    def epoch(self) -> int:
        """The epoch at hand, counted from 0."""
        return self._position.epoch

    @property
    def consumed(self) -> int:
        """How many samples all ranks together have been given in this epoch."""
        return self._position.consumed

    def __len__(self) -> int:
        """Return the number of batches in the pass at hand, or in the next one between two."""
        begin = self._begin.consumed if self.consumed else 0
        return self._count(begin)

    def __iter__(self) -> Iterator[Indices]:
        """Go on from the position at hand; a batch counts as consumed when it is given out."""
        self._begin = self._position = self._skip_end(self._position)
        return self._walk(self._begin)

    def _walk(self, begin: _Position) -> Iterator[Indices]:
        epoch, place = begin
        order = (
            order_of(self.num_samples, self.seed, epoch)
            if self.shuffle
            else np.arange(self.num_samples, dtype=np.int64)
        )
        while self._has_batch(place):
            batch = order[place : place + self.global_batch_size]
            place += len(batch)
            self._position = _Position(epoch, place)
            yield share_of(batch, self.rank, self.world_size)
        self._position = _Position(epoch + 1, 0)

    def set_epoch(self, epoch: int) -> None:
        """Go to the begin of an epoch; to stay in the one at hand changes nothing.

        There is no need to: every pass is of a new epoch.
        """
        number = _check(epoch, 0, "epoch")
        if number != self.epoch:
            self._position = self._begin = _Position(number, 0)

    def state_dict(self, num_batches: int | None = None) -> dict[str, int | bool]:
        """Return all it takes to go on from here, in a world of any size.

        ``num_batches``: how many batches of this pass have been used, where more than those have
        been fetched, as a DataLoader with workers does.
        """
        epoch, consumed = self._position
        if num_batches is not None:
            most = self._count(self._begin.consumed)
            epoch, consumed = self._begin
            consumed += _check(num_batches, 0, "num_batches", most) * self.global_batch_size
        return {
            "epoch": epoch,
            "consumed": min(consumed, self.num_samples),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_samples": self.num_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where a state was taken; every rank loads the same one."""
        for name in ("num_samples", "shuffle"):
            if _item(state, name) != getattr(self, name):
                raise ferrodist.InvalidArgument(
                    f"IndexShards: the state is of {name}={state[name]}, but here it is "
                    f"{getattr(self, name)}; it can only go on with the same samples in the same "
                    "order",
                    got=state[name],
                    expected=getattr(self, name),
                )
        consumed = _check(_item(state, "consumed"), 0, "consumed", self.num_samples)
        position = _Position(_check(_item(state, "epoch"), 0, "epoch"), consumed)
        self.seed = _check(_item(state, "seed"), 0, "seed")
        self._position = self._begin = self._skip_end(position)

    def _has_batch(self, place: int) -> bool:
        return place + self._least <= self.num_samples

    def _count(self, begin: int) -> int:
        left = self.num_samples - begin
        return (left + self.global_batch_size - self._least) // self.global_batch_size

    def _skip_end(self, position: _Position) -> _Position:
        """Step over an epoch that has been begun and has nothing left."""
        if position.consumed == 0 or self._has_batch(position.consumed):
            return position
        return _Position(position.epoch + 1, 0)


def shard_indices(
    num_samples: int,
    backend: ferrodist.Backend | None = None,
    *,
    global_batch_size: int | None = None,
    rank_batch_size: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
) -> IndexShards:
    """Deal the samples 0 to num_samples - 1 to the ranks: none is lost and none comes twice.

    Gives this rank's IndexShards. Nothing is sent: every rank passes the same arguments.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def body(backend):
        ...     shards = ferrodist.shard_indices(5, backend, rank_batch_size=1, seed=3)
        ...     return [batch.tolist() for batch in shards]
        >>> run_ranks(2, body)
        [[[4], [0], [2]], [[1], [3], []]]
    """
    backend = backend or current_backend()
    if backend is None:
        raise ferrodist.NotInitialized(
            "shard_indices: call ferrodist.init() first, or pass a backend"
        )
    return IndexShards(
        num_samples,
        backend.rank,
        backend.world_size,
        global_batch_size=global_batch_size,
        rank_batch_size=rank_batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )


# -- arguments -------------------------------------------------------------------------------------


def _check(value: Any, least: int, name: str, most: int | None = None) -> int:
    """Return an integer between two bounds."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or (most is not None and number > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ferrodist.InvalidArgument(
            f"IndexShards: {name} must be an integer {bounds}, got {value!r}", got=value
        )
    return number


def _check_rank(rank: Any, world_size: int) -> int:
    try:
        return _check(rank, 0, "rank", world_size - 1)
    except ferrodist.InvalidArgument as error:
        raise ferrodist.InvalidRank(str(error), rank=rank, world_size=world_size) from error


def _global_size(global_size: Any, rank_size: Any, world_size: int) -> int:
    """Work out the size of a global batch; every rank must have a part of a full one."""
    if (global_size is None) == (rank_size is None):
        found = "none" if global_size is None else "both"
        raise ferrodist.InvalidArgument(
            f"IndexShards: pass either global_batch_size or rank_batch_size, got {found} of them"
        )
    if global_size is None:
        return _check(rank_size, 1, "rank_batch_size") * world_size
    if _check(global_size, 1, "global_batch_size") < world_size:
        raise ferrodist.InvalidArgument(
            f"IndexShards: global_batch_size is {global_size}, which leaves some of the "
            f"{world_size} ranks without a sample in every batch; make it at least {world_size}",
            got=global_size,
            world_size=world_size,
        )
    return operator.index(global_size)


def _item(state: Mapping[str, Any], name: str) -> Any:
    if name not in state:
        raise ferrodist.InvalidArgument(
            f"IndexShards: the state has no {name!r}, only {sorted(state)}; pass what state_dict() "
            "returned",
            got=sorted(state),
        )
    return state[name]
