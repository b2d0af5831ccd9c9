"""Several groups, several threads, calls in flight, programs that end anyhow."""

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest

import ferrodist
from ferrodist import (
    BackendClosed,
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    InvalidArgument,
    InvalidRank,
    InvalidWorldSize,
    RankLost,
    SimulatedBackend,
)
from ferrodist.testing import run_ranks
from helpers import Gate, await_until, errors_by_rank

# -- calls in flight -------------------------------------------------------------------------------


def test_calls_in_flight_run_in_program_order_with_their_own_results():
    def body(backend):
        works = [
            ferrodist.allreduce(np.full(3, n + backend.rank), backend, async_op=True)
            for n in range(8)
        ]
        last = ferrodist.allreduce(backend.rank, backend)  # waits its turn
        return [work.wait(20)[0] for work in works], last

    assert run_ranks(3, body) == [([3 * n + 3 for n in range(8)], 3)] * 3


def test_the_caller_works_while_a_call_is_in_flight():
    gate = Gate()

    def body(backend):
        if backend.rank == 1:
            gate.pass_through(1)  # only after rank 0 has gone on
            return ferrodist.barrier(backend)
        work = ferrodist.allreduce(1, backend, async_op=True)
        assert not work.done()
        gate.pass_through(0)
        return work.exception(20)

    error, _ = errors_by_rank(2, body)
    assert error is None
    assert isinstance(run_ranks(2, lambda b: body_of_mismatch(b))[0], CollectiveMismatch)


def body_of_mismatch(backend):
    if backend.rank == 1:
        with pytest.raises(CollectiveMismatch):
            ferrodist.barrier(backend)
        return None
    return ferrodist.allreduce(1, backend, async_op=True).exception(20)


def test_wait_running_out_leaves_the_call_going():
    gate = Gate()

    def body(backend):
        if backend.rank == 1:
            gate.pass_through(1)
            return ferrodist.allreduce(2, backend)
        work = ferrodist.allreduce(1, backend, async_op=True)
        with pytest.raises(TimeoutError):
            work.wait(0.01)
        gate.pass_through(0)
        return work.wait(20)

    assert run_ranks(2, body) == [3, 3]


def test_a_work_cannot_be_cancelled_and_can_be_awaited():
    async def train(backend):
        work = ferrodist.allreduce(backend.rank, backend, async_op=True)
        assert not work.cancel()
        return await work

    assert run_ranks(3, lambda b: asyncio.run(train(b))) == [3, 3, 3]


def test_callbacks_run_when_the_work_is_done_and_must_not_communicate():
    def body(backend):
        found = threading.Event()
        errors = []

        def callback(work):
            assert work.result() == 2
            with pytest.raises(InvalidArgument, match="must not communicate"):
                ferrodist.barrier(backend)
            errors.append(None)
            found.set()

        work = ferrodist.allreduce(1, backend, async_op=True)
        work.add_done_callback(callback)
        assert found.wait(20)
        return len(errors)

    assert run_ranks(2, body) == [1, 1]


def test_the_error_of_a_work_nobody_asked_is_logged_and_raised_by_close(caplog):
    def body(backend):
        ferrodist.allreduce(np.ones(2 + backend.rank), backend, async_op=True)
        ferrodist.barrier(backend)
        with pytest.raises(CollectiveMismatch):
            backend.close()
        backend.close()

    run_ranks(2, body)
    assert "allreduce #1 failed" in caplog.text


def test_the_error_of_a_work_that_was_asked_is_not_raised_again(caplog):
    def body(backend):
        work = ferrodist.allreduce(np.ones(2 + backend.rank), backend, async_op=True)
        assert isinstance(work.exception(20), CollectiveMismatch)
        backend.close()

    run_ranks(2, body)


def test_close_finishes_what_is_in_flight():
    def body(backend):
        with backend:
            works = [ferrodist.allreduce(n, backend, async_op=True) for n in range(5)]
        return [work.wait(1) for work in works]

    assert run_ranks(2, body) == [[0, 2, 4, 6, 8]] * 2


