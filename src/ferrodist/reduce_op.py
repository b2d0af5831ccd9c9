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
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """Accept a member or its name, in either case."""
        if isinstance(op, cls):
            return op
        if isinstance(op, str) and op.upper() in BY_NAME:
            return BY_NAME[op.upper()]
        known = ", ".join(name.lower() for name in cls.__members__)
        raise InvalidArgument(f"unknown reduce op {op!r}; known: {known}", got=op)


BY_NAME = {spelling: op for op in ReduceOp for spelling in (op.name, op.name.lower())}
"""The members by their names, in upper and in lower case."""
