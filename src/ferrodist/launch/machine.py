# SPDX-License-Identifier: MIT OR Apache-2.0
"""The machine: what it is, which cores ranks get, and whether others are using it.

And the words in which commands tell amounts of memory and of ranks.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 20
_TOPOLOGY = Path("/sys/devices/system/cpu")
_SECONDS = 0.25  # how long to watch the cores
_BUSY_CORES = 0.25  # below this a machine counts as idle: something always runs
_BUSY_PROCESS = 0.1  # and a process that uses less is not worth naming
_MOST_NAMES = 3
_IDLE, _IO_WAIT = 3, 4  # columns of a line of /proc/stat


class Load(NamedTuple):
    """How many cores are in use, of how many, and by whom: "name (pid)", the busiest first."""

    busy_cores: float
    num_cores: int
    processes: list[str]

    @property
    def warning(self) -> str | None:
        """What to tell somebody who is about to measure; None if the machine is idle."""
        if self.busy_cores < _BUSY_CORES:
            return None
        names = f": {', '.join(self.processes)}" if self.processes else ""
        return (
            f"other processes use {self.busy_cores:.1f} of {self.num_cores} cores{names}; "
            "times will be longer than on an idle machine, and vary"
        )


def describe_machine() -> dict[str, str | int]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 2**30),
        "kernel": platform.release(),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


# -- cores -----------------------------------------------------------------------------------------


def usable_cores() -> int:
    """Count the cores' worth of time this process may use: its affinity mask, its container."""
    return max(1, min(len(os.sched_getaffinity(0)), container_cpus()))


def container_cpus() -> int:
    """Return how many cores' worth of time the container grants; a large number if no limit."""
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with suppress(OSError, ValueError):  # not this version of cgroups, or "max"
            words = " ".join((_CGROUP / name).read_text(encoding="ascii") for name in names)
            quota, period = map(int, words.split())
            if quota > 0 and period > 0:
                return math.ceil(quota / period)
    return _UNLIMITED


def threads_per_rank(num_ranks: int) -> int:
    return max(1, usable_cores() // num_ranks)


def share_cores(num_ranks: int) -> list[set[int]] | None:
    """Give each rank cores of its own, side by side; None if there are not enough."""
    names = "physical_package_id", "core_id"
    cores = sorted(
        os.sched_getaffinity(0), key=lambda cpu: (*(_read_topology(cpu, n) for n in names), cpu)
    )
    if usable_cores() < num_ranks:
        return None
    ends = [len(cores) * rank // num_ranks for rank in range(num_ranks + 1)]
    return [set(cores[ends[rank] : ends[rank + 1]]) for rank in range(num_ranks)]


def _read_topology(cpu: int, name: str) -> int:
    try:
        return int((_TOPOLOGY / f"cpu{cpu}" / "topology" / name).read_text())
    except (OSError, ValueError):
        return 0  # as if all were one


# -- load ------------------------------------------------------------------------------------------


def measure_load(proc: Path = Path("/proc"), wait: Callable[[float], None] = time.sleep) -> Load:
    cores, processes = _core_ticks(proc), _process_ticks(proc)
    wait(_SECONDS)
    later_cores, later_processes = _core_ticks(proc), _process_ticks(proc)
    pairs = [(cores[cpu], ticks) for cpu, ticks in later_cores.items() if cpu in cores]
    busy = sum(
        (later.busy - before.busy) / max(1, later.total - before.total) for before, later in pairs
    )
    used = {
        name: (ticks - processes[name]) / (_SECONDS * os.sysconf("SC_CLK_TCK"))
        for name, ticks in later_processes.items()
        if name in processes
    }
    named = sorted((name for name in used if used[name] >= _BUSY_PROCESS), key=used.__getitem__)
    return Load(busy, len(pairs), named[: -_MOST_NAMES - 1 : -1])


class _Ticks(NamedTuple):
    busy: int
    total: int


def _core_ticks(proc: Path) -> dict[int, _Ticks]:
    """Read how long each usable core has been busy; time stolen from a virtual one counts."""
    ticks: dict[int, _Ticks] = {}
    for line in _try_read(proc / "stat").splitlines():
        name, *columns = line.split()
        number = name.removeprefix("cpu")
        if number.isdigit() and int(number) in os.sched_getaffinity(0):
            counts = [int(column) for column in columns[:8]]  # guests are in user time already
            idle = counts[_IDLE] + counts[_IO_WAIT]
            ticks[int(number)] = _Ticks(sum(counts) - idle, sum(counts))
    return ticks


def _process_ticks(proc: Path) -> dict[str, int]:
    ticks: dict[str, int] = {}
    for file in proc.glob("[0-9]*/stat"):
        # The name stands in parentheses, and may have any character, parentheses included.
        head, _, tail = _try_read(file).rpartition(")")
        columns = tail.split()
        if len(columns) > 12:
            pid, _, name = head.partition(" (")
            ticks[f"{name} ({pid})"] = int(columns[11]) + int(columns[12])
    return ticks


def _try_read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:  # a process that has ended
        return ""


def readable_nbytes(nbytes: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} bytes" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def count_of_ranks(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"
