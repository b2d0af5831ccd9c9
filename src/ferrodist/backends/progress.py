# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a wait that lasts does besides waiting: a line in the log, and what other ranks can read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ferrodist.backends import failures
from ferrodist.config import DefaultTimeout

if TYPE_CHECKING:
    from ferrodist.backends.process_backend import ProcessBackend

logger = logging.getLogger("ferrodist")


_REPORT_AFTER = 0.1  # seconds of waiting after which the others can read what this rank waits in
_MINUTE = 60.0  # seconds between two log lines in the end
_SHOWN_RANKS = 3  # of those that are waited for, in one line


class LogTimes:
    """When a wait that lasts is logged: ever more rarely at first, then every minute."""

    def __init__(self, log_wait_after: float, timeout: float | None) -> None:
        self.start = time.monotonic()
        self._first = log_wait_after
        self._minute = float(timeout) if isinstance(timeout, DefaultTimeout) else _MINUTE
        self.next = self.start + self._first

    def is_due(self, now: float) -> bool:
        """Tell whether it is time for a line; the next one is due later."""
        if now < self.next:
            return False
        waited = now - self.start
        next_minute = (waited // self._minute + 1) * self._minute
        self.next = self.start + min(2 * waited + self._first, next_minute)
        return True


def log_wait(
    rank: int, where: str, peers: Sequence[int], last_seen: Callable[[int], str], waited: float
) -> None:
    """Log a long wait: which ranks it waits for, where, and what they did last."""
    if not peers:
        return  # they have come meanwhile
    names = failures.names_of_ranks(peers)
    seen = "; ".join(f"rank {peer} {last_seen(peer)}" for peer in peers[:_SHOWN_RANKS])
    text = "rank %d: still waiting for %s in %s after %.0f s (%s)"
    logger.warning(text, rank, names, where, waited, seen)


class Wait:
    """What a wait does besides waiting: it tells the log, and the other ranks, what it is in.

    ``peers`` lists those that are waited for; without it they are the ones missing in the call.
    """

    def __init__(
        self, backend: ProcessBackend, where: str, peers: Callable[[], list[int]] | None = None
    ) -> None:
        self.backend = backend
        self.where = where
        self._peers = peers
        self._has_reported = False
        self._log_times = LogTimes(backend.config.log_wait_after, backend.timeout)
        self.started = self._log_times.start

    def poll(self) -> None:
        """Report a wait that lasts; native code asks for this about every 50 ms."""
        now = time.monotonic()
        if not self._has_reported and now - self.started > _REPORT_AFTER:
            self._has_reported = True
            self.backend.world.report(f"is in {self.where}{self.backend.group_name}")
        if self._log_times.is_due(now):
            missing = self.backend.group.missing()  # over TCP this asks all ranks what they do
            peers = missing if self._peers is None else self._peers()
            waited, last_seen = now - self.started, self.backend.last_seen
            log_wait(self.backend.rank, self.where, peers, last_seen, waited)

    def end(self) -> None:
        if self._has_reported:
            self.backend.world.report("")
