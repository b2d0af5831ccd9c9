# SPDX-License-Identifier: MIT OR Apache-2.0
"""``python -m benchmarks.compare``: its options, and what is done with them."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import click
from benchmarks.compare.driver import Effort, run_parts
from benchmarks.compare.engines import ENGINES
from benchmarks.compare.page import write_charts, write_page
from benchmarks.compare.plan import COLLECTIVES, PARTS, QUICK_SIZES, SIZES, Wish, plan_parts
from benchmarks.compare.report import Document, join_documents
from benchmarks.compare.tables import open_bench_progress, show_document
from rich.console import Console

from ferrodist.launch.bench import parse_names, parse_sizes, write_text
from ferrodist.launch.machine import describe_machine

_QUICK = Effort(rounds=2, round_seconds=0.02, lane_seconds=0.2, most_repeats=1000)
_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


def parse_ranks(context: click.Context, option: click.Parameter, text: str) -> list[int]:
    """Read numbers of ranks; one rank has nobody to talk to."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 1 for word in words):
        raise click.BadParameter(f"{text!r} must be numbers of 2 or more, such as 2,4")
    return [int(word) for word in words]


@click.command()
@click.option(
    "--parts", metavar="NAME,...", callback=parse_names(lambda: PARTS),
    help="Which parts: shared_memory (against all), tcp (against Gloo), ddp (a training step), "
    "calls (any array, and in flight), messages (against MPI), busy (cores that others use too, "
    "against Gloo), torch (torch.distributed on ferrodist against Gloo).  [default: all]",
)  # fmt: skip
@click.option(
    "--ranks", metavar="N,...", default="2,4", show_default=True, callback=parse_ranks,
    help="Numbers of ranks; all parts but shared_memory take the smallest.",
)  # fmt: skip
@click.option(
    "--sizes", metavar="SIZE,...", callback=parse_sizes,
    help="Sizes in bytes.  [default: 8,1KB,64KB,1MB,16MB,64MB; with --quick: 8,64KB,1MB]",
)  # fmt: skip
@click.option(
    "--collectives", metavar="NAME,...", callback=parse_names(lambda: COLLECTIVES),
    help=f"Which calls, of {', '.join(COLLECTIVES)}.  [default: all]",
)  # fmt: skip
@click.option(
    "--engines", metavar="NAME,...", callback=parse_names(lambda: ENGINES),
    help=f"Which libraries, of {', '.join(ENGINES)}.  [default: all]",
)  # fmt: skip
@click.option("--quick", is_flag=True, help="Fewer sizes and repeats: a first look in a minute.")
@click.option("--json", "json_file", type=_FILE, help="Write all results as JSON.")
@click.option(
    "--chart", type=_FILE, help="Draw allreduce, and in files beside it the ratios, as SVG."
)
@click.option("--docs", type=_FILE, help="Write a page of the documentation, with pictures.")
@click.option(
    "--from", "measured", multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Show the results of this JSON file, or of several together; measure nothing.",
)  # fmt: skip
def compare(
    parts: list[str],
    ranks: list[int],
    sizes: list[int],
    collectives: list[str],
    engines: list[str],
    quick: bool,
    json_file: Path | None,
    chart: Path | None,
    docs: Path | None,
    measured: tuple[Path, ...],
) -> None:
    """Compare ferrodist with MPICH, Open MPI and Gloo on this machine.

    The libraries of a part run at once but take turns, call by call and size by size; the ranks of
    those that wait sleep. Takes about a quarter of an hour. Start it through "make bench", which
    gets the peers, and leave the machine alone while it runs.
    """
    console = Console(highlight=False)
    if measured:
        document = join_documents([json.loads(file.read_text("utf-8")) for file in measured])
    else:
        sizes = sizes or list(QUICK_SIZES if quick else SIZES)
        wish = Wish(parts, engines, ranks, collectives, sizes)
        document = _measure(console, wish, _QUICK if quick else Effort())
    if json_file is not None:
        write_text(json_file, json.dumps(document, indent=1) + "\n")
    show_document(console, document)
    _write_pictures(console, document, chart, docs)


def _measure(console: Console, wish: Wish, effort: Effort) -> Document:
    """Run what was asked for and return the document that describes it."""
    parts, missing = plan_parts(wish)
    total = sum(part.num_blocks for part in parts)
    with open_bench_progress(console, total) as report:
        outcome = run_parts(parts, effort, report)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "missing": missing,
        **outcome.as_dict(),
    }


def _write_pictures(
    console: Console, document: Document, chart: Path | None, docs: Path | None
) -> None:
    if not document["results"]:
        raise click.ClickException("nothing was measured")
    if chart is not None:
        drawn = " and ".join(str(path) for path in write_charts(document, chart))
        text = f"drawn in {drawn}" if drawn else "nothing to draw"
        console.print(text, markup=False, soft_wrap=True)
    if docs is not None:
        write_page(document, docs)
        console.print("page written to", str(docs), markup=False, soft_wrap=True)


if __name__ == "__main__":
    compare(prog_name="python -m benchmarks.compare")
