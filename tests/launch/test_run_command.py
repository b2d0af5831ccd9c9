"""The run command: a script on n processes, its output, its exit code and its end."""

from __future__ import annotations

import os
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from commands import RUN, are_gone, children_of, lines_of, pids_of, run, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("nothing_left_behind"),
]


# -- what a script finds --------------------------------------------------------------------------


def test_a_script_finds_everything_as_if_started_by_hand(script):
    path = script("say(__name__, *sys.argv[1:], sys.path[0] == os.path.dirname(__file__))")
    done = run("-n", "2", path, "-n", "7", "--some_flag", "--", "-m")
    words = "__main__ -n 7 --some_flag -- -m True"
    assert sorted(done.stdout.splitlines()) == [words, f"rank 1: {words}"]


@pytest.mark.parametrize("option", ["--nproc-per-node", "--nproc_per_node", "-n"])
def test_a_module_runs_too(tmp_path, option):
    (tmp_path / "some_module.py").write_text("import sys; print(__name__, sys.argv[1:])")
    done = run(option, "2", "-m", "some_module", "-x", cwd=tmp_path)
    assert lines_of(done.stdout) == ["__main__ ['-x']"] * 2


def test_a_program_that_is_not_python_runs_too():
    done = run("-n", "2", "--no-python", "sh", "-c", 'echo "$RANK of $WORLD_SIZE"')
    assert lines_of(done.stdout) == ["0 of 2", "1 of 2"]


def test_without_a_number_there_is_a_rank_per_core(script):
    cores = len(os.sched_getaffinity(0))
    assert lines_of(run(script("say(size)")).stdout) == [str(cores)] * cores


def test_ranks_join_one_job(script):
    path = script("""
        import ferrodist
        backend = ferrodist.init()
        say(backend.rank, ferrodist.allreduce(backend.rank + 1))
        """)
    assert lines_of(run("-n", "3", path).stdout) == ["0 6", "1 6", "2 6"]


