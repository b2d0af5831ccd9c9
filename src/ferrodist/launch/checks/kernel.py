# SPDX-License-Identifier: MIT OR Apache-2.0
"""The kernel: whether it has, and the container allows, what ranks of one host are built on."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import select
import signal
import socket
from collections.abc import Callable, Iterator, Mapping

from ferrodist.launch.checks.finding import Finding, Subject
from ferrodist.launch.checks.situation import Situation

about = Subject("kernel")

_SO_PEERPIDFD = 77  # not in Python's socket module yet

Probe = Callable[[], object]


def _memfd() -> None:
    file = os.memfd_create("ferrodist-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, 4096)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    finally:
        os.close(file)


def _pidfd() -> None:
    file = os.pidfd_open(os.getpid())
    try:
        select.select([file], [], [], 0)
        signal.pidfd_send_signal(file, 0)
    finally:
        os.close(file)


def _peer_pidfd() -> None:
    one, other = socket.socketpair()
    with one, other:
        os.close(one.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))


def _unix_socket() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.bind("")  # the kernel finds an abstract name
        probe.listen(1)


_NEEDED: Mapping[str, Probe] = {"memfd_create": _memfd, "abstract Unix sockets": _unix_socket}
_WANTED: Mapping[str, Probe] = {"pidfd_open": _pidfd, "SO_PEERPIDFD": _peer_pidfd}


def check(
    situation: Situation,
    needed: Mapping[str, Probe] = _NEEDED,
    wanted: Mapping[str, Probe] = _WANTED,
) -> Iterator[Finding]:
    """Try each of the calls for real."""
    missing = {name: error for name, probe in needed.items() if (error := _failure(probe))}
    lacking = {name: error for name, probe in wanted.items() if (error := _failure(probe))}
    there = [name for name in (*needed, *wanted) if name not in missing and name not in lacking]
    if there:
        yield about.ok(f"Linux {platform.release()} has {', '.join(there)}")
    filtered = _has_filter(situation)
    for name, error in missing.items():
        yield about.error(
            f"{name} does not work: {error}",
            _advice(filtered, "ranks of one host cannot share memory without it"),
        )
    for name, error in lacking.items():
        yield about.note(
            f"{name} does not work: {error}",
            _advice(filtered, "a killed rank is then noticed by its closed socket"),
        )
    yield from _tracing(situation)


def _failure(probe: Probe) -> str:
    """Try a call; return what is wrong with it, nothing if it works."""
    try:
        probe()
    except (OSError, AttributeError) as error:  # AttributeError: Python was built without it
        return str(error)
    return ""


def _has_filter(situation: Situation) -> bool:
    status = situation.try_read("proc/self/status") or ""
    return re.search(r"^Seccomp:\s+2$", status, re.MULTILINE) is not None


def _advice(has_filter: bool, consequence: str) -> str:
    if has_filter:
        return f"{consequence}: this process has a seccomp filter; let the container's allow it"
    return f"{consequence}: it came with Linux 3.17 (memfd), 5.3 (pidfd) and 6.5 (SO_PEERPIDFD)"


def _tracing(situation: Situation) -> Iterator[Finding]:
    scope = situation.try_read("proc/sys/kernel/yama/ptrace_scope")
    if scope in ("2", "3"):
        yield about.note(
            f"other processes may not be traced (kernel.yama.ptrace_scope={scope})",
            "ferrodist does not do that; py-spy and gdb, to see where a rank hangs, need it lower",
        )
