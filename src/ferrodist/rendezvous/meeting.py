# SPDX-License-Identifier: MIT OR Apache-2.0
"""The ranks of a job meet at rank 0: while they do, it is the Server, and the others are Clients.

    client                                          server
    HELLO: pid, patience, its host and script   ->
                                                <-  TAKEN
    RECORD: what it tells all, and its files    ->
                                                <-  ROSTER: records and files of some ranks
    TAKEN                                       ->      ... until it has those of all
                                                <-  GO: all have everything

The server admits who belongs to the job, knows who is there, and tells all when it cannot work out.
``meet`` is what ranks of one host come for: everybody's memory files.
"""

from __future__ import annotations

import os
import random
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, ProtocolError, RendezvousError
from ferrodist.rendezvous import errors
from ferrodist.rendezvous.exchange import Exchange, check_record
from ferrodist.rendezvous.handshake import (
    Acceptor,
    Greeting,
    PeerIdentity,
    check_version,
    greet_client,
    greet_server,
)
from ferrodist.rendezvous.job import Job, Member
from ferrodist.rendezvous.script import is_same_script
from ferrodist.rendezvous.sockets import MeetingPoint, UnixPoint
from ferrodist.rendezvous.watch import Lifeline, close_files, open_own_watch, try_peer_pidfd
from ferrodist.rendezvous.wire import (
    HELLO,
    MAX_HOST_NAME,
    Channel,
    Message,
    MessageKind,
    RosterEntry,
    Steps,
    close_roster,
    pack_roster,
    parse_failure,
    receive_answer,
    run_steps,
    send_failure,
    unpack_roster,
    wait_seconds,
)

T = TypeVar("T")

_FIRST_PAUSE = 0.001  # seconds between two attempts to reach rank 0; it doubles
_PAUSE_IF_BUSY = 0.02


def meet(job: Job, arena: int, timeout: float) -> list[Member]:
    """Exchange memory files with all ranks of the job; return all members, in rank order.

    Every rank calls it, and none returns before all have everything. ``arena`` stays the caller's;
    the files of the members, its own included, are new ones. Raises RendezvousError, naming the
    ranks at fault, AuthenticationError or ProtocolError, within ``timeout`` seconds; at once for a
    job on several hosts.
    """
    if job.several_hosts:
        raise errors.several_hosts(job)
    if job.world_size == 1:
        return [Member(0, os.getpid(), os.dup(arena), open_own_watch())]
    deadline = Deadline(timeout)
    try:
        if job.rank == 0:
            with Server(job, UnixPoint(job), deadline, shares_memory=True) as server:
                roster = server.exchange(b"", [os.dup(arena), open_own_watch()])
        else:
            roster = _exchange_files(job, arena, deadline)
    except DistributedError:
        raise
    except OSError as error:
        raise errors.could_not_join(job, error) from error
    return [Member(entry.rank, entry.pid, *entry.files) for entry in roster]


def _exchange_files(job: Job, arena: int, deadline: Deadline) -> list[RosterEntry]:
    lifeline, is_held = Lifeline(), False
    client = Client(job, UnixPoint(job), deadline, shares_memory=True)
    try:
        client.join()
        roster = client.exchange(b"", [arena, lifeline.watch])
        is_held = roster[job.rank].is_lifeline
    finally:
        client.close()
        if is_held:
            lifeline.keep()
        else:
            lifeline.close()
    return roster


# -- rank 0 ---------------------------------------------------------------------------------------


class _JoinedRank(NamedTuple):
    """A rank that has joined, and how errors name it.

    ``kernel_pid`` is 0 if the process is not visible from here; then ``pid`` is what it says.
    """

    channel: Channel
    pid: int
    kernel_pid: int
    who: str


