# SPDX-License-Identifier: MIT OR Apache-2.0
"""The backend contract on the simulated backend, and broken backends that it must find."""

from __future__ import annotations

import functools
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import Config, InvalidArgument, ReduceOp, SimulatedBackend, _native
from ferrodist.backends.running_call import NO_ARGS, CollectiveArgs, RunningCall
from ferrodist.buffer import DTYPES_BY_LABEL, Buffer, DType
from ferrodist.call import Call, Kind
from ferrodist.collectives.request import Request
from ferrodist.schedules import known
from ferrodist.testing import (
    Case,
    Failure,
    Report,
    contract_cases,
    distinct_values,
    run_contract,
    run_ranks,
)
from ferrodist.testing.contract.cases import Rule, covering, ring_shape
from ferrodist.testing.contract.messages import RINGS
from ferrodist.testing.contract.values import DTYPES, legal_ops

SEED = 0
slow = pytest.mark.slow
WORLDS = [
    *(pytest.param(world, marks=slow) for world in (1, 3)),
    *(pytest.param(world, marks=[slow, pytest.mark.long]) for world in (2, 4, 5, 8)),
]


@functools.cache
def cases_of(world: int) -> tuple[Case, ...]:
    return tuple(contract_cases(world, SEED))


@pytest.mark.parametrize("world", WORLDS)
def test_simulated_backend_keeps_the_contract(world: int) -> None:
    cases = cases_of(world)
    print(f"seed {SEED}, world {world}: {len(cases)} cases,", dict(Counter(c.check for c in cases)))
    reports = run_ranks(world, lambda backend: run_contract(backend, cases), timeout=110)
    assert all(report.is_clean for report in reports), "\n".join(map(str, reports))


@pytest.mark.slow
def test_arrays_that_are_cut_into_pieces_and_segments_come_out_the_same() -> None:
    small = Config(message_nbytes=4096, chunk_nbytes=8192, fuse_nbytes=4096)
    cases = [c for c in cases_of(3) if c.library == "numpy" and max(c.shape, default=0) > 4000]
    reports = run_ranks(3, lambda backend: run_contract(backend, cases), config=small)
    assert all(report.is_clean for report in reports), "\n".join(map(str, reports))


# -- the suite itself ------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_seed_gives_one_list_and_another_seed_another() -> None:
    lists = [contract_cases(1, seed, algorithms=False) for seed in (7, 7, 8)]
    assert lists[0] == lists[1]
    assert lists[0] != lists[2]


def test_case_survives_pickling_and_its_text_makes_it_again() -> None:
    for case in cases_of(1)[:200]:
        assert pickle.loads(pickle.dumps(case)) == case
        assert eval(repr(case)) == case


@pytest.mark.slow
def test_every_shape_dtype_and_legal_op_of_allreduce_is_there() -> None:
    cases = [c for c in cases_of(2) if (c.function, c.check) == ("allreduce", "result")]
    plain = {(c.shape, c.layout, c.dtype, c.op) for c in cases if c.style == "plain"}
    for shape in [(), (0,), (0, 3), (1,), (7,), (4097,), (12, 3)]:
        for dtype, op in [("bool", "BXOR"), ("uint64", "PROD"), ("bfloat16", "MEAN")]:
            assert (shape, "plain", dtype, op) in plain
    assert ((12, 3), "transposed", "complex128", "SUM") in plain
    assert not any(op == "MEAN" and dtype.startswith("int") for _, _, dtype, op in plain)


def test_every_algorithm_and_every_root_of_a_function_is_there() -> None:
    cases = cases_of(3)
    algorithms = {case.algorithm for case in cases if case.function == "allreduce"}
    assert algorithms == {"", *(schedule.name for schedule in known(Kind.ALLREDUCE))}
    for function in ("broadcast", "reduce", "gather", "scatter"):
        assert {case.root for case in cases if case.function == function} == {0, 1, 2}


@pytest.mark.slow
def test_backend_without_algorithms_is_asked_for_none() -> None:
    assert not any(case.algorithm for case in contract_cases(1, algorithms=False))


def test_covering_holds_every_legal_pair_and_nothing_illegal() -> None:
    parameters = {"a": range(5), "b": range(4), "c": range(3), "d": range(6)}
    rules: list[Rule] = [(("a", "b"), lambda a, b: a != b), (("b", "d"), lambda b, d: b + d != 3)]
    rows = covering(parameters, rules, seed=1, apart=[("a", "d")])
    assert all(row["a"] != row["b"] and row["b"] + row["d"] != 3 for row in rows)
    assert {(row["a"], row["b"]) for row in rows} == {
        (a, b) for a in range(5) for b in range(4) if a != b
    }
    assert len({(row["c"], row["d"]) for row in rows}) == 3 * 6
    assert len(rows) < 30


