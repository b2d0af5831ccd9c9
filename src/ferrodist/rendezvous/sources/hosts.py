# SPDX-License-Identifier: MIT OR Apache-2.0
"""show_hosts: whether the ranks of a job are on several hosts, as seen from one of them.

Launchers that count the ranks of a host say it, and say the same to all. Variables set by hand may
not; then the address of rank 0 decides:

- loopback: one host, on every rank;
- an address of another host: several;
- an address of this very host: nobody can tell. The ranks on this host see what they would see if
  they were all; those on other hosts, if there are any, see several. So what counts is whether the
  job has a secret file: with one the ranks meet at the address, which is right in both cases;
  without one they meet on this host, and ranks on other hosts are told to make one.

So all ranks come to the same answer if all or none of them have the secret file, and if the
address is the same on all. Otherwise they wait for each other at two places, and the join timeout
names the ranks that did not come to rank 0's.
"""

from __future__ import annotations

import socket

from ferrodist.errors import InvalidArgument, InvalidWorldSize, RendezvousError
from ferrodist.rendezvous.interfaces import is_loopback
from ferrodist.rendezvous.job import Through
from ferrodist.rendezvous.launch import brief
from ferrodist.rendezvous.sources.place import MASTER_ADDRESS, MASTER_PORT, Place

_MOST_RANKS = 4096  # each of them then needs 0.4 GiB of shared memory before it sends anything


def show_hosts(place: Place, *, has_secret: bool) -> str:
    """Show that a job is on several hosts; '' if it is on this one.

    Raises InvalidWorldSize for one that this host does not hold, InvalidArgument for one on several
    whose rank 0 has no port.
    """
    hosts = "" if place.world_size == 1 else _hosts(place, has_secret)
    if hosts:
        _check_port(place, hosts)
    elif place.world_size > _MOST_RANKS:
        raise InvalidWorldSize(
            f"{place.source.world_size}={place.world_size} ({place.source.name}): one host holds "
            f"at most {_MOST_RANKS} ranks",
            this_rank=place.rank,
            world_size=place.world_size,
        )
    return hosts


def _hosts(place: Place, has_secret: bool) -> str:
    if place.several_hosts or place.is_host_told or place.endpoint is None:
        return place.several_hosts or ""
    host = place.endpoint.host
    if is_loopback(host):
        return ""
    try:
        is_here = _is_here(host)
    except (OSError, UnicodeError) as error:
        if has_secret:
            return f"{MASTER_ADDRESS}={brief(host)} is not known to this host yet"
        raise RendezvousError(
            f"{MASTER_ADDRESS}={brief(host)} ({place.source.name}) cannot be resolved: "
            f"{brief(str(error))}; set it to 127.0.0.1, or to what this host is called",
            this_rank=place.rank,
        ) from error
    if not is_here:
        return f"{MASTER_ADDRESS}={brief(host)} is not an address of this host"
    return f"{MASTER_ADDRESS}={brief(host)}, and a secret file" if has_secret else ""


def _is_here(host: str) -> bool:
    """Tell whether an address is this host's, by taking a port there for a moment."""
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    return any(_can_bind(family, where) for family, _, _, _, where in found)


def _can_bind(family: int, where: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True


def _check_port(place: Place, hosts: str) -> None:
    endpoint = place.endpoint
    if endpoint is None or place.through is not Through.SOCKETS or 0 < endpoint.port < 1 << 16:
        return
    raise InvalidArgument(
        f"{MASTER_PORT} ({place.source.name}): expected a port from 1 to 65535, for the ranks of "
        f"job {place.job!r} are on several hosts ({hosts})"
    )
