# SPDX-License-Identifier: MIT OR Apache-2.0
"""ProcessBackend: a rank that is a process and holds a native group, whatever connects the ranks.

Here is what surrounds the collectives: verdicts, splitting, leaving, and the texts of what goes
wrong. Joining, and the collectives themselves, are for subclasses.
"""

from __future__ import annotations

import abc
import functools
import weakref
from collections.abc import Sequence
from typing import Any, Self, TypeVar

from ferrodist import _native
from ferrodist.backends import message_errors, verdict
from ferrodist.backends.base import Algorithm, Body, Statistics
from ferrodist.backends.deaths import Deaths
from ferrodist.backends.messaging import MessagingBackend
from ferrodist.backends.native_group import NativeGroup, NativeSplit, NativeWorld
from ferrodist.backends.native_turns import NativeTurns
from ferrodist.backends.outcome import Outcome
from ferrodist.backends.planner import Planner
from ferrodist.backends.process_messenger import ProcessMessenger
from ferrodist.backends.process_talk import ProcessTalk
from ferrodist.backends.process_texts import (
    pack_departure,
    pack_verdict,
    unpack_departure,
    unpack_verdict,
)
from ferrodist.backends.verdict import Departure, Verdict
from ferrodist.call import Call, Kind
from ferrodist.config import DEFAULT, Config, Timeout, check_timeout
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendClosed, CollectiveTimeout, RankLost

T = TypeVar("T")

_FOR_EVER = 1e9  # seconds: thirty years
_QUEUE_LOOK = 0.05  # seconds between looks while a call waits for its turn


