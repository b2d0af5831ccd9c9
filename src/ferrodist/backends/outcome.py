# SPDX-License-Identifier: MIT OR Apache-2.0
"""How native calls end."""

from __future__ import annotations

import enum

Ending = tuple[int, int, BaseException | None]
"""An Outcome, the rank it is due to (or -1), and the error that ended a wait (or None)."""


class Outcome(enum.IntEnum):
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
