"""Gradients of NumPy and JAX become means over all ranks: in one call, and in buckets."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import ferrodist
from ferrodist import CollectiveMismatch, InvalidArgument, SizeMismatch
from ferrodist.parallel.data_parallel import DataParallel, average_gradients
from ferrodist.testing import run_ranks
from helpers import errors_by_rank

pytestmark = pytest.mark.timeout(60)

WORLDS = [1, 2, 3, 5]


class Pair(NamedTuple):
    left: Any
    right: Any


def numbers(rank: int, shape: Any, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Give values in which the order of additions shows."""
    random = np.random.default_rng([rank, *np.atleast_1d(shape)])
    return random.normal(scale=10.0 ** (rank % 3), size=shape).astype(dtype)


def mean_in_rank_order(parts: list[Any], weights: list[float] | None = None) -> Any:
    """Average in one process, one rank after the other; 16 bits in float32."""
    dtype = parts[0].dtype
    is_half = dtype.itemsize == 2
    parts = [part.astype(np.float32) if is_half else part for part in parts]
    if weights is not None:
        parts = [part * weight for part, weight in zip(parts, weights, strict=True)]
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    count = len(parts) if weights is None else sum(weights)
    if np.iscomplexobj(total):  # NumPy divides those by multiplying
        return (total.view(total.real.dtype) / count).view(dtype)
    return (total / count).astype(dtype)


def assert_same_bits(found: Any, expected: Any) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


def some_gradients(rank: int) -> dict[str, Any]:
    return {
        "layers": [Pair(numbers(rank, (3, 4)), numbers(rank, 4)), Pair(numbers(rank, 5), None)],
        "double": numbers(rank, 7, np.float64),
        "complex": numbers(rank, 6) + 1j * numbers(rank, 6),
        "half": numbers(rank, 9, np.float16),
        "bfloat16": numbers(rank, 9, ml_dtypes.bfloat16),
        "nothing": numbers(rank, (0, 3)),
        "number": numbers(rank, ()),
    }


