# SPDX-License-Identifier: MIT OR Apache-2.0
"""Show a benchmark in the terminal: how far it is, and what came out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ferrodist.launch.bench.driver import Report
from ferrodist.launch.bench.report import Document
from ferrodist.launch.bench.tables import MET, MISSED, TextTable, make_remarks, make_tables
from ferrodist.launch.progress import is_live

_LINES_IN_A_LOG = 12
_ASCII: dict[str, str | int | None]
_ASCII = {"µ": "u", "≥": ">=", "≤": "<=", MET: "met", MISSED: "missed"}


@contextmanager
def open_bench_progress(console: Console, total: int) -> Iterator[Report]:
    """Show how many blocks are done: a bar on a terminal, a few lines in a log."""
    if not is_live(console):
        yield _plain_report(console, total)
        return
    columns = (
        TextColumn("measuring"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting the ranks", total=total)
        yield lambda title: progress.update(task, advance=1, description=title)


def _plain_report(console: Console, total: int) -> Report:
    done = 0
    every = max(1, total // _LINES_IN_A_LOG)

    def report(title: str) -> None:
        nonlocal done
        done += 1
        if done % every == 0 or done == total:
            console.print(f"measured {done} of {total}: {title}")

    return report


def show_document(console: Console, document: Document) -> None:
    """Print all tables, and what is to be said about them."""
    letters = str.maketrans(_ASCII if console.options.ascii_only else {})
    lines = ["Medians of the slowest rank in µs; ratios of speed.".translate(letters)]
    for table in make_tables(document):
        table.rows[:] = [[cell.translate(letters) for cell in row] for row in table.rows]
        lines += ["", f"[bold]{table.title}[/]", *_table_lines(table)]
    lines += ["", *map(escape, make_remarks(document))]
    console.print("\n".join(lines), soft_wrap=True)


def _table_lines(table: TextTable) -> Iterator[str]:
    """Write a table without lines, so that it fits into eighty columns."""
    is_grouped = table.columns[1] == "size"
    columns, *rows = [row[is_grouped:] for row in ([*table.columns], *table.rows)]
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    yield f"[dim]{_line(columns, widths)}[/]"
    last = ""
    for (call, *_), cells in zip(table.rows, rows, strict=True):
        if is_grouped and call != last:
            yield f"[bold cyan]{call}[/]"
        last = call
        yield _coloured(_line(cells, widths))


def _line(cells: list[str], widths: list[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    texts = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
    return f"  {'  '.join(texts)}".rstrip()


def _coloured(line: str) -> str:
    return line.replace(MET, f"[green]{MET}[/]").replace(MISSED, f"[bold red]{MISSED}[/]")
