# SPDX-License-Identifier: MIT OR Apache-2.0
"""Server: rank 0 while the ranks of a job meet.

It admits who belongs to the job, knows who is there, and tells all of them when it cannot work out.
What the clients come for is the store (``ARRIVAL``), or, with an arena, everybody's memory files
(``HELLO``, which brings their own).
"""

from __future__ import annotations

import os
import selectors
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, InvalidArgument, ProtocolError, RendezvousError
from ferrodist.rendezvous import errors
from ferrodist.rendezvous.handshake import (
    Acceptor,
    Greeting,
    PeerIdentity,
    check_version,
    greet_client,
)
from ferrodist.rendezvous.job import Job, Member
from ferrodist.rendezvous.sockets import MeetingPoint
from ferrodist.rendezvous.store import (
    AMOUNT,
    SECONDS,
    Exchange,
    StoreTable,
    absent,
    gather,
    unpack_entry,
    unpack_number,
)
from ferrodist.rendezvous.watch import close_files, open_own_watch, try_peer_pidfd
from ferrodist.rendezvous.wire import (
    HELLO,
    Channel,
    Message,
    MessageKind,
    RosterEntry,
    Steps,
    close_roster,
    pack_roster,
    parse_failure,
    run_steps,
    send_failure,
    wait_seconds,
)

_REQUESTS = (
    *(MessageKind.SET, MessageKind.GET, MessageKind.ADD),
    *(MessageKind.LEAVE, MessageKind.FAILURE),
)


class _JoinedRank(NamedTuple):
    """A rank that has joined, and how errors name it."""

    channel: Channel
    who: str


class _PendingGet(NamedTuple):
    """A client that waits for a value."""

    channel: Channel
    key: str
    deadline: Deadline


