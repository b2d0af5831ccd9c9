"""Ranks that close, end, exit or fork: the others are told, nobody is harmed."""

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
from ferrodist.backends.shared_memory import SharedMemoryBackend
from ferrodist.rendezvous import Job as Place
from jobs import BACKENDS, LIMIT, error_and_time, run_program

pytestmark = pytest.mark.timeout(90)

MEGABYTE = 1 << 20
slow = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


def close_here(backend: Any) -> None:
    backend.close()


CLOSED_AT = f"test_leaving.py:{close_here.__code__.co_firstlineno + 1}"


# -- leaving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaver", [2, 0])
@pytest.mark.parametrize("how", ["closes", "ends", "drops its group"])
def test_a_rank_that_leaves_while_others_still_call_is_lost_soon(start, soon, how, leaver):
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
    with start(3, body) as job:
        ends = [rank.end().result for rank in job]
    left = ends.pop(leaver)
    for error, when in ends:
        assert isinstance(error, RankLost)
        assert error.rank == leaver
        assert f"rank {leaver} {words[how]}" in str(error)
        assert when - left < soon


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


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [24, MEGABYTE])
def test_leaving_right_after_the_last_call_of_a_group_harms_nobody(start, nbytes):
    """The rank that is first out of a group's last call leaves it at once."""

    def body(backend, pipe):
        count = nbytes // 8
        calls = last_calls(backend.zeros(count, "float64") if backend.rank else np.zeros(count))
        for number in range(203):
            with backend.split([0, 1, 2]) as group:
                calls[number % len(calls)](group)

    with start(3, body) as job:
        job.results()


@pytest.mark.slow
@pytest.mark.parametrize(
    "repeats", [1, pytest.param(30, marks=slow)], ids=lambda repeats: f"{repeats} times"
)
def test_ending_right_after_the_last_call_harms_nobody(start, repeats):
    """The process is gone, and its sockets, while others are still inside a large call."""

    def body(backend, pipe):
        number = pipe.recv()
        ferrodist.barrier(backend)
        last_calls(np.full(MEGABYTE, float(backend.rank)))[number](backend)

    for number in range(len(last_calls(np.zeros(24)))):
        for _ in range(repeats):
            with start(4, body) as job:
                for rank in job:
                    rank.tell(number)
                job.results()


@pytest.mark.slow
def test_dying_right_after_the_last_call_harms_nobody(start):
    def body(backend, pipe):
        ferrodist.barrier(backend)
        total = ferrodist.allreduce(np.full(3, backend.rank + 1), backend).tolist()
        if backend.rank == 1:
            os._exit(0)
        return total

    for _ in range(30):
        with start(3, body) as job:
            assert [rank.end().result for rank in job.others(1)] == [[6, 6, 6]] * 2


def test_messages_sent_before_leaving_arrive(start):
    """Rank 1 sends and is gone; rank 0 asks for its messages when it knows that."""

    def body(backend, pipe):
        ferrodist.barrier(backend)
        if backend.rank == 1:
            for number in range(200):
                ferrodist.send(np.full(2000, number), 0, backend)
            return 0
        pipe.recv()
        like = np.zeros(2000, int)
        total = sum(int(ferrodist.recv(1, backend, like=like)[-1]) for _ in range(200))
        error, _ = error_and_time(ferrodist.recv, 1, backend)
        return total, error

    with start(2, body) as job:
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
    lambda backend: ferrodist.recv(1 - backend.rank, backend, like=np.ones(3)),
    lambda backend: ferrodist.broadcast_object(1, backend),
    lambda backend: backend.split([0, 1]),
    lambda backend: backend.empty(3, "int8"),
    lambda backend: backend.abort(),
    lambda backend: backend.statistics(),
]


