# SPDX-License-Identifier: MIT OR Apache-2.0
"""``ferrodist demo`` and the command line around it, as a user meets them."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

import ferrodist
from ferrodist.launch import demo
from ferrodist.launch.chart import open_progress, sketch
from ferrodist.launch.demo import (
    Plan,
    Trained,
    first_difference,
    loss_and_gradients,
    make_points,
    mean_in_rank_order,
    new_weights,
    take_shard,
    train_alone,
)
from ferrodist.launch.machine import readable_nbytes
from ferrodist.launch.main import commands

FERRODIST = [sys.executable, "-W", "error", "-m", "ferrodist"]


def run_cli(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", **variables}
    return subprocess.run(
        [*FERRODIST, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_json_is_one_object_and_nothing_else(tmp_path: Path, ranks: int) -> None:
    done = run_cli(tmp_path, "demo", "--json", "--steps", "40", "--ranks", str(ranks))
    assert (done.returncode, done.stderr) == (0, "")
    outcome = json.loads(done.stdout)
    assert (outcome["ranks"], outcome["steps"], outcome["backend"]) == (ranks, 40, "shared_memory")
    assert outcome["weights_equal"] is True
    assert outcome["first_difference"] is None
    assert (outcome["bytes_exchanged"] > 0) == (ranks > 1)
    assert outcome["samples_per_second"] > 0
    assert 0 <= outcome["accuracy"] <= 1
    assert [step for step, _ in outcome["loss_curve"]] == list(range(1, 41))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_text_has_table_curve_check_and_chart(tmp_path: Path) -> None:
    # FORCE_COLOR is common in CI and must not fill a log with frames of a progress bar.
    done = run_cli(tmp_path, "demo", "--steps", "50", "-n", "2", FORCE_COLOR="1")
    assert (done.returncode, done.stderr) == (0, "")
    plain = click.unstyle(done.stdout)
    assert "training on 2 ranks: step 50 of 50, training loss" in plain
    assert plain.count("step ") < 20
    for words in ("samples/s", "test loss", "test accuracy", "bytes exchanged", "⠤"):
        assert words in plain
    assert "weights equal a single-process run, bit for bit: yes" in plain
    assert "loss curve drawn in ferrodist-demo.svg" in plain
    assert "\x1b[?25l" not in done.stdout
    assert ElementTree.parse(tmp_path / "ferrodist-demo.svg").getroot().tag.endswith("svg")


@pytest.mark.slow
def test_text_without_unicode_does_without_the_curve(tmp_path: Path) -> None:
    done = run_cli(tmp_path, "demo", "--steps", "5", "-n", "1", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "bit for bit: yes" in done.stdout


@pytest.mark.slow
def test_json_draws_a_chart_only_where_asked(tmp_path: Path) -> None:
    done = run_cli(tmp_path, "demo", "--steps", "5", "--json", "--chart", "x.svg")
    assert done.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.svg"]


@pytest.mark.slow
def test_chart_that_cannot_be_written_is_named_after_the_results(tmp_path: Path) -> None:
    done = run_cli(tmp_path, "demo", "--steps", "5", "-n", "1", "--chart", "missing/x.svg")
    assert done.returncode == 1
    assert "bit for bit: yes" in done.stdout
    assert "missing/x.svg" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_network_learns(tmp_path: Path) -> None:
    done = run_cli(tmp_path, "demo", "--json", "-n", "2", "--steps", "4000")
    outcome = json.loads(done.stdout)
    assert outcome["accuracy"] > 0.95
    assert outcome["final_loss"] < 0.2
    assert outcome["weights_equal"]


def one_bit_off(plan: Plan, report: Any) -> Any:
    weights = train_alone(plan, report)
    weights[2][3, 5] = np.nextafter(weights[2][3, 5], np.float32(9))
    return weights


def test_one_differing_bit_fails_the_demo_and_is_named(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "train_alone", one_bit_off)
    chart = str(tmp_path / "x.svg")
    options = ["--steps", "5", "--backend", "simulated", "--chart", chart]
    done = CliRunner().invoke(commands, ["demo", *options])
    assert done.exit_code == 1
    assert "bit for bit: no" in done.output
    assert "first difference: rank 0, layer 2 matrix[3, 5]: " in done.output
    assert "(1 of its 4096 numbers differ)" in done.output.replace("\n", " ")


def test_one_differing_bit_fails_json_too(monkeypatch: Any) -> None:
    monkeypatch.setattr(demo, "train_alone", one_bit_off)
    options = ["--steps", "5", "--backend", "simulated", "--json"]
    done = CliRunner().invoke(commands, ["demo", *options])
    assert done.exit_code == 1
    outcome = json.loads(done.output)
    assert outcome["weights_equal"] is False
    assert outcome["first_difference"].startswith("rank 0, layer 2 matrix[3, 5]: ")


def test_fold_in_another_order_fails_the_demo(monkeypatch: Any) -> None:
    allreduce = ferrodist.allreduce

    def by_ring(*arguments: Any, reproducible: bool, **options: Any) -> Any:
        return allreduce(*arguments, algorithm="ring", **options)

    monkeypatch.setattr(ferrodist, "allreduce", by_ring)
    options = ["--steps", "20", "--ranks", "3", "--json", "--backend", "simulated"]
    done = CliRunner().invoke(commands, ["demo", *options])
    assert done.exit_code == 1
    assert json.loads(done.output)["first_difference"].startswith("rank 0, layer 1 matrix")


def trained(weights: list[Any]) -> Trained:
    return Trained([weight.copy() for weight in weights], [], 1.0, 0)


def test_difference_on_any_rank_is_found() -> None:
    expected = new_weights(0)
    ranks = [trained(expected) for _ in range(3)]
    assert first_difference(ranks, expected) is None
    ranks[2].weights[5][1] = -0.0  # equal to 0.0, but not in its bits
    assert first_difference(ranks, expected) == (
        "rank 2, layer 3 bias[1]: -0.0 instead of 0.0 (1 of its 3 numbers differ)"
    )


def test_mean_folds_from_the_left_and_divides_once() -> None:
    parts = [[np.array([value], np.float32)] for value in (1e8, 3.0, 3.0, -1e8)]
    (mean,) = mean_in_rank_order(parts)
    expected = ((np.float32(1e8) + np.float32(3)) + np.float32(3)) + np.float32(-1e8)
    assert mean == expected / np.float32(4)
    assert mean.dtype == np.float32
    assert mean != 1.5  # what exact arithmetic would give


def test_shards_of_a_step_make_up_one_batch_that_changes_by_step() -> None:
    points = make_points(0)
    shards = [take_shard(points, 0, 7, rank, 3).places for rank in range(3)]
    again = [take_shard(points, 0, 7, rank, 3).places for rank in range(3)]
    assert all(np.array_equal(a, b) for a, b in zip(shards, again, strict=True))
    assert not np.array_equal(shards[0], shards[1])
    assert not np.array_equal(shards[0], take_shard(points, 0, 8, 0, 3).places)


def test_gradients_are_the_slopes_of_the_loss() -> None:
    points, weights = make_points(0, 50), new_weights(0)
    _, gradients = loss_and_gradients(weights, points)
    random = np.random.default_rng(0)
    for weight, gradient in zip(weights, gradients, strict=True):
        direction = random.normal(size=weight.shape).astype(np.float32)
        direction *= np.float32(0.01) / np.linalg.norm(direction)
        weight += direction
        above, _ = loss_and_gradients(weights, points)
        weight -= 2 * direction
        below, _ = loss_and_gradients(weights, points)
        weight += direction
        assert float(above - below) / 2 == pytest.approx(
            float((gradient * direction).sum()), abs=2e-5
        )


@pytest.mark.slow
def test_ctrl_c_stops_a_live_demo_and_gives_the_cursor_back(tmp_path: Path) -> None:
    shown, code = interrupt_in_terminal(tmp_path, after=b"loss ")
    assert code == 130
    assert b"stopped" in shown
    assert b"Traceback" not in shown
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l") > 0


def interrupt_in_terminal(folder: Path, *, after: bytes) -> tuple[bytes, int]:
    """Run an endless demo in a terminal, interrupt it when ``after`` is shown, wait for its end."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*FERRODIST, "demo", "--steps", "100000000"],
        cwd=folder,
        env={**os.environ, "TERM": "xterm"},
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    try:
        shown = read_until(ours, after)
        process.send_signal(signal.SIGINT)
        shown += read_until(ours, None)
        return shown, process.wait(20)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(terminal: int, words: bytes | None) -> bytes:
    """Read until the words are there, or until the program has closed the terminal."""
    shown = b""
    while words is None or words not in shown:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # how Linux says that the other end is closed
            break
    return shown