def test_the_variables_of_torchrun_are_set(script):
    path = script("""
        names = "RANK LOCAL_RANK ROLE_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE ROLE_WORLD_SIZE "
        names += "GROUP_WORLD_SIZE MASTER_ADDR TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS"
        say(*(os.environ[name] for name in names.split()))
        """)
    outer = {**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_RANK": "9"}
    done = run("-n", "2", "--max_restarts", "3", path, env=outer)
    expected = [f"{r} {r} {r} 0 2 2 2 1 127.0.0.1 0 3" for r in range(2)]
    assert lines_of(done.stdout) == expected


def test_a_torch_program_starts_under_it(script):
    pytest.importorskip("torch", reason="it is a program of torch")
    path = script("""
        import torch.distributed as dist, torch
        dist.init_process_group("gloo")
        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        say(dist.get_rank(), dist.get_world_size(), total.item())
        dist.destroy_process_group()
        """)
    done = run("-n", "2", path)
    assert lines_of(done.stdout) == ["0 2 3.0", "1 2 3.0"], done.stderr


def test_numerical_libraries_share_the_cores_unless_the_user_has_chosen(script):
    path, cores = script("say(os.environ['OMP_NUM_THREADS'])"), len(os.sched_getaffinity(0))
    without = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    assert lines_of(run("-n", "1", path, env=without).stdout) == [str(cores)]
    assert lines_of(run("-n", str(cores), path, env=without).stdout) == ["1"] * cores
    chosen = {**without, "OMP_NUM_THREADS": "5"}
    assert lines_of(run("-n", "2", path, env=chosen).stdout) == ["5", "5"]


def test_ranks_are_bound_to_cores_only_if_asked_for_and_if_there_are_enough(script):
    path, cores = script("say(sorted(os.sched_getaffinity(0)))"), sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core cannot be shared out")
    halves = [eval(line) for line in lines_of(run("-n", "2", "--bind", "cores", path).stdout)]
    assert sorted(halves[0] + halves[1]) == cores
    everything = [str(cores)] * 2
    assert lines_of(run("-n", "2", path).stdout) == everything
    assert lines_of(run("-n", "2", "--bind", "none", path).stdout) == everything
    size = len(cores) + 1
    assert lines_of(run("-n", str(size), "--bind", "cores", path).stdout) == [str(cores)] * size


def test_two_jobs_at_once_do_not_meet(script):
    path = script("""
        import ferrodist
        ferrodist.init()
        for _ in range(50):
            total = ferrodist.allreduce(int(sys.argv[1]))
        say(total)
        """)
    with start("-n", "2", path, "10") as one, start("-n", "2", path, "100") as other:
        outputs = [job.communicate(timeout=60)[0] for job in (one, other)]
    assert [lines_of(output) for output in outputs] == [["20"] * 2, ["200"] * 2]


def test_a_process_started_by_a_rank_is_no_rank(script):
    path = script("""
        import subprocess, ferrodist
        ferrodist.init()
        code = "import ferrodist; ferrodist.init()"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        say(done.returncode, "started by a rank" in done.stderr)
        """)
    assert lines_of(run("-n", "2", path).stdout) == ["1 True"] * 2


def test_a_rank_can_run_ranks_of_its_own(script):
    path = script("""
        import ferrodist
        say(ferrodist.run(lambda backend: backend.world_size, 2))
        """)
    assert run("-n", "1", path).stdout == "[2, 2]\n"


@pytest.mark.parametrize("arguments", [[], ["-n", "0", "script.py"], ["-n", "2"], ["-n", "x", "s"]])
def test_the_command_says_what_it_needs(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert "Usage: ferrodist run" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["run", "-np", "2", "x.py"], "write -n N"),
        (["run", "-n", "2", "python", "x.py", "-v"], "write 'x.py -v' alone"),
        (["run", "-n", "2", "python3.11", "x.py"], "--no-python python3.11 x.py"),
        (["run", "-n", "2", "ls"], "say --no-python"),
        (["runn", "-n", "2", "x.py"], "did you mean 'ferrodist run'?"),
        (["x.py"], "did you mean 'ferrodist run x.py'?"),
        (["frobnicate"], "there are demo, run, bench, doctor"),
    ],
)
def test_likely_mistakes_get_their_answer(arguments, answer):
    command = [*RUN[:-1], *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert answer in done.stderr


def test_a_script_that_is_not_there_is_named_before_anything_starts():
    done = run("-n", "2", "nowhere.py")
    assert done.returncode == 2
    assert "nowhere.py" in done.stderr
    assert "Traceback" not in done.stderr


# -- secrets --------------------------------------------------------------------------------------


def test_the_secret_is_nowhere_to_be_seen(script, tmp_path):
    path = script(f"""
        import ferrodist
        fd = int(os.environ["FERRODIST_SECRET_FD"])
        secret = os.read(fd, 32)
        read, write = os.pipe()  # put it back, for init
        os.write(write, secret)
        os.close(write)
        os.dup2(read, fd)
        if rank == 0:
            with open({str(tmp_path / "secret")!r}, "wb") as file:
                file.write(secret)
        ferrodist.init()
        seen = b""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            for name in ("cmdline", "environ"):
                try:
                    with open(f"/proc/{{pid}}/{{name}}", "rb") as file:
                        seen += file.read()
                except OSError:
                    pass
        assert secret not in seen and secret.hex().encode() not in seen
        say("looked")
        if rank == 1:
            raise ValueError("so that there is an error")
        ferrodist.barrier()
        """)
    logs = tmp_path / "logs"
    done = run("-n", "2", "--log-dir", str(logs), path, env={**os.environ, "FERRODIST_DEBUG": "1"})
    secret = (tmp_path / "secret").read_bytes()
    shown = (done.stdout + done.stderr).encode(errors="replace")
    shown += b"".join(file.read_bytes() for file in logs.rglob("*") if file.is_file())
    assert shown.count(b"looked") == 4  # both ranks, shown and logged
    assert b"RankLost" in shown
    for form in (secret, secret.hex().encode(), repr(secret).encode()[2:-1]):
        assert form not in shown


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "expected", "how"),
    [
        ("sys.exit(3)", 3, "rank 1 (pid N) ended with exit code 3"),
        ("1 / 0", 1, "rank 1: ZeroDivisionError: division by zero"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 (pid N) was killed by SIGKILL"),
        ("os.abort()", 134, "rank 1 (pid N) was killed by SIGABRT"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "PYTHONFAULTHANDLER=1 shows where"),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(script, code, expected, how):
    path = script(f"""
        if rank == 1:
            {code}
        """)
    done = run("-n", "2", path)
    assert done.returncode == expected
    assert how in re.sub(r"pid \d+", "pid N", done.stderr)


def count_shown(output, text):
    """Count a text of tracebacks: one that has just been shown is not written out again."""
    return output.count(text) + output.count(": the same traceback\n")


def test_the_traceback_of_the_first_failure_is_shown_last(script):
    path = script("""
        import ferrodist
        ferrodist.init()
        ferrodist.barrier()
        if rank == 2:
            def the_culprit():
                raise ValueError("the cause")
            the_culprit()
        ferrodist.barrier()
        """)
    done = run("-n", "4", path)
    assert done.returncode == 1
    assert count_shown(done.stderr, "RankLost") >= 2
    assert done.stderr.endswith("ValueError: the cause\n")
    _, repeated, end = done.stderr.rpartition("ferrodist run: ")
    if repeated:  # unless it was the last anyway
        assert end.startswith("rank 2 (pid ")
        assert "failed first" in end
        assert "in the_culprit" in end
        assert "RankLost" not in end


def test_the_exit_code_is_that_of_the_cause_though_others_end_before_it(script):
    path = script("""
        import atexit, ferrodist
        ferrodist.init()
        others = [pid for pid in ferrodist.all_gather_object(os.getpid()) if pid != os.getpid()]
        if rank == 1:
            @atexit.register
            def outlive_the_others():
                while any(os.path.exists(f"/proc/{pid}") for pid in others):
                    pass
            raise ValueError("the cause")
        try:
            ferrodist.barrier()
        except ferrodist.RankLost:
            sys.exit(7)
        """)
    done = run("-n", "3", path)
    assert "ValueError: the cause" in done.stderr.rpartition("ferrodist run: ")[2]
    assert done.returncode == 1


def test_the_cause_is_named_though_its_process_does_not_end(script):
    path = script("""
        import threading, ferrodist
        ferrodist.init()
        if rank == 0:
            threading.Thread(target=signal.sigwait, args=[{signal.SIGUSR2}]).start()
            raise ValueError("the cause")
        ferrodist.barrier()
        """)
    done = run("-n", "2", "--grace", "0.5", path)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: the cause\n")


def test_an_error_that_was_handled_is_not_taken_for_the_end(script):
    path = script("""
        import traceback
        try:
            1 / 0
        except ZeroDivisionError:
            traceback.print_exc()
        sys.stderr.write("went on\\n")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        """)
    done = run("-n", "2", path)
    assert done.returncode == 137
    last = done.stderr.rpartition("ferrodist run: ")[2]
    assert "was killed by SIGKILL" in last
    assert "ZeroDivisionError" not in last


def test_a_wrapped_consequence_is_still_one(script):
    path = script("""
        import ferrodist
        ferrodist.init()
        if rank == 1:
            raise ValueError("the cause")
        try:
            ferrodist.barrier()
        except ferrodist.RankLost as error:
            raise KeyError("training") from error
        """)
    done = run("-n", "3", path)
    assert done.stderr.endswith("ValueError: the cause\n")


def test_a_rank_that_waited_in_vain_did_not_fail_first(script):
    path = script("""
        import ferrodist
        ferrodist.init()
        pids = ferrodist.all_gather_object(os.getpid())
        def outlive(rank):
            while os.path.exists(f"/proc/{pids[rank]}"):
                pass
        try:
            if rank == 1:
                outlive(0)
            ferrodist.barrier(timeout=None if rank == 1 else 0.3)
        finally:
            if rank == 2:
                outlive(1)
        """)
    done = run("-n", "3", path)
    end = done.stderr.rpartition("ferrodist run: ")[2]
    assert end.startswith("rank 1 (pid ")
    assert "failed first; its traceback:\n" in end
    assert "GroupAborted" in end
    shown = count_shown(done.stderr, "raise the limit")
    assert shown == 4  # by each rank, and in the traceback


def test_a_victim_alone_is_not_said_to_have_failed_first(script):
    path = script("""
        import ferrodist
        ferrodist.init()
        if rank == 1:
            signal.pause()
        ferrodist.barrier(timeout=0.3)
        """)
    done = run("-n", "2", "--grace", "0.1", path)
    assert done.returncode == 1
    assert "failed first" not in done.stderr


def test_the_survivors_have_a_while_and_are_then_ended(script):
    path = script("""
        if rank == 1:
            sys.exit(4)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say(os.getpid())
        signal.pause()
        """)
    start = time.monotonic()
    done = run("-n", "2", "--grace", "1.5", path)
    assert done.returncode == 4
    assert "the others have 1.5 s to end" in done.stderr
    assert 1.5 < time.monotonic() - start < 20
    assert are_gone([int(done.stdout)], 0)


def test_the_survivors_may_finish_what_they_do(script):
    path = script("""
        import ferrodist
        ferrodist.init()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            ferrodist.barrier()
        except ferrodist.RankLost as error:
            say(error.rank, error.how)
        """)
    done = run("-n", "3", path)
    assert done.returncode == 137
    assert lines_of(done.stdout) == ["1 was killed by SIGKILL"] * 2


def test_survivors_go_on_if_that_is_asked_for(script):
    path = script("""
        if rank == 1:
            sys.exit(6)
        end = time.monotonic() + 1.5
        while time.monotonic() < end:  # longer than the grace
            pass
        say("went on")
        """)
    done = run("-n", "2", "--keep-survivors", "--grace", "0.1", "--max-restarts", "1", path)
    assert done.returncode == 0
    assert done.stdout == "went on\n"
    assert "the others go on" in done.stderr
    assert "rank 1 (pid " in done.stderr
    assert done.stderr.endswith(
        "ferrodist run: the other ranks ended well, so the exit code is 0 (--keep-survivors)\n"
    )


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ("killed killed 0", 0),
        ("killed 0 0", 0),
        ("3 killed 0", 0),
        ("killed 5 0", 137),  # a survivor has failed
        ("3 3 3", 3),  # no rank has survived
        ("killed killed killed", 137),
    ],
)
def test_job_whose_survivors_end_well_ends_with_0(script, ends, code):
    """Ranks end one after the other, each when the one before it is gone."""
    path = script(f"""
        import ferrodist
        pids = ferrodist.all_gather_object(os.getpid(), ferrodist.init(backend="shared_memory"))
        mine = {ends.split()!r}[rank]
        while rank and os.path.exists(f"/proc/{{pids[rank - 1]}}"):
            pass
        os.kill(os.getpid(), signal.SIGKILL) if mine == "killed" else os._exit(int(mine))
        """)
    done = run("-n", "3", "--keep-survivors", path)
    assert done.returncode == code, done.stderr
    assert ("the other ranks ended well" in done.stderr) == (code == 0)


