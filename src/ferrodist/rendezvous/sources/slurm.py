# SPDX-License-Identifier: MIT OR Apache-2.0
"""The source SLURM, and that only in a step of several tasks, which srun has started.

A batch script, and whatever it starts without srun, has the variables of the whole allocation; they
say nothing of one process.
"""

from __future__ import annotations

from ferrodist.rendezvous.launch import number
from ferrodist.rendezvous.sources.place import (
    Environment,
    Place,
    rank_and_size,
    require,
    shown,
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
_NUM_HOSTS = "SLURM_STEP_NUM_NODES"


def read(environ: Environment) -> Place | None:
    """Read the variables of a step."""
    if number(environ.get(SOURCE.world_size, "")) < 2:
        return None
    require(environ, SOURCE, SOURCE.rank, SOURCE.world_size, _JOB, _STEP, _NUM_HOSTS)
    rank, world_size = rank_and_size(environ, SOURCE, SOURCE.rank, SOURCE.world_size)
    return Place(
        SOURCE,
        f"slurm-{environ[_JOB]}.{environ[_STEP]}-{environ.get(_RESTARTS) or '0'}",
        rank,
        world_size,
        several_hosts=show_hosts(environ),
    )


def show_hosts(environ: Environment) -> str | None:
    """Show that a step runs on several hosts; None if it does not, or is none."""
    if number(environ.get(_NUM_HOSTS, "")) < 2:
        return None
    return shown(environ, [_NUM_HOSTS])
