"""What ranks have started ends with the job, whatever session it is in and however the job ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import ferrodist
from commands import are_gone, children_of, pids_of, run, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

# Three children of each rank: a plain one, one in a session of its own, one that was forked twice.
CHILDREN = """
    import subprocess
    def daemon():
        read, write = os.pipe()
        if os.fork() == 0:
            os.setsid()
            pid = os.fork()
            if pid == 0:
                os.execvp("sleep", ["sleep", "1000"])
            os.write(write, str(pid).encode())
            os._exit(0)
        os.wait()
        return int(os.read(read, 20))
    say("pid", subprocess.Popen(["sleep", "1000"]).pid)
    say("pid", subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
    say("pid", daemon())
    """


def polite(answer: str) -> str:
    """Return the code of a rank with a child that says when it is asked to end, then answers."""
    code = textwrap.dedent(f"""\
        import os, signal, sys
        def asked(*about):
            print("asked", flush=True)
            {answer}
        signal.signal(signal.SIGTERM, asked)
        print("pid", os.getpid(), flush=True)
        print("ready", file=sys.stderr, flush=True)
        while True:
            signal.pause()
        """)
    return f"""
        import subprocess
        command = [sys.executable, "-c", {code!r}]
        child = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
        child.stderr.readline()
        """


def pids_in(text: str) -> list[int]:
    return [int(line.split()[-1]) for line in text.splitlines() if "pid" in line]


@pytest.mark.parametrize(("end", "code"), [("pass", 0), ("sys.exit(3)", 3), ("os.abort()", 134)])
def test_no_child_outlives_a_job_that_ends(script, end, code):
    done = run("-n", "2", script(f"{CHILDREN}\n    {end}"))
    assert done.returncode == code
    pids = pids_in(done.stdout)
    assert len(pids) == 6
    assert are_gone(pids, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_child_outlives_a_launcher_that_gets_a_signal(script, number):
    with start("-n", "2", script(f"{CHILDREN}\n    signal.pause()")) as process:
        pids = pids_of(process, 6)
        process.send_signal(number)
        process.wait(10)
        assert are_gone(pids, 5 if number is signal.SIGKILL else 0)


def test_children_of_a_job_that_is_started_again_are_gone_before(script):
    path = script(f"""
    {CHILDREN}
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        open(__file__ + "pid", "w").write(str(daemon()))
        sys.exit(1)
    pid = int(open(__file__ + "pid").read())
    say("gone", not os.path.exists(f"/proc/{{pid}}"))
    """)
    assert "gone True" in run("-n", "1", "--max-restarts", "1", path).stdout


def test_at_a_normal_end_a_child_is_asked_first_and_may_finish(script):
    done = run("-n", "2", script(polite("print('saved', flush=True); os._exit(0)")))
    assert done.returncode == 0
    assert done.stdout.count("saved") == 2 or "ranks 0-1" in done.stdout
    assert are_gone(pids_in(done.stdout), 0)
    assert "--keep-children" in done.stderr
    for pid in pids_in(done.stdout):
        assert f"(pid {pid})" in done.stderr


def test_a_child_that_does_not_end_is_killed_after_the_grace(script):
    began = time.monotonic()
    done = run("-n", "1", "--grace", "0.5", script(polite("pass")))
    assert done.returncode == 0
    assert "asked" in done.stdout
    assert 0.5 < time.monotonic() - began < 4.5
    assert are_gone(pids_in(done.stdout), 0)


def test_a_signal_shortens_the_grace_of_children(script):
    with start("-n", "1", "--grace", "100", script(polite("pass"))) as process:
        pids = pids_of(process, 1)
        assert process.stdout.readline() == "asked\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert are_gone(pids, 0)


def test_children_are_kept_if_that_is_asked_for(script):
    done = run("-n", "2", "--keep-children", script(CHILDREN), stdin=subprocess.DEVNULL)
    pids = pids_in(done.stdout)
    try:
        assert done.returncode == 0
        assert not any(are_gone([pid], 0) for pid in pids)
        assert done.stderr == ""
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def test_children_are_not_kept_after_a_failure(script):
    done = run("-n", "2", "--keep-children", script(f"{CHILDREN}\n    sys.exit(rank * 5)"))
    assert done.returncode == 5
    assert are_gone(pids_in(done.stdout), 0)


def test_children_that_end_by_themselves_are_not_mentioned(script):
    path = script("""
        import subprocess
        subprocess.Popen(["sleep", "0.01"], start_new_session=True)
        """)
    assert run("-n", "2", path).stderr == ""


def test_no_child_outlives_a_function_on_ranks():
    def start_another(backend):
        return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid

    assert are_gone(ferrodist.run(start_another, 2), 0)


def test_a_program_that_is_killed_leaves_no_child_though_it_had_forked():
    """What it has forked holds its pipes open, so they do not tell that it is gone."""
    code = """
import os, signal, subprocess, threading, time
import ferrodist

def body(backend):
    pid = subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
    os.write(1, b"%d\\n" % pid)
    os.fork()
    signal.pause()

def children_of(pid):
    return open(f"/proc/{pid}/task/{pid}/children").read().split()

def fork_once_ranks_are_there():
    while not any(map(children_of, children_of(os.getpid()))):
        pass
    pid = os.fork()
    if pid == 0:
        signal.pause()
    os.write(1, b"forked %d\\n" % pid)

threading.Thread(target=fork_once_ranks_are_there).start()
ferrodist.run(body, 2)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        process.kill()
        (forked,) = [int(line.split()[1]) for line in lines if b"forked" in line]
        pids = [int(line.split()[-1]) for line in lines if b"forked" not in line]
        gone = are_gone(pids, 5)
        os.kill(forked, signal.SIGKILL)
        assert gone


# -- the reaper -----------------------------------------------------------------------------------


def reaper_of(launcher: int) -> int:
    return int(Path(f"/proc/{launcher}/task/{launcher}/children").read_text())


def test_a_signal_to_every_process_of_the_job_leaves_the_launcher_in_charge(script):
    """As scancel does: the reaper must not end the ranks before their grace."""
    path = script("""
        def save(number, frame):
            say("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        say("pid", os.getpid())
        signal.pause()
        """)
    with start("-n", "2", path) as process:
        pids_of(process, 2)
        for pid in [reaper_of(process.pid), process.pid]:
            os.kill(pid, signal.SIGTERM)
        assert process.stdout.read().count("saved") >= 1
        assert process.wait(10) == 128 + signal.SIGTERM


def test_if_the_reaper_is_killed_no_rank_is_left_and_the_job_has_failed(script):
    with start("-n", "2", script("say('pid', os.getpid()); signal.pause()")) as process:
        pids = pids_of(process, 2)
        os.kill(reaper_of(process.pid), signal.SIGKILL)
        assert process.wait(10) == 128 + signal.SIGKILL
        assert are_gone(pids, 5)


def await_rest(pid: int) -> None:
    """Wait until a process has nothing to do, for two seconds at most."""
    seen, num_same, end = "", 0, time.monotonic() + 2
    while num_same < 10 and time.monotonic() < end:
        now = Path(f"/proc/{pid}/schedstat").read_text()
        seen, num_same = now, num_same + 1 if now == seen else 0
        time.sleep(0.01)


@pytest.mark.parametrize("end", ["signal.pause()", "pass"])
def test_if_the_reaper_is_killed_no_child_of_a_rank_is_left(script, end):
    """While ranks run, and while what they have left has its grace to end."""
    ignoring = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"  # which children inherit
    path = script(
        f"{CHILDREN.replace('import subprocess', f'import subprocess; {ignoring}')}\n    {end}"
    )
    with start("-n", "2", "--grace", "60", path, stderr=subprocess.PIPE) as process:
        pids = pids_of(process, 6)
        reaper = reaper_of(process.pid)
        while end == "pass" and len(children_of(reaper)) > 6:
            pass  # until the ranks are gone, and only their children are left
        await_rest(process.pid)  # the launcher has heard how the ranks ended
        os.kill(reaper, signal.SIGKILL)
        errors = process.stderr.read()
        code = process.wait(10)
        assert are_gone(pids, 0)
    assert code == (0 if end == "pass" else 128 + signal.SIGKILL)
    assert f"the parent process of the ranks (pid {reaper}) was killed by SIGKILL" in errors
    assert "ended what they had left running: sleep (pid " in errors


def test_a_rank_is_the_child_of_a_process_that_outlives_the_launcher(script):
    with start("-n", "2", script("say('pid', os.getppid()); signal.pause()")) as process:
        parents = pids_of(process, 2)
        assert set(parents) == {reaper_of(process.pid)}
        assert len(children_of(process.pid)) == 3


def test_a_program_that_cannot_be_executed_is_named(tmp_path):
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF but not really")
    program.chmod(0o755)
    done = run("-n", "2", "--no-python", str(program))
    assert done.returncode == 1
    assert f"cannot start 2 ranks: [Errno 8] Exec format error: '{program}'" in done.stderr
