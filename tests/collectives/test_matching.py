"""Any source, any tag, probes, cancelling and waiting: what the contract cannot show of them."""

import concurrent.futures
import copy
import pickle
import signal
import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest

import ferrodist
from ferrodist import (
    ANY_SOURCE,
    ANY_TAG,
    PROC_NULL,
    InvalidArgument,
    InvalidRank,
    RankLost,
    SelfSend,
    SimulatedBackend,
    Status,
    Work,
)
from ferrodist.testing import Faults, run_ranks
from helpers import errors_by_rank


def test_no_number_is_any_source_and_copies_are_the_same():
    for special in (ANY_SOURCE, ANY_TAG, PROC_NULL):
        assert pickle.loads(pickle.dumps(special)) is special
        assert copy.deepcopy(special) is special
        assert repr(special) == f"ferrodist.{special.name}"
    errors = errors_by_rank(2, lambda b: ferrodist.recv(-1, b))
    assert {type(error) for error in errors} == {InvalidRank}


def test_a_status_tells_how_large_a_message_is():
    assert Status(0, 1, "float16", (3, 4)).nbytes == 24
    assert not Status(0, 1, "float16", (3, 4)).is_object
    assert Status(0, 1, "object", (7,)).is_object
    assert Status(0, 1, "object", (7,)).nbytes == 7


def status_of_an_object(backend):
    if backend.rank == 0:
        return backend.send_object(b"x" * 1000, 1)
    found = [backend.probe(0), ferrodist.try_probe(0, backend)]
    found.append(backend.recv_object(0, with_status=True)[1])
    return [(status.is_object, 1000 < status.nbytes < 1020) for status in found]


def test_the_status_of_an_object_has_its_size(start):
    with start(2, lambda backend, pipe: status_of_an_object(backend)) as job:
        assert job.results() == [None, [(True, True)] * 3]


def test_the_status_of_an_object_between_threads_has_its_size():
    assert run_ranks(2, status_of_an_object) == [None, [(True, True)] * 3]


def exchange_with_status(backend):
    """Send rank + 1 rows to the right, into room for ten rows there."""
    rank, world = backend.rank, backend.world_size
    right, left = (rank + 1) % world, (rank - 1) % world
    for is_async in (False, True):
        room = np.full(10, -1.0)
        found = backend.sendrecv(
            np.full(rank + 1, float(rank)),
            right,
            left,
            out=room,
            tag=rank,
            recv_tag=ANY_TAG,
            with_status=True,
            async_op=is_async,
        )
        got, status = found.wait(20) if is_async else found
        assert np.shares_memory(got, room)
        assert room.tolist() == [left] * (left + 1) + [-1] * (9 - left)
        assert got.shape == status.shape == (left + 1,)
        assert (status.source, status.tag) == (left, left)
        nothing = backend.sendrecv(1, PROC_NULL, PROC_NULL, out=room, with_status=True)
        assert nothing[0] is room
        assert nothing[1].source is PROC_NULL


def test_sendrecv_takes_a_shorter_message_with_its_status(start):
    with start(3, lambda backend, pipe: exchange_with_status(backend)) as job:
        job.results()


def test_sendrecv_between_threads_takes_a_shorter_message_with_its_status():
    run_ranks(3, exchange_with_status)


# -- losses ----------------------------------------------------------------------------------------


def receive_around_a_death(backend, wait_for_death):
    """On rank 0: what rank 1 sent before it died is received, then nothing from any rank is."""
    ferrodist.recv(2, backend, tag=9)  # which rank 1 has told of its message
    wait_for_death()
    found = [backend.recv(tag=1)]
    for call in (
        lambda: backend.recv(tag=1),
        lambda: backend.recv(tag=ANY_TAG, async_op=True).wait(30),
        lambda: backend.probe(),
        lambda: backend.recv_object(),
    ):
        with pytest.raises(RankLost) as caught:
            call()
        found.append(caught.value.rank)
    backend.send(0, 2, tag=3)
    return [*found, backend.recv(2, tag=4)]  # those who live still talk


def test_a_receive_from_any_rank_raises_when_one_is_killed(start):
    def body(backend, pipe):
        if backend.rank == 0:
            return receive_around_a_death(backend, pipe.recv)
        if backend.rank == 1:
            backend.send(11, 0, tag=1)
            backend.send(0, 2)
            pipe.recv()  # never
        backend.recv(1)
        backend.send(0, 0, tag=9)
        pipe.send("sent")
        backend.recv(0, tag=3)
        return backend.send(44, 0, tag=4)

    with start(3, body) as job:
        assert job[2].hear() == "sent"
        job[1].send_signal(signal.SIGKILL)
        assert job[1].has_ended()
        job[0].tell()
        end = job[0].end()
    assert end.error is None, end.trace
    assert end.result == [11, 1, 1, 1, 1, 44]


