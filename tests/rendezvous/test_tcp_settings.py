"""Settings that decide what is sent are compared when ranks have met: all refuse, or none."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(60)

PROGRAM = """
import os
if os.environ["RANK"] == "2":
    os.environ["FERRODIST_{name}"] = "{value}"
import ferrodist
try:
    ferrodist.init("tcp")
    print("agreed")
except ferrodist.InvalidArgument as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "MESSAGE_NBYTES",
            "65536",
            "FERRODIST_MESSAGE_NBYTES is 65536 on rank 2 and 524288 on rank 0",
        ),
        ("CHUNK_NBYTES", "65536", "FERRODIST_CHUNK_NBYTES is 65536 on rank 2 and 4194304 on"),
        ("TCP_LINK", "1,1,1,1", "FERRODIST_TCP_LINK is 1.0,1.0,1.0,1.0 on rank 2 and 2.5e-05,"),
        ("LOG_WAIT_AFTER", "7", "agreed"),
    ],
)
def test_every_rank_hears_of_a_setting_that_differs(tmp_path, name, value, said):
    (tmp_path / "join.py").write_text(PROGRAM.format(name=name, value=value))
    command = [sys.executable, "-m", "ferrodist", "run", "-n", "3", "--log-dir", "logs", "join.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    logs = [path.read_text() for path in tmp_path.glob("logs/**/*stdout*")]
    assert [text.startswith(said) for text in logs] == [True] * 3, done.stdout + done.stderr
