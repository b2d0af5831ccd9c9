# SPDX-License-Identifier: MIT OR Apache-2.0
"""Point-to-point calls between processes: requests of the native matching engine."""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import Any

from ferrodist import _native
from ferrodist.arrays import InputArray, received_array
from ferrodist.backends import failures
from ferrodist.backends.failures import StatusCode
from ferrodist.backends.framing import FrameError, pack_array_form, pack_array_header, unpack_shape
from ferrodist.backends.process_backend import ProcessBackend
from ferrodist.backends.progress import Wait
from ferrodist.backends.receive import ANY, Receive, leaf_of_target, make_status, status_of
from ferrodist.backends.request_work import ANY_PEER, NO_PEER, name_of_message, source_of
from ferrodist.buffer import ArrayKind, DType
from ferrodist.call import Leaf, Site, caller_site
from ferrodist.config import DEFAULT
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendClosed, InvalidArgument, ProtocolError, SelfSend, SizeMismatch
from ferrodist.message_status import ANY_SOURCE, ANY_TAG, Status
from ferrodist.work import Work

_OF_CYCLES = (StatusCode.LATE, StatusCode.LOST)


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
        dst, src = self._peers[:2]
        if src != ANY_PEER:
            return [dst if src == NO_PEER else src]
        backend = self.backend
        others = [rank for rank in range(backend.world_size) if rank != backend.rank]
        return [rank for rank in others if not backend.group.is_gone(rank)] or others

    def poll(self) -> None:
        if self._wait is None:
            self._wait = Wait(self.backend, self._where, self.awaited)
        self._wait.poll()

    def end_wait(self) -> None:
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
        if code == StatusCode.LOST:
            is_gone = backend.group.is_gone(peer)
            how = backend.leave_reason_of(peer) if is_gone else failures.closing()
        else:
            how = failures.died(backend.silence_of(peer))
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


def header_of(source: InputArray) -> bytes:
    """Lay out what a message holds."""
    return pack_array_header(source.buffer.dtype, source.buffer.shape, source.kind)