def test_what_a_failed_rank_has_started_is_ended(script):
    path = script("""
        import subprocess
        say(subprocess.Popen(["sleep", "1000"]).pid)
        os.kill(os.getpid(), signal.SIGKILL)
        """)
    done = run("-n", "1", path)
    assert are_gone([int(done.stdout)], 5)


def test_a_job_that_fails_is_started_again_as_a_whole(script):
    path = script("""
        import ferrodist
        ferrodist.init()
        count = os.environ["TORCHELASTIC_RESTART_COUNT"]
        say("attempt", count, "of rank", rank)
        ferrodist.barrier()
        if rank == 1 and int(count) < 2:
            raise ValueError(f"attempt {count}")
        ferrodist.barrier()
        say("done")
        """)
    done = run("-n", "2", "--max-restarts", "3", path)
    assert done.returncode == 0
    attempts = [f"attempt {count} of rank {rank}" for count in range(3) for rank in range(2)]
    assert lines_of(done.stdout) == [*attempts, "done", "done"]
    assert "restart 1 of 3" in done.stderr
    assert "restart 2 of 3" in done.stderr
    assert "restart 3 of 3" not in done.stderr


def test_after_the_last_restart_the_failure_is_the_jobs(script):
    done = run("-n", "2", "--max-restarts", "1", script("say('tried'); sys.exit(5 + rank * 0)"))
    assert done.returncode == 5
    assert lines_of(done.stdout) == ["tried"] * 4


