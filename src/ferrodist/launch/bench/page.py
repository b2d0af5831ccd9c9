# SPDX-License-Identifier: MIT OR Apache-2.0
"""Write the results of a benchmark to files: the pictures, and a page of the documentation."""

from __future__ import annotations

from pathlib import Path

import click

from ferrodist.launch.bench.engines import TITLES
from ferrodist.launch.bench.pictures import draw_pictures
from ferrodist.launch.bench.report import Document
from ferrodist.launch.bench.tables import TextTable, make_remarks, make_tables

_HEAD = """# Benchmarks

<!-- Written by "ferrodist bench --docs"; changes made by hand are lost. -->

ferrodist, MPICH, Open MPI and Gloo side by side: one run, in which they take turns on every call
and size, so that a busy machine slows all alike. float32, shared memory, every call through its
public Python function with a result array given. Times are medians of the slowest rank in
microseconds; a ratio of speed of 2 means that ferrodist is twice as quick as the faster MPI, or as
Gloo. The size of gather, all_gather and scatter is what one rank gives or gets, of the others the
whole array. Only the ratios carry over to other machines: `make bench` measures on yours.
"""


def write_charts(document: Document, path: Path) -> dict[Path, str]:
    """Draw what there are results for, in files named after this one; return their captions."""
    captions: dict[Path, str] = {}
    for picture in draw_pictures(document):
        file = path.with_name(f"{path.stem}{picture.suffix}{path.suffix}")
        write_text(file, picture.svg)
        captions[file] = picture.caption
    return captions


def write_page(document: Document, path: Path) -> None:
    """Write the page, and its pictures beside it."""
    captions = write_charts(document, path.with_suffix(".svg"))
    pictures = [f"![{caption}]({file.name})\n" for file, caption in captions.items()]
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
    about = [table.about, ""] if table.about else []
    return "\n".join([f"## {table.title}", "", *about, *lines, ""])


def write_text(path: Path, text: str) -> None:
    """Write a file, or end with one line that says why not."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.FileError(str(path), error.strerror or str(error)) from error
