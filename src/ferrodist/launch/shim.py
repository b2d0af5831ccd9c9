# SPDX-License-Identifier: MIT OR Apache-2.0
"""Two small programs that a launcher runs beside itself, so that nothing outlives it.

Run as a file, and imports nothing of ferrodist:

- ``shim.py rank <pid of the launcher> <cores> <"terminal" or nothing> <program> ...`` becomes a
  rank that dies with its launcher, even if that is killed by SIGKILL. The program it turns into
  finds everything as if it had been started by hand.
- ``shim.py reaper`` outlives a launcher that is killed, and kills what its ranks had started: the
  ranks die with the launcher, their children would not.
"""

import os
import signal
import sys


def main() -> None:
    """Be one of the two."""
    name, *arguments = sys.argv[1:]
    if name == "rank":
        become_rank(*arguments)
    else:
        reap()


def become_rank(launcher: str, cores: str, terminal: str, *command: str) -> None:
    """Set up what only a process can set up for itself, then turn into the program."""
    import ctypes
    import fcntl
    import termios

    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):
        os._exit(1)  # it died before the prctl took effect
    if terminal:
        own = next(file for file in range(3) if os.isatty(file))
        fcntl.ioctl(own, termios.TIOCSCTTY, 0)
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, other programs do not
        signal.signal(number, signal.SIG_DFL)
    os.execvp(command[0], command)


def reap() -> None:
    """Keep the list of process groups while the launcher lives; then kill what is still on it.

    The standard input is a pipe from the launcher: ``+ 4711`` is a process group that began,
    ``- 4711`` one that is over, ``quit`` the end.
    """
    import contextlib

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
