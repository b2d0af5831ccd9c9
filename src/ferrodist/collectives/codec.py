# SPDX-License-Identifier: MIT OR Apache-2.0
"""Objects to bytes and back, by msgpack with a few types of our own. Reading never runs code.

Tuples and sets are lists that begin with a mark, so that nesting stays msgpack's own and bounded.
Pickle is used only where the caller asked for it by name, on both sides. Those are threads of one
process, or processes of one user on one host that have met as a job; a backend that reaches further
must authenticate its peers before it allows this.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import pickle
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from ferrodist.arrays import new_result, take
from ferrodist.buffer import DTYPES_BY_LABEL
from ferrodist.errors import ProtocolError, UnsupportedArray

_MAX_DEPTH = 200
_BIG_INT, _COMPLEX, _MARK, _ARRAY = range(1, 5)  # codes of msgpack's extension types
_CONTAINERS: dict[type, bytes] = {tuple: b"t", set: b"s", frozenset: b"f"}
_PLAIN = (type(None), bool, int, float, complex, bytes)
_LIBRARIES = ("numpy", "torch", "jax")  # what an array may ask to be on arrival

_PAIR = struct.Struct("<dd")
_LENGTH = struct.Struct("<I")


def encode(value: Any, use_pickle: bool, where: str) -> bytes:
    """Lay an object out as bytes; raise a TypeError with type and place if it has none."""
    if use_pickle:
        return pickle.dumps(value)
    import msgpack

    _check(value, where, 0)
    packed: bytes = msgpack.packb(value, default=_encode_special, strict_types=True)
    return packed


def decode(data: bytes | memoryview, use_pickle: bool) -> Any:
    """Read an object back. Bytes that were not made by ``encode`` raise ProtocolError."""
    if use_pickle:
        return pickle.loads(data)  # asked for by name, on this rank too: see the module docstring
    import msgpack

    try:
        return _unmarked(
            msgpack.unpackb(
                data,
                ext_hook=_decode_special,
                list_hook=_decode_list,
                object_pairs_hook=_decode_pairs,
                strict_map_key=False,
            )
        )
    except (ValueError, TypeError, KeyError, IndexError, msgpack.UnpackException) as error:
        raise ProtocolError(f"an object could not be read: {error}") from error
    except (RuntimeError, OverflowError, ImportError, struct.error) as error:  # an array's library
        raise ProtocolError(f"an array in an object could not be made: {error}") from error


# -- what may travel -------------------------------------------------------------------------------


def _check(value: Any, where: str, depth: int) -> None:
    """Refuse what cannot travel, and say where in the object it is."""
    kind = type(value)
    if kind in _PLAIN:
        return
    if depth > _MAX_DEPTH:
        raise UnsupportedArray(
            f"an object is nested more than {_MAX_DEPTH} deep, or contains itself"
        )
    if kind is str:
        _check_text(value, where)
    elif kind is dict:
        for key, item in value.items():
            _check(key, f"key {key!r} of {where}", depth + 1)
            _check(item, f"{where}[{key!r}]", depth + 1)
    elif kind is list or kind in _CONTAINERS:
        for index, item in enumerate(value):
            _check(item, f"{where}[{index}]", depth + 1)
    elif _is_array(value):
        take(value, where)
    else:
        name = f"{kind.__module__}.{kind.__qualname__}"
        advice = "convert it, or pass pickle=True on every rank"
        raise UnsupportedArray(f"{where} is a {name}, which cannot be sent; {advice}", got=name)


def _check_text(value: str, where: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedArray(f"{where} is text with a lone surrogate; send bytes") from error


# -- types of our own ------------------------------------------------------------------------------


class _Mark:
    """What a list begins with that was a tuple or a set."""

    def __init__(self, make: Callable[[list[Any]], Any]) -> None:
        self.make = make


_MARKS = {name: _Mark(kind) for kind, name in _CONTAINERS.items()}


def _encode_special(value: Any) -> Any:
    import msgpack

    kind = type(value)
    if kind is int:  # msgpack's own end at 64 bits
        size = value.bit_length() // 8 + 1
        return msgpack.ExtType(_BIG_INT, value.to_bytes(size, "little", signed=True))
    if kind is complex:
        return msgpack.ExtType(_COMPLEX, _PAIR.pack(value.real, value.imag))
    if kind in _CONTAINERS:
        return [msgpack.ExtType(_MARK, _CONTAINERS[kind]), *value]
    return msgpack.ExtType(_ARRAY, _encode_array(value))


def _decode_special(code: int, data: bytes) -> Any:
    if code == _BIG_INT:
        return int.from_bytes(data, "little", signed=True)
    if code == _COMPLEX:
        return complex(*_PAIR.unpack(data))
    if code == _MARK:
        return _MARKS[data]
    if code == _ARRAY:
        return _decode_array(data)
    raise ValueError(f"unknown type {code}")


def _decode_list(items: list[Any]) -> Any:
    if items and type(items[0]) is _Mark:
        return items[0].make([_unmarked(item) for item in items[1:]])
    return items


def _decode_pairs(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    return {_unmarked(key): _unmarked(value) for key, value in pairs}


def _unmarked(value: Any) -> Any:
    """Refuse a mark anywhere but at the head of a list."""
    if type(value) is _Mark or (type(value) is list and any(type(v) is _Mark for v in value)):
        raise ValueError("a mark stands where there is no list")
    return value


# -- arrays ----------------------------------------------------------------------------------------


def _library_of(value: Any) -> str:
    root = type(value).__module__.partition(".")[0]
    return "jax" if root == "jaxlib" else root


def _is_array(value: Any) -> bool:
    return (
        _library_of(value) in _LIBRARIES and hasattr(value, "dtype") and not isinstance(value, type)
    )


def _encode_array(value: Any) -> bytes:
    """Lay an array out: the length of its description, the description, its bytes."""
    import msgpack

    buffer, is_scalar = take(value).buffer, isinstance(value, np.generic)
    header = msgpack.packb([_library_of(value), buffer.dtype.label, list(buffer.shape), is_scalar])
    return b"".join((_LENGTH.pack(len(header)), header, buffer.memory))


def _decode_array(data: bytes) -> Any:
    """Make an array of the sender's kind where that library is installed, else of NumPy."""
    import msgpack

    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    library, label, lengths, is_scalar = msgpack.unpackb(data[_LENGTH.size : start])
    dtype, shape = DTYPES_BY_LABEL[label], tuple(lengths)
    if library not in _LIBRARIES or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"not an array: {library} {shape}")
    if is_scalar is not (is_scalar and shape == ()):
        raise ValueError(f"not a scalar: {shape}")
    content = memoryview(data)[start:]
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
