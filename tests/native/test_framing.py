"""The wire: every frame reads back, nothing else does, and array headers keep their bounds."""

import math
import struct
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ferrodist import _native
from ferrodist.backends.framing import (
    FrameError,
    pack_array_form,
    pack_array_header,
    unpack_message,
    unpack_shape,
)
from ferrodist.buffer import ARRAY_DTYPES, MAX_AXES, ArrayKind, DType


class Frame(NamedTuple):
    """A frame that carries a piece."""

    group: int
    sequence: int
    fingerprint: int
    payload: bytes | memoryview
    tag: int = 0


KEY = bytes(32)


def encode(frame: Frame, source: int, number: int) -> bytearray:
    group, sequence, fingerprint, payload, tag = frame
    return _native.encode_frame(1, group, sequence, fingerprint, tag, payload, KEY, source, number)


def decode(data: bytes | bytearray, source: int, number: int) -> Frame:
    try:
        kind, group, sequence, fingerprint, tag, payload = _native.decode_frame(
            data, KEY, source, number, len(data)
        )
    except ValueError as error:
        raise FrameError(str(error)) from None
    if kind != 1:
        raise FrameError(f"a frame of kind {kind}, not 1")
    return Frame(group, sequence, fingerprint, payload, tag)


BITS_32, BITS_64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
FRAMES = st.builds(Frame, BITS_64, BITS_64, BITS_64, st.binary(max_size=100), BITS_32)
KEYS = st.binary(min_size=32, max_size=32)

HEADER_NBYTES = len(encode(Frame(0, 0, 0, b""), 0, 1))
LENGTH_AT = 48  # where in a header the length of the payload stands
PIECE = 4096
NUM_KINDS = 25
# The kinds that carry nothing, and those that carry more than a piece may be.
EMPTY_KINDS = (0, 2, 5, 7, 8, 9, 11, 12, 17, 19, 22, 23)
LARGEST = 16 * 2**20


