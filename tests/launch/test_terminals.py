"""Rank 0 at a terminal: it writes and is typed to as if nobody stood between."""

from __future__ import annotations

import fcntl
import math
import os
import select
import struct
import subprocess
import sys
import termios
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

import small_launcher
from ferrodist.launch.output import writer
from ferrodist.launch.output.console import console_of_files
from ferrodist.launch.output.logs import LogFiles
from small_launcher import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

LAUNCHER = Path(small_launcher.__file__)


class Person:
    """A person at a terminal, in which a launcher runs the given ranks."""

    def __init__(self, *codes: str, **files: int) -> None:
        self.outside, self.inside = os.openpty()
        self.modes = termios.tcgetattr(self.inside)
        self.resize(40, 111)
        self.seen = ""
        streams = {"stdin": self.inside, "stdout": self.inside, "stderr": self.inside, **files}
        self.process = subprocess.Popen(self.command(codes), start_new_session=True, **streams)

    def command(self, codes: Sequence[str]) -> list[str]:
        return [sys.executable, str(LAUNCHER), *map(textwrap.dedent, codes)]

    def resize(self, lines: int, columns: int) -> None:
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self.outside, termios.TIOCSWINSZ, size)

    def type(self, text: str) -> None:
        os.write(self.outside, text.encode())

    def type_until_full(self) -> int:
        """Type lines until no more can be typed; return how much was."""
        poll = select.poll()
        poll.register(self.outside, select.POLLOUT)
        os.set_blocking(self.outside, False)
        nbytes = 0
        while poll.poll(1000):
            nbytes += os.write(self.outside, b"typed\r" * 10)
        os.set_blocking(self.outside, True)
        return nbytes

    def read_until(self, text: str) -> str:
        """Read until this text comes; return all up to and with it."""
        while text not in self.seen:
            self.seen += os.read(self.outside, 1000).decode()
        found, _, self.seen = self.seen.partition(text)
        return found + text

    def __enter__(self) -> Person:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                assert self.process.wait(50) == 0
                assert termios.tcgetattr(self.inside) == self.modes
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self.inside)
            os.close(self.outside)


def test_rank_0_has_a_terminal_and_others_have_none():
    code = """
    import os
    print([os.isatty(file) for file in range(3)], os.get_terminal_size(1), os.ttyname(1))
    """
    alone = "import os; os.write(1, str([os.isatty(file) for file in range(3)]).encode())"
    with Person(code, alone) as person:
        text = person.read_until("\r\n") + person.read_until("\r\n")
    assert "[True, True, True] os.terminal_size(columns=111, lines=40) /dev/pts/" in text
    assert "rank 1: [False, False, False]" in text


def test_colours_and_progress_bars_arrive_untouched():
    code = r"""
    import sys
    for percent in range(0, 101, 20):
        sys.stderr.write(f"\r\x1b[32m{percent}%\x1b[0m")
    sys.stdout.write("\nend\n")
    """
    with Person(code) as person:
        text = person.read_until("end\r\n")
    bar = "".join(f"\r\x1b[32m{percent}%\x1b[0m" for percent in range(0, 101, 20))
    assert text == bar + "\r\nend\r\n"


def test_a_question_is_asked_echoed_and_answered():
    with Person("print('hello', input('name? '))", "") as person:
        assert person.read_until("name? ") == "name? "
        person.type("Adaa\x7f\r")
        text = person.read_until("\r\nhello Ada\r\n")
    assert text.startswith("Adaa\b \b")


def test_a_program_that_wants_every_key_gets_it_as_it_is():
    code = """
    import os, tty
    tty.setraw(0)
    os.write(1, b"ready")
    print(b"".join(os.read(0, 1) for _ in range(4)))
    """
    with Person(code) as person:
        person.read_until("ready")
        person.type("\r\n\x04\x7f")
        assert person.read_until("'\r\n") == r"b'\r\n\x04\x7f'" + "\r\n"


def test_a_password_is_not_echoed():
    with Person("import getpass; print(len(getpass.getpass('secret: ')))") as person:
        person.read_until("secret: ")
        person.type("swordfish\r")
        assert person.read_until("9\r\n") == "\r\n9\r\n"


def test_ctrl_d_ends_the_input():
    with Person("import sys; print('ready'); print(sys.stdin.read().split())") as person:
        person.read_until("ready\r\n")
        person.type("one\rtwo\r")
        person.read_until("two\r\n")
        person.type("\x04")
        assert person.read_until("]") == "['one', 'two']"


def test_the_debugger_can_be_used():
    with Person("value = 42\nbreakpoint()\nprint('went on')") as person:
        person.read_until("(Pdb) ")
        person.type("p value + 1\r")
        assert "43" in person.read_until("(Pdb) ")
        person.type("c\r")
        person.read_until("went on")


def test_the_size_of_the_terminal_is_followed():
    code = """
    import os, signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
    print(os.get_terminal_size(1).columns, flush=True)
    signal.sigwait([signal.SIGWINCH])
    print(os.get_terminal_size(1).columns, flush=True)
    """
    with Person(code) as person:
        person.read_until("111\r\n")
        person.resize(50, 222)
        person.read_until("222\r\n")


