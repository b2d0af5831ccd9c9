# SPDX-License-Identifier: MIT OR Apache-2.0
"""NumPy arrays and scalars converted and back."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrodist.arrays import as_input, as_output, new_result
from ferrodist.buffer import ARRAY_DTYPES, DType
from ferrodist.errors import InvalidArgument, UnsupportedArray
from helpers import address, round_trip

SHAPES = [(), (0,), (0, 3), (1,), (7,), (12, 3), (2, 3, 4)]


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if dtype is DType.BFLOAT16 else dtype.label)


def values(dtype: DType, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Distinct small numbers, with an imaginary part where there is one."""
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 100
    if dtype is DType.BOOL:
        return np.asarray(numbers % 3 == 0)
    parts = numbers - 1j * numbers if dtype.is_complex else numbers
    return np.asarray(parts, numpy_dtype(dtype))


def assert_same(found: Any, expected: np.ndarray[Any, Any]) -> None:
    assert type(found) is np.ndarray
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ARRAY_DTYPES, ids=lambda dtype: dtype.label)
def test_array_comes_back_as_it_was(dtype: DType, shape: tuple[int, ...]) -> None:
    x = values(dtype, shape)
    taken = as_input(x)
    assert (taken.buffer.dtype, taken.buffer.shape) == (dtype, shape)
    assert taken.buffer.memory.format == "B"
    assert taken.buffer.memory.ndim == 1
    assert taken.buffer.nbytes == x.nbytes
    assert not taken.is_number
    assert_same(round_trip(x), x)


@pytest.mark.parametrize("dtype", ARRAY_DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize(
    "cut",
    [np.s_[::2], np.s_[::-1], np.s_[:, 1], np.s_[3:9:3, ::-2], np.s_[5:5:2, ::2]],
    ids=["every second", "backwards", "column", "both axes", "empty"],
)
def test_strided_array_is_packed(dtype: DType, cut: Any) -> None:
    x = values(dtype, (12, 3))[cut]
    assert as_input(x).buffer.memory.tobytes() == x.tobytes()
    assert_same(round_trip(x), x)


@pytest.mark.parametrize("order", ["transposed", "fortran", "broadcast", "sliding"])
def test_array_in_another_order_is_packed(order: str) -> None:
    x = values(DType.FLOAT32, (4, 5))
    view = {
        "transposed": x.T,
        "fortran": np.asfortranarray(x),
        "broadcast": np.broadcast_to(x[1], (3, 5)),
        "sliding": np.lib.stride_tricks.sliding_window_view(x.reshape(-1), 3),
    }[order]
    assert_same(round_trip(view), view.copy())


@pytest.mark.slow
@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    data=st.data(),
)
def test_any_slices_of_any_axes_are_packed_right(shape: list[int], data: st.DataObject) -> None:
    x = (
        np.arange(np.prod(shape))
        .reshape(shape)
        .transpose(data.draw(st.permutations(range(len(shape)))))
    )
    view = x[tuple(data.draw(st.slices(size)) for size in x.shape)]
    assert as_input(view).buffer.memory.tobytes() == view.tobytes()
    assert_same(round_trip(view), view.copy())


def test_contiguous_array_is_not_copied() -> None:
    x = values(DType.FLOAT32, (12, 3))
    assert address(as_input(x).buffer.memory) == address(x)


def test_result_is_not_copied() -> None:
    result = new_result(as_input(np.zeros(3)), (5,))
    result.buffer.memory[:] = np.arange(5.0).tobytes()
    assert address(result.finish()) == address(result.buffer.memory)
    np.testing.assert_array_equal(result.finish(), np.arange(5.0))


def test_result_has_the_shape_asked_for() -> None:
    assert_same(
        new_result(as_input(np.ones(3, np.int16)), (0, 2)).finish(), np.ones((0, 2), np.int16)
    )


def test_read_only_array_gives_read_only_memory() -> None:
    x = np.arange(5.0)
    x.flags.writeable = False
    taken = as_input(x)
    assert taken.buffer.memory.readonly
    assert not as_input(np.arange(5.0)).buffer.memory.readonly
    assert round_trip(x).flags.writeable


