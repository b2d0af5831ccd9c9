"""The native executor and the one in Python: the same pieces and results, no byte twice.

A *trace* lists the pieces of collectives that a rank has sent and received.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist.schedules import Kind, known
from ferrodist.testing import distinct_values
from jobs import SMALL_PIECES

pytestmark = pytest.mark.timeout(100)

PIECE, SEGMENT = (int(SMALL_PIECES[f"FERRODIST_{name}_NBYTES"]) for name in ("MESSAGE", "CHUNK"))
NAMED = [(kind, schedule.name) for kind in Kind for schedule in known(kind)]
# Elements of four bytes for each rank: none, one, a bit more than a piece and than some segments.
SIZES = [0, 1, PIECE // 4 + 1, 3 * SEGMENT // 4 + 7]

Trace = list[tuple[bool, int, int, int]]  # is_sent, peer, sequence, nbytes


def make_call(backend: Any, kind: Kind, algorithm: str, rows: int, dtype: str, number: int) -> Any:
    """Make one call of a kind; the arrays of all ranks together have about ``rows`` * world."""
    world, rank = backend.world_size, backend.rank
    root = number % world
    options: dict[str, Any] = {"algorithm": algorithm}
    if kind is Kind.BARRIER:
        return ferrodist.barrier(backend)
    if kind.is_rooted:
        options["root"] = root
    count = rows * world if kind.is_cut_by_rank and kind is not Kind.ALL_GATHER else rows
    x = distinct_values(rank, (count,), dtype, seed=number)
    if kind is Kind.SCATTER:
        x = x if rank == root else x[: count // world]
    return getattr(ferrodist, kind.label)(x, backend, **options)


def digest(x: Any) -> str:
    return "" if x is None else hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()


def trace_of(backend: Any, call: Any) -> tuple[Trace, str]:
    """Make a call; return its pieces and a digest of its result."""
    backend.world.start_trace()
    result = call()
    return backend.world.stop_trace(), digest(result)


def traced_calls(backend: Any) -> dict[Any, tuple[Trace, str]]:
    """Make every kind of call with every algorithm, in several sizes."""
    found = {}
    for number, (kind, algorithm) in enumerate(NAMED):
        for rows in SIZES:
            for dtype in ("float32", "float16"):  # of which unfinished sums travel as float32
                key = kind.label, algorithm, rows, dtype
                found[key] = trace_of(
                    backend,
                    lambda k=kind, a=algorithm, r=rows, d=dtype, n=number: make_call(
                        backend, k, a, r, d, n
                    ),
                )
    return found | uneven_and_chosen_calls(backend)


def uneven_and_chosen_calls(backend: Any) -> dict[Any, tuple[Trace, str]]:
    """Make calls that say no algorithm, in place and with parts of every length."""
    rank, world = backend.rank, backend.world_size
    x = distinct_values(rank, (SEGMENT // 2 + 5,), "float64", seed=1)
    uneven = distinct_values(rank, (PIECE * rank + 3,), "int8", seed=2)
    counts = [(PIECE + 5) * (peer == (rank + 1) % world) + rank for peer in range(world)]
    blocks = distinct_values(rank, (sum(counts),), "int16", seed=3)
    out = x.copy()
    calls = {
        "allreduce": lambda: ferrodist.allreduce(x, backend),
        "in order": lambda: ferrodist.allreduce(x, backend, reproducible=True),
        "in place": lambda: ferrodist.allreduce(out, backend, "max", out=out),
        "mean": lambda: ferrodist.reduce(x, backend, world - 1, "mean"),
        "all_gather_uneven": lambda: ferrodist.all_gather_uneven(uneven, backend),
        "all_to_all_uneven": lambda: ferrodist.all_to_all_uneven(blocks, counts, backend)[0],
        "tree": lambda: ferrodist.allreduce({"a": x, "b": x[:3]}, backend)["a"],
    }
    return {name: trace_of(backend, call) for name, call in calls.items()}


def by_direction_and_peer(trace: Trace) -> dict[tuple[bool, int], list[tuple[int, int]]]:
    """Sort pieces by whom they went to or came from; among those their order is fixed."""
    found: dict[tuple[bool, int], list[tuple[int, int]]] = {}
    for is_sent, peer, sequence, nbytes in trace:
        found.setdefault((is_sent, peer), []).append((sequence, nbytes))
    return found


@pytest.mark.parametrize("world", [2, 3, 5])
def test_both_walkers_send_the_same_pieces_and_come_to_the_same_bits(start_tcp_job, world):
    results = []
    for executor in ("native", "python"):
        environment = {"FERRODIST_EXECUTOR": executor, **SMALL_PIECES}
        with start_tcp_job(
            world, lambda backend, pipe: traced_calls(backend), **environment
        ) as job:
            results.append(job.results())
    for rank, (native, reference) in enumerate(zip(*results, strict=True)):
        assert native.keys() == reference.keys()
        assert len(native) > 150
        for key, (pieces, bits) in native.items():
            expected, expected_bits = reference[key]
            assert by_direction_and_peer(pieces) == by_direction_and_peer(expected), (rank, key)
            assert bits == expected_bits, (rank, key)


@pytest.mark.parametrize("executor", ["native", "python"])
def test_what_one_rank_sends_is_what_the_other_receives_in_pieces_of_the_size_set(
    start_tcp_job, executor
):
    """Looks at the traces themselves: of empty ones any two would be the same."""
    world = 3
    environment = {"FERRODIST_EXECUTOR": executor, **SMALL_PIECES}
    with start_tcp_job(world, lambda backend, pipe: traced_calls(backend), **environment) as job:
        results = job.results()
    for key in results[0]:
        pieces = [by_direction_and_peer(result[key][0]) for result in results]
        for rank in range(world):
            for peer in set(range(world)) - {rank}:
                sent = pieces[rank].get((True, peer), [])
                assert sent == pieces[peer].get((False, rank), []), (key, rank, peer)
                assert all(nbytes <= PIECE for _, nbytes in sent)
        assert any(pieces), key
    large = results[0]["allreduce", "ring", SIZES[-1], "float32"][0]
    assert sum(nbytes for is_sent, _, _, nbytes in large if is_sent) == pytest.approx(
        2 * 2 / 3 * 4 * SIZES[-1], rel=0.01
    )
    assert len(large) > 2 * 2 * 2 / 3 * 4 * SIZES[-1] / PIECE


@pytest.mark.parametrize("world", [2, 3, 5])
def test_a_large_allreduce_sends_no_more_than_it_must(start_tcp_job, world):
    """Each rank sends the others' parts once, and then its own part of the result to all."""

    def body(backend, pipe):
        x = np.ones(world << 18, np.float32)
        found = []
        for _ in range(2):
            ferrodist.barrier(backend)
            found.append(backend.statistics())
            ferrodist.barrier(backend)  # nothing comes of the next call before all have counted
            ferrodist.allreduce(x, backend)
        before, after = found
        sent = after.sent_nbytes - before.sent_nbytes
        return sent, after.received_nbytes - before.received_nbytes, x.nbytes

    with start_tcp_job(world, body) as job:
        for sent, received, nbytes in job.results():
            least = 2 * (world - 1) / world * nbytes
            for moved in (sent, received):
                assert least <= moved < 1.005 * least + 10_000


def test_a_small_allreduce_sends_few_and_short_messages(start_tcp_job):
    """What is counted is what travels: 24 bytes with a header each, to few others."""

    def body(backend, pipe):
        x = np.ones(3)
        ferrodist.allreduce(x, backend)
        before = backend.statistics().sent_nbytes
        for _ in range(50):
            ferrodist.allreduce(x, backend)
        return (backend.statistics().sent_nbytes - before) / 50

    with start_tcp_job(2, body) as job:
        for nbytes in job.results():
            assert 24 < nbytes <= 2 * (24 + 72)


def test_a_wide_plan_kept_for_later_calls_is_not_mistaken_for_another(start_tcp_job):
    """More different calls than plans are kept: some are made anew, and all are right."""

    def body(backend, pipe):
        wrong = []
        for turn in range(2):
            for count in range(1, 400):
                x = np.full(count, backend.rank + turn, np.float16 if count % 2 else np.int32)
                total = ferrodist.allreduce(x, backend)
                if total.shape != x.shape or (total != 3 + 3 * turn).any():
                    wrong.append((turn, count))
        return wrong

    with start_tcp_job(3, body) as job:
        assert job.results() == [[], [], []]
