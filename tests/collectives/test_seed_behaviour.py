# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the crate that ferrodist descends from promised: its tests by their meaning, and its edges.

Where ferrodist differs on purpose, the test says so. ``star`` is the one algorithm the crate had.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import (
    Backend,
    CollectiveTimeout,
    InvalidRank,
    InvalidShape,
    InvalidWorldSize,
    ReduceOp,
    SimulatedBackend,
    SizeMismatch,
    all_gather,
    allreduce,
    barrier,
    broadcast,
    reduce_scatter,
)
from ferrodist.testing import run_ranks

pytestmark = pytest.mark.timeout(60)

with_star = pytest.mark.parametrize("algorithm", [None, "star"])
both_floats = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def assert_all_equal(results: list[Any], expected: Any, dtype: Any = np.float32) -> None:
    for result in results:
        np.testing.assert_array_equal(result, np.array(expected, dtype), strict=True)


def alone() -> SimulatedBackend:
    return SimulatedBackend.create_group(1)[0]


def errors_of(num_ranks: int, attempt: Callable[[Backend], object]) -> list[Any]:
    """Return each rank's error; every rank must have one."""

    def catch(backend: Backend) -> BaseException:
        with pytest.raises(ferrodist.DistributedError) as caught:
            attempt(backend)
        return caught.value

    return run_ranks(num_ranks, catch)


# -- allreduce -------------------------------------------------------------------------------------


@with_star
def test_allreduce_sums_over_four_ranks(algorithm: str | None) -> None:
    results = run_ranks(
        4, lambda b: allreduce(np.full(3, b.rank, np.float32), b, ReduceOp.SUM, algorithm=algorithm)
    )
    assert_all_equal(results, [6, 6, 6])


@with_star
def test_allreduce_mean_over_four_ranks_divides_the_sum_by_four(algorithm: str | None) -> None:
    results = run_ranks(
        4,
        lambda b: allreduce(np.full(3, b.rank, np.float32), b, ReduceOp.MEAN, algorithm=algorithm),
    )
    assert_all_equal(results, [1.5, 1.5, 1.5])


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
def test_allreduce_of_a_single_rank_is_a_copy(op: ReduceOp) -> None:
    x = np.array([1, 2, 3], np.float32)
    result = allreduce(x, alone(), op)
    assert_all_equal([result], [1, 2, 3])
    assert not np.shares_memory(result, x)


def test_allreduce_sums_unless_told_otherwise() -> None:
    assert run_ranks(3, lambda b: allreduce(b.rank, b)) == [3, 3, 3]


@with_star
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_allreduce_of_nothing_keeps_the_shape(
    shape: tuple[int, ...], algorithm: str | None
) -> None:
    results = run_ranks(2, lambda b: allreduce(np.empty(shape), b, algorithm=algorithm))
    assert [result.shape for result in results] == [shape, shape]


@with_star
def test_allreduce_keeps_the_shape(algorithm: str | None) -> None:
    results = run_ranks(3, lambda b: allreduce(np.ones((2, 3), np.float32), b, algorithm=algorithm))
    assert_all_equal(results, [[3, 3, 3], [3, 3, 3]])


def test_star_folds_at_rank_0_from_left_to_right() -> None:
    """Rank 0 starts from its own data and adds rank after rank: the order shows in the rounding."""
    values = [1e8, 1.0, -1e8, 1.0]
    results = run_ranks(
        4,
        lambda b: allreduce(np.array([values[b.rank]], np.float32), b, algorithm="star"),
    )
    assert_all_equal(results, [((np.float32(1e8) + 1) - np.float32(1e8)) + 1])


# -- broadcast and barrier -------------------------------------------------------------------------


@with_star
def test_broadcast_from_rank_0_reaches_everybody(algorithm: str | None) -> None:
    def run(backend: Backend) -> Any:
        value = 42.0 if backend.rank == 0 else 0.0
        return broadcast(np.full(2, value, np.float32), backend, 0, algorithm=algorithm)

    assert_all_equal(run_ranks(4, run), [42, 42])


