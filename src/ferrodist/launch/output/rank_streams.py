# SPDX-License-Identifier: MIT OR Apache-2.0
"""The streams of one rank: what its process is started with, and how that reaches the console."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from typing import NamedTuple

from ferrodist.launch.output.console import Console, Way
from ferrodist.launch.output.flow import Flow
from ferrodist.launch.output.last_words import FileTail, Tail
from ferrodist.launch.output.logs import RankLogs, Which
from ferrodist.launch.output.sinks import FileSink
from ferrodist.launch.output.speakers import PassThrough, Prefixed, Speaker
from ferrodist.launch.output.terminal import Terminal
from ferrodist.launch.processes import Crew


class Files(NamedTuple):
    """The standard streams of a process that is to be started; see ``Order``."""

    stdin: int
    stdout: int
    stderr: int
    has_terminal: bool


class RankStreams:
    """What a rank reads from and writes to.

    ``files`` are closed here once the rank has them. ``terminal`` is rank 0's, if it has one: for
    those of its streams that end at a terminal, which are then one.
    """

    def __init__(self, rank: int, console: Console, logs: RankLogs) -> None:
        self.flows: list[Flow] = []
        self.terminal: Terminal | None = None
        self._rank = rank
        self._console = console
        self._logs = logs
        self._tail: Tail | FileTail | None = None  # of the stream that tracebacks go to
        self._lent = ExitStack()
        self._kept = ExitStack()
        try:
            stdout = self._open(Which.STDOUT, console.stdout)
            stderr = self._open(Which.STDERR, console.stderr)
            self.files = Files(self._stdin(), stdout, stderr, self.terminal is not None)
        except BaseException:
            self.close()
            raise

    def attach(self, crew: Crew) -> None:
        """Leave its files to the rank, and read while the crew is waited for."""
        self._lent.close()
        for flow in self.flows:
            flow.watch(crew)
        if self.terminal is not None:
            self.terminal.attach(crew)

    def last_words(self) -> str:
        """Return the end of what it has written to stderr."""
        return "" if self._tail is None else self._tail.read().decode(errors="replace")

    def close(self) -> None:
        """Close all files."""
        self._lent.close()
        self._kept.close()

    def _stdin(self) -> int:
        stdin = self._console.stdin
        if self._rank > 0 or stdin == subprocess.DEVNULL:
            return subprocess.DEVNULL
        if not os.isatty(stdin):
            return stdin
        if self.terminal is not None and self.terminal.keyboard is not None:
            return self.terminal.inside
        return subprocess.DEVNULL  # to read from a terminal in the background would stop it

    def _open(self, stream: Which, way: Way) -> int:
        """Return what the rank is to write to, and lay the way of what comes out of it."""
        if stream in self._logs.redirected:
            return self._open_redirected(stream)
        if self._rank == 0 and way.terminal is not None:
            return self._open_terminal(stream, way, way.terminal)
        return self._open_pipe(stream, way)

    def _open_redirected(self, stream: Which) -> int:
        if stream == Which.STDERR:
            self._tail = FileTail(self._logs.path(stream))
        return self._lend(self._logs.open(stream))

    def _open_terminal(self, stream: Which, way: Way, real: int) -> int:
        if self.terminal is None:
            self.terminal = Terminal(real, self._console.stdin)
            self._kept.callback(self.terminal.close)
            speaker = PassThrough(way.outlet, is_terminal=True)
            is_teed = self._streams_on_terminal() & self._logs.teed
            log = self._open_log(stream) if is_teed else None
            self._add_flow(self.terminal.outside, speaker, log)
        self._tail = self.flows[-1].tail
        return self.terminal.inside

    def _streams_on_terminal(self) -> Which:
        ways = {Which.STDOUT: self._console.stdout, Which.STDERR: self._console.stderr}
        on_it = Which.NONE
        for stream, way in ways.items():
            if way.terminal is not None and stream not in self._logs.redirected:
                on_it |= stream
        return on_it

    def _open_pipe(self, stream: Which, way: Way) -> int:
        read, write = os.pipe()
        self._lend(write)
        if self._rank == 0:
            speaker: Speaker = PassThrough(way.outlet)
        else:
            speaker = Prefixed(self._rank, way.outlet)
        self._add_flow(read, speaker, self._open_log(stream) if stream in self._logs.teed else None)
        self._tail = self.flows[-1].tail
        return write

    def _open_log(self, stream: Which) -> FileSink:
        file = self._logs.open(stream)
        self._kept.callback(os.close, file)
        return FileSink(file)

    def _add_flow(self, file: int, speaker: Speaker, log: FileSink | None) -> None:
        flow = Flow(file, speaker, log)
        self._kept.callback(flow.close)
        self.flows.append(flow)

    def _lend(self, file: int) -> int:
        self._lent.callback(os.close, file)
        return file
