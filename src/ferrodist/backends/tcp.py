# SPDX-License-Identifier: MIT OR Apache-2.0
"""TcpBackend: ranks are processes that are connected by TCP, on one host or on several.

Every rank has a connection to every other, made when it joins; native code reads and writes them
(``native/net``), executes the schedules and keeps the group errors. Every piece that is sent
carries the call's fingerprint, so a rank that differs is found by those that hear from it. The
group's coordinator, its lowest rank that is there, is told, asks all for their descriptors, and
hands everybody all of them.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from ferrodist import _native
from ferrodist._native import Status
from ferrodist.backends import failures
from ferrodist.backends.executor import ExecutionPlan, Planner, execute_plan
from ferrodist.backends.failures import (
    CallDescriptor,
    LeaveReason,
    StatusCode,
    pack_descriptor,
    pack_group_error,
    unpack_descriptor,
    unpack_group_error,
)
from ferrodist.backends.peers import PeerExitStatuses, check_settings
from ferrodist.backends.process_messages import ProcessMessagingBackend
from ferrodist.backends.running_call import CollectiveArgs, RunningCall
from ferrodist.buffer import Buffer, DType
from ferrodist.call import Kind
from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.errors import RankLost
from ferrodist.reduce_op import ReduceOp
from ferrodist.rendezvous import Job
from ferrodist.rendezvous.mesh import MeshPeer, address_among, join_mesh
from ferrodist.schedules import Lengths, LinkModel

LONGEST_PIECE = 1 << 19  # fits the cache of a core, where it is hashed and reduced
_NO_MEMORY = "no memory"  # how native code begins to say so


class TcpBackend(ProcessMessagingBackend):
    """A group of processes that communicate over TCP.

    Made by ``ferrodist.init(backend="tcp")`` under a launcher, or by ``split``.
    """

    world: _native.Mesh
    group: _native.TcpGroup
    _exit_statuses: PeerExitStatuses
    _has_fast_path = True

    def __init__(
        self,
        mesh: _native.Mesh,
        group: _native.TcpGroup,
        members: tuple[int, ...],
        rank: int,
        config: Config,
        mesh_peers: Sequence[MeshPeer],
        exit_statuses: PeerExitStatuses,
    ) -> None:
        super().__init__(mesh, group, members, rank, config, exit_statuses)
        self.mesh_peers = mesh_peers
        if self._has_fast_path and config.executor == "native":
            self._take_fast_path(group)

    @classmethod
    def join(cls, job: Job, *, config: Config | None = None) -> Self:
        """Connect to all other ranks of a job; every rank calls it."""
        config = Config.from_environment() if config is None else config
        return cls._over(job, config, join_mesh(job, config))

    @classmethod
    def _over(cls, job: Job, config: Config, mesh_peers: Sequence[MeshPeer]) -> Self:
        """Make the first group of ranks that are connected."""
        config = replace(config, message_nbytes=min(config.message_nbytes, LONGEST_PIECE))
        mesh = _native.Mesh(
            job.rank,
            [(mesh_peer.socket, mesh_peer.key, mesh_peer.watch) for mesh_peer in mesh_peers],
            config.heartbeat,
            config.heartbeat_timeout,
            config.message_nbytes,
        )
        ranks, exit_statuses = tuple(range(job.world_size)), PeerExitStatuses(job, mesh_peers)
        made = cls(mesh, mesh.first_group(), ranks, job.rank, config, mesh_peers, exit_statuses)
        weakref.finalize(made, _close_watches, mesh_peers).atexit = False
        try:
            check_settings(made)
        except BaseException as error:  # Ctrl-C too: the other ranks are told
            made._fail(error)
            raise
        return made

    @property
    def local_rank(self) -> int:
        return self._local_ranks().index(self.rank)

    @property
    def local_world_size(self) -> int:
        return len(self._local_ranks())

    def _local_ranks(self) -> list[int]:
        """List the ranks of this group that are on this host."""
        here = self.mesh_peers[self.members[self.rank]].host
        hosts = [self.mesh_peers[member].host for member in self.members]
        return [rank for rank, host in enumerate(hosts) if host == here]

    @property
    def own_address(self) -> str:
        """An address of this host at which the ranks of this group reach it."""
        peers = [self.mesh_peers[member] for member in self.members]
        return address_among(peers, self.rank, self.config.socket_ifname)

    def plan_of(self, kind: Kind, dtype: DType, lengths: Lengths, args: CollectiveArgs) -> Any:
        """Plan a call on one array that ``describe`` has described; tell whether out may be x."""
        plan = self.planner.plan_lengths(kind, dtype, lengths, args)
        return plan.native, plan.alias_safe

    def describe(
        self,
        kind: Kind,
        dtype: DType,
        op: ReduceOp,
        root: int,
        nbytes: int,
        in_place: bool,
        in_order: bool,
    ) -> tuple[Kind, DType, Lengths, CollectiveArgs]:
        """Describe a call on one array of ``nbytes``, which in scatter is one part."""
        is_part = kind.input_is_block or kind is Kind.SCATTER
        count = nbytes // dtype.itemsize * (self.world_size if is_part else 1)
        its_op = op if kind.is_reduction else None
        args = CollectiveArgs(its_op, root, in_order=in_order, in_place=in_place)
        return kind, dtype, Lengths(count), args

    def _new_planner(self) -> Planner:
        model = self.link_model
        return Planner(self.rank, self.world_size, self.config, model, reduces_in_order=False)

    @property
    def link_model(self) -> LinkModel:
        return LinkModel(*self.config.tcp_link)

    def _new_split(self, members: Sequence[int], identity: int) -> _native.TcpSplit:
        return _native.TcpSplit(self.group, list(members), identity)

    def _child(self, group: _native.TcpGroup, world_ranks: tuple[int, ...], rank: int) -> Self:
        config, mesh_peers, exit_statuses = self.config, self.mesh_peers, self._exit_statuses
        return type(self)(self.world, group, world_ranks, rank, config, mesh_peers, exit_statuses)

    def _give_up_split(self, split: Any, members: tuple[int, ...], error: BaseException) -> None:
        is_loss = isinstance(error, RankLost) and error.rank in members
        lost = members.index(error.rank) if is_loss else None  # type: ignore[attr-defined]
        due = failures.split_given_up(members.index(self.rank), error, lost)
        split.give_up(pack_group_error(due, [self.members[member] for member in members]))

    def _give_up_group(self, error: BaseException) -> None:
        lost = error.rank if isinstance(error, RankLost) else None
        due = failures.split_given_up(self.rank, error, lost)
        self.group.give_up_split(pack_group_error(due, self.members))

    def _split_failure(
        self, split: Any, members: tuple[int, ...], deadline: Deadline, status: Status
    ) -> BaseException:
        if status.code == StatusCode.GROUP_ERROR and split.error is not None:
            world_ranks = [self.members[member] for member in members]
            given = unpack_group_error(split.error, world_ranks)
            return self._renumber(given.now(members.index(self.rank)), members, deadline)
        return super()._split_failure(split, members, deadline, status)

    def damage_of(self, rank: int, what: str) -> str:
        """Say what is wrong with the bytes that came from a rank."""
        return self.group.flaw_of(rank) or "it is not what was expected"

    def loss_of(self, rank: int) -> int:
        """Return the code of a wait for a rank that is gone, or sends what cannot be right."""
        return self.group.loss_of(rank)

    def leave_reason_of(self, rank: int) -> LeaveReason:
        if self.group.leave_reason_of(rank) is not None:
            return super().leave_reason_of(rank)
        flaw = self.group.flaw_of(rank) or "its connection ended"
        return self._exit_statuses.leave_reason_of_silent(self.members[rank], flaw)

    def _lateness(self, rank: int) -> float:
        """Return how long this rank has waited for another."""
        return self.group.waited(self.rank, rank)

    def _leave(self, leave_reason: LeaveReason, deadline: Deadline) -> None:
        super()._leave(leave_reason, deadline)
        if self._parent is None:
            self.world.finish(deadline)

    # -- collectives ----------------------------------------------------------------------------

    def _run_collective(
        self,
        running: RunningCall,
        kind: Kind,
        input: Buffer | None,
        output: Buffer | None,
        args: CollectiveArgs,
    ) -> None:
        plan, in_place = self.planner.plan(kind, input, output, args), args.in_place
        if in_place and not plan.alias_safe and input is not None:
            in_place, input = False, input.copy()
        if self.config.executor == "python":
            self._check(running, self._execute_in_python(running, plan, input, output, in_place))
            return
        status = self.group.execute(
            plan.native,
            input.memory if input else None,
            output.memory if output else None,
            in_place,
            running.sequence,
            running.fingerprint,
            *running.waiting,
        )
        self._check(running, status)

    def _execute_in_python(
        self,
        running: RunningCall,
        plan: ExecutionPlan,
        input: Buffer | None,
        output: Buffer | None,
        in_place: bool,
    ) -> Status:
        """Execute a plan with the reference executor, piece by piece."""

        def exchange(
            to: int, payload: memoryview | None, peer: int, expected_nbytes: int | None
        ) -> memoryview | None:
            arrived = None if expected_nbytes is None else memoryview(bytearray(expected_nbytes))
            status = self.group.exchange(
                running.call.kind,
                to,
                payload,
                peer,
                arrived,
                running.sequence,
                running.fingerprint,
                *running.waiting,
            )
            if status.code:
                raise _ExecutionEnded(status)
            return arrived

        code = self.group.enter(running.call.kind, running.sequence, running.fingerprint)
        if code != StatusCode.DONE:
            return Status(code)
        try:
            execute_plan(plan, input, output, in_place, self.config, exchange)
        except _ExecutionEnded as ended:
            return ended.status
        finally:
            self.group.exit()
        return Status(StatusCode.DONE)

    def _has_barred(self) -> bool:
        """Tell whether those missing were barred, be it by all others because they are silent."""
        return self.group.has_barred

    def _group_error_of(self, running: RunningCall, status: Status) -> failures.GroupError:
        code, rank = status.code, status.failed_rank
        if code == StatusCode.LATE:
            return super()._group_error_of(running, Status(code))
        flaw = self.group.flaw_of(rank) if code == StatusCode.CORRUPT else ""
        if flaw.startswith(_NO_MEMORY):  # this rank's own trouble, not its peer's
            where = f"{running.call.kind.label} #{running.sequence}"
            return failures.abort(self.rank, f"{flaw} from rank {rank} (in {where})")
        return super()._group_error_of(running, status)

    def _exchange_descriptors(
        self, running: RunningCall, mine: CallDescriptor
    ) -> list[CallDescriptor]:
        """Send this rank's call to the group's coordinator; receive the calls of all ranks."""
        status, found = self.group.exchange_descriptors(
            running.sequence,
            pack_descriptor(mine),
            *running.waiting,
        )
        self._check_exchange(running, status)
        return [unpack_descriptor(descriptor) for descriptor in found]


class _ExecutionEnded(Exception):
    """Ends the execution of a plan in Python."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status


def _close_watches(mesh_peers: Sequence[MeshPeer]) -> None:
    for mesh_peer in mesh_peers:
        if mesh_peer.watch >= 0:
            os.close(mesh_peer.watch)
