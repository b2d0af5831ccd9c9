"""Ranks connected by TCP that close, end, exit or fork: others are told, nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import BackendClosed, DistributedError, RankLost
from ferrodist.backends.tcp import TcpBackend
from ferrodist.rendezvous import Job as Place
from jobs import LIMIT, error_and_time
from tcp_jobs import SMALL_PIECES
from test_shared_memory_leaving import ENDINGS, close_here
from test_shared_memory_limits import assert_no_growth, growth, resources

pytest_plugins = ["tcp_jobs"]
pytestmark = pytest.mark.timeout(90)

MEGABYTE = 1 << 20
CLOSED_AT = f"test_shared_memory_leaving.py:{close_here.__code__.co_firstlineno + 1}"
slow = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


# -- leaving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaver", [2, 0])
@pytest.mark.parametrize("how", ["closes", "ends", "drops its group"])
def test_a_rank_that_leaves_while_others_still_call_is_lost_soon(start_tcp_job, how, leaver):
    def body(backend, pipe):
        group = backend if how == "ends" else backend.split([0, 1, 2])
        for _ in range(3):
            ferrodist.barrier(group)
        left = time.monotonic()
        if backend.rank != leaver:
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
        "closes": f"left after #3 (closed at {CLOSED_AT}); every rank must make the same number",
        "ends": "left after #3 (its program ended); every rank must make the same number of calls",
        "drops its group": "dropped its backend without close(); look at that rank's own output",
    }
    with start_tcp_job(3, body) as job:
        ends = [rank.end().result for rank in job]
    left = ends.pop(leaver)
    for error, when in ends:
        assert isinstance(error, RankLost)
        assert error.rank == leaver
        assert f"rank {leaver} {words[how]}" in str(error)
        assert when - left < 2


def last_calls(x: Any) -> list[Any]:
    """List calls of which a rank may leave while others are still inside."""
    return [
        lambda group: ferrodist.allreduce(x, group),
        lambda group: ferrodist.broadcast(x, group),
        lambda group: ferrodist.gather(x, group),
        lambda group: ferrodist.all_to_all(x[: len(x) // 12 * 12], group),
        lambda group: ferrodist.allreduce(x, group, algorithm="ring"),
        lambda group: ferrodist.all_gather(x, group, algorithm="bruck"),
        lambda group: ferrodist.barrier(group),
    ]


@pytest.mark.parametrize("nbytes", [24, MEGABYTE])
def test_leaving_right_after_the_last_call_of_a_group_harms_nobody(start_tcp_job, nbytes):
    """Whoever is first out of the last call of a group leaves it at once."""

    def body(backend, pipe):
        calls = last_calls(np.zeros(nbytes // 8))
        for number in range(140):
            with backend.split([0, 1, 2]) as group:
                calls[number % len(calls)](group)

    with start_tcp_job(3, body) as job:
        job.results()


@pytest.mark.parametrize(
    "repeats", [1, pytest.param(30, marks=slow)], ids=lambda repeats: f"{repeats} times"
)
def test_ending_right_after_the_last_call_harms_nobody(start_tcp_job, repeats):
    """The process is gone, and its sockets, while others are still inside a large call."""

    def body(backend, pipe):
        number = pipe.recv()
        ferrodist.barrier(backend)
        last_calls(np.full(MEGABYTE, float(backend.rank)))[number](backend)

    for number in range(len(last_calls(np.zeros(24)))):
        for _ in range(repeats):
            with start_tcp_job(4, body) as job:
                for rank in job:
                    rank.tell(number)
                job.results()


def test_dying_right_after_the_last_call_harms_nobody(start_tcp_job):
    def body(backend, pipe):
        ferrodist.barrier(backend)
        total = ferrodist.allreduce(np.full(3, backend.rank + 1), backend).tolist()
        if backend.rank == 1:
            os._exit(0)
        return total

    for _ in range(20):
        with start_tcp_job(3, body) as job:
            assert [rank.end().result for rank in job.others(1)] == [[6, 6, 6]] * 2


def test_messages_sent_before_leaving_arrive(start_tcp_job):
    """Rank 1 sends and is gone; rank 0 asks for its messages when it knows that."""

    def body(backend, pipe):
        ferrodist.barrier(backend)
        if backend.rank == 1:
            for number in range(200):
                ferrodist.send(np.full(2000, number), 0, backend)
            return 0
        pipe.recv()
        like = np.zeros(2000, int)
        total = sum(int(ferrodist.recv(like, 1, backend)[-1]) for _ in range(200))
        error, _ = error_and_time(ferrodist.recv, like, 1, backend)
        return total, error

    with start_tcp_job(2, body) as job:
        assert job[1].end().result == 0
        assert job[1].has_ended()
        job[0].tell()
        total, error = job[0].end().result
    assert total == sum(range(200))
    assert isinstance(error, RankLost)
    assert "rank 1 left after #1 (its program ended)" in str(error)


# -- forks -----------------------------------------------------------------------------------------

REFUSED_IN_CHILDREN = [
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


def exit_code_of_child(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_is_refused_at_once_and_the_parent_is_unharmed(start_tcp_job):
    def body(backend, pipe):
        assert ferrodist.allreduce(1, backend, async_op=True).wait(20) == 2
        ferrodist.allreduce(np.ones(3), backend)  # the next like it goes the short way
        child = os.fork()
        if child == 0:
            start, refused = time.monotonic(), 0
            for call in REFUSED_IN_CHILDREN:
                try:
                    call(backend)
                except BackendClosed as error:
                    refused += "forked" in str(error)
            backend.close()
            os._exit(refused if time.monotonic() - start < 1 else 99)
        code = exit_code_of_child(child)
        x = np.full(100_000, backend.rank)
        return code, int(ferrodist.allreduce(x, backend)[-1]), ferrodist.allreduce(1, backend)

    with start_tcp_job(2, body) as job:
        assert job.results() == [(len(REFUSED_IN_CHILDREN), 1, 2)] * 2


def test_a_death_is_noticed_although_a_forked_child_lives_on(start_tcp_job):
    """Were the sockets still open in the child, nothing would tell the others."""

    def body(backend, pipe):
        ferrodist.barrier(backend)
        if backend.rank == 1 and os.fork() == 0:
            pipe.recv()  # until the test ends
            os._exit(0)
        pipe.send("ready")
        return error_and_time(ferrodist.recv, 0, 1 - backend.rank, backend)

    with start_tcp_job(2, body) as job:
        for rank in job:
            assert rank.hear() == "ready"
        killed = job[1].send_signal(signal.SIGKILL)
        error, when = job[0].end().result
        assert isinstance(error, RankLost)
        assert error.rank == 1
        assert when - killed < 2
        job[1].tell()  # the child, which holds the other end, may go


def test_a_forked_child_that_drops_a_group_writes_to_no_file_of_its_own(start_tcp_job):
    """The child has closed the sockets of its parent; their numbers are those of other files."""

    def body(backend, pipe):
        group = backend.split([1, 0])
        ferrodist.barrier(group)
        child = os.fork()
        if child == 0:
            pairs = [socket.socketpair() for _ in range(8)]
            dropped = weakref.ref(group)
            del group
            gc.collect()
            found = 0 if dropped() is None else 98
            for end in (end for pair in pairs for end in pair):
                end.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    found += len(end.recv(1000))
            os._exit(min(found, 99))
        code = exit_code_of_child(child)
        return code, ferrodist.allreduce(1, group)

    with start_tcp_job(2, body) as job:
        assert job.results() == [(0, 2)] * 2


def test_a_forked_child_is_never_caught_by_a_lock_of_its_parent(start_tcp_job):
    """The child is made while other threads are in the middle of calls, and drops the groups."""

    def body(backend, pipe):
        busy = backend.split([0, 1])
        stop, stuck = threading.Event(), 0

        def keep_busy():
            x = np.ones(20_000)
            while ferrodist.allreduce(float(stop.is_set()), busy) == 0:
                ferrodist.allreduce(x, busy)

        thread = threading.Thread(target=keep_busy)
        thread.start()
        for _ in range(8):
            group = backend.split([1, 0])
            child = os.fork()
            if child == 0:
                signal.alarm(5)  # ends a child that waits for a lock nobody gives back
                del group
                gc.collect()
                os._exit(0)
            stuck += exit_code_of_child(child) != 0
        stop.set()
        thread.join()
        return stuck

    with start_tcp_job(2, body) as job:
        assert job.results() == [0, 0]


def test_a_forked_child_can_make_a_backend_of_its_own(start_tcp_job):
    """The children of two ranks join a job of their own, beside that of their parents."""
    name, secret = f"test-{secrets.token_hex(8)}", secrets.token_bytes(32)

    def body(backend, pipe):
        child = os.fork()
        if child == 0:
            with TcpBackend.join(Place(name, backend.rank, 2, secret)) as own:
                total = int(ferrodist.allreduce(np.ones(1000), own, async_op=True).wait(5).sum())
                total += int(ferrodist.allreduce(np.ones(100_000), own)[-1])
            os._exit(0 if total == 2002 else 1)
        code = exit_code_of_child(child)
        return code, ferrodist.allreduce(1, backend)

    with start_tcp_job(2, body) as job:
        assert job.results() == [(0, 2)] * 2


# -- ends of programs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        "exits with a call in flight",
        *(
            pytest.param(how, marks=slow)
            for how in sorted({*ENDINGS} - {"exits with a call in flight"})
        ),
    ],
)
def test_a_program_that_ends_without_close_ends_quietly_soon_and_with_its_own_code(tmp_path, how):
    script = tmp_path / "script.py"
    begin = "import os, time, numpy as np, ferrodist\nbackend = ferrodist.init('tcp')\n"
    begin += "ferrodist.barrier()\nos.write(1, b'%f\\n' % time.monotonic())\n"
    script.write_text(begin + textwrap.dedent(ENDINGS[how]))
    command = [sys.executable, "-m", "ferrodist", "run", "-n", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    ended = time.monotonic()
    assert done.returncode == 7, done.stderr
    times = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert ended - max(times) < 3.5  # of which the launcher has a part
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr


# -- leaks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [100_000, pytest.param(1_000_000, marks=slow)])
def test_many_small_collectives_leave_nothing_behind(start_tcp_job, number):
    def body(backend, pipe):
        x = np.full(3, backend.rank)

        def work():
            assert ferrodist.allreduce(x, backend)[0] == 1

        return growth(work, number)

    with start_tcp_job(2, body) as job:
        assert_no_growth([rank.hear(500).result for rank in job])


@pytest.mark.parametrize(
    "environment",
    [{}, pytest.param({"FERRODIST_WALKER": "python", **SMALL_PIECES}, marks=slow)],
    ids=["native", "python"],
)
def test_calls_of_other_kinds_and_errors_leave_nothing_behind(start_tcp_job, environment):
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
            with pytest.raises(ferrodist.CollectiveMismatch):
                ferrodist.allreduce(large[backend.rank :], backend)

        return growth(work, 100)

    with start_tcp_job(2, body, **environment) as job:
        assert_no_growth(job.results())


@pytest.mark.parametrize("number", [300, pytest.param(10_000, marks=slow)])
def test_groups_made_and_closed_leave_nothing_behind(start_tcp_job, number):
    def body(backend, pipe):
        large = np.zeros(10_000)

        def work():
            with backend.split([0, 1]) as group:
                ferrodist.allreduce(1, group)
                ferrodist.allreduce(large, group)
                ferrodist.sendrecv(1, 1 - group.rank, 0, 1 - group.rank, group)

        return growth(work, number)

    with start_tcp_job(2, body) as job:
        assert_no_growth([rank.hear(500).result for rank in job])


@pytest.mark.parametrize("world", [1, 3])
def test_backends_give_their_files_and_threads_back_closed_or_not(start_tcp_job, world):
    secret = secrets.token_bytes(32)

    def body(backend, pipe):
        def join_and_leave(number):
            with contextlib.ExitStack() as stack:
                place = Place(f"test-{secret.hex()[:20]}-{number}", backend.rank, world, secret)
                another = TcpBackend.join(place)
                if number % 3:
                    stack.enter_context(another)
                ferrodist.allreduce(np.ones(50_000), another, async_op=True).wait(20)

        before = resources()
        for number in range(12):
            join_and_leave(number)
        end = time.monotonic() + 5
        while resources() != before and time.monotonic() < end:
            pass  # threads that were told to end need a moment
        return before, resources()

    with start_tcp_job(world, body) as job:
        for before, after in job.results():
            assert before == after
