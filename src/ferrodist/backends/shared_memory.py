# SPDX-License-Identifier: MIT OR Apache-2.0
"""SharedMemoryBackend: ranks are processes of one host that see each other's memory.

The collectives themselves are native code (``native/shm``); here are joining, the arena, and the
short way: a call that native code does whole, and that comes here only to wait or to fail.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Self, TypeVar

import numpy as np

from ferrodist import _native
from ferrodist.backends.deaths import Deaths
from ferrodist.backends.planner import Planner
from ferrodist.backends.process_talk import Wait
from ferrodist.backends.shared_talk import SharedTalk
from ferrodist.backends.short_way import ShortWayBackend
from ferrodist.buffer import DTYPES_BY_LABEL
from ferrodist.call import Call, Leaf
from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.rendezvous import Job, meet
from ferrodist.schedules.cost import LINKS

T = TypeVar("T")


class SharedMemoryBackend(ShortWayBackend):
    """One rank of a group of processes on one host.

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
        deaths: Deaths,
    ) -> None:
        self.arena = arena
        super().__init__(world, group, members, rank, config, deaths)
        self._at_once = group.at_once
        self._send_at_once = group.send_at_once
        self._recv_at_once = group.recv_at_once
        self._at_once_wait: Wait | None = None

    @classmethod
    def join(cls, job: Job, *, config: Config | None = None) -> SharedMemoryBackend:
        """Meet the other ranks of the job and make the group of all; every rank calls it."""
        config = Config.from_environment() if config is None else config
        arena = _native.Arena(job.rank, job.world_size)
        members = meet(job, arena.fd, config.join_timeout)
        try:
            fds = [(member.arena, member.watch) for member in members]
            world = _native.World(job.rank, arena, fds, config.heartbeat, config.silence)
        finally:
            for member in members:
                os.close(member.arena)
            os.close(members[job.rank].watch)  # the world closes those of the others
        ranks, deaths = tuple(range(job.world_size)), Deaths(job, members)
        return cls(world, arena, world.first_group(), ranks, job.rank, config, deaths)

    def _new_talk(
        self, sequence: int, call: Call, deadline: Deadline, num_runs: int = 0
    ) -> SharedTalk:
        """Begin a call; its first collective compares it with those of the others."""
        return SharedTalk(self, sequence, call, deadline, num_runs)

    def _new_planner(self) -> Planner:
        """Plan only for callers that name an algorithm; unnamed, native code decides."""
        return Planner(self.rank, self.world_size, self.config, LINKS["shared_memory"])

    def _new_split(self, members: Sequence[int], identity: int) -> _native.Split:
        return _native.Split(self.group, list(members), identity)

    def _child(self, group: _native.SharedGroup, world_ranks: tuple[int, ...], rank: int) -> Self:
        config, deaths = self.config, self._deaths
        return type(self)(self.world, self.arena, group, world_ranks, rank, config, deaths)

    def damage_of(self, rank: int, what: str) -> str:
        """Say that it is no part of the memory that its rank shares."""
        return f"{what} does not lie in its memory"

    def _new_memory(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Take memory of this process's arena; it goes back with the last array over it."""
        return self.arena.empty(nbytes) if nbytes else super()._new_memory(0)

    # -- messages on the short way ---------------------------------------------------------------

    def _look_at_mail(self) -> None:
        """Look round in a receive that went the short way: native code hears of signals by this."""

    def _fail_recv_at_once(
        self,
        outcome: int,
        culprit: int,
        error: BaseException | None,
        found: bytes,
        like: Any,
        peer: int,
        tag: int,
    ) -> None:
        """Raise what became of a receive that went the short way."""
        self._stop_looking()
        expected = Leaf("", DTYPES_BY_LABEL[like.dtype.name], like.shape)
        with self._aborting_on_interrupt("recv"):
            raise self._messenger.receive_failure(
                outcome, culprit, error, found, expected, peer, tag, Deadline(self.timeout)
            )
