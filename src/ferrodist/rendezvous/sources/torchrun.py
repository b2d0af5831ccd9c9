# SPDX-License-Identifier: MIT OR Apache-2.0
"""The source torchrun, known by its run id."""

from __future__ import annotations

from ferrodist.config import variable
from ferrodist.rendezvous.job import Through
from ferrodist.rendezvous.sources.place import (
    MASTER_ADDRESS,
    MASTER_PORT,
    Environment,
    Place,
    is_set,
    rank_and_size,
    require,
    show_difference,
    try_endpoint_of,
    try_number,
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
_LOCAL_RANK, _LOCAL_SIZE = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def read(environ: Environment) -> Place | None:
    """Read the variables; those that ``ferrodist run`` sets for programs of torch do not count."""
    if not is_set(environ, RUN_ID) or environ[RUN_ID] == environ.get(variable("job")):
        return None
    names = (RUN_ID, _RESTARTS, SOURCE.rank, SOURCE.world_size)
    require(environ, SOURCE, *names, _LOCAL_SIZE, MASTER_ADDRESS, MASTER_PORT)
    rank, world_size = rank_and_size(environ, SOURCE, SOURCE.rank, SOURCE.world_size)
    # The run id alone would not do: with some rendezvous backends it is "none" for every job.
    where = f"{environ[MASTER_ADDRESS]}:{environ[MASTER_PORT]}"
    # Then an agent of torchrun listens at that port, and rank 0 cannot.
    is_taken = environ.get(_AGENT_STORE) == str(True)
    return Place(
        SOURCE,
        f"torchrun-{environ[RUN_ID]}-{environ[_RESTARTS]}-{where}",
        rank,
        world_size,
        several_hosts=show_difference(environ, SOURCE, _LOCAL_SIZE, SOURCE.world_size),
        endpoint=try_endpoint_of(environ),
        through=Through.TORCH_STORE if is_taken else Through.SOCKETS,
        local_rank=try_number(environ, _LOCAL_RANK),
        local_world_size=try_number(environ, _LOCAL_SIZE),
    )