def leaves_of(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        tree = [tree[key] for key in sorted(tree)]
    if isinstance(tree, (list, tuple)):
        return [leaf for child in tree for leaf in leaves_of(child)]
    return [] if tree is None else [tree]


def averaged_in_buckets(tree: Any, backend: Any, **options: Any) -> Any:
    return DataParallel(tree, backend, bucket_mib=1e-4).average(tree, **options)


both = pytest.mark.parametrize("average", [average_gradients, averaged_in_buckets])


# -- the mean --------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_mean_has_the_bits_of_one_process_in_rank_order(average, world, is_weighted):
    weights = [rank + 1.0 for rank in range(world)] if is_weighted else None

    def body(backend):
        weight = weights and weights[backend.rank]
        return average(some_gradients(backend.rank), backend, weight=weight)

    parts = [leaves_of(some_gradients(rank)) for rank in range(world)]
    for found in run_ranks(world, body):
        assert found["layers"][1].right is None
        assert type(found["layers"][0]) is Pair
        for leaf, *leaf_parts in zip(leaves_of(found), *parts, strict=True):
            assert_same_bits(leaf, mean_in_rank_order(leaf_parts, weights))


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_that_are_processes_get_the_bits_of_simulated_ones(start_job, world):
    def body(backend, _pipe=None):
        mine = some_gradients(backend.rank)
        parallel = DataParallel(mine, backend, bucket_mib=1e-4)
        weight = backend.rank + 1.0
        found = [parallel.average(mine), parallel.average(mine, weight=weight)]
        found += [average_gradients(mine, backend), average_gradients(mine, backend, weight=weight)]
        return [leaf.tobytes() for leaf in leaves_of([parallel.params, found])]

    with start_job(world, body) as job:
        assert job.results() == run_ranks(world, body)


@both
def test_arrays_come_back_as_the_kinds_they_were(average):
    import jax.numpy as jnp
    import torch

    def body(backend):
        tree = {
            "numpy": np.full(2, backend.rank, np.float32),
            "jax": jnp.full(2, backend.rank, jnp.bfloat16),
            "torch": torch.full((2,), float(backend.rank), dtype=torch.bfloat16),
            "scalar": np.float32(backend.rank),
            "number": float(backend.rank),
        }
        return average(tree, backend), average(tree, backend, weight=backend.rank)

    for mean, weighted in run_ranks(3, body):
        for found, value in ((mean, 1.0), (weighted, 5 / 3)):
            assert type(found["numpy"]) is np.ndarray
            assert isinstance(found["jax"], jnp.ndarray)
            assert found["jax"].dtype == jnp.bfloat16
            assert found["torch"].dtype is torch.bfloat16
            assert type(found["scalar"]) is np.float32
            assert type(found["number"]) is float
            assert all(
                np.allclose(np.float64(leaf[0]), value, rtol=1e-2)
                for leaf in (found["numpy"], found["jax"], found["torch"])
            )
            assert np.allclose([found["scalar"], found["number"]], value)


@both
def test_registered_jax_nodes_are_trees(average):
    import jax

    class Layer:
        def __init__(self, weight: Any, name: str) -> None:
            self.weight, self.name = weight, name

    jax.tree_util.register_pytree_with_keys(
        Layer,
        lambda x: (((jax.tree_util.GetAttrKey("weight"), x.weight),), x.name),
        lambda name, children: Layer(*children, name),
    )

    def body(backend):
        return average({"a": Layer(jax.numpy.full(2, float(backend.rank)), "first")}, backend)

    for found in run_ranks(3, body):
        assert (found["a"].name, found["a"].weight.tolist()) == ("first", [1.0, 1.0])


def test_arrays_that_were_passed_are_left_alone():
    def body(backend):
        mine = {"w": np.full(3, float(backend.rank))}
        average_gradients(mine, backend, weight=2)
        averaged_in_buckets(mine, backend)
        return mine["w"].tolist()

    assert run_ranks(2, body) == [[0.0] * 3, [1.0] * 3]


@both
def test_lone_array_is_a_tree_too(average):
    found = run_ranks(2, lambda b: average(np.full(2, float(b.rank)), b, weight=b.rank + 1))
    assert all(np.allclose(one, 2 / 3) for one in found)


# -- number of calls -------------------------------------------------------------------------------


def collectives_of(backend: Any, call: Any, *args: Any, **options: Any) -> int:
    before = backend.statistics().collectives
    call(*args, **options)
    return backend.statistics().collectives - before


@pytest.mark.parametrize("weight", [None, 3])
def test_tree_of_many_leaves_is_one_collective(weight):
    def body(backend):
        tree = [numbers(backend.rank, 3) for _ in range(500)]
        return collectives_of(backend, average_gradients, tree, backend, weight=weight)

    assert run_ranks(2, body) == [1, 1]


@pytest.mark.parametrize("weight", [None, 3])
def test_step_is_one_collective_for_each_bucket(weight):
    def body(backend):
        tree = {
            "a": np.zeros(5, np.float16),
            "b": [numbers(backend.rank, 3) for _ in range(500)],
            "c": np.zeros(1 << 19, np.float32),  # 2 MiB: closes the first bucket
        }
        parallel = DataParallel(tree, backend)
        return collectives_of(backend, parallel.average, tree, weight=weight)

    expected = 3 if weight is None else 2  # with a weight 16 bits travel as 32
    assert run_ranks(2, body) == [expected] * 2


# -- weights ---------------------------------------------------------------------------------------


@both
def test_rank_without_samples_counts_for_nothing_even_if_it_has_nan(average):
    def body(backend):
        value = np.nan if backend.rank == 1 else float(backend.rank)
        return average([np.full(2, value)], backend, weight=0 if backend.rank == 1 else 4)

    assert all(found[0].tolist() == [1.0, 1.0] for found in run_ranks(3, body))


@both
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_weights_beyond_sixteen_bits_are_exact(average, dtype):
    def body(backend):
        return average([np.full(2, 1000, dtype)], backend, weight=65537 + backend.rank)

    assert all(found[0].tolist() == [1000.0, 1000.0] for found in run_ranks(3, body))


@both
def test_weights_that_are_all_zero_are_refused_on_every_rank(average):
    for error in errors_by_rank(3, lambda b: average([np.ones(2)], b, weight=0)):
        assert type(error) is InvalidArgument
        assert "the weights of all ranks are 0, so there is no mean; skip the step" in str(error)


@both
@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "many", [1, 2]])
def test_weight_that_is_none_is_refused(average, weight):
    (error,) = errors_by_rank(1, lambda b: average([np.ones(2)], b, weight=weight))
    assert re.search(r": weight must be a number that is not negative, got .+", str(error))


