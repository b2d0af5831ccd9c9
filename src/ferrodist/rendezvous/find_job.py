# SPDX-License-Identifier: MIT OR Apache-2.0
"""find_job: which rank of which job this process is, according to the innermost launcher.

Only the pipe with the secret of ``ferrodist run`` is read, once; nothing else that a launcher has
opened is touched.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import socket
import stat
import struct
import termios
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ferrodist.config import variable
from ferrodist.errors import DistributedError, InvalidArgument, InvalidWorldSize, RendezvousError
from ferrodist.rendezvous.interfaces import is_loopback
from ferrodist.rendezvous.job import (
    MASTER_ADDRESS,
    MASTER_PORT,
    SECRET_NBYTES,
    Bootstrap,
    Environment,
    Job,
    Launcher,
    brief,
    known_secret,
    number,
    quoted,
    secret_from_file,
    try_endpoint,
)
from ferrodist.rendezvous.launchers import (
    MPI,
    READERS,
    JobReader,
    Stale,
    check_plain_agrees,
    read_open_mpi,
    read_plain,
    read_pmi,
    read_pmix,
    read_torchrun,
)
from ferrodist.rendezvous.munge import try_munge
from ferrodist.rendezvous.watch import StatusBoard

logger = logging.getLogger("ferrodist")

_MAX_RANKS_PER_HOST = 4096  # each then needs 0.4 GiB of shared memory before it sends anything

# What ``ferrodist run`` and ``ferrodist.run`` tell a process that they start. The secret itself is
# never in the environment: secret_fd is a pipe with it, ends_fd the status board.
_RUN_NAMES = (
    *("rank", "world_size", "job", "secret_fd", "ends_fd"),
    *("local_rank", "local_world_size", "endpoint"),
)
RUN_VARIABLES = tuple(map(variable, _RUN_NAMES))
OUTER_JOBS = variable("outer_jobs")
# What is read of the variables that begin as ours and are no settings.
NO_SETTINGS = frozenset({*RUN_VARIABLES, OUTER_JOBS, variable("ssh")})

FERRODIST_RUN = Launcher(
    name="ferrodist run",
    rank=variable("rank"),
    world_size=variable("world_size"),
    job=f"launcher ({variable('job')})",
    start="start all ranks with 'ferrodist run -n {size} script.py'",
)


class _Other(NamedTuple):
    """What a launcher says that was not followed."""

    text: str
    world_size: int = 0


# -- finding the job ------------------------------------------------------------------------------


def find_job(environ: Environment) -> Job:
    """Find this process's rank in a job, and log in one line who assigned it.

    Without any launcher it is a world of one. The line is a warning if it is a world of one against
    an outer launcher: n processes that compute the same thing alone look like a job.

    Raises:
        InvalidArgument: for variables that are half set, wrong or contradict each other.
        RendezvousError: for variables of another process.
        AuthenticationError: for a secret file that others can read, or that is not a secret.
    """
    found, others = _find(environ)
    if found is None:
        logger.info("no launcher has started this process: a world of one")
        return Job(f"alone-{os.getpid()}", 0, 1, os.urandom(SECRET_NBYTES))
    _check_name(found)
    path = environ.get(variable("secret_file"))
    if path and found.world_size > 1 and not found.has_secret:
        found = replace(found, secret=secret_from_file(path), has_secret=True)
    elif _may_use_munge(found):
        found = replace(found, munge=try_munge(environ.get(variable("munge_socket"), "")))
    job = replace(found, hosts=_show_hosts(found))
    is_doubtful = job.world_size == 1 and any(other.world_size > 1 for other in others)
    level = logging.WARNING if is_doubtful else logging.INFO
    logger.log(level, "%s", "; ".join([_describe(job), *(other.text for other in others)]))
    return job


def _find(environ: Environment) -> tuple[Job | None, list[_Other]]:
    """Return the job of the first launcher that has one, and what all others said.

    A job that ``ferrodist run`` itself belongs to is not followed instead of its own: what a rank
    starts is a rank of neither.
    """
    stale: list[Stale] = []
    for index, read in enumerate(_ALL_READERS):
        found = read(environ)
        if isinstance(found, Stale):
            stale.append(found)
        elif found is not None and not (stale and _is_outer_job(environ, found)):
            if found.launcher in MPI:
                check_plain_agrees(environ, found)
            outer = _ALL_READERS[index + 1 :]
            return found, [*map(_describe_stale, stale), *_read_others(environ, found, outer)]
    if stale:
        raise RendezvousError(stale[0].why)
    return None, []


def _read_others(environ: Environment, winner: Job, outer: Sequence[JobReader]) -> Iterator[_Other]:
    """Say what outer launchers say; nobody depends on them, whatever is wrong there."""
    for read in outer:
        if read is read_plain and winner.launcher in MPI:
            continue  # it was found to agree
        try:
            found = read(environ)
        except DistributedError as error:
            yield _Other(f"not used: {error}")
            continue
        if isinstance(found, Stale):
            yield _describe_stale(found)
        elif found is not None:
            is_same = (found.rank, found.world_size) == (winner.rank, winner.world_size)
            text = "the same" if is_same else f"rank {found.rank} of {found.world_size}"
            yield _Other(f"{found.launcher.name}: {text}", found.world_size)


def _describe(job: Job) -> str:
    launcher = job.launcher
    where = f", on several hosts ({job.hosts})" if job.hosts else ""
    if job.uses_munge:
        where += ", which prove themselves by MUNGE"
    variables = f"{launcher.rank}={job.rank}, {launcher.world_size}={job.world_size}"
    return (
        f"rank {job.rank} of {job.world_size} in job {job.name!r}, from {launcher.name} "
        f"({variables}){where}"
    )


def _describe_stale(stale: Stale) -> _Other:
    return _Other(f"the variables of {stale.launcher.name} are another process's")


def _check_name(job: Job) -> None:
    try:
        job.name.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{job.launcher.job}, from {job.launcher.name}, makes '{brief(job.name)}' the name of "
            "the job: some of its bytes are not text (UTF-8)",
            got=brief(job.name),
        ) from error


def _may_use_munge(job: Job) -> bool:
    """Tell whether a launcher gives no secret and says itself, on all ranks, that hosts differ.

    torchrun's store and MPI carry what the ranks tell each other, and no handshake.
    """
    is_open = job.bootstrap is Bootstrap.SOCKETS and not job.has_secret
    return is_open and job.world_size > 1 and bool(job.hosts)


# -- whether the job is on several hosts ----------------------------------------------------------
#
# Launchers that count the ranks of a host say it, and say the same to all. Variables set by hand
# may not; then the address of rank 0 decides:
#
# - loopback: one host, on every rank;
# - an address of another host: several;
# - an address of this very host: nobody can tell. The ranks on this host see what they would see if
#   they were all; those on other hosts, if there are any, see several. So what counts is whether
#   the job has a secret file: with one the ranks meet at the address, which is right in both cases;
#   without one they meet on this host, and ranks on other hosts are told to make one.
#
# So all ranks come to the same answer if all or none of them have the secret file, and if the
# address is the same on all. Otherwise they wait for each other at two places, and the join timeout
# names the ranks that did not come to rank 0's.


def _show_hosts(job: Job) -> str:
    """Show that a job is on several hosts; '' if it is on this one.

    Raises InvalidWorldSize for a job that is too large for this host, InvalidArgument for one on
    several hosts whose rank 0 has no port.
    """
    hosts = "" if job.world_size == 1 else _hosts(job)
    if hosts:
        _check_port(job, hosts)
    elif job.world_size > _MAX_RANKS_PER_HOST:
        raise InvalidWorldSize(
            f"{job.launcher.world_size}={job.world_size} ({job.launcher.name}): one host holds "
            f"at most {_MAX_RANKS_PER_HOST} ranks",
            this_rank=job.rank,
            world_size=job.world_size,
        )
    return hosts


def _hosts(job: Job) -> str:
    if job.hosts is not None or job.endpoint is None:
        return job.hosts or ""
    host = job.endpoint.host
    if is_loopback(host):
        return ""
    try:
        is_here = _is_here(host)
    except (OSError, UnicodeError) as error:
        if job.has_secret:
            return f"{MASTER_ADDRESS}={brief(host)} is not known to this host yet"
        raise RendezvousError(
            f"{MASTER_ADDRESS}={brief(host)} ({job.launcher.name}) cannot be resolved: "
            f"{brief(str(error))}; set it to 127.0.0.1, or to the name of this host",
            this_rank=job.rank,
        ) from error
    if not is_here:
        return f"{MASTER_ADDRESS}={brief(host)} is not an address of this host"
    return f"{MASTER_ADDRESS}={brief(host)}, and a secret file" if job.has_secret else ""


def _is_here(host: str) -> bool:
    """Tell whether an address is this host's, by binding to a port there for a moment."""
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    return any(_can_bind(family, where) for family, _, _, _, where in found)


