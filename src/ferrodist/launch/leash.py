# SPDX-License-Identifier: MIT OR Apache-2.0
"""Leash: what holds a launcher that another one has started here by ssh.

Its standard input brings the secret of the job, then signals, one byte each. When it ends, the
connection or the other launcher is gone, and the ranks of this host have to go too.
"""

from __future__ import annotations

import os
import signal
import stat

from ferrodist.errors import InvalidArgument
from ferrodist.launch.output.console import Console
from ferrodist.launch.output.pipes import Watcher
from ferrodist.launch.reports import Report, to_bytes
from ferrodist.launch.signals import HANDED_ON
from ferrodist.rendezvous.job import SECRET_NBYTES

_STDIN = 0


class Leash:
    """The standard input of this process, and the way back. ``job`` is what both ends call it."""

    def __init__(self, job: str, console: Console) -> None:
        self._job = job
        self._console = console
        self.is_cut = False

    def attach(self, crew: Watcher) -> None:
        """Heed it while the crew is waited for."""
        crew.watch(_STDIN, self._read)

    def report(self, report: Report) -> None:
        """Tell the launcher at the other end."""
        self._console.stdout.outlet.write_aside(to_bytes(self._job, report))

    def _read(self) -> bool:
        """Do as the other end says; tell whether it may say more."""
        data = os.read(_STDIN, 100)
        for number in data:
            if number in HANDED_ON:
                signal.raise_signal(number)
        self.is_cut = not data
        return not self.is_cut


def read_secret() -> bytes:
    """Read the secret of the job, the first that comes in."""
    mode = os.fstat(_STDIN).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        raise InvalidArgument("the secret is to come from ssh, but stdin is not a pipe")
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
