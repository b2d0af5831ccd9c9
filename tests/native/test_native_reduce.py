# SPDX-License-Identifier: MIT OR Apache-2.0
"""The reduction kernels against NumPy, at every CPU level this machine can run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ferrodist import _native
from ferrodist.buffer import ARRAY_DTYPES, DType
from ferrodist.reduce_op import ReduceOp

Array = np.ndarray[Any, Any]

LENGTHS = [0, 1, 7, 64, 4097]
NUM_OPERANDS = [1, 2, 3, 5]
HALVES = [DType.FLOAT16, DType.BFLOAT16]
SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -6e-8, 65504.0, 3e38, 1.0]

ARITHMETIC: dict[ReduceOp, np.ufunc] = {ReduceOp.SUM: np.add, ReduceOp.PROD: np.multiply}
ORDER: dict[ReduceOp, np.ufunc] = {ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}
BITS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
LOGIC: dict[ReduceOp, np.ufunc] = {
    ReduceOp.LAND: np.logical_and,
    ReduceOp.LOR: np.logical_or,
    ReduceOp.LXOR: np.logical_xor,
}


def ufuncs(dtype: DType) -> dict[ReduceOp, np.ufunc]:
    """Return what each op of a dtype does to two arrays; MEAN adds, then divides."""
    if dtype.is_complex:
        return ARITHMETIC | LOGIC | {ReduceOp.MEAN: np.add}
    if dtype.is_float:
        return ARITHMETIC | ORDER | LOGIC | {ReduceOp.MEAN: np.add}
    return ARITHMETIC | ORDER | BITS | LOGIC


CASES = [(dtype, op) for dtype in ARRAY_DTYPES for op in sorted(ufuncs(dtype))]
every_case = pytest.mark.parametrize(
    ("dtype", "op"), CASES, ids=[f"{dtype.label}-{op.name}" for dtype, op in CASES]
)
every_dtype = pytest.mark.parametrize("dtype", ARRAY_DTYPES, ids=lambda dtype: dtype.label)
every_half = pytest.mark.parametrize("half", HALVES, ids=lambda dtype: dtype.label)
every_level = pytest.mark.parametrize("level", _native.cpu_levels(), indirect=True)


@contextlib.contextmanager
def using_level(name: str) -> Iterator[None]:
    before = _native.cpu_level()
    _native.use_cpu_level(name)
    try:
        yield
    finally:
        _native.use_cpu_level(before)


@pytest.fixture
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    with using_level(request.param):
        yield request.param


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if dtype is DType.BFLOAT16 else dtype.label)


def accumulator(dtype: DType) -> np.dtype[Any]:
    return np.dtype(np.float32) if dtype.is_half else numpy_dtype(dtype)


def real_part(dtype: DType) -> np.dtype[Any]:
    """Return the type whose division a mean is made of."""
    part: np.dtype[Any] = np.empty(0, accumulator(dtype)).real.dtype
    return part


def random_values(dtype: DType, length: int, *, seed: int) -> Array:
    """Return numbers of every size, for floats with everything special among them."""
    random = np.random.default_rng([seed, dtype])
    if dtype is DType.BOOL:
        return random.integers(0, 2, length).astype(bool)
    if dtype.is_integer:
        integers = random.integers(0, 256, length * dtype.itemsize, np.uint8).view(dtype.label)
        integers[random.random(length) < 0.3] = 0
        return integers
    parts = 2 if dtype.is_complex else 1
    values = random.normal(size=length * parts) * 10.0 ** random.integers(-3, 4, length * parts)
    places = random.random(length * parts) < 0.1
    values[places] = random.choice(SPECIAL, places.sum())
    kind = real_part(dtype) if dtype.is_complex else numpy_dtype(dtype)
    with np.errstate(all="ignore"):
        return values.astype(kind).view(numpy_dtype(dtype))


def random_operands(dtype: DType, length: int, number: int) -> list[Array]:
    return [random_values(dtype, length, seed=seed) for seed in range(number)]


def multiply_complex(left: Array, right: Array) -> Array:
    """Multiply by the plain formula; NumPy's own loops may use fused operations."""
    result = np.empty_like(left)
    result.real = left.real * right.real - left.imag * right.imag
    result.imag = left.real * right.imag + left.imag * right.real
    return result


