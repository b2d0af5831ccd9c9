# SPDX-License-Identifier: MIT OR Apache-2.0
"""What speaks the buffer protocol, converted and back."""

from __future__ import annotations

import array
import ctypes
import mmap
import sys
from typing import Any

import numpy as np
import pytest

from ferrodist.arrays import Overlap, OverlapKind, as_input, as_output, overlap
from ferrodist.buffer import DType
from ferrodist.errors import InvalidArgument, UnsupportedArray
from helpers import address, round_trip

FORMATS = {
    "?": DType.BOOL,
    "b": DType.INT8,
    "h": DType.INT16,
    "i": DType.INT32,
    "l": DType.INT64,
    "q": DType.INT64,
    "B": DType.UINT8,
    "H": DType.UINT16,
    "I": DType.UINT32,
    "L": DType.UINT64,
    "Q": DType.UINT64,
    "e": DType.FLOAT16,
    "f": DType.FLOAT32,
    "d": DType.FLOAT64,
    "Zf": DType.COMPLEX64,
    "Zd": DType.COMPLEX128,
}


@pytest.mark.parametrize("x", [b"", b"ferro", bytearray(), bytearray(b"dist")])
def test_bytes_come_back_as_they_were(x: Any) -> None:
    taken = as_input(x)
    assert (taken.buffer.dtype, taken.buffer.shape) == (DType.UINT8, (len(x),))
    assert taken.buffer.memory.tobytes() == bytes(x)
    assert type(round_trip(x)) is type(x)
    assert round_trip(x) == x


@pytest.mark.parametrize("typecode", "bBhHiIlLqQfd")
@pytest.mark.parametrize("count", [0, 1, 7])
def test_standard_array_comes_back_as_it_was(typecode: str, count: int) -> None:
    x = array.array(typecode, range(count))
    taken = as_input(x)
    assert (taken.buffer.dtype, taken.buffer.shape) == (FORMATS[typecode], (count,))
    assert type(round_trip(x)) is array.array
    assert round_trip(x) == x
    assert round_trip(x).typecode == typecode


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (7,), (4, 3)], ids=str)
@pytest.mark.parametrize("letters", FORMATS)
def test_memoryview_comes_back_as_it_was(letters: str, shape: tuple[int, ...]) -> None:
    code = {"Zf": "F", "Zd": "D"}.get(letters, letters)
    x = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(code).data
    assert x.format == letters
    taken = as_input(x)
    assert (taken.buffer.dtype, taken.buffer.shape) == (FORMATS[letters], shape)
    found = round_trip(x)
    assert type(found) is memoryview
    assert (found.format, found.shape, found.tobytes()) == (letters, shape, x.tobytes())


def test_strided_memoryview_is_packed() -> None:
    assert round_trip(memoryview(b"abcdef")[::-2]).tobytes() == b"fdb"


def test_other_exporters_come_back_as_memoryview() -> None:
    with mmap.mmap(-1, 8) as mapped:
        mapped[:] = b"12345678"
        assert round_trip(mapped).tobytes() == b"12345678"
    found = round_trip((ctypes.c_int * 3)(1, 2, 3))
    assert type(found) is memoryview
    assert found.tobytes() == np.int32([1, 2, 3]).tobytes()


def test_subclass_comes_back_as_its_base() -> None:
    class Mine(bytes):
        pass

    assert type(round_trip(Mine(b"abc"))) is bytes


@pytest.mark.parametrize("x", [b"abc", bytearray(b"abc"), array.array("h", [1, 2])])
def test_memory_is_not_copied_and_read_only_if_the_input_is(x: Any) -> None:
    memory = as_input(x).buffer.memory
    assert address(memory) == address(x)
    assert memory.readonly is isinstance(x, bytes)


def test_result_of_a_bytearray_can_be_resized() -> None:
    found = round_trip(bytearray(b"abc"))
    found += b"d"
    assert found == b"abcd"


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (memoryview(b"abc").cast("c"), "string dtype"),
        (array.array("w" if sys.version_info >= (3, 13) else "u", "ab"), "string dtype"),
        (np.zeros(2, ">i4").data, "big-endian dtype >i4"),
        ((ctypes.c_void_p * 2)(), "whose memory cannot be read.*'<P'"),
    ],
    ids=["char", "unicode", "big-endian", "pointers"],
)
def test_other_formats_are_refused(x: Any, message: str) -> None:
    with pytest.raises(UnsupportedArray, match=message):
        as_input(x)


def test_released_memory_is_refused() -> None:
    view, mapped = memoryview(b"abc"), mmap.mmap(-1, 8)
    view.release()
    mapped.close()
    with pytest.raises(
        UnsupportedArray, match=r"a memoryview whose memory cannot be read.*released"
    ):
        as_input(view)
    with pytest.raises(UnsupportedArray, match=r"a mmap\.mmap whose memory cannot be read.*closed"):
        as_input(mapped)
    for out in (view, mapped):
        with pytest.raises(InvalidArgument, match=r"out is a .* whose memory cannot be read"):
            as_output(out, DType.UINT8, (3,))


@pytest.mark.parametrize(
    "out", [bytearray(6), array.array("B", bytes(6)), memoryview(bytearray(6))], ids=type
)
def test_out_receives_the_bytes_and_is_returned(out: Any) -> None:
    result = as_output(out, DType.UINT8, (6,))
    result.buffer.memory[:] = b"ferro!"
    assert result.finish() is out
    assert bytes(out) == b"ferro!"


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (b"abc", "out is bytes, which cannot be written; pass a bytearray"),
        (memoryview(b"abc"), "out is read-only"),
        (memoryview(bytearray(6))[::2], "out is not C-contiguous"),
        (bytearray(4), r"out has shape \(4,\), expected \(3,\)"),
        (array.array("b", bytes(3)), "out has dtype int8, expected uint8"),
    ],
)
def test_unfit_out_is_refused(out: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        as_output(out, DType.UINT8, (3,))


def test_overlap_is_seen_through_a_memoryview() -> None:
    memory = bytearray(12)
    result = as_output(memory, DType.UINT8, (12,))
    assert overlap(as_input(memory), result).kind is OverlapKind.SAME
    assert overlap(as_input(memoryview(memory)[4:8]), result) == Overlap(
        OverlapKind.PARTIAL, 4, in_place=True
    )
