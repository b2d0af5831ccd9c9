# SPDX-License-Identifier: MIT OR Apache-2.0
"""RequestWork: the handle of a call in flight that native code finishes by itself.

A call is a native request; no thread of Python stands behind it. Whoever waits for the Work waits
in native code, without the GIL. What a Future needs beyond that (its condition, waiters, callbacks)
is made when somebody first asks for it; from then on, and for errors that nobody asks for, the one
callbacks thread of the process hears of the request.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from ferrodist import _native
from ferrodist.backends.progress import ProgressThread
from ferrodist.config import check_timeout
from ferrodist.work import Work

T = TypeVar("T")

_STATE = frozenset(
    ("_condition", "_state", "_result", "_exception", "_waiters", "_done_callbacks")
)  # what Future.__init__ makes
_LONGEST_SLEEP = 3600.0  # seconds
_END = 0  # the token that ends the callbacks thread


class RequestCall(Protocol):
    """What a RequestWork knows of its call."""

    @property
    def name(self) -> str:
        """The call as logs show it."""

    def look(self) -> None:
        """Let native code hear of signals."""

    def explain(self, outcome: int, rank: int, found: bytes) -> BaseException:
        """Make the error of a request that has failed."""

    def interrupted(self, error: BaseException) -> None:
        """Hear that a signal ended the wait of a caller."""

    def unasked(self, work: RequestWork[Any], error: BaseException) -> None:
        """Hear of an error that nobody has asked for."""


class RequestWork(Work[T]):
    """A Work whose call is a native request; ``finish`` makes its result when it is done."""

    _outcome: tuple[T | None, BaseException | None] | None = None
    is_asked = False

    def __init__(
        self, request: _native.Request, token: int, call: RequestCall, finish: Callable[[], T]
    ) -> None:
        # Not Future.__init__: most Works are only waited for.
        self._request = request
        self._token = token
        self._call = call
        self._finish: Callable[[], T] | None = finish
        _registry.add(token, self)

    @property
    def describe(self) -> str:  # type: ignore[override] # a Work of another kind has it as a field
        """The call as logs and errors show it."""
        return self._call.name

    def __getattr__(self, name: str) -> Any:
        """Make the state of a Future when somebody first asks for it."""
        if name not in _STATE:
            raise AttributeError(name)
        with _registry.lock:
            if "_done_callbacks" not in self.__dict__:
                Future.__init__(self)
                if self._request.is_complete:
                    self._tell_future()
                else:
                    _registry.works[self._token] = self
                    self._request.hear(self._token)
        return self.__dict__[name]

    def done(self) -> bool:
        """Tell whether the call is over."""
        return self._request.is_complete or self._request.test()

    def wait(self, timeout: float | timedelta | None = None) -> T:
        """Return the result; after ``timeout`` raise TimeoutError and leave the call going."""
        return self.result(0 if timeout == 0 else check_timeout(timeout))

    def result(self, timeout: float | None = None) -> T:
        """Return the result, waiting for it if necessary."""
        result, error = self._wait(timeout)
        if error is not None:
            try:
                raise error
            finally:
                del error
        return result  # type: ignore[return-value] # which is there if there is no error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error of the call, None if it went well."""
        return self._wait(timeout)[1]

    def _wait(self, timeout: float | None) -> tuple[T | None, BaseException | None]:
        self.is_asked = True
        if self._outcome is None and not self._request.is_complete:
            end = math.inf if timeout is None else time.monotonic() + max(timeout, 0)
            error = self._request.wait(end, False, self._call.look)[2]
            if error is not None and not self._request.is_complete:
                self._call.interrupted(error)
                raise error
            if not self._request.is_complete:
                raise TimeoutError(f"{self.describe} is still in flight after {timeout:g} s")
        return self.settle()

    def settle(self) -> tuple[T | None, BaseException | None]:
        """Make result or error of a request that is complete, once; tell of an unasked error."""
        with _registry.lock:
            if self._outcome is None:
                self._outcome = self._make_outcome()
                self._finish = None
                _registry.works.pop(self._token, None)
                _registry.drop_oldest()
                error = self._outcome[1]
                if error is not None and not self.is_asked:
                    self._call.unasked(self, error)
        return self._outcome

    def _make_outcome(self) -> tuple[T | None, BaseException | None]:
        outcome, rank = self._request.status
        try:
            if outcome:
                return None, self._call.explain(outcome, rank, self._request.found)
            assert self._finish is not None
            return self._finish(), None
        except BaseException as error:  # noqa: BLE001 -- whoever asks for the result gets it
            return None, error

    def _tell_future(self) -> None:
        result, error = self.settle()
        if self._state == "FINISHED":
            return
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(result)  # type: ignore[arg-type] # there is one if there is no error

    def on_complete(self) -> None:
        """Hear, on the callbacks thread, that the request is complete."""
        if "_done_callbacks" in self.__dict__:
            self._tell_future()
        else:
            self.settle()

    def wait_for_end(self) -> None:
        """Wait as long as the call may take, without asking for its outcome."""
        while not self._request.is_complete:
            error = self._request.wait(math.inf, False, self._call.look)[2]
            if error is not None:
                raise error
        self.on_complete()


