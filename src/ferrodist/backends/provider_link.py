# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a provider's group knows of its peers, and its point-to-point calls.

Errors and leave reasons travel as control messages; whoever waits for a request reads them.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

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
from ferrodist.backends.framing import FrameError, split_message
from ferrodist.backends.p2p import Posted, header_of
from ferrodist.backends.provider import Provider, Request
from ferrodist.backends.receive import (
    ANY,
    MatchQueue,
    Message,
    Misfit,
    PostedReceive,
    Receive,
    is_object,
    status_of,
)
from ferrodist.backends.request_work import ANY_PEER, NO_PEER, name_of_message
from ferrodist.call import caller_site
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    BackendClosed,
    DistributedError,
    GroupAborted,
    InvalidArgument,
    ProtocolError,
    RankLost,
    SelfSend,
    SizeMismatch,
)
from ferrodist.message_status import Status

CONTROL_TAG = 1 << 32
ENTRY_TAG = CONTROL_TAG + 1  # what ranks compare before a collective
DATA_TAG = CONTROL_TAG + 2  # collectives that are made of messages
MESSAGE_TAG = CONTROL_TAG + 3  # point-to-point messages of users, whatever their tag

EAGER_NBYTES = 64 * 1024  # up to here a send does not wait for its receiver
_ERROR, _LEFT, _SPLIT = b"E", b"L", b"S"
_NUMBER = struct.Struct("<Q")
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
        self.staying: set[int] = set()  # threads in a split, before whose end none leaves
        self._last_words = b""  # for the others, when this rank leaves
        self._parent = parent
        self._errors: list[GroupError] = []
        self._abort = b""  # why the group was aborted, for the groups split off it
        self._left: dict[int, LeaveReason] = {}
        self.splits: dict[tuple[int, bytes], bytes] = {}  # what peers tell of splits, by their keys
        self._told: list[Request] = []  # control messages that may be on their way
        self._lock = threading.RLock()  # reentrant, as everything a finalizer may touch
        self.peers = [rank for rank in range(provider.world_size) if rank != self.rank]

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
        except BaseException:  # Ctrl-C too: the memory of the requests is in use until then
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
            if self.has_left and not self.staying:
                return
            for peer in self.peers:
                while (memory := self.try_read(peer, CONTROL_TAG)) is not None:
                    self._hear(peer, memory)
            if self._parent is not None and self._parent._abort and not self._abort:
                self._note_abort(self._parent._abort)

    def try_read(self, peer: int, tag: int) -> memoryview | None:
        """Receive the next message of a rank with this tag if there is one; else return None."""
        with self._busy():
            nbytes = self.provider.iprobe(peer, tag)
            if nbytes is None:
                return None
            memory = memoryview(bytearray(nbytes))
            try:
                request = self.provider.irecv(memory, peer, tag)
                while not request.test():
                    time.sleep(_FIRST_NAP)  # it has come: iprobe said so
            except ConnectionError:
                return None  # it was lost with its sender
        return memory

    def _hear(self, peer: int, memory: memoryview) -> None:
        word, body = bytes(memory[:1]), bytes(memory[1:])
        if word == _LEFT:
            self._left.setdefault(peer, unpack_leave_reason(body))
            return
        if word == _SPLIT:
            end = _NUMBER.size + _NUMBER.unpack_from(body)[0]
            self.splits[peer, body[_NUMBER.size : end]] = body[end:]
            return
        found = unpack_group_error(body, self.members)
        if found.error is GroupAborted:
            self._note_abort(body)
        else:
            self._note(found)

    def tell_of_split(self, key: bytes, mine: bytes, peers: Sequence[int]) -> Waiting:
        """Tell the other members of a split that this rank is there; return what to wait for."""
        with self._busy():
            self._tell(_SPLIT + _NUMBER.pack(len(key)) + key + mine, peers)
        return [(peer, _Meeting(self, (peer, key))) for peer in peers]

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
                self._tell(_ERROR + body, self.peers)
                self.provider.abort(found.text)
        return found

    def _tell(self, words: bytes, peers: Sequence[int]) -> None:
        with self._lock:
            self._told = [request for request in self._told if not _is_sent(request)]
            for peer in peers:
                with suppress(ConnectionError):
                    self._told.append(self.provider.isend(memoryview(words), peer, CONTROL_TAG))

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
                self._last_words = pack_leave_reason(leave_reason)
                if not self.staying:
                    self.say_good_bye()
        finally:
            self._lock.release()

    @contextmanager
    def before_leaving(self) -> Iterator[None]:
        """Put off the good-bye of a close() on another thread: others may count on this one."""
        me = threading.get_ident()
        self.staying.add(me)
        try:
            yield
        finally:
            self.staying.discard(me)
            if self.has_left:
                self.say_good_bye()

    def say_good_bye(self) -> None:
        """Tell the others, once, that this rank has left."""
        with self._busy(), self._lock:
            if not self._last_words or self.staying:
                return
            self._tell(_LEFT + self._last_words, self.peers)
            self._last_words = b""
            self.provider.close()


