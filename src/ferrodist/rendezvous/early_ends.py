# SPDX-License-Identifier: MIT OR Apache-2.0
"""EarlyEnds: ranks that ended before they joined, so that nobody waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.start_errors import ended_early

_PAUSE = 0.1  # seconds between two looks


class EarlyEnds:
    """Looks now and then what the launcher has noted; without such notes it sees nothing."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._next_look = 0.0

    def look(self, ranks: Iterable[int]) -> None:
        """Raise RendezvousError if one of these ranks has ended, unless the last look was now."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _PAUSE
            self.look_at_once(ranks)

    def look_at_once(self, ranks: Iterable[int]) -> None:
        """Raise RendezvousError if one of these ranks has ended; it names all that have."""
        ends = self._job.ends
        if ends is None:
            return
        ended = {rank: how for rank in ranks if (how := ends.how(rank)) is not None}
        if ended:
            raise ended_early(self._job, ended)
