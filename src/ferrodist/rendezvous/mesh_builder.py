# SPDX-License-Identifier: MIT OR Apache-2.0
"""MeshBuilder: one rank while it connects to those below it and accepts those above.

Everything happens in one select loop. When a rank has all its links it tells rank 0, and when rank
0 has heard that from all it lets everybody go. A rank that fails before that tells all it is linked
to, each forwards it, so that every rank raises the first error there was. A rank that is
not linked yet learns of it by the *failure channels*, which lead to rank 0 from everywhere if the
ranks have met there.
"""

from __future__ import annotations

import random
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.errors import AuthenticationError, ProtocolError, RendezvousError
from ferrodist.rendezvous import errors
from ferrodist.rendezvous.handshake import (
    MESH,
    Acceptor,
    Greeting,
    PeerIdentity,
    greet_client,
    greet_server,
)
from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.sockets import (
    finish_connecting,
    identify_by_address,
    resolve,
    set_limits,
    start_connecting,
)
from ferrodist.rendezvous.wire import (
    Channel,
    Message,
    MessageKind,
    Steps,
    parse_failure,
    send_failure,
    wait_seconds,
)

if TYPE_CHECKING:
    from ferrodist.rendezvous.mesh import PeerAddress
    from ferrodist.rendezvous.tls import Tls

_MAX_CONNECTING = 64  # at once
_GRACE = 1.0  # seconds to hear why a rank has left: it may have told another, or all is well
_GIVE_UP_AFTER = 0.75  # of the time: then a rank that cannot be reached is named

_PAUSE = 0.05  # seconds between two tries to connect, at first
_MAX_PAUSE = 1.0
_MAX_TRIES = 5  # for a rank that is known to listen and is not found to


class MeshLink(NamedTuple):
    """A connection to a rank, and the key that the two ends share."""

    channel: Channel
    key: bytes


class _FailureChannel(NamedTuple):
    """A channel that was there before the mesh; its owner closes it."""

    rank: int
    channel: Channel


