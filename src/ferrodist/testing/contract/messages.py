# SPDX-License-Identifier: MIT OR Apache-2.0
"""Check ``message``: send, recv and sendrecv, with and without tags, small and large."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ferrodist import CollectiveTimeout, SizeMismatch, Work, barrier, recv, send, sendrecv
from ferrodist.testing.contract.case import Trial
from ferrodist.testing.contract.inputs import make_input, values_of
from ferrodist.testing.contract.matching import MATCHING
from ferrodist.testing.contract.values import Array

LARGEST_EAGER = 64 * 1024  # bytes up to which a blocking send does not wait for its receiver
LARGE = 40_000  # elements of float32: beyond the 64 KB that a send may leave to the receiver
_SHORT = 0.1  # seconds; for calls that must run out of time


def check_message(trial: Trial) -> None:
    """Run one scenario of point-to-point calls, then see that the group is in step."""
    SCENARIOS[trial.case.detail](trial)
    trial.expect_in_step()


def _around(trial: Trial) -> tuple[int, int]:
    """Return the next and the previous rank of a ring."""
    return (trial.rank + 1) % trial.world, (trial.rank - 1) % trial.world


def _like(trial: Trial) -> Any:
    """Make an array that tells what to receive; its own values must not matter."""
    return make_input(trial.case, trial.rank, trial.world)


def _expect_from(trial: Trial, got: Any, peer: int) -> None:
    wanted = values_of(trial.case, peer, trial.world)
    library = trial.case.library_of(trial.rank)
    trial.expect_array(got, wanted, library=library, dtype=trial.case.dtype)


def _expect_numbers(trial: Trial, got: Array, *wanted: int) -> None:
    trial.expect_array(got, np.array(wanted))


# -- rings: every rank sends to the next one -------------------------------------------------------


def _sendrecv_ring(trial: Trial) -> None:
    right, left = _around(trial)
    x, like = _like(trial), _like(trial)
    got = sendrecv(x, right, left, trial.backend, like=like, tag=trial.case.number)
    _expect_from(trial, got, left)
    _expect_from(trial, like, trial.rank)  # like is not written
    _expect_from(trial, x, trial.rank)


def _small_send_ring(trial: Trial) -> None:
    """Up to 64 KB a send does not wait, so all ranks may send first."""
    right, left = _around(trial)
    send(_like(trial), right, trial.backend)
    _expect_from(trial, recv(left, trial.backend, like=_like(trial)), left)


def _async_ring(trial: Trial) -> None:
    right, left = _around(trial)
    works = [
        recv(left, trial.backend, like=_like(trial), async_op=True),
        send(_like(trial), right, trial.backend, async_op=True),
    ]
    trial.expect(all(isinstance(work, Work) for work in works), "async_op=True must give a Work")
    got, nothing = (work.wait(trial.backend.timeout) for work in works)
    _expect_from(trial, got, left)
    trial.expect(nothing is None, "a send has no result")


def _out_ring(trial: Trial) -> None:
    right, left = _around(trial)
    out, like = _like(trial), _like(trial)
    got = sendrecv(_like(trial), right, left, trial.backend, out=out, like=like)
    trial.expect(got is out, "out was not returned")
    _expect_from(trial, out, left)
    send(_like(trial), right, trial.backend)
    trial.expect(recv(left, trial.backend, out=out, like=like) is out, "out was not returned")
    _expect_from(trial, out, left)


def _unknown_ring(trial: Trial) -> None:
    """Without out= and like= a receive returns what was sent, of the sender's kind."""
    right, left = _around(trial)
    library = trial.case.library_of(left)
    if library in ("torch", "jax") and library not in sys.modules:
        library = "numpy"  # it is not imported here
    coming = recv(left, trial.backend, tag=1, async_op=True)
    got = [sendrecv(_like(trial), right, left, trial.backend)]
    works = [send(_like(trial), right, trial.backend, tag=tag, async_op=True) for tag in (1, 2)]
    got.append(recv(left, trial.backend, tag=2, timeout=trial.backend.timeout))
    got.append(coming.wait(trial.backend.timeout))
    for work in works:
        work.wait(trial.backend.timeout)
    wanted = values_of(trial.case, left, trial.world)
    for one in got:
        trial.expect_array(one, wanted, library=library, dtype=trial.case.dtype)


def _in_place_ring(trial: Trial) -> None:
    """What is received may take the place of what is sent."""
    right, left = _around(trial)
    mine = np.arange(LARGE, dtype=np.float32) + trial.rank
    trial.expect(sendrecv(mine, right, left, trial.backend, out=mine) is mine, "not out")
    trial.expect_array(mine, np.arange(LARGE, dtype=np.float32) + left)


def _large_ring(trial: Trial) -> None:
    right, left = _around(trial)
    mine = np.arange(LARGE, dtype=np.float32) + trial.rank
    got = sendrecv(mine, right, left, trial.backend, like=np.empty_like(mine))
    trial.expect_array(got, np.arange(LARGE, dtype=np.float32) + left)


