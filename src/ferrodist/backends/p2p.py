# SPDX-License-Identifier: MIT OR Apache-2.0
"""Point-to-point calls of backends: send, recv, sendrecv and probe, blocking or in flight."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ferrodist import _native
from ferrodist.arrays import InputArray, OutputArray, received_array
from ferrodist.backends import failures
from ferrodist.backends.base import Backend
from ferrodist.backends.failures import LeaveReason, StatusCode
from ferrodist.backends.framing import (
    FrameError,
    pack_array_form,
    pack_array_header,
    unpack_shape,
)
from ferrodist.backends.progress import ProgressThread
from ferrodist.backends.receive import (
    ANY,
    Receive,
    leaf_of_target,
    make_status,
    status_of,
)
from ferrodist.backends.request_work import ANY_PEER, NO_PEER, name_of_message
from ferrodist.backends.waits import Wait
from ferrodist.buffer import ArrayKind, DType
from ferrodist.call import Leaf, Site, caller_site
from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    BackendClosed,
    DistributedError,
    InvalidArgument,
    ProtocolError,
    SelfSend,
    SizeMismatch,
)
from ferrodist.message_status import ANY_SOURCE, ANY_TAG, Status
from ferrodist.work import Work

if TYPE_CHECKING:
    from ferrodist.backends.process_backend import ProcessBackend


def header_of(source: InputArray) -> bytes:
    """Lay out what a message holds."""
    return pack_array_header(source.buffer.dtype, source.buffer.shape, source.kind)


class Messenger(Protocol):
    """What moves the messages of one rank."""

    def send(self, source: InputArray, peer: int, tag: int, deadline: Deadline) -> None:
        """Send a message and wait until ``source`` may change."""

    def sendrecv(
        self, source: InputArray, to: int, tag: int, receive: Receive, deadline: Deadline
    ) -> Any:
        """Send and receive at once; return what came."""

    def probe(self, peer: int, tag: int, deadline: Deadline) -> Status:
        """Wait for a message and leave it."""

    def try_probe(self, peer: int, tag: int) -> Status | None:
        """Tell what a receive would get now."""


class Posted(NamedTuple):
    """A message that was posted: what to call it, how to finish it, and how to take it back.

    ``is_done``: nothing is left to wait for. ``is_receive``: the user may take it back.
    """

    what: str
    finish: Callable[[], Any]
    cancel: Callable[[], bool]
    is_done: bool = False
    is_receive: bool = False


class ThreadMessenger(Messenger, Protocol):
    """One whose calls in flight need threads."""

    def post(self, source: InputArray, peer: int, tag: int, deadline: Deadline) -> Posted:
        """Send a message; what is left is to wait until ``source`` may change."""

    def post_receive(self, receive: Receive, deadline: Deadline) -> Posted:
        """Take a place among the receives; what is left is to wait for the message."""


class MessagingBackend(Backend):
    """A backend whose point-to-point calls go through a messenger."""

    _messenger: Messenger

    def _send(self, source: InputArray, peer: int, tag: int, deadline: Deadline) -> None:
        """Send a message; beyond 64 KB wait until the receiver has it."""
        self._check_usable()
        with self._aborting_on_interrupt("send"):
            self._messenger.send(source, peer, tag, deadline)

    def _sendrecv(
        self, source: InputArray, to: int, tag: int, receive: Receive, deadline: Deadline
    ) -> Any:
        """Post the outgoing message, receive, and only then wait for the receiver."""
        self._check_usable()
        with self._aborting_on_interrupt("sendrecv"):
            return self._messenger.sendrecv(source, to, tag, receive, deadline)

    def _probe(self, peer: int, tag: int, deadline: Deadline) -> Status:
        """Wait for a message and leave it; from this rank itself it is there, or never comes."""
        self._check_usable()
        if self._is_alone(peer):
            found = self._messenger.try_probe(peer, tag)
            if found is None:
                raise self._nothing_sent(peer, tag, "probe")
            return found
        with self._aborting_on_interrupt("probe"):
            return self._messenger.probe(peer, tag, deadline)

    def _try_probe(self, peer: int, tag: int) -> Status | None:
        """Tell what a receive would get now."""
        self._check_usable()
        return self._messenger.try_probe(peer, tag)

    def _is_alone(self, peer: int) -> bool:
        """Whether only this rank itself can send what a blocking call waits for."""
        return peer == self.rank or (peer == ANY and self.world_size == 1)

    def _nothing_sent(self, peer: int, tag: int, call: str = "recv") -> SelfSend:
        name = name_of_message(NO_PEER, ANY_PEER if peer == ANY else peer, 0, tag, call)
        text = f"{name}: rank {self.rank} has sent itself nothing that it could wait for"
        return SelfSend(f"{text}; send with async_op=True first", rank=peer, this_rank=self.rank)

    @contextmanager
    def _aborting_on_interrupt(self, what: str) -> Iterator[None]:
        """Tell the others of Ctrl-C and the like inside a call; ferrodist's errors are its own."""
        try:
            yield
        except BaseException as error:
            self._abort_if_foreign(error, what)
            raise

    def _abort_if_foreign(self, error: BaseException, what: str) -> None:
        if not isinstance(error, DistributedError | CancelledError):
            self.abort(f"{failures.describe(error)} (in {what})")