def test_a_call_behind_one_that_hangs_has_its_own_deadline():
    done = threading.Barrier(2)

    def body(backend):
        try:
            if backend.rank == 0:
                hangs = ferrodist.allreduce(1, backend, async_op=True, timeout=None)
                with pytest.raises(
                    CollectiveTimeout, match=r"rank 1 did not get through within 0\.2 s"
                ):
                    ferrodist.barrier(backend, timeout=0.2)
                assert isinstance(hangs.exception(20), CollectiveTimeout)
        finally:
            done.wait(20)

    run_ranks(2, body)


def test_arrays_live_as_long_as_their_work_and_no_longer():
    def body(backend):
        x = np.ones(1000)
        alive = weakref.ref(x)
        work = ferrodist.allreduce(x, backend, async_op=True)
        del x
        result = work.wait(20)
        del work
        ferrodist.barrier(backend)
        gc.collect()
        return alive() is None and result.sum() == 2000

    assert run_ranks(2, body) == [True, True]


def test_the_progress_thread_ends_with_close_and_with_the_backend():
    def threads():
        return set(os.listdir("/proc/self/task"))

    def new_threads(backend):
        """Let calls in flight, of which nobody waits for the first, start what they need."""
        before, done = threads(), threading.Event()
        ferrodist.allreduce(1, backend, async_op=True).add_done_callback(lambda work: done.set())
        assert done.wait(20)
        return threads() - before

    (backend,) = SimulatedBackend.create_group(1)
    started = new_threads(backend)
    assert started
    backend.close()
    await_until(lambda: not started & threads())
    (backend,) = SimulatedBackend.create_group(1)
    started = new_threads(backend)
    assert started
    del backend
    gc.collect()
    await_until(lambda: not started & threads())


# -- groups ----------------------------------------------------------------------------------------


def test_split_gives_ranks_in_the_order_of_the_list():
    def body(backend):
        if backend.rank == 1:
            return None
        group = backend.split([3, 0, 2])
        return group.rank, group.world_size, ferrodist.all_gather(backend.rank, group).tolist()

    assert run_ranks(4, body) == [(1, 3, [3, 0, 2]), None, (2, 3, [3, 0, 2]), (0, 3, [3, 0, 2])]


def test_roots_and_peers_are_ranks_of_the_group():
    def body(backend):
        group = backend.split([2, 1]) if backend.rank else None
        if group is None:
            return None
        got = ferrodist.broadcast(backend.rank, group, root=0)
        return got, ferrodist.sendrecv(backend.rank, 1 - group.rank, 1 - group.rank, group)

    assert run_ranks(3, body) == [None, (2, 2), (2, 1)]


def test_two_groups_used_in_different_orders_do_not_mix():
    def body(backend):
        rows = backend.split([0, 1] if backend.rank < 2 else [2, 3])
        columns = backend.split([backend.rank % 2, backend.rank % 2 + 2])
        sums = {}
        for number in range(20):
            groups = [("rows", rows), ("columns", columns)]
            works = []
            for name, group in groups if backend.rank % 3 else reversed(groups):
                x = np.full(5, backend.rank + 10 * number)
                works.append((name, ferrodist.allreduce(x, group, async_op=True)))
            for name, work in works:
                sums.setdefault(name, []).append(int(work.wait(20)[0]))
        return sums

    for rank, sums in enumerate(run_ranks(4, body)):
        row = [0, 1] if rank < 2 else [2, 3]
        assert sums["rows"] == [sum(row) + 20 * n for n in range(20)]
        assert sums["columns"] == [rank % 2 * 2 + 2 + 20 * n for n in range(20)]


def test_the_same_list_may_be_split_off_many_times():
    def body(backend):
        groups = [backend.split([0, 1]) for _ in range(5)]
        return [ferrodist.allreduce(n + backend.rank, group) for n, group in enumerate(groups)]

    assert run_ranks(2, body) == [[1, 3, 5, 7, 9]] * 2


