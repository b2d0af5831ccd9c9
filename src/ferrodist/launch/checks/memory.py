# SPDX-License-Identifier: MIT OR Apache-2.0
"""Memory: how much there is, what the container allows, and whether ranks can share it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ferrodist import _native
from ferrodist.launch.checks.cgroup import memory_limit
from ferrodist.launch.checks.finding import Finding, Subject
from ferrodist.launch.checks.situation import Situation
from ferrodist.launch.demo_report import count_of_ranks, readable_nbytes

about = Subject("memory")

_RANK_NBYTES = 100 << 20  # a Python process with NumPy, and its slots, before it has any data
_DOCKER_SHM_NBYTES = 64 << 20  # what a container gets unless somebody asks for more
_SHMEM_PAGES = "sys/kernel/mm/transparent_hugepage/shmem_enabled"


def check(situation: Situation) -> Iterator[Finding]:
    """Look at memory, the container's limit, swap, and shared memory of all kinds."""
    yield from _amount(situation)
    yield from _overcommit(situation)
    yield from _arena(situation)
    yield from _loader_memory(situation)
    yield from _huge_pages(situation)


def _amount(situation: Situation) -> Iterator[Finding]:
    facts = _meminfo(situation)
    total, available = facts.get("MemTotal", 0), facts.get("MemAvailable", 0)
    if not total:
        yield about.note("how much there is cannot be seen: no /proc/meminfo")
        return
    what = f"{readable_nbytes(total)}, of which {readable_nbytes(available)} are available"
    limit = memory_limit(situation)
    if limit is not None:
        available = min(available, limit.left)
        what += (
            f"; the container may use {readable_nbytes(limit.most)} and has "
            f"{readable_nbytes(limit.left)} left"
        )
    what += f"; {_swap(facts)}"
    if available >= situation.num_ranks * _RANK_NBYTES:
        yield about.ok(what)
    else:
        yield about.warning(
            f"{what}: little for {count_of_ranks(situation.num_ranks)}",
            f"a rank takes some {readable_nbytes(_RANK_NBYTES)} before it has any data: end other "
            "programs, start fewer ranks, or raise the limit of the container",
        )


def _meminfo(situation: Situation) -> dict[str, int]:
    text = situation.try_read("proc/meminfo") or ""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(number) * 1024 for name, number in found}


def _swap(facts: dict[str, int]) -> str:
    total = facts.get("SwapTotal", 0)
    used = total - facts.get("SwapFree", 0)
    if not total:
        return "no swap"
    return f"{readable_nbytes(used)} of {readable_nbytes(total)} swap in use"


def _overcommit(situation: Situation) -> Iterator[Finding]:
    if situation.try_read("proc/sys/vm/overcommit_memory") == "2":
        yield about.note(
            "the kernel promises no more memory than there is (vm.overcommit_memory=2)",
            "programs that reserve a lot, such as CUDA's, may fail; usual is 'sysctl "
            "vm.overcommit_memory=0'",
        )


def _arena(situation: Situation) -> Iterator[Finding]:
    """Make shared memory as a rank does, and write to it."""
    try:
        arena = _native.Arena(0, max(2, situation.num_ranks))
        arena.empty(1 << 20)[:] = 1
    except (OSError, MemoryError, RuntimeError) as error:
        yield about.error(
            f"shared memory cannot be made: {error}",
            "look at 'ulimit -v', at the container's memory limit, and whether its seccomp profile "
            "allows memfd_create",
        )
        return
    yield about.ok(f"a rank can show up to {readable_nbytes(arena.nbytes)} to the others")


def _loader_memory(situation: Situation) -> Iterator[Finding]:
    try:
        facts = os.statvfs(situation.root / "dev/shm")
    except OSError:
        yield about.note(
            "there is no /dev/shm",
            "ferrodist does not need it; workers of torch's DataLoader do",
        )
        return
    nbytes = facts.f_blocks * facts.f_frsize
    if nbytes <= _DOCKER_SHM_NBYTES:
        yield about.note(
            f"/dev/shm has {readable_nbytes(nbytes)}",
            "ferrodist does not use it, but workers of torch's DataLoader die of SIGBUS when it is "
            "full: start the container with --shm-size=1g or --ipc=host",
        )


def _huge_pages(situation: Situation) -> Iterator[Finding]:
    choice = re.search(r"\[(\w+)\]", situation.try_read(_SHMEM_PAGES) or "")
    if choice is not None and choice[1] in ("never", "deny"):
        yield about.note(
            f"shared memory has no huge pages (shmem_enabled is {choice[1]!r}), as usual",
            f"'echo always > /{_SHMEM_PAGES}' may speed up very large arrays",
        )
