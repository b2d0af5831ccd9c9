# SPDX-License-Identifier: MIT OR Apache-2.0
"""ProviderBackend: what users see of a provider; keeps the contract on nothing but its messages.

Before every collective each rank sends every other one a word about its call. So no rank goes on
before all have come, ranks that differ or are missing are known by name, and a rank that finds a
difference later can report it to all.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from ferrodist.backends import failures
from ferrodist.backends.base import Statistics
from ferrodist.backends.executor import Planner, execute_plan
from ferrodist.backends.failures import (
    CallDescriptor,
    GroupError,
    LeaveReason,
    MismatchReport,
    pack_descriptor,
    unpack_descriptor,
)
from ferrodist.backends.p2p import ThreadMessagingBackend
from ferrodist.backends.provider import Provider
from ferrodist.backends.provider_link import (
    DATA_TAG,
    ENTRY_TAG,
    ProviderLink,
    ProviderMessenger,
    Waiting,
)
from ferrodist.backends.running_call import Algorithm, CollectiveArgs, RunningCall
from ferrodist.buffer import Buffer
from ferrodist.call import Kind, caller_site
from ferrodist.config import DEFAULT, Config, Timeout
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    BackendClosed,
    CollectiveMismatch,
    CollectiveTimeout,
    DistributedError,
    RankLost,
)
from ferrodist.schedules.cost import LinkModel

_ENTRY = struct.Struct("<QQQ")  # sequence number, fingerprint, whether this rank reports a mismatch
_LENGTH = struct.Struct("<Q")
_QUEUE_LOOK = 0.05  # seconds between looks while a call waits for its ticket
_GOES_ON, _GAVE_UP = b"goes on", b"gave up"  # what a member of a split says when it knew of all
_WORDS_SECONDS, _FIRST_LOOK = 2.0, 0.001  # for what others have to say of a call that has ended


class ProviderBackend(ThreadMessagingBackend):
    """One rank of a group whose messages a Provider moves."""

    _knows_statuses = False

    def __init__(
        self, provider: Provider, config: Config | None = None, *, _link: ProviderLink | None = None
    ) -> None:
        config = Config.from_environment() if config is None else config
        super().__init__(provider.rank, provider.world_size, config)
        self._provider = provider
        self._link = _link or ProviderLink(provider, tuple(range(provider.world_size)), None)
        self._messenger = ProviderMessenger(self._link)
        model = LinkModel(*config.tcp_link)
        self._planner = Planner(self.rank, self.world_size, config, model)
        self._peers = [rank for rank in range(self.world_size) if rank != self.rank]
        self._settled = 0  # the last call that ended in a difference all ranks know of
        self._lateness = [0.0] * self.world_size
        self._splits: dict[tuple[int, ...], int] = {}
        self._parent: ProviderBackend | None = None
        self._children: weakref.WeakSet[ProviderBackend] = weakref.WeakSet()
        # A backend that is dropped without close() leaves its group all the same.
        weakref.finalize(self, self._link.drop).atexit = False

    @property
    def local_rank(self) -> int:
        """This rank's number among those on its host."""
        return self._provider.local_rank

    @property
    def local_world_size(self) -> int:
        """How many ranks are on this host."""
        return self._provider.local_world_size

    @property
    def _group_name(self) -> str:
        return self._link.group_name

    # -- a call ---------------------------------------------------------------------------------

    def _begin_call(self, running: RunningCall) -> None:
        if self._link.has_left:
            raise BackendClosed(f"rank {self.rank} has left this group", this_rank=self.rank)
        self._link.poll()
        found = self._link.error_of(running.sequence)
        if found is not None:
            raise found.later(self.rank)

    def _run_collective(
        self,
        running: RunningCall,
        kind: Kind,
        input: Buffer | None,
        output: Buffer | None,
        args: CollectiveArgs,
    ) -> None:
        """Compare the calls of all ranks, then let the provider do it, or its messages."""
        with self._naming_failures(running):
            if self._enter(running, is_reporting=False):
                raise self._settle_mismatch(running, None)
            if kind is Kind.BARRIER:
                return  # all have come
            done = NotImplemented
            if args.algorithm is None:
                done = self._provider.collective(kind, input, output, args, running.deadline)
            if done is NotImplemented:
                self._run_by_messages(running, kind, input, output, args)

    def note_site(self, running: RunningCall) -> None:
        """Find out where a call was made that errors may have to show."""
        if running.call.site is None:
            running.call = running.call._replace(site=caller_site())

    def _run_by_messages(
        self,
        running: RunningCall,
        kind: Kind,
        input: Buffer | None,
        output: Buffer | None,
        args: CollectiveArgs,
    ) -> None:
        def exchange(
            to: int, payload: memoryview | None, peer: int, expected_nbytes: int | None
        ) -> memoryview | None:
            waiting: Waiting = []
            arrived = None
            if expected_nbytes is not None:
                arrived = memoryview(bytearray(expected_nbytes))
                waiting.append((peer, self._link.irecv(arrived, peer, DATA_TAG)))
            if payload is not None:
                waiting.append((to, self._link.isend(payload, to, DATA_TAG)))
            self._wait(running, waiting)
            return arrived

        plan = self._planner.plan(kind, input, output, args)
        execute_plan(plan, input, output, args.in_place, self.config, exchange)

    def _enter(self, running: RunningCall, *, is_reporting: bool) -> bool:
        """Wait until all ranks have come; tell whether their calls differ."""
        entry = _ENTRY.pack(running.sequence, running.fingerprint, is_reporting)
        found = self._tell_all(running, entry, [len(entry)] * self.world_size)
        running.hook = True  # from now on nobody can say that this rank has not come
        return is_reporting or any(other != entry for other in found)

    def _tell_all(self, running: RunningCall, mine: bytes, nbytes: Sequence[int]) -> list[bytes]:
        """Send all ranks the same bytes and return those of all, in the order of ranks."""
        found = [bytearray(mine if rank == self.rank else n) for rank, n in enumerate(nbytes)]
        link, came = self._link, time.monotonic()
        coming: Waiting = [(peer, link.irecv(found[peer], peer, ENTRY_TAG)) for peer in self._peers]
        going: Waiting = [(peer, link.isend(mine, peer, ENTRY_TAG)) for peer in self._peers]
        for late in coming:
            if late[1].test():
                continue
            self._wait(running, coming)
            self._lateness[late[0]] += time.monotonic() - came
            break
        self._wait(running, going)
        return [bytes(one) for one in found]

    def _wait(self, running: RunningCall, waiting: Waiting) -> None:
        self._link.wait(waiting, lambda peers: self._check(running, peers), running.deadline)

    def _check(self, running: RunningCall, peers: Sequence[int]) -> None:
        """Raise if a call cannot succeed that waits for these peers, or its time is up."""
        self._check_standing(running, peers)
        if peers and running.deadline.remaining() <= 0:
            self._expire(running, peers)

    def _expire(self, running: RunningCall, missing: Sequence[int]) -> None:
        raise self._set_error(running, self._expiry(running, missing))

    def _check_standing(self, running: RunningCall, peers: Sequence[int]) -> None:
        """Raise if a call cannot succeed that needs these peers."""
        link, sequence, call = self._link, running.sequence, running.call
        found = link.error_of(sequence)
        if found is not None:
            raise self._error_from(running, found)
        if link.has_left:
            text = f"{call.kind.label} #{sequence}: rank {self.rank} left while it ran"
            raise BackendClosed(text, this_rank=self.rank)
        for peer in peers:
            if (leave_reason := link.left(peer)) is not None:
                raise self._set_error(running, failures.loss(call, sequence, peer, leave_reason))

    def _error_from(self, running: RunningCall, found: GroupError) -> DistributedError:
        """Make this rank's error; one that came too late gets what later calls get."""
        is_missed = self.rank in (found.facts.get("missing") or ())
        is_late = is_missed and running.hook is None
        return found.later(self.rank) if is_late else found.now(self.rank)

    def _set_error(self, running: RunningCall, found: GroupError) -> DistributedError:
        """End the group on all ranks; return what this one raises."""
        return self._error_from(running, self._link.set_error(found))

    def _expiry(self, running: RunningCall, peers: Sequence[int], last: str = "") -> GroupError:
        last = last or f"nothing has come from {failures.names_of_ranks(peers)}"
        return failures.timeout(running.call, running.sequence, peers, running.deadline, [last])

    @contextmanager
    def _naming_failures(self, running: RunningCall) -> Iterator[None]:
        """Make errors of all ranks of those that a provider raises."""
        try:
            yield
        except DistributedError:
            raise
        except (ConnectionError, TimeoutError) as error:
            found = self._failure_of(running, error)
            if found is None:
                raise
            raise found from error

    def _failure_of(
        self, running: RunningCall, error: ConnectionError | TimeoutError
    ) -> DistributedError | None:
        self._link.poll()
        self._check(running, [])  # it may be due to what another rank has told
        rank = error.args[0] if error.args and type(error.args[0]) is int else None
        if isinstance(error, TimeoutError):
            return self._set_error(
                running, self._expiry(running, self._peers if rank is None else [rank])
            )
        if rank is None:
            self._await_words(running)
            return None
        leave_reason = self._link.left(rank) or failures.GONE
        return self._set_error(
            running, failures.loss(running.call, running.sequence, rank, leave_reason)
        )

    def _await_words(self, running: RunningCall) -> None:
        """Give the rank that ended the call a moment to say why; raise what is told."""
        end = time.monotonic() + _WORDS_SECONDS
        while time.monotonic() < end:
            self._link.poll()
            self._check_standing(running, self._peers)
            time.sleep(_FIRST_LOOK)

    def _end_call(self, running: RunningCall) -> None:
        pass

    @property
    def members(self) -> tuple[int, ...]:
        return self._link.members

    def _report_mismatch(
        self, running: RunningCall, error: type[CollectiveMismatch], text: str
    ) -> DistributedError:
        """Tell the others, who wait for this rank before the next collective of the call."""
        self._enter(running, is_reporting=True)
        return self._settle_mismatch(running, (error, text))

    def _settle_mismatch(
        self, running: RunningCall, report: MismatchReport | None
    ) -> DistributedError:
        """Exchange descriptors, and make of them the error that all ranks make."""
        self.note_site(running)
        mine = pack_descriptor(CallDescriptor(running.call, report))
        lengths = self._tell_all(running, _LENGTH.pack(len(mine)), [_LENGTH.size] * self.world_size)
        nbytes = [_LENGTH.unpack(one)[0] for one in lengths]
        found = [unpack_descriptor(one) for one in self._tell_all(running, mine, nbytes)]
        calls = [one.call for one in found]
        first = next((one.report for one in found if one.report is not None), None)
        given = failures.mismatch(running.sequence, calls, first)
        self._settled = running.sequence
        return given._replace(text=given.text + self._link.group_name).now(self.rank)

    def _look_while_queued(self, running: RunningCall) -> float:
        """Let the call that holds this one up run out of time when this one does."""
        self._link.poll()
        if running.deadline.remaining() <= 0 and self._link.final is None:
            peer = self._link.waiting_for
            missing = [self.rank] if peer is None else [peer]
            why = [f"an earlier call of rank {self.rank} is still running"]
            sequence = self._tickets.last_ended + 1
            due = failures.timeout(running.call, sequence, missing, running.deadline, why)
            raise self._link.set_error(due).now(self.rank)
        self._link.refuse_if_final()
        return min(running.deadline.remaining(), _QUEUE_LOOK)

    def _is_settled(self, sequence: int, in_background: bool) -> bool:
        is_known = self._settled == sequence or self._link.has_left
        return is_known or self._link.error_of(sequence) is not None

    def _check_algorithm(
        self, kind: Kind, algorithm: Algorithm, root: int, reproducible: bool
    ) -> str | None:
        return self._planner.check(kind, algorithm, root, reproducible)

    def _holds_lock(self) -> bool:
        return threading.get_ident() in self._link.busy

    # -- groups, statistics, leaving ------------------------------------------------------------

    def split(self, ranks: Sequence[int], *, timeout: Timeout = DEFAULT) -> Self:
        """Make a group of some ranks of this one.

        Only the members call it, all with the same list; their ranks in the new group follow its
        order. Waits for all of them and names those missing.
        """
        self._check_usable()
        members = self._check_members(ranks)
        deadline = self._deadline(timeout)

        def meet() -> Provider:
            with self._link.before_leaving():
                self._link.poll()
                self._link.refuse_if_aborted()
                return self._meet(members, deadline)

        provider = self._abort_if_interrupted("split", meet)
        world_ranks = tuple(self._link.members[member] for member in members)
        link = ProviderLink(provider, world_ranks, self._link)
        made = type(self)(provider, self.config, _link=link)
        made._inherit(self)
        made._parent = self  # a parent that is dropped would take its groups along
        self._children.add(made)
        return made

    def _meet(self, members: tuple[int, ...], deadline: Deadline) -> Provider:
        """Wait until all members have called split with the same list; then make the group.

        A member that comes late would find the words of those that have given up. So each says
        whether it goes on as soon as it knows that all have come, and waits for all to say so.
        """
        nth = self._splits[members] = self._next_attempt(members)
        first, second = _split_key(nth, members), _split_key(-nth, members)
        try:
            self._tell_members(
                members, first, b"", lambda absent: self._check_split(members, absent, deadline)
            )
        except BaseException:  # Ctrl-C too: the others wait for an answer
            self._link.tell_of_split(second, _GAVE_UP, self._others(members))
            self._forget_split(members, nth)
            raise
        # Nothing but an answer ends this wait: others may have all of them, and go on.
        self._tell_members(
            members, second, _GOES_ON, lambda absent: self._check_lost(members, absent)
        )
        return self._provider.split(members)

    def _next_attempt(self, members: tuple[int, ...]) -> int:
        """Number a split among those with the same list; drop those that other members gave up."""
        nth, splits = self._splits.get(members, 0) + 1, self._link.splits
        while True:
            second = _split_key(-nth, members)
            if _GAVE_UP not in [splits.get((member, second)) for member in members]:
                return nth
            self._forget_split(members, nth)
            nth += 1

    def _forget_split(self, members: tuple[int, ...], nth: int) -> None:
        for member, number in itertools.product(members, (nth, -nth)):
            self._link.splits.pop((member, _split_key(number, members)), None)

    def _others(self, members: Sequence[int]) -> list[int]:
        return [member for member in members if member != self.rank]

    def _tell_members(
        self,
        members: tuple[int, ...],
        key: bytes,
        mine: bytes,
        check: Callable[[list[int]], None],
    ) -> list[bytes]:
        """Tell all members something about a split; return what each has told."""
        splits = self._link.splits
        splits[self.rank, key] = mine
        waiting = self._link.tell_of_split(key, mine, self._others(members))
        self._link.wait(waiting, check, Deadline(None))
        told = [splits.pop((member, key)) for member in members]
        for member, word in zip(members, told, strict=True):
            if word == _GAVE_UP:
                self._link.refuse_if_aborted()
                self._check_lost(members, [member])
                text = (
                    f"{self._name_split(members)}: rank {member} called it, and gave up before it "
                    "knew that all members had; call it again on all of them"
                )
                raise CollectiveTimeout(text, missing=[member], rank=member, this_rank=self.rank)
        return told

    def _check_split(self, members: Sequence[int], absent: list[int], deadline: Deadline) -> None:
        """Raise if a split cannot succeed that waits for these members, or its time is up."""
        self._link.refuse_if_aborted()
        if self._link.has_left:
            text = f"{self._name_split(members)}: rank {self.rank} left while it ran"
            raise BackendClosed(text, this_rank=self.rank)
        self._check_lost(members, absent)
        if deadline.remaining() <= 0:
            text = (
                f"{self._name_split(members)}: {failures.names_of_ranks(absent)} did not call it "
                f"within {deadline}; every member must, with the same list. the limit is timeout=, "
                "backend.timeout or FERRODIST_TIMEOUT"
            )
            raise CollectiveTimeout(text, missing=absent, rank=absent[0], this_rank=self.rank)

    def _check_lost(self, members: Sequence[int], absent: list[int]) -> None:
        for peer in absent:
            if (leave_reason := self._link.left(peer)) is not None:
                text = f"{self._name_split(members)}: rank {peer} {leave_reason.how}"
                raise RankLost(text, rank=peer, how=leave_reason.how, this_rank=self.rank)

    def abort(self, reason: str = "abort() was called") -> None:
        """Give the group up, and every group split off it."""
        self._check_process()
        found = failures.abort(self.rank, reason)
        if self._holds_lock():  # called by a signal handler or finalizer in the middle of a call
            threading.Thread(target=self._link.set_error, args=[found], daemon=True).start()
        else:
            self._link.set_error(found)

    def statistics(self) -> Statistics:
        """Count what this rank has exchanged in this group, and whom it waited for."""
        self._check_process()
        return Statistics(
            rank=self.rank,
            world_size=self.world_size,
            collectives=self._tickets.last_ended,
            sent_nbytes=self._link.sent_nbytes,
            received_nbytes=self._link.received_nbytes,
            waiting_for=self._link.waiting_for,
            lateness=tuple(self._lateness),
        )

    def _announce_closing(self) -> None:
        """Say nothing: leaving is what the others hear of."""

    def _leave(self, leave_reason: LeaveReason, deadline: Deadline) -> None:
        for child in list(self._children):
            child._leave(leave_reason, deadline)
        self._link.leave(leave_reason, deadline)


def _split_key(nth: int, members: Sequence[int]) -> bytes:
    return array("q", [nth, *members]).tobytes()
