# SPDX-License-Identifier: MIT OR Apache-2.0
"""Job: what a rank knows before the ranks have met; Member: what it has of each rank afterwards.

Also how the variables are read by which launchers say it: numbers, endpoints, and errors that quote
them. These functions take a mapping, never the process's own environment.

The secret of a job is what its ranks know and nobody else. ``ferrodist run`` makes one. For jobs
that other launchers start on several hosts it comes from a file, which the user has put on all of
them, or from rank 0 by MUNGE. Neither the secret nor any part of the file is ever in an error or a
log.
"""

from __future__ import annotations

import enum
import hashlib
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ferrodist.config import Config, DefaultTimeout, variable
from ferrodist.errors import AuthenticationError, InvalidArgument, InvalidRank, InvalidWorldSize
from ferrodist.rendezvous.interfaces import is_loopback
from ferrodist.rendezvous.watch import StatusBoard

if TYPE_CHECKING:
    from ferrodist.rendezvous.exchange import Exchange
    from ferrodist.rendezvous.munge import Munge

Environment = Mapping[str, str]

MASTER_ADDRESS, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"

_MAX_DIGITS = 9  # anything longer fits no rank, size or file descriptor
_MAX_SHOWN = 60  # characters of a value in an error
SECRET_NBYTES = 32
MIN_SECRET_FILE_NBYTES = 32
_MAX_SECRET_FILE_NBYTES = 1 << 16
_EXAMPLE = "~/.ferrodist-secret"


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher: the variables it sets, and what errors say about it.

    ``job`` is what its jobs differ in; ``start`` is how to start all ranks, with ``{size}`` and
    ``{last}`` for the world size and the last rank. ``required`` are the variables that only make
    sense together.
    """

    name: str
    rank: str
    world_size: str
    job: str
    start: str
    local_rank: str = ""
    local_world_size: str = ""
    required: tuple[str, ...] = ()

    def how_to_start(self, world_size: int) -> str:
        return self.start.format(size=world_size, last=world_size - 1)


class Endpoint(NamedTuple):
    """A host and port to listen at or to connect to."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


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
    another ``bootstrap``, or an ``exchange`` that the program has. ``script`` is what all ranks
    must run, '' if the name alone shows that they belong together. ``local_rank`` and
    ``local_world_size`` are the rank among those of this host, if the launcher says. Without
    ``has_secret`` the secret follows from the name, and keeps nobody out; with ``munge`` the ranks
    of several hosts then get one from rank 0.
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
    exchange: Exchange | None = field(default=None, repr=False, compare=False)
    script: str = field(default="", repr=False, compare=False)
    munge: Munge | None = field(default=None, repr=False, compare=False)

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

    def join_seconds(self, config: Config) -> float:
        """Return how long to wait for ranks that do not join.

        A launcher that records how ranks end shows which of them live: unless the user has set a
        limit, these may take as long to join as they may be late in a call.
        """
        is_watched = self.status_board is not None and not self.several_hosts
        if is_watched and isinstance(config.join_timeout, DefaultTimeout):
            return max(config.join_timeout, config.late_timeout)
        return config.join_timeout

    @property
    def several_hosts(self) -> bool:
        return bool(self.hosts)

    @property
    def meets_here(self) -> bool:
        """Whether its ranks meet at a Unix socket, where the kernel says whose process each is.

        At a port of loopback any user of this host could be one of them, so that needs a secret.
        """
        is_loopback_only = self.endpoint is not None and is_loopback(self.endpoint.host)
        return not self.several_hosts or (is_loopback_only and not self.has_secret)

    @property
    def uses_munge(self) -> bool:
        """Whether its ranks get the secret when they meet, by MUNGE."""
        return self.munge is not None and not (self.has_secret or self.meets_here)


class Member(NamedTuple):
    """A rank that has joined; its receiver closes both files.

    ``arena`` is the memory it shows to the others, ``watch`` becomes readable when it is gone.
    """

    rank: int
    pid: int
    arena: int
    watch: int


