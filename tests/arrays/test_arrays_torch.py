# SPDX-License-Identifier: MIT OR Apache-2.0
"""torch tensors converted and back."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from ferrodist.arrays import (
    Overlap,
    OverlapKind,
    as_input,
    as_output,
    new_result,
    overlap,
    torch_tensors,
)
from ferrodist.buffer import ARRAY_DTYPES, DType
from ferrodist.errors import InvalidArgument, UnsupportedArray
from helpers import address, round_trip

SHAPES = [(), (0,), (0, 3), (1,), (7,), (12, 3)]


def values(dtype: DType, shape: tuple[int, ...]) -> Any:
    numbers = torch.arange(int(np.prod(shape))).reshape(shape) % 100
    if dtype is DType.BOOL:
        return numbers % 3 == 0
    return (numbers - 1j * numbers if dtype.is_complex else numbers).to(getattr(torch, dtype.label))


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is torch.Tensor
    assert not found.requires_grad
    assert (found.dtype, found.shape, found.device) == (
        expected.dtype,
        expected.shape,
        expected.device,
    )
    assert found.tolist() == expected.tolist()


class Wrapper(torch.Tensor):
    """A tensor that keeps its data in another one, and has no memory of its own."""

    inner: Any

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat host tensors as if they were on a device, which goes the same way as CUDA."""
    monkeypatch.setattr(torch_tensors, "_is_on_host", lambda x: False)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ARRAY_DTYPES, ids=lambda dtype: dtype.label)
def test_tensor_comes_back_as_it_was(dtype: DType, shape: tuple[int, ...]) -> None:
    x = values(dtype, shape)
    taken = as_input(x)
    assert (taken.buffer.dtype, taken.buffer.shape) == (dtype, shape)
    assert (taken.buffer.memory.format, taken.buffer.nbytes) == ("B", x.nbytes)
    assert_same(round_trip(x), x)


@pytest.mark.parametrize("dtype", ARRAY_DTYPES, ids=lambda dtype: dtype.label)
def test_strided_tensor_is_packed(dtype: DType) -> None:
    x = values(dtype, (12, 3))
    for view in (x[::2], x.t(), x[:, 1], x[1].expand(4, 3), x[5:5]):
        assert_same(round_trip(view), view)


def test_bytes_are_those_numpy_would_have() -> None:
    assert as_input(torch.arange(3)).buffer.memory.tobytes() == np.arange(3).tobytes()
    bits = as_input(torch.tensor([1.0], dtype=torch.bfloat16)).buffer.memory.tobytes()
    assert bits == np.uint16(0x3F80).tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contiguous_tensor_is_not_copied(dtype: Any) -> None:
    x = torch.ones(10, 3, dtype=dtype)
    assert address(as_input(x[2:]).buffer.memory) == x[2:].data_ptr()
    assert address(as_input(x.requires_grad_()).buffer.memory) == x.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_result_is_not_copied(dtype: Any) -> None:
    result = new_result(as_input(torch.ones(3, dtype=dtype)), (5, 2))
    assert result.finish().data_ptr() == address(result.buffer.memory)
    assert result.finish().shape == (5, 2)


def test_buffer_keeps_the_memory_alive() -> None:
    class Watched(bytearray):
        pass

    memory = Watched(np.arange(1000.0).tobytes())
    watch = weakref.ref(memory)
    buffer = as_input(torch.frombuffer(memory, dtype=torch.float64)).buffer
    del memory
    gc.collect()
    assert watch() is not None
    assert buffer.memory.tobytes() == np.arange(1000.0).tobytes()
    del buffer
    gc.collect()
    assert watch() is None


def test_tensor_that_requires_grad_is_taken_by_its_data() -> None:
    x = torch.arange(3.0, requires_grad=True)
    for tensor in (x, x * 2, torch.nn.Parameter(torch.arange(3.0))):
        assert_same(round_trip(tensor), tensor.detach())


