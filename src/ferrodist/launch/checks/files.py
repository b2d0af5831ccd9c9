# SPDX-License-Identifier: MIT OR Apache-2.0
"""Open files and processes: how many this user may have, against what ranks need."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator

from ferrodist.launch.checks.cgroup import process_limit
from ferrodist.launch.checks.finding import Finding, Subject
from ferrodist.launch.checks.situation import Situation
from ferrodist.launch.demo_report import count_of_ranks

about = Subject("files and processes")

_OWN_FILES = 64  # of Python and the libraries a rank imports
_FILES_PER_PEER = 3  # its memory and its watch on one host, a connection between hosts
_TASKS_PER_RANK = 8  # the process, its heartbeat, its calls in flight, a few of NumPy's

GetLimit = Callable[[int], tuple[int, int]]


def check(
    situation: Situation, get_limit: GetLimit = resource.getrlimit, uid: int | None = None
) -> Iterator[Finding]:
    """Look at the limits of open files and of processes."""
    yield _open_files(situation, *map(_or_infinite, get_limit(resource.RLIMIT_NOFILE)))
    most, _ = map(_or_infinite, get_limit(resource.RLIMIT_NPROC))
    yield from _processes(situation, most, os.getuid() if uid is None else uid)


def _or_infinite(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def _shown(limit: float) -> str:
    return "any number" if limit == float("inf") else f"{limit:.0f}"


def _open_files(situation: Situation, soft: float, hard: float) -> Finding:
    need = _OWN_FILES + _FILES_PER_PEER * situation.num_ranks
    ranks = count_of_ranks(situation.num_ranks)
    what = f"a process may open {_shown(soft)} files; each of {ranks} needs about {need}"
    if need <= soft:
        return about.ok(what)
    if need <= hard:
        return about.error(what, f"'ulimit -n {need}' in the shell that starts the ranks")
    return about.error(
        f"{what}; the hard limit is {_shown(hard)}",
        "let the administrator raise 'nofile' in /etc/security/limits.conf, or start the container "
        f"with --ulimit nofile={need}",
    )


def _processes(situation: Situation, most: float, uid: int) -> Iterator[Finding]:
    need = _TASKS_PER_RANK * situation.num_ranks
    left = float("inf") if uid == 0 else most - _num_tasks(situation, uid)  # root has no limit
    whose = "this user (ulimit -u)"
    group = process_limit(situation)
    if group is not None and group.left < left:
        left, whose = group.left, f"the container ({group.folder / 'pids.max'})"
    ranks = count_of_ranks(situation.num_ranks)
    if left == float("inf"):
        yield about.ok("the number of processes and threads has no limit")
    elif left >= need:
        yield about.ok(f"{left:.0f} more processes and threads may be started")
    else:
        yield about.error(
            f"{whose} may start {max(0, left):.0f} more processes and threads, {ranks} need about "
            f"{need}",
            "end other programs, start fewer ranks, or raise that limit",
        )


def _num_tasks(situation: Situation, uid: int) -> int:
    """Count the processes and threads of a user."""
    count = 0
    for folder in (situation.root / "proc").iterdir():
        try:
            if folder.name.isdigit() and folder.stat().st_uid == uid:
                count += len(os.listdir(folder / "task"))
        except OSError:
            continue  # it has ended meanwhile
    return count
