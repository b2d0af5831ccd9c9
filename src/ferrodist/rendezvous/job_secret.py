# SPDX-License-Identifier: MIT OR Apache-2.0
"""The secret of a job: what its ranks know and nobody else.

``ferrodist run`` makes one. For jobs that other launchers start on several hosts it comes from a
file, which the user has put on all of them. Neither the secret nor anything of the file is ever in
a text.
"""

from __future__ import annotations

import hashlib
import os
import stat

from ferrodist.config import variable
from ferrodist.errors import AuthenticationError

LEAST_NBYTES = 32
_MOST_NBYTES = 1 << 16
_EXAMPLE = "~/.ferrodist-secret"


def secret_from_file(path: str) -> bytes:
    """Read the secret of a file that nobody else can read.

    Raises AuthenticationError for a file that is not there, too short, of another user, or open to
    others.
    """
    try:
        # Not to wait for ever for the other end of a pipe that has none.
        file = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise AuthenticationError(
            f"{_variable(path)} cannot be read: {error.strerror}; {how_to_make_one()}"
        ) from error
    try:
        _check(path, os.fstat(file))
        content = _read(path, file)
    finally:
        os.close(file)
    if not LEAST_NBYTES <= len(content) <= _MOST_NBYTES:
        raise AuthenticationError(
            f"{_variable(path)} has {_size(content)}: a secret has {LEAST_NBYTES} to "
            f"{_MOST_NBYTES}; {how_to_make_one()}"
        )
    return hashlib.sha256(content).digest()


def known_secret(job: str) -> bytes:
    """Make the secret of a job whose launcher gives none.

    It keeps nobody out: it follows from the name, so that there is one handshake for all jobs. What
    protects the job is that the socket is of this host, and each end checks the other's user.
    """
    return hashlib.sha256(f"ferrodist job {job}".encode()).digest()


def no_secret(job: str, source: str, hosts: str, rank: int) -> AuthenticationError:
    """Make the error of a job on several hosts whose ranks have nothing to know each other by."""
    return AuthenticationError(
        f"job {job!r} has ranks on several hosts ({source}: {hosts}) and no secret: without one "
        f"they could not tell each other from strangers on the network; {how_to_make_one()}",
        this_rank=rank,
    )


def how_to_make_one() -> str:
    """Say what to type to make a secret that all hosts have."""
    return (
        "make one with\n"
        f"    (umask 077; head -c {LEAST_NBYTES} /dev/urandom > {_EXAMPLE})\n"
        f"    export {variable('secret_file')}={_EXAMPLE}\n"
        f"and, unless all hosts share the home directory, copy it with 'scp -p {_EXAMPLE} HOST:'; "
        "every rank needs the variable"
    )


def _check(path: str, status: os.stat_result) -> None:
    mode = status.st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        raise AuthenticationError(f"{_variable(path)} is neither a file nor a pipe")
    if status.st_uid not in (os.geteuid(), 0):
        raise AuthenticationError(
            f"{_variable(path)} belongs to user {status.st_uid}, who then knows the secret; this "
            f"is user {os.geteuid()}: make a copy of your own"
        )
    if stat.S_IMODE(mode) & 0o077:
        raise AuthenticationError(
            f"{_variable(path)} has mode {stat.S_IMODE(mode):04o}, so others of this host can read "
            f"or write it: expected 0600; 'chmod 600 {path}', or make a new one if it was read"
        )


def _read(path: str, file: int) -> bytes:
    """Read all there is, or a little more than there may be."""
    content = b""
    try:
        os.set_blocking(file, True)
        while len(content) <= _MOST_NBYTES and (part := os.read(file, _MOST_NBYTES + 1)):
            content += part
    except OSError as error:
        raise AuthenticationError(f"{_variable(path)} cannot be read: {error.strerror}") from error
    return content


def _size(content: bytes) -> str:
    return f"{len(content)} bytes" if len(content) <= _MOST_NBYTES else f"over {_MOST_NBYTES} bytes"


def _variable(path: str) -> str:
    return f"{variable('secret_file')}={path}"