def test_conjugate_and_negative_bits_are_resolved() -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    assert x.conj().is_conj()
    assert x.conj().imag.is_neg()
    assert round_trip(x.conj()).tolist() == [1 - 2j, 3 + 4j]
    assert round_trip(x.conj().imag).tolist() == [-2, 4]


def test_subclass_comes_back_as_a_plain_tensor() -> None:
    class Mine(torch.Tensor):
        pass

    x = torch.arange(3.0).as_subclass(Mine)
    assert_same(round_trip(x), torch.arange(3.0))
    assert_same(round_trip(torch.nn.Parameter(x, requires_grad=False)), torch.arange(3.0))


def test_inference_tensor_is_taken_and_written() -> None:
    with torch.inference_mode():
        x = torch.arange(3.0)
    assert_same(round_trip(x), torch.arange(3.0))
    result = as_output(x, DType.FLOAT32, (3,))
    result.buffer.memory[:] = bytes(12)
    assert result.finish().tolist() == [0, 0, 0]


def test_default_device_of_the_user_is_not_used() -> None:
    x = torch.arange(3.0)
    with torch.device("meta"):
        assert_same(round_trip(x), x)


def quantised() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def nested(layout: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def compressed() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(3).to_sparse_csr()


def fake() -> Any:
    with FakeTensorMode():
        return torch.ones(3)


@pytest.mark.parametrize(
    ("make", "word", "advice"),
    [
        (lambda: torch.ones(3).to_sparse(), "sparse", "to_dense"),
        (compressed, "sparse", "to_dense"),
        (lambda: torch.ones(3, 3).to_mkldnn(), "foreign layout", "to_dense"),
        (quantised, "quantised", "dequantize"),
        (lambda: torch.empty(3, device="meta"), "meta device", "real device"),
        (lambda: nested(torch.strided), "nested", "unbind"),
        (lambda: nested(torch.jagged), "nested", "unbind"),
        (fake, "traced by torch.export or a fake mode", "outside"),
        (lambda: torch.nn.UninitializedParameter(), "not yet initialised", "run the module"),
        (lambda: Wrapper(torch.ones(3)), "without memory of its own", "plain tensors inside"),
        (lambda: torch.empty(3, dtype=torch.float8_e4m3fn), "float8_e4m3fn", "float16"),
    ],
)
def test_tensor_without_plain_memory_is_refused(make: Any, word: str, advice: str) -> None:
    x = make()
    with pytest.raises(UnsupportedArray) as caught:
        as_input(x, "tree leaf ['w']")
    assert str(caught.value).startswith("tree leaf ['w'] is a ")
    assert word in str(caught.value)
    assert advice in str(caught.value)
    with pytest.raises(InvalidArgument, match=r"^out "):
        as_output(x, DType.FLOAT32, (3,))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.vmap(f)(torch.ones(3, 2)),
        lambda f: torch.func.grad(lambda x: f(x).sum())(torch.ones(3)),
        lambda f: torch.func.functionalize(f)(torch.ones(3)),
    ],
    ids=["vmap", "grad", "functionalize"],
)
def test_tensor_inside_a_transform_is_refused(transform: Any) -> None:
    with pytest.raises(UnsupportedArray, match="inside vmap, grad or functionalize; call"):
        transform(round_trip)


@pytest.mark.slow
def test_tensor_inside_torch_compile_is_refused() -> None:
    with pytest.raises(
        UnsupportedArray, match=r"inside torch\.compile; .*@torch\.compiler\.disable"
    ):
        torch.compile(lambda x: round_trip(x * 2), backend="eager")(torch.ones(3))


def test_advice_of_the_error_works() -> None:
    outside = torch.compiler.disable(round_trip)
    found = torch.compile(lambda x: outside(x * 2) + 1, backend="eager")(torch.ones(3))
    assert found.tolist() == [3, 3, 3]


def test_dtensor_is_refused() -> None:
    from torch.distributed.tensor import DTensor

    # Made without a process group, which is all that conversion looks at.
    x = torch.Tensor._make_wrapper_subclass(DTensor, (3,), dtype=torch.float32)
    with pytest.raises(UnsupportedArray, match=r"DTensor spread over a mesh; pass x\.to_local"):
        as_input(x)


