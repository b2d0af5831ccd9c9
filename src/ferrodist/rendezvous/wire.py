# SPDX-License-Identifier: MIT OR Apache-2.0
"""Messages between ranks that meet: a Channel carries them, with open files if need be.

What two sides say to each other is written as *steps*: a generator that yields whenever it has to
wait for the other side, or the file that it waits for instead. ``run_steps`` runs one to its end; a
server runs many side by side.

A rank that fails tells the others why: ``send_failure`` on one side, ``receive_answer`` on the
other, which raises the same error again.
"""

from __future__ import annotations

import enum
import hmac
import json
import math
import select
import socket
import struct
from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self, TypeVar

from ferrodist.deadline import Deadline
from ferrodist.errors import AuthenticationError, DistributedError, ProtocolError, RendezvousError
from ferrodist.rendezvous.errors import could_not_join, no_file_limit_left
from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.script import MAX_SCRIPT
from ferrodist.rendezvous.watch import close_files

T = TypeVar("T")
Steps = Generator[int | None, None, T]

_HEADER = struct.Struct("!4sBI")  # magic, kind, bytes that follow
_MAGIC = b"frd1"
_MAX_WAIT = 0.2
_COUNTER = struct.Struct("!Q")
_TAG_NBYTES = 16

# pid, seconds within which rank 0 has to decide, the time limit they are of, shares memory
HELLO = struct.Struct("!Qdd?")
MAX_HOST_NAME = 64  # bytes; after it a zero and the script
MAX_RECORD = 1024  # bytes that a rank tells the others
_ROSTER_ENTRY = struct.Struct("!IQ?H")  # rank, pid, whether its watch is a lifeline, its record's
RANKS_PER_ROSTER = 60  # a message carries at most 253 files, a rank has two
MAX_ROSTER = RANKS_PER_ROSTER * (_ROSTER_ENTRY.size + MAX_RECORD)

# Errors that a rank passes on to others, and what of them.
_ERROR_TYPES: dict[str, type[DistributedError]] = {
    kind.__name__: kind for kind in (RendezvousError, AuthenticationError, ProtocolError)
}
_ERROR_FIELDS = ("rank", "got", "expected")
_MAX_ERROR_TEXT = 4000
_MAX_MISSING = 1000


class MessageKind(enum.IntEnum):
    """What a message is about, and how many bytes and files it has at most."""

    max_nbytes: int
    max_files: int

    def __new__(cls, number: int, max_nbytes: int = 0, max_files: int = 0) -> Self:
        kind = int.__new__(cls, number)
        kind._value_, kind.max_nbytes, kind.max_files = number, max_nbytes, max_files
        return kind

    GREETING = 1, 72  # who I say I am, and a nonce
    PROOF = 2, 32  # that I know the secret
    WELCOME = 3  # your proof is right
    HELLO = 4, HELLO.size + MAX_HOST_NAME + 1 + MAX_SCRIPT  # who I am
    ROSTER = 5, MAX_ROSTER, 2 * RANKS_PER_ROSTER  # everybody's records and files, in parts
    TAKEN = 6  # I have it
    GO = 7  # all have everything
    BUSY = 8  # come again
    FAILURE = 9, 1 << 16  # the ranks will not meet, and why
    RECORD = 10, MAX_RECORD, 2  # what I tell the others, and my files
    READY = 18  # I am connected to all
    MUNGE_GREETING = 19, 72  # a greeting, by somebody who has no secret yet
    CREDENTIAL = 20, 1 << 11  # of MUNGE: whose process I am, and the secret


class Message(NamedTuple):
    """One message; its receiver closes the files."""

    kind: MessageKind
    body: bytes
    files: list[int]


class _Seal:
    """The tags of the messages in one direction; each covers its number, so none fits twice."""

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


