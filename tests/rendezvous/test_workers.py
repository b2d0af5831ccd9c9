"""Worker processes of multiprocessing beside ranks, and ranks that are such processes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from commands import RUN, free_port, lines_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

METHODS = ["spawn", "forkserver"]


def run(tmp_path: Path, text: str, *launcher: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    command = [*(launcher or [sys.executable]), str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_that_runs_init_as_it_imports_the_main_module_is_told_what_to_do(method, tmp_path):
    done = run(
        tmp_path,
        f"""
        import multiprocessing
        import ferrodist
        backend = ferrodist.init()  # every worker does that again

        if __name__ == "__main__":
            worker = multiprocessing.get_context("{method}").Process(target=print)
            try:
                worker.start()
                worker.join()
            except (EOFError, OSError):
                pass  # the fork server imports the main module, too
            print(ferrodist.allreduce(backend.rank), worker.exitcode == 0)
        """,
        *RUN,
        "-n2",
    )
    assert lines_of(done.stdout) == ["1 False"] * 2, done.stderr
    assert "a worker process that a rank has started, imports the main module again" in done.stderr
    assert "put what only ranks do under 'if __name__ == \"__main__\":'" in done.stderr


def test_a_worker_of_a_program_that_is_no_rank_may_be_a_world_of_its_own(tmp_path):
    done = run(
        tmp_path,
        """
        import multiprocessing
        import ferrodist
        backend = ferrodist.init()

        if __name__ == "__main__":
            worker = multiprocessing.get_context("spawn").Process(target=print, args=["done"])
            worker.start()
            worker.join()
        """,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("method", METHODS)
def test_processes_of_multiprocessing_can_be_ranks(method, tmp_path):
    done = run(
        tmp_path,
        f"""
        import multiprocessing, os
        import ferrodist

        def train(rank):
            os.environ |= {{"RANK": str(rank), "WORLD_SIZE": "3"}}
            os.environ |= {{"MASTER_ADDR": "localhost", "MASTER_PORT": "{free_port()}"}}
            backend = ferrodist.init()
            os.write(1, b"%d\\n" % ferrodist.allreduce(backend.rank))  # in one piece

        if __name__ == "__main__":
            context = multiprocessing.get_context("{method}")
            ranks = [context.Process(target=train, args=[rank]) for rank in range(3)]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()
            print([rank.exitcode for rank in ranks])
        """,
    )
    assert (done.stdout, done.stderr) == ("3\n3\n3\n[0, 0, 0]\n", "")


def test_ranks_are_started_by_the_spawn_of_torch(tmp_path):
    pytest.importorskip("torch", reason="its multiprocessing starts the ranks")
    done = run(
        tmp_path,
        f"""
        import os
        import torch
        import ferrodist

        def train(rank, size):
            os.environ |= {{"RANK": str(rank), "WORLD_SIZE": str(size)}}
            os.environ |= {{"MASTER_ADDR": "localhost", "MASTER_PORT": "{free_port()}"}}
            ferrodist.init()
            total = ferrodist.allreduce(torch.ones(2) * rank).tolist()
            os.write(1, f"{{total}}\\n".encode())  # in one piece

        if __name__ == "__main__":
            torch.multiprocessing.spawn(train, args=[2], nprocs=2)
        """,
    )
    assert (done.stdout, done.stderr) == ("[1.0, 1.0]\n" * 2, "")


@pytest.mark.parametrize("method", METHODS)
def test_a_loader_of_torch_has_workers_beside_ranks(method, tmp_path):
    pytest.importorskip("torch", reason="it is torch's DataLoader")
    done = run(
        tmp_path,
        f"""
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        import ferrodist

        if __name__ == "__main__":
            backend = ferrodist.init()
            data = TensorDataset(torch.arange(8.0) + backend.rank)
            loader = DataLoader(data, 4, num_workers=1, multiprocessing_context="{method}")
            sums = [ferrodist.allreduce(batch.sum()).item() for (batch,) in loader]
            print(sums)
        """,
        *RUN,
        "-n2",
    )
    assert lines_of(done.stdout) == ["[16.0, 48.0]"] * 2, done.stderr