def test_unaligned_array_is_packed() -> None:
    x = np.frombuffer(b"." + np.arange(4.0).tobytes(), np.float64, offset=1)
    taken = as_input(x)
    assert address(taken.buffer.memory) % 8 == 0
    assert_same(round_trip(x), np.arange(4.0))


def test_buffer_keeps_the_memory_alive() -> None:
    class Watched(bytearray):
        pass

    memory = Watched(np.arange(1000.0).tobytes())
    watch = weakref.ref(memory)
    buffer = as_input(np.frombuffer(memory)).buffer
    del memory
    gc.collect()
    assert watch() is not None
    assert buffer.memory.tobytes() == np.arange(1000.0).tobytes()
    del buffer
    gc.collect()
    assert watch() is None


@pytest.mark.parametrize("make", [np.matrix, np.asarray, lambda x: x.view(np.recarray)])
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_subclass_comes_back_as_ndarray(make: Any) -> None:
    x = make(np.arange(6.0).reshape(2, 3))
    assert_same(round_trip(x), np.asarray(x))


def test_memmap_comes_back_as_ndarray(tmp_path: Any) -> None:
    x = np.memmap(tmp_path / "data", np.int32, "w+", shape=(5,))
    x[:] = range(5)
    assert_same(round_trip(x), np.arange(5, dtype=np.int32))


@pytest.mark.parametrize("letter", "lqLQ")
def test_every_c_name_of_a_64_bit_integer_is_known(letter: str) -> None:
    x = np.arange(3, dtype=letter)
    assert as_input(x).buffer.dtype is (DType.INT64 if letter.islower() else DType.UINT64)
    assert round_trip(x).dtype.char == letter


def test_dtype_with_metadata_is_known() -> None:
    assert (
        as_input(np.zeros(3, np.dtype("f4", metadata={"unit": "m"}))).buffer.dtype is DType.FLOAT32
    )


def test_more_than_two_gib_is_seen_whole() -> None:
    count = 2**31 + 8
    x = np.zeros(count, np.uint8)  # never touched, so it costs nothing
    taken = as_input(x)
    assert taken.buffer.nbytes == taken.buffer.count == count
    assert new_result(taken, (count,)).buffer.nbytes == count


@pytest.mark.slow
def test_more_than_two_gib_is_packed() -> None:
    row = np.arange(4096, dtype=np.int16)
    memory = as_input(np.broadcast_to(row, (2**18 + 1, 4096))).buffer.memory
    assert memory.nbytes == 2**31 + row.nbytes
    assert memory[-row.nbytes :].tobytes() == row.tobytes()


@pytest.mark.parametrize(
    ("dtype", "word", "advice"),
    [
        (">f4", "big-endian dtype >f4", ".astype('<f4')"),
        (">i8", "big-endian", ".astype('<i8')"),
        (">c16", "big-endian", ".astype('<c16')"),
        ("O", "object", "broadcast_object"),
        ("U3", "string", "convert it to numbers"),
        ("S3", "string", "convert it to numbers"),
        ([("a", "f4"), ("b", "i2")], "structured", "fields one by one"),
        ("longdouble", "longdouble dtype float128", ".astype('float64')"),
        ("clongdouble", "longdouble dtype complex256", ".astype('complex128')"),
        ("M8[s]", "datetime dtype datetime64[s]", ".astype('int64')"),
        ("m8[s]", "datetime dtype timedelta64[s]", ".astype('int64')"),
        ("V4", "unsupported dtype |V4", "bfloat16"),
        (ml_dtypes.float8_e4m3fn, "unsupported dtype float8_e4m3fn", "float32"),
        (ml_dtypes.int4, "unsupported dtype int4", "int8"),
    ],
    ids=str,
)
def test_other_dtypes_are_refused_with_what_to_do(dtype: Any, word: str, advice: str) -> None:
    with pytest.raises(UnsupportedArray) as caught:
        as_input(np.zeros(3, dtype), "tree leaf ['a'][0]")
    text = str(caught.value)
    assert text.startswith("tree leaf ['a'][0] is an array of ")
    assert word in text
    assert advice in text


