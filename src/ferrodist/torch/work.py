# SPDX-License-Identifier: MIT OR Apache-2.0
"""What torch gets back for a call: a Work, finished or in flight, and errors in torch's words.

A call that blocks is over when it returns, so all of them return one and the same Work. A Future is
made only on request: it costs as much as the call.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed

from ferrodist.backends.base import Backend
from ferrodist.call import Site, caller_site
from ferrodist.errors import CollectiveTimeout, DistributedError
from ferrodist.torch.tensors import Finish
from ferrodist.work import Work

_NO_TIMEOUT = timedelta(0)  # what torch passes for "as long as it takes"


class CallSite:
    """A call of torch.distributed as errors name it: what, with what, where in the program."""

    __slots__ = ("backend", "name", "site", "tensors")

    def __init__(self, name: str, tensors: Sequence[Any], backend: Backend) -> None:
        self.name = name
        self.tensors = tensors
        self.backend = backend
        self.site: Site | None = caller_site()

    def __str__(self) -> str:
        arrays = [f"{_name_of(x.dtype)}{list(x.shape)}" for x in self.tensors[:3]]
        more = [f"... {len(self.tensors)} tensors"] if len(self.tensors) > 3 else []
        return f"torch.distributed.{self.name}({', '.join([*arrays, *more])}) at {self.site}"

    def explain(self, error: BaseException) -> BaseException:
        """Say in an error of ferrodist which call of torch it comes from."""
        if isinstance(error, DistributedError) and not hasattr(error, "torch_call"):
            error.torch_call = str(self)  # type: ignore[attr-defined] # once: an error may be raised again
            limit = ""
            if isinstance(error, CollectiveTimeout) and self.backend.timeout is not None:
                limit = f"; the timeout of the group is {self.backend.timeout:g} s"
            error.args = (f"{error}\n  in {self}{limit}",)
        return error


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


class FinishedWork(torch._C._distributed_c10d.Work):  # type: ignore[misc] # torch has no types here
    """A call that has succeeded; its results are in the caller's tensors."""

    def __init__(self, tensors: Sequence[Any] = (), source: int = -1) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._source = source

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return at once."""
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        """Tell whether the call has ended."""
        return True

    is_success = is_completed

    def exception(self) -> BaseException | None:
        """Return the error of the call, or None if it succeeded or has not ended."""
        return None

    def result(self) -> list[Any]:
        """Return the tensors with the result."""
        return self._tensors

    def source_rank(self) -> int:
        """Return the rank that sent the message."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a future that already has the tensors."""
        future = torch.futures.Future()
        future.set_result(self._tensors)
        return future


FINISHED = FinishedWork()
"""The Work of a call that has returned: nobody asks it for more than that."""


class PendingWork(torch._C._distributed_c10d.Work):  # type: ignore[misc] # torch has no types here
    """A call in flight.

    ``pending`` is the Work of ferrodist, ``finish`` what is left to do when it is done: copies into
    tensors that are not contiguous. The tensors belong to the call until then. The result of a
    receive that ``is_from_any`` source has a Status that names it. ``thread`` finishes its future.
    """

    def __init__(
        self,
        pending: Work[Any],
        tensors: Sequence[Any],
        site: CallSite,
        finish: Finish | None = None,
        source: int = -1,
        is_from_any: bool = False,
        *,
        thread: FuturesThread,
    ) -> None:
        super().__init__()
        self._pending = pending
        self._thread = thread
        self._tensors = tensors
        self._site = site
        self._finish = finish
        self._source = source
        self._is_from_any = is_from_any
        self._lock = None if finish is None else threading.Lock()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until the result is in the tensors; raises the error of the call."""
        try:
            result = self._pending.wait(None if timeout <= _NO_TIMEOUT else timeout)
        except DistributedError as error:
            raise self._site.explain(error) from None
        except TimeoutError as error:
            raise TimeoutError(f"{self._site}: Timed out waiting: {error}") from None
        self._end(result)
        return True

    synchronize = wait

    def _end(self, result: Any) -> None:
        """Do what is left of a call that went well, once."""
        if self._is_from_any:
            self._source = result[1].source
        if self._finish is not None and self._lock is not None:
            with self._lock:  # a thread that waits and the future may come here at the same time
                if self._finish is not None:
                    self._finish(result)
                self._finish = None

    def is_completed(self) -> bool:
        """Tell whether the call has ended."""
        return self._pending.done()

    def is_success(self) -> bool:
        """Tell whether the call has succeeded."""
        return self._pending.done() and self._pending.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of the call, or None if it succeeded or has not ended."""
        error = self._pending.exception() if self._pending.done() else None
        return None if error is None else self._site.explain(error)

    def result(self) -> list[Any]:
        """Wait, and return the tensors with the result."""
        self.wait()
        return list(self._tensors)

    def source_rank(self) -> int:
        """Return the rank that sent the message."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a future of the tensors; it fails with a RuntimeError with ferrodist's text."""

        def take(_: Any) -> list[Any]:
            self.wait()
            thread.has_waited()
            return list(self._tensors)

        thread = self._thread
        # An exception set on a Future of torch is taken for a value by its own C++ code, and a
        # callback that raises is not.
        over = torch.futures.Future()
        taken = over.then(take)
        is_alone = self._site.backend.world_size == 1 and thread is not MESSAGES
        # A callback may wait for the future, and no other thread would finish it.
        if self._pending._meet() or is_alone or thread.is_current():
            over.set_result(None)
        elif thread is MESSAGES:
            self._pending.add_done_callback(partial(thread._finish_over, over))
        else:
            thread.finish(over, self._pending)
        return taken


