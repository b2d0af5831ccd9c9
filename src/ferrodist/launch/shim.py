# SPDX-License-Identifier: MIT OR Apache-2.0
"""Become a rank that dies with its launcher, even if that is killed without a word.

Run as a file: ``shim.py <pid of the launcher> <cores> <"terminal" or nothing> <program> ...``. It
imports nothing of ferrodist, and the program it turns into finds everything as if it had been
started by hand.
"""

import ctypes
import fcntl
import os
import signal
import sys
import termios

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Set up what only a process can set up for itself, then turn into the program."""
    launcher, cores, terminal, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):
        os._exit(1)  # it died before the kernel had heard of it
    if terminal:
        fcntl.ioctl(_first_terminal(), termios.TIOCSCTTY, 0)
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, other programs do not
        signal.signal(number, signal.SIG_DFL)
    os.execvp(command[0], command)


def _first_terminal() -> int:
    return next(file for file in range(3) if os.isatty(file))


if __name__ == "__main__":
    main()
