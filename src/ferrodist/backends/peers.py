# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a rank knows of those it is connected to: where they are, how they died, their settings.

Settings that ranks must share (``Config.shared``) are compared when they have met: a difference
would look like damage, or like a rank that is lost, later.
"""

from __future__ import annotations

import json
import select
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ferrodist import _native
from ferrodist.arrays import InputArray, as_input, as_output
from ferrodist.backends.failures import LeaveReason, describe, died, names_of_ranks
from ferrodist.backends.receive import Receive
from ferrodist.buffer import DType
from ferrodist.call import MAX_TAG
from ferrodist.config import variable
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    DistributedError,
    InvalidArgument,
    ProtocolError,
    RendezvousError,
    is_of_victim,
)
from ferrodist.rendezvous import Job, Member
from ferrodist.rendezvous.mesh import MeshPeer
from ferrodist.rendezvous.watch import describe_exit, is_stopped, try_exit_code

if TYPE_CHECKING:
    from ferrodist.backends.process_backend import ProcessBackend

_PATIENCE = 0.3  # until a launcher has noted a death that we see at the same moment
_PAUSE = 0.005
_KILL_SECONDS = 1.0  # until the kernel has ended a process that was killed


class ExitStatuses:
    """Asks the kernel, and the launcher's notes, how the processes of a job have ended."""

    def __init__(self, job: Job, members: Sequence[Member]) -> None:
        self._job = job
        self._members = members

    def leave_reason_of(self, rank: int) -> LeaveReason:
        """Tell how a rank of the world left whose process is gone."""
        how = self._await_how(rank, _PATIENCE if self._job.status_board is not None else 0.0)
        return died(how or "died (its process is gone)")

    def _await_how(self, rank: int, patience: float = _PATIENCE) -> str | None:
        """Return how a process ended, once that can be known; None if it cannot."""
        end = time.monotonic() + patience
        while (how := self._try_how(rank)) is None and time.monotonic() < end:
            time.sleep(_PAUSE)
        return how

    def _try_how(self, rank: int) -> str | None:
        member = self._members[rank]
        code = try_exit_code(member.pid, member.watch)
        if code is not None:
            return describe_exit(code)
        board = self._job.status_board
        return None if board is None else board.describe(rank)

    def can_kill(self, rank: int) -> bool:
        """Tell whether this process may kill that of a rank, which a lifeline does not allow."""
        return self._signal(rank, 0)

    def kill(self, rank: int) -> bool:
        """Kill the process of a rank; tell whether it is gone, which takes a second at most."""
        return self._signal(rank, signal.SIGKILL) and is_readable(
            self._members[rank].watch, _KILL_SECONDS
        )

    def _signal(self, rank: int, number: int) -> bool:
        try:
            signal.pidfd_send_signal(self._members[rank].watch, number)
        except ProcessLookupError:
            return True  # it is gone
        except OSError:  # no pidfd, one of another pid namespace, another user's process
            return False
        return True

    def is_traced(self, rank: int) -> bool:
        """Tell whether a debugger holds the process of a rank."""
        return _native.is_traced(self._members[rank].watch)

    def is_stopped(self, rank: int) -> bool:
        """Tell whether the process of a rank is stopped; False if that cannot be known."""
        return is_stopped(self._members[rank].pid)

    def note_kill(self, rank: int, text: str) -> None:
        """Let the launcher say why a rank was killed."""
        if self._job.status_board is not None:
            self._job.status_board.set_final_error(rank, text, is_consequence=False)

    def say(self, error: BaseException) -> None:
        """Tell the launcher that this rank's program has raised."""
        rank, board = self._job.rank, self._job.status_board
        if board is not None:
            is_second = is_of_victim(error, rank)
            board.set_final_error(rank, describe(error), is_consequence=is_second)


_SETTINGS_NBYTES = 1024
_MAX_SHOWN = 600  # characters of a difference
_SETTINGS_TAG = MAX_TAG + 2  # no user's


