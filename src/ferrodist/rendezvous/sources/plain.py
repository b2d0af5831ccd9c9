# SPDX-License-Identifier: MIT OR Apache-2.0
"""The source that is set by hand: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

from __future__ import annotations

from ferrodist.errors import InvalidArgument
from ferrodist.rendezvous.launch import number
from ferrodist.rendezvous.sources.place import (
    MASTER_ADDRESS,
    MASTER_PORT,
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
from ferrodist.rendezvous.sources.torchrun import RUN_ID

SOURCE = Source(
    name="variables set by hand",
    rank="RANK",
    world_size="WORLD_SIZE",
    job="MASTER_PORT",
    start=(
        "start one process per rank, with RANK=0 to RANK={last}, or all of them with "
        "'ferrodist run -n {size} script.py'"
    ),
)
_LOCAL_RANK, _LOCAL_SIZE = "LOCAL_RANK", "LOCAL_WORLD_SIZE"


def read(environ: Environment) -> Place | None:
    """Read the variables, unless they are torchrun's. An address alone says nothing."""
    if is_set(environ, RUN_ID) or not is_set(environ, SOURCE.rank, SOURCE.world_size):
        return None
    require(environ, SOURCE, SOURCE.rank, SOURCE.world_size, MASTER_ADDRESS, MASTER_PORT)
    rank, world_size = rank_and_size(environ, SOURCE, SOURCE.rank, SOURCE.world_size)
    return Place(
        SOURCE,
        # Not after the address: one rank says localhost, another 127.0.0.1, and both are right.
        f"plain-{environ[MASTER_PORT]}",
        rank,
        world_size,
        several_hosts=show_difference(environ, SOURCE, _LOCAL_SIZE, SOURCE.world_size),
        is_host_told=is_set(environ, _LOCAL_SIZE),
        endpoint=try_endpoint_of(environ),
        local_rank=try_number(environ, _LOCAL_RANK),
        local_world_size=try_number(environ, _LOCAL_SIZE),
    )


def check_agrees(environ: Environment, place: Place) -> None:
    """Refuse variables that contradict a place another source has given."""
    if is_set(environ, RUN_ID):
        return
    said = {SOURCE.rank: place.rank, SOURCE.world_size: place.world_size}
    wrong = [n for n, value in said.items() if is_set(environ, n) and number(environ[n]) != value]
    if wrong:
        other = place.source
        raise InvalidArgument(
            f"{shown(environ, wrong)}, but {other.name} says {other.rank}={place.rank}, "
            f"{other.world_size}={place.world_size}: unset {' and '.join(wrong)}, or start the "
            f"ranks without {other.name}"
        )
