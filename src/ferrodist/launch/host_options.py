# SPDX-License-Identifier: MIT OR Apache-2.0
"""The options of ``ferrodist run`` for several hosts, by torchrun's and mpirun's names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class HostOptions(NamedTuple):
    """What was given of them; None, or nothing, for what was not."""

    nnodes: str | None
    node_rank: int | None
    rdzv_endpoint: str | None
    rdzv_id: str | None
    rdzv_backend: str | None
    hosts: str | None
    hostfile: Path | None
    ssh: str | None
    export: tuple[str, ...]
    held_by_ssh: bool
    only_attempt: int | None
    standalone: bool

    @property
    def is_for_others(self) -> bool:
        """True if hosts are listed, on which the launchers are to be started."""
        return self.hosts is not None or self.hostfile is not None


_OPTIONS = [
    click.option(
        "--nnodes", metavar="N",
        help="How many hosts the job is on; the same command runs on each.",
    ),
    click.option(
        "--node-rank", type=click.IntRange(min=0), metavar="K",
        help="Which of the hosts this is, from 0.",
    ),
    click.option(
        "--rdzv-endpoint", metavar="HOST:PORT",
        help="Where rank 0 listens: the first host, as all others reach it. The port after it is "
        "for torch.",
    ),
    click.option("--rdzv-id", metavar="NAME", help="A name for the job, the same on all hosts."),
    click.option("--rdzv-backend", hidden=True, help="What torchrun needs on several hosts."),
    click.option(
        "--hosts", metavar="A,B",
        help="Start the job on these hosts, by one ssh each; A:2,B:4 says how many ranks.",
    ),
    click.option(
        "--hostfile", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
        help="The same from a file with a line 'host slots=N' for each.",
    ),
    click.option("--ssh", metavar="COMMAND", help="What to use for ssh, with its options."),
    click.option(
        "--export", multiple=True, metavar="NAME",
        help="Give this variable to the ranks on other hosts as well. It is in a command line "
        "there, which all users of the host can read.",
    ),
    click.option("--held-by-ssh", is_flag=True, hidden=True, help="Used by --hosts."),
    click.option("--only-attempt", type=click.IntRange(min=0), hidden=True, help="The same."),
    click.option("--standalone", is_flag=True, hidden=True, help="What torchrun needs on one."),
]  # fmt: skip


def host_options(command: F) -> F:
    """Add the options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
