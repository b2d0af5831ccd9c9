"""Timeouts of calls that send and receive at once name the rank that the caller waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ferrodist import CollectiveTimeout, GroupAborted
from ferrodist.testing import run_ranks

pytestmark = pytest.mark.timeout(60)

LARGE = np.zeros(1 << 20)  # such a message waits for its receiver


def send_to_one_that_never_receives(backend: Any) -> list[Any]:
    """Let rank 0 send to rank 1, which does nothing, and receive from rank 2, which sends."""
    found = []
    timeouts: list[dict[str, Any]] = [{"timeout": 0.5}, {"timeout": 0.5, "async_op": True}, {}]
    backend.timeout = 0.5
    for tag, options in enumerate(timeouts):
        if backend.rank == 2:
            backend.send(tag, 0, tag=tag)
        elif backend.rank == 0:
            try:
                done = backend.sendrecv(LARGE, 1, 2, tag=tag, **options)
                found.append(done.wait() if "async_op" in options else done)
            except CollectiveTimeout as error:
                found.append((error.rank, error.missing, "rank 1 did not answer" in str(error)))
    backend.barrier(timeout=20.0)
    return found


WANTED = [[(1, [1], True)] * 3, [], []]


def test_sendrecv_names_the_rank_that_never_receives(start: Callable[..., Any]) -> None:
    with start(3, lambda backend, pipe: send_to_one_that_never_receives(backend)) as job:
        assert job.results() == WANTED


def test_sendrecv_between_threads_names_the_rank_that_never_receives() -> None:
    assert run_ranks(3, send_to_one_that_never_receives) == WANTED


def exchange_without_rank_0(backend: Any, call: str, options: dict[str, Any], x: Any) -> Any:
    """Let rank 0 come to an exchange on a ring when its neighbors have given up."""
    grid = backend.grid(backend.world_size, periodic=True)
    grid.timeout = 0.5
    if grid.rank == 0:
        backend.barrier(timeout=20.0)
    try:
        return getattr(grid, call)(x if call == "neighbor_all_gather" else [x, x], **options)
    except (CollectiveTimeout, GroupAborted) as error:
        return error.rank, "rank 0 did not answer" in str(error)
    finally:
        if grid.rank != 0:
            backend.barrier(timeout=20.0)


CALLS = [
    (call, options, x)
    for call in ("neighbor_all_gather", "neighbor_all_to_all")
    for options in ({}, {"timeout": 0.5})
    for x in (1.5, LARGE)
]


def test_late_neighbor_is_named_by_all_ranks(start: Callable[..., Any]) -> None:
    def body(backend: Any, pipe: Any) -> list[Any]:
        return [exchange_without_rank_0(backend, *call) for call in CALLS]

    with start(3, body) as job:
        assert job.results() == [[(0, True)] * len(CALLS)] * 3


def exchange_in_a_row(backend: Any) -> Any:
    """Let rank 0 be late; rank 1 is its neighbor, rank 2 is not."""
    grid = backend.grid(3)
    if grid.rank == 0:
        backend.barrier(timeout=20.0)
    try:
        found = grid.neighbor_all_gather(LARGE + grid.rank, timeout=1.0)
        return [None if part is None else part[0] for part in found]
    except (CollectiveTimeout, GroupAborted) as error:
        return type(error), "rank 0 did not answer" in str(error)
    finally:
        if grid.rank != 0:
            backend.barrier(timeout=20.0)


IN_A_ROW = [(GroupAborted, True), (CollectiveTimeout, True), [1.0, None]]


def test_rank_that_does_not_need_the_late_one_gets_its_result(start: Callable[..., Any]) -> None:
    with start(3, lambda backend, pipe: exchange_in_a_row(backend)) as job:
        assert job.results() == IN_A_ROW


def test_late_neighbor_between_threads_is_named() -> None:
    assert run_ranks(3, exchange_in_a_row) == IN_A_ROW
