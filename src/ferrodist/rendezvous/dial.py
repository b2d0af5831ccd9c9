# SPDX-License-Identifier: MIT OR Apache-2.0
"""Call: the way from this rank to one that listens, from connecting to the end of the handshake.

``wrap`` returns what to talk to instead of the connection itself.
A call is made again after a short pause when it is not heard; what cannot become better by that is
raised at once.
"""

from __future__ import annotations

import errno
import random
import selectors
import socket
import time
from collections.abc import Callable

from ferrodist.errors import AuthenticationError, ProtocolError, RendezvousError
from ferrodist.rendezvous import mesh_errors
from ferrodist.rendezvous.cards import Card
from ferrodist.rendezvous.handshake import Purpose, greet_host
from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.launch import Endpoint
from ferrodist.rendezvous.link import Link, Talk
from ferrodist.rendezvous.tcp_socket import Address, finish_connecting, resolve, start_connecting

_PAUSE = 0.05  # seconds between two tries, at first
_LONGEST_PAUSE = 1.0
_MOST_TRIES = 5  # of a rank that is known to listen and is not found to


class Call:
    """One link in the making, as a part of the owner's select loop."""

    def __init__(
        self,
        job: Job,
        card: Card,
        selector: selectors.BaseSelector,
        wrap: Callable[[socket.socket], socket.socket],
    ) -> None:
        self.card = card
        self.why = ""
        self._job = job
        self._selector = selector
        self._wrap = wrap
        self._endpoint = Endpoint(card.address, card.port)
        self._addresses = self._resolve()
        self._link: Link | None = None
        self._talk: Talk[bytes] | None = None
        self._tries = 0
        self._next_try = 0.0

    def is_due(self, now: float) -> bool:
        """Tell whether a new try is to be made."""
        return self._link is None and now >= self._next_try

    def seconds_to_next_try(self, now: float) -> float:
        """Return how long nothing is to be done unless the other side answers."""
        return float("inf") if self._link is not None else max(0.0, self._next_try - now)

    def go_on(self) -> bytes | None:
        """Do what can be done now; return the link's key at the end of the handshake."""
        try:
            if self._link is None:
                self._connect()
            elif self._talk is None:
                self._begin_talk(self._link.socket)
            if self._talk is not None:
                next(self._talk)
        except StopIteration as end:
            key: bytes = end.value
            return key
        except BlockingIOError:
            self._pause("it has too many visitors", is_alive=True)
        except (AuthenticationError, ProtocolError) as error:
            raise mesh_errors.wrong_answer(self._job, self.card, error) from error
        except RendezvousError:
            raise  # the other side says why it does not want us
        except (EOFError, OSError) as error:
            if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
                raise mesh_errors.no_room_for_files(self._job, self.card) from error
            self._pause(getattr(error, "strerror", None) or str(error), is_alive=False)
        return None

    def take_link(self, data: object) -> Link:
        """Hand the link over; it stays registered, under this data."""
        link = self._link
        assert link is not None
        self._selector.modify(link, selectors.EVENT_READ, data)
        self._link = None
        return link

    def close(self) -> None:
        """Give the call up."""
        if self._talk is not None:
            self._talk.close()
            self._talk = None
        if self._link is not None:
            self._selector.unregister(self._link)
            self._link.close()
            self._link = None

    def _resolve(self) -> list[Address]:
        try:
            return resolve(self._endpoint)
        except (OSError, UnicodeError) as error:
            raise mesh_errors.unreachable(self._job, self.card, str(error)) from error

    def _connect(self) -> None:
        address = self._addresses[self._tries % len(self._addresses)]
        self._tries += 1
        self._link = Link(start_connecting(address))
        self._selector.register(self._link, selectors.EVENT_WRITE, self)

    def _begin_talk(self, connection: socket.socket) -> None:
        finish_connecting(connection)
        self._selector.unregister(connection)
        self._link = link = Link(self._wrap(connection))
        self._selector.register(link, selectors.EVENT_READ, self)
        where, rank = f" at {self._endpoint}", self.card.rank
        self._talk = greet_host(link, self._job, Purpose.MESH, rank=rank, where=where)

    def _pause(self, why: str, *, is_alive: bool) -> None:
        """Try again a little later, unless there is no hope."""
        self.close()
        self.why = why
        if self._tries >= _MOST_TRIES * len(self._addresses) and not is_alive:
            raise mesh_errors.unreachable(self._job, self.card, why)
        pause = min(_PAUSE * 2**self._tries, _LONGEST_PAUSE)
        self._next_try = time.monotonic() + pause * random.uniform(0.5, 1.0)
