"""Every launcher's variables are read as it means them, and what is wrong with them is said."""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import hashlib
import logging
import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ferrodist import (
    AuthenticationError,
    DistributedError,
    InvalidArgument,
    InvalidWorldSize,
    RendezvousError,
)
from ferrodist.rendezvous import Job, meet
from ferrodist.rendezvous.find_job import (
    FERRODIST_RUN,
    RUN_VARIABLES,
    find_job,
    mark_outer_jobs,
    read_ferrodist_run,
    run_variables,
    try_run_job,
)
from ferrodist.rendezvous.interfaces import list_interfaces
from ferrodist.rendezvous.job import Bootstrap, Endpoint, try_endpoint
from ferrodist.rendezvous.launchers import (
    PLAIN as PLAIN_LAUNCHER,
)
from ferrodist.rendezvous.launchers import (
    PMI,
    Stale,
    expand_hosts,
    read_open_mpi,
    read_plain,
    read_pmi,
    read_pmix,
    read_slurm,
    read_torchrun,
)
from ferrodist.rendezvous.launchers import (
    TORCHRUN as TORCHRUN_LAUNCHER,
)
from ferrodist.rendezvous.watch import StatusBoard


@pytest.fixture(autouse=True)
def no_munge(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found here does not depend on whether the machine has MUNGE; see test_munge.py."""
    monkeypatch.setattr("ferrodist.rendezvous.find_job.try_munge", lambda path: None)


# What the launchers of today set, as seen in a rank of each; what says nothing of a place is left
# out, except for a few words that look as if it did.
TORCHRUN = {
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "38717",
    "RANK": "1",
    "ROLE_RANK": "1",
    "ROLE_WORLD_SIZE": "2",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "1027417c-0fc5",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "WORLD_SIZE": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-22607@1",
    "PMIX_RANK": "1",
    "PMIX_SERVER_URI2": "prterun-vm-22607@0.0;tcp4://127.0.0.1:59879",
    "PMIX_SERVER_URI41": "prterun-vm-22607@0.0;tcp4://127.0.0.1:59879",
}
INTEL_MPI = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_PORT": "vm:34567",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
PLAIN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
PLAIN_LOCAL = PLAIN | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node-1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
SLURM_HOSTS = SLURM | {
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "rack[07-08]n[1,3],gpu5",
    "SLURM_STEP_NUM_NODES": "5",
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),2(x3)",
}
SLURM_PMIX = SLURM | {"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.77.0"}
BATCH = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


HYDRA = """
import socket, sys
mine, ranks = socket.socketpair()
mine.send(b"only MPI may read this")
with socket.socket(fileno=int(sys.argv[1])) as channel:
    socket.send_fds(channel, [b"x"], [ranks.fileno()])
ranks.close()
sys.exit(mine.recv(100) != b"and it still can write")
"""


@pytest.fixture
def mpich() -> Iterator[dict[str, str]]:
    """Make this process look like rank 1 of 2 of MPICH's mpiexec, which a child of it plays."""
    channel, other = socket.socketpair()
    with channel, other:
        command = [sys.executable, "-c", HYDRA, str(other.fileno())]
        hydra = subprocess.Popen(command, pass_fds=[other.fileno()])
        _, (file,), _, _ = socket.recv_fds(channel, 1, 1)
    with hydra, socket.socket(fileno=file) as ours:
        yield {
            "MPI_LOCALNRANKS": "2",
            "MPI_LOCALRANKID": "1",
            "PMI_FD": str(file),
            "PMI_HOSTNAME": "vm",
            "PMI_RANK": "1",
            "PMI_SIZE": "2",
            "PID": str(hydra.pid),  # for the tests
        }
        assert ours.recv(100) == b"only MPI may read this"
        ours.send(b"and it still can write")
    assert hydra.returncode == 0


@pytest.fixture
def launched() -> Iterator[dict[str, str]]:
    """Make this process look like rank 2 of 4 of ``ferrodist run``, torch's variables included."""
    ends = StatusBoard.create(4)
    read, write = os.pipe()
    os.write(write, secrets.token_bytes(32))
    os.close(write)
    ours = {"RANK": "2", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "run-1-ab"}
    yield TORCHRUN | ours | run_variables(run_job("run-1-ab", 2, 2, 4), read, ends.file)
    ends.close()


def run_job(
    name: str, rank: int, local_rank: int, local_size: int, endpoint: Endpoint | None = None
) -> Job:
    facts = {"local_rank": local_rank, "local_world_size": local_size, "endpoint": endpoint}
    return Job(name, rank, 4, bytes(32), **facts)


def close_secret(environ: dict[str, str]) -> None:
    os.close(int(environ["FERRODIST_SECRET_FD"]))


@pytest.fixture
def find_and_log(caplog: pytest.LogCaptureFixture) -> Any:
    """Give what finds a job and returns it with the one line of the log."""

    def find_and_log(environ: dict[str, str]) -> tuple[Job, str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "ferrodist"):
            job = find_job(environ)
        (record,) = caplog.records
        is_doubtful = job.world_size == 1 and " of " in record.message.partition(";")[2]
        assert record.name == "ferrodist"
        assert record.levelname == ("WARNING" if is_doubtful else "INFO")
        assert job.secret.hex() not in record.message
        return job, record.message

    return find_and_log


# -- one source ----------------------------------------------------------------------------------


def test_nothing_set_is_a_world_of_one(find_and_log):
    job, line = find_and_log({"MASTER_ADDR": "node7", "MASTER_PORT": "1", "LOCAL_RANK": "3"})
    assert (job.rank, job.world_size) == (0, 1)
    assert line == "no launcher has started this process: a world of one"


@pytest.mark.parametrize(
    ("read", "environ", "job"),
    [
        (read_torchrun, TORCHRUN, "torchrun-1027417c-0fc5-0-localhost:38717"),
        (read_open_mpi, OPEN_MPI, "openmpi-prterun-vm-22607@1"),
        (read_pmi, INTEL_MPI, "pmi-vm:34567"),
        (read_plain, PLAIN_LOCAL, "plain-29500"),
        (read_slurm, SLURM, "slurm-77.0-0"),
        (read_pmix, SLURM_PMIX, "pmix-slurm.pmix.77.0"),
    ],
)
def test_a_source_says_place_and_job(read, environ, job):
    found = read(environ)
    assert (found.name, found.rank, found.world_size) == (job, 1, 2)
    assert (found.local_rank, found.local_world_size) == (1, 2)
    assert found.hosts == ""
    assert read({}) is None


def test_a_source_that_says_nothing_of_the_host_is_taken_at_its_word():
    assert read_plain(PLAIN).hosts is None
    assert read_plain(PLAIN).endpoint == ("127.0.0.1", 29500)
    assert (read_plain(PLAIN).local_rank, read_plain(PLAIN).local_world_size) == (None, None)
    assert read_pmi(without(INTEL_MPI, "MPI_LOCALNRANKS")).hosts == ""


def test_ferrodist_run_gives_the_secret_and_the_ends(launched):
    os.set_inheritable(int(launched["FERRODIST_ENDS_FD"]), True)
    found = read_ferrodist_run(launched)
    assert (found.name, found.rank, found.world_size) == ("run-1-ab", 2, 4)
    assert len(found.secret) == 32
    assert str(found.status_board.file) == launched["FERRODIST_ENDS_FD"]
    assert not os.get_inheritable(found.status_board.file)
    assert "secret" not in repr(found)
    assert isinstance(read_ferrodist_run(launched), Stale)  # it is taken once


def test_hydra_names_a_job_by_the_process_behind_the_socket(mpich):
    found = read_pmi(mpich)
    start_time = Path(f"/proc/{mpich['PID']}/stat").read_text().rpartition(") ")[2].split()[19]
    assert found.name == f"pmi-{mpich['PID']}-{start_time}"


def test_looking_at_the_socket_of_hydra_leaves_no_file_open(mpich):
    gc.collect()  # what earlier tests have left
    before = os.listdir("/proc/self/fd")
    read_pmi(mpich)
    with open(os.devnull) as other:
        assert isinstance(read_pmi(mpich | {"PMI_FD": str(other.fileno())}), Stale)
    assert os.listdir("/proc/self/fd") == before


def test_looking_at_the_socket_of_hydra_never_changes_it(mpich):
    file = int(mpich["PMI_FD"])
    before = fcntl.fcntl(file, fcntl.F_GETFL), os.get_inheritable(file)
    socket.setdefaulttimeout(10)  # which every new socket object gives to its file
    try:
        assert isinstance(read_pmi(mpich), Job)
    finally:
        socket.setdefaulttimeout(None)
    assert (fcntl.fcntl(file, fcntl.F_GETFL), os.get_inheritable(file)) == before


def test_a_socket_of_this_process_with_the_number_of_hydras_is_not_hydras(mpich):
    one, other = socket.socketpair()  # as event loops have them
    with one, other:
        assert isinstance(read_pmi(mpich | {"PMI_FD": str(one.fileno())}), Stale)


@pytest.mark.parametrize(
    ("change", "job"),
    [
        ({"PMI_JOBID": "77.0"}, "pmi-77.0-vm:34567"),
        ({"PMI_JOBID": "77.0", "PMI_PORT": ""}, "pmi-77.0"),
    ],
)
def test_pmi_without_a_socket_names_a_job_by_what_there_is(change, job):
    assert read_pmi(INTEL_MPI | change).name == job


def test_pmi_with_one_rank_needs_no_name():
    found = read_pmi({"PMI_RANK": "0", "PMI_SIZE": "1"})
    assert (found.rank, found.world_size) == (0, 1)


def test_a_socket_with_nobody_to_be_seen_behind_it_leaves_the_other_names():
    with socket.socket() as connection:  # TCP: the kernel names no process
        environ = INTEL_MPI | {"PMI_FD": str(connection.fileno())}
        assert read_pmi(environ).name == "pmi-vm:34567"


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({"OMPI_MCA_ess_base_jobid": "4242"}, "openmpi-4242"),
        ({}, f"openmpi-{OPEN_MPI['PMIX_SERVER_URI2']}"),
    ],
)
def test_open_mpi_without_a_namespace_names_a_job_by_what_there_is(variables, job):
    environ = without(OPEN_MPI, "PMIX_NAMESPACE") | variables
    assert read_open_mpi(environ).name == job


