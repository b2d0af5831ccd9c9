"""Calls in flight where no thread can be started: refused before the other ranks count on them."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

import numpy as np
import pytest

from ferrodist import CollectiveMismatch, DistributedError, GroupAborted, SizeMismatch


@contextlib.contextmanager
def no_room_for_a_stack() -> Iterator[None]:
    """Leave half the memory that the stack of a thread takes."""
    with open("/proc/self/statm") as sizes:
        used = int(sizes.read().split()[0]) * resource.getpagesize()
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + stack // 2, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


CALLS = {
    "allreduce": lambda b: b.allreduce(np.ones(3), async_op=True),
    "tree": lambda b: b.allreduce({"a": np.ones(3), "b": 1}, async_op=True),
    "object": lambda b: b.broadcast_object({"a": 1}, async_op=True),
    "barrier": lambda b: b.barrier(async_op=True),
}
MESSAGES = {
    "send": lambda b: b.send(np.ones(3), 0, async_op=True),
    "large send": lambda b: b.send(np.ones(100_000), 0, async_op=True),
    "recv": lambda b: b.recv(0, async_op=True),
    "recv with timeout": lambda b: b.recv(0, async_op=True, timeout=20),
    "sendrecv": lambda b: b.sendrecv(np.ones(3), 0, 0, async_op=True),
}


def refused(backend, calls) -> list[str]:
    """List the calls that are refused because no thread can be started."""
    found = []
    with no_room_for_a_stack():
        for name, call in calls.items():
            with contextlib.suppress(DistributedError):
                call(backend)
                continue
            found.append(name)
    return found


def test_calls_in_flight_without_a_thread_are_refused_and_the_group_goes_on(start):
    def body(backend, pipe):
        found = []
        if backend.rank == 1:
            found = refused(backend, CALLS | MESSAGES)
            with no_room_for_a_stack(), pytest.raises(DistributedError, match="no thread can be"):
                backend.allreduce(np.ones(3), async_op=True)
        values = [backend.allreduce(backend.rank + 1)]
        values.append(backend.allreduce({"a": np.ones(2), "b": 1}, async_op=True).wait()["b"])
        peer = 1 - backend.rank
        values.append(backend.sendrecv(peer, peer, peer, async_op=True).wait() + peer)
        return found, values, backend.statistics().collectives

    with start(2, body, FERRODIST_TIMEOUT="10") as job:
        (_, *others), (found, *own) = job.results()
    assert found == [*CALLS, *MESSAGES]  # nothing is in flight yet: callbacks have no thread
    assert own == others == [[3, 2, 1], others[1]]


def test_calls_in_flight_are_refused_where_only_callbacks_have_a_thread(start):
    def body(backend, pipe):
        second = backend.dup()  # which has a thread of its own
        backend.allreduce(1, async_op=True).wait()
        found = refused(second, CALLS) if backend.rank == 1 else []
        before = second.statistics().collectives
        return found, before, second.allreduce(1), second.allreduce(1, async_op=True).wait()

    with start(2, body, FERRODIST_TIMEOUT="10") as job:
        (_, *others), (found, *own) = job.results()
    assert found == [*CALLS]
    assert own == others == [0, 2, 2]


def test_ranks_that_are_in_different_calls_end_with_an_error_and_not_in_recursion(start_job):
    """Rank 1 has used a number on its own, as by a bug: no exchange of descriptors helps."""

    def body(backend, pipe):
        if backend.rank == 1:
            backend._tickets.end(backend._tickets.take())

        def differ() -> None:
            for number in range(3):
                backend.allreduce(np.ones(3 + number + backend.rank), timeout=10)
                backend.allreduce(np.ones(3 + number))

        with pytest.raises(DistributedError) as caught:
            differ()
        return type(caught.value)

    with start_job(2, body) as job:
        assert set(job.results()) <= {GroupAborted, CollectiveMismatch, SizeMismatch}
