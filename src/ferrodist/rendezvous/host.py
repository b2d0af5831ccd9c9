# SPDX-License-Identifier: MIT OR Apache-2.0
"""The host's side: rank 0 receives all others, and hands everybody's files to everybody.

Visitors are served side by side, each with a bound of its own, so that one that is slow or talks
nonsense holds up nobody.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import struct
import time
from contextlib import suppress
from typing import NamedTuple

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, ProtocolError, RendezvousError
from ferrodist.rendezvous import failure, roster, start_errors
from ferrodist.rendezvous.early_ends import EarlyEnds
from ferrodist.rendezvous.guest import HELLO
from ferrodist.rendezvous.handshake import (
    Greeting,
    check_version,
    greet_guest,
)
from ferrodist.rendezvous.job import Job, Member
from ferrodist.rendezvous.link import Kind, Link, Message, Talk, close_files, drive, wait_seconds
from ferrodist.rendezvous.roster import Entry
from ferrodist.rendezvous.unix_socket import Peer, check_user, open_listener, peer_of
from ferrodist.rendezvous.watch import open_own_watch, try_peer_pidfd

logger = logging.getLogger("ferrodist")

_MOST_STRANGERS = 64  # visitors at once beyond those that are expected
_VISIT_SECONDS = 5.0  # for a visitor to become a guest
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class _Visitor(NamedTuple):
    """A connection whose handshake goes on."""

    link: Link
    peer: Peer
    talk: Talk[None]
    deadline: Deadline


def receive_all(job: Job, arena: int, deadline: Deadline) -> list[Member]:
    """Wait for all ranks and return the members when everybody has them."""
    host = Host(job, arena, deadline)
    try:
        host.gather()
        return host.hand_out()
    except BaseException as error:
        host.give_up(error)
        raise
    finally:
        host.close()


class Host:
    """Rank 0 while the ranks meet."""

    def __init__(self, job: Job, arena: int, deadline: Deadline) -> None:
        self._job = job
        self._deadline = deadline
        self._listener = open_listener(job)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._visitors: dict[Link, _Visitor] = {}  # the oldest first
        self._guests: dict[int, Link] = {}
        own = Member(0, os.getpid(), os.dup(arena), open_own_watch())
        self._entries = {0: Entry(own, is_lifeline=False)}
        self._refusals: list[str] = []
        self._fatal: ProtocolError | None = None
        self._quiet_until = 0.0
        self._early_ends = EarlyEnds(job)

    # -- waiting for ranks ------------------------------------------------------------------------

    def gather(self) -> None:
        """Serve visitors until every rank is a guest."""
        size = self._job.world_size
        while len(self._guests) < size - 1:
            for key, _ in self._selector.select(self._until_next_end()):
                if isinstance(key.data, _Visitor):
                    self._go_on_with(key.data)
                elif key.data is not None:
                    raise self._left(key.data)
                else:
                    self._accept()
            self._end_overdue_visits()
            self._early_ends.look(rank for rank in range(size) if rank not in self._entries)
            if self._fatal is not None:
                raise self._fatal
            if self._deadline.remaining() <= 0:
                pids = {rank: entry.member.pid for rank, entry in self._entries.items()}
                seconds = self._deadline.seconds or 0.0
                raise start_errors.missing_ranks(self._job, pids, seconds, self._refusals)

    def _until_next_end(self) -> float:
        deadlines = [self._deadline, *(visitor.deadline for visitor in self._visitors.values())]
        return wait_seconds(min(deadline.remaining() for deadline in deadlines))

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in _OUT_OF_FILES or not self._visitors:
                raise
            self._end_oldest_visit()
            return
        link, peer = Link(connection), peer_of(connection)
        try:
            check_user(peer)
        except DistributedError as error:
            link.close()
            self._log_refusal(error)
            return
        if len(self._visitors) >= self._job.world_size + _MOST_STRANGERS:
            self._end_oldest_visit()
        visitor = _Visitor(link, peer, self._talk(link, peer), Deadline(_VISIT_SECONDS))
        self._visitors[link] = visitor
        self._selector.register(link, selectors.EVENT_READ, visitor)
        self._go_on_with(visitor)

    def _go_on_with(self, visitor: _Visitor) -> None:
        """Hear what a visitor has to say now; what is wrong with it is its own affair."""
        if visitor.link not in self._visitors:
            return  # its visit was ended a moment ago
        try:
            next(visitor.talk)
        except StopIteration:
            return  # it is a guest
        except (EOFError, OSError) as error:
            self._end_visit(visitor)
            self._log_refusal(error)

    def _talk(self, link: Link, peer: Peer) -> Talk[None]:
        """Make a guest of a visitor."""
        try:
            greeting = yield from greet_guest(link, self._job)
            self._check(greeting, peer)
            link.send(Kind.WELCOME)
            hello = yield from link.receive(Kind.HELLO)
            self._admit(link, peer, greeting.rank, hello)
        except DistributedError as error:
            failure.tell(link, error)
            raise

    def _check(self, greeting: Greeting, peer: Peer) -> None:
        """Refuse a process that has proved to be of this job and yet does not fit into it."""
        rank, size = greeting.rank, self._job.world_size
        try:
            check_version(greeting.version, self._job, rank)
        except ProtocolError as error:
            self._fatal = error  # no other process will come for this rank: nobody need wait
            raise
        if greeting.world_size != size:
            theirs = greeting.world_size
            raise self._refused(start_errors.wrong_world_size(self._job, rank, theirs, peer.pid))
        if not 0 < rank < size:
            raise self._refused(RendezvousError(f"rank {rank} cannot join", rank=rank))
        self._check_is_new(rank, peer)

    def _check_is_new(self, rank: int, peer: Peer) -> None:
        if rank in self._entries:
            first = self._entries[rank].member.pid
            raise self._refused(start_errors.second_process(self._job, rank, first, peer.pid))

    def _refused(self, error: RendezvousError) -> RendezvousError:
        """Remember a refusal: if a rank is missing in the end, it says why."""
        self._refusals = [*self._refusals[-3:], f"refused: {error}"]
        return error

    def _admit(self, link: Link, peer: Peer, rank: int, hello: Message) -> None:
        try:
            self._check_is_new(rank, peer)
            pid, seconds = _read_hello(hello)
        except DistributedError:
            close_files(hello.files)
            raise
        arena, lifeline = hello.files
        pidfd = try_peer_pidfd(link.socket, peer.pid)
        if pidfd is not None:
            os.close(lifeline)
        watch = lifeline if pidfd is None else pidfd
        self._entries[rank] = Entry(Member(rank, peer.pid or pid, arena, watch), pidfd is None)
        self._guests[rank] = link
        del self._visitors[link]
        self._selector.modify(link, selectors.EVENT_READ, rank)
        if seconds < self._deadline.remaining():
            self._deadline = Deadline(seconds)

    def _end_overdue_visits(self) -> None:
        for visitor in list(self._visitors.values()):
            if visitor.deadline.remaining() <= 0:
                self._send_away(visitor)

    def _end_oldest_visit(self) -> None:
        self._send_away(next(iter(self._visitors.values())))

    def _send_away(self, visitor: _Visitor) -> None:
        """End a visit that takes too long; a rank of ours will come again."""
        with suppress(EOFError):
            visitor.link.send(Kind.BUSY)
        self._end_visit(visitor)
        self._log_refusal(f"pid {visitor.peer.pid} did not finish the handshake")

    def _end_visit(self, visitor: _Visitor) -> None:
        del self._visitors[visitor.link]
        self._selector.unregister(visitor.link)
        visitor.talk.close()
        visitor.link.close()

    def _log_refusal(self, reason: object) -> None:
        """Log that a visitor was turned away, at most once a second."""
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + 1.0
            logger.warning("job %r: turned a connection away: %s", self._job.name, reason)

    def _left(self, rank: int) -> RendezvousError:
        return start_errors.left(self._job, rank, self._entries[rank].member.pid)

    # -- all are here -----------------------------------------------------------------------------

    def hand_out(self) -> list[Member]:
        """Give everybody all files, one guest after the other, and let all go."""
        self._listener.close()
        entries = [self._entries[rank] for rank in range(self._job.world_size)]
        for rank, link in self._guests.items():
            try:
                drive(_give(link, entries), link, self._deadline)
            except EOFError as error:
                raise self._left(rank) from error
            except TimeoutError as error:
                pid = self._entries[rank].member.pid
                raise RendezvousError(
                    f"rank {rank} (pid {pid}) has joined and then not answered", rank=rank
                ) from error
        for link in self._guests.values():
            with suppress(EOFError):  # who dies from now on is found by the watches
                link.send(Kind.GO)
        return [entry.member for entry in entries]

    # -- the end ----------------------------------------------------------------------------------

    def give_up(self, error: BaseException) -> None:
        """Tell all guests why the ranks will not meet."""
        for link in self._guests.values():
            failure.tell(link, error)
        roster.close_entries(list(self._entries.values()))

    def close(self) -> None:
        """Close all sockets."""
        self._listener.close()
        self._selector.close()
        for link in [*self._visitors, *self._guests.values()]:
            link.close()


def _give(link: Link, entries: list[Entry]) -> Talk[None]:
    """Hand a roster over; each part is taken before the next is sent.

    The kernel bounds how many files a user may have on their way.
    """
    for body, files in roster.pack(entries):
        link.send(Kind.ROSTER, body, files)
        yield from link.receive(Kind.TAKEN)


def _read_hello(hello: Message) -> tuple[int, float]:
    """Return the guest's pid, and how long it can wait."""
    if len(hello.files) != 2:
        raise roster.no_room_for_files(f"{len(hello.files)} of 2 files of a rank arrived")
    try:
        pid, seconds = HELLO.unpack(hello.body)
    except struct.error as error:
        raise ProtocolError("a hello that cannot be read") from error
    if not seconds > 0:  # not a number, perhaps
        raise ProtocolError("a hello with a time that is none")
    return pid, seconds
