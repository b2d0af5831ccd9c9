# SPDX-License-Identifier: MIT OR Apache-2.0
"""The handshake: both sides prove that they know the job's secret, and show it to nobody.

    guest                                     host
    GREETING: nonce, rank, size, version  ->
                                          <-  GREETING: the same of the host
                                          <-  PROOF: HMAC("host", both greetings, job)
    PROOF: HMAC("gues", both greetings, job)  ->
                                          <-  WELCOME

A proof covers the role, all that both sides have said (their ranks too) and the job's name, so it
cannot be sent back, used again, or taken to another rank or job. Only then the host compares what
both have said. From the same follow keys that only these two have: every message after the WELCOME
is sealed with one, and one is handed out for what comes after messages.
"""

from __future__ import annotations

import enum
import hmac
import secrets
import struct
from collections.abc import Callable
from typing import NamedTuple

from ferrodist.config import variable
from ferrodist.errors import AuthenticationError, ProtocolError
from ferrodist.rendezvous import failure
from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.link import Kind, Link, Talk
from ferrodist.version import __version__

_GREETING = struct.Struct("!32sII32s")
_LINK, _TO_HOST, _TO_GUEST = b"link", b"toho", b"togu"  # of one length, like all but the name


class Purpose(enum.Enum):
    """What a handshake is for; one that is meant for this is no good for that."""

    MEETING = b"host", b"gues"
    MESH = b"answ", b"call"

    @property
    def host(self) -> bytes:
        """What stands in the proof of the one who listens."""
        return self.value[0]

    @property
    def guest(self) -> bytes:
        """What stands in the proof of the one who comes."""
        return self.value[1]


class Greeting(NamedTuple):
    """What one side says about itself."""

    nonce: bytes
    rank: int
    world_size: int
    version: str

    def pack(self) -> bytes:
        """Return it as it travels."""
        return _GREETING.pack(self.nonce, self.rank, self.world_size, self.version.encode()[:32])

    @classmethod
    def unpack(cls, body: bytes) -> Greeting:
        """Read one from a message."""
        try:
            nonce, rank, world_size, version = _GREETING.unpack(body)
            return cls(nonce, rank, world_size, version.rstrip(b"\0").decode("ascii"))
        except (struct.error, UnicodeDecodeError) as error:
            raise ProtocolError("a greeting that cannot be read") from error


def greet_host(
    link: Link, job: Job, purpose: Purpose = Purpose.MEETING, *, rank: int = 0, where: str = ""
) -> Talk[bytes]:
    """Shake hands as a guest of a rank, and return the key that both have now.

    Raises AuthenticationError if whoever listens does not know the secret, or is another rank.
    """
    mine = _new_greeting(job).pack()
    link.send(Kind.GREETING, mine)
    try:
        theirs = (yield from failure.hear(link, Kind.GREETING, believe=False)).body
        proof = (yield from failure.hear(link, Kind.PROOF, believe=False)).body
    except ProtocolError as error:
        raise ProtocolError(
            f"whoever listens{where} for job {job.name!r} is no rank of ferrodist: {error}",
            rank=rank,
            this_rank=job.rank,
        ) from error
    if not hmac.compare_digest(proof, _prove(job, purpose.host, mine, theirs)):
        raise AuthenticationError(
            f"whoever listens{where} for job {job.name!r} does not know its secret: it belongs to "
            f"another job of this name, or its {variable('secret_file')} is not the same file as "
            "here (compare them with sha256sum)",
            rank=rank,
            this_rank=job.rank,
        )
    host = Greeting.unpack(theirs)
    if host.rank != rank:  # before we prove anything: it must not take us for its own guest
        raise AuthenticationError(
            f"rank {host.rank} of job {job.name!r} listens{where}, where rank {rank} should",
            rank=host.rank,
            this_rank=job.rank,
        )
    link.send(Kind.PROOF, _prove(job, purpose.guest, mine, theirs))
    link.seal_sent(_prove(job, _TO_HOST, mine, theirs))
    check_version(host.version, job, rank)
    yield from failure.hear(link, Kind.WELCOME)
    link.seal_received(_prove(job, _TO_GUEST, mine, theirs))
    return _prove(job, _LINK, mine, theirs)


def greet_guest(
    link: Link,
    job: Job,
    purpose: Purpose = Purpose.MEETING,
    check: Callable[[Greeting], None] = lambda greeting: None,
) -> Talk[tuple[Greeting, bytes]]:
    """Shake hands as the host; return what the guest has proved to have said, and the key.

    ``check`` looks at what it has said, and raises if it is not welcome all the same.
    """
    theirs = (yield from link.receive(Kind.GREETING)).body
    greeting, mine = Greeting.unpack(theirs), _new_greeting(job).pack()
    link.send(Kind.GREETING, mine)
    link.send(Kind.PROOF, _prove(job, purpose.host, theirs, mine))
    try:
        proof = (yield from link.receive(Kind.PROOF)).body
    except EOFError as error:
        raise AuthenticationError(
            f"a visitor that calls itself rank {greeting.rank} left when it saw this job's proof"
        ) from error
    if not hmac.compare_digest(proof, _prove(job, purpose.guest, theirs, mine)):
        raise AuthenticationError("a visitor does not know the job's secret")
    link.seal_received(_prove(job, _TO_HOST, theirs, mine))
    check(greeting)
    link.send(Kind.WELCOME)
    link.seal_sent(_prove(job, _TO_GUEST, theirs, mine))
    return greeting, _prove(job, _LINK, theirs, mine)


def check_version(other: str, job: Job, rank: int = 0) -> None:
    """Refuse a rank that runs another version."""
    if other != __version__:
        raise ProtocolError(
            f"rank {rank} runs ferrodist {other}, rank {job.rank} runs {__version__}; install one "
            "version everywhere",
            rank=rank,
            this_rank=job.rank,
            got=other,
            expected=__version__,
        )


def _new_greeting(job: Job) -> Greeting:
    return Greeting(secrets.token_bytes(32), job.rank, job.world_size, __version__)


def _prove(job: Job, role: bytes, guest: bytes, host: bytes) -> bytes:
    return hmac.digest(job.secret, role + guest + host + job.name.encode(), "sha256")