# -- from rank 0 to the last one -------------------------------------------------------------------


def _is_end(trial: Trial) -> tuple[bool, bool]:
    return trial.rank == 0, trial.rank == trial.world - 1


def _crossing_tags(trial: Trial) -> None:
    """Messages are taken in another order than they were sent in, told apart by their tags."""
    sends, receives = _is_end(trial)
    tags = [3, 1, 2**31 - 1, 0]
    if sends:
        for tag in tags:
            send(np.array([tag]), trial.world - 1, trial.backend, tag=tag)
    elif receives:
        for tag in sorted(tags):
            _expect_numbers(trial, recv(0, trial.backend, tag=tag), tag)


def _order_of_one_tag(trial: Trial) -> None:
    """Small and large messages with one tag stay in order, however they are waited for."""
    sends, receives = _is_end(trial)
    sizes = [1, LARGE, 2, 3, LARGE, 4]
    if sends:
        works = [
            send(np.full(size, number), trial.world - 1, trial.backend, tag=5, async_op=True)
            for number, size in enumerate(sizes)
        ]
        for work in works:
            work.wait(trial.backend.timeout)
    elif receives:
        likes = [np.empty(size, int) if size % 2 else None for size in sizes]
        coming = [recv(0, trial.backend, like=like, tag=5, async_op=True) for like in likes]
        for number, (message, size) in enumerate(zip(coming, sizes, strict=True)):
            trial.expect_array(message.wait(trial.backend.timeout), np.full(size, number))


def _across_collectives(trial: Trial) -> None:
    """A message neither waits for a collective nor disturbs it."""
    right, left = _around(trial)
    send(_like(trial), right, trial.backend, tag=9)
    barrier(trial.backend)
    trial.expect_in_step()
    _expect_from(trial, recv(left, trial.backend, like=_like(trial), tag=9), left)


def _every_pair(trial: Trial) -> None:
    """Each rank writes to every other before it reads anything."""
    others = [peer for peer in range(trial.world) if peer != trial.rank]
    for peer in others:
        send(np.array([trial.rank, peer]), peer, trial.backend, tag=trial.rank)
    for peer in reversed(others):
        got = recv(peer, trial.backend, tag=peer)
        _expect_numbers(trial, got, peer, trial.rank)


def _sender_may_write(trial: Trial) -> None:
    """When send has returned, x may change."""
    sends, receives = _is_end(trial)
    x = np.arange(3)
    if sends:
        send(x, trial.world - 1, trial.backend)
        x[:] = -1
    elif receives:
        _expect_numbers(trial, recv(0, trial.backend, like=x), 0, 1, 2)


# -- what goes wrong is the receiver's alone -------------------------------------------------------


def _unexpected_message(trial: Trial) -> None:
    """Another dtype or shape is an error on the receiver, and the next message is in its place."""
    sends, receives = _is_end(trial)
    if sends:
        for x in (np.zeros(3, np.float32), np.zeros((2, 3)), np.array([4])):
            send(x, trial.world - 1, trial.backend)
    elif receives:
        _expect_unexpected(trial, np.zeros(3))
        _expect_unexpected(trial, np.zeros((3, 2)))
        _expect_numbers(trial, recv(0, trial.backend, like=np.array([0])), 4)


def _expect_unexpected(trial: Trial, like: Array) -> None:
    error = trial.expect_error(SizeMismatch, lambda: recv(0, trial.backend, like=like))
    trial.expect(error is None or error.rank == 0, "the error must name the sender")


def _nobody_sends(trial: Trial) -> None:
    """A receive that runs out of time names its peer; the group goes on."""
    left = _around(trial)[1]
    if trial.rank == 0:
        error = trial.expect_error(
            CollectiveTimeout, lambda: recv(left, trial.backend, tag=77, timeout=_SHORT)
        )
        missing = None if error is None else error.missing
        trial.expect_equal(missing, [left], "missing")
    barrier(trial.backend)


SCENARIOS: dict[str, Callable[[Trial], None]] = {
    "sendrecv_ring": _sendrecv_ring,
    "small_send_ring": _small_send_ring,
    "async_ring": _async_ring,
    "out_ring": _out_ring,
    "unknown_ring": _unknown_ring,
    "in_place_ring": _in_place_ring,
    "large_ring": _large_ring,
    "crossing_tags": _crossing_tags,
    "order_of_one_tag": _order_of_one_tag,
    "across_collectives": _across_collectives,
    "every_pair": _every_pair,
    "sender_may_write": _sender_may_write,
    "unexpected_message": _unexpected_message,
    "nobody_sends": _nobody_sends,
    **MATCHING,
}

RINGS = (
    "sendrecv_ring",
    "small_send_ring",
    "async_ring",
    "out_ring",
    "across_collectives",
    "unknown_ring",
)
"""The scenarios that take the arrays of their case."""