class Channel:
    """One end of a connection. The other side closing it raises EOFError here."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._send_seal: _Seal | None = None
        self._receive_seal: _Seal | None = None
        self._partial: Steps[Message] | None = None  # a message that has arrived in part

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()

    def seal_sent(self, key: bytes) -> None:
        """From now on, tag every message with a key.

        An attacker between two hosts can then not change, repeat or drop one unnoticed.
        """
        self._send_seal = _Seal(key)

    def seal_received(self, key: bytes) -> None:
        """From now on, refuse messages that are not tagged so."""
        self._receive_seal = _Seal(key)

    def send(self, kind: MessageKind, body: bytes = b"", files: Sequence[int] = ()) -> None:
        """Send a message at once.

        It never has to wait: all are small, and no side sends much before it gets an answer.
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

    def receive(self, *expected: MessageKind) -> Steps[Message]:
        """Receive a message of one of these kinds; anything else is a ProtocolError."""
        files: list[int] = []
        max_files = max(kind.max_files for kind in expected)
        try:
            header = yield from self._read(_HEADER.size, max_files, files)
            magic, number, nbytes = _HEADER.unpack(header)
            kind = next((kind for kind in expected if kind == number), None)
            if magic != _MAGIC or kind is None or nbytes > kind.max_nbytes:
                names = " or ".join(kind.name for kind in expected)
                raise ProtocolError(f"expected {names}, got bytes that are no such message")
            body = yield from self._read(nbytes, max_files, files)
            if self._receive_seal is not None:
                tag = yield from self._read(_TAG_NBYTES, max_files, files)
                self._receive_seal.check(header + body, tag)
        except BaseException:  # GeneratorExit too: nobody else has the files
            close_files(files)
            raise
        return Message(kind, body, files)

    def try_receive(self, *expected: MessageKind) -> Message | None:
        steps = self._partial or self.receive(*expected)
        self._partial = None
        try:
            next(steps)
        except StopIteration as end:
            message: Message = end.value
            return message
        self._partial = steps
        return None

    @property
    def is_receiving(self) -> bool:
        return self._partial is not None

    def starts_with(self, kind: MessageKind) -> bool:
        """Tell whether a message of this kind comes next, and leave it where it is.

        Raises EOFError at the end, BlockingIOError if nothing has arrived.
        """
        try:
            start = self.socket.recv(_HEADER.size, socket.MSG_PEEK)
        except ConnectionError as error:
            raise EOFError("the other side is gone") from error
        if not start:
            raise EOFError("the other side has closed the connection")
        return start[:5] == _HEADER.pack(_MAGIC, kind, 0)[:5]

    def _read(self, nbytes: int, max_files: int, files: list[int]) -> Steps[bytes]:
        """Read exactly so many bytes, and append the files that come with them."""
        data = bytearray()
        while len(data) < nbytes:
            try:
                part, new_files = self._read_some(nbytes - len(data), max_files)
            except BlockingIOError:
                yield None
                continue
            except ConnectionError as error:
                raise EOFError("the other side is gone") from error
            files += new_files
            if len(files) > max_files:
                raise ProtocolError(f"expected {max_files} files, got more")
            if not part:
                raise EOFError("the other side has closed the connection")
            data += part
        return bytes(data)

    def _read_some(self, nbytes: int, max_files: int) -> tuple[bytes, list[int]]:
        if max_files == 0:  # files that come nevertheless are dropped by the kernel
            return self.socket.recv(nbytes), []
        space = socket.CMSG_SPACE(max_files * array("i").itemsize)
        part, rights, _, _ = self.socket.recvmsg(nbytes, space, socket.MSG_CMSG_CLOEXEC)
        files = array("i")
        for level, kind, data in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                files.frombytes(data[: len(data) - len(data) % files.itemsize])
        return part, files.tolist()


def run_steps(steps: Steps[T], channel: Channel, deadline: Deadline) -> T:
    """Run steps to their end; raise TimeoutError if the other side takes too long."""
    try:
        while True:
            try:
                awaited = next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            poll = select.poll()
            poll.register(channel if awaited is None else awaited, select.POLLIN)
            ready = poll.poll(math.ceil(1000 * wait_seconds(deadline.remaining())))
            if not ready and deadline.remaining() <= 0:
                raise TimeoutError("the other side does not answer")
    finally:
        steps.close()


