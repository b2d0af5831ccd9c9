# SPDX-License-Identifier: MIT OR Apache-2.0
"""Both ends of an ssh connection, at whose other end a launcher runs the ranks of a host.

- Towards it go the secret of the job, then signals, one byte each: its standard input is its
  ``ControlPipe``. When that ends, the launcher there ends its ranks and itself. So it is enough to
  close it, or to be killed: nothing is left behind on any host.
- From it come the output of its ranks and, because ssh has no third stream, *reports* within its
  stdout. A report begins with a mark that no program writes, may stand in the middle of a line, and
  is removed from the output by its reader.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ferrodist.errors import InvalidArgument
from ferrodist.launch.output.console import Console
from ferrodist.launch.output.reader import PassThrough, Prefixer, Stream
from ferrodist.launch.output.streams import ProcessStreams
from ferrodist.launch.output.writer import Writer
from ferrodist.launch.processes import FORWARDED_SIGNALS, KILL_SECONDS, ProcessSet
from ferrodist.rendezvous.job import SECRET_NBYTES
from ferrodist.rendezvous.watch import try_pidfd

_STDIN = 0
_REPORT_NBYTES = 4096  # at most
_REPORT_WORDS = 500  # letters of them, at most
_STARTUP_NBYTES = 1 << 16  # of output before a launcher has started
_POLL_SECONDS = 0.05  # between looks at processes that cannot be watched
_LEAVE_SECONDS = KILL_SECONDS + 2.0  # for a launcher to end its ranks, and for the network


class Started(NamedTuple):
    """The launcher is there, and is about to start its ranks."""


class RankFailed(NamedTuple):
    """A rank has failed; what a shell would report, and whether it was because of another rank."""

    rank: int
    exit_code: int
    is_consequence: bool
    words: str


HostReport = Started | RankFailed


# -- the end of the launcher that starts others ---------------------------------------------------


class Connections(ProcessSet["Connection"]):
    """All hosts of a job. Leaving the context leaves no ssh process alive."""

    def add(self, connection: Connection) -> None:
        self.running.append(connection)
        if connection.pidfd is not None:
            self._selector.register(connection.pidfd, selectors.EVENT_READ)
        connection.streams.attach(self)

    def wait(self, seconds: float) -> list[Connection]:
        if any(connection.pidfd is None for connection in self.running):
            seconds = min(seconds, _POLL_SECONDS)
        return super().wait(seconds)

    def send_signal(self, number: int) -> None:
        """Forward a signal to all ranks of all hosts, if it is one that is forwarded."""
        if number in FORWARDED_SIGNALS:
            for connection in self.running:
                connection.send_signal(number)

    def stop(self) -> None:
        self._release()
        self._wait_for_all(_LEAVE_SECONDS)
        self.kill()

    def close(self) -> None:
        self._release()
        super().close()

    def _release(self) -> None:
        for connection in self.running:
            connection.release()

    def kill(self) -> None:
        """End every ssh that is left; the launcher at its other end then ends by itself."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for connection in self.running:
                connection.signal_ssh(number)
            self._wait_for_all(KILL_SECONDS)
        for connection in list(self.running):
            connection.process.wait()
            self._forget(connection)

    def _wait_for_all(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.running and time.monotonic() < end:
            self.wait(end - time.monotonic())

    def _forget(self, process: Connection) -> None:
        super()._forget(process)
        if process.pidfd is not None:
            self._selector.unregister(process.pidfd)
        process.close()
        process.streams.retire()


class Connection:
    """The ssh process that leads to a host, in a process group of its own."""

    def __init__(
        self, host: str, command: Sequence[str], secret: bytes, streams: HostStreams
    ) -> None:
        self.host = host
        self.streams = streams
        read, self._stdin = os.pipe()
        os.set_blocking(self._stdin, False)  # a signal handler writes to it
        try:
            os.write(self._stdin, secret)
            stdout, stderr = streams.files
            # A Ctrl-C is for this process, which decides what to do.
            self.process = subprocess.Popen(
                command, stdin=read, stdout=stdout, stderr=stderr, process_group=0
            )
        except BaseException:  # Ctrl-C too: nobody else closes the pipe
            os.close(self._stdin)
            raise
        finally:
            os.close(read)
        self.pidfd = try_pidfd(self.process.pid)

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def send_signal(self, number: int) -> None:
        """Have the launcher there signalled. Takes no lock: signal handlers call it."""
        if self._stdin >= 0:
            with suppress(BrokenPipeError, BlockingIOError):
                os.write(self._stdin, bytes([number]))

    def signal_ssh(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def release(self) -> None:
        """Have the launcher there end its ranks immediately, and itself."""
        if self._stdin >= 0:
            file, self._stdin = self._stdin, -1
            os.close(file)

    def close(self) -> None:
        self.release()
        if self.pidfd is not None:
            os.close(self.pidfd)


class HostStreams(ProcessStreams):
    """Both streams of one host; ``files`` are for ssh.

    Lines in them name their ranks already. The host of rank 0 is passed through, as rank 0 is; the
    lines of the others wait until its line ends. ``on_failure`` is called for every rank that the
    launcher there reports.
    """

    def __init__(
        self,
        console: Console,
        job: str,
        on_failure: Callable[[RankFailed], None],
        *,
        is_first: bool,
    ) -> None:
        super().__init__()
        self._on_failure = on_failure
        self._is_first = is_first
        self.has_started = self.has_failed = False
        self.files: list[int] = []
        self._stdout = self._open(console.stdout, ReportReader(job))
        self._stderr = self._open(console.stderr)

    def startup_output(self) -> str:
        kept = self._stderr.kept or self._stdout.kept
        return kept.decode(errors="replace").replace("\r", "").strip()

    def _open(self, writer: Writer, reports: ReportReader | None = None) -> _FilteredStream:
        read, write = os.pipe()
        self.files.append(self._lend(write))
        prefixer = PassThrough(writer) if self._is_first else Prefixer(None, writer)
        stream = _FilteredStream(read, prefixer, reports, self._take_report)
        self._add(stream)
        return stream

    def _take_report(self, report: HostReport) -> None:
        if isinstance(report, RankFailed):
            self.has_failed = True
            self._on_failure(report)
            return
        self.has_started = True
        self._stdout.start(shows_kept=False)  # greetings
        self._stderr.start(shows_kept=True)


class _FilteredStream(Stream):
    """A stream with a startup filter, from which reports are removed.

    What arrives before the launcher has started, greetings of a shell or errors of ssh, is kept
    back.
    """

    def __init__(
        self,
        file: int,
        prefixer: Prefixer,
        reports: ReportReader | None,
        on_report: Callable[[HostReport], None],
    ) -> None:
        super().__init__(file, prefixer)
        self._reports = reports
        self._on_report = on_report
        self._has_started = False
        self.kept = b""

    def start(self, *, shows_kept: bool) -> None:
        """Pass on what arrives from now on, and what was kept, if that may be news."""
        self._has_started = True
        if shows_kept:
            super()._take(self.kept)
        else:
            self.kept = b""

    def _take(self, data: bytes) -> None:
        if self._reports is not None:
            data, reports = self._reports.split(data)
            for report in reports:
                self._on_report(report)
        self._filter(data)

    def _filter(self, data: bytes) -> None:
        if self._has_started:
            super()._take(data)
        else:
            self.kept = (self.kept + data)[-_STARTUP_NBYTES:]

    def _end_output(self) -> None:
        if self._reports is not None:
            self._filter(self._reports.end())
        super()._end_output()


class ReportReader:
    """Removes the reports of a job from a stream of bytes."""

    def __init__(self, job: str) -> None:
        self._mark = _mark(job)
        self._rest = b""

    def split(self, data: bytes) -> tuple[bytes, list[HostReport]]:
        before, *parts = (self._rest + data).split(self._mark)
        output, reports = [before], list[HostReport]()
        self._rest = b""
        for number, part in enumerate(parts):
            line, newline, after = part.partition(b"\n")
            is_unfinished = not newline and number == len(parts) - 1
            if is_unfinished and len(line) <= _REPORT_NBYTES:
                self._rest = self._mark + line
                break
            try:
                facts = json.loads(line)
                reports.append(RankFailed(**facts) if facts else Started())
                output.append(after)
            except (ValueError, TypeError, AttributeError):  # not one of ours
                output.append(self._mark + part)
        if not self._rest:
            output[-1], self._rest = self._cut(output[-1])
        return b"".join(output), reports

    def end(self) -> bytes:
        rest, self._rest = self._rest, b""
        return rest

    def _cut(self, data: bytes) -> tuple[bytes, bytes]:
        start = data.rfind(self._mark[:1])
        if start >= 0 and self._mark.startswith(data[start:]):
            return data[:start], data[start:]
        return data, b""


def to_bytes(job: str, report: HostReport) -> bytes:
    facts: dict[str, Any] = report._asdict()
    if "words" in facts:
        facts["words"] = facts["words"][:_REPORT_WORDS]
    return _mark(job) + json.dumps(facts).encode() + b"\n"


def _mark(job: str) -> bytes:
    return b"\x1eferrodist " + job.encode(errors="replace") + b" "


# -- the end of the launcher that ssh has started -------------------------------------------------


class ControlPipe:
    """The standard input of this process, and the way back. ``job`` is what both ends call it."""

    def __init__(self, job: str, console: Console) -> None:
        self._job = job
        self._console = console
        self.is_closed = False  # the connection or the other launcher is gone

    def attach(self, processes: ProcessSet[Any]) -> None:
        processes.watch(_STDIN, self._read)

    def report(self, report: HostReport) -> None:
        self._console.stdout.write_report(to_bytes(self._job, report))

    def _read(self) -> bool:
        data = os.read(_STDIN, 100)
        for number in data:
            if number in FORWARDED_SIGNALS:
                signal.raise_signal(number)
        self.is_closed = not data
        return not self.is_closed


def read_secret() -> bytes:
    mode = os.fstat(_STDIN).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        raise InvalidArgument("the secret should come from ssh, but stdin is not a pipe")
    secret = b""
    while len(secret) < SECRET_NBYTES:
        data = os.read(_STDIN, SECRET_NBYTES - len(secret))
        if not data:
            raise InvalidArgument(
                f"stdin ended after {len(secret)} bytes, before the secret of {SECRET_NBYTES}: "
                "the launcher that has started this one is gone"
            )
        secret += data
    return secret
