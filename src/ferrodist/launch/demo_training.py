# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a rank of the demo does: train with the others, and show that one alone gets the same bits.

``train`` is an ordinary training loop; all that is distributed about it is two calls of ferrodist.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
from rich.console import Console

import ferrodist
from ferrodist.launch.demo_report import Outcome, count_of_ranks
from ferrodist.launch.progress import Report, open_progress
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


def gather_trained(backend: ferrodist.Backend, mine: Trained) -> list[Trained]:
    """Bring what all ranks have to rank 0, which looks at it; the others get nothing."""
    everybodys = [ferrodist.gather(array[None], backend) for array in mine.weights]
    sent = ferrodist.gather_object(mine.sent_nbytes, backend)
    if sent is None:
        return []
    return [
        Trained([arrays[rank] for arrays in everybodys], mine.losses, mine.seconds, sent[rank])
        for rank in range(backend.world_size)
    ]


def run_demo(backend: ferrodist.Backend, plan: Plan, progress: OpenProgress) -> Outcome | None:
    """Train on all ranks; rank 0 then trains alone, compares, and has the outcome."""
    mine = train(backend, plan, progress)
    trained = gather_trained(backend, mine)
    if backend.rank != 0:
        return None
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
