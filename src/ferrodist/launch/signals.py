# SPDX-License-Identifier: MIT OR Apache-2.0
"""Signals: what is sent to a launcher is handed on to its ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_AGAIN_SECONDS = 1.0
_PASSING = (signal.SIGUSR1, signal.SIGUSR2)  # the ranks know what they mean, we go on
HANDED_ON = frozenset((*_ENDING, *_PASSING))


class Takers(Protocol):
    """Those that signals are handed on to."""

    def send_signal(self, number: int) -> None:
        """Signal them all; signal handlers call it."""
        ...


class Signals:
    """Hands signals on while its context lasts; remembers those that ask the job to end.

    What was ignored when the launcher started, as by nohup, stays so.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._times: list[float] = []
        self._crew: Takers | None = None
        self._let_terminal_go: Callable[[], None] | None = None
        self._previous: dict[int, Any] = {}

    @property
    def are_urgent(self) -> bool:
        """True if somebody insists: a second Ctrl-C, or anything again after a while.

        Several at once are one: a terminal that closes sends SIGHUP, and so does its shell.
        """
        has_repeated = len(self._times) > 1 and self._times[-1] - self._times[0] > _AGAIN_SECONDS
        return has_repeated or self.received.count(signal.SIGINT) > 1

    def hand_on_to(self, crew: Takers, let_terminal_go: Callable[[], None]) -> None:
        """Say whose ranks get them, and what to do before this process is stopped by Ctrl-Z."""
        self._crew, self._let_terminal_go = crew, let_terminal_go
        for number in self.received:  # while the ranks were being started
            crew.send_signal(number)

    def hand_on_to_nobody(self) -> None:
        """Only remember them."""
        self._crew, self._let_terminal_go = None, None

    def __enter__(self) -> Self:
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        handlers = dict.fromkeys((*_ENDING, *_PASSING), self._take)
        for number, handler in {**handlers, signal.SIGTSTP: self._stop}.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, handler)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number in _ENDING:
            self.received.append(signal.Signals(number))
            self._times.append(time.monotonic())
        if self._crew is not None:
            self._crew.send_signal(number)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Stop the ranks and this process, until somebody continues it."""
        crew, let_terminal_go = self._crew, self._let_terminal_go
        if crew is not None and let_terminal_go is not None:
            crew.send_signal(signal.SIGSTOP)
            let_terminal_go()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # returns when we are continued
        signal.signal(number, self._stop)
        if crew is not None:
            crew.send_signal(signal.SIGCONT)
