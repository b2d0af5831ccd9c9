# SPDX-License-Identifier: MIT OR Apache-2.0
"""Grid: a group whose ranks stand in rows and columns, and exchange data with their neighbors.

A grid is whatever ``split`` makes, with a shape: the group's own class, and ``Grid`` before it. An
exchange is one message per direction, with a tag of its own, so that two ranks that are neighbors
twice keep the directions apart. All of them are posted at once: a rank waits for its own neighbors
only, and not for theirs.
"""

from __future__ import annotations

import functools
import math
import operator
import re
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np

from ferrodist.arrays import (
    OutputArray,
    OverlapKind,
    as_input,
    as_output,
    overlap,
)
from ferrodist.backends.base import Backend
from ferrodist.backends.call_methods import No, Yes
from ferrodist.backends.receive import Receive
from ferrodist.buffer import DType
from ferrodist.call import MAX_TAG, Call, Kind, Leaf, as_index, caller_site
from ferrodist.config import DEFAULT, Timeout
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    CollectiveTimeout,
    DistributedError,
    InvalidArgument,
    InvalidWorldSize,
    OutOfMemory,
    ProtocolError,
    RankLost,
    SizeMismatch,
)
from ferrodist.message_status import PROC_NULL
from ferrodist.work import Work

NOBODY = -1  # in places of ranks, as native code takes them
_OF_MESSAGES = (SizeMismatch, CollectiveTimeout, RankLost, ProtocolError, OutOfMemory)
_FIRST_TAG = MAX_TAG + 65  # no user's; one for each direction
_MESSAGE = re.compile(r"(send|recv)\((?:src|dst)=(\d+), tag=(\d{10})\)")


@dataclass(frozen=True, slots=True)
class Place:
    """A grid, and where one of its ranks stands; ``neighbors`` go by direction."""

    shape: tuple[int, ...]
    periodic: tuple[bool, ...]
    coords: tuple[int, ...]
    neighbors: tuple[int, ...] = ()

    @classmethod
    def of(cls, rank: int, shape: tuple[int, ...], periodic: tuple[bool, ...]) -> Place:
        """Find the place of a rank."""
        coords = tuple(int(at) for at in np.unravel_index(rank, shape))
        alone = cls(shape, periodic, coords)
        ways = [(axis, step) for axis in range(len(shape)) for step in (-1, 1)]
        return replace(alone, neighbors=tuple(alone.rank_beside(*way) for way in ways))

    @property
    def ways(self) -> list[int]:
        """The directions in which there is a neighbor."""
        return [way for way, peer in enumerate(self.neighbors) if peer != NOBODY]

    def rank_beside(self, axis: int, step: int) -> int:
        """Return the rank ``step`` places further along an axis; NOBODY beyond an open edge."""
        coords, length = list(self.coords), self.shape[axis]
        coords[axis] += step
        if not 0 <= coords[axis] < length and not self.periodic[axis]:
            return NOBODY
        coords[axis] %= length
        return int(np.ravel_multi_index(coords, self.shape))

    def check_axis(self, axis: Any, what: str) -> int:
        """Return an axis as an index >= 0; raise if there is no such axis."""
        num_axes = len(self.shape)
        number = as_index(axis)
        if number is None or not -num_axes <= number < num_axes:
            text = f"{what}: axis {axis!r} is not one of the {num_axes} axes of grid {self.shape}"
            raise InvalidArgument(text, got=axis, expected=num_axes)
        return number % num_axes

    def list_by_direction(self, items: Any, what: str) -> list[Any]:
        """List one item per direction."""
        found = items if type(items) is list else None
        if found is None and isinstance(items, Iterable):
            found = list(items)
        if found is None or len(found) != len(self.neighbors):
            got = type(items).__name__ if found is None else len(found)
            raise InvalidArgument(
                f"{what} must have one entry per direction, {len(self.neighbors)} in a grid of "
                f"{len(self.shape)} axes, got {got}",
                expected=len(self.neighbors),
                got=got,
            )
        return found


