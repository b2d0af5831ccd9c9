"""ferrodist.run and the run command: processes that are ranks, their results, errors and ends."""

from __future__ import annotations

import base64
import io
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import (
    CollectiveTimeout,
    InvalidArgument,
    InvalidWorldSize,
    RankLost,
    UnsupportedArray,
)
from ferrodist.launch import machine as cores
from ferrodist.launch import processes
from ferrodist.tracebacks import RemoteTraceback

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(90),
    pytest.mark.usefixtures("nothing_left_behind"),
]


def are_gone(pidfds: list[int], seconds: float) -> bool:
    """Tell whether all processes have ended, after waiting for it; close the pidfds."""
    gone = []
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        gone.append(bool(poll.poll(seconds * 1000)))
        os.close(pidfd)
    return all(gone)


class Noticed(Exception):
    """An error with a past, of a module that every rank can import."""

    def __init__(self, what: str, *, code: int) -> None:
        super().__init__(what)
        self.code = code

    def __reduce__(self) -> Any:
        return _rebuild, (self.args[0], self.code)


def _rebuild(what: str, code: int) -> Noticed:
    return Noticed(what, code=code)


class Unpicklable(Exception):
    """An error that cannot travel."""

    def __reduce__(self) -> Any:
        raise TypeError("no")


