# SPDX-License-Identifier: MIT OR Apache-2.0
"""NodeSpec: the ranks that one launcher starts, and what each of them is told by its environment.

Ranks get ferrodist's variables, and those of torchrun for programs that use torch.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from ferrodist.config import environment
from ferrodist.rendezvous.find_job import mark_outer_jobs
from ferrodist.rendezvous.job import SECRET_NBYTES, Endpoint, Job

_LOOPBACK = "127.0.0.1"
_FREE_PORTS = range(20_000, 32_768)  # below those the kernel gives to outgoing connections

# What an outer torchrun has told its own workers, and would mislead ours.
_NOT_OURS = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE")


class Attempt(NamedTuple):
    """Which start of the whole job this is, of how many at most."""

    restarts: int = 0
    most_restarts: int = 0


FIRST_ATTEMPT = Attempt()


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """The ranks of one host.

    ``sizes`` are the numbers of ranks of all hosts. A job on several hosts has an endpoint, which
    is where rank 0 listens; its name and its secret are the same on all of them. On one host the
    name and the secret are made here, new for every attempt.
    """

    sizes: tuple[int, ...]
    node_rank: int = 0
    endpoint: Endpoint | None = None
    name: str = ""
    secret: bytes = field(default=b"", repr=False)

    @classmethod
    def single(cls, num_ranks: int) -> Self:
        return cls((num_ranks,))

    @property
    def num_ranks(self) -> int:
        return self.sizes[self.node_rank]

    @property
    def world_size(self) -> int:
        return sum(self.sizes)

    @property
    def ranks(self) -> range:
        first = sum(self.sizes[: self.node_rank])
        return range(first, first + self.num_ranks)

    def job(self, attempt: Attempt) -> str:
        """Name the job of an attempt: the same on all hosts, and different in every attempt."""
        if self.endpoint is None:
            return f"run-{os.getpid()}-{secrets.token_hex(8)}"
        return f"{self.name}-{attempt.restarts}"

    def secret_of_job(self) -> bytes:
        return self.secret or secrets.token_bytes(SECRET_NBYTES)

    def master(self) -> Endpoint:
        """Return where rank 0 of a torch program listens: at the port after ferrodist's."""
        if self.endpoint is None:
            return Endpoint(_LOOPBACK, _free_port())
        return Endpoint(self.endpoint.host, self.endpoint.port + 1)

    def job_of(self, rank: int, name: str, secret: bytes) -> Job:
        return Job(
            name,
            rank,
            self.world_size,
            secret,
            endpoint=self.endpoint,
            local_rank=rank - self.ranks.start,
            local_world_size=self.num_ranks,
        )

    def environment(
        self, job: Job, attempt: Attempt, master: Endpoint, num_threads: int
    ) -> dict[str, str]:
        """Return the environment of a rank.

        ``master`` is where rank 0 of a torch program listens. Numerical libraries get
        ``num_threads`` threads, unless the user has chosen a number.
        """
        inherited = {name: value for name, value in environment().items() if name not in _NOT_OURS}
        rank, size = str(job.rank), str(job.world_size)
        return {
            "OMP_NUM_THREADS": str(num_threads),
            **inherited,
            **mark_outer_jobs(inherited),
            "RANK": rank,
            "LOCAL_RANK": str(job.local_rank),
            "ROLE_RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": str(job.local_world_size),
            "ROLE_WORLD_SIZE": size,
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(len(self.sizes)),
            "ROLE_NAME": "default",
            "MASTER_ADDR": master.host,
            "MASTER_PORT": str(master.port),
            "TORCHELASTIC_RUN_ID": job.name,
            "TORCHELASTIC_RESTART_COUNT": str(attempt.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(attempt.most_restarts),
        }


def random_port() -> int:
    """Choose a port for another host, from a range that is rarely used, with the next one free."""
    return random.choice(_FREE_PORTS[::2])


def _free_port() -> int:
    for port in random.sample(_FREE_PORTS, 100):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((_LOOPBACK, port))
            except OSError:
                continue
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])
