# SPDX-License-Identifier: MIT OR Apache-2.0
"""Point-to-point calls of backends whose messages Python moves, blocking or in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeVar

from ferrodist.arrays import InputArray
from ferrodist.backends import failures
from ferrodist.backends.base import Backend
from ferrodist.backends.framing import pack_array_header
from ferrodist.backends.progress import ProgressThread
from ferrodist.backends.receive import ANY, Receive
from ferrodist.backends.request_work import NO_PEER, name_of_message, source_of
from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, SelfSend
from ferrodist.message_status import Status
from ferrodist.work import Work

T = TypeVar("T")


def header_of(source: InputArray) -> bytes:
    """Lay out what a message holds."""
    return pack_array_header(source.buffer.dtype, source.buffer.shape, source.kind)


class MessagingBackend(Backend):
    """What the point-to-point calls of all backends have in common."""

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


class Posted(NamedTuple):
    """A message that was posted: what to call it, how to finish it, and how to take it back.

    ``is_done``: nothing is left to wait for. ``is_receive``: the user may take it back.
    """

    what: str
    finish: Callable[[], Any]
    cancel: Callable[[], bool]
    is_done: bool = False
    is_receive: bool = False
    deadline: Deadline | None = None  # what finish waits by, of a provider's messages


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

    def post(self, source: InputArray, peer: int, tag: int, deadline: Deadline) -> Posted:
        """Send a message; what is left is to wait until ``source`` may change."""

    def post_receive(self, receive: Receive, deadline: Deadline) -> Posted:
        """Take a place among the receives; what is left is to wait for the message."""


class ThreadMessagingBackend(MessagingBackend):
    """One whose messages in flight are finished by a thread each."""

    _messenger: Messenger

    def __init__(self, rank: int, world_size: int, config: Config) -> None:
        super().__init__(rank, world_size, config)
        self._messages: list[threading.Thread] = []  # those in flight

    def _send(self, source: InputArray, peer: int, tag: int, deadline: Deadline) -> None:
        self._check_usable()
        self._abort_if_interrupted(
            "send", lambda: self._messenger.send(source, peer, tag, deadline)
        )

    def _sendrecv(
        self, source: InputArray, to: int, tag: int, receive: Receive, deadline: Deadline
    ) -> Any:
        """Post the outgoing message, receive, and only then wait for the receiver."""
        self._check_usable()
        return self._abort_if_interrupted(
            "sendrecv", lambda: self._messenger.sendrecv(source, to, tag, receive, deadline)
        )

    def _probe(self, peer: int, tag: int, deadline: Deadline) -> Status:
        self._check_usable()
        if self._is_alone(peer):
            return self._probe_own(peer, tag)
        return self._abort_if_interrupted(
            "probe", lambda: self._messenger.probe(peer, tag, deadline)
        )

    def _try_probe(self, peer: int, tag: int) -> Status | None:
        self._check_usable()
        return self._messenger.try_probe(peer, tag)

    def _start_send(
        self, source: InputArray, peer: int, tag: int, deadline: Deadline
    ) -> Work[None]:
        self._check_usable()
        return self._in_background(self._messenger.post(source, peer, tag, deadline))

    def _recv(self, receive: Receive, deadline: Deadline) -> Any:
        self._check_usable()

        def run() -> Any:
            posted = self._messenger.post_receive(receive, deadline)
            if not posted.is_done and self._is_alone(receive.peer):
                posted.cancel()
                raise self._nothing_sent(receive.peer, receive.tag)
            return posted.finish()

        return self._abort_if_interrupted("recv", run)

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
            except BaseException:  # however it fails, the array being sent is in use until then
                with suppress(DistributedError):  # the first error is the one that is told
                    sending.finish()
                raise
            sending.finish()
            return received

        def cancel() -> bool:
            return sending.cancel() and receiving.cancel()

        what = name_of_message(to, source_of(receive.peer), tag, receive.tag)
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
            except BaseException as error:  # others must not wait behind this message
                posted.cancel()
                if isinstance(error, RuntimeError):
                    raise failures.no_thread(error) from error
                raise
            self._messages = [other for other in self._messages if other.is_alive()] + [thread]
        return work

    def _await_works(self, deadline: Deadline) -> None:
        super()._await_works(deadline)
        for thread in self._messages:
            if thread is not threading.current_thread():
                thread.join(deadline.timeout())
