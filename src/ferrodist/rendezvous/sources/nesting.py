# SPDX-License-Identifier: MIT OR Apache-2.0
"""Nesting: which launchers are around ``ferrodist run``, and which of them inside.

A process has the variables of all launchers above it. So ``ferrodist run`` tells its ranks which
jobs it belongs to itself, the *outer* ones; any other is of a launcher that a rank has started.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from ferrodist.config import variable
from ferrodist.errors import DistributedError
from ferrodist.rendezvous.sources import mpi, pmi, torchrun
from ferrodist.rendezvous.sources.place import Environment, Place

OUTER_JOBS = variable("outer_jobs")
_READS = (torchrun.read, mpi.read_open_mpi, mpi.read_pmix, pmi.read)


def mark_outer_jobs(environ: Environment) -> dict[str, str]:
    """Return the variable by which a launcher tells its ranks of the jobs it belongs to."""
    return {OUTER_JOBS: ",".join(map(_mark, _places(environ)))}


def is_outer_job(environ: Environment, place: Place) -> bool:
    """Tell whether the launcher of this process's rank belongs to a job itself."""
    return _mark(place) in environ.get(OUTER_JOBS, "").split(",")


def has_inner_job(environ: Environment) -> bool:
    """Tell whether a rank of ``ferrodist run`` has started a launcher, and that this process."""
    return any(not is_outer_job(environ, place) for place in _places(environ))


def _places(environ: Environment) -> Iterator[Place]:
    for read in _READS:
        try:
            found = read(environ)
        except DistributedError:
            continue  # half set: that is said if anybody depends on it
        if isinstance(found, Place):
            yield found


def _mark(place: Place) -> str:
    """Shorten the name of a job, which may hold any letters."""
    return hashlib.sha256(place.job.encode(errors="surrogateescape")).hexdigest()[:16]