@pytest.mark.parametrize(
    "change",
    [
        {"TORCHELASTIC_RUN_ID": "other"},
        {"TORCHELASTIC_RESTART_COUNT": "1"},
        {"MASTER_PORT": "38718"},
    ],
)
def test_jobs_of_torchrun_differ_in_any_of(change):
    assert read_torchrun(TORCHRUN | change).name != read_torchrun(TORCHRUN).name


@pytest.mark.parametrize(
    "change", [{"SLURM_JOB_ID": "78"}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}]
)
def test_steps_of_slurm_differ_in_any_of(change):
    assert read_slurm(SLURM | change).name != read_slurm(SLURM).name


def test_hand_set_ranks_may_write_the_address_as_they_like(find_and_log):
    for host in ("localhost", "::1", "[::1]"):
        assert find_and_log(PLAIN | {"MASTER_ADDR": host})[0].name == "plain-29500"


def test_a_job_without_a_secret_gets_one_that_all_its_ranks_can_make(find_and_log):
    one, _ = find_and_log(PLAIN)
    other, _ = find_and_log(PLAIN | {"RANK": "0"})
    third, _ = find_and_log(PLAIN | {"MASTER_PORT": "29501"})
    assert one.secret == other.secret
    assert one.secret != third.secret
    assert len(one.secret) == 32


