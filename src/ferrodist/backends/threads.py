# SPDX-License-Identifier: MIT OR Apache-2.0
"""SimulatedBackend: ranks are threads of this process. Not a mock: it keeps the whole contract.

Tests, tutorials and debugging run on it with nothing installed and nothing started.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Self

import numpy as np

from ferrodist import _native
from ferrodist.backends import failures
from ferrodist.backends.base import Statistics
from ferrodist.backends.executor import Planner, execute_plan
from ferrodist.backends.failures import LeaveReason
from ferrodist.backends.framing import Frame
from ferrodist.backends.p2p import ThreadMessagingBackend
from ferrodist.backends.running_call import Algorithm, CollectiveArgs, RunningCall
from ferrodist.backends.thread_control import CallHook, Control, SplitHook, Stall
from ferrodist.backends.thread_faults import Faults
from ferrodist.backends.thread_links import Expected, Switch, ThreadTransport
from ferrodist.backends.thread_messages import Messenger
from ferrodist.buffer import Buffer
from ferrodist.call import Kind, as_index
from ferrodist.config import DEFAULT, Config, Timeout
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    CollectiveMismatch,
    DistributedError,
    InvalidWorldSize,
    RankLost,
)
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
        control = self._abort_if_interrupted("split", lambda: self._join(members, deadline))
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
    ) -> DistributedError:
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

    def _is_settled(self, sequence: int, in_background: bool) -> bool:
        with self._control.switch.lock:
            has_left = self._control.statuses[self.rank].leave_reason is not None
            return has_left or self._control.error_of(sequence) is not None

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

    @property
    def members(self) -> tuple[int, ...]:
        return self._control.members

    def _give_up(self, reason: str) -> None:
        """Abort the group from outside, with no rank to blame."""
        self._check_process()
        with self._world.switch.lock:
            statuses = enumerate(self._control.statuses)
            seen = "; ".join(f"rank {rank} {status.last_seen()}" for rank, status in statuses)
            self._control.abort(None, f"{reason} ({seen})")

    def _leave(self, leave_reason: LeaveReason, deadline: Deadline) -> None:
        self._world.leave(self._control, self.rank, leave_reason)
