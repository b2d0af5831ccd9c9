# SPDX-License-Identifier: MIT OR Apache-2.0
"""ProcessMessenger: the point-to-point calls of one rank, by the requests of a native group."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ferrodist.backends import message_errors, verdict
from ferrodist.backends.native_group import NativeRequest
from ferrodist.backends.request_work import RequestWork, new_token
from ferrodist.backends.status import StatusCode
from ferrodist.backends.verdict import Departure
from ferrodist.buffer import Buffer
from ferrodist.call import Leaf, caller_site
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendClosed, ProtocolError, SizeMismatch
from ferrodist.transports.framing import FrameError, pack_array_header, unpack_shape

if TYPE_CHECKING:
    from ferrodist.backends.process_backend import ProcessBackend

T = TypeVar("T")


class MessageCall:
    """One call: what errors name it, its deadline, and what becomes of a native outcome."""

    __slots__ = ("_expected", "_site", "backend", "deadline", "dst", "src", "tag", "timeout")

    def __init__(
        self,
        backend: ProcessBackend,
        dst: int,
        src: int,
        tag: int,
        deadline: Deadline | None,
        expected: Leaf | Any = None,
    ) -> None:
        self.backend = backend
        self.dst, self.src, self.tag = dst, src, tag  # -1: it does not send, or not receive
        self.deadline = deadline
        self.timeout = backend.timeout  # what it has without a deadline of its own
        self._expected = expected  # what is to be received: a Leaf, or an array like it
        self._site = caller_site()

    @property
    def name(self) -> str:
        """The call as logs show it."""
        if self.src < 0:
            return f"send(dst={self.dst}, tag={self.tag})"
        if self.dst < 0:
            return f"recv(src={self.src}, tag={self.tag})"
        return f"sendrecv(dst={self.dst}, src={self.src}, tag={self.tag})"

    @property
    def what(self) -> str:
        """The call as errors show it; made only for them."""
        return f"{self.name} at {self._site}{self.backend.group_name}"

    def look(self) -> None:
        """Let native code hear of signals."""

    def explain(self, outcome: int, rank: int, found: bytes) -> BaseException:
        """Make the error of a request that has failed."""
        return self.failure(outcome, rank, None, found)

    def interrupted(self, error: BaseException) -> None:
        """Tell the others of Ctrl-C and the like in a wait."""
        self.backend.abort(f"{verdict.words_of(error)} (in {self.name.partition('(')[0]})")

    def unasked(self, work: RequestWork[Any], error: BaseException) -> None:
        """Log an error that nobody has asked for, and keep it for close()."""
        self.backend._note_unasked(work, error)

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
            return MemoryError(f"{self.what}: no memory for a message with rank {peer}")
        if outcome == StatusCode.CORRUPT:
            reason = backend.damage_of(peer, "its queue")
            return message_errors.damaged(self.what, peer, backend.rank, reason)
        tags = backend.group.unexpected_tags(peer)
        if outcome == StatusCode.LATE:
            deadline = self.deadline or Deadline(self.timeout)
            return message_errors.timed_out(self.what, peer, backend.rank, deadline, tags)
        how = verdict.died(backend.silence)
        if outcome == StatusCode.LOST:
            how = self._departure_of(peer)
        return message_errors.lost(self.what, peer, backend.rank, how, tags)

    def _misfit(self, found: bytes, peer: int) -> BaseException:
        expected = self._expected
        if not isinstance(expected, Leaf):
            expected = self.backend.leaf_of(expected)
        try:
            leaf = Leaf("", *unpack_shape(found))
        except FrameError as flaw:
            return message_errors.damaged(self.what, peer, self.backend.rank, str(flaw))
        return message_errors.unexpected(self.what, peer, self.backend.rank, leaf, expected)

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

    def start_send(self, source: Buffer, peer: int, tag: int, deadline: Deadline) -> Any:
        """Post a send; the Work is done when ``source`` may change."""
        call, token = MessageCall(self.backend, peer, -1, tag, deadline), new_token()
        request = self._isend(call, source, peer, tag, deadline.end, token)
        return RequestWork(request, token, call, lambda: None)

    def start_recv(
        self, target: Buffer, peer: int, tag: int, deadline: Deadline, finish: Callable[[], T]
    ) -> RequestWork[T]:
        """Post a receive; ``finish`` makes the result of the Work."""
        call = MessageCall(self.backend, -1, peer, tag, deadline, _leaf(target))
        token = new_token()
        request = self._irecv(target, peer, tag, deadline.end, token)
        return RequestWork(request, token, call, finish)

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

    def _isend(
        self,
        call: MessageCall,
        source: Buffer,
        peer: int,
        tag: int,
        deadline: float = 0.0,
        token: int = 0,
    ) -> NativeRequest:
        self.backend.refuse_if_aborted()
        if self._group.is_gone(peer):
            raise call.failure(self.backend.loss_of(peer), peer, None)
        header = pack_array_header(source.dtype, source.shape)
        return self._group.isend(peer, tag, header, source.memory, deadline, token)

    def _irecv(
        self, target: Buffer, peer: int, tag: int, deadline: float = 0.0, token: int = 0
    ) -> NativeRequest:
        header = pack_array_header(target.dtype, target.shape)
        return self._group.irecv(peer, tag, header, target.memory, deadline, token)

    def _wait(self, call: MessageCall, request: NativeRequest, *, holds_caller: bool) -> None:
        """Wait for a request, which is over in any case; raise what became of it."""
        assert call.deadline is not None
        outcome, rank, error = request.wait(call.deadline.end, holds_caller, call.look)
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
