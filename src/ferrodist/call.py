# SPDX-License-Identifier: MIT OR Apache-2.0
"""Call: what one rank asked for, as compared between ranks and shown in errors and logs."""

from __future__ import annotations

import dis
import enum
import operator
import os
from types import CodeType
from typing import Any, NamedTuple

from ferrodist import _native
from ferrodist.buffer import DType
from ferrodist.reduce_op import CustomOp, ReduceOp

_SHOWN_LEAVES = 3

MAX_TAG = (1 << 31) - 1
"""The largest tag of a point-to-point message."""


def as_index(value: Any) -> int | None:
    """Read an integer of any library; None if it is not one, or a bool."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


class Kind(enum.IntEnum):
    """What is asked for. Up to EXSCAN it is what schedules describe; the rest is made of those."""

    ALLREDUCE = 0
    BROADCAST = 1
    REDUCE = 2
    ALL_GATHER = 3
    GATHER = 4
    SCATTER = 5
    REDUCE_SCATTER = 6
    ALL_TO_ALL = 7
    BARRIER = 8
    SCAN = 9
    EXSCAN = 10
    ALL_GATHER_UNEVEN = 11
    ALL_TO_ALL_UNEVEN = 12
    BROADCAST_OBJECT = 13
    ALL_GATHER_OBJECT = 14
    GATHER_OBJECT = 15
    SCATTER_OBJECT = 16
    GATHER_UNEVEN = 17
    SCATTER_UNEVEN = 18
    REDUCE_SCATTER_UNEVEN = 19
    SPLIT_BY = 20
    GRID = 21
    SHARED = 22

    @property
    def label(self) -> str:
        """The name of the public function."""
        return _LABELS[self]

    @property
    def is_reduction(self) -> bool:
        """True where contributions are reduced."""
        return self in _REDUCTIONS

    @property
    def is_prefix(self) -> bool:
        """True where a rank gets the reduction of the ranks up to its own."""
        return self in (Kind.SCAN, Kind.EXSCAN)

    @property
    def is_rooted(self) -> bool:
        """True where one rank has a part of its own."""
        return self in _ROOTED

    @property
    def is_cut_by_rank(self) -> bool:
        """True where the array is made of one block per rank, whatever the algorithm."""
        return Kind.ALL_GATHER <= self <= Kind.ALL_TO_ALL

    # How long the arrays of a collective are, the whole or one rank's block, and who has them.

    @property
    def input_is_block(self) -> bool:
        """True where a rank passes its block of the whole that the call makes."""
        return self in (Kind.ALL_GATHER, Kind.GATHER)

    @property
    def result_is_block(self) -> bool:
        """True where a rank gets its block of the whole that is passed."""
        return self in (Kind.SCATTER, Kind.REDUCE_SCATTER)

    def has_input(self, rank: int, root: int) -> bool:
        """Tell whether a rank passes an array."""
        return self is not Kind.BARRIER and (self is not Kind.SCATTER or rank == root)

    def has_result(self, rank: int, root: int) -> bool:
        """Tell whether a rank gets an array."""
        if self is Kind.EXSCAN:
            return rank > 0
        return self is not Kind.BARRIER and (self not in (Kind.REDUCE, Kind.GATHER) or rank == root)


_LABELS = tuple(kind.name.lower() for kind in Kind)

_REDUCTIONS = (
    Kind.ALLREDUCE,
    Kind.REDUCE,
    Kind.REDUCE_SCATTER,
    Kind.SCAN,
    Kind.EXSCAN,
    Kind.REDUCE_SCATTER_UNEVEN,
)
_ROOTED = (
    Kind.BROADCAST,
    Kind.REDUCE,
    Kind.GATHER,
    Kind.SCATTER,
    Kind.BROADCAST_OBJECT,
    Kind.GATHER_OBJECT,
    Kind.SCATTER_OBJECT,
    Kind.GATHER_UNEVEN,
    Kind.SCATTER_UNEVEN,
)


class Site(NamedTuple):
    """Where the user's program made a call: code and offset, never a frame.

    A frame would keep the user's arrays alive.
    """

    code: CodeType
    offset: int

    def __str__(self) -> str:
        line = self.code.co_firstlineno
        for start, number in dis.findlinestarts(self.code):
            if start > self.offset:
                break
            line = number or line
        return f"{os.path.basename(self.code.co_filename)}:{line}"


NOT_THE_USERS = [os.path.dirname(os.path.abspath(__file__)) + os.sep]
"""Folders of code through which the user's program is called back, and which no Site is in."""

