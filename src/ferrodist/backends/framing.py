# SPDX-License-Identifier: MIT OR Apache-2.0
"""Frames as bytes, for links between threads, and the header of a point-to-point message.

``native/net/frame.hpp`` says what a frame looks like; here its fields get their names. Links that
are made up have no handshake, and so a key that everybody knows: what it proves is that the bytes
are those that were sent.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from ferrodist import _native
from ferrodist.buffer import ARRAY_DTYPES, MAX_AXES, ArrayKind, DType

POINT_TO_POINT = 0  # the sequence number of messages that belong to no collective

_KEY = bytes(32)
_DATA = 1  # the kind of a frame that carries a piece, in frame.hpp


class Frame(NamedTuple):
    """One message: which call it belongs to, and its bytes."""

    group: int
    sequence: int
    fingerprint: int
    payload: memoryview | bytes
    tag: int = 0


class FrameError(ValueError):
    """These bytes are not a frame; the transport says whose they were."""


def encode(frame: Frame, source: int, number: int) -> bytearray:
    """Lay a frame out as bytes; ``number`` counts those of its link from 1."""
    group, sequence, fingerprint, payload, tag = frame
    return _native.encode_frame(
        _DATA, group, sequence, fingerprint, tag, payload, _KEY, source, number
    )


def decode(data: bytes | bytearray, source: int, number: int) -> Frame:
    """Read a frame back; raise FrameError unless every field is as it must be."""
    try:
        kind, group, sequence, fingerprint, tag, payload = _native.decode_frame(
            data, _KEY, source, number, len(data)
        )
    except ValueError as error:
        raise FrameError(str(error)) from None
    if kind != _DATA:
        raise FrameError(f"a frame of kind {kind}, not {_DATA}")
    return Frame(group, sequence, fingerprint, payload, tag)


# A point-to-point message begins with what it holds: B dtype, B number of axes, Q length of each,
# B kind of array. A receiver compares all but the last.
_ARRAY = struct.Struct("<BB")


def pack_array_form(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """Lay out dtype and shape: what a header begins with."""
    return _ARRAY.pack(dtype, len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)


def pack_array_header(dtype: DType, shape: tuple[int, ...], kind: ArrayKind) -> bytes:
    return pack_array_form(dtype, shape) + bytes([kind])


def unpack_shape(header: bytes | memoryview) -> tuple[DType, tuple[int, ...]]:
    payload = memoryview(header)
    if len(payload) < _ARRAY.size:
        raise FrameError("the message has no array header")
    code, axes = _ARRAY.unpack_from(payload)
    end = _ARRAY.size + 8 * axes
    if code >= len(ARRAY_DTYPES) or axes > MAX_AXES or len(payload) < end:
        raise FrameError("the array header is out of bounds")
    return DType(code), struct.unpack_from(f"<{axes}Q", payload, _ARRAY.size)


def split_message(payload: memoryview) -> tuple[memoryview, memoryview]:
    """Cut a message into header and content; raise FrameError if it is none."""
    end = len(pack_array_form(*unpack_shape(payload))) + 1
    if len(payload) < end:
        raise FrameError("the array header has no known kind of array")
    return payload[:end], payload[end:]


def unpack_message(payload: memoryview) -> tuple[DType, tuple[int, ...], ArrayKind, memoryview]:
    """Read dtype, shape, kind and content; raise FrameError unless they fit each other."""
    dtype, shape = unpack_shape(payload)
    header, content = split_message(payload)
    code = header[-1:].tobytes()
    if code[0] not in _KINDS:
        raise FrameError("the array header has no known kind of array")
    if math.prod(shape) * dtype.itemsize != len(content):
        raise FrameError(f"{len(content)} bytes do not fit {dtype.label}{list(shape)}")
    if code[0] == ArrayKind.NUMBER and shape:
        raise FrameError(f"a number has no shape, got {list(shape)}")
    return dtype, shape, ArrayKind(code[0]), content


_KINDS = frozenset(ArrayKind)
