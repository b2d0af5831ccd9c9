# SPDX-License-Identifier: MIT OR Apache-2.0
"""Lay the rows of a report out as tables of plain text, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ferrodist.launch.bench.engines import ENGINES, TCP_ENGINES, TITLES
from ferrodist.launch.bench.plan import OVERLAP_SIZE, size_name
from ferrodist.launch.bench.report import (
    DdpRow,
    Document,
    OverlapRow,
    PeerRow,
    Ratio,
    SelfRow,
    TcpRow,
    count_goals,
    ddp_rows,
    overlap_rows,
    peer_rows,
    self_rows,
    tcp_rows,
)

MET, MISSED = "✓", "✗"
_LIBRARIES = tuple(TITLES[engine] for engine in ENGINES)
_PEER_COLUMNS = ("call", "size", *_LIBRARIES, "x MPI", "goal", "x Gloo", "goal")
_TCP_COLUMNS = ("call", "size", "ferrodist", "p99", "Gloo", "p99", "x Gloo", "goal")
_DDP_COLUMNS = ("step", "takes", "p99", "x without DDP", "goal")
_SELF_COLUMNS = ("call", "size", "takes", "against", "takes", "x its time", "goal")
_OVERLAP_COLUMNS = ("library", "compute", "allreduce", "both", "hidden")
_STEPS = {
    "plain_step": "without DDP",
    "ferrodist_step": "ferrodist.DDP",
    "torch_step": "torch's DDP over Gloo",
}
_ABOUT_TCP = """\
ferrodist's TCP backend on loopback against Gloo, which uses TCP too; the two take turns. p99 is
what one call in a hundred exceeds on the rank where that is longest."""
_ABOUT_DDP = """\
A training step of an MLP of 14.2 million parameters: without DDP on every rank, with ferrodist's
over shared memory, and with torch's over Gloo. The three take turns, and all ranks are always at
work together."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """A title, the names of the columns, rows of as many cells; the page has words about it."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    about: str = ""


def make_tables(document: Document) -> Iterator[TextTable]:
    """Return the tables that have rows: shared memory, TCP, DDP, each by the number of ranks."""
    yield from _shared_memory_tables(document)
    tcp, ddp = tcp_rows(document), ddp_rows(document)
    for ranks in sorted({row.ranks for row in tcp}):
        rows = [_tcp_cells(row) for row in tcp if row.ranks == ranks]
        yield TextTable(f"{ranks} ranks: TCP against Gloo", _TCP_COLUMNS, rows, _ABOUT_TCP)
    for ranks in sorted({row.ranks for row in ddp}):
        rows = [_ddp_cells(row) for row in ddp if row.ranks == ranks]
        yield TextTable(f"{ranks} ranks: what DDP adds to a step", _DDP_COLUMNS, rows, _ABOUT_DDP)


def _shared_memory_tables(document: Document) -> Iterator[TextTable]:
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
    times = [_short(row.times.get(engine)) for engine in ENGINES]
    ratios = [*_ratio_cells(row.to_mpi), *_ratio_cells(row.to_gloo)]
    return [row.call, _size_cell(row.nbytes), *times, *ratios]


def _tcp_cells(row: TcpRow) -> list[str]:
    times = [
        _short(by_engine.get(engine))
        for engine in TCP_ENGINES
        for by_engine in (row.times, row.p99)
    ]
    return [row.call, _size_cell(row.nbytes), *times, *_ratio_cells(row.ratio)]


def _ddp_cells(row: DdpRow) -> list[str]:
    times = [_short(row.median), _short(row.p99)]
    return [_STEPS[row.step], *times, *_ratio_cells(row.ratio)]


def _size_cell(nbytes: int) -> str:
    return size_name(nbytes) if nbytes else ""


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
