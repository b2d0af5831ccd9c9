# SPDX-License-Identifier: MIT OR Apache-2.0
"""ProcessMessenger: the point-to-point calls of one rank, by the requests of a native group."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ferrodist import _native
from ferrodist.backends import message_errors, verdict
from ferrodist.backends.request_work import name_of_message
from ferrodist.backends.status import StatusCode
from ferrodist.backends.verdict import Departure
from ferrodist.buffer import Buffer
from ferrodist.call import Leaf, Site, caller_site
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendClosed, ProtocolError, SizeMismatch
from ferrodist.transports.framing import FrameError, pack_array_header, unpack_shape
from ferrodist.work import Work

if TYPE_CHECKING:
    from ferrodist.backends.process_backend import ProcessBackend

T = TypeVar("T")


class MessageCall:
    """One call: what errors name it, its deadline, and what becomes of a native outcome."""

    __slots__ = ("_expected", "_site", "backend", "deadline", "dst", "src", "tag")

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

    @property
    def what(self) -> str:
        """The call as errors show it; made only for them."""
        name = name_of_message(self.dst, self.src, self.tag)
        return f"{name} at {self._site}{self.backend.group_name}"

    def failure(
        self,
        outcome: int,
        rank: int,
        error: BaseException | None,
        found: bytes = b"",
        cycle: list[int] | None = None,
    ) -> BaseException:
        """Make the error that a native outcome means."""
        backend, peer = self.backend, rank
        if rank < 0:
            peer = self.src if self.src >= 0 else self.dst
        if outcome == StatusCode.INTERRUPTED and error is not None:
            return error
        if cycle:
            return message_errors.send_cycle(self.what, peer, backend.rank, cycle)
        if outcome == StatusCode.UNEXPECTED:
            return self._misfit(found, peer)
        if outcome == StatusCode.VERDICT:
            given = backend.verdict_of(None)
            assert given is not None
            return given.later(backend.rank)
        if outcome == StatusCode.GIVEN_UP:
            return BackendClosed(f"rank {backend.rank} has left this group", this_rank=backend.rank)
        if outcome == StatusCode.NO_MEMORY:
            return message_errors.no_memory(self.what, peer, backend.rank)
        if outcome == StatusCode.CORRUPT:
            reason = backend.damage_of(peer, "its queue")
            return message_errors.damaged(self.what, peer, backend.rank, reason)
        tags = backend.group.unexpected_tags(peer)
        if outcome == StatusCode.LATE:
            return message_errors.timed_out(self.what, peer, backend.rank, self.deadline, tags)
        how = verdict.died(backend.silence)
        if outcome == StatusCode.LOST:
            how = self._departure_of(peer)
        return message_errors.lost(self.what, peer, backend.rank, how, tags)

    def _misfit(self, found: bytes, peer: int) -> BaseException:
        assert self._expected is not None  # else nothing could differ from it
        try:
            leaf = Leaf("", *unpack_shape(found))
        except FrameError as flaw:
            return message_errors.damaged(self.what, peer, self.backend.rank, str(flaw))
        return message_errors.unexpected(self.what, peer, self.backend.rank, leaf, self._expected)

    def _departure_of(self, peer: int) -> Departure:
        is_gone = self.backend.group.is_gone(peer)
        return self.backend.departure_of(peer) if is_gone else verdict.closing()


class ProcessMessenger:
    """Sends and receives arrays; receives from one peer with one tag keep program order."""

    def __init__(self, backend: ProcessBackend) -> None:
        self.backend = weakref.proxy(backend)  # which holds on to this
        self._group = backend.group

    def send(self, source: Buffer, peer: int, tag: int, deadline: Deadline) -> None:
        """Send a message and wait until ``source`` may change."""
        call = MessageCall(self.backend, peer, -1, tag, deadline)
        self._wait(call, self._isend(call, source, peer, tag), holds_caller=True)

    def recv(self, target: Buffer, peer: int, tag: int, deadline: Deadline) -> None:
        """Receive the next message with this tag into ``target``."""
        call = MessageCall(self.backend, -1, peer, tag, deadline, _leaf(target))
        self._wait(call, self._irecv(target, peer, tag), holds_caller=False)

    def start_send(self, source: Buffer, peer: int, tag: int, deadline: Deadline) -> Work[None]:
        """Post a send; the Work is done when ``source`` may change."""
        self._refuse_if_gone(MessageCall(self.backend, peer, -1, tag, deadline), peer)
        header = pack_array_header(source.dtype, source.shape)
        work: Work[None] = self._group.start_send(
            self.backend, peer, tag, header, source.memory, deadline.end, deadline.seconds
        )
        return work

    def start_recv(
        self, target: Buffer, peer: int, tag: int, deadline: Deadline, finish: Callable[[], T]
    ) -> Work[T]:
        """Post a receive; ``finish`` makes the result of the Work."""
        header = pack_array_header(target.dtype, target.shape)
        work: Work[T] = self._group.start_recv(
            self.backend, peer, tag, header, target.memory, deadline.end, deadline.seconds, finish
        )
        return work

    def sendrecv(
        self, source: Buffer, to: int, target: Buffer, peer: int, tag: int, deadline: Deadline
    ) -> None:
        """Send and receive at once; if nothing is received the message is withdrawn.

        A message that came but does not fit is this rank's own affair: its own goes out.
        """
        call = MessageCall(self.backend, to, peer, tag, deadline, _leaf(target))
        sending = self._isend(call, source, to, tag)
        try:
            self._wait(call, self._irecv(target, peer, tag), holds_caller=False)
        except (SizeMismatch, ProtocolError):
            self._wait(call, sending, holds_caller=True)
            raise
        except BaseException:
            sending.abandon(StatusCode.LATE)
            raise
        self._wait(call, sending, holds_caller=False)

    def _isend(self, call: MessageCall, source: Buffer, peer: int, tag: int) -> _native.Request:
        self._refuse_if_gone(call, peer)
        header = pack_array_header(source.dtype, source.shape)
        return self._group.isend(peer, tag, header, source.memory)

    def _refuse_if_gone(self, call: MessageCall, peer: int) -> None:
        self.backend.refuse_if_aborted()
        if self._group.is_gone(peer):
            raise call.failure(self.backend.loss_of(peer), peer, None)

    def _irecv(self, target: Buffer, peer: int, tag: int) -> _native.Request:
        header = pack_array_header(target.dtype, target.shape)
        return self._group.irecv(peer, tag, header, target.memory)

    def _wait(self, call: MessageCall, request: _native.Request, *, holds_caller: bool) -> None:
        """Wait for a request, which is over in any case; raise what became of it."""
        outcome, rank, error = request.wait(call.deadline.end, holds_caller, None)
        if outcome == StatusCode.DONE:
            return
        cycle = []
        if holds_caller and outcome in _OF_CYCLES:
            cycle = self._group.find_send_cycle(call.dst)
        request.abandon(outcome)
        if rank < 0:
            rank = call.dst if holds_caller else call.src
        raise call.failure(outcome, rank, error, request.found, cycle)


_OF_CYCLES = (StatusCode.LATE, StatusCode.LOST)


def _leaf(target: Buffer) -> Leaf:
    return Leaf("", target.dtype, target.shape)


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


_native.set_message_hooks(
    message_error=_message_error,
    on_message_interrupt=lambda backend, name, error: backend._abort_if_foreign(error, name),
)
