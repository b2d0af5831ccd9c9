# SPDX-License-Identifier: MIT OR Apache-2.0
"""The handshake: both sides prove that they know the job's secret, and show it to nobody.

    client                                    server
    GREETING: nonce, rank, size, version  ->
                                          <-  GREETING: the same of the server
                                          <-  PROOF: HMAC("serv", both greetings, job)
    PROOF: HMAC("clie", both greetings, job)  ->
                                          <-  WELCOME

A proof covers the role, all that both sides have said (their ranks too) and the job's name, so it
cannot be sent back, replayed, or taken to another rank or job. Only then does the server compare
what both have said. From the same follow keys that only these two have: every message after the
WELCOME is sealed with one, and one is handed out for what comes after messages.

A client that has no secret gets it between the greetings and the proofs: see ``munge.py``.

The Acceptor leads every process that connects to a listener through it. Pending connections are
served side by side, each with a time limit of its own, so that one that is slow or sends nonsense
holds up nobody.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ferrodist.config import variable
from ferrodist.deadline import Deadline
from ferrodist.errors import AuthenticationError, DistributedError, ProtocolError
from ferrodist.rendezvous import munge
from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.wire import Channel, MessageKind, Steps, receive_answer, send_failure
from ferrodist.version import __version__

logger = logging.getLogger("ferrodist")

_GREETING = struct.Struct("!32sII32s")
# What the keys are for; of one length, like all in an HMAC but the job's name.
_LINK, _TO_SERVER, _TO_CLIENT = b"link", b"tose", b"tocl"
_GREETINGS = MessageKind.GREETING, MessageKind.MUNGE_GREETING

_MAX_STRANGERS = 64  # pending connections beyond those that are expected
_MAX_ACCEPTED_AT_ONCE = 32  # before others have their turn
_HANDSHAKE_SECONDS = 5.0
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Purpose(NamedTuple):
    """What a handshake is for, as it stands in the proofs; one purpose's are no good for another.

    ``server`` is the role of the side that listens, ``client`` of the one that connects.
    """

    server: bytes
    client: bytes


MEETING = Purpose(b"serv", b"clie")
MESH = Purpose(b"answ", b"call")


class Greeting(NamedTuple):
    """What one side says about itself."""

    nonce: bytes
    rank: int
    world_size: int
    version: str

    def pack(self) -> bytes:
        return _GREETING.pack(self.nonce, self.rank, self.world_size, self.version.encode()[:32])

    @classmethod
    def unpack(cls, body: bytes) -> Greeting:
        try:
            nonce, rank, world_size, version = _GREETING.unpack(body)
            return cls(nonce, rank, world_size, version.rstrip(b"\0").decode("ascii"))
        except (struct.error, UnicodeDecodeError) as error:
            raise ProtocolError("a greeting that cannot be decoded") from error


def greet_server(
    channel: Channel, job: Job, purpose: Purpose = MEETING, *, rank: int = 0, where: str = ""
) -> Steps[tuple[Job, bytes]]:
    """Shake hands as a client of a rank; return the job, with its secret, and the key of both.

    Raises AuthenticationError if the process that listens does not know the secret, or is another
    rank.
    """
    mine = _new_greeting(job).pack()
    channel.send(_greeting_kind(job), mine)
    try:
        answer = yield from receive_answer(channel, *_GREETINGS, is_trusted=False)
        theirs = answer.body
        if answer.kind is not _greeting_kind(job):
            raise munge.mixed(job, f"rank {rank}")
        if job.uses_munge:
            job = yield from munge.ask_for_secret(channel, job, mine, theirs, where)
        proof = (yield from receive_answer(channel, MessageKind.PROOF, is_trusted=False)).body
    except ProtocolError as error:
        raise ProtocolError(
            f"the process that listens{where} for job {job.name!r} is not a rank of ferrodist: "
            f"{error}",
            rank=rank,
            this_rank=job.rank,
        ) from error
    if not hmac.compare_digest(proof, _prove(job, purpose.server, mine, theirs)):
        raise AuthenticationError(
            f"the process that listens{where} for job {job.name!r} does not know its secret: it "
            f"belongs to another job of this name, or its {variable('secret_file')} is not the "
            "same file as here (compare them with sha256sum)",
            rank=rank,
            this_rank=job.rank,
        )
    server = Greeting.unpack(theirs)
    if server.rank != rank:  # before we prove anything: it must not take us for its own client
        raise AuthenticationError(
            f"rank {server.rank} of job {job.name!r} listens{where}, where rank {rank} should",
            rank=server.rank,
            this_rank=job.rank,
        )
    channel.send(MessageKind.PROOF, _prove(job, purpose.client, mine, theirs))
    channel.seal_sent(_prove(job, _TO_SERVER, mine, theirs))
    check_version(server.version, job, rank)
    yield from receive_answer(channel, MessageKind.WELCOME)
    channel.seal_received(_prove(job, _TO_CLIENT, mine, theirs))
    return job, _prove(job, _LINK, mine, theirs)


def greet_client(
    channel: Channel,
    job: Job,
    purpose: Purpose = MEETING,
    check: Callable[[Greeting], None] = lambda greeting: None,
) -> Steps[tuple[Greeting, bytes]]:
    """Shake hands as the server; return what the client has proved to have said, and the key.

    ``check`` looks at what it has said, and raises if it is not welcome all the same.
    """
    message = yield from channel.receive(*_GREETINGS)
    theirs = message.body
    greeting, mine = Greeting.unpack(theirs), _new_greeting(job).pack()
    channel.send(_greeting_kind(job), mine)
    if message.kind is not _greeting_kind(job):
        raise munge.mixed(job, f"a process that calls itself rank {greeting.rank}")
    if job.uses_munge:
        yield from munge.tell_secret(channel, job, theirs, mine)
    channel.send(MessageKind.PROOF, _prove(job, purpose.server, theirs, mine))
    try:
        proof = (yield from channel.receive(MessageKind.PROOF)).body
    except EOFError as error:
        raise AuthenticationError(
            f"a process that calls itself rank {greeting.rank} left when it saw this job's proof"
        ) from error
    if not hmac.compare_digest(proof, _prove(job, purpose.client, theirs, mine)):
        raise AuthenticationError("a process does not know the job's secret")
    channel.seal_received(_prove(job, _TO_SERVER, theirs, mine))
    check(greeting)
    channel.send(MessageKind.WELCOME)
    channel.seal_sent(_prove(job, _TO_CLIENT, theirs, mine))
    return greeting, _prove(job, _LINK, theirs, mine)


def check_version(other: str, job: Job, rank: int = 0) -> None:
    if other != __version__:
        raise ProtocolError(
            f"rank {rank} runs ferrodist {other}, rank {job.rank} runs {__version__}; install one "
            "version everywhere",
            rank=rank,
            this_rank=job.rank,
            got=other,
            expected=__version__,
        )


def _greeting_kind(job: Job) -> MessageKind:
    return MessageKind.MUNGE_GREETING if job.uses_munge else MessageKind.GREETING


def _new_greeting(job: Job) -> Greeting:
    return Greeting(os.urandom(32), job.rank, job.world_size, __version__)


def _prove(job: Job, role: bytes, client: bytes, server: bytes) -> bytes:
    return hmac.digest(job.secret, role + client + server + job.name.encode(), "sha256")


# -- accepting ------------------------------------------------------------------------------------


class PeerIdentity(NamedTuple):
    """Who is at the other end, according to the kernel.

    On this host pid and user, with pid 0 for a process in another pid namespace; else an address.
    """

    pid: int = 0
    uid: int = -1
    address: str = ""

    def __str__(self) -> str:
        return self.address or f"pid {self.pid}"


@dataclass(slots=True)
class PendingConnection:
    """A connection whose handshake is under way; ``awaited`` is what it waits for now."""

    channel: Channel
    peer: PeerIdentity
    steps: Steps[None]
    deadline: Deadline
    awaited: Channel | int


class Acceptor:
    """A listener and its pending connections, as a part of the owner's select loop.

    ``identify`` says who has connected, or raises for somebody who may not. ``receive`` are the
    steps of the handshake; at their end they call ``admit``. ``wrap`` returns the socket to use
    instead of the connection itself.
    """

    def __init__(
        self,
        job: Job,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        *,
        identify: Callable[[socket.socket], PeerIdentity],
        receive: Callable[[Channel, PeerIdentity], Steps[None]],
        wrap: Callable[[socket.socket], socket.socket] = lambda connection: connection,
    ) -> None:
        self.num_without_secret = 0  # connections that did not prove to know it
        self._job = job
        self._listener = listener
        self._selector = selector
        self._identify = identify
        self._receive = receive
        self._wrap = wrap
        self._pending: dict[Channel, PendingConnection] = {}  # the oldest first
        self._quiet_until = 0.0
        selector.register(listener, selectors.EVENT_READ, self)

    def handle(self, data: Any) -> bool:
        """Handle an event of the selector; False if it is none of ours."""
        if isinstance(data, PendingConnection):
            self._continue(data)
        elif data is self:
            for _ in range(_MAX_ACCEPTED_AT_ONCE):
                if not self._accept_one():
                    break
        else:
            return False
        return True

    def admit(self, channel: Channel, data: Any) -> None:
        """Hand a connection to the owner, who gets its events with this data from now on."""
        self._await(self._pending.pop(channel), channel)
        self._selector.modify(channel, selectors.EVENT_READ, data)

    def seconds_to_next_deadline(self) -> float:
        ends = (pending.deadline.remaining() for pending in self._pending.values())
        return min(ends, default=float("inf"))

    def close_overdue(self) -> None:
        for pending in list(self._pending.values()):
            if pending.deadline.remaining() <= 0:
                self._send_away(pending)
            elif pending.awaited is not pending.channel:
                self._continue(pending)  # whatever it waits for has a time limit of its own

    def close(self) -> None:
        """Stop listening, and close all pending connections; idempotent."""
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()
        for pending in list(self._pending.values()):
            self._close(pending)

    def _accept_one(self) -> bool:
        """Accept a connection and begin its handshake; False if there is none."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        except OSError as error:
            if error.errno not in _OUT_OF_FILES or not self._pending:
                raise
            self._send_oldest_away()
            return True
        try:
            peer = self._identify(connection)
            channel = Channel(self._wrap(connection))
        except (DistributedError, OSError) as error:
            connection.close()
            self._log_refusal(error)
            return True
        if len(self._pending) >= self._job.world_size + _MAX_STRANGERS:
            self._send_oldest_away()
        steps = self._receive_or_refuse(channel, peer)
        pending = PendingConnection(channel, peer, steps, Deadline(_HANDSHAKE_SECONDS), channel)
        self._pending[channel] = pending
        self._selector.register(channel, selectors.EVENT_READ, pending)
        self._continue(pending)
        return True

    def _receive_or_refuse(self, channel: Channel, peer: PeerIdentity) -> Steps[None]:
        try:
            yield from self._receive(channel, peer)
        except DistributedError as error:
            send_failure(channel, error, self._job)
            raise

    def _continue(self, pending: PendingConnection) -> None:
        if pending.channel not in self._pending:
            return  # it was closed a moment ago
        try:
            file = next(pending.steps)
        except StopIteration:
            return  # it was admitted
        except (EOFError, OSError) as error:
            self.num_without_secret += isinstance(error, AuthenticationError)
            self._close(pending)
            self._log_refusal(error)
            return
        self._await(pending, pending.channel if file is None else file)

    def _await(self, pending: PendingConnection, awaited: Channel | int) -> None:
        if awaited is not pending.awaited:
            self._selector.unregister(pending.awaited)
            self._selector.register(awaited, selectors.EVENT_READ, pending)
            pending.awaited = awaited

    def _send_oldest_away(self) -> None:
        self._send_away(next(iter(self._pending.values())))

    def _send_away(self, pending: PendingConnection) -> None:
        """Close a connection that takes too long; a rank of ours will come again."""
        with suppress(EOFError):
            pending.channel.send(MessageKind.BUSY)
        self._close(pending)
        self._log_refusal(f"{pending.peer} did not finish the handshake")

    def _close(self, pending: PendingConnection) -> None:
        del self._pending[pending.channel]
        self._selector.unregister(pending.awaited)
        pending.steps.close()
        pending.channel.close()

    def _log_refusal(self, reason: object) -> None:
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + 1.0
            logger.warning("job %r: refused a connection: %s", self._job.name, reason)
