# SPDX-License-Identifier: MIT OR Apache-2.0
"""SimulatedBackend: ranks are threads of this process, connected by socket pairs.

Not a mock: each thread has a native mesh of its own, as a process has over TCP, and keeps the whole
contract. Tests, tutorials and debugging run on it with nothing installed and nothing started.
"""

from __future__ import annotations

import itertools
import os
import resource
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn, Self

import numpy as np

from ferrodist import _native
from ferrodist._native import Status
from ferrodist.backends import failures
from ferrodist.backends.executor import Planner
from ferrodist.backends.failures import LeaveReason
from ferrodist.backends.peers import PeerExitStatuses
from ferrodist.backends.running_call import RunningCall
from ferrodist.backends.tcp import LONGEST_PIECE, TcpBackend
from ferrodist.backends.thread_faults import Faults, FaultyLinks
from ferrodist.call import as_index
from ferrodist.config import Config
from ferrodist.errors import InvalidArgument, InvalidWorldSize, RankLost
from ferrodist.rendezvous import Job
from ferrodist.rendezvous.mesh import MeshPeer
from ferrodist.schedules import LinkModel

_KEY = bytes(32)  # of links inside a process, which nobody else can reach
_SPARE_FILES = 64  # for the rest of the program


class _World:
    """What the ranks of one world share."""

    def __init__(self, size: int, config: Config, faults: Faults | None) -> None:
        self.size = size
        self.config = replace(config, message_nbytes=min(config.message_nbytes, LONGEST_PIECE))
        self.ended: dict[int, str] = {}  # how ranks died, which others learn from their links only
        self._shared: dict[int, tuple[np.ndarray[Any, Any], int]] = {}  # until all have taken it
        self._lock = threading.Lock()
        self._sockets = self._connect(faults)

    def _connect(self, faults: Faults | None) -> dict[tuple[int, int], int]:
        """Connect all ranks; return the file of each rank's end, by rank and peer."""
        ends: dict[tuple[int, int], socket.socket] = {}
        pairs = list(itertools.combinations(range(self.size), 2))
        need = (2 if faults is None else 4) * len(pairs) + 2 * self.size
        _allow_files(need)
        try:
            for low, high in pairs:
                ends[low, high], ends[high, low] = socket.socketpair()
            if faults is not None:
                FaultyLinks(faults, ends, self.ended)
        except OSError as error:
            for end in ends.values():
                end.close()
            text = f"{self.size} thread ranks need {need} files to connect: {error.strerror}"
            raise InvalidWorldSize(f"{text}; raise the limit (ulimit -n)", got=self.size) from error
        for end in ends.values():
            end.setblocking(False)
        return {place: end.detach() for place, end in ends.items()}

    def mesh(self, rank: int) -> _native.Mesh:
        """Make the links of a rank, once."""
        sockets, config = self._sockets, self.config
        return _native.Mesh(
            rank,
            [(sockets.pop((rank, peer), -1), _KEY, -1) for peer in range(self.size)],
            config.heartbeat,
            config.heartbeat_timeout,
            config.message_nbytes,
            is_of_thread=True,
        )

    def close_rest(self) -> None:
        """Close the ends of ranks that were not made."""
        while self._sockets:
            os.close(self._sockets.popitem()[1])

    def offer(self, memory: np.ndarray[Any, Any], takers: int) -> int:
        """Keep memory until so many ranks have taken it; return the number to take it by."""
        with self._lock:
            self._shared[id(memory)] = memory, takers
        return id(memory)

    def take(self, key: int) -> np.ndarray[Any, Any]:
        with self._lock:
            memory, takers = self._shared.pop(key)
            if takers > 1:
                self._shared[key] = memory, takers - 1
            return memory

    def withdraw(self, key: int) -> None:
        """Drop memory that none will take."""
        with self._lock:
            self._shared.pop(key, None)


class _ThreadEnds(PeerExitStatuses):
    """How threads have ended: their process, which is this one, says nothing about them."""

    def __init__(self, world: _World) -> None:
        self._world = world

    def leave_reason_of(self, rank: int) -> LeaveReason:
        return failures.died(self._world.ended.get(rank, "died (its links ended)"))

    def leave_reason_of_silent(self, rank: int, flaw: str) -> LeaveReason:
        how = self._world.ended.get(rank)
        return failures.died(how or f"is not connected any more: {flaw}")

    def is_traced(self, rank: int) -> bool:
        return False

    def is_stopped(self, rank: int) -> bool:
        return False

    def can_kill(self, rank: int) -> bool:
        return False

    def kill(self, rank: int) -> bool:
        return False

    def say(self, error: BaseException) -> None:
        pass


