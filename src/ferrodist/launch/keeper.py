# SPDX-License-Identifier: MIT OR Apache-2.0
"""Outlive a launcher that is killed without a word, and end what its ranks had started.

Run as a file with a pipe from the launcher as its input: ``+ 4711`` is a process group that began,
``- 4711`` one that is over, ``quit`` the end. The ranks themselves die with the launcher; their
children would not.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Keep the list while the launcher lives; then kill what is still on it."""
    groups: set[int] = set()
    for line in iter(sys.stdin.readline, "quit\n"):
        if not line:
            break
        sign, group = line.split()
        (groups.add if sign == "+" else groups.discard)(int(group))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
