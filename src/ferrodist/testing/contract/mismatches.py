# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checks ``mismatch`` and ``synchronised``: ranks call different things, or at different times.

In the first case all get the same error and the group goes on; in the second, none returns from a
collective before all have entered it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import ferrodist
from ferrodist import Backend, CollectiveMismatch, SizeMismatch
from ferrodist.testing.contract.case import Trial, describe_error
from ferrodist.testing.contract.inputs import COUNTED, ROOTED, SCATTERS
from ferrodist.testing.contract.objects import OBJECT_FUNCTIONS
from ferrodist.testing.contract.reductions import custom_of

Call = Callable[[Backend], object]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What most ranks call, what the odd one calls, and the error all must get."""

    usual: Call
    odd: Call
    error: type[CollectiveMismatch] = CollectiveMismatch
    needs_algorithms: bool = False


Mismatches = Iterator[tuple[str, Mismatch]]


def check_mismatch(trial: Trial) -> None:
    """Let the rank ``case.root`` differ; compare the errors of all ranks; see that all go on."""
    case, backend = trial.case, trial.backend
    mismatch = MISMATCHES[case.detail]
    attempt = mismatch.odd if trial.rank == case.root else mismatch.usual
    error = trial.expect_error(mismatch.error, lambda: attempt(backend))
    told = "nothing" if error is None else f"{describe_error(error)} #{error.sequence}"
    everybody = ferrodist.all_gather_object(told, backend)
    trial.expect(len(set(everybody)) == 1, f"ranks were told different things: {everybody}")
    if error is not None:
        trial.expect(isinstance(error.sequence, int), "the error must carry its sequence number")
        trial.expect_equal(error.this_rank, trial.rank, "this_rank")
        absent = [rank for rank in range(trial.world) if f"rank {rank}" not in str(error)]
        trial.expect(not absent, f"the error does not say what ranks {absent} called:\n{error}")
    trial.expect_in_step()


def _zeros(*shape: int, dtype: str = "float32") -> Any:
    return np.zeros(shape, dtype)


def _of(function: str, x: Any, **options: Any) -> Call:
    return lambda backend: getattr(ferrodist, function)(x, backend, **options)


def _rows(function: str, row: int, dtype: str = "float32", **options: Any) -> Call:
    """Call with as many rows as there are ranks, which every function can cut."""
    return lambda backend: getattr(ferrodist, function)(
        _zeros(backend.world_size, row, dtype=dtype), backend, **options
    )


def _sizes_and_dtypes() -> Mismatches:
    for function in (
        "allreduce",
        "broadcast",
        "reduce",
        "all_gather",
        "gather",
        "reduce_scatter",
        "scan",
        "all_to_all",
        "all_gather_uneven",
        "gather_uneven",
    ):
        usual = _rows(function, 3)
        yield f"{function}: shape", Mismatch(usual, _rows(function, 4), SizeMismatch)
        yield f"{function}: zero size", Mismatch(_rows(function, 0), usual, SizeMismatch)
        yield f"{function}: dtype", Mismatch(usual, _rows(function, 3, "float64"))
        yield f"{function}: dtype of one width", Mismatch(usual, _rows(function, 3, "int32"))


def _shapes() -> Mismatches:
    for name, shape, other in (
        ("same count", (2, 3), (3, 2)),
        ("one more axis", (4,), (4, 1)),
        ("number and array", (), (1,)),
        ("zero-size shapes", (0, 3), (0, 4)),
        ("large", (100_000,), (100_001,)),
    ):
        usual, odd = _of("allreduce", _zeros(*shape)), _of("allreduce", _zeros(*other))
        yield f"allreduce: {name}", Mismatch(usual, odd, SizeMismatch)


def _kinds() -> Mismatches:
    for first, second in (
        ("allreduce", "broadcast"),
        ("allreduce", "all_gather"),
        ("all_gather", "all_gather_uneven"),
        ("reduce", "gather"),
        ("all_to_all", "reduce_scatter"),
        ("scan", "exscan"),
        ("scan", "allreduce"),
        ("broadcast_object", "all_gather_object"),
        ("gather_object", "allreduce"),
    ):
        yield f"{first} and {second}", Mismatch(_rows(first, 3), _rows(second, 3))
    yield "barrier and allreduce", Mismatch(ferrodist.barrier, _of("allreduce", 1))
    yield "allreduce and barrier", Mismatch(_of("allreduce", _zeros(5)), ferrodist.barrier)


def _options() -> Mismatches:
    for function in ("allreduce", "reduce", "reduce_scatter"):
        usual, odd = (_rows(function, 3, op=op) for op in ("sum", "mean"))
        yield f"{function}: op", Mismatch(usual, odd)
    for function in ("broadcast", "reduce", "gather", "broadcast_object", "gather_object"):
        usual, odd = (_rows(function, 3, root=root) for root in (0, 1))
        yield f"{function}: root", Mismatch(usual, odd)
    first, second = (_of("allreduce", (1.0, 2), op=op) for op in ("minloc", "maxloc"))
    yield "allreduce: minloc and maxloc", Mismatch(first, second)
    yield "allreduce: name of a function", Mismatch(custom_of("one"), custom_of("other"))
    plain = _rows("allreduce", 3)
    yield "reproducible", Mismatch(plain, _rows("allreduce", 3, reproducible=True))
    usual, odd = (_rows("allreduce", 3, algorithm=name) for name in ("star", "direct"))
    yield "algorithm", Mismatch(usual, odd, needs_algorithms=True)
    usual, odd = (_of("all_gather_object", 1, pickle=is_on) for is_on in (False, True))
    yield "pickle", Mismatch(usual, odd)


def _trees() -> Mismatches:
    for name, usual, odd in (
        ("keys", {"a": 1, "b": 2}, {"a": 1, "c": 2}),
        ("tree and array", [_zeros(2)], _zeros(2)),
        ("one leaf more", [1, 2], [1, 2, 3]),
        ("empty tree", {}, {"a": 1}),
    ):
        yield name, Mismatch(_of("allreduce", usual), _of("allreduce", odd))
    trees = [{"a": _zeros(2), "b": [_zeros(length)]} for length in (3, 4)]
    first, second = (_of("all_gather", tree) for tree in trees)
    yield "size of a leaf", Mismatch(first, second, SizeMismatch)


def _in_flight() -> Mismatches:
    usual, odd = (_started(length) for length in (3, 4))
    yield "in flight", Mismatch(usual, odd, SizeMismatch)
    yield "one in flight", Mismatch(_of("allreduce", _zeros(3)), odd, SizeMismatch)


def _started(length: int) -> Call:
    return lambda backend: ferrodist.allreduce(_zeros(length), backend, async_op=True).wait(
        backend.timeout
    )


# -- what fingerprints leave out, and is found when it arrives -------------------------------------


def _found_on_arrival() -> Mismatches:
    yield "recv_counts", Mismatch(_exchange(1), _exchange(2), SizeMismatch)
    yield "one with recv_counts", Mismatch(_exchange(None), _exchange(0), SizeMismatch)
    yield "counts of reduce_scatter", Mismatch(_cut_at(0), _cut_at(1), SizeMismatch)
    yield "counts of scatter", Mismatch(_scatter_at(None), _scatter_at(1), SizeMismatch)
    part, wide = _zeros(2, 3), _zeros(2, 3, dtype="float64")
    yield "shape of a part", Mismatch(_scatter(None), _scatter(_zeros(3, 3)), SizeMismatch)
    yield "dtype of a part", Mismatch(_scatter(part), _scatter(wide))


def _exchange(recv_count: int | None) -> Call:
    def call(backend: Backend) -> object:
        world = backend.world_size
        expected = None if recv_count is None else [recv_count] * world
        return ferrodist.all_to_all_uneven(
            _zeros(world), [1] * world, backend, recv_counts=expected
        )

    return call


def _counts(world: int, last: int) -> list[int]:
    """Share as many rows as there are ranks; ``last`` of them are the last rank's."""
    return [world - last, *([0] * (world - 2)), last]


