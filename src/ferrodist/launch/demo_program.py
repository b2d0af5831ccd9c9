# SPDX-License-Identifier: MIT OR Apache-2.0
"""The demo as a program that any launcher can start: ``torchrun -m ferrodist.launch.demo_program``.

Every rank trains; rank 0 shows how it went, and its exit code is 1 if a bit differs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

import ferrodist
from ferrodist.config import Config
from ferrodist.launch.demo_report import Outcome, show_outcome, to_json, write_chart
from ferrodist.launch.demo_training import Plan, ShowProgress, run_demo, show_nothing
from ferrodist.launch.main import STOPPED_BY_USER

F = TypeVar("F", bound=Callable[..., Any])


def demo_options(command: F) -> F:
    """Add the options of the demo itself to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_OPTIONS = [
    click.option(
        "--steps", type=click.IntRange(min=1), metavar="N", default=7000, show_default=True,
        help="How many steps to train.",
    ),
    click.option(
        "--seed", type=click.IntRange(min=0), metavar="N", default=0, show_default=True,
        help="Makes the data and the first weights.",
    ),
    click.option(
        "--chart", type=click.Path(dir_okay=False, writable=True, path_type=Path),
        help="Where to draw the loss curve, as SVG.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."),
]  # fmt: skip


def run_rank(backend: ferrodist.Backend, plan: Plan, chart: Path | None, *, as_json: bool) -> bool:
    """Do the part of one rank; return False if a bit differs, which only rank 0 knows."""
    outcome = run_demo(backend, plan, show_nothing if as_json else ShowProgress(plan.steps))
    if outcome is None:
        return True
    if as_json:
        click.echo(to_json(outcome))
    else:
        show_outcome(Console(highlight=False), outcome)
    if chart is not None:
        _draw(outcome, chart, as_json)
    return outcome.weights_equal


def _draw(outcome: Outcome, chart: Path, as_json: bool) -> None:
    write_chart(outcome, chart)
    if not as_json:
        console = Console(highlight=False)
        console.print("loss curve drawn in", str(chart), markup=False, soft_wrap=True)


def _name_of_backend() -> str:
    chosen = Config.from_environment().backend
    return "shared_memory" if chosen == "auto" else chosen  # as init() chooses on one host


@click.command()
@demo_options
@click.pass_context
def program(
    context: click.Context, steps: int, seed: int, chart: Path | None, as_json: bool
) -> None:
    """Train with the other ranks of the job that this process is started in."""
    try:
        backend = ferrodist.init()
        plan = Plan(_name_of_backend(), backend.world_size, steps, seed)
        is_right = run_rank(backend, plan, chart, as_json=as_json)
    except KeyboardInterrupt:
        context.exit(STOPPED_BY_USER)
    except ferrodist.DistributedError as error:
        raise click.ClickException(str(error)) from error
    context.exit(0 if is_right else 1)


if __name__ == "__main__":
    program()
