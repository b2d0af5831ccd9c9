"""Properties over random calls: NumPy's bits in rank order, every difference caught."""

import random

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrodist
from ferrodist import CollectiveMismatch, Config, ReduceOp
from ferrodist.buffer import ARRAY_DTYPES, DType
from ferrodist.call import Kind
from ferrodist.schedules import known
from ferrodist.testing import run_ranks

IN_ORDER = [s.name for s in known(Kind.ALLREDUCE) if s.in_order]
OTHERS = [s.name for s in known(Kind.ALLREDUCE) if not s.in_order]
SMALL_PIECES = Config(message_nbytes=4096, chunk_nbytes=8192, fuse_nbytes=4096)

REDUCTIONS = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def numpy_dtype(dtype):
    return np.dtype(ml_dtypes.bfloat16) if dtype is DType.BFLOAT16 else np.dtype(dtype.label)


def legal_ops(dtype):
    if dtype.is_complex:
        return ["sum", "mean", "prod"]
    if dtype.is_float:
        return ["sum", "mean", "prod", "min", "max"]
    return [op for op in REDUCTIONS if op != "mean"]


def reduce_in_rank_order(inputs, op):
    """Reduce with NumPy alone, left to right; 16-bit floats in float32, rounded once at the end."""
    dtype = inputs[0].dtype
    is_half = dtype.itemsize == 2 and dtype.kind not in "iu"
    wide = [x.astype(np.float32) if is_half else x for x in inputs]
    with np.errstate(all="ignore"):
        total = wide[0]
        for x in wide[1:]:
            if op == "prod" and np.iscomplexobj(x):
                total = (total.real * x.real - total.imag * x.imag) + 1j * (
                    total.real * x.imag + total.imag * x.real
                )
                total = total.astype(dtype)
            else:
                total = REDUCTIONS[op](total, x)
        if op == "mean":
            count = np.asarray(len(inputs), total.real.dtype)
            if np.iscomplexobj(total):
                parts = np.stack([total.real / count, total.imag / count], axis=-1)
                total = parts.view(total.dtype)[..., 0]
            else:
                total = total / count
        return total.astype(dtype)


def random_array(rng, shape, dtype):
    if dtype is DType.BOOL:
        return rng.random(shape) < 0.5
    if dtype.is_integer:
        info = np.iinfo(dtype.label)
        return rng.integers(info.min, info.max, shape, dtype=dtype.label, endpoint=True)
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)
    if dtype.is_complex:
        x = x + 1j * rng.standard_normal(shape)
    return x.astype(numpy_dtype(dtype))


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@st.composite
def reductions(draw):
    dtype = draw(st.sampled_from(ARRAY_DTYPES))
    shape = draw(
        st.one_of(
            st.lists(st.integers(0, 5), max_size=3).map(tuple),
            st.integers(0, 5000).map(lambda n: (n,)),
        )
    )
    return (
        draw(st.integers(1, 6)),
        shape,
        dtype,
        draw(st.sampled_from(legal_ops(dtype))),
        draw(st.integers(0, 99)),
    )


RELAXED = settings(max_examples=120)


def reduced(case, **options):
    """Return the inputs of all ranks, NumPy's reduction in rank order, and what allreduce gives."""
    world, shape, dtype, op, seed = case
    inputs = [
        random_array(np.random.default_rng([seed, rank]), shape, dtype) for rank in range(world)
    ]
    results = run_ranks(
        world,
        lambda b: ferrodist.allreduce(inputs[b.rank], b, op, **options),
        config=SMALL_PIECES,
    )
    return inputs, reduce_in_rank_order(inputs, op), results


@pytest.mark.slow
@given(reductions(), st.sampled_from([None, *IN_ORDER]))
@RELAXED
def test_reproducible_sums_are_those_of_numpy_in_rank_order_bit_for_bit(case, algorithm):
    _, expected, results = reduced(case, algorithm=algorithm, reproducible=True)
    assert all(same_bits(result, expected) for result in results)


