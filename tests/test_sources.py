"""Every launcher's variables are read as it means them, and what is wrong with them is said."""

from __future__ import annotations

import fcntl
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

from ferrodist import DistributedError, InvalidArgument, InvalidWorldSize, RendezvousError
from ferrodist.rendezvous import Job
from ferrodist.rendezvous.ends import Ends
from ferrodist.rendezvous.launch import Launch
from ferrodist.rendezvous.sources import ferrodist_run, find, mpi, plain, pmi, slurm, torchrun
from ferrodist.rendezvous.sources.nesting import mark_outer_jobs
from ferrodist.rendezvous.sources.place import Place, Stale

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
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2",
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
    ends = Ends.create(4)
    read, write = os.pipe()
    os.write(write, secrets.token_bytes(32))
    os.close(write)
    ours = {"RANK": "2", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "run-1-ab"}
    yield TORCHRUN | ours | Launch(2, 4, "run-1-ab", read, ends.file).to_environment()
    ends.close()


def close_secret(environ: dict[str, str]) -> None:
    os.close(int(environ["FERRODIST_SECRET_FD"]))


@pytest.fixture
def find_and_log(caplog: pytest.LogCaptureFixture) -> Any:
    """Give what finds a job and returns it with the one line of the log."""

    def find_and_log(environ: dict[str, str]) -> tuple[Job, str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "ferrodist"):
            job = find.find_job(environ)
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
        (torchrun.read, TORCHRUN, "torchrun-1027417c-0fc5-0-localhost:38717"),
        (mpi.read_open_mpi, OPEN_MPI, "openmpi-prterun-vm-22607@1"),
        (pmi.read, INTEL_MPI, "pmi-vm:34567"),
        (plain.read, PLAIN | {"LOCAL_WORLD_SIZE": "2"}, "plain-29500"),
        (slurm.read, SLURM, "slurm-77.0-0"),
    ],
)
def test_a_source_says_place_and_job(read, environ, job):
    found = read(environ)
    assert (found.job, found.rank, found.world_size) == (job, 1, 2)
    assert (found.several_hosts, found.master_address) == (None, None)
    assert read({}) is None


def test_a_source_that_says_nothing_of_the_host_is_taken_at_its_word():
    assert plain.read(PLAIN).master_address == "127.0.0.1"
    assert pmi.read(without(INTEL_MPI, "MPI_LOCALNRANKS")).several_hosts is None


def test_ferrodist_run_gives_the_secret_and_the_ends(launched):
    os.set_inheritable(int(launched["FERRODIST_ENDS_FD"]), True)
    found = ferrodist_run.read(launched)
    assert (found.job, found.rank, found.world_size) == ("run-1-ab", 2, 4)
    assert len(found.secret) == 32
    assert str(found.ends.file) == launched["FERRODIST_ENDS_FD"]
    assert not os.get_inheritable(found.ends.file)
    assert "secret" not in repr(found)
    assert isinstance(ferrodist_run.read(launched), Stale)  # it is taken once


def test_hydra_names_a_job_by_the_process_behind_the_socket(mpich):
    found = pmi.read(mpich)
    start_time = Path(f"/proc/{mpich['PID']}/stat").read_text().rpartition(") ")[2].split()[19]
    assert found.job == f"pmi-{mpich['PID']}-{start_time}"


def test_looking_at_the_socket_of_hydra_leaves_no_file_open(mpich):
    before = os.listdir("/proc/self/fd")
    pmi.read(mpich)
    with open(os.devnull) as other:
        assert isinstance(pmi.read(mpich | {"PMI_FD": str(other.fileno())}), Stale)
    assert os.listdir("/proc/self/fd") == before


def test_looking_at_the_socket_of_hydra_never_changes_it(mpich):
    file = int(mpich["PMI_FD"])
    before = fcntl.fcntl(file, fcntl.F_GETFL), os.get_inheritable(file)
    socket.setdefaulttimeout(10)  # which every new socket object gives to its file
    try:
        assert isinstance(pmi.read(mpich), Place)
    finally:
        socket.setdefaulttimeout(None)
    assert (fcntl.fcntl(file, fcntl.F_GETFL), os.get_inheritable(file)) == before


def test_a_socket_of_this_process_with_the_number_of_hydras_is_not_hydras(mpich):
    one, other = socket.socketpair()  # as event loops have them
    with one, other:
        assert isinstance(pmi.read(mpich | {"PMI_FD": str(one.fileno())}), Stale)


@pytest.mark.parametrize(
    ("change", "job"),
    [
        ({"PMI_JOBID": "77.0"}, "pmi-77.0-vm:34567"),
        ({"PMI_JOBID": "77.0", "PMI_PORT": ""}, "pmi-77.0"),
    ],
)
def test_pmi_without_a_socket_names_a_job_by_what_there_is(change, job):
    assert pmi.read(INTEL_MPI | change).job == job


def test_pmi_with_one_rank_needs_no_name():
    found = pmi.read({"PMI_RANK": "0", "PMI_SIZE": "1"})
    assert (found.rank, found.world_size) == (0, 1)