def test_groups_can_be_split_again():
    def body(backend):
        if backend.rank == 0:
            return None
        inner = backend.split([1, 2, 3])
        if inner.rank == 0:
            return None
        pair = inner.split([2, 1])
        return pair.rank, ferrodist.allreduce(backend.rank, pair)

    assert run_ranks(4, body) == [None, None, (1, 5), (0, 5)]


@pytest.mark.parametrize(
    ("ranks", "error"),
    [
        ([], InvalidWorldSize),
        ([0, 0], InvalidRank),
        ([0, 9], InvalidRank),
        ([1], InvalidRank),
        ([0, "1"], InvalidRank),
    ],
)
def test_a_list_that_makes_no_group_is_refused(ranks, error):
    def body(backend):
        if backend.rank == 0:
            with pytest.raises(error):
                backend.split(ranks)
        return ferrodist.allreduce(1, backend)

    assert run_ranks(2, body) == [2, 2]


def test_split_names_the_members_that_do_not_come():
    both, done = threading.Barrier(2), threading.Barrier(4)

    def body(backend):
        try:
            if backend.rank in (0, 2):
                both.wait(20)
                backend.split([2, 3, 0, 1], timeout=0.5)
        finally:
            done.wait(20)

    errors = errors_by_rank(4, body)
    assert isinstance(errors[0], (CollectiveTimeout, GroupAborted))
    timeouts = [error for error in errors if isinstance(error, CollectiveTimeout)]
    first = min(timeouts, key=lambda error: len(error.missing))  # the second may miss the first too
    assert first.missing == [3, 1]
    assert "ranks 1, 3 did not call it within 0.5 s" in str(first)


def test_split_notices_a_member_that_is_gone():
    def body(backend):
        if backend.rank == 1:
            raise ValueError("boom")
        backend.split([0, 1])

    with pytest.raises(ExceptionGroup) as caught:
        run_ranks(2, body)
    first, second = caught.value.exceptions
    assert isinstance(first, ValueError)
    assert isinstance(second, RankLost)


def test_closing_a_group_leaves_the_others_alone():
    def body(backend):
        group = backend.split([0, 1])
        ferrodist.barrier(group)
        group.close()
        with pytest.raises(BackendClosed):
            ferrodist.barrier(group)
        return ferrodist.allreduce(1, backend)

    assert run_ranks(2, body) == [2, 2]


def test_abort_reaches_the_groups_split_off():
    gate = Gate()

    def body(backend):
        group = backend.split([0, 1]) if backend.rank < 2 else None
        if group is None:
            gate.pass_through(1)
            backend.abort("enough")
            gate.pass_through(2)
            return
        if backend.rank == 0:
            gate.pass_through(0)
            ferrodist.barrier(group)
        gate.pass_through(3)
        ferrodist.barrier(group)  # rank 0 may have done its part of it before the abort
        ferrodist.barrier(group)

    errors = errors_by_rank(3, body)
    assert [type(error) for error in errors] == [GroupAborted, GroupAborted, type(None)]
    assert "enough" in str(errors[0])


def test_an_exception_reaches_ranks_that_wait_in_a_group_split_off():
    def body(backend):
        group = backend.split([0, 1, 2])
        ferrodist.barrier(group)
        if backend.rank == 2:
            raise ValueError("boom")
        ferrodist.barrier(group)

    with pytest.raises(ExceptionGroup) as caught:
        run_ranks(3, body)
    assert [type(e) for e in caught.value.exceptions] == [ValueError, RankLost, RankLost]
    assert "rank 2 raised ValueError: boom" in str(caught.value.exceptions[1])


def test_groups_made_and_closed_leave_nothing_behind():
    def body(backend):
        for _ in range(300):
            with backend.split([0, 1]) as group:
                ferrodist.allreduce(1, group)
                ferrodist.sendrecv(1, 1 - group.rank, 1 - group.rank, group, tag=7)
        del group
        gc.collect()
        ferrodist.barrier(backend)
        return len(backend.groups_of_process()), backend.world.invitations_of(1 - backend.rank)

    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    assert run_ranks(2, body) == [(1, [])] * 2
    gc.collect()
    await_until(lambda: len(os.listdir("/proc/self/fd")) <= files)