def exit_code_of_child(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_is_refused_at_once_and_the_parent_is_unharmed(start):
    def body(backend, pipe):
        assert ferrodist.allreduce(1, backend, async_op=True).wait(20) == 2
        ferrodist.allreduce(np.ones(3), backend)  # the next like it takes the fast path
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

    with start(2, body) as job:
        assert job.results() == [(len(REFUSED_IN_CHILDREN), 1, 2)] * 2


def test_a_death_is_noticed_although_a_forked_child_lives_on(start):
    """Were the sockets still open in the child, nothing would tell the others."""

    def body(backend, pipe):
        ferrodist.barrier(backend)
        if backend.rank == 1 and os.fork() == 0:
            pipe.recv()  # until the test ends
            os._exit(0)
        pipe.send("ready")
        return error_and_time(ferrodist.recv, 1 - backend.rank, backend)

    with start(2, body) as job:
        for rank in job:
            assert rank.hear() == "ready"
        killed = job[1].send_signal(signal.SIGKILL)
        error, when = job[0].end().result
        assert isinstance(error, RankLost)
        assert error.rank == 1
        assert when - killed < 2
        job[1].tell()  # the child, which holds the other end, may go


def test_a_forked_child_that_drops_a_group_writes_to_no_file_of_its_own(start):
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

    with start(2, body) as job:
        assert job.results() == [(0, 2)] * 2


@pytest.mark.slow
def test_a_forked_child_is_never_caught_by_a_lock_of_its_parent(start):
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

    with start(2, body) as job:
        assert job.results() == [0, 0]


def test_a_forked_child_can_make_a_backend_of_its_own(start, backend_name):
    """The children of two ranks join a job of their own, beside that of their parents."""
    name, secret = f"test-{secrets.token_hex(8)}", secrets.token_bytes(32)

    def body(backend, pipe):
        child = os.fork()
        if child == 0:
            with BACKENDS[backend_name].join(Place(name, backend.rank, 2, secret)) as own:
                total = int(ferrodist.allreduce(np.ones(1000), own, async_op=True).wait(5).sum())
                total += int(ferrodist.allreduce(np.ones(100_000), own)[-1])
            os._exit(0 if total == 2002 else 1)
        code = exit_code_of_child(child)
        return code, ferrodist.allreduce(1, backend)

    with start(2, body) as job:
        assert job.results() == [(0, 2)] * 2


def test_a_forked_child_can_make_shared_memory_of_its_own(start_job):
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
        code = exit_code_of_child(child)
        return code, ferrodist.allreduce(1, backend)

    with start_job(2, body) as job:
        assert job.results() == [(0, 2)] * 2


# -- ends of programs ------------------------------------------------------------------------------


ENDINGS = {
    "exits": "raise SystemExit(7)",
    "exits with a call in flight": """
        if backend.rank == 0:
            work = ferrodist.allreduce(np.ones(3), async_op=True)  # rank 1 never comes
        raise SystemExit(7)
    """,
    "exits while a callback runs": """
        import threading
        begun = threading.Event()
        def callback(work):
            begun.set()
            time.sleep(600)
        if backend.rank == 0:  # the callback is there before the call can be done
            ferrodist.allreduce(np.ones(3), async_op=True).add_done_callback(callback)
            ferrodist.send(np.ones(1), 1)
            begun.wait()
        else:
            ferrodist.recv(0)
            ferrodist.allreduce(np.ones(3))
        raise SystemExit(7)
    """,
    "exits where no thread starts any more, as in Python 3.12": """
        import threading
        def refuse(thread):
            raise RuntimeError("can't create new thread at interpreter shutdown")
        atexit.register(setattr, threading.Thread, "start", refuse)
        if backend.rank == 0:
            work = ferrodist.allreduce(np.ones(3), async_op=True)
        raise SystemExit(7)
    """,
    "exits with threads in calls": """
        import contextlib, sys, threading
        sys.setswitchinterval(1e-5)  # so that some run Python code for an error when the end comes
        def wait(tag):
            with contextlib.suppress(ferrodist.RankLost):
                ferrodist.recv(1 - backend.rank, tag=tag)
        if backend.rank == 0:
            for tag in range(30):
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


QUICK_ENDING = "exits with a call in flight"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("", how) for how in ENDINGS),
        ("tcp", QUICK_ENDING),
        *(pytest.param("tcp", how, marks=slow) for how in sorted({*ENDINGS} - {QUICK_ENDING})),
    ],
)
def test_a_program_that_ends_without_close_ends_quietly_soon_and_with_its_own_code(
    tmp_path, name, how
):
    script = tmp_path / "script.py"
    begin = "import atexit, os, time, numpy as np, ferrodist\n"
    begin += f"backend = ferrodist.init({name or None!r})\n"
    begin += "atexit.register(lambda: os.write(1, b'%f\\n' % time.monotonic()))\n"  # runs first
    begin += "ferrodist.barrier()\n"
    script.write_text(begin + textwrap.dedent(ENDINGS[how]))
    command = [sys.executable, "-m", "ferrodist", "run", "-n", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    ended = time.monotonic()
    assert done.returncode == 7, done.stderr
    times = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert ended - max(times) < 3.5  # of which the launcher has a part
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr


def test_what_is_in_flight_at_the_end_gets_a_moment_and_is_cut_short(start):
    def body(backend, pipe):
        pair = backend.split([0, 1])
        if backend.rank == 1:
            error, _ = error_and_time(ferrodist.barrier, pair)
            pipe.recv()  # rank 0 has left all its groups
            return error
        work = ferrodist.allreduce(np.ones(3), backend, async_op=True)
        begun = time.monotonic()
        backend._end("its program ended", 0.5)
        return time.monotonic() - begun, type(work.exception(0))

    with start(2, body) as job:
        seconds, cut_short = job[0].end().result
        job[1].tell()
        lost = job[1].end().result
    assert 0.5 <= seconds < 1.5
    assert cut_short is BackendClosed
    assert isinstance(lost, RankLost)
    assert "rank 0 left after #0 (its program ended)" in str(lost)


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


def test_closing_finishes_a_named_algorithm_that_is_in_flight(start):
    def body(backend, pipe):
        work = ferrodist.allreduce(np.full(7, 1.0), backend, algorithm="ring", async_op=True)
        if backend.rank == 1:
            backend.close()
        return float(work.wait(20)[0])

    with start(3, body) as job:
        assert job.results() == [3.0] * 3


def test_a_group_is_left_with_the_one_it_was_split_off(start):
    def body(backend, pipe):
        pair = backend.split([0, 1])
        ferrodist.barrier(pair)
        backend.close()
        calls = (
            lambda: ferrodist.allreduce(np.ones(3), pair),
            lambda: ferrodist.send(np.ones(3), 1 - pair.rank, pair),
            lambda: ferrodist.allreduce(1.0, pair),
        )
        return [type(error_and_time(call)[0]) for call in calls]

    with start(2, body) as job:
        assert job.results() == [[BackendClosed] * 3] * 2
