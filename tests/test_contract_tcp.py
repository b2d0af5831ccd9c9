"""The backend contract on ranks that TCP connects, and the fast path of calls held to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist.testing import contract_cases, distinct_values, run_contract, run_ranks
from ferrodist.testing.contract.dtypes import DTYPES, legal_ops, numpy_dtype
from tcp_jobs import SMALL_PIECES
from test_contract_shared_memory import (
    DIFFERENT,
    REFUSED,
    WAYS,
    calls_on,
    digest_without_nan_payloads,
    go,
    special_values,
    words_of_refusal,
)

pytest_plugins = ["tcp_jobs"]
pytestmark = pytest.mark.timeout(100)

SEED = 0
LONG = 390.0  # seconds
slow = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(400)]
PYTHON = {"FERRODIST_WALKER": "python"}


def keep_contract(
    start_tcp_job: Any, world: int, libraries: Any, environment: Any, every: int = 1
) -> None:
    """Run the contract suite on ranks that are processes, and expect nothing to be wrong.

    ``every`` is 2 for every other case of it.
    """

    def body(backend, pipe):
        assert type(backend).__name__ == "TcpBackend"
        cases = contract_cases(backend.world_size, SEED, in_order=False, libraries=libraries)
        if libraries is not None:  # that one takes every library there is, and seconds to import
            cases = [case for case in cases if case.detail != "libraries"]
        return run_contract(backend, cases[::every])

    with start_tcp_job(world, body, **environment) as job:
        reports = [rank.hear(LONG).result for rank in job]
    assert all(report.is_clean for report in reports), "\n".join(map(str, reports))
    assert all(report.num_cases * every > 2000 for report in reports)


@pytest.mark.parametrize("world", [2, 3])
def test_tcp_backend_keeps_the_contract(start_tcp_job, world):
    """Arrays of other libraries come through a door that all backends share: in the slow part."""
    keep_contract(start_tcp_job, world, ["numpy"], {})


def test_tcp_backend_keeps_the_contract_with_the_walker_in_python(start_tcp_job):
    keep_contract(start_tcp_job, 2, ["numpy"], PYTHON, every=2)


@pytest.mark.parametrize("world", [pytest.param(world, marks=slow) for world in (1, 2, 3, 4, 5, 8)])
@pytest.mark.parametrize("walker", ["native", "python"])
def test_tcp_backend_keeps_the_whole_contract(start_tcp_job, world, walker):
    keep_contract(start_tcp_job, world, None, {"FERRODIST_WALKER": walker})


@pytest.mark.parametrize("walker", ["native", "python"])
@pytest.mark.parametrize("world", [pytest.param(world, marks=slow) for world in (2, 3, 5)])
def test_tcp_backend_keeps_the_contract_in_small_pieces(start_tcp_job, world, walker):
    environment = {"FERRODIST_WALKER": walker, **SMALL_PIECES}
    keep_contract(start_tcp_job, world, ["numpy"], environment)


# -- the same bits as the simulated backend --------------------------------------------------------


def reductions(backend: Any, nbytes: int) -> dict[Any, str]:
    """Reduce arrays of every dtype with every operation, in rank order; return digests."""
    backend.reproducible = True
    found = {}
    for number, dtype in enumerate(DTYPES):
        count = nbytes // numpy_dtype(dtype).itemsize // 3 * 3
        for op in legal_ops(dtype):
            for values in special_values(dtype):
                x = distinct_values(backend.rank, (count,), dtype, seed=number, values=values)
                root = number % backend.world_size
                results = {
                    "allreduce": ferrodist.allreduce(x, backend, op),
                    "reduce_scatter": ferrodist.reduce_scatter(x, backend, op),
                    "reduce": ferrodist.reduce(x, backend, root, op),
                }
                for name, result in results.items():
                    if result is not None:
                        found[name, dtype, op, values] = digest_without_nan_payloads(result)
    return found


@pytest.fixture(scope="module")
def simulated_reductions() -> Callable[[int], list[dict[Any, str]]]:
    """Give what the simulated backend makes of the same arrays; each size is done once."""
    found: dict[int, Any] = {}

    def reduce_once(nbytes: int) -> list[dict[Any, str]]:
        if nbytes not in found:
            found[nbytes] = run_ranks(3, lambda backend: reductions(backend, nbytes))
        return found[nbytes]

    return reduce_once


@pytest.mark.parametrize(
    ("nbytes", "walker"), [(48, "native"), (300_000, "native"), (300_000, "python")]
)
def test_every_dtype_and_operation_has_the_bits_of_the_simulated_backend(
    start_tcp_job, simulated_reductions, nbytes, walker
):
    """Whatever the walker, and however the arrays are cut."""
    environment = {"FERRODIST_WALKER": walker, "FERRODIST_PIECE_NBYTES": "65536"}
    with start_tcp_job(3, lambda backend, pipe: reductions(backend, nbytes), **environment) as job:
        found = job.results()
    assert len(found[0]) > 150
    assert found == simulated_reductions(nbytes)


def test_without_that_the_bits_are_the_same_on_all_ranks_and_in_every_run(start_tcp_job):
    def body(backend, pipe):
        digests = []
        for count in (7, 3001, 100_003):
            for dtype in ("float32", "float16", "complex64"):
                x = distinct_values(backend.rank, (count,), dtype, seed=count)
                for _ in range(2):
                    total = ferrodist.allreduce(x, backend)
                    digests.append(digest_without_nan_payloads(total))
        return digests

    runs = []
    for _ in range(2):
        with start_tcp_job(3, body) as job:
            runs += job.results()
    assert all(run == runs[0] for run in runs)


# -- the fast path and the general one -------------------------------------------------------------


def ways_mixed(backend: Any) -> tuple[int, list[Any]]:
    """Make calls of every kind, each rank another way; list those that come to another result."""
    number, wrong = 0, []
    for dtype in sorted(set(DTYPES) - {"bfloat16"}):  # not NumPy's own: always the general way
        for name, shape, options in calls_on(dtype, backend.world_size):
            x = distinct_values(backend.rank, shape, dtype, seed=number)
            usual = go("general", name, backend, x, **options)  # from now on it can go short
            mixed = go(WAYS[(number + backend.rank) % 4], name, backend, x, **options)
            number += 1
            if type(usual) is not type(mixed) or not np.array_equal(usual, mixed):
                wrong.append((name, dtype, shape, options))
    go("general", "barrier", backend)
    for turn in range(len(WAYS)):  # a barrier is never asynchronous
        go(WAYS[(turn + backend.rank) % 3], "barrier", backend)
    return number, wrong


@pytest.mark.parametrize("reproducible", [False, True])
def test_both_ways_have_one_fingerprint_and_one_result_and_mix_between_ranks(
    start_tcp_job, reproducible
):
    """A rank goes each way in turn, beside ranks that go the others: a difference would show."""

    def body(backend, pipe):
        backend.reproducible = reproducible
        return ways_mixed(backend)

    with start_tcp_job(3, body) as job:
        for number, wrong in job.results():
            assert wrong == []
            assert number > 700


def test_ranks_with_different_walkers_do_collectives_with_each_other(start_tcp_job):
    """The reference and the native walker send the same pieces, so they may be mixed by rank."""

    def body(backend, pipe):
        assert (backend._call_path is None) == (backend.rank == 1)
        wrong = []
        for dtype in ("float16", "int64", "complex128"):
            for name, shape, options in calls_on(dtype, backend.world_size):
                x = distinct_values(backend.rank, shape, dtype, seed=len(shape))
                results = [
                    getattr(ferrodist, name)(x, backend, **options, reproducible=True)
                    for _ in range(2)
                ]
                digest = [None if one is None else one.tobytes() for one in results]
                if digest[0] != digest[1]:
                    wrong.append((name, shape, options))
        x = distinct_values(backend.rank, (3, 30_000), "float32", seed=1)
        total = ferrodist.allreduce(x, backend, reproducible=True)
        return wrong, digest_without_nan_payloads(total)

    with start_tcp_job(3, body, **{"1:FERRODIST_WALKER": "python"}, **SMALL_PIECES) as job:
        results = job.results()
    assert [wrong for wrong, _ in results] == [[], [], []]
    assert len({digest for _, digest in results}) == 1


def test_both_ways_write_to_out_in_place_and_to_parts(start_tcp_job):
    def body(backend, pipe):
        rank, world = backend.rank, backend.world_size
        found = []
        for turn in range(4):
            way = WAYS[(turn + rank) % 4]
            x = np.arange(6.0) + 10 * rank
            out = np.full(6, -1.0)
            go("general", "allreduce", backend, x)
            assert go(way, "allreduce", backend, x, out=out) is out
            way = way if way != "fast" else "plain"  # not every algorithm may work in place
            assert go(way, "allreduce", backend, x, out=x) is x
            parts = np.full((world, 2), float(rank))
            gathered = go(way, "all_gather", backend, parts[rank], out=parts.reshape(-1))
            assert gathered.base is parts
            found.append((out.tolist(), x.tolist(), parts.tolist()))
        return found

    total = (3 * np.arange(6.0) + 30).tolist()
    with start_tcp_job(3, body) as job:
        assert job.results() == [[(total, total, [[0.0] * 2, [1.0] * 2, [2.0] * 2])] * 4] * 3


def test_what_is_refused_is_refused_in_the_same_words_either_way(start_tcp_job):
    """The fast path declines what it does not take; it must not take what is refused."""

    def body(backend, pipe):
        refused = {}
        for name in ("allreduce", "broadcast", "reduce", "gather"):
            go("general", name, backend, np.ones(3))  # the fast path is open for such calls
        backend.timeout = 2
        for name, call in REFUSED.items() if backend.rank == 1 else ():
            refused[name] = [words_of_refusal(call, way, backend) for way in ("general", "plain")]
        return refused, ferrodist.allreduce(backend.rank, backend, timeout=30)

    with start_tcp_job(3, body) as job:
        (_, first), (refused, second), (_, third) = job.results()
    for name, (general, plain) in refused.items():
        assert general == plain, name
        assert not general.startswith("returned"), name
    assert [first, second, third] == [3, 3, 3]


def test_a_difference_is_told_in_the_same_words_either_way(start_tcp_job):
    def body(backend, pipe):
        found: dict[str, list[Any]] = {name: [] for name in DIFFERENT}
        for name, call in DIFFERENT.items():
            for is_odd in (True, False):
                call("general", backend, is_odd)
            for turn in range(5):
                way = WAYS[(turn + backend.rank) % 4] if turn < 4 else "fast"
                with pytest.raises(ferrodist.CollectiveMismatch) as caught:
                    call(way, backend, backend.rank == 2)
                text = str(caught.value).replace(f"#{caught.value.sequence}:", "#:")
                found[name].append((type(caught.value), text))
        assert ferrodist.allreduce(backend.rank, backend) == 3
        return found

    with start_tcp_job(3, body) as job:
        results = job.results()
    assert results[0] == results[1] == results[2]
    for name, texts in results[0].items():
        assert len(set(texts)) == 1, name
        assert "  rank 2  " in texts[0][1]
