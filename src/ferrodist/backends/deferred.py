# SPDX-License-Identifier: MIT OR Apache-2.0
"""Calls in flight where only one thread may use the engine: they run when they are waited for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ferrodist.backends import failures
from ferrodist.backends.p2p import Posted
from ferrodist.backends.provider import Provider
from ferrodist.backends.provider_backend import ProviderBackend
from ferrodist.backends.provider_link import ProviderLink
from ferrodist.backends.running_call import Prepared, RunningCall
from ferrodist.call import Call
from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.errors import InvalidArgument
from ferrodist.work import Work

T = TypeVar("T")


class DeferredWork(Work[T]):
    """A call that runs when the main thread first asks for it: ``done`` finishes it, too."""

    def __init__(
        self, describe: str, run: Callable[[float | None], None], cancel: Any = None
    ) -> None:
        super().__init__(describe, cancel=cancel)
        self._run = run

    def result(self, timeout: float | None = None) -> T:
        """Run the call, if it has not run, and return its result; a timeout ends the call."""
        self._run_asked(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Run the call, if it has not run, and return its error; a timeout ends the call."""
        self._run_asked(timeout)
        return super().exception(timeout)

    def done(self) -> bool:
        """Run the call, if it has not run: it is done. Other threads are told how it stands."""
        if _is_main():
            self._run_asked(None)
        return self.has_run

    def _run_asked(self, timeout: float | None) -> None:
        if not self.has_run:
            _check_main(self.describe)
            self.is_asked = True
            self.run(timeout or None)  # a program that asks with 0 until it is done asks as by done

    def __repr__(self) -> str:
        return f"<Work {self.describe} {'done' if self.has_run else 'in flight'}>"

    @property
    def has_run(self) -> bool:
        """Whether it has run, or was cancelled."""
        return super().done()

    def run(self, timeout: float | None = None) -> None:
        """Run the call now, asked for or not."""
        if not self.has_run:
            self._run(timeout)

    def cancel(self) -> bool:
        """Withdraw a receive that has not run."""
        if self.has_run or self._withdraw is None or not self._withdraw():
            return self.cancelled()
        self.is_asked = True
        Future.cancel(self)
        return self.set_running_or_notify_cancel() is False

    def add_done_callback(self, fn: Callable[[Future[T]], Any]) -> None:
        """Run the call, then ``fn(work)``."""
        self.done()
        super().add_done_callback(fn)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _check_main(what: str) -> None:
    if not _is_main():
        raise InvalidArgument(
            f"{what}: the engine was initialised for one thread: only the main thread may "
            "communicate; MPI_THREAD_MULTIPLE allows all"
        )


class DeferredBackend(ProviderBackend):
    """One whose engine may allow the main thread alone: ``has_threads`` of the provider says so.

    Then collectives in flight run, in their order, when one is waited for, before the next
    collective, and in close().
    """

    def __init__(
        self, provider: Provider, config: Config | None = None, *, _link: ProviderLink | None = None
    ) -> None:
        super().__init__(provider, config, _link=_link)
        self._has_threads: bool = getattr(provider, "has_threads", True)
        if not self._has_threads:
            self._call_path = None  # which knows nothing of what is deferred
        self._deferred: deque[tuple[int, Deadline, Work[Any], Callable[[], None]]] = deque()
        self._deferred_messages: list[DeferredWork[Any]] = []

    def _check_usable(self) -> None:
        super()._check_usable()
        if not self._has_threads:
            _check_main(f"a call of rank {self.rank}")

    def abort(self, reason: str = "abort() was called") -> None:
        """Give the group up, and every group split off it."""
        if self._has_threads:
            super().abort(reason)
            return
        self._check_process()
        _check_main("abort")
        self._link.set_error(failures.abort(self.rank, reason))

    def close(self) -> None:
        """Finish what is in flight and leave the group; raise the error of a Work nobody asked."""
        if not self._has_threads:
            _check_main("close")
        super().close()

    def _run_call(self, call: Call, deadline: Deadline, body: Callable[[RunningCall], T]) -> T:
        self._run_deferred()
        return super()._run_call(call, deadline, body)

    def _start(self, prepared: Prepared[T]) -> Work[T]:
        if self._has_threads:
            return super()._start(prepared)
        self._check_usable()
        running, ticket = self._in_flight(prepared), self._tickets.take()

        def run() -> T:
            return self._run_in_flight(running, prepared, ticket, in_background=False)

        label = prepared.call.kind.label
        work: DeferredWork[T] = DeferredWork(
            f"{label} #{ticket}", lambda timeout: self._run_deferred(ticket, timeout)
        )
        self._deferred.append((ticket, prepared.deadline, work, lambda: self._finish(work, run)))
        return work

    def _run_deferred(self, last: int | None = None, timeout: float | None = None) -> None:
        """Run what was deferred, up to a ticket."""
        while self._deferred and (last is None or self._deferred[0][0] <= last):
            _, deadline, work, run = self._deferred.popleft()
            deadline.shorten(timeout)
            run()
            error = None if work.cancelled() else Future.exception(work, 0)
            if error is not None and not isinstance(error, Exception):
                work.is_asked = True
                raise error  # Ctrl-C is for the program, which may be in another call

    def _in_background(self, posted: Posted) -> Work[Any]:
        if self._has_threads or posted.is_done:
            return super()._in_background(posted)
        cancel = posted.cancel if posted.is_receive else None

        def run(timeout: float | None) -> None:
            if posted.deadline is not None:
                posted.deadline.shorten(timeout)
            self._finish(work, posted.finish)

        work: DeferredWork[Any] = DeferredWork(posted.what, run, cancel)
        waiting = [one for one in self._deferred_messages if not one.has_run]
        self._deferred_messages = [*waiting, work]
        return work

    def _await_works(self, deadline: Deadline) -> None:
        self._run_deferred()
        for work in self._deferred_messages:
            work.run()
        super()._await_works(deadline)
