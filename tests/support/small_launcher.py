"""A launcher that does nothing but starting ranks and showing what they write.

As a program: ``small_launcher.py <code of rank 0> <code of rank 1> ...``; it takes its stdin as the
terminal that controls it, if it is one and no other does.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ferrodist.launch.output.console import Console, console_of_files
from ferrodist.launch.output.logs import LogFiles
from ferrodist.launch.output.streams import Streams
from ferrodist.launch.processes import ProcessSpec, WorkerGroup


def launch(codes: list[str], console: Console, logs: LogFiles | None = None) -> Streams:
    """Run each code as a rank, until all have ended or nobody reads what they write."""
    with Streams(len(codes), console, logs) as streams:
        specs = [
            ProcessSpec([sys.executable, "-c", code], streams.ranks[rank].files)
            for rank, code in enumerate(codes)
        ]
        with WorkerGroup(specs) as workers, stopping(streams, workers):
            streams.attach(workers)
            while workers.running and not console.is_broken:
                for rank in workers.wait(min(1.0, streams.wait_seconds())):
                    streams.ranks[rank.rank].retire()
                streams.write_due()
            workers.stop()
        streams.finish()
    console.finish()
    return streams


@contextmanager
def stopping(streams: Streams, workers: WorkerGroup) -> Iterator[None]:
    """Let Ctrl-Z stop the ranks as well, and leave the terminal to the shell meanwhile."""

    def stop(number: int, frame: FrameType | None) -> None:
        workers.send_signal(signal.SIGSTOP)
        streams.restore_terminal()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # returns when somebody wants us to go on
        signal.signal(signal.SIGTSTP, stop)
        workers.send_signal(signal.SIGCONT)

    before = signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)


if __name__ == "__main__":
    if os.isatty(0) and os.getsid(0) == os.getpid():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    the_console = console_of_files()
    launch(sys.argv[1:], the_console)
    sys.exit(3 if the_console.is_broken else 0)
