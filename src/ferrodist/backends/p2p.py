# SPDX-License-Identifier: MIT OR Apache-2.0
"""Point-to-point calls of backends: send, recv and sendrecv, blocking or in flight."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ferrodist import _native
from ferrodist.arrays import InputArray, OutputArray, received_array
from ferrodist.backends import failures
from ferrodist.backends.base import Backend
from ferrodist.backends.failures import LeaveReason, StatusCode
from ferrodist.backends.framing import (
    FrameError,
    pack_array_form,
    pack_array_header,
    unpack_message,
    unpack_shape,
)
from ferrodist.backends.progress import ProgressThread
from ferrodist.backends.request_work import name_of_message
from ferrodist.backends.waits import Wait
from ferrodist.buffer import ArrayKind, DType
from ferrodist.call import Leaf, Site, caller_site
from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendClosed, DistributedError, ProtocolError, SizeMismatch
from ferrodist.work import Work

if TYPE_CHECKING:
    from ferrodist.backends.process_backend import ProcessBackend

Target = OutputArray | None
"""Where a message goes; None: it says itself what it is, and becomes an array of its own."""


def header_of(source: InputArray) -> bytes:
    """Lay out what a message holds."""
    return pack_array_header(source.buffer.dtype, source.buffer.shape, source.kind)


def deliver(payload: memoryview, target: Target, what: str, peer: int, rank: int) -> Any:
    """Put a whole message where it goes and return the array.

    Raises FrameError if it is none, SizeMismatch if it is not what its receiver expects.
    """
    dtype, shape, kind, content = unpack_message(payload)
    if target is None:
        return received_array(np.frombuffer(bytearray(content), np.uint8), dtype, shape, kind)
    found, expected = Leaf("", dtype, shape), leaf_of_target(target)
    if found != expected:
        raise failures.unexpected(what, peer, rank, found, expected)
    target.buffer.memory[:] = content
    return target.finish()


def leaf_of_target(target: OutputArray) -> Leaf:
    """Describe what a receiver expects."""
    return Leaf("", target.buffer.dtype, target.buffer.shape)


class Sender(Protocol):
    """What moves the messages of one rank."""

    def send(self, source: InputArray, peer: int, tag: int, deadline: Deadline) -> None:
        """Send a message and wait until ``source`` may change."""

    def sendrecv(
        self, source: InputArray, to: int, target: Target, peer: int, tag: int, deadline: Deadline
    ) -> Any:
        """Send and receive at once; return what came."""


class Posted(NamedTuple):
    """A message that was posted: what to call it, how to finish it, and how to take it back."""

    what: str
    finish: Callable[[], Any]
    cancel: Callable[[], object]
    is_done: bool = False  # nothing is left to finish


class ThreadSender(Sender, Protocol):
    """One whose calls in flight need threads."""

    def post(self, source: InputArray, peer: int, tag: int, deadline: Deadline) -> Posted:
        """Send a message; what is left is to wait until ``source`` may change."""

    def line_up(self, target: Target, peer: int, tag: int, deadline: Deadline) -> Posted:
        """Take a place among the receivers; what is left is to receive."""


class Lanes:
    """Receivers from one peer with one tag stand in line; a lane nobody uses is not kept."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._lanes: dict[tuple[int, int], _native.Tickets] = {}

    def __len__(self) -> int:
        return len(self._lanes)

    def draw(self, peer: int, tag: int) -> tuple[_native.Tickets, int]:
        """Take a place in line."""
        with self._lock:
            lane = self._lanes.setdefault((peer, tag), _native.Tickets())
            return lane, lane.take()

    def leave(self, lane: _native.Tickets, number: int, peer: int, tag: int) -> None:
        """Give a place up, when its turn is over or never came."""
        with self._lock:
            lane.end(number)
            if lane.is_idle:
                self._lanes.pop((peer, tag), None)


