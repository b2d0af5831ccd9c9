# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reception: serves whoever connects to a listener, until it has proved to belong to the job.

Visitors are served side by side, each with a bound of its own, so that one that is slow or talks
nonsense holds up nobody. What is wrong with a visitor is its own affair.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from ferrodist.deadline import Deadline
from ferrodist.errors import AuthenticationError, DistributedError
from ferrodist.rendezvous import failure
from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.link import Kind, Link, Talk

logger = logging.getLogger("ferrodist")

_MOST_STRANGERS = 64  # visitors at once beyond those that are expected
_MOST_ACCEPTED_AT_ONCE = 32  # before others have their turn
_VISIT_SECONDS = 5.0  # for a visitor to become a guest
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Peer(NamedTuple):
    """Who is at the other end, as the kernel says.

    On this host pid and user, with pid 0 for a process in another pid namespace; else an address.
    """

    pid: int = 0
    uid: int = -1
    address: str = ""

    def __str__(self) -> str:
        return self.address or f"pid {self.pid}"


class Visitor(NamedTuple):
    """A connection whose handshake goes on."""

    link: Link
    peer: Peer
    talk: Talk[None]
    deadline: Deadline


class Reception:
    """A listener and its visitors, as a part of the owner's select loop.

    ``identify`` says who has connected, or raises for somebody who may not. ``receive`` is the talk
    that makes a guest of a visitor; at its end it calls ``admit``. ``wrap`` returns what to talk to
    instead of the connection itself.
    """

    def __init__(
        self,
        job: Job,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        *,
        identify: Callable[[socket.socket], Peer],
        receive: Callable[[Link, Peer], Talk[None]],
        wrap: Callable[[socket.socket], socket.socket] = lambda connection: connection,
    ) -> None:
        self.num_without_secret = 0  # visitors that did not prove to know it
        self._job = job
        self._listener = listener
        self._selector = selector
        self._identify = identify
        self._receive = receive
        self._wrap = wrap
        self._visitors: dict[Link, Visitor] = {}  # the oldest first
        self._quiet_until = 0.0
        selector.register(listener, selectors.EVENT_READ, self)

    def take(self, data: Any) -> bool:
        """Go on with an event of the selector; False if it is none of ours."""
        if isinstance(data, Visitor):
            self._go_on_with(data)
        elif data is self:
            for _ in range(_MOST_ACCEPTED_AT_ONCE):
                if not self._accept_one():
                    break
        else:
            return False
        return True

    def admit(self, link: Link, data: Any) -> None:
        """Let a visitor go; the owner has its link from now on, under this data."""
        del self._visitors[link]
        self._selector.modify(link, selectors.EVENT_READ, data)

    def seconds_to_next_end(self) -> float:
        """Return when the next visit is over at the latest."""
        ends = (visitor.deadline.remaining() for visitor in self._visitors.values())
        return min(ends, default=float("inf"))

    def end_overdue_visits(self) -> None:
        """Send those away who have had their time."""
        for visitor in list(self._visitors.values()):
            if visitor.deadline.remaining() <= 0:
                self._send_away(visitor)

    def close(self) -> None:
        """Stop listening, and send all visitors away; once is enough."""
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()
        for visitor in list(self._visitors.values()):
            self._end_visit(visitor)

    def _accept_one(self) -> bool:
        """Begin a visit; False if nobody waits at the door."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        except OSError as error:
            if error.errno not in _OUT_OF_FILES or not self._visitors:
                raise
            self._end_oldest_visit()
            return True
        try:
            peer = self._identify(connection)
            link = Link(self._wrap(connection))
        except (DistributedError, OSError) as error:
            connection.close()
            self._log_refusal(error)
            return True
        if len(self._visitors) >= self._job.world_size + _MOST_STRANGERS:
            self._end_oldest_visit()
        talk = self._receive_or_tell(link, peer)
        visitor = Visitor(link, peer, talk, Deadline(_VISIT_SECONDS))
        self._visitors[link] = visitor
        self._selector.register(link, selectors.EVENT_READ, visitor)
        self._go_on_with(visitor)
        return True

    def _receive_or_tell(self, link: Link, peer: Peer) -> Talk[None]:
        try:
            yield from self._receive(link, peer)
        except DistributedError as error:
            failure.tell(link, error, self._job.rank)
            raise

    def _go_on_with(self, visitor: Visitor) -> None:
        if visitor.link not in self._visitors:
            return  # its visit was ended a moment ago
        try:
            next(visitor.talk)
        except StopIteration:
            return  # it is a guest
        except (EOFError, OSError) as error:
            self.num_without_secret += isinstance(error, AuthenticationError)
            self._end_visit(visitor)
            self._log_refusal(error)

    def _end_oldest_visit(self) -> None:
        self._send_away(next(iter(self._visitors.values())))

    def _send_away(self, visitor: Visitor) -> None:
        """End a visit that takes too long; a rank of ours will come again."""
        with suppress(EOFError):
            visitor.link.send(Kind.BUSY)
        self._end_visit(visitor)
        self._log_refusal(f"{visitor.peer} did not finish the handshake")

    def _end_visit(self, visitor: Visitor) -> None:
        del self._visitors[visitor.link]
        self._selector.unregister(visitor.link)
        visitor.talk.close()
        visitor.link.close()

    def _log_refusal(self, reason: object) -> None:
        """Log that a visitor was turned away, at most once a second."""
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + 1.0
            logger.warning("job %r: turned a connection away: %s", self._job.name, reason)
