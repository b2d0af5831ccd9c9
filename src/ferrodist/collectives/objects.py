# SPDX-License-Identifier: MIT OR Apache-2.0
"""Collectives of plain Python objects.

None, bool, int of any size, float, complex, str, bytes, list, tuple, dict, set and arrays travel by
msgpack; anything else is refused unless every rank passes ``pickle=True``.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ferrodist.arrays import as_input, new_result
from ferrodist.backends.running_call import CollectiveArgs, Prepared, RunningCall
from ferrodist.buffer import DTYPES_BY_LABEL, Buffer, DType
from ferrodist.call import Kind
from ferrodist.collectives.methods import hide_mistaken, refuse_keyword
from ferrodist.collectives.plan import Group, Request
from ferrodist.collectives.uneven import as_buffer, tell_numbers
from ferrodist.config import DEFAULT, Timeout
from ferrodist.errors import InvalidArgument, ProtocolError, UnsupportedArray

# -- the codec -------------------------------------------------------------------------------------
#
# Objects to bytes and back, by msgpack with a few types of our own. Reading never runs code.
#
# Tuples and sets are lists that begin with a mark, so that nesting stays msgpack's own and
# bounded. Pickle is used only where the caller asked for it by name, on both sides. Those are
# threads of one process, or processes of one user on one host that have met as a job; a backend
# that reaches further must authenticate its peers before it allows this.

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
        as_input(value, where)
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

    buffer, is_scalar = as_input(value).buffer, isinstance(value, np.generic)
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
    result = new_result(as_input(_sample(library, label)), shape)
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


# -- the calls -------------------------------------------------------------------------------------


@hide_mistaken
def broadcast_object(
    value: Any,
    backend: Group = None,
    root: int = 0,
    *,
    pickle: bool = False,
    timeout: Timeout = DEFAULT,
    async_op: bool = False,
    **mistaken: Any,
) -> Any:
    """Give every rank the object of ``root``; what the others pass is not looked at.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> settings = {0: {"lr": 0.1}}  # the root has them, the others pass None
        >>> run_ranks(2, lambda b: ferrodist.broadcast_object(settings.get(b.rank), b))
        [{'lr': 0.1}, {'lr': 0.1}]
    """
    if mistaken:
        raise refuse_keyword("broadcast_object", mistaken)
    request = Request(Kind.BROADCAST_OBJECT, backend, root=root, timeout=timeout, is_async=async_op)
    data = encode(value, pickle, "the object") if request.is_root else b""
    return _execute(_BroadcastObject, request, [data], pickle)


@hide_mistaken
def all_gather_object(
    value: Any,
    backend: Group = None,
    *,
    pickle: bool = False,
    timeout: Timeout = DEFAULT,
    async_op: bool = False,
    **mistaken: Any,
) -> Any:
    """Give every rank the list of the objects of all, in rank order.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> run_ranks(2, lambda b: ferrodist.all_gather_object((b.rank, "ok"), b))[1]
        [(0, 'ok'), (1, 'ok')]
    """
    if mistaken:
        raise refuse_keyword("all_gather_object", mistaken)
    request = Request(Kind.ALL_GATHER_OBJECT, backend, timeout=timeout, is_async=async_op)
    data = encode(value, pickle, "the object")
    return _execute(_GatherObject, request, [data], pickle)


@hide_mistaken
def gather_object(
    value: Any,
    backend: Group = None,
    root: int = 0,
    *,
    pickle: bool = False,
    timeout: Timeout = DEFAULT,
    async_op: bool = False,
    **mistaken: Any,
) -> Any:
    """Give ``root`` the list of the objects of all ranks; the other ranks get None.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> run_ranks(2, lambda b: ferrodist.gather_object({b.rank}, b))
        [[{0}, {1}], None]
    """
    if mistaken:
        raise refuse_keyword("gather_object", mistaken)
    request = Request(Kind.GATHER_OBJECT, backend, root=root, timeout=timeout, is_async=async_op)
    data = encode(value, pickle, "the object")
    return _execute(_GatherObject, request, [data], pickle)


@hide_mistaken
def scatter_object(
    values: Sequence[Any] | None,
    backend: Group = None,
    root: int = 0,
    *,
    pickle: bool = False,
    timeout: Timeout = DEFAULT,
    async_op: bool = False,
    **mistaken: Any,
) -> Any:
    """Give rank r the object ``values[r]`` of ``root``; the other ranks pass None.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> parts = {0: ["a", "b"]}  # the root has them, the others pass None
        >>> run_ranks(2, lambda b: ferrodist.scatter_object(parts.get(b.rank), b))
        ['a', 'b']
    """
    if mistaken:
        raise refuse_keyword("scatter_object", mistaken)
    request = Request(Kind.SCATTER_OBJECT, backend, root=root, timeout=timeout, is_async=async_op)
    parts = _encode_each(request, values, pickle) if request.is_root else []
    return _execute(_ScatterObject, request, parts, pickle)


@dataclass(slots=True, eq=False)
class _ObjectCall(Prepared[Any]):
    """A call on encoded objects: the sizes are told first, then the bytes travel."""

    request: Request
    data: list[bytes]
    pickle: bool
    found: Buffer | None = None
    sizes: list[int] = field(default_factory=list)

    @property
    def args(self) -> CollectiveArgs:
        return CollectiveArgs(root=self.request.args.root)

    def finish(self) -> Any:
        assert self.found is not None
        return decode(self.found.memory, self.pickle)

    def tell_sizes(self, running: RunningCall, num_sizes: int) -> list[int]:
        """Give every rank the sizes of the root's bytes."""
        sizes = np.array([len(one) for one in self.data] or [0] * num_sizes, np.int64)
        buffer = as_buffer(sizes)
        running.collective(Kind.BROADCAST, buffer, buffer, self.args._replace(in_place=True))
        told: list[int] = sizes.tolist()
        return told