def expected_fold(dtype: DType, op: ReduceOp, operands: list[Array], divisor: int = 1) -> Array:
    combine: Callable[..., Array] = ufuncs(dtype)[op]
    if dtype.is_complex and op is ReduceOp.PROD:
        combine = multiply_complex
    with np.errstate(all="ignore"):
        wide = [operand.astype(accumulator(dtype)) for operand in operands]
        wide = [operand != 0 for operand in wide] if op in LOGIC else wide
        reduced = functools.reduce(combine, wide)
        if op is ReduceOp.MEAN:
            real = real_part(dtype)
            reduced = (reduced.view(real) / real.type(divisor)).view(reduced.dtype)
        return reduced.astype(operands[0].dtype)


def raw(array: Array) -> memoryview:
    return array.view(np.uint8).data


def local_reduce(dtype: DType, op: ReduceOp, operands: list[Array], divisor: int = 1) -> Array:
    into = np.empty_like(operands[0])
    fold_into(into, dtype, op, operands, divisor)
    return into


def fold_into(
    into: Array, dtype: DType, op: ReduceOp, operands: list[Array], divisor: int = 1
) -> None:
    _native.local_reduce(dtype, op, raw(into), [raw(operand) for operand in operands], divisor)


def bits_of(array: Array) -> Array:
    """Return the array's bytes with every NaN made the same one."""
    if array.dtype.kind == "c":
        array = array.view(array.real.dtype)
    clean = array.copy()
    clean[array != array] = np.nan if array.dtype.kind not in "biu" else 0
    return clean.view(np.uint8)


def assert_same_bits(result: Array, expected: Array) -> None:
    np.testing.assert_array_equal(bits_of(result), bits_of(expected))


def assert_same(result: Array, expected: Array, op: ReduceOp) -> None:
    if op in ORDER:  # NumPy does not say which of -0.0 and 0.0 is the smaller
        result, expected = result + result.dtype.type(0), expected + expected.dtype.type(0)
    assert_same_bits(result, expected)


@every_level
@every_case
def test_fold_equals_numpy(dtype: DType, op: ReduceOp, level: str) -> None:
    for length in LENGTHS:
        for number in NUM_OPERANDS:
            operands = random_operands(dtype, length, number)
            expected = expected_fold(dtype, op, operands, divisor=number)
            assert_same(local_reduce(dtype, op, operands, divisor=number), expected, op)


@every_case
def test_every_level_gives_the_same_bits(dtype: DType, op: ReduceOp) -> None:
    random = np.random.default_rng(1)
    raw = random.integers(0, 256, (3, 4097 * dtype.itemsize), np.uint8)
    operands = [row.view(numpy_dtype(dtype)) for row in raw]
    results = []
    for name in _native.cpu_levels():
        with using_level(name):
            results.append(local_reduce(dtype, op, operands, divisor=3))
    for result in results[1:]:
        assert_same_bits(result, results[0])


@every_level
@every_case
def test_into_may_be_any_of_the_operands(dtype: DType, op: ReduceOp, level: str) -> None:
    expected = expected_fold(dtype, op, random_operands(dtype, 517, 3), divisor=3)
    for position in range(3):
        operands = random_operands(dtype, 517, 3)
        fold_into(operands[position], dtype, op, operands, divisor=3)
        assert_same(operands[position], expected, op)


@every_level
@every_dtype
def test_into_may_be_every_operand(dtype: DType, level: str) -> None:
    (array,) = random_operands(dtype, 517, 1)
    expected = expected_fold(dtype, ReduceOp.SUM, [array.copy()] * 4)
    fold_into(array, dtype, ReduceOp.SUM, [array] * 4)
    assert_same_bits(array, expected)


