# SPDX-License-Identifier: MIT OR Apache-2.0
"""Check ``grid``: groups by color, grids with their neighbors, and memory that ranks share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import ferrodist
from ferrodist import (
    PROC_NULL,
    Backend,
    CollectiveMismatch,
    DistributedError,
    InvalidArgument,
    InvalidWorldSize,
    OutOfMemory,
    SizeMismatch,
    UnsupportedArray,
    UnsupportedOp,
)
from ferrodist.testing.contract.case import Trial
from ferrodist.testing.contract.groups import expect_group
from ferrodist.testing.contract.values import Array

_LARGE = 20_000  # float64: more than a message that does not wait for its receiver


def check_grid(trial: Trial) -> None:
    """Run one scenario, then see that the parent group is in step."""
    SCENARIOS[trial.case.detail](trial)
    trial.expect_in_step()


# -- groups by color -------------------------------------------------------------------------------


def _by_color(trial: Trial) -> None:
    """Colors need not be small or positive; ranks of one color follow their keys, then rank."""
    everyone, top = range(trial.world), (1 << 63) - 1
    for color_of, key_of in (
        (lambda rank: rank % 3, lambda rank: -rank),
        (lambda rank: top if rank % 2 else -top, lambda rank: 0),
        (lambda rank: 7, lambda rank: (rank * 3) % 2),
    ):
        color = color_of(trial.rank)
        ranks = sorted((r for r in everyone if color_of(r) == color), key=lambda r: (key_of(r), r))
        group = trial.backend.split_by(color, key_of(trial.rank))
        if group is None:
            trial.expect(False, "split_by gave no group to a rank with a color")
            continue
        with group:
            expect_group(trial, group, ranks)


def _no_color(trial: Trial) -> None:
    """A rank without a color takes part in the call and gets no group."""
    last = trial.world - 1
    group = trial.backend.split_by(None if trial.rank == last else 0)
    trial.expect_equal(group is None, trial.rank == last, "without a color there is no group")
    if group is not None:
        with group:
            expect_group(trial, group, range(last))


def _duplicate(trial: Trial) -> None:
    """Messages of a duplicate are its own, whatever waits in the group it was made of."""
    right, left = (trial.rank + 1) % trial.world, (trial.rank - 1) % trial.world
    with trial.backend.dup() as group:
        expect_group(trial, group, range(trial.world))
        if trial.world > 1:
            ferrodist.send(trial.rank, right, trial.backend)
            got = ferrodist.sendrecv(100 + trial.rank, right, left, group)
            trial.expect_equal(got, 100 + left, "sendrecv in the duplicate")
            trial.expect_equal(ferrodist.recv(left, trial.backend), left, "recv in the parent")


def _wrong_colors(trial: Trial) -> None:
    backend: Any = trial.backend
    _expect_each(trial, backend.split_by, ("red", 1.0, True, 1 << 63, [1]), "color")
    _expect_each(trial, partial(backend.split_by, 0), (None, 0.5, "1", -(1 << 63) - 1), "key")


def _expect_each(
    trial: Trial,
    call: Callable[[Any], object],
    arguments: Sequence[Any],
    says: str,
    error: type[DistributedError] = InvalidArgument,
) -> None:
    """Note a problem unless a call refuses each of these."""
    for argument in arguments:
        trial.expect_error(error, partial(call, argument), says=says)


# -- grids -----------------------------------------------------------------------------------------


def _shapes(world: int) -> Iterator[tuple[int, ...]]:
    yield from ((world,), (1, world), (world, 1))
    for length in range(2, world):
        if world % length == 0:
            yield length, world // length
            yield length, 1, world // length


def _neighbors(shape: tuple[int, ...], periodic: Sequence[bool], rank: int) -> list[int | None]:
    """List the neighbors of a rank by direction, as NumPy rolls an array of all ranks."""
    ranks = np.arange(np.prod(shape)).reshape(shape)
    found: list[int | None] = []
    for axis, wraps in enumerate(periodic):
        for step, edge in ((1, 0), (-1, -1)):
            rolled = np.roll(ranks, step, axis).astype(object)
            if not wraps:
                np.moveaxis(rolled, axis, 0)[edge] = None
            found.append(rolled[np.unravel_index(rank, shape)])
    return found


def _message(rank: int, direction: int, count: int = 3) -> Array:
    return np.arange(count) + 1000.0 * rank + direction


def _grids(trial: Trial) -> None:
    """Every grid of this world: where ranks stand, and what comes from which neighbor."""
    for shape in _shapes(trial.world):
        for periodic in itertools.product([False, True], repeat=len(shape)):
            with trial.backend.grid(shape, periodic) as grid:
                _expect_places(trial, grid, shape, periodic)
                _expect_exchanges(trial, grid, _neighbors(shape, periodic, trial.rank), 3)


def _expect_places(trial: Trial, grid: Any, shape: tuple[int, ...], periodic: Any) -> None:
    what = f"grid({shape}, {periodic})"
    trial.expect_equal((grid.shape, grid.periodic), (shape, periodic), what)
    coords = tuple(int(at) for at in np.unravel_index(trial.rank, shape))
    trial.expect_equal(grid.coords, coords, f"coords in {what}")
    peers = _neighbors(shape, periodic, trial.rank)
    for axis in range(len(shape)):
        lower, higher = (PROC_NULL if p is None else p for p in peers[2 * axis : 2 * axis + 2])
        trial.expect_equal(grid.shift(axis, 1), (lower, higher), f"shift in {what}")
        trial.expect_equal(grid.shift(axis - len(shape), -1), (higher, lower), f"shift in {what}")
        trial.expect_equal(grid.shift(axis, 0), (trial.rank, trial.rank), f"shift in {what}")


def _expect_exchanges(trial: Trial, grid: Any, peers: Sequence[int | None], count: int) -> None:
    what = f"in grid {grid.shape} periodic {grid.periodic}"
    ways = range(len(peers))
    parts = [None if peers[way] is None else _message(trial.rank, way, count) for way in ways]
    wanted = [None if p is None else _message(p, way ^ 1, count) for way, p in enumerate(peers)]
    got = grid.neighbor_all_to_all(parts)
    for found, right in zip(got, wanted, strict=True):
        trial.expect_array(found, right, what=f"neighbor_all_to_all {what}")
    mine = _message(trial.rank, 9, count)
    rooms = [np.full(count, -1.0) for _ in ways]
    got = grid.neighbor_all_gather(mine, out=rooms)
    for found, room, peer in zip(got, rooms, peers, strict=True):
        trial.expect(found is (None if peer is None else room), f"out was not returned {what}")
        right = np.full(count, -1.0) if peer is None else _message(peer, 9, count)
        trial.expect_array(room, right, what=f"out of neighbor_all_gather {what}")
    works = [
        grid.neighbor_all_to_all(parts, async_op=True),
        grid.neighbor_all_gather(2 * mine, async_op=True, out=[np.empty(count) for _ in ways]),
    ]
    got = [work.wait(trial.backend.timeout) for work in reversed(works)]
    doubled = [None if peer is None else 2 * _message(peer, 9, count) for peer in peers]
    for found, right in zip(got[0] + got[1], doubled + wanted, strict=True):
        trial.expect_array(found, right, what=f"two exchanges in flight {what}")


def _large_halos(trial: Trial) -> None:
    """Messages that wait for their receivers do not wait for each other, in rings and chains."""
    for periodic in (False, True):
        with trial.backend.grid((1, trial.world), periodic) as grid:
            peers = _neighbors(grid.shape, grid.periodic, trial.rank)
            _expect_exchanges(trial, grid, peers, _LARGE)


def _uneven_halos(trial: Trial) -> None:
    """Neighbors may send any shape; if it does not fit ``out``, only that rank raises."""
    with trial.backend.grid(trial.world, True) as grid:
        lower, higher = grid.shift(0)
        mine = np.full(trial.rank + 1, trial.rank)
        got = grid.neighbor_all_gather(mine)
        for found, peer in zip(got, (lower, higher), strict=True):
            trial.expect_array(found, np.full(peer + 1, peer), what="a halo of its own length")
        rooms = [np.zeros(lower + 2, int) if trial.rank == 0 else None, None]
        if trial.rank == 0:
            trial.expect_error(
                SizeMismatch, lambda: grid.neighbor_all_gather(mine, out=rooms), says="lower"
            )
        else:
            got = grid.neighbor_all_gather(mine, out=rooms)
            trial.expect_array(got[1], np.full(higher + 1, higher), what="the halo beside a misfit")
        got = grid.neighbor_all_to_all([-trial.rank, trial.rank])
        trial.expect_equal(got, [lower, -higher], "the exchange after a misfit")


def _in_place_halos(trial: Trial) -> None:
    """What is sent may lie where something is received, or be no contiguous array."""
    with trial.backend.grid(trial.world, True) as grid:
        lower, higher = grid.shift(0)
        both = np.array([[trial.rank, 0], [trial.rank, 1]])
        got = grid.neighbor_all_to_all(both, out=both)
        wanted = np.array([[lower, 1], [higher, 0]])
        trial.expect_array(both, wanted, what="halos in place")
        trial.expect_array(got[1], wanted[1], what="halos in place")
        columns = np.arange(6).reshape(3, 2) + 10 * trial.rank
        got = grid.neighbor_all_to_all(columns.T)
        trial.expect_array(got[0], np.arange(1, 7, 2) + 10 * lower, what="a column as halo")
        trial.expect_array(got[1], np.arange(0, 6, 2) + 10 * higher, what="a column as halo")


def _halos_beside_receives(trial: Trial) -> None:
    """A receive from any rank, with any tag, takes nothing of an exchange."""
    any_source, any_tag = ferrodist.ANY_SOURCE, ferrodist.ANY_TAG
    with trial.backend.grid(trial.world, True) as grid:
        lower, higher = grid.shift(0)
        coming = ferrodist.recv(any_source, grid, tag=any_tag, async_op=True)
        got = grid.neighbor_all_gather(trial.rank)
        trial.expect_equal(got, [lower, higher], "halos beside a receive of anything")
        ferrodist.send(100 + trial.rank, higher, grid, tag=3, async_op=True).wait()
        trial.expect_equal(coming.wait(trial.backend.timeout), 100 + lower, "what was sent beside")
        grid.barrier()


def _sub_grids(trial: Trial) -> None:
    """Rows, columns and transposed grids have the ranks that NumPy indexing finds."""
    shape = max(_shapes(trial.world), key=len)
    ranks, periodic = np.arange(trial.world).reshape(shape), (True, *[False] * (len(shape) - 1))
    with trial.backend.grid(shape, periodic) as grid:
        for axes in (0, (len(shape) - 1,), (), tuple(range(len(shape)))[::-1]):
            kept = (axes,) if isinstance(axes, int) else axes
            here = [slice(None) if i in kept else at for i, at in enumerate(grid.coords)]
            members = ranks[tuple(here)]
            members = members.T if kept == tuple(range(len(shape)))[::-1] else members
            with grid.sub(axes) as part:
                trial.expect_equal(part.shape, members.shape, f"the shape of sub({axes})")
                wraps = tuple(periodic[axis] for axis in kept)
                trial.expect_equal(part.periodic, wraps, f"periodic of sub({axes})")
                expect_group(trial, part, members.reshape(-1).tolist())


def _wrong_grids(trial: Trial) -> None:
    backend: Any = trial.backend
    world = trial.world
    shapes = (world + 1, (world, 2), (0,), (-1, -world), (2, 0))
    _expect_each(trial, backend.grid, shapes, "places", InvalidWorldSize)
    _expect_each(trial, backend.grid, ("ab", (1.0, world), None), "integers")
    periods = ((True,), (True, False, True), "ab", 2, None)
    _expect_each(trial, partial(backend.grid, (world, 1)), periods, "periodic")
    with backend.grid((1, world)) as grid:
        axes = (2, -3, 1.0, None, True)
        _expect_each(trial, grid.shift, axes, "axis")
        _expect_each(trial, grid.sub, [[axis] for axis in axes], "axis")
        _expect_each(trial, grid.sub, [(0, 0)], "twice")
        _expect_each(trial, partial(grid.shift, 0), [0.5], "step")
        lists: tuple[Any, ...] = ([1, 2, 3], 5, [])
        _expect_each(trial, grid.neighbor_all_to_all, (*lists, None), "direction, 4")
        _expect_each(trial, lambda out: grid.neighbor_all_gather(1, out=out), lists, "out")
        trial.expect_in_step(grid)


def _different_grids(trial: Trial) -> None:
    """Ranks that mean different grids are told, and none of them exchanges anything."""
    shape = (1, trial.world) if trial.rank == 0 else (trial.world, 1)
    trial.expect_error(SizeMismatch, partial(trial.backend.grid, shape), says="grid({shape: int64[")


# -- memory that ranks share -----------------------------------------------------------------------


def _share(trial: Trial, group: Backend, shape: Any, dtype: str) -> Any:
    """Make a shared array; None on a backend that has none, which says what has."""
    try:
        return group.shared(shape, dtype)
    except UnsupportedOp as error:
        trial.expect("use hybrid" in str(error), f"shared is refused without advice: {error}")
        return None


def _shared(trial: Trial) -> None:
    """All write, all read; a rank that drops the array does not take it from the others."""
    backend = trial.backend
    for number, dtype in enumerate(("int64", "float32", "bool")):
        table = _share(trial, backend, (trial.world, 3), dtype)
        if table is None:
            return
        first, here = trial.rank - backend.local_rank, backend.local_world_size
        trial.expect_array(table, np.zeros((trial.world, 3), dtype), what="a fresh shared array")
        backend.barrier()
        table[trial.rank] = trial.rank + number
        backend.barrier()
        wanted = np.zeros((trial.world, 3), dtype)
        if here == trial.world:
            wanted[:] = np.arange(trial.world)[:, None] + number
            trial.expect_array(table, wanted, what="a shared array")
        if trial.rank in (first, number % trial.world):
            table = None
        backend.barrier()
        if table is not None and here == trial.world:
            trial.expect_array(table, wanted, what="a shared array that others have dropped")


def _shared_in_groups(trial: Trial) -> None:
    """A group's memory is seen by its members alone; an array may be empty."""
    group = trial.backend.split_by(trial.rank % 2, -trial.rank)
    assert group is not None
    with group:
        table = _share(trial, group, group.world_size, "int32")
        if table is None:
            return
        table[group.rank] += 1 + trial.rank
        group.barrier()
        if group.local_world_size == group.world_size:
            wanted = np.arange(trial.rank % 2, trial.world, 2, dtype=np.int32)[::-1] + 1
            trial.expect_array(table, wanted.astype(np.int32), what="a group's shared array")
        empty = group.shared((0, 4), "float64")
        trial.expect_equal((empty.shape, empty.dtype.name), ((0, 4), "float64"), "an empty one")
    trial.backend.barrier()