class Grid(Backend):
    """A group whose ranks form a Cartesian grid, row by row; made by ``backend.grid`` and ``sub``.

    It has everything that a Backend has; ``split`` makes groups without a grid. *Directions* are
    ordered: axis 0 lower, axis 0 higher, axis 1 lower, axis 1 higher, and so on.
    """

    # All its names that are not public: any other may be one of the group's class.
    _plain: type[Backend]  # that class
    _place: Place

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each axis."""
        return self._place.shape

    @property
    def periodic(self) -> tuple[bool, ...]:
        """For each axis, whether its first and last ranks are neighbors."""
        return self._place.periodic

    @property
    def coords(self) -> tuple[int, ...]:
        """This rank's coordinates, equal to ``np.unravel_index(rank, grid.shape)``."""
        return self._place.coords

    def shift(self, axis: int, step: int = 1) -> tuple[Any, Any]:
        """Return ``(source, destination)`` of a shift by ``step`` ranks along an axis.

        Beyond an open edge it is ``ferrodist.PROC_NULL``: ``sendrecv`` sends nothing there.

        Example:
            >>> from ferrodist.testing import run_ranks
            >>> run_ranks(3, lambda backend: backend.grid(3, periodic=True).shift(0))
            [(2, 1), (0, 2), (1, 0)]
        """
        axis = self._place.check_axis(axis, "shift")
        try:
            distance = operator.index(step)
        except TypeError as error:
            raise InvalidArgument(f"shift: step must be an int, got {step!r}", got=step) from error
        src, dst = (self._place.rank_beside(axis, by) for by in (-distance, distance))
        return PROC_NULL if src == NOBODY else src, PROC_NULL if dst == NOBODY else dst

    def sub(self, axes: int | Sequence[int], *, timeout: Timeout = DEFAULT) -> Grid:
        """Make the subgrid of the ranks that differ from this one only along ``axes``.

        Every rank calls it. ``grid.sub(1)`` is this rank's row. Its axes are in the order given.

        Example:
            >>> from ferrodist.testing import run_ranks
            >>> def sum_of_row(backend):
            ...     return backend.grid((2, 2)).sub(1).allreduce(backend.rank)
            >>> run_ranks(4, sum_of_row)
            [1, 1, 5, 5]
        """
        named = axes if isinstance(axes, Iterable) else (axes,)
        kept = [self._place.check_axis(axis, "sub") for axis in named]
        if len(set(kept)) < len(kept):
            raise InvalidArgument(f"sub: an axis is named twice in {axes!r}", got=axes)
        ranks = np.arange(self.world_size).reshape(self.shape)
        here = [slice(None) if axis in kept else at for axis, at in enumerate(self.coords)]
        members = ranks[tuple(here)].transpose([sorted(kept).index(axis) for axis in kept])
        group = self.split(members.reshape(-1).tolist(), timeout=timeout)
        return _as_grid(group, members.shape, tuple(self.periodic[axis] for axis in kept))

    def split(self, ranks: Sequence[int], *, timeout: Timeout = DEFAULT) -> Any:
        """Make a group of some ranks, without a grid, as ``Backend.split`` does."""
        group = super().split(ranks, timeout=timeout)  # type: ignore[safe-super] # of the group's class
        group.__class__ = self._plain  # type: ignore[assignment] # it was made as one like this
        return group

    def dup(self, *, timeout: Timeout = DEFAULT) -> Grid:
        """Make a grid of the same ranks and shape, with calls and messages of its own."""
        return _as_grid(super().dup(timeout=timeout), self.shape, self.periodic)

    # -- exchanges with neighbors -----------------------------------------------------------------

    @overload
    def neighbor_all_gather(
        self, x: Any, *, out: Any = ..., timeout: Timeout = ..., async_op: No = ...
    ) -> list[Any]: ...
    @overload
    def neighbor_all_gather(
        self, x: Any, *, out: Any = ..., timeout: Timeout = ..., async_op: Yes
    ) -> Work[list[Any]]: ...
    def neighbor_all_gather(
        self, x: Any, *, out: Any = None, timeout: Timeout = DEFAULT, async_op: bool = False
    ) -> Any:
        """Send ``x`` to all neighbors; return a list of what they sent, by direction.

        The list has None beyond open edges. ``out`` may list an array, or None, for each
        direction. Only neighbors wait for each other. ``async_op=True`` returns a Work: what does
        not depend on the neighbors can be computed meanwhile.

        Example:
            >>> from ferrodist.testing import run_ranks
            >>> run_ranks(3, lambda b: b.grid(3).neighbor_all_gather(10 * b.rank))
            [[None, 10], [0, 20], [10, None]]
        """
        parts = [x] * len(self._place.neighbors)
        return _exchange(self, "neighbor_all_gather", parts, out, timeout, async_op)

    @overload
    def neighbor_all_to_all(
        self, parts: Iterable[Any], *, out: Any = ..., timeout: Timeout = ..., async_op: No = ...
    ) -> list[Any]: ...
    @overload
    def neighbor_all_to_all(
        self, parts: Iterable[Any], *, out: Any = ..., timeout: Timeout = ..., async_op: Yes
    ) -> Work[list[Any]]: ...
    def neighbor_all_to_all(
        self,
        parts: Iterable[Any],
        *,
        out: Any = None,
        timeout: Timeout = DEFAULT,
        async_op: bool = False,
    ) -> Any:
        """Send one part to each neighbor; return a list of what they sent, by direction.

        ``parts`` is in the order of directions, too. Parts beyond an open edge are ignored, and
        the result has None there. Neighbors may send other shapes than this rank. ``out`` may list
        an array, or None, for each direction. ``async_op=True`` returns a Work.

        Example:
            >>> from ferrodist.testing import run_ranks
            >>> def swap(backend):
            ...     me = backend.rank
            ...     return backend.grid(3, periodic=True).neighbor_all_to_all([-me, me])
            >>> run_ranks(3, swap)
            [[2, -1], [0, -2], [1, 0]]
        """
        return _exchange(self, "neighbor_all_to_all", parts, out, timeout, async_op)

    def __dir__(self) -> list[str]:
        own = {name for name in vars(Grid) if not name.startswith("_")}
        return sorted(own.union(super().__dir__()))

    def __repr__(self) -> str:
        state = ", closed" if self.is_closed else ""
        name = f"{self._plain.__name__} grid {self._place.shape}"
        return f"<{name} rank {self.rank} of {self.world_size} at {self._place.coords}{state}>"