def flipped(wire: bytes | bytearray, place: int) -> bytearray:
    damaged = bytearray(wire)
    damaged[place // 8] ^= 1 << place % 8
    return damaged


# -- what was sent reads back ---------------------------------------------------------------------


@given(FRAMES, BITS_32, BITS_64)
def test_a_frame_reads_back_as_it_was(frame, source, number):
    assert decode(encode(frame, source, number), source, number) == frame


@given(FRAMES, st.integers(0, NUM_KINDS - 1), KEYS, BITS_32, BITS_64)
def test_a_frame_of_any_kind_reads_back_with_its_key(frame, kind, key, source, number):
    group, sequence, fingerprint, payload, tag = frame
    content = b"" if kind in EMPTY_KINDS else payload
    wire = _native.encode_frame(
        kind, group, sequence, fingerprint, tag, content, key, source, number
    )
    found = _native.decode_frame(wire, key, source, number, PIECE)
    assert found == (kind, group, sequence, fingerprint, tag, content)


@pytest.mark.parametrize("nbytes", [1023, 1024, 1025, 2048, 100_000])
def test_a_payload_of_several_blocks_reads_back_in_place(nbytes):
    payload = bytes(i * i % 251 for i in range(nbytes))
    wire = encode(Frame(1, 2, 3, payload), 0, 1)
    found = decode(wire, 0, 1).payload
    assert found == payload
    assert isinstance(found, memoryview)
    assert found.obj is wire


# -- nothing else does ----------------------------------------------------------------------------


@given(FRAMES, st.data())
def test_a_flipped_bit_is_always_found(frame, data):
    wire = encode(frame, 3, 9)
    place = data.draw(st.integers(0, 8 * len(wire) - 1))
    with pytest.raises(FrameError):
        decode(flipped(wire, place), 3, 9)


def test_every_bit_of_a_frame_counts():
    wire = encode(Frame(1, 2, 3, bytes(range(40)), 4), 3, 9)
    for place in range(8 * len(wire)):
        with pytest.raises(FrameError):
            decode(flipped(wire, place), 3, 9)


@given(FRAMES, st.data())
def test_a_frame_cut_short_is_always_found(frame, data):
    wire = encode(frame, 3, 9)
    with pytest.raises(FrameError):
        decode(wire[: data.draw(st.integers(0, len(wire) - 1))], 3, 9)


@given(FRAMES, st.binary(min_size=1, max_size=100))
def test_bytes_behind_a_frame_are_always_found(frame, more):
    with pytest.raises(FrameError):
        decode(encode(frame, 3, 9) + more, 3, 9)


@given(st.binary(max_size=3 * HEADER_NBYTES))
@example(b"")
@example(b"FDST" + bytes(HEADER_NBYTES - 4))
def test_random_bytes_are_no_frame(data):
    with pytest.raises(FrameError):
        decode(data, 0, 1)


@given(FRAMES, KEYS, KEYS)
def test_a_frame_with_another_key_is_no_frame(frame, key, other):
    group, sequence, fingerprint, payload, tag = frame
    wire = _native.encode_frame(1, group, sequence, fingerprint, tag, payload, key, 3, 9)
    if key == other:
        assert _native.decode_frame(wire, other, 3, 9, PIECE)[5] == payload
        return
    with pytest.raises(ValueError, match="the seal does not fit the header"):
        _native.decode_frame(wire, other, 3, 9, PIECE)


def test_a_frame_of_another_number_is_refused():
    wire = encode(Frame(1, 2, 3, b"abc"), 3, 9)
    for number in (0, 8, 10, 2**64 - 1):
        with pytest.raises(FrameError, match="does not fit the link"):
            decode(wire, 3, number)


def test_a_frame_of_another_rank_is_refused_for_its_key():
    wire = encode(Frame(1, 2, 3, b"abc"), 3, 9)
    with pytest.raises(FrameError, match="the seal does not fit"):
        decode(wire, 4, 9)


def test_a_frame_of_another_kind_is_no_message():
    heartbeat = _native.encode_frame(0, 0, 0, 0, 0, b"", bytes(32), 3, 9)
    with pytest.raises(FrameError, match="kind 0, not 1"):
        decode(heartbeat, 3, 9)


@pytest.mark.parametrize("nbytes", [0, 16, 31, 33])
def test_a_key_of_another_length_is_refused(nbytes):
    with pytest.raises(ValueError, match="32 bytes"):
        _native.encode_frame(1, 0, 0, 0, 0, b"", bytes(nbytes), 0, 1)
    with pytest.raises(ValueError, match="32 bytes"):
        _native.decode_frame(encode(Frame(0, 0, 0, b""), 0, 1), bytes(nbytes), 0, 1, PIECE)


# -- bounds ---------------------------------------------------------------------------------------


@given(st.integers(NUM_KINDS, 255), st.binary(max_size=20), KEYS)
def test_an_unknown_kind_is_refused_though_it_is_sealed(kind, payload, key):
    wire = _native.encode_frame(kind, 0, 0, 0, 0, payload, key, 0, 1)
    with pytest.raises(ValueError, match="unknown kind"):
        _native.decode_frame(wire, key, 0, 1, PIECE)


@pytest.mark.parametrize("kind", range(NUM_KINDS))
def test_a_payload_beyond_the_bound_of_its_kind_is_refused_though_it_is_sealed(kind):
    nbytes = 1 if kind in EMPTY_KINDS else LARGEST + 1
    wire = _native.encode_frame(kind, 0, 0, 0, 0, bytes(nbytes), bytes(32), 0, 1)
    with pytest.raises(ValueError, match="longer than a frame of its kind may have"):
        _native.decode_frame(wire, bytes(32), 0, 1, PIECE)


@given(st.integers(0, PIECE), st.integers(0, 2 * PIECE))
def test_a_piece_is_refused_by_its_header_alone(piece, nbytes):
    """A long one is refused for its length, a short one because the rest is not there."""
    wire = _native.encode_frame(1, 0, 0, 0, 0, bytes(nbytes), bytes(32), 0, 1)
    what = "longer than" if nbytes > piece else f"a payload of 0 bytes, not {nbytes}"
    if nbytes == 0:
        assert _native.decode_frame(wire, bytes(32), 0, 1, piece)[5] == b""
        return
    with pytest.raises(ValueError, match=what):
        _native.decode_frame(wire[:HEADER_NBYTES], bytes(32), 0, 1, piece)


@given(st.sampled_from([2**63, 2**64 - 1, 2**64 - HEADER_NBYTES, 2**32, 101]) | BITS_64)
def test_a_length_that_was_changed_is_never_believed(length):
    wire = encode(Frame(1, 2, 3, bytes(100)), 0, 1)
    struct.pack_into("<Q", wire, LENGTH_AT, length)
    if length == 100:
        assert decode(wire, 0, 1).payload == bytes(100)
        return
    with pytest.raises(FrameError, match="the seal"):
        decode(wire, 0, 1)


@pytest.mark.parametrize("tag", [-1, 2**32])
def test_a_field_that_does_not_fit_its_place_is_refused_and_not_cut(tag):
    with pytest.raises(TypeError):
        encode(Frame(1, 2, 3, b"", tag), 0, 1)


# -- array headers --------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


KINDS = st.sampled_from([kind for kind in ArrayKind if kind is not ArrayKind.NUMBER])


@given(st.sampled_from(ARRAY_DTYPES), SHAPES, KINDS)
def test_an_array_header_reads_back(dtype, shape, kind):
    content = bytes(math.prod(shape) * dtype.itemsize)
    found = unpack_message(memoryview(pack_array_header(dtype, shape, kind) + content))
    assert found[:3] == (dtype, shape, kind)
    assert bytes(found[3]) == content


@given(st.binary(max_size=60))
def test_an_array_header_out_of_bounds_is_refused(data):
    try:
        dtype, shape, _, content = unpack_message(memoryview(data))
    except FrameError:
        return
    assert math.prod(shape) * dtype.itemsize == len(content)


@given(st.sampled_from(ARRAY_DTYPES), SHAPES, st.data())
def test_an_array_header_with_a_flipped_bit_fits_its_content_or_is_refused(dtype, shape, data):
    header = pack_array_header(dtype, shape, ArrayKind.NUMPY)
    place = data.draw(st.integers(0, 8 * len(header) - 1))
    content = bytes(math.prod(shape) * dtype.itemsize)
    try:
        found = unpack_message(memoryview(flipped(header + content, place)))
    except FrameError:
        return
    assert math.prod(found[1]) * found[0].itemsize == len(found[3])


@given(st.sampled_from(ARRAY_DTYPES), SHAPES, st.data())
def test_an_array_header_cut_short_is_refused(dtype, shape, data):
    header = pack_array_form(dtype, shape)
    cut = header[: data.draw(st.integers(0, len(header) - 1))]
    with pytest.raises(FrameError):
        unpack_shape(cut)


@given(st.sampled_from(ARRAY_DTYPES), st.lists(BITS_64, max_size=MAX_AXES).map(tuple))
def test_a_shape_of_any_numbers_reads_back_without_its_content(dtype, shape):
    assert unpack_shape(pack_array_form(dtype, shape)) == (dtype, shape)
    if math.prod(shape) > 0:
        with pytest.raises(FrameError, match="do not fit"):
            unpack_message(memoryview(pack_array_header(dtype, shape, ArrayKind.NUMPY)))


@given(st.integers(len(ARRAY_DTYPES), 255))
def test_an_unknown_dtype_is_refused(code):
    with pytest.raises(FrameError, match="out of bounds"):
        unpack_shape(bytes((code, 0)))


@given(st.integers(MAX_AXES + 1, 255))
def test_too_many_axes_are_refused_though_they_are_there(axes):
    with pytest.raises(FrameError, match="out of bounds"):
        unpack_shape(bytes((0, axes)) + bytes(8 * axes))


def test_a_shape_whose_product_overflows_is_refused_without_allocating():
    header = pack_array_header(DType.FLOAT64, (2**62, 2**62), ArrayKind.NUMPY)
    with pytest.raises(FrameError, match="do not fit"):
        unpack_message(memoryview(header))


def test_an_unknown_kind_of_array_and_a_number_with_a_shape_are_refused():
    header = pack_array_form(DType.FLOAT64, (1,))
    for kind in (b"", bytes([0]), bytes([ArrayKind.JAX + 1]), bytes([ArrayKind.NUMBER])):
        with pytest.raises(FrameError):
            unpack_message(memoryview(header + kind + bytes(8)))
