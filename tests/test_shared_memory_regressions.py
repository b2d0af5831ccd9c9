# SPDX-License-Identifier: MIT OR Apache-2.0
"""What went wrong once in shared memory, and must not again."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import Backend, BackendClosed, CollectiveMismatch, GroupAborted, RankLost

pytestmark = pytest.mark.timeout(60)


def caught(call: Any) -> tuple[str, str]:
    """Return class and text of the error that a call raises."""
    try:
        call()
    except ferrodist.DistributedError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_loss_in_a_named_algorithm_is_seen_by_ranks_that_wait_for_others() -> None:
    def body(backend: Backend) -> tuple[str, float]:
        ferrodist.barrier(backend)
        if backend.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        name, _ = caught(lambda: ferrodist.allreduce(np.ones(5), backend, algorithm="ring"))
        seconds = time.monotonic() - start
        os.write(1, f"rank {backend.rank}: {name}\n".encode())
        assert name == "RankLost", name
        assert seconds < 5, seconds
        return name, seconds

    with pytest.raises(RankLost, match="SIGKILL") as raised:
        ferrodist.run(body, 4, timeout=40)
    assert raised.value.rank == 3


def test_closing_finishes_a_named_algorithm_that_is_in_flight() -> None:
    def body(backend: Backend) -> float:
        work = ferrodist.allreduce(np.full(7, 1.0), backend, algorithm="ring", async_op=True)
        if backend.rank == 1:
            backend.close()
        return float(work.wait(20)[0])

    assert ferrodist.run(body, 3, timeout=40) == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("letter", ["x", "ж", "漢", "🦀"])
def test_last_words_in_any_script_reach_the_others(letter: str) -> None:
    def body(backend: Backend) -> None:
        if backend.rank == 0:
            raise ValueError(letter * 5000)
        name, text = caught(lambda: ferrodist.barrier(backend))
        assert name == "RankLost", (name, text)
        assert letter * 100 in text

    with pytest.raises(ValueError, match=letter):
        ferrodist.run(body, 2, timeout=40)


def test_a_long_reason_of_an_abort_reaches_groups_split_off() -> None:
    def body(backend: Backend) -> tuple[str, bool]:
        pair = backend.split([0, 1])
        if backend.rank == 0:
            backend.abort("because " * 1000)
        name, text = caught(lambda: ferrodist.barrier(pair))
        return name, "because" in text

    assert ferrodist.run(body, 2, timeout=40) == [(GroupAborted.__name__, True)] * 2


def test_a_group_is_left_with_the_one_it_was_split_off() -> None:
    def body(backend: Backend) -> list[str]:
        pair = backend.split([0, 1])
        ferrodist.barrier(pair)
        backend.close()
        calls = (
            lambda: ferrodist.allreduce(np.ones(3), pair),
            lambda: ferrodist.send(np.ones(3), 1 - pair.rank, pair),
            lambda: ferrodist.allreduce(1.0, pair),
        )
        return [caught(call)[0] for call in calls]

    assert ferrodist.run(body, 2, timeout=40) == [[BackendClosed.__name__] * 3] * 2


def test_a_difference_deep_in_a_large_tree_is_named() -> None:
    def body(backend: Backend) -> tuple[str, str]:
        tree = [np.zeros(1, np.float32) for _ in range(300)]
        if backend.rank == 1:
            tree[250] = np.zeros(1, np.float64)
        return caught(lambda: ferrodist.allreduce(tree, backend))

    for name, text in ferrodist.run(body, 2, timeout=40):
        assert name == CollectiveMismatch.__name__
        assert "[250]" in text


def test_a_part_that_does_not_fit_is_an_error_of_all_and_the_group_goes_on() -> None:
    def body(backend: Backend) -> tuple[str, float]:
        x = np.arange(6.0) if backend.rank == 0 else np.zeros(5, np.float32)
        name, _ = caught(lambda: ferrodist.scatter(x, backend))
        return name, float(ferrodist.allreduce(np.ones(1), backend)[0])

    assert ferrodist.run(body, 3, timeout=40) == [("CollectiveMismatch", 3.0)] * 3


def test_an_int_that_is_no_member_is_no_op() -> None:
    def body(backend: Backend) -> str:
        return caught(lambda: ferrodist.allreduce(np.ones(3), backend, True))[0]  # type: ignore[call-overload]

    assert ferrodist.run(body, 2, timeout=40) == ["InvalidArgument"] * 2


def test_a_timeout_of_centuries_is_none() -> None:
    def body(backend: Backend) -> float:
        backend.timeout = 1e12
        return float(ferrodist.allreduce(np.ones(1), backend, timeout=1e15)[0])

    assert ferrodist.run(body, 2, timeout=40) == [2.0, 2.0]