class ThreadMessagingBackend(MessagingBackend):
    """One whose messages in flight are finished by a thread each."""

    _messenger: ThreadMessenger

    def __init__(self, rank: int, world_size: int, config: Config) -> None:
        super().__init__(rank, world_size, config)
        self._messages: list[threading.Thread] = []  # those in flight

    def _start_send(
        self, source: InputArray, peer: int, tag: int, deadline: Deadline
    ) -> Work[None]:
        """Send now, wait for the receiver in the background."""
        self._check_usable()
        return self._in_background(self._messenger.post(source, peer, tag, deadline))

    def _recv(self, receive: Receive, deadline: Deadline) -> Any:
        """Receive the next message that matches."""
        self._check_usable()
        with self._aborting_on_interrupt("recv"):
            posted = self._messenger.post_receive(receive, deadline)
            if not posted.is_done and self._is_alone(receive.peer):
                posted.cancel()
                raise self._nothing_sent(receive.peer, receive.tag)
            return posted.finish()

    def _start_recv(self, receive: Receive, deadline: Deadline) -> Work[Any]:
        """Take a place among the receives now, wait in the background."""
        self._check_usable()
        return self._in_background(self._messenger.post_receive(receive, deadline))

    def _start_sendrecv(
        self, source: InputArray, to: int, tag: int, receive: Receive, deadline: Deadline
    ) -> Work[Any]:
        """Post both now, wait for them in the background."""
        self._check_usable()
        sending = self._messenger.post(source, to, tag, deadline)
        receiving = self._messenger.post_receive(receive, deadline)

        def finish() -> Any:
            try:
                received = receiving.finish()
            except BaseException:
                with suppress(DistributedError):  # the first error is the one that is told
                    sending.finish()
                raise
            sending.finish()
            return received

        def cancel() -> bool:
            return sending.cancel() and receiving.cancel()

        src = ANY_PEER if receive.peer == ANY else receive.peer
        what = name_of_message(to, src, tag, receive.tag)
        return self._in_background(
            Posted(what, finish, cancel, sending.is_done and receiving.is_done)
        )

    def _in_background(self, posted: Posted) -> Work[Any]:
        """Finish a message on a thread of its own: it never queues behind a collective."""
        cancel = posted.cancel if posted.is_receive else None
        work: Work[Any] = Work(posted.what, holding=self._holding, cancel=cancel)
        if posted.is_done:
            self._finish(work, posted.finish)
            return work
        thread = ProgressThread(
            target=self._finish,
            args=(work, posted.finish),
            name=f"ferrodist {posted.what}",
            daemon=True,
        )
        with self._lock:
            try:
                thread.start()
            except BaseException:  # no thread is to be had: others must not wait behind this
                posted.cancel()
                raise
            self._messages = [other for other in self._messages if other.is_alive()] + [thread]
        return work

    def _await_works(self, deadline: Deadline) -> None:
        super()._await_works(deadline)
        for thread in self._messages:
            if thread is not threading.current_thread():
                thread.join(deadline.timeout())


# -- between processes: requests of the native matching engine -------------------------------------


