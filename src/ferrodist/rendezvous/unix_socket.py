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

from ferrodist.errors import AuthenticationError, RendezvousError
from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.reception import Peer
from ferrodist.rendezvous.start_errors import host_of_another_user, second_host

_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class UnixPoint:
    """The MeetingPoint of the ranks of one host."""

    longest_pause = 0.02
    towards = ""

    def __init__(self, job: Job) -> None:
        self._job = job

    @property
    def address(self) -> str:
        """Where rank 0 listens, in words."""
        return address_of(self._job.name)

    def where(self) -> str:
        """Add nothing: the name of the job says it."""
        return ""

    def open_listener(self) -> socket.socket:
        """Listen as rank 0."""
        return open_listener(self._job)

    def try_connect(self) -> socket.socket | None:
        """Connect to rank 0; None if it does not listen, or not yet."""
        return try_connect(self._job)

    def identify(self, connection: socket.socket) -> Peer:
        """Ask the kernel who is at the other end, and refuse other users."""
        peer = peer_of(connection)
        check_user(peer)
        return peer

    def describe_self(self) -> str:
        """Say who this process is, as the others are named."""
        return f"pid {os.getpid()}"


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
        raise _taken(job, address_of(job.name)) from error
    return listener


def _taken(job: Job, address: str) -> RendezvousError:
    """Make the error of an address that another process has; it says whose, if that can be seen."""
    connection = try_connect(job)
    if connection is None:
        return second_host(job, address, None)
    with connection:
        peer = peer_of(connection)
    if peer.uid != os.geteuid():
        return host_of_another_user(job, address, peer.pid, peer.uid)
    return second_host(job, address, peer.pid or None)


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
