# SPDX-License-Identifier: MIT OR Apache-2.0
"""The environment of a rank: ferrodist's variables, and those of torchrun for programs of torch."""

from __future__ import annotations

import random
import socket

from ferrodist.config import environment
from ferrodist.launch.part import Attempt, Part
from ferrodist.rendezvous.launch import Endpoint, Launch
from ferrodist.rendezvous.sources.nesting import mark_outer_jobs

_HERE = "127.0.0.1"
FREE_PORTS = range(20_000, 32_768)  # below those the kernel gives to outgoing connections

# What an outer torchrun has told its own workers, and would lead ours astray.
_NOT_OURS = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE")


def rank_environment(
    launch: Launch, part: Part, attempt: Attempt, master: Endpoint, num_threads: int
) -> dict[str, str]:
    """Return the environment of a rank that this process starts.

    ``master`` is where rank 0 of a torch program listens. Numerical libraries get ``num_threads``
    threads, unless the user has chosen a number.
    """
    inherited = {name: value for name, value in environment().items() if name not in _NOT_OURS}
    rank, size = str(launch.rank), str(launch.world_size)
    return {
        "OMP_NUM_THREADS": str(num_threads),
        **inherited,
        **launch.to_environment(),
        **mark_outer_jobs(inherited),
        "RANK": rank,
        "LOCAL_RANK": str(launch.local_rank),
        "ROLE_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(launch.local_world_size),
        "ROLE_WORLD_SIZE": size,
        "GROUP_RANK": str(part.node_rank),
        "GROUP_WORLD_SIZE": str(len(part.sizes)),
        "ROLE_NAME": "default",
        "MASTER_ADDR": master.host,
        "MASTER_PORT": str(master.port),
        "TORCHELASTIC_RUN_ID": launch.job,
        "TORCHELASTIC_RESTART_COUNT": str(attempt.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(attempt.most_restarts),
    }


def master_of(part: Part) -> Endpoint:
    """Return where rank 0 of a torch program listens: next to where ferrodist's does."""
    if part.endpoint is None:
        return Endpoint(_HERE, free_port())
    return Endpoint(part.endpoint.host, part.endpoint.port + 1)


def random_port() -> int:
    """Choose a port for another host, of those that hardly anybody listens at; the next is free."""
    return random.choice(FREE_PORTS[::2])


def free_port() -> int:
    """Find a port that nobody listens at, for a torch program's rank 0."""
    for port in random.sample(FREE_PORTS, 100):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((_HERE, port))
            except OSError:
                continue
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((_HERE, 0))
        return int(probe.getsockname()[1])
