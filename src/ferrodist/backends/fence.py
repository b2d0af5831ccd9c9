# SPDX-License-Identifier: MIT OR Apache-2.0
"""The fence: what a rank does before it goes on without ranks that may still be alive.

A rank that is lost because it is silent (stopped, swapped out, its host frozen) may continue at any
time, and then goes on with what it was doing. Where ranks share memory, that may be writing its
part of an allreduce into the arrays of the others. So a rank that splits off the survivors first
makes sure that nothing of a lost rank can reach its memory or its groups any more:

- It ends every group that it shares with the lost rank, whose next call there raises Evicted.
- It bars the lost rank from the call that failed. If that rank has entered the call already, it is
  killed. Where it cannot be killed (it is in another pid namespace, or another user's), this rank
  gives the arrays that it has shown in the call private pages, at the same addresses.

Ranks that are not lost, but not in the list of ``split`` either, leave the failed call by
themselves; they are waited for. So is a rank that a debugger holds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ferrodist.backends import failures
from ferrodist.backends.failures import GroupError
from ferrodist.backends.progress import Wait
from ferrodist.call import caller_site
from ferrodist.deadline import Deadline
from ferrodist.errors import CollectiveTimeout, RankLost

if TYPE_CHECKING:
    from ferrodist.backends.process_backend import ProcessBackend
    from ferrodist.backends.shared_memory import SharedMemoryBackend

logger = logging.getLogger("ferrodist")

_POLL = 0.001  # seconds between looks whether a rank has left a call
_OWN_CALLS_END = 5.0  # seconds that calls of this rank take at most to see the group error


def fence_off(backend: ProcessBackend, members: Sequence[int], deadline: Deadline) -> None:
    """Keep ranks that are not among ``members`` out of the memory and the groups of this rank."""
    kept = {backend.members[member] for member in members}
    groups = backend.groups_of_process()
    for group in groups:
        final = group.error_of(None)
        if final is None or final.error is not RankLost:
            continue
        for rank, member in enumerate(group.members):
            if member not in kept:
                Fence(backend, groups, group, rank, final).close(deadline)


class Fence:
    """What is done about one rank that ``group``, which has lost a rank, leaves behind."""

    def __init__(
        self,
        backend: ProcessBackend,
        groups: Sequence[ProcessBackend],
        group: ProcessBackend,
        rank: int,
        final: GroupError,
    ) -> None:
        self._backend = backend  # whose split this is
        self._group = group
        self._rank = rank
        self._final = final
        self._member = member = group.members[rank]
        self._is_lost = rank == final.facts.get("rank")
        concerned = [one for one in groups if member in one.members] if self._is_lost else [group]
        self._groups = concerned
        self._places = [place for one in concerned if (place := one.place_in_memory(member))]

    def close(self, deadline: Deadline) -> None:
        """Return when the rank can reach nothing of this one's any more."""
        if self._is_gone():
            return
        if self._is_lost:
            self._evict()
        if self._is_inside():
            self._stop(deadline)

    def _is_gone(self) -> bool:
        """Tell whether the rank has died, or has left the group by itself."""
        if not self._places:
            return self._group.group.is_gone(self._rank)
        has_left = self._group.group.leave_reason_of(self._rank) is not None
        return has_left or any(inner.is_dead(rank) for inner, rank in self._places)

    def _evict(self) -> None:
        """End the other groups of the lost rank, so that its next call in each of them raises."""
        how = self._final.facts.get("how") or "was lost in another group"
        for group in self._groups:
            if group.error_of(None) is None and not group.is_closed:
                rank = group.members.index(self._member)
                group.set_error(failures.eviction(group.next_sequence, rank, how))

    def _is_inside(self) -> bool:
        """Bar the rank wherever it shares memory; tell whether it is in an unfinished call."""
        found = [inner.group.fence(rank) for inner, rank in self._places]
        return any(found) and not self._is_gone()

    # -- a rank inside the call -------------------------------------------------------------------

    def _stop(self, deadline: Deadline) -> None:
        """Wait until the rank has left the call; a silent one is killed."""
        what = f"split at {caller_site()}"
        wait = Wait(self._group, what, lambda: [self._rank])
        silence = Silence(*self._places[0], is_known=self._is_lost)
        try:
            while self._is_inside():
                if silence.is_too_long():
                    self._kill()
                    return
                if deadline.remaining() <= 0 and not deadline.is_patient:
                    raise self._timeout(what, deadline)
                wait.poll()
                time.sleep(_POLL)
        finally:
            wait.end()

    def _timeout(self, what: str, deadline: Deadline) -> CollectiveTimeout:
        seen = self._group.last_seen(self._rank)
        text = (
            f"{what}: rank {self._rank} {seen}, and may still write into arrays of this rank; "
            f"it did not leave {self._call} within {deadline}"
        )
        rank, this_rank = self._rank, self._group.rank
        return CollectiveTimeout(text, missing=[rank], rank=rank, this_rank=this_rank)

    @property
    def _call(self) -> str:
        return f"{self._final.facts.get('op', 'call')} #{self._final.sequence}"

    def _kill(self) -> None:
        group, (inner, rank) = self._group, self._places[0]
        how = self._final.facts.get("how") if self._is_lost else inner.silence_of(rank)
        why = f"it {how} inside {self._call}, where it can write into the arrays of others"
        note = f"killed by rank {group.rank}, which goes on without it: {why}"
        if inner.can_kill(rank):
            group.exit_statuses.note_kill(self._member, note)
            logger.warning("rank %d: rank %d is being %s", group.rank, self._rank, note)
        if not inner.kill(rank):
            self._take_back()
            text = "rank %d: cannot kill rank %d (%s); arrays it was shown are private from now on"
            logger.warning(text, group.rank, self._rank, why)

    def _take_back(self) -> None:
        """Make the arrays that the rank was shown this process's own, when its own calls end."""
        end = time.monotonic() + _OWN_CALLS_END
        while not all(group.is_idle for group in self._groups) and time.monotonic() < end:
            time.sleep(_POLL)
        for inner, _ in self._places:
            inner.group.take_back_shown()


class Silence:
    """How long a rank has shown no heartbeat; ``is_known``: for too long already."""

    def __init__(self, backend: SharedMemoryBackend, rank: int, *, is_known: bool) -> None:
        self._backend = backend
        self._rank = rank
        self._limit = 0.0 if is_known else backend.config.heartbeat_timeout
        self._beats, self._since = backend.beats_of(rank), time.monotonic()

    def is_too_long(self) -> bool:
        """Tell whether it has lasted too long; never for a rank that a debugger holds."""
        now, beats = time.monotonic(), self._backend.beats_of(self._rank)
        if beats != self._beats or self._backend.is_traced(self._rank):
            self._beats, self._since = beats, now
            return False
        return now - self._since >= self._limit
