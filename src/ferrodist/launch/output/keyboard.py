# SPDX-License-Identifier: MIT OR Apache-2.0
"""Keyboard: what is typed at the launcher's terminal, on its way to rank 0's.

Meanwhile the real terminal neither echoes nor collects lines: rank 0's does, as rank 0 wants it.
Ctrl-C and Ctrl-Z stay with the launcher. In the background the terminal is another's: hands off.
"""

from __future__ import annotations

import os
import termios
from contextlib import suppress
from typing import Any, NamedTuple, Self

from ferrodist.launch.processes import Crew

_BITE_NBYTES = 1024  # a terminal holds four times as much for a program that does not read
_INPUT_MODES, _LOCAL_MODES, _CHARACTERS = 0, 3, 6  # their places in what tcgetattr returns


class Keyboard:
    """Takes from one terminal and gives to another."""

    def __init__(self, real: int, outside: int) -> None:
        self._real = real
        self._outside = outside
        self._crew: Crew | None = None
        self._modes: _Modes | None = None  # of the real terminal, while they are changed
        self._unsent = b""
        self._is_watched = False
        self._is_over = False

    def attach(self, crew: Crew) -> None:
        """Begin."""
        self._crew = crew
        self.follow()

    def follow(self) -> None:
        """Go on where rank 0 had not read, or where another was in the foreground."""
        self._send()
        if self._is_over or self._unsent or self._crew is None:
            return
        if not is_in_foreground(self._real):
            self._modes = None
            return
        if self._modes is None or not self._modes.are_set(self._real):
            self._modes = _Modes.change(self._real)
        if not self._is_watched:
            self._is_watched = True
            self._crew.watch(self._real, self._relay)

    def let_go(self) -> None:
        """Leave the real terminal as it was, until the next ``follow``."""
        # In the background it has been set by another program, and to touch it would stop us.
        if self._modes is not None and is_in_foreground(self._real):
            self._modes.undo(self._real)
        self._modes = None

    def _relay(self) -> bool:
        """Bring some bytes over; tell whether to be called again."""
        if self._modes is not None and not self._unsent and is_in_foreground(self._real):
            self._unsent = self._read()
            self._send()
        self._is_watched = self._modes is not None and not self._unsent and not self._is_over
        return self._is_watched

    def _read(self) -> bytes:
        try:
            data = os.read(self._real, _BITE_NBYTES)
        except OSError:  # the terminal is gone
            data = b""
        self._is_over = not data
        return data

    def _send(self) -> None:
        """Give rank 0's terminal as much as it takes."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._outside, self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # rank 0 has closed it
            self._unsent, self._is_over = b"", True


class _Modes(NamedTuple):
    """How a terminal was, and how it has been made."""

    before: list[Any]
    after: list[Any]

    @classmethod
    def change(cls, terminal: int) -> Self:
        """Let every byte through as it is typed."""
        before, modes = termios.tcgetattr(terminal), termios.tcgetattr(terminal)
        modes[_INPUT_MODES] &= ~termios.ICRNL
        modes[_LOCAL_MODES] &= ~(termios.ICANON | termios.ECHO)
        modes[_CHARACTERS][termios.VMIN], modes[_CHARACTERS][termios.VTIME] = 1, 0
        termios.tcsetattr(terminal, termios.TCSANOW, modes)
        return cls(before, termios.tcgetattr(terminal))

    def are_set(self, terminal: int) -> bool:
        """Tell whether nobody, such as a shell while we were stopped, has changed them since."""
        return termios.tcgetattr(terminal) == self.after

    def undo(self, terminal: int) -> None:
        """Make it as it was."""
        with suppress(termios.error):  # it may be gone
            termios.tcsetattr(terminal, termios.TCSANOW, self.before)


def is_in_foreground(terminal: int) -> bool:
    """Tell whether this process is one that may read from the terminal now."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # it is not the terminal that controls us
        return False