_native.set_site(Site, NOT_THE_USERS)
caller_site = _native.caller_site  # the innermost place in the user's program that led here


class Leaf(NamedTuple):
    """One array of a call: its place in the tree (empty for a lone array), dtype and shape."""

    path: str
    dtype: DType
    shape: tuple[int, ...]

    def __str__(self) -> str:
        array = f"{self.dtype.label}[{','.join(map(str, self.shape))}]"
        return f"{self.path}: {array}" if self.path else array


class Call(NamedTuple):
    """What one rank asked for. Ranks must agree on all of it but ``site``.

    ``site`` is text where the call is another process's. ``compared`` stands in for ``leaves`` in
    the fingerprint where sizes may differ by rank. ``refused`` is why this rank refuses its own
    arguments, as the name and the text of an error: then the calls of the others do not match.
    """

    kind: Kind
    leaves: tuple[Leaf, ...] = ()
    op: ReduceOp | CustomOp | None = None
    root: int | None = None
    algorithm: str | None = None
    reproducible: bool = False
    site: Site | str | None = None
    compared: tuple[Leaf, ...] | None = None
    pickle: bool = False
    counts: tuple[int, ...] | None = None  # rows of each rank, where all pass them
    refused: tuple[str, str] | None = None

    def fingerprint(self, *, checks_site: bool = False) -> int:
        """Hash what ranks must agree on to 64 bits; where it was called is a part if asked for."""
        numbers = [
            self.kind,
            -1 if self.op is None else self.op.code,
            -1 if self.root is None else self.root,
            0 if self.algorithm is None else _native.hash_text(self.algorithm),
            self.reproducible,
            self.pickle,
        ]
        for path, dtype, shape in self.leaves if self.compared is None else self.compared:
            numbers += (_native.hash_text(path), dtype, len(shape), *shape)
        numbers += self.counts or ()
        if self.refused is not None:  # for whatever reason: all ranks may refuse the same call
            numbers.append(_native.hash_text("refused"))
        if checks_site:
            numbers.append(_native.hash_text(str(self.site)))
        return _native.fingerprint(numbers)

    def __str__(self) -> str:
        words = [self._arrays()] if self.leaves else []
        if self.op is not None:
            words.append(self.op.label)
        if self.counts is not None:
            words.append(f"counts={list(self.counts)}")
        if self.root is not None:
            words.append(f"root={self.root}")
        if self.algorithm is not None:
            words.append(f"algorithm={self.algorithm!r}")
        if self.reproducible:
            words.append("reproducible")
        if self.pickle:
            words.append("pickle")
        return f"{self.kind.label}({', '.join(words)})"

    def _arrays(self) -> str:
        if len(self.leaves) == 1 and not self.leaves[0].path:
            return str(self.leaves[0])
        shown = [str(leaf) for leaf in self.leaves[:_SHOWN_LEAVES]]
        if len(self.leaves) > _SHOWN_LEAVES:
            shown.append(f"... {len(self.leaves)} leaves")
        return "{" + ", ".join(shown) + "}"

    def differs_only_in_site(self, other: Call) -> bool:
        """Tell whether the two calls are the same, made in different places."""
        return self._replace(site=None, compared=None) == other._replace(site=None, compared=None)

    def differs_only_in_size(self, other: Call) -> bool:
        """Tell whether the two calls would agree if their shapes did."""
        return self._without_sizes() == other._without_sizes()

    def _without_sizes(self) -> Call:
        leaves = tuple(leaf._replace(shape=()) for leaf in self.leaves)
        return self._replace(leaves=leaves, site=None, compared=None, counts=None)