def test_device_tensor_is_staged(staged: None) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    taken = as_input(x.t())
    assert taken.buffer.memory.tobytes() == x.t().numpy().tobytes()
    assert_same(round_trip(x.t()), x.t())
    assert taken.span is not None
    assert taken.span.device == "cpu"


def test_device_out_is_written_at_the_end(staged: None) -> None:
    out = torch.zeros(3, requires_grad=True)
    result = as_output(out, DType.FLOAT32, (3,))
    result.buffer.memory[:] = np.arange(3, dtype=np.float32).tobytes()
    assert out.tolist() == [0, 0, 0]
    assert result.finish() is out
    assert out.tolist() == [0, 1, 2]
    assert overlap(as_input(out), result) == Overlap(OverlapKind.SAME, 0, in_place=False)


@pytest.mark.parametrize("dtype", ARRAY_DTYPES, ids=lambda dtype: dtype.label)
def test_out_receives_the_bytes_and_is_returned(dtype: DType) -> None:
    expected = values(dtype, (4, 3))
    out = torch.zeros_like(expected)
    result = as_output(out, dtype, (4, 3))
    assert address(result.buffer.memory) == out.data_ptr()
    result.buffer.memory[:] = as_input(expected).buffer.memory
    assert result.finish() is out
    assert_same(out, expected)


def test_out_may_be_a_parameter() -> None:
    out = torch.nn.Parameter(torch.zeros(3))
    result = as_output(out, DType.FLOAT32, (3,))
    result.buffer.memory[:] = np.arange(3, dtype=np.float32).tobytes()
    assert result.finish() is out
    assert out.requires_grad
    assert out.tolist() == [0, 1, 2]


def test_backward_pass_notices_that_out_has_changed() -> None:
    weight, out = torch.ones(3, requires_grad=True), torch.ones(3)
    loss = (weight * out).sum()
    as_output(out, DType.FLOAT32, (3,)).finish()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.ones(3, requires_grad=True) * 2, r"computed with gradients; pass out\.detach"),
        (torch.zeros(3, dtype=torch.complex64).conj(), "conjugated or negated view"),
        (torch.zeros(3, dtype=torch.float64), "out has dtype float64, expected float32"),
        (torch.zeros(3, dtype=torch.float8_e5m2), "out has dtype torch.float8_e5m2, expected"),
        (torch.zeros(4), r"out has shape \(4,\), expected \(3,\)"),
        (torch.zeros(6)[::2], "out is not C-contiguous"),
        (torch.zeros(1).expand(3), "out is not C-contiguous"),
        (torch.frombuffer(bytearray(13), dtype=torch.float32, offset=1), "out is not aligned"),
    ],
    ids=["graph", "conj", "dtype", "foreign dtype", "shape", "gaps", "expanded", "unaligned"],
)
def test_unfit_out_is_refused(out: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        as_output(out, DType.FLOAT32, (3,))


def test_conjugated_view_of_out_is_not_in_place() -> None:
    x = torch.ones(3, dtype=torch.complex64)
    result = as_output(x, DType.COMPLEX64, (3,))
    assert overlap(as_input(x), result) == Overlap(OverlapKind.SAME, 0, in_place=True)
    assert overlap(as_input(x.conj()), result) == Overlap(OverlapKind.SAME, 0, in_place=False)


def test_overlap_is_seen_between_torch_and_numpy() -> None:
    array = np.zeros(6, np.float32)
    tensor = torch.from_numpy(array)
    assert overlap(as_input(array), as_output(tensor, DType.FLOAT32, (6,))).kind is OverlapKind.SAME
    assert (
        overlap(as_input(tensor[::2]), as_output(array, DType.FLOAT32, (6,))).kind
        is OverlapKind.PARTIAL
    )
    assert (
        overlap(as_input(tensor[:3]), as_output(array[3:], DType.FLOAT32, (3,))).kind
        is OverlapKind.NONE
    )
