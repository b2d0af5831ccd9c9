"""send, recv and sendrecv: order, tags, sizes, deadlines."""

import threading

import numpy as np
import pytest

import ferrodist
from ferrodist import (
    CollectiveTimeout,
    GroupAborted,
    InvalidArgument,
    InvalidRank,
    RankLost,
    SelfSend,
    SimulatedBackend,
    SizeMismatch,
    _native,
)
from ferrodist.testing import Faults, run_ranks
from helpers import errors_by_rank

LARGE = 100_000  # float64: well above the 64 KB that never wait


def test_messages_with_one_tag_stay_in_order():
    def body(backend):
        if backend.rank == 0:
            for number in range(50):
                ferrodist.send(number, 1, backend)
            return None
        return [ferrodist.recv(0, backend) for _ in range(50)]

    assert run_ranks(2, body)[1] == list(range(50))


def test_tags_keep_conversations_apart():
    def body(backend):
        if backend.rank == 0:
            for tag in (3, 1, 2):
                ferrodist.send(tag * 10, 1, backend, tag=tag)
            return None
        return [ferrodist.recv(0, backend, tag=tag) for tag in (1, 2, 3)]

    assert run_ranks(2, body)[1] == [10, 20, 30]


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (7,), (12, 3)])
def test_dtype_and_shape_come_through(shape):
    def body(backend):
        if backend.rank == 0:
            return ferrodist.send(np.full(shape, 2.5, np.float32), 1, backend)
        like = np.zeros(shape, np.float32)
        found = ferrodist.recv(0, backend, like=like)
        assert not like.any()
        return found

    found = run_ranks(2, body)[1]
    assert (found.dtype, found.shape) == (np.float32, shape)
    assert (found == 2.5).all()


def test_recv_writes_into_out_and_returns_it():
    def body(backend):
        if backend.rank == 0:
            return ferrodist.send(np.arange(3), 1, backend)
        out = np.empty(3, int)
        assert ferrodist.recv(0, backend, out=out) is out
        return out.tolist()

    assert run_ranks(2, body)[1] == [0, 1, 2]


def test_a_strided_array_arrives_as_it_looks():
    def body(backend):
        if backend.rank == 0:
            return ferrodist.send(np.arange(12).reshape(3, 4).T, 1, backend)
        return ferrodist.recv(0, backend, like=np.empty((4, 3), int))

    np.testing.assert_array_equal(run_ranks(2, body)[1], np.arange(12).reshape(3, 4).T)


def test_an_unexpected_shape_is_the_receivers_error_alone_and_the_next_message_is_fine():
    def body(backend):
        if backend.rank == 0:
            ferrodist.send(np.ones(3), 1, backend)
            ferrodist.send(np.ones(LARGE), 1, backend)
            ferrodist.send(np.full(2, 7.0), 1, backend)
            return None
        with pytest.raises(
            SizeMismatch, match=r"rank 0 sent float64\[3\], this rank expected float64\[2\]"
        ):
            ferrodist.recv(0, backend, like=np.ones(2))
        with pytest.raises(SizeMismatch, match="expected float32"):
            ferrodist.recv(0, backend, like=np.ones(LARGE, np.float32))
        return ferrodist.recv(0, backend, like=np.ones(2)).tolist()

    assert run_ranks(2, body)[1] == [7.0, 7.0]


def test_small_sends_do_not_wait_for_the_receiver():
    def body(backend):
        peer = 1 - backend.rank
        for number in range(100):
            ferrodist.send(np.full(1000, number), peer, backend)
        return sum(
            int(ferrodist.recv(peer, backend, like=np.empty(1000, int))[0]) for _ in range(100)
        )

    assert run_ranks(2, body) == [4950, 4950]


@pytest.mark.parametrize("world", [2, 3])
def test_a_ring_of_large_sends_is_a_timeout_that_names_the_ring(world):
    def body(backend):
        ferrodist.send(np.ones(LARGE), (backend.rank + 1) % world, backend, timeout=0.3)

    ring = " -> ".join(map(str, [*range(world), 0]))
    for error in errors_by_rank(world, body):
        assert isinstance(error, CollectiveTimeout)
        assert f"ranks {ring} all send and none receives; use sendrecv" in str(error)


def test_sendrecv_goes_round_a_ring_of_any_size():
    def body(backend):
        world = backend.world_size
        right, left = (backend.rank + 1) % world, (backend.rank - 1) % world
        x = np.full(LARGE, float(backend.rank))
        return ferrodist.sendrecv(x, right, left, backend, like=x)[-1]

    assert run_ranks(5, body) == [4.0, 0.0, 1.0, 2.0, 3.0]


def test_a_message_nobody_sends_is_a_timeout_that_harms_only_the_receiver():
    def body(backend):
        if backend.rank == 0:
            with pytest.raises(
                CollectiveTimeout, match=r"rank 1 did not answer within 0\.1 s"
            ) as caught:
                ferrodist.recv(1, backend, timeout=0.1)
            assert caught.value.missing == [1]
        return ferrodist.allreduce(1, backend)

    assert run_ranks(2, body) == [2, 2]


def test_receiving_from_a_rank_that_left_finds_what_it_sent_and_then_the_loss():
    left = threading.Event()

    def body(backend):
        if backend.rank == 0:
            with backend:
                ferrodist.send(1, 1, backend)
            left.set()
            return None
        assert left.wait(20)
        assert ferrodist.recv(0, backend) == 1
        with pytest.raises(RankLost, match="rank 0 left after #0"):
            ferrodist.recv(0, backend)
        return True

    assert run_ranks(2, body)[1]


