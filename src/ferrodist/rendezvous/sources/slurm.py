# SPDX-License-Identifier: MIT OR Apache-2.0
"""The source SLURM, and that only in a step of several tasks, which srun has started.

A batch script, and whatever it starts without srun, has the variables of the whole allocation; they
say nothing of one process.

On several hosts rank 0 listens at MASTER_ADDR, else on the first host of the step, where SLURM puts
task 0 unless it is asked for an arbitrary distribution; the port is MASTER_PORT, else one from
20000 to 29999 that follows from the numbers of job and step.
"""

from __future__ import annotations

import hashlib
import itertools

from ferrodist.errors import InvalidArgument
from ferrodist.rendezvous.launch import Endpoint, number, quoted
from ferrodist.rendezvous.sources.node_list import expand, repeated
from ferrodist.rendezvous.sources.place import (
    MASTER_ADDRESS,
    MASTER_PORT,
    Environment,
    Place,
    rank_and_size,
    require,
    shown,
    try_number,
    without_brackets,
)
from ferrodist.rendezvous.sources.source import Source

SOURCE = Source(
    name="SLURM",
    rank="SLURM_PROCID",
    world_size="SLURM_STEP_NUM_TASKS",
    job="srun (SLURM_JOB_ID, SLURM_STEP_ID)",
    start="start all ranks with 'srun -n {size} python script.py'",
)
_JOB, _STEP, _RESTARTS = "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"
_NUM_HOSTS, _HOSTS = "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST"
_LOCAL_RANK = "SLURM_LOCALID"
_HOST_NUMBER, _LOCAL_SIZES = "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"
_MOST_HOSTS = 1 << 16
_PORTS = range(20_000, 30_000)  # below those the kernel gives to outgoing connections


def read(environ: Environment) -> Place | None:
    """Read the variables of a step."""
    if number(environ.get(SOURCE.world_size, "")) < 2:
        return None
    require(environ, SOURCE, SOURCE.rank, SOURCE.world_size, _JOB, _STEP, _NUM_HOSTS)
    rank, world_size = rank_and_size(environ, SOURCE, SOURCE.rank, SOURCE.world_size)
    job = f"slurm-{environ[_JOB]}.{environ[_STEP]}-{environ.get(_RESTARTS) or '0'}"
    hosts = show_hosts(environ)
    return Place(
        SOURCE,
        job,
        rank,
        world_size,
        several_hosts=hosts,
        endpoint=_endpoint_of(environ, job) if hosts else None,
        local_rank=try_local_rank(environ),
        local_world_size=try_local_size(environ),
    )


def show_hosts(environ: Environment) -> str | None:
    """Show that a step runs on several hosts; None if it does not, or is none."""
    if number(environ.get(_NUM_HOSTS, "")) < 2:
        return None
    return shown(environ, [_NUM_HOSTS])


def try_local_rank(environ: Environment) -> int | None:
    """Return the number of a task among those of its host."""
    return try_number(environ, _LOCAL_RANK)


def try_local_size(environ: Environment) -> int | None:
    """Return how many tasks of the step are on this host."""
    host = try_number(environ, _HOST_NUMBER)
    sizes = environ.get(_LOCAL_SIZES)
    if host is None or not sizes:
        return None
    try:
        return next(itertools.islice(repeated(sizes), host, None), None)
    except ValueError:
        return None


def _endpoint_of(environ: Environment, job: str) -> Endpoint:
    port = number(environ[MASTER_PORT]) if environ.get(MASTER_PORT) else _port_of(job)
    if environ.get(MASTER_ADDRESS):
        return Endpoint(without_brackets(environ[MASTER_ADDRESS]), port)
    require(environ, SOURCE, _NUM_HOSTS, _HOSTS)
    try:
        first, *_ = itertools.islice(expand(environ[_HOSTS]), _MOST_HOSTS)
        return Endpoint(first, port)
    except ValueError as error:
        raise InvalidArgument(
            f"{quoted(environ, [_HOSTS])} ({SOURCE.name}): expected hosts as node[01-03,7],gpu5, "
            f"got {error}"
        ) from error


def _port_of(job: str) -> int:
    digest = hashlib.sha256(job.encode(errors="surrogateescape")).digest()
    return _PORTS[int.from_bytes(digest[:8]) % len(_PORTS)]