def make_grid(backend: Backend, shape: Any, periodic: Any, timeout: Timeout) -> Grid:
    """Make a grid of all ranks of a backend; ranks that pass different shapes are told so."""
    backend._check_usable()
    lengths = _check_shape(shape, backend)
    wraps = _check_periodic(periodic, len(lengths))
    deadline = backend._deadline(timeout)
    leaves = (
        Leaf("shape", DType.INT64, lengths),
        Leaf("periodic", DType.BOOL, tuple(map(int, wraps))),
    )
    call = Call(Kind.GRID, leaves, site=caller_site())
    backend._run_call(call, deadline, lambda running: running.collective(Kind.BARRIER))
    group = backend.split(range(backend.world_size), timeout=deadline.rest_of(timeout))
    return _as_grid(group, lengths, wraps)


def _as_grid(group: Any, shape: tuple[int, ...], periodic: tuple[bool, ...]) -> Grid:
    plain: type[Backend] = type(group)
    group.__class__ = _grid_class(plain)
    group._place = Place.of(group.rank, shape, periodic)
    made: Grid = group
    return made


@functools.cache
def _grid_class(kind: type[Backend]) -> type[Grid]:
    """Put Grid before the class of a group."""
    return type(f"{kind.__name__}Grid", (Grid, kind), {"_plain": kind, "__doc__": Grid.__doc__})


