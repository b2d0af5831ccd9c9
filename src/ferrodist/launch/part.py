# SPDX-License-Identifier: MIT OR Apache-2.0
"""Part: what one launcher starts of a job, which may be all of it or the ranks of its host."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from ferrodist.rendezvous.job import SECRET_NBYTES
from ferrodist.rendezvous.launch import Endpoint, Launch


class Attempt(NamedTuple):
    """Which start of the whole job this is, of how many at most."""

    restarts: int = 0
    most_restarts: int = 0


FIRST_ATTEMPT = Attempt()


@dataclass(frozen=True, slots=True)
class Part:
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
    def whole(cls, num_ranks: int) -> Self:
        """Return a job on this host alone."""
        return cls((num_ranks,))

    @property
    def num_ranks(self) -> int:
        """How many ranks this host has."""
        return self.sizes[self.node_rank]

    @property
    def world_size(self) -> int:
        """How many ranks the job has."""
        return sum(self.sizes)

    @property
    def ranks(self) -> range:
        """The ranks of this host."""
        first = sum(self.sizes[: self.node_rank])
        return range(first, first + self.num_ranks)

    def job(self, attempt: Attempt) -> str:
        """Name the job of an attempt: all hosts alike, and no two attempts."""
        if self.endpoint is None:
            return f"run-{os.getpid()}-{secrets.token_hex(8)}"
        return f"{self.name}-{attempt.restarts}"

    def secret_of_job(self) -> bytes:
        """Return the secret of the job, a new one if this is all of it."""
        return self.secret or secrets.token_bytes(SECRET_NBYTES)

    def launch(self, rank: int, job: str, secret_file: int, ends_file: int) -> Launch:
        """Return what a rank is told."""
        return Launch(
            rank=rank,
            world_size=self.world_size,
            job=job,
            secret_fd=secret_file,
            ends_fd=ends_file,
            local_rank=rank - self.ranks.start,
            local_world_size=self.num_ranks,
            endpoint="" if self.endpoint is None else str(self.endpoint),
        )
