# SPDX-License-Identifier: MIT OR Apache-2.0
"""ScheduledBackend: runs any schedule on any transport. Simulated ranks and TCP are this class."""

from __future__ import annotations

from typing import TypeVar

from ferrodist.backends import verdict
from ferrodist.backends.base import Algorithm, Body, Counts
from ferrodist.backends.control import Control
from ferrodist.backends.messaging import MessagingBackend
from ferrodist.backends.messenger import Messenger
from ferrodist.backends.planner import Planner, walk_plan
from ferrodist.backends.walk_plan import lengths_of
from ferrodist.backends.watches import CallWatch
from ferrodist.buffer import Buffer, DType
from ferrodist.call import Call, Kind
from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    CollectiveMismatch,
)
from ferrodist.reduce_op import ReduceOp
from ferrodist.schedules import (
    LinkModel,
)
from ferrodist.transports.base import Expected, Transport
from ferrodist.transports.framing import Frame

T = TypeVar("T")

_QUEUE_LOOK = 0.05  # seconds between looks while a call waits for its turn


class ScheduledBackend(MessagingBackend):
    """Does collectives by walking schedules over a transport."""

    def __init__(
        self, transport: Transport, control: Control, rank: int, config: Config, model: LinkModel
    ) -> None:
        super().__init__(rank, len(control.members), config)
        self._transport = transport
        self._control = control
        self.planner = Planner(rank, len(control.members), config, model)
        self._messenger = Messenger(transport, control, rank)

    # -- collectives ----------------------------------------------------------------------------

    def converse(self, sequence: int, call: Call, body: Body[T], deadline: Deadline) -> T:
        """Enter the call, run the body, leave."""
        talk = _Talk(self, sequence, call, deadline)
        self._control.enter(self.rank, sequence, call, talk.fingerprint)
        try:
            return body(talk)
        finally:
            self._control.finish(self.rank)

    def look_while_queued(self, sequence: int, call: Call, deadline: Deadline) -> float:
        """Let the call that holds this one up run out of time when this one does."""
        control = self._control
        with control.switch.lock:
            if deadline.remaining() <= 0 and control.final is None:
                self._expire_in_queue(call, deadline)
                assert control.final is not None
                raise control.final.now(self.rank)
            control.refuse_if_final(self.rank)
        return min(deadline.remaining(), _QUEUE_LOOK)

    def _expire_in_queue(self, call: Call, deadline: Deadline) -> None:
        running = self._control.desks[self.rank]
        if running.is_inside:
            self._control.expire(running.sequence, running.call, deadline)
            return
        why = [f"on rank {self.rank} a callback of an earlier Work is still running"]
        held_up = self._turns.last_ended + 1  # where the other ranks wait for this one
        self._control.give(verdict.timeout(call, held_up, [self.rank], deadline, why))

    def is_settled(self, sequence: int) -> bool:
        """Tell whether there is a verdict on the call, or this rank has left."""
        with self._control.switch.lock:
            has_left = self._control.desks[self.rank].departure is not None
            return has_left or self._control.verdict_of(sequence) is not None

    def check_algorithm(
        self, kind: Kind, algorithm: Algorithm, root: int, reproducible: bool
    ) -> str | None:
        """Refuse an algorithm that is unknown, wrong, or out of order where order is asked for."""
        return self.planner.check(kind, algorithm, root, reproducible)

    def abort(self, reason: str = "abort() was called") -> None:
        """Give the group up, and every group split off it."""
        self.check_process()
        with self._control.switch.lock:
            self._control.abort(self.rank, reason)

    def _announce_closing(self) -> None:
        with self._control.switch.lock:
            self._control.desks[self.rank].is_closing = True
            self._control.switch.wake_all()

    def _holds_lock(self) -> bool:
        return self._control.switch.is_locked_here()


class _Talk:
    """One call in progress."""

    def __init__(
        self, backend: ScheduledBackend, sequence: int, call: Call, deadline: Deadline
    ) -> None:
        self.fingerprint = call.fingerprint()
        self._backend = backend
        self._control = backend._control
        self._transport = backend._transport
        self._members = backend._control.members
        self._sequence = sequence
        self._expected = Expected(backend._control.group, sequence, self.fingerprint)
        self._watch = CallWatch(backend._control, backend.rank, sequence, call, deadline)

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
        backend = self._backend
        lengths = lengths_of(kind, backend.rank, backend.world_size, source, target, counts)
        sample = source or target
        dtype = sample.dtype if sample else DType.UINT8
        plan = backend.planner.plan(kind, op, root, dtype, lengths, algorithm, in_order)
        walk_plan(plan, source, target, dtype, in_place, backend.config, self._exchange)

    def disagree(self, error: type[CollectiveMismatch], text: str) -> CollectiveMismatch:
        """Report the difference, then wait for the verdict that all ranks get."""
        control, watch = self._control, self._watch
        control.object_to(self._sequence, error, text)
        with control.switch.lock:
            while True:  # left by the error that look() raises
                try:
                    self._transport.sleep(self._transport.rank, watch)
                except CollectiveMismatch as given:
                    return given

    def _exchange(
        self, to: int, payload: memoryview | None, peer: int, expected_nbytes: int | None
    ) -> memoryview | None:
        """Send and receive one message of this call, at once where there are both."""
        transport, watch, expected = self._transport, self._watch, self._expected
        if payload is None:
            return transport.recv(self._members[peer], expected, watch)
        frame = Frame(expected.group, expected.sequence, expected.fingerprint, payload)
        if expected_nbytes is not None:
            return transport.exchange(
                self._members[to], frame, self._members[peer], expected, watch
            )
        transport.send(self._members[to], frame, watch)
        return None
