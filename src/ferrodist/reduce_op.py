# SPDX-License-Identifier: MIT OR Apache-2.0
"""ReduceOp: how contributions are combined."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ferrodist import _native
from ferrodist.errors import InvalidArgument


class ReduceOp(enum.IntEnum):
    """How the arrays of all ranks are combined, element by element.

    LAND, LOR and LXOR treat nonzero numbers as true and return 0 or 1. MINLOC and MAXLOC reduce a
    pair ``(values, indices)`` to the smallest (largest) values and their indices; NaN wins, and of
    equal values the one with the lower index. ``custom`` turns a function into an operation.
    """

    # The values are the codes the native kernels use.
    SUM = 0
    MEAN = 1
    PROD = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    LAND = 8
    LOR = 9
    LXOR = 10
    MINLOC = 11
    MAXLOC = 12

    @property
    def label(self) -> str:
        """How it is shown."""
        return self.name.lower()

    @property
    def code(self) -> int:
        """What stands for it in fingerprints."""
        return self.value

    @property
    def is_logical(self) -> bool:
        """True where numbers count as true or false."""
        return self in (ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR)

    @property
    def takes_pairs(self) -> bool:
        """True where values are reduced together with their indices."""
        return self in (ReduceOp.MINLOC, ReduceOp.MAXLOC)

    @classmethod
    def parse(cls, op: ReduceOp | CustomOp | str | None) -> ReduceOp | CustomOp:
        """Return the operation given by itself or by name, in upper or lower case."""
        if isinstance(op, (cls, CustomOp)):
            return op
        if isinstance(op, str) and op.upper() in BY_NAME:
            return BY_NAME[op.upper()]
        known = ", ".join(name.lower() for name in cls.__members__)
        advice = "; for a function: ReduceOp.custom(fn)" if callable(op) else ""
        raise InvalidArgument(f"unknown reduce op {op!r}; known: {known}{advice}", got=op)

    @staticmethod
    def custom(fn: Callable[[Any, Any], Any], *, name: str | None = None) -> CustomOp:
        """Turn a function of two arrays into a reduce operation.

        ``fn(a, b)`` gets two arrays of the shape of ``x``, ``a`` from lower ranks than ``b``, and
        returns an array of the same dtype and shape. It need not be commutative: one rank applies
        it, in rank order. It must not communicate. All ranks must use the same ``name``, by default
        the function's module and name.

        Example:
            >>> import numpy as np
            >>> from ferrodist import ReduceOp, allreduce
            >>> from ferrodist.testing import run_ranks
            >>> product = ReduceOp.custom(np.matmul, name="matrix product")
            >>> def multiply(backend):
            ...     return allreduce(np.array([[1, backend.rank], [0, 1]]), backend, product)
            >>> run_ranks(4, multiply)[0]
            array([[1, 6],
                   [0, 1]])
        """
        if not callable(fn):
            raise InvalidArgument(f"custom: fn must be a function of two arrays, got {fn!r}")
        if name is None:
            own = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None)
            if own is None:
                raise InvalidArgument(
                    f"custom: {fn!r} has no name for ranks to compare; pass name="
                )
            name = f"{getattr(fn, '__module__', None) or ''}.{own}".lstrip(".")
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"custom: name must be a text, got {name!r}", got=name)
        return CustomOp(name, fn)


@dataclass(frozen=True, slots=True)
class CustomOp:
    """What ``ReduceOp.custom`` makes; of another rank's, only the name is known."""

    name: str
    fn: Callable[[Any, Any], Any] | None = field(default=None, compare=False)

    is_logical = False
    takes_pairs = False

    @property
    def label(self) -> str:
        """How it is shown."""
        return f"custom {self.name}"

    @property
    def code(self) -> int:
        """What stands for it in fingerprints."""
        return _native.hash_text(self.label)


_NAMES = {
    **ReduceOp.__members__,
    "AVG": ReduceOp.MEAN,  # as in torch
    "AVERAGE": ReduceOp.MEAN,  # as in Horovod
    "PRODUCT": ReduceOp.PROD,  # as in both
}
BY_NAME = {spelling: op for name, op in _NAMES.items() for spelling in (name, name.lower())}
"""The members by their names, and by what others call them, in upper and in lower case."""