@every_level
@every_dtype
def test_buffers_need_no_alignment(dtype: DType, level: str) -> None:
    operands = random_operands(dtype, 517, 3)
    expected = expected_fold(dtype, ReduceOp.SUM, operands)
    nbytes = expected.nbytes
    memory = memoryview(bytearray(4 * (nbytes + 8)))
    places = [memory[i * (nbytes + 8) + i + 1 :][:nbytes] for i in range(4)]
    for place, operand in zip(places, operands, strict=False):
        place[:] = operand.tobytes()
    _native.local_reduce(dtype, ReduceOp.SUM, places[3], places[:3])
    assert_same_bits(np.frombuffer(bytes(places[3]), expected.dtype), expected)


@every_level
@every_dtype
def test_nothing_beyond_the_end_is_written(dtype: DType, level: str) -> None:
    for length in range(70):
        memory = np.full(length * dtype.itemsize + 64, 0xEE, np.uint8)
        operands = [bytes(length * dtype.itemsize)] * 2
        _native.local_reduce(dtype, ReduceOp.SUM, memory.data[: length * dtype.itemsize], operands)
        assert (memory[length * dtype.itemsize :] == 0xEE).all()


@every_level
@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_integers_wrap(bits: int, level: str) -> None:
    dtype = DType[f"INT{bits}"]
    largest = np.full(9, 2 ** (bits - 1) - 1, dtype.label)
    one, two = np.ones(9, dtype.label), np.full(9, 2, dtype.label)
    assert (local_reduce(dtype, ReduceOp.SUM, [largest, one]) == -(2 ** (bits - 1))).all()
    assert (local_reduce(dtype, ReduceOp.PROD, [largest, two]) == -2).all()


@every_level
def test_any_byte_but_zero_is_true(level: str) -> None:
    odd_bools = np.array([0, 1, 2, 255], np.uint8).repeat(50)
    trues = np.full(200, 4, np.uint8)
    into = np.empty(200, np.uint8)
    fold_into(into, DType.BOOL, ReduceOp.PROD, [trues, odd_bools])
    np.testing.assert_array_equal(into, odd_bools != 0)


@every_level
@pytest.mark.parametrize("dtype", [d for d in DType if d.is_float], ids=lambda d: d.label)
def test_min_and_max_keep_the_left_one_of_equal_zeros(dtype: DType, level: str) -> None:
    negative, positive = (np.array([zero] * 40).astype(numpy_dtype(dtype)) for zero in (-0.0, 0.0))
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        assert_same_bits(local_reduce(dtype, op, [negative, positive]), negative)
        assert_same_bits(local_reduce(dtype, op, [positive, negative]), positive)


@every_level
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
def test_nan_wins_in_any_position(op: ReduceOp, level: str) -> None:
    operands = [np.full(40, value, np.float32) for value in (np.inf, np.nan, -np.inf)]
    for _ in range(3):
        operands = operands[1:] + operands[:1]
        assert np.isnan(local_reduce(DType.FLOAT32, op, operands)).all()


def pairs_of(dtype: DType, values: Array, indices: Array, is_reversed: bool) -> Array:
    pairs = np.empty((len(values), 2), np.uint64)
    form = (dtype, DType[indices.dtype.name.upper()], is_reversed)
    _native.pack_pairs(*form, raw(pairs.reshape(-1)), raw(values), raw(indices))
    return pairs


def expected_place(columns: Array, indices: Array, op: ReduceOp) -> tuple[Any, Any]:
    """Find value and index in one column: NaN wins, of equal values the lowest index does."""
    wide = columns.astype(np.float64) if columns.dtype.kind not in "iu" else columns
    best = wide[(np.argmin if op is ReduceOp.MINLOC else np.argmax)(wide)]
    return best, min(indices[(wide == best) | ((wide != wide) & (best != best))])


