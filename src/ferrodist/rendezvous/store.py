# SPDX-License-Identifier: MIT OR Apache-2.0
"""The store: a few small values that rank 0 keeps for all while the ranks meet.

    set(key, value)     a key is set once; the same value again does no harm
    get(key, timeout)   waits until somebody has set it
    add(key, amount)    counts, and returns the sum so far

Keys, values and their number are bounded. ``Table`` is what rank 0 keeps, ``StoreHost`` serves it,
``StoreGuest`` is the way there of every other rank. All three have the same verbs, as other
people's stores do.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Any, NamedTuple, Protocol

from ferrodist.deadline import Deadline
from ferrodist.errors import InvalidArgument, ProtocolError, RendezvousError
from ferrodist.rendezvous import failure
from ferrodist.rendezvous.guest import Visit, patience
from ferrodist.rendezvous.host import HELLO, Host
from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.link import (
    LARGEST_VALUE,
    LONGEST_KEY,
    LONGEST_NAME,
    Kind,
    Link,
    Message,
    Talk,
)
from ferrodist.rendezvous.meeting_point import MeetingPoint
from ferrodist.rendezvous.reception import Peer

_MOST_ENTRIES = 1 << 16
_KEY_LENGTH = struct.Struct("!H")
_SECONDS = struct.Struct("!d")
_AMOUNT = struct.Struct("!q")
_GRACE = 5.0  # seconds that rank 0 may take longer with "there is none" than it was given


class Store(Protocol):
    """What ranks need to tell each other a few things before they are connected."""

    def set(self, key: str, value: bytes) -> None:
        """Keep a value; raises InvalidArgument if the key has another one."""

    def get(self, key: str, timeout: float) -> bytes:
        """Wait for a value; raises RendezvousError if nobody sets it in time."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number that starts at 0, and return the sum."""


class Table:
    """What rank 0 keeps."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        """Keep a value."""
        self._check(key, value)
        found = self._values.setdefault(key, value)
        if found != value:
            raise InvalidArgument(
                f"key {key!r} of the store has a value of {len(found)} bytes, and a key is set "
                f"once: got another of {len(value)} bytes",
                got=len(value),
            )

    def try_get(self, key: str) -> bytes | None:
        """Return a value; None if nobody has set it."""
        return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is kept as its decimal digits."""
        found = self._values.get(key, b"0")
        try:
            total = int(found) + amount
        except ValueError as error:
            raise InvalidArgument(f"key {key!r} of the store is not a number") from error
        value = str(total).encode()
        self._check(key, value)
        self._values[key] = value
        return total

    def _check(self, key: str, value: bytes) -> None:
        check_entry(key, value)
        if key not in self._values and len(self._values) >= _MOST_ENTRIES:
            raise InvalidArgument(f"key {key!r}: the store is full, with {_MOST_ENTRIES} keys")


def check_entry(key: str, value: bytes = b"") -> bytes:
    """Refuse what the store cannot hold; return the key as it travels."""
    name = key.encode()
    if not 0 < len(name) <= LONGEST_KEY:
        raise InvalidArgument(
            f"a key of the store has 1 to {LONGEST_KEY} bytes, got {len(name)}", got=len(name)
        )
    if len(value) > LARGEST_VALUE:
        raise InvalidArgument(
            f"key {key!r}: a value in the store has at most {LARGEST_VALUE} bytes, got "
            f"{len(value)}",
            got=len(value),
        )
    return name


class _Wait(NamedTuple):
    """A guest that waits for a value."""

    link: Link
    key: str
    deadline: Deadline


