# SPDX-License-Identifier: MIT OR Apache-2.0
"""Lay the rows of a report out as tables of plain text, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ferrodist.launch.bench.engines import TITLES
from ferrodist.launch.bench.plan import OVERLAP_SIZE, size_name
from ferrodist.launch.bench.report import (
    Document,
    OverlapRow,
    PeerRow,
    Ratio,
    SelfRow,
    count_goals,
    overlap_rows,
    peer_rows,
    self_rows,
)

MET, MISSED = "✓", "✗"
_PEER_COLUMNS = ("call", "size", *TITLES.values(), "x MPI", "goal", "x Gloo", "goal")
_SELF_COLUMNS = ("call", "size", "takes", "against", "takes", "x its time", "goal")
_OVERLAP_COLUMNS = ("library", "compute", "allreduce", "both", "hidden")


@dataclass(frozen=True, slots=True)
class TextTable:
    """A title, the names of the columns, and rows of as many cells."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]


def make_tables(document: Document) -> Iterator[TextTable]:
    """Return the tables that have rows, one number of ranks after the other."""
    peers, itself, overlaps = peer_rows(document), self_rows(document), overlap_rows(document)
    for ranks in sorted({row.ranks for row in peers}):
        rows = [_peer_cells(row) for row in peers if row.ranks == ranks]
        yield TextTable(f"{ranks} ranks: against the peers", _PEER_COLUMNS, rows)
        if rows := [_self_cells(row) for row in itself if row.ranks == ranks]:
            yield TextTable(f"{ranks} ranks: against itself and a copy", _SELF_COLUMNS, rows)
        if rows := [_overlap_cells(row) for row in overlaps if row.ranks == ranks]:
            title = f"{ranks} ranks: allreduce of {size_name(OVERLAP_SIZE)} behind a computation"
            yield TextTable(title, _OVERLAP_COLUMNS, rows)


def make_remarks(document: Document) -> list[str]:
    """Say which engines are missing, what failed, and how many goals are met."""
    remarks = [f"missing: {TITLES[name]}: {how}" for name, how in document["missing"].items()]
    remarks += [f"failed: {failure}" for failure in document["failures"]]
    met, goals = count_goals(document)
    return [*remarks, f"goals met: {met} of {goals}"] if goals else remarks


def _peer_cells(row: PeerRow) -> list[str]:
    times = [_short(row.times.get(engine)) for engine in TITLES]
    size = size_name(row.nbytes) if row.nbytes else ""
    return [row.call, size, *times, *_ratio_cells(row.to_mpi), *_ratio_cells(row.to_gloo)]


def _self_cells(row: SelfRow) -> list[str]:
    times = [_short(row.ours), row.against, _short(row.other)]
    return [row.what, size_name(row.nbytes), *times, *_ratio_cells(row.ratio)]


def _overlap_cells(row: OverlapRow) -> list[str]:
    times = [_short(time) for time in (row.compute, row.alone, row.both)]
    return [TITLES[row.engine], *times, f"{row.hidden:.0%}"]


def _ratio_cells(ratio: Ratio) -> list[str]:
    if ratio.goal is None:
        return [_short(ratio.value), ""]
    mark = {True: f" {MET}", False: f" {MISSED}", None: ""}[ratio.is_met]
    return [_short(ratio.value), f"{'≤' if ratio.is_most else '≥'} {ratio.goal:g}{mark}"]


def _short(value: float | None) -> str:
    """Write a number with three digits, or all in front of the point."""
    if value is None:
        return "-"
    if value >= 99.95:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
