# SPDX-License-Identifier: MIT OR Apache-2.0
"""MeshBuilder: one rank while it connects to those below it and hears those above.

Everything happens in one select loop. When a rank has all its links it tells rank 0, and when rank
0 has heard that from all it lets everybody go. Whoever fails before tells all it is linked to, and
each of them tells on, so that every rank raises the first error there was. Who is not linked yet
hears of it by the *lines*, which lead to rank 0 from everywhere if the ranks have met there.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.errors import ProtocolError, RendezvousError
from ferrodist.rendezvous import failure, mesh_errors
from ferrodist.rendezvous.cards import Card
from ferrodist.rendezvous.dial import Call
from ferrodist.rendezvous.early_ends import EarlyEnds
from ferrodist.rendezvous.handshake import Greeting, Purpose, greet_guest
from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.link import Kind, Link, Message, Talk, wait_seconds
from ferrodist.rendezvous.reception import Peer, Reception
from ferrodist.rendezvous.tcp_socket import identify, set_limits

if TYPE_CHECKING:
    from ferrodist.rendezvous.tls import Tls

_MOST_CALLS = 64  # that are made at once
_GRACE = 1.0  # seconds to hear why a rank has left: it may have said it to another, or all is well
_PATIENCE = 0.75  # of the time, after which a rank that cannot be reached is given up and named


class MeshLink(NamedTuple):
    """A connection to a rank, and the key that the two ends share."""

    link: Link
    key: bytes


class _Line(NamedTuple):
    """A link that was there before the mesh; it is closed by whom it belongs to."""

    rank: int
    link: Link


class MeshBuilder:
    """What one rank has of the mesh so far."""

    def __init__(
        self,
        job: Job,
        listener: socket.socket,
        cards: list[Card],
        lines: Mapping[int, Link],
        config: Config,
        deadline: Deadline,
    ) -> None:
        self._job = job
        self._cards = cards
        self._silence = config.silence
        self._tls = _open_tls(job.secret) if config.tls else None
        self._deadline = deadline
        self._give_up_calls = Deadline(_PATIENCE * deadline.remaining())
        self._selector = selectors.DefaultSelector()
        self._links: dict[int, MeshLink] = {}
        self._to_call = list(range(job.rank - 1, -1, -1))  # rank 0 last in the list, so first
        self._calls: dict[int, Call] = {}
        self._messages: dict[Link, Talk[Message]] = {}  # that have come in part
        self._ready: set[int] = set()  # ranks that have told rank 0
        self._has_told = False
        self._gone: tuple[int, Deadline] | None = None  # a rank that has left, rightly or not
        self._is_over = False
        self._early_ends = EarlyEnds(job)
        self._reception = Reception(
            job,
            listener,
            self._selector,
            identify=identify,
            receive=self._receive,
            wrap=self._wrap_accepted,
        )
        for rank, line in lines.items():
            self._selector.register(line, selectors.EVENT_READ, _Line(rank, line))

    def build(self) -> dict[int, MeshLink]:
        """Return the links to all other ranks when all ranks have all of theirs."""
        try:
            while not self._is_over:
                self._start_calls()
                for key, _ in self._selector.select(wait_seconds(self._seconds_to_next_end())):
                    if not self._reception.take(key.data):
                        self._go_on(key.data)
                self._reception.end_overdue_visits()
                self._see_whether_ready()
                self._look_at_the_clock()
        except BaseException as error:
            self._tell_all(error)
            for link in self._links.values():
                link.link.close()
            raise
        finally:
            for call in self._calls.values():
                call.close()
            self._reception.close()
            self._selector.close()
        return self._links

    def _go_on(self, data: Any) -> None:
        if isinstance(data, Call):
            self._go_on_calling(data)
        elif isinstance(data, _Line):
            self._hear_line(data)
        elif data in self._links:
            self._hear(data, self._links[data].link)

    # -- ranks below: we connect to them ----------------------------------------------------------

    def _start_calls(self) -> None:
        while self._to_call and len(self._calls) < _MOST_CALLS:
            rank = self._to_call.pop()
            self._calls[rank] = self._new_call(self._cards[rank])
        now = time.monotonic()
        for call in self._calls.values():
            if call.is_due(now):
                self._go_on_calling(call)

    def _new_call(self, card: Card) -> Call:
        return Call(self._job, card, self._selector, self._wrap_called)

    def _wrap_called(self, connection: socket.socket) -> socket.socket:
        set_limits(connection, self._silence)
        return connection if self._tls is None else self._tls.call(connection)

    def _go_on_calling(self, call: Call) -> None:
        key = call.go_on()
        if key is not None:
            rank = call.card.rank
            del self._calls[rank]
            self._links[rank] = MeshLink(call.take_link(rank), key)

    # -- ranks above: they connect to us ----------------------------------------------------------

    def _wrap_accepted(self, connection: socket.socket) -> socket.socket:
        set_limits(connection, self._silence)
        return connection if self._tls is None else self._tls.accept(connection)

    def _receive(self, link: Link, peer: Peer) -> Talk[None]:
        greeting, key = yield from greet_guest(link, self._job, Purpose.MESH, self._check)
        self._links[greeting.rank] = MeshLink(link, key)
        self._reception.admit(link, greeting.rank)

    def _check(self, greeting: Greeting) -> None:
        """Refuse a rank that has no business here."""
        rank, size = greeting.rank, self._job.world_size
        if greeting.world_size != size or not self._job.rank < rank < size:
            raise ProtocolError(f"rank {rank} does not connect to rank {self._job.rank}", rank=rank)
        if rank in self._links:
            card = self._cards[rank]
            raise RendezvousError(f"{card} is linked to rank {self._job.rank} already", rank=rank)

    # -- all ranks --------------------------------------------------------------------------------

    def _hear(self, rank: int, link: Link) -> None:
        """Read what a linked rank says, but nothing that it sends when the mesh is complete."""
        try:
            is_new = link not in self._messages
            if is_new and self._has_told and rank != 0 and not link.starts_with(Kind.FAILURE):
                self._selector.unregister(link)  # it was let go a moment before us
                return
            self._go_on_reading(rank, link, Kind.READY, Kind.GO, Kind.FAILURE)
        except BlockingIOError:
            return
        except EOFError:
            self._selector.unregister(link)
            self._gone = self._gone or (rank, Deadline(_GRACE))

    def _hear_line(self, line: _Line) -> None:
        """Hear of failures; a rank whose line ends without a word is gone."""
        try:
            self._go_on_reading(line.rank, line.link, Kind.FAILURE)
        except EOFError as error:
            if not self._has_told:
                raise mesh_errors.left(self._job, self._cards[line.rank]) from error
            self._selector.unregister(line.link)
            self._gone = self._gone or (line.rank, Deadline(_GRACE))

    def _go_on_reading(self, rank: int, link: Link, *kinds: Kind) -> None:
        if link not in self._messages:
            self._messages[link] = link.receive(*kinds)
        try:
            next(self._messages[link])
        except StopIteration as end:
            del self._messages[link]
            self._take(rank, end.value)

    def _take(self, rank: int, message: Message) -> None:
        if message.kind is Kind.FAILURE:
            raise failure.error_of(message.body)
        if message.kind is Kind.READY and self._job.rank == 0:
            self._ready.add(rank)
        elif message.kind is Kind.GO and rank == 0 and self._has_told:
            self._is_over = True
        else:
            raise ProtocolError(f"rank {rank} said {message.kind.name} out of turn", rank=rank)

    def _see_whether_ready(self) -> None:
        num_others = self._job.world_size - 1
        if len(self._links) < num_others or self._is_over:
            return
        self._reception.close()
        if self._job.rank != 0 and not self._has_told:
            self._has_told = True
            try:
                self._links[0].link.send(Kind.READY)
            except EOFError as error:
                raise mesh_errors.left(self._job, self._cards[0]) from error
        elif self._job.rank == 0 and len(self._ready) == num_others:
            self._is_over = True
            for link in self._links.values():
                try:
                    link.link.send(Kind.GO)
                except EOFError:
                    continue  # who dies from now on is found by those who use the link

    def _look_at_the_clock(self) -> None:
        if self._is_over:
            return
        absent = [rank for rank in range(self._job.world_size) if rank not in self._links]
        self._early_ends.look(rank for rank in absent if rank != self._job.rank)
        if self._gone is not None and self._gone[1].remaining() <= 0:
            raise mesh_errors.left(self._job, self._cards[self._gone[0]])
        if self._give_up_calls.remaining() <= 0 and self._calls:
            call = next(iter(self._calls.values()))
            raise mesh_errors.unreachable(self._job, call.card, call.why or "no answer")
        if self._deadline.remaining() <= 0:
            raise self._overdue()

    def _overdue(self) -> RendezvousError:
        size, rank = self._job.world_size, self._job.rank
        silent = [other for other in range(rank + 1, size) if other not in self._links]
        if silent:
            cards = [self._cards[one] for one in silent]
            return mesh_errors.not_connected(self._job, self._cards[rank], cards, self._deadline)
        slow = [other for other in range(1, size) if other not in self._ready] if rank == 0 else [0]
        cards = [self._cards[one] for one in slow]
        return mesh_errors.not_ready(self._job, cards, self._deadline)

    def _seconds_to_next_end(self) -> float:
        now = time.monotonic()
        pauses = (call.seconds_to_next_try(now) for call in self._calls.values())
        ends = (self._deadline.remaining(), self._reception.seconds_to_next_end())
        return min(*ends, *pauses)

    def _tell_all(self, error: BaseException) -> None:
        for rank, link in self._links.items():
            # A rank that was let go already takes what comes for its first data.
            if not self._has_told or rank == 0:
                failure.tell(link.link, error, self._job.rank)


def _open_tls(secret: bytes) -> Tls:
    from ferrodist.rendezvous.tls import Tls  # it takes longer than all the rest here

    return Tls(secret)
