# SPDX-License-Identifier: MIT OR Apache-2.0
"""SharedMemoryBackend: ranks are processes of one host that see each other's memory.

The collectives themselves are native code (``native/shm``); here is what surrounds them: joining,
splitting, leaving, and the texts of what goes wrong.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import numpy as np

from ferrodist import _native
from ferrodist.backends import message_errors, verdict
from ferrodist.backends.base import Algorithm, Body, Conversation, Statistics
from ferrodist.backends.deaths import Deaths
from ferrodist.backends.messaging import MessagingBackend
from ferrodist.backends.planner import Planner
from ferrodist.backends.shared_messenger import SharedMessenger
from ferrodist.backends.shared_outcome import Outcome
from ferrodist.backends.shared_talk import SharedTalk, Wait
from ferrodist.backends.shared_texts import (
    pack_departure,
    pack_verdict,
    unpack_departure,
    unpack_verdict,
)
from ferrodist.backends.shared_turns import SharedTurns
from ferrodist.backends.verdict import Departure, Verdict
from ferrodist.buffer import DTYPES_BY_LABEL
from ferrodist.call import Call, Kind, Leaf, caller_site
from ferrodist.config import DEFAULT, Config, Timeout, check_timeout
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    BackendClosed,
    CollectiveTimeout,
    RankLost,
)
from ferrodist.reduce_op import ReduceOp
from ferrodist.rendezvous import Job, meet
from ferrodist.schedules.cost import LINKS

T = TypeVar("T")

_FOR_EVER = 1e9  # seconds: thirty years
_QUEUE_LOOK = 0.05  # seconds between looks while a call waits for its turn


class SharedMemoryBackend(MessagingBackend):
    """One rank of a group of processes on one host.

    Made by ``ferrodist.init()`` under a launcher, by ``ferrodist.run``, or by ``split``.
    """

    _turns: SharedTurns
    _messenger: SharedMessenger

    def __init__(
        self,
        world: _native.World,
        arena: _native.Arena,
        group: _native.SharedGroup,
        members: tuple[int, ...],
        rank: int,
        config: Config,
        deaths: Deaths,
    ) -> None:
        self.world = world
        self.arena = arena
        self._deaths = deaths
        self.group = group
        self.members = members
        self.settled = 0  # the last call that ended in a difference all ranks know of
        super().__init__(rank, len(members), config)
        self._turns = SharedTurns(group)
        self._messenger = SharedMessenger(self)
        self._at_once = group.at_once
        self._send_at_once = group.send_at_once
        self._recv_at_once = group.recv_at_once
        self._at_once_wait: Wait | None = None
        self._id = 0
        self._parent: SharedMemoryBackend | None = None
        self._children: weakref.WeakSet[SharedMemoryBackend] = weakref.WeakSet()
        self._splits: dict[tuple[int, ...], int] = {}
        self._note_change()
        weakref.finalize(self, group.leave, b"").atexit = False

    @classmethod
    def join(cls, job: Job, *, config: Config | None = None) -> SharedMemoryBackend:
        """Meet the other ranks of the job and make the group of all; every rank calls it."""
        config = Config.from_environment() if config is None else config
        arena = _native.Arena(job.rank, job.world_size)
        members = meet(job, arena.fd, config.join_timeout)
        try:
            fds = [(member.arena, member.watch) for member in members]
            world = _native.World(job.rank, arena, fds, config.heartbeat, config.silence)
        finally:
            for member in members:
                os.close(member.arena)
            os.close(members[job.rank].watch)  # the world closes those of the others
        ranks, deaths = tuple(range(job.world_size)), Deaths(job, members)
        return cls(world, arena, world.first_group(), ranks, job.rank, config, deaths)

    def _note_change(self) -> None:
        timeout, group = self._timeout, self.group
        is_limited = timeout is not None and timeout < _FOR_EVER
        group.timeout_ns = max(1, int(timeout * 1e9)) if timeout and is_limited else 0
        group.reproducible = self._reproducible
        group.is_open = not self._is_closed

    # -- collectives ----------------------------------------------------------------------------

    def converse(self, sequence: int, call: Call, body: Body[T], deadline: Deadline) -> T:
        """Run the body; its first collective compares the call with those of the others."""
        if self.group.has_left:
            raise BackendClosed(f"rank {self.rank} has left this group", this_rank=self.rank)
        talk = SharedTalk(self, sequence, call, deadline)
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
        """What finds and checks the algorithms that callers name; unnamed, native code decides."""
        return Planner(self.rank, self.world_size, self.config, LINKS["shared_memory"])

    # -- the short way --------------------------------------------------------------------------

    def _look(self) -> None:
        """Look round in a call that went the short way and waits."""
        if self._at_once_wait is None:
            sequence, kind = self.group.last_call(self.rank)
            where = f"{Kind(kind).label} #{sequence} at {caller_site()}"
            self._at_once_wait = Wait(self, where)
        self._at_once_wait.look()

    def _stop_looking(self) -> None:
        if self._at_once_wait is not None:
            self._at_once_wait.end()
            self._at_once_wait = None

    def _look_at_mail(self) -> None:
        """Look round in a receive that went the short way: native code hears of signals by this."""

    def _wake_turns(self) -> None:
        """Let calls go on that were made while one went the short way."""
        self._turns.wake()

    def _fail_at_once(
        self,
        outcome: int,
        culprit: int,
        sequence: int,
        error: BaseException | None,
        kind: int,
        x: Any,
        op: Any,
        root: int,
        num_runs: int,
    ) -> None:
        """Raise what became of a call that went the short way, and end its turn."""
        call = _call_of(Kind(kind), x, op, root, self.reproducible)
        talk = SharedTalk(self, sequence, call, Deadline(self.timeout), num_runs)

        def fail(_: Conversation) -> None:
            raise talk.failure(outcome, culprit, error)

        self._stop_looking()
        self._end_turn_after(talk, fail)

    def resume(
        self,
        number: int,
        call: Call,
        body: Body[Any],
        deadline: Deadline,
        finish: Callable[[Any], T],
    ) -> T:
        """Go on with a call that began on the short way, has its turn, and did one collective."""
        self._stop_looking()
        talk = SharedTalk(self, number, call, deadline, num_runs=1)
        return finish(self._end_turn_after(talk, body))

    def _end_turn_after(self, talk: SharedTalk, body: Body[T]) -> T:
        """Do the rest of a call whose turn it is."""
        try:
            return body(talk)
        except BaseException as error:
            self._abort_unless_settled(talk.sequence, talk.call, error)
            raise
        finally:
            talk.end()
            self._turns.end(talk.sequence)

    def _fail_recv_at_once(
        self,
        outcome: int,
        culprit: int,
        error: BaseException | None,
        found: bytes,
        like: Any,
        peer: int,
        tag: int,
    ) -> None:
        """Raise what became of a receive that went the short way."""
        self._stop_looking()
        expected = Leaf("", DTYPES_BY_LABEL[like.dtype.name], like.shape)
        with self._aborting_on_interrupt("recv"):
            raise self._messenger.receive_failure(
                outcome, culprit, error, found, expected, peer, tag, Deadline(self.timeout)
            )

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

    def give_up_turn(self, number: int, error: BaseException) -> None:
        """End the turn of a call that began on the short way and cannot go on."""
        self.abort(f"{verdict.words_of(error)} (in call #{number})")
        self._turns.end(number)

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
        split = _native.Split(self.group, list(members), identity)
        ending = split.wait(deadline.end, lambda: None)
        if ending[0] != Outcome.DONE:
            raise self._split_failure(split, members, deadline, *ending)
        world_ranks = tuple(self.members[member] for member in members)
        rank = members.index(self.rank)
        group, deaths = split.group(), self._deaths
        child = type(self)(self.world, self.arena, group, world_ranks, rank, self.config, deaths)
        child._parent, child._id = self, identity  # a parent must outlive its groups
        child.timeout, child.reproducible = self.timeout, self.reproducible
        self._children.add(child)
        return child

    def _split_failure(
        self,
        split: _native.Split,
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
            reason = "its group does not lie in its memory"
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

    def _new_memory(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Take memory of this process's arena; it goes back with the last array over it."""
        return self.arena.empty(nbytes) if nbytes else super()._new_memory(0)

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


def _call_of(kind: Kind, x: Any, op: Any, root: int, reproducible: bool) -> Call:
    """Describe a call that went the short way."""
    leaves = () if x is None else (Leaf("", DTYPES_BY_LABEL[x.dtype.name], x.shape),)
    return Call(
        kind,
        leaves,
        op=ReduceOp(op) if kind.is_reduction else None,
        root=root if kind.is_rooted else None,
        reproducible=reproducible,
        site=caller_site(),
    )
