# SPDX-License-Identifier: MIT OR Apache-2.0
"""TcpPoint: where the ranks of several hosts meet, at an address and port of rank 0's host.

Nobody learns a user id or passes files here: the handshake alone says who is who. Rank 0 listens at
one address, never at all of them.
"""

from __future__ import annotations

import errno
import logging
import os
import socket

from ferrodist.config import Config, variable
from ferrodist.deadline import Deadline
from ferrodist.errors import RendezvousError
from ferrodist.rendezvous import tcp_socket
from ferrodist.rendezvous.interfaces import (
    choose_address,
    is_loopback,
    list_interfaces,
    matches,
    name_of,
)
from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.launch import Endpoint, brief
from ferrodist.rendezvous.link import LARGEST_VALUE
from ferrodist.rendezvous.port_owner import who_listens
from ferrodist.rendezvous.reception import Peer
from ferrodist.rendezvous.tcp_socket import Address, connect_to_any, open_listener_at, resolve

logger = logging.getLogger("ferrodist")

_ROUND_SECONDS = 5.0  # that one try to connect takes at most
_FIRST_PAUSE = 0.25  # seconds before a name that was not found is looked up again; it doubles
_LONGEST_PAUSE = 4.0


class TcpPoint:
    """The MeetingPoint of the ranks of several hosts; the name is resolved once."""

    longest_pause = 0.25  # not to flood the host of a rank 0 that has not started

    def __init__(self, job: Job, endpoint: Endpoint, config: Config, deadline: Deadline) -> None:
        self._job = job
        self._endpoint = endpoint
        self._config = config
        self._deadline = deadline
        self._addresses: list[Address] = []
        self._why = ""
        self._next_lookup = Deadline(0.0)
        self._pause = _FIRST_PAUSE
        self._towards = ""

    # -- rank 0 -----------------------------------------------------------------------------------

    def open_listener(self) -> socket.socket:
        """Listen at the endpoint's address, if it is one of this host's."""
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
            self._towards = address.host
            logger.info("listening at %s on %s, for all ranks", address, name_of(address.host))
            return listener
        raise self._not_here(addresses)

    def _candidates(self, addresses: list[Address]) -> list[Address]:
        """List where to listen, the best first."""
        pattern = self._config.socket_ifname
        if pattern:
            names = {one.address: one.name for one in list_interfaces()}
            known = [one for one in addresses if one.host in names]
            taken = [one for one in known if matches(pattern, names[one.host])]
            others = [] if taken else self._chosen()  # raises where the pattern takes none at all
            if not taken and known and self._is_address(known[0]):
                raise self._error(
                    f"rank 0 is to listen at {known[0].host}, which is on {names[known[0].host]}, "
                    f"and {variable('socket_ifname')}={brief(pattern)!r} does not take that "
                    "interface; change one of the two"
                )
            return taken or others
        if self._is_known_here_only(addresses):
            return self._chosen()
        return sorted(addresses, key=lambda address: is_loopback(address.host))

    def _is_address(self, address: Address) -> bool:
        """Tell whether the endpoint is an address itself, at which the others look for rank 0."""
        return self._endpoint.host == address.host

    def _is_known_here_only(self, addresses: list[Address]) -> bool:
        """Tell whether a name leads to loopback, as on its own host it may (127.0.1.1).

        From other hosts it leads to an address that they can reach.
        """
        is_name = not is_loopback(self._endpoint.host)
        return is_name and all(is_loopback(address.host) for address in addresses)

    def _chosen(self) -> list[Address]:
        _, host = choose_address(self._config.socket_ifname)
        return resolve(Endpoint(host, self._endpoint.port))

    def _cannot_listen(self, address: Address, error: OSError) -> RendezvousError:
        if error.errno != errno.EADDRINUSE:
            return self._error(f"rank 0 cannot listen at {address}: {error.strerror}")
        owner = who_listens(address.where[1])
        who = f"{owner} listens" if owner else "another process listens"
        return self._error(
            f"port {address.where[1]} is in use at {address.host}: {who} there, and rank 0 has to; "
            "end it if it is of an earlier job, or give this job another port"
        )

    def _not_here(self, addresses: list[Address]) -> RendezvousError:
        there = ", ".join(dict.fromkeys(address.host for address in addresses))
        known = ", ".join(map(str, list_interfaces()))
        return self._error(
            f"rank 0 cannot listen at {there}, which is not an address of this host; there are: "
            f"{known}. Start rank 0 on the host that the address is of; if it leads here by other "
            f"ways (NAT, a service), name the interface in {variable('socket_ifname')}"
        )

    # -- guests -----------------------------------------------------------------------------------

    def try_connect(self) -> socket.socket | None:
        """Connect to rank 0; None if it does not listen, or not yet."""
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
        self._towards = str(connection.getpeername()[0])
        return connection

    def _try_resolve(self) -> bool:
        """Look the name up; a host that has just been started may not be known yet."""
        if self._next_lookup.remaining() > 0:
            return False
        try:
            addresses = resolve(self._endpoint)
        except (OSError, UnicodeError) as error:
            if not self._why:
                logger.warning("%s cannot be resolved yet: %s", self._endpoint, error)
            self._why = f"it cannot be resolved: {brief(str(error))}"
            self._next_lookup = Deadline(self._pause)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            return False
        # If it leads to loopback rank 0 is on this host, and listens where others find it.
        is_here = self._is_known_here_only(addresses)
        self._addresses = [*(self._chosen() if is_here else []), *addresses]
        return True

    # -- both -------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Where rank 0 listens, in words."""
        why = f" ({self._why})" if self._why else ""
        return f"{self._endpoint}{why}"

    @property
    def towards(self) -> str:
        """The address of rank 0, when it listens or was reached."""
        return self._towards

    def where(self) -> str:
        """Complete the sentence 'whoever listens ...'."""
        return f" at {self._endpoint}"

    def identify(self, connection: socket.socket) -> Peer:
        """Say where the other end is, and set up this one."""
        tcp_socket.set_limits(connection, self._config.silence)
        # One message of the largest kind, and a failure after it, always fit.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * LARGEST_VALUE)
        return tcp_socket.identify(connection)

    def describe_self(self) -> str:
        """Say who this process is, as the others are named."""
        return f"pid {os.getpid()} on {socket.gethostname()}, {self._towards}"

    def _error(self, what: str) -> RendezvousError:
        return RendezvousError(
            f"job {self._job.name!r}, {self._endpoint} from {self._job.source.name}: {what}",
            rank=0,
            this_rank=self._job.rank,
            address=str(self._endpoint),
        )
