# SPDX-License-Identifier: MIT OR Apache-2.0
"""Deaths: why the process of a rank is gone, for a rank that could not say it itself."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ferrodist.backends.verdict import Departure, died, words_of
from ferrodist.errors import is_consequence
from ferrodist.rendezvous import Job, Member
from ferrodist.rendezvous.ends import how_ended
from ferrodist.rendezvous.watch import try_exit_code

_PATIENCE = 0.3  # until a launcher has noted a death that we see at the same moment
_PAUSE = 0.005


class Deaths:
    """Asks the kernel, and the launcher's notes, how the processes of a job have ended."""

    def __init__(self, job: Job, members: Sequence[Member]) -> None:
        self._job = job
        self._members = members

    def departure_of(self, rank: int) -> Departure:
        """Tell how a rank of the world left whose process is gone."""
        how = self._await_how(rank, _PATIENCE if self._job.ends is not None else 0.0)
        return died(how or "died (its process is gone)")

    def _await_how(self, rank: int, patience: float = _PATIENCE) -> str | None:
        """Return how a process ended, once that can be known; None if it cannot."""
        end = time.monotonic() + patience
        while (how := self._try_how(rank)) is None and time.monotonic() < end:
            time.sleep(_PAUSE)
        return how

    def _try_how(self, rank: int) -> str | None:
        member = self._members[rank]
        code = try_exit_code(member.pid, member.watch)
        if code is not None:
            return how_ended(code)
        return None if self._job.ends is None else self._job.ends.how(rank)

    def say(self, error: BaseException) -> None:
        """Tell the launcher that this rank's program has raised."""
        rank, ends = self._job.rank, self._job.ends
        if ends is not None:
            ends.say(rank, words_of(error), is_consequence=is_consequence(error, rank))
