# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sockets: how a rank listens and connects, and where the ranks of a job meet.

On one host they meet at an abstract Unix socket (``UnixPoint``). Nothing of it is in a file system,
so nothing is left behind, and the kernel says who is at the other end. Ranks of several hosts meet
at an address and port of rank 0's host (``TcpPoint``); there the handshake alone says who is who.
Rank 0 listens at one address, never at all of them.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ferrodist.config import Config, variable
from ferrodist.deadline import Deadline
from ferrodist.errors import AuthenticationError, RendezvousError
from ferrodist.rendezvous.errors import second_server, server_of_another_user
from ferrodist.rendezvous.handshake import PeerIdentity
from ferrodist.rendezvous.interfaces import (
    choose_address,
    is_loopback,
    list_interfaces,
    matches,
    name_of,
    who_listens,
)
from ferrodist.rendezvous.job import Endpoint, Job, brief
from ferrodist.rendezvous.wire import MAX_ROSTER, wait_seconds

logger = logging.getLogger("ferrodist")

_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid

_HEAD_START = 0.25  # seconds before the next address of a host is tried as well
_BACKLOG = 4096  # who comes when it is full comes a second later; a flood must not fill it

_ROUND_SECONDS = 5.0  # that one try to connect takes at most
_FIRST_PAUSE = 0.25  # seconds before a name that was not found is resolved again; it doubles
_MAX_PAUSE = 4.0
_MAX_KEEPALIVE = 32767  # seconds that Linux accepts
_MAX_INT = 2**31 - 1


# -- one host: Unix sockets -----------------------------------------------------------------------


