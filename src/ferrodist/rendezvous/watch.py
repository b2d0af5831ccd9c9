# SPDX-License-Identifier: MIT OR Apache-2.0
"""Watches: files that become readable when a process is gone, and what the kernel tells of its end.

A pidfd where there is one. Else a *lifeline*: the read end of a pipe whose write end only that
process has open, so that it ends when the process does.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from pathlib import Path

from ferrodist.rendezvous.link import close_files

_SO_PEERPIDFD = 77  # Linux 6.5; not in the socket module

# Linux 6.15: a pidfd tells the exit code of a process that its parent has waited for.
_INFO = struct.Struct("<Q52xi")  # struct pidfd_info: what is asked for, and the exit code
_PIDFD_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_INFO_EXIT = 1 << 3

# Write ends of lifelines; a forked child must not hold those of its parent.
_HELD: set[int] = set()


def _let_go() -> None:
    close_files(_HELD)
    _HELD.clear()


os.register_at_fork(after_in_child=_let_go)


class Lifeline:
    """A pipe that ends with this process."""

    def __init__(self) -> None:
        self.watch, self._end = os.pipe()
        _HELD.add(self._end)

    def keep(self) -> None:
        """Leave this process's end open until the process is gone."""
        os.close(self.watch)

    def close(self) -> None:
        """Close both ends: nobody watches."""
        os.close(self.watch)
        _HELD.discard(self._end)
        os.close(self._end)


def try_peer_pidfd(connection: socket.socket, pid: int) -> int | None:
    """Open a pidfd of the process at the other end; None where that cannot be had."""
    try:
        # The kernel's own word, so no other process can have got the number in the meantime.
        pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return try_pidfd(pid)
    os.set_inheritable(pidfd, False)
    return pidfd


def try_pidfd(pid: int) -> int | None:
    """Open a pidfd; None where there are none, or where the process is not to be seen."""
    if pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def open_own_watch() -> int:
    """Open a watch of this process, for others to use."""
    pidfd = try_pidfd(os.getpid())
    if pidfd is not None:
        return pidfd
    lifeline = Lifeline()
    watch = os.dup(lifeline.watch)
    lifeline.keep()
    return watch


def try_exit_code(pid: int, watch: int) -> int | None:
    """Return the exit code of a process that is gone, or minus the signal that killed it.

    None where that is not to be learned: this process is not its parent, to whom it is told.
    """
    status = _status_of_reaped(watch)
    if status is None:
        status = _status_of_zombie(pid)
    return None if status is None else os.waitstatus_to_exitcode(status)


def _status_of_zombie(pid: int) -> int | None:
    """Ask for the status of a process that its parent has not waited for yet."""
    try:
        _, _, facts = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
    except OSError:
        return None
    state, *_, status = facts.split()
    return int(status) if state in ("Z", "X") else None


def _status_of_reaped(pidfd: int) -> int | None:
    info = bytearray(_INFO.pack(_INFO_EXIT, 0))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None  # an older kernel, or no pidfd
    found, status = _INFO.unpack(info)
    return status if found & _INFO_EXIT else None