# -- several threads -------------------------------------------------------------------------------


def test_eight_threads_on_one_group_get_right_results_or_a_named_error():
    """Equal calls from several threads match by sequence number, whatever thread makes them."""

    def body(backend):
        sums = []

        def work():
            for _ in range(10):
                sums.append(ferrodist.allreduce(backend.rank + 1, backend))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sums

    assert run_ranks(2, body) == [[3] * 80] * 2


def test_threads_without_an_agreed_order_end_in_a_mismatch_not_in_wrong_data():
    def body(backend):
        results = []

        def work(kind):
            for number in range(20):
                try:
                    if kind == 0:
                        results.append(("sum", ferrodist.allreduce(backend.rank + 1, backend)))
                    else:
                        results.append(
                            ("max", ferrodist.allreduce(float(backend.rank), backend, "max"))
                        )
                except CollectiveMismatch:
                    results.append(("mismatch", number))

        threads = [threading.Thread(target=work, args=(kind,)) for kind in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    for results in run_ranks(2, body):
        assert {value for name, value in results if name == "sum"} <= {3}
        assert {value for name, value in results if name == "max"} <= {1.0}
        assert len(results) == 40


def test_calls_are_matched_by_number_in_the_order_they_arrive():
    gate = Gate()

    def body(backend):
        if backend.rank == 1:
            return [ferrodist.allreduce(1, backend), ferrodist.allreduce(10, backend)]
        found = {}

        def second():
            gate.pass_through(1)
            found["second"] = ferrodist.allreduce(10, backend)

        thread = threading.Thread(target=second)
        thread.start()
        first = ferrodist.allreduce(1, backend)
        gate.pass_through(0)
        thread.join(20)
        return [first, found["second"]]

    assert run_ranks(2, body) == [[2, 20], [2, 20]]


# -- programs that end -----------------------------------------------------------------------------


def run_program(text, **options):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=30,
        **options,
    )


def test_a_program_that_ends_without_close_ends_quietly():
    done = run_program(
        """
        import threading, numpy as np, ferrodist
        from ferrodist import SimulatedBackend
        group = SimulatedBackend.create_group(2)
        work = ferrodist.allreduce(np.ones(3), group[0], async_op=True)   # rank 1 never comes
        threading.Thread(target=ferrodist.recv, args=(1, group[0]), daemon=True).start()
        raise SystemExit(7)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


def test_a_forked_child_is_refused_at_once_and_the_parent_is_unharmed():
    done = run_program(
        """
        import os, sys, warnings, ferrodist
        from ferrodist import SimulatedBackend, BackendClosed
        (backend,) = SimulatedBackend.create_group(1)
        assert ferrodist.allreduce(1, backend, async_op=True).wait(10) == 1
        warnings.simplefilter("ignore")
        child = os.fork()
        if child == 0:
            try:
                ferrodist.allreduce(1, backend)
            except BackendClosed as error:
                backend.close()
                os._exit(3 if "forked" in str(error) else 4)
            os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert ferrodist.allreduce(1, backend) == 1
        backend.close()
        print("unharmed")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "unharmed\n", "")


def test_importing_ferrodist_imports_no_framework():
    done = run_program(
        """
        import sys, ferrodist
        ferrodist.SimulatedBackend
        heavy = {"torch", "jax", "mpi4py", "click", "rich", "msgpack", "asyncio", "cupy"}
        print(sorted(heavy & set(sys.modules)))
        """
    )
    assert done.stdout == "[]\n", done.stderr


def test_ctrl_c_ends_run_ranks_and_wakes_the_ranks():
    done = run_program(
        """
        import os, signal, threading, ferrodist
        from ferrodist.testing import run_ranks
        woken, started, finished = [], threading.Barrier(3), threading.Barrier(3)
        def body(backend):
            started.wait(10)
            if backend.rank == 0:
                os.kill(os.getpid(), signal.SIGINT)
            else:
                try:
                    ferrodist.barrier(backend)
                except ferrodist.GroupAborted as error:
                    woken.append(str(error))
            finished.wait(10)
        try:
            run_ranks(3, body)
        except KeyboardInterrupt:
            for thread in threading.enumerate():
                if thread is not threading.main_thread():
                    thread.join(10)
            print(len(woken), woken[0])
        """
    )
    assert done.stdout.startswith("2 KeyboardInterrupt in run_ranks ("), done.stderr