def _check_shape(shape: Any, backend: Backend) -> tuple[int, ...]:
    try:
        named = shape if isinstance(shape, Iterable) else (shape,)
        lengths = tuple(operator.index(length) for length in named)
    except TypeError as error:
        text = f"grid: a shape is made of integers, got {shape!r}"
        raise InvalidArgument(text, got=shape) from error
    if any(length < 1 for length in lengths) or math.prod(lengths) != backend.world_size:
        raise InvalidWorldSize(
            f"grid: shape {lengths} has {math.prod(lengths)} places, the group has "
            f"{backend.world_size} ranks",
            got=lengths,
            world_size=backend.world_size,
            this_rank=backend.rank,
        )
    return lengths


def _check_periodic(periodic: Any, num_axes: int) -> tuple[bool, ...]:
    flags = list(periodic) if isinstance(periodic, Iterable) else [periodic] * num_axes
    if any(not isinstance(flag, (bool, np.bool_)) and flag not in (0, 1) for flag in flags):
        text = f"grid: periodic must be a bool, or one for each axis, got {periodic!r}"
        raise InvalidArgument(text, got=periodic)
    if len(flags) != num_axes:
        text = f"grid: periodic must have {num_axes} entries, one for each axis, got {periodic!r}"
        raise InvalidArgument(text, got=periodic, expected=num_axes)
    return tuple(map(bool, flags))


# -- exchanges with neighbors ----------------------------------------------------------------------


def _exchange(
    grid: Grid, name: str, parts: Any, out: Any, timeout: Timeout, is_async: bool
) -> list[Any] | Work[list[Any]]:
    place = grid._place
    given = place.list_by_direction(parts, f"{name}: parts")
    rooms = None if out is None else place.list_by_direction(out, f"{name}: out")
    try:
        if timeout is DEFAULT and not is_async and grid._fast_exchange is not None:
            done = grid._fast_exchange(grid, place.neighbors, _FIRST_TAG, given, rooms)
            if done is not NotImplemented:
                return done  # type: ignore[no-any-return] # it comes from native code
    except DistributedError as error:
        raise _failure_of_exchange(grid, error, name) from None
    messages = _post_messages(grid, name, given, rooms, timeout)
    if is_async:
        return ExchangeWork(grid, name, messages)
    try:
        return _by_direction(grid, _await_all(messages))
    except DistributedError as error:
        raise _end_exchange(grid, error, name, messages) from None


def _post_messages(
    grid: Grid, name: str, parts: list[Any], out: list[Any] | None, timeout: Timeout
) -> list[Work[Any]]:
    """Post a receive for every neighbor, then a send; return them in this order."""
    grid._check_usable()
    deadline, neighbors = grid._deadline(timeout), grid._place.neighbors
    ways = grid._place.ways
    sources = {way: as_input(parts[way], f"{name}: the part for {_side(way)}") for way in ways}
    targets = {way: _as_target(out, way) for way in ways}
    for way, source in sources.items():  # what comes may come first
        rooms = [room for room in targets.values() if room is not None]
        if any(overlap(source, room).kind is not OverlapKind.NONE for room in rooms):
            sources[way] = source._replace(buffer=source.buffer.copy())
    works: list[Work[Any]] = []
    try:
        for way in ways:  # a message has the tag of the way it goes, and comes from the other side
            receive = Receive(neighbors[way], _FIRST_TAG + (way ^ 1), targets[way])
            works.append(grid._start_recv(receive, deadline))
        for way in ways:
            tag = _FIRST_TAG + way
            works.append(grid._start_send(sources[way], neighbors[way], tag, deadline))
    except DistributedError as error:
        raise _end_exchange(grid, error, name, works) from None
    return works


def _by_direction(grid: Grid, results: list[Any]) -> list[Any]:
    """Make the list that an exchange returns of what its messages have, receives first."""
    came = dict(zip(grid._place.ways, results, strict=False))
    return [came.get(way) for way in range(len(grid._place.neighbors))]


