# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sharding: the numbers of samples, dealt to ranks so that none is lost and none comes twice.

An epoch is one order of all samples, the same on every rank, and a position in it is one number,
the samples that all ranks have consumed: it means the same in a world of any size. IndexShards
gives a rank its share of each *global batch*, the next run of the order; ShardedSampler its samples
one after the other, for torch's DataLoader, which takes whatever has a length and can be iterated.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sized
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

import ferrodist
from ferrodist.parallel import backend_of

Indices = np.ndarray[Any, np.dtype[np.int64]]
Remainder = Literal["pad", "drop", "uneven"]


def order_of(num_samples: int, seed: int, epoch: int) -> Indices:
    """Return the shuffled order of an epoch: the same on every platform and with every NumPy."""
    # NumPy promises to keep the bits of SeedSequence and PCG64, and not those of permutation().
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    return np.argsort(bits.random_raw(num_samples), kind="stable").astype(np.int64, copy=False)


def share_of(batch: Indices, rank: int, world_size: int, first: int = 0) -> Indices:
    """Return a rank's part of a batch; from rank ``first`` on, some may be longer by one."""
    size, longer = divmod(len(batch), world_size)
    is_longer = (np.arange(rank + 1) - first) % world_size < longer
    start = rank * size + int(is_longer[:rank].sum())
    return batch[start : start + size + int(is_longer[rank])]


class Position(NamedTuple):
    """How far the samples have been given out: an epoch, and how many of it to all ranks."""

    epoch: int
    consumed: int


