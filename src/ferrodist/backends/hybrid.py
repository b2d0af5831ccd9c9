# SPDX-License-Identifier: MIT OR Apache-2.0
"""HybridBackend: shared memory inside hosts, TCP between them.

All ranks are connected by TCP: verdicts, messages and what cannot be done in two levels go there.
The ranks of one host also share memory, and do their part of a collective in it, so that between
hosts only one contribution per host travels.

Every collective of a call begins with one round of the ranks of a host, which compares what they
have called, and goes on between hosts only when that was the same. A rank that meets a difference
between hosts still comes to the next round of its own host, with a fingerprint that nobody else
has: so the rounds stay in step, and all of the host hear of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np

from ferrodist import _native
from ferrodist.backends import two_levels
from ferrodist.backends.base import Backend
from ferrodist.backends.host_map import HostMap
from ferrodist.backends.neighbours import NeighbourDeaths
from ferrodist.backends.planner import Planner
from ferrodist.backends.process_texts import unpack_departure
from ferrodist.backends.running_call import NO_ARGS, CollectiveArgs, RunningCall
from ferrodist.backends.shared_memory import MISMATCH_FOUND, SharedMemoryBackend
from ferrodist.backends.status import NativeStatus, Status, StatusCode
from ferrodist.backends.tcp import TcpBackend
from ferrodist.backends.verdict import Departure
from ferrodist.buffer import Buffer
from ferrodist.call import Kind
from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.errors import CollectiveMismatch
from ferrodist.rendezvous import Job
from ferrodist.rendezvous.mesh import Neighbour


class HybridBackend(TcpBackend):
    """One rank of a group of processes on several hosts.

    Made by ``ferrodist.init()`` under a launcher whose ranks are on several hosts, or by ``split``.
    """

    _has_fast_path = False  # calls take the general path, through both levels

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
            made._fail(error)
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

    def _simplest(self) -> Backend:
        """Return the group of this host if that is all ranks, and leave the connections."""
        if len(self.host_map.hosts) > 1:
            return self
        inside, self._inside = self.inside, None
        self.close()
        return inside

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

    # -- collectives ----------------------------------------------------------------------------

    def _run_collective(
        self,
        running: RunningCall,
        kind: Kind,
        input: Buffer | None,
        output: Buffer | None,
        args: CollectiveArgs,
    ) -> None:
        """Do one whole collective, in two levels where that is allowed and pays."""
        if args.algorithm is None and args.counts is None:
            steps = two_levels.find(self, kind, input or output, args)
            if steps is not None:
                steps(two_levels.Collective(self, running, input, output, args))
                return
        self.intra_node(running, Kind.BARRIER)
        super()._run_collective(running, kind, input, output, args)

    def intra_node(
        self,
        running: RunningCall,
        kind: Kind,
        input: Buffer | None = None,
        output: Buffer | None = None,
        args: CollectiveArgs = NO_ARGS,
    ) -> None:
        """Do a collective of the ranks of this host; its root is a number among them."""
        running.num_rounds += 1
        self._check_intra_node(running, self._try_intra_node(running, kind, input, output, args))

    def inter_node(
        self,
        running: RunningCall,
        ranks: Sequence[int],
        kind: Kind,
        input: Buffer | None = None,
        output: Buffer | None = None,
        args: CollectiveArgs = NO_ARGS,
    ) -> None:
        """Do a collective of ranks on different hosts; its root is a place in their list."""
        key = tuple(ranks)
        if key not in self._planners:
            rank, size, model = key.index(self.rank), len(key), self.link_model
            self._planners[key] = Planner(rank, size, self.config, model, folds_in_order=False)
        plan = self._planners[key].plan(kind, input, output, args)
        self._execute(running, plan, input, output, args.in_place, ranks)

    def _check_executed(self, running: RunningCall, status: NativeStatus) -> None:
        """Where ranks differ, the others of this host hear it in their next round."""
        if status[0] == StatusCode.MISMATCH:
            self._stop_intra_node(running)
        self._check(running, status)

    def _try_intra_node(
        self,
        running: RunningCall,
        kind: Kind,
        input: Buffer | None = None,
        output: Buffer | None = None,
        args: CollectiveArgs = NO_ARGS,
        *,
        fingerprint: int | None = None,
    ) -> NativeStatus:
        code = self.group.enter(running.call.kind, running.sequence, running.fingerprint)
        if code == StatusCode.GIVEN_UP:
            return Status(code)

        def poll() -> None:
            self._poll_intra_node(running)

        number = running.num_rounds
        return self.inside.run_native(
            running, number, kind, input, output, args, fingerprint=fingerprint, poll=poll
        )

    def _check_intra_node(self, running: RunningCall, status: NativeStatus) -> None:
        code, local_rank, error = status
        rank = self.host_map.local[local_rank] if local_rank >= 0 else local_rank
        self._check(running, (code, rank, error))

    def _poll_intra_node(self, running: RunningCall) -> None:
        """Poll in a round of this host; only here what befell other hosts is heard."""
        self._poll(running)
        self._check(running, (*self.group.look_round(), None))

    # -- when ranks differ ----------------------------------------------------------------------

    def _stop_intra_node(self, running: RunningCall) -> None:
        """Come to the next round of this host with a difference, for there is one elsewhere."""
        status = self._try_intra_node(running, Kind.BARRIER, fingerprint=MISMATCH_FOUND)
        if status[0] != StatusCode.MISMATCH:  # done: all of the host report one
            self._check_intra_node(running, status)

    def _report_mismatch(
        self, running: RunningCall, error: type[CollectiveMismatch], text: str
    ) -> CollectiveMismatch:
        """Stop the others of this host in their next round; all ranks get the same verdict."""
        self._stop_intra_node(running)
        return super()._report_mismatch(running, error, text)

    def _end_call(self, running: RunningCall) -> None:
        super()._end_call(running)
        self.group.exit()
