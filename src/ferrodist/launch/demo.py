# SPDX-License-Identifier: MIT OR Apache-2.0
"""``ferrodist demo``: train a small network on several ranks, and check every bit of it.

The command starts this file as the program of every rank, as any launcher can: ``torchrun -m
ferrodist.launch.demo``. ``train`` is an ordinary training loop; all that is distributed about it is
two calls of ferrodist.
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import ferrodist
from ferrodist.config import Config
from ferrodist.launch.bench import write_text
from ferrodist.launch.chart import ShowProgress, line_chart, open_progress, sketch
from ferrodist.launch.machine import count_of_ranks, readable_nbytes
from ferrodist.launch.main import STOPPED_BY_USER
from ferrodist.launch.run import run
from ferrodist.testing import run_ranks

F = TypeVar("F", bound=Callable[..., Any])
Array = NDArray[np.float32]
Weights = list[Array]  # matrix and bias of layer 1, matrix and bias of layer 2, ...

DEFAULT_CHART = Path("ferrodist-demo.svg")
_PROGRAM = "ferrodist.launch.demo"
_POINTS_OF_A_CURVE = 140

_ARMS, _TURNS, _NOISE = 3, 2.0, 0.02
_LAYER_SIZES = (2, 64, 64, _ARMS)
_LEARNING_RATE, _MOMENTUM = np.float32(0.03), np.float32(0.9)
# 32 x 64 x 64 is small enough for BLAS to stay on one thread, so a product has the same bits in
# every run, however busy the machine is.
_SHARD_SIZE = 32

_OPTIONS = [
    click.option(
        "--steps", type=click.IntRange(min=1), metavar="N", default=7000, show_default=True,
        help="Number of training steps.",
    ),
    click.option(
        "--seed", type=click.IntRange(min=0), metavar="N", default=0, show_default=True,
        help="Seed of the data and the initial weights.",
    ),
    click.option(
        "--chart", type=click.Path(dir_okay=False, writable=True, path_type=Path),
        help="Draw the loss curve to this SVG file.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."),
]  # fmt: skip


def _demo_options(command: F) -> F:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command()
@click.option(
    "-n", "--ranks", type=click.IntRange(min=1), metavar="N", default=4, show_default=True,
    help="Number of ranks.",
)  # fmt: skip
@click.option(
    "--backend", type=click.Choice(["shared_memory", "simulated"]), default="shared_memory",
    metavar="[shared_memory|simulated]", show_default=True,
    help="shared_memory: ranks are processes; simulated: threads of this process.",
)  # fmt: skip
@_demo_options
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
    """Train a small network on several ranks and verify the result bit for bit.

    Makes points on a spiral of three arms and trains a network in plain NumPy to tell the arms
    apart. In every step each rank computes the gradients of its own shard of the batch, and one
    allreduce averages them. Then a single process computes the same shards one after the other; its
    weights must be the same, bit for bit. Takes about 20 seconds. Exit code 1 if a bit differs. The
    loss curve is drawn in ferrodist-demo.svg, or with --json only where --chart says.
    """
    if chart is None and not as_json:
        chart = DEFAULT_CHART
    if not as_json:
        click.echo(
            "Training a small network to tell the arms of a spiral apart, on "
            f"{count_of_ranks(ranks)} ({backend}).\n"
            "In every step one allreduce averages the gradients of all ranks.\n"
        )
    if backend == "simulated":
        context.exit(_run_threads(Plan(backend, ranks, steps, seed), chart, as_json))
    options = ["--steps", str(steps), "--seed", str(seed)]
    options += ["--chart", str(chart)] if chart is not None else []
    options += ["--json"] if as_json else []
    context.exit(_run_processes(ranks, options, as_json))


def _run_processes(ranks: int, options: list[str], as_json: bool) -> int:
    arguments = ["-n", str(ranks), "-m", _PROGRAM, *options]
    if not as_json:
        click.echo(f"$ {shlex.join(['ferrodist', 'run', *arguments])}")
    code: int = run.main(arguments, prog_name="ferrodist run", standalone_mode=False)
    if code == STOPPED_BY_USER:
        Console().show_cursor()  # a rank that was ended in the middle left it hidden
        click.echo("\nstopped", err=True)
    return code


def _run_threads(plan: Plan, chart: Path | None, as_json: bool) -> int:
    def body(backend: ferrodist.Backend) -> bool:
        return run_rank(backend, plan, chart, as_json=as_json)

    # A command runs as long as its user likes; a stuck rank is found by the calls themselves.
    return 0 if all(run_ranks(plan.ranks, body, timeout=None)) else 1


# -- what a rank does -----------------------------------------------------------------------------


@click.command()
@_demo_options
@click.pass_context
def program(
    context: click.Context, steps: int, seed: int, chart: Path | None, as_json: bool
) -> None:
    """Train with the other ranks of the job that this process is started in."""
    try:
        backend = ferrodist.init()
        chosen = Config.from_environment().backend
        name = "shared_memory" if chosen == "auto" else chosen  # as init() chooses on one host
        plan = Plan(name, backend.world_size, steps, seed)
        is_right = run_rank(backend, plan, chart, as_json=as_json)
    except KeyboardInterrupt:
        context.exit(STOPPED_BY_USER)
    except ferrodist.DistributedError as error:
        raise click.ClickException(str(error)) from error
    context.exit(0 if is_right else 1)


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


def run_rank(backend: ferrodist.Backend, plan: Plan, chart: Path | None, *, as_json: bool) -> bool:
    """Train with the others; rank 0 then trains alone, compares, and says how it went.

    Returns False if a bit differs, which only rank 0 knows.
    """
    is_shown, ranks = backend.rank == 0 and not as_json, count_of_ranks(plan.ranks)
    with _progress(f"training on {ranks}", plan, is_shown) as report:
        mine = train(backend, plan, report)
    trained = gather_trained(backend, mine)
    if backend.rank != 0:
        return True
    with _progress("the same on one process", plan, is_shown) as report:
        expected = train_alone(plan, report)
    outcome = _judge(plan, trained, expected)
    console = Console(highlight=False)
    if as_json:
        click.echo(json.dumps(outcome))
    else:
        _show(console, outcome)
    if chart is not None:
        picture = line_chart(
            {f"{ranks}, {plan.backend}": outcome["loss_curve"]},
            title="ferrodist demo: telling the arms of a spiral apart",
            x_label="step",
            y_label="cross entropy",
        )
        write_text(chart, picture)
        if not as_json:
            console.print("loss curve drawn in", str(chart), markup=False, soft_wrap=True)
    return bool(outcome["weights_equal"])


def _progress(title: str, plan: Plan, is_shown: bool) -> AbstractContextManager[ShowProgress]:
    if not is_shown:
        return nullcontext(lambda step, loss: None)
    return open_progress(Console(highlight=False), title, plan.steps)


def train(backend: ferrodist.Backend, plan: Plan, report: ShowProgress) -> Trained:
    points = make_points(plan.seed)
    weights = ferrodist.broadcast(new_weights(plan.seed), backend)
    optimizer, losses, start = Momentum(weights), [], time.perf_counter()
    for step in range(plan.steps):
        shard = take_shard(points, plan.seed, step, backend.rank, backend.world_size)
        loss, gradients = loss_and_gradients(weights, shard)
        # One call averages the loss and all gradients over the ranks. Reducing in rank order makes
        # the bits those of ``train_alone``, whichever algorithm and backend do the work.
        loss, *gradients = ferrodist.allreduce(
            [loss, *gradients], backend, op="mean", reproducible=True
        )
        optimizer.update(weights, gradients)
        losses.append(float(loss))
        report(step + 1, losses[-1])
    seconds = time.perf_counter() - start
    return Trained(weights, losses, seconds, backend.statistics().sent_nbytes)


def train_alone(plan: Plan, report: ShowProgress) -> Weights:
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


def gather_trained(backend: ferrodist.Backend, mine: Trained) -> list[Trained]:
    everybodys = [ferrodist.gather(array[None], backend) for array in mine.weights]
    sent = ferrodist.gather_object(mine.sent_nbytes, backend)
    if sent is None:
        return []
    return [
        Trained([arrays[rank] for arrays in everybodys], mine.losses, mine.seconds, sent[rank])
        for rank in range(backend.world_size)
    ]


def first_difference(trained: list[Trained], expected: Weights) -> str | None:
    """Name the first place where the weights of a rank differ by a bit; None if none does."""
    for rank, one in enumerate(trained):
        for index, (got, wanted) in enumerate(zip(one.weights, expected, strict=True)):
            differs = got.view(np.uint32) != wanted.view(np.uint32)
            if differs.any():
                at = np.unravel_index(differs.argmax(), differs.shape)
                name = f"layer {index // 2 + 1} {'bias' if index % 2 else 'matrix'}"
                return (
                    f"rank {rank}, {name}{[int(i) for i in at]}: {got[at]!s} instead of "
                    f"{wanted[at]!s} ({differs.sum()} of its {differs.size} numbers differ)"
                )
    return None


# -- the task: nothing here is distributed, all is float32 and made from a seed -------------------


class Points(NamedTuple):
    """Places in the plane and the arm of the spiral that each belongs to."""

    places: Array
    arms: NDArray[np.int64]


def make_points(seed: int, count: int = 4000) -> Points:
    random = np.random.default_rng(seed)
    arms = random.integers(_ARMS, size=count)
    radius = np.sqrt(random.random(count))
    angle = 2 * np.pi * (_TURNS * radius + arms / _ARMS)
    places = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    places += random.normal(scale=_NOISE, size=places.shape)
    return Points(places.astype(np.float32), arms)


def take_shard(points: Points, seed: int, step: int, rank: int, num_ranks: int) -> Points:
    random = np.random.default_rng([seed, step])
    batch = random.integers(len(points.arms), size=(num_ranks, _SHARD_SIZE))
    return Points(points.places[batch[rank]], points.arms[batch[rank]])


def new_weights(seed: int) -> Weights:
    random = np.random.default_rng(seed)
    weights = []
    for inputs, outputs in itertools.pairwise(_LAYER_SIZES):
        matrix = random.normal(scale=np.sqrt(2 / inputs), size=(inputs, outputs))
        weights += [matrix.astype(np.float32), np.zeros(outputs, np.float32)]
    return weights


def loss_and_gradients(weights: Weights, points: Points) -> tuple[Array, Weights]:
    layers = _forward(weights, points.places)
    loss, slope = _cross_entropy(layers[-1], points.arms)
    gradients: Weights = []
    for index in reversed(range(len(layers) - 1)):
        entering, matrix = layers[index], weights[2 * index]
        gradients[:0] = [entering.T @ slope, slope.sum(axis=0)]
        slope = slope @ matrix.T * (1 - entering * entering)  # 1 - tanh², through the layer below
    return loss, gradients


class Momentum:
    """Gradient descent that keeps part of its last step."""

    def __init__(self, weights: Weights) -> None:
        self._steps = [np.zeros_like(weight) for weight in weights]

    def update(self, weights: Weights, gradients: Weights) -> None:
        for weight, step, gradient in zip(weights, self._steps, gradients, strict=True):
            step *= _MOMENTUM
            step -= _LEARNING_RATE * gradient
            weight += step


def _forward(weights: Weights, places: Array) -> list[Array]:
    """Return what enters each layer and, last, the scores of the arms."""
    layers = [places]
    for matrix, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        layers.append(np.tanh(layers[-1] @ matrix + bias))
    return [*layers, layers[-1] @ weights[-2] + weights[-1]]


def _cross_entropy(scores: Array, arms: NDArray[np.int64]) -> tuple[Array, Array]:
    shifted = scores - scores.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    sums = exponentials.sum(axis=1, keepdims=True)
    own = np.arange(len(arms)), arms
    loss = np.mean(np.log(sums[:, 0]) - shifted[own])
    slope = exponentials / sums
    slope[own] -= 1
    return np.asarray(loss, np.float32), slope / np.float32(len(arms))


# -- what came out of it --------------------------------------------------------------------------


def _judge(plan: Plan, trained: list[Trained], expected: Weights) -> dict[str, Any]:
    """Return what --json prints; loss and accuracy are of points it was not trained on."""
    points = make_points(plan.seed + 1)
    scores = _forward(trained[0].weights, points.places)[-1]
    difference = first_difference(trained, expected)
    return {
        **asdict(plan),
        "seconds": trained[0].seconds,
        "samples_per_second": plan.ranks * plan.steps * _SHARD_SIZE / trained[0].seconds,
        "final_loss": float(_cross_entropy(scores, points.arms)[0]),
        "accuracy": float(np.mean(scores.argmax(axis=1) == points.arms)),
        "bytes_exchanged": sum(one.sent_nbytes for one in trained),
        "first_difference": difference,
        "weights_equal": difference is None,
        "loss_curve": _curve(trained[0].losses),
    }


def _curve(losses: list[float]) -> list[tuple[float, float]]:
    """Return (step, loss) with neighbouring steps averaged, few enough to be drawn."""
    size = math.ceil(len(losses) / _POINTS_OF_A_CURVE)
    parts = [losses[at : at + size] for at in range(0, len(losses), size)]
    ends = itertools.accumulate(map(len, parts))
    return [(end, math.fsum(part) / len(part)) for end, part in zip(ends, parts, strict=True)]


def _show(console: Console, outcome: dict[str, Any]) -> None:
    if not console.options.ascii_only:  # braille dots need more than ASCII
        values = [loss for _, loss in outcome["loss_curve"]]
        console.print("\nloss", sketch(values, end=f"step {outcome['steps']}"), "", sep="\n")
    cells = {
        "ranks": str(outcome["ranks"]),
        "steps": str(outcome["steps"]),
        "samples/s": f"{outcome['samples_per_second']:,.0f}",
        "test loss": f"{outcome['final_loss']:.4f}",
        "test accuracy": f"{outcome['accuracy']:.1%}",
        "bytes exchanged": readable_nbytes(outcome["bytes_exchanged"]),
    }
    table = Table()
    for name in cells:
        table.add_column(name, justify="right")
    table.add_row(*cells.values())
    console.print(table)
    answer = "[green]yes[/]" if outcome["weights_equal"] else "[bold red]no[/]"
    console.print(f"weights equal a single-process run, bit for bit: {answer}")
    if outcome["first_difference"] is not None:
        console.print("first difference:", outcome["first_difference"], markup=False)


if __name__ == "__main__":
    program()
