# SPDX-License-Identifier: MIT OR Apache-2.0
"""Status: how a native call ended."""

from __future__ import annotations

import enum
from typing import NamedTuple


class StatusCode(enum.IntEnum):
    """How a native call ended. The codes are those of native/shm/wait.hpp."""

    DONE = 0
    MISMATCH = 1
    VERDICT = 2
    LATE = 3
    LOST = 4
    SILENT = 5
    INTERRUPTED = 6
    CORRUPT = 7
    UNEXPECTED = 8
    GIVEN_UP = 9
    NO_MEMORY = 10


class Status(NamedTuple):
    """How a native call ended, the rank it is due to (or -1), the error that ended a wait."""

    code: int
    failed_rank: int = -1
    error: BaseException | None = None


NativeStatus = tuple[int, int, BaseException | None]
"""A Status as native code returns it."""
