# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reading the variables that launchers set: numbers, endpoints, and errors that quote them.

These functions take a mapping, never the process's own environment, and do not decide which
launcher is followed: ``find_job.py`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ferrodist.errors import InvalidArgument

Environment = Mapping[str, str]

MASTER_ADDRESS, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"

_MAX_DIGITS = 9  # anything longer fits no rank, size or file descriptor
_MAX_SHOWN = 60  # characters of a value in an error


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher: the variables it sets, and what errors say about it.

    ``job`` is what its jobs differ in; ``start`` is how to start all ranks, with ``{size}`` and
    ``{last}`` for the world size and the last rank. ``required`` are the variables that only make
    sense together.
    """

    name: str
    rank: str
    world_size: str
    job: str
    start: str
    local_rank: str = ""
    local_world_size: str = ""
    required: tuple[str, ...] = ()

    def how_to_start(self, world_size: int) -> str:
        """Say how to start all ranks of a world."""
        return self.start.format(size=world_size, last=world_size - 1)


class Endpoint(NamedTuple):
    """A host and port to listen at or to connect to."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def try_endpoint(text: str) -> Endpoint | None:
    """Parse ``host:port`` or ``[IPv6 address]:port``; None if it is neither."""
    bracketed, _, port = text.rpartition(":")
    host = without_brackets(bracketed)
    if host == bracketed and ":" in host:
        return None
    is_word = host != "" and host.isprintable() and not set(host) & set(" []/@")
    return Endpoint(host, number(port)) if is_word and 0 < number(port) <= 65535 else None


def try_master_endpoint(environ: Environment) -> Endpoint | None:
    """Read where rank 0 listens, from the variables that torch has made common.

    A MASTER_PORT that is not a number gives port -1: it only matters if the ranks need the port.
    """
    if not is_set(environ, MASTER_ADDRESS) or not is_set(environ, MASTER_PORT):
        return None
    return Endpoint(without_brackets(environ[MASTER_ADDRESS]), number(environ[MASTER_PORT]))


def without_brackets(host: str) -> str:
    """Return a host without the brackets that IPv6 addresses have before a port ([::1]:29500)."""
    is_bracketed = host.startswith("[") and host.endswith("]")
    return host[1:-1] if is_bracketed else host


def number(text: str) -> int:
    """Parse a non-negative number; -1, which no variable may be, if it is not one."""
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    return int(text) if is_number else -1


def try_number(environ: Environment, name: str) -> int | None:
    """Read an optional number; None if it is absent or not a number."""
    value = number(environ.get(name, ""))
    return value if value >= 0 else None


def is_set(environ: Environment, *names: str) -> bool:
    """Tell whether one of these variables has a value."""
    return any(environ.get(name) for name in names)


def read_rank(environ: Environment, launcher: Launcher) -> tuple[int, int]:
    """Read rank and world size; raises InvalidArgument if a required variable is missing."""
    require(environ, launcher, *launcher.required)
    names = [launcher.rank, launcher.world_size]
    rank, world_size = (number(environ[name]) for name in names)
    if not 0 <= rank < world_size:
        raise InvalidArgument(
            f"{quoted(environ, names)} ({launcher.name}): expected whole numbers, and "
            f"{launcher.rank} from 0 to {launcher.world_size} - 1"
        )
    return rank, world_size


def require(environ: Environment, launcher: Launcher, *names: str) -> None:
    """Refuse variables that only make sense together and are not all set."""
    absent = [name for name in names if not environ.get(name)]
    if absent:
        raise InvalidArgument(
            f"{', '.join(absent)} not set, but {shown(environ, names)} ({launcher.name}): all of "
            f"{', '.join(names)} are needed; set the missing ones, unset the others, or use "
            "'ferrodist run -n N script.py'",
            missing=absent,
        )


def show_difference(environ: Environment, launcher: Launcher) -> str:
    """Show that not all ranks are on this host; '' if they are, or if the variable is not set."""
    names = [launcher.local_world_size, launcher.world_size]
    if not is_set(environ, names[0]):
        return ""
    local_size, world_size = (number(environ[name]) for name in names)
    if not 1 <= local_size <= world_size:
        raise InvalidArgument(
            f"{quoted(environ, names)} ({launcher.name}): expected whole numbers, and {names[0]} "
            f"from 1 to {names[1]}"
        )
    return "" if local_size == world_size else shown(environ, names)


def shown(environ: Environment, names: Iterable[str]) -> str:
    """Show the variables that have a value."""
    return ", ".join(f"{name}={brief(environ[name])}" for name in names if environ.get(name))


def quoted(environ: Environment, names: Sequence[str]) -> str:
    """Show the variables that are set, in quotes, because one of them is odd."""
    return ", ".join(f"{name}='{brief(environ[name])}'" for name in names if name in environ)


def brief(value: str) -> str:
    """Shorten a value for an error, and escape bytes that are not text."""
    text = value.encode(errors="backslashreplace").decode()
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
