# SPDX-License-Identifier: MIT OR Apache-2.0
"""Console: where the output of all ranks goes in the end, and where what people type comes from.

There is one console for the whole life of a launcher; restarts of a job share it. Rank 0 gets a
``Terminal`` of its own where the console is one, so that it writes colours and progress bars, and a
``Keyboard`` passes on what is typed.
"""

from __future__ import annotations

import fcntl
import io
import os
import subprocess
import termios
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TextIO

from ferrodist.launch.output.writer import FileSink, Sink, TextSink, Writer
from ferrodist.launch.processes import ProcessSet

FOLLOW_SECONDS = 0.2  # between looks at the real terminal
_KEYBOARD_NBYTES = 1024  # a terminal holds four times as much for a program that does not read
# The places of these in what tcgetattr returns:
_INPUT_MODES, _OUTPUT_MODES, _LOCAL_MODES, _CHARACTERS = 0, 1, 3, 6


@dataclass(frozen=True, slots=True)
class Console:
    """stdout, stderr, and the file that rank 0 reads from or that people type at."""

    stdout: Writer
    stderr: Writer
    stdin: int = subprocess.DEVNULL

    @property
    def writers(self) -> list[Writer]:
        return list(dict.fromkeys((self.stdout, self.stderr)))

    @property
    def error(self) -> Exception | None:
        """Why some output is lost; None as long as none is.

        BrokenPipeError: the reader has gone, which need not be said. TimeoutError: ``finish`` has
        given up. Others, such as a full disk, are news.
        """
        errors = [writer.error for writer in self.writers if writer.error is not None]
        return min(errors, key=lambda error: isinstance(error, BrokenPipeError), default=None)

    @property
    def is_broken(self) -> bool:
        return self.error is not None

    def say(self, text: str) -> None:
        """Write lines of the launcher's own to stderr, after everything that ranks have written."""
        for writer in self.writers:
            writer.flush()
        self.stderr.say(text)

    def finish(self, is_hurried: Callable[[], bool] = lambda: True) -> None:
        for writer in self.writers:
            writer.finish(is_hurried)


def console_of_files(stdin: int = 0, stdout: int = 1, stderr: int = 2) -> Console:
    """Return the console of a command: all output goes through it, and terminals are passed on."""
    out, err = _writers(stdout, stderr)
    return Console(out, err, stdin if _is_open(stdin) else subprocess.DEVNULL)


def console_of_streams(stdout: TextIO | None, stderr: TextIO | None) -> Console:
    """Return the console of a function: the files of its streams, where they are real ones.

    A notebook's are not, nor are most replacements of sys.stdout; these get text.
    """
    return Console(*_writers(_file_of(stdout), _file_of(stderr)))


def _writers(out: int | TextIO | None, err: int | TextIO | None) -> tuple[Writer, Writer]:
    writer = _writer(out)
    is_same = False
    if isinstance(out, int) and isinstance(err, int) and _is_open(out) and _is_open(err):
        is_same = os.path.samestat(os.fstat(out), os.fstat(err))
    return writer, writer if is_same else _writer(err)


def _writer(target: int | TextIO | None) -> Writer:
    if isinstance(target, int) and _is_open(target):
        return Writer(FileSink(target), terminal=target if os.isatty(target) else None)
    if target is None or isinstance(target, int):
        return Writer(Sink())
    return Writer(TextSink(target))


def _file_of(stream: TextIO | None) -> int | TextIO | None:
    # Other streams have a fileno() too; in a notebook it is the terminal of the server.
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        stream.flush()
        return stream.fileno()
    except (OSError, ValueError):
        return stream


def _is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


class Terminal:
    """A pseudo-terminal: ``inside`` is rank 0's terminal, ``outside`` the launcher's end of it.

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

    def attach(self, processes: ProcessSet[Any]) -> None:
        """Close the inside, which rank 0 has now, and begin to pass on what is typed."""
        self._close_inside()
        if self.keyboard is not None:
            self.keyboard.attach(processes)

    def follow(self) -> None:
        self._follow_size()
        if self.keyboard is not None:
            self.keyboard.follow()

    def restore(self) -> None:
        if self.keyboard is not None:
            self.keyboard.restore()

    def close(self) -> None:
        """Leave the real terminal as it was. The outside is closed by its reader."""
        self.restore()
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


class Keyboard:
    """Passes what is typed at the real terminal on to rank 0's.

    Meanwhile the real terminal neither echoes nor collects lines: rank 0's does, as rank 0 wants
    it. Ctrl-C and Ctrl-Z stay with the launcher. In the background the terminal belongs to another
    program and is not touched.
    """

    def __init__(self, real: int, outside: int) -> None:
        self._real = real
        self._outside = outside
        self._processes: ProcessSet[Any] | None = None
        self._modes: _Modes | None = None  # of the real terminal, while they are changed
        self._unsent = b""
        self._is_watched = False
        self._is_over = False

    def attach(self, processes: ProcessSet[Any]) -> None:
        self._processes = processes
        self.follow()

    def follow(self) -> None:
        """Resume after rank 0 had not read, or another program was in the foreground."""
        self._send()
        if self._is_over or self._unsent or self._processes is None:
            return
        if not is_in_foreground(self._real):
            self._modes = None
            return
        if self._modes is None or not self._modes.are_set(self._real):
            self._modes = _Modes.change(self._real)
        if not self._is_watched:
            self._is_watched = True
            self._processes.watch(self._real, self._relay)

    def restore(self) -> None:
        # In the background another program has set it, and to touch it would stop us.
        if self._modes is not None and is_in_foreground(self._real):
            self._modes.undo(self._real)
        self._modes = None

    def _relay(self) -> bool:
        if self._modes is not None and not self._unsent and is_in_foreground(self._real):
            self._unsent = self._read()
            self._send()
        self._is_watched = self._modes is not None and not self._unsent and not self._is_over
        return self._is_watched

    def _read(self) -> bytes:
        try:
            data = os.read(self._real, _KEYBOARD_NBYTES)
        except OSError:  # the terminal is gone
            data = b""
        self._is_over = not data
        return data

    def _send(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._outside, self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # rank 0 has closed it
            self._unsent, self._is_over = b"", True


class _Modes(NamedTuple):
    """The modes of a terminal before and after they were changed."""

    before: list[Any]
    after: list[Any]

    @classmethod
    def change(cls, terminal: int) -> Self:
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
        with suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(terminal, termios.TCSANOW, self.before)


def is_in_foreground(terminal: int) -> bool:
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # it is not our controlling terminal
        return False
