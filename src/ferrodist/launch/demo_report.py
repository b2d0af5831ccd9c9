# SPDX-License-Identifier: MIT OR Apache-2.0
"""What ``ferrodist demo`` says at its end: as a table and a curve, as JSON, as a chart."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from ferrodist.launch.chart import line_chart
from ferrodist.launch.sketch import sketch

_POINTS_OF_A_CURVE = 140


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out of the demo; loss and accuracy are of points it was not trained on."""

    backend: str
    ranks: int
    steps: int
    seed: int
    seconds: float
    samples_per_second: float
    final_loss: float
    accuracy: float
    bytes_exchanged: int
    first_difference: str | None
    losses: list[float]

    @property
    def weights_equal(self) -> bool:
        """True if every rank has the weights of a single process, bit for bit."""
        return self.first_difference is None

    def curve(self) -> list[tuple[float, float]]:
        """Return (step, loss) with neighbouring steps averaged, few enough to be drawn."""
        size = math.ceil(len(self.losses) / _POINTS_OF_A_CURVE)
        return [
            (min(start + size, len(self.losses)), _mean(self.losses[start : start + size]))
            for start in range(0, len(self.losses), size)
        ]


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def to_json(outcome: Outcome) -> str:
    """Return the outcome as one JSON object."""
    fields = asdict(outcome)
    del fields["losses"]
    fields |= {"weights_equal": outcome.weights_equal, "loss_curve": outcome.curve()}
    return json.dumps(fields)


def show_outcome(console: Console, outcome: Outcome) -> None:
    """Print the loss curve, the table and the check."""
    if not console.options.ascii_only:  # braille dots need more than ASCII
        values = [loss for _, loss in outcome.curve()]
        console.print("\nloss", sketch(values, end=f"step {outcome.steps}"), "", sep="\n")
    console.print(_table(outcome))
    verdict = "[green]yes[/]" if outcome.weights_equal else "[bold red]no[/]"
    console.print(f"weights equal a single-process run, bit for bit: {verdict}")
    if outcome.first_difference is not None:
        console.print("first difference:", outcome.first_difference, markup=False)


def _table(outcome: Outcome) -> Table:
    cells = {
        "ranks": str(outcome.ranks),
        "steps": str(outcome.steps),
        "samples/s": f"{outcome.samples_per_second:,.0f}",
        "final loss": f"{outcome.final_loss:.4f}",
        "accuracy": f"{outcome.accuracy:.1%}",
        "bytes exchanged": readable_nbytes(outcome.bytes_exchanged),
    }
    table = Table()
    for name in cells:
        table.add_column(name, justify="right")
    table.add_row(*cells.values())
    return table


def readable_nbytes(nbytes: float) -> str:
    """Write a number of bytes with at most four digits."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} bytes" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def count_of_ranks(ranks: int) -> str:
    """Write a number of ranks."""
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def write_chart(outcome: Outcome, path: Path) -> None:
    """Draw the loss curve into an SVG file."""
    chart = line_chart(
        {f"{count_of_ranks(outcome.ranks)}, {outcome.backend}": outcome.curve()},
        title="ferrodist demo: telling the arms of a spiral apart",
        x_label="step",
        y_label="cross entropy",
    )
    try:
        path.write_text(chart, encoding="utf-8")
    except OSError as error:
        raise click.FileError(str(path), error.strerror or str(error)) from error
