# SPDX-License-Identifier: MIT OR Apache-2.0
"""Work: the handle of a call in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

from ferrodist.config import check_timeout
from ferrodist.errors import InvalidArgument

T = TypeVar("T")


class Work(Future[T]):
    """A call in flight: a Future that cannot be cancelled, unless it is a receive.

    The arrays passed to the call belong to it until it is done. Callbacks run on the thread that
    finishes the call and must not communicate.
    """

    def __init__(
        self,
        describe: str = "work",
        thread: threading.Thread | None = None,
        holding: Callable[[], AbstractContextManager[None]] = nullcontext,
        cancel: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__()
        self.describe = describe
        self._thread = thread  # the one that will finish it
        self._holding = holding  # shows others that it is waited for
        self._withdraw = cancel  # takes it back, if that is possible at all
        self.is_asked = False  # whether anybody looked at the outcome, so that no error is lost

    def cancel(self) -> bool:
        """Withdraw a receive that no message was matched with.

        Then it has taken nothing, and its result is a CancelledError. Else return False: the other
        ranks count on this call.
        """
        if self._withdraw is None or self.done() or not self._withdraw():
            return self.cancelled()
        self.is_asked = True
        super().cancel()
        self.set_running_or_notify_cancel()
        return True

    def wait(self, timeout: float | timedelta | None = None) -> T:
        """Return the result; after ``timeout`` raise TimeoutError and leave the call going."""
        return self.result(0 if timeout == 0 else check_timeout(timeout))

    def result(self, timeout: float | None = None) -> T:
        """Return the result, waiting for it if necessary."""
        self._ask()
        try:
            with nullcontext() if self.done() else self._holding():
                return super().result(timeout)
        except TimeoutError as error:
            raise self._explain(error, timeout) from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error of the call, None if it went well."""
        self._ask()
        try:
            with nullcontext() if self.done() else self._holding():
                return super().exception(timeout)
        except TimeoutError as error:
            raise self._explain(error, timeout) from None

    def add_done_callback(self, fn: Callable[[Future[T]], Any]) -> None:
        """Call ``fn(work)`` when the call is done."""
        self.is_asked = True
        super().add_done_callback(fn)

    def _explain(self, error: TimeoutError, timeout: float | None) -> TimeoutError:
        """Give a text to a wait that ran out; the call's own timeout has one."""
        if self.done():
            return error
        return TimeoutError(f"{self.describe} is still in flight after {timeout:g} s")

    def _ask(self) -> None:
        self.is_asked = True
        if self._thread is threading.current_thread() and not self.done():
            raise InvalidArgument(
                f"{self.describe}: a callback cannot wait for a call that its own thread has to do"
            )

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio  # only programs that await pay for it

        return asyncio.wrap_future(self).__await__()

    def __repr__(self) -> str:
        return f"<Work {self.describe} {'done' if self.done() else 'in flight'}>"
