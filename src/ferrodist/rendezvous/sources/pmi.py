# SPDX-License-Identifier: MIT OR Apache-2.0
"""The source PMI: the mpiexec of MPICH, of Intel MPI and others.

MPICH's launcher, Hydra, gives a job no name. But every rank holds a socket, PMI_FD, whose other end
belongs to the one process that has started the ranks of this host: that process names the job. The
socket is MPI's own; it is looked at, never read, written or closed. On several hosts there is such
a process on each, and what names the job is where its ranks meet.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from ferrodist.errors import InvalidArgument
from ferrodist.rendezvous.launch import number
from ferrodist.rendezvous.sources import mpi, slurm
from ferrodist.rendezvous.sources.place import (
    Environment,
    Place,
    Stale,
    is_set,
    rank_and_size,
    require,
    show_difference,
    shown,
    try_endpoint_of,
    try_number,
)
from ferrodist.rendezvous.sources.source import Source
from ferrodist.rendezvous.unix_socket import peer_of

SOURCE = Source(
    name="MPI (PMI)",
    rank="PMI_RANK",
    world_size="PMI_SIZE",
    job="mpiexec (PMI_FD)",
    start="start all ranks with 'mpiexec -n {size} python script.py'",
)
_SOCKET = "PMI_FD"
_NAMES = ("PMI_JOBID", "PMI_PORT")  # where there is no socket, or nobody to be seen behind it
_LOCAL_RANK, _LOCAL_SIZE = "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
_START_TIME = 22  # the field of /proc/<pid>/stat


def read(environ: Environment) -> Place | Stale | None:
    """Read the variables, and look who is at the other end of the socket."""
    if not is_set(environ, SOURCE.rank, SOURCE.world_size):
        return None
    require(environ, SOURCE, SOURCE.rank, SOURCE.world_size)
    rank, world_size = rank_and_size(environ, SOURCE, SOURCE.rank, SOURCE.world_size)
    try:
        job = _job_of(environ, world_size)
    except OSError:
        return Stale(SOURCE, _why_stale(environ))
    elsewhere = show_difference(environ, SOURCE, _LOCAL_SIZE, SOURCE.world_size)
    elsewhere = elsewhere or slurm.show_hosts(environ)
    endpoint = try_endpoint_of(environ)
    if elsewhere:
        job = environ.get(_NAMES[0]) or f"at-{endpoint or 'mpi'}"
    return Place(
        SOURCE,
        f"pmi-{job}",
        rank,
        world_size,
        several_hosts=elsewhere,
        endpoint=endpoint,
        through=mpi.way_of(endpoint),
        local_rank=try_number(environ, _LOCAL_RANK),
        local_world_size=try_number(environ, _LOCAL_SIZE),
    )


def _job_of(environ: Environment, world_size: int) -> str:
    """Name the job; raises OSError if the socket that a variable names is not there."""
    starter = _starter(number(environ[_SOCKET])) if is_set(environ, _SOCKET) else None
    if starter is not None:
        return starter
    if is_set(environ, *_NAMES):
        return "-".join(environ[name] for name in _NAMES if environ.get(name))
    if world_size == 1:
        return "alone"  # there is nobody to meet
    names = SOURCE.rank, SOURCE.world_size
    raise InvalidArgument(
        f"{', '.join([_SOCKET, *_NAMES])} not set, but {shown(environ, names)}: nothing says which "
        "job of MPI this is; use mpiexec or 'ferrodist run -n N script.py'",
        missing=[_SOCKET],
    )


def _starter(file: int) -> str | None:
    """Return pid and start time of the process behind a socket; None if it is not to be seen."""
    pid = _peer_pid(file)
    if pid == os.getpid():  # a socket of this process's own that has got the number of MPI's
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in brackets, which may hold anything, blanks too.
    fields_from_third = line.rpartition(")")[2].split()
    return f"{pid}-{fields_from_third[_START_TIME - 3]}"


def _peer_pid(file: int) -> int:
    """Return who is behind a socket; what is not a socket raises OSError."""
    if not stat.S_ISSOCK(os.fstat(file).st_mode):
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    # A socket object gives its file the default timeout, so it is made before the file is MPI's.
    with socket.socket(socket.AF_UNIX) as connection:
        os.dup2(file, connection.fileno(), inheritable=False)
        return peer_of(connection).pid


def _why_stale(environ: Environment) -> str:
    return (
        f"{shown(environ, [SOURCE.rank, SOURCE.world_size])} belong to another process: "
        f"{shown(environ, [_SOCKET])} is not an open socket here. This process was started by a "
        "rank and not by mpiexec: start it with 'ferrodist run -n 1 script.py' if it is to be a "
        f"world of its own, or without {SOURCE.rank} and {SOURCE.world_size}"
    )
