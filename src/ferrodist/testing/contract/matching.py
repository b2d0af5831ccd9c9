# SPDX-License-Identifier: MIT OR Apache-2.0
"""Scenarios of ``message``: any source, any tag, probes, objects, cancelling, ranks by themselves.

All of them leave nothing behind: the next case begins when every rank has ended this one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from ferrodist import (
    ANY_SOURCE,
    ANY_TAG,
    PROC_NULL,
    CollectiveTimeout,
    InvalidArgument,
    SelfSend,
    SizeMismatch,
    Status,
    barrier,
    probe,
    recv,
    recv_object,
    send,
    send_object,
    sendrecv,
    try_probe,
    wait_all,
    wait_any,
)
from ferrodist.testing.contract.case import Trial

LARGE = 40_000  # elements of float32: beyond the 64 KB that a send may leave to the receiver
_SHORT = 0.1  # seconds; for calls that must run out of time


def _around(trial: Trial) -> tuple[int, int]:
    """Return the next and the previous rank of a ring."""
    return (trial.rank + 1) % trial.world, (trial.rank - 1) % trial.world


def _numbers(rank: int, size: int) -> Any:
    return np.arange(size, dtype=np.float32) + rank


# -- any source, any tag ---------------------------------------------------------------------------


def _any_source(trial: Trial) -> None:
    """All send to rank 0, which receives from each and knows the source."""
    sizes = (3, LARGE, 0)
    if trial.rank > 0:
        for tag, size in enumerate(sizes):
            send(_numbers(trial.rank, size), 0, trial.backend, tag=tag)
        return
    for tag, size in enumerate(sizes):
        heard = []
        for _ in range(trial.world - 1):
            got, status = recv(backend=trial.backend, tag=tag, with_status=True)
            heard.append(status.source)
            trial.expect_array(got, _numbers(status.source, size))
            trial.expect_equal(status[1:], (tag, "float32", (size,)), "status")
        trial.expect_equal(sorted(heard), list(range(1, trial.world)), "sources")


def _order_however_received(trial: Trial) -> None:
    """Messages of one rank stay in order, whichever way each of them is received."""
    right, left = _around(trial)
    count = 24
    works = [
        send(np.full(LARGE if i % 7 == 6 else 1 + i % 3, i), right, trial.backend, async_op=True)
        for i in range(count)
    ]
    for i in range(count):
        src, tag = (left, ANY_SOURCE)[i % 2], (0, ANY_TAG)[i // 2 % 2]
        # From any source the previous rank is still the only one that sends to it.
        if i % 3 == 0:
            got = recv(src, trial.backend, tag=tag, async_op=True).wait(trial.backend.timeout)
        elif i % 3 == 1:
            status = probe(src, trial.backend, tag=tag)
            trial.expect_equal((status.source, status.tag), (left, 0), "probe")
            got = recv(src, trial.backend, tag=tag)
        else:
            got = recv(src, trial.backend, tag=tag, timeout=trial.backend.timeout)
        trial.expect_equal(int(got[0]), i, "the order of messages")
    wait_all(works)


def _any_tag_is_the_earliest(trial: Trial) -> None:
    """Any tag takes what was sent first; a receive posted earlier comes before it."""
    right, left = _around(trial)
    posted = recv(left, trial.backend, tag=2, async_op=True)
    barrier(trial.backend)
    for tag in (5, 2, 2**31 - 1, 0):
        send(tag, right, trial.backend, tag=tag)
    got = [recv(left, trial.backend, tag=ANY_TAG, with_status=True) for _ in range(3)]
    wanted = [(tag, Status(left, tag, "int64", ())) for tag in (5, 2**31 - 1, 0)]
    trial.expect_equal(got, wanted, "any tag")
    trial.expect_equal(posted.wait(trial.backend.timeout), 2, "the receive posted first")


def _fair(trial: Trial) -> None:
    """A rank that sends again as soon as it is answered must not starve the others."""
    count = 30
    if trial.rank > 0:
        for i in range(count):
            send(i, 0, trial.backend, tag=1)
            recv(0, trial.backend, tag=2)
        return
    heard = [0] * trial.world
    for _ in range(count * (trial.world - 1)):
        got, status = recv(ANY_SOURCE, trial.backend, tag=1, with_status=True)
        trial.expect_equal(got, heard[status.source], "the order of messages")
        heard[status.source] += 1
        send(0, status.source, trial.backend, tag=2)
    trial.expect_equal(heard[1:], [count] * (trial.world - 1), "messages of each rank")


def _nobody_sends_at_all(trial: Trial) -> None:
    """A receive from any source that runs out of time names all others; nothing is lost by it."""
    if trial.rank == 0:
        error = trial.expect_error(
            CollectiveTimeout, lambda: recv(backend=trial.backend, tag=77, timeout=_SHORT)
        )
        missing = None if error is None else error.missing
        trial.expect_equal(missing, list(range(1, trial.world)), "missing")
    barrier(trial.backend)


# -- probes, shorter messages, objects -------------------------------------------------------------


def _probes(trial: Trial) -> None:
    right, left = _around(trial)
    trial.expect_equal(try_probe(left, trial.backend), None, "try_probe before")
    barrier(trial.backend)
    send(np.zeros((2, 3), np.int16), right, trial.backend, tag=4)
    wanted = Status(left, 4, "int16", (2, 3))
    trial.expect_equal(probe(backend=trial.backend), wanted, "probe")
    trial.expect_equal(probe(left, trial.backend, tag=4), wanted, "a second probe")
    trial.expect_equal(try_probe(left, trial.backend, tag=5), None, "try_probe of another tag")
    trial.expect_equal(try_probe(ANY_SOURCE, trial.backend), wanted, "try_probe")
    out = np.ones(wanted.shape, wanted.dtype)
    trial.expect_array(recv(wanted.source, trial.backend, out=out, tag=4), np.zeros_like(out))


def _shorter(trial: Trial) -> None:
    """With a status a message may have fewer rows than out, of which the rest stays."""
    right, left = _around(trial)
    for rows in (0, 2, 5, 20_000):
        x = np.full((rows, 3), trial.rank, np.float32)
        sending = send(x, right, trial.backend, async_op=True)
        out = np.full((20_000, 3), -1, np.float32)
        got, status = recv(left, trial.backend, out=out, with_status=True)
        sending.wait(trial.backend.timeout)
        trial.expect_equal(status.shape, (rows, 3), "shape")
        trial.expect_array(got, np.full((rows, 3), left, np.float32))
        trial.expect(bool((out[rows:] == -1).all()), "the rest of out was written")
        trial.expect(np.shares_memory(got, out) or rows == 0, "not a part of out")


def _too_long(trial: Trial) -> None:
    """What does not fit out is the receiver's error; without a status, so is what is shorter."""
    right, left = _around(trial)
    for size, with_status in ((6, True), (LARGE, True), (4, False)):
        sending = send(_numbers(0, size), right, trial.backend, async_op=True)
        out = np.zeros(5, np.float32)
        take = partial(recv, left, trial.backend, out=out, with_status=with_status)
        trial.expect_error(SizeMismatch, take)
        sending.wait(trial.backend.timeout)


