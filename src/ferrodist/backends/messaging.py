# SPDX-License-Identifier: MIT OR Apache-2.0
"""The point-to-point calls of a backend, whatever moves the messages.

A messenger knows how to send and receive; here is what all have in common: calls in the background,
and what becomes of a group when Ctrl-C ends a call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar, cast

from ferrodist import _native
from ferrodist.backends import verdict
from ferrodist.backends.base import Backend
from ferrodist.backends.progress import ProgressThread
from ferrodist.buffer import Buffer
from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError
from ferrodist.work import Work

T = TypeVar("T")


class Sender(Protocol):
    """What moves the messages of one rank."""

    def send(self, source: Buffer, peer: int, tag: int, deadline: Deadline) -> None:
        """Send a message and wait until ``source`` may change."""

    def sendrecv(
        self, source: Buffer, to: int, target: Buffer, peer: int, tag: int, deadline: Deadline
    ) -> None:
        """Send and receive at once."""


class ThreadSender(Sender, Protocol):
    """One whose calls in flight need threads."""

    def post(
        self, source: Buffer, peer: int, tag: int, deadline: Deadline
    ) -> tuple[str, Callable[[], None] | None]:
        """Send a message; return what to call it, and how to wait until ``source`` may change."""

    def line_up(
        self, target: Buffer, peer: int, tag: int, deadline: Deadline
    ) -> tuple[str, Callable[[], None]]:
        """Take a place among the receivers; return what to call it, and how to receive."""


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

    def _send(self, source: Buffer, peer: int, tag: int, deadline: Deadline) -> None:
        """Send a message; beyond 64 KB wait until the receiver has it."""
        self._check_usable()
        with self._aborting_on_interrupt("send"):
            self._messenger.send(source, peer, tag, deadline)

    def _sendrecv(
        self, source: Buffer, to: int, target: Buffer, peer: int, tag: int, deadline: Deadline
    ) -> None:
        """Post the outgoing message, receive, and only then wait for the receiver."""
        self._check_usable()
        with self._aborting_on_interrupt("sendrecv"):
            self._messenger.sendrecv(source, to, target, peer, tag, deadline)

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
            self.abort(f"{verdict.words_of(error)} (in {what})")


class ThreadMessagingBackend(MessagingBackend):
    """One whose messages in flight are finished by a thread each."""

    _messenger: ThreadSender

    def __init__(self, rank: int, world_size: int, config: Config) -> None:
        super().__init__(rank, world_size, config)
        self._messages: list[threading.Thread] = []  # those in flight

    def _start_send(self, source: Buffer, peer: int, tag: int, deadline: Deadline) -> Work[None]:
        """Send now, wait for the receiver in the background."""
        self._check_usable()
        what, settle = self._messenger.post(source, peer, tag, deadline)
        return self._in_background(what, settle)

    def _recv(self, target: Buffer, peer: int, tag: int, deadline: Deadline) -> None:
        """Receive the next message with this tag into ``target``."""
        self._check_usable()
        with self._aborting_on_interrupt("recv"):
            self._messenger.line_up(target, peer, tag, deadline)[1]()

    def _start_recv(
        self, target: Buffer, peer: int, tag: int, deadline: Deadline, finish: Callable[[], T]
    ) -> Work[T]:
        """Take a place in the line of receivers now, receive in the background."""
        self._check_usable()
        what, receive = self._messenger.line_up(target, peer, tag, deadline)

        def receive_and_finish() -> T:
            receive()
            return finish()

        return self._in_background(what, receive_and_finish)

    def _in_background(self, what: str, run: Callable[[], T] | None) -> Work[T]:
        """Finish a message on a thread of its own: it never queues behind a collective."""
        work: Work[T] = Work(what)
        if run is None:
            work.set_result(cast(T, None))
            return work
        thread = ProgressThread(
            target=self._finish, args=(work, run), name=f"ferrodist {what}", daemon=True
        )
        with self._lock:
            thread.start()
            self._messages = [other for other in self._messages if other.is_alive()] + [thread]
        return work

    def _await_works(self) -> None:
        super()._await_works()
        for thread in self._messages:
            if thread is not threading.current_thread():
                thread.join()
