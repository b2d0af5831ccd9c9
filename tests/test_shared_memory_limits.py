"""What ranks in shared memory leave behind, and what becomes of them where there is not enough."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import _native
from ferrodist.backends.shared_memory import SharedMemoryBackend
from ferrodist.rendezvous import Job as Place
from jobs import run_program

pytestmark = pytest.mark.timeout(90)

slow = [pytest.mark.slow, pytest.mark.timeout(400)]


# -- leaks -----------------------------------------------------------------------------------------


def resources() -> tuple[int, int]:
    """Count open files and threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def memory_nbytes() -> int:
    """How much memory this process has to itself or shares with others, and has touched."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def growth(work: Any, number: int) -> tuple[tuple[int, int], tuple[int, int], int]:
    """Do something often; return files and threads before and after, and the growth of memory."""
    for _ in range(max(100, number // 100)):  # what is made once is made now
        work()
    before, nbytes = resources(), memory_nbytes()
    for _ in range(number):
        work()
    return before, resources(), memory_nbytes() - nbytes


def assert_no_growth(results: list[Any]) -> None:
    for before, after, nbytes in results:
        assert before == after
        assert nbytes < 5e6


@pytest.mark.parametrize("number", [100_000, pytest.param(1_000_000, marks=slow)])
def test_many_small_collectives_leave_nothing_behind(start_job, number):
    def body(backend, pipe):
        x = np.full(3, backend.rank)

        def work():
            assert ferrodist.allreduce(x, backend)[0] == 1

        return growth(work, number)

    with start_job(2, body) as job:
        assert_no_growth([rank.hear(300).result for rank in job])


def test_calls_of_other_kinds_and_errors_leave_nothing_behind(start_job):
    def body(backend, pipe):
        peer, large = 1 - backend.rank, np.zeros(150_000)

        def work():
            ferrodist.allreduce(large, backend)
            ferrodist.allreduce(large, backend, async_op=True).wait(20)
            ferrodist.allreduce({"a": large, "b": 1}, backend)
            ferrodist.sendrecv(large, peer, large, peer, backend)
            ferrodist.all_gather_object("x", backend)
            with pytest.raises(ferrodist.CollectiveMismatch):
                ferrodist.allreduce(np.ones(2 + backend.rank), backend)

        return growth(work, 100)

    with start_job(2, body) as job:
        assert_no_growth(job.results())


@pytest.mark.parametrize("number", [300, pytest.param(10_000, marks=slow)])
def test_groups_made_and_closed_leave_nothing_behind(start_job, number):
    def body(backend, pipe):
        large = np.zeros(10_000)

        def work():
            with backend.split([0, 1]) as group:
                ferrodist.allreduce(1, group)
                ferrodist.allreduce(large, group)  # takes a stage
                ferrodist.sendrecv(1, 1 - group.rank, 0, 1 - group.rank, group)  # takes a queue

        before = backend.arena.num_blocks
        found = growth(work, number)
        ferrodist.barrier(backend)
        backend.world.sweep()
        ferrodist.barrier(backend)
        backend.world.sweep()  # a group's own block goes when all others have swept
        return found, backend.arena.num_blocks - before

    with start_job(2, body) as job:
        results = [rank.hear(300).result for rank in job]
    assert_no_growth([found for found, _ in results])
    assert [blocks for _, blocks in results] == [0, 0]


def names_in_use() -> list[str]:
    """List the files this process has open or mapped."""
    names = Path("/proc/self/maps").read_text().split()
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            names.append(os.readlink(f"/proc/self/fd/{file}"))
    return names


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

# What a rank does under a limit; any end but a result or an error in words would be a crash.
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


def test_too_few_files_is_an_error_in_words():
    for limit in (3, 5, 6, 7):
        done = run_program(LIMITED.format(what="RLIMIT_NOFILE", limit=limit))
        assert done.returncode == 0, (limit, done.stderr)
        last = done.stdout.splitlines()[-1]
        assert "Too many open files" in last or "MemoryError" in last, (limit, done.stdout)


@pytest.mark.parametrize("megabytes", [10, 200, 1000])
def test_too_little_address_space_is_an_error_in_words(megabytes):
    used = "int(open('/proc/self/statm').read().split()[0]) * 4096"
    limit = f"{used} + ({megabytes} << 20)"
    done = run_program(LIMITED.format(what="RLIMIT_AS", limit=limit))
    assert done.returncode == 0, done.stderr
    error = done.stdout.splitlines()[-1]
    assert "MemoryError" in error, done.stdout
    assert "MiB" in error
    assert ("ulimit -v" in error) == ("joined" not in done.stdout)


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


@pytest.mark.parametrize("world", [1, 3])
def test_backends_give_their_files_and_threads_back_closed_or_not(start_job, world):
    secret = secrets.token_bytes(32)

    def body(backend, pipe):
        def join(number):
            return SharedMemoryBackend.join(
                Place(f"test-{secret.hex()[:20]}-{number}", backend.rank, world, secret)
            )

        def join_and_leave(number):
            with contextlib.ExitStack() as stack:
                another = join(number)
                if number % 3:
                    stack.enter_context(another)
                ferrodist.allreduce(np.ones(50_000), another, async_op=True).wait(20)

        before = resources()
        for number in range(20):
            join_and_leave(number)
        end = time.monotonic() + 5
        while resources() != before and time.monotonic() < end:
            pass  # threads that were told to end need a moment
        return before, resources()

    with start_job(world, body) as job:
        for before, after in job.results():
            assert before == after