_OBJECT = {"settings": [1, (2.5, "x"), None], "array": "below"}


def _objects(trial: Trial) -> None:
    right, left = _around(trial)
    large = "long" * 30_000
    works = [
        send_object({**_OBJECT, "rank": trial.rank}, right, trial.backend, async_op=True),
        send_object(large, right, trial.backend, tag=1, async_op=True),
        send_object(np.arange(3), right, trial.backend, tag=2, pickle=True, async_op=True),
    ]
    got, status = recv_object(left, trial.backend, with_status=True)
    trial.expect_equal(got, {**_OBJECT, "rank": left}, "object")
    trial.expect_equal(status, Status(left, 0, "object", status.shape), "status")
    coming = recv_object(ANY_SOURCE, trial.backend, tag=1, async_op=True)
    trial.expect_equal(coming.wait(trial.backend.timeout), large, "a large object")
    trial.expect_array(recv_object(left, trial.backend, tag=2, pickle=True), np.arange(3))
    wait_all(works)
    send_object(1, right, trial.backend, pickle=True)
    trial.expect_error(InvalidArgument, lambda: recv_object(left, trial.backend), "pickle=True")


def _arrays_and_objects(trial: Trial) -> None:
    """A receive of the wrong kind fails, and the message stays."""
    right, left = _around(trial)
    early = recv(left, trial.backend, async_op=True)
    early.add_done_callback(lambda work: None)  # else its error is logged before it is asked for
    barrier(trial.backend)
    send_object("an object", right, trial.backend)
    send(np.arange(3), right, trial.backend)
    trial.expect_error(
        InvalidArgument, lambda: early.wait(trial.backend.timeout), "with recv_object"
    )
    trial.expect_error(InvalidArgument, lambda: recv(left, trial.backend), "with recv_object")
    trial.expect_error(
        InvalidArgument,
        lambda: recv(ANY_SOURCE, trial.backend, tag=ANY_TAG, timeout=trial.backend.timeout),
        "with recv_object",
    )
    trial.expect_equal(recv_object(left, trial.backend), "an object", "object")
    trial.expect_error(InvalidArgument, lambda: recv_object(left, trial.backend), "with recv")
    trial.expect_array(recv(left, trial.backend), np.arange(3))


