# SPDX-License-Identifier: MIT OR Apache-2.0
"""Draw the results of a benchmark: times and ratios by size, for the parts that were measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ferrodist.launch.bench.engines import ENGINES, TITLES
from ferrodist.launch.bench.report import Document, TcpRow, peer_rows, tcp_rows, times_of
from ferrodist.launch.chart import Point, line_chart


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
