"""The run command on several hosts: by the same command on each, and by ssh from one of them.

The hosts are this machine. In place of ssh there is a script that does what sshd does: it runs the
command by a shell, in a session of its own, with hardly any environment. Where there is an sshd,
the real thing is tried too.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from commands import free_port
from ferrodist import InvalidArgument
from ferrodist.launch.hosts import SshHost, parse_hosts, read_hostfile, sizes_of
from ferrodist.launch.main import commands
from ferrodist.launch.output.logs import parse_choice
from ferrodist.launch.ssh import RankFailed, ReportReader, Started, to_bytes
from test_run_command import RUN, are_gone, lines_of, pids_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

LIMIT = 50.0
HOSTS = "127.0.0.1,localhost"
SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")
Write = Callable[[str], str]


@pytest.fixture(autouse=True)
def no_other_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what a launcher around the tests may have set."""
    for name in os.environ:
        if name.startswith(("FERRODIST_", "SLURM_")) or name in ("GROUP_RANK", "NODE_RANK"):
            monkeypatch.delenv(name)


@pytest.fixture
def script(tmp_path: Path) -> Write:
    """Give what writes a script; all it needs is imported, ``rank`` and ``say`` are there."""
    head = textwrap.dedent("""\
        import os, signal, sys, time
        rank, host = int(os.environ["RANK"]), int(os.environ["GROUP_RANK"])
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        def say(*words):  # in one piece
            os.write(1, (" ".join(map(str, words)) + "\\n").encode())
        def variables(names):
            return [os.environ[name] for name in names.split()]
        def read_secret():
            return os.read(int(os.environ["FERRODIST_SECRET_FD"]), 100)
        """)

    def write(code: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(head + textwrap.dedent(code))
        return str(path)

    return write


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*RUN, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, **options)