class UnUnpicklable(Exception):
    """An error that cannot be made again: its arguments are not those of its constructor."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


# -- results --------------------------------------------------------------------------------------


def test_results_come_back_in_rank_order_from_as_many_processes():
    results = ferrodist.run(lambda backend: (backend.rank, backend.world_size, os.getpid()), 3)
    assert [result[:2] for result in results] == [(0, 3), (1, 3), (2, 3)]
    assert len({pid for _, _, pid in results} | {os.getpid()}) == 4


def test_ranks_talk_to_each_other_with_and_without_naming_the_backend():
    def body(backend, factor):
        total = ferrodist.allreduce(np.full(3, factor * (backend.rank + 1.0)), backend)
        return total, ferrodist.allreduce(backend.rank), ferrodist.init() is backend

    for total, ranks, is_same in ferrodist.run(body, 2, args=(10,)):
        np.testing.assert_array_equal(total, np.full(3, 30.0))
        assert ranks == 1
        assert is_same


def test_closures_and_large_arguments_and_results_travel():
    large = np.arange(1 << 20, dtype=np.int64)  # more than any pipe holds
    results = ferrodist.run(lambda backend, more: large + more[-1] + backend.rank, 2, args=(large,))
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result, large + large[-1] + rank)


def test_one_rank_is_a_world_too():
    assert ferrodist.run(lambda backend: ferrodist.allreduce(backend.world_size), 1) == [1]


def test_by_default_there_is_a_rank_per_core():
    cores = len(os.sched_getaffinity(0))
    assert ferrodist.run(lambda backend: backend.world_size) == [cores] * cores


def test_ranks_may_use_all_cores():
    cores = os.sched_getaffinity(0)
    assert ferrodist.run(lambda backend: os.sched_getaffinity(0), 2) == [cores] * 2


def test_a_rank_finds_directory_path_and_arguments_as_they_are_here(monkeypatch, tmp_path):
    (tmp_path / "only_here.py").write_text("WORD = 'found'")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program", "--flag"])

    def body(backend):
        import only_here

        return only_here.WORD, os.getcwd(), sys.argv

    assert ferrodist.run(body, 1) == [("found", str(tmp_path), ["program", "--flag"])]


def test_cores_are_shared_among_ranks_unless_the_user_has_chosen(monkeypatch):
    def threads(backend):
        return os.environ["OMP_NUM_THREADS"]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores, "usable_cores", lambda: 6)
    assert ferrodist.run(threads, 2) == ["3", "3"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert ferrodist.run(threads, 1) == ["5"]


def test_the_secret_is_in_no_command_line_and_no_environment(monkeypatch):
    made = []

    def new_secret(nbytes):
        made.append(os.urandom(nbytes))
        return made[-1]

    monkeypatch.setattr(processes.secrets, "token_bytes", new_secret)

    def seen(backend):
        return [Path(f"/proc/self/{name}").read_bytes() for name in ("cmdline", "environ")]

    results = ferrodist.run(seen, 2)
    (secret,) = [one for one in made if len(one) == 32]
    for command, environment in results:
        assert b"worker.py" in command
        assert b"FERRODIST_SECRET_FD" in environment
        for form in (secret, secret.hex().encode(), base64.b64encode(secret)):
            assert form not in command + environment


def test_what_a_rank_prints_comes_out_here_and_says_who_said_it(capfd):
    def body(backend):
        print("rank", backend.rank)
        print("alike", file=sys.stderr)

    ferrodist.run(body, 3)
    output, errors = capfd.readouterr()
    assert sorted(output.splitlines()) == ["rank 0", "rank 1: rank 1", "rank 2: rank 2"]
    rank_0, *others = sorted(errors.splitlines())
    assert rank_0 == "alike"
    assert others in (["ranks 1-2: alike"], ["rank 1: alike", "rank 2: alike"])  # as time permits


def test_where_output_is_no_file_it_is_written_as_text(monkeypatch):
    output, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", errors)

    def body(backend):
        sys.stdout.write("ä" * 3 + "\n")
        print("no newline", end="", file=sys.stderr)

    ferrodist.run(body, 2)
    assert sorted(output.getvalue().splitlines()) == ["rank 1: äää", "äää"]
    assert sorted(errors.getvalue().splitlines()) == ["no newline", "rank 1: no newline"]


def test_a_stream_with_a_file_that_is_another_place_gets_text(monkeypatch, capfd):
    class NotebookStream(io.StringIO):
        def fileno(self):
            return 1

    output = NotebookStream()
    monkeypatch.setattr(sys, "stdout", output)
    ferrodist.run(lambda backend: print("here"), 1)
    assert output.getvalue() == "here\n"
    assert capfd.readouterr().out == ""


# -- errors ---------------------------------------------------------------------------------------


def test_the_error_of_a_rank_is_raised_with_its_type_text_note_and_traceback():
    def fail_on_one(backend):
        if backend.rank == 1:
            raise Noticed("boom", code=7)

    with pytest.raises(Noticed, match="boom") as caught:
        ferrodist.run(fail_on_one, 2)
    assert caught.value.code == 7
    assert caught.value.__notes__ == ["on rank 1"]
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "in fail_on_one" in str(caught.value.__cause__)
    assert "worker.py" not in str(caught.value.__cause__)


def test_the_cause_is_raised_before_its_consequences():
    def fail_on_one(backend):
        if backend.rank == 1:
            raise ValueError("the cause")
        ferrodist.barrier(backend)

    with pytest.raises(ValueError, match="the cause"):
        ferrodist.run(fail_on_one, 3)


def test_the_first_of_several_errors_is_raised():
    def fail_in_turn(backend):
        ferrodist.barrier(backend)
        if backend.rank == 0:
            ferrodist.recv(1, backend, like=np.zeros(1))
        if backend.rank == 1:
            raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        ferrodist.run(fail_in_turn, 2)


def test_the_others_may_notice_and_finish():
    def survive(backend, path):
        if backend.rank == 1:
            raise ValueError("gone")
        try:
            ferrodist.barrier(backend)
        except RankLost as error:
            Path(path).write_text(f"{error.rank} {error}")

    read, write = os.pipe()
    try:
        with pytest.raises(ValueError, match="gone"):
            ferrodist.run(survive, 2, args=(f"/proc/{os.getpid()}/fd/{write}",))
        words = os.read(read, 1000).decode()
    finally:
        os.close(read)
        os.close(write)
    assert words.startswith("1 ")
    assert "ValueError: gone" in words


def test_a_rank_that_is_killed_is_lost():
    def die(backend):
        if backend.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankLost, match=r"rank 1 .* was killed by SIGKILL") as caught:
        ferrodist.run(die, 2)
    assert caught.value.rank == 1
    assert caught.value.how == "was killed by SIGKILL"


@pytest.mark.parametrize("leave", [os._exit, sys.exit])
def test_a_rank_that_ends_without_a_result_is_lost(leave):
    with pytest.raises(RankLost) as caught:
        ferrodist.run(lambda backend: leave(3) if backend.rank == 0 else None, 2)
    assert caught.value.rank == 0
    assert caught.value.how == "ended with exit code 3 without a result"


@pytest.mark.parametrize(
    ("kind", "args", "words"),
    [
        (Unpicklable, ("why",), "Unpicklable: why"),
        (UnUnpicklable, (1, 2), "UnUnpicklable: 1 and 2"),
    ],
)
def test_an_error_that_cannot_travel_is_told_in_words(kind, args, words):
    def fail(backend):
        raise kind(*args)

    with pytest.raises(RankLost, match=words) as caught:
        ferrodist.run(fail, 1)
    assert "in fail" in str(caught.value.__cause__)
    assert caught.value.__notes__ == ["on rank 0"]


def test_a_result_that_cannot_be_pickled_names_rank_and_type():
    with pytest.raises(UnsupportedArray, match="rank 1 returned a lock that cannot be pickled"):
        ferrodist.run(lambda backend: threading.Lock() if backend.rank else None, 2)


def test_a_function_that_cannot_be_pickled_is_refused_here():
    lock = threading.Lock()
    with pytest.raises(UnsupportedArray, match="the function or its arguments cannot be pickled"):
        ferrodist.run(lambda backend: lock, 2)


def test_a_function_that_a_rank_cannot_read_is_that_ranks_error(monkeypatch, tmp_path):
    (tmp_path / "vanishing.py").write_text("def body(backend): pass")
    monkeypatch.syspath_prepend(tmp_path)
    import vanishing

    (tmp_path / "vanishing.py").unlink()
    with pytest.raises(ModuleNotFoundError, match="vanishing"):
        ferrodist.run(vanishing.body, 2)


@pytest.mark.parametrize("ranks", [0, -1])
def test_a_world_without_ranks_is_refused(ranks):
    with pytest.raises(InvalidWorldSize):
        ferrodist.run(print, ranks)


def test_a_timeout_that_is_none_is_refused():
    with pytest.raises(InvalidArgument, match="timeout"):
        ferrodist.run(print, 1, timeout=-1)


def test_after_the_timeout_all_are_ended_and_the_late_ones_named():
    start = time.monotonic()
    with pytest.raises(CollectiveTimeout, match=r"gave up after 1 s.*rank 0, rank 1 had") as caught:
        ferrodist.run(lambda backend: signal.pause(), 2, timeout=1)
    assert caught.value.missing == [0, 1]
    assert time.monotonic() - start < 5


def test_a_rank_that_will_not_end_is_killed_after_the_grace():
    def stay(backend):
        if backend.rank == 1:
            raise ValueError("first")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pause()

    with pytest.raises(ValueError, match="first"):
        ferrodist.run(stay, 2, grace=0.2)


def test_what_a_rank_has_started_ends_with_it(monkeypatch):
    def start_another(backend):
        if backend.rank == 1:
            ferrodist.barrier(backend)
            raise ValueError("enough")
        print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
        ferrodist.barrier(backend)
        signal.pause()

    output = io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    with pytest.raises(ValueError, match="enough"):
        ferrodist.run(start_another, 2, grace=0.1)
    pid = int(output.getvalue())
    assert not Path(f"/proc/{pid}").exists() or are_gone([os.pidfd_open(pid)], 5)


# -- scripts --------------------------------------------------------------------------------------


def write_script(path: Path, code: str) -> str:
    path.write_text(textwrap.dedent(code))
    return str(path)


def output_of(command: list[str], **options: Any) -> str:
    return subprocess.check_output(command, text=True, timeout=60, **options)


UNGUARDED = """
import ferrodist
print("top")