class FuturesThread:
    """The thread that finishes futures of torch, and so runs their callbacks, one at a time.

    Those may communicate, which callbacks of ferrodist's own thread must not. The calls of a group
    end in their order, so its thread waits for the next one, and does it if no thread has begun to:
    the program that waits for the future is woken by the thread that did the call. Where the future
    of a later call was asked for first, it gets here again when that call is over, as do those of
    messages, which end in any order. While the thread waits for a call, the callbacks of one that
    is over may be what the other ranks wait for: they run on a thread of their own.
    """

    _IDLE = 5.0  # seconds after which the thread ends
    _END = 2.0  # seconds that a callback has at the end of the program
    _all: ClassVar[weakref.WeakSet[FuturesThread]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._all.add(self)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._aside: list[threading.Thread] = []  # for futures that could not wait for it
        self._is_waiting = False  # for a call
        self._futures: queue.SimpleQueue[tuple[Any, Work[Any] | None] | None] = queue.SimpleQueue()

    def is_current(self) -> bool:
        """Tell whether this is a callback of a future that the thread has finished."""
        return threading.current_thread() is self._thread

    def has_waited(self) -> None:
        """Note that the call which the thread has waited for is over, if this is the thread."""
        if self.is_current():
            self._is_waiting = False

    def finish(self, future: Any, pending: Work[Any] | None = None) -> None:
        """Finish a future, after those that were given before, when its call is over."""
        with self._lock:
            if self._is_waiting and (pending is None or pending.done()):
                thread = self._new_thread(lambda: future.set_result(None))
                self._aside = [*(one for one in self._aside if one.is_alive()), thread]
                thread.start()
                return
            self._futures.put((future, pending))
            if self._thread is None:
                self._thread = self._new_thread(self._run)
                self._thread.start()

    @staticmethod
    def _new_thread(run: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=run, name="ferrodist-torch-futures", daemon=True)

    def _finish_over(self, future: Any, _: Work[Any]) -> None:
        self.finish(future)

    def _run(self) -> None:
        while True:
            try:
                item = self._futures.get(timeout=self._IDLE)
            except queue.Empty:
                with self._lock:
                    if self._futures.empty():
                        self._thread = None
                        return
                continue
            if item is None:
                return
            future, pending = item
            if pending is None or pending.done():
                future.set_result(None)
            elif pending._is_next():
                self._wait_for(future, pending)
            else:
                pending.add_done_callback(partial(self._finish_over, future))
            del item, future, pending

    def _wait_for(self, future: Any, pending: Work[Any]) -> None:
        """Finish the future of a call that is not over, after those that can be finished now."""
        while (item := self._next_or_wait()) is not None:
            other, its_pending = item
            if its_pending is None or its_pending.done():
                other.set_result(None)
            else:
                its_pending.add_done_callback(partial(self._finish_over, other))
        try:
            future.set_result(None)  # its first callback waits
        finally:
            self._is_waiting = False

    def _next_or_wait(self) -> tuple[Any, Work[Any] | None] | None:
        """Return the next future; if there is none, the thread is waiting from now on."""
        with self._lock:
            if self._futures.empty():
                self._is_waiting = True
                return None
            item = self._futures.get_nowait()
            if item is None:  # the program ends, but not before this future is finished
                self._is_waiting = True
                self._futures.put(None)
            return item

    @classmethod
    def end_all(cls) -> None:
        """Let the threads end, and wait for them: at the end of the program.

        Python ends other threads where they take the GIL. Inside a future of torch, whose C++ code
        does not expect it, that ends the process with SIGABRT.
        """
        end = time.monotonic() + cls._END
        everyone = list(cls._all)
        for one in everyone:
            one._futures.put(None)
        for one in everyone:
            for thread in (one._thread, *one._aside):
                if thread is not None:
                    thread.join(max(0.0, end - time.monotonic()))


MESSAGES = FuturesThread()
atexit.register(FuturesThread.end_all)
os.register_at_fork(after_in_child=MESSAGES.__init__)  # type: ignore[misc] # the thread is gone
