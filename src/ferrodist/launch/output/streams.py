# SPDX-License-Identifier: MIT OR Apache-2.0
"""Streams: the output of all ranks of one attempt, on its way to the console and to log files.

Everything goes through the launcher, rank 0's output too; otherwise lines would tear. Rank 0 gets a
terminal of its own for those of its streams that end at one.
"""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

from ferrodist.launch.output.console import FOLLOW_SECONDS, Console, Terminal
from ferrodist.launch.output.logs import FileTail, LogFiles, RankLogs, Tail, Which
from ferrodist.launch.output.reader import PassThrough, Prefixer, Stream
from ferrodist.launch.output.writer import FileSink, Writer
from ferrodist.launch.processes import ProcessSet, StandardFiles


class ProcessStreams:
    """The streams of one process: files that it is started with, and what reads them here."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self._lent = ExitStack()  # files of the process, closed here once it has them
        self._kept = ExitStack()

    def attach(self, processes: ProcessSet[Any]) -> None:
        """Close the files that the process has now, and read while the processes are waited for."""
        self._lent.close()
        for stream in self.streams:
            stream.watch(processes)

    def retire(self) -> None:
        for stream in self.streams:
            stream.retire()

    def close(self) -> None:
        self._lent.close()
        self._kept.close()

    def _lend(self, file: int) -> int:
        self._lent.callback(os.close, file)
        return file

    def _add(self, stream: Stream) -> None:
        self._kept.callback(stream.close)
        self.streams.append(stream)


class StreamSet:
    """The streams of several processes that end at one console.

    Around every wait, wait no longer than ``wait_seconds``, then ``write_due``. After all have
    ended, ``finish``.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self.members: list[ProcessStreams] = []

    @property
    def _streams(self) -> Sequence[Stream | Prefixer]:
        return [stream for member in self.members for stream in member.streams]

    def wait_seconds(self) -> float:
        held = [writer.wait_seconds() for writer in self._console.writers]
        return min([*held, *(stream.wait_seconds() for stream in self._streams)])

    def write_due(self) -> None:
        for writer in self._console.writers:
            writer.write_due()
        for stream in self._streams:
            stream.write_due()

    def finish(self) -> None:
        """Read all that has been written, and wait for nobody; the console is finished later."""
        for stream in self._streams:
            stream.end()
        for writer in self._console.writers:
            writer.flush()

    def close(self) -> None:
        self.finish()
        for member in self.members:
            member.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Streams(StreamSet):
    """The streams of all ranks. Leaving the context leaves the terminal as it was.

    Make one, start the ranks with their ``files``, ``attach`` it; then, after every wait, retire
    those that have ended. ``first_rank`` is the first of this host, ``front_rank`` the one with the
    terminal.
    """

    def __init__(
        self,
        num_ranks: int,
        console: Console,
        logs: LogFiles | None = None,
        *,
        attempt: int = 0,
        first_rank: int = 0,
        front_rank: int = 0,
    ) -> None:
        super().__init__(console)
        self._front_rank = front_rank
        self.ranks: dict[int, RankStreams] = {}
        try:
            for rank in range(first_rank, first_rank + num_ranks):
                own = RankLogs() if logs is None else logs.of_rank(rank, attempt)
                self.ranks[rank] = RankStreams(rank, console, own, is_front=rank == front_rank)
                self.members.append(self.ranks[rank])
        except BaseException:  # Ctrl-C too: files and threads of what was opened would stay
            self.close()
            raise

    @property
    def _terminal(self) -> Terminal | None:
        front = self.ranks.get(self._front_rank)
        return None if front is None else front.terminal

    def attach(self, processes: ProcessSet[Any]) -> None:
        for member in self.members:
            member.attach(processes)

    def wait_seconds(self) -> float:
        longest = math.inf if self._terminal is None else FOLLOW_SECONDS
        return min(longest, super().wait_seconds())

    def write_due(self) -> None:
        super().write_due()
        if self._terminal is not None:
            self._terminal.follow()

    def log_error(self) -> Exception | None:
        """Return why some log file is not complete, such as a full disk; None if all are."""
        logs = (stream.log for member in self.members for stream in member.streams)
        return next((log.error for log in logs if log is not None and log.error), None)

    def restore_terminal(self) -> None:
        if self._terminal is not None:
            self._terminal.restore()


class RankStreams(ProcessStreams):
    """What a rank reads from and writes to.

    ``files`` are for its process, and closed here by ``attach``. ``terminal`` is the front rank's,
    if it has one: for those of its streams that end at a terminal, which are then one.
    """

    def __init__(self, rank: int, console: Console, logs: RankLogs, *, is_front: bool) -> None:
        super().__init__()
        self.terminal: Terminal | None = None
        self._rank = rank
        self._is_front = is_front
        self._console = console
        self._logs = logs
        self._tail: Tail | FileTail | None = None  # of the stream that tracebacks go to
        try:
            stdout = self._open(Which.STDOUT, console.stdout)
            stderr = self._open(Which.STDERR, console.stderr)
            self.files = StandardFiles(self._stdin(), stdout, stderr, self.terminal is not None)
        except BaseException:  # Ctrl-C too: files and threads of what was opened would stay
            self.close()
            raise

    def attach(self, processes: ProcessSet[Any]) -> None:
        super().attach(processes)
        if self.terminal is not None:
            self.terminal.attach(processes)

    def last_output(self) -> str:
        """Return the end of what it has written to stderr; also after all is closed."""
        return "" if self._tail is None else self._tail.read().decode(errors="replace")

    def _stdin(self) -> int:
        stdin = self._console.stdin
        if not self._is_front or stdin == subprocess.DEVNULL:
            return subprocess.DEVNULL
        if not os.isatty(stdin):
            return self._lend(os.dup(stdin))
        if self.terminal is not None and self.terminal.keyboard is not None:
            return self.terminal.inside
        return subprocess.DEVNULL  # to read from a terminal in the background would stop it

    def _open(self, stream: Which, writer: Writer) -> int:
        if stream in self._logs.redirected:
            if stream == Which.STDERR:
                self._tail = FileTail(self._logs.path(stream))
            return self._lend(self._logs.open(stream))
        if self._is_front and writer.terminal is not None:
            return self._open_terminal(stream, writer, writer.terminal)
        read, write = os.pipe()
        self._lend(write)
        log = self._open_log(stream) if stream in self._logs.teed else None
        prefixer = PassThrough(writer) if self._is_front else Prefixer(self._rank, writer)
        self._add(Stream(read, prefixer, log))
        self._tail = self.streams[-1].tail
        return write

    def _open_terminal(self, stream: Which, writer: Writer, real: int) -> int:
        if self.terminal is None:
            self.terminal = Terminal(real, self._console.stdin)
            self._kept.callback(self.terminal.close)
            is_teed = bool(self._streams_on_terminal() & self._logs.teed)
            log = self._open_log(stream) if is_teed else None
            prefixer = PassThrough(writer, is_terminal=True)
            self._add(Stream(self.terminal.outside, prefixer, log))
        self._tail = self.streams[-1].tail
        return self.terminal.inside

    def _streams_on_terminal(self) -> Which:
        ends = {Which.STDOUT: self._console.stdout, Which.STDERR: self._console.stderr}
        on_it = Which.NONE
        for stream, writer in ends.items():
            if writer.terminal is not None and stream not in self._logs.redirected:
                on_it |= stream
        return on_it

    def _open_log(self, stream: Which) -> FileSink:
        file = self._logs.open(stream)
        self._kept.callback(os.close, file)
        return FileSink(file)