def test_plain_progress_is_a_few_lines() -> None:
    console = Console(file=io.StringIO(), width=80)
    with open_progress(console, "training", 1000) as report:
        for step in range(1, 1001):
            report(step, 1.5)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined] # it is a StringIO
    assert lines[-1] == "training: step 1000 of 1000, training loss 1.500"
    assert len(lines) == 5


def test_sketch_is_as_large_as_asked_and_falls_from_left_to_right() -> None:
    lines = sketch([4.0, 3.0, 2.0, 1.0], end="step 4", width=10, height=3).splitlines()
    assert lines[0].startswith("4.000 │⠑")
    assert lines[2].startswith("1.000 │⠀")
    assert lines[2].endswith("⢄")
    assert lines[4].endswith("step 4")
    assert {len(line) for line in lines} == {17}


@pytest.mark.parametrize("values", [[1.0], [2.0] * 5, [float("nan"), 1.0, float("inf")]])
def test_sketch_draws_what_there_is(values: list[float]) -> None:
    assert len(sketch(values, end="x", height=2).splitlines()) == 4


def test_sketch_of_nothing_says_so() -> None:
    assert sketch([float("nan")], end="x") == "nothing to draw"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (76e7, "760.0 MB"), (2e15, "2000.0 TB")],
)
def test_bytes_are_readable(nbytes: float, text: str) -> None:
    assert readable_nbytes(nbytes) == text