class MessagingBackend(Backend):
    """A backend whose point-to-point calls go through a messenger."""

    _messenger: Sender

    def _send(self, source: InputArray, peer: int, tag: int, deadline: Deadline) -> None:
        """Send a message; beyond 64 KB wait until the receiver has it."""
        self._check_usable()
        with self._aborting_on_interrupt("send"):
            self._messenger.send(source, peer, tag, deadline)

    def _sendrecv(
        self, source: InputArray, to: int, target: Target, peer: int, tag: int, deadline: Deadline
    ) -> Any:
        """Post the outgoing message, receive, and only then wait for the receiver."""
        self._check_usable()
        with self._aborting_on_interrupt("sendrecv"):
            return self._messenger.sendrecv(source, to, target, peer, tag, deadline)

    @contextmanager
    def _aborting_on_interrupt(self, what: str) -> Iterator[None]:
        """Tell the others of Ctrl-C and the like inside a call; ferrodist's errors are its own."""
        try:
            yield
        except BaseException as error:
            self._abort_if_foreign(error, what)
            raise

    def _abort_if_foreign(self, error: BaseException, what: str) -> None:
        if not isinstance(error, DistributedError):
            self.abort(f"{failures.describe(error)} (in {what})")


class ThreadMessagingBackend(MessagingBackend):
    """One whose messages in flight are finished by a thread each."""

    _messenger: ThreadSender

    def __init__(self, rank: int, world_size: int, config: Config) -> None:
        super().__init__(rank, world_size, config)
        self._messages: list[threading.Thread] = []  # those in flight

    def _start_send(
        self, source: InputArray, peer: int, tag: int, deadline: Deadline
    ) -> Work[None]:
        """Send now, wait for the receiver in the background."""
        self._check_usable()
        posted = self._messenger.post(source, peer, tag, deadline)
        return self._in_background(posted)

    def _recv(self, target: Target, peer: int, tag: int, deadline: Deadline) -> Any:
        """Receive the next message with this tag."""
        self._check_usable()
        with self._aborting_on_interrupt("recv"):
            return self._messenger.line_up(target, peer, tag, deadline).finish()

    def _start_recv(self, target: Target, peer: int, tag: int, deadline: Deadline) -> Work[Any]:
        """Take a place in the line of receivers now, receive in the background."""
        self._check_usable()
        posted = self._messenger.line_up(target, peer, tag, deadline)
        return self._in_background(posted)

    def _in_background(self, posted: Posted) -> Work[Any]:
        """Finish a message on a thread of its own: it never queues behind a collective."""
        work: Work[Any] = Work(posted.what, holding=self._holding)
        if posted.is_done:
            work.set_result(None)
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

    __slots__ = ("_expected", "_site", "_wait", "backend", "deadline", "dst", "src", "tag")

    def __init__(
        self,
        backend: ProcessBackend,
        dst: int,
        src: int,
        tag: int,
        deadline: Deadline,
        expected: Leaf | None = None,
        site: Site | None = None,
    ) -> None:
        self.backend = backend
        self.dst, self.src, self.tag = dst, src, tag  # -1: it does not send, or not receive
        self.deadline = deadline
        self._expected = expected  # what is to be received
        self._site = site or caller_site()
        self._wait: Wait | None = None

    @property
    def what(self) -> str:
        """The call as errors show it; made only for them."""
        return f"{self._where}{self.backend.group_name}"

    @property
    def _where(self) -> str:
        return f"{name_of_message(self.dst, self.src, self.tag)} at {self._site}"

    def poll(self) -> None:
        """Look round in a wait that lasts."""
        if self._wait is None:
            peer = self.src if self.src >= 0 else self.dst
            self._wait = Wait(self.backend, self._where, lambda: [peer])
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
        backend, peer = self.backend, rank
        if rank < 0:
            peer = self.src if self.src >= 0 else self.dst
        if code == StatusCode.INTERRUPTED and error is not None:
            return error
        if cycle:
            return failures.send_cycle(self.what, peer, backend.rank, cycle)
        if code == StatusCode.UNEXPECTED:
            return self._misfit(found, peer)
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
        tags = backend.group.unexpected_tags(peer)
        if code == StatusCode.LATE:
            return failures.timed_out(self.what, peer, backend.rank, self.deadline, tags)
        how = failures.died(backend.no_heartbeat)
        if code == StatusCode.LOST:
            how = self._leave_reason_of(peer)
        return failures.lost(self.what, peer, backend.rank, how, tags)

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
        call = MessageCall(self.backend, peer, -1, tag, deadline)
        self._wait(call, self._isend(call, source, peer, tag), holds_caller=True)

    def recv(self, target: Target, peer: int, tag: int, deadline: Deadline) -> Any:
        """Receive the next message with this tag."""
        call = MessageCall(self.backend, -1, peer, tag, deadline, _leaf(target))
        receiving = self._irecv(target, peer, tag)
        self._wait(call, receiving, holds_caller=False)
        return receiving.array() if target is None else target.finish()

    def start_send(self, source: InputArray, peer: int, tag: int, deadline: Deadline) -> Work[None]:
        """Post a send; the Work is done when ``source`` may change."""
        self._refuse_if_gone(MessageCall(self.backend, peer, -1, tag, deadline), peer)
        header, memory = header_of(source), source.buffer.memory
        work: Work[None] = self._group.start_send(self.backend, peer, tag, header, memory, deadline)
        return work

    def start_recv(self, target: Target, peer: int, tag: int, deadline: Deadline) -> Work[Any]:
        """Post a receive."""
        finish = None if target is None else target.finish
        work: Work[Any] = self._group.start_recv(
            self.backend, peer, tag, *_expect(target), deadline, finish
        )
        return work

    def sendrecv(
        self, source: InputArray, to: int, target: Target, peer: int, tag: int, deadline: Deadline
    ) -> Any:
        """Send and receive at once; if nothing is received the message is withdrawn.

        A message that came but does not fit is this rank's own affair: its own goes out.
        """
        call = MessageCall(self.backend, to, peer, tag, deadline, _leaf(target))
        sending = self._isend(call, source, to, tag)
        receiving = self._irecv(target, peer, tag)
        try:
            self._wait(call, receiving, holds_caller=False)
        except (SizeMismatch, ProtocolError):
            self._wait(call, sending, holds_caller=True)
            raise
        except BaseException:
            sending.abandon(StatusCode.LATE)
            raise
        self._wait(call, sending, holds_caller=False)
        return receiving.array() if target is None else target.finish()

    def _isend(self, call: MessageCall, source: InputArray, peer: int, tag: int) -> _native.Request:
        self._refuse_if_gone(call, peer)
        return self._group.isend(peer, tag, header_of(source), source.buffer.memory)

    def _refuse_if_gone(self, call: MessageCall, peer: int) -> None:
        self.backend.refuse_if_aborted()
        if self._group.is_gone(peer):
            raise call.failure(self.backend.loss_of(peer), peer, None)

    def _irecv(self, target: Target, peer: int, tag: int) -> _native.Request:
        return self._group.irecv(peer, tag, *_expect(target))

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
        if rank < 0:
            rank = call.dst if holds_caller else call.src
        raise call.failure(status.code, rank, status.error, request.found, cycle)


