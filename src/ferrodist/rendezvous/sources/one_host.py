# SPDX-License-Identifier: MIT OR Apache-2.0
"""check_one_host: refuse jobs that are on several hosts, or too large for one."""

from __future__ import annotations

import socket

from ferrodist.errors import InvalidWorldSize, RendezvousError
from ferrodist.rendezvous.launch import brief
from ferrodist.rendezvous.sources.place import Place

_MOST_RANKS = 4096  # each of them then needs 0.4 GiB of shared memory before it sends anything


def check_one_host(place: Place) -> None:
    """Refuse a place in a job that one host does not hold."""
    if place.world_size == 1:
        return
    elsewhere = place.several_hosts
    if place.master_address is not None and not _is_here(place.master_address, place):
        elsewhere = f"MASTER_ADDR={brief(place.master_address)} is not an address of this host"
    if elsewhere:
        raise RendezvousError(
            f"the {place.world_size} ranks of job {place.job!r} are on several hosts "
            f"({place.source.name}: {elsewhere}). That needs the TCP backend, which this version "
            "does not have: start all ranks on one host",
            this_rank=place.rank,
            world_size=place.world_size,
        )
    if place.world_size > _MOST_RANKS:
        raise InvalidWorldSize(
            f"{place.source.world_size}={place.world_size} ({place.source.name}): one host holds "
            f"at most {_MOST_RANKS} ranks",
            this_rank=place.rank,
            world_size=place.world_size,
        )


def _is_here(address: str, place: Place) -> bool:
    """Tell whether an address is this host's, by taking a port there for a moment."""
    is_bracketed = address.startswith("[") and address.endswith("]")  # as in [::1]:29500
    host = address[1:-1] if is_bracketed else address
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise RendezvousError(
            f"MASTER_ADDR={brief(address)} ({place.source.name}) cannot be resolved: "
            f"{brief(str(error))}; set it to 127.0.0.1, or to what this host is called",
            this_rank=place.rank,
        ) from error
    return any(_can_bind(family, where) for family, _, _, _, where in found)


def _can_bind(family: int, where: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True