# -- calls in flight -------------------------------------------------------------------------------


def _cancel(trial: Trial) -> None:
    """A receive that nothing came for is withdrawn and takes nothing; no other call is."""
    right, left = _around(trial)
    works = [recv(left, trial.backend, tag=3, async_op=True) for _ in range(3)]
    trial.expect(works[1].cancel() and works[1].cancelled() and works[1].done(), "not cancelled")
    trial.expect(works[1].cancel(), "cancelled twice")
    with suppress(CancelledError):
        trial.expect(False, f"the cancelled receive gave {works[1].wait(trial.backend.timeout)!r}")
    barrier(trial.backend)
    for number in range(2):
        send(number, right, trial.backend, tag=3)
    got = [works[0].wait(trial.backend.timeout), works[2].wait(trial.backend.timeout)]
    trial.expect_equal(got, [0, 1], "those not cancelled")
    trial.expect(not works[0].cancel() and not works[0].cancelled(), "cancelled when it was over")
    sending = send(_numbers(0, LARGE), right, trial.backend, async_op=True)
    trial.expect(not sending.cancel(), "a send was cancelled")
    recv(left, trial.backend)
    sending.wait(trial.backend.timeout)


def _several_works(trial: Trial) -> None:
    right, left = _around(trial)
    works = [recv(left, trial.backend, tag=tag, async_op=True) for tag in range(4)]
    barrier(trial.backend)
    found = []
    for tag in (2, 0, 3, 1):
        send(tag, right, trial.backend, tag=tag)
        waiting = [work for work in works if work not in found]
        found.append(waiting[wait_any(waiting, trial.backend.timeout)])
        trial.expect(found[-1].done(), "wait_any gave one that is not over")
    trial.expect_equal(wait_all(works, trial.backend.timeout), [0, 1, 2, 3], "wait_all")


