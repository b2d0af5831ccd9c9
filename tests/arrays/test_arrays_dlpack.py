# SPDX-License-Identifier: MIT OR Apache-2.0
"""Arrays of libraries ferrodist has not heard of, through DLPack."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

from ferrodist.arrays import Overlap, OverlapKind, as_input, as_output, overlap
from ferrodist.buffer import ARRAY_DTYPES, DType
from ferrodist.errors import InvalidArgument, UnsupportedArray
from helpers import round_trip

DTYPES = [dtype for dtype in ARRAY_DTYPES if dtype is not DType.BFLOAT16]


class Foreign:
    """An array of a library that speaks DLPack and nothing else."""

    def __init__(self, array: Any, device: int = 1) -> None:
        self.array, self.device = array, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)


class WithNamespace(Foreign):
    def __array_namespace__(self) -> Any:
        return types.SimpleNamespace(from_dlpack=lambda x: WithNamespace(np.from_dlpack(x)))


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (7,), (12, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
def test_array_comes_back_through_its_namespace(dtype: DType, shape: tuple[int, ...]) -> None:
    host = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype.label)
    taken = as_input(WithNamespace(host))
    assert (taken.buffer.dtype, taken.buffer.shape) == (dtype, shape)
    found = round_trip(WithNamespace(host))
    assert type(found) is WithNamespace
    assert (found.array.dtype, found.array.shape) == (host.dtype, shape)
    np.testing.assert_array_equal(found.array, host)


def test_array_comes_back_through_from_dlpack_of_its_module(monkeypatch: Any) -> None:
    module: Any = types.ModuleType("foreign")
    module.from_dlpack = lambda x: Foreign(np.from_dlpack(x))
    monkeypatch.setitem(sys.modules, "foreign", module)
    monkeypatch.setattr(Foreign, "__module__", "foreign.arrays")
    found = round_trip(Foreign(np.arange(3.0)))
    assert type(found) is Foreign
    assert found.array.tolist() == [0, 1, 2]


def test_numpy_comes_back_where_the_library_imports_nothing() -> None:
    found = round_trip(Foreign(np.arange(6.0).reshape(2, 3).T))
    assert type(found) is np.ndarray
    assert found.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_memory_is_not_copied() -> None:
    host = np.arange(3.0)
    memory = as_input(Foreign(host)).buffer.memory
    assert np.frombuffer(memory, np.uint8).ctypes.data == host.ctypes.data


def test_array_on_a_device_is_refused() -> None:
    x = Foreign(np.zeros(3), device=2)
    with pytest.raises(UnsupportedArray, match="Foreign on DLPack device 2; copy it to the host"):
        as_input(x)
    with pytest.raises(InvalidArgument, match=r"out is a .*Foreign on DLPack device 2"):
        as_output(x, DType.FLOAT64, (3,))


def test_array_numpy_cannot_import_is_refused() -> None:
    class Broken(Foreign):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("no bfloat16 here")

    with pytest.raises(UnsupportedArray, match=r"NumPy cannot import .no bfloat16 here"):
        as_input(Broken(np.zeros(3)))
    with pytest.raises(InvalidArgument, match=r"NumPy cannot import .no bfloat16 here"):
        as_output(Broken(np.zeros(3)), DType.FLOAT64, (3,))


def test_class_is_not_an_array() -> None:
    with pytest.raises(UnsupportedArray, match="x is the type Foreign"):
        as_input(Foreign)


def test_out_is_written_in_place() -> None:
    host = np.zeros(4)
    out = Foreign(host)
    result = as_output(out, DType.FLOAT64, (4,))
    result.buffer.memory[:] = np.arange(4.0).tobytes()
    assert result.finish() is out
    assert host.tolist() == [0, 1, 2, 3]
    assert overlap(as_input(host), result).kind is OverlapKind.SAME
    assert overlap(as_input(Foreign(host[2:])), result) == Overlap(
        OverlapKind.PARTIAL, 16, in_place=True
    )


def test_read_only_out_is_refused() -> None:
    host = np.zeros(3)
    host.flags.writeable = False
    with pytest.raises(InvalidArgument, match="out is read-only"):
        as_output(Foreign(host), DType.FLOAT64, (3,))
