# SPDX-License-Identifier: MIT OR Apache-2.0
"""Cores: how many there are for the ranks of a job, and which of them each rank gets."""

from __future__ import annotations

import os
from pathlib import Path

from ferrodist._native import container_cpus

_TOPOLOGY = Path("/sys/devices/system/cpu")


def usable_cores() -> int:
    """Count the cores' worth of time this process may use: its affinity mask, its container."""
    return max(1, min(len(os.sched_getaffinity(0)), container_cpus()))


def threads_per_rank(num_ranks: int) -> int:
    """Return how many threads a rank can keep busy while the others do the same."""
    return max(1, usable_cores() // num_ranks)


def share_cores(num_ranks: int) -> list[set[int]] | None:
    """Give each rank cores of its own, side by side; None if there are not enough."""
    cores = sorted(os.sched_getaffinity(0), key=_place)
    if usable_cores() < num_ranks:
        return None
    ends = [len(cores) * rank // num_ranks for rank in range(num_ranks + 1)]
    return [set(cores[ends[rank] : ends[rank + 1]]) for rank in range(num_ranks)]


def _place(cpu: int) -> tuple[int, int, int]:
    """Return where a CPU is, so that neighbours in this order are neighbours in the machine."""
    package, core = (_read(cpu, name) for name in ("physical_package_id", "core_id"))
    return package, core, cpu


def _read(cpu: int, name: str) -> int:
    try:
        return int((_TOPOLOGY / f"cpu{cpu}" / "topology" / name).read_text())
    except (OSError, ValueError):
        return 0  # as if all were one