EVERYTHING = [
    (environ, name)
    for environ in (
        *(TORCHRUN, OPEN_MPI, SLURM_PMIX),
        INTEL_MPI | {"PMI_JOBID": "77.0", "RANK": "1", "WORLD_SIZE": "2"},
        INTEL_MPI | {"PMI_FD": "987654"},
        PLAIN | {"LOCAL_WORLD_SIZE": "2"},
        SLURM | {"SLURM_RESTART_COUNT": "0"},
    )
    for name in environ
]


@pytest.mark.parametrize(("environ", "name"), EVERYTHING)
def test_an_empty_variable_is_as_good_as_none(environ, name):
    def outcome(variables: dict[str, str]) -> object:
        try:
            return find_job(variables)
        except DistributedError as error:
            return str(error)

    empty, unset = outcome(environ | {name: ""}), outcome(without(environ, name))
    if isinstance(unset, Job) and unset.name.startswith("alone-"):
        assert (empty.name, empty.world_size) == (unset.name, 1)  # its secret is its own
    else:
        assert empty == unset


@pytest.mark.parametrize(
    "environ", [BATCH, BATCH | {"SLURM_STEP_NUM_TASKS": "1"}, SLURM | {"SLURM_STEP_NUM_TASKS": "x"}]
)
def test_a_batch_script_of_slurm_is_no_source(environ, find_and_log):
    assert find_and_log(environ)[0].world_size == 1


# -- several sources -----------------------------------------------------------------------------


def test_the_line_of_the_log_names_source_rank_size_and_job(find_and_log):
    _, line = find_and_log(TORCHRUN)
    assert line == (
        "rank 1 of 2 in job 'torchrun-1027417c-0fc5-0-localhost:38717', from torchrun (RANK=1, "
        "WORLD_SIZE=2)"
    )


OTHER_SLURM = SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3"}


@pytest.mark.parametrize(
    ("environ", "winner", "others"),
    [
        (SLURM | PLAIN, "variables set by hand", ["SLURM: the same"]),
        (OTHER_SLURM | PLAIN, "variables set by hand", ["SLURM: rank 0 of 3"]),
        (OTHER_SLURM | INTEL_MPI, "MPI (PMI)", ["SLURM: rank 0 of 3"]),
        (OTHER_SLURM | OPEN_MPI, "Open MPI", ["SLURM: rank 0 of 3"]),
        (SLURM_PMIX, "PMIx", ["SLURM: the same"]),
        (OTHER_SLURM | TORCHRUN, "torchrun", ["SLURM: rank 0 of 3"]),
        (INTEL_MPI | TORCHRUN, "torchrun", ["MPI (PMI): the same"]),
        (INTEL_MPI | {"PMI_RANK": "0"} | TORCHRUN, "torchrun", ["MPI (PMI): rank 0 of 2"]),
        (PLAIN | OPEN_MPI | INTEL_MPI, "Open MPI", ["MPI (PMI): the same"]),
        (INTEL_MPI | PLAIN, "MPI (PMI)", []),
        (INTEL_MPI | {"RANK": "1"}, "MPI (PMI)", []),
        (INTEL_MPI | {"WORLD_SIZE": "2"}, "MPI (PMI)", []),
    ],
)
def test_the_innermost_source_wins_and_the_log_says_what_the_others_said(
    environ, winner, others, find_and_log
):
    job, line = find_and_log(environ)
    assert (job.launcher.name, job.rank, job.world_size) == (winner, 1, 2)
    _, *said = line.split("; ")
    assert said == others


def test_ferrodist_run_wins_over_all_and_does_not_count_torchs_variables(launched, find_and_log):
    outer = SLURM | INTEL_MPI
    job, line = find_and_log(outer | launched | mark_outer_jobs(outer))
    assert (job.launcher.name, job.rank, job.world_size) == ("ferrodist run", 2, 4)
    assert line == (
        "rank 2 of 4 in job 'run-1-ab', from ferrodist run (FERRODIST_RANK=2, "
        "FERRODIST_WORLD_SIZE=4); MPI (PMI): rank 1 of 2; SLURM: rank 1 of 2"
    )


def test_an_outer_source_that_is_half_set_is_named_and_does_no_harm(find_and_log):
    job, line = find_and_log(without(SLURM, "SLURM_STEP_ID") | TORCHRUN)
    assert job.launcher is TORCHRUN_LAUNCHER
    assert "; not used: SLURM_STEP_ID not set, but SLURM_PROCID=1" in line


