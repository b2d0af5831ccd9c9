# SPDX-License-Identifier: MIT OR Apache-2.0
"""ProcessBackend: a rank that is a process and holds a native group, whatever connects the ranks.

Here is what surrounds the collectives: what becomes of a call that cannot succeed, group errors,
splitting, leaving, and the texts of what goes wrong. When ranks differ, each exchanges descriptors
with all the others and makes the same group error of them. Losses, aborts and deadlines are seen by
ranks that wait; the group error of the first, told to all, is everybody's. Joining, messages, and
the collectives themselves, are for subclasses.
"""

from __future__ import annotations

import abc
import functools
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ferrodist import _native
from ferrodist._native import Status
from ferrodist.backends import failures
from ferrodist.backends.base import Backend, Statistics
from ferrodist.backends.executor import Planner
from ferrodist.backends.failures import (
    CallDescriptor,
    GroupError,
    LeaveReason,
    MismatchReport,
    StatusCode,
    pack_group_error,
    pack_leave_reason,
    unpack_group_error,
    unpack_leave_reason,
)
from ferrodist.backends.fence import fence_off
from ferrodist.backends.peers import ExitStatuses
from ferrodist.backends.progress import Wait
from ferrodist.backends.request_work import end_callbacks
from ferrodist.backends.running_call import Algorithm, Prepared, RunningCall
from ferrodist.call import Kind, Site, caller_site
from ferrodist.config import DEFAULT, Config, DefaultTimeout, Timeout
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    BackendClosed,
    CollectiveMismatch,
    CollectiveTimeout,
    DistributedError,
    GroupAborted,
    RankLost,
)
from ferrodist.work import Work

if TYPE_CHECKING:
    from ferrodist.backends.shared_memory import SharedMemoryBackend

T = TypeVar("T")

_FOR_EVER = 1e9  # seconds: thirty years
_ALL_NBYTES = (1 << 63) - 1
_QUEUE_LOOK = 0.05  # seconds between looks while a call waits for its ticket
_GROUP_ERROR_WAIT = 5.0  # seconds that a rank which has barred this one has to say so to all
_GROUP_ERROR_POLL = 0.001


