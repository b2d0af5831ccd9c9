# SPDX-License-Identifier: MIT OR Apache-2.0
"""Console: where the output of all ranks goes in the end, whatever becomes of them.

There is one for the whole life of a launcher; restarts of a job share it.
"""

from __future__ import annotations

import io
import os
import subprocess
from dataclasses import dataclass, replace
from typing import TextIO

from ferrodist.launch.output.outlet import Outlet
from ferrodist.launch.output.sinks import FileSink, NullSink, Sink, TextSink


@dataclass(frozen=True, slots=True)
class Way:
    """How output reaches one of this process's streams.

    ``terminal`` is the file, if it is a terminal, and ``straight``, if rank 0 is to write to it
    itself.
    """

    outlet: Outlet
    terminal: int | None = None
    straight: int | None = None


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
        """Why some output is lost, such as a broken pipe; None as long as none is."""
        return next((outlet.error for outlet in self.outlets if outlet.error), None)

    @property
    def is_broken(self) -> bool:
        """True if nobody reads on, or nothing more can be written."""
        return self.error is not None

    def lines_at_end(self, rank: int) -> int:
        """Count the lines at the very end of stderr that are this rank's (too)."""
        return self.stderr.outlet.lines_at_end(rank)

    def say(self, text: str) -> None:
        """Write lines of the launcher's own to stderr, after all that ranks have said."""
        for outlet in self.outlets:
            outlet.flush()
        self.stderr.outlet.say(text)


def console_of_files(stdin: int = 0, stdout: int = 1, stderr: int = 2) -> Console:
    """Return the console of a command: all output goes through it, and terminals are passed on."""
    out, err = (
        Way(Outlet(_sink_of(file)), terminal=file if os.isatty(file) else None)
        for file in (stdout, stderr)
    )
    if _are_same(stdout, stderr):
        err = replace(err, outlet=out.outlet)
    return Console(out, err, stdin if _is_open(stdin) else subprocess.DEVNULL)


def console_of_streams(stdout: TextIO | None, stderr: TextIO | None) -> Console:
    """Return the console of a function: rank 0 writes straight to streams that are real files.

    A notebook's are not, nor are those of most who replace sys.stdout; these get text.
    """
    out, err = _way_to(stdout), _way_to(stderr)
    if _are_same(out.straight, err.straight):
        err = replace(err, outlet=out.outlet)
    return Console(out, err)


def _sink_of(file: int) -> Sink:
    return FileSink(file) if _is_open(file) else NullSink()


def _way_to(stream: TextIO | None) -> Way:
    if stream is None:
        return Way(Outlet(NullSink()))
    file = _try_file(stream)
    return Way(Outlet(TextSink(stream) if file is None else FileSink(file)), straight=file)


def _try_file(stream: TextIO) -> int | None:
    # Other streams have a fileno() too; in a notebook it is the terminal of the server.
    if not isinstance(stream, io.TextIOWrapper):
        return None
    try:
        stream.flush()
        return stream.fileno()
    except (OSError, ValueError):
        return None


def _are_same(one: int | None, other: int | None) -> bool:
    if one is None or other is None or not (_is_open(one) and _is_open(other)):
        return False
    return os.path.samestat(os.fstat(one), os.fstat(other))


def _is_open(file: int) -> bool:
    """Tell whether there is such a file; whoever started us may have closed it."""
    try:
        os.fstat(file)
    except OSError:
        return False
    return True
