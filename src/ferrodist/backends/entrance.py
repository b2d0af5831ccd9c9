# SPDX-License-Identifier: MIT OR Apache-2.0
"""Entrance: how ranks enter a collective of an engine, by one small exchange of its own.

An engine knows no deadlines, and a call that ranks make differently may crash it. So each rank
first puts numbers about its call into an allreduce of 48 bytes, MIN, of which the result is the
same as what it put in on all ranks, or on none. It is polled against the deadline.

Such an exchange cannot be taken back: a rank that comes when others have given up would find it
done, and wait for ever in the engine's call. So a rank whose deadline passes first says so to all
and goes on listening for half a second: those in the call answer, and who is silent is missing.
A rank that has come through the exchange waits to hear what becomes of those.
"""

from __future__ import annotations

import time
from array import array
from typing import TYPE_CHECKING

from ferrodist.backends.provider import Engine, Request
from ferrodist.backends.provider_link import GOES_ON, INSIDE, PAST_DEADLINE, ProviderLink
from ferrodist.backends.running_call import RunningCall
from ferrodist.call import Kind
from ferrodist.deadline import Deadline

if TYPE_CHECKING:
    from ferrodist.backends.provider_backend import ProviderBackend

_LISTEN = 0.5  # seconds in which those in the call answer one whose deadline has passed
_STUCK = 5.0  # seconds for an exchange to end of which all say that they are in it
_NUM_WORDS = 6
_BARRIER = Kind.BARRIER
_HALF, _FULL = 1 << 63, 1 << 64
_FIRST_NAP, _LAST_NAP = 2e-5, 1e-3  # seconds between two looks at a request that cannot wait
_LOOK = 0.02  # seconds between two looks at what ranks tell, while a request waits by itself
_LATE = 0.1  # seconds without a look, after which MPICH may not see at once what has come
_LATE_LOOKS = 100  # that a rank makes then; three were enough


class Entrance:
    """The exchanges of one group; one at a time."""

    def __init__(self, engine: Engine, link: ProviderLink) -> None:
        self._engine, self._link = engine, link
        self._words = _new_words()
        self.has_flying = False  # whether the last call is in flight on any rank
        self._looked_at = time.monotonic()
        self.interrupt: BaseException | None = None  # Ctrl-C that came too late to stay out

    def enter(self, backend: ProviderBackend, running: RunningCall, is_reporting: bool) -> bool:
        """Wait until all ranks have come; tell whether their calls differ.

        The backend is asked meanwhile whether the call can still succeed.
        """
        sequence, fingerprint = running.sequence, running.fingerprint
        if fingerprint >= _HALF:
            fingerprint -= _FULL
        words = self._words
        words[0], words[1] = sequence, ~sequence
        words[2], words[3] = fingerprint, ~fingerprint
        words[4], words[5] = -is_reporting, -running.in_background
        self._link.num_entered += 1
        self._engine.is_awaited = False
        request = self._engine.start_minimum(words)
        try:
            self._wait(backend, running, request)
        except BaseException as error:
            if isinstance(error, Exception) or not self._have_all_come(request):
                request.cancel()
                self._words = _new_words()  # the engine may still write into the others
                raise
            self.interrupt = error
        self.has_flying = words[5] != 0
        is_same = words[0] == sequence and words[1] == ~sequence
        is_same = is_same and words[2] == fingerprint and words[3] == ~fingerprint
        is_same = is_same and words[4] == 0
        may_block = is_same and not self.has_flying
        self._engine.is_awaited = may_block and running.call.kind is not _BARRIER
        return not is_same

    def _have_all_come(self, request: Request) -> bool:
        """Say that this rank gives up; tell whether it is too late, for all were there before."""
        if request.test():
            return True
        self._link.tell_of_entry(PAST_DEADLINE, self._link.num_entered)
        end = time.monotonic() + _LISTEN / 2
        while not request.test():
            if time.monotonic() > end:
                return False
            time.sleep(_LAST_NAP)
        self._link.tell_of_entry(GOES_ON, self._link.num_entered)
        return True

    def _wait(self, backend: ProviderBackend, running: RunningCall, request: Request) -> None:
        link = self._link
        wait = getattr(request, "wait", None)
        if not request.test():
            if wait is not None:
                wait(_LAST_NAP)
            if not request.test():
                self._wait_long(backend, running, request)
        now = time.monotonic()
        for _ in range(_LATE_LOOKS if now - self._looked_at > _LATE else 1):
            link.poll()
        self._looked_at = now
        if link.past_deadline:
            self._wait_for_doubtful(backend, running)

    def _wait_long(self, backend: ProviderBackend, running: RunningCall, request: Request) -> None:
        backend.note_site(running)
        link, entry = self._link, self._link.num_entered
        limit = None  # the end of listening
        answered: set[int] = set()
        nap = _FIRST_NAP
        while not request.test():
            link.poll()
            backend._check_standing(running, link.needed())
            asking = {peer for peer, one in link.past_deadline.items() if one == entry} - answered
            link.tell_of_entry(INSIDE, entry, sorted(asking))
            answered |= asking
            now = time.monotonic()
            if limit is None and running.deadline.remaining() <= 0:
                link.tell_of_entry(PAST_DEADLINE, entry)
                limit = now + _LISTEN
            elif limit is not None and now >= limit:
                self._give_up(backend, running, is_stuck=now >= limit + _STUCK)
            _sleep(request, nap)
            nap = min(2 * nap, _LAST_NAP)
        if limit is not None:
            link.tell_of_entry(GOES_ON, entry)
        # All have come: from now on the call only ends if nothing moves any more.
        running.deadline = Deadline(running.deadline.seconds)

    def _give_up(self, backend: ProviderBackend, running: RunningCall, is_stuck: bool) -> None:
        """End the call because of those who are silent; because of all if nothing helps."""
        link = self._link
        silent = [peer for peer in link.peers if link.inside.get(peer, 0) < link.num_entered]
        if silent or is_stuck:
            backend._expire(running, silent or link.peers)

    def _wait_for_doubtful(self, backend: ProviderBackend, running: RunningCall) -> None:
        """Wait for ranks whose deadline had passed: they go on with the call, or have ended it."""
        link, entry = self._link, self._link.num_entered
        while doubtful := [peer for peer, one in link.past_deadline.items() if one == entry]:
            backend._check_standing(running, doubtful)
            time.sleep(_LAST_NAP)
            link.poll()


def _new_words() -> memoryview:
    return memoryview(array("q", bytes(8 * _NUM_WORDS)))


def _sleep(request: Request, nap: float) -> None:
    wait = getattr(request, "wait", None)
    if wait is None:
        time.sleep(nap)
    else:
        wait(_LOOK)
