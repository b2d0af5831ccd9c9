# SPDX-License-Identifier: MIT OR Apache-2.0
"""Objects to bytes and back, by msgpack with types of our own. Reading never runs code.

What msgpack does not know is a list that begins with a mark, so that nesting stays msgpack's own
and bounded: the mark says what is made of the rest. Pickle is used only where the caller asked for
it by name, on all sides: threads of one process, or processes that have met as a job and proved to
each other that they belong to it.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import importlib
import importlib.util
import pathlib
import pickle
import struct
import uuid
import zoneinfo
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ferrodist.arrays import as_input, numpy_dtype, received_array
from ferrodist.backends.framing import FrameError, pack_array_header, unpack_message
from ferrodist.buffer import DType
from ferrodist.errors import InvalidArgument, ProtocolError, UnsupportedArray

C = TypeVar("C", bound=type)

_MAX_DEPTH = 200
_BIG_INT, _COMPLEX, _MARK, _ARRAY = range(1, 5)  # codes of msgpack's extension types
_PLAIN = (type(None), bool, float, bytes)
_LIBRARIES = ("numpy", "torch", "jax")

_PAIR = struct.Struct("<dd")


def encode(value: Any, use_pickle: bool, where: str) -> bytes:
    """Lay an object out as bytes; raise a TypeError with type and place if it has none."""
    if use_pickle:
        return pickle.dumps(value)
    import msgpack

    laid_out = _lay_out(value, where, 0)
    packed: bytes = msgpack.packb(
        laid_out, default=lambda key: _lay_out(key, "a key", 0), strict_types=True
    )
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
    except (ValueError, TypeError, LookupError, msgpack.UnpackException) as error:
        raise ProtocolError(f"an object could not be read: {error}") from error
    except (RuntimeError, ArithmeticError, ImportError, struct.error) as error:
        raise ProtocolError(f"an object could not be made: {error}") from error


# -- what is made of lists -------------------------------------------------------------------------


class _Form(NamedTuple):
    """How a type becomes a list, and is made of one again."""

    mark: bytes
    items: Callable[[Any], Iterable[Any]]
    make: Callable[[list[Any]], Any]
    labels: tuple[str, ...] = ()  # of the items in errors, where they have names


def _of(kind: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    return lambda items: kind(*items)


def _fields(*names: str) -> Callable[[Any], list[Any]]:
    return lambda value: [getattr(value, name) for name in names]


def _folded(kind: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    return lambda items: kind(*items[:-1], fold=items[-1])


def _numpy_dtype_of(items: list[Any]) -> np.dtype[Any]:
    (name,) = items
    is_bfloat16 = name == "bfloat16"
    dtype: np.dtype[Any] = numpy_dtype(DType.BFLOAT16) if is_bfloat16 else np.dtype(str(name))
    return dtype


def _torch_size_of(items: list[Any]) -> Any:
    torch = _import_if_installed("torch")
    return tuple(items) if torch is None else torch.Size(items)


def _torch_dtype_of(items: list[Any]) -> Any:
    torch, (name,) = importlib.import_module("torch"), items
    if not isinstance(dtype := getattr(torch, name), torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


_CLOCK = ("hour", "minute", "second", "microsecond", "tzinfo", "fold")
_FORMS: dict[type, _Form] = {
    tuple: _Form(b"t", list, tuple),
    set: _Form(b"s", list, set),
    frozenset: _Form(b"f", list, frozenset),
    bytearray: _Form(b"bytearray", lambda value: [bytes(value)], _of(bytearray)),
    collections.OrderedDict: _Form(
        b"ordered",
        lambda value: [item for pair in value.items() for item in pair],
        lambda items: collections.OrderedDict(zip(items[::2], items[1::2], strict=True)),
    ),
    range: _Form(b"range", _fields("start", "stop", "step"), _of(range)),
    slice: _Form(b"slice", _fields("start", "stop", "step"), _of(slice)),
    datetime.datetime: _Form(
        b"datetime", _fields("year", "month", "day", *_CLOCK), _folded(datetime.datetime)
    ),
    datetime.date: _Form(b"date", _fields("year", "month", "day"), _of(datetime.date)),
    datetime.time: _Form(b"time", _fields(*_CLOCK), _folded(datetime.time)),
    datetime.timedelta: _Form(
        b"timedelta", _fields("days", "seconds", "microseconds"), _of(datetime.timedelta)
    ),
    datetime.timezone: _Form(
        b"timezone", lambda value: value.__getinitargs__(), _of(datetime.timezone)
    ),
    zoneinfo.ZoneInfo: _Form(b"zone", _fields("key"), _of(zoneinfo.ZoneInfo)),
    type(pathlib.Path()): _Form(b"path", lambda value: [str(value)], _of(pathlib.Path)),
    pathlib.PurePosixPath: _Form(
        b"posix path", lambda value: [str(value)], _of(pathlib.PurePosixPath)
    ),
    pathlib.PureWindowsPath: _Form(
        b"windows path", lambda value: [str(value)], _of(pathlib.PureWindowsPath)
    ),
    uuid.UUID: _Form(b"uuid", _fields("int"), lambda items: uuid.UUID(int=items[0])),
    decimal.Decimal: _Form(b"decimal", lambda value: [str(value)], _of(decimal.Decimal)),
    fractions.Fraction: _Form(
        b"fraction", _fields("numerator", "denominator"), _of(fractions.Fraction)
    ),
}
_NUMPY_DTYPE = _Form(
    b"numpy dtype",
    lambda value: [value.name if value.name == "bfloat16" else value.str],
    _numpy_dtype_of,
)
_OF_TORCH = {
    "Size": _Form(b"torch size", list, _torch_size_of),
    "dtype": _Form(b"torch dtype", lambda value: [str(value)[6:]], _torch_dtype_of),
}
_BY_MARK = {form.mark: form for form in (*_FORMS.values(), _NUMPY_DTYPE, *_OF_TORCH.values())}


def _form_of(value: Any) -> _Form | None:
    kind = type(value)
    if kind in _FORMS:
        return _FORMS[kind]
    if isinstance(value, np.dtype) and dtype_is_plain(value):
        return _NUMPY_DTYPE
    return _OF_TORCH.get(kind.__qualname__) if kind.__module__ == "torch" else None


def dtype_is_plain(dtype: np.dtype[Any]) -> bool:
    """Tell whether a dtype is told by its name; structured and object dtypes are not."""
    return dtype.names is None and dtype.subdtype is None and not dtype.hasobject


# -- types of the user's own -----------------------------------------------------------------------


def register_type(kind: C) -> C:
    """Let objects of a class of your own travel; call it on all ranks, or use it as a decorator.

    The class is a dataclass, an Enum or a named tuple. Objects are made of their fields, without
    calling ``__init__``.

    Example:
        >>> import dataclasses, ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> @ferrodist.register_type
        ... @dataclasses.dataclass
        ... class Progress:
        ...     step: int
        >>> run_ranks(2, lambda b: ferrodist.broadcast_object(Progress(b.rank), b, root=1))
        [Progress(step=1), Progress(step=1)]
    """
    form = _form_of_class(kind)
    if form is None:
        raise InvalidArgument(
            f"register_type takes a dataclass, an Enum or a named tuple, got {kind!r}; objects of "
            "other classes travel with pickle=True",
            got=str(kind),
        )
    _FORMS[kind] = _BY_MARK[form.mark] = form
    return kind


def _form_of_class(kind: Any) -> _Form | None:
    if not isinstance(kind, type):
        return None
    mark = f"{kind.__module__}.{kind.__qualname__}".encode()
    if issubclass(kind, enum.Enum):
        members: Any = kind.__members__
        return _Form(mark, lambda value: [value.name], lambda items: members[items[0]])
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        make: Any = kind
        return _Form(mark, list, lambda items: make._make(items), make._fields)
    if dataclasses.is_dataclass(kind):
        names = tuple(field.name for field in dataclasses.fields(kind))
        return _Form(mark, _fields(*names), lambda items: _fill(kind, names, items), names)
    return None


def _fill(kind: type, names: tuple[str, ...], items: list[Any]) -> Any:
    made: Any = object.__new__(kind)
    for name, item in zip(names, items, strict=True):
        object.__setattr__(made, name, item)  # of a frozen one, too
    return made


# -- laying out ------------------------------------------------------------------------------------


def _lay_out(value: Any, where: str, depth: int) -> Any:
    """Make what msgpack packs of an object, or refuse it and say where in the object it is."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if depth > _MAX_DEPTH:
        raise UnsupportedArray(
            f"an object is nested more than {_MAX_DEPTH} deep, or contains itself"
        )
    if kind is int:
        return value if -(2**63) <= value < 2**64 else _lay_out_int(value)
    if kind is str:
        return _check_text(value, where)
    if kind is dict:
        for key in value:
            _lay_out(key, f"key {key!r} of {where}", depth + 1)
        return {k: _lay_out(item, f"{where}[{k!r}]", depth + 1) for k, item in value.items()}
    if kind is list:
        return [_lay_out(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    return _lay_out_special(value, where, depth)


def _lay_out_special(value: Any, where: str, depth: int) -> Any:
    import msgpack

    kind, form = type(value), _form_of(value)
    if form is not None:
        labels = [f".{name}" for name in form.labels]
        items = [
            _lay_out(item, where + (labels[i] if labels else f"[{i}]"), depth + 1)
            for i, item in enumerate(form.items(value))
        ]
        return [msgpack.ExtType(_MARK, form.mark), *items]
    if kind is complex:
        return msgpack.ExtType(_COMPLEX, _PAIR.pack(value.real, value.imag))
    if _is_array(value):
        return msgpack.ExtType(_ARRAY, _encode_array(value, where))
    name = f"{kind.__module__}.{kind.__qualname__}"
    advice = "convert it, or pass pickle=True on every rank"
    if _form_of_class(kind) is not None:
        advice = "call ferrodist.register_type on its class, or pass pickle=True, on every rank"
    raise UnsupportedArray(f"{where} is a {name}, which cannot be sent; {advice}", got=name)


def _lay_out_int(value: int) -> Any:
    import msgpack

    size = value.bit_length() // 8 + 1
    return msgpack.ExtType(_BIG_INT, value.to_bytes(size, "little", signed=True))


def _check_text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedArray(f"{where} is text with a lone surrogate; send bytes") from error
    return value


# -- reading ---------------------------------------------------------------------------------------


def _decode_special(code: int, data: bytes) -> Any:
    if code == _BIG_INT:
        return int.from_bytes(data, "little", signed=True)
    if code == _COMPLEX:
        return complex(*_PAIR.unpack(data))
    if code == _MARK:
        return _Mark(_find_form(data))
    if code == _ARRAY:
        return _decode_array(data)
    raise ValueError(f"unknown type {code}")


class _Mark(NamedTuple):
    """What a list begins with that was something else."""

    form: _Form


def _find_form(mark: bytes) -> _Form:
    if mark not in _BY_MARK:
        name = mark.decode(errors="replace")
        raise ValueError(f"{name!r} is no type known here; call register_type on all ranks")
    return _BY_MARK[mark]


def _decode_list(items: list[Any]) -> Any:
    if items and type(items[0]) is _Mark:
        return items[0].form.make([_unmarked(item) for item in items[1:]])
    return items


def _decode_pairs(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    return {_unmarked(key): _unmarked(value) for key, value in pairs}


def _unmarked(value: Any) -> Any:
    """Refuse a mark anywhere but at the head of a list."""
    if type(value) is _Mark or (type(value) is list and any(type(v) is _Mark for v in value)):
        raise ValueError("a mark stands where there is no list")
    return value


# -- arrays ----------------------------------------------------------------------------------------


def _is_array(value: Any) -> bool:
    root = type(value).__module__.partition(".")[0]
    is_known = root in (*_LIBRARIES, "jaxlib")
    return is_known and hasattr(value, "dtype") and not isinstance(value, type)


def _encode_array(value: Any, where: str) -> bytes:
    """Lay an array out as a message does."""
    taken = as_input(value, where)
    header = pack_array_header(taken.buffer.dtype, taken.buffer.shape, taken.kind)
    return header + taken.buffer.memory


def _decode_array(data: bytes) -> Any:
    """Make an array of the sender's kind where that library is installed, else of NumPy."""
    try:
        dtype, shape, kind, content = unpack_message(memoryview(data))
    except FrameError as error:
        raise ValueError(str(error)) from error
    _import_if_installed(kind.name.lower())
    return received_array(np.frombuffer(bytearray(content), np.uint8), dtype, shape, kind)


def _import_if_installed(name: str) -> Any:
    is_there = name in _LIBRARIES and importlib.util.find_spec(name) is not None
    return importlib.import_module(name) if is_there else None