class Server(Exchange):
    """Rank 0, which serves the others whenever it waits itself.

    With ``shares_memory`` every rank brings its memory file and a watch, otherwise none does.
    """

    def __init__(
        self, job: Job, point: MeetingPoint, deadline: Deadline, *, shares_memory: bool = False
    ) -> None:
        self._job = job
        self._point = point
        self._deadline = deadline
        self._shares_memory = shares_memory
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, _JoinedRank] = {}
        self._roster: dict[int, RosterEntry] = {}  # those who have told theirs
        self._refusals: list[str] = []
        self._fatal: DistributedError | None = None
        self._early_exits = errors.EarlyExits(job)
        try:
            self._acceptor = Acceptor(
                job,
                point.open_listener(),
                self._selector,
                identify=point.identify,
                receive=self._receive,
            )
        except BaseException:  # Ctrl-C too: __exit__ is not reached from here
            self._selector.close()
            raise
        self._own_name = point.describe_self()

    @property
    def towards(self) -> str:
        return self._point.towards

    @property
    def failure_channels(self) -> Mapping[int, Channel]:
        return {rank: client.channel for rank, client in self._clients.items()}

    def gather(self, own: bytes) -> list[bytes]:
        return [entry.record for entry in self.exchange(own)]

    def exchange(self, own: bytes, files: Sequence[int] = ()) -> list[RosterEntry]:
        """Wait for all ranks, and give everybody all of it.

        These files belong to the roster from now on.
        """
        self._roster[0] = RosterEntry(0, os.getpid(), check_record(self._job, own), list(files))
        self.serve_until(lambda: len(self._roster) == self._job.world_size)
        self._acceptor.close()
        roster = [self._roster[rank] for rank in range(self._job.world_size)]
        self._hand_out(roster)
        for client in self._clients.values():
            with suppress(EOFError):  # who dies from now on is found by the watches
                client.channel.send(MessageKind.GO)
        return roster

    def _hand_out(self, roster: list[RosterEntry]) -> None:
        """Send the roster to all at once, so that latency does not add up; until all have it.

        One with files goes to one client after the other, on this host: the kernel bounds how many
        files a user may have in flight.
        """
        waiting = sorted(self._clients, reverse=True)
        limit = 1 if self._shares_memory else len(waiting)
        under_way: dict[int, Steps[None]] = {}
        while waiting or under_way:
            while waiting and len(under_way) < limit:
                rank = waiting.pop()
                under_way[rank] = _send_roster(self._clients[rank].channel, roster)
                self._continue(rank, under_way)
            if not under_way:
                return  # the last answered before it was waited for, and nothing else will come
            for key, _ in self._selector.select(wait_seconds(self._deadline.remaining())):
                if key.data in under_way:
                    self._continue(key.data, under_way)
                else:
                    self._read(key.data)
            if under_way and self._deadline.remaining() <= 0:
                rank = min(under_way)
                who = self._clients[rank].who
                raise RendezvousError(
                    f"rank {rank} ({who}) has joined and then not answered", rank=rank
                )

    def _continue(self, rank: int, under_way: dict[int, Steps[None]]) -> None:
        """Send a client more of the roster, if it has taken what it was sent."""
        try:
            next(under_way[rank])
        except StopIteration:
            del under_way[rank]
        except EOFError as error:
            raise self._left(rank) from error

    def give_up(self, error: BaseException) -> None:
        """Tell all clients why the ranks will not meet, and close their files."""
        errors.note_own_failure(self._job, error)  # those that have not joined yet see it there
        for client in self._clients.values():
            send_failure(client.channel, error, self._job)
        close_roster(self._roster.values())

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
            ends = self._deadline.remaining(), self._acceptor.seconds_to_next_deadline()
            for key, _ in self._selector.select(wait_seconds(min(ends))):
                if not self._acceptor.handle(key.data):
                    self._read(key.data)
            self._acceptor.close_overdue()
            missing = [rank for rank in self._others() if rank not in self._clients]
            self._early_exits.check(missing, missing)
            if self._fatal is not None:
                raise self._fatal
            if self._deadline.remaining() <= 0:
                raise self._overdue()

    def _overdue(self) -> RendezvousError:
        who = {rank: client.who for rank, client in self._clients.items()}
        if self.is_full():
            slow = [rank for rank in self._clients if rank not in self._roster]
            return errors.not_ready_in_time(self._job, slow, who, self._deadline)
        refusals = self._refusals
        if (count := self._acceptor.num_without_secret) > 0:
            refusals = [*refusals, errors.without_secret(self._job, count)]
        here = {0: self._own_name, **who}
        return errors.missing_ranks(self._job, here, self._deadline, refusals)

    def _left(self, rank: int) -> RendezvousError:
        return errors.client_left(self._job, rank, self._clients[rank].who)

    def _others(self) -> range:
        return range(1, self._job.world_size)

    def _read(self, rank: int) -> None:
        """Take what a client tells: its record, once, or why it fails."""
        client = self._clients[rank]
        kinds = [MessageKind.FAILURE]
        if rank not in self._roster:
            kinds.append(MessageKind.RECORD)
        try:
            message = client.channel.try_receive(*kinds)
        except EOFError as error:
            raise self._left(rank) from error
        if message is None:
            return  # not all of it has arrived
        if message.kind is MessageKind.FAILURE:
            raise parse_failure(message.body)
        self._roster[rank] = self._entry(rank, client, message)

    def _entry(self, rank: int, client: _JoinedRank, message: Message) -> RosterEntry:
        files, expected = message.files, 2 if self._shares_memory else 0
        if len(files) != expected:
            close_files(files)
            what = f"rank 0 got {len(files)} of {expected} files of rank {rank}"
            raise errors.no_file_limit_left(what, self._job.world_size, rank=0)
        if not files:
            return RosterEntry(rank, client.pid, message.body, [])
        arena, lifeline = files
        pidfd = try_peer_pidfd(client.channel.socket, client.kernel_pid)
        if pidfd is not None:
            os.close(lifeline)
        watch = lifeline if pidfd is None else pidfd
        return RosterEntry(rank, client.pid, message.body, [arena, watch], pidfd is None)

    # -- admitting --------------------------------------------------------------------------------

    def _receive(self, channel: Channel, peer: PeerIdentity) -> Steps[None]:
        greeting, _ = yield from greet_client(
            channel, self._job, check=lambda greeting: self._check(greeting, peer)
        )
        message = yield from channel.receive(MessageKind.HELLO)
        self._admit(channel, peer, greeting.rank, message.body)

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

    def _check_script(self, rank: int, who: str, host: str, script: str) -> None:
        """Refuse a rank of another job that has the name of this one; ours may still come."""
        is_here = host == _host_name().decode(errors="replace")
        if self._job.script and not is_same_script(self._job.script, script, on_one_host=is_here):
            raise self._refused(
                errors.different_scripts(self._job, rank, script, who, self._own_name)
            )

    def _refused(self, error: RendezvousError) -> RendezvousError:
        """Remember a refusal: if a rank is missing in the end, it says why."""
        self._refusals = [*self._refusals[-3:], f"refused: {error}"]
        return error

    def _admit(self, channel: Channel, peer: PeerIdentity, rank: int, hello: bytes) -> None:
        pid, seconds, limit, shares_memory, name, script = _read_hello(hello)
        who = f"pid {pid} on {name}, {peer.address}" if peer.address else f"pid {peer.pid or pid}"
        self._check_script(rank, who, name, script)
        self._check_is_new(rank, who)
        if shares_memory != self._shares_memory:
            self._fatal = errors.different_backends(self._job, rank, who)
            raise self._fatal
        channel.send(MessageKind.TAKEN)
        self._clients[rank] = _JoinedRank(channel, peer.pid or pid, peer.pid, who)
        self._acceptor.admit(channel, rank)
        if seconds < self._deadline.remaining():
            self._deadline = Deadline(seconds)
            self._deadline.seconds = limit  # what its user has set, for errors


