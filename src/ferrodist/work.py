# SPDX-License-Identifier: MIT OR Apache-2.0
"""Work: the handle of a call in flight; and waiting for several of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future
from concurrent.futures import wait as wait_for_futures
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from ferrodist.config import check_timeout
from ferrodist.errors import InvalidArgument

T = TypeVar("T")


class Work(Future[T]):
    """The handle of a call in flight, returned by every call with ``async_op=True``.

    A ``concurrent.futures.Future`` that can also be awaited. Only a receive can be cancelled. Do
    not touch the arrays passed to the call until it is done. Callbacks must not communicate.
    """

    def __init__(
        self,
        describe: str = "work",
    ) -> None:
        super().__init__()
        self.describe = describe
        self.is_asked = False  # whether the result was asked for, so that no error is lost

    def cancel(self) -> bool:
        """Cancel a receive that has not been matched with a message; return whether it worked.

        A cancelled receive has consumed no message and raises CancelledError. Other calls cannot
        be cancelled: the other ranks depend on them.
        """
        return self.cancelled()

    def wait(self, timeout: float | timedelta | None = None) -> T:
        """Wait for the result and return it; raise the call's error if it failed.

        After ``timeout`` (seconds or a timedelta) raise TimeoutError; the call stays in flight.
        """
        return self.result(0 if timeout == 0 else check_timeout(timeout))

    def result(self, timeout: float | None = None) -> T:
        """Do the same as ``wait``, with ``timeout`` in seconds."""
        self.is_asked = True
        try:
            return super().result(timeout)
        except TimeoutError as error:
            raise self._explain(error, timeout) from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the call and return its error, None if it succeeded."""
        self.is_asked = True
        try:
            return super().exception(timeout)
        except TimeoutError as error:
            raise self._explain(error, timeout) from None

    def add_done_callback(self, fn: Callable[[Future[T]], Any]) -> None:
        """Call ``fn(work)`` when the call is done, or now if it is."""
        self.is_asked = True
        super().add_done_callback(fn)

    def _meet(self) -> bool:
        """Do a short call now if all ranks are about to; tell whether it is over."""
        return self.done()

    def _is_next(self) -> bool:
        """Tell whether all calls of its group before it are over; False if that is not known."""
        return self.done()

    def _explain(self, error: TimeoutError, timeout: float | None) -> TimeoutError:
        """Give a text to a wait that ran out; the call's own timeout has one."""
        if self.done():
            return error
        return TimeoutError(f"{self.describe} is still in flight after {timeout:g} s")

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio  # only programs that await pay for it

        return asyncio.wrap_future(self).__await__()

    def __repr__(self) -> str:
        return f"<Work {self.describe} {'done' if self.done() else 'in flight'}>"


def wait_all(works: Sequence[Work[Any]], timeout: float | timedelta | None = None) -> list[Any]:
    """Wait for several calls in flight and return their results, in the same order.

    If calls failed, raise the error of the first of these in the list once all calls have ended.
    After ``timeout`` raise TimeoutError; unfinished calls stay in flight.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def swap(backend):
        ...     peer = 1 - backend.rank
        ...     coming = backend.recv(peer, async_op=True)
        ...     return ferrodist.wait_all([coming, backend.send(backend.rank, peer, async_op=True)])
        >>> run_ranks(2, swap)
        [[1, None], [0, None]]
    """
    seconds = 0 if timeout == 0 else check_timeout(timeout)
    end = None if seconds is None else time.monotonic() + seconds
    works = _check_works(works, "wait_all")
    for work in works:
        with suppress(CancelledError):
            work.exception(None if end is None else max(0.0, end - time.monotonic()))
    return [work.result() for work in works]


_STARTS = itertools.count()


def wait_any(works: Sequence[Work[Any]], timeout: float | timedelta | None = None) -> int:
    """Wait until one of several calls in flight has ended and return its index.

    ``works[index].wait()`` then returns its result or raises its error. If several calls have
    ended, repeated calls choose different ones. After ``timeout`` raise TimeoutError.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def first(backend):
        ...     if backend.rank > 0:
        ...         return backend.send(backend.rank, 0)
        ...     works = [backend.recv(peer, async_op=True) for peer in (1, 2)]
        ...     index = ferrodist.wait_any(works)
        ...     return works[index].wait() == index + 1, works[1 - index].wait() == 2 - index
        >>> run_ranks(3, first)
        [(True, True), None, None]
    """
    works = _check_works(works, "wait_any")
    if not works:
        raise InvalidArgument("wait_any needs at least one Work, got none")
    seconds = 0 if timeout == 0 else check_timeout(timeout)
    start = next(_STARTS) % len(works)
    order: list[int] = [*range(start, len(works)), *range(start)]
    for is_last in (seconds == 0, True):
        for index in order:
            if works[index].done():
                return index
        if not is_last:
            wait_for_futures(works, seconds, FIRST_COMPLETED)
    raise TimeoutError(f"none of {len(works)} calls is over after {seconds:g} s")


def _check_works(works: Any, name: str) -> list[Work[Any]]:
    is_list = isinstance(works, (list, tuple))
    wrong = [work for work in works if not isinstance(work, Work)] if is_list else [works]
    if wrong:
        kind = type(wrong[0])
        got = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        text = f"{name} takes a list of what calls with async_op=True returned, got a {got}"
        raise InvalidArgument(text, got=got)
    return list(works)