def _cut_at(last: int) -> Call:
    return lambda b: ferrodist.reduce_scatter_uneven(
        _zeros(b.world_size), _counts(b.world_size, last), b
    )


def _scatter_at(last: int | None) -> Call:
    """Pass counts that are not those of rank 0, which is never the odd one, or none."""

    def call(backend: Backend) -> object:
        world, is_root = backend.world_size, backend.rank == 0
        x = _zeros(world) if is_root else None
        given = None if last is None else _counts(world, last)
        return ferrodist.scatter_uneven(x, _counts(world, 0) if is_root else given, backend)

    return call


def _scatter(template: Any) -> Call:
    """Scatter two rows to each from rank 0; the odd rank is never rank 0."""

    def call(backend: Backend) -> object:
        x = _zeros(2 * backend.world_size, 3) if backend.rank == 0 else template
        return ferrodist.scatter(x, backend, root=0)

    return call


def _all() -> Mismatches:
    for group in (
        _sizes_and_dtypes,
        _shapes,
        _kinds,
        _options,
        _trees,
        _in_flight,
        _found_on_arrival,
    ):
        yield from group()


MISMATCHES: dict[str, Mismatch] = dict(_all())


# -- ranks that come late --------------------------------------------------------------------------

_LATE_SECONDS = 0.004

SYNCHRONISING = (
    "allreduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_uneven",
    "gather",
    "scatter",
    "reduce_scatter",
    "scan",
    "exscan",
    "all_to_all",
    "all_to_all_uneven",
    "gather_uneven",
    "scatter_uneven",
    "reduce_scatter_uneven",
    "barrier",
    *OBJECT_FUNCTIONS,
)
HAS_ROOT = (*ROOTED, "broadcast_object", "gather_object", "scatter_object")


def check_synchronised(trial: Trial) -> None:
    """Let one rank come late and compare when ranks entered and left."""
    if trial.backend.local_world_size != trial.world:
        return  # clocks of several hosts cannot be compared
    case, backend = trial.case, trial.backend
    late = case.root if case.detail == "late_root" else (case.root + 1) % trial.world
    attempt = _call(case.function, case.root, rows=0 if case.style == "empty" else trial.world)
    ferrodist.barrier(backend)
    if trial.rank == late:
        time.sleep(_LATE_SECONDS)
    entered = time.monotonic()
    attempt(backend)
    left = time.monotonic()
    times = ferrodist.all_gather(np.array([[entered, left]]), backend)
    early = np.flatnonzero(times[:, 1] < times[:, 0].max()).tolist()
    trial.expect(not early, f"ranks {early} returned before rank {late} had entered")


def _call(function: str, root: int, rows: int) -> Callable[[Backend], object]:
    found = getattr(ferrodist, function)
    x = np.zeros((rows, 3))
    if function == "barrier":
        return lambda backend: found(backend)
    options = {"root": root} if function in HAS_ROOT else {}

    def call(backend: Backend) -> object:
        world = backend.world_size
        if function == "scatter_object":
            return found([x] * world, backend, root)
        counts = [[rows // world] * world] if function in COUNTED else []
        is_without = function in SCATTERS and backend.rank != root
        return found(None if is_without else x, *counts, backend, **options)

    return call
