"""Settings that ranks must share are compared when they have met: all refuse, or none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ferrodist import Config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

PROGRAM = """
import os
if os.environ["RANK"] == "1":
    os.environ["FERRODIST_{name}"] = "{value}"
import ferrodist
try:
    ferrodist.init("{backend}")
    print("agreed")
except ferrodist.InvalidArgument as error:
    print(error)
"""

HEARTBEAT = "FERRODIST_HEARTBEAT is 1.0 on ranks 0, 2 and 4.0 on rank 1: it has to be the same"


@pytest.mark.parametrize(
    ("backend", "name", "value", "said"),
    [
        ("shared_memory", "HEARTBEAT", "4", HEARTBEAT),
        ("tcp", "HEARTBEAT", "4", HEARTBEAT),
        ("hybrid", "HEARTBEAT", "4", HEARTBEAT),
        (
            "shared_memory",
            "HEARTBEAT_TIMEOUT",
            "5",
            "FERRODIST_HEARTBEAT_TIMEOUT is 10.0 on ranks 0, 2 and 5.0 on rank 1: it has to be",
        ),
        (
            "tcp",
            "MESSAGE_NBYTES",
            "65536",
            "FERRODIST_MESSAGE_NBYTES is 524288 on ranks 0, 2 and 65536 on rank 1: it has to be",
        ),
        ("tcp", "TCP_LINK", "1,1,1,1", "FERRODIST_TCP_LINK is 2.5e-05,5e-10,1e-10,5e-06 on ranks"),
        ("shared_memory", "FUSE_NBYTES", "4096", "FERRODIST_FUSE_NBYTES is 65536 on ranks 0, 2"),
        (
            "tcp",
            "LATE_TIMEOUT",
            "7",
            "FERRODIST_LATE_TIMEOUT is 1800.0 on ranks 0, 2 and 7.0 on rank 1",
        ),
        (
            "shared_memory",
            "CHECK_SITES",
            "1",
            "FERRODIST_CHECK_SITES is False on ranks 0, 2 and True",
        ),
        ("shared_memory", "LOG_WAIT_AFTER", "7", "agreed"),
        ("tcp", "LOG_WAIT_AFTER", "7", "agreed"),
    ],
)
def test_every_rank_hears_of_a_setting_that_differs(tmp_path, backend, name, value, said):
    program = PROGRAM.format(name=name, value=value, backend=backend)
    (tmp_path / "join.py").write_text(program)
    command = [sys.executable, "-m", "ferrodist", "run", "-n", "3", "--log-dir", "logs", "join.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    logs = [path.read_text() for path in tmp_path.glob("logs/**/*stdout*")]
    assert [text.startswith(said) for text in logs] == [True] * 3, done.stdout + done.stderr


def test_the_settings_of_a_rank_and_what_differs_fit_a_message():
    from ferrodist.backends.peers import _pack, describe_difference

    long = [{"ports": [n, 10**300 + n]} for n in range(4096)]
    assert len(_pack(Config().shared()).buffer.memory) == len(
        _pack({"difference": describe_difference(long)}).buffer.memory
    )