@pytest.mark.parametrize("dtype", ["int16", "uint64", "float32", "float64", "complex64"])
def test_values_differ_by_rank_and_position(dtype: str) -> None:
    values = [distinct_values(rank, (4097,), dtype, seed=3) for rank in range(8)]
    assert np.unique(np.concatenate(values)).size == 8 * 4097


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_values_of_small_dtypes_differ_by_rank_at_one_position(dtype: str) -> None:
    values = np.stack([distinct_values(rank, (4097,), dtype, seed=3) for rank in range(8)])
    assert all(np.unique(column).size >= 7 for column in values.T[:200].astype(np.float32))


def test_report_names_the_seed_and_every_failed_case() -> None:
    case = Case("allreduce", shape=(7,), dtype="int8", op="SUM", seed=5, number=3)
    report = Report(2, 1, 5, 10, ("numpy",), [Failure(case, "result: shape (6,)")])
    assert not report.is_clean
    assert "seed 5" in str(report)
    assert repr(case) in str(report)
    assert "result: shape (6,)" in str(report)


def test_run_that_finds_the_group_gone_stops_and_says_so() -> None:
    def leave(backend: SimulatedBackend) -> Report | None:
        cases = [Case("broadcast", shape=(7,))]
        return run_contract(backend, cases, timeout=5) if backend.rank == 0 else None

    report = run_ranks(2, leave)[0]
    assert report is not None
    assert "RankLost" in (report.stopped or "")
    assert not report.is_clean


# -- backends that are broken on purpose -----------------------------------------------------------


class Tampered(SimulatedBackend):
    """A backend that does something wrong, where Python sees it; by itself it changes nothing."""

    _has_fast_path = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for name in ("send", "recv", "sendrecv", "isend", "irecv", "isendrecv", "exchange"):
            setattr(self, f"_fast_{name}", None)

    def local_reduce(
        self,
        running: RunningCall,
        source: Buffer,
        target: Buffer,
        local_reduce: Callable[[list[Any]], None],
    ) -> None:
        """Gather all inputs and reduce them in a way of one's own."""
        everything = Buffer.empty(source.dtype, (self.world_size, source.count))
        super()._run_collective(running, Kind.ALL_GATHER, source, everything, NO_ARGS)
        size = source.nbytes
        local_reduce([everything.memory[rank * size :][:size] for rank in range(self.world_size)])


Find = Callable[..., list[Failure]]


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch) -> Find:
    """Run cases on three ranks of a backend and return what all ranks found."""

    def find(
        cases: Iterable[Case],
        backend: type[SimulatedBackend] = SimulatedBackend,
        timeout: float = 20,
    ) -> list[Failure]:
        monkeypatch.setattr("ferrodist.testing.ranks.SimulatedBackend", backend)
        chosen = list(cases)
        assert chosen
        reports = run_ranks(3, lambda backend: run_contract(backend, chosen, timeout=timeout))
        return [failure for report in reports for failure in report.failures]

    return find


def scenario(check: str, detail: str) -> list[Case]:
    """Pick the cases of three ranks that run one scenario."""
    return [case for case in cases_of(3) if (case.check, case.detail) == (check, detail)]


def plain(function: str, **options: Any) -> list[Case]:
    """Make cases with arrays of every dtype and, for reductions, every operation."""
    if function not in ("allreduce", "reduce", "reduce_scatter"):
        return [Case(function, shape=(7,), dtype=dtype, **options) for dtype in DTYPES]
    every = [(dtype, op) for dtype in DTYPES for op in legal_ops(dtype)]
    return [Case(function, shape=(7,), dtype=dtype, op=op, **options) for dtype, op in every]


class SwapsBlocks(Tampered):
    def _run_collective(
        self, running: RunningCall, kind: Kind, source: Any, target: Any, args: CollectiveArgs
    ) -> None:
        super()._run_collective(running, kind, source, target, args)
        if kind is Kind.ALL_GATHER and target.nbytes:
            size = target.nbytes // self.world_size
            first, second = bytes(target.memory[:size]), bytes(target.memory[size : 2 * size])
            target.memory[: 2 * size] = second + first


def test_swapped_blocks_are_found(find: Find) -> None:
    cases = plain("all_gather")
    failed = find(cases, SwapsBlocks)
    assert {failure.case for failure in failed} == set(cases)


class ForgetsToDivide(Tampered):
    def _run_collective(
        self, running: RunningCall, kind: Kind, source: Any, target: Any, args: CollectiveArgs
    ) -> None:
        if args.op is ReduceOp.MEAN:
            args = args._replace(op=ReduceOp.SUM)
        super()._run_collective(running, kind, source, target, args)


