# SPDX-License-Identifier: MIT OR Apache-2.0
"""A child process that may hang or crash, and takes nobody with it.

It is the leader of a group of its own, which ends as a whole when its time is up. Its stdin is a
pipe that nothing is written to: a probe that reads the end of it knows that we are gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple


class Ending(NamedTuple):
    """How a child ended: its exit code, minus a signal, or None if its time was up."""

    code: int | None
    stdout: str
    stderr: str


def run_child(command: list[str], environ: Mapping[str, str], limit: float) -> Ending:
    """Run a program for at most ``limit`` seconds; what it leaves behind is killed."""
    ours, lifeline = os.pipe()
    try:
        child = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=ours,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        return _await(child, limit)
    finally:
        os.close(ours)
        os.close(lifeline)


def _await(child: subprocess.Popen[str], limit: float) -> Ending:
    with child:
        try:
            stdout, stderr = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            _end_group(child)
            return Ending(None, "", "")
        _end_group(child)  # what it may have left behind
    return Ending(child.returncode, stdout, stderr)


def _end_group(child: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
