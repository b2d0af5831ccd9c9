# SPDX-License-Identifier: MIT OR Apache-2.0
"""join_mesh: every rank of a job gets a connection to every other.

Each rank listens at one address while the mesh is made, and tells all ranks by an exchange which.
Rank i connects to every rank below it and is connected to by every rank above. Both ends of each
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
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ferrodist.config import Config, variable
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, InvalidArgument, ProtocolError, RendezvousError
from ferrodist.rendezvous.errors import could_not_join
from ferrodist.rendezvous.exchange import Exchange, MpiExchange, StoreExchange, connect_to_agent
from ferrodist.rendezvous.handshake import check_version
from ferrodist.rendezvous.interfaces import choose_address
from ferrodist.rendezvous.job import (
    SECRET_NBYTES,
    Bootstrap,
    Endpoint,
    Job,
    no_secret,
    try_endpoint,
)
from ferrodist.rendezvous.meeting import Client, Server
from ferrodist.rendezvous.mesh_builder import MeshBuilder, MeshLink
from ferrodist.rendezvous.sockets import (
    MeetingPoint,
    TcpPoint,
    UnixPoint,
    open_listener_at,
    resolve,
)
from ferrodist.rendezvous.watch import try_pidfd
from ferrodist.rendezvous.wire import MAX_HOST_NAME, MAX_RECORD
from ferrodist.version import __version__

logger = logging.getLogger("ferrodist")

_LOOPBACK = "127.0.0.1"
_TOKEN_NBYTES = 16
# rank, pid, its namespace, port, token, whether links are encrypted; lengths of the texts
_HEAD = struct.Struct("!IQQH16s?4H")


class MeshPeer(NamedTuple):
    """A rank of the job, seen from this one; its receiver closes both files.

    ``host`` is the same for ranks that can share memory. ``socket`` is a non-blocking connection;
    with TLS, one end of a pair whose other end is encrypted. ``key`` is 32 bytes that only the two
    ranks know. ``watch`` becomes readable when the process is gone; -1 where that cannot be
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
        return f"MeshPeer(rank={self.rank}, pid={self.pid}, address={self.address!r})"


def join_mesh(job: Job, config: Config) -> list[MeshPeer]:
    """Connect all ranks of the job to each other; return all of them, in rank order.

    Every rank calls it, and none returns before all are connected. Raises RendezvousError, naming
    the ranks at fault, AuthenticationError or ProtocolError within ``config.join_timeout``.
    """
    if job.world_size == 1:
        return [_this_rank(PeerAddress.of_this_process(0, Endpoint("", 0), config.host_id))]
    try:
        return _join(job, config, Deadline(job.join_seconds(config)))
    except DistributedError:
        raise
    except OSError as error:
        raise could_not_join(job, error) from error


def _join(job: Job, config: Config, deadline: Deadline) -> list[MeshPeer]:
    with open_exchange(job, config, deadline) as exchange:
        with _open_listener(job, config, exchange.towards) as listener:
            own = _own_address(job, config, listener)
            addresses = exchange_addresses(exchange, job, own)
            mesh_job = _job_of_mesh(job, exchange.secret, addresses[0])
            channels = exchange.failure_channels
            if deadline.remaining() > config.join_timeout:  # for late ranks: all have joined now
                deadline = Deadline(config.join_timeout)
            builder = MeshBuilder(mesh_job, listener, addresses, channels, config, deadline)
            links = builder.build()
    return [peer_at(address, own, links.get(address.rank)) for address in addresses]


def open_exchange(job: Job, config: Config, deadline: Deadline) -> Exchange:
    """Choose how a job's ranks meet; raises AuthenticationError if they could be anybody."""
    if job.meets_here:
        return _open_socket_exchange(job, UnixPoint(job), deadline)
    if not (job.has_secret or job.uses_munge):
        raise no_secret(job)
    if job.bootstrap is Bootstrap.MPI:
        return MpiExchange(job, deadline)
    if job.exchange is not None:
        return job.exchange
    endpoint = job.endpoint
    if endpoint is None:
        raise InvalidArgument(
            f"job {job.name!r} is on several hosts, and nothing says where rank 0 listens",
            this_rank=job.rank,
        )
    if job.bootstrap is Bootstrap.TORCH_STORE:
        store = connect_to_agent(job, endpoint, deadline)
        return StoreExchange(job, store, deadline, endpoint.host)
    if job.uses_munge and job.rank == 0:
        job = replace(job, secret=os.urandom(SECRET_NBYTES))
    return _open_socket_exchange(job, TcpPoint(job, endpoint, config, deadline), deadline)


def _open_socket_exchange(job: Job, point: MeetingPoint, deadline: Deadline) -> Server | Client:
    if job.rank == 0:
        return Server(job, point, deadline)
    client = Client(job, point, deadline)
    client.join()
    return client


def _job_of_mesh(job: Job, secret: bytes, server: PeerAddress) -> Job:
    """Return the job with a secret of this mesh alone, which needs the random token of rank 0.

    Ranks of a job without a secret have met at a socket that lets only this user in, so other
    users, who may know the name of the job, cannot know the token.
    """
    secret = hmac.digest(secret, b"mesh" + server.token, "sha256")
    return replace(job, secret=secret, munge=None)


