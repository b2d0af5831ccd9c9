# SPDX-License-Identifier: MIT OR Apache-2.0
"""Lists and counts as results, pairs and functions as operations: what the contract leaves out."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import CollectiveMismatch, InvalidArgument, ReduceOp, UnsupportedOp
from ferrodist.testing import run_ranks

# -- lists ---------------------------------------------------------------------------------------


def test_a_list_of_a_tree_has_one_tree_per_rank() -> None:
    def gather(backend: Any) -> Any:
        tree = {"a": np.full((2, 2), backend.rank), "b": [backend.rank, None]}
        return backend.all_gather(tree, as_list=True)

    for trees in run_ranks(3, gather):
        assert [tree["a"].tolist() for tree in trees] == [[[rank] * 2] * 2 for rank in range(3)]
        assert [tree["b"] for tree in trees] == [[rank, None] for rank in range(3)]


def test_a_list_of_an_empty_tree_has_as_many_parts() -> None:
    assert run_ranks(3, lambda b: b.all_gather([], as_list=True)) == [[[], [], []]] * 3


@pytest.mark.slow
def test_parts_are_views_of_out() -> None:
    def gather(backend: Any) -> Any:
        found = []
        for is_async in (False, True):
            out, x = np.zeros(6), np.full(2, float(backend.rank))
            parts = backend.all_gather(x, as_list=True, out=out, async_op=is_async)
            parts = parts.wait(10) if is_async else parts
            out += 1
            found.append([part.tolist() for part in parts])
        return found

    wanted = [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    assert run_ranks(3, gather)[1] == [wanted, wanted]
    assert ferrodist.run(gather, ranks=3, timeout=60)[1] == [wanted, wanted]


def test_parts_of_numbers_are_numbers_and_of_arrays_without_axes_are_such() -> None:
    import torch

    def gather(backend: Any) -> Any:
        kinds: list[Any] = [float, np.float32, np.array, lambda x: torch.tensor(float(x))]
        return [backend.all_gather(kind(backend.rank), as_list=True) for kind in kinds]

    for numbers, scalars, arrays, tensors in run_ranks(2, gather):
        assert numbers == [0.0, 1.0]
        assert [type(one) for one in numbers] == [float, float]
        assert [type(one) for one in scalars] == [np.float32, np.float32]
        assert [one.shape for one in (*arrays, *tensors)] == [()] * 4


def test_bytes_and_memoryviews_are_cut_too() -> None:
    def gather(backend: Any) -> Any:
        rank = backend.rank
        table = memoryview(np.full((2, 2), rank, np.int32))
        joined = backend.all_gather(table, as_list=True)
        return backend.all_gather(b"ab" * (rank + 1) + b"c" * (2 - 2 * rank), as_list=True), joined

    texts, tables = run_ranks(2, gather)[0]
    assert texts == [b"abcc", b"abab"]
    assert [table.tolist() for table in tables] == [[[0, 0], [0, 0]], [[1, 1], [1, 1]]]


# -- counts --------------------------------------------------------------------------------------


def test_difference_of_counts_is_shown_for_every_rank() -> None:
    def reduce(backend: Any) -> str:
        counts = [1, 2] if backend.rank else [2, 1]
        with pytest.raises(ferrodist.SizeMismatch) as caught:
            backend.reduce_scatter_uneven(np.zeros(3), counts)
        return str(caught.value)

    for text in run_ranks(2, reduce):
        assert "reduce_scatter_uneven(float64[3], sum, counts=[2, 1])" in text
        assert "reduce_scatter_uneven(float64[3], sum, counts=[1, 2])" in text


def test_out_of_a_gather_that_is_too_short_is_told_to_all() -> None:
    def gather(backend: Any) -> None:
        out = np.zeros(2) if backend.rank == 0 else None
        with pytest.raises(CollectiveMismatch, match=r"rank 0: out has shape \(2,\)"):
            backend.gather_uneven(np.zeros(backend.rank + 1), out=out)
        assert backend.allreduce(1) == 2

    run_ranks(2, gather)


def test_keyword_of_another_library_is_answered() -> None:
    def call(backend: Any) -> None:
        with pytest.raises(TypeError, match=r"gather_uneven.* 'dst'; here it is root="):
            backend.gather_uneven(1, dst=0)

    run_ranks(1, call)


# -- pairs ---------------------------------------------------------------------------------------


def test_pair_may_be_of_two_libraries_and_each_comes_back_as_it_was() -> None:
    import torch

    def find(backend: Any) -> Any:
        values = torch.tensor([[1.0, -1.0], [0.0, 5.0]]) * (backend.rank - 1)
        return backend.allreduce((values, np.full((2, 2), backend.rank, np.uint8)), "maxloc")

    for values, ranks in run_ranks(3, find):
        assert torch.equal(values, torch.tensor([[1.0, 1.0], [0.0, 5.0]]))
        assert (ranks == np.array([[2, 0], [0, 2]], np.uint8)).all()
        assert ranks.dtype == np.uint8


def test_indices_at_the_ends_of_their_types_are_ordered() -> None:
    def find(backend: Any) -> Any:
        ends = np.array([0, 2**64 - 1], np.uint64) if backend.rank else np.full(2, 2**63, np.uint64)
        lows = np.full(2, -(2**63) if backend.rank else 2**63 - 1)
        zeros = np.zeros(2)
        return [backend.allreduce((zeros, x), "minloc")[1].tolist() for x in (ends, lows)]

    assert run_ranks(2, find)[0] == [[0, 2**63], [-(2**63)] * 2]


def test_pair_is_no_tree_and_a_tree_of_pairs_is_none() -> None:
    def find(backend: Any) -> None:
        with pytest.raises(ferrodist.UnsupportedArray, match="one of them is a tuple"):
            backend.allreduce(((1, 2), (3, 4)), "minloc")

    run_ranks(1, find)


# -- functions -----------------------------------------------------------------------------------


def test_function_sees_whole_arrays_of_the_callers_kind_in_rank_order() -> None:
    import torch

    def join(left: Any, right: Any) -> Any:
        assert left.shape == right.shape == (2, 3)
        return left * 10 + right

    def reduce(backend: Any) -> Any:
        rank = backend.rank
        x = torch.full((2, 3), rank + 1) if rank == 1 else np.full((2, 3), rank + 1)
        tree = {"x": x, "y": [x]}
        return backend.allreduce(tree, ReduceOp.custom(join))

    for rank, found in enumerate(run_ranks(4, reduce)):
        assert type(found["x"]) is (torch.Tensor if rank == 1 else np.ndarray)
        assert found["x"].tolist() == found["y"][0].tolist() == [[1234] * 3] * 2


def test_function_of_numbers_is_given_numbers() -> None:
    op = ReduceOp.custom(lambda left, right: left * 10 + right, name="digits")

    def reduce(backend: Any) -> Any:
        found = [
            call(backend.rank + 1, backend, op=op) for call in (ferrodist.scan, ferrodist.exscan)
        ]
        out = np.zeros(2, int)
        backend.reduce(np.full(2, backend.rank + 1), 1, op, out=out)
        return [*found, out.tolist()]

    assert run_ranks(3, reduce) == [[1, None, [0, 0]], [12, 1, [123, 123]], [123, 12, [0, 0]]]


@pytest.mark.slow
def test_function_that_communicates_is_stopped_at_once() -> None:
    def reduce(backend: Any) -> None:
        op = ReduceOp.custom(lambda left, right: backend.allreduce(left), name="nested")
        with pytest.raises(UnsupportedOp, match="must not communicate"):
            backend.allreduce(1.0, op, timeout=20)
        work = backend.allreduce(1.0, op, timeout=20, async_op=True)
        with pytest.raises(UnsupportedOp, match="must not communicate"):
            work.wait()
        assert backend.allreduce(1) == 2

    run_ranks(2, reduce)
    ferrodist.run(reduce, ranks=2, timeout=60)


def test_name_is_module_and_name_of_the_function() -> None:
    assert ReduceOp.custom(_add).name == f"{__name__}._add"
    assert ReduceOp.custom(np.add).name.endswith("add")
    assert ReduceOp.custom(_add) == ReduceOp.custom(max, name=f"{__name__}._add")
    assert pickle.loads(pickle.dumps(ReduceOp.custom(_add))).fn is _add
    with pytest.raises(InvalidArgument, match="pass name="):
        ReduceOp.custom(functools.partial(_add, 1))
    for wrong in ({"fn": 3}, {"fn": _add, "name": ""}):
        with pytest.raises(InvalidArgument):
            ReduceOp.custom(**wrong)  # type: ignore[arg-type]  # that is the point


def _add(left: Any, right: Any) -> Any:
    return left + right


def test_function_instead_of_an_operation_is_answered() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        run_ranks(1, lambda b: b.allreduce(1, max))
    assert caught.group_contains(InvalidArgument, match=r"ReduceOp\.custom\(fn\)")


def test_errors_name_the_function_and_its_ranks_call() -> None:
    def reduce(backend: Any) -> str:
        op = ReduceOp.custom(_add, name="mine" if backend.rank else "yours")
        with pytest.raises(CollectiveMismatch) as caught:
            backend.allreduce(np.zeros(2), op)
        return str(caught.value)

    assert all("custom mine" in text and "custom yours" in text for text in run_ranks(2, reduce))


# -- 0 and 1 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3])
def test_logical_operations_give_0_and_1_where_nothing_is_reduced(world: int) -> None:
    def reduce(backend: Any) -> Any:
        x = np.array([7.0, 0.0, np.nan, -0.0]) if backend.rank == 0 else np.ones(4)
        found = [backend.scan(x, "land"), backend.exscan(x, "lor"), backend.reduce(x, 0, "land")]
        return [None if one is None else one.tolist() for one in found]

    results = run_ranks(world, reduce)
    assert results[0] == [[1.0, 0.0, 1.0, 0.0], None, [1.0, 0.0, 1.0, 0.0]]
    assert all(one[1] == [1.0, 0.0, 1.0, 0.0] for one in results[1:2])
