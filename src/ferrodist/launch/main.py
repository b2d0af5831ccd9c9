# SPDX-License-Identifier: MIT OR Apache-2.0
"""The ``ferrodist`` command: what all its commands have in common, and the list of them."""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import Any

import click

import ferrodist

STOPPED_BY_USER = 130  # what shells report for a program that Ctrl-C ended
_COMMANDS = {
    "demo": "ferrodist.launch.demo",
    "run": "ferrodist.launch.run",
    "bench": "ferrodist.launch.bench",
    "doctor": "ferrodist.launch.doctor",
}


class Commands(click.Group):
    """Commands that end in one plain line, not in a traceback, where the user can act.

    Each is imported when it is used: a job should not wait for what draws charts.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS, *self.commands]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return super().get_command(ctx, name)
        command: click.Command = getattr(importlib.import_module(_COMMANDS[name]), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = _with_dashes(args[0]) if args else "-"
        if not name.startswith("-") and name not in self.list_commands(ctx):
            near = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            if not near and Path(args[0]).suffix == ".py":
                near = [f"run {args[0]}"]
            meant = f"did you mean '{ctx.info_name} {near[0]}'?" if near else "there are "
            others = "" if near else ", ".join(_COMMANDS)
            ctx.fail(f"there is no command {args[0]!r}; {meant}{others}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("\nstopped", err=True)
            ctx.exit(STOPPED_BY_USER)
        except ferrodist.DistributedError as error:
            raise click.ClickException(str(error)) from error


def _with_dashes(word: str) -> str:
    """Let --two_words mean --two-words, as users of torchrun expect."""
    return word.replace("_", "-")


@click.group(cls=Commands, context_settings={"token_normalize_func": _with_dashes})
@click.version_option(ferrodist.__version__, prog_name="ferrodist")
def commands() -> None:
    """Distributed training for any array.

    Start with "ferrodist demo": it needs no cluster, no server and no data.
    """


def main() -> None:
    commands(prog_name="ferrodist")