def test_ctrl_c_in_a_rank_that_is_the_main_thread_aborts_the_others():
    done = run_program(
        """
        import os, signal, threading, time, ferrodist
        from ferrodist import SimulatedBackend
        main, other = SimulatedBackend.create_group(2)
        texts = []

        def work():
            while main.statistics().waiting_for is None:  # until the main thread waits in its call
                pass
            os.kill(os.getpid(), signal.SIGINT)
            try:
                ferrodist.recv(0, other)
            except ferrodist.GroupAborted as error:
                texts.append(str(error))

        thread = threading.Thread(target=work)
        thread.start()
        start = time.monotonic()
        try:
            ferrodist.barrier(main)
        except KeyboardInterrupt:
            thread.join(10)
            print(texts, time.monotonic() - start < 5)
        """
    )
    words = "rank 0 aborted the group: KeyboardInterrupt (in barrier #1)"
    assert done.stdout == f"['{words}'] True\n", done.stderr


def test_a_call_in_flight_holds_no_arrays_when_it_is_done():
    """Else DDP may take a bucket for one that the program keeps, and move it."""

    def body(backend):
        held = []
        for call in (backend.allreduce, backend.broadcast, backend.all_gather):
            x = np.full(3, backend.rank)
            array = weakref.ref(x)
            work = call({"x": x}, async_op=True)
            del x
            work.add_done_callback(lambda work, array=array: held.append(array() is not None))
            work.wait()
        await_until(lambda: len(held) == 3)  # callbacks have a thread of their own
        return held

    assert run_ranks(2, body) == [[False] * 3] * 2


def test_a_callback_that_fails_or_takes_long_does_not_hold_up_the_calls_behind_it(caplog):
    gate, release = Gate(), threading.Event()

    def leaves(work):
        raise SystemExit

    def body(backend):
        if backend.rank == 1:
            gate.pass_through(1)
            return sum(ferrodist.allreduce(n, backend) for n in range(5))
        works = [ferrodist.allreduce(n, backend, async_op=True) for n in range(4)]
        works[0].add_done_callback(leaves)
        works[1].add_done_callback(lambda work: release.wait(20))
        gate.pass_through(0)
        total = sum(work.wait(20) for work in works) + ferrodist.allreduce(4, backend)
        release.set()
        return total

    assert run_ranks(2, body) == [20, 20]
    await_until(lambda: "a callback of a Work failed" in caplog.text)


def test_wait_of_zero_asks_without_waiting():
    gate = Gate()

    def body(backend):
        if backend.rank == 1:
            gate.pass_through(1)
            return ferrodist.barrier(backend)
        work = ferrodist.allreduce(1, backend, async_op=True)
        with pytest.raises(TimeoutError):
            work.wait(0)
        gate.pass_through(0)
        assert work.exception(10) is not None
        return None

    errors_by_rank(2, body)


def test_split_speaks_of_ranks_of_the_parent_and_gives_all_one_error():
    def body(backend):
        if backend.rank == 3:
            raise ValueError("boom")
        if backend.rank > 0:
            backend.split([1, 2, 3])

    with pytest.raises(ExceptionGroup) as caught:
        run_ranks(4, body)
    _, *others = caught.value.exceptions
    assert [type(error) for error in others] == [RankLost, RankLost]
    assert {error.rank for error in others} == {3}
    assert all("rank 3 raised ValueError: boom" in str(error) for error in others)


def test_threads_that_split_the_same_list_at_once_get_different_groups():
    def body(backend):
        groups = []
        threads = [
            threading.Thread(target=lambda: groups.append(backend.split([0, 1]))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {group._id for group in groups}

    first, second = run_ranks(2, body)
    assert first == second
    assert len(first) == 8