@with_star
@pytest.mark.parametrize("root", [0, 1, 2])
def test_broadcast_works_from_any_root(root: int, algorithm: str | None) -> None:
    results = run_ranks(
        3, lambda b: broadcast(np.full(2, b.rank, np.float32), b, root, algorithm=algorithm)
    )
    assert_all_equal(results, [root, root])


def test_broadcast_leaves_what_the_others_passed_alone() -> None:
    def run(backend: Backend) -> Any:
        x = np.full(2, backend.rank, np.float32)
        broadcast(x, backend, 0)
        return x

    results = run_ranks(2, run)
    assert_all_equal(results[:1], [0, 0])
    assert_all_equal(results[1:], [1, 1])


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("root", [2, 5, -1])
def test_broadcast_refuses_a_root_outside_the_world(world: int, root: int) -> None:
    """Before anything else, also in a world of one, with both numbers in the error."""
    for error in errors_of(world, lambda b: broadcast(np.zeros(3), b, root)):
        assert isinstance(error, InvalidRank)
        assert (error.rank, error.world_size) == (root, world)


def test_broadcast_refuses_a_bad_root_on_one_rank_while_the_others_do_nothing() -> None:
    group = SimulatedBackend.create_group(2)
    with pytest.raises(InvalidRank):
        broadcast(np.zeros(3, np.float32), group[0], 5)


def test_broadcast_of_a_single_rank_is_a_copy() -> None:
    assert_all_equal([broadcast(np.array([1, 2], np.float32), alone(), 0)], [1, 2])


def test_barrier_completes_on_four_ranks() -> None:
    assert run_ranks(4, barrier) == [None] * 4


def test_barrier_of_a_single_rank_completes() -> None:
    barrier(alone())


# -- all_gather ------------------------------------------------------------------------------------


@with_star
def test_all_gather_joins_four_ranks_in_order(algorithm: str | None) -> None:
    def run(backend: Backend) -> Any:
        base = 10.0 * backend.rank
        return all_gather(np.array([base, base + 1], np.float32), backend, algorithm=algorithm)

    assert_all_equal(run_ranks(4, run), [0, 1, 10, 11, 20, 21, 30, 31])


@with_star
@pytest.mark.parametrize(
    ("world", "shape", "expected"),
    [(2, (2, 3), (4, 3)), (3, (4, 8), (12, 8)), (2, (0, 3), (0, 3)), (3, (2, 0), (6, 0))],
)
def test_all_gather_multiplies_axis_0_alone(
    world: int, shape: tuple[int, ...], expected: tuple[int, ...], algorithm: str | None
) -> None:
    results = run_ranks(world, lambda b: all_gather(np.ones(shape), b, algorithm=algorithm))
    assert {result.shape for result in results} == {expected}


@with_star
def test_all_gather_of_0_d_arrays_gives_one_element_per_rank(algorithm: str | None) -> None:
    results = run_ranks(
        3, lambda b: all_gather(np.array(b.rank, np.float32), b, algorithm=algorithm)
    )
    assert_all_equal(results, [0, 1, 2])


def test_all_gather_of_a_single_rank_is_a_copy() -> None:
    assert_all_equal([all_gather(np.array([1, 2, 3], np.float32), alone())], [1, 2, 3])


def test_all_gather_of_a_single_0_d_array_follows_the_rule_too() -> None:
    """Here ferrodist differs: in the crate a world of one gave the 0-d array back."""
    assert_all_equal([all_gather(np.array(5, np.float32), alone())], [5])


@with_star
def test_all_gather_of_different_sizes_is_refused_on_every_rank(algorithm: str | None) -> None:
    errors = errors_of(3, lambda b: all_gather(np.ones(1 + b.rank % 2), b, algorithm=algorithm))
    assert {type(error) for error in errors} == {SizeMismatch}


# -- reduce_scatter --------------------------------------------------------------------------------


@with_star
def test_reduce_scatter_sum_gives_each_of_four_ranks_its_element(algorithm: str | None) -> None:
    x = np.array([1, 2, 3, 4], np.float32)
    results = run_ranks(4, lambda b: reduce_scatter(x, b, ReduceOp.SUM, algorithm=algorithm))
    for result, expected in zip(results, [4, 8, 12, 16], strict=True):
        assert_all_equal([result], [expected])


