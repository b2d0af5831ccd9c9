# SPDX-License-Identifier: MIT OR Apache-2.0
"""Client: how every rank but 0 meets the others, through rank 0 wherever that listens.

``meet`` is what the ranks of one host come together for: everybody's memory files.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, InvalidArgument, ProtocolError, RendezvousError
from ferrodist.rendezvous import errors
from ferrodist.rendezvous.handshake import greet_server
from ferrodist.rendezvous.job import Job, Member
from ferrodist.rendezvous.server import Server
from ferrodist.rendezvous.sockets import MeetingPoint, UnixPoint
from ferrodist.rendezvous.store import (
    AMOUNT,
    SECONDS,
    Exchange,
    absent,
    check_entry,
    gather,
    pack_entry,
    unpack_number,
)
from ferrodist.rendezvous.watch import Lifeline, open_own_watch
from ferrodist.rendezvous.wire import (
    HELLO,
    MAX_HOST_NAME,
    Channel,
    Message,
    MessageKind,
    RosterEntry,
    Steps,
    close_roster,
    receive_answer,
    run_steps,
    send_failure,
    unpack_roster,
)

T = TypeVar("T")

_FIRST_PAUSE = 0.001  # seconds between two attempts to reach rank 0; it doubles
_PAUSE_IF_BUSY = 0.02
_GRACE = 5.0  # seconds that rank 0 may take longer with "no such key" than it was given


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
        if job.rank != 0:
            return _exchange_files(job, arena, deadline)
        with Server(job, UnixPoint(job), deadline, arena=arena) as server:
            return server.hand_out()
    except DistributedError:
        raise
    except OSError as error:
        raise errors.could_not_join(job, error) from error


class Client(Exchange):
    """A connection to rank 0, from ``start`` to ``close``, and the store that rank 0 keeps."""

    def __init__(self, job: Job, point: MeetingPoint, deadline: Deadline) -> None:
        self.channel: Channel | None = None
        self._job = job
        self._point = point
        self._deadline = deadline
        self._who = ""

    @property
    def towards(self) -> str:
        return self._point.towards

    @property
    def failure_channels(self) -> Mapping[int, Channel]:
        return {} if self.channel is None else {0: self.channel}

    def join(self) -> None:
        """Connect to rank 0, to use its store."""

        def introduce(channel: Channel) -> Steps[None]:
            name = socket.gethostname().encode()[:MAX_HOST_NAME]
            channel.send(MessageKind.ARRIVAL, _pack_hello(self._deadline) + name)
            yield from receive_answer(channel, MessageKind.TAKEN)

        self.start(introduce)

    def gather(self, own: bytes) -> list[bytes]:
        values = gather(self, self._job, own, self._deadline)
        self.leave()
        return values

    def set(self, key: str, value: bytes) -> None:
        self._request(MessageKind.SET, pack_entry(key, value), self._deadline)

    def get(self, key: str, timeout: float) -> bytes:
        seconds = min(timeout, self._deadline.remaining())
        body = SECONDS.pack(seconds) + check_entry(key)
        message = self._request(MessageKind.GET, body, Deadline(seconds + _GRACE))
        if message.kind is MessageKind.ABSENT:
            raise absent(key, Deadline(timeout))
        return message.body

    def add(self, key: str, amount: int) -> int:
        body = AMOUNT.pack(amount) + check_entry(key)
        message = self._request(MessageKind.ADD, body, self._deadline)
        total, _ = unpack_number(AMOUNT, message.body)
        return int(total)

    def leave(self) -> None:
        """Tell rank 0 that nothing more is needed; the channel stays open."""

        def send(channel: Channel) -> Steps[None]:
            channel.send(MessageKind.LEAVE)
            yield from ()

        self._run(send, self._deadline)

    def give_up(self, error: BaseException) -> None:
        """Tell rank 0 what is wrong here; it will tell the others."""
        if self.channel is not None:
            send_failure(self.channel, error, self._job.rank)

    def close(self) -> None:
        """End the connection; idempotent."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def start(self, steps: Callable[[Channel], Steps[T]]) -> T:
        """Connect to rank 0, shake hands and run these steps; again if rank 0 is busy."""

        def greet_first(channel: Channel) -> Steps[T]:
            greeted = yield from greet_server(channel, self._job, where=self._point.where)
            self._job, _ = greeted
            return (yield from steps(channel))

        while True:
            self.channel = self._connect()
            try:
                return self._run(greet_first, self._deadline)
            except BlockingIOError as error:  # too many connections: we are asked to come again
                self.close()
                if self._deadline.remaining() <= 0:
                    raise errors.no_answer(self._job, self._who, self._deadline) from error
                time.sleep(random.uniform(1, 5) * _PAUSE_IF_BUSY)  # not all at the same moment
            except BaseException:
                self.close()
                raise

    def _connect(self) -> Channel:
        """Connect to rank 0, which may not have started yet."""
        job, pause, early_exits = self._job, _FIRST_PAUSE, errors.EarlyExits(self._job)
        while (connection := self._point.try_connect()) is None:
            if self._deadline.remaining() <= 0:
                if self._who:
                    raise errors.no_answer(job, self._who, self._deadline)
                raise errors.missing_server(job, self._point.address, self._deadline)
            early_exits.check(_others(job))
            time.sleep(min(pause, max(0.0, self._deadline.remaining())))
            pause = min(2 * pause, self._point.max_pause)
        try:
            self._who = str(self._point.identify(connection))
        except BaseException:
            connection.close()
            raise
        return Channel(connection)

    def _run(self, steps: Callable[[Channel], Steps[T]], deadline: Deadline) -> T:
        """Run steps on the open channel; raises RendezvousError if rank 0 is gone or silent."""
        channel = self.channel
        if channel is None:
            raise RendezvousError(
                "the connection to rank 0 was closed", rank=0, this_rank=self._job.rank
            )
        try:
            return run_steps(steps(channel), channel, deadline)
        except EOFError as error:
            with suppress(EOFError, TimeoutError):  # what rank 0 has sent before it left
                run_steps(receive_answer(channel, MessageKind.BUSY), channel, Deadline(0.0))
            errors.EarlyExits(self._job).check_now(_others(self._job))
            raise errors.server_left(self._job, self._who) from error
        except TimeoutError as error:
            raise errors.no_answer(self._job, self._who, deadline) from error

    def _request(self, kind: MessageKind, body: bytes, deadline: Deadline) -> Message:
        def ask(channel: Channel) -> Steps[Message]:
            channel.send(kind, body)
            refusals = MessageKind.ABSENT, MessageKind.REFUSED
            return (yield from receive_answer(channel, MessageKind.VALUE, *refusals))

        message = self._run(ask, deadline)
        if message.kind is MessageKind.REFUSED:
            raise InvalidArgument(message.body.decode(errors="replace"))
        return message


