# SPDX-License-Identifier: MIT OR Apache-2.0
"""Objects to bytes and back, by msgpack with a few types of our own. Reading never runs code.

Pickle is used only where the caller asked for it by name, on both sides.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ferrodist.arrays import new_result, take
from ferrodist.buffer import DTYPES_BY_LABEL
from ferrodist.errors import ProtocolError, UnsupportedArray

_BIG_INT, _COMPLEX, _TUPLE, _SET, _FROZENSET, _ARRAY = range(1, 7)
_CONTAINERS: dict[type, int] = {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}
_PLAIN = (type(None), bool, float, str, bytes)
_LIBRARIES = ("numpy", "torch", "jax")  # what an array may ask to be on arrival


def encode(value: Any, use_pickle: bool, where: str) -> bytes:
    """Lay an object out as bytes; raise a TypeError with type and place if it has none."""
    if use_pickle:
        return pickle.dumps(value)
    import msgpack

    try:
        packed: bytes = msgpack.packb(value, default=_encode_special, strict_types=True)
    except (TypeError, OverflowError) as error:
        raise _unsupported(value, where) from error
    except (ValueError, RecursionError) as error:
        raise UnsupportedArray(f"{where} is nested too deeply, or contains itself") from error
    return packed


def decode(data: bytes | memoryview, use_pickle: bool) -> Any:
    """Read an object back. Bytes that were not made by ``encode`` raise ProtocolError."""
    if use_pickle:
        return pickle.loads(data)  # asked for by name on this rank; the group is authenticated
    import msgpack

    try:
        return msgpack.unpackb(data, ext_hook=_decode_special, strict_map_key=False)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise ProtocolError(f"an object could not be read: {error}") from error


def _encode_special(value: Any) -> Any:
    import msgpack

    def nested(code: int, content: Any) -> Any:
        return msgpack.ExtType(
            code, msgpack.packb(content, default=_encode_special, strict_types=True)
        )

    kind = type(value)
    if kind is int:  # msgpack's own end at 64 bits
        return msgpack.ExtType(
            _BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        )
    if kind is complex:
        return nested(_COMPLEX, [value.real, value.imag])
    if kind in _CONTAINERS:
        return nested(_CONTAINERS[kind], list(value))
    if _is_array(value):
        return nested(_ARRAY, _describe_array(value))
    raise TypeError(kind)


def _decode_special(code: int, data: bytes) -> Any:
    if code == _BIG_INT:
        return int.from_bytes(data, "little", signed=True)
    content = decode(data, use_pickle=False)
    makers: dict[int, Callable[[Any], Any]] = {
        _COMPLEX: lambda parts: complex(*parts),
        _TUPLE: tuple,
        _SET: set,
        _FROZENSET: frozenset,
        _ARRAY: _make_array,
    }
    if code not in makers:
        raise ValueError(f"unknown type {code}")
    return makers[code](content)


# -- arrays ----------------------------------------------------------------------------------------


def _library_of(value: Any) -> str:
    root = type(value).__module__.partition(".")[0]
    return "jax" if root == "jaxlib" else root


def _is_array(value: Any) -> bool:
    return (
        _library_of(value) in _LIBRARIES and hasattr(value, "dtype") and not isinstance(value, type)
    )


def _describe_array(value: Any) -> list[Any]:
    taken = take(value, "an array in the object")
    is_scalar = isinstance(value, np.generic)
    content = bytes(taken.buffer.memory)
    return [
        _library_of(value),
        taken.buffer.dtype.label,
        list(taken.buffer.shape),
        is_scalar,
        content,
    ]


def _make_array(parts: list[Any]) -> Any:
    """Make an array of the sender's kind where that library is installed, else of NumPy."""
    library, label, lengths, is_scalar, content = parts
    dtype, shape = DTYPES_BY_LABEL[label], tuple(lengths)
    if library not in _LIBRARIES or any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"not an array: {library} {shape}")
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"{label}{list(shape)} does not fit {len(content)} bytes")
    result = new_result(take(_sample(library, label)), shape)
    result.buffer.memory[:] = content
    array = result.finish()
    return array[()] if is_scalar else array


def _sample(library: str, label: str) -> Any:
    """Make an empty array of a library and dtype, for results to go by."""
    if library == "torch" and _is_installed("torch"):
        torch = importlib.import_module("torch")
        return torch.empty(0, dtype=getattr(torch, label))
    if library == "jax" and _is_installed("jax"):
        with importlib.import_module("jax").enable_x64(True):  # else 64-bit dtypes are cut
            return importlib.import_module("jax.numpy").zeros(0, label)
    if label == "bfloat16":
        return np.empty(0, importlib.import_module("ml_dtypes").bfloat16)
    return np.empty(0, label)


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


# -- what is wrong, and where ----------------------------------------------------------------------


def _unsupported(value: Any, where: str) -> UnsupportedArray:
    for path, part in _parts(value, where):
        if type(part) in (list, tuple, set, frozenset, dict, int, complex) or type(part) in _PLAIN:
            continue
        if _is_array(part):
            try:
                take(part)
            except UnsupportedArray as error:
                return UnsupportedArray(f"{path}: {error}", got=type(part).__name__)
            continue
        name = f"{type(part).__module__}.{type(part).__qualname__}"
        advice = "convert it, or pass pickle=True on every rank"
        return UnsupportedArray(f"{path} is a {name}, which cannot be sent; {advice}", got=name)
    return UnsupportedArray(f"{where} cannot be sent; pass pickle=True on every rank")


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Walk an object, outermost first, with the place of every part."""
    yield path, value
    if type(value) is dict:
        for key, item in value.items():
            yield from _parts(key, f"key {key!r} of {path}")
            yield from _parts(item, f"{path}[{key!r}]")
    elif type(value) in (list, tuple, set, frozenset):
        for index, item in enumerate(value):
            yield from _parts(item, f"{path}[{index}]")
