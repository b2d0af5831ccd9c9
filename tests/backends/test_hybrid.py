"""HybridBackend: the contract, the bits of its results, and that both levels are really used.

The hosts are pretended: all ranks are processes of this machine, and are told that they are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist.testing import contract_cases, distinct_values, run_contract, run_ranks
from ferrodist.testing.contract.inputs import local_reduce, reduce_bound
from ferrodist.testing.contract.values import (
    HALVES,
    available_dtypes,
    numpy_dtype,
)
from reductions import reductions

pytestmark = pytest.mark.timeout(100)

SEED = 0
MEGABYTE = 1 << 20
TWO_AND_TWO, TWO_AND_ONE = "0011", "001"
SLOW_HOSTS = {
    "two and one": TWO_AND_ONE,
    "two and two": TWO_AND_TWO,
    "three and two": "00011",
    "one and three": "0111",
    "interleaved": "0101",
    "three hosts": "01122",
    "mixed": "012210",
    "all on one": "000",
    "each on its own": "012",
}


# -- the contract ----------------------------------------------------------------------------------


def check_contract(
    start_hybrid_job: Any,
    hosts: str,
    libraries: Sequence[str] | None = None,
    part: slice = slice(None),
    **settings: str,
) -> None:
    def body(backend, pipe):
        assert type(backend).__name__ == "HybridBackend"
        cases = contract_cases(backend.world_size, SEED, in_order=False, libraries=libraries)
        return run_contract(backend, cases[part])

    with start_hybrid_job(hosts, body, **settings) as job:
        reports = [rank.hear(380) for rank in job]
    assert all(end.error is None for end in reports), reports
    texts = [str(end.result) for end in reports if not end.result.is_clean]
    assert not texts, "\n".join(texts)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [TWO_AND_ONE, TWO_AND_TWO])
def test_hybrid_backend_keeps_the_contract(start_hybrid_job, hosts):
    """Each of the two with every other case; the next test has them all."""
    part = slice(int(hosts == TWO_AND_TWO), None, 2)
    check_contract(start_hybrid_job, hosts, ["numpy"], part)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("hosts", SLOW_HOSTS.values(), ids=SLOW_HOSTS)
def test_hybrid_backend_keeps_the_contract_wherever_ranks_are(start_hybrid_job, hosts):
    check_contract(start_hybrid_job, hosts)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
def test_hybrid_backend_keeps_the_contract_over_tls(start_hybrid_job):
    pytest.importorskip("cryptography", reason="TLS needs the package cryptography")
    check_contract(start_hybrid_job, TWO_AND_TWO, ["numpy"], FERRODIST_TLS="1")


# -- where ranks are -------------------------------------------------------------------------------


def test_a_rank_knows_its_place_on_its_host(start_hybrid_job):
    def body(backend, pipe):
        evens = backend.split([2, 0]) if backend.rank in (0, 2) else None
        inner = None if evens is None else (evens.local_rank, evens.local_world_size)
        return backend.local_rank, backend.local_world_size, backend.host_map.hosts, inner

    with start_hybrid_job("abaa", body) as job:
        results = job.results()
    hosts = ((0, 2, 3), (1,))
    assert results == [
        (0, 3, hosts, (1, 2)),
        (0, 1, hosts, None),
        (1, 3, hosts, (0, 2)),
        (2, 3, hosts, None),
    ]


# -- bits ------------------------------------------------------------------------------------------

SMALL, LARGE = 48, 100_000  # bytes: for node leaders, for rails


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "nbytes"), [(TWO_AND_TWO, SMALL), (TWO_AND_TWO, LARGE), ("010", LARGE)]
)
def test_reproducible_results_have_the_bits_of_the_simulated_backend(
    start_hybrid_job, hosts, nbytes
):
    def body(backend, pipe):
        return reductions(backend, nbytes, reproducible=True)

    with start_hybrid_job(hosts, body) as job:
        found = job.results()
    assert found == run_ranks(len(hosts), lambda backend: reductions(backend, nbytes))


def test_the_setting_for_reproducible_results_is_heeded(start_hybrid_job):
    with start_hybrid_job(
        TWO_AND_TWO, lambda backend, pipe: reductions(backend, SMALL), FERRODIST_REPRODUCIBLE="1"
    ) as job:
        found = job.results()
    assert found == run_ranks(4, lambda backend: reductions(backend, SMALL))


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [TWO_AND_TWO, TWO_AND_ONE])
def test_results_are_the_same_on_all_ranks_and_in_every_run(start_hybrid_job, hosts):
    def body(backend, pipe):
        return [reductions(backend, nbytes) for nbytes in (SMALL, LARGE)]

    runs = []
    for _ in range(2):
        with start_hybrid_job(hosts, body) as job:
            runs.append(job.results())
    assert runs[0] == runs[1]
    for found in zip(*runs[0], strict=True):  # each rank's, of one size
        shared = [{k: v for k, v in one.items() if k[0] == "allreduce"} for one in found]
        assert all(one == shared[0] for one in shared)


@pytest.mark.parametrize("function", ["allreduce", "reduce", "reduce_scatter"])
@pytest.mark.parametrize("hosts", [TWO_AND_TWO, TWO_AND_ONE])
def test_sums_of_16_bit_floats_are_rounded_once(start_hybrid_job, hosts, function):
    """Each contribution is below half a step of the first: rounded on the way, all are lost."""
    dtypes = [dtype for dtype in HALVES if dtype in available_dtypes()]
    world = len(hosts)

    def body(backend, pipe):
        found = []
        for dtype in dtypes:
            eps = float(np.finfo(np.float16).eps) if dtype == "float16" else 2.0**-7
            for count in (world, 60_000):
                x = np.full(count, 1.0 if backend.rank == 0 else 0.4 * eps).astype(
                    numpy_dtype(dtype)
                )
                got = getattr(ferrodist, function)(x, backend)
                if got is not None:
                    found.append((dtype, set(got.astype(np.float64).tolist())))
        return found

    with start_hybrid_job(hosts, body) as job:
        results = job.results()
    for found in results[:1] if function == "reduce" else results:
        for dtype, values in found:
            eps = float(np.finfo(np.float16).eps) if dtype == "float16" else 2.0**-7
            small = np.float32(np.array(0.4 * eps).astype(numpy_dtype(dtype)))
            parts = [np.float32(1.0)] + [small] * (world - 1)
            once = np.array(sum(parts)).astype(numpy_dtype(dtype)).astype(np.float64)
            assert once > 1
            assert values == {float(once)}


EDGES = [0, 1, 3, 1023, 16_383, 16_384, 16_385, 16_387, 32_768, 65_537]  # floats, about rails


@pytest.mark.parametrize("hosts", [TWO_AND_TWO, "0101", "010"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_arrays_of_any_length_are_cut_and_joined_rightly(start_hybrid_job, hosts, dtype):
    """Around the sizes at which an array is cut: for rails, in segments, in pieces."""
    settings = {"FERRODIST_MESSAGE_NBYTES": "4096", "FERRODIST_CHUNK_NBYTES": "131072"}
    world = len(hosts)

    def body(backend, pipe):
        for count in EDGES:
            inputs = [distinct_values(rank, (count,), dtype, seed=count) for rank in range(world)]
            for op in ("SUM", "MEAN", "MAX"):
                wanted = local_reduce(inputs, op)
                bound = reduce_bound(inputs, op, wanted)
                limit = 0.0 if bound is None else bound
                x = inputs[backend.rank].copy()
                for got in (
                    ferrodist.allreduce(x, backend, op),
                    ferrodist.allreduce(x, backend, op, out=x),
                ):
                    difference = np.abs(got.astype(np.float64) - wanted.astype(np.float64))
                    assert (difference <= limit).all(), (count, op)
        return True

    with start_hybrid_job(hosts, body, **settings) as job:
        assert job.results() == [True] * world


@pytest.mark.parametrize("hosts", ["0001", "01"])
def test_ranks_and_hosts_may_have_parts_of_very_different_sizes(start_hybrid_job, hosts):
    """What one side sends takes many more pieces than what it receives."""

    def body(backend, pipe):
        backend.timeout = 10
        rank, world, count = backend.rank, backend.world_size, 100_000
        whole = ferrodist.all_gather(np.full(count, rank), backend)
        assert (whole == np.repeat(np.arange(world), count)).all()
        for largest in range(world):
            counts = [count if other == largest else 1 for other in range(world)]
            whole = ferrodist.all_gather_uneven(np.full(counts[rank], rank), backend)
            assert (whole == np.repeat(np.arange(world), counts)).all()
            sends = [count if other == largest else 0 for other in range(world)]
            got, _ = ferrodist.all_to_all_uneven(np.full(count, rank), sends, backend)
            assert len(got) == (world * count if rank == largest else 0)
        return True

    with start_hybrid_job(hosts, body, FERRODIST_MESSAGE_NBYTES="4096") as job:
        assert job.results() == [True] * len(hosts)


# -- two levels ------------------------------------------------------------------------------------


def sent_by(backend: Any, call: Any) -> int:
    """Return how many bytes this rank sends to others by TCP in a call, about."""
    ferrodist.barrier(backend)
    before = backend.statistics().sent_nbytes
    call()
    return int(backend.statistics().sent_nbytes - before)


def bytes_sent(start_hybrid_job: Any, hosts: str, call: Any, **environment: str) -> list[int]:
    """Return what each rank sends in the second of two calls: the first may have more to settle."""

    def body(backend, pipe):
        call(backend)
        found = sent_by(backend, lambda: call(backend))
        ferrodist.barrier(backend)
        return found

    with start_hybrid_job(hosts, body, **environment) as job:
        return list(job.results())


def is_about(found: int, nbytes: float) -> bool:
    """Tell whether so many bytes were sent, apart from headers and what goes on besides."""
    return nbytes <= found <= 1.02 * nbytes + 1000


def allreduce_of(nbytes: int, **options: Any) -> Any:
    return lambda backend: ferrodist.allreduce(np.ones(nbytes // 4, np.float32), backend, **options)


# What two levels save depends on what a link is taken to cost.
SLOW_LINK = {"FERRODIST_TCP_LINK": "1e-4,1e-8,1e-10,1e-5"}
FAST_LINK = {"FERRODIST_TCP_LINK": "1e-9,1e-13,1e-10,1e-9"}


@pytest.mark.parametrize("nbytes", [8, 4096, 40_000])
@pytest.mark.parametrize(
    ("hosts", "leaders"), [(TWO_AND_ONE, [0, 2]), (TWO_AND_TWO, [0, 2]), ("0101", [0, 1])]
)
def test_of_a_small_allreduce_one_rank_per_host_speaks(start_hybrid_job, hosts, leaders, nbytes):
    sent = bytes_sent(start_hybrid_job, hosts, allreduce_of(nbytes), **SLOW_LINK)
    for rank, found in enumerate(sent):
        assert is_about(found, nbytes if rank in leaders else 0), sent


@pytest.mark.parametrize("settings", [{}, SLOW_LINK], ids=["default", "slow link"])
@pytest.mark.parametrize("hosts", [TWO_AND_TWO, "0101", TWO_AND_ONE])
def test_a_large_allreduce_sends_one_contribution_per_host(start_hybrid_job, hosts, settings):
    """Equal hosts cut it among their ranks; of others one rank speaks."""
    nbytes = 8 * MEGABYTE
    sent = bytes_sent(start_hybrid_job, hosts, allreduce_of(nbytes), **settings)
    wanted = [nbytes, 0, nbytes] if hosts == TWO_AND_ONE else [nbytes / 2] * 4
    for found, one in zip(sent, wanted, strict=True):
        assert is_about(found, one), sent


ROW = MEGABYTE // 8
OTHERS = {
    "barrier": (ferrodist.barrier, [0, 0, 0, 0]),
    "broadcast": (lambda b: ferrodist.broadcast(np.ones(ROW, np.uint8), b, 1), [0, ROW, 0, 0]),
    "reduce": (lambda b: ferrodist.reduce(np.ones(ROW, np.uint8), b, 1), [0, ROW / 2, ROW, 0]),
    "all_gather": (
        lambda b: ferrodist.all_gather(np.ones(ROW, np.uint8), b),
        [2 * ROW, 0, 2 * ROW, 0],
    ),
    "reduce_scatter": (
        lambda b: ferrodist.reduce_scatter(np.ones((4, ROW), np.uint8), b),
        [2 * ROW, 0, 2 * ROW, 0],
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_collectives_cross_between_hosts_once(start_hybrid_job, name):
    """Each host hears once what it lacks; a root that is not the lowest rank speaks for its own."""
    call, wanted = OTHERS[name]
    sent = bytes_sent(start_hybrid_job, TWO_AND_TWO, call, **SLOW_LINK)
    for found, nbytes in zip(sent, wanted, strict=True):
        assert is_about(found, nbytes), sent


FLAT = {
    "named": ({"algorithm": "ring"}, SLOW_LINK),
    "reproducible": ({"reproducible": True}, SLOW_LINK),
    "nothing is saved": ({}, FAST_LINK),
}


@pytest.mark.parametrize("how", FLAT)
def test_what_has_no_two_levels_or_saves_nothing_goes_between_all_ranks(start_hybrid_job, how):
    options, settings = FLAT[how]
    sent = bytes_sent(start_hybrid_job, TWO_AND_TWO, allreduce_of(MEGABYTE, **options), **settings)
    assert all(is_about(found, 1.5 * MEGABYTE) for found in sent), sent


@pytest.mark.parametrize("hosts", [TWO_AND_TWO, TWO_AND_ONE])
def test_arrays_in_shared_memory_are_taken_as_they_are(start_hybrid_job, hosts):
    def body(backend, pipe):
        found = []
        for count in (5, 300_000):
            x, out = backend.empty(count, "float32"), backend.zeros(count, "float32")
            x[:] = backend.rank + 1
            assert ferrodist.allreduce(x, backend, out=out) is out
            y = ferrodist.broadcast(x, backend, backend.world_size - 1)
            assert ferrodist.allreduce(x, backend, "max", out=x) is x
            found.append([set(a.tolist()) for a in (out, y, x)])
        return found

    world = len(hosts)
    with start_hybrid_job(hosts, body) as job:
        total = float(world * (world + 1) // 2)
        assert job.results() == [[[{total}, {float(world)}, {float(world)}]] * 2] * world
