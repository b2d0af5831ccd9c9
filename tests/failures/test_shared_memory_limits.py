"""What ranks in shared memory leave behind, and what becomes of them where there is not enough."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import numpy as np
import pytest

import ferrodist
from ferrodist import _native
from jobs import run_program

pytestmark = pytest.mark.timeout(90)

slow = [pytest.mark.slow, pytest.mark.timeout(400)]


def names_in_use() -> list[str]:
    """List the files this process has open or mapped."""
    names = Path("/proc/self/maps").read_text().split()
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            names.append(os.readlink(f"/proc/self/fd/{file}"))
    return names


@pytest.mark.slow
def test_nothing_is_left_when_all_ranks_are_killed_and_the_next_job_starts(start_job, tmp_path):
    def body(backend, pipe):
        array = backend.zeros(1 << 20, "uint8")
        ferrodist.allreduce(array, backend)
        places = ("/dev/shm", str(tmp_path))
        pipe.send([name for name in names_in_use() if name.startswith(places)])
        signal.pause()

    for _ in range(20):
        before = os.listdir("/dev/shm")
        with start_job(3, body, TMPDIR=str(tmp_path)) as job:
            assert [rank.hear() for rank in job] == [[], [], []]  # nothing with a name is in use
            for rank in job:
                rank.send_signal(signal.SIGKILL)
            assert all(rank.has_ended() for rank in job)
        assert os.listdir(tmp_path) == []
        left = set(os.listdir("/dev/shm")) - set(before)
        assert not any("ferrodist" in name or job.name in name for name in left)
        assert job.name not in Path("/proc/net/unix").read_text()


# -- not enough ------------------------------------------------------------------------------------

# What a rank does under a limit; it must end with a result or a ferrodist error, never crash.
LIMITED = """
import resource, secrets, sys
import numpy, ferrodist
from ferrodist.backends.shared_memory import SharedMemoryBackend
from ferrodist.rendezvous import Job
resource.setrlimit(resource.{what}, ({limit}, {limit}))
try:
    backend = SharedMemoryBackend.join(Job("test-" + secrets.token_hex(8), 0, 1, bytes(32)))
    print("joined", ferrodist.allreduce(1, backend))
    print(backend.zeros(1000, "int8").sum())
    backend.empty(1 << 36, "int8")
except (OSError, MemoryError, ferrodist.DistributedError) as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""


@pytest.mark.slow
def test_too_few_files_is_an_error_in_words():
    for limit in (3, 5, 6, 7):
        done = run_program(LIMITED.format(what="RLIMIT_NOFILE", limit=limit))
        assert done.returncode == 0, (limit, done.stderr)
        last = done.stdout.splitlines()[-1]
        assert "Too many open files" in last or "OutOfMemory" in last, (limit, done.stdout)


@pytest.mark.parametrize("megabytes", [10, 200, 1000])
def test_too_little_address_space_is_an_error_in_words(megabytes):
    used = "int(open('/proc/self/statm').read().split()[0]) * 4096"
    limit = f"{used} + ({megabytes} << 20)"
    done = run_program(LIMITED.format(what="RLIMIT_AS", limit=limit))
    assert done.returncode == 0, done.stderr
    error = done.stdout.splitlines()[-1]
    assert "OutOfMemory" in error, done.stdout
    assert "MiB" in error
    assert ("ulimit -v" in error) == ("joined" not in done.stdout)


@pytest.mark.slow
def test_ranks_that_find_no_address_space_for_each_other_say_so():
    done = run_program(
        """
        import resource, ferrodist
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
        try:
            print(ferrodist.run(lambda backend: ferrodist.allreduce(1), 8, timeout=50))
        except MemoryError as error:
            print(error)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[8] * 8}\n" or "ulimit -v" in done.stdout


# -- sealed ----------------------------------------------------------------------------------------


def test_nobody_can_change_the_size_of_an_arena(start_job):
    def body(backend, pipe):
        pids = ferrodist.all_gather(os.getpid(), backend)
        files = ferrodist.all_gather(backend.arena.fd, backend)
        refused = 0
        for pid, file in zip(pids, files, strict=True):
            with open(f"/proc/{pid}/fd/{file}", "r+b") as arena:
                for nbytes in (0, 4096, 1 << 60):
                    try:
                        os.truncate(arena.fileno(), nbytes)
                    except PermissionError:
                        refused += 1
        ferrodist.barrier(backend)
        return refused, int(ferrodist.allreduce(np.ones(100_000), backend)[-1])

    with start_job(3, body) as job:
        assert job.results() == [(9, 3)] * 3


def test_memory_that_could_be_truncated_is_not_mapped():
    arena = _native.Arena(0, 2)
    loose = os.memfd_create("loose")
    try:
        os.truncate(loose, arena.nbytes)
        with pytest.raises(RuntimeError, match="not sealed"):
            _native.World(0, arena, [(arena.fd, -1), (loose, -1)], 1.0, 10.0)
    finally:
        os.close(loose)
