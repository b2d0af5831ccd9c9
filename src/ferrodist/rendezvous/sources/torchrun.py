# SPDX-License-Identifier: MIT OR Apache-2.0
"""The source torchrun, known by its run id."""

from __future__ import annotations

from ferrodist.config import variable
from ferrodist.rendezvous.sources.place import (
    Environment,
    Place,
    is_set,
    rank_and_size,
    require,
    show_difference,
)
from ferrodist.rendezvous.sources.source import Source

SOURCE = Source(
    name="torchrun",
    rank="RANK",
    world_size="WORLD_SIZE",
    job="MASTER_PORT and TORCHELASTIC_RUN_ID",
    start="start all ranks with 'torchrun --nproc-per-node {size} script.py'",
)
RUN_ID = "TORCHELASTIC_RUN_ID"
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_LOCAL_SIZE, _ADDRESS, _PORT = "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"


def read(environ: Environment) -> Place | None:
    """Read the variables; those that ``ferrodist run`` sets for programs of torch do not count."""
    if not is_set(environ, RUN_ID) or environ[RUN_ID] == environ.get(variable("job")):
        return None
    names = (RUN_ID, _RESTARTS, SOURCE.rank, SOURCE.world_size)
    require(environ, SOURCE, *names, _LOCAL_SIZE, _ADDRESS, _PORT)
    rank, world_size = rank_and_size(environ, SOURCE, SOURCE.rank, SOURCE.world_size)
    # The run id alone would not do: with some rendezvous backends it is "none" for every job.
    where = f"{environ[_ADDRESS]}:{environ[_PORT]}"
    return Place(
        SOURCE,
        f"torchrun-{environ[RUN_ID]}-{environ[_RESTARTS]}-{where}",
        rank,
        world_size,
        several_hosts=show_difference(environ, SOURCE, _LOCAL_SIZE, SOURCE.world_size),
    )