class Epochs:
    """Orders of all samples, one epoch after the other, and the state that says how far it is."""

    def __init__(
        self, num_samples: int, rank: int, world_size: int, *, shuffle: bool, seed: int
    ) -> None:
        self.num_samples = self._check(num_samples, 0, "num_samples")
        self.world_size = self._check(world_size, 1, "world_size")
        self.rank = self._check_rank(rank)
        self.seed = self._check(seed, 0, "seed")
        self.shuffle = bool(shuffle)
        self._go_to(Position(0, 0))

    def _go_to(self, position: Position) -> None:
        """Let the next pass begin here."""
        self._position = self._begin = position

    @property
    def epoch(self) -> int:
        """The epoch at hand, counted from 0."""
        return self._position.epoch

    @property
    def consumed(self) -> int:
        """The number of samples that all ranks together have taken in this epoch."""
        return self._position.consumed

    def set_epoch(self, epoch: int) -> None:
        """Go to the begin of an epoch; to stay in the one at hand changes nothing.

        There is no need to: every pass is of a new epoch.
        """
        number = self._check(epoch, 0, "epoch")
        if number != self._begin_of_next().epoch:
            self._go_to(Position(number, 0))

    def _begin_of_next(self) -> Position:
        return self._position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where a state was taken; every rank loads the same one."""
        for name in ("num_samples", "shuffle"):
            if self._item(state, name) != getattr(self, name):
                raise ferrodist.InvalidArgument(
                    f"{self._name}: the state is of {name}={state[name]}, but here it is "
                    f"{getattr(self, name)}; it can only go on with the same samples in the same "
                    "order",
                    got=state[name],
                    expected=getattr(self, name),
                )
        consumed = self._check(self._item(state, "consumed"), 0, "consumed", self.num_samples)
        position = Position(self._check(self._item(state, "epoch"), 0, "epoch"), consumed)
        self.seed = self._check(self._item(state, "seed"), 0, "seed")
        self._go_to(self._skip_end(position))

    def _state(self, position: Position) -> dict[str, int | bool]:
        return {
            "epoch": position.epoch,
            "consumed": min(position.consumed, self.num_samples),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_samples": self.num_samples,
        }

    def _order(self, epoch: int) -> Indices:
        if self.shuffle:
            return order_of(self.num_samples, self.seed, epoch)
        return np.arange(self.num_samples, dtype=np.int64)

    def _has_more(self, place: int) -> bool:
        """Tell whether there is anything to give after so many samples of an epoch."""
        raise NotImplementedError

    def _skip_end(self, position: Position) -> Position:
        """Step over an epoch that has been begun and has nothing left."""
        if position.consumed == 0 or self._has_more(position.consumed):
            return position
        return Position(position.epoch + 1, 0)

    # -- arguments ------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _check(self, value: Any, least: int, name: str, most: int | None = None) -> int:
        """Return an integer between two bounds."""
        try:
            number = operator.index(value)
        except TypeError:
            number = least - 1
        if number < least or (most is not None and number > most):
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            raise ferrodist.InvalidArgument(
                f"{self._name}: {name} must be an integer {bounds}, got {value!r}", got=value
            )
        return number

    def _check_rank(self, rank: Any) -> int:
        try:
            return self._check(rank, 0, "rank", self.world_size - 1)
        except ferrodist.InvalidArgument as error:
            text, world_size = str(error), self.world_size
            raise ferrodist.InvalidRank(text, rank=rank, world_size=world_size) from error

    def _check_remainder(self, remainder: Any) -> Remainder:
        known = get_args(Remainder)
        if remainder not in known:
            names = ", ".join(map(repr, known))
            raise ferrodist.InvalidArgument(
                f"{self._name}: remainder is one of {names}, got {remainder!r}", got=remainder
            )
        checked: Remainder = remainder
        return checked

    def _item(self, state: Mapping[str, Any], name: str) -> Any:
        if name not in state:
            raise ferrodist.InvalidArgument(
                f"{self._name}: the state has no {name!r}, only {sorted(state)}; pass what "
                "state_dict() returned",
                got=sorted(state),
            )
        return state[name]


class IndexShards(Epochs):
    """Iterate over this rank's share of every global batch, as NumPy arrays of sample indices.

    Iterating continues from the current position to the end of the epoch; the next iteration is
    the next epoch. All ranks get the same number of batches. Pass either ``global_batch_size`` or
    ``rank_batch_size``.

    ``remainder`` says what to do with a batch that cannot be divided evenly among the ranks.
    ``"uneven"``: shares differ by one, not always on the same ranks, so weight gradients by
    ``len(batch)``; a last batch with fewer samples than ranks is merged into the one before, so
    that no share is empty. ``"pad"``: the last batch is filled with the first samples of the epoch.
    ``"drop"``: the surplus samples are dropped. With both, shares are equal. ``drop_last`` drops a
    last batch that is not full.

    For torch: ``DataLoader(dataset, batch_sampler=shards)``.

    Example:
        >>> from ferrodist.parallel.sharding import IndexShards
        >>> shards = IndexShards(7, 0, 2, global_batch_size=4, shuffle=False)
        >>> [batch.tolist() for batch in shards]
        [[0, 1], [4]]
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
        remainder: Remainder = "uneven",
        drop_last: bool = False,
    ) -> None:
        super().__init__(num_samples, rank, world_size, shuffle=shuffle, seed=seed)
        self.remainder = self._check_remainder(remainder)
        self.global_batch_size = self._global_size(global_batch_size, rank_batch_size)
        self.drop_last = bool(drop_last)

    def __len__(self) -> int:
        """Return the number of batches in the pass at hand, or in the next one between two."""
        return self._count(self._begin.consumed if self.consumed else 0)

    def __iter__(self) -> Iterator[Indices]:
        """Go on from the position at hand; a batch counts as consumed when it is given out."""
        self._go_to(self._skip_end(self._position))
        return self._iterate(self._begin)

    def _iterate(self, begin: Position) -> Iterator[Indices]:
        epoch, place = begin
        order = self._order(epoch)
        while size := self._batch_size(place):
            batch = order[place : place + size]
            if self.remainder == "pad":
                batch = padded(batch, order, self.world_size)
            # The ranks that get one more are other ones the next time.
            first = epoch + place // self.global_batch_size
            place += size
            self._position = Position(epoch, place)
            yield share_of(batch, self.rank, self.world_size, first)
        self._position = Position(epoch + 1, 0)

    def state_dict(self, num_batches: int | None = None) -> dict[str, int | bool]:
        """Return the position, to resume from it with any number of ranks.

        ``num_batches``: how many batches of this iteration the program has used, if more than
        those were fetched, as a DataLoader with workers does.
        """
        if num_batches is None:
            return self._state(self._position)
        epoch, consumed = self._begin
        most = self._count(consumed)
        consumed += self._check(num_batches, 0, "num_batches", most) * self.global_batch_size
        return self._state(Position(epoch, self.num_samples if num_batches == most else consumed))

    def _batch_size(self, place: int) -> int:
        """Return how many samples the next batch takes from the order; 0 at the end."""
        left, full = self.num_samples - place, self.global_batch_size
        if self.drop_last:
            return full if left >= full else 0
        if self.remainder == "drop":
            left -= left % self.world_size
        elif self.remainder == "uneven" and left - full < self.world_size:
            return left  # also the few after it: alone they would not do for all ranks
        return min(left, full)

    def _count(self, place: int) -> int:
        count = max(0, (self.num_samples - place) // self.global_batch_size - 1)
        place += count * self.global_batch_size  # these are full, the rest may be of any size
        while size := self._batch_size(place):
            place, count = place + size, count + 1
        return count

    def _has_more(self, place: int) -> bool:
        return self._batch_size(place) > 0

    def _global_size(self, global_size: Any, rank_size: Any) -> int:
        """Work out the size of a global batch; every rank must have a part of a full one."""
        if (global_size is None) == (rank_size is None):
            found = "none" if global_size is None else "both"
            raise ferrodist.InvalidArgument(
                f"IndexShards: pass either global_batch_size or rank_batch_size, got {found} of "
                "them"
            )
        world_size = self.world_size
        if global_size is None:
            return self._check(rank_size, 1, "rank_batch_size") * world_size
        size = self._check(global_size, 1, "global_batch_size")
        if size < world_size:
            raise ferrodist.InvalidArgument(
                f"IndexShards: global_batch_size is {size}, which leaves some of the "
                f"{world_size} ranks without a sample in every batch; make it at least "
                f"{world_size}",
                got=size,
                world_size=world_size,
            )
        if size % world_size and self.remainder != "uneven":
            raise ferrodist.InvalidArgument(
                f"IndexShards: global_batch_size is {size}, which {world_size} ranks cannot share "
                f"evenly in any batch; make it a multiple of {world_size}, or pass "
                "remainder='uneven' and weigh gradients by len(batch)",
                got=size,
                world_size=world_size,
            )
        return size


def padded(samples: Indices, order: Indices, world_size: int) -> Indices:
    """Fill up with the first of an order, again and again, to what ranks can share evenly."""
    missing = -len(samples) % world_size
    return np.concatenate([samples, np.resize(order, missing)]) if missing else samples


def shard_indices(
    num_samples: int,
    backend: ferrodist.Backend | None = None,
    *,
    global_batch_size: int | None = None,
    rank_batch_size: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    remainder: Remainder = "uneven",
    drop_last: bool = False,
) -> IndexShards:
    """Return this rank's IndexShards of the samples 0 to num_samples - 1.

    Together, the ranks get every sample exactly once, unless ``remainder`` pads or drops. No
    communication: every rank passes the same arguments.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def body(backend):
        ...     shards = ferrodist.shard_indices(5, backend, rank_batch_size=1, seed=3)
        ...     return [batch.tolist() for batch in shards]
        >>> run_ranks(2, body)
        [[[4], [0]], [[1], [3, 2]]]
    """
    backend = backend_of(backend, "shard_indices")
    return IndexShards(
        num_samples,
        backend.rank,
        backend.world_size,
        global_batch_size=global_batch_size,
        rank_batch_size=rank_batch_size,
        shuffle=shuffle,
        seed=seed,
        remainder=remainder,
        drop_last=drop_last,
    )


class ShardedSampler(Epochs):
    """A sampler for torch's DataLoader that yields this rank's samples, like DistributedSampler.

    ``DataLoader(dataset, batch_size=32, sampler=ShardedSampler(dataset))``. No communication: every
    rank passes the same arguments.

    ``remainder`` says what to do with samples that cannot be divided evenly among the ranks.
    ``"pad"``: some samples are repeated. ``"drop"``: they are dropped. With both, all ranks have
    the same number of samples, as DDP requires. ``"uneven"``: some ranks, different ones in each
    epoch, have one more, and every sample is used once.

    Each iteration is a new epoch, with a new order if ``shuffle``, even if the last iteration was
    not finished.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def body(backend):
        ...     sampler = ferrodist.ShardedSampler(range(5), backend, shuffle=False)
        ...     return list(sampler)
        >>> run_ranks(2, body)
        [[0, 2, 4], [1, 3, 0]]
    """

    def __init__(
        self,
        dataset: Sized,
        backend: ferrodist.Backend | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        remainder: Remainder = "pad",
    ) -> None:
        place = backend_of(backend, "ShardedSampler")
        super().__init__(len(dataset), place.rank, place.world_size, shuffle=shuffle, seed=seed)
        self.remainder = self._check_remainder(remainder)

    def _go_to(self, position: Position) -> None:
        super()._go_to(position)
        self._next = position
        self._num_given = 0  # to this rank, since the pass began

    def _begin_of_next(self) -> Position:
        return self._next

    @property
    def consumed(self) -> int:
        """The number of samples that all ranks together have taken in this epoch."""
        return self._after(self._num_given).consumed

    def __len__(self) -> int:
        """Return the number of samples this rank has in the pass at hand, or in the next one."""
        return self._length(self._begin if self._num_given else self._next)

    def __iter__(self) -> Iterator[int]:
        """Begin a pass: of the next epoch, or where a state was taken that has been loaded."""
        begin = self._skip_end(self._next)
        self._go_to(begin)
        self._next = Position(begin.epoch + 1, 0)
        return self._iterate(begin)

    def _iterate(self, begin: Position) -> Iterator[int]:
        order = self._order(begin.epoch)
        samples = order[begin.consumed :]
        if self.remainder == "pad":
            samples = padded(samples, order, self.world_size)
        mine = samples[self._first(begin.epoch) :: self.world_size][: self._length(begin)]
        for number, sample in enumerate(mine.tolist(), 1):
            self._num_given = number
            yield sample
        self._position, self._num_given = self._next, 0

    def _first(self, epoch: int) -> int:
        """Return where this rank's samples begin: those of one more are others in every epoch."""
        return (self.rank - epoch) % self.world_size if self.remainder == "uneven" else self.rank

    def _length(self, begin: Position) -> int:
        each, more = divmod(self.num_samples - begin.consumed, self.world_size)
        if self.remainder == "uneven":
            return each + (self._first(begin.epoch) < more)
        return each + (more > 0 and self.remainder == "pad")

    def _has_more(self, place: int) -> bool:
        left = self.num_samples - place
        return left >= (self.world_size if self.remainder == "drop" else 1)

    def _after(self, num_given: int) -> Position:
        """Return the position when so many samples have been given in the pass at hand."""
        if num_given == 0:
            return self._position
        epoch, consumed = self._begin
        return Position(epoch, min(consumed + num_given * self.world_size, self.num_samples))

    def state_dict(self, num_samples: int | None = None) -> dict[str, int | bool]:
        """Return the position, to resume from it with any number of ranks.

        ``num_samples``: how many samples of this iteration this rank has used, if more than those
        were fetched, as a DataLoader with workers does. ``steps * batch_size`` will do, even if it
        exceeds the number of samples.
        """
        if num_samples is None:
            return self._state(self._after(self._num_given))
        used = self._check(num_samples, 0, "num_samples")
        return self._state(self._after(used) if used else self._begin)
