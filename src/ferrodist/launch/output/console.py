# SPDX-License-Identifier: MIT OR Apache-2.0
"""Console: where the output of all ranks goes in the end, whatever becomes of them.

There is one for the whole life of a launcher; restarts of a job share it.
"""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TextIO

from ferrodist.launch.output.outlet import Outlet
from ferrodist.launch.output.sinks import FileSink, Sink, TextSink


@dataclass(frozen=True, slots=True)
class Way:
    """How output reaches one of this process's streams; ``terminal`` is the file, if it is one."""

    outlet: Outlet
    terminal: int | None = None


@dataclass(frozen=True, slots=True)
class Console:
    """The ways of stdout and stderr, and the file that rank 0 reads from or that people type at."""

    stdout: Way
    stderr: Way
    stdin: int = subprocess.DEVNULL

    @property
    def outlets(self) -> list[Outlet]:
        """The one outlet, or both."""
        return list(dict.fromkeys((self.stdout.outlet, self.stderr.outlet)))

    @property
    def error(self) -> Exception | None:
        """Why some output is lost; None as long as none is.

        BrokenPipeError: whoever read it does so no more, which need not be said. TimeoutError:
        ``finish`` has given up. Others, such as a full disk's, are news.
        """
        errors = [outlet.error for outlet in self.outlets if outlet.error is not None]
        return min(errors, key=lambda error: isinstance(error, BrokenPipeError), default=None)

    @property
    def is_broken(self) -> bool:
        """True if nobody reads on, or nothing more can be written."""
        return self.error is not None

    def shows_at_end(self, trace: str) -> bool:
        """Tell whether a traceback is the last that is seen at stderr, whichever rank's it is."""
        return self.stderr.outlet.shows_at_end(trace)

    def say(self, text: str) -> None:
        """Write lines of the launcher's own to stderr, after all that ranks have said."""
        for outlet in self.outlets:
            outlet.flush()
        self.stderr.outlet.say(text)

    def finish(self, is_hurried: Callable[[], bool] = lambda: True) -> None:
        """Wait, when all ranks have ended, until all is written; in a hurry, only if it is read."""
        for outlet in self.outlets:
            outlet.finish(is_hurried)


def console_of_files(stdin: int = 0, stdout: int = 1, stderr: int = 2) -> Console:
    """Return the console of a command: all output goes through it, and terminals are passed on."""
    out, err = _ways_to(stdout, stderr)
    return Console(out, err, stdin if _is_open(stdin) else subprocess.DEVNULL)


def console_of_streams(stdout: TextIO | None, stderr: TextIO | None) -> Console:
    """Return the console of a function: the files of its streams, where they are real ones.

    A notebook's are not, nor are those of most who replace sys.stdout; these get text.
    """
    return Console(*_ways_to(_place_of(stdout), _place_of(stderr)))


def _ways_to(out: int | TextIO | None, err: int | TextIO | None) -> tuple[Way, Way]:
    """Return the ways to two places, or twice the same one."""
    one = _way_to(out)
    is_one = isinstance(out, int) and isinstance(err, int) and _are_same(out, err)
    return one, replace(_way_to(err), outlet=one.outlet) if is_one else _way_to(err)


def _way_to(place: int | TextIO | None) -> Way:
    if isinstance(place, int) and _is_open(place):
        return Way(Outlet(FileSink(place)), terminal=place if os.isatty(place) else None)
    if place is None or isinstance(place, int):
        return Way(Outlet(Sink()))
    return Way(Outlet(TextSink(place)))


def _place_of(stream: TextIO | None) -> int | TextIO | None:
    """Return the file of a stream, or the stream itself if it has none."""
    # Other streams have a fileno() too; in a notebook it is the terminal of the server.
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        stream.flush()
        return stream.fileno()
    except (OSError, ValueError):
        return stream


def _are_same(one: int, other: int) -> bool:
    are_open = _is_open(one) and _is_open(other)
    return are_open and os.path.samestat(os.fstat(one), os.fstat(other))


def _is_open(file: int) -> bool:
    """Tell whether there is such a file; whoever started us may have closed it."""
    try:
        os.fstat(file)
    except OSError:
        return False
    return True