def test_two_ranks_talk_on_after_a_third_has_left():
    def body(backend):
        if backend.rank == 2:
            return None
        with pytest.raises(RankLost):
            ferrodist.barrier(backend)
        return ferrodist.sendrecv(backend.rank, 1 - backend.rank, 1 - backend.rank, backend)

    assert run_ranks(3, body) == [1, 0, None]


def test_asynchronous_messages_keep_program_order():
    def body(backend):
        if backend.rank == 0:
            works = [ferrodist.send(n, 1, backend, async_op=True) for n in range(10)]
            works.append(ferrodist.send(np.ones(LARGE), 1, backend, async_op=True))
            return [work.wait(20) for work in works]
        works = [ferrodist.recv(0, backend, async_op=True) for _ in range(9)]
        last = ferrodist.recv(0, backend)
        large = ferrodist.recv(0, backend, like=np.empty(LARGE), async_op=True).wait(20)
        return [work.wait(20) for work in works], last, large.sum()

    assert run_ranks(2, body)[1] == (list(range(9)), 9, LARGE)


def test_messages_do_not_queue_behind_a_collective_in_flight():
    def body(backend):
        if backend.rank == 0:
            work = ferrodist.allreduce(1, backend, async_op=True)
            ferrodist.send(b"x", 1, backend)
            assert ferrodist.recv(1, backend) == b"y"
            return work.wait(20)
        assert ferrodist.recv(0, backend) == b"x"
        ferrodist.send(b"y", 0, backend)
        return ferrodist.allreduce(1, backend)

    assert run_ranks(2, body) == [2, 2]


def test_bad_peers_and_tags_are_refused():
    def body(backend):
        with pytest.raises(SelfSend):
            ferrodist.send(1, backend.rank, backend)
        with pytest.raises(SelfSend):
            ferrodist.recv(backend.rank, backend)
        with pytest.raises(InvalidRank):
            ferrodist.send(1, 2, backend)
        with pytest.raises(InvalidRank):
            ferrodist.recv(-1, backend)
        for tag in (-1, 2**31, 1.5, True, "a"):
            with pytest.raises(InvalidArgument, match="tag must be"):
                ferrodist.send(1, 1 - backend.rank, backend, tag=tag)

    run_ranks(2, body)


def test_a_send_in_flight_that_expires_does_not_fail_the_others():
    def body(backend):
        large, other = np.ones(100_000), 1 - backend.rank
        timeout = 0.2 if backend.rank == 0 else 20
        work = ferrodist.send(large, other, backend, async_op=True, timeout=timeout)
        ferrodist.barrier(backend)
        if backend.rank == 0:
            assert isinstance(work.exception(10), CollectiveTimeout)
            return ferrodist.recv(other, backend, like=large).sum()
        return work.wait(10)

    assert run_ranks(2, body) == [100_000, None]


def test_small_sends_notice_a_dead_group_and_a_rank_that_left():
    left = threading.Event()

    def body(backend):
        if backend.rank == 1:
            backend.close()
            left.set()
            return
        assert left.wait(20)
        with pytest.raises(RankLost):
            ferrodist.send(1, 1, backend)

    run_ranks(2, body)
    (one, other) = SimulatedBackend.create_group(2)
    other.abort("enough")
    with pytest.raises(GroupAborted):
        ferrodist.send(1, 1, one)


def test_exactly_64_kilobytes_do_not_wait():
    def body(backend):
        if backend.rank == 0:
            ferrodist.send(np.zeros(65536, np.uint8), 1, backend, timeout=5)
        ferrodist.barrier(backend)
        if backend.rank == 1:
            ferrodist.recv(0, backend, like=np.zeros(65536, np.uint8))

    run_ranks(2, body)


@pytest.mark.parametrize("faults", [None, Faults(jitter=0.2)])
def test_a_sendrecv_that_fails_takes_its_large_message_back(faults):
    large = np.ones(100_000)

    def body(backend):
        if backend.rank == 0:
            with pytest.raises(CollectiveTimeout):
                ferrodist.sendrecv(large, 1, 1, backend, like=large, timeout=0.05)
            work = ferrodist.send(2 * large, 1, backend, async_op=True)
        ferrodist.barrier(backend)
        return ferrodist.recv(0, backend, like=large)[0] if backend.rank == 1 else work.wait(10)

    assert run_ranks(2, body, faults=faults)[1] == 2.0


def test_a_sendrecv_that_got_the_wrong_shape_still_sends():
    def body(backend):
        other = 1 - backend.rank
        like = np.ones(2 + backend.rank)
        return ferrodist.sendrecv(np.ones(2), other, other, backend, like=like, timeout=5)

    first, second = errors_by_rank(2, body)
    assert first is None
    assert isinstance(second, SizeMismatch)


def test_many_tags_and_asked_errors_leave_nothing_behind():
    def body(backend):
        other = 1 - backend.rank
        for tag in range(200):
            ferrodist.sendrecv(1, other, other, backend, tag=tag)
        for size in range(20):
            x = np.ones(1 + size + backend.rank)
            assert ferrodist.allreduce(x, backend, async_op=True).exception(10) is not None
        ferrodist.barrier(backend)
        kept = backend.group.unexpected_tags(other), _native.works_of(backend.group)
        return kept, len(backend._unasked)

    for kept, unasked in run_ranks(2, body):
        assert kept == ([], [])
        assert unasked <= 1