def _open_listener(job: Job, config: Config, towards: str) -> socket.socket:
    pattern = config.socket_ifname
    if job.meets_here:
        name, host, why = "lo", _LOOPBACK, ""
    else:
        name, host = choose_address(pattern, towards)
        why = (
            f", which matches {pattern!r}"
            if pattern
            else f", which routes to {towards or 'others'}"
        )
    listener = _listen_at(host, config.ports)
    endpoint = Endpoint(*listener.getsockname()[:2])
    logger.info("listening at %s on %s%s", endpoint, name, why)
    return listener


def _listen_at(host: str, ports: tuple[int, int]) -> socket.socket:
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
        f"the ranks connect; widen {variable('ports')}, or unset it to take any",
        got=ports,
    )


def _this_rank(address: PeerAddress) -> MeshPeer:
    where = str(address.endpoint) if address.port else ""
    return MeshPeer(address.rank, address.host, address.host_name, address.pid, where, -1, b"", -1)


def peer_at(address: PeerAddress, own: PeerAddress, link: MeshLink | None) -> MeshPeer:
    """Make a peer of what a rank has told and of its link, which is None for this rank itself."""
    if link is None:
        return _this_rank(address)
    return _this_rank(address)._replace(
        socket=link.channel.socket.detach(), key=link.key, watch=_open_watch(address, own)
    )


def address_among(peers: Sequence[MeshPeer], rank: int, pattern: str) -> str:
    """Choose where another library listens, for some ranks of a mesh; ``rank`` is this one."""
    elsewhere = [peer.address for peer in peers if peer.host != peers[rank].host]
    if not elsewhere:
        return _LOOPBACK
    towards = try_endpoint(elsewhere[0])
    return choose_address(pattern, towards.host if towards else "")[1]


def _open_watch(peer: PeerAddress, own: PeerAddress) -> int:
    """Open a watch of a process, if it is on this host and has the same pid here."""
    if (peer.host, peer.pid_namespace) != (own.host, own.pid_namespace) or not own.pid_namespace:
        return -1
    pidfd = try_pidfd(peer.pid)
    return -1 if pidfd is None else pidfd


# -- peer addresses -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """What a rank tells all others: its process and host, and where it listens.

    ``host`` is the same for processes that can share memory, and for no others. ``token`` is
    random; that of rank 0 tells this meeting from all others.
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

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.address, self.port)

    def pack(self) -> bytes:
        texts = [text.encode() for text in (self.host, self.host_name, self.address, self.version)]
        numbers = self.rank, self.pid, self.pid_namespace, self.port, self.token, self.is_tls
        return _HEAD.pack(*numbers, *map(len, texts)) + b"".join(texts)

    @classmethod
    def unpack(cls, data: bytes) -> PeerAddress:
        """Read one; it may come from anybody, and is not trusted before the handshake."""
        try:
            numbers = _HEAD.unpack(data[: _HEAD.size])
            rank, pid, pid_namespace, port, token, is_tls, *lengths = numbers
            if len(data) > MAX_RECORD or len(data) != _HEAD.size + sum(lengths):
                raise ProtocolError(f"the address of rank {rank} has {len(data)} bytes")
            texts, start = [], _HEAD.size
            for length in lengths:
                texts.append(data[start : start + length].decode())
                start += length
        except (struct.error, UnicodeDecodeError) as error:
            raise ProtocolError("the address of a rank cannot be decoded") from error
        host, host_name, address, version = texts
        return cls(rank, pid, pid_namespace, host, host_name, address, port, token, is_tls, version)

    @classmethod
    def of_this_process(
        cls, rank: int, endpoint: Endpoint, host: str = "", *, is_tls: bool = False
    ) -> PeerAddress:
        """Describe this process, which listens there; ``host`` is found out if empty."""
        name, token = socket.gethostname()[:MAX_HOST_NAME], os.urandom(_TOKEN_NBYTES)
        here = host or host_id()
        return cls(rank, os.getpid(), _namespace("pid"), here, name, *endpoint, token, is_tls)

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


def _namespace(kind: str) -> int:
    """Return a number that is the same for processes in the same namespace."""
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


def _own_address(job: Job, config: Config, listener: socket.socket) -> PeerAddress:
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
    return PeerAddress.of_this_process(job.rank, endpoint, config.host_id, is_tls=config.tls)


def exchange_addresses(exchange: Exchange, job: Job, own: PeerAddress) -> list[PeerAddress]:
    """Give every rank the addresses of all, in rank order; every rank calls it.

    Raises RendezvousError for ranks that do not come or do not agree on TLS, ProtocolError for
    those of another version.
    """
    addresses = [PeerAddress.unpack(value) for value in exchange.gather(own.pack())]
    if [address.rank for address in addresses] != list(range(job.world_size)):
        raise ProtocolError(f"the addresses of job {job.name!r} are not of this world")
    for address in addresses:
        check_version(address.version, job, address.rank)
        _check_tls(job, own, address)
    return addresses


def _check_tls(job: Job, own: PeerAddress, other: PeerAddress) -> None:
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
