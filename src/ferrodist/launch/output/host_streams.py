# SPDX-License-Identifier: MIT OR Apache-2.0
"""The streams of other hosts: what their launchers write, by ssh, on its way to the console.

Ranks are named in it already. The host of rank 0 is passed through, as rank 0 is; the lines of the
others wait until its line ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack

from ferrodist.launch.output.console import Console
from ferrodist.launch.output.flow import Flow
from ferrodist.launch.output.merging import Merging
from ferrodist.launch.output.outlet import Outlet
from ferrodist.launch.output.pipes import Watcher
from ferrodist.launch.output.speakers import Named, PassThrough, Speaker
from ferrodist.launch.reports import Begun, Failed, ReportReader

_MOST_NBYTES = 1 << 16  # before a launcher has begun


class _Curtain:
    """Keeps back what comes before a launcher has begun: greetings of a shell, ssh's errors."""

    def __init__(self, speaker: Speaker) -> None:
        self._speaker = speaker
        self.waits_for_lines = speaker.waits_for_lines
        self.is_open = False
        self.kept = b""

    @property
    def has_room(self) -> bool:
        return self._speaker.has_room

    def take(self, data: bytes) -> None:
        if self.is_open:
            self._speaker.take(data)
        else:
            self.kept = (self.kept + data)[-_MOST_NBYTES:]

    def write_due(self) -> None:
        self._speaker.write_due()

    def wait_seconds(self) -> float:
        return self._speaker.wait_seconds()

    def retire(self) -> None:
        self._speaker.retire()

    def end(self) -> None:
        self._speaker.end()


class _Reporting(_Curtain):
    """A curtain that opens at the first report; reports are taken out of what passes."""

    def __init__(self, speaker: Speaker, job: str, hear: Callable[[Begun | Failed], None]) -> None:
        super().__init__(speaker)
        self._reader = ReportReader(job)
        self._hear = hear

    def take(self, data: bytes) -> None:
        output, reports = self._reader.split(data)
        for report in reports:
            self._hear(report)
        super().take(output)

    def end(self) -> None:
        super().take(self._reader.end())
        super().end()


class HostStreams:
    """Both streams of one host. ``files`` are for ssh, and closed here by ``attach``.

    ``on_failure`` is called for every rank that the launcher there reports.
    """

    def __init__(
        self, console: Console, job: str, on_failure: Callable[[Failed], None], *, is_first: bool
    ) -> None:
        self._on_failure = on_failure
        self._lent = ExitStack()
        self._kept = ExitStack()
        self.has_begun = self.has_failed = False
        stdout = _speaker_to(console.stdout.outlet, is_first=is_first)
        stderr = _speaker_to(console.stderr.outlet, is_first=is_first)
        self._stdout = _Reporting(stdout, job, self._hear)
        self._stderr = _Curtain(stderr)
        self.flows: list[Flow] = []
        self.files = self._open(self._stdout), self._open(self._stderr)

    def attach(self, connections: Watcher) -> None:
        """Leave the files to ssh, and read while the hosts are waited for."""
        self._lent.close()
        for flow in self.flows:
            flow.watch(connections)

    def retire(self) -> None:
        """Take all that has been written; ssh has ended."""
        for flow in self.flows:
            flow.retire()

    def first_words(self) -> str:
        """Return what was said by ssh, or by a shell, before the launcher had begun."""
        kept = self._stderr.kept or self._stdout.kept
        return kept.decode(errors="replace").replace("\r", "").strip()

    def close(self) -> None:
        """Close all files."""
        self._lent.close()
        self._kept.close()

    def _hear(self, report: Begun | Failed) -> None:
        if isinstance(report, Failed):
            self.has_failed = True
            self._on_failure(report)
            return
        self.has_begun = self._stdout.is_open = self._stderr.is_open = True
        self._stdout.kept = b""  # greetings; what was said to stderr may be news
        self._stderr.take(self._stderr.kept)

    def _open(self, speaker: Speaker) -> int:
        read, write = os.pipe()
        self._lent.callback(os.close, write)
        flow = Flow(read, speaker, None)
        self._kept.callback(flow.close)
        self.flows.append(flow)
        return write


class AllHostStreams(Merging):
    """The streams of all hosts of one attempt."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.of_hosts: list[HostStreams] = []

    @property
    def _flows(self) -> list[Flow]:
        return [flow for streams in self.of_hosts for flow in streams.flows]

    def add(self, job: str, on_failure: Callable[[Failed], None]) -> HostStreams:
        """Make the streams of the next host."""
        is_first = not self.of_hosts
        streams = HostStreams(self._console, job, on_failure, is_first=is_first)
        self.of_hosts.append(streams)
        return streams

    def close(self) -> None:
        """Finish, and close all files."""
        self.finish()
        for streams in self.of_hosts:
            streams.close()


def _speaker_to(outlet: Outlet, *, is_first: bool) -> Speaker:
    return PassThrough(outlet) if is_first else Named(outlet)