# -- launchers within ferrodist run, and around it -----------------------------------------------

INNER = pytest.mark.parametrize(
    "inner", [TORCHRUN, OPEN_MPI, INTEL_MPI], ids=["torchrun", "Open MPI", "PMI"]
)


@INNER
def test_a_launcher_that_passes_the_secret_on_wins_all_the_same(launched, inner, find_and_log):
    job, line = find_and_log(launched | inner)
    assert (job.rank, job.world_size) == (1, 2)
    assert "; the variables of ferrodist run are another process's" in line
    assert len(os.read(int(launched["FERRODIST_SECRET_FD"]), 100)) == 32  # nobody has taken it
    close_secret(launched)


def test_the_same_launcher_around_ferrodist_run_and_within_it_is_told_apart(
    launched, mpich, find_and_log
):
    around = without(mpich, "PMI_FD") | {"PMI_JOBID": "another mpiexec"}
    job, _ = find_and_log(launched | mpich | mark_outer_jobs(around))
    assert job.name.startswith(f"pmi-{mpich['PID']}-")
    job, _ = find_and_log(launched | mpich | mark_outer_jobs(mpich))
    assert job.name == "run-1-ab"


def test_another_launcher_within_ferrodist_run_wins_over_those_around_it(launched, find_and_log):
    environ = launched | OPEN_MPI | mark_outer_jobs(OPEN_MPI)
    job, _ = find_and_log(environ | INTEL_MPI)
    assert job.launcher is PMI
    close_secret(launched)


def test_what_a_rank_starts_is_no_rank_of_a_job_around_ferrodist_run_either(launched):
    close_secret(launched)
    with pytest.raises(RendezvousError, match="FERRODIST_RANK=2 of job 'run-1-ab' belongs to anot"):
        find_job(OPEN_MPI | launched | mark_outer_jobs(OPEN_MPI))


@pytest.mark.parametrize(
    "outer",
    [without(OPEN_MPI, "OMPI_COMM_WORLD_RANK"), {"PMI_RANK": "0", "PMI_SIZE": "1"}],
    ids=["half set", "without a name"],
)
def test_whatever_is_around_ferrodist_run_stays_outside(outer, launched, find_and_log):
    job, _ = find_and_log(outer | launched | mark_outer_jobs(outer))
    assert job.name == "run-1-ab"


# -- variables of another process ----------------------------------------------------------------


def test_stale_variables_of_ferrodist_run_are_an_error_when_nobody_else_speaks(launched):
    close_secret(launched)
    with pytest.raises(RendezvousError, match="FERRODIST_RANK=2 of job 'run-1-ab' belongs to anot"):
        find_job(launched)


def test_a_secret_that_is_gone_may_have_been_taken_by_a_child(launched):
    child = os.fork()
    if child == 0:
        os._exit(read_ferrodist_run(launched).rank)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    with pytest.raises(RendezvousError) as caught:
        find_job(launched)
    assert "or a process that this one has started called init() first" in str(caught.value)
    close_secret(launched)


@INNER
def test_what_a_rank_of_ferrodist_run_starts_may_have_a_launcher_of_its_own(
    launched, inner, find_and_log
):
    close_secret(launched)
    job, line = find_and_log(launched | inner)
    assert (job.rank, job.world_size) == (1, 2)
    assert "; the variables of ferrodist run are another process's" in line


def test_stale_variables_of_hydra_are_an_error_when_nobody_else_speaks(mpich):
    mpich["PMI_FD"] = "987654"
    with pytest.raises(RendezvousError) as caught:
        find_job(mpich)
    assert str(caught.value) == (
        "PMI_RANK=1, PMI_SIZE=2 belong to another process: PMI_FD=987654 is not an open socket "
        "here. This process was started by a rank and not by mpiexec: start it with 'ferrodist run "
        "-n 1 script.py' if it is to be a world of its own, or without PMI_RANK and PMI_SIZE"
    )


def test_stale_variables_of_hydra_give_way_to_another_source(mpich, launched, find_and_log):
    mpich["PMI_FD"] = "987654"
    job, line = find_and_log(mpich | PLAIN | {"RANK": "4", "WORLD_SIZE": "5"})
    assert (job.launcher, job.rank, job.world_size) == (PLAIN_LAUNCHER, 4, 5)
    assert line.endswith("; the variables of MPI (PMI) are another process's")
    job, line = find_and_log(mpich | launched)
    assert job.launcher is FERRODIST_RUN
    assert line.endswith("; the variables of MPI (PMI) are another process's")


