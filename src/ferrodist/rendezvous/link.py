# SPDX-License-Identifier: MIT OR Apache-2.0
"""Link: whole messages, with open files if need be, over a connected stream socket.

What two sides say to each other is written as a *talk*: a generator that yields whenever it has to
wait for the other side. ``drive`` runs one talk to its end; a host runs many at once.
"""

from __future__ import annotations

import enum
import hmac
import math
import os
import select
import socket
import struct
from array import array
from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple, TypeVar

from ferrodist.deadline import Deadline
from ferrodist.errors import ProtocolError

T = TypeVar("T")
Talk = Generator[None, None, T]

_HEADER = struct.Struct("!4sBI")  # magic, kind, bytes that follow
_MAGIC = b"frd1"
_LONGEST_WAIT = 0.2
_COUNTER = struct.Struct("!Q")
_TAG_NBYTES = 16

RANKS_PER_ROSTER = 126  # a message carries at most 253 files, a rank has two
LONGEST_NAME = 64  # bytes of a host's name
LONGEST_KEY = 256  # bytes of a key in the store
LARGEST_VALUE = 1 << 16


class Kind(enum.IntEnum):
    """What a message is about."""

    GREETING = 1  # who I say I am, and a nonce
    PROOF = 2  # that I know the secret
    WELCOME = 3  # your proof is right
    HELLO = 4  # my files
    ROSTER = 5  # everybody's files, some ranks at a time
    TAKEN = 6  # I have them
    GO = 7  # all have everything
    BUSY = 8  # come again
    FAILURE = 9  # the ranks will not meet, and why
    ARRIVAL = 10  # who I am; I have no files
    SET = 11  # keep this in the store
    GET = 12  # tell me what is in the store, now or soon
    ADD = 13  # count in the store
    VALUE = 14  # what the store answers
    ABSENT = 15  # it has no such thing, and time is up
    REFUSED = 16  # it does not do that, and why
    LEAVE = 17  # I have all I came for
    READY = 18  # I am linked to all


class _Bounds(NamedTuple):
    nbytes: int = 0
    files: int = 0


_BOUNDS = {
    Kind.GREETING: _Bounds(72),
    Kind.PROOF: _Bounds(32),
    Kind.WELCOME: _Bounds(),
    Kind.HELLO: _Bounds(16, files=2),
    Kind.ROSTER: _Bounds(13 * RANKS_PER_ROSTER, files=2 * RANKS_PER_ROSTER),
    Kind.TAKEN: _Bounds(),
    Kind.GO: _Bounds(),
    Kind.BUSY: _Bounds(),
    Kind.FAILURE: _Bounds(1 << 16),
    Kind.ARRIVAL: _Bounds(16 + LONGEST_NAME),
    Kind.SET: _Bounds(2 + LONGEST_KEY + LARGEST_VALUE),
    Kind.GET: _Bounds(8 + LONGEST_KEY),
    Kind.ADD: _Bounds(8 + LONGEST_KEY),
    Kind.VALUE: _Bounds(LARGEST_VALUE),
    Kind.ABSENT: _Bounds(),
    Kind.REFUSED: _Bounds(1 << 12),
    Kind.LEAVE: _Bounds(),
    Kind.READY: _Bounds(),
}


class Message(NamedTuple):
    """One message; whoever gets it closes the files."""

    kind: Kind
    body: bytes
    files: list[int]


