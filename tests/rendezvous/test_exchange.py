"""Ranks that torchrun or mpiexec has started on several hosts hear of each other through it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ferrodist import BackendUnavailable, InvalidArgument, RendezvousError
from ferrodist.deadline import Deadline
from ferrodist.rendezvous import Job, launchers
from ferrodist.rendezvous import exchange as exchanges
from ferrodist.rendezvous.exchange import MpiExchange, StoreExchange, connect_to_agent
from ferrodist.rendezvous.job import Bootstrap, Endpoint
from test_launchers import ENVIRONMENT, MPICH, OPEN_MPI, TORCHRUN

pytestmark = pytest.mark.timeout(90)

# Every process takes itself for alone on its host.
SCRIPT = """
import os
from ferrodist.config import Config
from ferrodist.rendezvous.mesh import join_mesh
from ferrodist.rendezvous.find_job import find_job

job = find_job(dict(os.environ) | {"MPI_LOCALNRANKS": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
neighbours = join_mesh(job, Config())
words = ["rank", job.rank, job.bootstrap.name, *(one.pid for one in neighbours)]
os.write(1, " ".join(map(str, words)).encode() + b"\\n")  # in one piece
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_bytes(os.urandom(32))
    return ENVIRONMENT | {"FERRODIST_SECRET_FILE": str(path)}


def check_lines(output: str, size: int, through: str) -> None:
    """Check that every rank has said that it has met all, and all name the same processes."""
    lines = sorted(line.split() for line in output.splitlines() if line.startswith("rank "))
    assert [line[1:3] for line in lines] == [[str(rank), through] for rank in range(size)]
    pids = {tuple(line[3:]) for line in lines}
    assert len(pids) == 1
    assert len(set(pids.pop())) == size


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- torchrun ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_of_two_torchruns_meet_through_its_store(environment):
    pytest.importorskip("torch", reason="torchrun comes with torch")
    command = [TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--no-python"]
    command += [sys.executable, "-c", SCRIPT]
    runs = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(2)
    ]
    try:
        outputs = [run.communicate(timeout=80) for run in runs]
    finally:
        for run in runs:
            run.kill()
            run.wait()
    assert [run.returncode for run in runs] == [0, 0], outputs
    check_lines("".join(out for out, _ in outputs), 2, "TORCH_STORE")


@pytest.fixture
def agent() -> Iterator[Endpoint]:
    """Keep the store that torchrun's agent keeps."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield Endpoint("127.0.0.1", store.port)
    del store


def jobs_of(world_size: int, endpoint: Endpoint | None, through: Bootstrap) -> list[Job]:
    facts = {"hosts": "a test", "endpoint": endpoint, "bootstrap": through}
    return [
        Job("job", rank, world_size, bytes(32), launcher=launchers.OPEN_MPI, **facts)
        for rank in range(world_size)
    ]


def gather_all(make: Callable[[Job], Any], jobs: list[Job]) -> list[Any]:
    def gather(job: Job) -> Any:
        with make(job) as exchange:
            return exchange.gather(bytes([0, 255, job.rank]))

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(gather, jobs))


def through_agent(job: Job, agent: Endpoint, seconds: float) -> StoreExchange:
    deadline = Deadline(seconds)
    return StoreExchange(job, connect_to_agent(job, agent, deadline), deadline)


def test_all_get_the_values_of_all_through_torchs_store(agent):
    jobs = jobs_of(4, agent, Bootstrap.TORCH_STORE)
    results = gather_all(lambda job: through_agent(job, agent, 20), jobs)
    assert results == [[bytes([0, 255, rank]) for rank in range(4)]] * 4


@pytest.mark.slow
def test_ranks_that_do_not_come_to_torchs_store_are_named(agent):
    jobs = jobs_of(4, agent, Bootstrap.TORCH_STORE)
    with through_agent(jobs[2], agent, 1.0) as exchange:
        with pytest.raises(RendezvousError, match="rank 0, rank 1, rank 3 of 4 did not") as caught:
            exchange.gather(b"2")
    assert caught.value.missing == [0, 1, 3]
    with through_agent(jobs[0], agent, 1.0) as exchange:
        with pytest.raises(RendezvousError, match="rank 1, rank 3 of 4 did not join") as caught:
            exchange.gather(b"0")
    assert caught.value.missing == [1, 3]


def test_torchs_store_has_our_verbs(agent):
    store = connect_to_agent(jobs_of(2, agent, Bootstrap.TORCH_STORE)[0], agent, Deadline(10))
    store.set("key", b"\0\xff")
    store.set("key", b"\0\xff")
    with pytest.raises(InvalidArgument, match="key 'key' of torch's store has another value"):
        store.set("key", b"other")
    assert store.get("key", 10) == b"\0\xff"
    with pytest.raises(RendezvousError, match="nobody has set 'absent'"):
        store.get("absent", 0.05)


@pytest.mark.slow
def test_a_store_of_torchrun_that_is_not_there_is_told_with_its_address():
    pytest.importorskip("torch", reason="the store is torch's")
    endpoint = Endpoint("127.0.0.1", free_port())
    job = jobs_of(2, endpoint, Bootstrap.TORCH_STORE)[1]
    with pytest.raises(RendezvousError, match=f"torchrun's agent at 127.0.0.1:{endpoint.port}"):
        connect_to_agent(job, endpoint, Deadline(1.0))


def test_without_torch_it_is_said_what_to_install(agent, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    job = jobs_of(2, agent, Bootstrap.TORCH_STORE)[1]
    with pytest.raises(BackendUnavailable, match=r"pip install 'ferrodist\[torch\]'"):
        connect_to_agent(job, agent, Deadline(1.0))


# -- MPI -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mpiexec", "options"),
    [(MPICH, []), (OPEN_MPI, ["--oversubscribe", "--bind-to", "none"])],
    ids=["MPICH", "Open MPI"],
)
@pytest.mark.parametrize("through", ["MPI", "SOCKETS"])
def test_ranks_of_mpiexec_meet_through_mpi_or_at_an_address(mpiexec, options, through, environment):
    if not mpiexec.exists():
        pytest.skip(f"{mpiexec} is not there; 'make peers' makes it")
    home = mpiexec.parent.parent
    if through == "MPI":
        (packages,) = home.glob("lib/python*/site-packages")
        if packages.parent.name != "python{}.{}".format(*sys.version_info):
            pytest.skip(f"the mpi4py of {home} is for {packages.parent.name}")
        environment |= {"PYTHONPATH": str(packages), "LD_LIBRARY_PATH": str(home / "lib")}
    else:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [mpiexec, *options, "-n", "3", sys.executable, "-c", SCRIPT]
    run = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=80,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    check_lines(run.stdout, 3, through)


class World:
    """A world of MPI in which one rank has told something, and the others have or have not."""

    def __init__(self, rank: int, size: int, *, has_all: bool = True) -> None:
        self.rank, self.size, self.has_all = rank, size, has_all
        self.BYTE, self.library = "byte", "MPICH Version:      5.0.2\nMPICH Release date: ...\0"
        self.COMM_WORLD = self

    def Get_rank(self) -> int:  # noqa: N802 -- MPI's names
        return self.rank

    def Get_size(self) -> int:  # noqa: N802 -- MPI's names
        return self.size

    def Get_library_version(self) -> str:  # noqa: N802 -- MPI's names
        return self.library

    def Iallgather(self, own: Any, everything: Any) -> Any:  # noqa: N802 -- MPI's names
        everything[0][:] = bytes(own[0]) * self.size
        return types.SimpleNamespace(Test=lambda: self.has_all)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[World], None]:
    return lambda world: monkeypatch.setattr(exchanges, "_import_mpi", lambda job: world)


def test_values_of_any_length_pass_through_mpi(pretend):
    pretend(World(1, 3))
    with MpiExchange(jobs_of(3, None, Bootstrap.MPI)[1], Deadline(10)) as exchange:
        for value in (b"", b"\0", bytes(range(256)) * 4):
            assert exchange.gather(value) == [value] * 3


def test_a_world_of_mpi_that_is_not_the_launchers_is_refused_naming_both(pretend):
    pretend(World(0, 1))
    with pytest.raises(RendezvousError) as caught:
        MpiExchange(jobs_of(3, None, Bootstrap.MPI)[2], Deadline(10))
    assert str(caught.value) == (
        "MPI says rank 0 of 1, Open MPI says OMPI_COMM_WORLD_RANK=2, OMPI_COMM_WORLD_SIZE=3; start "
        "the ranks with the mpiexec of MPICH 5.0.2, which mpi4py uses here, or install mpi4py for "
        "the other MPI"
    )
    assert (caught.value.got, caught.value.expected) == ([0, 1], [2, 3])


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_NODES": "1"}
OPEN_MPI_5 = "Open MPI v5.0.11, package: Open MPI"


@pytest.mark.parametrize(
    ("library", "kind"), [("MPICH Version: 5.0.2", "pmi2"), (OPEN_MPI_5, "pmix")]
)
def test_a_step_whose_tasks_are_worlds_of_one_is_told_how_srun_starts_its_mpi(
    monkeypatch, library, kind
):
    world = World(0, 1)
    world.library = library
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "3")
    found = []
    by_pmi = {"PMI_RANK": "2", "PMI_SIZE": "3", "PMI_JOBID": "7.0"}
    step = STEP | {"SLURM_STEP_NUM_TASKS": "3"}
    for job in (launchers.read_slurm(step), launchers.read_pmi(step | by_pmi), None):
        with pytest.raises(RendezvousError) as caught:
            exchanges.check_mpi_world(job, world)
        found.append(str(caught.value))
    assert found[0].startswith(
        "MPI says rank 0 of 1, SLURM says SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=3; mpi4py uses "
    )
    assert "MPI (PMI) says PMI_RANK=2, PMI_SIZE=3; mpi4py uses " in found[1]
    assert "SLURM says SLURM_STEP_NUM_TASKS=3; mpi4py uses " in found[2]  # half of it is not set
    assert all(f"start the step with 'srun --mpi={kind}'" in text for text in found)


@pytest.mark.parametrize("tasks", ["", "1", "nonsense"])
def test_a_world_of_one_that_no_launcher_contradicts_is_right(monkeypatch, tasks):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", tasks)
    exchanges.check_mpi_world(None, World(0, 1))
    exchanges.check_mpi_world(None, World(2, 3))


def test_ranks_that_do_not_come_to_mpi_are_waited_for_no_longer_than_asked(pretend):
    pretend(World(1, 3, has_all=False))
    with MpiExchange(jobs_of(3, None, Bootstrap.MPI)[1], Deadline(0.05)) as exchange:
        with pytest.raises(RendezvousError, match="not all 3 ranks of job 'job' called"):
            exchange.gather(b"1")


def test_without_mpi4py_it_is_said_what_to_install_or_to_set(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(BackendUnavailable) as caught:
        MpiExchange(jobs_of(3, None, Bootstrap.MPI)[1], Deadline(10))
    assert "pip install 'ferrodist[mpi]', or set MASTER_ADDR and MASTER_PORT" in str(caught.value)
