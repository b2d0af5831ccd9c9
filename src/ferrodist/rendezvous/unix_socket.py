# SPDX-License-Identifier: MIT OR Apache-2.0
"""Abstract Unix sockets: where the ranks of one host meet.

Nothing of them is in a file system, so nothing is left behind. The kernel says who is at the other
end.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import struct
from typing import NamedTuple

from ferrodist.errors import AuthenticationError
from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.start_errors import second_host

_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class Peer(NamedTuple):
    """The process at the other end; pid 0 if it is in another pid namespace."""

    pid: int
    uid: int


def address_of(job_name: str) -> str:
    """Return where rank 0 of a job listens, with @ for the zero byte that abstract names have."""
    digest = hashlib.sha256(job_name.encode()).hexdigest()[:32]
    return f"@ferrodist-{os.geteuid()}-{digest}"


def open_listener(job: Job) -> socket.socket:
    """Listen for the other ranks."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind("\0" + address_of(job.name)[1:])
        listener.listen(min(job.world_size + 64, 4096))
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise second_host(job, address_of(job.name), _try_find_host(job)) from error
    return listener


def _try_find_host(job: Job) -> int | None:
    """Return the pid of whoever listens for the job; None if it cannot be seen."""
    connection = try_connect(job)
    if connection is None:
        return None
    with connection:
        return peer_of(connection).pid or None


def try_connect(job: Job) -> socket.socket | None:
    """Connect to rank 0; None if it does not listen, or not yet."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect("\0" + address_of(job.name)[1:])
    except (ConnectionRefusedError, BlockingIOError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    return connection


def peer_of(connection: socket.socket) -> Peer:
    """Ask the kernel who made the other end."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return Peer(pid, uid)


def check_user(peer: Peer) -> None:
    """Refuse processes of other users."""
    if peer.uid != os.geteuid():
        raise AuthenticationError(
            f"process {peer.pid} at the other end belongs to user {peer.uid}, not to {os.geteuid()}"
        )
