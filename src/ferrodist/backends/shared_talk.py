# SPDX-License-Identifier: MIT OR Apache-2.0
"""SharedTalk: one call in shared memory, and what becomes of it when it cannot succeed.

A difference is seen by every rank itself, in the first round of a collective: fingerprints of all
are compared there. Then all exchange their calls, and each makes the same verdict. Losses, aborts
and deadlines are seen by whoever waits; the first one's verdict, written where all can read it, is
everybody's.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from ferrodist import _native
from ferrodist.backends import verdict
from ferrodist.backends.base import Algorithm, Counts
from ferrodist.backends.planner import walk_plan
from ferrodist.backends.progress import ProgressThread
from ferrodist.backends.shared_outcome import Ending, Outcome
from ferrodist.backends.shared_texts import Statement, pack_statement, unpack_statement
from ferrodist.backends.verdict import Verdict, died
from ferrodist.backends.walk_plan import lengths_of
from ferrodist.buffer import Buffer, DType
from ferrodist.call import MAX_TAG, Call, Kind
from ferrodist.deadline import Deadline
from ferrodist.errors import CollectiveMismatch
from ferrodist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from ferrodist.backends.shared_memory import SharedMemoryBackend

logger = logging.getLogger("ferrodist")

_REPORT_AFTER = 0.1  # seconds of waiting after which the others can read what this rank waits in
_OBJECTION = _native.hash_text("objection")
_TABLE = _native.hash_text("table of calls")
_64_BITS = (1 << 64) - 1
_WALK_TAG = MAX_TAG + 1  # no user's

Found = tuple[type[CollectiveMismatch], str]


class Wait:
    """What a wait does besides waiting: it tells the log, and the other ranks, what it is in."""

    def __init__(self, backend: SharedMemoryBackend, where: str) -> None:
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


class SharedTalk:
    """One call in progress."""

    def __init__(
        self,
        backend: SharedMemoryBackend,
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

    # -- doing it -------------------------------------------------------------------------------

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
        """Do one whole collective: in native code, or by walking the algorithm that is named."""
        if in_place and kind is Kind.ALL_TO_ALL and counts is not None and source is not None:
            in_place = False  # what comes may lie where something still has to be read
            source = Buffer(memoryview(bytes(source.memory)), source.dtype, source.shape)
        # The runs of one call are told apart; the first one has the fingerprint of the call.
        fingerprint = (self._fingerprint + self._num_runs) & _64_BITS
        self._num_runs += 1
        if algorithm is None:
            self._collective(
                fingerprint,
                kind,
                source,
                target,
                op=op,
                root=root,
                counts=counts,
                in_place=in_place,
            )
            return
        self._collective(fingerprint, Kind.BARRIER, None, None)
        self._walk(kind, source, target, op, root, counts, algorithm, in_place)

    def _walk(
        self,
        kind: Kind,
        source: Buffer | None,
        target: Buffer | None,
        op: ReduceOp | None,
        root: int,
        counts: Counts | None,
        algorithm: Algorithm,
        in_place: bool,
    ) -> None:
        """Do what a schedule says, by messages: slower than native code, as its users know."""
        backend = self.backend
        lengths = lengths_of(kind, backend.rank, backend.world_size, source, target, counts)
        sample = source or target
        dtype = sample.dtype if sample else DType.UINT8
        plan = backend.planner.plan(kind, op, root, dtype, lengths, algorithm, in_order=False)
        walk_plan(plan, source, target, dtype, in_place, backend.config, self._exchange)

    def _exchange(
        self, to: int, payload: memoryview | None, peer: int, expected_nbytes: int | None
    ) -> memoryview | None:
        """Send and receive one message of a schedule at once; either may lack."""
        group = self.backend.group
        letter = None if payload is None else group.post(to, _WALK_TAG, b"", payload)
        try:
            arrived = None
            if expected_nbytes is not None:
                arrived = self._receive(peer, expected_nbytes, letter)
            if letter is not None:
                end, in_background = self.deadline.end, self._is_background
                ending = group.settle(letter, end, False, in_background, self._look_in_walk)
                if ending[0] != Outcome.DONE:
                    raise self.failure(ending[0], to, ending[2])
        except BaseException:
            if letter is not None and not group.take_back(letter):
                group.abandon(letter)
            raise
        return arrived

    def _receive(self, peer: int, nbytes: int, meanwhile: _native.Letter | None) -> memoryview:
        arrived = memoryview(bytearray(nbytes))
        outcome, _, error, _ = self.backend.group.receive(
            peer,
            _WALK_TAG,
            b"",
            arrived,
            self.deadline.end,
            self._is_background,
            self._look_in_walk,
            meanwhile,
        )
        if outcome != Outcome.DONE:
            raise self.failure(outcome, peer, error)
        return arrived

    def _look_in_walk(self) -> None:
        """Look round in a message of a schedule; only here a verdict ends a wait for a message."""
        self._look()
        given = self.backend.verdict_of(self.sequence)
        if given is not None:
            raise given.now(self.backend.rank)

    def _collective(self, fingerprint: int, kind: Kind, *buffers: Any, **options: Any) -> None:
        ending = self._native(fingerprint, kind, *buffers, **options)
        if ending[0] != Outcome.DONE:
            raise self.failure(*ending)

    def _native(
        self,
        fingerprint: int,
        kind: Kind,
        source: Buffer | None,
        target: Buffer | None,
        *,
        op: ReduceOp | None = None,
        root: int = 0,
        counts: Counts | None = None,
        in_place: bool = False,
    ) -> Ending:
        """Do a collective in native code; return how it ended, because of whom, with what error."""
        sample = source or target
        return self.backend.group.run(
            kind,
            sample.dtype if sample else DType.UINT8,
            ReduceOp.SUM if op is None else op,
            root,
            source.memory if source else None,
            target.memory if target else None,
            _count(kind, source, target, self.backend.world_size),
            None if counts is None else _flat(counts),
            in_place,
            self.sequence,
            fingerprint,
            self.deadline.end,
            self._is_background,
            self._look,
        )

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
            is_late = outcome == Outcome.GIVEN_UP and self._num_runs <= 1
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
        what = "what it posted does not lie in its memory"
        return verdict.corruption(self.call, self.sequence, culprit, what)

    def disagree(self, error: type[CollectiveMismatch], text: str) -> CollectiveMismatch:
        """Stop the others in their next round with a difference; all get the same verdict."""
        ending = self._native(_OBJECTION, Kind.BARRIER, None, None)
        if ending[0] in (Outcome.DONE, Outcome.MISMATCH):  # done: all ranks object
            return self._settle((error, text))
        raise self.failure(*ending)

    def _settle(self, objection: Found | None) -> CollectiveMismatch:
        """Exchange what all ranks have called, and make of it the verdict that all make."""
        statements = self._hear_all(Statement(self.call, objection))
        calls = [statement.call for statement in statements]
        found = next((s.objection for s in statements if s.objection is not None), None)
        given = (
            verdict.disagreement(self.sequence, calls)
            if found is None
            else verdict.objection(self.sequence, calls, *found)
        )
        self.backend.settled = self.sequence
        given = given._replace(text=given.text + self.backend.group_name)
        made = given.now(self.backend.rank)
        assert isinstance(made, CollectiveMismatch)
        return made

    def _hear_all(self, mine: Statement) -> list[Statement]:
        """Tell all ranks what this one says, and hear what they say."""
        data = np.frombuffer(pack_statement(mine), np.uint8)
        sizes = np.empty(self.backend.world_size, np.int64)
        self._collective(_TABLE, Kind.ALL_GATHER, _buffer(np.array([len(data)])), _buffer(sizes))
        joined = np.empty(int(sizes.sum()), np.uint8)
        counts = sizes.tolist()
        self._collective(_TABLE, Kind.ALL_GATHER, _buffer(data), _buffer(joined), counts=counts)
        ends = np.cumsum(sizes).tolist()
        return [
            unpack_statement(joined[end - size : end].tobytes())
            for end, size in zip(ends, counts, strict=True)
        ]


def _count(kind: Kind, source: Buffer | None, target: Buffer | None, world: int) -> int:
    """Say how many elements the array has; where it is cut by rank, how many one block has."""
    if kind is Kind.BARRIER:
        return 0
    if kind in (Kind.SCATTER, Kind.REDUCE_SCATTER):
        assert target is not None
        return target.count
    assert source is not None or target is not None
    count = source.count if source is not None else target.count  # type: ignore[union-attr] # one is
    return count // world if kind is Kind.ALL_TO_ALL else count


def _flat(counts: Counts) -> list[int]:
    """Lay a table of counts out row by row."""
    return [number for row in counts for number in ([row] if isinstance(row, int) else row)]


def _buffer(array: np.ndarray[Any, Any]) -> Buffer:
    dtype = DType.UINT8 if array.dtype == np.uint8 else DType.INT64
    return Buffer(array.view(np.uint8).data, dtype, array.shape, array)
