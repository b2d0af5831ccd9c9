# SPDX-License-Identifier: MIT OR Apache-2.0
"""Terminal: one of rank 0's own, so that it writes colours and progress bars and can be talked to.

What rank 0 writes to it comes out here and is written to the real terminal, which is as large. The
``keyboard`` brings what is typed there.
"""

from __future__ import annotations

import fcntl
import os
import termios
from contextlib import suppress

from ferrodist.launch.output.keyboard import Keyboard, is_in_foreground
from ferrodist.launch.processes import Crew

_OUTPUT_MODES = 1  # its place in what tcgetattr returns
FOLLOW_SECONDS = 0.2  # between looks at the real terminal


class Terminal:
    """A pair of files: ``inside`` is rank 0's terminal, ``outside`` is what is behind it.

    ``real`` is the terminal it stands for; ``stdin`` is where people type, if they do.
    """

    def __init__(self, real: int, stdin: int) -> None:
        self.outside, self.inside = os.openpty()
        self._real = real
        self._size = b""
        modes = termios.tcgetattr(real)
        modes[_OUTPUT_MODES] &= ~termios.OPOST  # or newlines would be translated here and there
        termios.tcsetattr(self.inside, termios.TCSANOW, modes)
        os.set_blocking(self.outside, False)
        self._follow_size()
        has_keyboard = os.isatty(stdin) and is_in_foreground(stdin)
        self.keyboard = Keyboard(stdin, self.outside) if has_keyboard else None

    def attach(self, crew: Crew) -> None:
        """Leave the inside to rank 0, and begin to bring what is typed."""
        self._close_inside()
        if self.keyboard is not None:
            self.keyboard.attach(crew)

    def follow(self) -> None:
        """Become as large as the real terminal, and listen if we are in its foreground."""
        self._follow_size()
        if self.keyboard is not None:
            self.keyboard.follow()

    def let_go(self) -> None:
        """Leave the real terminal as it was, until the next ``follow``."""
        if self.keyboard is not None:
            self.keyboard.let_go()

    def close(self) -> None:
        """Leave the real terminal as it was. The outside is its reader's to close."""
        self.let_go()
        self._close_inside()

    def _follow_size(self) -> None:
        with suppress(OSError):  # the real one may be gone, and a signal tells us so
            size = fcntl.ioctl(self._real, termios.TIOCGWINSZ, bytes(8))
            if size != self._size:
                self._size = size
                fcntl.ioctl(self.outside, termios.TIOCSWINSZ, size)

    def _close_inside(self) -> None:
        if self.inside >= 0:
            os.close(self.inside)
            self.inside = -1
