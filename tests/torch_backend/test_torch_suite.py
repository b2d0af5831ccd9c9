"""A part of torch's own tests of a backend; ``make torch-suite`` runs all of them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import suite

pytest.importorskip("torch", reason="these are tests of torch")
pytest.importorskip("expecttest", reason="torch's own tests import it")
pytestmark = pytest.mark.timeout(300)


def passing(world: int) -> list[str]:
    """List the tests that ferrodist is known to pass."""
    recorded = json.loads(suite.RECORD.read_text())[str(world)]
    return [name for name, outcome in recorded.items() if outcome["ferrodist"] == "passed"]


def test_no_test_that_gloo_passes_fails():
    for world, recorded in json.loads(suite.RECORD.read_text()).items():
        for name, outcome in recorded.items():
            is_worse = outcome.get("gloo") == "passed" != outcome["ferrodist"]
            assert not is_worse or name in suite.ONLY_GLOO, (world, name)


@pytest.mark.slow
def test_every_third_test_of_torch_passes_as_recorded():
    command = [sys.executable, suite.__file__, "--worlds", "3", "--backends", "ferrodist"]
    names = [name for name in passing(3) if not name.endswith("_profiler")]
    done = subprocess.run(
        [*command, *names[::3]], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(names[::3])} passed, 0 failed, 0 skipped" in done.stdout