class UnixPoint:
    """Where the ranks of one host meet."""

    max_pause = 0.02  # seconds between two tries to connect
    towards = ""  # the address of rank 0, which needs none
    where = ""  # completes 'the process that listens ...': the name of the job is enough

    def __init__(self, job: Job) -> None:
        self._job = job
        self.address = unix_address(job.name)

    def open_listener(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind("\0" + self.address[1:])
            listener.listen(min(self._job.world_size + 64, 4096))
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
            raise self._taken() from error
        return listener

    def _taken(self) -> RendezvousError:
        """Make the error for an address that another process has; it says whose, if visible."""
        connection = self.try_connect()
        if connection is None:
            return second_server(self._job, self.address, None)
        with connection:
            peer = peer_credentials(connection)
        if peer.uid != os.geteuid():
            return server_of_another_user(self._job, self.address, peer.pid, peer.uid)
        return second_server(self._job, self.address, peer.pid or None)

    def try_connect(self) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.connect("\0" + self.address[1:])
        except (ConnectionRefusedError, BlockingIOError):
            connection.close()
            return None
        except BaseException:  # Ctrl-C too: nobody else has the connection yet
            connection.close()
            raise
        return connection

    def identify(self, connection: socket.socket) -> PeerIdentity:
        """Ask the kernel who is at the other end; raises AuthenticationError for other users."""
        peer = peer_credentials(connection)
        if peer.uid != os.geteuid():
            raise AuthenticationError(
                f"process {peer.pid} at the other end belongs to user {peer.uid}, not to "
                f"{os.geteuid()}"
            )
        return peer

    def describe_self(self) -> str:
        return f"pid {os.getpid()}"


def unix_address(job_name: str) -> str:
    """Return where rank 0 of a job listens, with @ for the zero byte that abstract names have."""
    digest = hashlib.sha256(job_name.encode()).hexdigest()[:32]
    return f"@ferrodist-{os.geteuid()}-{digest}"


def peer_credentials(connection: socket.socket) -> PeerIdentity:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return PeerIdentity(pid, uid)


# -- several hosts: TCP ---------------------------------------------------------------------------


class TcpPoint:
    """Where the ranks of several hosts meet; the name is resolved once."""

    max_pause = 0.25  # seconds, not to flood the host of a rank 0 that has not started

    def __init__(self, job: Job, endpoint: Endpoint, config: Config, deadline: Deadline) -> None:
        self.where = f" at {endpoint}"  # completes 'the process that listens ...'
        self.towards = ""  # the address of rank 0, once it listens or was reached
        self._job = job
        self._endpoint = endpoint
        self._config = config
        self._deadline = deadline
        self._addresses: list[SocketAddress] = []
        self._why = ""
        self._next_lookup = Deadline(0.0)
        self._pause = _FIRST_PAUSE

    @property
    def address(self) -> str:
        why = f" ({self._why})" if self._why else ""
        return f"{self._endpoint}{why}"

    def identify(self, connection: socket.socket) -> PeerIdentity:
        set_limits(connection, self._config.heartbeat_timeout)
        # One message of the largest kind, and a failure after it, always fit.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_ROSTER)
        return identify_by_address(connection)

    def describe_self(self) -> str:
        return f"pid {os.getpid()} on {socket.gethostname()}, {self.towards}"

    # -- rank 0 -----------------------------------------------------------------------------------

    def open_listener(self) -> socket.socket:
        try:
            addresses = resolve(self._endpoint)
        except (OSError, UnicodeError) as error:
            raise self._error(f"cannot be resolved: {brief(str(error))}") from error
        for address in self._candidates(addresses):
            try:
                listener = open_listener_at(address)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    continue  # not of this host
                raise self._cannot_listen(address, error) from error
            self.towards = address.host
            logger.info("listening at %s on %s, for all ranks", address, name_of(address.host))
            return listener
        there = ", ".join(dict.fromkeys(address.host for address in addresses))
        known = ", ".join(map(str, list_interfaces()))
        raise self._error(
            f"rank 0 cannot listen at {there}, which is not an address of this host; there are: "
            f"{known}. Start rank 0 on the host that has the address; if it leads here by other "
            f"ways (NAT, a service), name the interface in {variable('socket_ifname')}"
        )

    def _candidates(self, addresses: list[SocketAddress]) -> list[SocketAddress]:
        pattern = self._config.socket_ifname
        if pattern:
            names = {one.address: one.name for one in list_interfaces()}
            known = [one for one in addresses if one.host in names]
            matching = [one for one in known if matches(pattern, names[one.host])]
            others = [] if matching else self._chosen()  # raises if the pattern matches none at all
            if not matching and known and self._endpoint.host == known[0].host:
                # The others look for rank 0 at this very address.
                raise self._error(
                    f"rank 0 is to listen at {known[0].host}, which is on {names[known[0].host]}, "
                    f"and {variable('socket_ifname')}={brief(pattern)!r} does not match that "
                    "interface; change one of the two"
                )
            return matching or others
        if self._is_known_here_only(addresses):
            return self._chosen()
        return sorted(addresses, key=lambda address: is_loopback(address.host))

    def _is_known_here_only(self, addresses: list[SocketAddress]) -> bool:
        """Tell whether a name leads to loopback, as on its own host it may (127.0.1.1).

        From other hosts it leads to an address that they can reach.
        """
        is_name = not is_loopback(self._endpoint.host)
        return is_name and all(is_loopback(address.host) for address in addresses)

    def _chosen(self) -> list[SocketAddress]:
        _, host = choose_address(self._config.socket_ifname)
        return resolve(Endpoint(host, self._endpoint.port))

    def _cannot_listen(self, address: SocketAddress, error: OSError) -> RendezvousError:
        if error.errno != errno.EADDRINUSE:
            return self._error(f"rank 0 cannot listen at {address}: {error.strerror}")
        owner = who_listens(address.where[1])
        who = f"{owner} listens" if owner else "another process listens"
        return self._error(
            f"port {address.where[1]} is in use at {address.host}: {who} there, and rank 0 has to; "
            "end it if it belongs to an earlier job, or give this job another port"
        )

    def _error(self, what: str) -> RendezvousError:
        return RendezvousError(
            f"job {self._job.name!r}, {self._endpoint} from {self._job.launcher.name}: {what}",
            rank=0,
            this_rank=self._job.rank,
            address=str(self._endpoint),
        )

    # -- the other ranks --------------------------------------------------------------------------

    def try_connect(self) -> socket.socket | None:
        if not self._addresses and not self._try_resolve():
            return None
        remaining = self._deadline.remaining()
        if remaining <= 0:
            return None
        try:
            connection = connect_to_any(self._addresses, min(_ROUND_SECONDS, remaining))
        except OSError as error:
            self._why = str(error)
            return None
        self.towards = str(connection.getpeername()[0])
        return connection

    def _try_resolve(self) -> bool:
        """Resolve the name; a host that has just been started may not be known yet."""
        if self._next_lookup.remaining() > 0:
            return False
        try:
            addresses = resolve(self._endpoint)
        except (OSError, UnicodeError) as error:
            if not self._why:
                logger.warning("%s cannot be resolved yet: %s", self._endpoint, error)
            self._why = f"it cannot be resolved: {brief(str(error))}"
            self._next_lookup = Deadline(self._pause)
            self._pause = min(2 * self._pause, _MAX_PAUSE)
            return False
        # If it leads to loopback rank 0 is on this host, and listens where others find it.
        is_here = self._is_known_here_only(addresses)
        self._addresses = [*(self._chosen() if is_here else []), *addresses]
        return True


MeetingPoint = UnixPoint | TcpPoint


class SocketAddress(NamedTuple):
    """An address as sockets take it."""

    family: int
    where: Any

    @property
    def host(self) -> str:
        return str(self.where[0])

    def __str__(self) -> str:
        return str(Endpoint(self.where[0], self.where[1]))


def resolve(endpoint: Endpoint) -> list[SocketAddress]:
    found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(SocketAddress(family, where) for family, _, _, _, where in found))