class PeerExitStatuses(ExitStatuses):
    """As ExitStatuses; of processes on other hosts nothing is known but that they are gone."""

    def __init__(self, job: Job, mesh_peers: Sequence[MeshPeer]) -> None:
        super().__init__(job, ())
        self._mesh_peers = mesh_peers

    def is_traced(self, rank: int) -> bool:
        watch = self._mesh_peers[rank].watch
        return watch >= 0 and _native.is_traced(watch)

    def is_stopped(self, rank: int) -> bool:
        return self._mesh_peers[rank].watch >= 0 and is_stopped(self._mesh_peers[rank].pid)

    def leave_reason_of_silent(self, rank: int, flaw: str) -> LeaveReason:
        """Tell how a rank of the world left that said nothing; ``flaw`` is its connection's."""
        mesh_peer, me = self._mesh_peers[rank], self._job.rank
        if mesh_peer.host != self._mesh_peers[me].host:
            place = f"{mesh_peer.host_name or mesh_peer.address}, pid {mesh_peer.pid}"
            return died(f"is unreachable: its process, host or network failed ({flaw}; {place})")
        how = self._await_how(rank)
        if how is None and mesh_peer.watch >= 0 and not is_readable(mesh_peer.watch):
            return LeaveReason(
                f"is alive (pid {mesh_peer.pid}), but not connected to rank {me} any more: {flaw}",
                "look at the network between the two",
            )
        return died(how or "died (its process is gone)")

    def _try_how(self, rank: int) -> str | None:
        mesh_peer = self._mesh_peers[rank]
        code = None if mesh_peer.watch < 0 else try_exit_code(mesh_peer.pid, mesh_peer.watch)
        if code is not None:
            return describe_exit(code)
        board = self._job.status_board
        return None if board is None else board.describe(rank)


def is_readable(file: int, seconds: float = 0.0) -> bool:
    """Tell whether a file becomes readable in time; a watch does when its process is gone."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


# -- settings -------------------------------------------------------------------------------------


def check_settings(backend: ProcessBackend) -> None:
    """Compare the settings that ranks must share; all raise the same InvalidArgument, or none."""
    deadline = Deadline(backend.config.join_timeout)
    try:
        compare = _compare_all if backend.rank == 0 else _let_compare
        difference = compare(backend, deadline)
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
            f"{difference}: it has to be the same on all ranks", this_rank=backend.rank
        )


def _compare_all(backend: ProcessBackend, deadline: Deadline) -> str:
    """On rank 0: receive the settings of all ranks, and tell all ranks what differs."""
    peers = range(1, backend.world_size)
    everybody = [_shared_by(backend), *(_receive(backend, peer, deadline) for peer in peers)]
    difference = describe_difference(everybody)
    for peer in peers:
        _send(backend, {"difference": difference}, peer, deadline)
    return difference


def _let_compare(backend: ProcessBackend, deadline: Deadline) -> str:
    """On the others: send the settings to rank 0, and receive what differs."""
    _send(backend, _shared_by(backend), 0, deadline)
    return str(_receive(backend, 0, deadline)["difference"])


def describe_difference(everybody: Sequence[dict[str, Any]]) -> str:
    """Say of the first setting that differs which ranks have which value; '' if none does."""
    for name in everybody[0]:
        ranks_of: dict[str, list[int]] = {}
        for rank, settings in enumerate(everybody):
            ranks_of.setdefault(_shown(settings.get(name)), []).append(rank)
        if len(ranks_of) > 1:
            groups = [f"{value} on {names_of_ranks(ranks)}" for value, ranks in ranks_of.items()]
            text = f"{variable(name)} is {', '.join(groups[:-1])} and {groups[-1]}"
            return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    return ""


def _shared_by(backend: ProcessBackend) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(backend.config.shared()))
    return found


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _send(backend: ProcessBackend, facts: dict[str, Any], peer: int, deadline: Deadline) -> None:
    backend._send(_pack(facts), peer, _SETTINGS_TAG, deadline)


def _receive(backend: ProcessBackend, peer: int, deadline: Deadline) -> dict[str, Any]:
    target = as_output(bytearray(_SETTINGS_NBYTES), DType.UINT8, (_SETTINGS_NBYTES,))
    message = backend._recv(Receive(peer, _SETTINGS_TAG, target), deadline)
    try:
        found = json.loads(message.rstrip(b"\0").decode())
    except RecursionError as error:
        raise ValueError("settings that are nested too deep") from error
    if not isinstance(found, dict) or ("difference" not in found) != (backend.rank == 0):
        raise ValueError(f"rank {peer} sent settings that cannot be decoded")
    return found


def _pack(facts: dict[str, Any]) -> InputArray:
    return as_input(json.dumps(facts).encode().ljust(_SETTINGS_NBYTES, b"\0"))
