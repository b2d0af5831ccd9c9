# SPDX-License-Identifier: MIT OR Apache-2.0
"""Become a rank that dies with its launcher, even if that is killed without a word.

Run as a file, ``shim.py <pid of the launcher> <program> <arguments>``. It imports nothing of
ferrodist, and the program it turns into finds everything as if it had been started by hand.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel for a SIGKILL at the launcher's death, then turn into the program."""
    launcher, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):
        os._exit(1)  # it died before the kernel had heard of it
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
