# SPDX-License-Identifier: MIT OR Apache-2.0
"""Names: what this host and the endpoint are called, how fast names are found, and where they lead.

ferrodist never asks for this host's own name. Gloo and MPI do, and a name that leads to loopback is
why their ranks wait for each other on two hosts.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ferrodist.launch.checks.background import start
from ferrodist.launch.checks.finding import Finding, Subject
from ferrodist.launch.checks.situation import Situation
from ferrodist.rendezvous.interfaces import is_loopback, source_address

about = Subject("names")

_LIMIT = 5.0  # seconds that a name server is given
_SLOW = 1.0

Resolve = Callable[[str], list[str]]


class Answer(NamedTuple):
    """What came of asking for a name: its addresses, or why there are none."""

    addresses: list[str]
    seconds: float
    error: str = ""


def check(
    situation: Situation, resolve: Resolve | None = None, own_name: str | None = None
) -> Iterator[Finding]:
    """Look at this host's name, at localhost and at the name of the endpoint."""
    resolve = resolve or addresses_of
    name = socket.gethostname() if own_name is None else own_name
    yield from _own_name(situation, name, ask(name, resolve))
    yield from _localhost(ask("localhost", resolve))
    for host in _others(situation):
        yield from _other(situation, host, ask(host, resolve))


def addresses_of(name: str) -> list[str]:
    """Return all addresses of a name, in the order in which programs try them."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]) for one in found))


def ask(name: str, resolve: Resolve, limit: float = _LIMIT) -> Answer:
    """Ask for a name, and take the time; whoever does not answer is not waited for."""
    begin = time.monotonic()
    question = start(resolve, name)
    try:
        addresses, error = question.result(limit), ""
    except TimeoutError:
        addresses, error = [], f"no answer within {limit:g} s"
    except (OSError, UnicodeError) as failure:  # UnicodeError: a label that is too long
        addresses, error = [], getattr(failure, "strerror", None) or str(failure)
    return Answer(addresses, time.monotonic() - begin, error)


def _own_name(situation: Situation, name: str, answer: Answer) -> Iterator[Finding]:
    if answer.error:
        yield about.warning(
            f"this host's name {name!r} does not resolve: {answer.error}",
            f"add a line '<address> {name}' to /etc/hosts; ferrodist does not need it, Gloo and "
            "MPI do",
        )
        return
    if any(map(is_loopback, answer.addresses)):
        yield _leads_to_loopback(situation, name, answer)
    else:
        yield about.ok(f"this host is {name!r}: {', '.join(answer.addresses)}")
    yield from _slowness(name, answer)


def _leads_to_loopback(situation: Situation, name: str, answer: Answer) -> Finding:
    what = f"this host's name {name!r} leads to {', '.join(answer.addresses)}, which is loopback"
    if situation.towards is None or is_loopback(situation.towards):
        return about.note(
            what, "nothing to do on one host; between hosts it leads Gloo astray, not ferrodist"
        )
    return about.warning(
        what,
        "ferrodist does not use it, but Gloo listens there and no other host gets through: set "
        f"GLOO_SOCKET_IFNAME to the interface, or give {name} its real address in /etc/hosts",
    )


def _slowness(name: str, answer: Answer) -> Iterator[Finding]:
    if answer.seconds > _SLOW:
        yield about.warning(
            f"finding {name!r} took {answer.seconds:.1f} s",
            "a name server in /etc/resolv.conf does not answer: take it out, or put the names of "
            "all hosts into /etc/hosts",
        )


def _localhost(answer: Answer) -> Iterator[Finding]:
    if answer.error or not all(map(is_loopback, answer.addresses)):
        yield about.error(
            f"'localhost' is {', '.join(answer.addresses) or answer.error}",
            "add a line '127.0.0.1 localhost' to /etc/hosts",
        )


def _others(situation: Situation) -> list[str]:
    """Name the hosts that were asked for; localhost has been looked at."""
    given = [one.host for one in (situation.endpoint, situation.peer) if one is not None]
    return [host for host in dict.fromkeys(given) if host != "localhost"]


def _other(situation: Situation, host: str, answer: Answer) -> Iterator[Finding]:
    if answer.error:
        yield about.error(
            f"{host!r} cannot be found: {answer.error}",
            "check the spelling, add it to /etc/hosts, or use its address",
        )
        return
    if answer.addresses != [host]:
        yield about.ok(f"{host!r} is {', '.join(answer.addresses)}")
    yield from _slowness(host, answer)
    yield from _unreachable(host, answer.addresses)
    is_ours = all(map(is_loopback, answer.addresses))
    if is_ours and situation.endpoint is not None and host == situation.endpoint.host:
        yield about.note(
            f"the endpoint {host!r} is loopback",
            "right on one host; ranks on others would look for rank 0 on themselves: use an "
            "address of this host",
        )


def _unreachable(host: str, addresses: list[str]) -> Iterator[Finding]:
    """Find a first address that no route leads to; if none has one, the interfaces say so."""
    good = next(filter(has_route, addresses), addresses[0])
    if good != addresses[0]:
        yield about.warning(
            f"{host!r} is {addresses[0]} first, and no route leads there",
            f"programs that try only the first address wait in vain: use {good}, not the name",
        )


def has_route(address: str) -> bool:
    """Tell whether this host knows a way to an address; nothing is sent."""
    try:
        source_address(address)
    except OSError:
        return False
    return True
