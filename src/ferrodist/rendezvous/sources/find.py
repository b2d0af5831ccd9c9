# SPDX-License-Identifier: MIT OR Apache-2.0
"""find_job: which rank of which job this process is, by the innermost launcher that says so."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ferrodist.errors import DistributedError, RendezvousError
from ferrodist.rendezvous.job import SECRET_NBYTES, Job
from ferrodist.rendezvous.sources import ferrodist_run, mpi, plain, pmi, slurm, torchrun
from ferrodist.rendezvous.sources.place import Environment, Place, Stale

logger = logging.getLogger("ferrodist")

_Read = Callable[[Environment], Place | Stale | None]

# The innermost first: torchrun may run under srun, hardly the other way round.
_SOURCES: Sequence[_Read] = (
    ferrodist_run.read,
    torchrun.read,
    mpi.read_open_mpi,
    mpi.read_pmix,
    pmi.read,
    plain.read,
    slurm.read,
)
_MPI = (mpi.OPEN_MPI, mpi.PMIX, pmi.SOURCE)


class _Other(NamedTuple):
    """What a source says that was not followed."""

    words: str
    world_size: int = 0


def find_job(environ: Environment) -> Job:
    """Find this process's place in a job, and log in one line who has said so.

    Without any source it is a world of one; the line is a warning if it is one against an outer
    source, for n processes that compute the same alone look like a job.

    Raises:
        InvalidArgument: for variables that are half set, wrong or contradict each other.
        RendezvousError: for those of another process or of several hosts.
    """
    place, others = _find(environ)
    if place is None:
        logger.info("no launcher has started this process: a world of one")
        return Job(f"alone-{os.getpid()}", 0, 1, os.urandom(SECRET_NBYTES))
    _check_one_host(place)
    is_doubtful = place.world_size == 1 and any(other.world_size > 1 for other in others)
    level = logging.WARNING if is_doubtful else logging.INFO
    logger.log(level, "%s", "; ".join([_describe(place), *(other.words for other in others)]))
    return Job(
        place.job,
        place.rank,
        place.world_size,
        place.secret or _known_secret(place.job),
        place.ends,
        place.source,
    )


def _find(environ: Environment) -> tuple[Place | None, list[_Other]]:
    """Return the place of the first source that has one, and what all others said."""
    stale: list[Stale] = []
    for number, read in enumerate(_SOURCES):
        found = read(environ)
        if isinstance(found, Stale):
            stale.append(found)
        elif found is not None:
            if found.source in _MPI:
                plain.check_agrees(environ, found)
            outer = _SOURCES[number + 1 :]
            return found, [*map(_describe_stale, stale), *_hear_others(environ, found, outer)]
    if stale:
        raise RendezvousError(stale[0].why)
    return None, []


def _hear_others(environ: Environment, winner: Place, outer: Sequence[_Read]) -> Iterator[_Other]:
    """Say what outer sources say; whatever is wrong with them, nobody depends on it."""
    for read in outer:
        if read is plain.read and winner.source in _MPI:
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
            words = "the same" if is_same else f"rank {found.rank} of {found.world_size}"
            yield _Other(f"{found.source.name}: {words}", found.world_size)


def _describe(place: Place) -> str:
    source = place.source
    variables = f"{source.rank}={place.rank}, {source.world_size}={place.world_size}"
    return (
        f"rank {place.rank} of {place.world_size} in job {place.job!r}, from {source.name} "
        f"({variables})"
    )


def _describe_stale(stale: Stale) -> _Other:
    return _Other(f"the variables of {stale.source.name} are another process's")


def _check_one_host(place: Place) -> None:
    if place.world_size == 1:
        return
    elsewhere, address = place.several_hosts, place.master_address
    if place.local_world_size is None and address is not None and not _is_here(address):
        elsewhere = f"MASTER_ADDR={address} is not an address of this host"
    if elsewhere:
        raise RendezvousError(
            f"the {place.world_size} ranks of job {place.job!r} are on several hosts "
            f"({place.source.name}: {elsewhere}). That needs the TCP backend, which this version "
            "does not have: start all ranks on one host",
            this_rank=place.rank,
            world_size=place.world_size,
        )


def _is_here(address: str) -> bool:
    """Tell whether an address is this host's, by taking a port there for a moment."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, where) for family, _, _, _, where in found)


def _can_bind(family: int, where: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True


def _known_secret(job: str) -> bytes:
    """Make the secret of a job whose launcher gives none.

    It keeps nobody out: it follows from the name, so that there is one handshake for all jobs. What
    protects the job is that the socket is of this host, and each end checks the other's user.
    """
    return hashlib.sha256(f"ferrodist job {job}".encode()).digest()
