# SPDX-License-Identifier: MIT OR Apache-2.0
"""Lay the results out as tables of plain text, for the page, and show them in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.compare.driver import Report
from benchmarks.compare.engines import ENGINES, TCP_ENGINES, TITLES
from benchmarks.compare.plan import OURS, OVERLAP_SIZE, TORCH
from benchmarks.compare.report import (
    DdpRow,
    Document,
    OverlapRow,
    PeerRow,
    Ratio,
    SelfRow,
    TcpRow,
    VersusRow,
    call_name,
    count_goals,
    ddp_rows,
    overlap_rows,
    peer_rows,
    self_rows,
    tcp_rows,
    versus_rows,
)
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ferrodist.launch.bench import size_name
from ferrodist.launch.chart import is_live

MET, MISSED = "✓", "✗"
_LINES_IN_A_LOG = 12
_ASCII: dict[str, str | int | None]
_ASCII = {"µ": "u", "≥": ">=", "≤": "<=", MET: "met", MISSED: "missed"}
_LIBRARIES = tuple(TITLES[engine] for engine in ENGINES)
_PEER_COLUMNS = ("call", "size", *_LIBRARIES, "x MPI", "goal", "x Gloo", "goal")
_TCP_COLUMNS = ("call", "size", "ferrodist", "p99", "Gloo", "p99", "x Gloo", "goal")
_DDP_COLUMNS = ("step", "takes", "p99", "x without DDP", "goal")
_SELF_COLUMNS = ("call", "size", "takes", "against", "takes", "x its time", "goal")
_VERSUS_COLUMNS = ("call", "size", "takes", "p99", "against", "takes", "p99", "ratio", "goal")
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
A training step of {}: without DDP on every rank{}, with ferrodist's
over shared memory, and with torch's over Gloo. The three take turns, and all ranks are always at
work together."""
_MODELS = {
    "": ("an MLP of 14.2 million parameters", ""),
    "small": ("an MLP of 0.02 million parameters", " but with a barrier"),
    "many": ("a model of 2 000 tensors of 100 elements", " but with a barrier"),
}
_ABOUT_CALLS = """\
Arrays of other kinds, and a call in flight, against the call on a NumPy array with `out=`, all in
the same processes. `jnp.asarray` is what JAX does to make its array of a result."""
_ABOUT_MESSAGES = """\
Messages between two ranks, and the barrier, against MPI through mpi4py. `halo` is one turn of the
loop of `examples/heat.py`, with 64 x 64 numbers per rank, against the same program in mpi4py."""
_ABOUT_TORCH = """\
The functions of torch.distributed, and training steps of an MLP of 14.2 million parameters under
torch's own DDP and FSDP2, with `init_process_group("ferrodist")` and with "gloo"."""
_ABOUT_BUSY = """\
Other processes, the hogs, compute for ever on all cores; nothing is bound to a core."""


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
    for ranks, model in dict.fromkeys((row.ranks, row.model) for row in ddp):
        rows = [_ddp_cells(row) for row in ddp if (row.ranks, row.model) == (ranks, model)]
        title = f"{ranks} ranks: what DDP adds to a step of {_MODELS[model][0]}"
        yield TextTable(title, _DDP_COLUMNS, rows, _ABOUT_DDP.format(*_MODELS[model]))
    yield from _versus_tables(document)


def _versus_tables(document: Document) -> Iterator[TextTable]:
    rows: dict[tuple[str, str], list[list[str]]] = {}
    for row in versus_rows(document):
        _, call, variant, _, ranks = row.key
        title, about = "messages against MPI", _ABOUT_MESSAGES
        if variant == TORCH:
            title, about = "through torch.distributed against Gloo", _ABOUT_TORCH
        elif variant.endswith(" hogs"):
            title, about = f"with {variant} against Gloo", _ABOUT_BUSY
        elif call == "allreduce":
            title, about = "any array, blocking and in flight", _ABOUT_CALLS
        rows.setdefault((f"{ranks} ranks: {title}", about), []).append(_versus_cells(row))
    for (title, about), cells in rows.items():
        yield TextTable(title, _VERSUS_COLUMNS, cells, about)


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


def _versus_cells(row: VersusRow) -> list[str]:
    engine, call, variant, nbytes, _ = row.key
    over = " over TCP" if engine != OURS else ""
    other = TITLES[row.against[0]] if row.against[0] != OURS else "NumPy array"
    if call == "halo":
        other = f"{other} {row.against[2]}"
    theirs = [other, _short(row.theirs), _short(row.their_p99)]
    ours = [_short(row.ours), _short(row.our_p99)]
    name = call_name(call, variant) + over
    return [name, _size_cell(nbytes), *ours, *theirs, *_ratio_cells(row.ratio)]


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
        return [_short(ratio.value), ratio.unit]
    mark = {True: f" {MET}", False: f" {MISSED}", None: ""}[ratio.is_met]
    goal = f"{'≤' if ratio.is_most else '≥'} {ratio.goal:g} {ratio.unit}".rstrip()
    return [_short(ratio.value), goal + mark]


def _short(value: float | None) -> str:
    """Write a number with three digits, or all in front of the point."""
    if value is None:
        return "-"
    if value >= 99.95:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


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