def _sendrecv_in_flight(trial: Trial) -> None:
    """Two of them at once, with tags of their own, in either direction."""
    right, left = _around(trial)
    backend, mine = trial.backend, _numbers(trial.rank, LARGE)
    out = np.empty_like(mine)
    there = sendrecv(mine, right, left, backend, tag=1, recv_tag=1, async_op=True)
    back = sendrecv(mine, left, right, backend, out=out, tag=2, recv_tag=ANY_TAG, async_op=True)
    trial.expect_array(there.wait(backend.timeout), _numbers(left, LARGE))
    trial.expect(back.wait(backend.timeout) is out, "not out")
    trial.expect_array(out, _numbers(right, LARGE))
    if trial.world > 2:
        got = sendrecv(trial.rank, right, left, backend, tag=trial.rank, recv_tag=left)
        trial.expect_equal(got, left, "two tags")


def _barrier_in_flight(trial: Trial) -> None:
    works = [barrier(trial.backend, async_op=True), barrier(trial.backend, async_op=True)]
    for work in works:
        trial.expect(work is not None and work.wait(trial.backend.timeout) is None, "a result")


# -- self and PROC_NULL ----------------------------------------------------------------------------


def _to_itself(trial: Trial) -> None:
    backend, me = trial.backend, trial.rank
    for size in (3, LARGE):
        x = _numbers(me, size)
        trial.expect_array(sendrecv(x, me, me, backend), x)
        sending = send(x, me, backend, tag=4, async_op=True)
        trial.expect_equal(probe(me, backend).tag, 4, "the tag of a probe")
        trial.expect_array(recv(me, backend, tag=4), x)
        coming = recv(ANY_SOURCE, backend, tag=5, async_op=True)
        both = [sending, send(x, me, backend, tag=5, async_op=True)]
        trial.expect_array(coming.wait(backend.timeout), x)
        wait_all(both, backend.timeout)
        trial.expect_array(sendrecv(x, me, me, backend, async_op=True).wait(backend.timeout), x)
    send_object({"to": me}, me, backend, async_op=True)
    trial.expect_equal(recv_object(me, backend), {"to": me}, "an object")
    trial.expect_error(SelfSend, lambda: recv(me, backend))
    trial.expect_error(SelfSend, lambda: probe(me, backend))


def _with_nobody(trial: Trial) -> None:
    backend, out = trial.backend, np.full(3, 7)
    send(np.ones(3), PROC_NULL, backend)
    send_object("x", PROC_NULL, backend, async_op=True).wait(backend.timeout)
    trial.expect(recv(PROC_NULL, backend) is None, "something came of nobody")
    trial.expect(recv(PROC_NULL, backend, out=out, async_op=True).wait(1) is out, "not out")
    trial.expect(recv_object(PROC_NULL, backend) is None, "an object of nobody")
    trial.expect_equal(probe(PROC_NULL, backend).source, PROC_NULL, "a probe of nobody")
    trial.expect_array(out, np.full(3, 7))
    # The ends of a line: one has no rank on its left, the other none on its right.
    left = PROC_NULL if trial.rank == 0 else trial.rank - 1
    right = PROC_NULL if trial.rank == trial.world - 1 else trial.rank + 1
    for async_op in (False, True):
        got = sendrecv(trial.rank, right, left, backend, async_op=async_op)
        got = got.wait(backend.timeout) if async_op else got
        trial.expect_equal(got, None if left is PROC_NULL else left, "what came from the left")


MATCHING: dict[str, Callable[[Trial], None]] = {
    "any_source": _any_source,
    "order_however_received": _order_however_received,
    "any_tag_is_the_earliest": _any_tag_is_the_earliest,
    "fair": _fair,
    "nobody_sends_at_all": _nobody_sends_at_all,
    "probes": _probes,
    "shorter": _shorter,
    "too_long": _too_long,
    "objects_in_messages": _objects,
    "arrays_and_objects": _arrays_and_objects,
    "cancel": _cancel,
    "several_works": _several_works,
    "sendrecv_in_flight": _sendrecv_in_flight,
    "barrier_in_flight": _barrier_in_flight,
    "to_itself": _to_itself,
    "with_nobody": _with_nobody,
}
