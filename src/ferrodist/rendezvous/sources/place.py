# SPDX-License-Identifier: MIT OR Apache-2.0
"""Place: where a source says this process stands; and how sources read their variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ferrodist.errors import InvalidArgument
from ferrodist.rendezvous.ends import Ends
from ferrodist.rendezvous.launch import number
from ferrodist.rendezvous.sources.source import Source

Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank of which job a process is, as one source says.

    ``local_*`` count on this host and are None where the source does not say. ``several_hosts`` is
    what shows that there are more hosts than this one. ``secret`` and ``ends`` come from
    ``ferrodist run`` alone.
    """

    source: Source
    job: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    master_address: str | None = None
    several_hosts: str | None = None
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
    return ", ".join(f"{name}={environ[name]}" for name in names if environ.get(name))


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
            f"{rank}={environ[rank]!r}, {world_size}={environ[world_size]!r} ({source.name}): "
            f"expected whole numbers, and {rank} from 0 to {world_size} - 1"
        )
    return numbers


def local_rank_and_size(
    environ: Environment, source: Source, rank: str, world_size: str
) -> tuple[int, int] | tuple[None, None]:
    """Read what not every launcher says: a rank among those of this host, and their number."""
    if not (is_set(environ, rank) and is_set(environ, world_size)):
        return None, None
    return rank_and_size(environ, source, rank, world_size)


def show_difference(environ: Environment, local_size: str, world_size: str) -> str | None:
    """Show that not all ranks are on this host; None if they are, or if nothing is said of it."""
    if number(environ.get(local_size, environ[world_size])) == number(environ[world_size]):
        return None
    return shown(environ, [local_size, world_size])
