# SPDX-License-Identifier: MIT OR Apache-2.0
"""The control plane of a group of threads: which rank is in which call or has left, and errors.

On threads the control plane is a shared object, so a rank reports its call by writing it down when
it enters. Every method that writes holds the lock of the world's Switch, or says "lock held" and
expects its caller to.

Why no rank fails without a cause: no rank finishes call #s before all have entered #s with one
fingerprint. So a difference at #s is seen while every rank is still inside #s, and a loss or a
timeout at #s is of no concern to a rank still inside #s-1: a final group error counts from its own
sequence number on, and a rank further behind may still get one of its own.

A deadline ends a call in which a rank is missing: both its entering and the group error that bars
it happen under the lock. If all have entered, it goes on as long as anything moves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ferrodist.backends import failures
from ferrodist.backends.failures import GroupError, LeaveReason
from ferrodist.backends.progress import LogTimes, log_wait
from ferrodist.backends.thread_links import ProgressHook, Switch
from ferrodist.call import Call, Kind, caller_site
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendClosed, CollectiveMismatch, CollectiveTimeout, RankLost

if TYPE_CHECKING:
    from ferrodist.backends.thread_messages import SendHook

_NOTHING = Call(Kind.BARRIER)
STALL = 0.2  # seconds for which nothing may move in a call that all have entered and that is late


@dataclass(slots=True, eq=False)
class RankStatus:
    """What is known of one rank: its last call, whether it is inside, which rank it waits for."""

    sequence: int = 0
    call: Call = _NOTHING
    fingerprint: int = 0
    is_inside: bool = False
    waiting_for: int | None = None
    since: float = 0.0
    leave_reason: LeaveReason | None = None
    is_closing: bool = False  # makes no new calls, but waits for those in flight
    receives: int = 0  # point-to-point receives in flight
    lateness: float = 0.0

    def sends_no_more(self) -> LeaveReason | None:
        """Tell how a rank left, or is leaving, that sends nothing it has not sent by now."""
        return self.leave_reason or (failures.closing() if self.is_closing else None)

    def takes_no_more(self) -> LeaveReason | None:
        """Tell how a rank left, or is leaving, that takes no message any more."""
        return self.leave_reason if self.receives else self.sends_no_more()

    def last_seen(self) -> str:
        """Say what the rank was last doing, as a clause."""
        if self.sequence == 0:
            return "has made no call yet"
        where = f"{self.call.kind.label} #{self.sequence} at {self.call.site}"
        return f"is in {where}" if self.is_inside else f"last call was {where}"


class Stall:
    """Sees whether anything moves in a group, for one whose deadline is over."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._num_moves = -1
        self._since = 0.0

    def is_over(self) -> bool:
        """Tell whether nothing has moved for a while. Lock held."""
        now = time.monotonic()
        if self._control.num_moves != self._num_moves:
            self._num_moves, self._since = self._control.num_moves, now
        return now - self._since >= STALL


