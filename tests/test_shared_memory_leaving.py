"""Ranks in shared memory that close, end, exit or fork: the others are told, nobody is harmed."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import subprocess
import sys
import textwrap
import time
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import BackendClosed, DistributedError, RankLost
from ferrodist.backends.shared_memory import SharedMemoryBackend
from ferrodist.rendezvous import Job as Place
from jobs import LIMIT, error_and_time, run_program

pytestmark = pytest.mark.timeout(90)

MEGABYTE = 1 << 20


def close_here(backend: Any) -> int:
    backend.close()
    return close_here.__code__.co_firstlineno + 1


@pytest.mark.parametrize("how", ["closes", "ends", "drops its group"])
def test_a_rank_that_leaves_while_others_still_call_is_lost_within_a_second(start_job, how):
    def body(backend, pipe):
        group = backend if how == "ends" else backend.split([0, 1, 2])
        for _ in range(3):
            ferrodist.barrier(group)
        left = time.monotonic()
        if backend.rank != 2:
            return error_and_time(ferrodist.allreduce, np.ones(3), group)
        if how == "closes":
            close_here(group)
        elif how == "drops its group":
            del group
            gc.collect()
        else:
            return left
        with contextlib.suppress(DistributedError):
            ferrodist.barrier(backend, timeout=LIMIT)  # until the others are gone
        return left

    words = {
        "closes": f"left after #3 (closed at test_shared_memory_leaving.py:{LINE}); every",
        "ends": "left after #3 (its program ended); every rank must make the same number of calls",
        "drops its group": "dropped its backend without close(); look at that rank's own output",
    }
    with start_job(3, body) as job:
        (one, other, left) = [rank.end().result for rank in job]
    for error, when in (one, other):
        assert isinstance(error, RankLost)
        assert error.rank == 2
        assert f"rank 2 {words[how]}" in str(error)
        assert when - left < 1


LINE = close_here.__code__.co_firstlineno + 1


@pytest.mark.parametrize("nbytes", [24, MEGABYTE])
def test_leaving_right_after_the_last_call_harms_nobody(start_job, nbytes):
    """Two hundred times: whoever is first out of the last call of a group leaves at once."""

    def body(backend, pipe):
        x = backend.zeros(nbytes // 8, "float64") if backend.rank else np.zeros(nbytes // 8)
        calls = [
            lambda group: ferrodist.allreduce(x, group),
            lambda group: ferrodist.broadcast(x, group),
            lambda group: ferrodist.gather(x, group),
            lambda group: ferrodist.all_to_all(x[: len(x) // 3 * 3], group),
            lambda group: ferrodist.barrier(group),
        ]
        for number in range(200):
            with backend.split([0, 1, 2]) as group:
                calls[number % 5](group)

    with start_job(3, body) as job:
        job.results()


def test_dying_right_after_the_last_call_harms_nobody(start_job):
    def body(backend, pipe):
        ferrodist.barrier(backend)
        total = ferrodist.allreduce(np.full(3, backend.rank + 1), backend).tolist()
        if backend.rank == 1:
            os._exit(0)
        return total

    for _ in range(30):
        with start_job(3, body) as job:
            assert [rank.end().result for rank in job.others(1)] == [[6, 6, 6]] * 2


# -- forks and ends --------------------------------------------------------------------------------


def test_a_forked_child_is_refused_at_once_and_the_parent_is_unharmed(start_job):
    calls = [
        lambda backend: ferrodist.allreduce(np.ones(3), backend),
        lambda backend: ferrodist.barrier(backend, timeout=5),
        lambda backend: ferrodist.allreduce(1, backend, async_op=True),
        lambda backend: ferrodist.send(np.ones(3), 1 - backend.rank, backend),
        lambda backend: ferrodist.recv(np.ones(3), 1 - backend.rank, backend),
        lambda backend: ferrodist.broadcast_object(1, backend),
        lambda backend: backend.split([0, 1]),
        lambda backend: backend.empty(3, "int8"),
        lambda backend: backend.abort(),
        lambda backend: backend.statistics(),
    ]

    def body(backend, pipe):
        assert ferrodist.allreduce(1, backend, async_op=True).wait(20) == 2
        child = os.fork()
        if child == 0:
            start = time.monotonic()
            refused = 0
            for call in calls:
                try:
                    call(backend)
                except BackendClosed as error:
                    refused += "forked" in str(error)
            backend.close()
            del backend
            os._exit(refused if time.monotonic() - start < 1 else 99)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        x = np.full(100_000, backend.rank)
        return code, int(ferrodist.allreduce(x, backend)[-1]), ferrodist.allreduce(1, backend)

    with start_job(2, body) as job:
        assert job.results() == [(len(calls), 1, 2)] * 2


def test_a_forked_child_can_make_a_backend_of_its_own(start_job):
    def body(backend, pipe):
        child = os.fork()
        if child == 0:
            place = Place(f"test-{secrets.token_hex(8)}", 0, 1, bytes(32))
            with SharedMemoryBackend.join(place) as own:
                array = own.zeros(1000, "float64")
                total = int(ferrodist.allreduce(array + 1, own, async_op=True).wait(5).sum())
                total += int(ferrodist.allreduce(np.ones(10), own).sum())
                blocks = own.arena.num_blocks
                del array
                is_freed = own.arena.num_blocks == blocks - 1
            os._exit(0 if total == 1010 and is_freed else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, ferrodist.allreduce(1, backend)

    with start_job(2, body) as job:
        assert job.results() == [(0, 2)] * 2


ENDINGS = {
    "exits": "raise SystemExit(7)",
    "exits with a call in flight": """
        if backend.rank == 0:
            work = ferrodist.allreduce(np.ones(3), async_op=True)  # rank 1 never comes
        raise SystemExit(7)
    """,
    "exits with threads in calls": """
        import contextlib, threading
        def wait(tag):
            with contextlib.suppress(ferrodist.RankLost):
                ferrodist.recv(1, 1 - backend.rank, tag=tag)
        if backend.rank == 0:
            for tag in range(8):
                threading.Thread(target=wait, args=[tag], daemon=True).start()
            much = [[n] for n in range(1_000_000)]  # the end takes a while: threads wake up in it
        else:
            wait(9)  # until rank 0 is gone
        raise SystemExit(7)
    """,
    "exits with arrays and groups": """
        array, group = backend.zeros(1000, "float32"), backend.split([1, 0])
        ferrodist.allreduce(array, group)
        raise SystemExit(7)
    """,
}


@pytest.mark.parametrize("how", ENDINGS)
def test_a_program_that_ends_without_close_ends_quietly_soon_and_with_its_own_code(tmp_path, how):
    script = tmp_path / "script.py"
    begin = "import os, time, numpy as np, ferrodist\nbackend = ferrodist.init()\n"
    begin += "ferrodist.barrier()\nos.write(1, b'%f\\n' % time.monotonic())\n"
    script.write_text(begin + textwrap.dedent(ENDINGS[how]))
    command = [sys.executable, "-m", "ferrodist", "run", "-n", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    ended = time.monotonic()
    assert done.returncode == 7
    times = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert ended - max(times) < 3.5  # of which the launcher has a part
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr


def test_a_program_of_one_rank_ends_quietly():
    done = run_program(
        """
        import numpy as np, ferrodist
        backend = ferrodist.init()
        work = ferrodist.allreduce(np.ones(3), async_op=True)
        array = backend.zeros(5, "int8")
        raise SystemExit(7)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