# -- losses, told apart ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("raise ValueError('the cause')", "raised ValueError: the cause"),
        ("sys.exit(3)", "left after #1 (its program ended after sys.exit(3) at script.py:N)"),
        ("sys.exit('x')", "left after #1 (its program ended after sys.exit('x') at script.py:N)"),
        ("pass", "left after #1 (its program ended)"),
        ("os._exit(3)", "ended with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "was killed by SIGTERM"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("os.abort()", "was killed by SIGABRT"),
    ],
)
def test_every_way_to_end_is_told_to_the_others(script, end, how):
    path = script(f"""
        import ferrodist
        ferrodist.init()
        ferrodist.barrier()
        if rank == 1:
            {end}
        else:
            try:
                ferrodist.barrier()
            except ferrodist.RankLost as error:
                say(error.rank, error.how)
        """)
    done = run("-n", "3", path)
    expected = [f"1 {how}"] * 2
    assert [re.sub(r"py:\d+", "py:N", line) for line in lines_of(done.stdout)] == expected


def test_an_error_is_told_though_somebody_has_replaced_the_hook(script):
    path = script("""
        import ferrodist
        ferrodist.init()
        sys.excepthook = lambda *about: None
        if rank == 1:
            raise ValueError("the cause")
        try:
            ferrodist.barrier()
        except ferrodist.RankLost as error:
            say(error.how)
        """)
    assert run("-n", "2", path).stdout == "raised ValueError: the cause\n"