class Control:
    """Shared by the ranks of a group.

    ``members`` are the world ranks behind the group's ranks, ``groups`` all groups of the world by
    their number.
    """

    def __init__(
        self,
        switch: Switch,
        members: tuple[int, ...],
        group: int,
        log_wait_after: float,
        groups: dict[int, Control],
    ) -> None:
        self.switch = switch
        self.groups = groups
        self.members = members
        self.group = group
        self.log_wait_after = log_wait_after
        self.statuses = [RankStatus() for _ in members]
        self.children: list[Control] = []
        self.sends: list[SendHook] = []  # large sends that wait, each holding its caller
        self.joined: set[int] = set()
        self.is_complete = False  # whether all members have joined before any gave up
        self._rank_of = {world_rank: rank for rank, world_rank in enumerate(members)}
        self._finals: list[GroupError] = []
        self._mismatch: GroupError | None = None
        self._report: tuple[type[CollectiveMismatch], str] | None = None
        self._arrivals: list[float] = []
        self._shared: dict[int, tuple[np.ndarray[Any, Any], set[int]]] = {}  # until all have it
        self.num_moves = 0  # changes as long as calls of this group get on
        groups[group] = self  # last: a finalizer may look at it from now on

    def join(self, rank: int) -> None:
        """Write down that a member of a group being split off has come. Lock held."""
        self.joined.add(rank)
        self.is_complete = len(self.joined) == len(self.members) and self.final is None
        self.switch.wake_all()

    def offer(self, memory: np.ndarray[Any, Any]) -> int:
        """Keep memory until every rank has taken it; return the number to take it by."""
        with self.switch.lock:
            key = id(memory)
            self._shared[key] = memory, set(range(len(self.members)))
            return key

    def take(self, key: int, rank: int) -> np.ndarray[Any, Any]:
        with self.switch.lock:
            memory, waiting = self._shared[key]
            waiting.discard(rank)
            if not waiting:
                self.withdraw(key)
            return memory

    def withdraw(self, key: int) -> None:
        """Drop memory that all ranks have, or none will take."""
        with self.switch.lock:
            self._shared.pop(key, None)

    # -- a rank's way through a call ------------------------------------------------------------

    def enter(self, rank: int, sequence: int, call: Call, fingerprint: int) -> None:
        """Write down that a rank has entered a call; raises if the group is at its end."""
        with self.switch.lock:
            status = self.statuses[rank]
            if status.leave_reason is not None:
                raise BackendClosed(f"rank {rank} has left this group", this_rank=rank)
            self.refuse_if_final(rank)
            status.sequence, status.call, status.fingerprint = sequence, call, fingerprint
            status.is_inside, status.since = True, time.monotonic()
            self.num_moves += 1
            self._note_arrival(status)
            self._judge(sequence)

    def finish(self, rank: int) -> None:
        """Write down that a rank is out of its call, well or not."""
        with self.switch.lock:
            self.statuses[rank].is_inside = False
            self.statuses[rank].waiting_for = None

    def report_mismatch(self, sequence: int, error: type[CollectiveMismatch], text: str) -> None:
        """Report a difference that fingerprints do not show; it fails the call on all ranks."""
        with self.switch.lock:
            if self._mismatch is None or self._mismatch.sequence < sequence:  # the first one stands
                self._report = self._report or (error, text)
                self._judge(sequence)

    # -- group errors ------------------------------------------------------------------------------

    @property
    def final(self) -> GroupError | None:
        """The group error that ended the group: it answers every later call."""
        return self._finals[0] if self._finals else None

    def refuse_if_final(self, rank: int) -> None:
        if self._finals:
            raise self._finals[0].later(rank)

    def refuse_if_aborted(self, rank: int) -> None:
        """Raise the final group error unless it is a loss: those left may go on."""
        aborted = next((final for final in self._finals if final.error is not RankLost), None)
        if aborted is not None:
            raise aborted.later(rank)

    def error_of(self, sequence: int) -> GroupError | None:
        """Return what a rank inside ``sequence`` has to raise, if anything."""
        if self._mismatch is not None and self._mismatch.sequence == sequence:
            return self._mismatch
        return next((final for final in self._finals if final.sequence <= sequence), None)

    def set_error(self, new: GroupError) -> None:
        """Announce a group error, unless one was given that concerns the same ranks. Lock held."""
        self.announce(new._replace(text=new.text + self.group_name))

    def announce(self, new: GroupError) -> None:
        """Announce a group error whose text says whose ranks it names. Lock held."""
        if not new.is_final:
            self._mismatch = new
        elif all(final.sequence > new.sequence for final in self._finals):
            self._finals.append(new)
        self.switch.wake_all()

    def leave(self, rank: int, leave_reason: LeaveReason) -> None:
        """Write down that a rank has left; ranks that still need it will find out. Lock held."""
        if self.statuses[rank].leave_reason is None:
            self.statuses[rank].leave_reason = leave_reason
            self.switch.wake_all()

    def abort(self, rank: int | None, reason: str) -> None:
        """Give the group up, and every group split off it. Lock held."""
        self.set_error(failures.abort(rank, reason))
        for child in self.children:
            child_rank = None if rank is None else child._rank_of.get(self.members[rank])
            is_outsider = rank is not None and child_rank is None
            outside = f"rank {rank} of the parent group aborted it: {reason}"
            child.abort(child_rank, outside if is_outsider else reason)

    def expire(self, sequence: int, call: Call, deadline: Deadline, stall: Stall) -> None:
        """Set the group error of a deadline that ran out, if it is due. Lock held."""
        if not self._absent(sequence) and not stall.is_over():
            return
        missing = self.missing(sequence)
        have_part_to_do = all(self._has_part_to_do(rank, sequence) for rank in missing)
        if have_part_to_do and self.may_still_come(missing, deadline):
            return
        last = [f"rank {rank} {self._excuse(rank, sequence)}" for rank in missing]
        self.set_error(failures.timeout(call, sequence, missing, deadline, last))

    def _has_part_to_do(self, rank: int, sequence: int) -> bool:
        status = self.statuses[rank]
        return status.sequence < sequence or (status.is_inside and status.waiting_for is None)

    def may_still_come(self, ranks: Sequence[int], deadline: Deadline) -> bool:
        """Tell whether a deadline is patient, and none of these ranks stuck in another call."""
        limit = deadline.seconds or 0.0
        return deadline.is_patient and all(
            self.switch.seconds_held(self.members[rank]) < limit for rank in ranks
        )

    def lose(self, sequence: int, call: Call, rank: int) -> None:
        """Set the group error of a rank that is gone and that ``sequence`` needs. Lock held."""
        leave_reason = self.statuses[rank].leave_reason
        assert leave_reason is not None
        self.set_error(failures.loss(call, sequence, rank, leave_reason))

    def _judge(self, sequence: int) -> None:
        """Set the group error of a difference once every rank has entered the call."""
        if any(status.sequence < sequence for status in self.statuses):
            return
        report, self._report = self._report, None
        if report is not None or len({status.fingerprint for status in self.statuses}) > 1:
            calls = [status.call for status in self.statuses]
            self.set_error(failures.mismatch(sequence, calls, report))

    @property
    def group_name(self) -> str:
        """Whose ranks an error speaks of, where they are not those of the world."""
        if self.members == tuple(range(self.switch.size)):
            return ""
        return f" (in the group of world ranks {list(self.members)})"

    def _excuse(self, rank: int, sequence: int) -> str:
        """Say what a rank that did not get through is doing."""
        status, world_rank = self.statuses[rank], self.members[rank]
        if status.sequence > sequence or (status.sequence == sequence and not status.is_inside):
            return "has sent its messages, but not all of them arrived"
        if not status.is_inside:
            for other in list(self.groups.values()):
                if world_rank in other.members and other is not self:
                    elsewhere = other.statuses[other.rank_of(world_rank)]
                    if elsewhere.is_inside:
                        return elsewhere.last_seen() + (other.group_name or " (in the world)")
        return status.last_seen()

    def waiting_tags(self, sources: Sequence[int], target: int) -> list[int]:
        """List the tags of messages to a rank that are not received yet. Lock held."""
        members = [self.members[source] for source in sources]
        return self.switch.waiting_tags(members, self.members[target], self.group)

    # -- which rank failed ----------------------------------------------------------------------

    def missing(self, sequence: int) -> list[int]:
        """List the ranks that hold ``sequence`` up: not arrived, cut off, or stuck inside."""
        ranks, absent = range(len(self.statuses)), self._absent(sequence)
        waits = {
            rank: self.statuses[rank].waiting_for for rank in ranks if self.statuses[rank].is_inside
        }
        unheard = {
            peer for rank, peer in waits.items() if peer is not None and self._is_cut(peer, rank)
        }
        stuck = [rank for rank, peer in waits.items() if peer is None or peer == rank]
        waited_for = {peer for peer in waits.values() if peer is not None}
        return absent or sorted(unheard) or stuck or sorted(waited_for)

    def _absent(self, sequence: int) -> list[int]:
        """List the ranks that have not entered a call; once it is given up they never can."""
        return [rank for rank, status in enumerate(self.statuses) if status.sequence < sequence]

    def lost_rank(self, sequence: int, peer: int, rank: int) -> int | None:
        """Find a rank that is gone and that ``rank``, waiting for ``peer``, still needs."""
        for other, status in enumerate(self.statuses):
            if status.leave_reason is not None and status.sequence < sequence:
                return other
        if self.statuses[peer].leave_reason is not None:
            source, target = self.members[peer], self.members[rank]
            return None if self.switch.is_pending(source, target) else peer
        return None

    def rank_of(self, world_rank: int) -> int:
        return self._rank_of[world_rank]

    def _is_cut(self, source: int, target: int) -> bool:
        link = self.members[source], self.members[target]
        return self.switch.sent[link[0]][link[1]] > self.switch.received[link[0]][link[1]]

    def _note_arrival(self, status: RankStatus) -> None:
        """Charge the last rank to arrive with the time that the median rank waited for it."""
        self._arrivals.append(status.since)
        if len(self._arrivals) == len(self.statuses):
            median = sorted(self._arrivals)[(len(self._arrivals) - 1) // 2]
            status.lateness += self._arrivals[-1] - median
            self._arrivals.clear()


# -- waits -----------------------------------------------------------------------------------------


class LoggingHook(ProgressHook):
    """The waits of one rank in one call; long ones are logged."""

    def __init__(self, control: Control, rank: int, deadline: Deadline) -> None:
        self.control = control
        self.rank = rank
        self.deadline = deadline
        self._log_times = LogTimes(control.log_wait_after, deadline.seconds)

    def _sleep_limit(self, where: Callable[[], str], peers: Callable[[], list[int]]) -> float:
        """Log the wait if that is due; say how long to sleep until it is, or the deadline."""
        now, remaining = time.monotonic(), self.deadline.remaining()
        if not self._log_times.is_due(now):
            return min(remaining if remaining > 0 else STALL / 4, self._log_times.next - now)
        text, missing, waited = where(), peers(), now - self._log_times.start
        seen = {rank: self.control.statuses[rank].last_seen() for rank in missing}
        # A log handler is the program's code: it must not run under the lock of the world.
        self.control.switch.lock.release()
        try:
            log_wait(self.rank, text, missing, seen.__getitem__, waited)
        finally:
            self.control.switch.lock.acquire()
        return 0.0  # something may have come meanwhile


class CallHook(LoggingHook):
    """The waits of one rank in one collective."""

    def __init__(
        self, control: Control, rank: int, sequence: int, call: Call, deadline: Deadline
    ) -> None:
        super().__init__(control, rank, deadline)
        self.sequence = sequence
        self.call = call
        self._stall = Stall(control)
        self._status = control.statuses[rank]

    def poll(self, peer: int) -> float:
        """Raise the group error of the call, set one if it is due, or say how long to sleep."""
        control = self.control
        self._raise_group_error()
        if self._status.leave_reason is not None:
            text = f"{self.call.kind.label} #{self.sequence}: rank {self.rank} left while it ran"
            raise BackendClosed(text, this_rank=self.rank)
        group_peer = self._status.waiting_for = control.rank_of(peer)
        if group_peer == self.rank:  # waits for a group error, not for a rank
            self._log_times.next = math.inf
        lost = control.lost_rank(self.sequence, group_peer, self.rank)
        if lost is not None:
            control.lose(self.sequence, self.call, lost)
        elif self.deadline.remaining() <= 0:
            control.expire(self.sequence, self.call, self.deadline, self._stall)
        self._raise_group_error()
        return self._sleep_limit(
            lambda: f"{self.call.kind.label} #{self.sequence} at {self.call.site}",
            lambda: control.missing(self.sequence),
        )

    def arrived(self) -> None:
        self._status.waiting_for = None

    def damaged(self, peer: int, reason: str) -> None:
        """Give the call up because bytes from ``peer`` cannot be right."""
        rank = self.control.rank_of(peer)
        self.control.set_error(failures.corruption(self.call, self.sequence, rank, reason))
        self._raise_group_error()

    def _raise_group_error(self) -> None:
        found = self.control.error_of(self.sequence)
        if found is not None:
            raise found.now(self.rank)


class SplitHook(LoggingHook):
    """The wait of a member for the other members; speaks in ranks of the parent group."""

    def __init__(
        self,
        parent: Control,
        control: Control,
        members: tuple[int, ...],
        rank: int,
        deadline: Deadline,
    ) -> None:
        super().__init__(parent, rank, deadline)
        self.group = control
        self.members = members
        self.what = f"split({list(members)}){parent.group_name}"
        self._site = caller_site()

    def absent(self) -> list[int]:
        """List the members, as ranks of the parent, that have not called split."""
        joined = {self.members[rank] for rank in self.group.joined}
        return [rank for rank in self.members if rank not in joined]

    def poll(self, peer: int) -> float:
        """Raise the group error on the new group, bring one about if it is due."""
        due = None if self.group.final is not None else self._due()
        if due is not None:
            self.group.announce(due)
        if self.group.final is not None:
            raise self.group.final.now(self.rank)
        return self._sleep_limit(lambda: f"{self.what} at {self._site}", self.absent)

    def _due(self) -> GroupError | None:
        self.control.refuse_if_aborted(self.rank)
        absent = self.absent()
        gone = next((rank for rank in absent if self.control.statuses[rank].sends_no_more()), None)
        if gone is not None:
            leave_reason = self.control.statuses[gone].sends_no_more()
            assert leave_reason is not None
            text = f"{self.what}: rank {gone} {leave_reason.how}"
            return GroupError(RankLost, 0, text, {"rank": gone, "how": leave_reason.how})
        is_late = self.deadline.remaining() <= 0
        if is_late and not self.control.may_still_come(absent, self.deadline):
            others = self._other_splits(absent)
            text = failures.split_timeout(self.what, absent, self.deadline, others)
            return GroupError(CollectiveTimeout, 0, text, {"missing": absent, "rank": absent[0]})
        return None

    def _other_splits(self, absent: list[int]) -> list[str]:
        """Say which of the absent wait in a split of their own, with another list."""
        found = []
        for child in self.control.children:
            ranks = [self.control.rank_of(member) for member in child.members]
            waiting = [ranks[rank] for rank in child.joined if ranks[rank] in absent]
            if waiting and not child.is_complete and child.final is None:
                found.append(f"{failures.names_of_ranks(waiting)} in split({ranks})")
        return found