def wait_seconds(remaining: float) -> float:
    """Return how long to wait at once: a signal that came just before is handled after it."""
    return min(max(0.0, remaining), _MAX_WAIT)


# -- the roster: all members of a job, as rank 0 hands them to everybody ---------------------------


class RosterEntry(NamedTuple):
    """What a rank has told the others, and its memory file and watch, if it shares memory.

    ``is_lifeline``: its watch is one, whose other end it has to keep open.
    """

    rank: int
    pid: int
    record: bytes
    files: list[int]
    is_lifeline: bool = False


def pack_roster(entries: Sequence[RosterEntry]) -> Iterator[tuple[bytes, list[int]]]:
    for start in range(0, len(entries), RANKS_PER_ROSTER):
        part = entries[start : start + RANKS_PER_ROSTER]
        heads = (
            _ROSTER_ENTRY.pack(entry.rank, entry.pid, entry.is_lifeline, len(entry.record))
            for entry in part
        )
        body = b"".join(head + entry.record for head, entry in zip(heads, part, strict=True))
        yield body, [file for entry in part for file in entry.files]


def unpack_roster(message: Message, num_ranks: int, *, files_per_rank: int) -> list[RosterEntry]:
    body, files, at = message.body, message.files, 0
    entries: list[RosterEntry] = []
    with suppress(struct.error):
        while at < len(body):
            rank, pid, is_lifeline, nbytes = _ROSTER_ENTRY.unpack_from(body, at)
            start, at = at + _ROSTER_ENTRY.size, at + _ROSTER_ENTRY.size + nbytes
            first = files_per_rank * len(entries)
            own = files[first : first + files_per_rank]
            entries.append(RosterEntry(rank, pid, body[start:at], own, is_lifeline))
    num_files = files_per_rank * len(entries)
    if not entries or at != len(body) or len(files) > num_files:
        close_files(files)
        raise ProtocolError("rank 0 sent a roster that cannot be decoded", rank=0)
    if len(files) < num_files:
        close_files(files)
        what = f"{len(files)} of {num_files} files of the other ranks arrived"
        raise no_file_limit_left(what, num_ranks)
    return entries


def close_roster(entries: Iterable[RosterEntry]) -> None:
    close_files(file for entry in entries for file in entry.files)


# -- failures -------------------------------------------------------------------------------------


def send_failure(channel: Channel, error: BaseException, job: Job) -> None:
    if isinstance(error, OSError) and not isinstance(error, DistributedError):
        error = could_not_join(job, error)  # as this rank's program will see it
    name = type(error).__name__
    text = str(error) if name in _ERROR_TYPES else f"rank {job.rank} gave up: {name}"
    facts: dict[str, Any] = {name: getattr(error, name, None) for name in _ERROR_FIELDS}
    if missing := getattr(error, "missing", None):
        facts["missing"] = missing[:_MAX_MISSING]
    message = {"error": name, "text": text[:_MAX_ERROR_TEXT], "facts": facts}
    try:
        channel.send(MessageKind.FAILURE, json.dumps(message).encode())
    except EOFError:
        return


def receive_answer(
    channel: Channel, *kinds: MessageKind, is_trusted: bool = True
) -> Steps[Message]:
    """Receive a message of these kinds from the server, or raise what it sends instead.

    Before it has proved itself (``is_trusted=False``) it can only ask to come again, which is
    BlockingIOError.
    """
    failures = (MessageKind.BUSY, MessageKind.FAILURE) if is_trusted else (MessageKind.BUSY,)
    message = yield from channel.receive(*kinds, *failures)
    if message.kind is MessageKind.BUSY:
        raise BlockingIOError("rank 0 is busy")
    if message.kind is MessageKind.FAILURE:
        raise parse_failure(message.body)
    return message


def parse_failure(body: bytes) -> DistributedError:
    """Make the error again that a rank has sent."""
    try:
        message = json.loads(body)
        error_type = _ERROR_TYPES.get(message["error"], RendezvousError)
        return error_type(message["text"], **message["facts"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ProtocolError("a rank failed, and sent an error that cannot be decoded") from error
