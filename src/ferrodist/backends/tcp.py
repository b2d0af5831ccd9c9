# SPDX-License-Identifier: MIT OR Apache-2.0
"""TcpBackend: ranks are processes that are connected by TCP, on one host or on several.

Every rank has a connection to every other, made when it joins; native code reads and writes them
(``native/net``), walks the schedules and keeps the verdicts. Every piece that is sent carries the
call's fingerprint, so whoever differs is found by whoever hears from it. The group's keeper, its
lowest rank, is told, asks all for their descriptors, and hands everybody all of them.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from ferrodist import _native
from ferrodist.backends import verdict
from ferrodist.backends.neighbours import NeighbourDeaths, check_settings
from ferrodist.backends.planner import Planner, walk_plan
from ferrodist.backends.process_backend import ProcessBackend
from ferrodist.backends.process_texts import CallDescriptor, pack_descriptor, unpack_descriptor
from ferrodist.backends.running_call import CollectiveArgs, RunningCall
from ferrodist.backends.status import NativeStatus, Status, StatusCode
from ferrodist.backends.verdict import Departure
from ferrodist.backends.walk_plan import WalkPlan
from ferrodist.buffer import Buffer, DType
from ferrodist.call import Kind
from ferrodist.config import Config
from ferrodist.reduce_op import ReduceOp
from ferrodist.rendezvous import Job
from ferrodist.rendezvous.mesh import Neighbour, join_mesh
from ferrodist.schedules import Lengths, LinkModel

_LONGEST_PIECE = 1 << 19  # fits the cache of a core, where it is hashed and folded
_NO_MEMORY = "no memory"  # how native code begins to say so


class TcpBackend(ProcessBackend):
    """One rank of a group of processes that are connected by TCP.

    Made by ``ferrodist.init(backend="tcp")`` under a launcher, or by ``split``.
    """

    world: _native.Mesh
    group: _native.TcpGroup
    _deaths: NeighbourDeaths
    _has_fast_path = True

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
        if self._has_fast_path and config.walker == "native":
            self._call_path, self._start_path = group.call_path, group.start_path

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
        )
        ranks, deaths = tuple(range(job.world_size)), NeighbourDeaths(job, neighbours)
        made = cls(mesh, mesh.first_group(), ranks, job.rank, config, neighbours, deaths)
        weakref.finalize(made, _close_watches, neighbours).atexit = False
        try:
            check_settings(made)
        except BaseException as error:
            made._fail(error)
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

    def plan_of(
        self, kind: Kind, dtype: DType, op: ReduceOp, root: int, nbytes: int, in_place: bool
    ) -> Any:
        """Plan a call on one array of ``nbytes``; also tell whether out may be x.

        In scatter the array is one part.
        """
        plan = self.planner.plan_lengths(*self._describe(kind, dtype, op, root, nbytes, in_place))
        return plan.native, plan.alias_safe

    def _describe(
        self, kind: Kind, dtype: DType, op: ReduceOp, root: int, nbytes: int, in_place: bool
    ) -> tuple[Kind, DType, Lengths, CollectiveArgs]:
        is_part = kind in (Kind.ALL_GATHER, Kind.GATHER, Kind.SCATTER)
        count = nbytes // dtype.itemsize * (self.world_size if is_part else 1)
        its_op = op if kind.is_reduction else None
        args = CollectiveArgs(its_op, root, in_order=self.reproducible, in_place=in_place)
        return kind, dtype, Lengths(count), args

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
        """Return the code of a wait for a rank that is gone, or sends what cannot be right."""
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

    # -- collectives ----------------------------------------------------------------------------

    def _run_collective(
        self,
        running: RunningCall,
        kind: Kind,
        input: Buffer | None,
        output: Buffer | None,
        args: CollectiveArgs,
    ) -> None:
        """Do one whole collective: pick the schedule, execute it over every segment."""
        plan, in_place = self.planner.plan(kind, input, output, args), args.in_place
        if in_place and not plan.alias_safe and input is not None:
            in_place, input = False, input.copy()
        execute = self._execute_in_python
        if self.config.walker != "python":
            execute = self._execute_in_native_code
        self._check(running, execute(running, plan, input, output, in_place))

    def _execute_in_native_code(
        self,
        running: RunningCall,
        plan: WalkPlan,
        input: Buffer | None,
        output: Buffer | None,
        in_place: bool,
    ) -> NativeStatus:
        return self.group.walk(
            plan.native,
            input.memory if input else None,
            output.memory if output else None,
            in_place,
            running.sequence,
            running.fingerprint,
            running.deadline.end,
            running.in_background,
            running.poll,
        )

    def _execute_in_python(
        self,
        running: RunningCall,
        plan: WalkPlan,
        input: Buffer | None,
        output: Buffer | None,
        in_place: bool,
    ) -> NativeStatus:
        """Execute a plan with the reference walker, piece by piece."""

        def exchange(
            to: int, payload: memoryview | None, peer: int, expected_nbytes: int | None
        ) -> memoryview | None:
            arrived = None if expected_nbytes is None else memoryview(bytearray(expected_nbytes))
            status = self._exchange(running, to, payload, peer, arrived)
            if status[0]:
                raise _ExecutionEnded(status)
            return arrived

        code = self.group.enter(running.call.kind, running.sequence, running.fingerprint)
        if code != StatusCode.DONE:
            return Status(code)
        try:
            walk_plan(plan, input, output, in_place, self.config, exchange)
        except _ExecutionEnded as ended:
            return ended.status
        finally:
            self.group.exit()
        return Status(StatusCode.DONE)

    def _exchange(
        self,
        running: RunningCall,
        to: int,
        payload: memoryview | None,
        peer: int,
        arrived: memoryview | None,
    ) -> NativeStatus:
        """Send and receive one piece at once; either may be None."""
        return self.group.exchange(
            running.call.kind,
            to,
            payload,
            peer,
            arrived,
            running.sequence,
            running.fingerprint,
            running.deadline.end,
            running.in_background,
            running.poll,
        )

    def _has_barred(self) -> bool:
        """Tell whether those missing were barred, be it by all others because they are silent."""
        return self.group.has_barred

    def _verdict_on(self, running: RunningCall, status: Status) -> verdict.Verdict:
        code, rank, _ = status
        if code == StatusCode.LATE:
            return super()._verdict_on(running, status._replace(failed_rank=-1))
        flaw = self.group.flaw_of(rank) if code == StatusCode.CORRUPT else ""
        if flaw.startswith(_NO_MEMORY):  # this rank's own trouble, not its peer's
            where = f"{running.call.kind.label} #{running.sequence}"
            return verdict.abort(self.rank, f"{flaw} from rank {rank} (in {where})")
        return super()._verdict_on(running, status)

    def _exchange_descriptors(
        self, running: RunningCall, mine: CallDescriptor
    ) -> list[CallDescriptor]:
        """Tell the group's keeper what this rank has called, and hear from it what all have."""
        code, rank, error, found = self.group.hear_all(
            running.sequence,
            pack_descriptor(mine),
            running.deadline.end,
            running.in_background,
            running.poll,
        )
        self._check(running, (code, rank, error))
        return [unpack_descriptor(descriptor) for descriptor in found]


class _ExecutionEnded(Exception):
    """Ends the execution of a plan in Python."""

    def __init__(self, status: NativeStatus) -> None:
        super().__init__(status)
        self.status = status


def _close_watches(neighbours: Sequence[Neighbour]) -> None:
    for neighbour in neighbours:
        if neighbour.watch >= 0:
            os.close(neighbour.watch)