def open_listener_at(address: SocketAddress) -> socket.socket:
    listener = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        if address.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # A port that had connections a moment ago is free all the same; one that somebody listens
        # at is not.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address.where)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:  # Ctrl-C too: nobody else has the listener yet
        listener.close()
        raise
    return listener


def start_connecting(address: SocketAddress) -> socket.socket:
    """Begin to connect; the socket becomes writable when that has succeeded or failed."""
    connection = socket.socket(address.family, socket.SOCK_STREAM)
    connection.setblocking(False)
    code = connection.connect_ex(address.where)
    if code not in (0, errno.EINPROGRESS):
        connection.close()
        raise OSError(code, os.strerror(code))
    return connection


def finish_connecting(connection: socket.socket) -> None:
    """Raise OSError if the connection was not made."""
    code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def connect_to_any(addresses: Sequence[SocketAddress], seconds: float) -> socket.socket:
    """Connect to the first of these that answers; each has a head start over the next.

    So an address that no route leads to costs a quarter of a second. Raises OSError, which names
    each address and what came of it.
    """
    end = time.monotonic() + seconds
    waiting, next_start = list(addresses), 0.0
    trying: dict[int, tuple[socket.socket, SocketAddress]] = {}
    failed: list[str] = []
    try:
        while waiting or trying:
            now = time.monotonic()
            if now >= end:
                break
            if waiting and (now >= next_start or not trying):
                address, next_start = waiting.pop(0), now + _HEAD_START
                try:
                    connection = start_connecting(address)
                    trying[connection.fileno()] = connection, address
                except OSError as error:
                    failed.append(f"{address}: {error.strerror}")
                continue
            until = min(end, next_start) if waiting else end
            poll = select.poll()
            for file in trying:
                poll.register(file, select.POLLOUT)
            for file, _ in poll.poll(1000 * wait_seconds(until - now)):
                connection, address = trying.pop(file)
                try:
                    finish_connecting(connection)
                except OSError as error:
                    connection.close()
                    failed.append(f"{address}: {error.strerror}")
                    continue
                return connection
        silent = [f"{address}: no answer" for _, address in trying.values()]
        raise ConnectionError("; ".join([*failed, *silent]) or "nothing was tried")
    finally:
        for connection, _ in trying.values():
            connection.close()


def identify_by_address(connection: socket.socket) -> PeerIdentity:
    """Say where the other end is, and let small messages go at once."""
    host, port, *_ = connection.getpeername()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return PeerIdentity(address=str(Endpoint(host, port)))


def set_limits(connection: socket.socket, timeout: float) -> None:
    """Let the kernel give a connection up when the other side has been silent for so long.

    Keepalive finds a silent peer while nothing is sent, TCP_USER_TIMEOUT one that does not
    acknowledge what is.
    """
    idle, pause = (min(max(1, round(timeout / part)), _MAX_KEEPALIVE) for part in (2, 6))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(round(1000 * timeout), _MAX_INT)
    )
