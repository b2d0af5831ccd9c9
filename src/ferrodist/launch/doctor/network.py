# SPDX-License-Identifier: MIT OR Apache-2.0
"""The network: this host's interfaces, the names it knows, its ports.

ferrodist never asks for this host's own name. Gloo and MPI do, and a name that leads to loopback is
why their ranks wait for each other on two hosts.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ferrodist.config import variable
from ferrodist.launch.doctor.report import CheckContext, Diagnostic, fail, note, ok, start, warn
from ferrodist.launch.machine import count_of_ranks
from ferrodist.rendezvous.interfaces import (
    Interface,
    choose_address,
    is_loopback,
    list_interfaces,
    matches,
    name_of,
    source_address,
    who_listens,
)
from ferrodist.rendezvous.job import Endpoint

Listing = Callable[[], Sequence[Interface]]
Resolve = Callable[[str], list[str]]


_LIMIT = 5.0  # seconds that a name server is given
_SLOW = 1.0
_EPHEMERAL = "proc/sys/net/ipv4/ip_local_port_range"
_MOST_TRIED = 512  # of a range; each costs a system call or two
_MOST_SHOWN = 3
_PATIENCE = 3.0  # seconds until a port that does not answer counts as closed off


def check_interfaces(
    context: CheckContext, listing: Listing = list_interfaces
) -> Iterator[Diagnostic]:
    known = listing()
    names = dict.fromkeys(one.name for one in known)
    parts = [
        f"{name} {', '.join(one.address for one in known if one.name == name)}" for name in names
    ]
    yield ok("; ".join(parts) or "none is up")
    if all(one.is_loopback for one in known):
        yield warn(
            "there is only loopback: no other host can reach this one",
            "nothing to do on one host; otherwise bring an interface up ('ip link', 'ip addr'), or "
            "start the container with a network",
        )
    yield from _choice(context, known)
    if context.towards is not None:
        addresses = ask(context.towards, addresses_of).addresses
        good = next(filter(has_route, addresses), None)
        if good is not None:
            yield _use(context, context.towards, good, known)
        elif addresses:  # if the name is unknown, the check of names says so
            yield fail(
                f"no route leads to {context.towards} ({', '.join(addresses)})",
                "check the address, that an interface is up, and 'ip route'",
            )


def _choice(context: CheckContext, known: Sequence[Interface]) -> Iterator[Diagnostic]:
    pattern = context.config.socket_ifname
    if not pattern:
        return
    shown = f"{variable('socket_ifname')}={pattern}"
    chosen = [one for one in known if matches(pattern, one.name)]
    if not chosen:
        yield fail(
            f"{shown} matches no interface that is up",
            "write eth0,ib for all that begin so, =eth0 for this one, ^docker,lo for all but "
            "these; empty is the one that routes to rank 0",
        )
    elif all(one.is_loopback for one in chosen):
        yield warn(
            f"{shown} selects loopback alone", "right on one host; no other host can connect there"
        )
    else:
        yield ok(f"{shown} selects {', '.join(map(str, chosen))}")


def _use(
    context: CheckContext, towards: str, address: str, known: Sequence[Interface]
) -> Diagnostic:
    source = source_address(address)
    name = name_of(source, known)
    pattern = context.config.socket_ifname
    if matches(pattern, name) or not any(matches(pattern, one.name) for one in known):
        return ok(f"the way to {towards} is {name} ({source})")
    used = " ".join(choose_address(pattern, address))
    return warn(
        f"the way to {towards} is {name} ({source}), which {variable('socket_ifname')}={pattern} "
        f"leaves out: ranks use {used}",
        "right if that interface reaches the other hosts, too; if not, unset the variable",
    )


class Answer(NamedTuple):
    """What came of asking for a name: its addresses, or why there are none."""

    addresses: list[str]
    seconds: float
    error: str = ""


def check_names(
    context: CheckContext, resolve: Resolve | None = None, own_name: str | None = None
) -> Iterator[Diagnostic]:
    resolve = resolve or addresses_of
    name = socket.gethostname() if own_name is None else own_name
    yield from _own_name(context, name, ask(name, resolve))
    answer = ask("localhost", resolve)
    if answer.error or not all(map(is_loopback, answer.addresses)):
        yield fail(
            f"'localhost' is {', '.join(answer.addresses) or answer.error}",
            "add a line '127.0.0.1 localhost' to /etc/hosts",
        )
    for host in _others(context):
        yield from _other(context, host, ask(host, resolve))


def addresses_of(name: str) -> list[str]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]) for one in found))


def ask(name: str, resolve: Resolve, limit: float = _LIMIT) -> Answer:
    """Ask for a name, and take the time; after the limit no answer is waited for."""
    begin = time.monotonic()
    question = start(resolve, name)
    try:
        addresses, error = question.result(limit), ""
    except TimeoutError:
        addresses, error = [], f"no answer within {limit:g} s"
    except (OSError, UnicodeError) as failure:  # UnicodeError: a label that is too long
        addresses, error = [], getattr(failure, "strerror", None) or str(failure)
    return Answer(addresses, time.monotonic() - begin, error)


def _own_name(context: CheckContext, name: str, answer: Answer) -> Iterator[Diagnostic]:
    if answer.error:
        yield warn(
            f"this host's name {name!r} does not resolve: {answer.error}",
            f"add a line '<address> {name}' to /etc/hosts; ferrodist does not need it, Gloo and "
            "MPI do",
        )
        return
    if any(map(is_loopback, answer.addresses)):
        yield _leads_to_loopback(context, name, answer)
    else:
        yield ok(f"this host is {name!r}: {', '.join(answer.addresses)}")
    yield from _slowness(name, answer)


def _leads_to_loopback(context: CheckContext, name: str, answer: Answer) -> Diagnostic:
    what = f"this host's name {name!r} leads to {', '.join(answer.addresses)}, which is loopback"
    if context.towards is None or is_loopback(context.towards):
        return note(
            what, "nothing to do on one host; between hosts it leads Gloo astray, not ferrodist"
        )
    return warn(
        what,
        "ferrodist does not use it, but Gloo listens there and no other host gets through: set "
        f"GLOO_SOCKET_IFNAME to the interface, or give {name} its real address in /etc/hosts",
    )


def _slowness(name: str, answer: Answer) -> Iterator[Diagnostic]:
    if answer.seconds > _SLOW:
        yield warn(
            f"diagnostic {name!r} took {answer.seconds:.1f} s",
            "a name server in /etc/resolv.conf does not answer: take it out, or put the names of "
            "all hosts into /etc/hosts",
        )


def _others(context: CheckContext) -> list[str]:
    given = [one.host for one in (context.endpoint, context.peer) if one is not None]
    return [host for host in dict.fromkeys(given) if host != "localhost"]


def _other(context: CheckContext, host: str, answer: Answer) -> Iterator[Diagnostic]:
    if answer.error:
        yield fail(
            f"{host!r} cannot be found: {answer.error}",
            "check the spelling, add it to /etc/hosts, or use its address",
        )
        return
    if answer.addresses != [host]:
        yield ok(f"{host!r} is {', '.join(answer.addresses)}")
    yield from _slowness(host, answer)
    good = next(filter(has_route, answer.addresses), answer.addresses[0])
    if good != answer.addresses[0]:
        yield warn(
            f"{host!r} is {answer.addresses[0]} first, and no route leads there",
            f"programs that try only the first address wait in vain: use {good}, not the name",
        )
    is_ours = all(map(is_loopback, answer.addresses))
    if is_ours and context.endpoint is not None and host == context.endpoint.host:
        yield note(
            f"the endpoint {host!r} is loopback",
            "right on one host; ranks on others would look for rank 0 on themselves: use an "
            "address of this host",
        )


def has_route(address: str) -> bool:
    """Tell whether this host knows a way to an address; nothing is sent."""
    try:
        source_address(address)
    except OSError:
        return False
    return True


def check_ports(context: CheckContext) -> Iterator[Diagnostic]:
    numbers = (context.try_read(_EPHEMERAL) or "").split()
    taken_by_kernel = range(int(numbers[0]), int(numbers[1]) + 1) if len(numbers) == 2 else range(0)
    if taken_by_kernel:
        first, last = taken_by_kernel[0], taken_by_kernel[-1]
        yield ok(f"outgoing connections get ports {first}-{last}")
    yield from _range(context, taken_by_kernel)
    if context.endpoint is not None:
        yield from _endpoint(context, context.endpoint, taken_by_kernel)


def refusal(port: int) -> OSError | None:
    """Try to take a port for a moment; return why that is not possible, None if it is."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as listeners of ranks do
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            return error
    return None


