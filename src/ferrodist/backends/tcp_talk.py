# SPDX-License-Identifier: MIT OR Apache-2.0
"""TcpTalk: one call over TCP. A schedule is picked and walked, by native code or in Python.

Every piece that is sent carries the call's fingerprint, so whoever differs is found by whoever
hears from it. The group's keeper, its lowest rank, is told, asks all for their calls, and hands
everybody all of them: each makes the same verdict.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ferrodist import _native
from ferrodist.backends import verdict
from ferrodist.backends.base import Algorithm, Counts
from ferrodist.backends.outcome import Ending, Outcome
from ferrodist.backends.planner import walk_plan
from ferrodist.backends.process_talk import ProcessTalk
from ferrodist.backends.process_texts import Statement, pack_statement, unpack_statement
from ferrodist.backends.walk_plan import WalkPlan, lengths_of
from ferrodist.buffer import Buffer, DType
from ferrodist.call import Kind
from ferrodist.errors import CollectiveMismatch
from ferrodist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from ferrodist.backends.tcp import TcpBackend


_NO_MEMORY = "no memory"  # how native code begins to say so


class TcpTalk(ProcessTalk):
    """One call in progress."""

    backend: TcpBackend

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
        """Do one whole collective: pick the schedule, walk its table over every segment."""
        backend = self.backend
        self._num_runs += 1
        lengths = lengths_of(kind, backend.rank, backend.world_size, source, target, counts)
        sample = source or target
        dtype = sample.dtype if sample else DType.UINT8
        plan = backend.planner.plan(kind, op, root, dtype, lengths, algorithm, in_order)
        if algorithm is None and counts is None and kind is self.call.kind:
            self._keep_for_the_short_way(plan, dtype)
        self._walk(plan, source, target, dtype, in_place)

    def _walk(
        self,
        plan: WalkPlan,
        source: Buffer | None,
        target: Buffer | None,
        dtype: DType,
        in_place: bool,
        peers: Sequence[int] = (),
    ) -> None:
        """Walk a plan; ``peers`` are the group's ranks behind those of the plan."""
        ending = self._try_walk(plan, source, target, dtype, in_place, peers)
        if ending[0] != Outcome.DONE:
            raise self.failure(*ending)

    def _try_walk(
        self,
        plan: WalkPlan,
        source: Buffer | None,
        target: Buffer | None,
        dtype: DType,
        in_place: bool,
        peers: Sequence[int],
    ) -> Ending:
        """Walk a plan, and tell how that ended."""
        backend = self.backend
        if backend.config.walker == "python":
            return self._walk_in_python(plan, source, target, dtype, in_place, peers)
        if in_place and not plan.alias_safe and source is not None:
            in_place = False
            source = Buffer(memoryview(bytes(source.memory)), source.dtype, source.shape)
        return backend.group.walk(
            backend.native_plan(plan, dtype, peers),
            source.memory if source else None,
            target.memory if target else None,
            in_place,
            self.sequence,
            self._fingerprint,
            self.deadline.end,
            self._is_background,
            self._look,
        )

    def _walk_in_python(
        self,
        plan: WalkPlan,
        source: Buffer | None,
        target: Buffer | None,
        dtype: DType,
        in_place: bool,
        peers: Sequence[int],
    ) -> Ending:
        """Walk a plan with the reference walker, piece by piece."""
        ranks = peers or range(self.backend.world_size)

        def exchange(
            to: int, payload: memoryview | None, peer: int, expected_nbytes: int | None
        ) -> memoryview | None:
            arrived = None if expected_nbytes is None else memoryview(bytearray(expected_nbytes))
            ending = self._exchange(ranks[to], payload, ranks[peer], arrived)
            if ending[0] != Outcome.DONE:
                raise _WalkEnded(ending)
            return arrived

        group = self.backend.group
        outcome = group.enter(self.call.kind, self.sequence, self._fingerprint)
        if outcome != Outcome.DONE:
            return outcome, -1, None
        try:
            walk_plan(plan, source, target, dtype, in_place, self.backend.config, exchange)
        except _WalkEnded as ended:
            return ended.ending
        finally:
            group.exit()
        return Outcome.DONE, -1, None

    def _exchange(
        self, to: int, payload: memoryview | None, peer: int, arrived: memoryview | None
    ) -> Ending:
        """Send and receive one piece at once; either may lack."""
        return self.backend.group.exchange(
            self.call.kind,
            to,
            payload,
            peer,
            arrived,
            self.sequence,
            self._fingerprint,
            self.deadline.end,
            self._is_background,
            self._look,
        )

    def _keep_for_the_short_way(self, plan: WalkPlan, dtype: DType) -> None:
        """Let native code do the next call like this one, if it is of one array, by itself."""
        call, is_tree = self.call, len(self.call.leaves) > 1
        if is_tree or not self.backend.has_short_way or (call.leaves and call.leaves[0].path):
            return
        leaf = call.leaves[0] if call.leaves else None
        self.backend.group.keep_plan(
            call.kind,
            leaf.dtype if leaf else -1,
            -1 if call.op is None else call.op,
            -1 if call.root is None else call.root,
            math.prod(leaf.shape) * leaf.dtype.itemsize if leaf else 0,
            call.reproducible,
            plan.alias_safe,
            self.backend.native_plan(plan, dtype),
        )

    def _check(self, ending: Ending) -> None:
        if ending[0] != Outcome.DONE:
            raise self.failure(*ending)

    def _due(self, outcome: int, culprit: int) -> verdict.Verdict:
        if outcome == Outcome.LATE:
            missing = self.backend.group.missing()
            return self.backend.expiry(self.call, self.sequence, self.deadline, missing)
        flaw = self.backend.group.flaw_of(culprit) if outcome == Outcome.CORRUPT else ""
        if flaw.startswith(_NO_MEMORY):  # this rank's own trouble, not its peer's
            reason = f"{flaw} from rank {culprit} (in {self.call.kind.label} #{self.sequence})"
            return verdict.abort(self.backend.rank, reason)
        return super()._due(outcome, culprit)

    def disagree(self, error: type[CollectiveMismatch], text: str) -> CollectiveMismatch:
        """Report the difference; all ranks get the same verdict."""
        return self._settle((error, text))

    def _hear_all(self, mine: Statement) -> list[Statement]:
        """Tell the group's keeper what this rank says, and hear from it what all say."""
        outcome, culprit, error, statements = self.backend.group.hear_all(
            self.sequence,
            pack_statement(mine),
            self.deadline.end,
            self._is_background,
            self._look,
        )
        self._check((outcome, culprit, error))
        return [unpack_statement(statement) for statement in statements]


class _WalkEnded(Exception):
    """Ends a walk in Python."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending)
        self.ending = ending


def make_native(plan: WalkPlan, dtype: DType, peers: Sequence[int] = ()) -> _native.Plan:
    """Hand a plan to native code; ``peers`` are the group's ranks behind those of the plan."""
    ranges = array("Q")
    for layout in plan.layouts:
        for span in layout.ranges:
            ranges.extend(span)
    return _native.Plan(
        plan.table.to_ints(),
        ranges,
        array("Q", [layout.scratch_nbytes for layout in plan.layouts]),
        dtype,
        plan.op,
        plan.divisor,
        plan.is_wide,
        plan.divides_at_end,
        list(peers),
    )