@contextmanager
def start(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [*RUN, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


# -- the same command on each host ----------------------------------------------------------------


@pytest.fixture
def secret_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(os.urandom(32))
    monkeypatch.setenv("FERRODIST_SECRET_FILE", str(path))
    return path


def run_on_each(*arguments: str, endpoint: str, num_hosts: int = 2) -> list[Any]:
    """Run the same command on each of some hosts; return what became of them."""
    more = ["--nnodes", str(num_hosts), "--rdzv-endpoint", endpoint, *arguments]
    with ExitStack() as stack:
        hosts = [
            stack.enter_context(start("--node-rank", str(number), *more))
            for number in range(num_hosts)
        ]
        outputs = [host.communicate(timeout=LIMIT) for host in hosts]
    return [
        subprocess.CompletedProcess(host.args, host.returncode, *output)
        for host, output in zip(hosts, outputs, strict=True)
    ]


def outputs_of(done: list[Any]) -> list[str]:
    """Sort the lines of all hosts."""
    assert all(one.returncode == 0 for one in done), done
    return sorted(line for one in done for line in lines_of(one.stdout))


VARIABLES = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE MASTER_ADDR"
OURS = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE ENDPOINT JOB"


@pytest.mark.usefixtures("secret_file")
def test_every_rank_knows_its_place_on_its_host_and_in_the_job(script):
    port = free_port()
    path = script(f"""
        ours = " ".join("FERRODIST_" + name for name in {OURS!r}.split())
        say(*variables({VARIABLES!r} + " MASTER_PORT"), *variables(ours))
        """)
    expected = [
        f"{rank} {local} {host} 3 {size} 2 127.0.0.1 {port + 1} "
        f"{rank} {local} 3 {size} 127.0.0.1:{port} run-127.0.0.1:{port}-0"
        for rank, local, host, size in [(0, 0, 0, 1), (1, 0, 1, 2), (2, 1, 1, 2)]
    ]
    assert outputs_of(run_on_each("-n", "1,2", path, endpoint=f"127.0.0.1:{port}")) == expected


@pytest.mark.usefixtures("secret_file")
def test_options_may_be_written_as_torchruns(script):
    path = script("say(*variables('RANK WORLD_SIZE FERRODIST_JOB'))")
    options = ["--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=name", "--nnodes=2:2"]
    done = run_on_each(*options, path, endpoint="[::1]:20000")
    assert outputs_of(done) == ["0 2 name-0", "1 2 name-0"]


@pytest.mark.usefixtures("secret_file")
def test_every_line_names_its_rank_in_the_job(script):
    first, second = run_on_each("-n", "1", script("say('x')"), endpoint="127.0.0.1:20000")
    assert (first.stdout, second.stdout) == ("x\n", "rank 1: x\n")


@pytest.mark.usefixtures("secret_file")
def test_a_torch_program_finds_its_master_at_the_next_port(script):
    pytest.importorskip("torch.distributed", reason="it is a program of torch")
    path = script("""
        import torch.distributed as dist, torch
        dist.init_process_group("gloo")
        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        say(dist.get_rank(), total.item())
        dist.destroy_process_group()
        """)
    done = run_on_each("-n", "1", path, endpoint=f"127.0.0.1:{free_port()}")
    assert outputs_of(done) == ["0 3.0", "1 3.0"]


def test_all_ranks_of_all_hosts_get_the_secret_of_the_file(script, secret_file):
    path = script("say(read_secret().hex())")
    expected = hashlib.sha256(secret_file.read_bytes()).hexdigest()
    done = run_on_each("-n", "2", path, endpoint="127.0.0.1:20000")
    assert outputs_of(done) == [expected] * 4


def test_without_a_secret_nothing_is_started_and_the_commands_that_make_one_are_shown(script):
    done = run("--nnodes=2", "--node-rank=0", "--rdzv-endpoint=a:1", "-n1", script("say('x')"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert "head -c 32 /dev/urandom > " in done.stderr
    assert "export FERRODIST_SECRET_FILE=" in done.stderr


@pytest.mark.usefixtures("secret_file")
@pytest.mark.parametrize("name", ["GROUP_RANK", "NODE_RANK", "SLURM_NODEID"])
def test_a_scheduler_says_which_host_this_is(script, name, monkeypatch):
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_NNODES", "3")
    path = script("say(*variables('GROUP_RANK GROUP_WORLD_SIZE RANK'))")
    done = run("--rdzv-endpoint=a:1", "-n", "1", path)
    assert lines_of(done.stdout) == ["1 3 1"]
    monkeypatch.setenv(name, "one")
    assert f"{name}='one': expected a number" in run("--rdzv-endpoint=a:1", path).stderr


@pytest.mark.parametrize(
    "options", [[], ["--nnodes=1"], ["--nnodes=1", "--node-rank=0", "--rdzv-endpoint=a:1"]]
)
def test_on_one_host_nothing_is_as_on_several(script, options, monkeypatch):
    monkeypatch.setenv("SLURM_NNODES", "3")
    monkeypatch.setenv("SLURM_NODEID", "1")
    path = script(
        "say(*variables('GROUP_RANK MASTER_ADDR'), repr(os.environ['FERRODIST_ENDPOINT']))"
    )
    assert lines_of(run("-n", "1", *options, path).stdout) == ["0 127.0.0.1 ''"]


@pytest.mark.usefixtures("secret_file")
def test_launchers_whose_ranks_have_failed_meet_again_in_the_next_attempt(script):
    path = script("""
        if attempt == 0:
            sys.exit(3)
        say(*variables("FERRODIST_JOB TORCHELASTIC_MAX_RESTARTS"))
        """)
    done = run_on_each("-n", "1", "--max-restarts=2", "--rdzv-id=j", path, endpoint="a:1")
    assert outputs_of(done) == ["j-1 2", "j-1 2"]


BY_HAND = ["--nnodes=2", "--node-rank=0", "--rdzv-endpoint=a:1"]
THERE = ["--hosts", HOSTS]


@pytest.mark.usefixtures("secret_file")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-n1", "--nnodes=2", "--node-rank=0"], "--rdzv-endpoint HOST:PORT says where rank 0"),
        (["-n1", "--nnodes=2", "--rdzv-endpoint=a:1"], "Say --node-rank K, from 0 to 1"),
        (["-n1", "--rdzv-endpoint=a:1"], "say how many, by --nnodes N"),
        (["-n1", "--nnodes=1:3"], "--nnodes 1:3: a job cannot grow or shrink"),
        (["-n1", "--nnodes=0"], "--nnodes '0': expected a number above zero"),
        (["-n1", "--nnodes=2", "--node-rank=2", "--rdzv-endpoint=a:1"], "expected 0 to 1"),
        (["-n1", "--nnodes=2", "--node-rank=0", "--rdzv-endpoint=a"], "expected HOST:PORT"),
        (["-n1", "--nnodes=2", "--node-rank=0", "--rdzv-endpoint=a:65535"], "for torch"),
        ([*BY_HAND, "-n1", "--rdzv-id="], "--rdzv-id: expected a name"),
        ([*BY_HAND, "-n1", "--standalone"], "--standalone is for one host"),
        ([*BY_HAND, "-n1,2,3"], "-n 1,2,3 is for 3 hosts, but there are 2"),
        ([*BY_HAND, "-n1,x"], "'1,x' is neither a number above zero"),
        (BY_HAND, "say -n N, the same on all hosts"),
        ([*BY_HAND, "-n1", "--ssh=ssh"], "--ssh and --export are for --hosts"),
        ([*BY_HAND, "-n1", "--max-restarts=1", "--keep-survivors"], "exclude each other"),
        ([*BY_HAND, "-n1", "--max-restarts=1", "--grace=60"], "longer FERRODIST_JOIN_TIMEOUT"),
        ([*BY_HAND, "-n2", "--tee=4:1", "--log-dir=x"], "names a rank beyond 3"),
        (["-n1,2"], "-n 1,2 is for 2 hosts, but there are 1"),
        ([*THERE, "-n1", "--nnodes=2"], "--hosts and --nnodes exclude each other"),
        ([*THERE, "-n1", "--node-rank=0"], "--hosts and --node-rank exclude each other"),
        ([*THERE, "-n1", "--standalone"], "--hosts and --standalone exclude each other"),
        ([*THERE, "-n1", "--hostfile=x"], "--hosts and --hostfile exclude each other"),
        (["--hostfile=nowhere", "-n1"], "nowhere cannot be read"),
        (THERE, "how many ranks should 127.0.0.1, localhost have? Give -n N"),
        ([*THERE, "-n1,2"], "say A:2,B:4 for hosts that differ"),
        (["--hosts=a:2,b:3", "-n2"], "omit -n, and the job has 5 ranks"),
        (["--hosts=a,b,a", "-n1"], "host 'a' is named twice"),
        (["--hosts=a,,b", "-n1"], "'' is not a host name"),
        (["--hosts=-oProxyCommand=x", "-n1"], "'-oProxyCommand=x' is not a host name"),
        (["--hosts=me@", "-n1"], "'me@' is not a host name"),
        (["--hosts=localhost,b", "-n1"], "rank 0 would listen at localhost"),
        ([*THERE, "-n1", "--export=NOT_SET_AT_ALL"], "NOT_SET_AT_ALL is not set here"),
        ([*THERE, "-n1", "--export=A=B"], "'A=B' is not the name of a variable"),
        ([*THERE, "-n1", "--ssh='"], "is not a command"),
        ([*THERE, "-n2", "--tee=4:1", "--log-dir=x"], "names a rank beyond 3"),
        ([*THERE, "-n1", "-m", "--no-python"], "--module and --no-python exclude each other"),
    ],
)
def test_options_that_are_not_enough_or_contradict_each_other(script, options, words):
    done = CliRunner().invoke(commands, ["run", *options, script("say('started')")])
    assert done.exit_code == 2, done
    assert words in " ".join(done.output.split())


# -- by ssh ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a script in the place of ssh; what is called nowhere cannot be reached."""
    path = tmp_path / "stand-in for ssh"
    path.write_text("""#!/bin/sh
        while [ "${1#-}" != "$1" ]; do shift 2; done
        host=$1
        shift
        if [ "$host" = nowhere ]; then
            echo "ssh: connect to host nowhere port 22: No route to host" >&2
            exit 255
        fi
        echo "a greeting of the shell on $host"
        exec env -i HOME="$HOME" PATH="$PATH" setsid --wait sh -c "$*"
        """)
    path.chmod(0o755)
    monkeypatch.setenv("FERRODIST_SSH", f"{shlex.quote(str(path))} -o BatchMode=yes")
    return path


def test_hosts_are_started_by_one_command(script, tmp_path, monkeypatch):
    monkeypatch.setenv("FERRODIST_LOG_WAIT_AFTER", "7.5")
    monkeypatch.setenv("CHOSEN", 'it\'s "odd" $HOME')
    monkeypatch.setenv("NOT_CHOSEN", "x")
    path = script(f"""
        say(*variables({VARIABLES!r}), os.getcwd(), sys.executable, *sys.argv[1:])
        say(*variables("FERRODIST_LOG_WAIT_AFTER CHOSEN"), "NOT_CHOSEN" in os.environ)
        say(int(os.environ["MASTER_PORT"]) - int(os.environ["FERRODIST_ENDPOINT"].split(":")[1]))
        say(repr(sys.stdin.read()))
        """)
    options = ["--hosts", "127.0.0.1:1,localhost:2", "--export", "CHOSEN"]
    (tmp_path / "odd 'name").mkdir()
    folder = tmp_path / "odd 'name"
    done = run(*options, path, "--", "a 'b", "$HOME", "-n", cwd=folder, input="not for rank 0")
    assert done.returncode == 0, done.stderr
    places = [(0, 0, 0, 1), (1, 0, 1, 2), (2, 1, 1, 2)]
    rest = f"127.0.0.1 {folder} {sys.executable} -- a 'b $HOME -n"
    expected = [f"{r} {local} {host} 3 {size} 2 {rest}" for r, local, host, size in places]
    expected += ['7.5 it\'s "odd" $HOME False', "1", "''"] * 3
    assert lines_of(done.stdout) == sorted(expected)
    assert done.stderr == ""


def test_hosts_of_a_file_and_a_given_endpoint(script, tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# ours\n127.0.0.1 slots=2\n\nlocalhost slots=1 max_slots=4 # slow\n")
    path = script("say(*variables('RANK GROUP_RANK FERRODIST_ENDPOINT FERRODIST_JOB'))")
    options = [
        "--hostfile",
        str(hostfile),
        "--rdzv-endpoint",
        "name:1234",
        "--rdzv-id",
        "two words",
    ]
    done = run(*options, path)
    ends = "name:1234 two words-0"
    assert lines_of(done.stdout) == [f"0 0 {ends}", f"1 0 {ends}", f"2 1 {ends}"], done.stderr


def test_options_for_ranks_reach_all_hosts(tmp_path):
    (tmp_path / "some_module.py").write_text("import os; print(os.environ['RANK'])")
    options = ["--hosts", HOSTS, "-n1", "--log-dir=logs", "--redirects=0:1,1:1", "--bind=none"]
    done = run(*options, "-m", "some_module", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    logs = {file.parent.name: file.read_text() for file in tmp_path.glob("logs/*/*/*/stdout.log")}
    assert logs == {"0": "0\n", "1": "1\n"}


def test_rank_0_is_passed_on_as_it_is_and_reports_are_not(script):
    path = script("""
        if rank == 0:
            os.write(1, b"no newline \\x1e at the end")
        elif rank == 3:
            sys.exit(1)
        """)
    done = run("-n2", "--hosts", HOSTS, path)
    assert done.stdout == "no newline \x1e at the end"
    assert "ferrodist run: rank 3 (pid " in done.stderr


@pytest.mark.slow
def test_a_program_of_torch_runs_on_all_hosts(script):
    pytest.importorskip("torch.distributed", reason="it is a program of torch")
    path = script("""
        import torch.distributed as dist, torch
        dist.init_process_group("gloo")
        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        say(total.item())
        dist.destroy_process_group()
        """)
    done = run("-n1", "--hosts", HOSTS, path)
    assert lines_of(done.stdout) == ["3.0", "3.0"], done.stderr


def test_the_secret_is_in_no_command_line_and_no_environment(script):
    path = script("""
        secret, seen = read_secret(), b""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            for name in ("cmdline", "environ"):
                try:
                    with open(f"/proc/{pid}/{name}", "rb") as file:
                        seen += file.read()
                except OSError:
                    pass
        assert b"--held-by-ssh" in seen
        forms = [secret, secret.hex().encode(), repr(secret).encode()[2:-1]]
        say(len(secret), secret.hex(), any(form in seen for form in forms))
        """)
    one, other = (run("-n2", "--hosts", HOSTS, path) for _ in range(2))
    assert one.returncode == 0, one.stderr
    lines = lines_of(one.stdout)
    assert lines == [lines[0]] * 4
    nbytes, secret, is_seen = lines[0].split()
    assert (nbytes, is_seen) == ("32", "False")
    assert other.returncode == 0
    assert secret not in other.stdout


def test_a_variable_that_looks_like_a_secret_is_warned_of(script, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "x")
    done = run(
        "-n1", "--hosts", HOSTS, "--export=SOME_TOKEN", script("say(*variables('SOME_TOKEN'))")
    )
    assert lines_of(done.stdout) == ["x", "x"]
    assert (
        "SOME_TOKEN is in command lines on all hosts, where their users can read it" in done.stderr
    )


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "expected"), [("sys.exit(7)", 7), ("os.abort()", 134)])
def test_the_exit_code_is_that_of_the_host_that_failed_first(script, code, expected):
    path = script(f"""
        if host == 1:
            {code}
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(9))
        say(os.getpid())
        signal.pause()
        """)
    done = run("-n1", "--grace=0.5", "--hosts", HOSTS, path)
    assert done.returncode == expected
    assert are_gone([int(done.stdout)], 0)
    assert "ferrodist run: rank 1 (pid " in done.stderr.splitlines()[-1]
    assert done.stderr.endswith("on host localhost\n")


def test_a_host_that_failed_because_of_another_is_not_the_first(script, tmp_path):
    path = script(f"""
        from ferrodist.rendezvous.watch import StatusBoard
        fifo = {str(tmp_path / "fifo")!r}
        if host == 0:
            ends = StatusBoard(int(os.environ["FERRODIST_ENDS_FD"]))
            ends.set_final_error(rank, "RankLost: it was rank 1", is_consequence=True)
            os.open(fifo, os.O_WRONLY)
            sys.exit(3)
        os.read(os.open(fifo, os.O_RDONLY), 1)  # until the other is gone
        sys.exit(4)
        """)
    os.mkfifo(tmp_path / "fifo")
    done = run("-n1", "--keep-survivors", "--hosts", HOSTS, path)
    assert done.returncode == 4
    assert "ended with exit code 4 on host localhost" in done.stderr.splitlines()[-1]


def test_the_others_may_go_on_if_that_is_asked_for(script, tmp_path):
    path = script(f"""
        fifo = {str(tmp_path / "fifo")!r}
        if host == 1:
            os.open(fifo, os.O_WRONLY)
            sys.exit(4)
        os.read(os.open(fifo, os.O_RDONLY), 1)  # until the other is gone
        say("went on")
        """)
    os.mkfifo(tmp_path / "fifo")
    done = run("-n1", "--grace=0", "--keep-survivors", "--hosts", HOSTS, path)
    assert (done.returncode, done.stdout) == (0, "went on\n")
    assert "the other ranks ended well" in done.stderr.splitlines()[-1]


def test_all_hosts_are_started_again_when_one_has_failed(script):
    path = script("""
        if attempt < 2 and host == 1:
            sys.exit(5)
        if attempt < 2:
            signal.pause()
        say(*variables("FERRODIST_JOB TORCHELASTIC_MAX_RESTARTS"))
        """)
    options = ["--max-restarts=3", "--grace=0", "--rdzv-id=j", "--hosts", HOSTS]
    done = run("-n1", *options, path)
    assert done.returncode == 0
    assert lines_of(done.stdout) == ["j-2 3", "j-2 3"]
    assert "on host localhost; starting all again, restart 2 of 3\n" in done.stderr


def test_a_host_that_cannot_be_reached_is_named_and_the_others_are_ended(script):
    path = script("""
        say(os.getpid())
        signal.pause()
        """)
    options = ["--max-restarts=2", "--hosts", f"{HOSTS},nowhere", "--rdzv-endpoint=a:1"]
    done = run("-n1", *options, path)
    assert done.returncode == 255
    words = "ssh: connect to host nowhere port 22: No route to host\n"
    assert done.stderr.count(f"host nowhere cannot be reached by ssh: {words}") == 1
    assert "BatchMode=yes nowhere true' must work from here, without a password" in done.stderr
    assert are_gone([int(line) for line in lines_of(done.stdout)], 0)


def test_a_host_without_what_is_needed_is_named_with_what_it_said(tmp_path):
    done = run("-n1", "--hosts=b", "nowhere.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "host b did not start 'ferrodist run' (exit code 2): " in done.stderr
    assert "there is no file 'nowhere.py' here" in done.stderr
    assert "must exist there too, at the same paths" in done.stderr


def test_an_ssh_that_is_not_there_is_named(script):
    done = run("-n1", "--ssh=no-such-program", "--hosts", HOSTS, script(""))
    assert done.returncode == 1
    assert "cannot start 'no-such-program': [Errno 2] No such file" in done.stderr


# -- signals and the end --------------------------------------------------------------------------

WAIT = """
    def heard(number, frame):
        say("heard", number)
        sys.exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, heard)
    if host == 0:
        import subprocess
        say(subprocess.Popen(["sleep", "1000"], process_group=None).pid)
    say("pid", os.getpid())
    while True:
        signal.pause()
    """


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_ranks_of_all_hosts_and_ends_them(script, number):
    with start("-n1", "--hosts", HOSTS, script(WAIT)) as process:
        pids = pids_of(process, 3)
        process.send_signal(number)
        assert lines_of(process.stdout.read()) == [f"heard {int(number)}"] * 2
        assert process.wait(LIMIT) == 128 + number
        assert are_gone(pids, 0)


def test_a_signal_that_means_something_to_the_ranks_does_not_end_them(script):
    path = script("""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        say("pid", os.getpid())
        signal.sigwait({signal.SIGUSR1})
        say("heard")
        """)
    with start("-n1", "--hosts", HOSTS, path) as process:
        pids_of(process, 2)
        process.send_signal(signal.SIGUSR1)
        assert lines_of(process.stdout.read()) == ["heard"] * 2
        assert process.wait(LIMIT) == 0


def test_a_second_signal_ends_all_hosts_at_once(script):
    path = script("""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: say("heard"))
        say("pid", os.getpid())
        while True:
            signal.pause()
        """)
    with start("-n1", "--grace=1000", "--hosts", HOSTS, path) as process:
        pids = pids_of(process, 2)
        process.send_signal(signal.SIGINT)
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 130
        assert are_gone(pids, 0)


def test_an_ssh_that_does_not_end_is_ended(script, tmp_path):
    stuck, fifo = tmp_path / "stuck", tmp_path / "fifo"
    stuck.write_text(f"#!/bin/sh\necho $$ > {fifo}\nexec sleep 1000\n")
    stuck.chmod(0o755)
    os.mkfifo(fifo)
    with start("-n1", f"--ssh={stuck}", "--grace=1000", "--hosts=a", script("")) as process:
        pid = int(fifo.read_text())
        for _ in range(2):
            process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 130
        assert are_gone([pid], 0)


def test_no_rank_outlives_a_command_that_is_killed(script):
    with start("-n1", "--hosts", HOSTS, script(WAIT)) as process:
        pids = pids_of(process, 3)
        process.kill()
        assert are_gone(pids, LIMIT)


def test_a_reader_that_goes_away_ends_all_hosts(script):
    path = script("""
        say("pid", os.getpid())
        while True:
            say("more")
        """)
    with start("-n1", "--hosts", HOSTS, path) as process:
        pids = pids_of(process, 1)
        process.stdout.close()
        assert process.wait(LIMIT) == 128 + signal.SIGPIPE
        assert are_gone(pids, 0)


# -- the real ssh ---------------------------------------------------------------------------------


@pytest.fixture
def real_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start an sshd that lets this user in by a key, for this test alone."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("there is no sshd here, or no ssh")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # an sshd of root insists on it
    for name in ("host", "user"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(make, check=True, stdin=subprocess.DEVNULL)
    port = free_port()
    config = {
        "Port": port,
        "ListenAddress": "127.0.0.1",
        "HostKey": tmp_path / "host",
        "AuthorizedKeysFile": tmp_path / "user.pub",
        "StrictModes": "no",
        "UsePAM": "no",
        "PidFile": "none",
    }
    (tmp_path / "config").write_text("".join(f"{key} {value}\n" for key, value in config.items()))
    known = (tmp_path / "host.pub").read_text().split()[:2]
    (tmp_path / "known").write_text(f"* {' '.join(known)}\n")
    options = f"-F none -p {port} -l {getpass.getuser()} -i {tmp_path}/user -o BatchMode=yes"
    monkeypatch.setenv("FERRODIST_SSH", f"ssh {options} -o UserKnownHostsFile={tmp_path}/known")
    command = [SSHD, "-D", "-e", "-f", str(tmp_path / "config")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as sshd:
        try:
            if "Server listening" not in (said := sshd.stderr.readline()):
                pytest.skip(f"sshd does not start: {said}")
            yield
        finally:
            sshd.terminate()


@pytest.mark.usefixtures("real_ssh")
def test_hosts_are_reached_by_the_real_ssh(script):
    path = script("""
        say(*variables("RANK GROUP_RANK"), len(read_secret()), *sys.argv[1:])
        sys.exit(6 if rank == 3 else 0)
        """)
    done = run("-n2", "--hosts", HOSTS, path, "a 'b", "$HOME")
    rest = "32 a 'b $HOME"
    assert lines_of(done.stdout) == [f"{rank} {rank // 2} {rest}" for rank in range(4)], done.stderr
    assert done.returncode == 6


@pytest.mark.slow
@pytest.mark.usefixtures("real_ssh")
@pytest.mark.parametrize("how", ["Ctrl-C", "the command is killed", "the connection is lost"])
def test_no_rank_outlives_the_real_ssh(script, how):
    with start("-n1", "--grace=1", "--hosts", HOSTS, script(WAIT)) as process:
        pids = pids_of(process, 3)
        if how == "Ctrl-C":
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT) == 130
        elif how == "the command is killed":
            process.kill()
        else:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            os.kill(int(children.split()[0]), signal.SIGKILL)
            assert process.wait(LIMIT) == 137
            assert (
                "the connection to host 127.0.0.1 ended with exit code 137" in process.stderr.read()
            )
        assert are_gone(pids, LIMIT)


@pytest.mark.usefixtures("real_ssh")
def test_the_real_ssh_says_why_it_cannot_reach_a_host(script, monkeypatch):
    monkeypatch.setenv("FERRODIST_SSH", f"ssh -F none -p {free_port()} -o BatchMode=yes")
    done = run("-n1", "--hosts", "127.0.0.1", script("say('x')"))
    assert done.returncode == 255
    assert "host 127.0.0.1 cannot be reached by ssh: ssh: connect to host 127.0.0.1" in done.stderr


# -- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [SshHost("a")]),
        ("a, me@b:2", [SshHost("a"), SshHost("me@b", 2)]),
        ("::1,[fe80::1]:3,[::2]", [SshHost("::1"), SshHost("fe80::1", 3), SshHost("::2")]),
    ],
)
def test_hosts_are_read_as_they_are_written(text, hosts):
    assert parse_hosts(text) == hosts


def test_the_user_of_a_host_is_ssh_business():
    assert SshHost("me@b").address == "b"


@pytest.mark.parametrize("line", ["a slots=x", "a slots=0", "a:0", "a cores=2", "a b"])
def test_a_line_of_a_hostfile_that_is_not_understood_is_named(line, tmp_path):
    path = tmp_path / "hosts"
    path.write_text(f"ok\n{line}\n")
    with pytest.raises(InvalidArgument, match=f"^{path}:2: "):
        read_hostfile(path)


def test_a_hostfile_without_hosts_is_refused(tmp_path):
    (tmp_path / "hosts").write_text("# none\n")
    with pytest.raises(InvalidArgument, match="names no host"):
        read_hostfile(tmp_path / "hosts")


def test_hosts_without_slots_get_what_n_says():
    assert sizes_of([SshHost("a"), SshHost("b", 3)], 2) == (2, 3)


REPORTS = [
    Started(),
    RankFailed(3, 137, True, "rank 3 \n was killed"),
    RankFailed(0, 1, False, "x" * 5000),
]


@pytest.mark.parametrize("bite", [1, 2, 7, 1000, 100_000])
def test_reports_are_taken_out_wherever_they_stand(bite):
    words = [b"", b"in mid-", b"line \x1e\x1eferrodist \x1e", b"\x1eferrodist job {}", b"\n\x1e"]
    marked = [to_bytes("job", report) for report in REPORTS]
    data = words[0] + marked[0] + words[1] + marked[1] + words[2] + marked[2] + words[4] + words[3]
    reader, output, reports = ReportReader("job"), b"", []
    for at in range(0, len(data), bite):
        more, found = reader.split(data[at : at + bite])
        output, reports = output + more, reports + found
    assert output + reader.end() == b"".join([*words[:3], words[4], words[3]])
    assert reports == [*REPORTS[:2], REPORTS[2]._replace(words="x" * 500)]


def test_what_is_no_report_stays_where_it_is():
    reader = ReportReader("job")
    for text in (
        b"\x1eferrodist job nonsense\n",
        b'\x1eferrodist job {"a": 1}\n',
        b"\x1eferrodist j",
    ):
        assert reader.split(text)[0] + reader.end() == text


@pytest.mark.parametrize("text", ["3", "0:1,2:3"])
def test_a_choice_of_streams_is_passed_on_as_it_was_given(text):
    assert parse_choice(text).to_text() == text