_OF_CYCLES = (StatusCode.LATE, StatusCode.LOST)


def _leaf(target: Target) -> Leaf | None:
    return None if target is None else leaf_of_target(target)


def _expect(target: Target) -> tuple[bytes, memoryview | None]:
    """What the header of a message must begin with, and the memory for it."""
    if target is None:
        return b"", None
    buffer = target.buffer
    return pack_array_form(buffer.dtype, buffer.shape), buffer.memory


def _message_error(
    backend: ProcessBackend,
    status: int,
    failed_rank: int,
    error: BaseException | None,
    found: bytes,
    cycle: list[int],
    expected: bytes,
    dst: int,
    src: int,
    tag: int,
    timeout: float | None,
    site: Site | None,
    waits_in: str | None,
) -> BaseException:
    """Make the error of a call that native code did; tell the others of Ctrl-C in its wait."""
    leaf = Leaf("", *unpack_shape(expected)) if expected else None
    call = MessageCall(backend, dst, src, tag, Deadline(timeout), leaf, site)
    made = call.failure(status, failed_rank, error, found, cycle)
    if waits_in is not None:
        backend._abort_if_foreign(made, waits_in)
    return made


def _on_message_wait(
    call: MessageCall | None, backend: ProcessBackend, dst: int, src: int, tag: int, site: Any
) -> MessageCall:
    """Look round in a wait of a call that native code does."""
    call = call or MessageCall(backend, dst, src, tag, Deadline(None), site=site)
    call.poll()
    return call


_native.set_message_hooks(
    message_error=_message_error,
    make_received=lambda memory, dtype, shape, kind: received_array(
        memory, DType(dtype), shape, ArrayKind(kind)
    ),
    on_message_wait=_on_message_wait,
    on_message_wait_end=MessageCall.end_wait,
    on_message_interrupt=lambda backend, name, error: backend._abort_if_foreign(error, name),
)
