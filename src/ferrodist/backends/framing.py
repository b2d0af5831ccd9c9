# SPDX-License-Identifier: MIT OR Apache-2.0
"""The header of a point-to-point message: what it holds, as bytes."""

from __future__ import annotations

import math
import struct

from ferrodist.buffer import ARRAY_DTYPES, MAX_AXES, ArrayKind, DType


class FrameError(ValueError):
    """These bytes are no message; the transport says whose they were."""


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
