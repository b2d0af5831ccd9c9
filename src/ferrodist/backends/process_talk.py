# SPDX-License-Identifier: MIT OR Apache-2.0
"""ProcessTalk: one call among processes, and what becomes of it when it cannot succeed.

When ranks differ, each hears what all the others have called and makes the same verdict of it.
Losses, aborts and deadlines are seen by whoever waits; the first one's verdict, told to all, is
everybody's. How a collective is done, and how ranks hear each other, is for subclasses.
"""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ferrodist.backends import verdict
from ferrodist.backends.base import Algorithm, Counts
from ferrodist.backends.outcome import Outcome
from ferrodist.backends.process_texts import Statement
from ferrodist.backends.progress import ProgressThread
from ferrodist.backends.verdict import Verdict, died
from ferrodist.buffer import Buffer
from ferrodist.call import Call, Kind
from ferrodist.deadline import Deadline
from ferrodist.errors import CollectiveMismatch
from ferrodist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from ferrodist.backends.process_backend import ProcessBackend

logger = logging.getLogger("ferrodist")

_REPORT_AFTER = 0.1  # seconds of waiting after which the others can read what this rank waits in

Found = tuple[type[CollectiveMismatch], str]


class Wait:
    """What a wait does besides waiting: it tells the log, and the other ranks, what it is in."""

    def __init__(self, backend: ProcessBackend, where: str) -> None:
        self.backend = backend
        self.where = where
        self.has_reported = False
        self._started = time.monotonic()
        self._notice = backend.config.notice
        self._next_notice = self._started + self._notice

    def look(self) -> None:
        """Report a wait that lasts; native code asks for this about every 50 ms."""
        now = time.monotonic()
        if not self.has_reported and now - self._started > _REPORT_AFTER:
            self.has_reported = True
            self.backend.world.report(f"is in {self.where}{self.backend.group_name}")
        if now >= self._next_notice:
            self._notice *= 2
            self._next_notice = now + self._notice
            missing = verdict.names_of_ranks(self.backend.group.missing())
            logger.warning(
                "rank %d: still waiting for %s in %s", self.backend.rank, missing, self.where
            )

    def end(self) -> None:
        """Take the report back."""
        if self.has_reported:
            self.backend.world.report("")


class ProcessTalk(abc.ABC):
    """One call in progress."""

    def __init__(
        self,
        backend: ProcessBackend,
        sequence: int,
        call: Call,
        deadline: Deadline,
        num_runs: int = 0,
    ) -> None:
        self.backend = backend
        self.sequence = sequence
        self.call = call
        self.deadline = deadline
        self._fingerprint = call.fingerprint()
        self._num_runs = num_runs  # collectives of this call so far
        self._is_background = isinstance(threading.current_thread(), ProgressThread)
        self._wait: Wait | None = None

    # -- what subclasses write ------------------------------------------------------------------

    @abc.abstractmethod
    def run(
        self,
        kind: Kind,
        source: Buffer | None,
        target: Buffer | None,
        *,
        op: ReduceOp | None = None,
        root: int = 0,
        counts: Counts | None = None,
        algorithm: Algorithm = None,
        in_order: bool = False,
        in_place: bool = False,
    ) -> None:
        """Do one whole collective; see ``Conversation.run``."""

    @abc.abstractmethod
    def disagree(self, error: type[CollectiveMismatch], text: str) -> CollectiveMismatch:
        """Stop the others with a difference the fingerprints leave out; all get one verdict."""

    @abc.abstractmethod
    def _hear_all(self, mine: Statement) -> Sequence[Statement]:
        """Tell all ranks what this one says, and hear what they say, in the order of ranks."""

    # -- looking round --------------------------------------------------------------------------

    def _look(self) -> None:
        if self._wait is None:
            where = f"{self.call.kind.label} #{self.sequence} at {self.call.site}"
            self._wait = Wait(self.backend, where)
        self._wait.look()

    def end(self) -> None:
        """End the call, well or not."""
        if self._wait is not None:
            self._wait.end()

    # -- when it fails --------------------------------------------------------------------------

    def failure(self, outcome: int, culprit: int, error: BaseException | None) -> BaseException:
        """Make the error that a native outcome means, and see that all ranks get the same."""
        backend = self.backend
        if outcome == Outcome.INTERRUPTED and error is not None:
            return error
        if outcome == Outcome.MISMATCH:
            return self._settle(None)
        if outcome in (Outcome.VERDICT, Outcome.GIVEN_UP):
            given = backend.verdict_of(self.sequence)
            assert given is not None
            is_missed = backend.rank in (given.facts.get("missing") or ())  # it came too late
            is_late = (outcome == Outcome.GIVEN_UP or is_missed) and self._num_runs <= 1
            return given.later(backend.rank) if is_late else given.now(backend.rank)
        return backend.give(self._due(outcome, culprit)).now(backend.rank)

    def _due(self, outcome: int, culprit: int) -> Verdict:
        if outcome == Outcome.LATE:
            missing = self.backend.group.missing() if culprit < 0 else [culprit]
            return self.backend.expiry(self.call, self.sequence, self.deadline, missing)
        if outcome == Outcome.LOST:
            how = self.backend.departure_of(culprit)
            return verdict.loss(self.call, self.sequence, culprit, how)
        if outcome == Outcome.SILENT:
            return verdict.loss(self.call, self.sequence, culprit, died(self.backend.silence))
        what = self.backend.damage_of(culprit, "what it posted")
        return verdict.corruption(self.call, self.sequence, culprit, what)

    def _settle(self, objection: Found | None) -> CollectiveMismatch:
        """Exchange what all ranks have called, and make of it the verdict that all make."""
        given = self._verdict_from(self._hear_all(Statement(self.call, objection)))
        self.backend.settled = self.sequence
        made = given.now(self.backend.rank)
        assert isinstance(made, CollectiveMismatch)
        return made

    def _verdict_from(self, statements: Sequence[Statement]) -> Verdict:
        """Make the verdict of what all ranks say: the first objection, else who called what."""
        calls = [statement.call for statement in statements]
        found = next((s.objection for s in statements if s.objection is not None), None)
        given = (
            verdict.disagreement(self.sequence, calls)
            if found is None
            else verdict.objection(self.sequence, calls, *found)
        )
        return given._replace(text=given.text + self.backend.group_name)
