# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a provider's group knows of its peers, and its point-to-point calls.

Errors and leave reasons travel as control messages; whoever waits for a request reads them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from ferrodist.arrays import InputArray
from ferrodist.backends import failures
from ferrodist.backends.failures import (
    GroupError,
    LeaveReason,
    pack_group_error,
    pack_leave_reason,
    unpack_group_error,
    unpack_leave_reason,
)
from ferrodist.backends.framing import FrameError, pack_array_form, unpack_shape
from ferrodist.backends.p2p import Lanes, Posted, Target, deliver, header_of, leaf_of_target
from ferrodist.backends.provider import Provider, Request
from ferrodist.buffer import MAX_AXES, DType
from ferrodist.call import Leaf, caller_site
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    BackendClosed,
    DistributedError,
    GroupAborted,
    ProtocolError,
    RankLost,
    SizeMismatch,
)

CONTROL_TAG = 1 << 32
ENTRY_TAG = CONTROL_TAG + 1  # what ranks compare before a collective
DATA_TAG = CONTROL_TAG + 2  # collectives that are made of messages
SPLIT_TAG = 1 << 62  # with a hash of the members in its lower bits

_ERROR, _LEFT = b"E", b"L"
_FIRST_NAP = 2e-5  # seconds between two looks at a request that cannot wait; doubled every time
_LAST_NAP = 1e-3
_POLL = 0.02  # seconds between two looks at control messages while a request waits by itself

Waiting = list[tuple[int, Request]]  # each with the peer it is about


