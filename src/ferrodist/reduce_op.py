# SPDX-License-Identifier: MIT OR Apache-2.0
"""ReduceOp: how contributions are combined."""

from __future__ import annotations

import enum

from ferrodist.errors import InvalidArgument


class ReduceOp(enum.IntEnum):
    """How the contributions of the ranks are combined, element by element.

    The values are the codes the native kernels use.
    """

    SUM = 0
    MEAN = 1
    PROD = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7

    @classmethod
    def parse(cls, op: ReduceOp | str | None) -> ReduceOp:
        """Accept a member or its name, in either case."""
        if isinstance(op, cls):
            return op
        if isinstance(op, str) and op.upper() in BY_NAME:
            return BY_NAME[op.upper()]
        known = ", ".join(name.lower() for name in cls.__members__)
        raise InvalidArgument(f"unknown reduce op {op!r}; known: {known}", got=op)


_NAMES = {
    **ReduceOp.__members__,
    "AVG": ReduceOp.MEAN,  # as in torch
    "AVERAGE": ReduceOp.MEAN,  # as in Horovod
    "PRODUCT": ReduceOp.PROD,  # as in both
}
BY_NAME = {spelling: op for name, op in _NAMES.items() for spelling in (name, name.lower())}
"""The members by their names, and by what others call them, in upper and in lower case."""
