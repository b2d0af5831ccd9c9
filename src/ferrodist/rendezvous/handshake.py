# SPDX-License-Identifier: MIT OR Apache-2.0
"""The handshake: both sides prove that they know the job's secret, and show it to nobody.

    guest                                     host
    GREETING: nonce, rank, size, version  ->
                                          <-  GREETING: the same of the host
                                          <-  PROOF: HMAC("host", both greetings, job)
    PROOF: HMAC("gues", both greetings, job)  ->
                                          <-  WELCOME

A proof covers the role, all that both sides have said and the job's name, so it cannot be sent
back, used again, or taken to another job. Only then the host compares what both have said.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import NamedTuple

from ferrodist.errors import AuthenticationError, ProtocolError
from ferrodist.rendezvous import failure
from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.link import Kind, Link, Talk
from ferrodist.version import __version__

_GREETING = struct.Struct("!32sII32s")
_HOST, _GUEST = b"host", b"gues"  # of one length, like everything else in a proof but the name


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


def greet_host(link: Link, job: Job) -> Talk[None]:
    """Shake hands as a guest; raises AuthenticationError if the host does not know the secret."""
    mine = _new_greeting(job).pack()
    link.send(Kind.GREETING, mine)
    theirs = (yield from failure.hear(link, Kind.GREETING, believe=False)).body
    proof = (yield from failure.hear(link, Kind.PROOF, believe=False)).body
    if not hmac.compare_digest(proof, _prove(job, _HOST, mine, theirs)):
        raise AuthenticationError(
            f"whoever listens for job {job.name!r} does not know its secret: it belongs to "
            "another job of this name, or to nobody you know",
            rank=0,
            this_rank=job.rank,
        )
    link.send(Kind.PROOF, _prove(job, _GUEST, mine, theirs))
    host = Greeting.unpack(theirs)
    check_version(host.version, job)
    yield from failure.hear(link, Kind.WELCOME)


def greet_guest(link: Link, job: Job) -> Talk[Greeting]:
    """Shake hands as the host; return what the guest has proved to have said."""
    theirs = (yield from link.receive(Kind.GREETING)).body
    greeting, mine = Greeting.unpack(theirs), _new_greeting(job).pack()
    link.send(Kind.GREETING, mine)
    link.send(Kind.PROOF, _prove(job, _HOST, theirs, mine))
    proof = (yield from link.receive(Kind.PROOF)).body
    if not hmac.compare_digest(proof, _prove(job, _GUEST, theirs, mine)):
        raise AuthenticationError("a visitor does not know the job's secret")
    return greeting


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
