# SPDX-License-Identifier: MIT OR Apache-2.0
"""benchmarks/compare: what it measures, in which turns, what it says; never how long it took."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from benchmarks.compare import __main__ as command
from benchmarks.compare import driver, engines, plan
from benchmarks.compare.driver import Effort, Job, Outcome, run_bench, run_parts
from benchmarks.compare.engines import DDP_ENGINES, ENGINES, TCP_ENGINES, Engine
from benchmarks.compare.goals import (
    copy_goal,
    ddp_goal,
    gloo_goal,
    itself_goal,
    mpi_goal,
    tcp_goal,
    versus,
)
from benchmarks.compare.page import write_page
from benchmarks.compare.plan import (
    COLLECTIVES,
    DDP_MODELS,
    DDP_STEPS,
    KINDS,
    MESSAGES,
    TCP_COLLECTIVES,
    TORCH,
    TORCH_STEPS,
    Part,
    Wish,
    make_blocks,
    make_busy_blocks,
    make_ddp_block,
    make_tcp_blocks,
    plan_bench,
    plan_parts,
)
from benchmarks.compare.report import (
    Ratio,
    count_goals,
    ddp_rows,
    overlap_rows,
    peer_rows,
    self_rows,
    tcp_rows,
    versus_rows,
)
from benchmarks.compare.tables import make_remarks, make_tables, show_document
from benchmarks.compare.worker import ferrodist_engine, measure
from benchmarks.compare.worker.measure import Order, carry_out
from click.testing import CliRunner, Result
from rich.console import Console

import ferrodist
from ferrodist.launch.bench import KB, MB, parse_sizes, size_name

ROOT = Path(__file__).parent.parent
LITTLE = Effort(rounds=2, round_seconds=0.001, lane_seconds=1.0, most_repeats=5)

# An engine that knows what every call should give, and needs nobody to give it. It notes every
# order it gets, so that tests see who was asked when.
FAKE = """
import os
from pathlib import Path

class Engine:
    def __init__(self, name, folder, flaw, rank, world):
        self.rank, self.world = int(rank), int(world)
        self.name, self.folder, self.flaw = name, Path(folder), flaw
        self.versions = {"fake": "1"}
        if flaw == "ends at start":
            print("cannot open the device")
            raise SystemExit(3)
        (self.folder / f"{name}-{rank}.pid").write_text(str(os.getpid()))

    def calls(self, x, out):
        if self.rank == 0:
            with (self.folder / "orders").open("a") as orders:
                orders.write(self.name + "\\n")
        ranks = range(1, self.world + 1)
        return {
            "allreduce": lambda: self.fill(out, [sum(ranks)]),
            "allreduce new": lambda: self.fill(out.copy(), [sum(ranks)]),
            "reduce": lambda: self.fill(out, [sum(ranks)]),
            "reduce_scatter": lambda: self.fill(out, [sum(ranks)]),
            "scan": lambda: self.fill(out, [sum(range(1, self.rank + 2))]),
            "broadcast": lambda: self.fill(out, [1]),
            "scatter": lambda: self.fill(out, [self.rank + 1]),
            "send_recv": lambda: self.fill(out, [2 - self.rank]),
            "all_gather": lambda: self.fill(out, ranks),
            "gather": lambda: self.fill(out, ranks),
            "all_to_all": lambda: self.fill(out, ranks),
            "barrier": lambda: None,
            "allreduce async": lambda: self.fill(out, [sum(ranks)]),
            "sendrecv": lambda: self.fill(out, [2 - self.rank]),
            "window": lambda: self.fill(out, [1]),
            "posted": lambda: self.fill(out, [1]),
        } | {
            step + model: lambda: None
            for step in ("plain_step", "ferrodist_step", "torch_step", "ddp_step", "fsdp2_step")
            for model in ("", " small", " many")
        }

    def fill(self, out, values):
        if self.flaw == "dies" and self.rank == 1:
            print("the device caught fire", flush=True)
            os._exit(1)
        out.reshape(len(values), -1)[:] = [[value] for value in values]
        if self.flaw == "wrong":
            out[-1] += 1
        return out

    def start_allreduce(self, x, out):
        return self.calls(x, out)["allreduce"]

    def empty(self, count, dtype):
        import numpy
        return numpy.empty(count, dtype)

    def convert(self, kind, x):
        return x

    def close(self):
        pass