def test_a_receive_from_any_thread_raises_when_one_dies():
    has_come, is_dead = threading.Event(), threading.Event()

    def body(backend):
        if backend.rank == 0:
            backend.probe(1, tag=1)
            has_come.set()
            return receive_around_a_death(backend, lambda: is_dead.wait(10))
        if backend.rank == 1:
            backend.send(11, 0, tag=1)
            assert has_come.wait(10)  # messages on different links may overtake each other
            backend.send(0, 2)
            try:
                backend.send(0, 2, tag=8)  # the third one kills it
            finally:
                is_dead.set()
        backend.recv(1)
        backend.send(0, 0, tag=9)
        backend.recv(0, tag=3)
        return backend.send(44, 0, tag=4)

    group = SimulatedBackend.create_group(3, faults=Faults(kill={1: 3}))
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        works = [pool.submit(body, backend) for backend in group]
        assert works[0].result(30) == [11, 1, 1, 1, 1, 44]


def until_raised(call):
    while call() is None:  # try_probe, while they have not closed yet
        pass


def leave_one_by_one(backend):
    """Rank 0 hears from any rank until all others have closed; then it is told so."""
    if backend.rank > 0:
        backend.send(backend.rank, 0, tag=backend.rank)
        return backend.close()
    sources = sorted(backend.recv(tag=ANY_TAG) for _ in range(backend.world_size - 1))
    texts = []
    for call in (
        backend.recv,
        lambda: backend.recv(async_op=True).wait(30),
        backend.probe,
        backend.try_probe,
        lambda: backend.probe(1),
        lambda: backend.try_probe(1),
    ):
        with pytest.raises(RankLost) as caught:
            until_raised(call)
        texts.append(str(caught.value))
    return sources, texts


def check_texts(result):
    sources, texts = result
    assert sources == [1, 2]
    assert all("all other ranks have left" in text for text in texts[:4])
    assert all("rank 1" in text for text in texts[4:])


def test_a_receive_from_any_rank_goes_on_until_all_have_left(start):
    with start(3, lambda backend, pipe: leave_one_by_one(backend)) as job:
        check_texts(job.results()[0])


def test_a_receive_from_any_thread_goes_on_until_all_have_left():
    check_texts(run_ranks(3, leave_one_by_one)[0])


def test_a_rank_that_raises_is_lost_to_a_receive_from_any():
    def body(backend):
        if backend.rank == 1:
            raise ValueError("its own")
        if backend.rank == 0:
            return backend.recv()
        return backend.recv(0)

    with pytest.raises(ExceptionGroup) as caught:
        run_ranks(3, body)
    lost = caught.value.subgroup(lambda error: getattr(error, "this_rank", None) == 0)
    (error,) = lost.exceptions
    assert isinstance(error, RankLost)
    assert error.rank == 1
    assert "its own" in str(error)


def test_who_is_alone_receives_from_itself_or_not_at_all():
    def body(backend):
        for call in (backend.recv, backend.probe, backend.recv_object):
            with pytest.raises(SelfSend, match="sent itself nothing"):
                call()
        coming = backend.recv(async_op=True)
        backend.send(3, 0, async_op=True)
        return coming.wait(10), backend.sendrecv(4, 0, 0), backend.try_probe()

    assert run_ranks(1, body) == [(3, 4, None)]
    backend = ferrodist.init()
    try:
        assert body(backend) == (3, 4, None)
    finally:
        backend.close()


# -- the fast path ---------------------------------------------------------------------------------


def test_plain_arrays_take_the_fast_path(start):
    def body(backend, pipe):
        def refuse(*args):
            raise AssertionError("the general path")

        for name in ("_send", "_recv", "_sendrecv", "_start_send", "_start_recv"):
            setattr(backend, name, refuse)
        backend._start_sendrecv = refuse
        right, left = (backend.rank + 1) % 3, (backend.rank - 1) % 3
        out = np.zeros((9, 2))
        backend.send(np.ones((4, 2)), right, tag=7)
        rows, status = backend.recv(out=out, tag=7, with_status=True)
        work = backend.sendrecv(backend.rank, right, left, tag=1, recv_tag=ANY_TAG, async_op=True)
        found = [rows.shape, status, out.sum(), work.wait(30)]
        backend.send(backend.rank, backend.rank, tag=5, async_op=True)
        found.append(backend.recv(backend.rank, tag=5, async_op=True).wait(30))
        backend.barrier()  # messages of a rank that leaves take the general path
        return found, left, backend.rank

    with start(3, body) as job:
        for found, left, rank in job.results():
            assert found == [(4, 2), Status(left, 7, "float64", (4, 2)), 8.0, left, rank]