def test_weight_may_be_a_number_of_numpy_or_jax():
    found = run_ranks(2, lambda b: average_gradients(np.ones(1), b, weight=np.int64(b.rank + 1)))
    assert all(one.tolist() == [1.0] for one in found)


@both
def test_weight_on_one_rank_alone_is_found(average):
    def body(backend):
        return average([np.ones(3)], backend, weight=1 if backend.rank else None)

    assert all(isinstance(error, CollectiveMismatch) for error in errors_by_rank(2, body))


# -- differences between ranks ---------------------------------------------------------------------


@both
def test_other_shape_is_named_with_its_leaf(average):
    def body(backend):
        tree = {"a": np.ones(3), "b": {"c": np.ones(5 + (backend.rank == 1))}}
        average(tree, backend)

    for error in errors_by_rank(3, body):
        assert type(error) is SizeMismatch
        assert "first difference at leaf ['b']['c']: " in str(error)
        assert "float64[5] against ['b']['c']: float64[6]" in str(error)


@both
def test_leaf_that_is_missing_is_named(average):
    def body(backend):
        average({"a": np.ones(3), "b" if backend.rank else "c": np.ones(5)}, backend)

    for error in errors_by_rank(2, body):
        assert type(error) is CollectiveMismatch
        assert "first difference at leaf ['b']: " in str(error)
        assert "absent" in str(error)


def test_trees_of_equal_size_but_other_leaves_are_found():
    def body(backend):
        sizes = (3, 5) if backend.rank else (5, 3)
        average_gradients([np.ones(size) for size in sizes], backend, weight=1)

    for error in errors_by_rank(2, body):
        assert "first difference at leaf [0][0]: " in str(error)


@pytest.mark.parametrize("weight", [None, 1])
def test_integers_are_refused_with_their_place(weight):
    (error,) = errors_by_rank(
        1, lambda b: average_gradients({"step": np.arange(3)}, b, weight=weight)
    )
    assert isinstance(error, ferrodist.UnsupportedOp)
    assert re.search(r"int64.*\['step'\]|\['step'\].*int64", str(error))


# -- DataParallel ----------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_begins_with_the_parameters_of_rank_0(world):
    def body(backend):
        params = {"w": numbers(backend.rank, (2, 3)), "b": None, "s": float(backend.rank)}
        parallel = DataParallel(params, backend)
        return parallel.params, parallel.broadcast(backend.rank, world - 1)

    for params, last in run_ranks(world, body):
        assert_same_bits(params["w"], numbers(0, (2, 3)))
        assert (params["b"], params["s"], last) == (None, 0.0, world - 1)


def test_results_are_the_callers_to_keep():
    def body(backend):
        parallel = DataParallel([np.zeros(3)], backend)
        kept = [parallel.average([np.full(3, float(step))])[0] for step in range(3)]
        return [one.tolist() for one in kept]

    assert run_ranks(2, body) == [[[0.0] * 3, [1.0] * 3, [2.0] * 3]] * 2


def test_jax_results_are_not_views_of_a_bucket():
    import jax.numpy as jnp

    def body(backend):
        parallel = DataParallel({"w": jnp.zeros((64, 64))}, backend)
        kept = [parallel.average({"w": jnp.full((64, 64), step * 1.0)})["w"] for step in range(3)]
        return [float(one.sum()) for one in kept]

    assert run_ranks(2, body) == [[0.0, 4096.0, 8192.0]] * 2