def _wrong_shared(trial: Trial) -> None:
    backend = trial.backend
    if _share(trial, backend, (), "int8") is None:
        return
    trial.expect_error(InvalidArgument, lambda: backend.shared(-1, "int8"), says="negative")
    trial.expect_error(InvalidArgument, lambda: backend.shared("ab", "int8"), says="integers")
    trial.expect_error(UnsupportedArray, lambda: backend.shared(1, "O"), says="dtype")
    for size in (1 << 50, 1 << 70):
        trial.expect_error(OutOfMemory, partial(backend.shared, size, "int8"))
    if trial.world > 1:
        trial.expect_error(SizeMismatch, lambda: backend.shared(trial.rank, "int8"), says="shared")
        dtype = "int8" if trial.rank else "bool"
        trial.expect_error(CollectiveMismatch, lambda: backend.shared(3, dtype), says="bool[3]")


SCENARIOS: dict[str, Callable[[Trial], None]] = {
    "by_color": _by_color,
    "duplicate": _duplicate,
    "wrong_colors": _wrong_colors,
    "grids": _grids,
    "large_halos": _large_halos,
    "uneven_halos": _uneven_halos,
    "in_place_halos": _in_place_halos,
    "halos_beside_receives": _halos_beside_receives,
    "sub_grids": _sub_grids,
    "wrong_grids": _wrong_grids,
    "shared": _shared,
    "shared_in_groups": _shared_in_groups,
    "wrong_shared": _wrong_shared,
}

NEEDS_TWO: dict[str, Callable[[Trial], None]] = {
    "no_color": _no_color,
    "different_grids": _different_grids,
}
SCENARIOS |= NEEDS_TWO