class MeshBuilder:
    """What one rank has of the mesh so far."""

    def __init__(
        self,
        job: Job,
        listener: socket.socket,
        addresses: list[PeerAddress],
        failure_channels: Mapping[int, Channel],
        config: Config,
        deadline: Deadline,
    ) -> None:
        self._job = job
        self._addresses = addresses
        self._heartbeat_timeout = config.heartbeat_timeout
        self._tls = _open_tls(job.secret) if config.tls else None
        self._deadline = deadline
        self._give_up_connecting = Deadline(_GIVE_UP_AFTER * deadline.remaining())
        self._selector = selectors.DefaultSelector()
        self._links: dict[int, MeshLink] = {}
        self._to_connect = list(range(job.rank - 1, -1, -1))  # rank 0 last in the list, so first
        self._connecting: dict[int, OutgoingConnection] = {}
        self._ready: set[int] = set()  # ranks that have told rank 0
        self._is_ready = False  # and this rank has
        self._gone: tuple[int, Deadline] | None = None  # a rank that has left, rightly or not
        self._is_over = False
        self._early_exits = errors.EarlyExits(job)
        self._acceptor = Acceptor(
            job,
            listener,
            self._selector,
            identify=identify_by_address,
            receive=self._receive,
            wrap=partial(self._wrap, True),
        )
        for rank, channel in failure_channels.items():
            data = _FailureChannel(rank, channel)
            self._selector.register(channel, selectors.EVENT_READ, data)

    def build(self) -> dict[int, MeshLink]:
        """Return the links to all other ranks when all ranks have all of theirs."""
        try:
            while not self._is_over:
                self._start_connecting()
                for key, _ in self._selector.select(wait_seconds(self._seconds_to_next_deadline())):
                    if not self._acceptor.handle(key.data):
                        self._handle(key.data)
                self._acceptor.close_overdue()
                self._check_ready()
                self._check_deadlines()
        except BaseException as error:  # Ctrl-C too: the other ranks are told
            self._tell_all(error)
            for link in self._links.values():
                link.channel.close()
            raise
        finally:
            for connecting in self._connecting.values():
                connecting.close()
            self._acceptor.close()
            self._selector.close()
        return self._links

    def _handle(self, data: Any) -> None:
        if isinstance(data, OutgoingConnection):
            self._continue_connecting(data)
        elif isinstance(data, _FailureChannel):
            self._read_failure(data)
        elif data in self._links:
            self._read(data, self._links[data].channel)

    # -- ranks below: we connect to them ----------------------------------------------------------

    def _start_connecting(self) -> None:
        while self._to_connect and len(self._connecting) < _MAX_CONNECTING:
            rank = self._to_connect.pop()
            self._connecting[rank] = OutgoingConnection(
                self._job, self._addresses[rank], self._selector, partial(self._wrap, False)
            )
        now = time.monotonic()
        for connecting in self._connecting.values():
            if connecting.is_due(now):
                self._continue_connecting(connecting)

    def _wrap(self, is_server: bool, connection: socket.socket) -> socket.socket:
        """Set a connection up; return the socket to use instead of it."""
        set_limits(connection, self._heartbeat_timeout)
        if self._tls is None:
            return connection
        return (self._tls.accept if is_server else self._tls.connect)(connection)

    def _continue_connecting(self, connecting: OutgoingConnection) -> None:
        key = connecting.proceed()
        if key is not None:
            rank = connecting.peer.rank
            del self._connecting[rank]
            self._links[rank] = MeshLink(connecting.take_channel(rank), key)

    # -- ranks above: they connect to us ----------------------------------------------------------

    def _receive(self, channel: Channel, peer: PeerIdentity) -> Steps[None]:
        greeting, key = yield from greet_client(channel, self._job, MESH, self._check)
        self._links[greeting.rank] = MeshLink(channel, key)
        self._acceptor.admit(channel, greeting.rank)

    def _check(self, greeting: Greeting) -> None:
        rank, size = greeting.rank, self._job.world_size
        if greeting.world_size != size or not self._job.rank < rank < size:
            raise ProtocolError(f"rank {rank} does not connect to rank {self._job.rank}", rank=rank)
        if rank in self._links:
            peer = self._addresses[rank]
            raise RendezvousError(f"{peer} is linked to rank {self._job.rank} already", rank=rank)

    # -- all ranks --------------------------------------------------------------------------------

    def _read(self, rank: int, channel: Channel) -> None:
        """Read what a linked rank says, but nothing that it sends when the mesh is complete."""
        try:
            may_be_data = self._is_ready and rank != 0 and not channel.is_receiving
            if may_be_data and not channel.starts_with(MessageKind.FAILURE):
                self._selector.unregister(channel)  # it was let go a moment before us
                return
            kinds = MessageKind.READY, MessageKind.GO, MessageKind.FAILURE
            self._take(rank, channel.try_receive(*kinds))
        except BlockingIOError:
            return
        except EOFError:
            self._selector.unregister(channel)
            self._gone = self._gone or (rank, Deadline(_GRACE))

    def _read_failure(self, data: _FailureChannel) -> None:
        """Hear of failures; a rank whose channel ends without one is gone."""
        try:
            self._take(data.rank, data.channel.try_receive(MessageKind.FAILURE))
        except EOFError as error:
            if not self._is_ready:
                raise errors.peer_left(self._job, self._addresses[data.rank]) from error
            self._selector.unregister(data.channel)
            self._gone = self._gone or (data.rank, Deadline(_GRACE))

    def _take(self, rank: int, message: Message | None) -> None:
        if message is None:
            return  # not all of it has arrived
        if message.kind is MessageKind.FAILURE:
            raise parse_failure(message.body)
        if message.kind is MessageKind.READY and self._job.rank == 0:
            self._ready.add(rank)
        elif message.kind is MessageKind.GO and rank == 0 and self._is_ready:
            self._is_over = True
        else:
            raise ProtocolError(f"rank {rank} sent {message.kind.name} out of turn", rank=rank)

    def _check_ready(self) -> None:
        num_others = self._job.world_size - 1
        if len(self._links) < num_others or self._is_over:
            return
        self._acceptor.close()
        if self._job.rank != 0 and not self._is_ready:
            self._is_ready = True
            try:
                self._links[0].channel.send(MessageKind.READY)
            except EOFError as error:
                raise errors.peer_left(self._job, self._addresses[0]) from error
        elif self._job.rank == 0 and len(self._ready) == num_others:
            self._is_over = True
            for link in self._links.values():
                try:
                    link.channel.send(MessageKind.GO)
                except EOFError:
                    continue  # who dies from now on is found by those who use the link

    def _check_deadlines(self) -> None:
        if self._is_over:
            return
        absent = [rank for rank in range(self._job.world_size) if rank not in self._links]
        self._early_exits.check(rank for rank in absent if rank != self._job.rank)
        if self._gone is not None and self._gone[1].remaining() <= 0:
            raise errors.peer_left(self._job, self._addresses[self._gone[0]])
        if self._give_up_connecting.remaining() <= 0 and self._connecting:
            first = next(iter(self._connecting.values()))
            raise errors.unreachable(self._job, first.peer, first.why or "no answer")
        if self._deadline.remaining() <= 0:
            raise self._overdue()

    def _overdue(self) -> RendezvousError:
        size, rank = self._job.world_size, self._job.rank
        silent = [self._addresses[i] for i in range(rank + 1, size) if i not in self._links]
        if silent:
            return errors.not_connected(self._job, self._addresses[rank], silent, self._deadline)
        slow = [other for other in range(1, size) if other not in self._ready] if rank == 0 else [0]
        return errors.not_ready(self._job, [self._addresses[i] for i in slow], self._deadline)

    def _seconds_to_next_deadline(self) -> float:
        now = time.monotonic()
        pauses = (connecting.seconds_to_next_try(now) for connecting in self._connecting.values())
        ends = (self._deadline.remaining(), self._acceptor.seconds_to_next_deadline())
        return min(*ends, *pauses)

    def _tell_all(self, error: BaseException) -> None:
        for rank, link in self._links.items():
            # A rank that was let go already would take a failure for its first data.
            if not self._is_ready or rank == 0:
                send_failure(link.channel, error, self._job)