def test_advice_of_the_error_works() -> None:
    x = np.arange(3, dtype=">f4")
    assert_same(round_trip(x.astype("<f4")), np.arange(3, dtype=np.float32))


def test_masked_array_is_refused() -> None:
    x = np.ma.masked_array([1.0, 2.0], mask=[True, False])
    with pytest.raises(UnsupportedArray, match=r"^x is a masked array; pass x\.filled"):
        as_input(x)
    with pytest.raises(InvalidArgument, match="out is a masked array"):
        as_output(x, DType.FLOAT64, (2,))


@pytest.mark.parametrize("dtype", ARRAY_DTYPES, ids=lambda dtype: dtype.label)
def test_scalar_comes_back_as_scalar(dtype: DType) -> None:
    x = numpy_dtype(dtype).type(1)
    taken = as_input(x)
    assert (taken.buffer.dtype, taken.buffer.shape, taken.is_number) == (dtype, (), False)
    assert type(round_trip(x)) is type(x)
    assert round_trip(x) == x
    assert taken.span is None


def test_scalars_gather_into_an_array() -> None:
    result = new_result(as_input(np.float32(1)), (3,))
    result.buffer.memory[:] = np.float32([1, 2, 3]).tobytes()
    assert_same(result.finish(), np.float32([1, 2, 3]))


def test_scalar_of_another_dtype_is_refused() -> None:
    with pytest.raises(UnsupportedArray, match="datetime64"):
        as_input(np.datetime64(0, "s"))


@pytest.mark.parametrize("dtype", ARRAY_DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_out_receives_the_bytes_and_is_returned(dtype: DType, shape: tuple[int, ...]) -> None:
    expected = values(dtype, shape)
    out = np.zeros(shape, expected.dtype)
    result = as_output(out, dtype, shape)
    result.buffer.memory[:] = as_input(expected).buffer.memory
    assert result.finish() is out
    assert_same(out, expected)


def test_out_may_be_a_subclass() -> None:
    class Mine(np.ndarray[Any, Any]):
        pass

    out = np.zeros(3).view(Mine)
    result = as_output(out, DType.FLOAT64, (3,))
    result.buffer.memory[:] = np.arange(3.0).tobytes()
    assert result.finish() is out
    assert out.tolist() == [0, 1, 2]


def test_out_of_another_dtype_names_both() -> None:
    with pytest.raises(InvalidArgument, match="out has dtype float32, expected float64") as caught:
        as_output(np.zeros(3, np.float32), DType.FLOAT64, (3,))
    assert (caught.value.got, caught.value.expected) == ("float32", "float64")


def test_out_of_a_foreign_dtype_names_both() -> None:
    with pytest.raises(InvalidArgument, match="out has dtype >f8, expected float64"):
        as_output(np.zeros(3, ">f8"), DType.FLOAT64, (3,))


def test_out_of_another_shape_names_both() -> None:
    with pytest.raises(InvalidArgument, match=r"out has shape \(3, 1\), expected \(3,\)") as caught:
        as_output(np.zeros((3, 1)), DType.FLOAT64, (3,))
    assert (caught.value.got, caught.value.expected) == ((3, 1), (3,))


def test_out_that_is_read_only_is_refused() -> None:
    out = np.zeros(3)
    out.flags.writeable = False
    with pytest.raises(InvalidArgument, match="out is read-only"):
        as_output(out, DType.FLOAT64, (3,))


@pytest.mark.parametrize("out", [np.zeros(6)[::2], np.zeros(3)[::-1]], ids=["gaps", "backwards"])
def test_out_that_is_not_contiguous_is_refused(out: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"out is not C-contiguous \(strides"):
        as_output(out, DType.FLOAT64, (3,))


def test_out_that_is_not_aligned_is_refused() -> None:
    out = np.frombuffer(bytearray(25), np.float64, offset=1)
    with pytest.raises(InvalidArgument, match="out is not aligned"):
        as_output(out, DType.FLOAT64, (3,))


def test_out_cannot_be_a_scalar() -> None:
    with pytest.raises(
        InvalidArgument, match=r"out is a NumPy scalar \(float64\); pass a 0-d array"
    ):
        as_output(np.float64(0), DType.FLOAT64, ())