def test_help_and_version_are_given() -> None:
    runner = CliRunner()
    assert "demo" in runner.invoke(commands, ["--help"]).output
    assert "bit for bit" in runner.invoke(commands, ["demo", "--help"]).output
    version = runner.invoke(commands, ["--version"]).output
    assert version == f"ferrodist, version {ferrodist.__version__}\n"


def test_two_words_may_be_joined_by_dash_or_underscore(monkeypatch: Any) -> None:
    @click.command()
    @click.option("--two-words")
    def example(two_words: str) -> None:
        click.echo(two_words)

    monkeypatch.setitem(commands.commands, "an-example", example)
    for spelling in ("--two-words", "--two_words"):
        for name in ("an-example", "an_example"):
            assert CliRunner().invoke(commands, [name, spelling, "a_b"]).output == "a_b\n"


def test_errors_of_ferrodist_are_one_line(monkeypatch: Any) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ferrodist.BackendUnavailable("backend 'x' needs y: pip install 'ferrodist[x]'")

    monkeypatch.setattr("ferrodist.launch.demo.run_ranks", fail)
    done = CliRunner().invoke(commands, ["demo", "--json", "--backend", "simulated"])
    assert done.exit_code == 1
    assert done.output == "Error: backend 'x' needs y: pip install 'ferrodist[x]'\n"


@pytest.mark.parametrize("arguments", [["--ranks", "0"], ["--steps", "x"], ["--backend", "no"]])
def test_wrong_options_are_usage_errors(arguments: list[str]) -> None:
    done = CliRunner().invoke(commands, ["demo", *arguments])
    assert done.exit_code == 2
    assert arguments[0] in done.output


@pytest.mark.slow
def test_the_program_of_the_demo_runs_under_any_launcher(tmp_path: Path) -> None:
    options = ["-m", "ferrodist.launch.demo", "--steps", "20", "--json"]
    done = run_cli(tmp_path, "run", "-n", "3", *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["weights_equal"] is True
    alone = subprocess.run([sys.executable, *options], capture_output=True, timeout=60)
    assert json.loads(alone.stdout)["ranks"] == 1
