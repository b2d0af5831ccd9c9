# SPDX-License-Identifier: MIT OR Apache-2.0
"""Failures: which rank failed first, and what is said of it and of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ferrodist.launch.output.last_words import is_at_end, traceback_in
from ferrodist.rendezvous.ends import LastWords, how_ended


class Failure(NamedTuple):
    """A rank that did not end well: when, how, and what it said before."""

    rank: int
    pid: int
    code: int  # as of Popen: minus the signal that killed it
    when: float
    words: LastWords | None

    @property
    def exit_code(self) -> int:
        """What a shell would report."""
        return 128 - self.code if self.code < 0 else self.code

    @property
    def is_consequence(self) -> bool:
        """True if it has said that it fails because another rank did."""
        return self.words is not None and self.words.is_consequence

    @property
    def order(self) -> tuple[bool, float]:
        """Sort causes before consequences, and then by time.

        A rank that raised has said so before its process was gone, and others may have gone
        sooner, because of it.
        """
        return self.is_consequence, self.when if self.words is None else self.words.when

    def traceback_in(self, output: str) -> str:
        """Find the traceback that it ended with; '' if its output ends with something else."""
        trace = traceback_in(output)
        is_its_own = trace != "" and is_at_end(trace, output)
        if self.code < 0:  # a signal: what it raised before is not what ended it
            is_its_own = is_its_own and trace.startswith("Fatal Python error")
        return trace if is_its_own else ""

    def __str__(self) -> str:
        how = how_ended(self.code)
        words = f" ({_first_line(self.words.words)})" if self.words is not None else ""
        return f"rank {self.rank} (pid {self.pid}) {how}{words}"


def first_of(failures: Sequence[Failure]) -> Failure:
    """Return the failure that the others follow from, as far as one can tell."""
    return min(failures, key=lambda failure: failure.order)


def _first_line(words: str) -> str:
    return words.splitlines()[0] if words else ""
