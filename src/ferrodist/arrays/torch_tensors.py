# SPDX-License-Identifier: MIT OR Apache-2.0
"""torch.Tensor: host tensors without a copy, other devices through host memory and back.

Loaded only when the caller's array is a tensor, so torch is imported already.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ferrodist import _native
from ferrodist.arrays.library import (
    HOST,
    SUPPORTED,
    InputArray,
    Library,
    OutputArray,
    Span,
    as_it_is,
    buffer_of,
    check_out,
    check_out_contiguous,
    check_out_memory,
    refuse,
    refuse_out,
    type_name,
)
from ferrodist.buffer import ARRAY_DTYPES, ArrayKind, DeviceBuffer, DType

_DTYPES: dict[Any, DType] = {getattr(torch, dtype.label): dtype for dtype in ARRAY_DTYPES}


class _TorchTensors:
    """Tensors are taken by their data: gradients are neither read nor recorded."""

    def as_input(self, x: Any, where: str) -> InputArray:
        dtype = _check(x, where)
        # Each of these gives the tensor itself when there is nothing to do.
        host = x.detach().resolve_conj().resolve_neg().cpu()
        if host._is_zerotensor():  # which has no memory
            host = host.clone()
        kind = ArrayKind.TORCH if _is_on_host(x) else ArrayKind.NUMPY
        return InputArray(buffer_of(_as_numpy(host), dtype), self, x, kind)

    def new_result(self, taken: InputArray, shape: tuple[int, ...]) -> OutputArray:
        x = taken.array
        if isinstance(taken.buffer, DeviceBuffer):
            made = torch.empty(shape, dtype=x.dtype, device=x.device)
            return OutputArray(_device_buffer(made, taken.buffer.dtype), made)
        host = torch.empty(shape, dtype=x.dtype, device="cpu")
        convert = as_it_is if _is_on_host(x) else functools.partial(_move, x.device)
        return OutputArray(buffer_of(_as_numpy(host), taken.buffer.dtype), host, convert)

    def as_output(self, out: Any, dtype: DType, shape: tuple[int, ...]) -> OutputArray:
        """Write into the user's tensor; autograd learns only that it has changed."""
        _check_out(out, dtype, shape)
        if _is_on_host(out):
            host, finish = out.detach(), _mark_as_changed
            check_out_memory(_as_numpy(host))
        else:
            host, finish = torch.empty(shape, dtype=out.dtype, device="cpu"), _copy_into
        convert = functools.partial(finish, out)
        return OutputArray(buffer_of(_as_numpy(host), dtype), host, convert, self.span(out))

    def span(self, x: Any) -> Span:
        itemsize = x.element_size()
        strides = tuple(stride * itemsize for stride in x.stride())
        device = HOST if _is_on_host(x) else str(x.device)
        return Span(x.data_ptr(), tuple(x.shape), strides, itemsize, device)


LIBRARY: Library = _TorchTensors()


# -- tensors that stay on their device -------------------------------------------------------------


def as_device_input(x: Any, where: str) -> InputArray:
    """Take a tensor in where it is, for an engine that does the call there."""
    dtype = _check(x, where)
    packed = x.detach().resolve_conj().resolve_neg().contiguous()
    return InputArray(_device_buffer(packed, dtype), LIBRARY, x)


def as_device_output(out: Any, dtype: DType, shape: tuple[int, ...]) -> OutputArray:
    _check_out(out, dtype, shape)
    convert = functools.partial(_mark_as_changed, out)
    return OutputArray(_device_buffer(out.detach(), dtype), out, convert, LIBRARY.span(out))


def _device_buffer(tensor: Any, dtype: DType) -> DeviceBuffer:
    stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
    return DeviceBuffer(memoryview(b""), dtype, tuple(tensor.shape), tensor, stream)


# -- checks ----------------------------------------------------------------------------------------


