# SPDX-License-Identifier: MIT OR Apache-2.0
"""Cores: how many there are for the ranks, and what their numerical libraries make of them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator

from ferrodist._native import container_cpus
from ferrodist.launch.checks.finding import Finding, Subject
from ferrodist.launch.checks.situation import Situation
from ferrodist.launch.demo_report import count_of_ranks

about = Subject("cores")

_THREADS = "OMP_NUM_THREADS"


def check(
    situation: Situation, cpus: Collection[int] | None = None, container: int | None = None
) -> Iterator[Finding]:
    """Look at the cores this process may use, against ranks and their threads."""
    cpus = os.sched_getaffinity(0) if cpus is None else cpus
    container = container_cpus() if container is None else container
    usable = max(1, min(len(cpus), container))
    yield about.ok(_describe(situation, cpus, container))
    yield from _ranks(situation, usable, len(_physical(situation, cpus)))
    yield from _threads(situation, usable)


def _describe(situation: Situation, cpus: Collection[int], container: int) -> str:
    words = f"{_count(len(cpus))} for this process"
    online = _num_online(situation)
    if online > len(cpus):
        words += f", of {online} there are (its affinity mask leaves out the others)"
    if container < len(cpus):
        words += f"; the container grants the time of {container}"
    num_physical = len(_physical(situation, cpus))
    if num_physical < len(cpus):
        words += f"; they are {num_physical} physical, each with several threads"
    return words


def _count(num_cores: int) -> str:
    return "1 core" if num_cores == 1 else f"{num_cores} cores"


def _num_online(situation: Situation) -> int:
    """Count what a list such as "0-3,8" names; 0 if it cannot be read."""
    text = situation.try_read("sys/devices/system/cpu/online") or ""
    parts = [part.partition("-") for part in text.split(",") if part]
    return sum(int(last or first) - int(first) + 1 for first, _, last in parts)


def _physical(situation: Situation, cpus: Collection[int]) -> set[str]:
    """Tell physical cores apart; a core whose siblings are not known counts for itself."""
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return {situation.try_read(topology.format(cpu)) or str(cpu) for cpu in cpus}


def _ranks(situation: Situation, usable: int, num_physical: int) -> Iterator[Finding]:
    num_ranks = situation.num_ranks
    if num_ranks > usable:
        yield about.warning(
            f"{count_of_ranks(num_ranks)} on {_count(usable)}: they take turns",
            "results are the same, but every collective waits for ranks that have no core, which "
            f"takes milliseconds, not microseconds: start at most {usable}",
        )
    elif num_ranks > num_physical:
        yield about.note(
            f"{count_of_ranks(num_ranks)} on {num_physical} physical cores: some share one",
            f"for numerical work {num_physical} may be as fast",
        )


def _threads(situation: Situation, usable: int) -> Iterator[Finding]:
    text = situation.environ.get(_THREADS, "")
    share = max(1, usable // situation.num_ranks)
    if not text:
        yield about.ok(f"{_THREADS} is not set: 'ferrodist run' makes it {share} for each rank")
        return
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        yield about.warning(f"{_THREADS}={text!r} is no number above zero", f"unset {_THREADS}")
        return
    wanted = int(text) * situation.num_ranks
    if wanted > usable and int(text) > 1:
        yield about.warning(
            f"{_THREADS}={text}: {wanted} threads of {count_of_ranks(situation.num_ranks)} on "
            f"{_count(usable)}",
            f"threads that take turns are slower than fewer: unset it, or make it {share}",
        )
    elif int(text) < share:
        yield about.note(
            f"{_THREADS}={text}: each rank uses {text} of the {share} cores it could have",
            f"unset it, and 'ferrodist run' makes it {share}",
        )
    else:
        yield about.ok(f"{_THREADS}={text}")
