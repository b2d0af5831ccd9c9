"""The run command as tests start it, and what they read of it."""

from __future__ import annotations

import os
import re
import select
import socket
import subprocess
import sys

RUN = [sys.executable, "-m", "ferrodist", "run"]


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
