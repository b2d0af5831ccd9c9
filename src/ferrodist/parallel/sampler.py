# SPDX-License-Identifier: MIT OR Apache-2.0
"""ShardedSampler: a rank's samples one after the other, for torch's DataLoader to make batches of.

torch is not imported: its DataLoader takes whatever has a length and can be iterated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

import ferrodist
from ferrodist.parallel.sharding import Epochs, Position, Remainder, backend_of, padded


class ShardedSampler(Epochs):
    """Give a rank its samples of a dataset, one number after the other; for torch's DataLoader.

    ``DataLoader(dataset, batch_size=32, sampler=ShardedSampler(dataset))``. Nothing is sent: every
    rank passes the same arguments.

    ``remainder`` says what becomes of the samples that the ranks cannot share evenly. ``"pad"``:
    some come twice, ``"drop"``: they are left out; with both, all ranks have the same number of
    samples, as DDP needs it. ``"uneven"``: some ranks, others in every epoch, have one more, and
    none is lost or comes twice.

    Every pass is of a new epoch, with an order of its own if ``shuffle``, also where the pass
    before was left early.

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
        """How many samples all ranks together have been given in this epoch."""
        return self._after(self._num_given).consumed

    def __len__(self) -> int:
        """Return the number of samples this rank has in the pass at hand, or in the next one."""
        return self._length(self._begin if self._num_given else self._next)

    def __iter__(self) -> Iterator[int]:
        """Begin a pass: of the next epoch, or where a state was taken that has been loaded."""
        begin = self._skip_end(self._next)
        self._go_to(begin)
        self._next = Position(begin.epoch + 1, 0)
        return self._walk(begin)

    def _walk(self, begin: Position) -> Iterator[int]:
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
        """Return all it takes to go on from here, in a world of any size.

        ``num_samples``: how many samples this rank has used since the pass began, where more than
        those have been fetched, as a DataLoader with workers does. ``steps * batch_size`` will do:
        it may be more than there are.
        """
        if num_samples is None:
            return self._state(self._after(self._num_given))
        used = self._check(num_samples, 0, "num_samples")
        return self._state(self._after(used) if used else self._begin)