def _exchange_files(job: Job, arena: int, deadline: Deadline) -> list[Member]:
    """Bring this rank's files to rank 0, and return all members when everybody has them."""
    lifeline = Lifeline()
    is_held = False
    client = Client(job, UnixPoint(job), deadline)
    files = [arena, lifeline.watch]
    try:
        roster = client.start(lambda channel: _swap_files(channel, job, files, deadline))
        is_held = roster[job.rank].is_lifeline
    finally:
        client.close()
        if is_held:
            lifeline.keep()
        else:
            lifeline.close()
    return [entry.member for entry in roster]


def _swap_files(
    channel: Channel, job: Job, files: list[int], deadline: Deadline
) -> Steps[list[RosterEntry]]:
    channel.send(MessageKind.HELLO, _pack_hello(deadline), files)
    roster: list[RosterEntry] = []
    try:
        while len(roster) < job.world_size:
            roster += unpack_roster((yield from receive_answer(channel, MessageKind.ROSTER)))
            channel.send(MessageKind.TAKEN)
        if [entry.member.rank for entry in roster] != list(range(job.world_size)):
            raise ProtocolError("rank 0 sent a roster that is not of this world", rank=0)
        yield from receive_answer(channel, MessageKind.GO)
    except BaseException:
        close_roster(roster)
        raise
    return roster


def _pack_hello(deadline: Deadline) -> bytes:
    """Say who this is, and when rank 0 has to give up so that we hear its reasons in time."""
    remaining = deadline.remaining()
    return HELLO.pack(os.getpid(), remaining - min(0.5, remaining / 10))


def _others(job: Job) -> list[int]:
    return [rank for rank in range(job.world_size) if rank != job.rank]