def test_threads_that_receive_from_any_rank_share_the_messages(start):
    count, num_threads = 200, 4

    def body(backend, pipe):
        if backend.rank > 0:
            for number in range(count):
                backend.send(number, 0, tag=backend.rank)
            return None
        heard = []

        def listen():
            for _ in range(2 * count // num_threads):
                got, status = backend.recv(tag=ANY_TAG, with_status=True)
                heard.append((status.source, status.tag, got))

        threads = [threading.Thread(target=listen) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return sorted(heard)

    with start(3, body) as job:
        heard = job.results()[0]
    assert heard == [(rank, rank, number) for rank in (1, 2) for number in range(count)]


# -- cancelling and waiting ------------------------------------------------------------------------


def cancel_in_every_way(backend):
    """See that a cancelled receive is a cancelled Future to all who look at one."""
    works = [backend.recv(1 - backend.rank, tag=5, async_op=True) for _ in range(4)]
    called = threading.Event()
    works[0].add_done_callback(lambda work: called.set())
    assert [work.cancel() for work in works[:3]] == [True] * 3
    assert called.wait(10)
    done, waiting = concurrent.futures.wait(works, 0)
    assert (done, waiting) == (set(works[:3]), {works[3]})
    assert set(concurrent.futures.as_completed(works[:3], 10)) == set(works[:3])
    for work in works[:3]:
        assert work.cancelled()
        assert not work.running()
        for ask in (work.wait, work.result, work.exception):
            with pytest.raises(CancelledError):
                ask(10)
    with pytest.raises(CancelledError):
        ferrodist.wait_all(works[:2])
    ferrodist.barrier(backend)
    backend.send(7, 1 - backend.rank, tag=5)
    return works[3].wait(10), works[3].cancel()


def test_a_cancelled_receive_takes_nothing(start):
    with start(2, lambda backend, pipe: cancel_in_every_way(backend)) as job:
        assert job.results() == [(7, False)] * 2


def test_a_cancelled_receive_between_threads_takes_nothing():
    assert run_ranks(2, cancel_in_every_way) == [(7, False)] * 2


def wait_for_several(backend):
    """See which errors wait_all and wait_any raise, and when."""
    peer = 1 - backend.rank
    late = backend.recv(peer, tag=1, async_op=True)
    for wait in (ferrodist.wait_all, ferrodist.wait_any):
        with pytest.raises(TimeoutError):
            wait([late], 0.01)
    misfit = backend.recv(peer, like=np.ones(2), tag=2, async_op=True)
    misfit.add_done_callback(lambda work: None)
    ferrodist.barrier(backend)
    backend.send(np.ones(3), peer, tag=2)
    assert ferrodist.wait_any([late, misfit], 30) == 1
    ferrodist.barrier(backend)
    backend.send(1, peer, tag=1)
    with pytest.raises(ferrodist.SizeMismatch):
        ferrodist.wait_all([misfit, late], 30)
    assert late.done()
    both = backend.sendrecv(backend.rank, peer, peer, async_op=True)
    heard = []
    is_heard = threading.Event()
    both.add_done_callback(lambda work: (heard.append(work.result()), is_heard.set()))
    assert is_heard.wait(30)
    assert isinstance(both, Work)
    return heard, both.wait(30), ferrodist.wait_all([])


def test_waiting_for_several(start):
    with start(2, lambda backend, pipe: wait_for_several(backend)) as job:
        assert job.results() == [([1], 1, []), ([0], 0, [])]


def test_waiting_for_several_between_threads():
    assert run_ranks(2, wait_for_several) == [([1], 1, []), ([0], 0, [])]


def test_what_is_no_list_of_works_is_refused():
    for call in (ferrodist.wait_all, ferrodist.wait_any):
        for wrong in (None, [None], Work()):
            with pytest.raises(InvalidArgument, match="async_op=True"):
                call(wrong)
    with pytest.raises(InvalidArgument, match="at least one"):
        ferrodist.wait_any([])