# -- variables -------------------------------------------------------------------------------------


def try_endpoint(text: str) -> Endpoint | None:
    """Parse ``host:port`` or ``[IPv6 address]:port``; None if it is neither."""
    bracketed, _, port = text.rpartition(":")
    host = without_brackets(bracketed)
    if host == bracketed and ":" in host:
        return None
    is_word = host != "" and host.isprintable() and not set(host) & set(" []/@")
    return Endpoint(host, number(port)) if is_word and 0 < number(port) <= 65535 else None


def try_master_endpoint(environ: Environment) -> Endpoint | None:
    """Read where rank 0 listens, from the variables that torch has made common.

    A MASTER_PORT that is not a number gives port -1: it only matters if the ranks need the port.
    """
    if not is_set(environ, MASTER_ADDRESS) or not is_set(environ, MASTER_PORT):
        return None
    return Endpoint(without_brackets(environ[MASTER_ADDRESS]), number(environ[MASTER_PORT]))


def without_brackets(host: str) -> str:
    is_bracketed = host.startswith("[") and host.endswith("]")
    return host[1:-1] if is_bracketed else host


def number(text: str) -> int:
    """Parse a non-negative number; -1, which no variable may be, if it is not one."""
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    return int(text) if is_number else -1


def try_number(environ: Environment, name: str) -> int | None:
    value = number(environ.get(name, ""))
    return value if value >= 0 else None


def is_set(environ: Environment, *names: str) -> bool:
    return any(environ.get(name) for name in names)


def read_rank(environ: Environment, launcher: Launcher) -> tuple[int, int]:
    require(environ, launcher, *launcher.required)
    names = [launcher.rank, launcher.world_size]
    rank, world_size = (number(environ[name]) for name in names)
    if not 0 <= rank < world_size:
        raise InvalidArgument(
            f"{quoted(environ, names)} ({launcher.name}): expected whole numbers, and "
            f"{launcher.rank} from 0 to {launcher.world_size} - 1"
        )
    return rank, world_size


def require(environ: Environment, launcher: Launcher, *names: str) -> None:
    """Refuse variables that only make sense together and are not all set."""
    absent = [name for name in names if not environ.get(name)]
    if absent:
        raise InvalidArgument(
            f"{', '.join(absent)} not set, but {shown(environ, names)} ({launcher.name}): all of "
            f"{', '.join(names)} are needed; set the missing ones, unset the others, or use "
            "'ferrodist run -n N script.py'",
            missing=absent,
        )


def show_difference(environ: Environment, launcher: Launcher) -> str:
    """Show that not all ranks are on this host; '' if they are, or if the variable is not set."""
    names = [launcher.local_world_size, launcher.world_size]
    if not is_set(environ, names[0]):
        return ""
    local_size, world_size = (number(environ[name]) for name in names)
    if not 1 <= local_size <= world_size:
        raise InvalidArgument(
            f"{quoted(environ, names)} ({launcher.name}): expected whole numbers, and {names[0]} "
            f"from 1 to {names[1]}"
        )
    return "" if local_size == world_size else shown(environ, names)


def shown(environ: Environment, names: Iterable[str]) -> str:
    return ", ".join(f"{name}={brief(environ[name])}" for name in names if environ.get(name))


def quoted(environ: Environment, names: Sequence[str]) -> str:
    return ", ".join(f"{name}='{brief(environ[name])}'" for name in names if name in environ)


def brief(value: str) -> str:
    """Shorten a value for an error, and escape bytes that are not text."""
    text = value.encode(errors="backslashreplace").decode()
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


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
    return AuthenticationError(
        f"job {job.name!r} has ranks on several hosts ({job.launcher.name}: {job.hosts}) and no "
        "secret: without one they could not tell each other from strangers on the network; "
        f"{how_to_make_secret()}",
        this_rank=job.rank,
    )


def how_to_make_secret() -> str:
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
