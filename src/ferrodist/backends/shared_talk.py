# SPDX-License-Identifier: MIT OR Apache-2.0
"""SharedTalk: one call in shared memory.

A difference is seen by every rank itself, in the first round of a collective: fingerprints of all
are compared there. Then all exchange their calls, again in rounds. An algorithm that the caller
names is walked by messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ferrodist import _native
from ferrodist.backends.base import Algorithm, Counts
from ferrodist.backends.outcome import Ending, Outcome
from ferrodist.backends.planner import walk_plan
from ferrodist.backends.process_talk import ProcessTalk
from ferrodist.backends.process_texts import Statement, pack_statement, unpack_statement
from ferrodist.backends.walk_plan import lengths_of
from ferrodist.buffer import Buffer, DType
from ferrodist.call import MAX_TAG, Kind
from ferrodist.errors import CollectiveMismatch
from ferrodist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from ferrodist.backends.shared_memory import SharedMemoryBackend

_OBJECTION = _native.hash_text("objection")
_TABLE = _native.hash_text("table of calls")
_64_BITS = (1 << 64) - 1
_WALK_TAG = MAX_TAG + 1  # no user's


class SharedTalk(ProcessTalk):
    """One call in progress, in native rounds."""

    backend: SharedMemoryBackend

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

    # -- when ranks differ ----------------------------------------------------------------------

    def disagree(self, error: type[CollectiveMismatch], text: str) -> CollectiveMismatch:
        """Stop the others in their next round with a difference; all get the same verdict."""
        ending = self._native(_OBJECTION, Kind.BARRIER, None, None)
        if ending[0] in (Outcome.DONE, Outcome.MISMATCH):  # done: all ranks object
            return self._settle((error, text))
        raise self.failure(*ending)

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