class ProcessBackend(MessagingBackend):
    """One rank of a group of processes; ``members`` are the ranks of the group in the world."""

    _turns: NativeTurns
    _messenger: ProcessMessenger

    def __init__(
        self,
        world: NativeWorld,
        group: NativeGroup,
        members: tuple[int, ...],
        rank: int,
        config: Config,
        deaths: Deaths,
    ) -> None:
        self.world = world
        self.group = group
        self.members = members
        self.settled = 0  # the last call that ended in a difference all ranks know of
        self._deaths = deaths
        super().__init__(rank, len(members), config)
        self._turns = NativeTurns(group)
        self._messenger = ProcessMessenger(self)
        self._id = 0
        self._parent: ProcessBackend | None = None
        self._children: weakref.WeakSet[ProcessBackend] = weakref.WeakSet()
        self._splits: dict[tuple[int, ...], int] = {}
        self._note_change()
        weakref.finalize(self, group.leave, b"").atexit = False

    def _note_change(self) -> None:
        timeout, group = self._timeout, self.group
        is_limited = timeout is not None and timeout < _FOR_EVER
        group.timeout_ns = max(1, int(timeout * 1e9)) if timeout and is_limited else 0
        group.reproducible = self._reproducible
        group.is_open = not self._is_closed

    # -- what subclasses write ------------------------------------------------------------------

    @abc.abstractmethod
    def _new_talk(
        self, sequence: int, call: Call, deadline: Deadline, num_runs: int = 0
    ) -> ProcessTalk:
        """Begin a call whose turn has come, or go on with one after ``num_runs`` collectives."""

    @abc.abstractmethod
    def _new_planner(self) -> Planner:
        """Make what finds and checks algorithms."""

    @abc.abstractmethod
    def _new_split(self, members: Sequence[int], identity: int) -> NativeSplit:
        """Begin to make a group of some ranks; ``identity`` is the same on all of them."""

    @abc.abstractmethod
    def _child(self, group: Any, world_ranks: tuple[int, ...], rank: int) -> Self:
        """Make this rank's backend of a group that a split has made."""

    @abc.abstractmethod
    def damage_of(self, rank: int, what: str) -> str:
        """Say in a clause why ``what`` of a rank, as "its queue", cannot be right."""

    def loss_of(self, rank: int) -> int:
        """Return the outcome of a wait for a rank that is gone."""
        return Outcome.LOST

    # -- collectives ----------------------------------------------------------------------------

    def converse(self, sequence: int, call: Call, body: Body[T], deadline: Deadline) -> T:
        """Run the body; its first collective compares the call with those of the others."""
        if self.group.has_left:
            raise BackendClosed(f"rank {self.rank} has left this group", this_rank=self.rank)
        talk = self._new_talk(sequence, call, deadline)
        try:
            return body(talk)
        finally:
            talk.end()

    def look_while_queued(self, sequence: int, call: Call, deadline: Deadline) -> float:
        """Let the call that holds this one up run out of time when this one does."""
        if deadline.remaining() <= 0 and self.verdict_of(None) is None:
            running = self._turns.last_ended + 1
            missing = [rank for rank in self.group.missing() if rank != self.rank]
            if missing:
                due = self.expiry(call, running, deadline, missing)
            else:
                why = [f"on rank {self.rank} a callback of an earlier Work is still running"]
                due = verdict.timeout(call, running, [self.rank], deadline, why)
            raise self.give(due).now(self.rank)
        self._refuse_if_final()
        return min(deadline.remaining(), _QUEUE_LOOK)

    def is_settled(self, sequence: int) -> bool:
        """Tell whether the other ranks know how this call ends, or this rank has left."""
        is_known = self.settled == sequence or self.group.verdict(sequence) is not None
        return is_known or self.group.has_left

    def check_algorithm(
        self, kind: Kind, algorithm: Algorithm, root: int, reproducible: bool
    ) -> str | None:
        """Refuse an algorithm that is unknown, wrong, or out of order where order is asked for."""
        return (
            None if algorithm is None else self.planner.check(kind, algorithm, root, reproducible)
        )

    @functools.cached_property
    def planner(self) -> Planner:
        """What finds and checks the algorithms that callers name."""
        return self._new_planner()

    # -- verdicts -------------------------------------------------------------------------------

    def give(self, due: Verdict) -> Verdict:
        """Announce a verdict; return the one that stands, which another rank may have given."""
        due = due._replace(text=due.text + self.group_name)
        self.group.give_verdict(due.sequence, pack_verdict(due, self.members))
        return self.verdict_of(due.sequence) or due

    def verdict_of(self, sequence: int | None) -> Verdict | None:
        """Return the final verdict that concerns a call, or any."""
        data = self.group.verdict(sequence)
        return None if data is None else unpack_verdict(data, self.members)

    def _refuse_if_final(self) -> None:
        final = self.verdict_of(None)
        if final is not None:
            raise final.later(self.rank)

    def refuse_if_aborted(self) -> None:
        """Raise the final verdict unless it is a loss: those left may still talk to each other."""
        final = self.verdict_of(None)
        if final is not None and final.error is not RankLost:
            raise final.later(self.rank)

    def expiry(self, call: Call, sequence: int, deadline: Deadline, missing: list[int]) -> Verdict:
        """Make the verdict of a deadline that ran out."""
        last = [f"rank {rank} {self._last_seen(rank, sequence)}" for rank in missing]
        return verdict.timeout(call, sequence, missing, deadline, last)

    def _last_seen(self, rank: int, sequence: int) -> str:
        """Say what a rank that did not get through is doing, as a clause."""
        report = self.world.report_of(self.members[rank])
        if report:
            return report
        last, kind = self.group.last_call(rank)
        if last == 0:
            return "has made no call yet"
        label = f"{Kind(kind).label} #{last}"
        return f"is in {label}" if last >= sequence else f"last call was {label}"

    def departure_of(self, rank: int) -> Departure:
        """Tell how a rank left, in its own words if it had any."""
        words = self.group.departure_of(rank)
        if words is None:
            return self._deaths.departure_of(self.members[rank])
        return unpack_departure(words)

    @property
    def silence(self) -> str:
        """What is said of a rank that does nothing at all, not even beat."""
        return f"shows no sign of life: no heartbeat for {self.config.silence:g} s"

    @property
    def group_name(self) -> str:
        """Whose ranks an error speaks of, where they are not those of the world."""
        return f" (in the group of world ranks {list(self.members)})" if self._parent else ""

    def abort(self, reason: str = "abort() was called") -> None:
        """Give the group up, and every group split off it."""
        self.check_process()
        self.give(verdict.abort(self.rank, reason))

    def check_usable(self) -> None:
        """Raise unless this rank may still make calls, from this thread."""
        super().check_usable()
        if self.group.has_left:  # with the group that this one was split off
            raise BackendClosed(f"rank {self.rank} has left this group", this_rank=self.rank)

    def _complete(self, parent: Self, identity: int, deadline: Deadline) -> None:
        """Do what is left to do when a split has made this group."""

    # -- leaving --------------------------------------------------------------------------------

    def _announce_closing(self) -> None:
        self.group.announce_closing()

    def _holds_lock(self) -> bool:
        return False

    def fail(self, error: BaseException) -> None:
        """Leave at once because this rank's program raised; others and launcher are told."""
        if not self.is_forked and self._parent is None:
            self._deaths.say(error)
        super().fail(error)

    def _leave(self, departure: Departure) -> None:
        for child in list(self._children):
            child._leave(departure)
        self.group.leave(pack_departure(departure))

    # -- groups ---------------------------------------------------------------------------------

    def split(self, ranks: Sequence[int], *, timeout: Timeout = DEFAULT) -> Self:
        """Make a group of some ranks of this one.

        Only the members call it, all with the same list; their ranks in the new group follow its
        order. Waits for all of them and names those missing.
        """
        self.check_usable()
        members = self.check_members(ranks)
        deadline = Deadline(self.timeout if timeout is DEFAULT else check_timeout(timeout))
        self.refuse_if_aborted()
        nth = self._splits[members] = self._splits.get(members, 0) + 1
        identity = _native.fingerprint([self._id, nth, *members]) or 1
        return self._split_off(members, identity, deadline)

    def _split_off(self, members: tuple[int, ...], identity: int, deadline: Deadline) -> Self:
        """Make a group whose members know it by ``identity``, which no other group has."""
        split = self._new_split(members, identity)
        ending = split.wait(deadline.end, lambda: None)
        if ending[0] != Outcome.DONE:
            raise self._split_failure(split, members, deadline, *ending)
        world_ranks = tuple(self.members[member] for member in members)
        child = self._child(split.group(), world_ranks, members.index(self.rank))
        child._complete(self, identity, deadline)
        child._parent, child._id = self, identity  # a parent must outlive its groups
        child.timeout, child.reproducible = self.timeout, self.reproducible
        self._children.add(child)
        return child

    def _split_failure(
        self,
        split: NativeSplit,
        members: tuple[int, ...],
        deadline: Deadline,
        outcome: int,
        culprit: int,
        error: BaseException | None,
    ) -> BaseException:
        """Make the error of a split that did not come about; it is this rank's own."""
        what = f"split({list(members)})"
        if outcome == Outcome.INTERRUPTED and error is not None:
            self.abort(f"{verdict.words_of(error)} (in split)")
            return error
        if outcome == Outcome.VERDICT:
            final = self.verdict_of(None)
            assert final is not None
            return final.later(self.rank)
        if outcome == Outcome.LATE:
            return self._split_timeout(what, split.absent(), deadline)
        if outcome == Outcome.CORRUPT:
            reason = self.damage_of(culprit, "its group")
            return message_errors.damaged(what, culprit, self.rank, reason)
        how = self.departure_of(culprit).how
        text = f"{what}: rank {culprit} {how}"
        return RankLost(text, rank=culprit, this_rank=self.rank, how=how)

    def _split_timeout(self, what: str, absent: list[int], deadline: Deadline) -> CollectiveTimeout:
        others = []
        for rank in absent:
            for world_ranks in self.world.invitations_of(self.members[rank]):
                if not set(world_ranks) <= set(self.members):  # off a group around this one
                    continue
                ranks = [self.members.index(world_rank) for world_rank in world_ranks]
                others.append(f"{verdict.names_of_ranks([rank])} in split({ranks})")
        elsewhere = f" (waiting elsewhere: {', '.join(others)})" if others else ""
        text = (
            f"{what}: {verdict.names_of_ranks(absent)} did not call it within {deadline}"
            f"{elsewhere}; every member must, with the same list. the limit is timeout=, "
            "backend.timeout or FERRODIST_TIMEOUT"
        )
        missing = absent or None
        return CollectiveTimeout(
            text, missing=missing, rank=absent[0] if absent else None, this_rank=self.rank
        )

    # -- statistics -----------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """Count what this process has exchanged, and who came late to this group's calls."""
        self.check_process()
        missing = self.group.missing() if not self._turns.is_idle else []
        return Statistics(
            rank=self.rank,
            world_size=self.world_size,
            collectives=self._turns.last_ended,
            sent_nbytes=self.world.sent_nbytes,
            received_nbytes=self.world.received_nbytes,
            waiting_for=next((rank for rank in missing if rank != self.rank), None),
            lateness=tuple(self._lateness(rank) for rank in range(self.world_size)),
        )

    def _lateness(self, rank: int) -> float:
        """Return how long the median rank has slept for this one."""
        waits = sorted(self.group.waited(other, rank) for other in range(self.world_size))
        return waits[self.world_size // 2]
