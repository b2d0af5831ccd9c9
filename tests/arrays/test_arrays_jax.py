# SPDX-License-Identifier: MIT OR Apache-2.0
"""JAX arrays converted and back."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrodist.arrays import OverlapKind, as_input, as_output, new_result, overlap
from ferrodist.buffer import ARRAY_DTYPES, DType
from ferrodist.errors import InvalidArgument, UnsupportedArray
from helpers import round_trip

SHAPES = [(), (0,), (0, 3), (1,), (7,), (12, 3)]


def values(dtype: DType, shape: tuple[int, ...]) -> Any:
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 100
    if dtype is DType.BOOL:
        return jnp.asarray(numbers % 3 == 0)
    with jax.enable_x64(True):
        parts = numbers - 1j * numbers if dtype.is_complex else numbers
        return jnp.asarray(parts).astype(dtype.label)


# JAX arrays of 64 bits exist beside jax_enable_x64=False, and must not come back halved.
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ARRAY_DTYPES, ids=lambda dtype: dtype.label)
def test_array_comes_back_as_it_was(dtype: DType, shape: tuple[int, ...]) -> None:
    x = values(dtype, shape)
    assert x.dtype == dtype.label
    taken = as_input(x)
    assert (taken.buffer.dtype, taken.buffer.shape) == (dtype, shape)
    assert (taken.buffer.memory.format, taken.buffer.nbytes) == ("B", x.nbytes)
    found = round_trip(x)
    assert isinstance(found, jax.Array)
    assert (found.dtype, found.shape, found.devices()) == (x.dtype, x.shape, x.devices())
    np.testing.assert_array_equal(np.asarray(found), np.asarray(x))


def test_array_on_the_cpu_is_not_copied() -> None:
    x = jnp.arange(1000.0)
    memory = as_input(x).buffer.memory
    assert np.frombuffer(memory, np.uint8).ctypes.data == x.unsafe_buffer_pointer()
    assert memory.readonly


def test_transposed_array_is_right() -> None:
    x = jnp.arange(6.0).reshape(2, 3).T
    assert round_trip(x).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_result_has_the_shape_asked_for() -> None:
    assert new_result(as_input(jnp.ones(3)), (4, 2)).finish().shape == (4, 2)


@pytest.mark.parametrize("committed", [True, False])
def test_result_is_committed_to_its_device_as_the_input_is(committed: bool) -> None:
    x = jax.device_put(np.ones(3), jax.devices()[0] if committed else None)
    assert x.committed is committed
    assert round_trip(x).committed is committed


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap], ids=["jit", "grad", "vmap"])
def test_tracer_is_refused(transform: Any) -> None:
    with pytest.raises(UnsupportedArray, match=r"x is a JAX tracer.*outside.*io_callback.*ordered"):
        transform(lambda x: as_input(x).array)(
            jnp.float32([1]) if transform is not jax.grad else 1.0
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jax.random.key(0), r"random keys; pass jax\.random\.key_data"),
        (lambda: jnp.ones(3, "float8_e4m3fn"), "unsupported dtype float8_e4m3fn"),
        (lambda: jnp.ones(3, "int4"), "unsupported dtype int4"),
    ],
    ids=["keys", "float8", "int4"],
)
def test_other_dtypes_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UnsupportedArray, match=message):
        as_input(make())


def test_deleted_array_is_refused() -> None:
    x = jnp.ones(3)
    x.delete()
    with pytest.raises(UnsupportedArray, match=r"a deleted jax\.Array; keep it from being donated"):
        as_input(x)


def test_out_cannot_be_a_jax_array() -> None:
    with pytest.raises(InvalidArgument, match=r"out is a jax\.Array.*omit out="):
        as_output(jnp.zeros(3), DType.FLOAT32, (3,))


def test_overlap_with_numpy_memory_is_seen() -> None:
    # JAX shares NumPy memory that is aligned to 64 bytes.
    pool = np.zeros(1024, np.uint8)
    start = -pool.ctypes.data % 64
    out = pool[start : start + 512].view(np.float32)
    x = jax.device_put(out)
    if x.unsafe_buffer_pointer() != out.ctypes.data:
        pytest.skip("this JAX copies")
    assert overlap(as_input(x), as_output(out, DType.FLOAT32, (128,))).kind is OverlapKind.SAME


SEVERAL_DEVICES = """
import jax, numpy as np, pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ferrodist.arrays import new_result, as_input
from ferrodist.errors import UnsupportedArray

devices = jax.devices()
assert len(devices) == 3
mesh = Mesh(devices, ("axis",))
for spec in (PartitionSpec("axis"), PartitionSpec()):
    x = jax.device_put(np.ones(6), NamedSharding(mesh, spec))
    with pytest.raises(UnsupportedArray, match=r"on 3 devices; pass its parts.*addressable_shards"):
        as_input(x)
    assert [as_input(shard.data).buffer.count for shard in x.addressable_shards]

committed = jax.device_put(np.ones(6), devices[2])
with jax.default_device(devices[1]):
    uncommitted = jax.device_put(np.ones(6))
for x, device in ((committed, devices[2]), (uncommitted, devices[1])):
    result = new_result(as_input(x), (2,)).finish()
    assert result.devices() == {device}, result.devices()
    assert result.committed == x.committed
"""


@pytest.mark.slow
def test_sharded_array_is_refused_and_results_stay_on_their_device() -> None:
    flags = "--xla_force_host_platform_device_count=3"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", SEVERAL_DEVICES], env=environment, check=True, timeout=60)