@pytest.mark.parametrize("failed_rank", [0, 1])
@pytest.mark.parametrize(
    ("end", "how"),
    [("raise ImportError('no such thing')", "exit code 1"), ("sys.exit(0)", "exit code 0")],
)
def test_a_rank_that_ends_before_it_joins_is_not_waited_for(script, failed_rank, end, how):
    path = script(f"""
        import ferrodist
        if rank == {failed_rank}:
            {end}
        try:
            ferrodist.init()
        except ferrodist.RendezvousError as error:
            say(error)
        """)
    start = time.monotonic()
    done = run("-n", "3", path)
    assert time.monotonic() - start < 20  # the join timeout is 60
    words = lines_of(done.stdout)
    assert len(words) == 2
    for line in words:
        assert f"rank {failed_rank}" in line
        assert how in line


# -- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_to_the_command_reaches_every_rank(script, number):
    path = script("""
        def heard(number, frame):
            say("heard", number)
            os._exit(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, heard)
        say("pid", os.getpid())
        while True:
            signal.pause()
        """)
    with start("-n", "2", path) as process:
        pids = pids_of(process, 2)
        process.send_signal(number)
        assert lines_of(process.stdout.read()) == [f"heard {int(number)}"] * 2
        assert process.wait(10) == 128 + number
        assert are_gone(pids, 0)