class _BroadcastObject(_ObjectCall):
    def run(self, running: RunningCall) -> None:
        (size,) = self.tell_sizes(running, 1)
        found = _bytes(bytearray(self.data[0])) if self.request.is_root else _room(size)
        running.collective(Kind.BROADCAST, found, found, self.args._replace(in_place=True))
        self.found = found


class _GatherObject(_ObjectCall):
    def run(self, running: RunningCall) -> None:
        is_rooted = self.request.kind is Kind.GATHER_OBJECT
        self.sizes = tell_numbers(running, [len(self.data[0])])[:, 0].tolist()
        self.found = None if is_rooted and not self.request.is_root else _room(sum(self.sizes))
        kind, args = Kind.GATHER if is_rooted else Kind.ALL_GATHER, self.args
        running.collective(kind, _bytes(self.data[0]), self.found, args._replace(counts=self.sizes))

    def finish(self) -> list[Any] | None:
        return _decode_each(self.found, self.sizes, self.pickle)


class _ScatterObject(_ObjectCall):
    def run(self, running: RunningCall) -> None:
        backend = running.backend
        sizes = self.tell_sizes(running, backend.world_size)
        source = _bytes(b"".join(self.data)) if self.request.is_root else None
        self.found = _room(sizes[backend.rank])
        running.collective(Kind.SCATTER, source, self.found, self.args._replace(counts=sizes))


def _execute(prepared: type[_ObjectCall], request: Request, data: list[bytes], pickle: bool) -> Any:
    call = request.call(pickle=pickle)
    return request.execute(prepared(call, request.deadline, request, data, pickle))


def _encode_each(request: Request, values: Sequence[Any] | None, pickle: bool) -> list[bytes]:
    world = request.backend.world_size
    found = len(values) if isinstance(values, (list, tuple)) else None
    if values is None or found != world:
        raise InvalidArgument(
            f"scatter_object: the root must pass a list of {world} objects, one per rank, "
            f"got {type(values).__name__}{'' if found is None else f' of {found}'}",
            expected=world,
            got=found,
            this_rank=request.backend.rank,
        )
    return [
        encode(value, pickle, f"the object for rank {rank}") for rank, value in enumerate(values)
    ]


def _decode_each(joined: Buffer | None, sizes: Sequence[int], pickle: bool) -> list[Any] | None:
    if joined is None:
        return None
    values, place = [], 0
    for size in sizes:
        values.append(decode(joined.memory[place : place + size], pickle))
        place += size
    return values


def _bytes(data: bytes | bytearray) -> Buffer:
    return Buffer(memoryview(data), DType.UINT8, (len(data),), data)


def _room(size: int) -> Buffer:
    return Buffer.empty(DType.UINT8, (size,))