class ProcessBackend(Backend):
    """One rank of a group of processes; ``members`` are the ranks of the group in the world."""

    _carried_nbytes = _ALL_NBYTES  # up to which ferrodist moves an array itself, and no engine

    def __init__(
        self,
        world: _native.World | _native.Mesh,
        group: _native.SharedGroup | _native.TcpGroup,
        members: tuple[int, ...],
        rank: int,
        config: Config,
        exit_statuses: ExitStatuses,
    ) -> None:
        self.world = world
        self.group = group
        self._members = members
        self.settled = 0  # the last call that ended in a difference all ranks know of
        self._exit_statuses = exit_statuses
        super().__init__(rank, len(members), config)
        self._tickets = group.tickets
        self._wait: Wait | None = None  # of a call on the fast path
        group.set_unexpected_limit(config.unexpected_nbytes)
        for name in ("send", "recv", "sendrecv", "isend", "irecv", "isendrecv", "exchange"):
            setattr(self, f"_fast_{name}", getattr(group, f"fast_{name}"))
        self._id = 0
        self._parent: ProcessBackend | None = None
        self._children: weakref.WeakSet[ProcessBackend] = weakref.WeakSet()
        self._splits: dict[tuple[int, ...], int] = {}
        self._note_change()
        weakref.finalize(self, _native.end_listening).atexit = False
        weakref.finalize(self, group.stop_progress)  # before the interpreter ends
        weakref.finalize(self, group.leave, b"").atexit = False

    @property
    def members(self) -> tuple[int, ...]:
        return self._members

    def _note_change(self) -> None:
        timeout = self._timeout
        is_limited = timeout is not None and timeout < _FOR_EVER
        is_default = isinstance(timeout, DefaultTimeout)
        self.group.set_calls(
            is_open=not self._is_closed,
            reproducible=self._reproducible,
            fuse_nbytes=self.config.fuse_nbytes,
            carried_nbytes=self._carried_nbytes,
            timeout_ns=max(1, int(timeout * 1e9)) if timeout and is_limited else 0,
            timeout=timeout or 0.0,
            late_timeout=(self._late_timeout or 0.0) if is_default else 0.0,
        )

    def _take_fast_path(self, group: _native.NativeGroup) -> None:
        """Let calls go through native code, which knows nothing of where they are made."""
        if not self.config.check_sites:
            self._call_path, self._start_path = group.call_path, group.start_path

    def _await_works(self, deadline: Deadline) -> None:
        for work in _native.works_of(self.group):
            work.wait_for_end(deadline)

    # -- what subclasses write ------------------------------------------------------------------

    @abc.abstractmethod
    def _exchange_descriptors(
        self, running: RunningCall, mine: CallDescriptor
    ) -> Sequence[CallDescriptor]:
        """Tell all ranks what this one has called; return what all have, in the order of ranks."""

    @abc.abstractmethod
    def _new_planner(self) -> Planner:
        """Make what finds and checks algorithms."""

    @abc.abstractmethod
    def _new_split(self, members: Sequence[int], identity: int) -> _native.Split | _native.TcpSplit:
        """Begin to make a group of some ranks; ``identity`` is the same on all of them."""

    @abc.abstractmethod
    def _child(self, group: Any, world_ranks: tuple[int, ...], rank: int) -> Self:
        """Make this rank's backend of a group that a split has made."""

    @abc.abstractmethod
    def damage_of(self, rank: int, what: str) -> str:
        """Say in a clause why ``what`` of a rank, as "its queue", cannot be right."""

    def loss_of(self, rank: int) -> int:
        """Return the status code of a wait for a rank that is gone."""
        return StatusCode.LOST

    # -- collectives ----------------------------------------------------------------------------

    def _start(self, prepared: Prepared[T]) -> Work[T]:
        """Put a call in flight that Python prepares; the first thread to wait for it runs it."""
        with self._lock:  # so that nothing is queued behind the end of the thread
            self._check_usable()
            kind, running = prepared.call.kind, self._in_flight(prepared)
            work: Work[T] = self.group.start_prepared(self, kind, running, prepared.finish)
            return work

    def _begin_call(self, running: RunningCall) -> None:
        """Begin a call; its first collective compares it with those of the others."""
        if self.group.has_left:
            raise BackendClosed(f"rank {self.rank} has left this group", this_rank=self.rank)

    def _end_call(self, running: RunningCall) -> None:
        if running.hook is not None:
            running.hook.end()

    def _poll(self, running: RunningCall) -> None:
        if running.hook is None:
            where = f"{running.call.kind.label} #{running.sequence} at {running.call.site}"
            running.hook = Wait(self, where)
        running.hook.poll()

    def look_in_wait(self, site: Site | None) -> None:
        """Poll in a call on the fast path that waits."""
        if self._wait is None:
            sequence, kind = self.group.last_call(self.rank)
            where = f"{Kind(kind).label} #{sequence} at {site or caller_site()}"
            self._wait = Wait(self, where)
        self._wait.poll()

    def end_wait(self) -> float | None:
        """End what look_in_wait began; return when that was, None if it never was."""
        wait, self._wait = self._wait, None
        if wait is None:
            return None
        wait.end()
        return wait.started

    def _look_while_queued(self, running: RunningCall) -> float:
        """Let the call that holds this one up run out of time when this one does."""
        if running.in_background and self.group.is_stopping:
            raise self.cut_short(running.call.kind, running.sequence)
        deadline = running.deadline
        if deadline.remaining() <= 0 and self.error_of(None) is None:
            if self.group.expire(deadline).code == StatusCode.LATE:  # with those missing barred
                raise self.set_error(self._expiry_in_queue(running)).now(self.rank)
            return _QUEUE_LOOK
        if (final := self.error_of(None)) is not None:
            raise final.later(self.rank)
        return min(max(deadline.remaining(), 0.0), _QUEUE_LOOK)

    def _expiry_in_queue(self, running: RunningCall) -> GroupError:
        sequence = self._tickets.last_ended + 1
        missing = [rank for rank in self.group.missing() if rank != self.rank]
        if missing:
            return self.expiry(running, missing, sequence=sequence, is_barred=self._has_barred())
        why = [f"on rank {self.rank} a callback of an earlier Work is still running"]
        return failures.timeout(running.call, sequence, [self.rank], running.deadline, why)

    def _is_settled(self, sequence: int, in_background: bool) -> bool:
        if in_background and self.group.is_stopping:
            return True  # the others learn that this rank has ended
        is_known = self.settled == sequence
        is_known = is_known or self.group.group_error(sequence) is not None
        return is_known or self.group.has_left

    # -- calls that fail ------------------------------------------------------------------------

    def _check(self, running: RunningCall, status: Status) -> None:
        if status.code:
            raise self.failure_of(running, status)

    def failure_of(self, running: RunningCall, status: Status) -> BaseException:
        """Make the error that a status means, and see that all ranks get the same."""
        code = status.code
        if code == StatusCode.INTERRUPTED:
            return status.error or self.cut_short(running.call.kind, running.sequence)
        if code == StatusCode.MISMATCH:
            return self._settle_mismatch(running, None)
        if code in (StatusCode.GROUP_ERROR, StatusCode.GIVEN_UP):
            given = self._await_group_error(running)
            is_late = code == StatusCode.GIVEN_UP or given.bars(self.rank)
            is_late = is_late and running.num_collectives <= 1
            return given.later(self.rank) if is_late else given.now(self.rank)
        return self.set_error(self._group_error_of(running, status)).now(self.rank)

    def cut_short(self, kind: int, sequence: int) -> BackendClosed:
        """Make the error of a call in flight that is not done when this rank leaves."""
        name = f"{Kind(kind).label} #{sequence}"
        return BackendClosed(f"{name}: rank {self.rank} left the group before it was done")

    def _await_group_error(self, running: RunningCall) -> GroupError:
        """Return the group error of a call that this rank is in, or was barred from.

        The rank that barred this one sets it next; if that died meanwhile, this rank does.
        """
        end = time.monotonic() + _GROUP_ERROR_WAIT
        while (given := self.error_of(running.sequence)) is None:
            if time.monotonic() > end:
                due = self.expiry(running, [self.rank], is_barred=True)
                return self.set_error(due)
            time.sleep(_GROUP_ERROR_POLL)
        return given

    def _group_error_of(self, running: RunningCall, status: Status) -> GroupError:
        """Make the group error that is due when this rank is the first to see a failure."""
        call, sequence, rank = running.call, running.sequence, status.failed_rank
        if status.code == StatusCode.LATE:
            missing = self._held_up_by() if rank < 0 else [rank]
            return self.expiry(running, missing, is_barred=rank < 0 and self._has_barred())
        if status.code == StatusCode.LOST:
            return failures.loss(call, sequence, rank, self.leave_reason_of(rank))
        if status.code == StatusCode.NO_HEARTBEAT:
            return failures.loss(call, sequence, rank, failures.died(self.silence_of(rank)))
        return failures.corruption(call, sequence, rank, self.damage_of(rank, "what it posted"))

    def _report_mismatch(
        self, running: RunningCall, error: type[CollectiveMismatch], text: str
    ) -> DistributedError:
        return self._settle_mismatch(running, (error, text))

    def _settle_mismatch(
        self, running: RunningCall, report: MismatchReport | None
    ) -> DistributedError:
        """Exchange descriptors, and make of them the group error that all ranks make."""
        found = self._exchange_descriptors(running, CallDescriptor(running.call, report))
        calls = [descriptor.call for descriptor in found]
        first = next((one.report for one in found if one.report is not None), None)
        given = failures.mismatch(running.sequence, calls, first)
        self.settled = running.sequence
        return given._replace(text=given.text + self.group_name).now(self.rank)

    def _check_exchange(self, running: RunningCall, status: Status) -> None:
        """Raise if the exchange of descriptors has failed, which nothing can settle any more."""
        if status.code == StatusCode.MISMATCH:
            where = f"{running.call.kind.label} #{running.sequence}"
            reason = f"the ranks differ, and are not in the same call either (in {where})"
            raise self.set_error(failures.abort(self.rank, reason)).now(self.rank)
        self._check(running, status)

    # -- algorithms -----------------------------------------------------------------------------

    def _check_algorithm(
        self, kind: Kind, algorithm: Algorithm, root: int, reproducible: bool
    ) -> str | None:
        return (
            None if algorithm is None else self.planner.check(kind, algorithm, root, reproducible)
        )

    @functools.cached_property
    def planner(self) -> Planner:
        """What finds and checks the algorithms that callers name."""
        return self._new_planner()

    # -- group errors ------------------------------------------------------------------------------

    def set_error(self, due: GroupError) -> GroupError:
        """Announce a group error; return the one that stands, which another rank may have given."""
        due = due._replace(text=due.text + self.group_name)
        self.group.set_error(due.sequence, pack_group_error(due, self.members))
        return self.error_of(due.sequence) or due

    def error_of(self, sequence: int | None) -> GroupError | None:
        """Return the final group error that concerns a call, or any."""
        data = self.group.group_error(sequence)
        return None if data is None else unpack_group_error(data, self.members)

    def refuse_if_aborted(self) -> None:
        """Raise the final group error unless it is a loss: those left may go on."""
        final = self._end_of_group()
        if final is not None and final.error is not RankLost:
            raise final.later(self.rank)

    def _end_of_group(self) -> GroupError | None:
        """Return the abort of the group, also one after a loss, or else what ended it."""
        return self.error_of(0) or self.error_of(None)

    def expiry(
        self,
        running: RunningCall,
        missing: list[int],
        *,
        sequence: int | None = None,
        is_barred: bool = False,
    ) -> GroupError:
        """Make the group error of a deadline that ran out, in this call or an earlier one."""
        sequence = running.sequence if sequence is None else sequence
        last = [f"rank {rank} {self.last_seen(rank, sequence)}" for rank in missing]
        call, deadline = running.call, running.deadline
        return failures.timeout(call, sequence, missing, deadline, last, is_barred=is_barred)

    def _held_up_by(self) -> list[int]:
        """List the ranks that a call was given up for; never empty."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        return self.group.missing() or others

    def _has_barred(self) -> bool:
        """Tell whether those ranks were barred, so that they may not know it themselves."""
        return False

    def last_seen(self, rank: int, sequence: int | None = None) -> str:
        """Say what a rank is doing that did not get through to a call, or to this rank's last."""
        if self._exit_statuses.is_traced(self.members[rank]):
            return "is held by a debugger"
        report = self.world.report_of(self.members[rank])
        if report:
            return report
        last, kind = self.group.last_call(rank)
        if last == 0:
            return "has made no call yet"
        label = f"{Kind(kind).label} #{last}"
        is_inside = sequence is not None and last >= sequence
        return f"is in {label}" if is_inside else f"last call was {label}"

    def leave_reason_of(self, rank: int) -> LeaveReason:
        """Tell how a rank left, with its own error text if it has one."""
        words = self.group.leave_reason_of(rank)
        if words is None:
            return self._exit_statuses.leave_reason_of(self.members[rank])
        return unpack_leave_reason(words)

    def silence_of(self, rank: int) -> str:
        """Complete the sentence 'rank 2 ...' for a rank without a heartbeat."""
        is_stopped = self._exit_statuses.is_stopped(self.members[rank])
        why = ": it is stopped, by Ctrl-Z or SIGSTOP" if is_stopped else ""
        return f"has sent no heartbeat for {self.config.heartbeat_timeout:g} s{why}"

    @property
    def group_name(self) -> str:
        """Whose ranks an error speaks of, where they are not those of the world."""
        return f" (in the group of world ranks {list(self.members)})" if self._parent else ""

    @property
    def _group_name(self) -> str:
        return self.group_name

    def abort(self, reason: str = "abort() was called") -> None:
        self._check_process()
        self.set_error(failures.abort(self.rank, reason))

    def _end_group(self, error: DistributedError) -> None:
        facts = {name: fact for name, fact in error._facts.items() if name in ("rank", "missing")}
        self.set_error(GroupError(type(error), 0, str(error), facts))

    def _check_usable(self) -> None:
        super()._check_usable()
        if self.group.has_left:  # with the group that this one was split off
            raise BackendClosed(f"rank {self.rank} has left this group", this_rank=self.rank)
        final = self.error_of(None)
        if final is not None and final.evicts(self.rank):
            raise final.later(self.rank)

    def _complete(self, parent: Self, identity: int, deadline: Deadline) -> None:
        """Do what is left to do when a split has made this group; errors name its own ranks."""

    # -- leaving --------------------------------------------------------------------------------

    def _announce_closing(self) -> None:
        self.group.announce_closing()

    def _fail(self, error: BaseException) -> None:
        """Leave at once because this rank's program raised; others and launcher are told."""
        if not self.is_forked and self._parent is None:
            self._exit_statuses.say(error)
        super()._fail(error)

    def _leave(self, leave_reason: LeaveReason, deadline: Deadline) -> None:
        for child in list(self._children):
            if leave_reason.is_normal:
                child._announce_closing()
            child._leave(leave_reason, deadline)
        self.group.stop_progress()
        end_callbacks(deadline)
        self.group.leave(pack_leave_reason(leave_reason))

    # -- groups ---------------------------------------------------------------------------------

    def split(self, ranks: Sequence[int], *, timeout: Timeout = DEFAULT) -> Self:
        self._check_usable()
        members = self._check_members(ranks)
        deadline = self._deadline(timeout)
        self.refuse_if_aborted()
        return self._abort_if_interrupted("split", lambda: self._split(members, deadline))

    def _split(self, members: tuple[int, ...], deadline: Deadline) -> Self:
        fence_off(self, members, deadline)
        nth = self._splits[members] = self._splits.get(members, 0) + 1
        identity = _native.fingerprint([self._id, nth, *members]) or 1
        return self._split_off(members, identity, deadline)

    def groups_of_process(self) -> list[ProcessBackend]:
        """List the groups of this process that are made from the same first one, that included."""
        first: ProcessBackend = self
        while first._parent is not None:
            first = first._parent
        found = [first]
        for group in found:  # which grows
            found += group._children
        return found

    def place_in_memory(self, member: int) -> tuple[SharedMemoryBackend, int] | None:
        """Return a group in shared memory, and the rank in it of a rank of the world, if any."""
        return None

    @property
    def exit_statuses(self) -> ExitStatuses:
        """What is known of how processes ended."""
        return self._exit_statuses

    @property
    def next_sequence(self) -> int:
        """The number of the first call that has not ended."""
        return self._tickets.last_ended + 1

    @property
    def is_idle(self) -> bool:
        """Whether this rank is in no call."""
        return self._tickets.is_idle

    def _split_off(self, members: tuple[int, ...], identity: int, deadline: Deadline) -> Self:
        """Make a group whose members know it by ``identity``, which no other group has."""
        split = self._new_split(members, identity)
        wait = Wait(self, f"split({list(members)}) at {caller_site()}", split.absent)
        try:
            status = split.wait(deadline, wait.poll)
        finally:
            wait.end()
        if status.code != StatusCode.DONE:
            error = self._split_failure(split, members, deadline, status)
            if _is_news(error):
                self._give_up_split(split, members, error)
            raise error
        child = self._adopt(split.group(), members)
        try:
            child._complete(self, identity, deadline)
        except BaseException as error:  # Ctrl-C too: members that have the group are told
            if _is_news(error):
                child._give_up_group(error)
            renumbered = self._renumber(error, members, deadline)
            if renumbered is error:
                raise
            raise renumbered from None  # the other speaks of ranks of a group that never was
        self._keep(child, identity)
        return child

    def _adopt(self, group: Any, members: Sequence[int]) -> Self:
        """Make this rank's backend of a group of some ranks of this one."""
        world_ranks = tuple(self.members[member] for member in members)
        return self._child(group, world_ranks, members.index(self.rank))

    def _keep(self, child: Self, identity: int) -> None:
        child._parent, child._id = self, identity  # a parent must outlive its groups
        child._inherit(self)
        self._children.add(child)

    def _give_up_split(self, split: Any, members: tuple[int, ...], error: BaseException) -> None:
        """Tell members that may have the group already that this rank has not; no loss of it."""

    def _give_up_group(self, error: BaseException) -> None:
        """Tell the same of a group that this rank could not complete."""

    def _renumber(
        self, error: BaseException, members: tuple[int, ...], deadline: Deadline
    ) -> BaseException:
        """Make an error of a half-made group, which has its ranks, one of this group's split."""
        what = self._name_split(members)
        if not isinstance(error, DistributedError):
            return error
        if isinstance(error, RankLost) and error.rank is not None:
            return failures.lost_in_split(what, members[error.rank], self.rank, error.how)
        if isinstance(error, CollectiveTimeout) and error.missing:
            return self._split_timeout(what, [members[rank] for rank in error.missing], deadline)
        return error

    def _split_failure(
        self,
        split: _native.Split | _native.TcpSplit,
        members: tuple[int, ...],
        deadline: Deadline,
        status: Status,
    ) -> BaseException:
        """Make the error of a split that did not come about; it is this rank's own."""
        what = self._name_split(members)
        code, rank = status.code, status.failed_rank
        if code == StatusCode.INTERRUPTED and status.error is not None:
            return status.error
        if code == StatusCode.GROUP_ERROR:
            final = self._end_of_group()
            assert final is not None
            return final.later(self.rank)
        if code == StatusCode.LATE:
            return self._split_timeout(what, split.absent(), deadline)
        if code == StatusCode.CORRUPT:
            reason = self.damage_of(rank, "its group")
            return failures.damaged(what, rank, self.rank, reason)
        return failures.lost_in_split(what, rank, self.rank, self.leave_reason_of(rank).how)

    def _split_timeout(self, what: str, absent: list[int], deadline: Deadline) -> CollectiveTimeout:
        others = []
        for rank in absent:
            for world_ranks in self.world.invitations_of(self.members[rank]):
                if not set(world_ranks) <= set(self.members):  # off a group around this one
                    continue
                ranks = [self.members.index(world_rank) for world_rank in world_ranks]
                others.append(f"{failures.names_of_ranks([rank])} in split({ranks})")
        text = failures.split_timeout(what, absent, deadline, others)
        first = absent[0] if absent else None
        return CollectiveTimeout(text, missing=absent or None, rank=first, this_rank=self.rank)

    # -- statistics -----------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """Return what this process has exchanged, and which ranks were late in this group."""
        self._check_process()
        missing = self.group.missing() if not self._tickets.is_idle else []
        return Statistics(
            rank=self.rank,
            world_size=self.world_size,
            collectives=self._tickets.last_ended,
            sent_nbytes=self.world.sent_nbytes,
            received_nbytes=self.world.received_nbytes,
            waiting_for=next((rank for rank in missing if rank != self.rank), None),
            lateness=tuple(self._lateness(rank) for rank in range(self.world_size)),
        )

    def _lateness(self, rank: int) -> float:
        """Return how long the median rank has slept for this one."""
        waits = sorted(self.group.waited(other, rank) for other in range(self.world_size))
        return waits[self.world_size // 2]


def _is_news(error: BaseException) -> bool:
    """Tell whether other members may not know why a split fails; an abort reaches all of them."""
    return isinstance(error, DistributedError) and not isinstance(error, GroupAborted)