def test_a_signal_that_means_something_to_the_ranks_does_not_end_them(script):
    path = script("""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        say("pid", os.getpid())
        signal.sigwait({signal.SIGUSR1})
        say("heard")
        """)
    with start("-n", "2", path) as process:
        pids_of(process, 2)
        process.send_signal(signal.SIGUSR1)
        assert lines_of(process.stdout.read()) == ["heard"] * 2
        assert process.wait(10) == 0


def test_ctrl_c_in_a_collective_ends_all_within_three_seconds(script):
    path = script("""
        import ferrodist
        ferrodist.init()
        say("pid", os.getpid())
        if rank == 1:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pause()
        ferrodist.barrier()
        """)
    with start("-n", "3", path, stderr=subprocess.PIPE) as process:
        pids = pids_of(process, 3)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert time.monotonic() - begin < 3.5
        assert are_gone(pids, 0)
        assert "KeyboardInterrupt" in process.stderr.read()


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_all_at_once(script, first):
    path = script("""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: say("heard"))
        say("pid", os.getpid())
        while True:
            signal.pause()
        """)
    with start("-n", "2", "--grace", "60", path) as process:
        pids = pids_of(process, 2)
        process.send_signal(first)
        assert process.stdout.readline().endswith("heard\n")
        end = time.monotonic() + 1.1  # several at one moment are one
        while time.monotonic() < end and first is not signal.SIGINT:
            pass
        process.send_signal(first)
        process.stdout.read()
        assert process.wait(10) == 128 + first
        assert are_gone(pids, 0)


def test_two_signals_at_one_moment_leave_the_grace_as_it_is(script):
    path = script("""
        def finish(number, frame):
            end = time.monotonic() + 1
            while time.monotonic() < end:
                pass
            say("saved")
            os._exit(0)
        signal.signal(signal.SIGTERM, finish)
        say("pid", os.getpid())
        while True:
            signal.pause()
        """)
    with start("-n", "2", path) as process:
        pids_of(process, 2)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert lines_of(process.stdout.read()) == ["saved"] * 2
        assert process.wait(10) == 128 + signal.SIGTERM


def test_what_a_rank_has_started_ends_with_it_though_the_rank_ends_well(script):
    path = script("""
        import subprocess
        code = "import signal, os; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; "
        code += "os.write(1, b'up\\\\n'); signal.pause()"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        child.stdout.readline()
        signal.signal(signal.SIGTERM, lambda *about: sys.exit(0))
        say("pid", child.pid)
        signal.pause()
        """)
    with start("-n", "2", path) as process:
        pids = pids_of(process, 2)
        process.send_signal(signal.SIGTERM)
        process.wait(10)
        assert are_gone(pids, 2)


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, 5))]
)
def test_no_rank_outlives_a_command_that_is_killed(script, part):
    """Fifty times in all, at any moment from the very start on."""
    path = script("""
        import ferrodist
        ferrodist.init()
        while True:
            ferrodist.barrier()
        """)
    moments = random.Random(part)
    for _ in range(10):
        pids: set[int] = set()
        with start("-n", "2", path) as process:
            end = time.monotonic() + moments.uniform(0, 1.0)
            while time.monotonic() < end:
                pids |= children_of(process.pid)
            process.kill()
            pids |= children_of(process.pid)
        assert are_gone(list(pids), 5)
        marks = path.encode()
        for command in Path("/proc").glob("[0-9]*/cmdline"):  # also one that was just being born
            with suppress(OSError):
                if marks in command.read_bytes():
                    assert are_gone([int(command.parent.name)], 5)