def test_missing_division_is_found_in_means_alone(find: Find) -> None:
    failed = find(plain("allreduce"), ForgetsToDivide)
    assert {failure.case.op for failure in failed} == {"MEAN"}


class FoldsBackwards(Tampered):
    def _run_collective(
        self, running: RunningCall, kind: Kind, source: Any, target: Any, args: CollectiveArgs
    ) -> None:
        if kind is not Kind.ALLREDUCE:
            return super()._run_collective(running, kind, source, target, args)

        def local_reduce(operands: list[Any]) -> None:
            backwards = operands[::-1]
            _native.local_reduce(source.dtype, args.op, target.memory, backwards, self.world_size)

        return self.local_reduce(running, source, target, local_reduce)


def test_fold_in_another_order_is_found_where_the_order_shows(find: Find) -> None:
    failed = find(plain("allreduce"), FoldsBackwards)
    assert {failure.case.op for failure in failed} == {"SUM", "MEAN", "PROD"}
    assert all(failure.case.dtype.startswith(("float", "bf", "c")) for failure in failed)


class RoundsEveryTime(Tampered):
    def _run_collective(
        self, running: RunningCall, kind: Kind, source: Any, target: Any, args: CollectiveArgs
    ) -> None:
        if kind is not Kind.ALLREDUCE or not source.dtype.is_half:
            return super()._run_collective(running, kind, source, target, args)

        def local_reduce(operands: list[Any]) -> None:
            target.memory[:] = operands[0]
            for operand in operands[1:]:
                _native.local_reduce(
                    source.dtype, ReduceOp.SUM, target.memory, [target.memory, operand]
                )

        return self.local_reduce(running, source, target, local_reduce)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_second_rounding_of_16_bit_floats_is_found(find: Find, dtype: str) -> None:
    assert find([Case("allreduce", shape=(7,), dtype=dtype, op="SUM")], RoundsEveryTime)


class StartsFromZero(Tampered):
    def _run_collective(
        self, running: RunningCall, kind: Kind, source: Any, target: Any, args: CollectiveArgs
    ) -> None:
        super()._run_collective(running, kind, source, target, args)
        if kind is Kind.ALLREDUCE and source.dtype is DType.FLOAT32:
            array = np.frombuffer(target.memory, np.float32)
            array += np.float32(0.0)


def test_fold_that_loses_the_sign_of_zero_is_found(find: Find) -> None:
    cases = [Case("allreduce", shape=(7,), op="SUM", values="special")]
    assert find(cases, StartsFromZero)
    assert not find(cases)


class TrustsTheLastRankLess(Tampered):
    def _run_collective(
        self, running: RunningCall, kind: Kind, source: Any, target: Any, args: CollectiveArgs
    ) -> None:
        super()._run_collective(running, kind, source, target, args)
        if kind is Kind.ALLREDUCE and self.rank == self.world_size - 1 and target.nbytes:
            array = np.frombuffer(target.memory, np.float64)
            array[0] = np.nextafter(array[0], 0.0)


def test_bits_that_differ_between_ranks_within_the_bound_are_found(find: Find) -> None:
    case = Case(
        "allreduce", shape=(7,), dtype="float64", op="SUM", algorithm="ring", in_order=False
    )
    failed = find([case], TrustsTheLastRankLess)
    assert {failure.text for failure in failed} == {"ranks do not hold the same bits"}


class TakesAnotherRoot(Tampered):
    def _run_collective(
        self, running: RunningCall, kind: Kind, source: Any, target: Any, args: CollectiveArgs
    ) -> None:
        if kind in (Kind.BROADCAST, Kind.REDUCE) and not args.in_place:
            args = args._replace(root=(args.root + 1) % self.world_size)
        super()._run_collective(running, kind, source, target, args)


def test_wrong_root_is_found(find: Find) -> None:
    cases = plain("broadcast", root=1)
    failed = find(cases, TakesAnotherRoot)
    assert {failure.case for failure in failed} == set(cases)


class SkipsBarriers(Tampered):
    def _run_collective(
        self, running: RunningCall, kind: Kind, source: Any, target: Any, args: CollectiveArgs
    ) -> None:
        if kind is not Kind.BARRIER:
            super()._run_collective(running, kind, source, target, args)


def test_barrier_that_does_not_wait_is_found(find: Find) -> None:
    assert find([Case("barrier", "synchronised", "late_other")], SkipsBarriers)


