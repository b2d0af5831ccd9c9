# SPDX-License-Identifier: MIT OR Apache-2.0
"""HybridTalk: one call in two levels: inside hosts by shared memory, between them by TCP.

Every collective of a call begins with one round of the ranks of a host, which compares what they
have called, and goes on between hosts only when that was the same. A rank that meets a difference
between hosts still comes to the next round of its own host, with a fingerprint that nobody else
has: so the rounds stay in step, and all of the host hear of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ferrodist import _native
from ferrodist.backends import two_levels
from ferrodist.backends.base import Algorithm, Counts
from ferrodist.backends.outcome import Ending, Outcome
from ferrodist.backends.tcp_talk import TcpTalk
from ferrodist.backends.walk_plan import WalkPlan, lengths_of
from ferrodist.buffer import Buffer, DType
from ferrodist.call import Kind
from ferrodist.errors import CollectiveMismatch
from ferrodist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from ferrodist.backends.hybrid import HybridBackend

_OBJECTION = _native.hash_text("objection")
_64_BITS = (1 << 64) - 1


class HybridTalk(TcpTalk):
    """One call in progress."""

    backend: HybridBackend
    _num_rounds = 0  # of this host, in this call

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
        """Do one whole collective, in two levels where that is allowed and pays."""
        sample = source or target
        if algorithm is None and counts is None:
            work = two_levels.find(self.backend, kind, sample, op, in_order)
            if work is not None:
                self._num_runs += 1
                work(self, two_levels.Order(source, target, op, root, in_place))
                return
        self.inside(Kind.BARRIER)
        super().run(
            kind,
            source,
            target,
            op=op,
            root=root,
            counts=counts,
            algorithm=algorithm,
            in_order=in_order,
            in_place=in_place,
        )

    # -- the two levels -------------------------------------------------------------------------

    def inside(
        self,
        kind: Kind,
        source: Buffer | None = None,
        target: Buffer | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        root: int = 0,
        count: int = 0,
        in_place: bool = False,
    ) -> None:
        """Do a collective of the ranks of this host; ``root`` is a number among them."""
        self._num_rounds += 1
        fingerprint = (self._fingerprint + self._num_rounds) & _64_BITS
        self._check_inside(
            self._try_inside(fingerprint, kind, source, target, op, root, count, in_place)
        )

    def between(
        self,
        ranks: Sequence[int],
        kind: Kind,
        source: Buffer | None = None,
        target: Buffer | None = None,
        *,
        op: ReduceOp | None = None,
        root: int = 0,
        counts: Counts | None = None,
        in_place: bool = False,
    ) -> None:
        """Do a collective of ranks on different hosts; ``root`` is a place in their list."""
        index, size = ranks.index(self.backend.rank), len(ranks)
        lengths = lengths_of(kind, index, size, source, target, counts)
        sample = source or target
        dtype = sample.dtype if sample else DType.UINT8
        plan = self.backend.planner_of(ranks).plan(kind, op, root, dtype, lengths, None, False)
        self._walk(plan, source, target, dtype, in_place, ranks)

    def _walk(
        self,
        plan: WalkPlan,
        source: Buffer | None,
        target: Buffer | None,
        dtype: DType,
        in_place: bool,
        peers: Sequence[int] = (),
    ) -> None:
        """Walk a plan; where ranks differ, the others of this host hear it in their next round."""
        ending = self._try_walk(plan, source, target, dtype, in_place, peers)
        if ending[0] == Outcome.MISMATCH:
            self._stop_inside()
        if ending[0] != Outcome.DONE:
            raise self.failure(*ending)

    def _try_inside(
        self,
        fingerprint: int,
        kind: Kind,
        source: Buffer | None,
        target: Buffer | None,
        op: ReduceOp,
        root: int,
        count: int,
        in_place: bool,
    ) -> Ending:
        sample = source or target
        group = self.backend.group
        outcome = group.enter(self.call.kind, self.sequence, self._fingerprint)
        if outcome == Outcome.GIVEN_UP:
            return outcome, -1, None
        return self.backend.inside.group.run(
            kind,
            sample.dtype if sample else DType.UINT8,
            op,
            root,
            source.memory if source else None,
            target.memory if target else None,
            count,
            None,
            in_place,
            self.sequence,
            fingerprint,
            self.deadline.end,
            self._is_background,
            self._look_inside,
        )

    def _check_inside(self, ending: Ending) -> None:
        outcome, culprit, error = ending
        if outcome != Outcome.DONE:
            rank = self.backend.host_map.local[culprit] if culprit >= 0 else culprit
            raise self.failure(outcome, rank, error)

    def _look_inside(self) -> None:
        """Look round in a round of this host; only here what befell other hosts is heard."""
        self._look()
        outcome, culprit = self.backend.group.look_round()
        if outcome != Outcome.DONE:
            raise self.failure(outcome, culprit, None)

    # -- when ranks differ ----------------------------------------------------------------------

    def _stop_inside(self) -> None:
        """Come to the next round of this host with a difference, for there is one elsewhere."""
        ending = self._try_inside(
            _OBJECTION, Kind.BARRIER, None, None, ReduceOp.SUM, 0, 0, in_place=False
        )
        if ending[0] not in (Outcome.DONE, Outcome.MISMATCH):  # done: all of the host object
            self._check_inside(ending)

    def disagree(self, error: type[CollectiveMismatch], text: str) -> CollectiveMismatch:
        """Stop the others of this host in their next round; all ranks get the same verdict."""
        self._stop_inside()
        return super().disagree(error, text)

    def end(self) -> None:
        """End the call, well or not."""
        super().end()
        self.backend.group.exit()


def part(buffer: Buffer, begin: int, end: int) -> Buffer:
    """Show some elements of an array."""
    size = buffer.dtype.itemsize
    memory = buffer.memory[begin * size : end * size]
    return Buffer(memory, buffer.dtype, (end - begin,), buffer.owner)


def new_buffer(dtype: DType, count: int) -> Buffer:
    """Make room for elements."""
    memory = np.empty(count * dtype.itemsize, np.uint8)
    return Buffer(memory.data, dtype, (count,), memory)