def test_what_ranks_have_started_does_not_outlive_a_command_that_is_killed(script):
    path = script("""
        import subprocess
        say("pid", subprocess.Popen(["sleep", "1000"]).pid)
        signal.pause()
        """)
    with start("-n", "2", path) as process:
        pids = pids_of(process, 2)
        process.kill()
        assert are_gone(pids, 5)


def test_a_job_that_is_stopped_goes_on_where_it_was(script):
    path = script("""
        import ferrodist
        ferrodist.init()
        say("pid", os.getpid())
        sys.stdin.readline() if rank == 0 else None
        say(ferrodist.allreduce(rank))
        """)
    # In a group of its own: the kernel does not stop one whose shell is gone.
    with start("-n", "2", path, stdin=subprocess.PIPE, process_group=0) as process:
        pids = pids_of(process, 2)
        process.send_signal(signal.SIGTSTP)
        assert os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        for pid in pids:
            while state_of(pid) != "T":
                pass
        process.send_signal(signal.SIGCONT)
        process.stdin.write("go on\n")
        process.stdin.close()
        assert lines_of(process.stdout.read()) == ["1", "1"]
        assert process.wait(10) == 0


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# -- output ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_hundred_thousand_lines_are_neither_torn_nor_lost_nor_mixed_up(script, stream):
    path = script(f"""
        for number in range(25_000):
            print(rank, number, "x" * (number % 97), file=sys.{stream})
        """)
    shown = getattr(run("-n", "4", path), stream).splitlines()
    assert len(shown) == 100_000
    for rank in range(4):
        prefix = f"rank {rank}: " if rank else ""
        own = [line for line in shown if line.startswith(f"{prefix}{rank} ")]
        assert own == [f"{prefix}{rank} {n} {'x' * (n % 97)}" for n in range(25_000)]


def test_what_a_rank_prints_comes_though_the_rank_is_killed_without_a_word(script):
    path = script("""
        import ferrodist
        ferrodist.init()
        print("printed by", rank)
        ferrodist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
        """)
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = run("-n", "2", path, env=environment)
    assert lines_of(done.stdout) == ["printed by 0", "printed by 1"]


def test_log_files_have_what_each_rank_wrote(script, tmp_path):
    path = script("say('out', rank); sys.stderr.write(f'err {rank}\\n')")
    done = run("-n", "2", "--log-dir", str(tmp_path / "logs"), path)
    assert lines_of(done.stdout) == ["out 0", "out 1"]
    (folder,) = (tmp_path / "logs").iterdir()
    assert str(folder) in done.stderr
    for rank in range(2):
        assert (folder / f"attempt_0/{rank}/stdout.log").read_text() == f"out {rank}\n"
        assert (folder / f"attempt_0/{rank}/stderr.log").read_text() == f"err {rank}\n"


def test_some_streams_go_to_files_only_and_others_to_both(script, tmp_path):
    path = script("say('out', rank); sys.exit(3 if rank == 1 else 0)")
    options = ["--log_dir", str(tmp_path / "logs"), "--redirects", "1:1", "--tee", "0:1"]
    done = run("-n", "2", "--max-restarts", "1", *options, path)
    assert done.stdout == "out 0\n" * 2
    assert done.returncode == 3
    files = (tmp_path / "logs").rglob("*.log")
    assert sorted("/".join(file.parts[-3:]) for file in files) == [
        f"attempt_{attempt}/{rank}/stdout.log" for attempt in range(2) for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tee", "3"], "say where, by --log-dir"),
        (["--log-dir", "x", "--tee", "7"], "3 for both"),
        (["--log-dir", "/dev/null/x"], "Not a directory"),
        (["--no-python", "-m"], "exclude each other"),
        (["--log-dir", "x", "--tee", "2:3"], "names a rank beyond 1"),
        (["--debug-rank", "2"], "--debug-rank 2: the ranks are 0 to 1"),
        (["--debug-rank", "1", "--hosts", "a,b"], "--debug-rank is for a job on one host"),
        (["--grace", "nan"], "expected seconds"),
    ],
)
def test_options_that_cannot_be_are_usage_errors(script, options, words, tmp_path):
    done = run("-n", "2", *options, script(""), cwd=tmp_path)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())