class IgnoresTags(Tampered):
    def _send(self, source: Any, peer: int, tag: int, deadline: Any) -> None:
        super()._send(source, peer, 0, deadline)

    def _recv(self, receive: Any, deadline: Any) -> Any:
        return super()._recv(receive._replace(tag=0), deadline)


def test_ignored_tags_are_found(find: Find) -> None:
    (failure,) = find(scenario("message", "crossing_tags"), IgnoresTags)
    sent, wanted = (3, 1, 2**31 - 1, 0), (0, 1, 3, 2**31 - 1)
    swapped = [
        f"{got}, expected {tag}" for got, tag in zip(sent, wanted, strict=True) if got != tag
    ]
    assert [line.rpartition(": ")[2] for line in failure.text.splitlines()] == swapped


def test_all_ranks_may_send_the_array_of_a_ring_before_one_receives() -> None:
    """Whichever dtypes are there: their number picks the shapes, and ml_dtypes brings one."""
    for dtype in DTYPES:
        sizes = [math.prod(ring_shape(number, dtype)) for number in range(5)]
        largest = max(sizes) * DTYPES_BY_LABEL[dtype].itemsize
        assert 4000 < largest <= 64 * 1024, (dtype, sizes)
    rings = [case for case in cases_of(3) if case.detail in RINGS]
    assert rings
    for case in rings:
        assert math.prod(case.shape) * DTYPES_BY_LABEL[case.dtype].itemsize <= 64 * 1024


class SortsMembers(SimulatedBackend):
    def split(self, ranks: Sequence[int], **options: Any) -> Any:
        return super().split(sorted(ranks), **options)


def test_sub_group_in_another_order_is_found(find: Find) -> None:
    assert find(scenario("group", "reordered"), SortsMembers)
    assert not find(scenario("group", "halves"), SortsMembers)


def replace_allreduce(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Callable[..., Any], Any, Any, Any], Any]
) -> None:
    right = ferrodist.allreduce
    monkeypatch.setattr(
        ferrodist, "allreduce", lambda x, backend, **options: wrong(right, x, backend, options)
    )


def test_input_that_is_overwritten_and_returned_is_found(
    find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    def return_input(right: Any, x: Any, backend: Any, options: Any) -> Any:
        if not isinstance(x, np.ndarray) or not x.flags.writeable:
            return right(x, backend, **options)
        x[...] = right(x, backend, **options)
        return x

    replace_allreduce(monkeypatch, return_input)
    texts = " ".join(failure.text for failure in find(plain("allreduce")))
    assert "the input afterwards" in texts
    assert "shares memory" in texts


def test_out_that_is_not_written_is_found(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget_out(right: Any, x: Any, backend: Any, options: Any) -> Any:
        out = options.pop("out", None)
        result = right(x, backend, **options)
        return result if out is None else out

    replace_allreduce(monkeypatch, forget_out)
    cases = plain("allreduce", style="out")
    assert {failure.case for failure in find(cases)} >= {c for c in cases if c.dtype != "bool"}
    assert not find(plain("allreduce"))


def test_array_of_another_kind_is_found(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    def give_numpy(right: Any, x: Any, backend: Any, options: Any) -> Any:
        return np.asarray(right(x, backend, **options))

    replace_allreduce(monkeypatch, give_numpy)
    failed = find([Case("allreduce", op="SUM", library="scalar")])
    assert all("expected scalar" in failure.text for failure in failed)
    assert failed


def test_unchecked_fingerprints_are_found(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Call, "fingerprint", lambda self, **_: 1)
    cases = scenario("mismatch", "allreduce: op") + scenario("mismatch", "reproducible")
    failed = find(cases, Tampered)
    assert {failure.case for failure in failed} == set(cases)
    assert "expected CollectiveMismatch" in failed[0].text


def test_operations_that_are_not_refused_are_found(
    find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Request, "check_op", lambda *arguments: None)
    assert find([Case("allreduce", "refused", dtype="float32", op="BXOR")])


def test_rank_that_fails_alone_does_not_derail_the_others(
    find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_float16(right: Any, x: Any, backend: Any, options: Any) -> Any:
        if backend.rank == 1 and getattr(x, "dtype", None) == np.float16:
            raise InvalidArgument("rank 1 takes no float16")
        return right(x, backend, **options)

    replace_allreduce(monkeypatch, refuse_float16)
    cases = plain("allreduce") + plain("broadcast")
    failed = find(cases)
    refused = {case for case in cases if case.function == "allreduce" and case.dtype == "float16"}
    assert {failure.case for failure in failed} == refused
    assert len(failed) == len(refused)  # once each: on rank 1, nothing is held against the others
    last = Case("allreduce", shape=(7,), dtype="float16", op="SUM")
    assert [failure.case for failure in find([last])] == [last]
