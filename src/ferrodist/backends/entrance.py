# SPDX-License-Identifier: MIT OR Apache-2.0
"""Entrance: how ranks enter a collective of an engine, by one small exchange of its own.

An engine knows no deadlines, and a call that ranks make differently may crash it. So each rank
first puts numbers about its call into an allreduce of 48 bytes, MIN, of which the result is the
same as what it put in on all ranks, or on none. It is polled against the deadline.

Such an exchange cannot be taken back: a rank that comes when others have given up finds it done,
and would wait for ever in the engine's call. So a rank that wants to give up, because its deadline
has passed or the group was aborted, first says so to all and listens for a moment. If the exchange
is done meanwhile it stays and goes through with the call; else it says that it gave up. A rank
whose exchange is done waits until all that were giving up have said which. So either all ranks go
into the engine's call or none does, as long as a message takes less than half of that moment. Those
in the exchange answer a rank that is giving up, so that it can name the silent ones.
"""

from __future__ import annotations

import threading
import time
from array import array
from typing import TYPE_CHECKING

from ferrodist.backends.provider import Engine, Request
from ferrodist.backends.provider_link import GAVE_UP, GIVING_UP, INSIDE, STAYS, ProviderLink
from ferrodist.backends.running_call import RunningCall
from ferrodist.call import Kind
from ferrodist.deadline import Deadline
from ferrodist.errors import RankLost

if TYPE_CHECKING:
    from ferrodist.backends.provider_backend import ProviderBackend

_LISTEN = 0.5  # seconds in which those in the call answer a rank whose deadline has passed
_LISTEN_ABORTED = 0.25  # seconds in which a rank that gives up for another reason listens
_STUCK = 5.0  # seconds for an exchange to end of which all say that they are in it
_MOST_INTERRUPTS = 4  # one after the other, before a rank gives up without listening
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
        self._answered: dict[int, int] = {}  # the last entry in which each peer was answered
        self.late_error: BaseException | None = None  # raised when all were there: after the call

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
        link, me = self._link, threading.get_ident()
        link.staying.add(me)
        try:
            self._exchange(backend, running)
        finally:
            link.staying.discard(me)
            if link.has_left:  # close() on another thread, which could not tell the others
                link.say_good_bye()
        self.has_flying = words[5] != 0
        is_same = words[0] == sequence and words[1] == ~sequence
        is_same = is_same and words[2] == fingerprint and words[3] == ~fingerprint
        is_same = is_same and words[4] == 0
        may_block = is_same and not self.has_flying
        self._engine.is_awaited = may_block and running.call.kind is not _BARRIER
        return not is_same

    def _exchange(self, backend: ProviderBackend, running: RunningCall) -> None:
        link = self._link
        # Another thread may end the group now. It sets the error first and then tells how many
        # entries this rank has made; so count first and then look: it tells of this one, or this
        # rank sees the error and stays out.
        link.num_entered += 1
        if link.final is not None or link.has_left:
            link.num_entered -= 1
            backend._check_standing(running, [])
            link.num_entered += 1
        self._engine.is_awaited = False
        request = self._engine.start_minimum(self._words)
        try:
            self._wait(backend, running, request)
        except BaseException as error:  # Ctrl-C too: others may be in the call
            stays = False
            try:
                stays = self._has_to_stay(request, error)
            finally:
                if not stays:
                    self._give_up()
                    request.cancel()
                    self._words = _new_words()  # the engine may still write into the others
            if not stays:
                raise
            self.late_error = self.late_error or error

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
        if (link.giving_up or link.gave_up) and not self._all_stay():
            self._raise_what_is_told(backend, running)

    def _wait_long(self, backend: ProviderBackend, running: RunningCall, request: Request) -> None:
        backend.note_site(running)
        nap = _FIRST_NAP
        while not request.test():
            self._look()
            backend._check_standing(running, self._link.needed())
            if running.deadline.remaining() <= 0:
                self._expire(backend, running, request)
                break
            _sleep(request, nap)
            nap = min(2 * nap, _LAST_NAP)
        # All have come: from now on the call only ends if nothing moves any more.
        running.deadline = Deadline(running.deadline.seconds)

    def _look(self) -> None:
        """Read what others tell, and answer those that are giving up: this rank is there."""
        link, entry = self._link, self._link.num_entered
        link.poll()
        for peer, one in list(link.giving_up.items()):
            if one == entry and self._answered.get(peer) != entry:
                self._answered[peer] = entry
                link.tell_of_entry(INSIDE, entry, [peer])

    # -- giving up ------------------------------------------------------------------------------

    def _expire(self, backend: ProviderBackend, running: RunningCall, request: Request) -> None:
        """End the call because of those who are silent; because of all if nothing helps."""
        link = self._link
        if not self._hears_of_all(request, _LISTEN):
            if self._is_given_up():
                self._raise_what_is_told(backend, running)
            silent = [peer for peer in link.peers if link.inside.get(peer, 0) < link.num_entered]
            if silent or not self._hears_of_all(request, _STUCK):
                self._give_up()
                backend._expire(running, silent or link.peers)
        link.tell_of_entry(STAYS, link.num_entered)

    def _has_to_stay(self, request: Request, error: BaseException) -> bool:
        """Tell whether this rank must go through with a call that it wants to give up."""
        if isinstance(error, RankLost | ConnectionError):
            return False  # no engine's call succeeds, or waits for this rank
        for _ in range(_MOST_INTERRUPTS):
            try:
                return self._listens_and_stays(request)
            except Exception:  # noqa: BLE001 -- whatever the engine raises, it is of no use any more
                return False
            except BaseException:  # noqa: BLE001 -- Ctrl-C again: others may be in the call
                continue
        return False

    def _listens_and_stays(self, request: Request) -> bool:
        if self._is_given_up():
            return False
        if not request.test() and not self._hears_of_all(request, _LISTEN_ABORTED):
            return False
        self._link.tell_of_entry(STAYS, self._link.num_entered)
        return self._all_stay()

    def _hears_of_all(self, request: Request, seconds: float) -> bool:
        """Tell all that this rank is giving up; listen whether the exchange is done meanwhile."""
        self._link.tell_of_entry(GIVING_UP, self._link.num_entered)
        end, num_looks = time.monotonic() + seconds, 0
        while not request.test():
            self._look()
            num_looks += 1
            is_over = time.monotonic() > end and num_looks > _LATE_LOOKS
            if is_over or self._is_given_up():
                return False
            time.sleep(_LAST_NAP)
        return True

    def _give_up(self) -> None:
        link = self._link
        link.gave_up[link.rank] = link.num_entered
        link.tell_of_entry(GAVE_UP, link.num_entered)

    def _is_given_up(self) -> bool:
        """Tell whether a rank has given up this entry, or never comes to it: so nobody goes on."""
        return any(one <= self._link.num_entered for one in self._link.gave_up.values())

    def _all_stay(self) -> bool:
        """Wait until all ranks that were giving up this entry stay, or one of them gave up."""
        link, entry = self._link, self._link.num_entered
        while undecided := [peer for peer, one in link.giving_up.items() if one == entry]:
            if self._is_given_up() or any(link.left(peer) is not None for peer in undecided):
                return False
            time.sleep(_LAST_NAP)
            link.poll()
        return not self._is_given_up()

    def _raise_what_is_told(self, backend: ProviderBackend, running: RunningCall) -> None:
        """Raise why the others gave up, as soon as they have said it."""
        link = self._link
        while True:
            gone = [peer for peer in link.peers if peer in link.giving_up or peer in link.gave_up]
            backend._check_standing(running, gone)
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
