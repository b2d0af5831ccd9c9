# SPDX-License-Identifier: MIT OR Apache-2.0
"""``ferrodist bench``: what it measures and says, what it refuses; never how long it took."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner, Result

import ferrodist
from ferrodist.launch import bench as bench_command
from ferrodist.launch.bench import CALLS, KB, MB, lengths, make_calls, measure_calls
from ferrodist.launch.machine import Load, measure_load
from ferrodist.launch.main import commands
from mpi_jobs import PEERS, environment_of

IDLE = Load(0.0, 2, [])


def run_cli(*arguments: str) -> Result:
    return CliRunner().invoke(commands, ["bench", *arguments])


def one_result(backend: str, call: str, nbytes: int, median: float) -> dict[str, Any]:
    is_by_other = backend == "gloo" and nbytes < MB
    return {
        "backend": backend,
        "call": call,
        "nbytes": nbytes,
        "median_us": median,
        "p90_us": 2 * median,
        "bytes_per_second": nbytes / median * 1e6,
        "samples": 9,
        "carried_by": "shared memory" if is_by_other else backend,
    }


def fake_measure(backend: str, ranks: int, calls: list[str], sizes: list[int]) -> list[Any]:
    """Return times that tell the backend, the call and the size apart."""
    if backend == "tcp":
        raise ferrodist.RendezvousError("no network")
    return [
        one_result(backend, call, nbytes, len(backend) + ranks + nbytes)
        for call in calls
        for nbytes in (sizes if call != "barrier" else [0])
    ]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_command, "measure_load", lambda: IDLE)
    monkeypatch.setattr(bench_command, "_measure", fake_measure)


@pytest.mark.world(2, 3)
def test_every_call_is_made_on_the_arrays_of_its_size(world: Any) -> None:
    def results(backend: ferrodist.Backend) -> dict[str, list[float]]:
        found = {}
        for call in CALLS:
            if call == "send_recv" and backend.rank > 1:
                continue
            given, got = lengths(call, 24, backend.world_size)
            x, out = np.full(given, backend.rank + 1.0), np.zeros(got)
            if call == "scatter":
                x = np.repeat(np.arange(backend.world_size) + 1.0, got)
            make_calls(backend, x, out)[call]()
            found[call] = out.tolist()
        return found

    first, second = world.run(results)[:2]
    size = world.size
    count, total = len(first["allreduce"]), size * (size + 1) / 2
    gathered = np.repeat(np.arange(size) + 1.0, count).tolist()
    assert count == 24 // 4
    for rank in (first, second):
        assert rank["allreduce"] == [total] * count
        assert rank["reduce_scatter"] == [total] * (count // size)
        assert rank["all_gather"] == gathered
        assert rank["all_to_all"] == np.repeat(np.arange(size) + 1.0, count // size).tolist()
    assert first["reduce"] == [total] * count
    assert first["gather"] == gathered
    assert (first["scatter"], second["scatter"]) == ([1.0] * count, [2.0] * count)
    assert (first["send_recv"], second["send_recv"]) == ([2.0] * count, [1.0] * count)
    assert second["broadcast"] == [1.0] * count


@pytest.mark.world(2)
def test_every_rank_gets_the_times_of_the_slowest(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times(backend: ferrodist.Backend, call: str, nbytes: int) -> list[float]:
        return [(number + 1) * 1e-6 * (1 + 9 * backend.rank) for number in range(10)]

    monkeypatch.setattr(bench_command, "_time_call", times)
    calls, sizes = ["allreduce", "barrier"], [MB, 8]
    slow = [one * 1e-5 for one in range(1, 11)]
    for results in world.run(lambda backend: list(measure_calls(backend, "mine", calls, sizes))):
        keys = [(one["backend"], one["call"], one["nbytes"]) for one in results]
        assert keys == [("mine", "allreduce", 8), ("mine", "allreduce", MB), ("mine", "barrier", 0)]
        for one in results:
            assert one["median_us"] == pytest.approx(statistics.median(slow) * 1e6)
            assert one["p90_us"] == pytest.approx(100.0)
            assert one["bytes_per_second"] == pytest.approx(one["nbytes"] / statistics.median(slow))


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("backend", ["shared_memory", "tcp", "hybrid", "simulated"])
def test_backend_is_measured(backend: str, tmp_path: Path) -> None:
    saved = tmp_path / "bench.json"
    calls = "allreduce,send_recv,barrier"
    options = ["--backend", backend, "-n", "3", "--calls", calls, "--sizes", "8,64KB"]
    done = run_cli(*options, "--json", str(saved))
    assert done.exit_code == 0, done.output
    assert f"{backend}, 3 ranks" in done.output
    document = json.loads(saved.read_text())
    assert (document["ranks"], document["failures"]) == (3, {})
    assert document["machine"]["cores"] >= 1
    results = document["results"]
    assert [(one["call"], one["nbytes"]) for one in results] == [
        *[(call, size) for call in ("allreduce", "send_recv") for size in (8, 64 * KB)],
        ("barrier", 0),
    ]
    for one in results:
        assert one["backend"] == backend
        assert 0 < one["median_us"] <= one["p90_us"]
        assert one["bytes_per_second"] == pytest.approx(one["nbytes"] / one["median_us"] * 1e6)
        assert one["samples"] >= 5


@pytest.mark.usefixtures("fakes")
def test_all_backends_are_measured_once_and_those_that_do_not_run_are_named(tmp_path: Path) -> None:
    saved = tmp_path / "bench.json"
    done = run_cli(
        "--json", str(saved), "--calls", "allreduce,barrier", "--sizes", "1KB", "-n", "5"
    )
    assert done.exit_code == 0
    assert "tcp does not run here: no network" in done.output
    document = json.loads(saved.read_text())
    assert document["failures"] == {"tcp": "no network"}
    measured = [one["backend"] for one in document["results"] if one["call"] == "barrier"]
    assert {"shared_memory", "hybrid", "simulated"} <= set(measured)
    assert len(measured) == len(set(measured))
    assert not {"shm", "mpi", "gloo", "nccl"} & set(measured)
    # 1 042 µs: 13 letters, 5 ranks, 1024 bytes
    lines = [line.split() for line in done.output.splitlines()]
    assert ["allreduce", "1", "KB", "1", "042.0", "2", "084.0", "983", "KB/s"] in lines
    assert ["barrier", "18.0", "36.0"] in lines
    assert "make bench" in done.output
    assert "benchmarks/compare" in done.output


@pytest.mark.usefixtures("fakes")
def test_nothing_measured_is_a_failure() -> None:
    done = run_cli("--backend", "tcp")
    assert done.exit_code == 1
    assert "no backend could be measured" in done.output


@pytest.mark.slow
@pytest.mark.timeout(100)
@pytest.mark.parametrize("engine", ["gloo", "mpi"])
def test_engines_are_measured_if_they_are_named(engine: str, monkeypatch: Any) -> None:
    if engine == "mpi":  # by mpiexec, which is found on PATH
        for name, value in environment_of("mpich").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PATH", f"{PEERS / 'mpich' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    calls, sizes = ["allreduce", "send_recv", "barrier"], [100_000, 5 * MB]
    results = bench_command._measure(engine, 2, calls, sizes)
    assert {one["backend"] for one in results} == {engine}
    assert [one["nbytes"] for one in results] == [*sizes, *sizes, 0]
    assert all(one["samples"] >= 5 for one in results)
    own = "shared memory"
    assert [one["carried_by"] for one in results] == [own, engine, own, own, own]


def test_what_an_engine_did_not_carry_is_not_called_by_its_name(fakes: None, tmp_path: Any) -> None:
    chart = tmp_path / "bench.svg"
    options = ["--calls", "allreduce", "--sizes", "64KB,1MB,16MB", "--chart", str(chart)]
    done = run_cli("--backend", "gloo,shared_memory", *options)
    of_gloo, of_memory = done.output.split("shared_memory, ")
    rows = [line.split() for line in of_gloo.splitlines() if " KB " in line or " MB " in line]
    assert [row[-2:] for row in rows[:1]] == [["shared", "memory"]]
    assert [row[-1] for row in rows[1:]] == ["gloo", "gloo"]
    assert "gloo" not in of_memory
    assert " by " not in of_memory
    assert "gloo by shared memory" in chart.read_text()
    (chart_of_one := tmp_path / "one.svg").touch()
    run_cli("--backend", "gloo", *options[:-1], str(chart_of_one))
    assert "allreduce by shared memory" in chart_of_one.read_text()


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_reason_of_a_backend_that_does_not_run_is_that_of_its_ranks() -> None:
    with pytest.raises(ferrodist.RendezvousError, match="no backend named 'nosuch'"):
        bench_command._measure("nosuch", 2, ["barrier"], [8])


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("backends", "lines"),
    [
        ("shared_memory,hybrid", ["shared_memory", "hybrid"]),
        ("hybrid", ["reduce", "gather"]),
    ],
)
def test_picture_has_a_line_by_backend_or_by_call(
    backends: str, lines: list[str], tmp_path: Path
) -> None:
    chart = tmp_path / "bench.svg"
    options = ["--backend", backends, "--calls", "barrier,reduce,gather", "--chart", str(chart)]
    assert run_cli(*options).exit_code == 0
    root = ElementTree.parse(chart).getroot()
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    known = ["shared_memory", "hybrid", "reduce", "gather", "barrier"]
    assert [text for text in texts if text in known] == lines


@pytest.mark.parametrize(
    ("option", "wrong", "said"),
    [
        (
            "--backend",
            "tcp,shm",
            "'shm' is none of gloo, hybrid, mpi, nccl, shared_memory, simulated, tcp",
        ),
        ("--calls", "allreduce,all", "'all' is none of allreduce, broadcast"),
        ("--sizes", "4", "'4' must be a size of 8 bytes or more, such as 64KB"),
        ("--sizes", "1XB", "'1XB' must be a size"),
        ("-n", "1", "1 is not in the range x>=2"),
        ("--json", "no/such/folder/bench.json", "there is no folder 'no/such/folder'"),
        ("--chart", "no/such/folder/bench.svg", "there is no folder 'no/such/folder'"),
    ],
)
def test_wrong_option_is_refused_before_anything_starts(
    option: str, wrong: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_command, "measure_load", pytest.fail)
    done = run_cli(option, wrong)
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.usefixtures("fakes")
def test_busy_machine_is_warned_of_and_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved = tmp_path / "bench.json"
    assert "warning" not in run_cli("--json", str(saved)).stderr
    assert json.loads(saved.read_text())["load"]["busy_cores"] == 0
    busy = Load(1.44, 2, ["cc1plus (17)", "python (3)"])
    monkeypatch.setattr(bench_command, "measure_load", lambda: busy)
    done = run_cli("--json", str(saved))
    words = "warning: other processes use 1.4 of 2 cores: cc1plus (17), python (3); times will be"
    assert words in done.stderr
    assert json.loads(saved.read_text())["load"]["busy_cores"] == 1.44


def cpu_line(number: int, busy: int, idle: int, waiting: int) -> str:
    return f"cpu{number} {busy} 0 0 {idle} {waiting} 0 0 0 50 0\n"


def test_load_is_what_the_cores_did_meanwhile_and_names_who(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
    monkeypatch.setattr(os, "sysconf", lambda name: 100)

    def write(
        cores: dict[int, tuple[int, int, int]], processes: dict[int, tuple[str, int]]
    ) -> None:
        lines = [cpu_line(number, *ticks) for number, ticks in cores.items()]
        (tmp_path / "stat").write_text("cpu 1 2 3\n" + "".join(lines) + "intr 5\n")
        for pid, (name, ticks) in processes.items():
            (tmp_path / str(pid)).mkdir(exist_ok=True)
            line = f"{pid} ({name}) R 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20\n"
            (tmp_path / str(pid) / "stat").write_text(line)

    def later(processes: dict[int, tuple[str, int]]) -> Callable[[float], None]:
        cores = {0: (1025, 500, 80), 1: (9000, 1, 0), 2: (705, 515, 5)}
        return lambda seconds: write(cores, processes)

    before = {7: ("a (b) c", 100), 8: ("idle", 40), 9: ("quick", 5), 10: ("gone", 3)}
    write({0: (1000, 500, 80), 1: (5, 5, 5), 2: (700, 500, 0)}, before)
    load = measure_load(tmp_path, later({7: ("a (b) c", 110), 8: ("idle", 41), 9: ("quick", 20)}))
    # core 0 was busy for 25 ticks of 25, core 2 for 5 of 25; core 1 is not ours
    assert load.busy_cores == pytest.approx(1.2)
    assert load.num_cores == 2
    assert load.processes == ["quick (9)", "a (b) c (7)"]
    assert load.warning is not None


def test_load_of_this_machine_can_be_measured() -> None:
    load = measure_load()
    assert load.num_cores == len(os.sched_getaffinity(0))
    assert 0 <= load.busy_cores <= load.num_cores


def test_idle_machine_is_not_warned_of() -> None:
    assert Load(0.2, 2, []).warning is None
