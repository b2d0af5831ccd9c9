"""FERRODIST_CHECK_SITES=1: two calls of one shape in another order on one rank are told apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist.config import Config
from ferrodist.errors import CollectiveMismatch, SizeMismatch
from ferrodist.testing import run_ranks

pytestmark = pytest.mark.timeout(60)

SITES = {"FERRODIST_CHECK_SITES": "1"}


def call_first(backend: Any, x: Any, **options: Any) -> Any:
    return ferrodist.allreduce(x, backend, **options)


def call_second(backend: Any, x: Any, **options: Any) -> Any:
    return ferrodist.allreduce(x, backend, **options)


def make_swapped_calls(backend: Any) -> tuple[str, list[str], float]:
    """Make two calls of one shape, rank 1 in the other order, and then one that is the same."""
    x = np.full(3, backend.rank + 1.0)
    in_order = [call_first, call_second]
    for call in in_order if backend.rank != 1 else reversed(in_order):
        try:
            call(backend, x)
        except CollectiveMismatch as error:
            caught = error
    return str(caught), caught.calls, float(call_first(backend, x)[0])


def check_table(found: list[Any]) -> None:
    assert {one[0] for one in found} == {found[0][0]}, "all ranks have the same table"
    text = found[0][0]
    first, second = (call.__code__.co_firstlineno + 1 for call in (call_first, call_second))
    for rank, line in enumerate([second, first, second]):
        assert f"  rank {rank}  allreduce(float64[3], sum)  test_call_sites.py:{line}" in text
    assert "allreduce #2: ranks called from different lines" in text
    assert "FERRODIST_CHECK_SITES=1" in text
    assert [one[2] for one in found] == [6.0] * 3  # the group goes on


def test_swapped_calls_of_one_shape_are_told_apart(start):
    with start(3, lambda backend, pipe: make_swapped_calls(backend), **SITES) as job:
        check_table(job.results())


def test_swapped_calls_of_one_shape_are_told_apart_between_threads():
    check_table(run_ranks(3, make_swapped_calls, config=Config(check_sites=True, timeout=20)))


def test_swapped_calls_in_flight_are_told_apart_by_where_they_were_started(start):
    def body(backend, pipe):
        calls = [call_first, call_second][:: -1 if backend.rank == 1 else 1]
        works = [call(backend, np.ones(3), async_op=True) for call in calls]
        return [type(work.exception()).__name__ for work in works]

    with start(3, body, **SITES) as job:
        assert job.results() == [["CollectiveMismatch"] * 2] * 3


def test_without_the_setting_they_are_the_same_call(start):
    def body(backend, pipe):
        calls = [call_first, call_second][:: -1 if backend.rank == 1 else 1]
        return [float(call(backend, np.ones(3))[0]) for call in calls]

    with start(3, body) as job:
        assert job.results() == [[3.0, 3.0]] * 3


def test_sizes_that_differ_in_one_line_are_a_size_mismatch_as_ever(start):
    def body(backend, pipe):
        with pytest.raises(SizeMismatch, match="sizes differ between ranks"):
            call_first(backend, np.ones(3 + backend.rank))
        return float(ferrodist.broadcast({"a": 1.0 + backend.rank}, backend, root=2)["a"])

    with start(3, body, **SITES) as job:
        assert job.results() == [3.0] * 3