class _Meeting(NamedTuple):
    """The wait for what a peer tells of a split."""

    link: ProviderLink
    key: tuple[int, bytes]

    def test(self) -> bool:
        """Tell whether it has come."""
        return self.key in self.link.splits

    def cancel(self) -> bool:
        """Give it up; False if it has come."""
        return not self.test()


def _is_sent(request: Request) -> bool:
    try:
        return request.test()
    except ConnectionError:
        return True


def _undone(waiting: Sequence[tuple[int, Request]]) -> Waiting:
    return [(peer, request) for peer, request in waiting if not request.test()]


def _sleep(request: Request, nap: float, deadline: Deadline) -> None:
    wait, left = getattr(request, "wait", None), max(0.0, deadline.remaining())
    if wait is None:
        time.sleep(min(nap, left))
    else:
        wait(min(_POLL, left))


# -- point-to-point calls --------------------------------------------------------------------------


_TAG = struct.Struct("<I")


class _Arrived:
    """A message that was pulled from the provider, or that this rank has sent to itself."""

    __slots__ = ("is_object", "is_taken", "payload", "source", "tag")

    def __init__(self, source: int, data: memoryview) -> None:
        self.source = source
        (self.tag,) = _TAG.unpack_from(data)
        self.payload = data[_TAG.size :]
        self.is_object = is_object(split_message(self.payload)[0])
        self.is_taken = False

    def take(self) -> None:
        """Hear that a receive has it."""
        self.is_taken = True


class Arrivals:
    """The messages of all ranks, matched here: a provider knows neither any source nor any tag.

    They travel with one tag of the provider's, the user's in front. Whoever waits pulls all that
    has come, beginning with another rank every time, so that none is only heard when the others
    have nothing to say.
    """

    def __init__(self, link: ProviderLink) -> None:
        self._link = link
        self._queue = MatchQueue()
        self._lock = threading.RLock()
        size = link.provider.world_size
        self._peers = deque(rank for rank in range(size) if rank != link.rank)

    def post(self, receive: PostedReceive) -> None:
        """Let a receive take its message, or wait for it."""
        with self._lock:
            self.pull()
            self._queue.post(receive)

    def withdraw(self, receive: PostedReceive) -> bool:
        """Take a receive back; False if it has its message."""
        with self._lock:
            return self._queue.withdraw(receive)

    def find(self, peer: int, tag: int) -> Message | None:
        """Return the message that a receive would get; it stays."""
        with self._lock:
            self.pull()
            return self._queue.find(peer, tag)

    def deliver(self, source: int, data: memoryview) -> _Arrived:
        """Take a message in."""
        message = _Arrived(source, data)
        with self._lock:
            self._queue.deliver(message)
        return message

    def remove(self, message: _Arrived) -> bool:
        """Take a message of this rank to itself back; False if a receive has it."""
        with self._lock:
            self._queue.remove(message)
            return not message.is_taken

    def pull(self) -> None:
        """Read what has come."""
        with self._lock:
            self._peers.rotate(-1)
            for peer in self._peers:
                while (data := self._link.try_read(peer, MESSAGE_TAG)) is not None:
                    self._link.received_nbytes += len(data)
                    self.deliver(peer, data)