@every_level
@pytest.mark.parametrize("op", [ReduceOp.MINLOC, ReduceOp.MAXLOC])
@pytest.mark.parametrize(
    "dtype", [d for d in ARRAY_DTYPES if not d.is_complex], ids=lambda d: d.label
)
def test_pairs_give_the_least_and_the_largest_with_their_indices(
    dtype: DType, op: ReduceOp, level: str
) -> None:
    for number, length in ((1, 1), (2, 7), (5, 300)):
        values = random_operands(dtype, length, number)
        kind = ["int8", "uint16", "int32", "int64", "uint64"][number % 5]
        indices = [random_values(DType[kind.upper()], length, seed=9 + i) for i in range(number)]
        pairs = [
            pairs_of(dtype, *one, op is ReduceOp.MAXLOC)
            for one in zip(values, indices, strict=True)
        ]
        into = np.empty_like(pairs[0])
        fold_into(into.reshape(-1), DType.PAIR, ReduceOp.MINLOC, [p.reshape(-1) for p in pairs])
        found, places = np.empty_like(values[0]), np.empty_like(indices[0])
        form = (dtype, DType[kind.upper()], op is ReduceOp.MAXLOC)
        _native.unpack_pairs(*form, raw(into.reshape(-1)), raw(found), raw(places))
        for at in range(length):
            column = np.array([one[at] for one in values])
            value, place = expected_place(column, np.array([one[at] for one in indices]), op)
            assert found[at] == value or (found[at] != found[at] and value != value)
            assert places[at] == place


def test_pairs_refuse_what_has_no_order_and_lengths_that_differ() -> None:
    pairs, values = bytearray(32), bytes(16)
    with pytest.raises(TypeError, match="order"):
        _native.pack_pairs(DType.COMPLEX64, DType.INT64, False, pairs, values, values)
    with pytest.raises(ValueError, match="as many as pairs, 2"):
        _native.pack_pairs(DType.INT64, DType.INT64, False, pairs, values, bytes(8))
    with pytest.raises(TypeError, match="no sense"):
        _native.local_reduce(DType.PAIR, ReduceOp.SUM, pairs, [pairs])


@every_level
def test_mean_is_a_true_division(level: str) -> None:
    values = np.arange(1, 4097, dtype=np.float32)
    expected = values / np.float32(3)
    assert (expected != values * np.float32(1 / 3)).any()
    assert_same_bits(local_reduce(DType.FLOAT32, ReduceOp.MEAN, [values], divisor=3), expected)


@every_level
@pytest.mark.parametrize(("dtype", "bits"), [(DType.COMPLEX64, 12), (DType.COMPLEX128, 27)])
def test_complex_product_is_not_fused(dtype: DType, bits: int, level: str) -> None:
    """The square of x needs more bits than there are: a fused operation would leave a rest."""
    x = 1 + 2.0**-bits
    array = np.full(33, complex(x, x), dtype.label)
    assert (local_reduce(dtype, ReduceOp.PROD, [array, array]).real == 0).all()


@every_level
@every_half
def test_halves_are_rounded_once_at_the_end(half: DType, level: str) -> None:
    large = 2.0 ** (11 if half is DType.FLOAT16 else 8)  # the next number up is 2 away
    operands = [np.full(40, value, numpy_dtype(half)) for value in (large, 1, 1)]
    assert (local_reduce(half, ReduceOp.SUM, operands) == large + 2).all()


@every_level
@every_half
def test_every_half_widens_as_in_numpy(half: DType, level: str) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    floats = np.empty(1 << 16, np.float32)
    _native.widen(half, raw(floats), raw(halves))
    assert_same_bits(floats, halves.view(numpy_dtype(half)).astype(np.float32))


def hard_to_narrow(half: DType) -> Array:
    """Return floats at, just below and just above every half and every middle of two halves."""
    halves = np.arange(1 << 15, dtype=np.uint16).view(numpy_dtype(half)).astype(np.float64)
    halves = halves[np.isfinite(halves)]
    middles = (halves[1:] + halves[:-1]) / 2
    limits = [65520.0, 65536.0, 3.3961775e38, np.inf, np.nan]
    exact = np.concatenate([halves, middles, limits]).astype(np.float32)
    near = [exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(np.inf))]
    anything = np.random.default_rng(0).integers(0, 1 << 32, 1 << 17, np.uint32).view(np.float32)
    floats = np.concatenate([*near, anything])
    return np.concatenate([floats, -floats])