@pytest.mark.parametrize("weight", [None, 2])
def test_gradients_in_the_buckets_are_averaged_in_place(monkeypatch, weight):
    tree = {"w": np.zeros((2, 3), np.float32), "h": np.zeros(4, np.float16), "c": np.zeros(2, "c8")}
    made = []
    empty = ferrodist.Backend.empty
    monkeypatch.setattr(
        ferrodist.Backend, "empty", lambda self, *args: made.append(args) or empty(self, *args)
    )

    def body(backend):
        parallel = DataParallel(tree, backend)
        mine = parallel.gradients
        for step in range(4):
            for leaf in mine.values():
                leaf[...] = backend.rank + step
            found = parallel.average(mine, weight=weight)
            assert all(found[name] is mine[name] for name in mine)
            assert all((leaf == step + 0.5).all() for leaf in found.values())
            ferrodist.barrier(backend)
            if step == 0:
                first = len(made)
            ferrodist.barrier(backend)
        assert [(leaf.dtype, leaf.shape) for leaf in mine.values()] == [
            (leaf.dtype, leaf.shape) for leaf in tree.values()
        ]
        return len(made) - first

    assert run_ranks(2, body) == [0, 0]


def test_buckets_live_in_shared_memory(start_job):
    def body(backend, pipe):
        tree = {"w": np.zeros(1000, np.float32), "h": np.zeros(10, np.float16)}
        parallel = DataParallel(tree, backend)
        parallel.gradients["w"][...] = backend.rank
        parallel.average(parallel.gradients)
        return [
            backend.arena.holds(memoryview(leaf.view(np.uint8)))
            for leaf in parallel.gradients.values()
        ]

    with start_job(2, body) as job:
        assert job.results() == [[True, True]] * 2


def test_parameters_are_not_kept_alive():
    (backend,) = ferrodist.SimulatedBackend.create_group(1)
    with backend:
        params = {"w": np.zeros(1000)}
        parallel = DataParallel(params, backend)
        parallel.average(params)
        alive = [weakref.ref(params["w"]), weakref.ref(parallel.params["w"])]
        del params, parallel.params
        gc.collect()
        assert [one() for one in alive] == [None, None]


def test_leaf_unused_on_some_ranks_counts_as_zeros_there():
    def body(backend):
        parallel = DataParallel({"a": np.zeros(2), "b": np.zeros(3, np.float32)}, backend)
        mine = {"a": np.full(2, 6.0), "b": np.full(3, 9, np.float32)}
        return parallel.average({"a": mine["a"], "b": mine["b"] if backend.rank == 2 else None})

    for found in run_ranks(3, body):
        assert found["a"].tolist() == [6.0, 6.0]
        assert_same_bits(found["b"], np.full(3, 3, np.float32))


def test_leaf_unused_on_every_rank_stays_none():
    def body(backend):
        parallel = DataParallel({"a": np.zeros(2), "b": np.zeros(3)}, backend)
        return parallel.average({"a": np.ones(2), "b": None}), parallel.average(None)

    for first, second in run_ranks(2, body):
        assert (first["a"].tolist(), first["b"]) == ([1.0, 1.0], None)
        assert second == {"a": None, "b": None}


def test_rank_without_gradients_gets_the_kinds_of_its_parameters():
    import jax.numpy as jnp

    def body(backend):
        parallel = DataParallel({"a": jnp.zeros((2, 2)), "b": 0.0}, backend)
        mine = {"a": jnp.ones((2, 2)), "b": 1.0} if backend.rank == 0 else None
        return parallel.average(mine, weight=3 if backend.rank == 0 else 0)

    for found in run_ranks(2, body):
        assert isinstance(found["a"], jnp.ndarray)
        assert found["a"].tolist() == [[1.0, 1.0]] * 2
        assert (type(found["b"]), found["b"]) == (float, 1.0)