def test_a_program_that_is_not_there_is_named():
    done = run("-n", "2", "--no-python", "no-such-program")
    assert done.returncode == 2
    assert "there is no program 'no-such-program'" in done.stderr


def test_ranks_that_wait_for_one_in_vain_show_it_once_with_the_limit_that_was_set(script):
    path = script("""
        import ferrodist, time
        if rank == 2:
            time.sleep(60)
        ferrodist.init()
        """)
    variables = {**os.environ, "FERRODIST_JOIN_TIMEOUT": "0.75"}
    done = run("-n", "3", "--grace", "0", path, env=variables)
    assert done.returncode == 1
    assert done.stderr.count("rank 2 of 3 did not join job") == 1, done.stderr
    assert "within 0.75 s; here: rank 0" in done.stderr
    assert "rank 1: the same traceback" in done.stderr


def test_help_says_when_ranks_wait_for_a_debugger_with_a_deadline():
    text = " ".join(run("--help").stdout.split())
    assert "without a deadline, unless a timeout is set in the environment or passed to" in text


def test_too_few_files_are_named_with_the_number_needed(script):
    path = script("import ferrodist; ferrodist.init()")
    command = shlex.join([*RUN, "-n", "8", path])
    few, enough = (["bash", "-c", f"ulimit -n {files}; exec {command}"] for files in (40, 64))
    done = subprocess.run(few, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    words = (
        "cannot start 8 ranks: a process may open 40 files here, and the launcher needs about 88; "
        "'ulimit -n 88' in the shell that starts the ranks"
    )
    assert words in " ".join(done.stderr.split())
    assert subprocess.run(enough, timeout=60).returncode == 0


def test_a_full_disk_is_named(script):
    path = script("say('something')")
    with open("/dev/full", "w") as full:
        done = subprocess.run([*RUN, "-n", "2", path], stdout=full, stderr=subprocess.PIPE,
                              text=True, timeout=60)  # fmt: skip
    assert done.returncode != 0
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_missing_standard_files_do_no_harm(script, tmp_path, closed):
    path = script(f"""
        import ferrodist
        backend = ferrodist.init()
        total = ferrodist.allreduce(rank)
        open({str(tmp_path)!r} + f"/{{rank}}", "w").write(str(total))
        """)
    command = " ".join([*RUN, "-n", "2", path, closed])
    assert subprocess.run(command, shell=True, timeout=60).returncode == 0
    assert [(tmp_path / name).read_text() for name in "01"] == ["1", "1"]
    code = "import ferrodist; assert ferrodist.run(lambda b: ferrodist.allreduce(1), 2) == [2, 2]"
    command = f'{sys.executable} -c "{code}" {closed}'
    assert subprocess.run(command, shell=True, timeout=60).returncode == 0


def test_a_launcher_that_ignores_its_children_works_all_the_same(script):
    code = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    code += "os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", code, *RUN, "-n", "2", script("sys.exit(rank * 3)")]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 3


def test_a_reader_that_goes_away_ends_the_job(script):
    path = script("""
        while True:
            print(rank)
        """)
    with start("-n", "2", path) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(20) == 128 + signal.SIGPIPE


# -- how long it takes ----------------------------------------------------------------------------


def test_an_empty_script_on_two_ranks_starts_soon(script):
    """Half a second more than python: of processor time, since others run here as well."""
    path = script("")
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}

    def seconds(command: list[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, timeout=60, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    alone, together = [sys.executable, path], [*RUN, "-n", "2", path]
    pairs = [(seconds(alone), seconds(together)) for _ in range(5)]
    assert min(second - first for first, second in pairs) < 0.5