def _range(context: CheckContext, taken_by_kernel: range) -> Iterator[Diagnostic]:
    first, last = context.config.ports
    if first == 0:
        return
    name = f"{variable('ports')}={first}" + ("" if first == last else f"-{last}")
    tried = range(first, min(last, first + _MOST_TRIED - 1) + 1)
    refused = {port: error for port in tried if (error := refusal(port)) is not None}
    num_free = len(tried) - len(refused)
    state = f"{name}: {num_free} of {len(tried)} free"
    need = f"one per rank is needed, for {count_of_ranks(context.num_ranks)}"
    if last - first + 1 < context.num_ranks:
        yield fail(f"{name} is too narrow: {need}", f"set {variable('ports')} to a wider range")
    elif num_free < min(context.num_ranks, len(tried)):
        yield fail(
            f"{state}; {need}{_who(refused)}",
            f"end what has them, or set {variable('ports')} to another range",
        )
    elif refused:
        yield note(f"{state}{_who(refused)}")
    else:
        yield ok(f"{name}: free")
    if first in taken_by_kernel or last in taken_by_kernel:
        yield note(
            f"{name} is among those that outgoing connections get",
            f"any program may have one by chance: take ports below {taken_by_kernel[0]}",
        )


def _who(refused: dict[int, OSError]) -> str:
    if not refused:
        return ""
    shown = [f"{port} {_why(port, refused[port])}" for port in [*refused][:_MOST_SHOWN]]
    more = len(refused) - len(shown)
    return f"; {', '.join(shown)}{f' and {more} more' if more else ''}"


