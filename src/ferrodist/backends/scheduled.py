# SPDX-License-Identifier: MIT OR Apache-2.0
"""ScheduledBackend: runs any schedule on any transport. Simulated ranks and TCP are this class."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar, cast

from ferrodist import _native
from ferrodist.backends import verdict
from ferrodist.backends.base import Algorithm, Backend, Body, Counts
from ferrodist.backends.control import Control
from ferrodist.backends.messenger import Messenger
from ferrodist.backends.progress import ProgressThread
from ferrodist.backends.walk_plan import WalkPlan, lengths_of, make_plan
from ferrodist.backends.walker import Task, walk
from ferrodist.backends.watches import CallWatch
from ferrodist.buffer import Buffer, DType
from ferrodist.call import Call, Kind
from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    CollectiveMismatch,
    DistributedError,
    InvalidArgument,
    UnsupportedOp,
)
from ferrodist.reduce_op import ReduceOp
from ferrodist.schedules import (
    Lengths,
    LinkModel,
    Schedule,
    choose,
    compile_table,
    find,
    traits,
)
from ferrodist.transports.base import Expected, Transport
from ferrodist.transports.framing import Frame
from ferrodist.work import Work

T = TypeVar("T")

_QUEUE_LOOK = 0.05  # seconds between looks while a call waits for its turn
_SCHEDULED_AS = {Kind.ALL_GATHER_UNEVEN: Kind.ALL_GATHER, Kind.ALL_TO_ALL_UNEVEN: Kind.ALL_TO_ALL}


_MOST_PLANS = 256


class ScheduledBackend(Backend):
    """Does collectives by walking schedules over a transport."""

    folds_in_order = True
    """Whether reductions fold in rank order unless the caller names an algorithm that does not."""

    def __init__(
        self, transport: Transport, control: Control, rank: int, config: Config, model: LinkModel
    ) -> None:
        super().__init__(rank, len(control.members), config)
        self._transport = transport
        self._control = control
        self._model = model
        self._messenger = Messenger(transport, control, rank)
        self._plans: dict[tuple[Any, ...], WalkPlan] = {}
        self._messages: list[threading.Thread] = []  # those in flight

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
        if algorithm is None:
            return None
        schedule = find(_SCHEDULED_AS.get(kind, kind), algorithm)
        found = traits(schedule, self.world_size, root)
        if reproducible and kind.is_reduction and not found.in_order:
            raise UnsupportedOp(
                f"{kind.label}: algorithm {schedule.name!r} does not fold in rank order, which "
                "reproducible=True asks for; leave one of the two out",
                op=kind.label,
                this_rank=self.rank,
            )
        if kind is Kind.ALL_TO_ALL_UNEVEN and found.relays:
            raise InvalidArgument(
                f"{kind.label}: algorithm {schedule.name!r} relays blocks through ranks that do "
                "not know how large they are; name another",
                this_rank=self.rank,
            )
        if isinstance(algorithm, str):
            return schedule.name
        return _signed_name(schedule, self.world_size, root)

    def pick(
        self, kind: Kind, nbytes: int, dtype: DType, algorithm: Algorithm, in_order: bool
    ) -> Schedule:
        """Take the algorithm asked for, or the cheapest that is allowed."""
        if algorithm is not None:
            return find(kind, algorithm)
        in_order = in_order or self.folds_in_order
        return choose(
            kind, self.world_size, nbytes, half=dtype.is_half, in_order=in_order, model=self._model
        )

    def plan_walk(
        self,
        kind: Kind,
        op: ReduceOp | None,
        root: int,
        dtype: DType,
        lengths: Lengths,
        algorithm: Algorithm,
        in_order: bool,
    ) -> WalkPlan:
        """Work out what a collective needs besides its buffers; kept, for it will come again."""
        key = (kind, op, root, dtype, lengths, algorithm, in_order)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            schedule = self.pick(kind, lengths.count * dtype.itemsize, dtype, algorithm, in_order)
            table = compile_table(schedule, self.world_size, self.rank, root)
            found = traits(schedule, self.world_size, root)
            plan = make_plan(table, found, op, dtype, lengths, self.config.segment_nbytes)
            self._plans[key] = plan
        return plan

    def abort(self, reason: str = "abort() was called") -> None:
        """Give the group up, and every group split off it."""
        self.check_process()
        with self._control.switch.lock:
            self._control.abort(self.rank, reason)

    # -- point to point -------------------------------------------------------------------------

    def send(self, source: Buffer, peer: int, tag: int, deadline: Deadline) -> None:
        """Send a message; beyond 64 KB wait until the receiver has it."""
        self.check_usable()
        with self._aborting_on_interrupt("send"):
            self._messenger.send(source, peer, tag, deadline)

    def start_send(self, source: Buffer, peer: int, tag: int, deadline: Deadline) -> Work[None]:
        """Send now, wait for the receiver in the background."""
        self.check_usable()
        what, settle = self._messenger.post(source, peer, tag, deadline)
        return self._in_background(what, settle)

    def recv(self, target: Buffer, peer: int, tag: int, deadline: Deadline) -> None:
        """Receive the next message with this tag into ``target``."""
        self.check_usable()
        with self._aborting_on_interrupt("recv"):
            self._messenger.line_up(target, peer, tag, deadline)[1]()

    def start_recv(
        self, target: Buffer, peer: int, tag: int, deadline: Deadline, finish: Callable[[], T]
    ) -> Work[T]:
        """Take a place in the line of receivers now, receive in the background."""
        self.check_usable()
        what, receive = self._messenger.line_up(target, peer, tag, deadline)

        def receive_and_finish() -> T:
            receive()
            return finish()

        return self._in_background(what, receive_and_finish)

    def sendrecv(
        self, source: Buffer, to: int, target: Buffer, peer: int, tag: int, deadline: Deadline
    ) -> None:
        """Post the outgoing message, receive, and only then wait for the receiver."""
        self.check_usable()
        with self._aborting_on_interrupt("sendrecv"):
            self._messenger.sendrecv(source, to, target, peer, tag, deadline)

    @contextmanager
    def _aborting_on_interrupt(self, what: str) -> Iterator[None]:
        """Tell the others of Ctrl-C and the like inside a call; ferrodist's errors are its own."""
        try:
            yield
        except DistributedError:
            raise
        except BaseException as error:
            self.abort(f"{verdict.words_of(error)} (in {what})")
            raise

    def _in_background(self, what: str, run: Callable[[], T] | None) -> Work[T]:
        """Finish a message on a thread of its own: it never queues behind a collective."""
        work: Work[T] = Work(what)
        if run is None:
            work.set_result(cast(T, None))
            return work
        thread = ProgressThread(
            target=self._finish, args=(work, run), name=f"ferrodist {what}", daemon=True
        )
        with self._lock:
            self._messages = [other for other in self._messages if other.is_alive()] + [thread]
            thread.start()
        return work

    def _announce_closing(self) -> None:
        with self._control.switch.lock:
            self._control.desks[self.rank].is_closing = True
            self._control.switch.wake_all()

    def _holds_lock(self) -> bool:
        return self._control.switch.is_locked_here()

    def _await_works(self) -> None:
        super()._await_works()
        for thread in self._messages:
            if thread is not threading.current_thread():
                thread.join()


