# SPDX-License-Identifier: MIT OR Apache-2.0
"""join_mesh: every rank of a job gets a connection to every other.

Each rank listens at one address while the mesh is made, and tells it to all on its card. Rank i
connects to every rank below it and is connected to by every rank above. Both ends of each
connection prove that they are the rank they say, of this job, and derive a key that nobody else
has. When all ranks have all their connections, and not before, everybody returns, and no rank
listens any longer.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import socket
from dataclasses import replace
from typing import NamedTuple

from ferrodist.config import Config, variable
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, InvalidArgument, RendezvousError
from ferrodist.rendezvous.cards import Card, exchange_cards
from ferrodist.rendezvous.exchange import open_exchange
from ferrodist.rendezvous.interfaces import choose_address
from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.launch import Endpoint, try_endpoint
from ferrodist.rendezvous.mesh_builder import MeshBuilder, MeshLink
from ferrodist.rendezvous.tcp_socket import open_listener_at, resolve
from ferrodist.rendezvous.watch import try_pidfd

logger = logging.getLogger("ferrodist")


class Neighbour(NamedTuple):
    """A rank of the job, seen from this one; whoever gets it closes both files.

    ``host`` is the same for ranks that can share memory. ``socket`` is a connection that does not
    block; with TLS, one end of a pair whose other end is encrypted. ``key`` is 32 bytes that only
    the two ranks know. ``watch`` becomes readable when the process is gone, -1 where that cannot be
    watched. For this rank itself there is none of the three.
    """

    rank: int
    host: str
    host_name: str
    pid: int
    address: str
    socket: int
    key: bytes
    watch: int

    def __repr__(self) -> str:
        return f"Neighbour(rank={self.rank}, pid={self.pid}, address={self.address!r})"


def join_mesh(job: Job, config: Config) -> list[Neighbour]:
    """Connect all ranks of the job to each other; return all of them, in rank order.

    Every rank calls it, and none returns before all are connected. Raises RendezvousError, naming
    the ranks at fault, AuthenticationError or ProtocolError within ``config.join_timeout``.
    """
    if job.world_size == 1:
        return [_this_rank(Card.of_this_process(0, "", 0, config.host_id))]
    try:
        return _join(job, config, Deadline(config.join_timeout))
    except DistributedError:
        raise
    except OSError as error:
        raise RendezvousError(
            f"rank {job.rank} could not join job {job.name!r}: {error}", this_rank=job.rank
        ) from error


def _join(job: Job, config: Config, deadline: Deadline) -> list[Neighbour]:
    with open_exchange(job, config, deadline) as exchange:
        with _open_listener(job, config, exchange.towards) as listener:
            cards = exchange_cards(exchange, job, _make_card(job, config, listener))
            own_job = _job_of_mesh(job, cards[0])
            lines = exchange.lines
            links = MeshBuilder(own_job, listener, cards, lines, config, deadline).build()
    return [_neighbour(card, cards[job.rank], links.get(card.rank)) for card in cards]


def _job_of_mesh(job: Job, host: Card) -> Job:
    """Return the job with a secret of this mesh alone.

    On one host the ranks have met by a socket that only this user has, so other users, who may
    know the name of the job, cannot know this.
    """
    return replace(job, secret=hmac.digest(job.secret, b"mesh" + host.token, "sha256"))


def _open_listener(job: Job, config: Config, towards: str) -> socket.socket:
    """Listen for the ranks above this one."""
    pattern = config.socket_ifname
    if not job.several_hosts:
        name, host = "lo", "127.0.0.1"
    else:
        name, host = choose_address(pattern, towards)
    listener = _listen_at(host, config.ports)
    endpoint = Endpoint(*listener.getsockname()[:2])
    why = f"which matches {pattern!r}" if pattern else f"which routes to {towards or 'others'}"
    logger.info("listening at %s on %s%s", endpoint, name, f", {why}" if job.several_hosts else "")
    return listener


def _listen_at(host: str, ports: tuple[int, int]) -> socket.socket:
    """Listen at the first port of a range that is free; 0 is any."""
    first, last = ports
    for port in range(first, last + 1):
        try:
            return open_listener_at(resolve(Endpoint(host, port))[0])
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise RendezvousError(
                    f"cannot listen at {Endpoint(host, port)}: {error.strerror}"
                ) from error
    raise RendezvousError(
        f"no port from {first} to {last} is free at {host}: every rank of a host needs one while "
        f"the ranks connect; widen {variable('ports')}, or leave it out to take any",
        got=ports,
    )


def _make_card(job: Job, config: Config, listener: socket.socket) -> Card:
    endpoint = Endpoint(*listener.getsockname()[:2])
    if config.advertise:
        given = try_endpoint(config.advertise)
        if given is None:
            raise InvalidArgument(
                f"{variable('advertise')}={config.advertise!r}: expected address:port, as "
                "10.0.0.2:29600 or [fd00::2]:29600",
                got=config.advertise,
            )
        endpoint = given
    where, host = (endpoint.host, endpoint.port), config.host_id
    return Card.of_this_process(job.rank, *where, host, is_tls=config.tls)


def _this_rank(card: Card) -> Neighbour:
    address = str(Endpoint(card.address, card.port)) if card.port else ""
    return Neighbour(card.rank, card.host, card.host_name, card.pid, address, -1, b"", -1)


def _neighbour(card: Card, own: Card, link: MeshLink | None) -> Neighbour:
    if link is None:
        return _this_rank(card)
    return _this_rank(card)._replace(
        socket=link.link.socket.detach(), key=link.key, watch=_open_watch(card, own)
    )


def _open_watch(card: Card, own: Card) -> int:
    """Open a watch of a process, if it is one of this host and known here by its number."""
    if (card.host, card.pid_namespace) != (own.host, own.pid_namespace) or not own.pid_namespace:
        return -1
    pidfd = try_pidfd(card.pid)
    return -1 if pidfd is None else pidfd


def close_neighbours(neighbours: list[Neighbour]) -> None:
    """Close the files of all ranks."""
    for neighbour in neighbours:
        for file in (neighbour.socket, neighbour.watch):
            if file >= 0:
                os.close(file)
