# SPDX-License-Identifier: MIT OR Apache-2.0
"""Host: rank 0 while the ranks of a job meet, whatever they have come for.

It lets in who belongs to the job, knows who is there, and tells all of them when it cannot work
out. What the guests are served is up to the classes made of it.
"""

from __future__ import annotations

import selectors
import struct
from collections.abc import Callable
from typing import NamedTuple

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, ProtocolError, RendezvousError
from ferrodist.rendezvous import failure, start_errors
from ferrodist.rendezvous.early_ends import EarlyEnds
from ferrodist.rendezvous.handshake import Greeting, check_version, greet_guest
from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.link import Kind, Link, Message, Talk, close_files, wait_seconds
from ferrodist.rendezvous.meeting_point import MeetingPoint
from ferrodist.rendezvous.reception import Peer, Reception

HELLO = struct.Struct("!Qd")  # pid, seconds within which the host has to decide


class Guest(NamedTuple):
    """A rank that is here, and who it is in words."""

    link: Link
    pid: int
    who: str


class Host:
    """Rank 0 while the ranks meet. ``hello`` is how guests introduce themselves."""

    hello = Kind.ARRIVAL

    def __init__(self, job: Job, point: MeetingPoint, deadline: Deadline) -> None:
        self._job = job
        self._deadline = deadline
        self._selector = selectors.DefaultSelector()
        self._guests: dict[int, Guest] = {}
        self._refusals: list[str] = []
        self._fatal: DistributedError | None = None
        self._early_ends = EarlyEnds(job)
        try:
            self._reception = Reception(
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

    # -- serving ----------------------------------------------------------------------------------

    def is_full(self) -> bool:
        """Tell whether every rank is here."""
        return len(self._guests) == self._job.world_size - 1

    def serve_until(self, is_done: Callable[[], bool]) -> None:
        """Serve visitors and guests; raises RendezvousError for ranks that do not come or leave."""
        while not is_done():
            for key, _ in self._selector.select(wait_seconds(self._seconds_to_next_end())):
                if not self._reception.take(key.data):
                    self._hear(key.data)
            self._reception.end_overdue_visits()
            self._early_ends.look(rank for rank in self._others() if rank not in self._guests)
            self._look_at_the_clock()

    def _hear(self, rank: int) -> None:
        """Go on with a guest who has something to say; here it can only leave."""
        raise self._left(rank)

    def _seconds_to_next_end(self) -> float:
        return min(self._deadline.remaining(), self._reception.seconds_to_next_end())

    def _look_at_the_clock(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        if self._deadline.remaining() > 0:
            return
        if self.is_full():
            raise self._overdue()
        here = {0: self._own_name, **{rank: guest.who for rank, guest in self._guests.items()}}
        seconds, refusals = self._deadline.seconds or 0.0, self._refusals
        if (count := self._reception.num_without_secret) > 0:
            refusals = [*refusals, start_errors.without_secret(count)]
        raise start_errors.missing_ranks(self._job, here, seconds, refusals)

    def _overdue(self) -> RendezvousError:
        return RendezvousError(f"the ranks of job {self._job.name!r} did not get ready in time")

    def _left(self, rank: int) -> RendezvousError:
        return start_errors.left(self._job, rank, self._guests[rank].who)

    def _others(self) -> range:
        return range(1, self._job.world_size)

    # -- from visitor to guest --------------------------------------------------------------------

    def _receive(self, link: Link, peer: Peer) -> Talk[None]:
        greeting, _ = yield from greet_guest(
            link, self._job, check=lambda greeting: self._check(greeting, peer)
        )
        message = yield from link.receive(Kind.HELLO, Kind.ARRIVAL)
        self._admit(link, peer, greeting.rank, message)

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
            raise self._refused(
                start_errors.wrong_world_size(self._job, rank, theirs, str(peer), self._own_name)
            )
        if rank not in self._others():
            raise self._refused(RendezvousError(f"rank {rank} cannot join", rank=rank))
        self._check_is_new(rank, str(peer))

    def _check_is_new(self, rank: int, who: str) -> None:
        if rank in self._guests:
            first = self._guests[rank].who
            raise self._refused(start_errors.second_process(self._job, rank, first, who))

    def _refused(self, error: RendezvousError) -> RendezvousError:
        """Remember a refusal: if a rank is missing in the end, it says why."""
        self._refusals = [*self._refusals[-3:], f"refused: {error}"]
        return error

    def _admit(self, link: Link, peer: Peer, rank: int, message: Message) -> None:
        try:
            pid, seconds, name = _read_hello(message)
            who = _in_words(peer, pid, name)
            self._check_is_new(rank, who)
            if message.kind is not self.hello:
                self._fatal = start_errors.different_purposes(self._job, rank, who)
                raise self._fatal
            self._take(link, peer, rank, pid, message.files)
        except DistributedError:
            close_files(message.files)
            raise
        self._guests[rank] = Guest(link, peer.pid or pid, who)
        self._reception.admit(link, rank)
        if seconds < self._deadline.remaining():
            self._deadline = Deadline(seconds)

    def _take(self, link: Link, peer: Peer, rank: int, pid: int, files: list[int]) -> None:
        """Take what a new guest has brought; if this raises, the files are closed."""

    # -- the end ----------------------------------------------------------------------------------

    def give_up(self, error: BaseException) -> None:
        """Tell all guests why the ranks will not meet."""
        for guest in self._guests.values():
            failure.tell(guest.link, error, 0)

    def close(self) -> None:
        """Close all sockets."""
        self._reception.close()
        self._selector.close()
        for guest in self._guests.values():
            guest.link.close()


def _in_words(peer: Peer, pid: int, name: str) -> str:
    if not peer.address:
        return f"pid {peer.pid or pid}"
    return f"pid {pid} on {name}, {peer.address}"


def _read_hello(message: Message) -> tuple[int, float, str]:
    """Return the guest's pid, how long it can wait, and its host's name."""
    head, name = message.body[: HELLO.size], message.body[HELLO.size :]
    try:
        pid, seconds = HELLO.unpack(head)
    except struct.error as error:
        raise ProtocolError("a hello that cannot be read") from error
    if not seconds > 0:  # not a number, perhaps
        raise ProtocolError("a hello with a time that is none")
    return pid, seconds, name.decode(errors="replace")