class ProcessMessagingBackend(ProcessBackend):
    """A rank that is a process; receives from one peer with one tag keep program order."""

    def _is_alone(self, peer: int) -> bool:
        """Whether only this rank itself can send what a blocking call waits for."""
        return peer == self.rank or (peer == ANY and self.world_size == 1)

    def _probe_own(self, peer: int, tag: int) -> Status:
        """Find what this rank has sent itself: it is there, or never comes."""
        found = self._try_probe(peer, tag)
        if found is None:
            raise self._nothing_sent(peer, tag, "probe")
        return found

    def _nothing_sent(self, peer: int, tag: int, call: str = "recv") -> SelfSend:
        name = name_of_message(NO_PEER, source_of(peer), 0, tag, call)
        text = f"{name}: rank {self.rank} has sent itself nothing that it could wait for"
        return SelfSend(f"{text}; send with async_op=True first", rank=peer, this_rank=self.rank)

    def _send(self, source: InputArray, peer: int, tag: int, deadline: Deadline) -> None:
        self._check_usable()

        def run() -> None:
            call = MessageCall(self, (peer, NO_PEER, tag, 0), deadline)
            self._await(call, self._isend(call, source, peer, tag), is_send=True, holds_caller=True)

        self._abort_if_interrupted("send", run)

    def _recv(self, receive: Receive, deadline: Deadline) -> Any:
        self._check_usable()

        def run() -> Any:
            peers = NO_PEER, source_of(receive.peer), 0, receive.tag
            name = "recv_object" if receive.takes_object else "recv"
            call = MessageCall(self, peers, deadline, _leaf(receive), name=name)
            receiving = self.group.irecv(*_wanted(receive))
            self._refuse_if_alone(receive, receiving, "recv")
            self._await(call, receiving)
            return _finish(receive, receiving)

        return self._abort_if_interrupted("recv", run)

    def _sendrecv(
        self, source: InputArray, to: int, tag: int, receive: Receive, deadline: Deadline
    ) -> Any:
        """Send and receive at once; if nothing is received the message is withdrawn.

        A message that came but does not fit fails this call only: its own goes out.
        """
        self._check_usable()

        def run() -> Any:
            call = self._both(to, tag, receive, deadline)
            sending = self._isend(call, source, to, tag)
            receiving = self.group.irecv(*_wanted(receive))
            try:
                self._refuse_if_alone(receive, receiving, "sendrecv")
                self._await(call, receiving)
            except (SizeMismatch, ProtocolError, InvalidArgument):
                self._await(call, sending, is_send=True, holds_caller=True)
                raise
            except BaseException:  # Ctrl-C too: native code must not read the array any more
                sending.abandon(StatusCode.LATE)
                raise
            self._await(call, sending, is_send=True)
            return _finish(receive, receiving)

        return self._abort_if_interrupted("sendrecv", run)

    def _start_send(
        self, source: InputArray, peer: int, tag: int, deadline: Deadline
    ) -> Work[None]:
        self._check_usable()
        self._refuse_if_gone(MessageCall(self, (peer, NO_PEER, tag, 0), deadline), peer)
        header, memory = header_of(source), source.buffer.memory
        work: Work[None] = self.group.start_send(self, peer, tag, header, memory, deadline)
        return work

    def _start_recv(self, receive: Receive, deadline: Deadline) -> Work[Any]:
        self._check_usable()
        work: Work[Any] = self.group.start_recv(self, *_wanted(receive), deadline, receive.finish)
        return work

    def _start_sendrecv(
        self, source: InputArray, to: int, tag: int, receive: Receive, deadline: Deadline
    ) -> Work[Any]:
        self._check_usable()
        self._refuse_if_gone(self._both(to, tag, receive, deadline), to)
        header, memory = header_of(source), source.buffer.memory
        work: Work[Any] = self.group.start_sendrecv(
            self, to, tag, header, memory, *_wanted(receive), deadline, receive.finish
        )
        return work

    def _probe(self, peer: int, tag: int, deadline: Deadline) -> Status:
        self._check_usable()
        if self._is_alone(peer):
            return self._probe_own(peer, tag)

        def run() -> Status:
            peers = NO_PEER, source_of(peer), 0, tag
            call = MessageCall(self, peers, deadline, name="probe")
            probing = self.group.iprobe(peer, tag)
            self._await(call, probing)
            return status_of(probing.source, probing.tag, probing.found)

        return self._abort_if_interrupted("probe", run)

    def _try_probe(self, peer: int, tag: int) -> Status | None:
        """Tell what a receive would get now; raise if nothing can come any more."""
        self._check_usable()
        found = self.group.peek(peer, tag)
        if found is None:
            self.refuse_if_aborted()
            lost = self._lost_rank(peer)
            found = self.group.peek(peer, tag)  # it may have come before that
            if found is None and lost is not None:
                peers = NO_PEER, source_of(peer), 0, tag
                call = MessageCall(self, peers, Deadline(None), name="try_probe")
                raise call.failure(self.loss_of(lost), lost, None)
        return None if found is None else status_of(*found)

    def _lost_rank(self, peer: int) -> int | None:
        """Find a rank for whose sake nothing more can be had from a peer, or from any."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        gone = [rank for rank in others if self.group.is_gone(rank)]
        if peer != ANY:
            return peer if peer in gone else None
        died = [rank for rank in gone if not self.leave_reason_of(rank).is_normal]
        return next(iter(died or (gone if gone == others else [])), None)

    def _both(self, to: int, tag: int, receive: Receive, deadline: Deadline) -> MessageCall:
        peers = to, source_of(receive.peer), tag, receive.tag
        return MessageCall(self, peers, deadline, _leaf(receive))

    def _isend(self, call: MessageCall, source: InputArray, peer: int, tag: int) -> _native.Request:
        self._refuse_if_gone(call, peer)
        return self.group.isend(peer, tag, header_of(source), source.buffer.memory)

    def _refuse_if_gone(self, call: MessageCall, peer: int) -> None:
        self.refuse_if_aborted()
        if peer != self.rank and self.group.is_gone(peer):
            raise call.failure(self.loss_of(peer), peer, None)
        final = self.error_of(None)  # a loss: another rank may know of it before this one does
        if final is not None and final.facts.get("rank") == peer and "how" in final.facts:
            how = failures.died(final.facts["how"])
            raise failures.lost(call.what, peer, self.rank, how, ())

    def _refuse_if_alone(self, receive: Receive, receiving: _native.Request, call: str) -> None:
        if self._is_alone(receive.peer) and not receiving.test():
            receiving.abandon(StatusCode.GIVEN_UP)
            raise self._nothing_sent(receive.peer, receive.tag, call)

    def _await(
        self,
        call: MessageCall,
        request: _native.Request,
        *,
        is_send: bool = False,
        holds_caller: bool = False,
    ) -> None:
        """Wait for a request, which is over in any case; raise what became of it.

        ``holds_caller``: its caller does nothing but send, and may be part of a cycle.
        """
        try:
            status = request.wait(call.deadline, holds_caller, call.poll)
        finally:
            call.end_wait()
        if status.code == StatusCode.DONE:
            return
        cycle = []
        if holds_caller and status.code in _OF_CYCLES:
            cycle = self.group.find_send_cycle(call.dst)
        request.abandon(status.code)
        rank = status.failed_rank
        if rank < 0 and is_send:
            rank = call.dst
        raise call.failure(status.code, rank, status.error, request.found, cycle)


def _leaf(receive: Receive) -> Leaf | None:
    return None if receive.target is None else leaf_of_target(receive.target)


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
    found: bytes,
    cycle: list[int],
    expected: bytes,
    peers: tuple[int, int, int, int],
    timeout: float | None,
    site: Site | None,
) -> BaseException:
    """Make the error of a call that native code did."""
    leaf = Leaf("", *unpack_shape(expected)) if expected else None
    call = MessageCall(backend, peers, Deadline(timeout), leaf, site)
    return call.failure(status, failed_rank, None, found, cycle)


def _on_message_wait(
    call: MessageCall | None, backend: ProcessBackend, peers: tuple[int, int, int, int], site: Any
) -> MessageCall:
    """Poll in a wait of a call that native code does."""
    call = call or MessageCall(backend, peers, Deadline(None), site=site)
    call.poll()
    return call


_native.set_hooks(
    message_error=_message_error,
    make_received=lambda memory, dtype, shape, kind: received_array(
        memory, DType(dtype), shape, ArrayKind(kind)
    ),
    make_status=make_status,
    on_message_wait=_on_message_wait,
    on_message_wait_end=MessageCall.end_wait,
    on_message_interrupt=lambda backend, name, error: backend._abort_if_foreign(error, name),
    default_timeout=DEFAULT,
    any_source=ANY_SOURCE,
    any_tag=ANY_TAG,
)