class ExchangeWork(Work[list[Any]]):
    """The Work of an exchange, whose parts are messages in flight."""

    def __init__(self, grid: Grid, name: str, messages: list[Work[Any]]) -> None:
        super().__init__(name)
        self._grid, self._messages = grid, messages
        self._settling = threading.Lock()
        self._error: DistributedError | None = None
        self._is_settled = False
        for message in messages:
            message.add_done_callback(self._take)
        self._settle()  # there may be no neighbors

    def result(self, timeout: float | None = None) -> list[Any]:
        """Wait for all messages, and return what came, by direction."""
        self._await_messages(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for all messages, and return the error of the first that failed."""
        self._await_messages(timeout)
        return super().exception(timeout)

    def done(self) -> bool:
        """Tell whether all messages have come and gone, or failed."""
        for message in self._messages:
            if message.done():
                self._take(message)
        return super().done()

    def _await_messages(self, timeout: float | None) -> None:
        """Wait here for what native code does, without a thread between."""
        deadline = Deadline(timeout)
        for message in self._messages:
            with suppress(TimeoutError):  # which is told by who called us
                message.exception(None if timeout is None else deadline.timeout())
            if message.done():
                self._take(message)

    def _take(self, message: Future[Any]) -> None:
        """Note how a message ended; the first that fails ends those that are left."""
        error = message.exception()
        if isinstance(error, DistributedError) and not isinstance(error, SizeMismatch):
            made = _name_exchange(error, self.describe)
            with self._settling:
                is_first = self._error is None
                self._error = self._error or made
            if is_first:
                _end_after(self._grid, error, made)
        self._settle()

    def _settle(self) -> None:
        if not all(message.done() for message in self._messages):  # which may call back
            return
        with self._settling:
            if self._is_settled:
                return
            self._is_settled = True
        try:
            result = self._results()
        except BaseException as error:  # noqa: BLE001 -- whatever it is, the Work carries it on
            is_asked = self.is_asked
            self.set_exception(error)
            if not is_asked:
                self._grid._note_unasked(self, error)
        else:
            self.set_result(result)

    def _results(self) -> list[Any]:
        try:
            if self._error is None:
                return _by_direction(self._grid, _await_all(self._messages))
        except SizeMismatch as error:
            self._error = _name_exchange(error, self.describe)
        raise self._error


def _await_all(works: list[Work[Any]]) -> list[Any]:
    """Return the results, receives first; a message that does not fit fails this call only."""
    results: list[Any] = []
    misfit: SizeMismatch | None = None
    for work in works:
        try:
            results.append(work.wait())
        except SizeMismatch as error:
            misfit = misfit or error
    if misfit is not None:
        raise misfit
    return results


def _end_exchange(
    grid: Grid, error: DistributedError, name: str, works: list[Work[Any]]
) -> DistributedError:
    """End what is left of an exchange that has failed; return the error to raise."""
    made = _failure_of_exchange(grid, error, name)
    for work in works:
        work.exception()  # at the deadline, or because the group was given up
    return made


def _failure_of_exchange(grid: Grid, error: DistributedError, name: str) -> DistributedError:
    made = _name_exchange(error, name)
    _end_after(grid, error, made)
    return made


def _name_exchange(error: DistributedError, name: str) -> DistributedError:
    """Name the call that was made, and the neighbor, instead of a message and its tag."""
    if not isinstance(error, _OF_MESSAGES):
        return error

    def name_side(message: re.Match[str]) -> str:
        way = int(message[3]) - _FIRST_TAG
        side = way if message[1] == "send" else way ^ 1
        return f"{name}, {_side(side)}, rank {message[2]}"

    return type(error)(_MESSAGE.sub(name_side, str(error), count=1), **error._facts)


def _end_after(grid: Grid, error: DistributedError, made: DistributedError) -> None:
    """End the group, unless this rank alone is concerned: the others would wait for each other."""
    if isinstance(error, CollectiveTimeout):
        grid._end_group(made)
    elif isinstance(error, _OF_MESSAGES) and not isinstance(error, SizeMismatch):
        grid.abort(f"{type(error).__name__}: {made}")


def _as_target(out: list[Any] | None, way: int) -> OutputArray | None:
    if out is None or out[way] is None:
        return None
    buffer = as_input(out[way], f"out for {_side(way)}").buffer
    return as_output(out[way], buffer.dtype, buffer.shape)


def _side(direction: int) -> str:
    side = "higher" if direction % 2 else "lower"
    return f"the {side} neighbor along axis {direction // 2}"
