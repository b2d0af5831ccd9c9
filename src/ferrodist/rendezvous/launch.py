# SPDX-License-Identifier: MIT OR Apache-2.0
"""Launch: what ``ferrodist run`` and ``ferrodist.run`` tell a process that they start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from ferrodist.config import variable
from ferrodist.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Launch:
    """Which rank a process is, of how many, of which job.

    ``secret_fd`` is an inherited pipe with the job's secret; the secret itself is never in the
    environment. ``ends_fd`` is the file in which the launcher notes how processes end.
    """

    rank: int
    world_size: int
    job: str
    secret_fd: int
    ends_fd: int

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Launch | None:
        """Read what a launcher has set; None if it has set nothing."""
        names = [variable(one.name) for one in fields(cls)]
        absent = [name for name in names if name not in environ]
        if len(absent) == len(names):
            return None
        if absent:
            raise InvalidArgument(
                f"{', '.join(absent)} not set, but {_shown(environ, names)}; ferrodist run sets "
                f"all of {', '.join(names)}",
                missing=absent,
            )
        rank, world_size, secret_fd, ends_fd = (number(environ[names[i]]) for i in (0, 1, 3, 4))
        are_right = 0 <= rank < world_size and secret_fd >= 0 and ends_fd >= 0
        if not (are_right and environ[names[2]]):
            raise InvalidArgument(
                f"{_shown(environ, names)}: expected a rank from 0 to world size - 1, the name of "
                "a job and the numbers of two open files"
            )
        return cls(rank, world_size, environ[names[2]], secret_fd, ends_fd)

    def to_environment(self) -> dict[str, str]:
        """Return the variables from which ``from_environment`` makes this again."""
        return {variable(one.name): str(getattr(self, one.name)) for one in fields(self)}


def number(text: str) -> int:
    """Read a number; -1, which no variable may be, if it is none."""
    return int(text) if text.isascii() and text.isdigit() else -1


def _shown(environ: Mapping[str, str], names: list[str]) -> str:
    return ", ".join(f"{name}={environ[name]!r}" for name in names if name in environ)