"""


def fake_engine(folder: Path, name: str, flaw: str = "none") -> Engine:
    file = folder / "fake.py"
    file.write_text(FAKE)

    def commands(ranks: int, script: list[str], _: Path) -> list[list[str]]:
        arguments = [name, str(folder), flaw]
        return [
            [sys.executable, *script, *arguments, str(rank), str(ranks)] for rank in range(ranks)
        ]

    return Engine(name, file, commands, lambda: None)


def run_fakes(
    fakes: Sequence[Engine],
    ranks: int = 2,
    collectives: Sequence[str] = ("allreduce",),
    sizes: Sequence[int] = (KB,),
) -> Outcome:
    plan = plan_bench(fakes, [ranks], collectives, sizes)
    return run_bench(fakes, plan, LITTLE, lambda title: None)


def one_result(engine: str, median: float, **fields: Any) -> dict[str, Any]:
    plain = {"call": "allreduce", "variant": "", "nbytes": 64 * MB, "ranks": 2}
    times = {"median": median, "p99": 2 * median, "mean": median, "samples": 9}
    return plain | fields | times | {"engine": engine}


def make_document(*results: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": "2030-01-02",
        "machine": {"cpu": "a CPU", "cores": 2, "memory_gb": 8, "kernel": "6.1"},
        "missing": {"openmpi": "no openmpi; get it with: make bench"},
        "versions": {
            "ferrodist": {"ferrodist": "0.1.0"},
            "mpich": {"library": "MPICH 5.0", "mpi4py": "4.1"},
        },
        "failures": [],
        "results": list(results),
    }


DOCUMENT = make_document(
    one_result("ferrodist", 10_000.0),
    one_result("mpich", 40_000.0),
    one_result("openmpi", 30_000.0),
    one_result("gloo", 50_000.0),
    one_result("ferrodist", 5_000.0, variant="shared"),
    one_result("ferrodist", 14_000.0, variant="new"),
    one_result("ferrodist", 7_000.0, variant="float16"),
    one_result("ferrodist", 8_000.0, variant="copy"),
    one_result("ferrodist", 4.0, call="barrier", nbytes=0),
    one_result("mpich", 3.0, call="barrier", nbytes=0),
    one_result("ferrodist", 6.0, call="overlap", variant="compute", nbytes=16 * MB),
    one_result("ferrodist", 4.0, call="overlap", variant="alone", nbytes=16 * MB),
    one_result("ferrodist", 7.0, call="overlap", variant="both", nbytes=16 * MB),
    one_result("mpich", 7.0, call="overlap", variant="both", nbytes=16 * MB),
)

TCP_RESULTS = (
    one_result("ferrodist", 8.0, call="barrier", variant="tcp", nbytes=0),
    one_result("gloo", 10.0, call="barrier", variant="tcp", nbytes=0),
    one_result("ferrodist", 500.0, variant="tcp", nbytes=MB),
    one_result("gloo", 2_000.0, variant="tcp", nbytes=MB),
    one_result("ferrodist", 9_000.0, variant="tcp", nbytes=16 * MB),
    one_result("gloo", 27_000.0, variant="tcp", nbytes=16 * MB),
)
DDP_RESULTS = (
    one_result("ddp", 70.0, call="torch_step", nbytes=0),
    one_result("ddp", 60.0, call="ferrodist_step", nbytes=0),
    one_result("ddp", 50.0, call="plain_step", nbytes=0),
)
SMALL_DDP_RESULTS = (
    one_result("ddp", 6.0, call="ferrodist_step", variant="small", nbytes=0),
    one_result("ddp", 5.0, call="plain_step", variant="small", nbytes=0),
    one_result("ddp", 7.0, call="ferrodist_step", variant="many", nbytes=0),
    one_result("ddp", 5.0, call="plain_step", variant="many", nbytes=0),
)
CALLS_RESULTS = tuple(
    one_result("ferrodist", median, variant=variant, nbytes=8)
    for variant, median in (
        ("numpy", 2.0),
        ("torch", 3.0),
        ("torch new", 3.5),
        ("number", 5.0),
        ("dict", 10.0),
        ("jax", 14.0),
        ("asarray", 10.0),
        ("async", 16.0),
    )
)
MESSAGES_RESULTS = (
    *[
        one_result(engine, median, call=call, nbytes=8)
        for call, times in (("sendrecv", (2.0, 3.0, 1.0)), ("posted", (900.0, 300.0, 450.0)))
        for engine, median in zip(("ferrodist", "mpich", "openmpi"), times, strict=True)
    ],
    one_result("ferrodist", 5.0, call="barrier", variant="pair", nbytes=0),
    one_result("openmpi", 4.0, call="barrier", variant="pair", nbytes=0),
)
BUSY_RESULTS = tuple(
    one_result(engine, median * nbytes, variant="2 hogs", nbytes=nbytes)
    for nbytes in (8, KB)
    for engine, median in (("ferrodist", 1.0), ("ferrodist_tcp", 4.0), ("gloo", 2.0))
)


def test_rows_compare_with_the_faster_mpi_and_with_gloo() -> None:
    plain, shared, barrier = peer_rows(DOCUMENT)
    assert plain.times == {"ferrodist": 1e4, "mpich": 4e4, "openmpi": 3e4, "gloo": 5e4}
    assert (plain.to_mpi, plain.to_gloo) == (Ratio(3.0, 2.0), Ratio(5.0, 6.0))
    assert (plain.to_mpi.is_met, plain.to_gloo.is_met) == (True, False)
    assert shared.call == "allreduce, shared arrays"
    assert shared.to_mpi == Ratio(6.0, 5.0)
    assert (barrier.to_mpi, barrier.to_gloo) == (Ratio(0.75, 1.0), Ratio(None, None))


def test_variants_are_held_against_the_plain_call_and_against_a_copy() -> None:
    ratios = {(row.what, row.against): row.ratio for row in self_rows(DOCUMENT)}
    assert ratios == {
        ("allreduce", "one numpy.copyto"): Ratio(1.25, 1.5, is_most=True),
        ("allreduce, shared arrays", "one numpy.copyto"): Ratio(0.625, 0.8, is_most=True),
        ("allreduce, without out=", "float32 with out="): Ratio(1.4, 1.3, is_most=True),
        ("allreduce, float16", "float32 with out="): Ratio(0.7, 0.8, is_most=True),
    }
    assert ratios["allreduce, without out=", "float32 with out="].is_met is False


def test_tcp_is_compared_with_gloo_as_measured_beside_it() -> None:
    document = make_document(*DOCUMENT["results"], *TCP_RESULTS)
    barrier, middle, large = tcp_rows(document)
    assert (barrier.ratio, barrier.ratio.is_met) == (Ratio(1.25, 1.5), False)
    assert (middle.ratio, middle.ratio.is_met) == (Ratio(4.0, None), None)
    assert (large.ratio, large.ratio.is_met) == (Ratio(3.0, 2.0), True)
    assert large.p99 == {"ferrodist": 18_000.0, "gloo": 54_000.0}
    assert peer_rows(document) == peer_rows(DOCUMENT)
    assert self_rows(document) == self_rows(DOCUMENT)


def test_tcp_without_gloo_has_times_but_no_ratio() -> None:
    (row,) = tcp_rows(make_document(TCP_RESULTS[0]))
    assert (row.times, row.ratio) == ({"ferrodist": 8.0}, Ratio(None, 1.5))


def test_steps_with_ddp_are_held_against_the_one_without() -> None:
    rows = ddp_rows(make_document(*DOCUMENT["results"], *DDP_RESULTS))
    assert [(row.step, row.ratio.value) for row in rows] == [
        ("plain_step", 1.0),
        ("ferrodist_step", 1.2),
        ("torch_step", 1.4),
    ]
    assert [row.ratio.is_met for row in rows] == [None, False, None]


def test_steps_of_other_models_are_held_against_their_own_and_goals_of_their_own() -> None:
    rows = ddp_rows(make_document(*DDP_RESULTS, *SMALL_DDP_RESULTS))
    ratios = [(row.model, row.ratio) for row in rows if row.step == "ferrodist_step"]
    assert ratios == [
        ("", Ratio(1.2, 1.15, is_most=True)),
        ("small", Ratio(1.2, 1.25, is_most=True)),
        ("many", Ratio(1.4, 1.3, is_most=True)),
    ]


def test_calls_on_any_array_are_held_against_the_one_on_numpy_each_in_its_unit() -> None:
    ratios = {row.key[2]: row.ratio for row in versus_rows(make_document(*CALLS_RESULTS))}
    assert ratios == {
        "torch": Ratio(1.5, 2.0, True, "x its time"),
        "torch new": Ratio(1.5, 1.0, True, "µs more"),
        "number": Ratio(2.5, 2.0, True, "x its time"),
        "dict": Ratio(5.0, 10.0, True, "x its time"),
        "jax": Ratio(1.2, 1.5, True, "x jnp.asarray more"),
        "asarray": Ratio(5.0, None, True, "x its time"),
        "async": Ratio(16.0, 15.0, True, "µs in all"),
    }
    alone = [one for one in CALLS_RESULTS if one["variant"] not in ("numpy", "asarray")]
    values = {row.key[2]: row.ratio.value for row in versus_rows(make_document(*alone))}
    assert {name for name, value in values.items() if value is not None} == {"async"}


def test_messages_are_compared_with_mpi_and_busy_cores_with_gloo() -> None:
    rows = versus_rows(make_document(*MESSAGES_RESULTS, *BUSY_RESULTS))
    assert [(*row.key[:2], row.against[0], row.ratio.value, row.ratio.is_met) for row in rows] == [
        ("ferrodist", "sendrecv", "mpich", 1.5, True),
        ("ferrodist", "sendrecv", "openmpi", 0.5, None),
        ("ferrodist", "posted", "mpich", 1 / 3, False),
        ("ferrodist", "posted", "openmpi", 0.5, None),
        ("ferrodist", "barrier", "openmpi", 0.8, True),
        ("ferrodist", "allreduce", "gloo", 2.0, True),
        ("ferrodist", "allreduce", "gloo", 2.0, True),
        ("ferrodist_tcp", "allreduce", "gloo", 0.5, False),
        ("ferrodist_tcp", "allreduce", "gloo", 0.5, False),
    ]


def test_rows_of_other_parts_are_not_taken_for_those_of_the_peers() -> None:
    others = (*SMALL_DDP_RESULTS, *CALLS_RESULTS, *MESSAGES_RESULTS, *BUSY_RESULTS)
    document = make_document(*DOCUMENT["results"], *others)
    assert peer_rows(document) == peer_rows(DOCUMENT)
    assert self_rows(document) == self_rows(DOCUMENT)
    assert tcp_rows(document) == []
    assert versus_rows(DOCUMENT) == []


def test_every_lane_of_the_new_parts_has_a_row_or_is_what_rows_are_held_against() -> None:
    wish = Wish(["calls", "messages", "busy"], list(ENGINES), [2], COLLECTIVES, [8, 16 * MB])
    for part in plan_parts(wish)[0]:
        for block in part.blocks_by_ranks[2]:
            lanes = {(lane.engine, lane.call, lane.variant) for lane in block.lanes}
            ours = {lane for lane in lanes if versus(*lane)}
            held = {(one.engine, one.call, one.variant) for lane in ours for one in versus(*lane)}
            assert lanes <= ours | held


def test_overlap_is_shown_where_all_three_times_are_known() -> None:
    (row,) = overlap_rows(DOCUMENT)
    assert (row.engine, row.hidden) == ("ferrodist", 0.75)


def test_goals_are_counted_where_there_is_something_to_judge() -> None:
    assert count_goals(DOCUMENT) == (6, 9)
    assert count_goals(make_document(one_result("mpich", 1.0))) == (0, 0)
    assert count_goals(make_document(*TCP_RESULTS)) == (1, 2)
    assert count_goals(make_document(*DDP_RESULTS)) == (0, 1)
    assert count_goals(make_document(*CALLS_RESULTS, *MESSAGES_RESULTS)) == (5, 9)


@pytest.mark.parametrize(
    ("goal", "expected"),
    [
        (mpi_goal("allreduce", "", 8, 2), 1.2),
        (mpi_goal("broadcast", "", KB, 2), 1.0),
        (mpi_goal("allreduce", "", 4 * KB, 2), None),
        (mpi_goal("all_gather", "", 64 * KB, 2), 1.5),
        (mpi_goal("reduce_scatter", "shared", MB, 2), 5.0),
        (mpi_goal("gather", "", 64 * MB, 2), 1.0),
        (mpi_goal("send_recv", "", 64 * KB, 2), 1.2),
        (mpi_goal("scatter", "", MB, 2), 1.0),
        (mpi_goal("allreduce", "", 64 * MB, 4), 1.0),
        (gloo_goal("allreduce", KB, 2), 100.0),
        (gloo_goal("reduce_scatter", 64 * KB, 2), 30.0),
        (gloo_goal("all_gather", MB, 2), 10.0),
        (gloo_goal("allreduce", 16 * MB, 2), 6.0),
        (gloo_goal("broadcast", 64 * KB, 2), None),
        (gloo_goal("broadcast", MB, 2), 5.0),
        (gloo_goal("reduce", MB, 2), None),
        (gloo_goal("allreduce", 8, 4), None),
        (tcp_goal("allreduce", 8, 2), 4.0),
        (tcp_goal("reduce_scatter", 64 * KB, 2), 4.0),
        (tcp_goal("all_gather", MB, 2), None),
        (tcp_goal("all_gather", 16 * MB, 2), 2.0),
        (tcp_goal("broadcast", 64 * KB, 2), 1.5),
        (tcp_goal("broadcast", 16 * MB, 2), 1.1),
        (tcp_goal("barrier", 0, 2), 1.5),
        (tcp_goal("barrier", 0, 3), None),
        (ddp_goal("ferrodist_step", 2), 1.15),
        (ddp_goal("ferrodist_step", 4), None),
        (ddp_goal("ferrodist_step", 2, "many"), 1.3),
        (ddp_goal("torch_step", 2), None),
        (copy_goal("shared", 64 * MB, 2), 0.8),
        (copy_goal("", MB, 2), None),
        (itself_goal("new", 8, 2), 1.3),
        (itself_goal("bfloat16", KB, 2), None),
        (itself_goal("bfloat16", 64 * KB, 2), 1.2),
        (itself_goal("float16", 16 * MB, 2), 0.8),
    ],
)
def test_goals_are_those_of_the_page(goal: float | None, expected: float | None) -> None:
    assert goal == expected


def test_tables_mark_what_is_met_and_missed() -> None:
    peers, itself, overlap = make_tables(DOCUMENT)
    assert peers.rows[0][:5] == ["allreduce", "64 MB", "10 000", "40 000", "30 000"]
    assert peers.rows[0][6:] == ["3.00", "≥ 2 ✓", "5.00", "≥ 6 ✗"]
    assert peers.rows[2] == ["barrier", "", "4.00", "3.00", "-", "-", "0.75", "≥ 1 ✗", "-", ""]
    assert itself.rows[0][-2:] == ["0.70", "≤ 0.8 ✓"]
    assert itself.rows[1][-2:] == ["1.40", "≤ 1.3 ✗"]
    assert overlap.rows == [["ferrodist", "6.00", "4.00", "7.00", "75%"]]
    for table in (peers, itself, overlap):
        assert {len(row) for row in table.rows} == {len(table.columns)}


def test_tables_of_tcp_and_ddp_show_the_slow_calls_too() -> None:
    tcp, ddp = make_tables(make_document(*TCP_RESULTS, *DDP_RESULTS))
    assert tcp.rows == [
        ["barrier", "", "8.00", "16.0", "10.0", "20.0", "1.25", "≥ 1.5 ✗"],
        ["allreduce", "1 MB", "500", "1 000", "2 000", "4 000", "4.00", ""],
        ["allreduce", "16 MB", "9 000", "18 000", "27 000", "54 000", "3.00", "≥ 2 ✓"],
    ]
    assert ddp.rows[1] == ["ferrodist.DDP", "60.0", "120", "1.20", "≤ 1.15 ✗"]
    for table in (tcp, ddp):
        assert {len(row) for row in table.rows} == {len(table.columns)}


def test_tables_of_the_new_parts_say_the_unit_of_every_goal() -> None:
    results = (*SMALL_DDP_RESULTS, *CALLS_RESULTS, *MESSAGES_RESULTS, *BUSY_RESULTS)
    *_, calls, messages, busy = tables = list(make_tables(make_document(*results)))
    assert [table.title for table in tables] == [
        "2 ranks: what DDP adds to a step of an MLP of 0.02 million parameters",
        "2 ranks: what DDP adds to a step of a model of 2 000 tensors of 100 elements",
        "2 ranks: any array, blocking and in flight",
        "2 ranks: messages against MPI",
        "2 ranks: with 2 hogs against Gloo",
    ]
    name, *cells = calls.rows[1]
    assert name == "allreduce, torch tensor without out="
    assert cells == ["8 B", "3.50", "7.00", "NumPy array", "2.00", "4.00", "1.50", "≤ 1 µs more ✗"]
    assert messages.rows[1][4:] == ["Open MPI", "1.00", "2.00", "0.50", "x its speed"]
    assert [row[:2] for row in busy.rows[1:3]] == [
        ["allreduce", "1 KB"],
        ["allreduce over TCP", "8 B"],
    ]
    for table in tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}


def test_remarks_name_the_missing_and_the_failed() -> None:
    document = make_document(one_result("mpich", 1.0)) | {"failures": ["gloo: no network"]}
    assert make_remarks(document) == [
        "missing: Open MPI: no openmpi; get it with: make bench",
        "failed: gloo: no network",
    ]


def test_page_has_machine_versions_tables_and_pictures(tmp_path: Path) -> None:
    write_page(DOCUMENT, tmp_path / "benchmarks.md")
    page = (tmp_path / "benchmarks.md").read_text()
    for words in (
        "measured on 2030-01-02: a CPU, 2 cores, 8 GB, Linux 6.1",
        "- MPICH: MPICH 5.0, mpi4py 4.1",
        "missing: Open MPI",
        "goals met: 6 of 9",
        "![Time of an allreduce by its size](benchmarks.svg)",
        "| allreduce | 64 MB | 10 000 | 40 000 | 30 000 | 50 000 | 3.00 | ≥ 2 ✓ |",
    ):
        assert words in page
    assert "TCP" not in page
    assert "DDP" not in page
    assert drawn_in(tmp_path) == ["benchmarks-ratios.svg", "benchmarks.svg"]


def drawn_in(folder: Path) -> list[str]:
    """Return the names of the pictures in a folder, each of which must be one."""
    files = sorted(folder.glob("*.svg"))
    for file in files:
        assert ElementTree.parse(file).getroot().tag.endswith("svg")
    return [file.name for file in files]


def test_page_has_tcp_and_ddp_where_they_were_measured(tmp_path: Path) -> None:
    document = make_document(*DOCUMENT["results"], *TCP_RESULTS, *DDP_RESULTS)
    write_page(document, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    for words in (
        "goals met: 7 of 12",
        "![Speed over TCP against Gloo](page-tcp.svg)",
        "## 2 ranks: TCP against Gloo\n\nferrodist's TCP backend",
        "| barrier |  | 8.00 | 16.0 | 10.0 | 20.0 | 1.25 | ≥ 1.5 ✗ |",
        "| without DDP | 50.0 | 100 | 1.00 |  |",
    ):
        assert words in page
    assert drawn_in(tmp_path) == ["page-ratios.svg", "page-tcp.svg", "page.svg"]


@pytest.mark.parametrize(
    ("results", "drawn", "said"),
    [
        (TCP_RESULTS, ["chart-tcp.svg"], "chart-tcp.svg"),
        (DDP_RESULTS, [], "nothing to draw"),
    ],
)
def test_only_what_was_measured_is_drawn(
    tmp_path: Path, results: Sequence[dict[str, Any]], drawn: list[str], said: str
) -> None:
    saved = tmp_path / "saved.json"
    saved.write_text(json.dumps(make_document(*results)))
    done = run_cli("--from", str(saved), "--chart", str(tmp_path / "chart.svg"))
    assert done.exit_code == 0
    assert said in done.output
    assert drawn_in(tmp_path) == drawn


def test_saved_results_are_shown_again_without_measuring(tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    saved.write_text(json.dumps(DOCUMENT))
    chart = tmp_path / "chart.svg"
    done = run_cli("--from", str(saved), "--chart", str(chart))
    assert done.exit_code == 0
    assert "goals met: 6 of 9" in done.output
    assert "Open MPI, shared arrays" not in chart.read_text()
    assert "ferrodist, shared arrays" in chart.read_text()


def test_results_of_several_runs_are_put_together(tmp_path: Path) -> None:
    again = make_document(one_result("mpich", 20_000.0), *TCP_RESULTS)
    again |= {"date": "2030-01-03", "missing": {}, "failures": ["gloo: no network"]}
    again["versions"] = {"mpich": {"library": "MPICH 5.1", "mpi4py": "4.1"}}
    files = [tmp_path / "first.json", tmp_path / "again.json"]
    for file, document in zip(files, (DOCUMENT, again), strict=True):
        file.write_text(json.dumps(document))
    both = tmp_path / "both.json"
    froms = [word for file in files for word in ("--from", str(file))]
    assert run_cli(*froms, "--json", str(both)).exit_code == 0
    joined = json.loads(both.read_text())
    assert joined["date"] == "2030-01-02 and 2030-01-03"
    assert joined["machine"] == DOCUMENT["machine"]
    assert joined["versions"] == {
        "ferrodist": {"ferrodist": "0.1.0"},
        "mpich": {"library": "MPICH 5.0 and MPICH 5.1", "mpi4py": "4.1"},
    }
    assert (joined["missing"], joined["failures"]) == (DOCUMENT["missing"], again["failures"])
    assert peer_rows(joined)[0].times["mpich"] == 20_000.0
    assert tcp_rows(joined) == tcp_rows(again)
    assert len(joined["results"]) == len(DOCUMENT["results"]) + len(TCP_RESULTS)


def test_tables_do_without_unicode_and_without_room() -> None:
    narrow = Console(file=io.TextIOWrapper(io.BytesIO(), "ascii"), width=60)
    show_document(narrow, DOCUMENT)
    narrow.file.seek(0)
    shown = narrow.file.read()
    assert "40 000    30 000  50 000   3.00     >= 2 met    5.00  >= 6 missed\n" in shown


def run_cli(*arguments: str) -> Result:
    return CliRunner().invoke(command.compare, arguments)


@pytest.mark.parametrize("name", ["mpich", "openmpi"])
def test_missing_peer_is_named_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setattr(engines, "PEERS", tmp_path)
    done = run_cli("--quick", "--engines", name)
    assert done.exit_code == 1
    assert f"/bin/pip install numpy mpi4py {name}" in done.output
    assert "nothing was measured" in done.output


def test_missing_torch_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    present, missing = engines.split_present(["ferrodist", "gloo"])
    assert [engine.name for engine in present] == ["ferrodist"]
    assert "ferrodist[bench]" in missing["gloo"]


def test_parts_without_torch_are_planned_as_far_as_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    planned, missing = plan_parts(Wish(["tcp", "ddp"], list(ENGINES), [2, 4], ["barrier"], [8]))
    (tcp,) = planned
    assert [engine.label for engine in tcp.engines] == ["ferrodist over TCP"]
    assert set(missing) == {"gloo", "ddp"}
    remarks = make_remarks(make_document() | {"missing": missing})
    assert [remark.partition(": no torch")[0] for remark in remarks] == [
        "missing: Gloo",
        "missing: DDP",
    ]


def test_missing_jax_and_torch_are_named_and_the_other_kinds_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (calls,), missing = plan_parts(Wish(["calls"], list(ENGINES), [2, 4], [], []))
    (block,) = calls.blocks_by_ranks[2]
    assert [lane.variant for lane in block.lanes] == ["numpy", "number", "dict", "async"]
    remarks = make_remarks(make_document() | {"missing": missing})
    assert [remark.partition(" here;")[0] for remark in remarks] == [
        "missing: torch: no torch",
        "missing: JAX: no jax",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--ranks", "1"),
        ("--ranks", "two"),
        ("--sizes", "4"),
        ("--sizes", "1XB"),
        ("--engines", "nccl"),
        ("--collectives", "allreduce,all"),
        ("--parts", "tcp,mpi"),
    ],
)
def test_wrong_option_is_refused_before_anything_starts(arguments: tuple[str, str]) -> None:
    done = run_cli(*arguments)
    assert done.exit_code == 2
    assert arguments[1].rpartition(",")[2] in done.output


def test_sizes_are_read_as_people_write_them() -> None:
    context, option = None, None
    sizes = parse_sizes(context, option, "8,1KB, 64k,16 MB")  # type: ignore[arg-type] # not used
    assert sizes == [8, KB, 64 * KB, 16 * MB]
    assert [size_name(size) for size in sizes] == ["8 B", "1 KB", "64 KB", "16 MB"]


def test_every_block_has_all_engines_and_the_variants_of_ours() -> None:
    blocks = make_blocks(["ferrodist", "gloo"], 4, COLLECTIVES, [8, 16 * MB])
    titles = [block.title for block in blocks]
    assert titles[0] == "barrier on 4 ranks"
    assert titles[-1] == "overlap on 4 ranks"
    assert len(blocks) == 1 + 2 * 10 + 1
    for block in blocks:
        engines = {lane.engine for lane in block.lanes}
        assert engines == ({"ferrodist"} if "scan" in block.title else {"ferrodist", "gloo"})
    assert all(block.count % 4 == 0 and block.count > 0 for block in blocks)
    variants = {lane.variant for block in blocks for lane in block.lanes if lane.engine == "gloo"}
    assert variants == {"", "compute", "alone", "both"}


def test_blocks_over_tcp_have_both_libraries_and_no_variants_of_ours() -> None:
    blocks = make_tcp_blocks(["ferrodist", "gloo"], 2, COLLECTIVES, [16 * MB, 8])
    assert [block.title for block in blocks[:2]] == [
        "barrier on 2 ranks over TCP",
        "allreduce of 8 B on 2 ranks over TCP",
    ]
    assert len(blocks) == 1 + 2 * 4
    assert {lane.call for block in blocks for lane in block.lanes} == set(TCP_COLLECTIVES)
    for block in blocks:
        assert [(lane.engine, lane.variant) for lane in block.lanes] == [
            ("ferrodist", "tcp"),
            ("gloo", "tcp"),
        ]


@pytest.mark.slow
def test_tcp_and_ddp_run_on_the_fewest_ranks_and_with_our_own_library_over_tcp() -> None:
    pytest.importorskip("torch", reason="DDP is for torch's modules")
    wish = Wish(["tcp", "ddp"], ["ferrodist", "mpich"], [4, 2], ["broadcast"], [8])
    (tcp, ddp), missing = plan_parts(wish)
    assert (tcp.engines, ddp.engines) == ([TCP_ENGINES["ferrodist"]], [DDP_ENGINES["ferrodist"]])
    assert list(tcp.blocks_by_ranks) == list(ddp.blocks_by_ranks) == [2]
    lanes = [(lane.call, lane.variant) for block in ddp.blocks_by_ranks[2] for lane in block.lanes]
    assert lanes == [(step, model) for model in DDP_MODELS for step in DDP_STEPS]
    assert missing == {}


def test_busy_part_has_a_hog_per_core_and_twice_as_many_for_one_large_broadcast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    sizes = [16 * MB, 8]
    planned, _ = plan_parts(Wish(["busy"], ["ferrodist"], [4, 2], COLLECTIVES, sizes))
    titles = [(part.hogs, [one.title for one in part.blocks_by_ranks[2]]) for part in planned]
    assert titles == [
        (3, [f"{call} of {size} on 2 ranks with 3 hogs"
             for call in ("allreduce", "broadcast") for size in ("8 B", "16 MB")]),
        (6, ["broadcast of 16 MB on 2 ranks with 6 hogs"]),
    ]  # fmt: skip
    assert [engine.name for engine in planned[0].engines] == ["ferrodist", "ferrodist_tcp"]
    quick, _ = plan_parts(Wish(["busy"], ["ferrodist"], [2], ["allreduce"], [8]))
    assert [part.hogs for part in quick] == [3]


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_hogs_run_while_a_part_is_measured_and_are_gone_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None
) -> None:
    original, hogs = driver._run_hogs, list[subprocess.Popen[bytes]]()
    alive: list[bool] = []
    sessions: set[int] = set()

    @contextmanager
    def run_hogs(number: int) -> Iterator[None]:
        with original(number) as started:
            hogs.extend(started)
            yield

    def look(title: str) -> None:
        alive.extend(hog.poll() is None for hog in hogs)
        ranks = [int(file.read_text()) for file in tmp_path.glob("*.pid")]
        sessions.update(os.getsid(pid) for pid in (*ranks, *(hog.pid for hog in hogs)))
        if error is not None:
            raise error

    monkeypatch.setattr(driver, "_run_hogs", run_hogs)
    blocks = {2: make_busy_blocks(["a"], 2, 2, [("allreduce", 8)])}
    part = Part([fake_engine(tmp_path, "a")], blocks, hogs=2)
    with pytest.raises(error) if error else nullcontext():
        run_parts([part], LITTLE, look)
    assert alive == [True, True]
    assert sessions == {
        os.getsid(0)
    }  # sessions, not processes, would get equal shares of the cores
    for hog in hogs:
        with pytest.raises(ProcessLookupError):
            os.kill(hog.pid, 0)


@pytest.mark.timeout(60)
def test_hog_ends_when_the_benchmark_was_killed() -> None:
    script = "import os; from benchmarks.compare import driver\n"
    script += "with driver._run_hogs(1) as hogs: print(hogs[0].pid, flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, **pipes) as benchmark:
        assert benchmark.stdout is not None
        hog = os.pidfd_open(int(benchmark.stdout.readline()))
        try:
            assert select.select([hog], [], [], 0)[0] == []
            benchmark.kill()
            assert select.select([hog], [], [], 30)[0] == [hog]  # readable once it has ended
        finally:
            os.close(hog)


def test_each_engine_of_ours_asks_for_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def init(backend: str) -> ferrodist.Backend:
        asked.append(backend)
        return ferrodist.SimulatedBackend.create_group(1)[0]

    monkeypatch.setattr(ferrodist, "init", init)
    for engine in (ENGINES["ferrodist"], TCP_ENGINES["ferrodist"]):
        (start,) = engine.start_commands(2, Path("folder/driver"))
        ferrodist_engine.Engine(*start[start.index(str(engine.file)) + 1 :])
    assert asked == ["shared_memory", "tcp"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_call_is_measured_and_checked(tmp_path: Path, ranks: int) -> None:
    outcome = run_fakes([fake_engine(tmp_path, "ferrodist")], ranks, COLLECTIVES, [8, 16 * MB])
    assert [one for one in outcome.failures if "bfloat16" not in one] == []
    assert {one.call for one in outcome.results} == {*COLLECTIVES, "overlap"}
    variants = {one.variant for one in outcome.results if one.nbytes == 16 * MB}
    assert variants >= {"", "shared", "new", "float16", "copy", "compute", "alone", "both"}
    assert all(0 < one.median <= one.p99 and one.samples > 2 for one in outcome.results)
    assert outcome.versions["ferrodist"]["fake"] == "1"


@pytest.mark.slow
def test_engines_take_turns_and_each_begins_a_round(tmp_path: Path) -> None:
    run_fakes([fake_engine(tmp_path, "a"), fake_engine(tmp_path, "b")])
    orders = (tmp_path / "orders").read_text().split()
    assert orders == ["a", "b", "b", "a", "a", "b"]


@pytest.mark.slow
def test_calls_that_take_long_get_more_rounds(tmp_path: Path) -> None:
    blocks = {2: [make_ddp_block(2)]}
    part = Part([fake_engine(tmp_path, "ddp")], blocks, patience=3)
    outcome = run_parts([part, part], LITTLE, lambda title: None)
    assert [one.call for one in outcome.results] == [*DDP_STEPS, *DDP_STEPS]
    orders = (tmp_path / "orders").read_text().split()
    assert len(orders) == 2 * len(DDP_STEPS) * (1 + 3 * LITTLE.rounds)


@pytest.mark.slow
def test_failures_of_every_part_are_kept(tmp_path: Path) -> None:
    fakes = [fake_engine(tmp_path, name, "ends at start") for name in ("a", "b")]
    outcome = run_parts([Part([fake], {2: []}) for fake in fakes], LITTLE, lambda title: None)
    assert [failure.partition(" ")[0] for failure in outcome.failures] == ["a", "b"]


@pytest.mark.slow
def test_wrong_result_is_not_timed(tmp_path: Path) -> None:
    fakes = [fake_engine(tmp_path, "good"), fake_engine(tmp_path, "bad", "wrong")]
    outcome = run_fakes(fakes)
    assert {one.engine for one in outcome.results} == {"good"}
    assert outcome.failures == [
        "allreduce of 1 KB on 2 ranks, bad: ValueError: rank 0: wrong result of allreduce, "
        "expected parts of [3]"
    ]


@pytest.mark.slow
def test_engine_that_dies_is_named_with_its_last_words_and_the_others_go_on(tmp_path: Path) -> None:
    fakes = [fake_engine(tmp_path, "good"), fake_engine(tmp_path, "bad", "dies")]
    outcome = run_fakes(fakes, sizes=[KB, MB])
    assert [(one.engine, one.nbytes) for one in outcome.results] == [("good", KB), ("good", MB)]
    (failure,) = outcome.failures
    assert "rank 1 gave no answer: the device caught fire" in failure


@pytest.mark.slow
def test_engine_that_cannot_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    fakes = [fake_engine(tmp_path, "good"), fake_engine(tmp_path, "bad", "ends at start")]
    outcome = run_fakes(fakes)
    assert {one.engine for one in outcome.results} == {"good"}
    (failure,) = outcome.failures
    assert failure.startswith("bad on 2 ranks: bad ended at its start: cannot open the device")


def test_engine_that_fails_over_tcp_is_told_from_the_same_over_shared_memory(
    tmp_path: Path,
) -> None:
    bad = replace(fake_engine(tmp_path, "ferrodist", "ends at start"), link="TCP")
    (failure,) = run_fakes([bad]).failures
    assert failure.startswith("ferrodist over TCP on 2 ranks: ferrodist over TCP ended")


@pytest.mark.slow
def test_ctrl_c_leaves_no_rank_behind(tmp_path: Path) -> None:
    def interrupt(title: str) -> None:
        raise KeyboardInterrupt

    fakes = [fake_engine(tmp_path, "a"), fake_engine(tmp_path, "b")]
    plan = plan_bench(fakes, [2], ["barrier"], [])
    with pytest.raises(KeyboardInterrupt):
        run_bench(fakes, plan, LITTLE, interrupt)
    pids = [int(file.read_text()) for file in tmp_path.glob("*.pid")]
    assert len(pids) == 4
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_rank_that_does_not_leave_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.compare.driver._END_SECONDS", 0.1)
    engine = fake_engine(tmp_path, "stubborn")
    engine.file.write_text(FAKE.replace("pass\n", "import time; time.sleep(100)\n"))
    with Job(engine, 2):
        pass
    for file in tmp_path.glob("*.pid"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def use_fakes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, part: str, names: Sequence[str]
) -> dict[str, Engine]:
    """Let fakes stand for the engines of one part, under the names people ask for them by."""
    known, make_part = plan._KINDS[part]
    fakes = {name: fake_engine(folder, known[name].name) for name in names}
    monkeypatch.setitem(plan._KINDS, part, (fakes, make_part))
    monkeypatch.setattr(command, "_QUICK", LITTLE)
    return fakes


@pytest.mark.slow
def test_command_measures_all_parts_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fakes(tmp_path, monkeypatch, "shared_memory", ["ferrodist"])
    use_fakes(tmp_path, monkeypatch, "tcp", ["ferrodist", "gloo"])
    use_fakes(tmp_path, monkeypatch, "ddp", ["ferrodist"])
    use_fakes(tmp_path, monkeypatch, "calls", ["ferrodist"])
    use_fakes(tmp_path, monkeypatch, "messages", ["ferrodist", "openmpi"])
    use_fakes(tmp_path, monkeypatch, "busy", ["ferrodist tcp", "gloo"])
    use_fakes(tmp_path, monkeypatch, "torch", ["ferrodist", "gloo"])
    monkeypatch.setattr(plan, "missing_module", lambda name: f"no {name}")
    hogs = f"{len(os.sched_getaffinity(0))} hogs"
    saved = tmp_path / "bench.json"
    options = ["--quick", "--sizes", "8", "--collectives", "broadcast", "--json", str(saved)]
    assert run_cli(*options).exit_code == 0
    lanes = [
        (one["engine"], one["call"], one["variant"], one["ranks"])
        for one in json.loads(saved.read_text())["results"]
    ]
    assert lanes == [
        ("ferrodist", "broadcast", "", 2),
        ("ferrodist", "broadcast", "", 4),
        ("ferrodist", "broadcast", "tcp", 2),
        ("gloo", "broadcast", "tcp", 2),
        *[("ddp", step, model, 2) for model in DDP_MODELS for step in DDP_STEPS],
        *[("ferrodist", "allreduce", kind, 2) for kind in ("numpy", "number", "dict", "async")],
        *[(name, call, "", 2) for call in MESSAGES for name in ("ferrodist", "openmpi")],
        ("ferrodist", "barrier", "pair", 2),
        ("openmpi", "barrier", "pair", 2),
        ("ferrodist_tcp", "broadcast", hogs, 2),
        ("gloo", "broadcast", hogs, 2),
        *[
            (name, call, TORCH, 2)
            for call in ("broadcast", *TORCH_STEPS)
            for name in ("ferrodist", "gloo")
        ],
        *[
            (name, step, f"{TORCH}, {hogs}", 2)
            for step in TORCH_STEPS
            for name in ("ferrodist", "gloo")
        ],
    ]
    done = run_cli(*options, "--parts", "tcp")
    assert "measured 1 of 1: broadcast of 8 B on 2 ranks over TCP" in done.output
    assert {one["variant"] for one in json.loads(saved.read_text())["results"]} == {"tcp"}


@pytest.mark.slow
def test_command_measures_writes_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = use_fakes(tmp_path, monkeypatch, "shared_memory", ["ferrodist", "mpich", "gloo"])
    saved = tmp_path / "bench.json"
    page = tmp_path / "page.md"
    options = ["--quick", "--ranks", "2", "--sizes", "8,1MB", "--collectives", "allreduce,barrier"]
    options += ["--parts", "shared_memory"]
    done = run_cli(*options, "--json", str(saved), "--docs", str(page))
    assert done.exit_code == 0, done.output
    assert "measured 3 of 3: allreduce of 1 MB on 2 ranks" in done.output
    assert "allreduce, shared arrays" in done.output
    document = json.loads(saved.read_text())
    assert document["machine"]["cores"] >= 1
    assert set(document["versions"]) == set(fakes)
    assert "# Benchmarks" in page.read_text()


@pytest.mark.world(2, 3)
def test_calls_of_ferrodist_give_what_workers_check(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_POSTED", 8)  # a simulated rank has a thread for each
    orders = [Order(call, "", 12, 1, 2) for call in COLLECTIVES]
    orders += [Order("allreduce", variant, 12, 1, 2) for variant in ("new", "float16", "copy")]
    orders += [Order("overlap", variant, 12, 0, 1) for variant in ("compute", "alone", "both")]
    orders += [Order(call, "", 2, 1, 2) for call in (*MESSAGES, "halo")]
    orders += [Order("allreduce", kind, 2, 1, 2) for kind in KINDS if has_module(kind)]

    def carry_out_all(backend: ferrodist.Backend) -> list[int]:
        engine = object.__new__(ferrodist_engine.Engine)
        engine.backend, engine.rank, engine.world = backend, backend.rank, backend.world_size
        return [len(carry_out(engine, order)["microseconds"]) for order in orders]

    counts = world.run(carry_out_all)
    takes_part = [order.variant != "copy" for order in orders]
    assert counts[0] == [order.repeats for order in orders]
    assert [bool(count) for count in counts[1]] == takes_part


@pytest.mark.slow
@pytest.mark.parametrize(
    "ours", [ENGINES["ferrodist"], TCP_ENGINES["ferrodist"]], ids=lambda one: one.label
)
def test_ferrodist_itself_can_be_measured(ours: Engine) -> None:
    outcome = run_fakes([ours], 2, COLLECTIVES, [8, MB])
    assert outcome.failures == []
    assert {one.call for one in outcome.results} == set(COLLECTIVES)


def has_module(kind: str) -> bool:
    """Tell whether what an array of this kind needs is installed."""
    module = {"asarray": "jax", "torch new": "torch"}.get(kind, kind)
    return module not in ("jax", "torch") or importlib.util.find_spec(module) is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "models", [["small"], pytest.param(DDP_MODELS, marks=pytest.mark.long)], ids=["small", "all"]
)
def test_step_with_ddp_can_be_measured(models: Sequence[str]) -> None:
    pytest.importorskip("torch", reason="DDP is for torch's modules")
    blocks = [make_ddp_block(2, model) for model in models]
    part = Part([DDP_ENGINES["ferrodist"]], {2: blocks})
    outcome = run_parts([part], LITTLE, lambda title: None)
    assert outcome.failures == []
    assert [one.call for one in outcome.results] == [*DDP_STEPS] * len(models)
