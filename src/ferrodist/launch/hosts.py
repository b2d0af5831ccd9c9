# SPDX-License-Identifier: MIT OR Apache-2.0
"""Hosts: which ones a job is to run on, and how many ranks each of them has."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ferrodist.errors import InvalidArgument
from ferrodist.rendezvous.launch import number

_IGNORED = ("max_slots", "max-slots")  # of mpirun: how far it may go beyond the slots


class Host(NamedTuple):
    """A host as ssh knows it, and how many ranks it is to have, if that is said with it."""

    name: str
    slots: int | None = None

    @property
    def address(self) -> str:
        """The name without the user, as other hosts may know it."""
        return self.name.rpartition("@")[2]

    @property
    def is_loopback(self) -> bool:
        """True if every host calls itself so."""
        try:
            return ipaddress.ip_address(self.address).is_loopback
        except ValueError:
            return self.address.lower() in ("localhost", "localhost.localdomain", "ip6-localhost")


def parse_hosts(text: str) -> list[Host]:
    """Read hosts by commas, ``a,user@b:2,[fe80::1]:4``; the numbers are slots."""
    return _checked([_parse_host(word.strip()) for word in text.split(",")])


def read_hostfile(path: Path) -> list[Host]:
    """Read a file as mpirun's: a host per line, ``b slots=2``, and comments after ``#``."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}") from error
    hosts = []
    for line_number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            try:
                hosts.append(_parse_line(words))
            except InvalidArgument as error:
                raise InvalidArgument(f"{path}:{line_number}: {error}") from error
    if not hosts:
        raise InvalidArgument(f"{path} names no host")
    return _checked(hosts)


def sizes_of(hosts: Sequence[Host], num_ranks: int | None) -> tuple[int, ...]:
    """Return how many ranks each host has; ``num_ranks`` is for those without slots."""
    bare = [host.name for host in hosts if host.slots is None]
    if num_ranks is None and bare:
        raise InvalidArgument(
            f"how many ranks is {', '.join(bare)} to have? Say -n N for every host, or "
            f"{bare[0]}:N for this one"
        )
    if num_ranks is not None and not bare:
        raise InvalidArgument(
            f"-n {num_ranks} is for hosts that are given without slots, but all have them: leave "
            f"-n away, and the job has {sum(host.slots or 0 for host in hosts)} ranks"
        )
    return tuple(host.slots or num_ranks or 0 for host in hosts)


def _parse_line(words: Sequence[str]) -> Host:
    host = _parse_host(words[0])
    for word in words[1:]:
        name, _, value = word.partition("=")
        if name == "slots":
            host = host._replace(slots=_parse_slots(value, word))
        elif name not in _IGNORED:
            raise InvalidArgument(f"{word!r} is not understood; expected 'host slots=N'")
    return host


def _parse_host(text: str) -> Host:
    name, colon, slots = text.rpartition(":")
    is_bracketed = name.endswith("]")
    if not colon or (":" in name and not is_bracketed):  # a name, or a bare IPv6 address
        name, colon = text, ""
    name = name.replace("[", "").replace("]", "")
    is_word = name.isprintable() and not set(name) & set(" ,'\"/\\;|&$`<>()")
    if not name or not is_word or name.startswith("-") or name.endswith("@"):
        raise InvalidArgument(f"{text!r} is no host; expected names as a,b or a:2,b:2")
    return Host(name, _parse_slots(slots, text) if colon else None)


def _parse_slots(text: str, shown: str) -> int:
    if number(text) < 1:
        raise InvalidArgument(f"{shown!r}: the slots have to be a number above zero")
    return number(text)


def _checked(hosts: list[Host]) -> list[Host]:
    """Refuse a host that is there twice: it would have two ranks with one local rank."""
    (name, count), *_ = Counter(host.name for host in hosts).most_common(1)
    if count > 1:
        raise InvalidArgument(
            f"host {name!r} is named twice; its ranks are counted by slots, as in {name}:2"
        )
    return hosts