def _why(port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"is taken by {who_listens(port) or 'a process that cannot be seen from here'}"
    return f"is refused ({error.strerror})"


def _endpoint(
    context: CheckContext, endpoint: Endpoint, taken_by_kernel: range
) -> Iterator[Diagnostic]:
    answer = ask(endpoint.host, addresses_of)
    if answer.error:
        return  # the check of names says so
    if all(map(_is_here, answer.addresses)):
        yield _own_port(context, endpoint)
        if endpoint.port in taken_by_kernel:
            yield note(
                f"port {endpoint.port} of the endpoint is among those that outgoing connections "
                "get",
                f"any program may have it by chance: take one below {taken_by_kernel[0]}",
            )
    elif any(map(has_route, answer.addresses)):  # if not, the check of interfaces says so
        yield _others_port(endpoint, answer.addresses)


def _is_here(address: str) -> bool:
    return is_loopback(address) or address in {one.address for one in list_interfaces()}


def _own_port(context: CheckContext, endpoint: Endpoint) -> Diagnostic:
    error = refusal(endpoint.port)
    if error is None:
        return ok(f"port {endpoint.port} of the endpoint {endpoint} is free")
    what = f"port {endpoint.port} of {endpoint} {_why(endpoint.port, error)}"
    if context.environ.get("TORCHELASTIC_RUN_ID"):
        return note(what, "as it should be if that is torchrun's agent")
    if error.errno == errno.EACCES:
        return fail(what, f"take a port above 1023, not {endpoint.port}")
    return fail(
        what, "if that is not the job's own rank 0, end it or choose another port for all ranks"
    )


def _others_port(endpoint: Endpoint, addresses: list[str]) -> Diagnostic:
    """Judge the port of an endpoint on another host by connecting to it, and saying nothing."""
    reasons = []
    for address in addresses:
        begin = time.monotonic()
        error = try_connect(address, endpoint.port)
        if error is None:
            milliseconds = (time.monotonic() - begin) * 1000
            return ok(f"{endpoint} answers at {address} in {milliseconds:.1f} ms")
        reasons.append((address, error))
    if any(error.errno == errno.ECONNREFUSED for _, error in reasons):
        return note(
            f"{endpoint} is reached, but nobody listens there now",
            "right before the job starts; if rank 0 runs already, it listens at another port",
        )
    why = ", ".join(f"{address}: {error.strerror or error}" for address, error in reasons)
    return fail(
        f"{endpoint} does not answer ({why})",
        "a firewall drops it, or the host is down: open the port there, and look at both ways "
        "with 'ferrodist doctor --listen PORT' on that host",
    )


def try_connect(address: str, port: int) -> OSError | None:
    """Connect for a moment, saying nothing; return why that is not possible, None if it is."""
    try:
        socket.create_connection((address, port), timeout=_PATIENCE).close()
    except TimeoutError:
        return OSError(errno.ETIMEDOUT, f"no answer within {_PATIENCE:g} s")
    except OSError as error:
        return error if error.errno else OSError(errno.EIO, os.strerror(errno.EIO))
    return None