class MessageCall:
    """One call: what errors name it, its deadline, and what becomes of a native code."""

    __slots__ = ("_expected", "_name", "_peers", "_site", "_wait", "backend", "deadline")

    def __init__(
        self,
        backend: ProcessBackend,
        peers: tuple[int, int, int, int],
        deadline: Deadline,
        expected: Leaf | None = None,
        site: Site | None = None,
        name: str = "",
    ) -> None:
        self.backend = backend
        self._peers = peers  # as of name_of_message
        self.deadline = deadline
        self._expected = expected  # what is to be received
        self._site = site or caller_site()
        self._name = name
        self._wait: Wait | None = None

    @property
    def what(self) -> str:
        """The call as errors show it; made only for them."""
        return f"{self._where}{self.backend.group_name}"

    @property
    def _where(self) -> str:
        return f"{name_of_message(*self._peers, self._name)} at {self._site}"

    @property
    def dst(self) -> int:
        """Whom it sends to, if it does."""
        return self._peers[0]

    def awaited(self) -> list[int]:
        """List the ranks that it waits for."""
        dst, src = self._peers[:2]
        if src != ANY_PEER:
            return [dst if src == NO_PEER else src]
        backend = self.backend
        others = [rank for rank in range(backend.world_size) if rank != backend.rank]
        return [rank for rank in others if not backend.group.is_gone(rank)] or others

    def poll(self) -> None:
        """Look round in a wait that lasts."""
        if self._wait is None:
            self._wait = Wait(self.backend, self._where, self.awaited)
        self._wait.poll()

    def end_wait(self) -> None:
        """End what poll() began."""
        if self._wait is not None:
            self._wait.end()
            self._wait = None

    def failure(
        self,
        code: int,
        rank: int,
        error: BaseException | None,
        found: bytes = b"",
        cycle: list[int] | None = None,
    ) -> BaseException:
        """Make the error that a native code means."""
        backend, peers = self.backend, [rank] if rank >= 0 else self.awaited()
        peer = peers[0]
        if code == StatusCode.INTERRUPTED and error is not None:
            return error
        if cycle:
            return failures.send_cycle(self.what, peer, backend.rank, cycle)
        if code == StatusCode.UNEXPECTED:
            return self._misfit(found, peer)
        if code == StatusCode.OTHER_KIND:
            takes_object = self._name == "recv_object"
            return failures.other_kind(self.what, peer, backend.rank, is_object=not takes_object)
        if code == StatusCode.CANCELLED:
            return CancelledError(f"{self.what} was cancelled")
        if code == StatusCode.GROUP_ERROR:
            given = backend.error_of(None)
            assert given is not None
            return given.later(backend.rank)
        if code == StatusCode.GIVEN_UP:
            return BackendClosed(f"rank {backend.rank} has left this group", this_rank=backend.rank)
        if code == StatusCode.NO_MEMORY:
            return failures.no_memory(self.what, peer, backend.rank)
        if code == StatusCode.CORRUPT:
            reason = backend.damage_of(peer, "its queue")
            return failures.damaged(self.what, peer, backend.rank, reason)
        tags = sorted({tag for one in peers for tag in backend.group.unexpected_tags(one)})
        if code == StatusCode.LATE:
            return failures.timed_out(self.what, peers, backend.rank, self.deadline, tags)
        how = failures.died(backend.no_heartbeat)
        if code == StatusCode.LOST:
            how = self._leave_reason_of(peer)
        is_last = self._peers[1] == ANY_PEER and how.is_normal
        make = failures.lost_all if is_last else failures.lost
        return make(self.what, peer, backend.rank, how, tags)

    def _misfit(self, found: bytes, peer: int) -> BaseException:
        try:
            leaf = Leaf("", *unpack_shape(found))
            if self._expected is None:
                raise FrameError(f"a message of {leaf} that has not its size")
        except FrameError as flaw:
            return failures.damaged(self.what, peer, self.backend.rank, str(flaw))
        return failures.unexpected(self.what, peer, self.backend.rank, leaf, self._expected)

    def _leave_reason_of(self, peer: int) -> LeaveReason:
        is_gone = self.backend.group.is_gone(peer)
        return self.backend.leave_reason_of(peer) if is_gone else failures.closing()


