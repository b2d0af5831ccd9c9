# SPDX-License-Identifier: MIT OR Apache-2.0
"""Network interfaces: which addresses this host has, and at which of them other hosts find it.

No name of this host is resolved for that: it may lead to loopback, or to another network. What
counts is the address that the kernel would send from. ``who_listens`` names the owner of a port.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ferrodist.config import variable
from ferrodist.errors import RendezvousError

_SIOCGIFCONF = 0x8912
_MAX_ADDRESSES = 1024
_REQUEST = struct.Struct("16s2xH4s16x" if struct.calcsize("P") == 8 else "16s2xH4s8x")
_IPV6_TABLE = Path("/proc/net/if_inet6")
# Addresses that nobody has (RFC 5737, RFC 3849): what is sent there takes the default route.
_ELSEWHERE = ("198.51.100.1", "2001:db8::1")
_LINK_LOCAL = "fe80:"
_NAMES_OF_LOOPBACK = ("localhost", "localhost.localdomain", "ip6-localhost")
_ANY_PORT = 9  # nothing is sent
_TCP_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTENS = "0A"


class Interface(NamedTuple):
    """One address of a network interface, which may have several."""

    name: str
    address: str
    family: socket.AddressFamily
    is_loopback: bool

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


def list_interfaces() -> list[Interface]:
    return [*_list_ipv4(), *_list_ipv6()]


def matches(pattern: str, name: str) -> bool:
    """Tell whether a pattern as in NCCL_SOCKET_IFNAME matches an interface.

    It is a comma-separated list of prefixes. ``=`` before the list asks for whole names, ``^`` for
    all but these, ``^=`` for both. An empty pattern matches all.
    """
    is_excluding = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    is_exact = pattern.startswith("=")
    words = [word.strip() for word in pattern.removeprefix("=").split(",") if word.strip()]
    if not words:
        return True
    is_in_list = name in words if is_exact else name.startswith(tuple(words))
    return is_in_list != is_excluding


def is_loopback(host: str) -> bool:
    """Tell whether an address, or the name localhost, only reaches this host itself."""
    for family, start in ((socket.AF_INET, b"\x7f"), (socket.AF_INET6, bytes(15) + b"\1")):
        try:
            return socket.inet_pton(family, host.partition("%")[0]).startswith(start)
        except (OSError, ValueError):
            continue
    return host.lower() in _NAMES_OF_LOOPBACK or host.lower().endswith(".localhost")


def source_address(towards: str) -> str:
    """Return the address of this host from which it reaches another; nothing is sent.

    Raises OSError if the name cannot be resolved, or no route leads there.
    """
    error: OSError = OSError(f"{towards} has no address")
    for family, _, _, _, where in socket.getaddrinfo(towards, _ANY_PORT, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(where)
            except OSError as found:
                error = found
                continue
            return str(probe.getsockname()[0])
    raise error


def choose_address(pattern: str, towards: str = "") -> tuple[str, str]:
    """Choose where other ranks find this one: the name of an interface, and its address.

    It is the address that routes to ``towards``, which is rank 0's. Where that is this very host
    under a name that is only known here (127.0.1.1), or nothing is known about rank 0, it is the
    one of the default route. With a pattern, it is that of an interface which matches.
    """
    known = list_interfaces()
    candidates = [one for one in known if matches(pattern, one.name)]
    if pattern and not candidates:
        there = ", ".join(map(str, known)) or "none that is up"
        raise RendezvousError(
            f"{variable('socket_ifname')}={pattern!r} matches no network interface of this host; "
            f"there are: {there}",
            got=pattern,
        )
    wanted = _try_source(towards)
    if pattern:
        chosen = _best(candidates, wanted, towards)
        return chosen.name, chosen.address
    address = wanted or (_best(candidates, None, towards).address if candidates else "127.0.0.1")
    return name_of(address, known), address


def name_of(address: str, known: Sequence[Interface] | None = None) -> str:
    interfaces = list_interfaces() if known is None else known
    plain = address.partition("%")[0]
    found = (one.name for one in interfaces if one.address.partition("%")[0] == plain)
    return next(found, "lo" if is_loopback(address) else "?")


def _try_source(towards: str) -> str | None:
    """Return the address that routes to rank 0, or to hosts elsewhere; None if there is none."""
    candidates = [towards] if towards else []
    if not is_loopback(towards):
        candidates += [one for one in _ELSEWHERE if ":" in one or ":" not in towards]
    found = []
    for candidate in candidates:
        try:
            found.append(source_address(candidate))
        except OSError:
            continue
        is_useful = not (is_loopback(found[-1]) or found[-1].startswith(_LINK_LOCAL))
        if is_loopback(towards) or is_useful:
            return found[-1]
    return found[0] if found else None


def _best(candidates: Sequence[Interface], wanted: str | None, towards: str) -> Interface:
    family = socket.AF_INET6 if ":" in (wanted or towards) else socket.AF_INET

    def penalty(one: Interface) -> tuple[bool, ...]:
        is_link_local = one.address.startswith(_LINK_LOCAL)
        return one.address != wanted, one.is_loopback, is_link_local, one.family != family

    return min(candidates, key=penalty)


def _list_ipv4() -> list[Interface]:
    """Ask the kernel; on systems without this ioctl there is only loopback."""
    buffer = array.array("B", bytes(_REQUEST.size * _MAX_ADDRESSES))
    where, _ = buffer.buffer_info()
    request = struct.pack("iP", len(buffer), where)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFCONF, request)
        except OSError:
            return [Interface("lo", "127.0.0.1", socket.AF_INET, is_loopback=True)]
    nbytes, _ = struct.unpack("iP", answer)
    found = []
    for name, _, packed in _REQUEST.iter_unpack(buffer.tobytes()[:nbytes]):
        # A second address may have a label: eth0:1 is eth0.
        label = name.partition(b"\0")[0].decode(errors="replace").partition(":")[0]
        address = socket.inet_ntop(socket.AF_INET, packed)
        found.append(Interface(label, address, socket.AF_INET, is_loopback(address)))
    return found


def _list_ipv6() -> list[Interface]:
    try:
        lines = _IPV6_TABLE.read_text().splitlines()
    except OSError:
        return []  # no IPv6 here
    found = []
    for line in lines:
        digits, *_, name = line.split()
        address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
        if address.startswith(_LINK_LOCAL):
            address = f"{address}%{name}"  # it means nothing without the interface
        found.append(Interface(name, address, socket.AF_INET6, is_loopback(address)))
    return found


# -- who listens at a port ------------------------------------------------------------------------


def who_listens(port: int) -> str | None:
    """Name the process that listens at a port: pid and command; None if it is not visible."""
    sockets = {f"socket:[{inode}]" for table in _TCP_TABLES for inode in _listeners(table, port)}
    if not sockets:
        return None
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _has_one_of(process, sockets):
            return f"pid {process.name} ({_command(process)})"
    return None


def _listeners(table: str, port: int) -> list[str]:
    try:
        lines = Path(table).read_text().splitlines()[1:]
    except OSError:
        return []
    fields = [line.split() for line in lines]
    ending = f":{port:04X}"
    return [one[9] for one in fields if one[3] == _LISTENS and one[1].endswith(ending)]


def _has_one_of(process: Path, sockets: set[str]) -> bool:
    try:
        files = os.listdir(process / "fd")
    except OSError:
        return False  # of another user, or gone
    for file in files:
        try:
            if os.readlink(process / "fd" / file) in sockets:
                return True
        except OSError:
            continue
    return False


def _command(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    text = b" ".join(words).decode(errors="replace").strip()
    return text if len(text) <= 80 else f"{text[:80]}..."
