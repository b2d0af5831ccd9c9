# SPDX-License-Identifier: MIT OR Apache-2.0
"""The reaper: the parent of the ranks of one host, which leaves nothing behind.

::

    launcher -> reaper -> ranks -> what ranks start

It is a *subreaper*: a process below it whose parent ends becomes its child, whatever session or
process group that is in, so it can find all of them. When the launcher is gone, even by SIGKILL, it
kills them. If it is killed itself, the kernel kills the ranks, and ``ferrodist run``, which is a
subreaper, too, what they leave.

Run as a file, ``reaper.py <pid of the launcher> <specs> <commands> <events>``, where the last three
are open files, and imports nothing of ferrodist. Commands are single bytes: a signal for the ranks
that are running, or, with ``EVERYTHING`` added, for all processes; ``LEAVE`` ends the reaper alone.
Events are lines: ``started <pid> 0`` for every rank in turn, or ``failed <pid> <errno>``; then
``ended <pid> <wait status>``, and ``asked`` or ``stayed <pid> <name>`` for what ranks have left.
When no process is left below it, the reaper ends.
"""

from __future__ import annotations

import marshal
import os
import select
import signal
import sys
import time
from contextlib import suppress

EVERYTHING = 128
LEAVE = EVERYTHING  # no signal
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
KILL_LIMIT = (
    5.0  # seconds; after them a process is another user's, or in a system call that does not end
)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


# What to start as one rank: command, environment, standard files, others that it inherits, cores,
# and whether the standard files are a terminal, which is to be its controlling terminal. Files are
# descriptors above 2. No NamedTuple: typing would take time to import.
RankSpec = tuple[list[str], dict[str, str], list[int], list[int], list[int], bool]


def files_of(spec: RankSpec) -> list[int]:
    return spec[2] + spec[3]


def main() -> None:
    launcher, specs, commands, events = map(int, sys.argv[1:])
    _keep_standard_files_taken()
    become_subreaper()
    reaper = _Reaper(commands, events)
    if not reaper.watch(launcher):
        return
    with open(specs, "rb") as source:
        ranks: list[RankSpec] = marshal.load(source)
    files = {file for spec in ranks for file in files_of(spec)}
    for file in (commands, events, *files):
        os.set_inheritable(file, False)
    for spec in ranks:
        reaper.start(spec)
    for file in files:
        os.close(file)
    reaper.run()