class ProcessMessenger:
    """Sends and receives arrays; receives from one peer with one tag keep program order."""

    def __init__(self, backend: ProcessBackend) -> None:
        self.backend = weakref.proxy(backend)  # which holds on to this
        self._group = backend.group

    def send(self, source: InputArray, peer: int, tag: int, deadline: Deadline) -> None:
        """Send a message and wait until ``source`` may change."""
        call = MessageCall(self.backend, (peer, NO_PEER, tag, 0), deadline)
        self._wait(call, self._isend(call, source, peer, tag), holds_caller=True)

    def recv(self, receive: Receive, deadline: Deadline) -> Any:
        """Receive the next message that matches."""
        call = self._receive_call(receive, deadline)
        receiving = self._irecv(receive)
        if self.backend._is_alone(receive.peer) and not receiving.test():
            receiving.abandon(StatusCode.GIVEN_UP)
            raise self.backend._nothing_sent(receive.peer, receive.tag)
        self._wait(call, receiving, holds_caller=False)
        return _finish(receive, receiving)

    def start_send(self, source: InputArray, peer: int, tag: int, deadline: Deadline) -> Work[None]:
        """Post a send; the Work is done when ``source`` may change."""
        call = MessageCall(self.backend, (peer, NO_PEER, tag, 0), deadline)
        self._refuse_if_gone(call, peer)
        header, memory = header_of(source), source.buffer.memory
        work: Work[None] = self._group.start_send(self.backend, peer, tag, header, memory, deadline)
        return work

    def start_recv(self, receive: Receive, deadline: Deadline) -> Work[Any]:
        """Post a receive."""
        work: Work[Any] = self._group.start_recv(
            self.backend, *_wanted(receive), deadline, receive.finish
        )
        return work

    def start_sendrecv(
        self, source: InputArray, to: int, tag: int, receive: Receive, deadline: Deadline
    ) -> Work[Any]:
        """Post both."""
        self._refuse_if_gone(self._both(to, tag, receive, deadline), to)
        header, memory = header_of(source), source.buffer.memory
        peer, recv_tag, expected, target = _wanted(receive)[:4]
        work: Work[Any] = self._group.start_sendrecv(
            self.backend,
            to,
            tag,
            header,
            memory,
            peer,
            recv_tag,
            expected,
            target,
            deadline,
            receive.finish,
        )
        return work

    def sendrecv(
        self, source: InputArray, to: int, tag: int, receive: Receive, deadline: Deadline
    ) -> Any:
        """Send and receive at once; if nothing is received the message is withdrawn.

        A message that came but does not fit is this rank's own affair: its own goes out.
        """
        call = self._both(to, tag, receive, deadline)
        sending = self._isend(call, source, to, tag)
        receiving = self._irecv(receive)
        try:
            if self.backend._is_alone(receive.peer) and not receiving.test():
                receiving.abandon(StatusCode.GIVEN_UP)
                raise self.backend._nothing_sent(receive.peer, receive.tag, "sendrecv")
            self._wait(call, receiving, holds_caller=False)
        except (SizeMismatch, ProtocolError, InvalidArgument):
            self._wait(call, sending, holds_caller=True)
            raise
        except BaseException:
            sending.abandon(StatusCode.LATE)
            raise
        self._wait(call, sending, holds_caller=False)
        return _finish(receive, receiving)

    def probe(self, peer: int, tag: int, deadline: Deadline) -> Status:
        """Wait for a message and leave it."""
        src = ANY_PEER if peer == ANY else peer
        call = MessageCall(self.backend, (NO_PEER, src, 0, tag), deadline, name="probe")
        probing = self._group.iprobe(peer, tag)
        self._wait(call, probing, holds_caller=False)
        return status_of(probing.source, probing.tag, probing.found)

    def try_probe(self, peer: int, tag: int) -> Status | None:
        """Tell what a receive would get now; raise if nothing can come any more."""
        found = self._group.peek(peer, tag)
        if found is None:
            self.backend.refuse_if_aborted()
            lost = self._lost_rank(peer)
            found = self._group.peek(peer, tag)  # it may have come before that
            if found is None and lost is not None:
                src = ANY_PEER if peer == ANY else peer
                peers = NO_PEER, src, 0, tag
                call = MessageCall(self.backend, peers, Deadline(None), name="try_probe")
                raise call.failure(self.backend.loss_of(lost), lost, None)
        return None if found is None else status_of(*found)

    def _lost_rank(self, peer: int) -> int | None:
        """Find a rank for whose sake nothing more can be had from a peer, or from any."""
        backend = self.backend
        others = [rank for rank in range(backend.world_size) if rank != backend.rank]
        gone = [rank for rank in others if self._group.is_gone(rank)]
        if peer != ANY:
            return peer if peer in gone else None
        died = [rank for rank in gone if not backend.leave_reason_of(rank).is_normal]
        return next(iter(died or (gone if gone == others else [])), None)

    def _receive_call(self, receive: Receive, deadline: Deadline) -> MessageCall:
        src = ANY_PEER if receive.peer == ANY else receive.peer
        name = "recv_object" if receive.takes_object else "recv"
        peers = NO_PEER, src, 0, receive.tag
        return MessageCall(self.backend, peers, deadline, _leaf(receive.target), name=name)

    def _both(self, to: int, tag: int, receive: Receive, deadline: Deadline) -> MessageCall:
        src = ANY_PEER if receive.peer == ANY else receive.peer
        peers = to, src, tag, receive.tag
        return MessageCall(self.backend, peers, deadline, _leaf(receive.target))

    def _isend(self, call: MessageCall, source: InputArray, peer: int, tag: int) -> _native.Request:
        self._refuse_if_gone(call, peer)
        return self._group.isend(peer, tag, header_of(source), source.buffer.memory)

    def _refuse_if_gone(self, call: MessageCall, peer: int) -> None:
        self.backend.refuse_if_aborted()
        if peer != self.backend.rank and self._group.is_gone(peer):
            raise call.failure(self.backend.loss_of(peer), peer, None)

    def _irecv(self, receive: Receive) -> _native.Request:
        return self._group.irecv(*_wanted(receive))

    def _wait(self, call: MessageCall, request: _native.Request, *, holds_caller: bool) -> None:
        """Wait for a request, which is over in any case; raise what became of it."""
        try:
            status = request.wait(call.deadline, holds_caller, call.poll)
        finally:
            call.end_wait()
        if status.code == StatusCode.DONE:
            return
        cycle = []
        if holds_caller and status.code in _OF_CYCLES:
            cycle = self._group.find_send_cycle(call.dst)
        request.abandon(status.code)
        rank = status.failed_rank
        if rank < 0 and holds_caller:
            rank = call.dst
        raise call.failure(status.code, rank, status.error, request.found, cycle)


