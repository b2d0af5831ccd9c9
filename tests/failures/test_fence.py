"""Ranks that are lost without proof of death, and continue when the others have gone on."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import Evicted, RankLost
from ferrodist.backends.peers import ExitStatuses
from jobs import QUICK, Job, error_and_time
from test_rank_faults import all_ready, tell_of_long_waits

pytestmark = pytest.mark.timeout(90)

SILENT = "has sent no heartbeat for 1 s: it is stopped, by Ctrl-Z or SIGSTOP"
COUNT = 6_000_000  # elements of an array of which one rank reduces a third: it takes milliseconds


def start_of_chunk(rank: int) -> int:
    """Return the first element that a rank of three reduces in an allreduce."""
    return COUNT // 3 * rank


def stop_when_it_reduces(backend: Any, out: Any) -> None:
    """Let this process stop itself when it has written a part of the results of its chunk."""
    first, last = start_of_chunk(backend.rank), start_of_chunk(backend.rank + 1) - 1

    def watch() -> None:
        while out[first] == 0 or out[last] != 0:
            pass
        os.kill(os.getpid(), signal.SIGSTOP)

    sys.setswitchinterval(1e-5)
    threading.Thread(target=watch, daemon=True).start()


def shared_arrays(backend: Any) -> tuple[Any, Any]:
    x, out = backend.empty(COUNT, "float32"), backend.empty(COUNT, "float32")
    x[:], out[:] = backend.rank + 1, 0
    return x, out


def lose_rank_1_inside(backend: Any, pipe: Any) -> tuple[Any, BaseException | None]:
    """Make allreduces on shared arrays, inside one of which rank 1 stops.

    On a busy machine the thread that stops it may not run during the first ones.
    """
    x, out = shared_arrays(backend)
    ferrodist.barrier(backend)
    pipe.send("ready")
    if backend.rank == 1:
        stop_when_it_reduces(backend, out)
    try:
        for _ in range(100):
            ferrodist.allreduce(x, backend, out=out)
            out[:] = 0
    except ferrodist.DistributedError as error:
        return out, error
    return out, None


def is_still_mine(out: Any, backend: Any) -> bool:
    return bool((out == 100 + backend.rank).all())


# -- shared memory ---------------------------------------------------------------------------------


def test_a_rank_stopped_inside_a_call_is_killed_before_the_others_go_on(start_job):
    def body(backend, pipe):
        out, error = lose_rank_1_inside(backend, pipe)
        survivors = backend.split([0, 2])
        out[:] = 100 + backend.rank
        pipe.send(error)
        assert pipe.recv() == "it was continued"
        total = ferrodist.allreduce(out, survivors)
        return is_still_mine(out, backend), total[0]

    with start_job(3, body, **QUICK) as job:
        all_ready(job)
        for rank in job.others(1):
            error = rank.hear()
            assert isinstance(error, RankLost)
            assert (error.rank, error.how) == (1, SILENT)
        job[1].send_signal(signal.SIGCONT)
        assert job[1].has_ended()
        for rank in job.others(1):
            rank.tell("it was continued")
        assert [rank.end().result for rank in job.others(1)] == [(True, 202)] * 2


def test_arrays_are_taken_back_from_a_rank_that_cannot_be_killed(start_job):
    """As with a pidfd of another pid namespace, or a lifeline: rank 1 writes all it wants."""

    def body(backend, pipe):
        ExitStatuses._signal = lambda self, rank, number: False
        common = backend.shared(3, "float64")
        out, error = lose_rank_1_inside(backend, pipe)
        if backend.rank == 1:
            pipe.send(error_and_time(ferrodist.barrier, backend)[0])
            assert pipe.recv() == "written"
            return True
        was_shared = backend.arena.holds(out)
        survivors = backend.split([0, 2])
        out[:] = 100 + backend.rank
        pipe.send(error)
        assert pipe.recv() == "it was continued"
        found = is_still_mine(out, backend), was_shared, backend.arena.holds(out)
        assert backend.arena.holds(common) == (backend.rank == 0)
        assert ferrodist.allreduce_(out, survivors)[-1] == 202
        return found

    with start_job(3, body, **QUICK) as job:
        all_ready(job)
        for rank in job.others(1):
            assert isinstance(rank.hear(), RankLost)
        job[1].send_signal(signal.SIGCONT)
        evicted = job[1].hear()  # its call is over: it has written whatever it was to write
        assert isinstance(evicted, Evicted)
        assert "the others have given this rank up: allreduce #" in str(evicted)
        assert (evicted.rank, evicted.this_rank) == (1, 1)
        for rank in job.others(1):
            rank.tell("it was continued")
        assert [rank.end().result for rank in job.others(1)] == [(True, True, False)] * 2


def test_a_rank_that_left_the_call_before_the_others_went_on_lives(start_job):
    def body(backend, pipe):
        pipe.send("ready")
        error, _ = error_and_time(call_for_ever_in_pieces, backend)
        pipe.send(error)
        assert pipe.recv() == "rank 1 has left the call"
        if backend.rank == 1:
            return ferrodist.Evicted, error_and_time(ferrodist.barrier, backend)[0]
        return ferrodist.allreduce(1, backend.split([0, 2]))

    with start_job(3, body, **QUICK) as job:
        all_ready(job)
        job[1].send_signal(signal.SIGSTOP)
        for rank in job.others(1):
            assert isinstance(rank.hear(), RankLost)
        job[1].send_signal(signal.SIGCONT)
        assert isinstance(job[1].hear(), Evicted)
        for rank in job:
            rank.tell("rank 1 has left the call")
        assert [rank.end().result for rank in job.others(1)] == [2, 2]
        kind, later = job[1].end().result
        assert isinstance(later, kind)


def call_for_ever_in_pieces(backend: Any) -> None:
    """Make calls of several rounds, of which every rank sees all others come."""
    x = np.full(3_000_000, backend.rank + 1.0)
    while True:
        ferrodist.allreduce(x, backend)


# -- every backend ---------------------------------------------------------------------------------


def test_a_rank_stopped_outside_every_call_lives_and_is_evicted_from_all_its_groups(
    start, backend_name
):
    world = 4  # ranks 0 and 1 share memory in a hybrid group

    def body(backend, pipe):
        other = backend.split(range(world))
        pair = backend.split([0, 1]) if backend.rank < 2 else backend.split([2, 3])
        x = backend.empty(COUNT, "float32")
        x[:] = backend.rank + 1
        ferrodist.barrier(other)
        pipe.send("ready")
        if backend.rank == 1:
            pipe.recv()
            groups = [backend, other, pair]
            calls = [lambda group=group: ferrodist.allreduce_(x, group) for group in groups]
            calls += [lambda group=group: ferrodist.send(1, 0, group) for group in groups]
            return [error_and_time(call)[0] for call in [*calls, lambda: backend.split([0, 1])]]
        error, _ = error_and_time(lambda: ferrodist.allreduce_(x, backend))
        assert isinstance(error, RankLost), error
        survivors = backend.split([0, 2, 3])
        x[:] = 100 + backend.rank
        pipe.send("went on")
        assert pipe.recv() == "it has called"
        assert is_still_mine(x, backend)
        assert isinstance(error_and_time(ferrodist.barrier, other)[0], RankLost)
        if backend.rank > 1:  # a group that rank 1 is not in is not concerned
            assert ferrodist.allreduce(1, pair) == 2
        return ferrodist.allreduce(1, survivors)

    with start(world, body, **QUICK) as job:
        all_ready(job)
        job[1].send_signal(signal.SIGSTOP)
        for rank in job.others(1):
            assert rank.hear() == "went on"
        job[1].send_signal(signal.SIGCONT)
        job[1].tell()
        errors = job[1].end().result
        assert [type(error) for error in errors] == [Evicted] * 7
        for error in errors:
            assert "rank 1 has sent no heartbeat for 1 s" in str(error)
            assert error.rank == error.this_rank == 1
        for rank in job.others(1):
            rank.tell("it has called")
        assert [rank.end().result for rank in job.others(1)] == [3, 3, 3]


@pytest.mark.parametrize("is_one_slow", [False, True])
@pytest.mark.parametrize("nbytes", [24, 8 << 20])
def test_survivors_may_go_on_in_two_groups_and_none_of_them_is_killed(start, nbytes, is_one_slow):
    """A rank that is not in the list of split is alive: it leaves the failed call by itself.

    A slow one may be a round behind the ranks that have split already, and still finishes that.
    """

    def body(backend, pipe):
        x = backend.empty(nbytes // 4, "float32")
        ferrodist.barrier(backend)
        pipe.send("ready")
        error, _ = error_and_time(allreduce_for_ever, backend, x)
        assert isinstance(error, RankLost), error
        half = backend.split([0, 1] if backend.rank < 2 else [3, 4])
        x[:] = backend.rank
        return int(ferrodist.allreduce(x, half)[-1])

    with start(5, body) as job:
        all_ready(job)
        if is_one_slow:
            job[3].send_signal(signal.SIGSTOP)
        job[2].send_signal(signal.SIGKILL)
        assert job[2].has_ended()
        job[3].send_signal(signal.SIGCONT)
        assert [rank.end().result for rank in job.others(2)] == [1, 1, 7, 7]


def allreduce_for_ever(backend: Any, x: Any) -> None:
    while True:
        x[:] = 1
        ferrodist.allreduce_(x, backend)


# -- debuggers -------------------------------------------------------------------------------------

_ATTACH, _DETACH, _ALL_THREADS = 16, 17, 0x40000000


@contextmanager
def held_by_a_debugger(pid: int) -> Iterator[None]:
    """Attach to all threads of a process, as gdb does, which stops them."""
    libc = ctypes.CDLL(None, use_errno=True)
    threads = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    for thread in threads:
        if libc.ptrace(_ATTACH, thread, None, None) != 0:
            if ctypes.get_errno() == errno.EPERM:
                pytest.skip("needs to attach to processes of this user: ptrace_scope 0")
            raise OSError(ctypes.get_errno(), "ptrace")
        os.waitpid(thread, _ALL_THREADS)
    try:
        yield
    finally:
        for thread in threads:
            libc.ptrace(_DETACH, thread, None, None)


@pytest.mark.slow
def test_a_rank_that_a_debugger_holds_is_waited_for_and_named(nursery, backend_name):
    """Only ranks on its host can know that: in the hybrid group all are on one."""
    world = "000" if backend_name == "hybrid" else 3

    def body(backend, pipe):
        ferrodist.barrier(backend)
        if backend.rank == 1:
            pipe.send("ready")
            pipe.recv()
        else:
            tell_of_long_waits(pipe)
            pipe.send("ready")
        return ferrodist.allreduce(backend.rank + 1, backend)

    slow = {"FERRODIST_LOG_WAIT_AFTER": "1.5"}  # longer than silence may last
    with Job(nursery, backend_name, world, body, **slow, **QUICK) as job:
        all_ready(job)
        with held_by_a_debugger(job[1].pid):
            job[1].tell()
            for rank in job.others(1):
                while "rank 1 is held by a debugger" not in rank.hear():
                    pass  # a line of before it was: this process came late
        assert job[1].end().result == 6


# -- the launcher ----------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys, threading
import ferrodist

backend = ferrodist.init()
x, out = backend.empty({count}, "float32"), backend.empty({count}, "float32")
x[:], out[:] = backend.rank + 1, 0
ferrodist.barrier()

def stop_inside():
    while out[{first}] == 0:
        pass
    os.kill(os.getpid(), signal.SIGSTOP)

if backend.rank == 1:
    sys.setswitchinterval(1e-5)
    threading.Thread(target=stop_inside, daemon=True).start()
try:
    ferrodist.allreduce(x, out=out)
except ferrodist.RankLost as error:
    print(ferrodist.allreduce(1, backend.split([0, 2])))
"""


def test_the_launcher_says_which_rank_killed_another_and_why(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM.format(count=COUNT, first=start_of_chunk(1)))
    command = [sys.executable, "-m", "ferrodist", "run", "--keep-survivors", "-n", "3", program]
    environment = {**os.environ, **QUICK}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert ended.stdout.count("2\n") == 2, ended  # the second line of a rank may have no label
    why = f"{SILENT} inside allreduce #2, where it can write into the arrays"
    assert "rank 1 (pid " in ended.stderr
    assert ") was killed by SIGKILL (killed by rank " in ended.stderr
    assert why in ended.stderr
