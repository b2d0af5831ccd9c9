# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whether an input and the user's ``out`` share memory, exactly, strides and all."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ferrodist.arrays.library import InputArray, OutputArray, Span, span_of
from ferrodist.buffer import Buffer

# Steps numpy may take to tell two strided arrays apart; ordinary strides need a handful.
_MAX_WORK: Any = 100_000  # Any because numpy's stubs know 0 and -1 only


class OverlapKind(enum.Enum):
    """How two pieces of memory lie to each other."""

    NONE = enum.auto()
    SAME = enum.auto()
    PARTIAL = enum.auto()


class Overlap(NamedTuple):
    """How the user's memory of an input lies to that of ``out``.

    ``offset`` is how many bytes the input begins after ``out``, negative if before it, and None
    unless both are contiguous and overlap. ``in_place`` is true if their buffers share that memory
    too; those of arrays that were packed, resolved or staged are copies.
    """

    kind: OverlapKind
    offset: int | None = None
    in_place: bool = False


_APART = Overlap(OverlapKind.NONE)


def overlap(taken: InputArray, result: OutputArray) -> Overlap:
    """Compare the user's own memory of an input with that of ``out``."""
    out, x = result.span, taken.span
    if out is None or x is None or x.device != out.device or not _bounds_meet(x, out):
        return _APART
    if _is_contiguous(x):
        same = x.address == out.address and _nbytes(x) == _nbytes(out)
        kind = OverlapKind.SAME if same else OverlapKind.PARTIAL
        offset = x.address - out.address
        between_buffers = _address(taken.buffer) - _address(result.buffer)
        return Overlap(kind, offset, in_place=between_buffers == offset)
    return Overlap(OverlapKind.PARTIAL) if _shares_memory(x, out) else _APART


def _address(buffer: Buffer) -> int:
    return span_of(np.frombuffer(buffer.memory, np.uint8)).address


def _bounds_meet(a: Span, b: Span) -> bool:
    if _nbytes(a) == 0 or _nbytes(b) == 0:
        return False
    (a_start, a_end), (b_start, b_end) = _bounds(a), _bounds(b)
    return a_start < b_end and b_start < a_end


def _bounds(span: Span) -> tuple[int, int]:
    """Return the first address and the one after the last; negative strides reach backwards."""
    reach = [(size - 1) * stride for size, stride in zip(span.shape, span.strides, strict=True)]
    start = span.address + sum(step for step in reach if step < 0)
    end = span.address + sum(step for step in reach if step > 0) + span.itemsize
    return start, end


def _nbytes(span: Span) -> int:
    return math.prod(span.shape) * span.itemsize


def _is_contiguous(span: Span) -> bool:
    expected = span.itemsize
    for size, stride in zip(reversed(span.shape), reversed(span.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _shares_memory(a: Span, b: Span) -> bool:
    try:
        return np.shares_memory(_view(a), _view(b), max_work=_MAX_WORK)
    except np.exceptions.TooHardError:
        return True  # not shown to be apart: better refused than overwritten


def _view(span: Span) -> np.ndarray[Any, Any]:
    """Show a span to NumPy, which compares addresses and reads nothing: a GPU's will do."""
    return np.asarray(_Exporter(span))


class _Exporter:
    def __init__(self, span: Span) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (span.address, False),
            "shape": span.shape,
            "strides": span.strides,
            "typestr": f"|V{span.itemsize}",
        }


class _Extent(NamedTuple):
    """From where to where a leaf's input, or its ``out``, reaches."""

    start: int
    end: int
    leaf: int
    out: OutputArray | None


def find_crossing(inputs: Sequence[InputArray], results: Sequence[OutputArray]) -> int | None:
    """Return a leaf whose ``out`` shares memory with another leaf's input or ``out``, if any.

    Extents are swept in order of address, so that a large tree costs no more than a sort.
    """
    reaching: list[_Extent] = []
    for extent in sorted(_extents(inputs, results), key=lambda extent: extent.start):
        reaching = [other for other in reaching if other.end > extent.start]
        for other in reaching:
            if _cross(extent, other, inputs):
                return other.leaf if extent.out is None else extent.leaf
        reaching.append(extent)
    return None


def _extents(inputs: Sequence[InputArray], results: Sequence[OutputArray]) -> Iterator[_Extent]:
    for leaf, (taken, result) in enumerate(zip(inputs, results, strict=True)):
        for span, out in ((taken.span, None), (result.span, result)):
            if span is not None and _nbytes(span) > 0:
                yield _Extent(*_bounds(span), leaf, out)


def _cross(a: _Extent, b: _Extent, inputs: Sequence[InputArray]) -> bool:
    if a.leaf == b.leaf:
        return False
    if a.out is not None and b.out is not None:
        return True  # both are contiguous, so what they reach they fill
    out, leaf = (a.out, b.leaf) if a.out is not None else (b.out, a.leaf)
    return out is not None and overlap(inputs[leaf], out).kind is not OverlapKind.NONE
