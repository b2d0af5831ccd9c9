# SPDX-License-Identifier: MIT OR Apache-2.0
"""The ``ferrodist`` command: what all its commands have in common, and the list of them."""

from __future__ import annotations

from typing import Any

import click

import ferrodist
from ferrodist.launch.bench.command import bench
from ferrodist.launch.demo import demo
from ferrodist.launch.run import run

STOPPED_BY_USER = 130  # what shells report for a program that Ctrl-C ended


class Commands(click.Group):
    """Commands that end in one plain line, not in a traceback, where the user can act."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; translate Ctrl-C and ferrodist's own errors."""
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


commands.add_command(demo)
commands.add_command(run)
commands.add_command(bench)


def main() -> None:
    """Run the command line and leave with its exit code."""
    commands(prog_name="ferrodist")