class StoreHost(Host):
    """Rank 0, which keeps the store and serves the others whenever it waits itself."""

    def __init__(self, job: Job, point: MeetingPoint, deadline: Deadline) -> None:
        super().__init__(job, point, deadline)
        self._table = Table()
        self._waits: dict[int, _Wait] = {}
        self._requests: dict[int, Talk[Message]] = {}  # that have come in part
        self._have_left: set[int] = set()

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
        """Count."""
        return self._table.add(key, amount)

    def leave(self) -> None:
        """Serve the others until none needs anything more, and let nobody in after that."""
        self.serve_until(lambda: len(self._have_left) == self._job.world_size - 1)
        self._reception.close()

    def lines(self) -> dict[int, Link]:
        """Return the links to all guests, which stay open after they have left."""
        return {rank: guest.link for rank, guest in self._guests.items()}

    def _take(self, link: Link, peer: Peer, rank: int, pid: int, files: list[int]) -> None:
        link.send(Kind.TAKEN)

    def _seconds_to_next_end(self) -> float:
        ends = (wait.deadline.remaining() for wait in self._waits.values())
        return min(super()._seconds_to_next_end(), *ends, float("inf"))

    def _look_at_the_clock(self) -> None:
        super()._look_at_the_clock()
        self._answer_waits()

    def _overdue(self) -> RendezvousError:
        slow = [rank for rank in self._guests if rank not in self._have_left]
        words = ", ".join(f"rank {rank} ({self._guests[rank].who})" for rank in slow[:16])
        return RendezvousError(
            f"{words} joined job {self._job.name!r} and then did not get ready within "
            f"{self._deadline}",
            rank=slow[0],
            missing=slow,
        )

    def _hear(self, rank: int) -> None:
        link = self._guests[rank].link
        if rank not in self._requests:
            kinds = Kind.SET, Kind.GET, Kind.ADD, Kind.LEAVE, Kind.FAILURE
            self._requests[rank] = link.receive(*kinds)
        try:
            next(self._requests[rank])
        except StopIteration as end:
            del self._requests[rank]
            self._do(rank, link, end.value)
        except EOFError as error:
            raise self._left(rank) from error

    def _do(self, rank: int, link: Link, message: Message) -> None:
        """Do what a guest asks for; the answer never has to wait, for it asks one at a time."""
        if message.kind is Kind.FAILURE:
            raise failure.error_of(message.body)
        try:
            if message.kind is Kind.LEAVE:
                self._have_left.add(rank)
                self._selector.unregister(link)
            elif message.kind is Kind.SET:
                key, value = _read_key(message.body)
                self.set(key, value)
                link.send(Kind.VALUE)
            elif message.kind is Kind.ADD:
                (amount,), key = _read(_AMOUNT, message.body)
                link.send(Kind.VALUE, _AMOUNT.pack(self._table.add(key, amount)))
                self._answer_waits()
            else:
                (seconds,), key = _read(_SECONDS, message.body)
                self._waits[rank] = _Wait(link, key, Deadline(seconds))
                self._answer_waits()
        except InvalidArgument as error:
            link.send(Kind.REFUSED, str(error).encode()[:1000])
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
                    wait.link.send(Kind.ABSENT)
                else:
                    wait.link.send(Kind.VALUE, value)
            except EOFError as error:
                raise self._left(rank) from error


class StoreGuest:
    """The way of every other rank to the store that rank 0 keeps."""

    def __init__(self, job: Job, point: MeetingPoint, deadline: Deadline) -> None:
        self._job = job
        self._visit = Visit(job, point, deadline)
        self._deadline = deadline
        self._visit.start(self._introduce)

    def set(self, key: str, value: bytes) -> None:
        """Ask rank 0 to keep a value."""
        name = check_entry(key, value)
        self._ask(Kind.SET, _KEY_LENGTH.pack(len(name)) + name + value, self._deadline)

    def get(self, key: str, timeout: float) -> bytes:
        """Wait until rank 0 has the value."""
        seconds = min(timeout, self._deadline.remaining())
        message = self._ask(
            Kind.GET, _SECONDS.pack(seconds) + check_entry(key), Deadline(seconds + _GRACE)
        )
        if message.kind is Kind.ABSENT:
            raise absent(key, Deadline(timeout))
        return message.body

    def add(self, key: str, amount: int) -> int:
        """Let rank 0 count."""
        message = self._ask(Kind.ADD, _AMOUNT.pack(amount) + check_entry(key), self._deadline)
        (total,), _ = _read(_AMOUNT, message.body)
        return int(total)

    def leave(self) -> None:
        """Tell rank 0 that nothing more is needed; the link stays open."""
        self._visit.go_on(_say_goodbye, self._deadline)

    def lines(self) -> dict[int, Link]:
        """Return the link to rank 0."""
        return {} if self._visit.link is None else {0: self._visit.link}

    def give_up(self, error: BaseException) -> None:
        """Tell rank 0 what is wrong here; it will tell the others."""
        if self._visit.link is not None:
            failure.tell(self._visit.link, error, self._job.rank)

    def close(self) -> None:
        """End the connection."""
        self._visit.close()

    def _introduce(self, link: Link) -> Talk[None]:
        body = HELLO.pack(os.getpid(), patience(self._deadline))
        link.send(Kind.ARRIVAL, body + socket.gethostname().encode()[:LONGEST_NAME])
        yield from failure.hear(link, Kind.TAKEN)

    def _ask(self, kind: Kind, body: bytes, deadline: Deadline) -> Message:
        def talk(link: Link) -> Talk[Message]:
            link.send(kind, body)
            others = Kind.ABSENT, Kind.REFUSED
            return (yield from failure.hear(link, Kind.VALUE, *others))

        message = self._visit.go_on(talk, deadline)
        if message.kind is Kind.REFUSED:
            raise InvalidArgument(message.body.decode(errors="replace"))
        return message


def absent(key: str, deadline: Deadline) -> RendezvousError:
    """Make the error of a value that nobody has set in time."""
    return RendezvousError(f"nobody has set {key!r} in the store within {deadline}")


def _say_goodbye(link: Link) -> Talk[None]:
    link.send(Kind.LEAVE)
    yield from ()


def _read(head: struct.Struct, body: bytes) -> tuple[tuple[Any, ...], str]:
    """Read numbers and the key that follows them."""
    try:
        return head.unpack(body[: head.size]), body[head.size :].decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError("a request to the store that cannot be read") from error


def _read_key(body: bytes) -> tuple[str, bytes]:
    try:
        (length,) = _KEY_LENGTH.unpack(body[: _KEY_LENGTH.size])
        end = _KEY_LENGTH.size + length
        return body[_KEY_LENGTH.size : end].decode(), body[end:]
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError("a request to the store that cannot be read") from error