@lru_cache(maxsize=256)
def _signed_name(schedule: Schedule, world: int, root: int) -> str:
    """Name a user's own schedule so that two different ones of one name do not match."""
    tables = [compile_table(schedule, world, rank, root) for rank in range(world)]
    steps = [number for table in tables for number in table.to_ints()]
    return f"{schedule.name}@{_native.fingerprint(steps) & 0xFFFFFFFF:08x}"


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
        sample = source or target
        dtype = sample.dtype if sample else DType.UINT8
        lengths = lengths_of(kind, backend.rank, backend.world_size, source, target, counts)
        plan = backend.plan_walk(kind, op, root, dtype, lengths, algorithm, in_order)
        if in_place and not plan.alias_safe and source is not None:
            in_place = False
            source = Buffer(memoryview(bytes(source.memory)), source.dtype, source.shape)
        task = Task(
            plan.table,
            source,
            target,
            dtype,
            plan.op,
            plan.divisor,
            plan.is_wide,
            in_place,
            backend.config.piece_nbytes,
        )
        for layout in plan.layouts:
            walk(task, layout, self._exchange)
        if plan.divides_at_end and target is not None:
            _native.fold(dtype, ReduceOp.MEAN, target.memory, [target.memory], plan.divisor)

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
        self, to: int, payload: memoryview | None, peer: int, is_receiving: bool
    ) -> memoryview | None:
        """Send and receive one message of this call, at once where there are both."""
        transport, watch, expected = self._transport, self._watch, self._expected
        if payload is None:
            return transport.recv(self._members[peer], expected, watch)
        frame = Frame(expected.group, expected.sequence, expected.fingerprint, payload)
        if is_receiving:
            return transport.exchange(
                self._members[to], frame, self._members[peer], expected, watch
            )
        transport.send(self._members[to], frame, watch)
        return None