def test_typing_that_nobody_reads_keeps_nobody_from_being_heard(tmp_path):
    gates = [tmp_path / "0", tmp_path / "1"]
    for gate in gates:
        os.mkfifo(gate)
    read_late = f"""
    import sys, termios
    modes = termios.tcgetattr(0)
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(0, termios.TCSANOW, modes)
    print("ready", flush=True)
    open({str(gates[0])!r}).read()
    print(sum(len(line) for line in iter(sys.stdin.readline, "end\\n")))
    """
    with Person(read_late, f"open({str(gates[1])!r}).read(); print('heard')") as person:
        person.read_until("ready")
        nbytes = person.type_until_full()
        gates[1].write_text("")
        person.read_until("rank 1: heard")
        gates[0].write_text("")
        person.type("end\r")
        person.read_until(f"{nbytes}\r\n")


def test_streams_that_end_elsewhere_are_not_on_the_terminal(tmp_path):
    code = "import os; os.write(1, b'%d %d' % (os.isatty(1), os.isatty(2))); os.write(2, b'err')"
    with (tmp_path / "out").open("wb") as out, Person(code, stdout=out.fileno()) as person:
        assert person.read_until("err") == "err"
    assert (tmp_path / "out").read_text() == "0 1"


def test_a_terminal_goes_to_one_log_file(tmp_path):
    outside, inside = os.openpty()
    logs = LogFiles(tmp_path)
    streams = launch(
        ["import os; os.write(1, b'out\\n'); os.write(2, b'err\\n')"],
        console_of_files(0, inside, inside),
        logs,
    )
    (path,) = logs.directory.rglob("*.log")
    assert (path.name, path.read_text()) == ("stdout.log", "out\nerr\n")
    assert streams.ranks[0].last_output() == "out\nerr\n"
    assert os.read(outside, 1000) == b"out\r\nerr\r\n"
    os.close(outside)
    os.close(inside)


@pytest.mark.parametrize("typed", [b"", b"\x13"], ids=["unread", "Ctrl-S"])
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_terminal_that_shows_nothing_keeps_nobody_waiting(monkeypatch, typed, is_ours):
    if not is_ours:
        monkeypatch.setattr(writer, "_try_open_again", lambda terminal: None)
    outside, inside = os.openpty()
    os.write(outside, typed)
    sink = writer.FileSink(inside)
    data = b"".join(b"%d\n" % number for number in range(10_000))
    sink.write(data)
    assert sink.wait_seconds() <= 0.05
    os.write(outside, b"\x11")
    expected, found = data.replace(b"\n", b"\r\n"), b""
    while len(found) < len(expected):
        sink.write_due()
        found += os.read(outside, 1000) if select.select([outside], [], [], 0.01)[0] else b""
    assert found == expected
    assert sink.wait_seconds() == math.inf
    os.close(inside)
    os.close(outside)


TAKE_TERMINAL = "import fcntl, os, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
PROMPT = "what now? "


class PersonWithShell(Person):
    """A person who types the command into a shell."""

    def command(self, codes: Sequence[str]) -> list[str]:
        prompt = f"os.environ['PS1'] = {PROMPT!r}"  # by itself it is another one for root
        shell = "os.execvp('bash', ['bash', '--norc', '--noediting', '-i'])"
        return [sys.executable, "-c", f"{TAKE_TERMINAL}; {prompt}; {shell}"]


def test_a_job_can_be_stopped_put_into_the_background_and_fetched_back():
    code = "print('ask', flush=True); print('got ' + input())"
    with PersonWithShell() as person:
        person.read_until(PROMPT)
        person.type("stty -a\r")
        person.read_until(" echo ")
        person.read_until(PROMPT)
        person.type(f'{sys.executable} {LAUNCHER} "{code}"\r')
        person.read_until("\nask\r\n")
        person.type("\x1a")
        person.read_until("Stopped")
        person.read_until(PROMPT)
        person.type("stty -a\r")
        person.read_until(" echo ")
        person.read_until(PROMPT)
        person.type("bg\r")
        person.read_until(PROMPT)
        person.type("echo still the shell\r")
        person.read_until(f"\nstill the shell\r\n{PROMPT}")
        person.type("fg\r")
        person.read_until("small_launcher.py")
        person.read_until("\r\n")
        person.type("answer\r")
        assert person.read_until(PROMPT).endswith(f"answer\r\ngot answer\r\n{PROMPT}")
        person.type("stty -a; exit\r")
        person.read_until(" echo ")


class PersonWhoDebugs(Person):
    """A person who runs two ranks of a script, with rank 1 at the terminal."""

    def command(self, codes: Sequence[str]) -> list[str]:
        command = [sys.executable, "-m", "ferrodist", "run", "-n2", "--debug-rank=1", *codes]
        return [sys.executable, "-c", f"{TAKE_TERMINAL}; os.execv({command[0]!r}, {command!r})"]


def test_the_rank_to_debug_has_the_terminal_and_the_others_wait_without_a_limit(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, ferrodist\n"
        "backend = ferrodist.init()\n"
        "if backend.rank == 1:\n"
        "    print('got ' + input('question? '))\n"
        "config = backend.config\n"
        "limits = config.timeout, config.heartbeat_timeout, config.join_timeout\n"
        "print('sum', ferrodist.allreduce(backend.rank + 1), os.isatty(0), *limits)\n"
    )
    with PersonWhoDebugs(str(script)) as person:
        person.read_until("question? ")
        person.type("answer\r")
        # A rank's own terminal and the other's pipe are two ways here: any line may come first.
        lines = "".join(person.read_until("\r\n") for _ in range(4))
        limits = "None 1000000.0 1000000.0\r\n"
        assert "got answer\r\n" in lines
        assert f"sum 3 True {limits}" in lines
        assert f"rank 0: sum 3 False {limits}" in lines
