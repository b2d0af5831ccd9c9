# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a rank knows of those it is connected to: where they are, how they died, their settings.

Settings that decide what is sent have to be the same on all ranks; they are compared when ranks
have met, because a difference would look like damage later.
"""

from __future__ import annotations

import json
import select
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ferrodist.backends.deaths import Deaths
from ferrodist.backends.verdict import Departure, died
from ferrodist.buffer import Buffer, DType
from ferrodist.call import MAX_TAG
from ferrodist.config import Config, variable
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, InvalidArgument, ProtocolError, RendezvousError
from ferrodist.rendezvous import Job
from ferrodist.rendezvous.ends import how_ended
from ferrodist.rendezvous.mesh import Neighbour
from ferrodist.rendezvous.watch import try_exit_code

if TYPE_CHECKING:
    from ferrodist.backends.tcp import TcpBackend

_SHARED_SETTINGS = ("piece_nbytes", "segment_nbytes", "tcp_link", "unexpected_nbytes")
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


def check_settings(backend: TcpBackend) -> None:
    """Compare the settings that ranks must share with those of rank 0; all ranks raise, or none."""
    deadline = Deadline(backend.config.join_timeout)
    try:
        if backend.rank == 0:
            difference = _hear_differences(backend, deadline)
        else:
            difference = _tell_difference(backend, deadline)
    except ProtocolError:
        raise
    except (DistributedError, ValueError) as error:
        raise RendezvousError(
            f"rank {backend.rank} is connected to the others, but they did not get to compare "
            f"their settings: {error}",
            this_rank=backend.rank,
        ) from error
    if difference:
        raise InvalidArgument(
            f"{difference}: it decides what is sent, so it has to be the same on all ranks",
            this_rank=backend.rank,
        )


def _hear_differences(backend: TcpBackend, deadline: Deadline) -> str:
    """On rank 0: tell all its settings, hear who has others, and tell that to all."""
    peers = range(1, backend.world_size)
    for peer in peers:
        backend._messenger.send(_pack(_settings(backend.config)), peer, _SETTINGS_TAG, deadline)
    answers = [_receive_difference(backend, peer, deadline) for peer in peers]
    difference = next(filter(None, answers), "")
    for peer in peers:
        backend._messenger.send(_pack({"difference": difference}), peer, _SETTINGS_TAG, deadline)
    return difference


def _tell_difference(backend: TcpBackend, deadline: Deadline) -> str:
    """On the others: compare, say what differs, and hear whether anything does anywhere."""
    theirs, difference = _receive(backend, 0, deadline), ""
    for name, value in _settings(backend.config).items():
        if theirs.get(name) != value:
            difference = (
                f"{variable(name)} is {_shown(value)} on rank {backend.rank} and "
                f"{_shown(theirs.get(name))} on rank 0"
            )
    backend._messenger.send(_pack({"difference": difference}), 0, _SETTINGS_TAG, deadline)
    return _receive_difference(backend, 0, deadline)


def _receive_difference(backend: TcpBackend, peer: int, deadline: Deadline) -> str:
    found = _receive(backend, peer, deadline)
    if "difference" not in found:
        raise ValueError(f"rank {peer} does not say whether its settings differ")
    return str(found["difference"])


def _receive(backend: TcpBackend, peer: int, deadline: Deadline) -> dict[str, Any]:
    message = _pack({})
    backend._messenger.recv(message, peer, _SETTINGS_TAG, deadline)
    try:
        found = json.loads(bytes(message.memory).rstrip(b"\0").decode())
    except RecursionError as error:
        raise ValueError("settings that are nested too deep") from error
    if not isinstance(found, dict):
        raise ValueError("settings that cannot be decoded")
    return found


def _shown(value: Any) -> str:
    """Write a setting as it is set."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _settings(config: Config) -> dict[str, Any]:
    settings = {name: getattr(config, name) for name in _SHARED_SETTINGS}
    found: dict[str, Any] = json.loads(json.dumps(settings))
    return found


def _pack(settings: dict[str, Any]) -> Buffer:
    data = bytearray(json.dumps(settings).encode().ljust(_SETTINGS_NBYTES, b"\0"))
    return Buffer(memoryview(data), DType.UINT8, (_SETTINGS_NBYTES,), data)