@pytest.mark.slow
@given(reductions(), st.sampled_from(OTHERS))
@RELAXED
def test_other_algorithms_stay_within_the_bound_of_reordering_and_agree_on_all_ranks(
    case, algorithm
):
    world, _, dtype, op, _ = case
    inputs, expected, results = reduced(case, algorithm=algorithm)
    assert all(same_bits(result, results[0]) for result in results)
    if op not in ("sum", "mean", "prod") or not (dtype.is_float or dtype.is_complex):
        assert same_bits(results[0], expected)
        return
    # Each of the W - 1 operations rounds once, whatever the order: the error of a sum is at most
    # W eps times the sum of magnitudes, that of a product W eps times the product of magnitudes.
    magnitudes = [np.abs(x.astype(complex)) for x in inputs]
    eps = 2.0**-8 if dtype is DType.BFLOAT16 else np.finfo(numpy_dtype(dtype)).eps
    size = np.prod(magnitudes, axis=0) if op == "prod" else np.sum(magnitudes, axis=0)
    limit = 4 * world * eps * size + 2.0**-24  # the last term: 16-bit subnormals
    is_finite = np.isfinite(expected.astype(complex)) & np.isfinite(results[0].astype(complex))
    with np.errstate(invalid="ignore"):
        error = np.abs(results[0].astype(complex) - expected.astype(complex))
    assert (error <= limit)[is_finite].all()


@pytest.mark.slow
@given(
    st.integers(1, 5),
    st.lists(
        st.tuples(
            st.sampled_from([DType.FLOAT32, DType.BFLOAT16, DType.INT64]), st.integers(0, 3000)
        ),
        max_size=6,
    ),
    st.integers(0, 99),
)
@RELAXED
def test_a_fused_tree_has_the_bits_of_its_leaves_one_by_one(world, leaves, seed):
    def tree(rank):
        rng = np.random.default_rng([seed, rank])
        return {
            f"leaf{i}": random_array(rng, (size * world,), dtype)
            for i, (dtype, size) in enumerate(leaves)
        }

    def body(backend):
        x = tree(backend.rank)
        checks = []
        for call in (
            ferrodist.allreduce,
            ferrodist.reduce_scatter,
            ferrodist.all_gather,
            ferrodist.broadcast,
        ):
            fused = call(x, backend)
            checks += [same_bits(fused[name], call(x[name], backend)) for name in x]
        return all(checks)

    assert all(run_ranks(world, body, config=SMALL_PIECES))


def test_float32_results_do_not_depend_on_size_pieces_or_segments():
    inputs = [
        np.random.default_rng(rank).standard_normal(50_000).astype(np.float32) for rank in range(3)
    ]
    whole = run_ranks(3, lambda b: ferrodist.allreduce(inputs[b.rank], b, "mean"))[0]
    pieces = run_ranks(
        3, lambda b: ferrodist.allreduce(inputs[b.rank], b, "mean"), config=SMALL_PIECES
    )[0]
    parts = [
        run_ranks(
            3, lambda b, at=at: ferrodist.allreduce(inputs[b.rank][at : at + 999], b, "mean")
        )[0]
        for at in range(0, 50_000, 999)
    ]
    assert same_bits(whole, pieces)
    assert same_bits(whole, np.concatenate(parts))


# -- differences -----------------------------------------------------------------------------------


def random_call(rng, world):
    """Draw a call as data: enough of everything that two draws rarely agree."""
    kind = rng.choice(
        [
            "allreduce",
            "broadcast",
            "reduce",
            "all_gather",
            "gather",
            "reduce_scatter",
            "barrier",
            "tree",
        ]
    )
    return {
        "kind": kind,
        "count": world * rng.randint(0, 3),
        "dtype": rng.choice(["float32", "int64", "float16"]),
        "op": rng.choice(["sum", "max", "prod"]),
        "root": rng.randrange(world),
        "algorithm": rng.choice([None, "star"]),
        "reproducible": rng.choice([None, True]),
        "keys": rng.choice(["ab", "ac", "abc"]),
    }


