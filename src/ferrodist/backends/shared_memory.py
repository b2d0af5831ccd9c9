# SPDX-License-Identifier: MIT OR Apache-2.0
"""SharedMemoryBackend: ranks are processes of one host that see each other's memory.

The collectives themselves are native code (``native/shm``); an algorithm that the caller names is
executed by messages. A difference is seen by every rank itself, in the first round of a collective:
fingerprints of all are compared there. Then all exchange their descriptors, again in rounds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import numpy as np

from ferrodist import _native
from ferrodist._native import Status
from ferrodist.backends.executor import Planner, execute_plan
from ferrodist.backends.failures import (
    CallDescriptor,
    StatusCode,
    pack_descriptor,
    unpack_descriptor,
)
from ferrodist.backends.peers import ExitStatuses, check_settings
from ferrodist.backends.process_messages import ProcessMessagingBackend
from ferrodist.backends.running_call import NO_ARGS, CollectiveArgs, Counts, RunningCall
from ferrodist.buffer import Buffer, DType
from ferrodist.call import MAX_TAG, Kind
from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.errors import CollectiveMismatch, DistributedError
from ferrodist.reduce_op import ReduceOp
from ferrodist.rendezvous import Job, meet
from ferrodist.schedules.cost import LINKS

MISMATCH_FOUND = _native.hash_text("mismatch")
"""The fingerprint of a round that a rank joins only to stop the others with a difference."""

_DESCRIPTORS = _native.hash_text("table of calls")
_LATE_WAIT = 0.05  # seconds between looks at whether a call gets on that is late
_64_BITS = (1 << 64) - 1
_SCHEDULE_TAG = MAX_TAG + 1  # no user's


class SharedMemoryBackend(ProcessMessagingBackend):
    """A group of processes on one host, which communicate in shared memory.

    Made by ``ferrodist.init()`` under a launcher, by ``ferrodist.run``, or by ``split``.
    """

    world: _native.World
    group: _native.SharedGroup

    def __init__(
        self,
        world: _native.World,
        arena: _native.Arena,
        group: _native.SharedGroup,
        members: tuple[int, ...],
        rank: int,
        config: Config,
        exit_statuses: ExitStatuses,
    ) -> None:
        self.arena = arena
        super().__init__(world, group, members, rank, config, exit_statuses)
        self._take_fast_path(group)

    @classmethod
    def join(cls, job: Job, *, config: Config | None = None) -> SharedMemoryBackend:
        """Join a job whose ranks are all on this host; every rank calls it."""
        config = Config.from_environment() if config is None else config
        arena = _native.Arena(job.rank, job.world_size)
        members = meet(job, arena.fd, job.join_seconds(config))
        try:
            fds = [(member.arena, member.watch) for member in members]
            world = _native.World(job.rank, arena, fds, config.heartbeat, config.heartbeat_timeout)
        finally:
            for member in members:
                os.close(member.arena)
            os.close(members[job.rank].watch)  # the world closes those of the others
        ranks, exit_statuses = tuple(range(job.world_size)), ExitStatuses(job, members)
        made = cls(world, arena, world.first_group(), ranks, job.rank, config, exit_statuses)
        try:
            check_settings(made)
        except BaseException as error:  # Ctrl-C too: the other ranks are told
            made._fail(error)
            raise
        return made

    def _new_planner(self) -> Planner:
        """Plan only for callers that name an algorithm; unnamed, native code decides."""
        return Planner(self.rank, self.world_size, self.config, LINKS["shared_memory"])

    def _new_split(self, members: Sequence[int], identity: int) -> _native.Split:
        return _native.Split(self.group, list(members), identity)

    def _child(self, group: _native.SharedGroup, world_ranks: tuple[int, ...], rank: int) -> Self:
        config, exit_statuses = self.config, self._exit_statuses
        return type(self)(self.world, self.arena, group, world_ranks, rank, config, exit_statuses)

    def damage_of(self, rank: int, what: str) -> str:
        """Say that it is no part of the memory that its rank shares."""
        return f"{what} does not lie in its memory"

    # -- what the fence needs ---------------------------------------------------------------------

    def place_in_memory(self, member: int) -> tuple[SharedMemoryBackend, int] | None:
        return (self, self.members.index(member)) if member in self.members else None

    def is_dead(self, rank: int) -> bool:
        """Tell whether the process of a rank is gone."""
        return self.world.is_dead(self.members[rank])

    def beats_of(self, rank: int) -> int:
        return self.world.beats_of(self.members[rank])

    def is_traced(self, rank: int) -> bool:
        return self._exit_statuses.is_traced(self.members[rank])

    def can_kill(self, rank: int) -> bool:
        return self._exit_statuses.can_kill(self.members[rank])

    def kill(self, rank: int) -> bool:
        return self._exit_statuses.kill(self.members[rank])

    def _new_memory(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Take memory of this process's arena; it goes back with the last array over it."""
        return self.arena.empty(nbytes) if nbytes else super()._new_memory(0)

    def _sharing_ranks(self) -> Sequence[int]:
        return range(self.world_size)

    def _allocate_shared(self, nbytes: int) -> int:
        return self.group.allocate_block(nbytes)

    def _open_shared(self, key: int, nbytes: int) -> np.ndarray[Any, Any]:
        return self.group.open_block(0, key, nbytes)

    def _release_shared(self, key: int) -> None:
        self.group.free_block(key)

    # -- collectives ----------------------------------------------------------------------------

    def _run_collective(
        self,
        running: RunningCall,
        kind: Kind,
        input: Buffer | None,
        output: Buffer | None,
        args: CollectiveArgs,
    ) -> None:
        """Do one whole collective: in native code, or by executing the algorithm that is named."""
        if args.in_place and kind is Kind.ALL_TO_ALL and args.counts is not None and input:
            # What comes may lie where something still has to be read.
            args, input = args._replace(in_place=False), input.copy()
        # Those of one call are told apart; the first one has the fingerprint of the call.
        number = running.num_collectives - 1
        if args.algorithm is None:
            self._check(running, self.run_native(running, number, kind, input, output, args))
            return
        self._check(running, self.run_native(running, number, Kind.BARRIER))
        plan = self.planner.plan(kind, input, output, args)
        exchange = partial(self._exchange, running)
        execute_plan(plan, input, output, args.in_place, self.config, exchange)

    def run_native(
        self,
        running: RunningCall,
        number: int,
        kind: Kind,
        input: Buffer | None = None,
        output: Buffer | None = None,
        args: CollectiveArgs = NO_ARGS,
        *,
        fingerprint: int | None = None,
    ) -> Status:
        """Do collective ``number`` of a call in native code, or one of a ``fingerprint``."""
        counts = args.counts
        sample = input or output
        return self.group.run(
            kind,
            sample.dtype if sample else DType.UINT8,
            ReduceOp.SUM if args.op is None else args.op,
            args.root,
            input.memory if input else None,
            output.memory if output else None,
            _count(kind, input, output, self.world_size),
            None if counts is None else _flat(counts),
            args.in_place,
            running.sequence,
            (running.fingerprint + number) & _64_BITS if fingerprint is None else fingerprint,
            *running.waiting,
        )

    def _exchange(
        self,
        running: RunningCall,
        to: int,
        payload: memoryview | None,
        peer: int,
        expected_nbytes: int | None,
    ) -> memoryview | None:
        """Send and receive one message of a schedule at once; either may be None."""
        group, poll = self.group, partial(self._poll_in_schedule, running)
        arrived = receiving = sending = None
        try:
            if expected_nbytes is not None:
                arrived = memoryview(bytearray(expected_nbytes))
                receiving = group.irecv(peer, _SCHEDULE_TAG, b"", arrived, False, False)
            if payload is not None:
                sending = group.isend(to, _SCHEDULE_TAG, b"", payload)
            for request, rank in ((receiving, peer), (sending, to)):
                if request is not None:
                    status = self._wait_for(request, running.deadline, poll)
                    self._check(running, Status(status.code, rank, status.error))
            group.note_move()
        except BaseException:  # Ctrl-C too: native code must not touch the arrays any more
            for request in (receiving, sending):
                if request is not None:
                    request.abandon(StatusCode.LATE)
            raise
        return arrived

    def _wait_for(
        self, request: _native.Request, deadline: Deadline, poll: Callable[[], None]
    ) -> Status:
        """Wait for a message of a schedule, beyond the deadline as long as the call goes on."""
        limit = deadline
        while True:
            status = request.wait(limit, False, poll)
            is_late = status.code == StatusCode.LATE
            if not is_late or self.group.expire(deadline).code != StatusCode.DONE:
                return status
            limit = Deadline(_LATE_WAIT)

    def _poll_in_schedule(self, running: RunningCall) -> None:
        """Poll in a message of a schedule; only here a group error ends a wait for a message."""
        self._poll(running)
        given = self.error_of(running.sequence)
        if given is not None:
            raise given.now(self.rank)

    def _report_mismatch(
        self, running: RunningCall, error: type[CollectiveMismatch], text: str
    ) -> DistributedError:
        """Stop the others in their next round with a difference; all get the same group error."""
        status = self.run_native(running, 0, Kind.BARRIER, fingerprint=MISMATCH_FOUND)
        if status.code not in (StatusCode.DONE, StatusCode.MISMATCH):  # done: all ranks report one
            raise self.failure_of(running, status)
        return super()._report_mismatch(running, error, text)

    def _exchange_descriptors(
        self, running: RunningCall, mine: CallDescriptor
    ) -> list[CallDescriptor]:
        data = np.frombuffer(pack_descriptor(mine), np.uint8)
        sizes = np.empty(self.world_size, np.int64)
        self._gather_descriptors(running, np.array([len(data)]), sizes)
        counts, ends = sizes.tolist(), np.cumsum(sizes).tolist()
        joined = np.empty(ends[-1], np.uint8)
        self._gather_descriptors(running, data, joined, counts)
        return [
            unpack_descriptor(joined[end - size : end].tobytes())
            for end, size in zip(ends, counts, strict=True)
        ]

    def _gather_descriptors(
        self, running: RunningCall, mine: Any, all_of_them: Any, counts: Counts | None = None
    ) -> None:
        buffers, args = (_buffer(mine), _buffer(all_of_them)), CollectiveArgs(counts=counts)
        self._check_exchange(
            running,
            self.run_native(running, 0, Kind.ALL_GATHER, *buffers, args, fingerprint=_DESCRIPTORS),
        )


def _count(kind: Kind, input: Buffer | None, output: Buffer | None, world: int) -> int:
    """Say how many elements the array has; where it is cut by rank, how many one block has."""
    if kind is Kind.BARRIER:
        return 0
    if kind in (Kind.SCATTER, Kind.REDUCE_SCATTER):
        assert output is not None
        return output.count
    assert input is not None or output is not None
    count = input.count if input is not None else output.count  # type: ignore[union-attr] # one is
    return count // world if kind is Kind.ALL_TO_ALL else count


def _flat(counts: Counts) -> list[int]:
    return [number for row in counts for number in ([row] if isinstance(row, int) else row)]


def _buffer(array: np.ndarray[Any, Any]) -> Buffer:
    dtype = DType.UINT8 if array.dtype == np.uint8 else DType.INT64
    return Buffer(array.view(np.uint8).data, dtype, array.shape, array)
