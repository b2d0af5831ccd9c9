# SPDX-License-Identifier: MIT OR Apache-2.0
"""Launch: what ``ferrodist run`` and ``ferrodist.run`` tell a process that they start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from ferrodist.config import variable
from ferrodist.errors import InvalidArgument

_MOST_DIGITS = 9  # what is longer fits no rank, size or number of a file
_MOST_LETTERS = 60  # of a value that is shown


@dataclass(frozen=True, slots=True)
class Launch:
    """Which rank a process is, of how many, of which job.

    ``secret_fd`` is an inherited pipe with the job's secret; the secret itself is never in the
    environment. ``ends_fd`` is the file in which the launcher notes how processes end.
    ``local_rank`` is the place among the ranks of this host. ``endpoint`` is where rank 0 listens,
    as ``host:port``; it is empty if all ranks are on one host, and they need none.
    """

    rank: int
    world_size: int
    job: str
    secret_fd: int
    ends_fd: int
    local_rank: int
    local_world_size: int
    endpoint: str

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Launch | None:
        """Read what a launcher has set; None if it has set nothing."""
        names = [variable(one.name) for one in fields(cls)]
        absent = [name for name in names if name not in environ]
        if len(absent) == len(names):
            return None
        if absent:
            raise InvalidArgument(
                f"{', '.join(absent)} not set, but {quoted(environ, names)}; ferrodist run sets "
                f"all of {', '.join(names)}",
                missing=absent,
            )
        texts = {one.name: environ[variable(one.name)] for one in fields(cls)}
        given: dict[str, Any] = {
            name: text if name in ("job", "endpoint") else number(text)
            for name, text in texts.items()
        }
        launch = cls(**given)
        if not launch._can_be:
            raise InvalidArgument(
                f"{quoted(environ, names)}: expected a rank from 0 to world size - 1, the name of "
                "a job, the numbers of two open files, and the place on this host: the same as in "
                "the job if there is no endpoint, otherwise an endpoint as host:port"
            )
        return launch

    @property
    def _can_be(self) -> bool:
        """True if the fields are in their bounds and do not contradict each other."""
        num_before = self.rank - self.local_rank  # of other hosts
        num_elsewhere = self.world_size - self.local_world_size
        are_in_bounds = (
            0 <= self.rank < self.world_size
            and 0 <= self.local_rank < self.local_world_size
            and 0 <= num_before <= num_elsewhere
            and self.secret_fd >= 0
            and self.ends_fd >= 0
        )
        is_alone = self.endpoint == "" and num_elsewhere == 0
        return (
            are_in_bounds
            and self.job != ""
            and (is_alone or try_endpoint(self.endpoint) is not None)
        )

    def to_environment(self) -> dict[str, str]:
        """Return the variables from which ``from_environment`` makes this again."""
        return {variable(one.name): str(getattr(self, one.name)) for one in fields(self)}


class Endpoint(NamedTuple):
    """Where to listen or to connect to."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def try_endpoint(text: str) -> Endpoint | None:
    """Read ``host:port`` or ``[IPv6 address]:port``; None if it is neither."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        return None
    is_word = host != "" and host.isprintable() and not set(host) & set(" []/@")
    return Endpoint(host, number(port)) if is_word and 0 < number(port) <= 65535 else None


def number(text: str) -> int:
    """Read a number; -1, which no variable may be, if it is none."""
    is_number = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    return int(text) if is_number else -1


def brief(value: str) -> str:
    """Shorten a value for a text, and show bytes that are no text in a way that can be printed."""
    text = value.encode(errors="backslashreplace").decode()
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."


def quoted(environ: Mapping[str, str], names: Sequence[str]) -> str:
    """Show the variables that are set, in quotes, for one of them is odd."""
    return ", ".join(f"{name}='{brief(environ[name])}'" for name in names if name in environ)