class _Awaited:
    """The wait for the message of a receive, as the link waits for requests."""

    def __init__(self, arrivals: Arrivals, receive: PostedReceive) -> None:
        self._arrivals, self._receive = arrivals, receive

    def test(self) -> bool:
        """Tell whether it is over."""
        if not self._receive.is_over:
            self._arrivals.pull()
        return self._receive.is_over

    def cancel(self) -> bool:
        """Give it up; False if it is over."""
        return not self._receive.is_cancelled and self._arrivals.withdraw(self._receive)


class _SentToSelf:
    """A message of this rank to itself, as a request."""

    def __init__(self, arrivals: Arrivals, message: _Arrived, *, is_eager: bool) -> None:
        self._arrivals, self._message = arrivals, message
        self._is_eager = is_eager

    def test(self) -> bool:
        """Tell whether it is done."""
        return self._is_eager or self._message.is_taken

    def cancel(self) -> bool:
        """Take it back; False if it is done."""
        return not self._is_eager and self._arrivals.remove(self._message)


class _Call:
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

    def _check(self, peers: list[int]) -> None:
        link, (peer,) = self.link, peers
        if link.has_left:
            raise BackendClosed(f"{self.what}: rank {link.rank} has left", this_rank=link.rank)
        link.refuse_if_aborted()
        awaited = link.peers if peer == ANY else [peer]
        if self.deadline.remaining() <= 0:
            raise failures.timed_out(self.what, awaited, link.rank, self.deadline, [])
        self.raise_if_lost(peer)

    def raise_if_lost(self, peer: int) -> None:
        """Raise if nothing can be had any more of a rank, or of any."""
        link = self.link
        if peer == link.rank:
            return
        if peer != ANY:
            if link.left(peer) is not None:
                raise self.lost(peer)
            return
        reasons = [(rank, link.left(rank)) for rank in link.peers]
        left = [(rank, reason) for rank, reason in reasons if reason is not None]
        for rank, reason in left:
            if not reason.is_normal:
                raise self.lost(rank)
        if left and len(left) == len(reasons):
            raise failures.lost_all(self.what, left[-1][0], link.rank, left[-1][1], [])

    @contextmanager
    def naming(self, peer: int) -> Iterator[None]:
        """Make a RankLost of the error of a provider that cannot reach a peer."""
        try:
            yield
        except DistributedError:
            raise
        except ConnectionError as error:
            is_told = peer == ANY and error.args and type(error.args[0]) is int
            raise self.lost(error.args[0] if is_told else peer) from error

    def lost(self, peer: int) -> RankLost:
        """Make the error of a peer that is gone."""
        self.link.poll()
        leave_reason = self.link.left(peer) or failures.GONE
        return failures.lost(self.what, peer, self.link.rank, leave_reason, [])