def _check(x: Any, where: str) -> DType:
    problem = _find_problem(x)
    if problem is not None:
        raise refuse(where, *problem)
    dtype = _DTYPES.get(x.dtype)
    if dtype is None:
        what = f"a {type_name(x)} of dtype {x.dtype}"
        raise refuse(where, what, f"call .to() first with one of {SUPPORTED}")
    return dtype


def _check_out(out: Any, dtype: DType, shape: tuple[int, ...]) -> None:
    problem = _find_problem(out) or _find_problem_of_out(out)
    if problem is not None:
        raise refuse_out(*problem)
    check_out(out, _DTYPES.get(out.dtype), dtype, shape)
    check_out_contiguous(out.is_contiguous(), out.stride())


_native.register_torch(torch, getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))


def _is_on_host(x: Any) -> bool:
    return bool(x.device.type == "cpu")


def _as_numpy(host: Any) -> np.ndarray[Any, Any]:
    """View a host tensor's memory; NumPy need not know bfloat16 for that."""
    plain = host.view(torch.int16) if host.dtype is torch.bfloat16 else host
    array: np.ndarray[Any, Any] = plain.numpy()
    return array


def _move(device: Any, host: Any) -> Any:
    return host.to(device)


def _copy_into(out: Any, host: Any) -> Any:
    out.detach().copy_(host)
    return out


def _mark_as_changed(out: Any, host: Any) -> Any:
    # Else a backward pass that saved the old values would use the new ones without a word.
    torch.autograd.graph.increment_version(out)
    return out


def _find_problem(x: Any) -> tuple[str, str] | None:
    """Return what ``x`` is and what to do about it, None if its memory can be read."""
    for has_problem, what, advice in _PROBLEMS:
        if has_problem(x):
            return f"a {type_name(x)} {what}", advice
    return None


def _find_problem_of_out(out: Any) -> tuple[str, str] | None:
    if out.requires_grad and not out.is_leaf:
        return "a tensor computed with gradients", "pass out.detach()"
    if out.is_conj() or out.is_neg():
        return "a conjugated or negated view", "pass out.resolve_conj().resolve_neg()"
    return None


def _is_dtensor(x: Any) -> bool:
    kinds = type(x).__mro__
    return any(k.__name__ == "DTensor" and k.__module__.startswith("torch.") for k in kinds)


def _is_traced(x: Any) -> bool:
    functional = sys.modules.get("torch._subclasses.functional_tensor")
    return isinstance(x, torch._subclasses.FakeTensor) or (
        functional is not None and isinstance(x, functional.FunctionalTensor)
    )


def _keeps_data_elsewhere(x: Any) -> bool:
    # Such a tensor may have no memory at all, and NumPy would read from address 0.
    return type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor

_OUTSIDE = "call the collective outside of it"

# The order matters: a later test may fail on a tensor that an earlier one finds, and the compiler
# that follows this code must be stopped before the first test it cannot follow.
_PROBLEMS: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (
        lambda x: torch.compiler.is_compiling(),
        "inside torch.compile",
        "call from a function with @torch.compiler.disable",
    ),
    (torch.nn.parameter.is_lazy, "not yet initialised", "run the module once before"),
    (_is_wrapped, "inside vmap, grad or functionalize", _OUTSIDE),
    (_is_traced, "traced by torch.export or a fake mode", _OUTSIDE),
    (_is_dtensor, "spread over a mesh", "pass x.to_local() or x.full_tensor()"),
    (lambda x: x.is_nested, "(nested)", "pass a list of its parts, x.unbind()"),
    (_keeps_data_elsewhere, "without memory of its own", "pass the plain tensors inside it"),
    (
        lambda x: x.layout is not torch.strided,
        "with a sparse or foreign layout",
        "pass x.to_dense()",
    ),
    (lambda x: x.is_quantized, "(quantised)", "pass x.dequantize() or x.int_repr()"),
    (lambda x: x.is_meta, "on the meta device, without data", "move it to a real device first"),
)
