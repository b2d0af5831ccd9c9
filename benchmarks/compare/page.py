# SPDX-License-Identifier: MIT OR Apache-2.0
"""Write the results to files: the pictures, and a page of the documentation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.compare.engines import ENGINES, TITLES
from benchmarks.compare.report import Document, TcpRow, peer_rows, tcp_rows, times_of
from benchmarks.compare.tables import TextTable, make_remarks, make_tables

from ferrodist.launch.bench import write_text
from ferrodist.launch.chart import Point, line_chart

_HEAD = """# Benchmarks

<!-- Written by "python -m benchmarks.compare --docs"; changes made by hand are lost. -->

ferrodist, MPICH, Open MPI and Gloo side by side: one run, in which they take turns on every call
and size, so that a busy machine slows all alike. float32, shared memory, every call through its
public Python function with a result array given. Times are medians of the slowest rank in
microseconds; a ratio of speed of 2 means that ferrodist is twice as quick as the faster MPI, or as
Gloo. The size of gather, all_gather and scatter is what one rank gives or gets, of the others the
whole array. Only the ratios carry over to other machines.

`make bench`, in a checkout of ferrodist, gets the peers and measures on your machine; after that
`.venv/bin/python -m benchmarks.compare --help` lists what can be measured alone, drawn and written.
For the times of your backends and sizes alone, on an installed ferrodist, run `ferrodist bench`.
"""

_TAIL = """\
## Your own backends

`ferrodist bench` needs nothing but ferrodist. It prints latency and bandwidth of every backend that
runs on your machine, or of those you name, and warns if other processes use the cores, as it did
in this run, where compilers kept both cores busy:

```console
$ ferrodist bench -n 2 --backend shared_memory --calls allreduce --sizes 8,64KB,16MB
shared_memory, 2 ranks
call        size  median µs   p90 µs       rate
allreduce    8 B        0.5      0.6  14.8 MB/s
           64 KB        4.5      5.6  14.5 GB/s
           16 MB    6 043.7  8 435.2  2.78 GB/s
```

| option | what it says |
| :-- | :-- |
| `-n N` | how many ranks; one per core unless set |
| `--backend NAME,...` | which backends, also your own; all that run here unless set |
| `--calls NAME,...` | which calls; `send_recv` is half of a round trip |
| `--sizes SIZE,...` | sizes in bytes, such as `8,64KB,1MB` |
| `--json FILE` | write the results, the machine and its load |
| `--chart FILE.svg` | draw the medians: the first call by backend, or all calls of one backend |

Times are those of the slowest rank; the rate is the size divided by the median.
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
    write_text(path, "\n".join([_HEAD, facts, "", *pictures, *tables, _TAIL]))


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


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing, what it shows, and what the name of its file ends in."""

    suffix: str
    caption: str
    svg: str


def draw_pictures(document: Document) -> Iterator[Picture]:
    """Draw allreduce, the ratios of all calls, and those over TCP, each on the fewest ranks."""
    if peers := peer_rows(document):
        ranks = min(row.ranks for row in peers)
        times = _time_chart(document, "allreduce", ranks)
        yield Picture("", "Time of an allreduce by its size", times)
        ratios = _ratio_chart(document, ranks)
        yield Picture("-ratios", "Speed of every call against the faster MPI", ratios)
    if rows := tcp_rows(document):
        tcp = _tcp_chart(rows, min(row.ranks for row in rows))
        yield Picture("-tcp", "Speed over TCP against Gloo", tcp)


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
    return _draw_ratios(lines, f"ferrodist on {ranks} ranks against the faster MPI")


def _tcp_chart(rows: list[TcpRow], ranks: int) -> str:
    lines: dict[str, list[Point]] = {}
    for row in rows:
        if row.ranks == ranks and row.nbytes and row.ratio.value is not None:
            lines.setdefault(row.call, []).append((float(row.nbytes), row.ratio.value))
    return _draw_ratios(lines, f"ferrodist over TCP on {ranks} ranks against Gloo")


def _draw_ratios(lines: dict[str, list[Point]], title: str) -> str:
    return line_chart(
        lines,
        title=f"{title}: more is better",
        x_label="bytes",
        y_label="times the speed",
        log_x=True,
        log_y=True,
    )
