# SPDX-License-Identifier: MIT OR Apache-2.0
"""``ferrodist run``: a script on n processes of this host."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click

from ferrodist.deadline import Deadline
from ferrodist.launch.processes import Crew, Order, sooner

_GRACE = 5.0  # for the others, after a rank has failed
_SIGNAL_GRACE = 2.0  # for all, after a signal to the launcher
_LONGEST_WAIT = 0.2  # at one go: a signal that came just before is noticed after it
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n", "--nproc-per-node", "num_ranks", type=click.IntRange(min=1), metavar="N", required=True,
    help="How many processes to start.",
)  # fmt: skip
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is the name of a module.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(
    ctx: click.Context, num_ranks: int, is_module: bool, script: str, args: tuple[str, ...]
) -> None:
    """Run SCRIPT on N processes that form one job.

    In the script, ferrodist.init() joins it. Everything after SCRIPT belongs to the script. If a
    process fails, the others are ended soon after, and its exit code is that of this command.
    """
    command = [sys.executable, *(["-m"] if is_module else []), script, *args]
    with Crew([Order(command)] * num_ranks) as crew:
        ctx.exit(wait_for(crew))


def wait_for(crew: Crew) -> int:
    """Wait for all processes and return the exit code of the first that fails, or 0."""
    code = 0
    deadline = Deadline(None)
    with _forwarding(crew) as received:
        while crew.running and deadline.remaining() > 0:
            for rank in crew.wait(min(_LONGEST_WAIT, deadline.remaining())):
                if rank.exit_code and not code and not received:
                    code, deadline = rank.exit_code, Deadline(_GRACE)
                    click.echo(f"ferrodist run: rank {rank.rank} {rank.how}", err=True)
            if received:
                code = code or 128 + received[0]
                deadline = sooner(deadline, Deadline(_SIGNAL_GRACE))
        crew.stop()
    return code


@contextmanager
def _forwarding(crew: Crew) -> Iterator[list[int]]:
    """Hand signals on to all processes; yield those that came."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        crew.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
