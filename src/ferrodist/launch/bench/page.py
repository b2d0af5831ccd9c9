# SPDX-License-Identifier: MIT OR Apache-2.0
"""Write the results of a benchmark to files: the pictures, and a page of the documentation."""

from __future__ import annotations

from pathlib import Path

import click

from ferrodist.launch.bench.engines import ENGINES, TITLES
from ferrodist.launch.bench.report import Document, peer_rows, times_of
from ferrodist.launch.bench.tables import TextTable, make_remarks, make_tables
from ferrodist.launch.chart import Point, line_chart

_HEAD = """# Benchmarks

<!-- Written by "ferrodist bench --docs"; changes made by hand are lost. -->

ferrodist, MPICH, Open MPI and Gloo side by side: one run, in which they take turns on every call
and size, so that a busy machine slows all alike. float32, shared memory, every call through its
public Python function with a result array given. Times are medians of the slowest rank in
microseconds; a ratio of speed of 2 means that ferrodist is twice as quick as the faster MPI, or as
Gloo. The size of gather, all_gather and scatter is what one rank gives or gets, of the others the
whole array. Only the ratios carry over to other machines: `make bench` measures on yours.
"""


def write_charts(document: Document, path: Path) -> list[Path]:
    """Draw the curve of allreduce, and beside it the ratios of all calls; return both files."""
    ranks = min(one["ranks"] for one in document["results"])
    beside = path.with_name(f"{path.stem}-ratios{path.suffix}")
    write_text(path, _time_chart(document, "allreduce", ranks))
    write_text(beside, _ratio_chart(document, ranks))
    return [path, beside]


def _time_chart(document: Document, call: str, ranks: int) -> str:
    times = times_of(document)
    lines: dict[str, list[Point]] = {}
    for engine in ENGINES:
        for variant in ("", "shared"):
            points = sorted(
                (float(nbytes), median)
                for (name, what, how, nbytes, size), median in times.items()
                if (name, what, how, size) == (engine, call, variant, ranks)
            )
            label = f"{TITLES[engine]}, shared arrays" if variant else TITLES[engine]
            lines |= {label: points} if points else {}
    return line_chart(
        lines,
        title=f"{call} on {ranks} ranks: less is better",
        x_label="bytes",
        y_label="median µs, slowest rank",
        log_x=True,
        log_y=True,
    )


def _ratio_chart(document: Document, ranks: int) -> str:
    lines: dict[str, list[Point]] = {}
    for row in peer_rows(document):
        if row.ranks == ranks and row.nbytes and row.to_mpi.value is not None:
            lines.setdefault(row.call, []).append((float(row.nbytes), row.to_mpi.value))
    return line_chart(
        lines,
        title=f"ferrodist on {ranks} ranks against the faster MPI: more is better",
        x_label="bytes",
        y_label="times the speed",
        log_x=True,
        log_y=True,
    )


def write_page(document: Document, path: Path) -> None:
    """Write the page, and its pictures beside it."""
    times, ratios = write_charts(document, path.with_suffix(".svg"))
    pictures = [
        f"![Time of an allreduce by its size]({times.name})\n",
        f"![Speed of every call against the faster MPI]({ratios.name})\n",
    ]
    facts = "\n".join(f"- {fact}" for fact in [*_facts(document), *make_remarks(document)])
    tables = [_markdown(table) for table in make_tables(document)]
    write_text(path, "\n".join([_HEAD, facts, "", *pictures, *tables]).rstrip() + "\n")


def _facts(document: Document) -> list[str]:
    """Say when, on what machine, and with which versions it was measured."""
    machine = document["machine"]
    facts = [
        f"measured on {document['date']}: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gb']} GB, Linux {machine['kernel']}"
    ]
    for engine, versions in document["versions"].items():
        named = ", ".join(f"{name} {version}" for name, version in versions.items())
        facts.append(f"{TITLES[engine]}: {named.removeprefix('library ')}")
    return facts


def _markdown(table: TextTable) -> str:
    rule = [":--", *["--:"] * (len(table.columns) - 1)]
    lines = [f"| {' | '.join(cells)} |" for cells in [list(table.columns), rule, *table.rows]]
    return "\n".join([f"## {table.title}", "", *lines, ""])


def write_text(path: Path, text: str) -> None:
    """Write a file, or end with one line that says why not."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.FileError(str(path), error.strerror or str(error)) from error
