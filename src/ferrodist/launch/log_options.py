# SPDX-License-Identifier: MIT OR Apache-2.0
"""The options of ``ferrodist run`` for log files, by torchrun's names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from ferrodist.errors import InvalidArgument
from ferrodist.launch.output.logs import Choice, LogFiles, parse_choice

F = TypeVar("F", bound=Callable[..., Any])


def _parse_streams(ctx: click.Context, param: click.Parameter, value: str | None) -> Choice | None:
    try:
        return None if value is None else parse_choice(value)
    except InvalidArgument as error:
        raise click.BadParameter(str(error)) from error


_OPTIONS = [
    click.option(
        "--log-dir", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
        help="Write what each rank writes to files in a new folder of DIR as well.",
    ),
    click.option(
        "-t", "--tee", callback=_parse_streams, metavar="STREAMS",
        help="Which streams to write to files as well: 1 stdout, 2 stderr, 3 both; or 0:1,1:3 by "
        "rank.",
    ),
    click.option(
        "-r", "--redirects", callback=_parse_streams, metavar="STREAMS",
        help="Which streams to write to files only.",
    ),
]  # fmt: skip


def log_options(command: F) -> F:
    """Add the options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class LogOptions(NamedTuple):
    """What was given of them."""

    directory: Path | None
    tee: Choice | None
    redirects: Choice | None

    def check(self, world_size: int) -> None:
        """Refuse ranks that there are not, and streams that go nowhere."""
        for choice in (self.tee, self.redirects):
            if choice is not None and any(rank >= world_size for rank in choice.by_rank):
                raise click.UsageError(f"--tee or --redirects names a rank beyond {world_size - 1}")
        if self.directory is None and (self.tee is not None or self.redirects is not None):
            raise click.UsageError("--tee and --redirects write to files: say where, by --log-dir")

    def to_words(self) -> list[str]:
        """Write the options as they were given, for another launcher."""
        words = [] if self.directory is None else ["--log-dir", str(self.directory)]
        for name, choice in {"--tee": self.tee, "--redirects": self.redirects}.items():
            words += [] if choice is None else [name, choice.to_text()]
        return words

    def open(self) -> LogFiles | None:
        """Make the folder of the files; None if none are wanted."""
        if self.directory is None:
            return None
        try:
            return LogFiles(self.directory, tee=self.tee, redirects=self.redirects)
        except OSError as error:
            raise click.UsageError(f"--log-dir {self.directory}: {error.strerror}") from error