class OutgoingConnection:
    """A connection to a rank that listens, until the end of the handshake.

    It is part of the owner's select loop. A try that is not answered is repeated after a short
    pause; what cannot become better by that is raised at once. ``wrap`` returns the socket to use
    instead of the connection itself.
    """

    def __init__(
        self,
        job: Job,
        peer: PeerAddress,
        selector: selectors.BaseSelector,
        wrap: Callable[[socket.socket], socket.socket],
    ) -> None:
        self.peer = peer
        self.why = ""
        self._job = job
        self._selector = selector
        self._wrap = wrap
        try:
            self._addresses = resolve(peer.endpoint)
        except (OSError, UnicodeError) as error:
            raise errors.unreachable(job, peer, str(error)) from error
        self._channel: Channel | None = None
        self._steps: Steps[tuple[Job, bytes]] | None = None
        self._tries = 0
        self._next_try = 0.0

    def is_due(self, now: float) -> bool:
        return self._channel is None and now >= self._next_try

    def seconds_to_next_try(self, now: float) -> float:
        """Return how long there is nothing to do unless the other side answers."""
        return float("inf") if self._channel is not None else max(0.0, self._next_try - now)

    def proceed(self) -> bytes | None:
        try:
            if self._channel is None:
                self._connect()
            elif self._steps is None:
                self._begin_handshake(self._channel.socket)
            if self._steps is not None:
                next(self._steps)
        except StopIteration as end:
            key: bytes = end.value[1]
            return key
        except BlockingIOError:
            self._pause("it has too many connections", is_alive=True)
        except (AuthenticationError, ProtocolError) as error:
            raise errors.wrong_answer(self._job, self.peer, error) from error
        except RendezvousError:
            raise  # the other side says why it refuses us
        except (EOFError, OSError) as error:
            if errors.lacks_files(error):
                raise errors.no_file_limit_left_for(self._job, self.peer) from error
            self._pause(getattr(error, "strerror", None) or str(error), is_alive=False)
        return None

    def take_channel(self, data: object) -> Channel:
        """Hand the channel over; it stays registered, with this data."""
        channel = self._channel
        assert channel is not None
        self._selector.modify(channel, selectors.EVENT_READ, data)
        self._channel = None
        return channel

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        if self._channel is not None:
            self._selector.unregister(self._channel)
            self._channel.close()
            self._channel = None

    def _connect(self) -> None:
        address = self._addresses[self._tries % len(self._addresses)]
        self._tries += 1
        self._channel = Channel(start_connecting(address))
        self._selector.register(self._channel, selectors.EVENT_WRITE, self)

    def _begin_handshake(self, connection: socket.socket) -> None:
        finish_connecting(connection)
        self._selector.unregister(connection)
        self._channel = channel = Channel(self._wrap(connection))
        self._selector.register(channel, selectors.EVENT_READ, self)
        where, rank = f" at {self.peer.endpoint}", self.peer.rank
        self._steps = greet_server(channel, self._job, MESH, rank=rank, where=where)

    def _pause(self, why: str, *, is_alive: bool) -> None:
        self.close()
        self.why = why
        if self._tries >= _MAX_TRIES * len(self._addresses) and not is_alive:
            raise errors.unreachable(self._job, self.peer, why)
        pause = min(_PAUSE * 2**self._tries, _MAX_PAUSE)
        self._next_try = time.monotonic() + pause * random.uniform(0.5, 1.0)


def _open_tls(secret: bytes) -> Tls:
    from ferrodist.rendezvous.tls import Tls  # it takes longer than all the rest here

    return Tls(secret)
