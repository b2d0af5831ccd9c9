# SPDX-License-Identifier: MIT OR Apache-2.0
"""find_job: which rank of which job this process is, by the innermost launcher that says so."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ferrodist.config import variable
from ferrodist.errors import DistributedError, InvalidArgument, RendezvousError
from ferrodist.rendezvous.job import SECRET_NBYTES, Job
from ferrodist.rendezvous.job_secret import known_secret, secret_from_file
from ferrodist.rendezvous.launch import brief
from ferrodist.rendezvous.sources import ferrodist_run, mpi, plain, pmi, slurm, torchrun
from ferrodist.rendezvous.sources.hosts import show_hosts
from ferrodist.rendezvous.sources.nesting import is_outer_job
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
        RendezvousError: for those of another process.
        AuthenticationError: for a file with a secret that others can read, or that is none.
    """
    place, others = _find(environ)
    if place is None:
        logger.info("no launcher has started this process: a world of one")
        return Job(f"alone-{os.getpid()}", 0, 1, os.urandom(SECRET_NBYTES))
    _check_name(place)
    secret = place.secret or _secret_of_file(environ, place)
    hosts = show_hosts(place, has_secret=secret is not None)
    is_doubtful = place.world_size == 1 and any(other.world_size > 1 for other in others)
    level = logging.WARNING if is_doubtful else logging.INFO
    words = [_describe(place, hosts), *(other.words for other in others)]
    logger.log(level, "%s", "; ".join(words))
    return Job(
        place.job,
        place.rank,
        place.world_size,
        secret or known_secret(place.job),
        place.ends,
        place.source,
        several_hosts=hosts != "",
        hosts=hosts,
        endpoint=place.endpoint,
        through=place.through,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        has_secret=secret is not None,
    )


def _secret_of_file(environ: Environment, place: Place) -> bytes | None:
    """Read the file with a secret if there is one, and anybody to keep it from."""
    path = environ.get(variable("secret_file"))
    return secret_from_file(path) if path and place.world_size > 1 else None


def _find(environ: Environment) -> tuple[Place | None, list[_Other]]:
    """Return the place of the first source that has one, and what all others said.

    A job that ``ferrodist run`` belongs to is not followed instead of its own: what a rank starts
    is no rank of either.
    """
    stale: list[Stale] = []
    for number, read in enumerate(_SOURCES):
        found = read(environ)
        if isinstance(found, Stale):
            stale.append(found)
        elif found is not None and not (stale and is_outer_job(environ, found)):
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


def _describe(place: Place, hosts: str) -> str:
    source = place.source
    where = f", on several hosts ({hosts})" if hosts else ""
    variables = f"{source.rank}={place.rank}, {source.world_size}={place.world_size}"
    return (
        f"rank {place.rank} of {place.world_size} in job {place.job!r}, from {source.name} "
        f"({variables}){where}"
    )


def _describe_stale(stale: Stale) -> _Other:
    return _Other(f"the variables of {stale.source.name} are another process's")


def _check_name(place: Place) -> None:
    try:
        place.job.encode()
    except UnicodeEncodeError as error:
        source = place.source
        raise InvalidArgument(
            f"{source.job}, from {source.name}, makes '{brief(place.job)}' the name of the job: "
            "some of its bytes are no text (UTF-8)",
            got=brief(place.job),
        ) from error