class Server(Exchange):
    """Rank 0, which serves the others whenever it waits itself.

    With an ``arena``, its own memory file, the clients have to bring theirs, and ``hand_out`` gives
    everybody all of them.
    """

    def __init__(
        self, job: Job, point: MeetingPoint, deadline: Deadline, *, arena: int | None = None
    ) -> None:
        self._job = job
        self._point = point
        self._deadline = deadline
        self._hello = MessageKind.ARRIVAL if arena is None else MessageKind.HELLO
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, _JoinedRank] = {}
        self._refusals: list[str] = []
        self._fatal: DistributedError | None = None
        self._early_exits = errors.EarlyExits(job)
        self._table = StoreTable()
        self._waits: dict[int, _PendingGet] = {}
        self._have_left: set[int] = set()
        self._roster: dict[int, RosterEntry] = {}
        try:
            self._acceptor = Acceptor(
                job,
                point.open_listener(),
                self._selector,
                identify=point.identify,
                receive=self._receive,
            )
        except BaseException:
            self._selector.close()
            raise
        self._own_name = point.describe_self()
        if arena is not None:
            own = Member(0, os.getpid(), os.dup(arena), open_own_watch())
            self._roster[0] = RosterEntry(own, is_lifeline=False)

    @property
    def towards(self) -> str:
        return self._point.towards

    @property
    def failure_channels(self) -> Mapping[int, Channel]:
        """The channels to all clients, which stay open after they have left."""
        return {rank: client.channel for rank, client in self._clients.items()}

    # -- what rank 0 itself asks for --------------------------------------------------------------

    def gather(self, own: bytes) -> list[bytes]:
        values = gather(self, self._job, own, self._deadline)
        self.leave()
        return values

    def set(self, key: str, value: bytes) -> None:
        """Keep a value, and tell those who wait for it."""
        self._table.set(key, value)
        self._answer_waits()

    def get(self, key: str, timeout: float) -> bytes:
        """Serve the others until one of them has set it."""
        deadline = Deadline(timeout)
        self.serve_until(lambda: self._table.try_get(key) is not None or deadline.remaining() <= 0)
        value = self._table.try_get(key)
        if value is None:
            raise absent(key, deadline)
        return value

    def add(self, key: str, amount: int) -> int:
        return self._table.add(key, amount)

    def leave(self) -> None:
        """Serve the others until none needs anything more, and admit nobody after that."""
        self.serve_until(lambda: len(self._have_left) == self._job.world_size - 1)
        self._acceptor.close()

    def hand_out(self) -> list[Member]:
        """Wait for all ranks, give everybody all files, one client after the other, and let go."""
        self.serve_until(self.is_full)
        self._acceptor.close()
        roster = [self._roster[rank] for rank in range(self._job.world_size)]
        for rank, client in self._clients.items():
            try:
                run_steps(_send_roster(client.channel, roster), client.channel, self._deadline)
            except EOFError as error:
                raise self._left(rank) from error
            except TimeoutError as error:
                raise RendezvousError(
                    f"rank {rank} ({client.who}) has joined and then not answered", rank=rank
                ) from error
        for client in self._clients.values():
            with suppress(EOFError):  # who dies from now on is found by the watches
                client.channel.send(MessageKind.GO)
        return [entry.member for entry in roster]

    def give_up(self, error: BaseException) -> None:
        """Tell all clients why the ranks will not meet, and close their files."""
        for client in self._clients.values():
            send_failure(client.channel, error, 0)
        close_roster(list(self._roster.values()))

    def close(self) -> None:
        self._acceptor.close()
        self._selector.close()
        for client in self._clients.values():
            client.channel.close()

    # -- serving ----------------------------------------------------------------------------------

    def is_full(self) -> bool:
        return len(self._clients) == self._job.world_size - 1

    def serve_until(self, is_done: Callable[[], bool]) -> None:
        """Serve until done; raises RendezvousError for ranks that do not come, or that leave."""
        while not is_done():
            for key, _ in self._selector.select(wait_seconds(self._seconds_to_next_deadline())):
                if not self._acceptor.handle(key.data):
                    self._read_request(key.data)
            self._acceptor.close_overdue()
            self._early_exits.check(rank for rank in self._others() if rank not in self._clients)
            self._check_deadlines()

    def _seconds_to_next_deadline(self) -> float:
        ends = (wait.deadline.remaining() for wait in self._waits.values())
        return min(self._deadline.remaining(), self._acceptor.seconds_to_next_deadline(), *ends)

    def _check_deadlines(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        if self._deadline.remaining() <= 0:
            raise self._overdue()
        self._answer_waits()

    def _overdue(self) -> RendezvousError:
        who = {rank: client.who for rank, client in self._clients.items()}
        if self.is_full():
            slow = [rank for rank in self._clients if rank not in self._have_left]
            return errors.not_ready_in_time(self._job, slow, who, self._deadline)
        refusals = self._refusals
        if (count := self._acceptor.num_without_secret) > 0:
            refusals = [*refusals, errors.without_secret(self._job, count)]
        seconds = self._deadline.seconds or 0.0
        return errors.missing_ranks(self._job, {0: self._own_name, **who}, seconds, refusals)

    def _left(self, rank: int) -> RendezvousError:
        return errors.client_left(self._job, rank, self._clients[rank].who)

    def _others(self) -> range:
        return range(1, self._job.world_size)

    def _read_request(self, rank: int) -> None:
        channel = self._clients[rank].channel
        try:
            message = channel.try_receive(*_REQUESTS)
        except EOFError as error:
            raise self._left(rank) from error
        if message is not None:
            self._answer(rank, channel, message)

    def _answer(self, rank: int, channel: Channel, message: Message) -> None:
        """Do what a client asks for; the answer never blocks, for it asks one at a time."""
        if message.kind is MessageKind.FAILURE:
            raise parse_failure(message.body)
        try:
            if message.kind is MessageKind.LEAVE:
                self._have_left.add(rank)
                self._selector.unregister(channel)
            elif message.kind is MessageKind.SET:
                self.set(*unpack_entry(message.body))
                channel.send(MessageKind.VALUE)
            elif message.kind is MessageKind.ADD:
                amount, key = unpack_number(AMOUNT, message.body)
                channel.send(MessageKind.VALUE, AMOUNT.pack(self._table.add(key, amount)))
                self._answer_waits()
            else:
                seconds, key = unpack_number(SECONDS, message.body)
                self._waits[rank] = _PendingGet(channel, key, Deadline(seconds))
                self._answer_waits()
        except InvalidArgument as error:
            channel.send(MessageKind.REFUSED, str(error).encode()[:1000])
        except EOFError as error:
            raise self._left(rank) from error

    def _answer_waits(self) -> None:
        for rank, wait in list(self._waits.items()):
            value = self._table.try_get(wait.key)
            if value is None and wait.deadline.remaining() > 0:
                continue
            del self._waits[rank]
            try:
                if value is None:
                    wait.channel.send(MessageKind.ABSENT)
                else:
                    wait.channel.send(MessageKind.VALUE, value)
            except EOFError as error:
                raise self._left(rank) from error

    # -- admitting --------------------------------------------------------------------------------

    def _receive(self, channel: Channel, peer: PeerIdentity) -> Steps[None]:
        greeting, _ = yield from greet_client(
            channel, self._job, check=lambda greeting: self._check(greeting, peer)
        )
        message = yield from channel.receive(MessageKind.HELLO, MessageKind.ARRIVAL)
        self._admit(channel, peer, greeting.rank, message)

    def _check(self, greeting: Greeting, peer: PeerIdentity) -> None:
        """Refuse a process that has proved to belong to this job and yet does not fit into it."""
        rank, size = greeting.rank, self._job.world_size
        try:
            check_version(greeting.version, self._job, rank)
        except ProtocolError as error:
            self._fatal = error  # no other process will come for this rank: nobody need wait
            raise
        if greeting.world_size != size:
            theirs = greeting.world_size
            raise self._refused(
                errors.wrong_world_size(self._job, rank, theirs, str(peer), self._own_name)
            )
        if rank not in self._others():
            raise self._refused(RendezvousError(f"rank {rank} cannot join", rank=rank))
        self._check_is_new(rank, str(peer))

    def _check_is_new(self, rank: int, who: str) -> None:
        if rank in self._clients:
            first = self._clients[rank].who
            raise self._refused(errors.second_process(self._job, rank, first, who))

    def _refused(self, error: RendezvousError) -> RendezvousError:
        """Remember a refusal: if a rank is missing in the end, it says why."""
        self._refusals = [*self._refusals[-3:], f"refused: {error}"]
        return error

    def _admit(self, channel: Channel, peer: PeerIdentity, rank: int, message: Message) -> None:
        try:
            pid, seconds, name = _read_hello(message)
            who = _describe(peer, pid, name)
            self._check_is_new(rank, who)
            if message.kind is not self._hello:
                self._fatal = errors.different_backends(self._job, rank, who)
                raise self._fatal
            if message.kind is MessageKind.HELLO:
                self._roster[rank] = _roster_entry(channel, peer, rank, pid, message.files)
            else:
                channel.send(MessageKind.TAKEN)
        except DistributedError:
            close_files(message.files)
            raise
        self._clients[rank] = _JoinedRank(channel, who)
        self._acceptor.admit(channel, rank)
        if seconds < self._deadline.remaining():
            self._deadline = Deadline(seconds)


def _roster_entry(
    channel: Channel, peer: PeerIdentity, rank: int, pid: int, files: list[int]
) -> RosterEntry:
    """Take the files that a client has brought; if this raises, they are still open."""
    if len(files) != 2:
        raise errors.no_file_limit_left(f"{len(files)} of 2 files of a rank arrived")
    arena, lifeline = files
    pidfd = try_peer_pidfd(channel.socket, peer.pid)
    if pidfd is not None:
        os.close(lifeline)
    watch = lifeline if pidfd is None else pidfd
    return RosterEntry(Member(rank, peer.pid or pid, arena, watch), is_lifeline=pidfd is None)


def _send_roster(channel: Channel, roster: list[RosterEntry]) -> Steps[None]:
    """Send the roster; each part is taken before the next is sent.

    The kernel bounds how many files a user may have in flight.
    """
    for body, files in pack_roster(roster):
        channel.send(MessageKind.ROSTER, body, files)
        yield from channel.receive(MessageKind.TAKEN)


def _describe(peer: PeerIdentity, pid: int, name: str) -> str:
    if not peer.address:
        return f"pid {peer.pid or pid}"
    return f"pid {pid} on {name}, {peer.address}"


def _read_hello(message: Message) -> tuple[int, float, str]:
    """Return the client's pid, how long it can wait, and its host's name."""
    head, name = message.body[: HELLO.size], message.body[HELLO.size :]
    try:
        pid, seconds = HELLO.unpack(head)
    except struct.error as error:
        raise ProtocolError("a hello that cannot be decoded") from error
    if not seconds > 0:  # not a number, perhaps
        raise ProtocolError("a hello with an impossible time limit")
    return pid, seconds, name.decode(errors="replace")
