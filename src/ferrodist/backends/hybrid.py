# SPDX-License-Identifier: MIT OR Apache-2.0
"""HybridBackend: shared memory inside hosts, TCP between them.

All ranks are connected by TCP: group errors, messages and what cannot be done in two levels go
there. The ranks of one host also share memory, and do their part of a collective in it, so that
between hosts only one contribution per host travels.

Every collective is a program (``two_levels.py``) that native code executes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np

from ferrodist import _native
from ferrodist._native import Status
from ferrodist.backends import failures, two_levels
from ferrodist.backends.base import Backend
from ferrodist.backends.executor import MOST_PLANS, Planner, lengths_of
from ferrodist.backends.failures import LeaveReason, StatusCode, unpack_leave_reason
from ferrodist.backends.progress import Wait
from ferrodist.backends.running_call import CollectiveArgs, RunningCall
from ferrodist.backends.shared_memory import MISMATCH_FOUND, SharedMemoryBackend
from ferrodist.backends.tcp import TcpBackend
from ferrodist.backends.two_levels import HostMap
from ferrodist.buffer import Buffer, DType
from ferrodist.call import Kind, caller_site
from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.errors import CollectiveMismatch, DistributedError, GroupAborted
from ferrodist.rendezvous import Job
from ferrodist.schedules import Lengths


class HybridBackend(TcpBackend):
    """A group of processes on several hosts: shared memory within a host, TCP between hosts.

    Made by ``ferrodist.init()`` if the launcher started ranks on several hosts, or by ``split``.
    """

    _has_fast_path = False  # until the ranks of this host have met
    _two_levels: _native.HybridGroup

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        hosts = [self.mesh_peers[member].host for member in self.members]
        self.host_map = HostMap.of(hosts, self.rank)
        self._inside: SharedMemoryBackend | None = None
        self.group.leaves_deaths = True  # ranks that share memory know how a rank ended
        self._planners: dict[tuple[int, ...], Planner] = {}
        self._programs: dict[tuple[Any, ...], _native.Program] = {}

    @classmethod
    def join(cls, job: Job, *, config: Config | None = None) -> Self:
        """Connect to all ranks of a job, and share memory with those on this host."""
        config = Config.from_environment() if config is None else config
        made = super().join(job, config=config)
        try:
            made._share_memory(SharedMemoryBackend.join(made._job_inside(job), config=config))
        except BaseException as error:  # Ctrl-C too: the other ranks are told
            made._fail(error)
            raise
        return made

    def _job_inside(self, job: Job) -> Job:
        """Describe the ranks of this host as a job of their own."""
        here = self.host_map
        # The status board goes by rank in the world.
        board = job.status_board if len(here.local) == job.world_size else None
        host = hashlib.sha256(self.mesh_peers[self.rank].host.encode()).hexdigest()[:16]
        return replace(
            job,
            name=f"{job.name}@{host}",
            rank=here.local_rank,
            world_size=len(here.local),
            status_board=board,
            hosts="",
        )

    @property
    def inside(self) -> SharedMemoryBackend:
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
        inside = parent.inside
        self._refuse_if_given_up()
        split = inside._new_split(local, identity)

        def ranks_here(ranks: Sequence[int]) -> list[int]:
            return [self.host_map.local[local.index(rank)] for rank in ranks]

        where = f"split({list(self.members)}) at {caller_site()}"
        wait = Wait(self, where, lambda: ranks_here(split.absent()))

        def poll() -> None:
            wait.poll()
            self._refuse_if_given_up()

        try:
            status = split.wait(deadline, poll)
        finally:
            wait.end()
        if status.code != StatusCode.DONE:
            failed = ranks_here([status.failed_rank])[0] if status.failed_rank >= 0 else -1
            raise self._failure_inside(status, failed, ranks_here(split.absent()), deadline)
        made = inside._adopt(split.group(), local)
        inside._keep(made, identity)
        self._share_memory(made)

    def _refuse_if_given_up(self) -> None:
        """Raise if another member has given this group up while it is being made."""
        if (given := self.error_of(None)) is not None:
            raise given.now(self.rank)

    def _failure_inside(
        self, status: Status, rank: int, absent: list[int], deadline: Deadline
    ) -> BaseException:
        """Make the error of members on this host that did not come to share memory."""
        what = self._name_split(self.members)
        if status.error is not None:
            return status.error
        if status.code == StatusCode.LATE:
            return self._split_timeout(what, absent, deadline)
        if status.code == StatusCode.CORRUPT:
            reason = "its group does not lie in its memory"
            return failures.damaged(what, rank, self.rank, reason)
        if status.code == StatusCode.GROUP_ERROR:
            reason = f"{what}: the group of this host was aborted"
            return GroupAborted(reason, reason=reason, this_rank=self.rank)
        return failures.lost_in_split(what, rank, self.rank, self.leave_reason_of(rank).how)

    def _share_memory(self, inside: SharedMemoryBackend) -> None:
        """Take the group of this host for collectives in two levels."""
        self._inside = inside
        local = list(self.host_map.local)
        self._two_levels = _native.HybridGroup(self.group, inside.group, local, MISMATCH_FOUND)
        self._take_fast_path(self._two_levels)

    def place_in_memory(self, member: int) -> tuple[SharedMemoryBackend, int] | None:
        local = [self.members[rank] for rank in self.host_map.local]
        return (self.inside, local.index(member)) if member in local and self._inside else None

    def _new_memory(self, nbytes: int) -> np.ndarray[Any, Any]:
        return self.inside._new_memory(nbytes)

    def _sharing_ranks(self) -> Sequence[int]:
        return self.host_map.local

    def _allocate_shared(self, nbytes: int) -> int:
        return self.inside._allocate_shared(nbytes)

    def _open_shared(self, key: int, nbytes: int) -> np.ndarray[Any, Any]:
        return self.inside._open_shared(key, nbytes)

    def _release_shared(self, key: int) -> None:
        self.inside._release_shared(key)

    def leave_reason_of(self, rank: int) -> LeaveReason:
        """Tell how a rank left; of one on this host, shared memory has it first."""
        here = self.host_map.local
        if rank in here and self._inside is not None:
            words = self._inside.group.leave_reason_of(here.index(rank))
            if words is not None:
                return unpack_leave_reason(words)
        return super().leave_reason_of(rank)

    def _lateness(self, rank: int) -> float:
        """Return how long this rank has waited for another, between hosts and inside."""
        between, here = super()._lateness(rank), self.host_map
        if rank not in here.local:
            return between
        return between + self.inside.group.waited(here.local_rank, here.local.index(rank))

    def _leave(self, leave_reason: LeaveReason, deadline: Deadline) -> None:
        if self._inside is not None:
            self._inside._leave(leave_reason, deadline)
        super()._leave(leave_reason, deadline)

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
        lengths = lengths_of(kind, self.rank, self.world_size, input, output, args.counts)
        sample = input or output
        dtype = sample.dtype if sample else DType.UINT8
        counts = input.count if input else None, output.count if output else None
        status = self._two_levels.execute(
            self._program(kind, dtype, lengths, args, *counts),
            input.memory if input else None,
            output.memory if output else None,
            running.call.kind,
            running.sequence,
            running.fingerprint,
            running.num_collectives - 1,
            *running.waiting,
        )
        self._check(running, status)

    def plan_of(
        self, kind: Kind, dtype: DType, lengths: Lengths, args: CollectiveArgs
    ) -> _native.Program:
        """Write the program of a call on one array that ``describe`` has described."""
        whole, place = lengths.count, (self.rank, args.root)
        part = whole // self.world_size
        takes_none = kind is Kind.BROADCAST and self.rank != args.root
        has_input = kind.has_input(*place) and not takes_none
        num_input = (part if kind.input_is_block else whole) if has_input else None
        has_output = kind.has_result(*place)
        num_output = (part if kind.result_is_block else whole) if has_output else None
        return self._program(kind, dtype, lengths, args, num_input, num_output)

    def _program(
        self,
        kind: Kind,
        dtype: DType,
        lengths: Lengths,
        args: CollectiveArgs,
        num_input: int | None,
        num_output: int | None,
    ) -> _native.Program:
        """Write how a collective on arrays of so many elements is done; kept for the next one."""
        is_uneven = args.counts is not None  # which the lengths tell, too
        key = (kind, dtype, lengths, args._replace(counts=None), is_uneven, num_input, num_output)
        found = self._programs.get(key)
        if found is None:
            if len(self._programs) >= MOST_PLANS:
                self._programs.clear()
            found = two_levels.build(self, kind, dtype, lengths, args, num_input, num_output)
            self._programs[key] = found
        return found

    def planner_of(self, ranks: Sequence[int]) -> Planner:
        if len(ranks) == self.world_size:
            return self.planner
        key = tuple(ranks)
        if key not in self._planners:
            rank, size, model = key.index(self.rank), len(key), self.link_model
            self._planners[key] = Planner(
                rank, size, self.config, model, reduces_in_order=False, peers=key
            )
        return self._planners[key]

    def _held_up_by(self) -> list[int]:
        """List the ranks that a call was given up for; between hosts there may be none."""
        local = [self.host_map.local[rank] for rank in self.inside.group.missing()]
        here = [rank for rank in local if rank != self.rank]
        return self.group.missing() or here or super()._held_up_by()

    def _report_mismatch(
        self, running: RunningCall, error: type[CollectiveMismatch], text: str
    ) -> DistributedError:
        """Stop the others of this host in their next collective; all ranks get the same error."""
        status = self._two_levels.tell_mismatch(
            running.call.kind,
            running.sequence,
            running.fingerprint,
            *running.waiting,
        )
        if status.code != StatusCode.MISMATCH:
            self._check(running, status)
        return super()._report_mismatch(running, error, text)

    def _end_call(self, running: RunningCall) -> None:
        super()._end_call(running)
        self.group.exit()
