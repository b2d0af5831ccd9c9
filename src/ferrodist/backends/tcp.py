# SPDX-License-Identifier: MIT OR Apache-2.0
"""TcpBackend: ranks are processes that are connected by TCP, on one host or on several.

Every rank has a connection to every other, made when it joins; native code reads and writes them
(``native/net``), walks the schedules and keeps the verdicts.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from ferrodist import _native
from ferrodist.backends.neighbours import NeighbourDeaths, check_settings, has_a_core_each
from ferrodist.backends.planner import Planner
from ferrodist.backends.short_way import ShortWayBackend
from ferrodist.backends.tcp_talk import TcpTalk, make_native
from ferrodist.backends.verdict import Departure
from ferrodist.backends.walk_plan import WalkPlan
from ferrodist.buffer import DType
from ferrodist.call import Call
from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.rendezvous import Job
from ferrodist.rendezvous.mesh import Neighbour, join_mesh
from ferrodist.schedules import LinkModel

_LONGEST_PIECE = 1 << 19  # fits the cache of a core, where it is hashed and folded
_MOST_PLANS = 256


class TcpBackend(ShortWayBackend):
    """One rank of a group of processes that are connected by TCP.

    Made by ``ferrodist.init(backend="tcp")`` under a launcher, or by ``split``.
    """

    world: _native.Mesh
    group: _native.TcpGroup
    _deaths: NeighbourDeaths
    _may_go_short = True

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
        super().__init__(mesh, group, members, rank, config, deaths)
        self.neighbours = neighbours
        self._native_plans: dict[int, tuple[WalkPlan, _native.Plan]] = {}
        self.has_short_way = self._may_go_short and config.walker == "native"
        self._at_once = group.at_once if self.has_short_way else None

    @classmethod
    def join(cls, job: Job, *, config: Config | None = None) -> Self:
        """Connect to the other ranks of the job and make the group of all; every rank calls it."""
        config = Config.from_environment() if config is None else config
        config = replace(config, piece_nbytes=min(config.piece_nbytes, _LONGEST_PIECE))
        neighbours = join_mesh(job, config)
        mesh = _native.Mesh(
            job.rank,
            [(neighbour.socket, neighbour.key) for neighbour in neighbours],
            config.heartbeat,
            config.silence,
            config.piece_nbytes,
            has_a_core_each(neighbours, job.rank),
        )
        ranks, deaths = tuple(range(job.world_size)), NeighbourDeaths(job, neighbours)
        made = cls(mesh, mesh.first_group(), ranks, job.rank, config, neighbours, deaths)
        weakref.finalize(made, _close_watches, neighbours).atexit = False
        try:
            check_settings(made)
        except BaseException as error:
            made.fail(error)
            raise
        return made

    @property
    def local_rank(self) -> int:
        """This rank's number among those on its host."""
        return self._local_ranks().index(self.rank)

    @property
    def local_world_size(self) -> int:
        """How many ranks are on this host."""
        return len(self._local_ranks())

    def _local_ranks(self) -> list[int]:
        """List the ranks of this group that are on this host."""
        here = self.neighbours[self.members[self.rank]].host
        hosts = [self.neighbours[member].host for member in self.members]
        return [rank for rank, host in enumerate(hosts) if host == here]

    def native_plan(self, plan: WalkPlan, dtype: DType, peers: Sequence[int] = ()) -> _native.Plan:
        """Return a plan as native code takes it; kept, for it will come again."""
        found = self._native_plans.get(id(plan))
        if found is None:
            if len(self._native_plans) >= _MOST_PLANS:
                self._native_plans.clear()
                self.group.forget_plans()
            found = self._native_plans[id(plan)] = plan, make_native(plan, dtype, peers)
        return found[1]

    def _new_talk(
        self, sequence: int, call: Call, deadline: Deadline, num_runs: int = 0
    ) -> TcpTalk:
        return TcpTalk(self, sequence, call, deadline, num_runs)

    def _new_planner(self) -> Planner:
        model = self.link_model
        return Planner(self.rank, self.world_size, self.config, model, folds_in_order=False)

    @property
    def link_model(self) -> LinkModel:
        """What a connection is taken to cost."""
        return LinkModel(*self.config.tcp_link)

    def _new_split(self, members: Sequence[int], identity: int) -> _native.TcpSplit:
        return _native.TcpSplit(self.group, list(members), identity)

    def _child(self, group: _native.TcpGroup, world_ranks: tuple[int, ...], rank: int) -> Self:
        config, neighbours, deaths = self.config, self.neighbours, self._deaths
        return type(self)(self.world, group, world_ranks, rank, config, neighbours, deaths)

    def damage_of(self, rank: int, what: str) -> str:
        """Say what is wrong with the bytes that came from a rank."""
        return self.group.flaw_of(rank) or "it is not what was expected"

    def loss_of(self, rank: int) -> int:
        """Return the outcome of a wait for a rank that is gone, or sends what cannot be right."""
        return self.group.loss_of(rank)

    def departure_of(self, rank: int) -> Departure:
        """Tell how a rank left, in its own words if it had any."""
        if self.group.departure_of(rank) is not None:
            return super().departure_of(rank)
        flaw = self.group.flaw_of(rank) or "its connection ended"
        return self._deaths.departure_without_words(self.members[rank], flaw)

    def _lateness(self, rank: int) -> float:
        """Return how long this rank has waited for another."""
        return self.group.waited(self.rank, rank)

    def _leave(self, departure: Departure) -> None:
        super()._leave(departure)
        if self._parent is None:
            self.world.finish()


def _close_watches(neighbours: Sequence[Neighbour]) -> None:
    for neighbour in neighbours:
        if neighbour.watch >= 0:
            os.close(neighbour.watch)
