# SPDX-License-Identifier: MIT OR Apache-2.0
"""Finding: one thing that a check has to say, how bad it is, and what to do about it."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Level(enum.StrEnum):
    """How bad a finding is: only an error keeps ranks from running."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


class Finding(NamedTuple):
    """What one check has found; ``advice`` is empty where nothing has to be done."""

    check: str
    level: Level
    what: str
    advice: str = ""


class Subject(NamedTuple):
    """What a check is about; makes its findings."""

    name: str

    def ok(self, what: str) -> Finding:
        """Say that something is as it should be."""
        return Finding(self.name, Level.OK, what)

    def note(self, what: str, advice: str = "") -> Finding:
        """Say something that is good to know."""
        return Finding(self.name, Level.NOTE, what, advice)

    def warning(self, what: str, advice: str) -> Finding:
        """Say that ranks run, but slower or less safely than they could, or only some of them."""
        return Finding(self.name, Level.WARNING, what, advice)

    def error(self, what: str, advice: str) -> Finding:
        """Say that ranks cannot run like this."""
        return Finding(self.name, Level.ERROR, what, advice)
