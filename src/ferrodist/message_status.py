# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a receive may be told instead of a rank or a tag, and what it tells of a message."""

from __future__ import annotations

import enum
import math
from typing import Any, Final, NamedTuple

from ferrodist.buffer import DTYPES_BY_LABEL


class Special(enum.Enum):
    """Stands for a rank or a tag. No number does: ``rank - 1`` must not be "any" by accident."""

    ANY_SOURCE = enum.auto()
    ANY_TAG = enum.auto()
    PROC_NULL = enum.auto()

    def __repr__(self) -> str:
        return f"ferrodist.{self.name}"


ANY_SOURCE: Final = Special.ANY_SOURCE
ANY_TAG: Final = Special.ANY_TAG
PROC_NULL: Final = Special.PROC_NULL

_OBJECT = "object"


class Status(NamedTuple):
    """What is known of a message: whose it is, its tag, and what it holds.

    ``dtype`` is a name such as ``float32``, or ``object`` for what ``recv_object`` takes, whose
    shape is ``()``. Of ``PROC_NULL`` there is no message: then that is the source, and ``ANY_TAG``
    the tag.
    """

    source: int
    tag: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_object(self) -> bool:
        """Whether it was sent by ``send_object``."""
        return self.dtype == _OBJECT

    @property
    def nbytes(self) -> int:
        """How many bytes its elements have; of an object that is not known here."""
        return 0 if self.is_object else math.prod(self.shape) * DTYPES_BY_LABEL[self.dtype].itemsize


_NOBODY: tuple[Any, Any] = (PROC_NULL, ANY_TAG)
NO_MESSAGE = Status(*_NOBODY, "uint8", (0,))
