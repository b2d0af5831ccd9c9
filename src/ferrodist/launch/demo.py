# SPDX-License-Identifier: MIT OR Apache-2.0
"""``ferrodist demo``: start the demo's program on n ranks, as ``ferrodist run`` does."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click
from rich.console import Console

from ferrodist import Backend
from ferrodist.launch import demo_training
from ferrodist.launch.demo_program import demo_options, run_rank
from ferrodist.launch.demo_report import count_of_ranks
from ferrodist.launch.main import STOPPED_BY_USER
from ferrodist.launch.output.console import console_of_files
from ferrodist.launch.part import Part
from ferrodist.launch.supervisor import Plan, supervise
from ferrodist.testing import run_ranks

DEFAULT_CHART = Path("ferrodist-demo.svg")
_PROGRAM = "ferrodist.launch.demo_program"


@click.command()
@click.option(
    "-n", "--ranks", type=click.IntRange(min=1), metavar="N", default=4, show_default=True,
    help="How many ranks train together.",
)  # fmt: skip
@click.option(
    "--backend", type=click.Choice(["shared_memory", "simulated"]), default="shared_memory",
    show_default=True,
    help="What the ranks are: processes that share memory, or 'simulated', threads of this one.",
)  # fmt: skip
@demo_options
@click.pass_context
def demo(
    context: click.Context,
    ranks: int,
    backend: str,
    steps: int,
    seed: int,
    chart: Path | None,
    as_json: bool,
) -> None:
    """Train a small network on several ranks, and check every bit of it.

    Makes points on a spiral of three arms and trains a network in plain NumPy to tell the arms
    apart. In every step each rank computes the gradients of its own shard of the batch, and one
    allreduce averages them. Then a single process computes the same shards one after the other; its
    weights must be the same, bit for bit. Takes about 20 seconds. Exit code 1 if a bit differs. The
    loss curve is drawn in ferrodist-demo.svg, or with --json only where --chart says.
    """
    if chart is None and not as_json:
        chart = DEFAULT_CHART
    if not as_json:
        _introduce(ranks, backend)
    if backend == "simulated":
        plan = demo_training.Plan(backend, ranks, steps, seed)
        context.exit(_run_threads(plan, chart, as_json))
    context.exit(_run_processes(ranks, _options(steps, seed, chart, as_json), as_json))


def _introduce(ranks: int, backend: str) -> None:
    Console(highlight=False).print(
        "Training a small network to tell the arms of a spiral apart, on "
        f"{count_of_ranks(ranks)} ({backend}).\n"
        "In every step one allreduce averages the gradients of all ranks.\n",
        soft_wrap=True,
    )


def _options(steps: int, seed: int, chart: Path | None, as_json: bool) -> list[str]:
    options = ["--steps", str(steps), "--seed", str(seed)]
    if chart is not None:
        options += ["--chart", str(chart)]
    return [*options, "--json"] if as_json else options


def _run_processes(ranks: int, options: list[str], as_json: bool) -> int:
    if not as_json:
        shown = shlex.join(["ferrodist", "run", "-n", str(ranks), "-m", _PROGRAM, *options])
        click.echo(f"$ {shown}")
    plan = Plan([sys.executable, "-m", _PROGRAM, *options], Part.whole(ranks))
    code = supervise(plan, console_of_files())
    if code == STOPPED_BY_USER:
        Console().show_cursor()  # a rank that was ended in the middle left it hidden
        click.echo("\nstopped", err=True)
    return code


def _run_threads(plan: demo_training.Plan, chart: Path | None, as_json: bool) -> int:
    def body(backend: Backend) -> bool:
        return run_rank(backend, plan, chart, as_json=as_json)

    # A command runs as long as its user likes; a stuck rank is found by the calls themselves.
    return 0 if all(run_ranks(plan.ranks, body, timeout=None)) else 1