RELEVANT = {
    "allreduce": {"count", "dtype", "op", "algorithm", "reproducible"},
    "broadcast": {"count", "dtype", "root", "algorithm", "reproducible"},
    "reduce": {"count", "dtype", "op", "root", "algorithm", "reproducible"},
    "all_gather": {"count", "dtype", "algorithm", "reproducible"},
    "gather": {"count", "dtype", "root", "algorithm", "reproducible"},
    "reduce_scatter": {"count", "dtype", "op", "algorithm", "reproducible"},
    "barrier": set(),
    "tree": {"count", "dtype", "op", "keys"},
}


def what_counts(call):
    return {"kind": call["kind"], **{name: call[name] for name in RELEVANT[call["kind"]]}}


def make_call(call, backend):
    kind = call["kind"]
    if kind == "barrier":
        return ferrodist.barrier(backend)
    x = np.ones(call["count"], call["dtype"])
    if kind == "tree":
        return ferrodist.allreduce(dict.fromkeys(call["keys"], x), backend, call["op"])
    names = RELEVANT[kind] - {"count", "dtype"}
    return getattr(ferrodist, kind)(x, backend, **{name: call[name] for name in names})


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_thousand_differences_are_all_caught_by_all_ranks(world, seed):
    def body(backend):
        rng = random.Random(seed)
        caught = 0
        for number in range(1000):
            usual, other = random_call(rng, world), random_call(rng, world)
            odd = {rank for rank in range(world) if rng.random() < 0.5}
            mine = other if backend.rank in odd else usual
            if not odd or len(odd) == world or what_counts(usual) == what_counts(other):
                make_call(mine, backend)
                continue
            with pytest.raises(CollectiveMismatch) as found:
                make_call(mine, backend)
            assert found.value.sequence == number + 1
            texts[number].add(str(found.value))
            caught += 1
        assert ferrodist.allreduce(1, backend) == world
        return caught

    texts = [set() for _ in range(1000)]
    results = run_ranks(world, body)
    assert len(set(results)) == 1
    assert results[0] > 400
    assert all(len(found) <= 1 for found in texts)


# -- large and strange -----------------------------------------------------------------------------


@pytest.mark.slow
def test_more_than_two_gigabytes_work():
    x = np.zeros(2**31 + 11, np.uint8)
    x[-1], x[0] = 3, 1

    def body(backend):
        total = ferrodist.allreduce(x, backend, ReduceOp.SUM)
        return int(total[0]), int(total[-1]), total.shape

    assert run_ranks(2, body, timeout=110) == [(2, 6, x.shape)] * 2


def test_nan_goes_through_min_and_max_as_in_numpy():
    def body(backend):
        x = np.array([1.0, np.nan, np.nan]) if backend.rank else np.array([np.nan, 2.0, np.nan])
        return ferrodist.allreduce(x, backend, "min"), ferrodist.allreduce(x, backend, "max")

    for low, high in run_ranks(2, body):
        assert np.isnan(low).all()
        assert np.isnan(high).all()


def test_sixteen_bit_sums_are_rounded_once():
    """1 + 2**-11 rounds back to 1 in float16 at each step; in float32 the small ones add up."""
    world = 5
    for algorithm in [None, *IN_ORDER, *OTHERS]:

        def body(backend, algorithm=algorithm):
            x = np.full(3, 1.0 if backend.rank == 0 else 2.0**-11, np.float16)
            return ferrodist.allreduce(x, backend, algorithm=algorithm)[0]

        assert run_ranks(world, body) == [np.float16(1 + 4 * 2.0**-11)] * world


def test_all_to_all_uneven_in_place_sends_what_was_passed():
    def body(backend):
        x = np.arange(6.0) + 100 * backend.rank
        ferrodist.all_to_all_uneven(x, [2, 2, 2], backend, out=x)
        return x.tolist()

    assert run_ranks(3, body)[0] == [0, 1, 100, 101, 200, 201]
