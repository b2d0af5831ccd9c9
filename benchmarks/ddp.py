# SPDX-License-Identifier: MIT OR Apache-2.0
"""What DDP adds to a training step: ferrodist's, and torch's own over Gloo, beside no DDP at all.

An MLP of 14 million parameters on two ranks. The three kinds of step take turns in one run, all
ranks at the same time, so that they meet the machine in the same mood. Run
``python benchmarks/ddp.py``.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import click
import numpy as np
import torch
import torch.distributed
from rich.console import Console
from rich.table import Table

import ferrodist

WIDTH, NUM_LAYERS, BATCH = 2048, 3, 64
GOAL = 1.15  # times the step without DDP

Step = Callable[[], None]


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(NUM_LAYERS):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 800))


def make_step(model: torch.nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def torch_ddp(model: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model)


def measure(backend: ferrodist.Backend, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of every step of every kind, taking turns."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.distributed.init_process_group("gloo")
    steps = {
        "without DDP": make_step(make_model()),
        "ferrodist.DDP": make_step(ferrodist.DDP(make_model(), backend)),
        "torch DDP, Gloo": make_step(torch_ddp(make_model())),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 3):
        for name, step in steps.items():
            ferrodist.barrier(backend)
            start = time.perf_counter()
            step()
            if turn >= 3:  # buckets are laid out, memory is warm
                seconds[name].append(time.perf_counter() - start)
    torch.distributed.destroy_process_group()
    return seconds


@click.command()
@click.option("--ranks", default=2, show_default=True)
@click.option("--repeats", default=30, show_default=True)
def main(ranks: int, repeats: int) -> None:
    """Print the median step of the slowest rank, and how many times that of no DDP it is."""
    results = ferrodist.run(measure, ranks, args=(repeats,))
    num_parameters = sum(parameter.numel() for parameter in make_model().parameters())
    table = Table(title=f"a step of {num_parameters / 1e6:.1f} M parameters on {ranks} ranks")
    for column in ("step", "median ms", "times no DDP", "goal"):
        table.add_column(column, justify="left" if column == "step" else "right")
    base = np.max([statistics.median(one["without DDP"]) for one in results])
    for name in results[0]:
        median = np.max([statistics.median(one[name]) for one in results])
        goal = f"{GOAL}" if name == "ferrodist.DDP" else ""
        table.add_row(name, f"{median * 1e3:.1f}", f"{median / base:.2f}", goal)
    Console().print(table)


if __name__ == "__main__":
    main()