class ProviderLink:
    """What one rank holds of a group; ``members`` are the world ranks behind the group's ranks."""

    def __init__(
        self, provider: Provider, members: tuple[int, ...], parent: ProviderLink | None
    ) -> None:
        self.provider = provider
        self.rank = provider.rank
        self.members = members
        self.has_left = False
        self.waiting_for: int | None = None
        self.sent_nbytes = self.received_nbytes = 0
        self.busy: set[int] = set()  # threads that may hold locks of the provider
        self._parent = parent
        self._errors: list[GroupError] = []
        self._abort = b""  # why the group was aborted, for the groups split off it
        self._left: dict[int, LeaveReason] = {}
        self._lock = threading.RLock()  # reentrant, as everything a finalizer may touch
        self._peers = [rank for rank in range(provider.world_size) if rank != self.rank]

    @property
    def group_name(self) -> str:
        """Whose ranks an error speaks of, where they are not those of the world."""
        if self._parent is None:
            return ""
        return f" (in the group of world ranks {list(self.members)})"

    # -- messages -------------------------------------------------------------------------------

    def isend(self, data: bytes | memoryview, peer: int, tag: int) -> Request:
        """Send bytes."""
        self.sent_nbytes += len(data)
        with self._busy():
            return self.provider.isend(memoryview(data), peer, tag)

    def irecv(self, memory: bytearray | memoryview, peer: int, tag: int) -> Request:
        """Receive into memory."""
        self.received_nbytes += len(memory)
        with self._busy():
            return self.provider.irecv(memoryview(memory), peer, tag)

    def wait(
        self, waiting: Waiting, check: Callable[[list[int]], None], deadline: Deadline
    ) -> None:
        """Wait until all requests are done; ``check`` raises when waiting for these peers is over.

        Then those not done are cancelled; if all had just got done, all is well.
        """
        try:
            with self._busy():
                self._wait(waiting, check, deadline)
        except DistributedError:
            cancelled = [request.cancel() for _, request in waiting]
            if any(cancelled):
                raise
        except BaseException:
            for _, request in waiting:
                request.cancel()
            raise
        finally:
            self.waiting_for = None

    def _wait(
        self, waiting: Waiting, check: Callable[[list[int]], None], deadline: Deadline
    ) -> None:
        nap = _FIRST_NAP
        while waiting := _undone(waiting):
            self.waiting_for = waiting[0][0]
            self.poll()  # may tell that a rank has left: what it sent before is there by now
            if not (waiting := _undone(waiting)):
                return
            check([peer for peer, _ in waiting])
            _sleep(waiting[0][1], nap, deadline)
            nap = min(2 * nap, _LAST_NAP)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Mark this thread as one that may hold locks of the provider."""
        me = threading.get_ident()
        if me in self.busy:
            yield
            return
        self.busy.add(me)
        try:
            yield
        finally:
            self.busy.discard(me)

    # -- what ranks tell each other -------------------------------------------------------------

    def poll(self) -> None:
        """Read the control messages that have come."""
        if self._parent is not None:
            self._parent.poll()
        with self._busy(), self._lock:
            if self.has_left:
                return
            for peer in self._peers:
                while (nbytes := self.provider.iprobe(peer, CONTROL_TAG)) is not None:
                    self._hear(peer, nbytes)
            if self._parent is not None and self._parent._abort and not self._abort:
                self._note_abort(self._parent._abort)

    def _hear(self, peer: int, nbytes: int) -> None:
        memory = bytearray(nbytes)
        request = self.provider.irecv(memoryview(memory), peer, CONTROL_TAG)
        while not request.test():
            time.sleep(_FIRST_NAP)  # it has come: iprobe said so
        body = bytes(memory[1:])
        if memory[:1] == _LEFT:
            self._left.setdefault(peer, unpack_leave_reason(body))
            return
        found = unpack_group_error(body, self.members)
        if found.error is GroupAborted:
            self._note_abort(body)
        else:
            self._note(found)

    def _note_abort(self, body: bytes) -> None:
        self._abort = self._abort or body
        self._note(unpack_group_error(body, self.members))

    def _note(self, found: GroupError) -> None:
        if all(error.sequence > found.sequence for error in self._errors):
            self._errors.append(found)

    def set_error(self, found: GroupError) -> GroupError:
        """End the group on all ranks, unless it is; return the error that stands."""
        with self._busy(), self._lock:
            self.poll()
            standing = self.error_of(found.sequence)
            if standing is not None:
                return standing
            found = found._replace(text=found.text + self.group_name)
            body = pack_group_error(found, self.members)
            self._note(found)
            if found.error is GroupAborted:
                self._abort = body
            if not self.has_left:
                self._tell(_ERROR + body)
                self.provider.abort(found.text)
        return found

    def _tell(self, words: bytes) -> None:
        for peer in self._peers:
            try:
                self.provider.isend(memoryview(words), peer, CONTROL_TAG)
            except ConnectionError:
                continue

    def error_of(self, sequence: int) -> GroupError | None:
        """Return what a rank inside ``sequence`` has to raise, if anything."""
        return next((error for error in self._errors if error.sequence <= sequence), None)

    @property
    def final(self) -> GroupError | None:
        """The error that ended the group: it answers every later call."""
        return self._errors[0] if self._errors else None

    def refuse_if_final(self) -> None:
        """Raise if the group is at its end."""
        if self._errors:
            raise self._errors[0].later(self.rank)

    def refuse_if_aborted(self) -> None:
        """Raise if the group is at its end, unless by a loss: those left may still talk."""
        aborted = next((error for error in self._errors if error.error is not RankLost), None)
        if aborted is not None:
            raise aborted.later(self.rank)

    def left(self, peer: int) -> LeaveReason | None:
        """Tell how a rank left; None while it is there, or nobody knows."""
        if peer not in self._left and self.provider.status(peer) == "lost":
            self.poll()  # its last words may have come meanwhile
            self._left.setdefault(peer, failures.GONE)
        return self._left.get(peer)

    def drop(self) -> None:
        """Leave because the backend was dropped; from a thread of its own.

        A finalizer runs wherever memory runs low, also where the provider holds its locks.
        """
        dropped = failures.died("dropped its backend without close()")
        args = [dropped, Deadline(None)]
        threading.Thread(target=self.leave, args=args, daemon=True).start()

    def leave(self, leave_reason: LeaveReason, deadline: Deadline) -> None:
        """Tell the others that this rank makes no further calls, unless a call never lets it."""
        if not self._lock.acquire(timeout=deadline.timeout()):
            return
        try:
            if not self.has_left:
                self.has_left = True
                self._tell(_LEFT + pack_leave_reason(leave_reason))
                self.provider.close()
        finally:
            self._lock.release()


def _undone(waiting: Sequence[tuple[int, Request]]) -> Waiting:
    return [(peer, request) for peer, request in waiting if not request.test()]


def _sleep(request: Request, nap: float, deadline: Deadline) -> None:
    wait, left = getattr(request, "wait", None), max(0.0, deadline.remaining())
    if wait is None:
        time.sleep(min(nap, left))
    else:
        wait(min(_POLL, left))


# -- point-to-point calls --------------------------------------------------------------------------


_LARGEST_HEADER = len(pack_array_form(DType.BOOL, (0,) * MAX_AXES)) + 1


class _Message:
    """One call: its name in errors, and what its waits look at."""

    def __init__(self, link: ProviderLink, name: str, deadline: Deadline) -> None:
        self.link = link
        self.deadline = deadline
        self.name = name
        self._site = caller_site()

    @property
    def what(self) -> str:
        """The call as errors show it; made only for them."""
        return f"{self.name} at {self._site}{self.link.group_name}"

    def wait(self, request: Request, peer: int) -> None:
        """Wait for a request."""
        with self.naming(peer):
            self.link.wait([(peer, request)], self._check, self.deadline)

    def look(self, peer: int) -> float:
        """Raise if waiting for this peer is over, else say how long to wait on."""
        self.link.poll()
        self._check([peer])
        return min(max(self.deadline.remaining(), 0.0), _POLL)

    def _check(self, peers: list[int]) -> None:
        link, (peer,) = self.link, peers
        if link.has_left:
            raise BackendClosed(f"{self.what}: rank {link.rank} has left", this_rank=link.rank)
        link.refuse_if_aborted()
        if self.deadline.remaining() <= 0:
            raise failures.timed_out(self.what, peer, link.rank, self.deadline, [])
        if link.left(peer) is not None:
            raise self.lost(peer)

    @contextmanager
    def naming(self, peer: int) -> Iterator[None]:
        """Make a RankLost of the error of a provider that cannot reach a peer."""
        try:
            yield
        except DistributedError:
            raise
        except ConnectionError as error:
            raise self.lost(peer) from error

    def lost(self, peer: int) -> RankLost:
        """Make the error of a peer that is gone."""
        self.link.poll()
        leave_reason = self.link.left(peer) or failures.GONE
        return failures.lost(self.what, peer, self.link.rank, leave_reason, [])


class ProviderMessenger:
    """Sends and receives arrays."""

    def __init__(self, link: ProviderLink) -> None:
        self._link = link
        self._lanes = Lanes()

    def send(self, source: InputArray, peer: int, tag: int, deadline: Deadline) -> None:
        """Send a message and wait until ``source`` may change."""
        posted = self.post(source, peer, tag, deadline)
        if not posted.is_done:
            posted.finish()

    def post(self, source: InputArray, peer: int, tag: int, deadline: Deadline) -> Posted:
        """Send a message; what is left is to wait until ``source`` may change."""
        name = f"send(dst={peer}, tag={tag})"
        message = _Message(self._link, name, deadline)
        request = self._isend(message, source, peer, tag)
        return Posted(name, partial(message.wait, request, peer), request.cancel, request.test())

    def line_up(self, target: Target, peer: int, tag: int, deadline: Deadline) -> Posted:
        """Take a place among the receivers; what is left is to receive."""
        name = f"recv(src={peer}, tag={tag})"
        return self._line_up(_Message(self._link, name, deadline), target, peer, tag)

    def sendrecv(
        self, source: InputArray, to: int, target: Target, peer: int, tag: int, deadline: Deadline
    ) -> Any:
        """Send and receive at once; if nothing is received the message is taken back.

        A message that came but does not fit is this rank's own affair: its own goes out.
        """
        name = f"sendrecv(dst={to}, src={peer}, tag={tag})"
        message = _Message(self._link, name, deadline)
        request = self._isend(message, source, to, tag)
        try:
            received = self._line_up(message, target, peer, tag).finish()
        except (SizeMismatch, ProtocolError):
            message.wait(request, to)
            raise
        except BaseException:
            request.cancel()
            raise
        message.wait(request, to)
        return received

    def _isend(self, message: _Message, source: InputArray, peer: int, tag: int) -> Request:
        self._check_open()
        if self._link.left(peer) is not None:
            raise message.lost(peer)
        data = header_of(source) + source.buffer.memory
        with message.naming(peer):
            return self._link.isend(data, peer, tag)

    def _line_up(self, message: _Message, target: Target, peer: int, tag: int) -> Posted:
        self._check_open()
        lane, number = self._lanes.draw(peer, tag)

        def receive() -> Any:
            try:
                lane.wait(number, lambda: message.look(peer))
                return self._receive(message, target, peer, tag)
            finally:
                self._lanes.leave(lane, number, peer, tag)

        return Posted(message.name, receive, partial(self._lanes.leave, lane, number, peer, tag))

    def _receive(self, message: _Message, target: Target, peer: int, tag: int) -> Any:
        """Receive when it is this one's turn: no other receive may take the message probed for."""
        if target is None:
            probe = _Probe(self._link.provider, peer, tag)
            message.wait(probe, peer)
            nbytes = probe.nbytes
        else:
            nbytes = _LARGEST_HEADER + target.buffer.nbytes
        memory = bytearray(nbytes)
        with message.naming(peer):
            request = self._link.irecv(memory, peer, tag)
        message.wait(request, peer)
        return self._unpack(message, memoryview(memory), target, peer)

    def _check_open(self) -> None:
        self._link.poll()
        self._link.refuse_if_aborted()

    def _unpack(self, message: _Message, memory: memoryview, target: Target, peer: int) -> Any:
        rank = self._link.rank
        try:
            if target is not None:  # its memory may be longer than the message
                found, expected = Leaf("", *unpack_shape(memory)), leaf_of_target(target)
                if found != expected:
                    raise failures.unexpected(message.what, peer, rank, found, expected)
                memory = memory[: len(pack_array_form(*found[1:])) + 1 + target.buffer.nbytes]
            return deliver(memory, target, message.what, peer, rank)
        except FrameError as error:
            raise failures.damaged(message.what, peer, rank, str(error)) from error


class _Probe:
    """A wait for the next message of a rank that nobody receives, to learn its length."""

    def __init__(self, provider: Provider, peer: int, tag: int) -> None:
        self._provider, self._peer, self._tag = provider, peer, tag
        self.nbytes = 0

    def test(self) -> bool:
        """Tell whether it is there."""
        found = self._provider.iprobe(self._peer, self._tag)
        self.nbytes = found or 0
        return found is not None

    def cancel(self) -> bool:
        """Give it up: there is nothing to take back, but a message that has just come is there."""
        return not self.test()
