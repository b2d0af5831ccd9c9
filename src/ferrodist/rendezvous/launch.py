# SPDX-License-Identifier: MIT OR Apache-2.0
"""Launch: what ``ferrodist run`` and ``ferrodist.run`` tell a process that they start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from ferrodist.config import variable
from ferrodist.errors import InvalidArgument

_MOST_DIGITS = 9  # what is longer fits no rank, size or number of a file
_MOST_LETTERS = 60  # of a value that is shown


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
                f"{', '.join(absent)} not set, but {quoted(environ, names)}; ferrodist run sets "
                f"all of {', '.join(names)}",
                missing=absent,
            )
        rank, world_size, secret_fd, ends_fd = (number(environ[names[i]]) for i in (0, 1, 3, 4))
        are_right = 0 <= rank < world_size and secret_fd >= 0 and ends_fd >= 0
        if not (are_right and environ[names[2]]):
            raise InvalidArgument(
                f"{quoted(environ, names)}: expected a rank from 0 to world size - 1, the name of "
                "a job and the numbers of two open files"
            )
        return cls(rank, world_size, environ[names[2]], secret_fd, ends_fd)

    def to_environment(self) -> dict[str, str]:
        """Return the variables from which ``from_environment`` makes this again."""
        return {variable(one.name): str(getattr(self, one.name)) for one in fields(self)}


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
