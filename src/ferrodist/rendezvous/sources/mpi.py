# SPDX-License-Identifier: MIT OR Apache-2.0
"""The sources Open MPI, and PMIx by itself: the job is the namespace of PMIx."""

from __future__ import annotations

from ferrodist.errors import InvalidArgument
from ferrodist.rendezvous.job import Through
from ferrodist.rendezvous.launch import Endpoint
from ferrodist.rendezvous.sources import slurm
from ferrodist.rendezvous.sources.place import (
    Environment,
    Place,
    is_set,
    rank_and_size,
    require,
    show_difference,
    shown,
    try_endpoint_of,
    try_number,
)
from ferrodist.rendezvous.sources.source import Source

_NAMESPACE = "PMIX_NAMESPACE"

OPEN_MPI = Source(
    name="Open MPI",
    rank="OMPI_COMM_WORLD_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    job=f"mpiexec ({_NAMESPACE})",
    start="start all ranks with 'mpiexec -n {size} python script.py'",
)
_LOCAL_RANK, _LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"

PMIX = Source(
    name="PMIx",
    rank="PMIX_RANK",
    world_size=slurm.SOURCE.world_size,  # PMIx itself has no variable for it
    job=f"srun ({_NAMESPACE})",
    start="start all ranks with 'srun --mpi=pmix -n {size} python script.py'",
)


def read_open_mpi(environ: Environment) -> Place | None:
    """Read the variables of Open MPI's mpiexec."""
    if not is_set(environ, OPEN_MPI.rank, OPEN_MPI.world_size):
        return None
    names = OPEN_MPI.rank, OPEN_MPI.world_size, _LOCAL_SIZE
    require(environ, OPEN_MPI, *names)
    rank, world_size = rank_and_size(environ, OPEN_MPI, OPEN_MPI.rank, OPEN_MPI.world_size)
    return Place(
        OPEN_MPI,
        f"openmpi-{_job_of(environ, names)}",
        rank,
        world_size,
        several_hosts=show_difference(environ, OPEN_MPI, _LOCAL_SIZE, OPEN_MPI.world_size),
        endpoint=(endpoint := try_endpoint_of(environ)),
        through=way_of(endpoint),
        local_rank=try_number(environ, _LOCAL_RANK),
        local_world_size=try_number(environ, _LOCAL_SIZE),
    )


def way_of(endpoint: Endpoint | None) -> Through:
    """Return how ranks of MPI meet between hosts: at an address if one is given, else by MPI."""
    return Through.MPI if endpoint is None else Through.SOCKETS


def _job_of(environ: Environment, names: tuple[str, ...]) -> str:
    """Return what all ranks of one mpiexec have in common, and no two mpiexecs."""
    servers = sorted(name for name in environ if name.startswith("PMIX_SERVER_URI"))
    candidates = [_NAMESPACE, "OMPI_MCA_ess_base_jobid", *servers]
    found = next((environ[name] for name in candidates if environ.get(name)), None)
    if found is None:
        raise InvalidArgument(
            f"{_NAMESPACE} not set, but {shown(environ, names)}: nothing says which job of "
            f"{OPEN_MPI.name} this is; pass {_NAMESPACE} on to the ranks, or use 'ferrodist run "
            "-n N script.py'",
            missing=[_NAMESPACE],
        )
    return found


def read_pmix(environ: Environment) -> Place | None:
    """Read the variables of PMIx, which does not say how many ranks there are; SLURM does.

    Open MPI sets them too; then it is no second source.
    """
    if not is_set(environ, PMIX.rank) or is_set(environ, OPEN_MPI.rank, OPEN_MPI.world_size):
        return None
    require(environ, PMIX, PMIX.rank, _NAMESPACE, PMIX.world_size)
    rank, world_size = rank_and_size(environ, PMIX, PMIX.rank, PMIX.world_size)
    job = f"pmix-{environ[_NAMESPACE]}"
    return Place(
        PMIX,
        job,
        rank,
        world_size,
        several_hosts=slurm.show_hosts(environ),
        endpoint=(endpoint := try_endpoint_of(environ)),
        through=way_of(endpoint),
        local_rank=slurm.try_local_rank(environ),
        local_world_size=slurm.try_local_size(environ),
    )
