# SPDX-License-Identifier: MIT OR Apache-2.0
"""SimulatedBackend: ranks are threads of this process. Not a mock: it keeps the whole contract.

Tests, tutorials and debugging run on it with nothing installed and nothing started.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn, Self

import numpy as np

from ferrodist import _native
from ferrodist.arrays import InputArray
from ferrodist.backends import failures
from ferrodist.backends.base import Statistics
from ferrodist.backends.executor import Planner, execute_plan
from ferrodist.backends.failures import LeaveReason
from ferrodist.backends.framing import Frame, FrameError, split_message
from ferrodist.backends.p2p import Posted, ThreadMessagingBackend, header_of
from ferrodist.backends.receive import ANY, Message, Misfit, PostedReceive, Receive, status_of
from ferrodist.backends.request_work import NO_PEER, name_of_message, source_of
from ferrodist.backends.running_call import Algorithm, CollectiveArgs, RunningCall
from ferrodist.backends.thread_control import (
    CallHook,
    Control,
    MessageHook,
    SendHook,
    SplitHook,
    Stall,
)
from ferrodist.backends.thread_faults import Faults
from ferrodist.backends.thread_links import Expected, SendRequest, Switch, ThreadTransport
from ferrodist.buffer import Buffer
from ferrodist.call import Kind, as_index
from ferrodist.config import DEFAULT, Config, Timeout
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    CollectiveMismatch,
    InvalidArgument,
    InvalidWorldSize,
    ProtocolError,
    RankLost,
    SelfSend,
    SizeMismatch,
)
from ferrodist.message_status import Status
from ferrodist.schedules.cost import LinkModel

_WORLD = 0  # the group number of the first group
_QUEUE_POLL = 0.05  # seconds between polls while a call waits for its ticket


class _World:
    """What the ranks of one simulated world share: the switch and the register of groups."""

    def __init__(self, size: int, config: Config, faults: Faults | None) -> None:
        self.config = config
        self.switch = Switch(size, faults, self._kill)
        self.model = LinkModel(*config.threads_link, is_serial=True)
        self._groups: dict[int, Control] = {}
        members = tuple(range(size))
        self.root = Control(self.switch, members, _WORLD, config.log_wait_after, self._groups)

    def group(self, parent: Control, members: tuple[int, ...], group: int) -> Control:
        """Find or make the control of a group that is being split off. Lock held."""
        if group not in self._groups:
            control = Control(self.switch, members, group, self.config.log_wait_after, self._groups)
            for rank, world_rank in enumerate(members):
                control.statuses[rank].leave_reason = parent.statuses[
                    parent.rank_of(world_rank)
                ].leave_reason
            parent.children.append(control)
        return self._groups[group]

    def leave(self, control: Control, rank: int, leave_reason: LeaveReason) -> None:
        """Let a rank leave a group and every group split off it; forget what all have left."""
        world_rank = control.members[rank]
        with self.switch.lock:
            left = list(_with_descendants(control, world_rank))
            for one in left:
                one.leave(one.rank_of(world_rank), leave_reason)
            for one in left:
                if all(status.leave_reason is not None for status in one.statuses):
                    self._forget(one)

    def _forget(self, control: Control) -> None:
        self.switch.forget(control.group)
        self._groups.pop(control.group, None)
        for other in list(self._groups.values()):
            if control in other.children:
                other.children.remove(control)
        if control is self.root:
            self.switch.close()

    def _kill(self, world_rank: int, how: str) -> NoReturn:
        self.leave(self.root, world_rank, failures.died(f"was {how}"))
        raise RankLost(
            f"rank {world_rank} was {how}", rank=world_rank, this_rank=world_rank, how=how
        )


def _with_descendants(control: Control, world_rank: int) -> Iterator[Control]:
    """Yield a group and all groups split off it that a rank is in."""
    yield control
    for child in control.children:
        if world_rank in child.members:
            yield from _with_descendants(child, world_rank)


class SimulatedBackend(ThreadMessagingBackend):
    """A group of ranks that are threads of this process, for tests; see ``testing.run_ranks``.

    Example:
        >>> import threading, numpy as np, ferrodist
        >>> from ferrodist import SimulatedBackend
        >>> sums = {}
        >>> def train(backend):
        ...     sums[backend.rank] = ferrodist.allreduce(np.full(2, backend.rank), backend)
        >>> group = SimulatedBackend.create_group(3)
        >>> threads = [threading.Thread(target=train, args=(backend,)) for backend in group]
        >>> for thread in threads: thread.start()
        >>> for thread in threads: thread.join()
        >>> sums[0]
        array([3, 3])
    """

    def __init__(self, world: _World, control: Control, rank: int, config: Config) -> None:
        size = len(control.members)
        super().__init__(rank, size, config)
        self._world = world
        self._control = control
        self._transport = ThreadTransport(world.switch, control.members[rank])
        self.planner = Planner(rank, size, config, world.model)
        self._messenger = Messenger(self._transport, control, rank)
        self._splits: dict[tuple[int, ...], int] = {}
        self._parent: SimulatedBackend | None = None
        # A backend that is dropped without close() leaves its group all the same.
        dropped = failures.died("dropped its backend without close()")
        weakref.finalize(self, world.leave, control, rank, dropped).atexit = False

    @classmethod
    def create_group(
        cls, world_size: int, *, config: Config | None = None, faults: Faults | None = None
    ) -> list[SimulatedBackend]:
        """Make a world of ``world_size`` ranks: one backend for each thread, in rank order."""
        size = as_index(world_size)
        if size is None or size < 1:
            raise InvalidWorldSize(
                f"a group needs at least one rank, got {world_size!r}", got=world_size
            )
        config = Config.from_environment() if config is None else config
        world = _World(size, config, faults)
        return [cls(world, world.root, rank, config) for rank in range(size)]

    def split(self, ranks: Sequence[int], *, timeout: Timeout = DEFAULT) -> Self:
        self._check_usable()
        members = self._check_members(ranks)
        deadline = self._deadline(timeout)
        with self._aborting_on_interrupt("split"):
            control = self._join(members, deadline)
        backend = type(self)(self._world, control, members.index(self.rank), self.config)
        backend._inherit(self)
        backend._parent = self  # a parent that is dropped would take its groups along
        return backend

    def _join(self, members: tuple[int, ...], deadline: Deadline) -> Control:
        """Enter a group that is being split off and wait for its other members."""
        parent, rank = self._control, members.index(self.rank)
        world_members = tuple(parent.members[member] for member in members)
        with self._world.switch.lock:
            parent.refuse_if_aborted(self.rank)
            nth = self._splits[members] = self._splits.get(members, 0) + 1
            group = _native.fingerprint([parent.group, nth, *members])
            control = self._world.group(parent, world_members, group)
            control.join(rank)
            hook = SplitHook(parent, control, members, self.rank, deadline)
            peer = parent.members[self.rank]  # no particular rank
            self._transport.sleep_until(lambda: control.is_complete, peer, hook)
        return control

    @property
    def _group_name(self) -> str:
        return self._control.group_name

    # -- memory that all see --------------------------------------------------------------------

    def _sharing_ranks(self) -> Sequence[int]:
        return range(self.world_size)

    def _allocate_shared(self, nbytes: int) -> int:
        return self._control.offer(np.zeros(nbytes, np.uint8))

    def _open_shared(self, key: int, nbytes: int) -> np.ndarray[Any, Any]:
        return self._control.take(key, self.rank)

    def _release_shared(self, key: int) -> None:
        self._control.withdraw(key)

    # -- collectives ----------------------------------------------------------------------------

    def _begin_call(self, running: RunningCall) -> None:
        sequence, call = running.sequence, running.call
        running.hook = CallHook(self._control, self.rank, sequence, call, running.deadline)
        self._control.enter(self.rank, sequence, call, running.fingerprint)

    def _end_call(self, running: RunningCall) -> None:
        self._control.finish(self.rank)

    def _run_collective(
        self,
        running: RunningCall,
        kind: Kind,
        input: Buffer | None,
        output: Buffer | None,
        args: CollectiveArgs,
    ) -> None:
        """Do one whole collective: pick the schedule, execute its table over every segment."""
        transport, control, hook = self._transport, self._control, running.hook
        members = control.members
        expected = Expected(control.group, running.sequence, running.fingerprint)

        def exchange(
            to: int, payload: memoryview | None, peer: int, expected_nbytes: int | None
        ) -> memoryview | None:
            control.num_moves += 1
            if payload is not None:  # which never waits for its receiver
                transport.send(members[to], Frame(*expected, payload), hook)
            wants = payload is None or expected_nbytes is not None
            return transport.recv(members[peer], expected, hook) if wants else None

        plan = self.planner.plan(kind, input, output, args)
        execute_plan(plan, input, output, args.in_place, self.config, exchange)

    def _report_mismatch(
        self, running: RunningCall, error: type[CollectiveMismatch], text: str
    ) -> CollectiveMismatch:
        """Report the difference, then wait for the group error that all ranks get."""
        self._control.report_mismatch(running.sequence, error, text)
        with self._control.switch.lock:
            while True:  # left by the error that poll() raises
                try:
                    self._transport.sleep(self._transport.rank, running.hook)
                except CollectiveMismatch as given:
                    return given

    def _look_while_queued(self, running: RunningCall) -> float:
        control, deadline = self._control, running.deadline
        with control.switch.lock:
            if deadline.remaining() <= 0 and control.final is None:
                self._expire_in_queue(running)
                if control.final is None:
                    return _QUEUE_POLL
                raise control.final.now(self.rank)
            control.refuse_if_final(self.rank)
        return min(max(deadline.remaining(), 0.0), _QUEUE_POLL)

    def _expire_in_queue(self, running: RunningCall) -> None:
        call, deadline, status = running.call, running.deadline, self._control.statuses[self.rank]
        if status.is_inside:
            running.hook = running.hook or Stall(self._control)
            self._control.expire(status.sequence, status.call, deadline, running.hook)
            return
        why = [f"on rank {self.rank} a callback of an earlier Work is still running"]
        held_up = self._tickets.last_ended + 1  # where the other ranks wait for this one
        self._control.set_error(failures.timeout(call, held_up, [self.rank], deadline, why))

    def _is_settled(self, running: RunningCall) -> bool:
        with self._control.switch.lock:
            has_left = self._control.statuses[self.rank].leave_reason is not None
            return has_left or self._control.error_of(running.sequence) is not None

    def _check_algorithm(
        self, kind: Kind, algorithm: Algorithm, root: int, reproducible: bool
    ) -> str | None:
        return self.planner.check(kind, algorithm, root, reproducible)

    def abort(self, reason: str = "abort() was called") -> None:
        self._check_process()
        with self._control.switch.lock:
            self._control.abort(self.rank, reason)

    def _announce_closing(self) -> None:
        with self._control.switch.lock:
            self._control.statuses[self.rank].is_closing = True
            self._control.switch.wake_all()

    def _holding(self) -> AbstractContextManager[None]:
        return self._world.switch.holding(self._transport.rank)

    def _holds_lock(self) -> bool:
        lock: Any = self._control.switch.lock
        return bool(lock._is_owned())  # as Condition asks it

    # -- groups, statistics, leaving ------------------------------------------------------------

    def statistics(self) -> Statistics:
        """Return what this rank has exchanged, and which ranks were late in this group."""
        self._check_process()
        switch, statuses = self._world.switch, self._control.statuses
        with switch.lock:
            return Statistics(
                rank=self.rank,
                world_size=self.world_size,
                collectives=self._tickets.last_ended,
                sent_nbytes=switch.sent_nbytes[self._transport.rank],
                received_nbytes=switch.received_nbytes[self._transport.rank],
                waiting_for=statuses[self.rank].waiting_for,
                lateness=tuple(status.lateness for status in statuses),
            )

    def _give_up(self, reason: str) -> None:
        """Abort the group from outside, with no rank to blame."""
        self._check_process()
        with self._world.switch.lock:
            statuses = enumerate(self._control.statuses)
            seen = "; ".join(f"rank {rank} {status.last_seen()}" for rank, status in statuses)
            self._control.abort(None, f"{reason} ({seen})")

    def _leave(self, leave_reason: LeaveReason, deadline: Deadline) -> None:
        self._world.leave(self._control, self.rank, leave_reason)


# -- point-to-point calls --------------------------------------------------------------------------


class Messenger:
    """Sends and receives arrays."""

    def __init__(self, transport: ThreadTransport, control: Control, rank: int) -> None:
        self._transport = transport
        self._control = control
        self._rank = rank
        self._status = control.statuses[rank]

    def send(self, source: InputArray, peer: int, tag: int, deadline: Deadline) -> None:
        what = name_of_message(peer, NO_PEER, tag, 0)
        hook = SendHook(self._control, self._rank, peer, what, deadline)
        request = self._post(source, peer, tag, hook)
        sends = self._control.sends
        sends.append(hook)
        try:
            self._transport.wait_taken(request, hook)
        finally:
            sends.remove(hook)

    def post(self, source: InputArray, peer: int, tag: int, deadline: Deadline) -> Posted:
        what = name_of_message(peer, NO_PEER, tag, 0)
        hook = MessageHook(self._control, self._rank, what, deadline)
        request = self._post(source, peer, tag, hook)
        wait_taken = partial(self._transport.wait_taken, request, hook)
        withdraw_send = partial(self._transport.withdraw_send, request)
        return Posted(what, wait_taken, withdraw_send, request.is_taken)

    def post_receive(self, receive: Receive, deadline: Deadline) -> Posted:
        name = "recv_object" if receive.takes_object else "recv"
        hook = self._hook(receive.peer, receive.tag, deadline, name)
        posted = self._post_receive(receive)
        finish = partial(self._finish, posted, receive, hook)
        cancel = partial(self._cancel, posted)
        return Posted(hook.call, finish, cancel, posted.is_over, is_receive=True)

    def sendrecv(
        self, source: InputArray, to: int, tag: int, receive: Receive, deadline: Deadline
    ) -> Any:
        """Send and receive at once; if nothing is received the message is withdrawn.

        A message that came but does not fit is this rank's own affair: its own goes out.
        """
        what = name_of_message(to, source_of(receive.peer), tag, receive.tag)
        sending = MessageHook(self._control, self._rank, what, deadline)
        receiving = MessageHook(self._control, self._rank, what, deadline, is_receiving=True)
        request = self._post(source, to, tag, sending)
        try:
            posted = self._post_receive(receive)
            if receive.peer == self._rank and not posted.is_over:
                self._cancel(posted)
                text = f"{receiving.what}: rank {self._rank} has sent itself nothing with that tag"
                raise SelfSend(text, rank=self._rank, this_rank=self._rank)
            received = self._finish(posted, receive, receiving)
        except (SizeMismatch, ProtocolError, InvalidArgument):
            self._transport.wait_taken(request, sending)
            raise
        except BaseException:  # Ctrl-C too: a message that was given up must not arrive
            self._transport.withdraw_send(request)
            raise
        self._transport.wait_taken(request, sending)
        return received

    def probe(self, peer: int, tag: int, deadline: Deadline) -> Status:
        hook = self._hook(peer, tag, deadline, "probe")
        source, group = self._world_rank(peer), self._control.group
        posted = PostedReceive(source, tag, is_probe=True)
        self._transport.post_receive(posted, group)
        self._await(posted, hook)
        return self._status_of(posted.message)

    def try_probe(self, peer: int, tag: int) -> Status | None:
        """Tell what a receive would get now; raise if nothing can come any more."""
        source, control = self._world_rank(peer), self._control
        with control.switch.lock:
            found = self._transport.find(source, tag, control.group)
            if found is None:
                control.refuse_if_aborted(self._rank)
                self._hook(peer, tag, Deadline(None), "try_probe").raise_if_lost(source)
                return None
        return self._status_of(found)

    def _status_of(self, message: Message | None) -> Status:
        assert message is not None
        header, _ = split_message(memoryview(message.payload))
        return status_of(self._control.rank_of(message.source), message.tag, header)

    def _world_rank(self, peer: int) -> int:
        return ANY if peer == ANY else self._control.members[peer]

    def _hook(self, peer: int, tag: int, deadline: Deadline, name: str) -> MessageHook:
        call = name_of_message(NO_PEER, source_of(peer), 0, tag, name)
        return MessageHook(self._control, self._rank, call, deadline, is_receiving=True)

    def _post(self, source: InputArray, peer: int, tag: int, hook: MessageHook) -> SendRequest:
        to, group, memory = self._control.members[peer], self._control.group, source.buffer.memory
        return self._transport.post(to, group, tag, header_of(source), memory, hook)

    def _post_receive(self, receive: Receive) -> PostedReceive:
        self._count_receive(1)
        peer = self._world_rank(receive.peer)
        posted = PostedReceive(peer, receive.tag, takes_object=receive.takes_object)
        self._transport.post_receive(posted, self._control.group)
        return posted

    def _finish(self, posted: PostedReceive, receive: Receive, hook: MessageHook) -> Any:
        try:
            self._await(posted, hook)
        finally:
            if not posted.is_cancelled:
                self._count_receive(-1)
        message = posted.message
        assert message is not None
        source = self._control.rank_of(message.source)
        if posted.is_refused:
            is_object = message.is_object
            raise failures.other_kind(hook.what, source, self._rank, is_object=is_object)
        try:
            return receive.finish_message(memoryview(message.payload), source, message.tag)
        except Misfit as error:
            found, expected = error.found, error.expected
            raise failures.unexpected(hook.what, source, self._rank, found, expected) from None
        except FrameError as error:
            hook.damaged(message.source, str(error))
            raise

    def _await(self, posted: PostedReceive, hook: MessageHook) -> None:
        """Wait for the message of a receive; one that fails is withdrawn."""
        transport, group = self._transport, self._control.group
        with self._control.switch.lock:
            try:
                transport.sleep_until(lambda: posted.is_over, posted.peer, hook)
            except BaseException:  # Ctrl-C too: else it would take a later message
                if transport.withdraw(posted, group):
                    posted.is_cancelled = False  # it was not cancelled by its caller
                raise
        if posted.is_cancelled:
            raise CancelledError(f"{hook.what} was cancelled")

    def _cancel(self, posted: PostedReceive) -> bool:
        """Take a receive back, unless it has its message."""
        is_withdrawn = self._transport.withdraw(posted, self._control.group)
        if is_withdrawn:
            self._count_receive(-1)
        return is_withdrawn

    def _count_receive(self, change: int) -> None:
        with self._control.switch.lock:
            self._status.receives += change
            if self._status.is_closing:  # senders may wait for a receive that never comes
                self._control.switch.wake_all()