class _Done:
    """The request of a call that was done at once."""

    is_complete = True
    status = (0, -1)


class DoneWork(RequestWork[None]):
    """A send that was done at once."""

    _request: Any = _Done()
    _outcome = None, None
    _token = 0

    def __init__(self, dst: int, tag: int) -> None:
        self._dst, self._tag = dst, tag

    @property
    def describe(self) -> str:  # type: ignore[override] # as in RequestWork
        """The call as logs and errors show it."""
        return f"send(dst={self._dst}, tag={self._tag})"


class _Registry:
    """The requests in flight of this process, and the thread that hears of those that are over."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.works: dict[int, RequestWork[Any]] = {}
        self._thread: threading.Thread | None = None
        self._tokens = itertools.count(1)

    def new_token(self) -> int:
        """Give a number that no other request has."""
        return next(self._tokens)

    def add(self, token: int, work: RequestWork[Any]) -> None:
        """Keep a request, and its arrays, while it is in flight."""
        self.works[token] = work
        if self._thread is None:
            self._start()
        self.drop_oldest()

    def in_flight(self, call_of: Callable[[RequestCall], bool]) -> list[RequestWork[Any]]:
        """List the works whose calls are of some kind."""
        return [work for work in list(self.works.values()) if call_of(work._call)]

    def drop_oldest(self) -> None:
        """Let go of works that are done and that nobody has waited for."""
        while (token := next(iter(self.works), None)) is not None:
            work = self.works.get(token)
            if work is not None:
                request = work._request
                is_dropped = request.is_complete and not request.status[0]
                if not is_dropped or "_done_callbacks" in work.__dict__:
                    return
            self.works.pop(token, None)

    def _start(self) -> None:
        with self.lock:
            if self._thread is None:
                self._thread = ProgressThread(
                    target=self._run, name="ferrodist-callbacks", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while True:
            for token in _native.next_completions(_LONGEST_SLEEP):
                if token == _END:
                    return
                work = self.works.get(token)
                if work is not None:
                    work.on_complete()
                del work

    def end_thread(self) -> None:
        """End the thread if nothing is in flight: the next call in flight starts another."""
        with self.lock:
            self.drop_oldest()
            thread = self._thread
            if self.works or thread is None or thread is threading.current_thread():
                return
            self._thread = None
            _native.wake_completions()
        thread.join()


_registry = _Registry()
end_callbacks_thread = _registry.end_thread
new_token = _registry.new_token
in_flight = _registry.in_flight


def _begin_anew() -> None:
    """In a forked child: the requests are the parent's, and so is the thread."""
    parents, _registry.works = _registry.works, {}
    _registry.__dict__.update(lock=threading.RLock(), _thread=None)
    _kept_of_parent.append(parents)


_kept_of_parent: list[Any] = []  # nothing of them is ended here
os.register_at_fork(after_in_child=_begin_anew)
