# SPDX-License-Identifier: MIT OR Apache-2.0
"""Situation: what all checks are given; and how they read small files of the kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

from ferrodist.config import Config, environment, variable
from ferrodist.errors import InvalidArgument
from ferrodist.rendezvous.launch import Endpoint


@dataclass(frozen=True, slots=True)
class Situation:
    """A machine, and what is to run on it.

    ``endpoint`` is where rank 0 listens, ``peer`` another host that is to be reached; ``root`` is
    where /proc, /sys and the like are found.
    """

    num_ranks: int = 1
    endpoint: Endpoint | None = None
    peer: Endpoint | None = None
    environ: Mapping[str, str] = field(default_factory=environment)
    root: Path = Path("/")

    @property
    def towards(self) -> str | None:
        """The host that the others are to be reached through; None if only this one counts."""
        other = self.peer or self.endpoint
        return None if other is None else other.host

    @property
    def config(self) -> Config:
        """The settings; those that cannot be read have their defaults.

        What is wrong with these is said by the check of the environment, once.
        """
        return Config(**{name: getattr(one, name) for name, one in self._settings()})

    def _settings(self) -> Iterator[tuple[str, Config]]:
        for one in fields(Config):
            name = variable(one.name)
            if name in self.environ:
                with suppress(InvalidArgument):
                    yield one.name, Config.from_environment({name: self.environ[name]})

    def try_read(self, path: str) -> str | None:
        """Read a file of the machine, such as "proc/meminfo"; None if it is not there."""
        return try_read(self.root / path)


def try_read(path: Path) -> str | None:
    """Read a small file; None if it is not there or not for us."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def try_number(path: Path) -> int | None:
    """Read the number in a small file; None if there is none, as in "max"."""
    text = try_read(path) or ""
    return int(text) if text.isascii() and text.isdigit() else None
