# SPDX-License-Identifier: MIT OR Apache-2.0
"""Cards: what every rank tells all others of itself before they connect to each other."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path

from ferrodist.config import variable
from ferrodist.errors import ProtocolError, RendezvousError
from ferrodist.rendezvous.exchange import LARGEST_RECORD, Exchange
from ferrodist.rendezvous.handshake import check_version
from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.link import LONGEST_NAME
from ferrodist.version import __version__

TOKEN_NBYTES = 16
# rank, pid, its namespace, port, token, whether links are encrypted; lengths of the texts
_HEAD = struct.Struct("!IQQH16s?4H")


@dataclass(frozen=True, slots=True)
class Card:
    """A rank, the process and host it is on, and where it listens.

    ``host`` is the same for processes that can share memory, and for no others. ``token`` is made
    of chance; that of rank 0 tells this meeting from all others.
    """

    rank: int
    pid: int
    pid_namespace: int
    host: str
    host_name: str
    address: str
    port: int
    token: bytes = field(repr=False)
    is_tls: bool = False
    version: str = __version__

    def pack(self) -> bytes:
        """Return it as it travels."""
        texts = [text.encode() for text in (self.host, self.host_name, self.address, self.version)]
        numbers = self.rank, self.pid, self.pid_namespace, self.port, self.token, self.is_tls
        return _HEAD.pack(*numbers, *map(len, texts)) + b"".join(texts)

    @classmethod
    def unpack(cls, data: bytes) -> Card:
        """Read one; it may come from anybody, and is believed by no one before the handshake."""
        try:
            numbers = _HEAD.unpack(data[: _HEAD.size])
            rank, pid, pid_namespace, port, token, is_tls, *lengths = numbers
            if len(data) > LARGEST_RECORD or len(data) != _HEAD.size + sum(lengths):
                raise ProtocolError(f"the card of rank {rank} has {len(data)} bytes")
            texts, start = [], _HEAD.size
            for length in lengths:
                texts.append(data[start : start + length].decode())
                start += length
        except (struct.error, UnicodeDecodeError) as error:
            raise ProtocolError("the card of a rank cannot be read") from error
        host, host_name, address, version = texts
        return cls(rank, pid, pid_namespace, host, host_name, address, port, token, is_tls, version)

    @classmethod
    def of_this_process(
        cls, rank: int, address: str, port: int, host: str = "", *, is_tls: bool = False
    ) -> Card:
        """Make the card of this process, which listens there; ``host`` is found out if empty."""
        name, token = socket.gethostname()[:LONGEST_NAME], secrets.token_bytes(TOKEN_NBYTES)
        here = host or host_id()
        return cls(rank, os.getpid(), pid_namespace(), here, name, address, port, token, is_tls)

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host_name})"


def host_id() -> str:
    """Name what this process can share memory with: the same kernel, network and user.

    Ranks pass memory by Unix sockets, which end at the border of a network namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    return f"{boot}-{_namespace('net')}-{os.geteuid()}"


def pid_namespace() -> int:
    """Return a number that is the same for processes that know each other by the same pids."""
    return _namespace("pid")


def _namespace(kind: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


def exchange_cards(exchange: Exchange, job: Job, card: Card) -> list[Card]:
    """Give every rank the cards of all, in rank order; every rank calls it.

    Raises RendezvousError for ranks that do not come or do not agree on TLS, ProtocolError for
    those of another version.
    """
    cards = [Card.unpack(value) for value in exchange.gather(card.pack())]
    if [card.rank for card in cards] != list(range(job.world_size)):
        raise ProtocolError(f"the cards of job {job.name!r} are not of this world")
    for one in cards:
        check_version(one.version, job, one.rank)
        _check_tls(job, card, one)
    return cards


def _check_tls(job: Job, own: Card, other: Card) -> None:
    if other.is_tls != own.is_tls:
        raise RendezvousError(
            f"{other} of job {job.name!r} has {variable('tls')}={int(other.is_tls)}, {own} has "
            f"{variable('tls')}={int(own.is_tls)}: links are encrypted at both ends or at none; "
            "set it on all ranks or on none",
            rank=other.rank,
            this_rank=own.rank,
            got=other.is_tls,
            expected=own.is_tls,
        )
