# SPDX-License-Identifier: MIT OR Apache-2.0
"""Watches: what a wait looks at before it sleeps, for collectives, messages and splits.

``look`` is called by the transport with the lock of the world held. It raises when waiting is over,
and brings a verdict about when one is due.
"""

from __future__ import annotations

import logging
import math
import time

from ferrodist.backends import message_errors, verdict
from ferrodist.backends.control import STALL, Control, Stall
from ferrodist.backends.verdict import Verdict
from ferrodist.call import Call, caller_site
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendClosed, CollectiveTimeout, RankLost

logger = logging.getLogger("ferrodist")


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
        self._stall = Stall(control)
        self._desk = control.desks[rank]
        self._notice = control.notice
        self._next_notice = time.monotonic() + control.notice

    def look(self, peer: int) -> float:
        """Raise the verdict of the call, bring one about if it is due, or say how long to sleep."""
        control = self.control
        self._raise_verdict()
        if self._desk.departure is not None:
            text = f"{self.call.kind.label} #{self.sequence}: rank {self.rank} left while it ran"
            raise BackendClosed(text, this_rank=self.rank)
        group_peer = self._desk.waiting_for = control.rank_of(peer)
        if group_peer == self.rank:  # waits for a verdict, not for anybody
            self._next_notice = math.inf
        lost = control.lost_rank(self.sequence, group_peer, self.rank)
        if lost is not None:
            control.lose(self.sequence, self.call, lost)
        elif self.deadline.remaining() <= 0:
            control.expire(self.sequence, self.call, self.deadline, self._stall)
        self._raise_verdict()
        remaining = self.deadline.remaining()
        return min(remaining if remaining > 0 else STALL / 4, self._seconds_to_notice())

    def arrived(self) -> None:
        """Hear that the wait is over."""
        self._desk.waiting_for = None

    def damaged(self, peer: int, reason: str) -> None:
        """Give the call up because bytes from ``peer`` cannot be right."""
        rank = self.control.rank_of(peer)
        self.control.give(verdict.corruption(self.call, self.sequence, rank, reason))
        self._raise_verdict()

    def _raise_verdict(self) -> None:
        found = self.control.verdict_of(self.sequence)
        if found is not None:
            raise found.now(self.rank)

    def _seconds_to_notice(self) -> float:
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

    def __init__(self, control: Control, rank: int, call: str, deadline: Deadline) -> None:
        self.control = control
        self.rank = rank
        self.call = call
        self.deadline = deadline
        self.is_receiving = False
        self._site = caller_site()

    @property
    def what(self) -> str:
        """The call as errors show it; made only for them."""
        return f"{self.call} at {self._site}{self.control.group_name}"

    def look(self, peer: int) -> float:
        """Raise if the group was given up, the peer is gone or the time is over."""
        control, group_peer = self.control, self.control.rank_of(peer)
        control.refuse_if_aborted(self.rank)
        if self.deadline.remaining() <= 0:
            raise self.timed_out(group_peer)
        source, target = peer, control.members[self.rank]
        desk = control.desks[group_peer]
        departure = desk.sends_no_more() if self.is_receiving else desk.takes_no_more()
        if departure is not None and not control.switch.is_pending(source, target):
            tags = control.waiting_tags(group_peer, self.rank)
            raise message_errors.lost(self.what, group_peer, self.rank, departure, tags)
        return self.deadline.remaining()

    def arrived(self) -> None:
        """Hear that the wait is over."""

    def damaged(self, peer: int, reason: str) -> None:
        """Refuse bytes that cannot be right."""
        rank = self.control.rank_of(peer)
        raise message_errors.damaged(self.what, rank, self.rank, reason)

    def timed_out(self, peer: int) -> CollectiveTimeout:
        """Make the error of a wait that took too long."""
        tags = self.control.waiting_tags(peer, self.rank)
        return message_errors.timed_out(self.what, peer, self.rank, self.deadline, tags)


class SendWatch(MessageWatch):
    """The wait of a large send that holds its caller: a ring of these is called by its name."""

    def __init__(
        self, control: Control, rank: int, peer: int, call: str, deadline: Deadline
    ) -> None:
        super().__init__(control, rank, call, deadline)
        self.peer = peer
        self.ring: list[int] = []

    def look(self, peer: int) -> float:
        """Raise as a message does; whoever finds a ring first tells the others in it."""
        if not self.ring and self.deadline.remaining() <= 0:
            self._find_ring()
        departure = self.control.desks[self.peer].takes_no_more()
        if self.ring and (departure is not None or self.deadline.remaining() <= 0):
            raise message_errors.send_cycle(self.what, self.peer, self.rank, self.ring)
        return super().look(peer)

    def _find_ring(self) -> None:
        """Follow the sends that wait; a way back to this one is a ring."""
        sends = {watch.rank: watch for watch in self.control.sends}
        ring = [self]
        while (after := sends.get(ring[-1].peer)) is not None and after not in ring:
            ring.append(after)
        if after is self:
            ranks = [watch.rank for watch in ring]
            start = ranks.index(min(ranks))
            for watch in ring:
                watch.ring = ranks[start:] + ranks[:start]


class SplitWatch:
    """The wait of a member for the other members; speaks in ranks of the parent group."""

    def __init__(
        self,
        parent: Control,
        control: Control,
        members: tuple[int, ...],
        rank: int,
        deadline: Deadline,
    ) -> None:
        self.parent = parent
        self.control = control
        self.members = members
        self.rank = rank
        self.deadline = deadline
        self.what = f"split({list(members)})"

    def absent(self) -> list[int]:
        """List the members, as ranks of the parent, that have not called split."""
        joined = {self.members[rank] for rank in self.control.joined}
        return [rank for rank in self.members if rank not in joined]

    def look(self, peer: int) -> float:
        """Raise the verdict on the new group, bring one about if it is due."""
        due = None if self.control.final is not None else self._due()
        if due is not None:
            self.control.give(due)
        if self.control.final is not None:
            raise self.control.final.now(self.rank)
        return self.deadline.remaining()

    def arrived(self) -> None:
        """Hear that the wait is over."""

    def damaged(self, peer: int, reason: str) -> None:
        """Say nothing: no bytes are awaited here."""

    def _due(self) -> Verdict | None:
        self.parent.refuse_if_aborted(self.rank)
        absent = self.absent()
        gone = next((rank for rank in absent if self.parent.desks[rank].sends_no_more()), None)
        if gone is not None:
            departure = self.parent.desks[gone].sends_no_more()
            assert departure is not None
            text = f"{self.what}: rank {gone} {departure.how}"
            return Verdict(RankLost, 0, text, {"rank": gone, "how": departure.how})
        if self.deadline.remaining() <= 0:
            others = self._other_splits(absent)
            text = (
                f"{self.what}: {verdict.names_of_ranks(absent)} did not call it within "
                f"{self.deadline}{others}; every member must, with the same list. the limit is "
                "timeout=, backend.timeout or FERRODIST_TIMEOUT"
            )
            return Verdict(CollectiveTimeout, 0, text, {"missing": absent, "rank": absent[0]})
        return None

    def _other_splits(self, absent: list[int]) -> str:
        """Say which of the absent wait in a split of their own, with another list."""
        found = []
        for child in self.parent.children:
            ranks = [self.parent.rank_of(member) for member in child.members]
            waiting = [ranks[rank] for rank in child.joined if ranks[rank] in absent]
            if waiting and not child.is_complete and child.final is None:
                found.append(f"{verdict.names_of_ranks(waiting)} in split({ranks})")
        return f" (waiting elsewhere: {', '.join(found)})" if found else ""
