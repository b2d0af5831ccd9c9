# SPDX-License-Identifier: MIT OR Apache-2.0
"""TCP sockets: how a rank listens, connects, and lets the kernel watch the other side."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ferrodist.rendezvous.launch import Endpoint
from ferrodist.rendezvous.reception import Peer

_HEAD_START = 0.25  # seconds before the next address of a host is tried as well
_BACKLOG = 4096  # who comes when it is full comes a second later; a flood must not fill it
_LONGEST_WAIT = 0.2  # a signal that came just before is noticed after it


class Address(NamedTuple):
    """An address as sockets take it."""

    family: int
    where: Any

    @property
    def host(self) -> str:
        """The address without the port."""
        return str(self.where[0])

    def __str__(self) -> str:
        return str(Endpoint(self.where[0], self.where[1]))


def resolve(endpoint: Endpoint) -> list[Address]:
    """Look a name up, the preferred addresses first; raises OSError or UnicodeError."""
    found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(Address(family, where) for family, _, _, _, where in found))


def open_listener_at(address: Address) -> socket.socket:
    """Listen at one address of this host; raises OSError."""
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
    except BaseException:
        listener.close()
        raise
    return listener


def start_connecting(address: Address) -> socket.socket:
    """Begin to connect; the socket becomes writable at the end, for better or worse."""
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


def connect_to_any(addresses: Sequence[Address], seconds: float) -> socket.socket:
    """Connect to the first of these that answers; each has a short start over the next.

    So an address that no route leads to costs a quarter of a second. Raises OSError, which names
    each address and what came of it.
    """
    end = time.monotonic() + seconds
    waiting, next_start = list(addresses), 0.0
    open_ones: dict[int, tuple[socket.socket, Address]] = {}
    failed: list[str] = []
    try:
        while waiting or open_ones:
            now = time.monotonic()
            if now >= end:
                break
            if waiting and (now >= next_start or not open_ones):
                address, next_start = waiting.pop(0), now + _HEAD_START
                try:
                    connection = start_connecting(address)
                    open_ones[connection.fileno()] = connection, address
                except OSError as error:
                    failed.append(f"{address}: {error.strerror}")
                continue
            until = min(end, next_start) if waiting else end
            for file in _wait_writable(open_ones, until - now):
                connection, address = open_ones.pop(file)
                try:
                    finish_connecting(connection)
                except OSError as error:
                    connection.close()
                    failed.append(f"{address}: {error.strerror}")
                    continue
                return connection
        silent = [f"{address}: no answer" for _, address in open_ones.values()]
        raise ConnectionError("; ".join([*failed, *silent]) or "nothing was tried")
    finally:
        for connection, _ in open_ones.values():
            connection.close()


def _wait_writable(files: Any, seconds: float) -> list[int]:
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLOUT)
    ready = poll.poll(1000 * min(max(0.0, seconds), _LONGEST_WAIT))
    return [file for file, _ in ready]


def identify(connection: socket.socket) -> Peer:
    """Say where the other end is, and let small messages go at once."""
    host, port, *_ = connection.getpeername()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Peer(address=str(Endpoint(host, port)))


def set_limits(connection: socket.socket, silence: float) -> None:
    """Let the kernel give a connection up when the other side has been silent for so long.

    Keepalive finds a silent peer while nothing is sent, TCP_USER_TIMEOUT one that does not
    acknowledge what is.
    """
    idle, pause = max(1, round(silence / 2)), max(1, round(silence / 6))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": idle, "TCP_KEEPINTVL": pause, "TCP_KEEPCNT": 3}
    options["TCP_USER_TIMEOUT"] = round(1000 * silence)
    for name, value in options.items():
        option = getattr(socket, name, None)
        if option is not None:  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
