# SPDX-License-Identifier: MIT OR Apache-2.0
"""HybridBackend: shared memory inside hosts, TCP between them.

All ranks are connected by TCP: verdicts, messages and what cannot be done in two levels go there.
The ranks of one host also share memory, and do their part of a collective in it, so that between
hosts only one contribution per host travels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np

from ferrodist import _native
from ferrodist.backends.base import Backend
from ferrodist.backends.host_map import HostMap
from ferrodist.backends.hybrid_talk import HybridTalk
from ferrodist.backends.neighbours import NeighbourDeaths
from ferrodist.backends.planner import Planner
from ferrodist.backends.process_texts import unpack_departure
from ferrodist.backends.shared_memory import SharedMemoryBackend
from ferrodist.backends.tcp import TcpBackend
from ferrodist.backends.verdict import Departure
from ferrodist.call import Call
from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.rendezvous import Job
from ferrodist.rendezvous.mesh import Neighbour


class HybridBackend(TcpBackend):
    """One rank of a group of processes on several hosts.

    Made by ``ferrodist.init()`` under a launcher whose ranks are on several hosts, or by ``split``.
    """

    _may_go_short = False  # calls go the general way, through both levels

    def __init__(
        self,
        mesh: _native.Mesh,
        group: _native.TcpGroup,
        members: tuple[int, ...],
        rank: int,
        config: Config,
        neighbours: Sequence[Neighbour],
        deaths: NeighbourDeaths,
    ) -> None:
        super().__init__(mesh, group, members, rank, config, neighbours, deaths)
        self.host_map = HostMap.of([neighbours[member].host for member in members], rank)
        self._inside: SharedMemoryBackend | None = None  # until the ranks of this host have met
        group.leaves_deaths = True  # who shares memory with a rank knows what it has done
        self._planners: dict[tuple[int, ...], Planner] = {}

    @classmethod
    def join(cls, job: Job, *, config: Config | None = None) -> Self:
        """Connect all ranks, and let those of each host share memory; every rank calls it."""
        config = Config.from_environment() if config is None else config
        made = super().join(job, config=config)
        try:
            made._inside = SharedMemoryBackend.join(made._job_inside(job), config=config)
        except BaseException as error:
            made.fail(error)
            raise
        return made

    def _job_inside(self, job: Job) -> Job:
        """Describe the ranks of this host as a job of their own."""
        here = self.host_map
        host = hashlib.sha256(self.neighbours[self.rank].host.encode()).hexdigest()[:16]
        return replace(
            job,
            name=f"{job.name}@{host}",
            rank=here.local_rank,
            world_size=len(here.local),
            ends=job.ends if len(here.local) == job.world_size else None,  # which is by world rank
            several_hosts=False,
        )

    @property
    def inside(self) -> SharedMemoryBackend:
        """The ranks of this host, as a group of their own."""
        assert self._inside is not None
        return self._inside

    def simplest(self) -> Backend:
        """Return the group of this host if that is all ranks, and leave the connections."""
        if len(self.host_map.hosts) > 1:
            return self
        inside, self._inside = self.inside, None
        self.close()
        return inside

    def planner_of(self, ranks: Sequence[int]) -> Planner:
        """Return what plans collectives between some ranks, of which this is one."""
        key = tuple(ranks)
        if key not in self._planners:
            rank, size, model = key.index(self.rank), len(key), self.link_model
            self._planners[key] = Planner(rank, size, self.config, model, folds_in_order=False)
        return self._planners[key]

    def _new_talk(
        self, sequence: int, call: Call, deadline: Deadline, num_runs: int = 0
    ) -> HybridTalk:
        return HybridTalk(self, sequence, call, deadline, num_runs)

    def _complete(self, parent: Self, identity: int, deadline: Deadline) -> None:
        """Let the members on this host share memory, as the group of the same identity."""
        here = [parent.members.index(self.members[rank]) for rank in self.host_map.local]
        local = tuple(parent.host_map.local.index(rank) for rank in here)
        self._inside = parent.inside._split_off(local, identity, deadline)

    def _new_memory(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Take memory that the ranks of this host reach in place."""
        return self.inside._new_memory(nbytes)

    def departure_of(self, rank: int) -> Departure:
        """Tell how a rank left; the words of one on this host are in its memory at once."""
        here = self.host_map.local
        if rank in here and self._inside is not None:
            words = self._inside.group.departure_of(here.index(rank))
            if words is not None:
                return unpack_departure(words)
        return super().departure_of(rank)

    def _lateness(self, rank: int) -> float:
        """Return how long this rank has waited for another, between hosts and inside."""
        between, here = super()._lateness(rank), self.host_map
        if rank not in here.local:
            return between
        return between + self.inside.group.waited(here.local_rank, here.local.index(rank))

    def _leave(self, departure: Departure) -> None:
        if self._inside is not None:
            self._inside._leave(departure)
        super()._leave(departure)
