# SPDX-License-Identifier: MIT OR Apache-2.0
"""The end of a rank's program: the other ranks are told that it ended, or what it raised.

Python has a hook for errors and one for the end, and neither knows of ``sys.exit``: so that is
replaced by one that remembers where it was called.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

from ferrodist.backends.base import Backend
from ferrodist.call import caller_site

logger = logging.getLogger("ferrodist")

_EXIT_SECONDS = 2.0  # for calls that are in flight when the program ends

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class ProgramEnd:
    """Tells the other ranks, once, how this rank's program came to its end."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._exit = ""
        self._has_failed = False

    def watch(self) -> None:
        """Hook into all the ways in which a program can end."""
        previous_hook: _Hook = sys.excepthook
        previous_exit = sys.exit

        def hook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            try:
                self._fail(error)
            finally:
                previous_hook(kind, error, trace)

        def exit(status: object = None, /) -> NoReturn:  # noqa: A001 -- it stands for sys.exit
            if _is_in_main_thread():
                self._exit = f"sys.exit({_shown(status)}) at {caller_site()}"
            previous_exit(status)  # type: ignore[arg-type]  # whatever it was given

        sys.excepthook = hook
        sys.exit = exit
        atexit.register(self._end)

    def _fail(self, error: BaseException) -> None:
        goes_on = hasattr(sys, "ps1") or sys.flags.inspect  # at a prompt, or one comes after it
        goes_on = goes_on or not _is_in_main_thread()  # a thread's error does not end the program
        if not goes_on and not self._has_failed:
            self._has_failed = True
            self._backend._fail(error)

    def _end(self) -> None:
        """Leave the group, quietly and soon: calls in flight get a moment, no more."""
        # Python notes the error of a program before it calls the hook, which may be somebody
        # else's by now.
        error = getattr(sys, "last_value", None)
        if error is not None:
            self._fail(error)
        thread = threading.Thread(target=self._end_quietly, daemon=True)
        with suppress(KeyboardInterrupt):  # we are ending
            thread.start()
            thread.join(_EXIT_SECONDS)

    def _end_quietly(self) -> None:
        how = f"its program ended after {self._exit}" if self._exit else "its program ended"
        try:
            self._backend._end(how)
        except Exception as error:  # noqa: BLE001 -- of a Work nobody asked: logged before
            rank = self._backend.rank
            logger.debug("rank %d: at the end of the program: %s", rank, error)


def _shown(status: object) -> str:
    """Show what sys.exit was given: a number, or a text in short."""
    if status is None:
        return ""
    if isinstance(status, int):
        return str(int(status))
    if not isinstance(status, str):
        return f"a {type(status).__name__}"
    return repr(status if len(status) <= 80 else f"{status[:80]}...")


def _is_in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