def _can_bind(family: int, where: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True


def _check_port(job: Job, hosts: str) -> None:
    endpoint = job.endpoint
    if endpoint is None or job.bootstrap is not Bootstrap.SOCKETS or 0 < endpoint.port < 1 << 16:
        return
    raise InvalidArgument(
        f"{MASTER_PORT} ({job.launcher.name}): expected a port from 1 to 65535, because the ranks "
        f"of job {job.name!r} are on several hosts ({hosts})"
    )


# -- launchers around ferrodist run ---------------------------------------------------------------
#
# A process has the variables of all launchers above it. So ``ferrodist run`` tells its ranks which
# jobs it belongs to itself, the *outer* ones; any other belongs to a launcher that a rank has
# started.


def mark_outer_jobs(environ: Environment) -> dict[str, str]:
    """Return the variable by which a launcher tells its ranks about the jobs it belongs to."""
    return {OUTER_JOBS: ",".join(map(_mark, _foreign_jobs(environ)))}


def _is_outer_job(environ: Environment, job: Job) -> bool:
    """Tell whether the launcher of this process's rank belongs to a job itself."""
    return _mark(job) in environ.get(OUTER_JOBS, "").split(",")


def _foreign_jobs(environ: Environment) -> Iterator[Job]:
    for read in (read_torchrun, read_open_mpi, read_pmix, read_pmi):
        try:
            found = read(environ)
        except DistributedError:
            continue  # half set: that is reported if anybody depends on it
        if isinstance(found, Job):
            yield found


def _mark(job: Job) -> str:
    """Shorten the name of a job, which may hold any characters."""
    return hashlib.sha256(job.name.encode(errors="surrogateescape")).hexdigest()[:16]


# -- ferrodist run --------------------------------------------------------------------------------


def run_variables(job: Job, secret_fd: int, ends_fd: int) -> dict[str, str]:
    endpoint = "" if job.endpoint is None else str(job.endpoint)
    values = (job.rank, job.world_size, job.name, secret_fd, ends_fd)
    values_here = (job.local_rank, job.local_world_size, endpoint)
    return dict(zip(RUN_VARIABLES, map(str, (*values, *values_here)), strict=True))


def try_run_job(environ: Environment) -> Job | None:
    """Read the job that ``ferrodist run`` has set, without its secret; None if it has set nothing.

    Raises InvalidArgument for variables that are incomplete, out of bounds or contradictory.
    """
    absent = [name for name in RUN_VARIABLES if name not in environ]
    if {*RUN_VARIABLES} - {*absent} <= {variable("job")}:  # it alone names a job started by hand
        return None
    if absent:
        raise InvalidArgument(
            f"{', '.join(absent)} not set, but {quoted(environ, RUN_VARIABLES)}; ferrodist run "
            f"sets all of {', '.join(RUN_VARIABLES)}",
            missing=absent,
        )
    texts = {name: environ[variable(name)] for name in _RUN_NAMES}
    values = {name: number(text) for name, text in texts.items()}
    endpoint = try_endpoint(texts["endpoint"])
    num_before = values["rank"] - values["local_rank"]  # on other hosts
    num_elsewhere = values["world_size"] - values["local_world_size"]
    are_valid = (
        0 <= values["rank"] < values["world_size"]
        and 0 <= values["local_rank"] < values["local_world_size"]
        and 0 <= num_before <= num_elsewhere
        and min(values["secret_fd"], values["ends_fd"]) >= 0
        and texts["job"] != ""
        and (endpoint is not None or (texts["endpoint"] == "" and num_elsewhere == 0))
    )
    if not are_valid:
        raise InvalidArgument(
            f"{quoted(environ, RUN_VARIABLES)}: expected a rank from 0 to world size - 1, the name "
            "of a job, two open file descriptors, and the rank on this host: the same as in "
            "the job if there is no endpoint, otherwise an endpoint as host:port"
        )
    return Job(
        texts["job"],
        values["rank"],
        values["world_size"],
        known_secret(texts["job"]),
        launcher=FERRODIST_RUN,
        hosts="" if endpoint is None else f"{variable('endpoint')}={texts['endpoint']}",
        endpoint=endpoint,
        local_rank=values["local_rank"],
        local_world_size=values["local_world_size"],
        has_secret=False,
    )


def read_ferrodist_run(environ: Environment) -> Job | Stale | None:
    """Read the variables, and take the secret out of the pipe that they name."""
    job = try_run_job(environ)
    if job is None:
        return None
    # A rank of ours may have started a launcher, and that this process.
    is_inner = any(not _is_outer_job(environ, job) for job in _foreign_jobs(environ))
    secret = None if is_inner else _try_take_secret(environ)
    if secret is None:
        return Stale(FERRODIST_RUN, _why_run_is_stale(environ, job))
    board = StatusBoard(number(environ[variable("ends_fd")]))
    return replace(job, secret=secret, has_secret=True, status_board=board)


def _try_take_secret(environ: Environment) -> bytes | None:
    """Read and close the pipe with the secret; None if the launcher's files are not here.

    A descriptor may be that of another file by now, so it is looked at before anything is read.
    What this process starts inherits neither file.
    """
    pipe, ends = (number(environ[variable(name)]) for name in ("secret_fd", "ends_fd"))
    try:
        if not stat.S_ISFIFO(os.fstat(pipe).st_mode) or _num_readable(pipe) != SECRET_NBYTES:
            return None
        os.set_inheritable(ends, False)
        secret = os.read(pipe, SECRET_NBYTES)
        os.close(pipe)
    except OSError:
        return None
    return secret


def _num_readable(pipe: int) -> int:
    count = struct.Struct("i")
    return int(count.unpack(fcntl.ioctl(pipe, termios.FIONREAD, bytes(count.size)))[0])


def _why_run_is_stale(environ: Environment, job: Job) -> str:
    secret_fd = variable("secret_fd")
    return (
        f"{variable('rank')}={job.rank} of job {job.name!r} belongs to another process: "
        f"{secret_fd}={number(environ[secret_fd])} is not a pipe with the secret of the job. "
        "Either this process was started by a rank and not by the launcher: start it with "
        "'ferrodist run -n 1 script.py' if it is to be a world of its own; or a process that this "
        "one has started called init() first: only one of them can be the rank; or init() was "
        "tried before and failed: the first error counts"
    )


_ALL_READERS: Sequence[JobReader] = (read_ferrodist_run, *READERS)