# -- half set, wrong, contradictory --------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        *((TORCHRUN, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")),
        *((TORCHRUN, name) for name in ("MASTER_ADDR", "MASTER_PORT")),
        (TORCHRUN, "TORCHELASTIC_RESTART_COUNT"),
        *((OPEN_MPI, f"OMPI_COMM_WORLD_{one}") for one in ("RANK", "SIZE", "LOCAL_SIZE")),
        *((SLURM_PMIX, name) for name in ("SLURM_STEP_NUM_TASKS", "PMIX_NAMESPACE")),
        *((INTEL_MPI, name) for name in ("PMI_RANK", "PMI_SIZE")),
        *((PLAIN, name) for name in PLAIN),
        *((SLURM, name) for name in ("SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID")),
        (SLURM, "SLURM_STEP_NUM_NODES"),
    ],
)
def test_a_source_that_is_half_set_names_what_is_missing_and_what_is_there(environ, name):
    with pytest.raises(InvalidArgument) as caught:
        find_job(without(environ, name))
    text = str(caught.value)
    assert text.startswith(f"{name} not set, but ")
    assert caught.value.missing == [name]
    there = re.findall(r"(\w+)=(\S+?)[, ]", text.partition(": ")[0])
    assert there
    assert dict(there).items() <= environ.items()
    assert "'ferrodist run -n N script.py'" in text


def test_plain_variables_that_are_half_set_say_so_in_full():
    with pytest.raises(InvalidArgument) as caught:
        find_job({"RANK": "0", "MASTER_ADDR": "localhost"})
    assert str(caught.value) == (
        "WORLD_SIZE, MASTER_PORT not set, but RANK=0, MASTER_ADDR=localhost (variables set by "
        "hand): all of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are needed; set the missing "
        "ones, unset the others, or use 'ferrodist run -n N script.py'"
    )


def test_mpi_that_names_no_job_is_half_set():
    with pytest.raises(
        InvalidArgument, match="PMI_FD, PMI_JOBID, PMI_PORT not set, but PMI_RANK=1"
    ):
        find_job(without(INTEL_MPI, "PMI_PORT"))
    bare = {name: value for name, value in OPEN_MPI.items() if name.startswith("OMPI")}
    with pytest.raises(InvalidArgument, match="PMIX_NAMESPACE not set, but OMPI_COMM_WORLD_RANK=1"):
        find_job(bare)


RUN_JOB = run_job("name", 3, 1, 2, Endpoint("node-1", 29500))
RUN = run_variables(RUN_JOB, 17, 18)


def assert_same_job(job: Job, variables: dict[str, str]) -> None:
    found = try_run_job(variables)
    names = ("name", "rank", "world_size", "endpoint", "local_rank", "local_world_size")
    for name in names:
        assert getattr(found, name) == getattr(job, name)
    assert (variables["FERRODIST_SECRET_FD"], variables["FERRODIST_ENDS_FD"]) == ("17", "18")


@pytest.mark.parametrize("endpoint", ["node-1:29500", "[::1]:1"])
def test_a_launch_is_read_as_it_was_written(endpoint):
    job = dataclasses.replace(RUN_JOB, endpoint=try_endpoint(endpoint))
    assert str(job.endpoint) == endpoint
    assert_same_job(job, run_variables(job, 17, 18))


def test_a_launch_on_one_host_is_read_as_it_was_written():
    variables = run_variables(run_job("name", 3, 3, 4), 17, 18)
    assert variables["FERRODIST_ENDPOINT"] == ""
    assert_same_job(run_job("name", 3, 3, 4), variables)


@pytest.mark.parametrize("name", [name.removeprefix("FERRODIST_") for name in RUN_VARIABLES])
def test_a_launch_that_is_half_set_names_what_is_missing(name):
    with pytest.raises(InvalidArgument, match=rf"^FERRODIST_{name} not set, but FERRODIST_"):
        find_job(without(RUN, f"FERRODIST_{name}"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "x"),
        ("RANK", "-1"),
        ("RANK", "4"),
        ("RANK", "²"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", ""),
        ("JOB", ""),
        ("SECRET_FD", "-3"),
        ("SECRET_FD", "99999999999"),
        ("ENDS_FD", "x"),
        ("LOCAL_RANK", "x"),
        ("LOCAL_RANK", "2"),
        ("LOCAL_RANK", "0"),  # it would be rank 2 at most
        ("LOCAL_WORLD_SIZE", "5"),
        ("ENDPOINT", ""),  # rank 3 is the second of this host
        ("ENDPOINT", "node-1"),
        ("ENDPOINT", "node-1:0"),
        ("ENDPOINT", "::1:29500"),
    ],
)
def test_a_launch_that_cannot_be_names_the_variables(name, value):
    with pytest.raises(InvalidArgument, match=f"FERRODIST_{name}='{value}'"):
        find_job(RUN | {f"FERRODIST_{name}": value})