def test_gradient_without_a_place_is_refused():
    def body(backend):
        DataParallel({"a": np.zeros(2)}, backend).average({"a": np.ones(2), "d": np.ones(1)})

    for error in errors_by_rank(2, body):
        assert type(error) is InvalidArgument
        assert "gradients['d'] has no place in the parameters, whose leaves are ['a'];" in str(
            error
        )


@pytest.mark.parametrize("other", [np.ones(2), np.ones(3, np.float32)])
def test_gradient_of_another_form_is_refused(other):
    def body(backend):
        DataParallel({"a": np.zeros(2, np.float32)}, backend).average({"a": other})

    found = f"gradients['a'] is {other.dtype}{list(other.shape)}, but the parameter is float32[2];"
    assert found in str(errors_by_rank(1, body)[0])


def test_parameter_that_has_no_mean_is_refused():
    (error,) = errors_by_rank(1, lambda b: DataParallel({"step": np.arange(3)}, b))
    assert isinstance(error, ferrodist.UnsupportedOp)
    assert "DataParallel: params['step'] is int64, whose mean would not be" in str(error)


def test_backend_is_needed():
    with pytest.raises(ferrodist.NotInitialized, match=r"^DataParallel: call ferrodist\.init"):
        DataParallel([np.ones(2)])


@pytest.mark.parametrize("params", [[], {}, [None]])
def test_no_parameters_at_all_are_fine(params):
    def body(backend):
        parallel = DataParallel(params, backend)
        parallel.check_replicas(parallel.params)
        return parallel.average(params), parallel.average(params, weight=0)

    assert run_ranks(2, body) == [(params, params)] * 2


# -- drift -----------------------------------------------------------------------------------------


def test_equal_replicas_pass():
    def body(backend):
        parallel = DataParallel(some_gradients(backend.rank), backend)
        before = backend.statistics().collectives
        parallel.check_replicas(parallel.params)
        return backend.statistics().collectives - before

    assert run_ranks(3, body) == [1, 1, 1]


def test_one_flipped_bit_is_named():
    def body(backend):
        parallel = DataParallel({"a": np.zeros(4), "b": [np.ones(1000)]}, backend)
        parallel.average(parallel.params)
        if backend.rank == 1:
            parallel.params["b"][0].view(np.uint64)[500] ^= 1
        parallel.check_replicas(parallel.params)

    for error in errors_by_rank(3, body):
        assert type(error) is CollectiveMismatch
        assert error.rank == 1
        assert "tree['b'][0] of rank 1 differs from the others' after 1 averages" in str(error)
        assert "(differing ranks: [1])" in str(error)


# -- training --------------------------------------------------------------------------------------


def trained_with_optax(average_of_shards: Any, num_steps: int = 5) -> Any:
    """Train a small JAX model by whatever gives the mean gradient of a step."""
    import jax
    import optax

    jnp = jax.numpy
    params = {"w": jnp.ones((3, 4)) / 3, "b": jnp.zeros(4)}
    optimizer = optax.adamw(0.1)
    state = optimizer.init(params)

    def loss_of(params, x):
        return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)

    for step in range(num_steps):
        gradients = average_of_shards(
            lambda rank, step=step, params=params: jax.grad(loss_of)(
                params, jnp.asarray(numbers(rank, (4, 3)) + step)
            )
        )
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_training_with_optax_has_the_bits_of_one_process(world):
    import jax

    def body(backend):
        parallel: list[DataParallel] = []

        def average(gradient_of_rank):
            mine = gradient_of_rank(backend.rank)
            parallel[:] = parallel or [DataParallel(mine, backend)]
            return parallel[0].average(mine)

        return trained_with_optax(average)

    def one_after_another(gradient_of_rank):
        parts = [gradient_of_rank(rank) for rank in range(world)]
        return jax.tree.map(
            lambda *leaves: jax.numpy.asarray(mean_in_rank_order([np.asarray(x) for x in leaves])),
            *parts,
        )

    expected = trained_with_optax(one_after_another)
    for found in run_ranks(world, body):
        for name in expected:
            assert_same_bits(np.asarray(found[name]), np.asarray(expected[name]))
