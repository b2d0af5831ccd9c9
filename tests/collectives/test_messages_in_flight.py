"""Sends and receives in flight between processes: any number, no thread each, nothing burnt."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import resource
import signal
import threading
import time
import weakref

import numpy as np
import pytest

import ferrodist
from ferrodist import CollectiveTimeout, InvalidArgument, RankLost, SizeMismatch, _native

pytestmark = pytest.mark.timeout(90)

LARGE = 100_000  # float64: well above the 64 KB that never wait


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_ten_thousand_receives_are_in_flight_without_a_thread_each(start):
    count = 10_000

    def body(backend, pipe):
        if backend.rank == 0:
            before = num_threads()
            works = [
                ferrodist.recv(1, backend, like=np.empty(2), async_op=True) for _ in range(count)
            ]
            assert backend.group.num_requests == count
            threads = num_threads() - before
            ferrodist.barrier(backend)
            return threads, [int(work.wait(60)[0]) for work in works] == list(range(count))
        ferrodist.barrier(backend)
        works = [
            ferrodist.send(np.full(2, float(number)), 0, backend, async_op=True)
            for number in range(count)
        ]
        for work in works:
            work.wait(60)
        return None

    with start(2, body) as job:
        threads, is_in_order = job.results()[0]
        assert threads <= 2  # one makes progress, one runs callbacks
        assert is_in_order


@pytest.mark.slow
def test_receives_in_flight_burn_nothing_while_nothing_comes(start):
    """The time other ranks take is made by collectives among them, not by a clock."""

    def body(backend, pipe):
        if backend.rank > 0:
            others = backend.split([1, 2])
            for _ in range(20):
                time.sleep(0.05)  # the time in which nothing must be burnt
                ferrodist.barrier(others)
            if backend.rank == 1:
                for number in range(1000):
                    ferrodist.send(np.array([number]), 0, backend)
            return None
        works = [ferrodist.recv(1, backend, like=np.array([0]), async_op=True) for _ in range(1000)]
        before = os.times()
        done = works[0].wait(60)
        after = os.times()
        assert [int(work.wait(60)[0]) for work in works[1:]] == list(range(1, 1000))
        return int(done[0]), after.user + after.system - before.user - before.system

    with start(3, body) as job:
        first, seconds = job.results()[0]
        assert first == 0
        assert seconds < 0.2


def test_order_with_one_tag_is_kept_whether_blocking_or_in_flight(start):
    def body(backend, pipe):
        sizes = [1, LARGE, 3, 3, LARGE, 2, 5, 7]
        if backend.rank == 0:
            works = []
            for number, size in enumerate(sizes):
                x = np.full(size, float(number))
                if size == LARGE or number % 2:
                    works.append(ferrodist.send(x, 1, backend, tag=4, async_op=True))
                else:
                    ferrodist.send(x, 1, backend, tag=4)
            return [work.wait(30) for work in works]
        found = []
        for start_at in range(0, len(sizes), 2):
            first = ferrodist.recv(0, backend, like=np.empty(sizes[start_at]), tag=4, async_op=True)
            second = ferrodist.recv(0, backend, like=np.empty(sizes[start_at + 1]), tag=4)
            found += [first.wait(30)[-1], second[-1]]
        return found

    with start(2, body) as job:
        assert job.results()[1] == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_receive_for_a_rank_that_is_killed_fails_and_the_others_go_on(start):
    def body(backend, pipe):
        if backend.rank == 2:
            pipe.recv()
            ferrodist.send(np.array([7]), 0, backend)
            return None
        if backend.rank == 1:
            pipe.send("ready")
            threading.Event().wait()
        lost = [ferrodist.recv(1, backend, like=np.array([0]), async_op=True) for _ in range(50)]
        other = ferrodist.recv(2, backend, like=np.array([0]), async_op=True)
        pipe.send("posted")
        errors = [work.exception(20) for work in lost]
        assert not other.done()
        pipe.send("lost")
        return errors, int(other.wait(20)[0])

    with start(3, body) as job:
        assert job[1].hear() == "ready"
        assert job[0].hear() == "posted"
        job[1].send_signal(signal.SIGKILL)
        assert job[0].hear() == "lost"
        job[2].tell()
        errors, value = job[0].end().result
        assert value == 7
        for error in errors:
            assert isinstance(error, RankLost)
            assert error.rank == 1
            assert "recv(src=1, tag=0) at " in str(error)


def test_a_receive_that_ran_out_of_time_takes_nothing(start):
    def body(backend, pipe):
        if backend.rank == 1:
            ferrodist.barrier(backend)
            ferrodist.send(np.array([5]), 0, backend)
            return None
        like = np.array([0])
        work = ferrodist.recv(1, backend, like=like, timeout=0.05, async_op=True)
        with pytest.raises(CollectiveTimeout, match=r"rank 1 did not answer within 0\.05 s"):
            work.wait(20)
        with pytest.raises(CollectiveTimeout):
            ferrodist.recv(1, backend, like=like, timeout=0.05)
        ferrodist.barrier(backend)
        return int(ferrodist.recv(1, backend, like=like)[0]), int(like[0])

    with start(2, body) as job:
        assert job.results()[0] == (5, 0)


def test_a_wait_that_runs_out_leaves_the_receive_in_flight(start):
    def body(backend, pipe):
        if backend.rank == 1:
            ferrodist.barrier(backend)
            ferrodist.send(np.array([5]), 0, backend)
            return None
        work = ferrodist.recv(1, backend, like=np.array([0]), async_op=True)
        with pytest.raises(TimeoutError, match=r"is still in flight after 0\.01 s"):
            work.wait(0.01)
        assert not work.done()
        ferrodist.barrier(backend)
        return int(work.wait(20)[0])

    with start(2, body) as job:
        assert job.results()[0] == 5


def test_unreceived_messages_are_bounded_and_small_sends_wait_beyond_that(start):
    def body(backend, pipe):
        x = np.zeros(1000)  # 8 KB
        if backend.rank == 0:
            works = [ferrodist.send(x + n, 1, backend, async_op=True) for n in range(40)]
            num_done = sum(work.done() for work in works)
            # More than what a rank that still joins makes room for meanwhile; it is withdrawn.
            with pytest.raises(CollectiveTimeout):
                ferrodist.send(np.zeros(3000), 1, backend, timeout=0.1)
            ferrodist.barrier(backend)
            for work in works:
                work.wait(30)
            return num_done
        ferrodist.barrier(backend)
        return [int(ferrodist.recv(0, backend, like=x)[0]) for _ in range(40)] == list(range(40))

    with start(2, body, FERRODIST_UNEXPECTED_NBYTES="65536") as job:
        num_done, is_in_order = job.results()
        most = 65536 // (8000 + 128)
        assert most - 1 <= num_done <= most  # ranks may have told each other their settings before
        assert is_in_order


def test_a_rank_without_memory_for_messages_says_so_to_both_sides_and_goes_on(start_job):
    """Rank 1 may not grow while 64 MB that it has not asked for stand before what it wants."""
    count, nbytes = 1000, 64_000

    def body(backend, pipe):
        x = np.zeros(nbytes // 8)
        ferrodist.barrier(backend)  # a rank that still joins would read them before it has a limit
        if backend.rank == 0:
            for number in range(count):
                ferrodist.send(x + number, 1, backend, tag=1)
            work = ferrodist.send(np.ones(LARGE), 1, backend, tag=2, async_op=True)
            ferrodist.barrier(backend)
            error = work.exception(60)
            ferrodist.barrier(backend)
            ferrodist.send(np.ones(LARGE), 1, backend, tag=2)
            return type(error).__name__, str(error)
        ferrodist.barrier(backend)
        with open("/proc/self/statm") as sizes:
            used = int(sizes.read().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), before[1]))
        try:
            with pytest.raises(ferrodist.OutOfMemory) as caught:
                ferrodist.recv(0, backend, tag=9)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
        error = caught.value
        ferrodist.barrier(backend)
        found = [int(ferrodist.recv(0, backend, like=x, tag=1)[-1]) for _ in range(count)]
        assert found == list(range(count))
        assert ferrodist.recv(0, backend, like=np.empty(LARGE), tag=2).sum() == LARGE
        return type(error).__name__, str(error)

    with start_job(2, body, FERRODIST_UNEXPECTED_NBYTES=str(2 * count * nbytes)) as job:
        sent, received = job.results()
    for call, peer, (name, text) in (("send", 1, sent), ("recv", 0, received)):
        assert name == "OutOfMemory"
        assert call in text
        assert f"no memory for a message with rank {peer}" in text


def test_works_of_messages_are_futures(start):
    def body(backend, pipe):
        peer = 1 - backend.rank
        called, others = [], []
        works = [
            ferrodist.recv(peer, backend, like=np.array([0]), tag=n, async_op=True)
            for n in range(4)
        ]
        sent = ferrodist.send(np.array([0]), peer, backend, tag=9, async_op=True)
        done = threading.Event()

        def callback(work):
            called.append(int(work.result()[0]))
            with pytest.raises(InvalidArgument, match="must not communicate"):
                ferrodist.barrier(backend)
            others.append(threading.current_thread().name)
            done.set()

        works[0].add_done_callback(callback)
        ferrodist.barrier(backend)
        for number in range(4):
            ferrodist.send(np.array([number + 10]), peer, backend, tag=number)
        assert done.wait(20)
        finished, pending = concurrent.futures.wait([*works[1:], sent], timeout=20)
        assert not pending
        in_order = {int(work.result()[0]) for work in concurrent.futures.as_completed(works, 20)}

        async def await_all():
            return [int((await work)[0]) for work in works]

        assert ferrodist.recv(peer, backend, like=np.array([1]), tag=9)[0] == 0
        return called, len(finished), sorted(in_order), asyncio.run(await_all()), others

    with start(2, body) as job:
        expected = ([10], 4, [10, 11, 12, 13], [10, 11, 12, 13], ["ferrodist-callbacks"])
        assert job.results() == [expected] * 2


def test_a_callback_is_called_though_somebody_else_waits_for_the_work(start):
    def body(backend, pipe):
        peer, called = 1 - backend.rank, threading.Event()
        work = ferrodist.recv(peer, backend, like=np.array([0]), async_op=True)
        work.add_done_callback(lambda done: called.set())
        ferrodist.send(np.array([3]), peer, backend)
        return int(work.wait()[0]), called.wait(20), weakref.ref(work)() is work

    with start(2, body) as job:
        assert job.results() == [(3, True, True)] * 2


def test_works_that_are_dropped_are_done_and_let_go(start):
    """A message in flight holds its arrays even if the program drops them, and no longer."""

    def body(backend, pipe):
        peer, count = 1 - backend.rank, 200
        outs = [np.zeros(2) for _ in range(count)]
        for out in outs:
            ferrodist.recv(peer, backend, out=out, async_op=True)
        ferrodist.barrier(backend)
        for number in range(count):
            ferrodist.send(np.full(2, number + 1.0), peer, backend, async_op=True)
        last = ferrodist.recv(peer, backend, like=np.empty(2), tag=1, async_op=True)
        ferrodist.send(np.zeros(2), peer, backend, tag=1)
        last.wait(20)
        values = [int(out[1]) for out in outs]
        kept = weakref.ref(outs.pop(0))
        assert _native.works_of(None) == []  # which lets go of those that are done
        gc.collect()
        return values == list(range(1, count + 1)), kept() is None

    with start(2, body) as job:
        assert job.results() == [(True, True)] * 2


def test_two_threads_may_wait_for_one_work(start):
    def body(backend, pipe):
        peer, found = 1 - backend.rank, []
        for _ in range(50):
            work = ferrodist.recv(peer, backend, async_op=True)
            threads = [
                threading.Thread(target=lambda work=work: found.append(work.wait(20)))
                for _ in range(3)
            ]
            for thread in threads:
                thread.start()
            ferrodist.send(1.5 + peer, peer, backend)
            for thread in threads:
                thread.join()
        return set(found), len(found)

    with start(2, body) as job:
        assert job.results() == [({1.5}, 150), ({2.5}, 150)]


def test_an_error_nobody_asked_for_is_logged_and_raised_by_close(start):
    def body(backend, pipe):
        import logging

        told = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())
        logging.getLogger("ferrodist").addHandler(handler)
        if backend.rank == 1:
            ferrodist.send(np.ones(3), 0, backend)
            ferrodist.barrier(backend)
            return None
        ferrodist.recv(1, backend, like=np.ones(2), async_op=True)
        ferrodist.barrier(backend)
        with pytest.raises(SizeMismatch, match=r"rank 1 sent float64\[3\]"):
            backend.close()
        return any("recv(src=1, tag=0) failed" in text for text in told)

    with start(2, body) as job:
        assert job.results()[0]


def test_a_forked_child_leaves_requests_in_flight_alone(start):
    def body(backend, pipe):
        import warnings

        peer = 1 - backend.rank
        work = ferrodist.recv(peer, backend, like=np.array([0]), async_op=True)
        large = ferrodist.send(np.ones(LARGE), peer, backend, tag=1, async_op=True)
        warnings.simplefilter("ignore")
        child = os.fork()
        if child == 0:
            try:
                ferrodist.recv(peer, backend, like=np.array([0]))
            except ferrodist.BackendClosed:
                del work, large
                os._exit(3)
            os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        ferrodist.send(np.array([8]), peer, backend)
        total = ferrodist.recv(peer, backend, like=np.empty(LARGE), tag=1).sum()
        large.wait(20)
        return int(work.wait(20)[0]), int(total)

    with start(2, body) as job:
        assert job.results() == [(8, LARGE)] * 2


@pytest.mark.slow
def test_a_program_may_end_with_requests_in_flight(tmp_path):
    import subprocess
    import sys

    script = tmp_path / "ends.py"
    script.write_text(
        "import numpy as np, ferrodist\n"
        "backend = ferrodist.init()\n"
        "work = ferrodist.recv(1 - backend.rank, backend, async_op=True, timeout=2)\n"
        "work.add_done_callback(lambda work: work.exception())\n"
        "ferrodist.barrier(backend)\n"
        "print('over', flush=True)\n"
    )
    command = [sys.executable, "-m", "ferrodist", "run", "-n", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("over") == 2