@every_level
@every_half
def test_floats_narrow_as_in_numpy(half: DType, level: str) -> None:
    with np.errstate(all="ignore"):
        floats = hard_to_narrow(half)
        expected = floats.astype(numpy_dtype(half))
    halves = np.empty(floats.size, np.uint16)
    _native.narrow(half, raw(halves), raw(floats))
    assert_same_bits(halves.view(numpy_dtype(half)), expected)


@every_level
@every_half
def test_widen_and_narrow_work_for_any_length(half: DType, level: str) -> None:
    for length in [*range(40), 4097]:
        values = random_values(half, length, seed=length)
        floats, back = np.empty(length, np.float32), np.empty_like(values)
        _native.widen(half, raw(floats), raw(values))
        _native.narrow(half, raw(back), raw(floats))
        assert_same_bits(back, values)


def test_best_level_is_used_unless_told_otherwise() -> None:
    assert _native.cpu_level() == _native.cpu_levels()[0]
    assert _native.cpu_levels()[-1] == "portable"


def test_unknown_level_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'pentium'.*portable"):
        _native.use_cpu_level("pentium")


@every_dtype
def test_op_that_makes_no_sense_is_refused(dtype: DType) -> None:
    buffer = bytearray(dtype.itemsize)
    # MAXLOC is MINLOC of other keys, and no native operation.
    for op in set(ReduceOp) - set(ufuncs(dtype)) - {ReduceOp.MAXLOC}:
        with pytest.raises(TypeError):
            _native.local_reduce(dtype, op, buffer, [buffer])


@pytest.mark.parametrize(("dtype", "op"), [(len(DType), 0), (0, len(ReduceOp))])
def test_unknown_code_is_refused(dtype: int, op: int) -> None:
    with pytest.raises(ValueError, match="unknown"):
        _native.local_reduce(dtype, op, bytearray(8), [bytearray(8)])


def test_operand_of_another_length_is_refused_with_both_lengths() -> None:
    with pytest.raises(ValueError, match="operand 1 has 12 bytes, into has 8"):
        _native.local_reduce(DType.FLOAT32, ReduceOp.SUM, bytearray(8), [bytes(8), bytes(12)])


def test_length_that_is_no_multiple_of_the_itemsize_is_refused() -> None:
    with pytest.raises(ValueError, match="10 bytes are no multiple of the itemsize 4"):
        _native.local_reduce(DType.FLOAT32, ReduceOp.SUM, bytearray(10), [bytes(10)])


def test_fold_of_nothing_and_division_by_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one operand"):
        _native.local_reduce(DType.FLOAT32, ReduceOp.SUM, bytearray(8), [])
    with pytest.raises(ValueError, match="divisor"):
        _native.local_reduce(DType.FLOAT32, ReduceOp.MEAN, bytearray(8), [bytes(8)], 0)


def test_readonly_into_is_refused() -> None:
    with pytest.raises(BufferError):
        _native.local_reduce(DType.FLOAT32, ReduceOp.SUM, bytes(8), [bytes(8)])
    with pytest.raises(BufferError):
        _native.widen(DType.FLOAT16, bytes(8), bytes(4))
    with pytest.raises(BufferError):
        _native.narrow(DType.FLOAT16, bytes(4), bytes(8))


@pytest.mark.parametrize("convert", [_native.widen, _native.narrow])
def test_conversion_refuses_other_dtypes_and_counts(convert: Callable[..., None]) -> None:
    with pytest.raises(TypeError):
        convert(DType.FLOAT32, bytearray(8), bytes(8))
    with pytest.raises(ValueError, match=r"16-bit floats do not go with"):
        convert(DType.FLOAT16, bytearray(8), bytes(8))


def test_large_fold_leaves_the_gil_and_comes_back_right() -> None:
    operands = random_operands(DType.INT32, 1 << 18, 2)
    expected = expected_fold(DType.INT32, ReduceOp.SUM, operands)
    assert_same_bits(local_reduce(DType.INT32, ReduceOp.SUM, operands), expected)
