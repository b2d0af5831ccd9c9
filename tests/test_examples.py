# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every example runs as its docstring says and shows what it promises."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

SHOWN = {
    "hello_allreduce.py": ["rank 0 of 3", "rank 2 of 3: put in [3. 3. 3. 3.], got [6. 6. 6. 6.]"],
    "train_numpy.py": ["step 100: loss 0.000", "slopes [ 2. -3.], offset [0.5]", "agree: True"],
    "train_torch.py": ["step 150: loss 0.0", "all ranks have the same weights: True"],
    "train_jax.py": ["step 150: loss 0.0", "all ranks have the same weights: True"],
    "own_schedule.py": [
        "proved: 12 messages, in rank order: True",
        "used: [6 6 6]",
        "refused: schedule 'forgets_the_last' at world 4: ",
    ],
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
NEEDS = {"train_torch.py": "torch", "train_jax.py": "jax"}


@pytest.mark.parametrize("name", SHOWN)
def test_example_shows_what_it_promises(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
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


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == SHOWN.keys()


@pytest.mark.parametrize("name", SHOWN)
def test_example_is_short_and_says_how_to_run_it(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    runner = "pytest" if name.startswith("test_") else "python"
    assert f"    {runner} examples/{name}\n" in (
        ast.get_docstring(ast.parse(text), clean=False) or ""
    )
    assert len(text.splitlines()) < 60


def test_the_first_example_of_the_readme_prints_what_it_says() -> None:
    text = (EXAMPLES.parent / "README.md").read_text()
    program = text.split("```python\n", 1)[1].split("```", 1)[0]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() in program.splitlines()[-1]
    assert done.stdout.strip()
