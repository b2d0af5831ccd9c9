# SPDX-License-Identifier: MIT OR Apache-2.0
"""The control plane of a group of threads: who is in which call, who is gone, and the verdicts.

On threads the control plane is a shared object, so a rank reports its call by writing it down when
it enters. Every method that writes holds the lock of the world's Switch, or says "lock held" and
expects its caller to.

Why nobody is failed wrongly: no rank finishes call #s before all have entered #s with one
fingerprint. So a difference at #s is seen while every rank is still inside #s, and a loss or a
timeout at #s is of no concern to a rank still inside #s-1: a final verdict counts from its own
sequence number on, and a rank further behind may still get one of its own.

A deadline ends a call in which a rank is missing: both its entering and the verdict that bars it
happen under the lock. If all have entered, it goes on as long as anything moves.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ferrodist.backends import verdict
from ferrodist.backends.verdict import Departure, Verdict
from ferrodist.call import Call, Kind
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendClosed, CollectiveMismatch, RankLost
from ferrodist.transports.threads import Switch

if TYPE_CHECKING:
    from ferrodist.backends.watches import SendWatch

_NOTHING = Call(Kind.BARRIER)
STALL = 0.2  # seconds for which nothing may move in a call that all have entered and that is late


class Desk:
    """What is known of one rank: its last call, whether it is inside, whom it waits for."""

    __slots__ = (
        "call",
        "departure",
        "fingerprint",
        "is_closing",
        "is_inside",
        "lateness",
        "receives",
        "sequence",
        "since",
        "waiting_for",
    )

    def __init__(self) -> None:
        self.sequence = 0
        self.call = _NOTHING
        self.fingerprint = 0
        self.is_inside = False
        self.waiting_for: int | None = None
        self.since = 0.0
        self.departure: Departure | None = None
        self.is_closing = False  # makes no new calls, but waits for those in flight
        self.receives = 0  # point-to-point receives in flight
        self.lateness = 0.0

    def sends_no_more(self) -> Departure | None:
        """Tell how a rank left, or is leaving, that sends nothing it has not sent by now."""
        return self.departure or (verdict.closing() if self.is_closing else None)

    def takes_no_more(self) -> Departure | None:
        """Tell how a rank left, or is leaving, that takes no message any more."""
        return self.departure if self.receives else self.sends_no_more()

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
        notice: float,
        groups: dict[int, Control],
    ) -> None:
        self.switch = switch
        self.groups = groups
        self.members = members
        self.group = group
        self.notice = notice
        self.desks = [Desk() for _ in members]
        self.children: list[Control] = []
        self.sends: list[SendWatch] = []  # large sends that wait, each holding its caller
        self.joined: set[int] = set()
        self.is_complete = False  # whether all members have joined before anybody gave up
        self._rank_of = {world_rank: rank for rank, world_rank in enumerate(members)}
        self._finals: list[Verdict] = []
        self._mismatch: Verdict | None = None
        self._report: tuple[type[CollectiveMismatch], str] | None = None
        self._arrivals: list[float] = []
        self.num_moves = 0  # changes as long as calls of this group get on
        groups[group] = self  # last: a finalizer may look at it from now on

    def join(self, rank: int) -> None:
        """Write down that a member of a group being split off has come. Lock held."""
        self.joined.add(rank)
        self.is_complete = len(self.joined) == len(self.members) and self.final is None
        self.switch.wake_all()

    # -- a rank's way through a call ------------------------------------------------------------

    def enter(self, rank: int, sequence: int, call: Call, fingerprint: int) -> None:
        """Write down that a rank has entered a call; raises if the group is at its end."""
        with self.switch.lock:
            desk = self.desks[rank]
            if desk.departure is not None:
                raise BackendClosed(f"rank {rank} has left this group", this_rank=rank)
            self.refuse_if_final(rank)
            desk.sequence, desk.call, desk.fingerprint = sequence, call, fingerprint
            desk.is_inside, desk.since = True, time.monotonic()
            self.num_moves += 1
            self._note_arrival(desk)
            self._judge(sequence)

    def finish(self, rank: int) -> None:
        """Write down that a rank is out of its call, well or not."""
        with self.switch.lock:
            self.desks[rank].is_inside = False
            self.desks[rank].waiting_for = None

    def report_mismatch(self, sequence: int, error: type[CollectiveMismatch], text: str) -> None:
        """Report a difference that fingerprints cannot show: it becomes the verdict of the call."""
        with self.switch.lock:
            if self._mismatch is None or self._mismatch.sequence < sequence:  # the first one stands
                self._report = self._report or (error, text)
                self._judge(sequence)

    # -- verdicts -------------------------------------------------------------------------------

    @property
    def final(self) -> Verdict | None:
        """The verdict that ended the group: it answers every later call."""
        return self._finals[0] if self._finals else None

    def refuse_if_final(self, rank: int) -> None:
        """Raise the final verdict if there is one."""
        if self._finals:
            raise self._finals[0].later(rank)

    def refuse_if_aborted(self, rank: int) -> None:
        """Raise the final verdict unless it is a loss: those left may still talk to each other."""
        aborted = next((final for final in self._finals if final.error is not RankLost), None)
        if aborted is not None:
            raise aborted.later(rank)

    def verdict_of(self, sequence: int) -> Verdict | None:
        """Return what a rank inside ``sequence`` has to raise, if anything."""
        if self._mismatch is not None and self._mismatch.sequence == sequence:
            return self._mismatch
        return next((final for final in self._finals if final.sequence <= sequence), None)

    def give(self, new: Verdict) -> None:
        """Announce a verdict, unless one was given that concerns the same ranks. Lock held."""
        new = new._replace(text=new.text + self.group_name)
        if not new.is_final:
            self._mismatch = new
        elif all(final.sequence > new.sequence for final in self._finals):
            self._finals.append(new)
        self.switch.wake_all()

    def leave(self, rank: int, departure: Departure) -> None:
        """Write down that a rank is gone; who still needs it will find out. Lock held."""
        if self.desks[rank].departure is None:
            self.desks[rank].departure = departure
            self.switch.wake_all()

    def abort(self, rank: int | None, reason: str) -> None:
        """Give the group up, and every group split off it. Lock held."""
        self.give(verdict.abort(rank, reason))
        for child in self.children:
            child_rank = None if rank is None else child._rank_of.get(self.members[rank])
            is_outsider = rank is not None and child_rank is None
            outside = f"rank {rank} of the parent group aborted it: {reason}"
            child.abort(child_rank, outside if is_outsider else reason)

    def expire(self, sequence: int, call: Call, deadline: Deadline, stall: Stall) -> None:
        """Give the verdict of a deadline that ran out in ``sequence``, if it is due. Lock held."""
        if not self._absent(sequence) and not stall.is_over():
            return
        missing = self.missing(sequence)
        last = [f"rank {rank} {self._excuse(rank, sequence)}" for rank in missing]
        self.give(verdict.timeout(call, sequence, missing, deadline, last))

    def lose(self, sequence: int, call: Call, rank: int) -> None:
        """Give the verdict of a rank that is gone and that ``sequence`` needs. Lock held."""
        departure = self.desks[rank].departure
        assert departure is not None
        self.give(verdict.loss(call, sequence, rank, departure))

    def _judge(self, sequence: int) -> None:
        """Give the verdict of a difference once every rank has entered the call."""
        if any(desk.sequence < sequence for desk in self.desks):
            return
        report, self._report = self._report, None
        fingerprint = self.desks[0].fingerprint
        if report is not None:
            self.give(
                verdict.reported_mismatch(sequence, [desk.call for desk in self.desks], *report)
            )
        elif any(desk.fingerprint != fingerprint for desk in self.desks):
            self.give(verdict.mismatch(sequence, [desk.call for desk in self.desks]))

    @property
    def group_name(self) -> str:
        """Whose ranks an error speaks of, where they are not those of the world."""
        if self.members == tuple(range(self.switch.size)):
            return ""
        return f" (in the group of world ranks {list(self.members)})"

    def _excuse(self, rank: int, sequence: int) -> str:
        """Say what a rank that did not get through is doing."""
        desk, world_rank = self.desks[rank], self.members[rank]
        if desk.sequence > sequence or (desk.sequence == sequence and not desk.is_inside):
            return "has sent its messages, but not all of them arrived"
        if not desk.is_inside:
            for other in list(self.groups.values()):
                if world_rank in other.members and other is not self:
                    elsewhere = other.desks[other.rank_of(world_rank)]
                    if elsewhere.is_inside:
                        return elsewhere.last_seen() + (other.group_name or " (in the world)")
        return desk.last_seen()

    def waiting_tags(self, source: int, target: int) -> list[int]:
        """List the tags of messages between two ranks that nobody has received. Lock held."""
        return self.switch.waiting_tags(self.members[source], self.members[target], self.group)

    # -- who is to blame ------------------------------------------------------------------------

    def missing(self, sequence: int) -> list[int]:
        """Name the ranks that hold ``sequence`` up: not arrived, not heard, or stuck inside."""
        ranks, absent = range(len(self.desks)), self._absent(sequence)
        waits = {rank: self.desks[rank].waiting_for for rank in ranks if self.desks[rank].is_inside}
        unheard = {
            peer for rank, peer in waits.items() if peer is not None and self._is_cut(peer, rank)
        }
        stuck = [rank for rank, peer in waits.items() if peer is None or peer == rank]
        waited_for = {peer for peer in waits.values() if peer is not None}
        return absent or sorted(unheard) or stuck or sorted(waited_for)

    def _absent(self, sequence: int) -> list[int]:
        """List the ranks that have not entered a call; once it is given up they never can."""
        return [rank for rank, desk in enumerate(self.desks) if desk.sequence < sequence]

    def lost_rank(self, sequence: int, peer: int, rank: int) -> int | None:
        """Find a rank that is gone and that ``rank``, waiting for ``peer``, still needs."""
        for other, desk in enumerate(self.desks):
            if desk.departure is not None and desk.sequence < sequence:
                return other
        if self.desks[peer].departure is not None:
            source, target = self.members[peer], self.members[rank]
            return None if self.switch.is_pending(source, target) else peer
        return None

    def rank_of(self, world_rank: int) -> int:
        """Translate a world rank to a rank of this group."""
        return self._rank_of[world_rank]

    def _is_cut(self, source: int, target: int) -> bool:
        return self.switch.undelivered(self.members[source], self.members[target]) > 0

    def _note_arrival(self, desk: Desk) -> None:
        """Charge the last rank to arrive with the time that the median rank waited for it."""
        self._arrivals.append(desk.since)
        if len(self._arrivals) == len(self.desks):
            median = sorted(self._arrivals)[(len(self._arrivals) - 1) // 2]
            desk.lateness += self._arrivals[-1] - median
            self._arrivals.clear()
