# SPDX-License-Identifier: MIT OR Apache-2.0
"""The wire layout: the only file that knows what a frame looks like as bytes.

A frame is a header of fixed size and a payload. All numbers are little-endian:

    4s magic   B version   B reserved   H epoch   I source   I tag
    Q group    Q sequence  Q fingerprint   Q number   Q length   I checksum

``number`` counts the frames of one link from 1, so that a receiver can put them in order and drop
copies. ``checksum`` covers the header up to itself and the payload.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import NamedTuple

from ferrodist.buffer import MAX_AXES, DType

VERSION = 1
POINT_TO_POINT = 0  # the sequence number of messages that belong to no collective

_MAGIC = b"FDST"
_HEADER = struct.Struct("<4sBBHIIQQQQQ")
_CHECKSUM = struct.Struct("<I")
HEADER_NBYTES = _HEADER.size + _CHECKSUM.size


class Frame(NamedTuple):
    """One message: which conversation it belongs to, and its bytes."""

    group: int
    sequence: int
    fingerprint: int
    payload: memoryview | bytes
    tag: int = 0


class FrameError(ValueError):
    """These bytes are not a frame; the transport says whose they were."""


def encode(frame: Frame, source: int, number: int) -> bytearray:
    """Lay a frame out as bytes."""
    header = _HEADER.pack(
        _MAGIC,
        VERSION,
        0,
        0,
        source,
        frame.tag,
        frame.group,
        frame.sequence,
        frame.fingerprint,
        number,
        len(frame.payload),
    )
    checksum = zlib.crc32(frame.payload, zlib.crc32(header))
    return bytearray().join((header, _CHECKSUM.pack(checksum), frame.payload))


def decode(data: bytes | bytearray, source: int, number: int) -> Frame:
    """Read a frame back; raise FrameError unless every field is as it must be."""
    if len(data) < HEADER_NBYTES:
        raise FrameError(f"{len(data)} bytes are too few for a frame")
    view = memoryview(data)
    header, payload = view[: _HEADER.size], view[HEADER_NBYTES:]
    (checksum,) = _CHECKSUM.unpack(view[_HEADER.size : HEADER_NBYTES])
    if zlib.crc32(payload, zlib.crc32(header)) != checksum:
        raise FrameError("the checksum does not fit the content")
    magic, version, reserved, epoch, came_from, tag, group, sequence, fingerprint, found, length = (
        _HEADER.unpack(header)
    )
    expected = (_MAGIC, VERSION, 0, 0, source, number, len(payload))
    if (magic, version, reserved, epoch, came_from, found, length) != expected:
        raise FrameError("the header does not fit the link")
    return Frame(group, sequence, fingerprint, payload, tag)


# A point-to-point message begins with what it holds: B dtype, B number of axes, Q length of each.
_ARRAY = struct.Struct("<BB")


def pack_array_header(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """Lay out dtype and shape."""
    return _ARRAY.pack(dtype, len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)


def unpack_shape(header: bytes | memoryview) -> tuple[DType, tuple[int, ...]]:
    """Read dtype and shape at the head of a message."""
    payload = memoryview(header)
    if len(payload) < _ARRAY.size:
        raise FrameError("the message has no array header")
    code, axes = _ARRAY.unpack_from(payload)
    end = _ARRAY.size + 8 * axes
    if code >= len(DType) or axes > MAX_AXES or len(payload) < end:
        raise FrameError("the array header is out of bounds")
    return DType(code), struct.unpack_from(f"<{axes}Q", payload, _ARRAY.size)


def unpack_array_header(payload: memoryview) -> tuple[DType, tuple[int, ...], memoryview]:
    """Read dtype, shape and content; raise FrameError unless they fit each other."""
    dtype, shape = unpack_shape(payload)
    content = payload[_ARRAY.size + 8 * len(shape) :]
    if math.prod(shape) * dtype.itemsize != len(content):
        raise FrameError(f"{len(content)} bytes do not fit {dtype.label}{list(shape)}")
    return dtype, shape, content
