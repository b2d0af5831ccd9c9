# SPDX-License-Identifier: MIT OR Apache-2.0
"""Watches: files that become readable when a process is gone.

A pidfd where there is one. Else a *lifeline*: the read end of a pipe whose write end only that
process has open, so that it ends when the process does.
"""

from __future__ import annotations

import os
import socket

from ferrodist.rendezvous.link import close_files

_SO_PEERPIDFD = 77  # Linux 6.5; not in the socket module

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