class SimulatedBackend(TcpBackend):
    """A group of ranks that are threads of this process, for tests; see ``testing.run_ranks``.

    Example:
        >>> import threading, numpy as np, ferrodist
        >>> from ferrodist import SimulatedBackend
        >>> sums = {}
        >>> def train(backend):
        ...     sums[backend.rank] = ferrodist.allreduce(np.full(2, backend.rank), backend)
        >>> group = SimulatedBackend.create_group(3)
        >>> threads = [threading.Thread(target=train, args=(backend,)) for backend in group]
        >>> for thread in threads: thread.start()
        >>> for thread in threads: thread.join()
        >>> sums[0]
        array([3, 3])
    """

    _exit_statuses: _ThreadEnds

    @classmethod
    def create_group(
        cls, world_size: int, *, config: Config | None = None, faults: Faults | None = None
    ) -> list[Self]:
        """Make a world of ``world_size`` ranks: one backend for each thread, in rank order."""
        size = as_index(world_size)
        if size is None or size < 1:
            raise InvalidWorldSize(
                f"a group needs at least one rank, got {world_size!r}", got=world_size
            )
        if faults is not None:
            faults.check_world(size)
        world = _World(size, Config.from_environment() if config is None else config, faults)
        ranks, ends = tuple(range(size)), _ThreadEnds(world)
        peers = [MeshPeer(rank, "", "", os.getpid(), "", -1, b"", -1) for rank in ranks]
        made = []
        try:
            for rank in ranks:
                mesh = world.mesh(rank)
                made.append(cls(mesh, mesh.first_group(), ranks, rank, world.config, peers, ends))
        finally:
            world.close_rest()
        return made

    @classmethod
    def join(cls, job: Job, *, config: Config | None = None) -> NoReturn:
        raise InvalidArgument(
            "init() cannot make backend 'simulated', whose ranks are threads: see run_ranks and "
            "SimulatedBackend.create_group"
        )

    @property
    def _shared_world(self) -> _World:
        return self._exit_statuses._world

    def _new_planner(self) -> Planner:
        return Planner(self.rank, self.world_size, self.config, self.link_model)

    @property
    def link_model(self) -> LinkModel:
        return LinkModel(*self.config.threads_link, is_serial=True)

    # -- memory that all see --------------------------------------------------------------------

    def _sharing_ranks(self) -> Sequence[int]:
        return range(self.world_size)

    def _allocate_shared(self, nbytes: int) -> int:
        return self._shared_world.offer(np.zeros(nbytes, np.uint8), self.world_size)

    def _open_shared(self, key: int, nbytes: int) -> np.ndarray[Any, Any]:
        return self._shared_world.take(key)

    def _release_shared(self, key: int) -> None:
        self._shared_world.withdraw(key)

    # -- endings --------------------------------------------------------------------------------

    def _give_up(self, reason: str) -> None:
        """Abort the group from outside, with no rank to blame."""
        self._check_process()
        ranks = range(self.world_size)
        seen = "; ".join(f"rank {rank} {self.last_seen(rank)}" for rank in ranks)
        self.set_error(failures.abort(None, f"{reason} ({seen})"))

    def _own_death(self) -> RankLost | None:
        """Return the error of a rank whose links an injected fault has ended."""
        me = self.members[self.rank]
        how = self._shared_world.ended.get(me)
        if how is None:
            return None
        return RankLost(f"rank {me} {how}", rank=self.rank, this_rank=self.rank, how=how)

    def _check_usable(self) -> None:
        if (death := self._own_death()) is not None:
            raise death
        super()._check_usable()

    def failure_of(self, running: RunningCall, status: Status) -> BaseException:
        """Return the error for a status; to a rank that was killed all others seem to be gone."""
        death = self._own_death()
        if death is None:
            return super().failure_of(running, status)
        facts = {"rank": self.rank, "how": death.how}
        self.set_error(failures.GroupError(RankLost, running.sequence, str(death), facts))
        return death

    def leave_reason_of(self, rank: int) -> LeaveReason:
        """Tell how a rank left, a message of this one or a split of its cannot do without it."""
        if (death := self._own_death()) is not None:
            raise death
        return super().leave_reason_of(rank)


def _allow_files(count: int) -> None:
    """Let this process have so many more files, as far as its hard limit goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/proc/self/fd")) + count + _SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
