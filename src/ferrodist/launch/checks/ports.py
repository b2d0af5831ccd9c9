# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ports: which the kernel gives away, whether ours are free, and who has them if not."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator

from ferrodist.config import variable
from ferrodist.launch.checks.finding import Finding, Subject
from ferrodist.launch.checks.names import addresses_of, ask, has_route
from ferrodist.launch.checks.situation import Situation
from ferrodist.launch.demo_report import count_of_ranks
from ferrodist.rendezvous.interfaces import is_loopback, list_interfaces
from ferrodist.rendezvous.launch import Endpoint
from ferrodist.rendezvous.port_owner import who_listens

about = Subject("ports")

_EPHEMERAL = "proc/sys/net/ipv4/ip_local_port_range"
_MOST_TRIED = 512  # of a range; each costs a system call or two
_MOST_SHOWN = 3
_PATIENCE = 3.0  # seconds until a port that does not answer counts as closed off


def check(situation: Situation) -> Iterator[Finding]:
    """Look at the kernel's range, at the range of FERRODIST_PORTS and at the endpoint."""
    taken_by_kernel = _ephemeral(situation)
    if taken_by_kernel:
        first, last = taken_by_kernel[0], taken_by_kernel[-1]
        yield about.ok(f"outgoing connections get ports {first}-{last}")
    yield from _range(situation, taken_by_kernel)
    if situation.endpoint is not None:
        yield from _endpoint(situation, situation.endpoint, taken_by_kernel)


def _ephemeral(situation: Situation) -> range:
    """Return the ports that the kernel gives to outgoing connections."""
    numbers = (situation.try_read(_EPHEMERAL) or "").split()
    return range(int(numbers[0]), int(numbers[1]) + 1) if len(numbers) == 2 else range(0)


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


def _range(situation: Situation, taken_by_kernel: range) -> Iterator[Finding]:
    first, last = situation.config.ports
    if first == 0:
        return
    name = f"{variable('ports')}={first}" + ("" if first == last else f"-{last}")
    tried = range(first, min(last, first + _MOST_TRIED - 1) + 1)
    refused = {port: error for port in tried if (error := refusal(port)) is not None}
    num_free = len(tried) - len(refused)
    state = f"{name}: {num_free} of {len(tried)} free"
    need = f"one per rank is needed, for {count_of_ranks(situation.num_ranks)}"
    if last - first + 1 < situation.num_ranks:
        yield about.error(
            f"{name} is too narrow: {need}",
            f"set {variable('ports')} to a wider range",
        )
    elif num_free < min(situation.num_ranks, len(tried)):
        yield about.error(
            f"{state}; {need}{_who(refused)}",
            f"end what has them, or set {variable('ports')} to another range",
        )
    elif refused:
        yield about.note(f"{state}{_who(refused)}")
    else:
        yield about.ok(f"{name}: free")
    if first in taken_by_kernel or last in taken_by_kernel:
        yield about.note(
            f"{name} is among those that outgoing connections get",
            f"any program may have one by chance: take ports below {taken_by_kernel[0]}",
        )


def _who(refused: dict[int, OSError]) -> str:
    """Say who has some of these ports."""
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
    situation: Situation, endpoint: Endpoint, taken_by_kernel: range
) -> Iterator[Finding]:
    answer = ask(endpoint.host, addresses_of)
    if answer.error:
        return  # the check of names says so
    if all(map(_is_here, answer.addresses)):
        yield _own_port(situation, endpoint)
        if endpoint.port in taken_by_kernel:
            yield about.note(
                f"port {endpoint.port} of the endpoint is among those that outgoing connections "
                "get",
                f"any program may have it by chance: take one below {taken_by_kernel[0]}",
            )
    elif any(map(has_route, answer.addresses)):  # if not, the check of interfaces says so
        yield _others_port(endpoint, answer.addresses)


def _is_here(address: str) -> bool:
    return is_loopback(address) or address in {one.address for one in list_interfaces()}


def _own_port(situation: Situation, endpoint: Endpoint) -> Finding:
    """Judge the port of an endpoint that is to be on this host."""
    error = refusal(endpoint.port)
    if error is None:
        return about.ok(f"port {endpoint.port} of the endpoint {endpoint} is free")
    what = f"port {endpoint.port} of {endpoint} {_why(endpoint.port, error)}"
    if situation.environ.get("TORCHELASTIC_RUN_ID"):
        return about.note(what, "as it should be if that is torchrun's agent")
    if error.errno == errno.EACCES:
        return about.error(what, f"take a port above 1023, not {endpoint.port}")
    return about.error(
        what, "if that is not the job's own rank 0, end it or choose another port for all ranks"
    )


def _others_port(endpoint: Endpoint, addresses: list[str]) -> Finding:
    """Judge the port of an endpoint on another host by connecting to it, and saying nothing."""
    reasons = []
    for address in addresses:
        begin = time.monotonic()
        error = _connect(address, endpoint.port)
        if error is None:
            milliseconds = (time.monotonic() - begin) * 1000
            return about.ok(f"{endpoint} answers at {address} in {milliseconds:.1f} ms")
        reasons.append((address, error))
    if any(error.errno == errno.ECONNREFUSED for _, error in reasons):
        return about.note(
            f"{endpoint} is reached, but nobody listens there now",
            "right before the job starts; if rank 0 runs already, it listens at another port",
        )
    why = ", ".join(f"{address}: {error.strerror or error}" for address, error in reasons)
    return about.error(
        f"{endpoint} does not answer ({why})",
        "a firewall drops it, or the host is down: open the port there, and look at both ways "
        "with 'ferrodist doctor --listen PORT' on that host",
    )


def _connect(address: str, port: int) -> OSError | None:
    try:
        socket.create_connection((address, port), timeout=_PATIENCE).close()
    except TimeoutError:
        return OSError(errno.ETIMEDOUT, f"no answer within {_PATIENCE:g} s")
    except OSError as error:
        return error if error.errno else OSError(errno.EIO, os.strerror(errno.EIO))
    return None
