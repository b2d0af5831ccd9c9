# SPDX-License-Identifier: MIT OR Apache-2.0
"""Control groups: what the container of this process may use, in version 1 and version 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ferrodist.launch.checks.situation import Situation, try_number, try_read

_NO_LIMIT = 1 << 60  # version 1 writes a number near the largest there is


class Limit(NamedTuple):
    """A limit, how much of it is used, and which folder sets it."""

    most: int
    used: int
    folder: Path

    @property
    def left(self) -> int:
        """How much more may be used."""
        return max(0, self.most - self.used)


def memory_limit(situation: Situation) -> Limit | None:
    """Return the tightest limit of memory; what the kernel can take back does not count as used."""
    return _tightest(_memory_limits(situation))


def process_limit(situation: Situation) -> Limit | None:
    """Return the tightest limit of processes and threads."""
    return _tightest(
        limit
        for folder in _folders(situation, "pids")
        if (limit := _try_limit(folder, "pids.max", "pids.current"))
    )


def _memory_limits(situation: Situation) -> Iterator[Limit]:
    for folder in _folders(situation, "memory"):
        limit = _try_limit(folder, "memory.max", "memory.current") or _try_limit(
            folder, "memory.limit_in_bytes", "memory.usage_in_bytes"
        )
        if limit is not None:
            cache = min(limit.used, _inactive_files(folder))
            yield limit._replace(used=limit.used - cache)


def _tightest(limits: Iterator[Limit]) -> Limit | None:
    return min(limits, key=lambda limit: limit.left, default=None)


def _try_limit(folder: Path, most_name: str, used_name: str) -> Limit | None:
    most, used = try_number(folder / most_name), try_number(folder / used_name)
    if most is None or used is None or most >= _NO_LIMIT:
        return None
    return Limit(most, used, folder)


def _inactive_files(folder: Path) -> int:
    """Return how much of the used memory is files that nobody has looked at for a while."""
    numbers = dict(
        line.split() for line in (try_read(folder / "memory.stat") or "").splitlines() if line
    )
    return int(numbers.get("total_inactive_file") or numbers.get("inactive_file") or 0)


def _folders(situation: Situation, controller: str) -> Iterator[Path]:
    """Name the groups this process is in, the innermost first: each of them sets limits."""
    top = situation.root / "sys/fs/cgroup"
    for line in (situation.try_read("proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            yield from _up_from(top / controllers, path)
            yield from _up_from(top / controller, path) if "," in controllers else ()
        elif number == "0":
            yield from _up_from(top, path)
            yield from _up_from(top / "unified", path)


def _up_from(mount: Path, path: str) -> Iterator[Path]:
    """Name a group and those around it; in some containers only the mount itself can be seen."""
    folder = mount / path.lstrip("/")
    while folder != mount:
        if folder.is_dir():
            yield folder
        folder = folder.parent
    yield mount
