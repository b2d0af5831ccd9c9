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
    """Source, tag, dtype and shape of a message, as returned by ``probe``.

    ``dtype`` is a name such as ``"float32"``. For a message of ``send_object`` it is ``"object"``,
    and the shape is ``(n,)`` where n is the number of bytes of the encoded object. A receive from
    ``PROC_NULL`` has source ``PROC_NULL`` and tag ``ANY_TAG``.
    """

    source: int
    tag: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_object(self) -> bool:
        """Whether the message was sent with ``send_object``."""
        return self.dtype == _OBJECT

    @property
    def nbytes(self) -> int:
        """Size of the array, or of the encoded object, in bytes."""
        itemsize = 1 if self.is_object else DTYPES_BY_LABEL[self.dtype].itemsize
        return math.prod(self.shape) * itemsize


_NOBODY: tuple[Any, Any] = (PROC_NULL, ANY_TAG)
NO_MESSAGE = Status(*_NOBODY, "uint8", (0,))