_OF_CYCLES = (StatusCode.LATE, StatusCode.LOST)


def _leaf(target: OutputArray | None) -> Leaf | None:
    return None if target is None else leaf_of_target(target)


def _finish(receive: Receive, request: _native.Request) -> Any:
    array = request.array() if receive.target is None else None
    return receive.finish(array, request.source, request.tag, request.found)


def _wanted(receive: Receive) -> tuple[int, int, bytes, memoryview | None, bool, bool]:
    """Whose messages, with what tag; what their headers must begin with, and the memory for it."""
    header, memory = b"", None
    if receive.target is not None:
        buffer = receive.target.buffer
        header, memory = pack_array_form(buffer.dtype, buffer.shape), buffer.memory
    takes_object, takes_shorter = receive.takes_object, receive.takes_shorter
    return receive.peer, receive.tag, header, memory, takes_object, takes_shorter


def _message_error(
    backend: ProcessBackend,
    status: int,
    failed_rank: int,
    error: BaseException | None,
    found: bytes,
    cycle: list[int],
    expected: bytes,
    peers: tuple[int, int, int, int],
    timeout: float | None,
    site: Site | None,
    waits_in: str | None,
) -> BaseException:
    """Make the error of a call that native code did; tell the others of Ctrl-C in its wait."""
    leaf = Leaf("", *unpack_shape(expected)) if expected else None
    call = MessageCall(backend, peers, Deadline(timeout), leaf, site)
    made = call.failure(status, failed_rank, error, found, cycle)
    if waits_in is not None:
        backend._abort_if_foreign(made, waits_in)
    return made


def _on_message_wait(
    call: MessageCall | None, backend: ProcessBackend, peers: tuple[int, int, int, int], site: Any
) -> MessageCall:
    """Look round in a wait of a call that native code does."""
    call = call or MessageCall(backend, peers, Deadline(None), site=site)
    call.poll()
    return call


_native.set_message_hooks(
    message_error=_message_error,
    make_received=lambda memory, dtype, shape, kind: received_array(
        memory, DType(dtype), shape, ArrayKind(kind)
    ),
    make_status=make_status,
    on_message_wait=_on_message_wait,
    on_message_wait_end=MessageCall.end_wait,
    on_message_interrupt=lambda backend, name, error: backend._abort_if_foreign(error, name),
    any_source=ANY_SOURCE,
    any_tag=ANY_TAG,
)