def test_a_socket_with_nobody_to_be_seen_behind_it_leaves_the_other_names():
    with socket.socket() as connection:  # TCP: the kernel names no process
        environ = INTEL_MPI | {"PMI_FD": str(connection.fileno())}
        assert pmi.read(environ).job == "pmi-vm:34567"


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({"OMPI_MCA_ess_base_jobid": "4242"}, "openmpi-4242"),
        ({}, f"openmpi-{OPEN_MPI['PMIX_SERVER_URI2']}"),
    ],
)
def test_open_mpi_without_a_namespace_names_a_job_by_what_there_is(variables, job):
    environ = without(OPEN_MPI, "PMIX_NAMESPACE") | variables
    assert mpi.read_open_mpi(environ).job == job


@pytest.mark.parametrize(
    "change",
    [
        {"TORCHELASTIC_RUN_ID": "other"},
        {"TORCHELASTIC_RESTART_COUNT": "1"},
        {"MASTER_PORT": "38718"},
    ],
)
def test_jobs_of_torchrun_differ_in_any_of(change):
    assert torchrun.read(TORCHRUN | change).job != torchrun.read(TORCHRUN).job


@pytest.mark.parametrize(
    "change", [{"SLURM_JOB_ID": "78"}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}]
)
def test_steps_of_slurm_differ_in_any_of(change):
    assert slurm.read(SLURM | change).job != slurm.read(SLURM).job


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
            return find.find_job(variables)
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
    assert (job.source.name, job.rank, job.world_size) == (winner, 1, 2)
    _, *said = line.split("; ")
    assert said == others


def test_ferrodist_run_wins_over_all_and_does_not_count_torchs_variables(launched, find_and_log):
    outer = SLURM | INTEL_MPI
    job, line = find_and_log(outer | launched | mark_outer_jobs(outer))
    assert (job.source.name, job.rank, job.world_size) == ("ferrodist run", 2, 4)
    assert line == (
        "rank 2 of 4 in job 'run-1-ab', from ferrodist run (FERRODIST_RANK=2, "
        "FERRODIST_WORLD_SIZE=4); MPI (PMI): rank 1 of 2; SLURM: rank 1 of 2"
    )


def test_an_outer_source_that_is_half_set_is_named_and_does_no_harm(find_and_log):
    job, line = find_and_log(without(SLURM, "SLURM_STEP_ID") | TORCHRUN)
    assert job.source is torchrun.SOURCE
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
    assert job.source is pmi.SOURCE
    close_secret(launched)


def test_what_a_rank_starts_is_no_rank_of_a_job_around_ferrodist_run_either(launched):
    close_secret(launched)
    with pytest.raises(RendezvousError, match="FERRODIST_RANK=2 of job 'run-1-ab' belongs to anot"):
        find.find_job(OPEN_MPI | launched | mark_outer_jobs(OPEN_MPI))


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
        find.find_job(launched)


def test_a_secret_that_is_gone_may_have_been_taken_by_a_child(launched):
    child = os.fork()
    if child == 0:
        os._exit(ferrodist_run.read(launched).rank)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    with pytest.raises(RendezvousError) as caught:
        find.find_job(launched)
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
        find.find_job(mpich)
    assert str(caught.value) == (
        "PMI_RANK=1, PMI_SIZE=2 belong to another process: PMI_FD=987654 is not an open socket "
        "here. This process was started by a rank and not by mpiexec: start it with 'ferrodist run "
        "-n 1 script.py' if it is to be a world of its own, or without PMI_RANK and PMI_SIZE"
    )


def test_stale_variables_of_hydra_give_way_to_another_source(mpich, launched, find_and_log):
    mpich["PMI_FD"] = "987654"
    job, line = find_and_log(mpich | PLAIN | {"RANK": "4", "WORLD_SIZE": "5"})
    assert (job.source, job.rank, job.world_size) == (plain.SOURCE, 4, 5)
    assert line.endswith("; the variables of MPI (PMI) are another process's")
    job, line = find_and_log(mpich | launched)
    assert job.source is ferrodist_run.SOURCE
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
        find.find_job(without(environ, name))
    text = str(caught.value)
    assert text.startswith(f"{name} not set, but ")
    assert caught.value.missing == [name]
    there = re.findall(r"(\w+)=(\S+?)[, ]", text.partition(": ")[0])
    assert there
    assert dict(there).items() <= environ.items()
    assert "'ferrodist run -n N script.py'" in text


def test_plain_variables_that_are_half_set_say_so_in_full():
    with pytest.raises(InvalidArgument) as caught:
        find.find_job({"RANK": "0", "MASTER_ADDR": "localhost"})
    assert str(caught.value) == (
        "WORLD_SIZE, MASTER_PORT not set, but RANK=0, MASTER_ADDR=localhost (variables set by "
        "hand): all of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are needed; set the missing "
        "ones, unset the others, or use 'ferrodist run -n N script.py'"
    )


