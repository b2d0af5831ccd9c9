# SPDX-License-Identifier: MIT OR Apache-2.0
"""Job: what a rank knows before the ranks have met; Member: what it has of each rank afterwards.

The secret of a job is what its ranks know and nobody else. ``ferrodist run`` makes one. For jobs
that other launchers start on several hosts it comes from a file, which the user has put on all of
them. Neither the secret nor any part of the file is ever in an error or a log.
"""

from __future__ import annotations

import enum
import hashlib
import os
import stat
from dataclasses import dataclass, field
from typing import NamedTuple

from ferrodist.config import variable
from ferrodist.errors import AuthenticationError, InvalidArgument, InvalidRank, InvalidWorldSize
from ferrodist.rendezvous.interfaces import is_loopback
from ferrodist.rendezvous.variables import Endpoint, Launcher
from ferrodist.rendezvous.watch import StatusBoard

SECRET_NBYTES = 32
MIN_SECRET_FILE_NBYTES = 32
_MAX_SECRET_FILE_NBYTES = 1 << 16
_EXAMPLE = "~/.ferrodist-secret"

# The launcher of a Job that a program has made itself.
PROGRAM = Launcher("the program", "rank", "world_size", "name", "start all ranks of the job")


class Bootstrap(enum.Enum):
    """Through what the ranks of several hosts first hear of each other."""

    SOCKETS = "a socket of rank 0"
    TORCH_STORE = "the store of torchrun's agent"
    MPI = "mpi4py"


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's assignment in a job. All ranks have the same name, world size and secret.

    ``status_board`` is present if the launcher records how processes end. ``launcher`` is who
    assigned the rank, for errors.

    ``hosts`` is what shows that there are ranks on other hosts, as far as can be known before they
    have met; it is '' if there are none, and None if the launcher does not say, which ``find_job``
    then finds out. With several hosts, ``endpoint`` is where rank 0 listens, unless they use
    another ``bootstrap``. ``local_rank`` and ``local_world_size`` are the rank among those of this
    host, if the launcher says. Without ``has_secret`` the secret follows from the name, and keeps
    nobody out.
    """

    name: str
    rank: int
    world_size: int
    secret: bytes = field(repr=False)
    status_board: StatusBoard | None = field(default=None, repr=False, compare=False)
    launcher: Launcher = field(default=PROGRAM, repr=False, compare=False)
    hosts: str | None = ""
    endpoint: Endpoint | None = None
    bootstrap: Bootstrap = Bootstrap.SOCKETS
    local_rank: int | None = None
    local_world_size: int | None = None
    has_secret: bool = field(default=True, repr=False)

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise InvalidWorldSize(f"world size {self.world_size} is not above zero")
        if not 0 <= self.rank < self.world_size:
            raise InvalidRank(
                f"rank {self.rank} is not in a world of {self.world_size}",
                rank=self.rank,
                world_size=self.world_size,
            )
        if len(self.secret) != SECRET_NBYTES:
            raise InvalidArgument(
                f"the secret of a job is {SECRET_NBYTES} bytes, got {len(self.secret)}"
            )

    @property
    def several_hosts(self) -> bool:
        """Whether ranks are on other hosts than this."""
        return bool(self.hosts)

    @property
    def meets_here(self) -> bool:
        """Whether its ranks meet at a Unix socket, where the kernel says whose process each is.

        At a port of loopback any user of this host could be one of them, so that needs a secret.
        """
        is_loopback_only = self.endpoint is not None and is_loopback(self.endpoint.host)
        return not self.several_hosts or (is_loopback_only and not self.has_secret)


class Member(NamedTuple):
    """A rank that has joined; whoever gets it closes both files.

    ``arena`` is the memory it shows to the others, ``watch`` becomes readable when it is gone.
    """

    rank: int
    pid: int
    arena: int
    watch: int


# -- the secret -----------------------------------------------------------------------------------


def secret_from_file(path: str) -> bytes:
    """Read the secret from a file that nobody else can read.

    Raises AuthenticationError for a file that does not exist, is too short, belongs to another user
    or is open to others.
    """
    try:
        # Non-blocking, not to wait for ever for the other end of a pipe that has none.
        file = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise AuthenticationError(
            f"{_setting(path)} cannot be read: {error.strerror}; {how_to_make_secret()}"
        ) from error
    try:
        _check_mode(path, os.fstat(file))
        content = _read(path, file)
    finally:
        os.close(file)
    if not MIN_SECRET_FILE_NBYTES <= len(content) <= _MAX_SECRET_FILE_NBYTES:
        is_long = len(content) > _MAX_SECRET_FILE_NBYTES
        size = f"over {_MAX_SECRET_FILE_NBYTES}" if is_long else str(len(content))
        raise AuthenticationError(
            f"{_setting(path)} has {size} bytes: a secret has {MIN_SECRET_FILE_NBYTES} to "
            f"{_MAX_SECRET_FILE_NBYTES}; {how_to_make_secret()}"
        )
    return hashlib.sha256(content).digest()


def known_secret(job: str) -> bytes:
    """Make the secret of a job whose launcher gives none.

    It keeps nobody out: it follows from the name, so that all jobs have the same handshake. What
    protects the job is that the socket is on this host, and each end checks the other's user.
    """
    return hashlib.sha256(f"ferrodist job {job}".encode(errors="surrogateescape")).digest()


def no_secret(job: Job) -> AuthenticationError:
    """Make the error for a job on several hosts whose ranks could not recognise each other."""
    return AuthenticationError(
        f"job {job.name!r} has ranks on several hosts ({job.launcher.name}: {job.hosts}) and no "
        "secret: without one they could not tell each other from strangers on the network; "
        f"{how_to_make_secret()}",
        this_rank=job.rank,
    )


def how_to_make_secret() -> str:
    """Say what to type to make a secret that all hosts have."""
    return (
        "make one with\n"
        f"    (umask 077; head -c {MIN_SECRET_FILE_NBYTES} /dev/urandom > {_EXAMPLE})\n"
        f"    export {variable('secret_file')}={_EXAMPLE}\n"
        f"and, unless all hosts share the home directory, copy it with 'scp -p {_EXAMPLE} HOST:'; "
        "every rank needs the variable"
    )


def _check_mode(path: str, status: os.stat_result) -> None:
    mode = status.st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        raise AuthenticationError(f"{_setting(path)} is neither a file nor a pipe")
    if status.st_uid not in (os.geteuid(), 0):
        raise AuthenticationError(
            f"{_setting(path)} belongs to user {status.st_uid}, who then knows the secret; this "
            f"is user {os.geteuid()}: make a copy of your own"
        )
    if stat.S_IMODE(mode) & 0o077:
        raise AuthenticationError(
            f"{_setting(path)} has mode {stat.S_IMODE(mode):04o}, so others on this host can read "
            f"or write it: expected 0600; 'chmod 600 {path}', or make a new one if it was read"
        )


def _read(path: str, file: int) -> bytes:
    """Read everything, or a little more than is allowed."""
    content = b""
    try:
        os.set_blocking(file, True)
        while len(content) <= _MAX_SECRET_FILE_NBYTES:
            part = os.read(file, _MAX_SECRET_FILE_NBYTES + 1)
            if not part:
                break
            content += part
    except OSError as error:
        raise AuthenticationError(f"{_setting(path)} cannot be read: {error.strerror}") from error
    return content


def _setting(path: str) -> str:
    return f"{variable('secret_file')}={path}"
