# SPDX-License-Identifier: MIT OR Apache-2.0
"""CuPy arrays converted and back, with a stand-in for cupy: there is no GPU here."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from ferrodist.arrays import OverlapKind, as_input, as_output, new_result, overlap
from ferrodist.buffer import DType
from ferrodist.errors import InvalidArgument, UnsupportedArray


class Device:
    """Counts how deep it is entered, as ``with device:`` makes it the current one."""

    current: ClassVar[list[int]] = []

    def __init__(self, id: int) -> None:  # noqa: A002 # cupy's name
        self.id = id

    def __enter__(self) -> None:
        self.current.append(self.id)

    def __exit__(self, *error: object) -> None:
        self.current.pop()


class FakeArray:
    """The part of cupy.ndarray that conversion uses, on host memory."""

    def __init__(self, host: Any, device: int) -> None:
        self.host, self.device = host, Device(device)
        self.dtype, self.shape, self.strides = host.dtype, host.shape, host.strides
        self.itemsize, self.flags = host.itemsize, host.flags
        self.data = types.SimpleNamespace(ptr=host.ctypes.data)

    def set(self, host: Any) -> None:
        assert Device.current == [self.device.id]
        self.host[...] = host


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module: Any = types.ModuleType("cupy")
    module.ndarray = FakeArray
    module.asnumpy = lambda x: x.host.copy(order="K")
    module.asarray = lambda host: FakeArray(host.copy(), Device.current[-1])
    monkeypatch.setitem(sys.modules, "cupy", module)
    yield module
    sys.modules.pop("ferrodist.arrays.cupy_arrays", None)


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (4, 3)], ids=str)
def test_array_goes_through_the_host_and_back_to_its_device(cupy: Any, shape: Any) -> None:
    host = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    for x in (FakeArray(host, 3), FakeArray(host.T, 3)):
        taken = as_input(x)
        assert taken.buffer.memory.tobytes() == x.host.tobytes()
        result = new_result(taken, x.shape)
        result.buffer.memory[:] = taken.buffer.memory
        found = result.finish()
        assert isinstance(found, FakeArray)
        assert (found.device.id, found.dtype) == (3, x.dtype)
        np.testing.assert_array_equal(found.host, x.host)


def test_out_is_written_at_the_end(cupy: Any) -> None:
    out = FakeArray(np.zeros(3), 1)
    result = as_output(out, DType.FLOAT64, (3,))
    result.buffer.memory[:] = np.arange(3.0).tobytes()
    assert out.host.tolist() == [0, 0, 0]
    assert result.finish() is out
    assert out.host.tolist() == [0, 1, 2]
    assert overlap(as_input(out), result).kind is OverlapKind.SAME


def test_memory_of_different_devices_does_not_overlap(cupy: Any) -> None:
    host = np.zeros(3)
    result = as_output(FakeArray(host, 1), DType.FLOAT64, (3,))
    assert overlap(as_input(FakeArray(host, 2)), result).kind is OverlapKind.NONE
    assert overlap(as_input(host), result).kind is OverlapKind.NONE


def test_unfit_arrays_are_refused(cupy: Any) -> None:
    with pytest.raises(UnsupportedArray, match="datetime"):
        as_input(FakeArray(np.zeros(3, "M8[s]"), 0))
    with pytest.raises(InvalidArgument, match="expected float64"):
        as_output(FakeArray(np.zeros(3, np.int8), 0), DType.FLOAT64, (3,))
    with pytest.raises(InvalidArgument, match="not C-contiguous"):
        as_output(FakeArray(np.zeros(6)[::2], 0), DType.FLOAT64, (3,))