def test_mpi_that_names_no_job_is_half_set():
    with pytest.raises(
        InvalidArgument, match="PMI_FD, PMI_JOBID, PMI_PORT not set, but PMI_RANK=1"
    ):
        find.find_job(without(INTEL_MPI, "PMI_PORT"))
    bare = {name: value for name, value in OPEN_MPI.items() if name.startswith("OMPI")}
    with pytest.raises(InvalidArgument, match="PMIX_NAMESPACE not set, but OMPI_COMM_WORLD_RANK=1"):
        find.find_job(bare)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "JOB", "SECRET_FD", "ENDS_FD"])
def test_a_launch_that_is_half_set_names_what_is_missing(name):
    variables = Launch(3, 4, "name", 17, 18).to_environment()
    with pytest.raises(InvalidArgument, match=rf"^FERRODIST_{name} not set, but FERRODIST_"):
        find.find_job(without(variables, f"FERRODIST_{name}"))


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
    ],
)
def test_a_launch_that_cannot_be_names_the_variables(name, value):
    variables = Launch(3, 4, "name", 17, 18).to_environment()
    with pytest.raises(InvalidArgument, match=f"FERRODIST_{name}='{value}'"):
        find.find_job(variables | {f"FERRODIST_{name}": value})


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
        find.find_job(environ | {name: value})
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
        find.find_job(OPEN_MPI | change)
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
        find.find_job(environ | {name: "7" * 5000})
    assert f"{name}='{'7' * 60}...'" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_launch_with_a_value_that_is_much_too_long_shows_it_in_part():
    variables = Launch(3, 4, "name", 17, 18).to_environment() | {"FERRODIST_RANK": "7" * 5000}
    with pytest.raises(InvalidArgument, match=f"FERRODIST_RANK='{'7' * 60}\\.\\.\\.', FERR"):
        find.find_job(variables)


def test_a_number_that_no_file_can_have_is_no_socket_of_hydra():
    with pytest.raises(RendezvousError, match="PMI_FD=99999999999 is not an open socket here"):
        find.find_job(INTEL_MPI | {"PMI_FD": "99999999999"})


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
        find.find_job(environ | {name: os.fsdecode(b"29\xff500")})
    assert name in str(caught.value)
    assert r"29\udcff500" in str(caught.value)
    str(caught.value).encode()  # it can be printed


@pytest.mark.parametrize(
    "address", ["no host", "foo..bar", os.fsdecode(b"\xff"), "[::1", "x" * 5000]
)
def test_an_address_that_cannot_be_resolved_is_named(address):
    with pytest.raises(RendezvousError) as caught:
        find.find_job(PLAIN | {"MASTER_ADDR": address})
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
        find.find_job(environ | dict.fromkeys(names, "70000"))
    assert str(caught.value).startswith(f"{names[0]}=70000 (")
    assert str(caught.value).endswith("): one host holds at most 4096 ranks")


# -- several hosts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        (TORCHRUN | {"WORLD_SIZE": "4"}, "torchrun: LOCAL_WORLD_SIZE=2, WORLD_SIZE=4"),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"},
            "Open MPI: OMPI_COMM_WORLD_LOCAL_SIZE=2, OMPI_COMM_WORLD_SIZE=4",
        ),
        (INTEL_MPI | {"PMI_SIZE": "4"}, "MPI (PMI): MPI_LOCALNRANKS=2, PMI_SIZE=4"),
        (
            without(INTEL_MPI, "MPI_LOCALNRANKS") | {"SLURM_STEP_NUM_NODES": "2"},
            "MPI (PMI): SLURM_STEP_NUM_NODES=2",
        ),
        (SLURM_PMIX | {"SLURM_STEP_NUM_NODES": "2"}, "PMIx: SLURM_STEP_NUM_NODES=2"),
        (SLURM | {"SLURM_STEP_NUM_NODES": "2"}, "SLURM: SLURM_STEP_NUM_NODES=2"),
        (
            PLAIN | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            "variables set by hand: LOCAL_WORLD_SIZE=1, WORLD_SIZE=2",
        ),
        (
            PLAIN | {"MASTER_ADDR": "192.0.2.7"},  # an address of nobody: RFC 5737
            "variables set by hand: MASTER_ADDR=192.0.2.7 is not an address of this host",
        ),
    ],
)
def test_ranks_on_several_hosts_are_told_that_this_needs_tcp(environ, shown):
    with pytest.raises(RendezvousError) as caught:
        find.find_job(environ)
    text = str(caught.value)
    assert f"are on several hosts ({shown}). That needs the TCP backend, which this version" in text
    assert text.endswith("start all ranks on one host")


def test_a_world_of_one_is_on_one_host_wherever_its_address_is(find_and_log):
    job, _ = find_and_log(PLAIN | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "192.0.2.7"})
    assert job.world_size == 1


def test_an_outer_source_on_several_hosts_is_nobodys_business(find_and_log):
    job, line = find_and_log(SLURM | {"SLURM_STEP_NUM_NODES": "2"} | TORCHRUN)
    assert isinstance(torchrun.read(TORCHRUN), Place)
    assert job.source is torchrun.SOURCE
    assert line.endswith("; SLURM: the same")
