# SPDX-License-Identifier: MIT OR Apache-2.0
"""Job and Member: what a rank knows before the ranks have met, and what it has afterwards."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from ferrodist.errors import InvalidArgument, InvalidRank, InvalidWorldSize
from ferrodist.rendezvous.ends import Ends
from ferrodist.rendezvous.launch import Endpoint
from ferrodist.rendezvous.sources.source import PROGRAM, Source

SECRET_NBYTES = 32  # what the ranks of a job know and nobody else


class Through(enum.Enum):
    """What the ranks of several hosts first hear of each other through."""

    SOCKETS = "a socket of rank 0"
    TORCH_STORE = "the store of torchrun's agent"
    MPI = "mpi4py"


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's place in a job. All its ranks have the same name, world size and secret.

    ``ends`` is there if the launcher tells how processes end. ``source`` is who has told the rank
    its place, for errors.

    ``several_hosts`` is whether ranks are on other hosts than this, as far as can be known before
    they have met; ``hosts`` is what shows it. Then ``endpoint`` is where rank 0 listens, unless
    they meet ``through`` something else. ``local_rank`` and ``local_world_size`` are the place
    among the ranks of this host, if the launcher tells. Without ``has_secret`` the secret follows
    from the name, and keeps nobody out.
    """

    name: str
    rank: int
    world_size: int
    secret: bytes = field(repr=False)
    ends: Ends | None = field(default=None, repr=False, compare=False)
    source: Source = field(default=PROGRAM, repr=False, compare=False)
    several_hosts: bool = False
    hosts: str = field(default="", repr=False)
    endpoint: Endpoint | None = None
    through: Through = Through.SOCKETS
    local_rank: int | None = None
    local_world_size: int | None = None
    has_secret: bool = field(default=True, repr=False)

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise InvalidWorldSize(f"world size {self.world_size} is not above zero")
        if not 0 <= self.rank < self.world_size:
            raise InvalidRank(
                f"rank {self.rank} is not one of a world of {self.world_size}",
                rank=self.rank,
                world_size=self.world_size,
            )
        if len(self.secret) != SECRET_NBYTES:
            raise InvalidArgument(
                f"the secret of a job is {SECRET_NBYTES} bytes, got {len(self.secret)}"
            )


class Member(NamedTuple):
    """A rank that has joined; whoever gets it closes both files.

    ``arena`` is the memory it shows to the others, ``watch`` becomes readable when it is gone.
    """

    rank: int
    pid: int
    arena: int
    watch: int