def _send_roster(channel: Channel, roster: list[RosterEntry]) -> Steps[None]:
    """Send the roster; each part is taken before the next is sent, so that no send has to wait."""
    for body, files in pack_roster(roster):
        channel.send(MessageKind.ROSTER, body, files)
        yield from receive_answer(channel, MessageKind.TAKEN)


def _read_hello(body: bytes) -> tuple[int, float, float, bool, str, str]:
    try:
        pid, seconds, limit, shares_memory = HELLO.unpack_from(body)
    except struct.error as error:
        raise ProtocolError("a hello that cannot be decoded") from error
    if not seconds > 0:  # not a number, perhaps
        raise ProtocolError("a hello with an impossible time limit")
    host, _, script = body[HELLO.size :].decode(errors="replace").partition("\0")
    return pid, seconds, limit, shares_memory, host, script


def _host_name() -> bytes:
    return socket.gethostname().encode()[:MAX_HOST_NAME]


# -- the other ranks ------------------------------------------------------------------------------


class Client(Exchange):
    """A connection to rank 0, from ``join`` to ``close``."""

    def __init__(
        self, job: Job, point: MeetingPoint, deadline: Deadline, *, shares_memory: bool = False
    ) -> None:
        self.channel: Channel | None = None
        self._job = job
        self._point = point
        self._deadline = deadline
        self._shares_memory = shares_memory
        self._who = ""

    @property
    def towards(self) -> str:
        return self._point.towards

    @property
    def failure_channels(self) -> Mapping[int, Channel]:
        return {} if self.channel is None else {0: self.channel}

    def join(self) -> None:
        """Connect to rank 0, shake hands and say who this is; again if rank 0 is busy."""
        while True:
            self.channel = self._connect()
            try:
                return self._run(self._introduce(self.channel), self.channel)
            except BlockingIOError as error:  # too many connections: we are asked to come again
                self.close()
                if self._deadline.remaining() <= 0:
                    raise errors.no_answer(self._job, self._who, self._deadline) from error
                time.sleep(random.uniform(1, 5) * _PAUSE_IF_BUSY)  # not all at the same moment
            except BaseException:  # Ctrl-C too: rank 0 must not take us for one that joined
                self.close()
                raise

    def gather(self, own: bytes) -> list[bytes]:
        return [entry.record for entry in self.exchange(own)]

    def exchange(self, own: bytes, files: Sequence[int] = ()) -> list[RosterEntry]:
        """Tell rank 0 this, and return what all have told, when everybody has it."""
        assert self.channel is not None
        record = check_record(self._job, own)
        return self._run(_swap(self.channel, self._job, record, files), self.channel)

    def give_up(self, error: BaseException) -> None:
        if self.channel is not None:
            send_failure(self.channel, error, self._job)

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def _introduce(self, channel: Channel) -> Steps[None]:
        self._job, _ = yield from greet_server(channel, self._job, where=self._point.where)
        # Rank 0 has to give up a little before us, so that we hear its reasons in time.
        remaining = self._deadline.remaining()
        seconds = remaining - min(0.5, remaining / 10)
        limit = self._deadline.seconds or seconds
        hello = HELLO.pack(os.getpid(), seconds, limit, self._shares_memory)
        where = _host_name() + b"\0" + self._job.script.encode()
        channel.send(MessageKind.HELLO, hello + where)
        yield from receive_answer(channel, MessageKind.TAKEN)

    def _connect(self) -> Channel:
        job, pause, early_exits = self._job, _FIRST_PAUSE, errors.EarlyExits(self._job)
        while (connection := self._point.try_connect()) is None:
            if self._deadline.remaining() <= 0:
                if self._who:
                    raise errors.no_answer(job, self._who, self._deadline)
                raise errors.missing_server(job, self._point.address, self._deadline)
            early_exits.check(_others(job), missing=[0])
            time.sleep(min(pause, max(0.0, self._deadline.remaining())))
            pause = min(2 * pause, self._point.max_pause)
        try:
            self._who = str(self._point.identify(connection))
        except BaseException:  # Ctrl-C too: nobody else has the connection yet
            connection.close()
            raise
        return Channel(connection)

    def _run(self, steps: Steps[T], channel: Channel) -> T:
        """Run steps; raises RendezvousError if rank 0 is gone or silent."""
        try:
            return run_steps(steps, channel, self._deadline)
        except EOFError as error:
            with suppress(EOFError, TimeoutError):  # what rank 0 has sent before it left
                run_steps(receive_answer(channel, MessageKind.BUSY), channel, Deadline(0.0))
            errors.EarlyExits(self._job).check_now(_others(self._job))
            raise errors.server_left(self._job, self._who) from error
        except TimeoutError as error:
            raise errors.no_answer(self._job, self._who, self._deadline) from error


def _swap(channel: Channel, job: Job, own: bytes, files: Sequence[int]) -> Steps[list[RosterEntry]]:
    channel.send(MessageKind.RECORD, own, files)
    roster: list[RosterEntry] = []
    try:
        while len(roster) < job.world_size:
            message = yield from receive_answer(channel, MessageKind.ROSTER)
            roster += unpack_roster(message, job.world_size, files_per_rank=len(files))
            channel.send(MessageKind.TAKEN)
        if [entry.rank for entry in roster] != list(range(job.world_size)):
            raise ProtocolError("rank 0 sent a roster that is not of this world", rank=0)
        yield from receive_answer(channel, MessageKind.GO)
    except BaseException:  # Ctrl-C and GeneratorExit too: nobody else has the files
        close_roster(roster)
        raise
    return roster


def _others(job: Job) -> list[int]:
    return [rank for rank in range(job.world_size) if rank != job.rank]