class _Seal:
    """The tags of the messages that go one way; each covers its number, so none fits twice."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def next_tag(self, frame: bytes) -> bytes:
        data = _COUNTER.pack(self._count) + frame
        self._count += 1
        return hmac.digest(self._key, data, "sha256")[:_TAG_NBYTES]

    def check(self, frame: bytes, tag: bytes) -> None:
        if not hmac.compare_digest(self.next_tag(frame), tag):
            raise ProtocolError("a message was changed on its way, or is not of this connection")


class Link:
    """One end of a connection. The other side ending it raises EOFError here."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._send_seal: _Seal | None = None
        self._receive_seal: _Seal | None = None

    def fileno(self) -> int:
        """Return the socket's number, for selectors."""
        return self.socket.fileno()

    def close(self) -> None:
        """End the connection."""
        self.socket.close()

    def seal_sent(self, key: bytes) -> None:
        """From now on, mark every message with a key.

        Whoever sits on the way between two hosts can then neither change, repeat nor drop one.
        """
        self._send_seal = _Seal(key)

    def seal_received(self, key: bytes) -> None:
        """From now on, refuse messages that are not so marked."""
        self._receive_seal = _Seal(key)

    def send(self, kind: Kind, body: bytes = b"", files: Sequence[int] = ()) -> None:
        """Send a message at once.

        It never has to wait: all are small, and no side sends much before it hears an answer.
        """
        frame = _HEADER.pack(_MAGIC, kind, len(body)) + body
        if self._send_seal is not None:
            frame += self._send_seal.next_tag(frame)
        try:
            # Not socket.send_fds and recv_fds: they drop their flags.
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))] if files else []
            sent = self.socket.sendmsg([frame], rights, socket.MSG_NOSIGNAL)
        except (ConnectionError, BlockingIOError) as error:
            raise EOFError("the other side takes nothing more") from error
        if sent < len(frame):
            raise EOFError("the other side does not read")

    def receive(self, *expected: Kind) -> Talk[Message]:
        """Receive a message of one of these kinds; anything else is a ProtocolError."""
        files: list[int] = []
        most_files = max(_BOUNDS[kind].files for kind in expected)
        try:
            header = yield from self._read(_HEADER.size, most_files, files)
            magic, number, nbytes = _HEADER.unpack(header)
            kind = next((kind for kind in expected if kind == number), None)
            if magic != _MAGIC or kind is None or nbytes > _BOUNDS[kind].nbytes:
                words = " or ".join(kind.name for kind in expected)
                raise ProtocolError(f"expected {words}, got bytes that are no such message")
            body = yield from self._read(nbytes, most_files, files)
            if self._receive_seal is not None:
                tag = yield from self._read(_TAG_NBYTES, most_files, files)
                self._receive_seal.check(header + body, tag)
        except BaseException:
            close_files(files)
            raise
        return Message(kind, body, files)

    def starts_with(self, kind: Kind) -> bool:
        """Tell whether a message of this kind comes next, and leave it where it is.

        Raises EOFError at the end, BlockingIOError if nothing has come.
        """
        try:
            start = self.socket.recv(_HEADER.size, socket.MSG_PEEK)
        except ConnectionError as error:
            raise EOFError("the other side is gone") from error
        if not start:
            raise EOFError("the other side has ended the connection")
        return start[:5] == _HEADER.pack(_MAGIC, kind, 0)[:5]

    def _read(self, nbytes: int, most_files: int, files: list[int]) -> Talk[bytes]:
        """Read exactly so many bytes, and add the files that come with them."""
        data = bytearray()
        while len(data) < nbytes:
            try:
                part, new_files = self._read_some(nbytes - len(data), most_files)
            except BlockingIOError:
                yield
                continue
            except ConnectionError as error:
                raise EOFError("the other side is gone") from error
            files += new_files
            if len(files) > most_files:
                raise ProtocolError(f"expected {most_files} files, got more")
            if not part:
                raise EOFError("the other side has ended the connection")
            data += part
        return bytes(data)

    def _read_some(self, nbytes: int, most_files: int) -> tuple[bytes, list[int]]:
        if most_files == 0:  # files that come nevertheless are thrown away by the kernel
            return self.socket.recv(nbytes), []
        room = socket.CMSG_SPACE(most_files * array("i").itemsize)
        part, rights, _, _ = self.socket.recvmsg(nbytes, room, socket.MSG_CMSG_CLOEXEC)
        files = array("i")
        for level, kind, data in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                files.frombytes(data[: len(data) - len(data) % files.itemsize])
        return part, files.tolist()


def drive(talk: Talk[T], link: Link, deadline: Deadline) -> T:
    """Run a talk to its end; raise TimeoutError if the other side keeps it waiting too long."""
    poll = select.poll()
    poll.register(link, select.POLLIN)
    try:
        while True:
            try:
                next(talk)
            except StopIteration as end:
                result: T = end.value
                return result
            ready = poll.poll(math.ceil(1000 * wait_seconds(deadline.remaining())))
            if not ready and deadline.remaining() <= 0:
                raise TimeoutError("the other side does not answer")
    finally:
        talk.close()


def wait_seconds(remaining: float) -> float:
    """Return how long to wait at one go: a signal that came just before is noticed after it."""
    return min(max(0.0, remaining), _LONGEST_WAIT)


def close_files(files: Iterable[int]) -> None:
    """Close open files by number."""
    for file in files:
        os.close(file)
