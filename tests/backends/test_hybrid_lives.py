"""Hybrid groups through their lives: how init makes them, threads, forks, many groups, memory."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ferrodist
from commands import RUN, free_port, lines_of
from ferrodist import BackendClosed
from test_differences import on_threads

pytestmark = pytest.mark.timeout(90)

TWO_AND_TWO = "0011"


@pytest.mark.parametrize("count", [3, 30_000])
def test_several_threads_on_one_group_get_right_results(start_hybrid_job, count):
    """Equal calls of several threads match by sequence number, whatever thread makes them."""

    def body(backend, pipe):
        def work(thread):
            right = 0
            for number in range(20):
                x = np.full(count, backend.rank + 1)
                if (thread + number) % 5 == 0:
                    total = ferrodist.allreduce(x, backend, async_op=True).wait(20)
                else:
                    total = ferrodist.allreduce(x, backend)
                right += bool((total == 10).all())
            return right

        return on_threads(6, work), backend.statistics().collectives

    with start_hybrid_job(TWO_AND_TWO, body) as job:
        assert job.results() == [([20] * 6, 120)] * 4


def files_and_threads() -> tuple[int, int]:
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


@pytest.mark.parametrize(
    "number",
    [60, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)])],
)
def test_groups_made_and_closed_leave_no_files_and_threads(start_hybrid_job, number):
    lists = [[0, 1, 2, 3], [3, 0], [1, 0], [2, 3, 1]]

    def make(backend, how_many):
        for turn in range(how_many):
            members = lists[turn % len(lists)]
            if backend.rank in members:
                with backend.split(members) as group:
                    ferrodist.allreduce(np.ones(3), group)
                    ferrodist.broadcast(np.ones(20_000), group, group.world_size - 1)

    def body(backend, pipe):
        make(backend, 8)
        ferrodist.barrier(backend)
        before = files_and_threads()
        make(backend, number)
        ferrodist.barrier(backend)
        return before, files_and_threads()

    with start_hybrid_job(TWO_AND_TWO, body) as job:
        for rank in job:
            end = rank.hear(280)
            assert end.error is None, end.error
            before, after = end.result
            assert before == after


def test_a_forked_child_is_refused_at_once_and_the_parent_is_unharmed(start_hybrid_job):
    calls = [
        lambda backend: ferrodist.allreduce(np.ones(3), backend),
        lambda backend: ferrodist.barrier(backend, timeout=5),
        lambda backend: ferrodist.allreduce(1, backend, async_op=True),
        lambda backend: ferrodist.send(np.ones(3), (backend.rank + 1) % 4, backend),
        lambda backend: ferrodist.broadcast_object(1, backend),
        lambda backend: backend.split([0, 1, 2, 3]),
        lambda backend: backend.empty(3, "int8"),
        lambda backend: backend.abort(),
        lambda backend: backend.statistics(),
    ]

    def body(backend, pipe):
        assert ferrodist.allreduce(1, backend, async_op=True).wait(20) == 4
        child = os.fork()
        if child == 0:
            refused = 0
            for call in calls:
                try:
                    call(backend)
                except BackendClosed as error:
                    refused += "forked" in str(error)
            backend.close()
            del backend
            os._exit(refused)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        x = np.full(100_000, backend.rank)
        return code, int(ferrodist.allreduce(x, backend)[-1]), ferrodist.allreduce(1, backend)

    with start_hybrid_job(TWO_AND_TWO, body) as job:
        assert job.results() == [(len(calls), 6, 4)] * 4


def test_arrays_in_shared_memory_outlive_their_backend(start_hybrid_job):
    def body(backend, pipe):
        x = backend.zeros(100_000, "float32")
        ferrodist.allreduce(np.full(100_000, backend.rank, np.float32), backend, out=x)
        backend.close()
        return float(x.sum())

    with start_hybrid_job(TWO_AND_TWO, body) as job:
        assert job.results() == [600_000.0] * 4


def close_and_call(backend: Any) -> str:
    backend.close()
    backend.close()
    with pytest.raises(BackendClosed) as caught:
        ferrodist.allreduce(1, backend)
    return str(caught.value)


def test_a_closed_backend_says_so_on_every_rank(start_hybrid_job):
    with start_hybrid_job(TWO_AND_TWO, lambda backend, pipe: close_and_call(backend)) as job:
        for rank, text in enumerate(job.results()):
            assert f"rank {rank} has closed" in text


# -- init ------------------------------------------------------------------------------------------

SCRIPT = """
import os, ferrodist
backend = ferrodist.init()
facts = type(backend).__name__, backend.local_rank, backend.local_world_size
total = ferrodist.allreduce(backend.rank, backend)
os.write(1, f"{backend.rank} {facts} {total}\\n".encode())
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_apart", [False, True])
def test_init_makes_what_suits_the_hosts_that_ranks_turn_out_to_be_on(tmp_path, is_apart):
    """Two launchers on this machine, which say that they are on two; ranks find out."""
    secret, script = tmp_path / "secret", tmp_path / "script.py"
    secret.touch(0o600)
    secret.write_bytes(os.urandom(32))
    script.write_text(SCRIPT)
    options = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "-n", "2"]
    environment = {**os.environ, "FERRODIST_SECRET_FILE": str(secret)}
    launchers = []
    for number in ("0", "1"):
        if is_apart:
            environment["FERRODIST_HOST_ID"] = f"pretended-{number}"
        command = [*RUN, "--node-rank", number, *options, str(script)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        launchers.append(subprocess.Popen(command, env=environment, text=True, **pipes))
    outputs = [launcher.communicate(timeout=60) for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    lines = [line for output, _ in outputs for line in lines_of(output)]
    kind, size = ("HybridBackend", 2) if is_apart else ("SharedMemoryBackend", 4)
    assert sorted(lines) == [f"{rank} {(kind, rank % size, size)} 6" for rank in range(4)]