@pytest.mark.parametrize(
    ("environ", "name", "value"),
    [
        *((PLAIN, "RANK", value) for value in ("2", "-1", "x", "1.0", "²", " 1")),
        *((PLAIN, "WORLD_SIZE", value) for value in ("0", "1", "two")),
        *((TORCHRUN, "LOCAL_WORLD_SIZE", value) for value in ("0", "3")),
        (PLAIN | {"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE", "x"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE", "x"),
        (INTEL_MPI, "PMI_RANK", "2"),
        (INTEL_MPI, "MPI_LOCALNRANKS", "-1"),
        (SLURM_PMIX, "PMIX_RANK", "9"),
        (SLURM, "SLURM_PROCID", "2"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_partner(environ, name, value):
    with pytest.raises(InvalidArgument) as caught:
        find_job(environ | {name: value})
    assert f"{name}={value!r}" in str(caught.value)
    assert "expected whole numbers, and " in str(caught.value)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"RANK": "0"}, "RANK"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE"),
        (PLAIN | {"RANK": "0", "WORLD_SIZE": "4"}, "RANK and WORLD_SIZE"),
        ({"RANK": "one"}, "RANK"),
    ],
)
def test_plain_variables_that_contradict_mpi_are_refused_naming_both(change, wrong):
    shown = ", ".join(f"{name}={change[name]}" for name in wrong.split(" and "))
    with pytest.raises(InvalidArgument) as caught:
        find_job(OPEN_MPI | change)
    assert str(caught.value) == (
        f"{shown}, but Open MPI says OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2: unset "
        f"{wrong}, or start the ranks without Open MPI"
    )


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        *((PLAIN, "RANK"), (TORCHRUN, "WORLD_SIZE"), (OPEN_MPI, "OMPI_COMM_WORLD_RANK")),
        *((INTEL_MPI, "MPI_LOCALNRANKS"), (SLURM, "SLURM_PROCID")),
    ],
)
def test_a_value_that_is_much_too_long_is_shown_in_part(environ, name):
    with pytest.raises(InvalidArgument) as caught:
        find_job(environ | {name: "7" * 5000})
    assert f"{name}='{'7' * 60}...'" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_launch_with_a_value_that_is_much_too_long_shows_it_in_part():
    variables = RUN | {"FERRODIST_RANK": "7" * 5000}
    with pytest.raises(InvalidArgument, match=f"FERRODIST_RANK='{'7' * 60}\\.\\.\\.', FERR"):
        find_job(variables)


def test_a_number_that_no_file_can_have_is_no_socket_of_hydra():
    with pytest.raises(RendezvousError, match="PMI_FD=99999999999 is not an open socket here"):
        find_job(INTEL_MPI | {"PMI_FD": "99999999999"})


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        (PLAIN, "MASTER_PORT"),
        (TORCHRUN, "TORCHELASTIC_RUN_ID"),
        (OPEN_MPI, "PMIX_NAMESPACE"),
        (SLURM, "SLURM_JOB_ID"),
    ],
)
def test_a_job_whose_name_is_not_text_is_refused_naming_the_variable(environ, name):
    with pytest.raises(InvalidArgument) as caught:
        find_job(environ | {name: os.fsdecode(b"29\xff500")})
    assert name in str(caught.value)
    assert r"29\udcff500" in str(caught.value)
    str(caught.value).encode()  # it can be printed


@pytest.mark.parametrize(
    "address", ["no host", "foo..bar", os.fsdecode(b"\xff"), "[::1", "x" * 5000]
)
def test_an_address_that_cannot_be_resolved_is_named(address):
    with pytest.raises(RendezvousError) as caught:
        find_job(PLAIN | {"MASTER_ADDR": address})
    text = str(caught.value)
    assert text.startswith("MASTER_ADDR=")
    assert " (variables set by hand) cannot be resolved: " in text
    assert "several hosts" not in text
    assert len(text.encode()) < 300


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        (PLAIN, ["WORLD_SIZE"]),
        (TORCHRUN, ["WORLD_SIZE", "LOCAL_WORLD_SIZE"]),
        (OPEN_MPI, ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"]),
    ],
)
def test_more_ranks_than_one_host_holds_are_refused(environ, names):
    with pytest.raises(InvalidWorldSize) as caught:
        find_job(environ | dict.fromkeys(names, "70000"))
    assert str(caught.value).startswith(f"{names[0]}=70000 (")
    assert str(caught.value).endswith("): one host holds at most 4096 ranks")


# -- several hosts -------------------------------------------------------------------------------


