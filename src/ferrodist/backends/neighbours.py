# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a rank knows of those it is connected to: where they are, how they died, their settings.

Settings that decide what is sent have to be the same on all ranks; they are compared when ranks
have met, because a difference would look like damage later.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ferrodist import _native
from ferrodist.backends.deaths import Deaths
from ferrodist.backends.verdict import Departure, died
from ferrodist.buffer import Buffer, DType
from ferrodist.call import MAX_TAG
from ferrodist.config import Config, variable
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, InvalidArgument, RendezvousError
from ferrodist.rendezvous import Job
from ferrodist.rendezvous.ends import how_ended
from ferrodist.rendezvous.mesh import Neighbour
from ferrodist.rendezvous.watch import try_exit_code

if TYPE_CHECKING:
    from ferrodist.backends.tcp import TcpBackend

_SHARED_SETTINGS = ("piece_nbytes", "segment_nbytes", "tcp_link")
_SETTINGS_NBYTES = 1024
_SETTINGS_TAG = MAX_TAG + 2  # no user's


class NeighbourDeaths(Deaths):
    """As Deaths; of processes on other hosts nothing is known but that they are gone."""

    def __init__(self, job: Job, neighbours: Sequence[Neighbour]) -> None:
        super().__init__(job, ())
        self._neighbours = neighbours

    def departure_without_words(self, rank: int, flaw: str) -> Departure:
        """Tell how a rank of the world left that said nothing; ``flaw`` is its connection's."""
        neighbour, me = self._neighbours[rank], self._job.rank
        if neighbour.host != self._neighbours[me].host:
            place = f"{neighbour.host_name or neighbour.address}, pid {neighbour.pid}"
            return died(f"died, or its host or the way to it did: {flaw} ({place})")
        how = self._await_how(rank)
        if how is None and neighbour.watch >= 0 and not _is_readable(neighbour.watch):
            return Departure(
                f"is alive (pid {neighbour.pid}), but not connected to rank {me} any more: {flaw}",
                "look at the network between the two",
            )
        return died(how or "died (its process is gone)")

    def _try_how(self, rank: int) -> str | None:
        neighbour = self._neighbours[rank]
        code = None if neighbour.watch < 0 else try_exit_code(neighbour.pid, neighbour.watch)
        if code is not None:
            return how_ended(code)
        return None if self._job.ends is None else self._job.ends.how(rank)


def _is_readable(file: int) -> bool:
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(0))


def has_a_core_each(neighbours: Sequence[Neighbour], rank: int) -> bool:
    """Tell whether the ranks of this host have a core each, so that waits may spin."""
    local = sum(neighbour.host == neighbours[rank].host for neighbour in neighbours)
    return local <= min(len(os.sched_getaffinity(0)), _native.container_cpus())


def check_settings(backend: TcpBackend) -> None:
    """Compare the settings that ranks must share with those of rank 0."""
    mine = _settings(backend.config)
    deadline = Deadline(backend.config.join_timeout)
    if backend.rank == 0:
        for peer in range(1, backend.world_size):
            backend._messenger.send(_pack(mine), peer, _SETTINGS_TAG, deadline)
        return
    theirs = _pack({})
    try:
        backend._messenger.line_up(theirs, 0, _SETTINGS_TAG, deadline)[1]()
        found = json.loads(bytes(theirs.memory).rstrip(b"\0").decode())
    except (DistributedError, ValueError) as error:
        raise RendezvousError(
            f"rank {backend.rank} is connected to the others, but did not hear rank 0's settings: "
            f"{error}",
            rank=0,
            this_rank=backend.rank,
        ) from error
    for name, value in mine.items():
        if found.get(name) != value:
            raise InvalidArgument(
                f"{variable(name)} is {value} on rank {backend.rank} and {found.get(name)} on rank "
                "0: it decides what is sent, so it has to be the same on all ranks",
                got=value,
                expected=found.get(name),
                this_rank=backend.rank,
            )


def _settings(config: Config) -> dict[str, Any]:
    settings = {name: getattr(config, name) for name in _SHARED_SETTINGS}
    found: dict[str, Any] = json.loads(json.dumps(settings))
    return found


def _pack(settings: dict[str, Any]) -> Buffer:
    data = bytearray(json.dumps(settings).encode().ljust(_SETTINGS_NBYTES, b"\0"))
    return Buffer(memoryview(data), DType.UINT8, (_SETTINGS_NBYTES,), data)