class Own(Exception):
    pass

class Result:
    pass

def body(backend):
    if backend.world_size == 1:
        raise Own("raised")
    return Result()

print(all(type(result) is Result for result in ferrodist.run(body, 2)))
try:
    ferrodist.run(body, 1)
except Own as error:
    print(error)
"""


def test_a_script_without_a_guard_is_run_once_and_its_classes_are_its_own(tmp_path):
    script = write_script(tmp_path / "script.py", UNGUARDED)
    assert output_of([sys.executable, script]) == "top\nTrue\nraised\n"


def test_a_program_that_is_no_file_can_run_ranks():
    assert output_of([sys.executable, "-"], input=UNGUARDED) == "top\nTrue\nraised\n"
    assert output_of([sys.executable, "-c", UNGUARDED]) == "top\nTrue\nraised\n"


WAITING = """
import os, signal, ferrodist

def body(backend):
    os.write(1, b"%d\\n" % os.getpid())  # in one piece
    signal.pause()

try:
    ferrodist.run(body, 2)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise SystemExit(5)
"""


def start_waiting(command: list[str]) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a program of two ranks that print their pids and wait; return pidfds of them."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines = [process.stdout.readline() for _ in range(2)]
    return process, [os.pidfd_open(int(line.removeprefix("rank 1: "))) for line in lines]


def test_ctrl_c_ends_the_ranks_and_is_raised():
    process, pidfds = start_waiting([sys.executable, "-c", WAITING])
    with process:
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert are_gone(pidfds, 0)
        assert process.wait(10) == 5


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_die_with_the_process_that_started_them(number):
    process, pidfds = start_waiting([sys.executable, "-c", WAITING])
    with process:
        process.send_signal(number)
        assert are_gone(pidfds, 5)
