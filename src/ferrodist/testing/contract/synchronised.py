# SPDX-License-Identifier: MIT OR Apache-2.0
"""Check ``synchronised``: no rank returns from a collective before every rank has entered it."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

import ferrodist
from ferrodist import Backend
from ferrodist.testing.contract.inputs import COUNTED, ROOTED, SCATTERS
from ferrodist.testing.contract.objects import OBJECT_FUNCTIONS
from ferrodist.testing.contract.trial import Trial

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
