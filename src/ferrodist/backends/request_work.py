# SPDX-License-Identifier: MIT OR Apache-2.0
"""RequestWork: the handle of a call in flight that native code finishes by itself.

A call is a native request; no thread of Python stands behind it. A wait for the Work is one
in native code, without the GIL. What a Future needs beyond that (its condition, waiters, callbacks)
is made when somebody first asks for it; from then on, and for errors that nobody asks for, the one
callbacks thread of the process is notified of the request.
"""

from __future__ import annotations

import _thread
import logging
import os
import threading
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from ferrodist import _native
from ferrodist.backends import failures
from ferrodist.call import Kind
from ferrodist.config import check_timeout
from ferrodist.deadline import Deadline
from ferrodist.work import Work

T = TypeVar("T")

logger = logging.getLogger("ferrodist")

_LONGEST_WAIT = 2.0  # seconds, for callbacks: they may wait for the very thread that waits for them


NO_PEER, ANY_PEER = -1, -2  # as of Peers in native/bind/messages.hpp


def source_of(peer: int) -> int:
    """Name the source of a receive as in names of messages; below 0 it is any rank."""
    return ANY_PEER if peer < 0 else peer


def name_of_message(dst: int, src: int, tag: int, recv_tag: int, name: str = "") -> str:
    """Name a point-to-point call as logs show it; a tag below 0 is any."""
    if src == NO_PEER:
        return f"{name or 'send'}(dst={dst}, tag={tag})"
    source = "ANY_SOURCE" if src == ANY_PEER else src
    received = "ANY_TAG" if recv_tag < 0 else recv_tag
    if dst == NO_PEER:
        return f"{name or 'recv'}(src={source}, tag={received})"
    second = "" if received == tag else f", recv_tag={received}"
    return f"sendrecv(dst={dst}, src={source}, tag={tag}{second})"


class RequestWork(_native.WorkBase, Work[T]):
    """A Work whose call is a native request, which makes it; wait and done are native, too."""

    @property
    def describe(self) -> str:  # type: ignore[override] # a Work of another kind has it as a field
        kind, dst, src, number = self._facts
        if kind < 0:
            return name_of_message(dst, src, number, number)
        return f"{Kind(kind).label} #{number}"

    def cancel(self) -> bool:
        """Withdraw a receive that no message was matched with; else return False."""
        if self._cancel():
            self.on_complete()
            return True
        return self.cancelled()

    def make_state(self) -> None:
        """Make the state of a Future, and have it told when the call is over."""
        with _callbacks.lock:
            if "_done_callbacks" not in self.__dict__:
                Future.__init__(self)
                if not self._hear():
                    self.on_complete()

    def on_complete(self) -> None:
        """Called when the call has ended: make its result, and set that of the Future if any."""
        if self._hear():
            return  # a part of it is not over
        result, error = self._outcome()
        if "_done_callbacks" not in self.__dict__ or self._state == "FINISHED":
            return
        if isinstance(error, CancelledError):
            self._note_cancelled()
        elif error is not None:
            self.set_exception(error)
        else:
            self.set_result(result)

    def _note_cancelled(self) -> None:
        with _callbacks.lock:
            if self._state == "PENDING":
                Future.cancel(self)
                self.set_running_or_notify_cancel()

    def wait_for_end(self, deadline: Deadline) -> None:
        """Wait as long as the call may take, without asking for its outcome."""
        if self._wait_for_end(deadline):
            self.on_complete()


class _FutureState:
    """A field of a Future, made with all others when it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, work: RequestWork[Any] | None, owner: Any = None) -> Any:
        if work is None:
            return self
        work.make_state()
        return work.__dict__[self._name]  # from now on it is found there


for _name in ("_condition", "_state", "_result", "_exception", "_waiters", "_done_callbacks"):
    setattr(RequestWork, _name, _FutureState(_name))


class _Callbacks:
    """The thread that is notified of finished calls and runs their callbacks.

    It sleeps while there is nothing to do. It ends when a group is closed and nothing is in flight;
    the next call in flight starts another, which may be before this one has noticed.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def start(self) -> None:
        """Start the thread; one that was started before, by a call that was interrupted, ends."""
        try:  # a threading.Thread waits for its thread, and a signal there leaves it half-made
            _thread.start_new_thread(_run_callbacks, (_native.begin_listening(),))
        except RuntimeError as error:
            raise failures.no_thread(error) from error

    def end(self, deadline: Deadline) -> None:
        """Let the thread end if nothing is in flight; wait a moment for callbacks that run."""
        _native.end_listening()
        if not _native.is_progress_thread():
            rest = deadline.timeout()
            _native.wait_for_callbacks(_LONGEST_WAIT if rest is None else min(rest, _LONGEST_WAIT))


def _run_callbacks(listener: int) -> None:
    threading.current_thread().name = "ferrodist-callbacks"
    _native.mark_progress_thread()
    while (works := _native.next_completions(listener)) is not None:
        for work in works:
            try:
                work.on_complete()
            except BaseException:  # SystemExit too: there are callbacks after it
                logger.exception("a callback of a Work failed")
        work = works = None  # what is done must not keep the user's arrays while the thread sleeps
    # Up to Python 3.12 threading goes on listing a thread that it has not started itself.
    getattr(threading, "_active", {}).pop(threading.get_ident(), None)


_callbacks = _Callbacks()
end_callbacks = _callbacks.end


def _begin_anew() -> None:
    """In a forked child: the calls in flight are the parent's, and so is the thread."""
    _native.forget_works()
    _callbacks.lock = threading.RLock()


_native.set_work_type(RequestWork)
_native.set_hooks(
    start_callbacks=_callbacks.start,
    check_wait=lambda timeout: 0 if timeout == 0 else check_timeout(timeout),
    on_unasked_error=lambda backend, work, error: backend._note_unasked(work, error),
)
os.register_at_fork(after_in_child=_begin_anew)
