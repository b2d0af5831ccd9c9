"""The wire layout: every frame reads back, and nothing else does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrodist.buffer import DType
from ferrodist.transports.framing import (
    HEADER_NBYTES,
    Frame,
    FrameError,
    decode,
    encode,
    pack_array_header,
    unpack_array_header,
)

BITS_64 = st.integers(0, 2**64 - 1)
FRAMES = st.builds(
    Frame, BITS_64, BITS_64, BITS_64, st.binary(max_size=100), st.integers(0, 2**31 - 1)
)


@given(FRAMES, st.integers(0, 2**32 - 1), BITS_64)
def test_a_frame_reads_back_as_it_was(frame, source, number):
    assert decode(encode(frame, source, number), source, number) == frame


@given(FRAMES, st.data())
def test_a_flipped_bit_is_always_found(frame, data):
    wire = encode(frame, 3, 9)
    place = data.draw(st.integers(0, 8 * len(wire) - 1))
    wire[place // 8] ^= 1 << place % 8
    with pytest.raises(FrameError):
        decode(wire, 3, 9)


@given(FRAMES, st.data())
def test_a_frame_cut_short_is_always_found(frame, data):
    wire = encode(frame, 3, 9)
    with pytest.raises(FrameError):
        decode(wire[: data.draw(st.integers(0, len(wire) - 1))], 3, 9)


@given(st.binary(max_size=3 * HEADER_NBYTES))
def test_random_bytes_are_no_frame(data):
    with pytest.raises(FrameError):
        decode(data, 0, 1)


def test_a_frame_of_another_link_or_number_is_refused():
    wire = encode(Frame(1, 2, 3, b"abc"), 3, 9)
    for source, number in ((4, 9), (3, 10)):
        with pytest.raises(FrameError, match="does not fit the link"):
            decode(wire, source, number)


SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@given(st.sampled_from(DType), SHAPES)
def test_an_array_header_reads_back(dtype, shape):
    count = 1
    for length in shape:
        count *= length
    content = bytes(count * dtype.itemsize)
    found = unpack_array_header(memoryview(pack_array_header(dtype, shape) + content))
    assert found[:2] == (dtype, shape)
    assert bytes(found[2]) == content


@given(st.binary(max_size=60))
def test_an_array_header_out_of_bounds_is_refused(data):
    try:
        dtype, shape, content = unpack_array_header(memoryview(data))
    except FrameError:
        return
    count = 1
    for length in shape:
        count *= length
    assert count * dtype.itemsize == len(content)


def test_a_shape_whose_product_overflows_is_refused_without_allocating():
    header = pack_array_header(DType.FLOAT64, (2**62, 2**62))
    with pytest.raises(FrameError, match="do not fit"):
        unpack_array_header(memoryview(header))