class ProviderMessenger:
    """Sends and receives arrays."""

    def __init__(self, link: ProviderLink) -> None:
        self._link = link
        self._arrivals = Arrivals(link)

    def send(self, source: InputArray, peer: int, tag: int, deadline: Deadline) -> None:
        """Send a message and wait until ``source`` may change."""
        posted = self.post(source, peer, tag, deadline)
        if not posted.is_done:
            posted.finish()

    def post(self, source: InputArray, peer: int, tag: int, deadline: Deadline) -> Posted:
        """Send a message; what is left is to wait until ``source`` may change."""
        call = _Call(self._link, name_of_message(peer, NO_PEER, tag, 0), deadline)
        request = self._isend(call, source, peer, tag)
        wait = partial(call.wait, request, peer)
        return Posted(call.name, wait, request.cancel, request.test(), deadline=deadline)

    def post_receive(self, receive: Receive, deadline: Deadline) -> Posted:
        """Take a place among the receives; what is left is to wait for the message."""
        name = "recv_object" if receive.takes_object else "recv"
        return self._post_receive(self._call(receive.peer, receive.tag, deadline, name), receive)

    def sendrecv(
        self, source: InputArray, to: int, tag: int, receive: Receive, deadline: Deadline
    ) -> Any:
        """Send and receive at once; if nothing is received the message is taken back.

        A message that came but does not fit is this rank's own affair: its own goes out.
        """
        src = ANY_PEER if receive.peer == ANY else receive.peer
        call = _Call(self._link, name_of_message(to, src, tag, receive.tag), deadline)
        request = self._isend(call, source, to, tag)
        try:
            posted = self._post_receive(call, receive)
            if receive.peer == self._link.rank and not posted.is_done:
                posted.cancel()
                text = f"{call.what}: rank {self._link.rank} has sent itself nothing with that tag"
                raise SelfSend(text, rank=self._link.rank, this_rank=self._link.rank)
            received = posted.finish()
        except (SizeMismatch, ProtocolError, InvalidArgument):
            call.wait(request, to)
            raise
        except BaseException:  # Ctrl-C too: a message that was given up must not arrive
            request.cancel()
            raise
        call.wait(request, to)
        return received

    def probe(self, peer: int, tag: int, deadline: Deadline) -> Status:
        """Wait for a message and leave it."""
        self._check_open()
        call = self._call(peer, tag, deadline, "probe")
        posted = PostedReceive(peer, tag, is_probe=True)
        self._arrivals.post(posted)
        call.wait(_Awaited(self._arrivals, posted), peer)
        return _status_of(posted.message)

    def try_probe(self, peer: int, tag: int) -> Status | None:
        """Tell what a receive would get now; raise if nothing can come any more."""
        self._check_open()
        found = self._arrivals.find(peer, tag)
        if found is None:
            try:
                self._call(peer, tag, Deadline(None), "try_probe").raise_if_lost(peer)
            except RankLost:
                found = self._arrivals.find(peer, tag)  # it may have come before that
                if found is None:
                    raise
        return None if found is None else _status_of(found)

    def _call(self, peer: int, tag: int, deadline: Deadline, name: str) -> _Call:
        src = ANY_PEER if peer == ANY else peer
        return _Call(self._link, name_of_message(NO_PEER, src, 0, tag, name), deadline)

    def _isend(self, call: _Call, source: InputArray, peer: int, tag: int) -> Request:
        self._check_open()
        data = b"".join((_TAG.pack(tag), header_of(source), source.buffer.memory))
        if peer == self._link.rank:
            message = self._arrivals.deliver(peer, memoryview(data))
            is_eager = source.buffer.nbytes <= EAGER_NBYTES
            return _SentToSelf(self._arrivals, message, is_eager=is_eager)
        if self._link.left(peer) is not None:
            raise call.lost(peer)
        with call.naming(peer):
            return self._link.isend(data, peer, MESSAGE_TAG)

    def _post_receive(self, call: _Call, receive: Receive) -> Posted:
        self._check_open()
        posted = PostedReceive(receive.peer, receive.tag, takes_object=receive.takes_object)
        self._arrivals.post(posted)
        finish = partial(self._finish, call, posted, receive)
        cancel = partial(self._arrivals.withdraw, posted)
        return Posted(call.name, finish, cancel, posted.is_over, True, call.deadline)

    def _finish(self, call: _Call, posted: PostedReceive, receive: Receive) -> Any:
        rank = self._link.rank
        call.wait(_Awaited(self._arrivals, posted), receive.peer)
        message = posted.message
        if message is None:
            raise CancelledError(f"{call.what} was cancelled")
        source = message.source
        if posted.is_refused:
            raise failures.other_kind(call.what, source, rank, is_object=message.is_object)
        try:
            return receive.finish_message(memoryview(message.payload), source, message.tag)
        except Misfit as error:
            found, expected = error.found, error.expected
            raise failures.unexpected(call.what, source, rank, found, expected) from None
        except FrameError as error:
            raise failures.damaged(call.what, source, rank, str(error)) from error

    def _check_open(self) -> None:
        self._link.poll()
        self._link.refuse_if_aborted()


def _status_of(message: Message | None) -> Status:
    assert message is not None
    header, _ = split_message(memoryview(message.payload))
    return status_of(message.source, message.tag, header)
