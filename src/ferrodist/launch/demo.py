# SPDX-License-Identifier: MIT OR Apache-2.0
"""``ferrodist demo``: train on n ranks, then show that one process alone gets the same bits.

``train`` is what a rank does; all that is distributed about it is two calls of ferrodist.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from rich.console import Console

import ferrodist
from ferrodist.backends.registry import backend_names
from ferrodist.launch.demo_report import Outcome, count_of_ranks, show_outcome, to_json, write_chart
from ferrodist.launch.progress import Report, open_progress
from ferrodist.launch.runners import run_on_ranks
from ferrodist.launch.spirals import (
    SHARD_SIZE,
    Momentum,
    Weights,
    loss_and_accuracy,
    loss_and_gradients,
    make_points,
    name_of,
    new_weights,
    take_shard,
)

DEFAULT_CHART = Path("ferrodist-demo.svg")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to train: the same on every rank."""

    backend: str
    ranks: int
    steps: int
    seed: int


@dataclass(frozen=True, slots=True)
class Trained:
    """What one rank has at the end."""

    weights: Weights
    losses: list[float]
    seconds: float
    sent_nbytes: int


OpenProgress = Callable[[str], AbstractContextManager[Report]]


def train(backend: ferrodist.Backend, plan: Plan, progress: OpenProgress) -> Trained:
    """Train on one rank, together with the others; only rank 0 shows how far they are."""
    show = progress if backend.rank == 0 else show_nothing
    with show(f"training on {count_of_ranks(plan.ranks)}") as report:
        return _train(backend, plan, report)


def _train(backend: ferrodist.Backend, plan: Plan, report: Report) -> Trained:
    points = make_points(plan.seed)
    weights = ferrodist.broadcast(new_weights(plan.seed), backend)
    optimizer, losses, start = Momentum(weights), [], time.perf_counter()
    for step in range(plan.steps):
        shard = take_shard(points, plan.seed, step, backend.rank, backend.world_size)
        loss, gradients = loss_and_gradients(weights, shard)
        # One call averages the loss and all gradients over the ranks. Folding in rank order makes
        # the bits those of ``train_alone``, whichever algorithm and backend do the work.
        loss, *gradients = ferrodist.allreduce(
            [loss, *gradients], backend, op="mean", reproducible=True
        )
        optimizer.update(weights, gradients)
        losses.append(float(loss))
        report(step + 1, losses[-1])
    seconds = time.perf_counter() - start
    return Trained(weights, losses, seconds, backend.statistics().sent_nbytes)


def train_alone(plan: Plan, report: Report) -> Weights:
    """Train in this process, without ferrodist: all shards of a step, one after the other."""
    points = make_points(plan.seed)
    weights = new_weights(plan.seed)
    optimizer = Momentum(weights)
    for step in range(plan.steps):
        parts = []
        for rank in range(plan.ranks):
            shard = take_shard(points, plan.seed, step, rank, plan.ranks)
            loss, gradients = loss_and_gradients(weights, shard)
            parts.append([loss, *gradients])
        loss, *gradients = mean_in_rank_order(parts)
        optimizer.update(weights, gradients)
        report(step + 1, float(loss))
    return weights


def mean_in_rank_order(parts: list[Weights]) -> Weights:
    """Return ((part 0 + part 1) + part 2 ...) / n, for every array in the parts."""
    total = parts[0]
    for part in parts[1:]:
        total = [left + right for left, right in zip(total, part, strict=True)]
    return [array / np.float32(len(parts)) for array in total]


def first_difference(trained: list[Trained], expected: Weights) -> str | None:
    """Name the first place where the weights of a rank differ by a bit; None if none does."""
    for rank, one in enumerate(trained):
        for index, (got, wanted) in enumerate(zip(one.weights, expected, strict=True)):
            differs = got.view(np.uint32) != wanted.view(np.uint32)
            if differs.any():
                at = np.unravel_index(differs.argmax(), differs.shape)
                return (
                    f"rank {rank}, {name_of(index)}{[int(i) for i in at]}: {got[at]!s} instead of "
                    f"{wanted[at]!s} ({differs.sum()} of its {differs.size} numbers differ)"
                )
    return None


def run_demo(plan: Plan, progress: OpenProgress) -> Outcome:
    """Train on ranks, train alone, compare."""
    body = functools.partial(train, plan=plan, progress=progress)
    trained = run_on_ranks(plan.backend, plan.ranks, body)
    with progress("the same on one process") as report:
        expected = train_alone(plan, report)
    seconds = trained[0].seconds
    loss, accuracy = loss_and_accuracy(trained[0].weights, make_points(plan.seed + 1))
    return Outcome(
        backend=plan.backend,
        ranks=plan.ranks,
        steps=plan.steps,
        seed=plan.seed,
        seconds=seconds,
        samples_per_second=plan.ranks * plan.steps * SHARD_SIZE / seconds,
        final_loss=loss,
        accuracy=accuracy,
        bytes_exchanged=sum(one.sent_nbytes for one in trained),
        first_difference=first_difference(trained, expected),
        losses=trained[0].losses,
    )


@dataclass(frozen=True, slots=True)
class ShowProgress:
    """Shows how far a training is, in whatever process that runs."""

    steps: int

    def __call__(self, title: str) -> AbstractContextManager[Report]:
        """Open what shows it."""
        return open_progress(Console(highlight=False), title, self.steps)


def show_nothing(title: str) -> AbstractContextManager[Report]:
    """Open nothing."""
    return nullcontext(lambda step, loss: None)


@click.command()
@click.option(
    "-n", "--ranks", type=click.IntRange(min=1), metavar="N", default=4, show_default=True,
    help="How many ranks train together.",
)  # fmt: skip
@click.option(
    "--backend", type=click.Choice(backend_names()), default="shared_memory", show_default=True,
    help="What the ranks are: processes that share memory, or 'simulated', threads of this one.",
)  # fmt: skip
@click.option(
    "--steps", type=click.IntRange(min=1), metavar="N", default=7000, show_default=True,
    help="How many steps to train.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(min=0), metavar="N", default=0, show_default=True,
    help="Makes the data and the first weights.",
)  # fmt: skip
@click.option(
    "--chart", type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help=f"Where to draw the loss curve, as SVG.  [default: {DEFAULT_CHART}; with --json: nowhere]",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
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
    weights must be the same, bit for bit. Takes about 20 seconds. Exit code 1 if a bit differs.
    """
    plan = Plan(backend, ranks, steps, seed)
    outcome = _run_quietly(plan, chart) if as_json else _run_visibly(plan, chart or DEFAULT_CHART)
    context.exit(0 if outcome.weights_equal else 1)


def _run_quietly(plan: Plan, chart: Path | None) -> Outcome:
    outcome = run_demo(plan, show_nothing)
    click.echo(to_json(outcome))
    if chart is not None:
        write_chart(outcome, chart)
    return outcome


def _run_visibly(plan: Plan, chart: Path) -> Outcome:
    console = Console(highlight=False)
    console.print(
        "Training a small network to tell the arms of a spiral apart, on "
        f"{count_of_ranks(plan.ranks)} ({plan.backend}).\n"
        "In every step one allreduce averages the gradients of all ranks.\n",
        soft_wrap=True,
    )
    try:
        outcome = run_demo(plan, ShowProgress(plan.steps))
    finally:
        console.show_cursor()  # a rank that was ended in the middle left it hidden
    show_outcome(console, outcome)
    write_chart(outcome, chart)
    console.print("loss curve drawn in", str(chart), markup=False, soft_wrap=True)
    return outcome
