# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reports: what a launcher on another host tells the one that started it, within its own stdout.

ssh has no third stream. A report begins with a mark that no program writes, may stand in the middle
of a line, and is taken out of the output by whoever reads it.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

_MOST_NBYTES = 4096
_MOST_WORDS = 500


class Begun(NamedTuple):
    """The launcher is there, and is about to start its ranks."""


class Failed(NamedTuple):
    """A rank has failed; what a shell would report, and whether it was because of another rank."""

    rank: int
    exit_code: int
    is_consequence: bool
    words: str


Report = Begun | Failed


def to_bytes(job: str, report: Report) -> bytes:
    """Write a report of a launcher of this job."""
    facts: dict[str, Any] = report._asdict()
    if "words" in facts:
        facts["words"] = facts["words"][:_MOST_WORDS]
    return _mark(job) + json.dumps(facts).encode() + b"\n"


def _mark(job: str) -> bytes:
    return b"\x1eferrodist " + job.encode(errors="replace") + b" "


def _parse(data: bytes) -> Report:
    facts = json.loads(data)
    return Failed(**facts) if facts else Begun()


class ReportReader:
    """Takes the reports of a job out of a stream of bytes."""

    def __init__(self, job: str) -> None:
        self._mark = _mark(job)
        self._rest = b""

    def split(self, data: bytes) -> tuple[bytes, list[Report]]:
        """Return the output that has come, and the reports that stood in it."""
        before, *parts = (self._rest + data).split(self._mark)
        output, reports = [before], []
        self._rest = b""
        for number, part in enumerate(parts):
            line, newline, after = part.partition(b"\n")
            is_unfinished = not newline and number == len(parts) - 1
            if is_unfinished and len(line) <= _MOST_NBYTES:
                self._rest = self._mark + line
                break
            try:
                reports.append(_parse(line))
                output.append(after)
            except (ValueError, TypeError, AttributeError):  # not one of ours
                output.append(self._mark + part)
        if not self._rest:
            output[-1], self._rest = self._cut(output[-1])
        return b"".join(output), reports

    def end(self) -> bytes:
        """Return what has come of a mark that was begun, and is none."""
        rest, self._rest = self._rest, b""
        return rest

    def _cut(self, data: bytes) -> tuple[bytes, bytes]:
        """Cut off what may be the beginning of a mark."""
        start = data.rfind(self._mark[:1])
        if start >= 0 and self._mark.startswith(data[start:]):
            return data[:start], data[start:]
        return data, b""
