# SPDX-License-Identifier: MIT OR Apache-2.0
"""The control plane of a group of threads: who is in which call, who is gone, and the one verdict.

On threads the control plane is a shared object, so a rank reports its call by writing it down when
it enters. Every method that waits or writes holds the lock of the world's Switch; ``look`` is
called by the transport with that lock held already.

Why nobody is failed wrongly: no rank finishes call #s before all have entered #s with one
fingerprint. So a difference at #s is seen while every rank is still inside #s, and a loss or a
timeout at #s is of no concern to a rank still inside #s-1: final verdicts count from their own
sequence number on.
"""

from __future__ import annotations

import logging
import time

from ferrodist.backends import verdict
from ferrodist.backends.verdict import Departure, Verdict
from ferrodist.call import Call, Kind
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    BackendClosed,
    CollectiveMismatch,
    CollectiveTimeout,
    ProtocolError,
    RankLost,
)
from ferrodist.transports.framing import Frame
from ferrodist.transports.threads import Switch

logger = logging.getLogger("ferrodist")

_NOTHING = Call(Kind.BARRIER)


class Desk:
    """What is known of one rank: its last call, whether it is inside, whom it waits for."""

    __slots__ = (
        "call",
        "departure",
        "fingerprint",
        "is_inside",
        "lateness",
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
        self.lateness = 0.0

    def last_seen(self) -> str:
        """Say what the rank was last doing, as a clause."""
        if self.sequence == 0:
            return "has made no call yet"
        where = f"{self.call.kind.label} #{self.sequence} at {self.call.site}"
        return f"is in {where}" if self.is_inside else f"last call was {where}"


class Control:
    """Shared by the ranks of a group; ``members`` are the world ranks behind the group's ranks."""

    def __init__(self, switch: Switch, members: tuple[int, ...], group: int, notice: float) -> None:
        self.switch = switch
        self.members = members
        self.group = group
        self.notice = notice
        self.desks = [Desk() for _ in members]
        self.joined: set[int] = set()
        self.is_complete = False  # whether all members have joined before anybody gave up
        self.children: list[Control] = []
        self.final: Verdict | None = None
        self.sends: dict[int, int] = {}  # large point-to-point sends that wait: sender to receiver
        self.rings: dict[int, list[int]] = {}  # senders found to wait in a circle, and the circle
        self._rank_of = {world_rank: rank for rank, world_rank in enumerate(members)}
        self._mismatch: Verdict | None = None
        self._arrivals: list[float] = []
        self._objection: tuple[type[CollectiveMismatch], str] | None = None

    def join(self, rank: int) -> None:
        """Write down that a member of a group being split off has come. Lock held."""
        self.joined.add(rank)
        self.is_complete = len(self.joined) == len(self.members) and self.final is None
        self.switch.wake_all()

    # -- a rank's way through a call ------------------------------------------------------------

    def enter(self, rank: int, sequence: int, call: Call, fingerprint: int) -> None:
        """Write down that a rank has entered a call; raises if the group is at its end."""
        with self.switch.lock:
            self.refuse_if_final(rank)
            desk = self.desks[rank]
            desk.sequence, desk.call, desk.fingerprint = sequence, call, fingerprint
            desk.is_inside, desk.since = True, time.monotonic()
            self._note_arrival(desk, sequence)
            self._judge(sequence)

    def finish(self, rank: int) -> None:
        """Write down that a rank is out of its call, well or not."""
        with self.switch.lock:
            self.desks[rank].is_inside = False
            self.desks[rank].waiting_for = None

    def refuse_if_final(self, rank: int) -> None:
        """Raise the final verdict if there is one."""
        if self.final is not None:
            raise self.final.later(rank)

    def object_to(self, sequence: int, error: type[CollectiveMismatch], text: str) -> None:
        """Report a difference that fingerprints cannot show: it becomes the verdict of the call."""
        with self.switch.lock:
            if self._mismatch is None or self._mismatch.sequence < sequence:  # the first one stands
                self._objection = self._objection or (error, text)
                self._judge(sequence)

    def verdict_of(self, sequence: int) -> Verdict | None:
        """The verdict that a rank inside ``sequence`` has to raise, if there is one."""
        if self.final is not None and self.final.sequence <= sequence:
            return self.final
        if self._mismatch is not None and self._mismatch.sequence == sequence:
            return self._mismatch
        return None

    # -- ends -----------------------------------------------------------------------------------

    def leave(self, rank: int, departure: Departure) -> None:
        """Write down that a rank is gone; who still needs it will find out. Lock held."""
        if self.desks[rank].departure is None:
            self.desks[rank].departure = departure
            self.switch.wake_all()

    def abort(self, rank: int | None, reason: str) -> None:
        """Give the group up, and every group split off it. Lock held."""
        self.give(verdict.abort(rank, reason))
        for child in self.children:
            world_rank = None if rank is None else self.members[rank]
            child_rank = child._rank_of.get(world_rank) if world_rank is not None else None
            is_outsider = rank is not None and child_rank is None
            outside = f"rank {rank} of the parent group aborted it: {reason}"
            child.abort(child_rank, outside if is_outsider else reason)

    def give(self, new: Verdict) -> None:
        """Announce a verdict; the first final one stands. Lock held."""
        if not new.is_final:
            self._mismatch = new
        elif self.final is None:
            self.final = new
        self.switch.wake_all()

    def expire(self, sequence: int, call: Call, deadline: Deadline) -> None:
        """A deadline ran out in ``sequence``: name who did not get through. Lock held."""
        missing = self.missing(sequence)
        last = [f"rank {rank} {self.desks[rank].last_seen()}" for rank in missing]
        self.give(verdict.timeout(call, sequence, missing, deadline, last))

    def lose(self, sequence: int, call: Call, rank: int) -> None:
        """A rank that ``sequence`` needs is gone. Lock held."""
        departure = self.desks[rank].departure
        assert departure is not None
        self.give(verdict.loss(call, sequence, rank, departure))

    # -- who is to blame ------------------------------------------------------------------------

    def missing(self, sequence: int) -> list[int]:
        """Name the ranks that hold ``sequence`` up: not arrived, not heard, or stuck inside."""
        ranks = range(len(self.desks))
        absent = [rank for rank in ranks if self.desks[rank].sequence < sequence]
        waits = {rank: self.desks[rank].waiting_for for rank in ranks if self.desks[rank].is_inside}
        unheard = {
            peer for rank, peer in waits.items() if peer is not None and self._is_cut(peer, rank)
        }
        stuck = [rank for rank, peer in waits.items() if peer is None or peer == rank]
        return (
            absent
            or sorted(unheard)
            or stuck
            or sorted({peer for peer in waits.values() if peer is not None})
        )

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

    def _judge(self, sequence: int) -> None:
        """Give the verdict of a difference once every rank has entered the call."""
        if any(desk.sequence < sequence for desk in self.desks):
            return
        objection, self._objection = self._objection, None
        fingerprint = self.desks[0].fingerprint
        if objection is not None:
            self.give(self._objected(sequence, *objection))
        elif any(desk.fingerprint != fingerprint for desk in self.desks):
            self.give(verdict.disagreement(sequence, [desk.call for desk in self.desks]))

    def _objected(self, sequence: int, error: type[CollectiveMismatch], text: str) -> Verdict:
        return verdict.objection(sequence, [desk.call for desk in self.desks], error, text)

    def _note_arrival(self, desk: Desk, sequence: int) -> None:
        """Charge the last rank to arrive with the time that the median rank waited for it."""
        self._arrivals.append(desk.since)
        if len(self._arrivals) == len(self.desks):
            median = sorted(self._arrivals)[len(self._arrivals) // 2]
            desk.lateness += self._arrivals[-1] - median
            self._arrivals.clear()


class CallWatch:
    """The waits of one rank in one collective."""

    def __init__(
        self, control: Control, rank: int, sequence: int, call: Call, deadline: Deadline
    ) -> None:
        self.control = control
        self.rank = rank
        self.sequence = sequence
        self.call = call
        self.deadline = deadline
        self._desk = control.desks[rank]
        self._notice = control.notice
        self._next_notice = time.monotonic() + control.notice

    def look(self, peer: int) -> float:
        """Raise the verdict of the call, bring one about if it is due, or say how long to sleep."""
        control = self.control
        if self._desk.departure is not None:
            text = f"{self.call.kind.label} #{self.sequence}: rank {self.rank} left while it ran"
            raise BackendClosed(text, this_rank=self.rank)
        group_peer = self._desk.waiting_for = control.rank_of(peer)
        self._raise_verdict()
        lost = control.lost_rank(self.sequence, group_peer, self.rank)
        if lost is not None:
            control.lose(self.sequence, self.call, lost)
        elif self.deadline.remaining() <= 0:
            control.expire(self.sequence, self.call, self.deadline)
        self._raise_verdict()
        return min(self.deadline.remaining(), self._notice_seconds())

    def arrived(self) -> None:
        """Hear that the wait is over."""
        self._desk.waiting_for = None

    def foreign(self, peer: int, frame: Frame) -> None:
        """Nothing to report: on threads every call is written down when it is entered."""

    def damaged(self, peer: int, reason: str) -> None:
        """Give the call up because bytes from ``peer`` cannot be right."""
        rank = self.control.rank_of(peer)
        self.control.give(verdict.corruption(self.call, self.sequence, rank, reason))
        self._raise_verdict()

    def _raise_verdict(self) -> None:
        found = self.control.verdict_of(self.sequence)
        if found is not None:
            raise found.now(self.rank)

    def _notice_seconds(self) -> float:
        seconds = self._next_notice - time.monotonic()
        if seconds > 0:
            return seconds
        missing = verdict.names_of_ranks(self.control.missing(self.sequence))
        where = f"{self.call.kind.label} #{self.sequence} at {self.call.site}"
        self._notice *= 2
        self._next_notice = time.monotonic() + self._notice
        # A log handler is somebody else's code: it must not run under the lock of the world.
        self.control.switch.lock.release()
        try:
            logger.warning("rank %d: still waiting for %s in %s", self.rank, missing, where)
        finally:
            self.control.switch.lock.acquire()
        return 0.0  # something may have come meanwhile


class MessageWatch:
    """The waits of one rank in a point-to-point call: its errors are its own, the group goes on."""

    def __init__(self, control: Control, rank: int, what: str, deadline: Deadline) -> None:
        self.control = control
        self.rank = rank
        self.what = what
        self.deadline = deadline

    def look(self, peer: int) -> float:
        """Raise if the group was given up, the peer is gone or the time is over."""
        control, group_peer = self.control, self.control.rank_of(peer)
        if control.final is not None and control.final.error is not RankLost:
            raise control.final.later(self.rank)
        if self.deadline.remaining() <= 0 or self.rank in control.rings:
            raise self.timed_out(group_peer)
        source, target = peer, control.members[self.rank]
        departure = control.desks[group_peer].departure
        if departure is not None and not control.switch.is_pending(source, target):
            text = f"{self.what}: rank {group_peer} {departure.how}"
            raise RankLost(text, rank=group_peer, this_rank=self.rank, how=departure.how)
        return self.deadline.remaining()

    def arrived(self) -> None:
        """Hear that the wait is over."""

    def foreign(self, peer: int, frame: Frame) -> None:
        """Never happens: point-to-point messages carry no fingerprint."""

    def damaged(self, peer: int, reason: str) -> None:
        """Refuse bytes that cannot be right."""
        rank = self.control.rank_of(peer)
        text = f"{self.what}: bytes from rank {rank} cannot be right ({reason})"
        raise ProtocolError(text, rank=rank, this_rank=self.rank, reason=reason)

    def timed_out(self, peer: int) -> CollectiveTimeout:
        """Make the error of a wait that took too long; a ring of sends is called by its name."""
        ring = self.control.rings.pop(self.rank, None) or self._find_ring()
        if ring:
            path = " -> ".join(map(str, [*ring, ring[0]]))
            text = f"ranks {path} all send and none receives; use sendrecv"
        else:
            text = (
                f"rank {peer} did not answer within {self.deadline}; look at it or raise timeout="
            )
        return CollectiveTimeout(
            f"{self.what}: {text}", missing=[peer], rank=peer, this_rank=self.rank
        )

    def _find_ring(self) -> list[int]:
        """Follow the sends that wait; a way back to this rank is a ring, and all in it are told."""
        ring, sends = [self.rank], self.control.sends
        while ring[-1] in sends and sends[ring[-1]] not in ring:
            ring.append(sends[ring[-1]])
        if sends.get(ring[-1]) != self.rank:
            return []
        start = ring.index(min(ring))
        ring = ring[start:] + ring[:start]
        self.control.rings.update({rank: ring for rank in ring if rank != self.rank})
        self.control.switch.wake_all()
        return ring
