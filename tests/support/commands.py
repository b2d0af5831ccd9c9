"""The run command as tests start it, and what they read of it."""

from __future__ import annotations

import os
import re
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

RUN = [sys.executable, "-m", "ferrodist", "run"]


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = [*RUN, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, **options)


@contextmanager
def start(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start the command; it is killed at the end of the context."""
    command = [*RUN, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def lines_of(text: str) -> list[str]:
    """Sort the lines of all ranks, without the prefixes; one of several ranks counts for each."""
    lines = []
    for line in text.splitlines():
        found = re.fullmatch(r"ranks? ([\d, -]+): (.*)", line)
        ranks, words = found.groups() if found else ("0", line)
        for part in ranks.split(", "):
            first, _, last = part.partition("-")
            lines += [words] * (int(last or first) - int(first) + 1)
    return sorted(lines)


def are_gone(pids: list[int], seconds: float) -> bool:
    """Tell whether all processes have ended, after waiting for it."""
    gone = []
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        gone.append(bool(poll.poll(seconds * 1000)))
        os.close(pidfd)
    return all(gone)


def pids_of(process: subprocess.Popen[str], count: int) -> list[int]:
    """Read the pids that the ranks print."""
    return [int(process.stdout.readline().rpartition(" ")[2]) for _ in range(count)]


def children_of(pid: int) -> set[int]:
    """List all descendants of a process."""
    found: set[int] = set()
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found |= {int(child)} | children_of(int(child))
    return found


def free_port() -> int:
    """Find a port that is free, as is the next one."""
    with socket.socket() as probe, socket.socket() as other:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
        try:
            other.bind(("127.0.0.1", port + 1))
        except (OSError, OverflowError):
            return free_port()
        return port
