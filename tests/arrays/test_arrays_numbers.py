# SPDX-License-Identifier: MIT OR Apache-2.0
"""Python numbers converted and back."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrodist.arrays import as_input, as_output, check_number, new_result
from ferrodist.buffer import DType
from ferrodist.errors import InvalidArgument, UnsupportedArray
from ferrodist.reduce_op import ReduceOp

INT64_MAX = 2**63 - 1


class Color(enum.IntEnum):
    RED = 7


def round_trip(x: Any) -> Any:
    taken = as_input(x)
    result = new_result(taken, ())
    result.buffer.memory[:] = taken.buffer.memory
    return result.finish()


@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        (True, DType.BOOL),
        (False, DType.BOOL),
        (3, DType.INT64),
        (-(2**63), DType.INT64),
        (INT64_MAX, DType.INT64),
        (0.1, DType.FLOAT64),
        (float("-inf"), DType.FLOAT64),
        (1 - 2j, DType.COMPLEX128),
    ],
)
def test_number_comes_back_as_it_was(x: Any, dtype: DType) -> None:
    taken = as_input(x)
    assert (taken.buffer.dtype, taken.buffer.shape, taken.is_number) == (dtype, (), True)
    assert taken.buffer.memory.format == "B"
    assert taken.buffer.nbytes == dtype.itemsize
    assert taken.span is None
    assert type(round_trip(x)) is type(x)
    assert round_trip(x) == x


@given(st.integers(-(2**63), INT64_MAX) | st.floats(allow_nan=False) | st.booleans())
def test_no_number_changes_on_the_way(x: Any) -> None:
    assert round_trip(x) == x


def test_member_of_an_int_enum_comes_back_as_int() -> None:
    assert type(round_trip(Color.RED)) is int
    assert round_trip(Color.RED) == 7


def test_numbers_gather_into_a_numpy_array() -> None:
    result = new_result(as_input(5), (3,))
    result.buffer.memory[:] = np.int64([5, 6, 7]).tobytes()
    assert result.finish().dtype == np.int64
    assert result.finish().tolist() == [5, 6, 7]


@pytest.mark.parametrize("x", [INT64_MAX + 1, -(2**63) - 1, 10**100])
def test_int_outside_int64_is_refused(x: int) -> None:
    with pytest.raises(
        UnsupportedArray, match=r"leaf \['n'\] is the int .*, outside int64; pass float"
    ):
        as_input(x, "leaf ['n']")


def test_error_of_a_huge_int_is_short() -> None:
    with pytest.raises(UnsupportedArray, match="the int of 100001 bits"):
        as_input(1 << 100_000)


@pytest.mark.parametrize(
    ("x", "op", "world_size"),
    [
        (INT64_MAX, ReduceOp.SUM, 1),
        (INT64_MAX // 4, ReduceOp.SUM, 4),
        (-(2**61), ReduceOp.SUM, 4),
        (2**15, ReduceOp.PROD, 4),
        (-1, ReduceOp.PROD, 10_000),
        (INT64_MAX, ReduceOp.MAX, 100),
        (INT64_MAX, ReduceOp.BXOR, 100),
        (1e308, ReduceOp.SUM, 100),
        (True, ReduceOp.SUM, 100),
        (np.int64(INT64_MAX), ReduceOp.SUM, 100),
    ],
)
def test_number_that_cannot_leave_its_dtype_passes(x: Any, op: ReduceOp, world_size: int) -> None:
    check_number(as_input(x), op, world_size)


@pytest.mark.parametrize(
    ("x", "op", "world_size"),
    [
        (INT64_MAX, ReduceOp.SUM, 2),
        (INT64_MAX // 4 + 1, ReduceOp.SUM, 4),
        (-(2**61) - 1, ReduceOp.SUM, 4),
        (2**16, ReduceOp.PROD, 4),
        (-2, ReduceOp.PROD, 63),
    ],
)
def test_int_whose_reduction_could_wrap_is_refused(x: int, op: ReduceOp, world_size: int) -> None:
    with pytest.raises(UnsupportedArray) as caught:
        check_number(as_input(x), op, world_size)
    assert f"{op.name} over {world_size} ranks could leave int64; pass float(x)" in str(
        caught.value
    )


@given(st.integers(-(2**63), INT64_MAX), st.integers(1, 100))
def test_numbers_that_pass_cannot_wrap_together(x: int, world_size: int) -> None:
    try:
        check_number(as_input(x), ReduceOp.SUM, world_size)
    except UnsupportedArray:
        assert not -(2**63) <= x * world_size <= INT64_MAX
    else:
        assert -(2**63) <= x * world_size <= INT64_MAX


@pytest.mark.parametrize("out", [1, 1.0, True, 1j])
def test_out_cannot_be_a_number(out: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"out is a Python {type(out).__name__}; pass a 0-d"):
        as_output(out, DType.INT64, ())
