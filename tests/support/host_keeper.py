"""Keeps the network namespace it runs in, under a given host name, until it is told to end.

Then it kills every other process of that namespace, and the namespace ends with it. The end of its
input tells it too, so this is also the clean-up after a test run that was killed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

LOOKS = 10  # after a killed test run: a process that it had just started may be on its way in


def namespace_of(pid: int | str) -> str:
    """Name the network namespace of a process; none for one that has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def kill_if_inside(pid: int, namespace: str) -> bool:
    """Kill a process of the namespace; the open file makes sure that the pid is not another's."""
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        try:
            if namespace_of(pid) == namespace:
                signal.pidfd_send_signal(process, signal.SIGKILL)
                return True
        finally:
            os.close(process)
    return False


def kill_all_others(namespace: str) -> None:
    """Kill until there is nobody left: a process may start others meanwhile."""
    while True:
        pids = {int(path.name) for path in Path("/proc").glob("[0-9]*")} - {os.getpid()}
        if not [pid for pid in pids if kill_if_inside(pid, namespace)]:
            return


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the tests, which then tell us
    socket.sethostname(sys.argv[1])
    print("ready", flush=True)
    was_told = sys.stdin.readline()
    kill_all_others(namespace_of("self"))
    for _ in range(0 if was_told else LOOKS):
        time.sleep(0.1)
        kill_all_others(namespace_of("self"))


if __name__ == "__main__":
    main()
