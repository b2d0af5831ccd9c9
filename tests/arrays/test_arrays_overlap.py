# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whether an input shares memory with ``out``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrodist.arrays import Overlap, OverlapKind, as_input, as_output, new_result, overlap
from ferrodist.buffer import DType


def between(x: Any, out: np.ndarray[Any, Any]) -> Overlap:
    return overlap(as_input(x), as_output(out, DType.INT64, out.shape))


def test_separate_arrays_do_not_overlap() -> None:
    assert between(np.zeros(8, np.int64), np.zeros(8, np.int64)) == Overlap(OverlapKind.NONE)


def test_neighbours_do_not_overlap() -> None:
    memory = np.zeros(8, np.int64)
    assert between(memory[:4], memory[4:]).kind is OverlapKind.NONE
    assert between(memory[4:], memory[:4]).kind is OverlapKind.NONE


def test_array_is_the_same_as_itself_in_any_shape() -> None:
    memory = np.zeros(12, np.int64)
    assert between(memory, memory) == Overlap(OverlapKind.SAME, 0, in_place=True)
    assert between(memory.reshape(3, 4), memory) == Overlap(OverlapKind.SAME, 0, in_place=True)


@pytest.mark.parametrize("part", range(4))
def test_part_is_told_by_its_offset(part: int) -> None:
    memory = np.zeros((8, 3), np.int64)
    cut = memory[2 * part : 2 * part + 2]
    assert between(cut, memory) == Overlap(OverlapKind.PARTIAL, part * cut.nbytes, in_place=True)
    assert between(memory, cut) == Overlap(OverlapKind.PARTIAL, -part * cut.nbytes, in_place=True)


def test_shifted_array_overlaps_in_part() -> None:
    memory = np.zeros(9, np.int64)
    assert between(memory[1:], memory[:-1]) == Overlap(OverlapKind.PARTIAL, 8, in_place=True)


@pytest.mark.parametrize("turn", [lambda x: x.T, lambda x: x[::-1], lambda x: x[:, ::2]])
def test_strided_view_of_out_overlaps_without_an_offset(turn: Any) -> None:
    memory = np.zeros((3, 3), np.int64)
    assert between(turn(memory), memory) == Overlap(OverlapKind.PARTIAL)


def test_column_beside_out_does_not_overlap() -> None:
    memory = np.zeros((4, 4), np.int64)
    row = memory[1, 1:3]
    assert between(memory[:, 0], row).kind is OverlapKind.NONE
    assert between(memory[:, 1], row).kind is OverlapKind.PARTIAL


def test_zero_size_arrays_share_nothing() -> None:
    memory = np.zeros(4, np.int64)
    assert between(memory[:0], memory).kind is OverlapKind.NONE
    assert between(memory, memory[2:2]).kind is OverlapKind.NONE


def test_numbers_and_new_results_share_nothing() -> None:
    out = as_output(np.zeros((), np.int64), DType.INT64, ())
    assert overlap(as_input(1), out).kind is OverlapKind.NONE
    x = as_input(np.zeros(3))
    assert overlap(x, new_result(x, (3,))).kind is OverlapKind.NONE


def test_strides_too_hard_to_compare_count_as_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_hard(*arrays: Any, max_work: int) -> bool:
        raise np.exceptions.TooHardError

    monkeypatch.setattr(np, "shares_memory", too_hard)
    memory = np.zeros((3, 3), np.int64)
    assert between(memory.T, memory).kind is OverlapKind.PARTIAL


@given(st.data())
def test_answer_is_that_of_numpy(data: st.DataObject) -> None:
    memory = np.zeros((4, 5), np.int64)
    x = memory[tuple(data.draw(st.slices(size)) for size in memory.shape)]
    flat = memory.reshape(-1)
    start = data.draw(st.integers(0, 20))
    out = flat[start : data.draw(st.integers(start, 20))]
    found = between(x, out)
    assert (found.kind is not OverlapKind.NONE) == np.shares_memory(x, out)
    if found.kind is OverlapKind.SAME:
        assert (x.ctypes.data, x.nbytes) == (out.ctypes.data, out.nbytes)
    if found.offset is not None:
        assert x.ctypes.data - out.ctypes.data == found.offset