@with_star
def test_reduce_scatter_mean_divides_by_two_ranks(algorithm: str | None) -> None:
    results = run_ranks(
        2,
        lambda b: reduce_scatter(
            np.full(4, b.rank, np.float32), b, ReduceOp.MEAN, algorithm=algorithm
        ),
    )
    assert_all_equal(results, [0.5, 0.5])


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
@pytest.mark.parametrize("shape", [(3,), (), (3, 2)])
def test_reduce_scatter_of_a_single_rank_is_a_copy_of_anything(
    shape: tuple[int, ...], op: ReduceOp
) -> None:
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    assert_all_equal([reduce_scatter(x, alone(), op)], x)


@with_star
def test_reduce_scatter_divides_axis_0_alone(algorithm: str | None) -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    results = run_ranks(2, lambda b: reduce_scatter(x, b, algorithm=algorithm))
    assert_all_equal(results[:1], 2 * x[:2])
    assert_all_equal(results[1:], 2 * x[2:])


@with_star
def test_reduce_scatter_of_nothing_divides_axis_0(algorithm: str | None) -> None:
    results = run_ranks(2, lambda b: reduce_scatter(np.empty((4, 0)), b, algorithm=algorithm))
    assert [result.shape for result in results] == [(2, 0), (2, 0)]


def test_reduce_scatter_refuses_an_element_count_the_ranks_cannot_share() -> None:
    """Locally, before the others are needed, with both numbers in the error."""
    group = SimulatedBackend.create_group(2)
    with pytest.raises(SizeMismatch) as caught:
        reduce_scatter(np.array([1, 2, 3], np.float32), group[0], ReduceOp.SUM)
    assert (caught.value.expected, caught.value.got) == (3, 2)


def test_reduce_scatter_refuses_an_axis_0_the_ranks_cannot_share() -> None:
    """Six elements could be shared by two ranks, three rows cannot."""
    group = SimulatedBackend.create_group(2)
    with pytest.raises(InvalidShape, match=r"axis 0 .* 3.* 2 ranks"):
        reduce_scatter(np.zeros((3, 2), np.float32), group[0])


# -- numbers as bytes and back ---------------------------------------------------------------------


@both_floats
def test_floats_survive_the_way_through_bytes(dtype: Any) -> None:
    original = np.array([1.0, 2.5, -3.14, 0.0, -0.0, np.inf, np.nan], dtype)
    results = run_ranks(
        2, lambda b: broadcast(original if b.rank == 0 else np.zeros_like(original), b)
    )
    assert all(result.tobytes() == original.tobytes() for result in results)


@both_floats
def test_input_need_not_be_aligned_in_memory(dtype: Any) -> None:
    def run(backend: Backend) -> Any:
        memory = bytearray(3 * np.dtype(dtype).itemsize + 1)
        x: Any = np.ndarray(3, dtype, buffer=memory, offset=1)
        x[:] = backend.rank + 1
        return allreduce(x, backend)

    assert_all_equal(run_ranks(2, run), [3, 3, 3], dtype)


# -- time ------------------------------------------------------------------------------------------


def test_default_timeout_is_one_minute() -> None:
    assert ferrodist.DEFAULT_COLLECTIVE_TIMEOUT == 60
    assert alone().timeout == 60


@with_star
@pytest.mark.parametrize("function", [allreduce, all_gather, reduce_scatter])
def test_call_runs_out_of_time_when_a_rank_does_not_come(
    function: Callable[..., Any], algorithm: str | None
) -> None:
    def run(backend: Backend) -> Any:
        if backend.rank == 1:
            return None
        with pytest.raises(CollectiveTimeout) as caught:
            function(np.zeros(2), backend, timeout=0.1, algorithm=algorithm)
        return caught.value.missing

    group = SimulatedBackend.create_group(2)
    assert run(group[0]) == [1]


def test_group_needs_at_least_one_rank() -> None:
    with pytest.raises(InvalidWorldSize):
        SimulatedBackend.create_group(0)
