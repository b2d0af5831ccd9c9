# SPDX-License-Identifier: MIT OR Apache-2.0
"""jax.Array on one device: read through NumPy, results put back on the same device.

Loaded only when the caller's array is JAX's, so jax is imported already.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import numpy as np

from ferrodist import _native
from ferrodist.arrays.host_arrays import known_buffer
from ferrodist.arrays.library import (
    InputArray,
    Library,
    OutputArray,
    Span,
    fresh,
    refuse,
    refuse_out,
    span_of,
)
from ferrodist.buffer import ArrayKind, DType


class _JaxArrays:
    """Arrays are immutable: never written, never ``out``."""

    def as_input(self, x: Any, where: str) -> InputArray:
        problem = _find_problem(x)
        if problem is not None:
            raise refuse(where, *problem)
        # From the second one on it is native code's.
        _native.register_adapted(type(x), _put_beside, ArrayKind.JAX)
        kind = ArrayKind.JAX if _device(x).platform == "cpu" else ArrayKind.NUMPY
        return InputArray(known_buffer(np.asarray(x), where), self, x, kind)

    def new_result(self, taken: InputArray, shape: tuple[int, ...]) -> OutputArray:
        host = np.empty(shape, taken.array.dtype)
        return fresh(host, taken.buffer.dtype, functools.partial(_put_beside, taken.array))

    def as_output(self, out: Any, dtype: DType, shape: tuple[int, ...]) -> OutputArray:
        raise refuse_out("a jax.Array, which cannot be written", "omit out=")

    def span(self, x: Any) -> Span:
        return span_of(np.asarray(x))


LIBRARY: Library = _JaxArrays()
_SHARED_NBYTES = 1 << 17  # from here on not copying saves more than device_put costs


def _put_beside(x: Any, host: np.ndarray[Any, Any]) -> Any:
    """Put ``host`` on the device of ``x``, committed to it only if ``x`` is."""
    if not getattr(x, "committed", True) and _goes_to_device_of(x, host):
        if host.nbytes >= _SHARED_NBYTES:
            return jax.device_put(host)  # shares the memory, which is ours
        return jax.numpy.asarray(host)  # the quickest way for little, once it is compiled
    with _keeping_dtype(host), contextlib.ExitStack() as stack:
        if getattr(x, "committed", True):
            return jax.device_put(host, _sharding(x))
        stack.enter_context(jax.default_device(_device(x)))
        return jax.device_put(host)


def from_numpy(host: np.ndarray[Any, Any]) -> Any:
    """Make an array of one that is nobody else's, where JAX puts arrays by default."""
    with _keeping_dtype(host):
        return jax.numpy.asarray(host)


def _keeping_dtype(host: np.ndarray[Any, Any]) -> contextlib.AbstractContextManager[Any]:
    """Keep JAX from halving a dtype of 64 bits."""
    is_halved = host.dtype.itemsize >= 8 and not jax.config.jax_enable_x64
    return _enabled_x64() if is_halved else contextlib.nullcontext()


def _goes_to_device_of(x: Any, host: np.ndarray[Any, Any]) -> bool:
    """Tell whether JAX puts an array where ``x`` is, in its dtype, without being told."""
    if host.dtype.itemsize >= 8 and not jax.config.jax_enable_x64:
        return False
    return jax.config.jax_default_device is None and x.devices() == _default_devices()


@functools.cache
def _default_devices() -> set[Any]:
    return {jax.local_devices()[0]}


def _device(x: Any) -> Any:
    return next(iter(x.devices()))


def _sharding(x: Any) -> Any:
    kind = x.sharding.memory_kind
    return jax.sharding.SingleDeviceSharding(_device(x), memory_kind=kind)


def _enabled_x64() -> Any:
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    return jax.experimental.enable_x64()


def _find_problem(x: Any) -> tuple[str, str] | None:
    """Return what ``x`` is and what to do about it, None if it can be read."""
    if isinstance(x, jax.core.Tracer):
        return (
            "a JAX tracer, inside jit, grad or vmap",
            "call the collective outside of it, or there by jax.experimental.io_callback(..., "
            "ordered=True); XLA may drop or merge a pure_callback",
        )
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return "an array of JAX random keys", "pass jax.random.key_data(x)"
    if x.is_deleted():
        return "a deleted jax.Array", "keep it from being donated to a jitted function"
    if len(x.sharding.device_set) > 1:
        return (
            f"a jax.Array on {len(x.sharding.device_set)} devices",
            "pass its parts one by one, [s.data for s in x.addressable_shards]",
        )
    return None
