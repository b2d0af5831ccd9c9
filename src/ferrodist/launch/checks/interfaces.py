# SPDX-License-Identifier: MIT OR Apache-2.0
"""Interfaces: which addresses this host has, and which of them other hosts would be told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ferrodist.config import variable
from ferrodist.launch.checks.finding import Finding, Subject
from ferrodist.launch.checks.names import addresses_of, ask, has_route
from ferrodist.launch.checks.situation import Situation
from ferrodist.rendezvous.interfaces import (
    Interface,
    choose_address,
    list_interfaces,
    matches,
    name_of,
    source_address,
)

about = Subject("interfaces")

Listing = Callable[[], Sequence[Interface]]


def check(situation: Situation, listing: Listing = list_interfaces) -> Iterator[Finding]:
    """Look at the interfaces, at the way to the endpoint, and at FERRODIST_SOCKET_IFNAME."""
    known = listing()
    yield from _overview(known)
    yield from _choice(situation, known)
    if situation.towards is not None:
        yield from _way(situation, situation.towards, known)


def _overview(known: Sequence[Interface]) -> Iterator[Finding]:
    names = dict.fromkeys(one.name for one in known)
    parts = [
        f"{name} {', '.join(one.address for one in known if one.name == name)}" for name in names
    ]
    yield about.ok("; ".join(parts) or "none is up")
    if all(one.is_loopback for one in known):
        yield about.warning(
            "there is only loopback: no other host can reach this one",
            "nothing to do on one host; otherwise bring an interface up ('ip link', 'ip addr'), or "
            "start the container with a network",
        )


def _choice(situation: Situation, known: Sequence[Interface]) -> Iterator[Finding]:
    pattern = situation.config.socket_ifname
    if not pattern:
        return
    shown = f"{variable('socket_ifname')}={pattern}"
    chosen = [one for one in known if matches(pattern, one.name)]
    if not chosen:
        yield about.error(
            f"{shown} matches no interface that is up",
            "write eth0,ib for all that begin so, =eth0 for this one, ^docker,lo for all but "
            "these; empty is the one that routes to rank 0",
        )
    elif all(one.is_loopback for one in chosen):
        yield about.warning(
            f"{shown} selects loopback alone", "right on one host; no other host can connect there"
        )
    else:
        yield about.ok(f"{shown} selects {', '.join(map(str, chosen))}")


def _way(situation: Situation, towards: str, known: Sequence[Interface]) -> Iterator[Finding]:
    """Say which way leads to the endpoint or the peer."""
    addresses = ask(towards, addresses_of).addresses
    good = next(filter(has_route, addresses), None)
    if good is not None:
        yield _use(situation, towards, good, known)
    elif addresses:  # if the name is unknown, the check of names says so
        yield about.error(
            f"no route leads to {towards} ({', '.join(addresses)})",
            "check the address, that an interface is up, and 'ip route'",
        )


def _use(situation: Situation, towards: str, address: str, known: Sequence[Interface]) -> Finding:
    """Say whether ranks would take the way there is."""
    source = source_address(address)
    name = name_of(source, known)
    pattern = situation.config.socket_ifname
    if matches(pattern, name) or not any(matches(pattern, one.name) for one in known):
        return about.ok(f"the way to {towards} is {name} ({source})")
    used = " ".join(choose_address(pattern, address))
    return about.warning(
        f"the way to {towards} is {name} ({source}), which {variable('socket_ifname')}={pattern} "
        f"leaves out: ranks use {used}",
        "right if that interface reaches the other hosts, too; if not, unset the variable",
    )
