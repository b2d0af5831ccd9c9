# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a call costs on simulated ranks, and what importing ferrodist costs.

Simulated ranks are threads connected by socket pairs: these numbers say how quickly tests run,
nothing about training. Run ``python benchmarks/latency.py``.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import ferrodist
from ferrodist.testing import run_ranks

NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"  # would measure the compiler

CALLS: dict[str, Callable[..., object]] = {
    "allreduce": ferrodist.allreduce,
    "broadcast": ferrodist.broadcast,
    "all_gather": ferrodist.all_gather,
    "reduce_scatter": ferrodist.reduce_scatter,
    "barrier": lambda x, backend: ferrodist.barrier(backend),
}


def median_microseconds(
    call: Callable[..., object], count: int, repeats: int, backend: ferrodist.Backend
) -> float:
    x = np.ones(count)
    samples = []
    for _ in range(repeats + 5):
        start = time.perf_counter()
        call(x, backend)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[5:]) * 1e6


def slowest_rank(call: Callable[..., object], world: int, count: int, repeats: int) -> float:
    return max(run_ranks(world, partial(median_microseconds, call, count, repeats)))


def calls_table(worlds: list[int], repeats: int) -> Table:
    table = Table(title="simulated ranks, median microseconds a call, slowest rank")
    table.add_column("call", no_wrap=True)
    for world in worlds:
        table.add_column(f"{world} x 64 B", justify="right", no_wrap=True)
        table.add_column(f"{world} x 1 MiB", justify="right", no_wrap=True)
    for name, call in CALLS.items():
        row = []
        for world in worlds:
            row.append(f"{slowest_rank(call, world, 8, repeats):.0f}")
            row.append(f"{slowest_rank(call, world, 1 << 17, max(5, repeats // 10)):.0f}")
        table.add_row(name, *row)
    return table


def import_seconds(module: str) -> float:
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    environ = {name: text for name, text in os.environ.items() if name != NO_BYTECODE}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def import_ratio(repeats: int = 15) -> float:
    """Compare the two imports pair by pair, so that both meet the machine in the same mood."""
    import_seconds("ferrodist")  # writes the bytecode
    pairs = [(import_seconds("ferrodist"), import_seconds("numpy")) for _ in range(repeats)]
    return statistics.median(ours / theirs for ours, theirs in pairs)


@click.command(help=__doc__)
@click.option("--repeats", default=200, show_default=True, help="calls per sample")
def main(repeats: int) -> None:
    console = Console(width=110)  # a log is no narrower than the table
    console.print(calls_table([2, 4, 8], repeats))
    console.print(f"import ferrodist takes {import_ratio():.2f} times as long as import numpy")


if __name__ == "__main__":
    main()