class _Reaper:
    """Children, and the launcher that they belong to."""

    def __init__(self, commands: int, events: int) -> None:
        self._commands = commands
        self._events = events
        self._launcher: int | None = None
        self._ranks: set[int] = set()  # pids of those that are running
        self._are_to_end = False
        # A handler, not SIG_IGN: that would be inherited by the ranks.
        for number in (signal.SIGCHLD, *ENDING_SIGNALS, signal.SIGUSR1, signal.SIGUSR2):
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *about: None)
        self._wakeup, write = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def watch(self, launcher: int) -> bool:
        """Notice the end of the launcher; return False if it is gone already.

        The end of the pipe of commands is not enough: what it has forked may hold it open.
        """
        with suppress(OSError):
            self._launcher = os.pidfd_open(launcher)
        return os.getppid() == launcher

    def start(self, spec: RankSpec) -> None:
        """Start a rank, and wait until its program has begun or could not be found."""
        read, write = os.pipe()  # closed by exec
        # A signal between fork and exec stays pending, instead of being lost in our handlers.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = os.fork()
        if pid == 0:
            _become(spec, mask, write)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(write)
        error = os.read(read, 10)
        os.close(read)
        if error:
            self._report(f"failed {pid} {error.decode()}")
        else:
            self._ranks.add(pid)
            self._report(f"started {pid} 0")

    def run(self) -> None:
        """Report how ranks end, and obey the launcher, while there is a process below this one."""
        poll = select.poll()
        for file in (self._commands, self._wakeup, self._launcher):
            if file is not None:
                poll.register(file, select.POLLIN)
        while self._reap():
            ready = {file for file, _ in poll.poll()}
            if self._wakeup in ready:
                os.read(self._wakeup, 1000)
            if self._launcher in ready:
                return self._kill()
            if self._commands in ready:
                command = os.read(self._commands, 1)
                if command == bytes([LEAVE]):
                    return None
                if not command or command[0] == EVERYTHING + signal.SIGKILL:
                    return self._kill()
                self._obey(command[0])
        return None

    def _obey(self, command: int) -> None:
        number = command % EVERYTHING
        self._are_to_end = self._are_to_end or number in (*ENDING_SIGNALS, signal.SIGKILL)
        if command < EVERYTHING:
            for pid in self._ranks:
                with suppress(ProcessLookupError, PermissionError):  # it has left its group
                    os.killpg(pid, number)
        else:
            if not self._ranks:
                self._report_left("asked")
            _send_all(number)

    def _kill(self) -> None:
        end = time.monotonic() + KILL_LIMIT
        while self._reap():
            if time.monotonic() > end:
                self._report_left("stayed")
                return
            _send_all(signal.SIGKILL)
            select.select([self._wakeup], [], [], 0.05)
            with suppress(BlockingIOError):
                os.read(self._wakeup, 1000)

    def _reap(self) -> bool:
        flags = os.WEXITED | os.WNOHANG
        try:
            # Looked at first: as long as it is not waited for, its pid is not another process's.
            while end := os.waitid(os.P_ALL, 0, flags | os.WNOWAIT):
                self._take_end(end)
        except ChildProcessError:
            return False
        return True

    def _take_end(self, end: os.waitid_result) -> None:
        """Wait for a child; with a rank that failed or was to end, ends its process group.

        The launcher is told first: if we are killed in between, the status would be lost with us.
        """
        pid = end.si_pid
        if pid in self._ranks:
            if end.si_status != 0 or self._are_to_end:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            self._ranks.remove(pid)
            self._report(f"ended {pid} {_wait_status(end)}")
        os.waitpid(pid, 0)

    def _report_left(self, what: str) -> None:
        for pid in descendants():
            with suppress(OSError):
                self._report(f"{what} {pid} {name_of(pid)}")

    def _report(self, line: str) -> None:
        with suppress(BrokenPipeError):  # the launcher is gone, which is noticed elsewhere
            os.write(self._events, f"{line}\n".encode())


def _wait_status(end: os.waitid_result) -> int:
    """Return what ``waitpid`` will say of this child."""
    if end.si_code == os.CLD_EXITED:
        return end.si_status << 8
    return end.si_status | (0x80 if end.si_code == os.CLD_DUMPED else 0)


def _become(spec: RankSpec, mask: set[int | signal.Signals], failed: int) -> None:
    """Set up what only a process can set up for itself, then turn into the program."""
    command, environment, standard, inherited, cores, has_terminal = spec
    try:
        reaper = os.getppid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != reaper:
            os._exit(1)  # it died before the prctl took effect
        os.setsid() if has_terminal else os.setpgid(0, 0)
        for number, file in enumerate(standard):
            os.dup2(file, number)
        for file in inherited:
            os.set_inheritable(file, True)
        if has_terminal:
            _control_terminal()
        if cores:
            os.sched_setaffinity(0, cores)
        _restore_signals(mask)
        os.execvpe(command[0], command, environment)
    except OSError as error:
        os.write(failed, str(error.errno).encode())
    finally:
        os._exit(127)


def _control_terminal() -> None:
    import fcntl
    import termios

    own = next(file for file in range(3) if os.isatty(file))
    fcntl.ioctl(own, termios.TIOCSCTTY, 0)


def _restore_signals(mask: set[int | signal.Signals]) -> None:
    """Let signals do what they do in a program that was started by hand."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, other programs do not
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _send_all(number: int) -> None:
    for pid in descendants():
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def become_subreaper() -> None:
    """Let processes below this one whose parents end become its children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_of(pid: int) -> str:
    """Return the name of a process as one word or more."""
    with open(f"/proc/{pid}/comm", errors="replace") as file:
        return " ".join(file.read().split())


def descendants() -> list[int]:
    """List the processes below this one: by /proc, since they may be in any group or session."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    parents = [os.getpid()]
    while parents:
        below = children.get(parents.pop(), [])
        found += below
        parents += below
    return found


def _prctl(option: int, value: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _keep_standard_files_taken() -> None:
    """Let no other file get the numbers 0 to 2: ranks are started with theirs there."""
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(file)


if __name__ == "__main__":
    main()
