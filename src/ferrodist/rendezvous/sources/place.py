# SPDX-License-Identifier: MIT OR Apache-2.0
"""Place: where a source says this process stands; and how sources read their variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ferrodist.errors import InvalidArgument
from ferrodist.rendezvous.ends import Ends
from ferrodist.rendezvous.job import Through
from ferrodist.rendezvous.launch import Endpoint, brief, number, quoted
from ferrodist.rendezvous.sources.source import Source

Environment = Mapping[str, str]

MASTER_ADDRESS, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank of which job a process is, as one source says.

    ``several_hosts`` is what shows that there are more hosts than this one; where the source says
    nothing of it (``is_host_told`` is false), ``endpoint`` may. That is where rank 0 listens, with
    port -1 if what stands there is none. Only ``ferrodist run`` gives ``secret`` and ``ends``.
    """

    source: Source
    job: str
    rank: int
    world_size: int
    several_hosts: str | None = None
    is_host_told: bool = True
    endpoint: Endpoint | None = None
    through: Through = Through.SOCKETS
    local_rank: int | None = None
    local_world_size: int | None = None
    secret: bytes | None = field(default=None, repr=False)
    ends: Ends | None = field(default=None, repr=False, compare=False)


class Stale(NamedTuple):
    """A source whose variables were meant for another process, from which this one has them."""

    source: Source
    why: str


def is_set(environ: Environment, *names: str) -> bool:
    """Tell whether one of these variables has a value."""
    return any(environ.get(name) for name in names)


def shown(environ: Environment, names: Iterable[str]) -> str:
    """Show the variables that have a value."""
    return ", ".join(f"{name}={brief(environ[name])}" for name in names if environ.get(name))


def require(environ: Environment, source: Source, *names: str) -> None:
    """Refuse variables that make sense together only and are not all there."""
    absent = [name for name in names if not environ.get(name)]
    if absent:
        raise InvalidArgument(
            f"{', '.join(absent)} not set, but {shown(environ, names)} ({source.name}): all of "
            f"{', '.join(names)} are needed; set the missing ones, unset the others, or use "
            "'ferrodist run -n N script.py'",
            missing=absent,
        )


def rank_and_size(
    environ: Environment, source: Source, rank: str, world_size: str
) -> tuple[int, int]:
    """Read a rank, and how many there are."""
    numbers = number(environ[rank]), number(environ[world_size])
    if not 0 <= numbers[0] < numbers[1]:
        raise InvalidArgument(
            f"{quoted(environ, [rank, world_size])} ({source.name}): expected whole numbers, and "
            f"{rank} from 0 to {world_size} - 1"
        )
    return numbers


def show_difference(
    environ: Environment, source: Source, local_size: str, world_size: str
) -> str | None:
    """Show that not all ranks are on this host; None if they are, or if nothing is said of it."""
    if not is_set(environ, local_size):
        return None
    names = [local_size, world_size]
    here, everywhere = (number(environ[name]) for name in names)
    if not 1 <= here <= everywhere:
        raise InvalidArgument(
            f"{quoted(environ, names)} ({source.name}): expected whole numbers, and {local_size} "
            f"from 1 to {world_size}"
        )
    return None if here == everywhere else shown(environ, names)


def try_number(environ: Environment, name: str) -> int | None:
    """Read a number that is good to know; None if it is not there, or none."""
    value = number(environ.get(name, ""))
    return value if value >= 0 else None


def try_endpoint_of(environ: Environment) -> Endpoint | None:
    """Read where rank 0 listens, from the variables that torch has made common."""
    if not environ.get(MASTER_ADDRESS) or not environ.get(MASTER_PORT):
        return None
    return Endpoint(without_brackets(environ[MASTER_ADDRESS]), number(environ[MASTER_PORT]))


def without_brackets(host: str) -> str:
    """Return a host without the brackets that addresses have before a port, as in [::1]:29500."""
    is_bracketed = host.startswith("[") and host.endswith("]")
    return host[1:-1] if is_bracketed else host