SEVERAL = [
    (TORCHRUN | {"WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=2, WORLD_SIZE=4"),
    (
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"},
        "OMPI_COMM_WORLD_LOCAL_SIZE=2, OMPI_COMM_WORLD_SIZE=4",
    ),
    (INTEL_MPI | {"PMI_SIZE": "4"}, "MPI_LOCALNRANKS=2, PMI_SIZE=4"),
    (
        without(INTEL_MPI, "MPI_LOCALNRANKS") | {"SLURM_STEP_NUM_NODES": "2"},
        "SLURM_STEP_NUM_NODES=2",
    ),
    (SLURM_PMIX | {"SLURM_STEP_NUM_NODES": "2"}, "SLURM_STEP_NUM_NODES=2"),
    (SLURM_HOSTS, "SLURM_STEP_NUM_NODES=5"),
    (PLAIN | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_WORLD_SIZE=1, WORLD_SIZE=2"),
    (
        PLAIN | {"MASTER_ADDR": "192.0.2.77"},  # an address of nobody: RFC 5737
        "MASTER_ADDR=192.0.2.77 is not an address of this host",
    ),
]


@pytest.mark.parametrize(("environ", "shown"), SEVERAL)
def test_ranks_on_several_hosts_are_known_and_logged(environ, shown, find_and_log):
    job, line = find_and_log(environ)
    assert job.several_hosts
    assert job.hosts == shown
    assert f", on several hosts ({shown})" in line


@pytest.mark.parametrize(("environ", "shown"), SEVERAL)
def test_ranks_on_several_hosts_share_no_memory_and_are_told_what_to_use(environ, shown):
    job = find_job(environ)
    with pytest.raises(RendezvousError) as caught:
        meet(job, 0, 1.0)
    text = str(caught.value)
    where = f"{job.launcher.name}: {shown}"
    assert f"are on several hosts ({where}), and shared memory is limited to one host" in text
    assert "use the backend 'hybrid'" in text


def test_ferrodist_run_says_where_rank_0_listens_on_several_hosts(find_and_log):
    ends = StatusBoard.create(4)
    read, write = os.pipe()
    os.write(write, secrets.token_bytes(32))
    os.close(write)
    told = run_job("run-1-ab", 3, 1, 2, Endpoint("fd00::1", 29500))
    job, _ = find_and_log(run_variables(told, read, ends.file))
    ends.close()
    assert (job.several_hosts, job.endpoint) == (True, ("fd00::1", 29500))
    assert (job.local_rank, job.local_world_size) == (1, 2)
    assert job.has_secret


def test_ferrodist_run_on_one_host_needs_no_endpoint(launched):
    job = find_job(launched)
    assert (job.several_hosts, job.endpoint) == (False, None)
    assert (job.local_rank, job.local_world_size) == (2, 4)


def test_slurm_puts_rank_0_on_the_first_host_at_a_port_of_the_step():
    one, same = read_slurm(SLURM_HOSTS).endpoint, read_slurm(SLURM_HOSTS).endpoint
    other = read_slurm(SLURM_HOSTS | {"SLURM_STEP_ID": "1"}).endpoint
    assert one == same
    assert one.host == other.host == "rack07n1"
    assert one.port != other.port
    assert {one.port, other.port} <= set(range(20000, 30000))


@pytest.mark.parametrize(
    ("change", "endpoint"),
    [
        ({"MASTER_PORT": "1234"}, ("rack07n1", 1234)),
        ({"MASTER_PORT": "1234", "MASTER_ADDR": "[fd00::1]"}, ("fd00::1", 1234)),
    ],
)
def test_slurm_takes_the_address_that_is_given(change, endpoint):
    assert read_slurm(SLURM_HOSTS | change).endpoint == endpoint


def test_slurm_says_how_many_ranks_a_host_has():
    sizes = [
        read_slurm(SLURM_HOSTS | {"SLURM_NODEID": str(number)}).local_world_size
        for number in range(6)
    ]
    assert sizes == [3, 3, 2, 2, 2, None]
    odd = SLURM_HOSTS | {"SLURM_STEP_TASKS_PER_NODE": "3(x,2"}
    assert read_slurm(odd).local_world_size is None


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node-1", ["node-1"]),
        ("a,b", ["a", "b"]),
        ("node[01-03,7],gpu5", ["node01", "node02", "node03", "node7", "gpu5"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[1-2]n[1,3].x", ["r1n1.x", "r1n3.x", "r2n1.x", "r2n3.x"]),
    ],
)
def test_lists_of_hosts_are_read_as_slurm_writes_them(text, hosts):
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize("text", ["", ",", "a,", "n[", "n[1-", "n[1--3]", "n[a]", "a b", "n[1]]"])
def test_what_is_not_a_list_of_hosts_is_refused(text):
    with pytest.raises(ValueError, match=r"at character|is not a list of numbers"):
        list(expand_hosts(text))


def test_a_list_of_hosts_may_not_be_endless():
    with pytest.raises(ValueError, match="too many"):
        list(expand_hosts("n[0-999999999]"))


def test_a_step_whose_hosts_cannot_be_read_says_so():
    with pytest.raises(InvalidArgument, match=r"SLURM_STEP_NODELIST='n\['.*: expected hosts"):
        find_job(SLURM_HOSTS | {"SLURM_STEP_NODELIST": "n["})
    with pytest.raises(InvalidArgument, match="SLURM_STEP_NODELIST not set, but SLURM_STEP_NUM"):
        find_job(without(SLURM_HOSTS, "SLURM_STEP_NODELIST"))


@pytest.mark.parametrize(
    ("environ", "bootstrap"),
    [
        (TORCHRUN | {"WORLD_SIZE": "4"}, Bootstrap.TORCH_STORE),
        (
            TORCHRUN | {"WORLD_SIZE": "4", "TORCHELASTIC_USE_AGENT_STORE": "False"},
            Bootstrap.SOCKETS,
        ),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, Bootstrap.MPI),
        (
            OPEN_MPI
            | {"OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "node-1", "MASTER_PORT": "1234"},
            Bootstrap.SOCKETS,
        ),
        (INTEL_MPI | {"PMI_SIZE": "4"}, Bootstrap.MPI),
        (SLURM_HOSTS, Bootstrap.SOCKETS),
    ],
)
def test_ranks_meet_through_what_has_brought_them_together(environ, bootstrap):
    assert find_job(environ).bootstrap is bootstrap


def test_ranks_of_hydra_on_several_hosts_call_their_job_the_same(mpich):
    several = mpich | {"PMI_SIZE": "4"}
    assert read_pmi(several).name == "pmi-at-mpi"
    where = {"MASTER_ADDR": "node-1", "MASTER_PORT": "1234"}
    assert read_pmi(several | where).name == "pmi-at-node-1:1234"
    assert read_pmi(several | {"PMI_JOBID": "77.0"}).name == "pmi-77.0"


@pytest.mark.parametrize("port", ["0", "65536", "x", "29 500"])
def test_a_port_that_is_none_is_refused_where_it_is_needed(port):
    assert not find_job(PLAIN | {"MASTER_PORT": port}).several_hosts
    with pytest.raises(InvalidArgument, match=r"MASTER_PORT .*: expected a port from 1 to 65535"):
        find_job(PLAIN | {"MASTER_PORT": port, "LOCAL_WORLD_SIZE": "1"})


# -- the secret file -----------------------------------------------------------------------------


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_bytes(b"0123456789abcdef0123456789abcdef")
    return path


def with_secret(environ: dict[str, str], path: Path) -> dict[str, str]:
    return environ | {"FERRODIST_SECRET_FILE": str(path)}


@pytest.mark.parametrize("environ", [PLAIN, TORCHRUN, OPEN_MPI, INTEL_MPI, SLURM])
def test_a_secret_file_is_the_secret_of_every_job(environ, secret_file, find_and_log):
    job, line = find_and_log(with_secret(environ, secret_file))
    assert job.has_secret
    assert job.secret == hashlib.sha256(secret_file.read_bytes()).digest()
    assert "0123456789abcdef" not in line + repr(job)
    assert not find_and_log(environ)[0].has_secret


def test_the_secret_of_ferrodist_run_counts_more_than_a_file(launched, secret_file):
    job = find_job(with_secret(launched, secret_file))
    assert job.secret != hashlib.sha256(secret_file.read_bytes()).digest()


def test_a_world_of_one_needs_no_secret(tmp_path, find_and_log):
    for environ in ({}, PLAIN | {"RANK": "0", "WORLD_SIZE": "1"}):
        assert find_and_log(with_secret(environ, tmp_path / "absent"))[0].world_size == 1


def test_a_secret_may_come_through_a_pipe(find_and_log):
    read, write = os.pipe()
    os.write(write, b"x" * 40)
    os.close(write)
    job, _ = find_and_log(with_secret(PLAIN, Path(f"/dev/fd/{read}")))
    os.close(read)
    assert job.secret == hashlib.sha256(b"x" * 40).digest()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_a_secret_that_others_can_read_is_none(mode, secret_file):
    secret_file.chmod(mode)
    with pytest.raises(AuthenticationError) as caught:
        find_job(with_secret(PLAIN, secret_file))
    text = str(caught.value)
    assert text.startswith(f"FERRODIST_SECRET_FILE={secret_file} has mode 0{mode:o}, so others")
    assert f"'chmod 600 {secret_file}'" in text
    assert "0123456789abcdef" not in text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_a_secret_of_another_user_is_none(secret_file):
    os.chown(secret_file, 65534, -1)
    with pytest.raises(AuthenticationError, match="belongs to user 65534, who then knows the"):
        find_job(with_secret(PLAIN, secret_file))


@pytest.mark.parametrize(
    ("content", "shown"), [(b"", "has 0 bytes"), (b"x" * 31, "31 bytes"), (b"x" * 65537, "over")]
)
def test_a_secret_of_the_wrong_size_is_none(content, shown, secret_file):
    secret_file.write_bytes(content)
    with pytest.raises(AuthenticationError, match=shown) as caught:
        find_job(with_secret(PLAIN, secret_file))
    assert "xxx" not in str(caught.value)
    assert "(umask 077; head -c 32 /dev/urandom > ~/.ferrodist-secret)" in str(caught.value)


def test_a_secret_file_that_is_not_there_says_how_to_make_one(tmp_path):
    with pytest.raises(AuthenticationError, match="cannot be read: No such file") as caught:
        find_job(with_secret(PLAIN, tmp_path / "absent"))
    assert "export FERRODIST_SECRET_FILE=~/.ferrodist-secret" in str(caught.value)
    with pytest.raises(AuthenticationError, match="is neither a file nor a pipe"):
        find_job(with_secret(PLAIN, tmp_path))


OWN_ADDRESS = next((one.address for one in list_interfaces() if not one.is_loopback), None)


@pytest.mark.skipif(OWN_ADDRESS is None, reason="this host has only loopback")
def test_an_address_of_this_host_means_several_only_with_a_secret_file(secret_file):
    environ = PLAIN | {"MASTER_ADDR": OWN_ADDRESS}
    assert not find_job(environ).several_hosts
    assert find_job(with_secret(environ, secret_file)).several_hosts
    told = environ | {"LOCAL_WORLD_SIZE": "2"}
    assert not find_job(with_secret(told, secret_file)).several_hosts


def test_loopback_is_one_host_with_a_secret_file_too(secret_file):
    for host in ("127.0.0.1", "localhost", "::1"):
        environ = PLAIN | {"MASTER_ADDR": host}
        assert not find_job(with_secret(environ, secret_file)).several_hosts


def test_a_name_that_is_not_known_yet_is_of_another_host(secret_file):
    environ = PLAIN | {"MASTER_ADDR": "rank-0.invalid"}  # RFC 2606: it never resolves
    job = find_job(with_secret(environ, secret_file))
    assert job.hosts == "MASTER_ADDR=rank-0.invalid is not known to this host yet"


def test_a_world_of_one_is_on_one_host_wherever_its_address_is(find_and_log):
    job, _ = find_and_log(PLAIN | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "192.0.2.7"})
    assert job.world_size == 1


def test_an_outer_source_on_several_hosts_is_nobodys_business(find_and_log):
    job, line = find_and_log(SLURM | {"SLURM_STEP_NUM_NODES": "2"} | TORCHRUN)
    assert isinstance(read_torchrun(TORCHRUN), Job)
    assert job.launcher is TORCHRUN_LAUNCHER
    assert line.endswith("; SLURM: the same")
