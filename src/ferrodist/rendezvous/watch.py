# SPDX-License-Identifier: MIT OR Apache-2.0
"""How processes end: files that become readable when a process is gone, and what is known of why.

A *watch* is a pidfd where there is one, otherwise a *lifeline*: the read end of a pipe whose write
end only that process has open, so that it ends when the process does.

Only the parent of a process learns its exit code. The launcher notes it on the status board, a
memory file that all ranks have open, so that the survivors can say more about a lost rank than that
it is gone. A rank whose program raises puts its final error there, so that the launcher knows who
failed first.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ferrodist.config import variable

# -- the status board -----------------------------------------------------------------------------

_CODE = struct.Struct("<i4x")
_RUNNING = 0
_BIAS = 1 << 16  # keeps exit codes apart from that
_ERROR = struct.Struct("<d??2xI")  # followed by the text
_MAX_TEXT = 488
_RECORD_NBYTES = _CODE.size + _ERROR.size + _MAX_TEXT


class FinalError(NamedTuple):
    """The error with which a rank's program ended.

    ``when`` is by the clock that all processes of a host share; ``is_consequence``: the error only
    says that another rank failed.
    """

    when: float
    is_consequence: bool
    text: str


class StatusBoard:
    """One record per rank: its final error, and its exit status."""

    def __init__(self, file: int) -> None:
        self.file = file

    @classmethod
    def create(cls, world_size: int) -> StatusBoard:
        file = os.memfd_create("ferrodist-ends", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, world_size * _RECORD_NBYTES)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return cls(file)

    def set_exit_code(self, rank: int, code: int) -> None:
        """Record how a process ended: its exit code, or minus the signal that killed it."""
        os.pwrite(self.file, _CODE.pack(code + _BIAS), rank * _RECORD_NBYTES)

    def describe(self, rank: int) -> str | None:
        """Complete the sentence 'rank 2 ...'; None if it runs, as far as the launcher knows."""
        record = self._read(rank)
        (code,) = _CODE.unpack_from(record)
        return None if code == _RUNNING else describe_exit(code - _BIAS)

    def set_final_error(self, rank: int, text: str, *, is_consequence: bool) -> None:
        data = text.encode(errors="replace")[:_MAX_TEXT]
        head = _ERROR.pack(time.monotonic(), True, is_consequence, len(data))
        os.pwrite(self.file, head + data, rank * _RECORD_NBYTES + _CODE.size)

    def final_error(self, rank: int) -> FinalError | None:
        record = self._read(rank)
        when, is_set, is_consequence, length = _ERROR.unpack_from(record, _CODE.size)
        start = _CODE.size + _ERROR.size
        text = record[start : start + length].decode(errors="replace")
        return FinalError(when, is_consequence, text) if is_set else None

    def _read(self, rank: int) -> bytes:
        record = os.pread(self.file, _RECORD_NBYTES, rank * _RECORD_NBYTES)
        return record.ljust(_RECORD_NBYTES, b"\0")  # a file that is not ours says nothing

    def close(self) -> None:
        os.close(self.file)


def describe_exit(code: int) -> str:
    """Complete the sentence 'rank 2 ...', from an exit code or minus a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    names = {int(one): one.name for one in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


# -- watches --------------------------------------------------------------------------------------

_SO_PEERPIDFD = 77  # Linux 6.5; not in the socket module

# Linux 6.15: a pidfd tells the exit code of a process that its parent has waited for.
_INFO = struct.Struct("<Q52xi")  # struct pidfd_info: what is asked for, and the exit code
_PIDFD_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_INFO_EXIT = 1 << 3

# Write ends of lifelines; a forked child must not hold those of its parent.
_HELD: set[int] = set()


class Lifeline:
    """A pipe that ends with this process."""

    def __init__(self) -> None:
        self.watch, self._end = os.pipe()
        _HELD.add(self._end)

    def keep(self) -> None:
        os.close(self.watch)

    def close(self) -> None:
        os.close(self.watch)
        _HELD.discard(self._end)
        os.close(self._end)


def try_peer_pidfd(connection: socket.socket, pid: int) -> int | None:
    try:
        # From the kernel itself, so that no other process can have got the pid in the meantime.
        pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return try_pidfd(pid)
    os.set_inheritable(pidfd, False)
    return pidfd


def try_pidfd(pid: int) -> int | None:
    """Open a pidfd; None where there are none, or where the process is not visible."""
    if pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def open_own_watch() -> int:
    pidfd = try_pidfd(os.getpid())
    if pidfd is not None:
        return pidfd
    lifeline = Lifeline()
    watch = os.dup(lifeline.watch)
    lifeline.keep()
    return watch


def try_exit_code(pid: int, watch: int) -> int | None:
    """Return the exit code of a process that is gone, or minus the signal that killed it.

    None where that cannot be learned: only its parent is told, and this process is not its parent.
    """
    status = _status_of_reaped(watch)
    if status is None:
        status = _status_of_zombie(pid)
    return None if status is None else os.waitstatus_to_exitcode(status)


def is_stopped(pid: int) -> bool:
    """Tell whether a process of this host is stopped: by Ctrl-Z, SIGSTOP or a debugger."""
    return _facts_of(pid)[:1] in (["T"], ["t"])


def try_stopped_process(job: str, rank: int) -> int | None:
    """Return the pid of a process of a rank that is stopped, before it has joined; None if none is.

    The launcher has put the job and the rank into its environment, and into that of its children.
    """
    marks = {f"{variable('job')}={job}".encode(), f"{variable('rank')}={rank}".encode()}
    pids = (int(path.name) for path in Path("/proc").glob("[1-9]*"))
    stopped = (pid for pid in pids if marks <= _environment_of(pid) and is_stopped(pid))
    return next(stopped, None)


def _environment_of(pid: int) -> set[bytes]:
    """Return the variables that a process was started with; none of another user's process."""
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def _status_of_zombie(pid: int) -> int | None:
    """Ask for the status of a process that its parent has not waited for yet."""
    facts = _facts_of(pid)
    return int(facts[-1]) if facts[:1] in (["Z"], ["X"]) else None


def _facts_of(pid: int) -> list[str]:
    """Return what /proc shows of a process, from its state to its exit status; [] if it is gone."""
    try:
        _, _, facts = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
    except OSError:
        return []
    return facts.split()


def _status_of_reaped(pidfd: int) -> int | None:
    info = bytearray(_INFO.pack(_INFO_EXIT, 0))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None  # an older kernel, or not a pidfd
    found, status = _INFO.unpack(info)
    return status if found & _INFO_EXIT else None


def close_files(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)


def _close_held() -> None:
    close_files(_HELD)
    _HELD.clear()


os.register_at_fork(after_in_child=_close_held)
