"""The backend contract on ranks that TCP connects, and the bits of the simulated backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

import ferrodist
from ferrodist.testing import contract_cases, distinct_values, run_contract, run_ranks
from jobs import SMALL_PIECES
from reductions import digest_without_nan_payloads, reductions
from test_contract_paths import calls_on

pytestmark = pytest.mark.timeout(100)

SEED = 0
LONG = 390.0  # seconds
slow = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(400)]
PYTHON = {"FERRODIST_EXECUTOR": "python"}


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


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 3])
def test_tcp_backend_keeps_the_contract(start_tcp_job, world):
    """All backends convert arrays of other libraries alike: in the slow part."""
    keep_contract(start_tcp_job, world, ["numpy"], {})


@pytest.mark.slow
def test_tcp_backend_keeps_the_contract_with_the_executor_in_python(start_tcp_job):
    keep_contract(start_tcp_job, 2, ["numpy"], PYTHON, every=2)


@pytest.mark.parametrize("world", [pytest.param(world, marks=slow) for world in (1, 2, 3, 4, 5, 8)])
@pytest.mark.parametrize("executor", ["native", "python"])
def test_tcp_backend_keeps_the_whole_contract(start_tcp_job, world, executor):
    keep_contract(start_tcp_job, world, None, {"FERRODIST_EXECUTOR": executor})


@pytest.mark.parametrize("executor", ["native", "python"])
@pytest.mark.parametrize("world", [pytest.param(world, marks=slow) for world in (2, 3, 5)])
def test_tcp_backend_keeps_the_contract_in_small_pieces(start_tcp_job, world, executor):
    environment = {"FERRODIST_EXECUTOR": executor, **SMALL_PIECES}
    keep_contract(start_tcp_job, world, ["numpy"], environment)


# -- the same bits as the simulated backend --------------------------------------------------------


in_order = functools.partial(reductions, reproducible=True)


@pytest.fixture(scope="module")
def simulated_reductions() -> Callable[[int], list[dict[Any, str]]]:
    """Give what the simulated backend makes of the same arrays; each size is done once."""
    found: dict[int, Any] = {}

    def reduce_once(nbytes: int) -> list[dict[Any, str]]:
        if nbytes not in found:
            found[nbytes] = run_ranks(3, lambda backend: in_order(backend, nbytes))
        return found[nbytes]

    return reduce_once


@pytest.mark.parametrize(
    ("nbytes", "executor"), [(48, "native"), (300_000, "native"), (300_000, "python")]
)
def test_every_dtype_and_operation_has_the_bits_of_the_simulated_backend(
    start_tcp_job, simulated_reductions, nbytes, executor
):
    """Whatever the executor, and however the arrays are cut."""
    environment = {"FERRODIST_EXECUTOR": executor, "FERRODIST_MESSAGE_NBYTES": "65536"}
    with start_tcp_job(3, lambda backend, pipe: in_order(backend, nbytes), **environment) as job:
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


# -- executors -------------------------------------------------------------


def test_ranks_with_different_walkers_do_collectives_with_each_other(start_tcp_job):
    """The reference and the native executor send the same pieces, so they may be mixed by rank."""

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

    with start_tcp_job(3, body, **{"1:FERRODIST_EXECUTOR": "python"}, **SMALL_PIECES) as job:
        results = job.results()
    assert [wrong for wrong, _ in results] == [[], [], []]
    assert len({digest for _, digest in results}) == 1
