# SPDX-License-Identifier: MIT OR Apache-2.0
"""Launchers: the variables by which other people's launchers assign a rank to a process.

A launcher is a ``Launcher``, in the table below, and a function ``read_*`` that takes a mapping of
variables and returns a Job, None if the launcher says nothing, or Stale if its variables were meant
for another process. To add one, copy ``TORCHRUN`` and ``read_torchrun`` and put the function into
``READERS``. Which of them counts is decided in ``find_job.py``.

Readers may look at an open file that a variable names, and leave it as it was.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ferrodist.config import variable
from ferrodist.errors import InvalidArgument
from ferrodist.rendezvous.job import (
    MASTER_ADDRESS,
    MASTER_PORT,
    Bootstrap,
    Endpoint,
    Environment,
    Job,
    Launcher,
    is_set,
    known_secret,
    number,
    quoted,
    read_rank,
    require,
    show_difference,
    shown,
    try_master_endpoint,
    try_number,
    without_brackets,
)
from ferrodist.rendezvous.script import running_script
from ferrodist.rendezvous.sockets import peer_credentials

_RUN_ID, _RESTARTS = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_NAMESPACE = "PMIX_NAMESPACE"
_PMI_SOCKET = "PMI_FD"
_PMI_NAMES = ("PMI_JOBID", "PMI_PORT")  # without a socket, or with nobody visible behind it
_START_TIME = 22  # the field of /proc/<pid>/stat

_JOB, _STEP = "SLURM_JOB_ID", "SLURM_STEP_ID"
_NUM_HOSTS, _HOSTS = "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST"
_HOST_NUMBER, _LOCAL_SIZES = "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"
_MAX_HOSTS = 1 << 16
_PORTS = range(20_000, 30_000)  # below those the kernel gives to outgoing connections

TORCHRUN = Launcher(
    name="torchrun",
    rank="RANK",
    world_size="WORLD_SIZE",
    job="MASTER_PORT and TORCHELASTIC_RUN_ID",
    start="start all ranks with 'torchrun --nproc-per-node {size} script.py'",
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE",
    required=(
        *(_RUN_ID, _RESTARTS, "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        *(MASTER_ADDRESS, MASTER_PORT),
    ),
)
OPEN_MPI = Launcher(
    name="Open MPI",
    rank="OMPI_COMM_WORLD_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    job=f"mpiexec ({_NAMESPACE})",
    start="start all ranks with 'mpiexec -n {size} python script.py'",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    required=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
SLURM = Launcher(
    name="SLURM",
    rank="SLURM_PROCID",
    world_size="SLURM_STEP_NUM_TASKS",
    job="srun (SLURM_JOB_ID, SLURM_STEP_ID)",
    start="start all ranks with 'srun -n {size} python script.py'",
    local_rank="SLURM_LOCALID",
    required=("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", _JOB, _STEP, _NUM_HOSTS),
)
PMIX = Launcher(
    name="PMIx",
    rank="PMIX_RANK",
    world_size=SLURM.world_size,  # PMIx itself has no variable for it
    job=f"srun ({_NAMESPACE})",
    start="start all ranks with 'srun --mpi=pmix -n {size} python script.py'",
    local_rank=SLURM.local_rank,
    required=("PMIX_RANK", _NAMESPACE, SLURM.world_size),
)
# The mpiexec of MPICH, of Intel MPI and others.
PMI = Launcher(
    name="MPI (PMI)",
    rank="PMI_RANK",
    world_size="PMI_SIZE",
    job="mpiexec (PMI_FD)",
    start="start all ranks with 'mpiexec -n {size} python script.py'",
    local_rank="MPI_LOCALRANKID",
    local_world_size="MPI_LOCALNRANKS",
    required=("PMI_RANK", "PMI_SIZE"),
)
PLAIN = Launcher(
    name="variables set by hand",
    rank="RANK",
    world_size="WORLD_SIZE",
    job="MASTER_PORT",
    start=(
        "start one process per rank, with RANK=0 to RANK={last}, or all of them with "
        "'ferrodist run -n {size} script.py'"
    ),
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE",
    required=("RANK", "WORLD_SIZE", MASTER_ADDRESS, MASTER_PORT),
)
MPI = (OPEN_MPI, PMIX, PMI)


class Stale(NamedTuple):
    """A launcher whose variables were meant for another process, from which this one has them."""

    launcher: Launcher
    why: str


# -- torchrun, variables set by hand --------------------------------------------------------------


def _job(
    environ: Environment,
    launcher: Launcher,
    rank_and_size: tuple[int, int],
    name: str,
    hosts: str | None,
    bootstrap: Bootstrap = Bootstrap.SOCKETS,
) -> Job:
    """Make a job without a secret, with what all launchers give in the same way."""
    return Job(
        name,
        *rank_and_size,
        known_secret(name),
        launcher=launcher,
        hosts=hosts,
        endpoint=try_master_endpoint(environ),
        bootstrap=bootstrap,
        local_rank=try_number(environ, launcher.local_rank),
        local_world_size=try_number(environ, launcher.local_world_size),
        has_secret=False,
    )


def read_torchrun(environ: Environment) -> Job | None:
    """Read the variables; those that ``ferrodist run`` sets for torch programs do not count."""
    if not is_set(environ, _RUN_ID) or environ[_RUN_ID] == environ.get(variable("job")):
        return None
    ranks = read_rank(environ, TORCHRUN)
    # The run id alone is not enough: with some rendezvous backends it is "none" for every job.
    where = f"{environ[MASTER_ADDRESS]}:{environ[MASTER_PORT]}"
    name = f"torchrun-{environ[_RUN_ID]}-{environ[_RESTARTS]}-{where}"
    # With an agent store torchrun's agent listens at that port, and rank 0 cannot.
    has_agent = environ.get(_AGENT_STORE) == str(True)
    bootstrap = Bootstrap.TORCH_STORE if has_agent else Bootstrap.SOCKETS
    return _job(environ, TORCHRUN, ranks, name, show_difference(environ, TORCHRUN), bootstrap)


def read_plain(environ: Environment) -> Job | None:
    """Read the variables, unless they are torchrun's. An address alone says nothing."""
    if is_set(environ, _RUN_ID) or not is_set(environ, PLAIN.rank, PLAIN.world_size):
        return None
    ranks = read_rank(environ, PLAIN)
    # Not named after the address: one rank says localhost, another 127.0.0.1, and both are right.
    given = given_name(environ)
    name = f"plain-{environ[MASTER_PORT]}" + (given and f"-{given}")
    is_told = is_set(environ, PLAIN.local_world_size)
    hosts = show_difference(environ, PLAIN) if is_told else None
    # Two jobs may have got the same port.
    script = "" if given else running_script()
    return replace(_job(environ, PLAIN, ranks, name, hosts), script=script)


def given_name(environ: Environment) -> str:
    """Return the name that the user gives a job by hand; '' for none, or that of ferrodist run."""
    return "" if variable("rank") in environ else environ.get(variable("job"), "")


def script_of_unnamed_job(environ: Environment) -> str:
    """Return what all ranks must run if nothing but an address names their job; '' otherwise."""
    is_unnamed = all(environ.get(name) for name in PLAIN.required) and not is_set(environ, _RUN_ID)
    return (given_name(environ) or running_script()) if is_unnamed else ""


def check_plain_agrees(environ: Environment, job: Job) -> None:
    """Refuse variables set by hand that contradict what another launcher says."""
    if is_set(environ, _RUN_ID):
        return
    said = {PLAIN.rank: job.rank, PLAIN.world_size: job.world_size}
    wrong = [n for n, value in said.items() if is_set(environ, n) and number(environ[n]) != value]
    if wrong:
        other = job.launcher
        raise InvalidArgument(
            f"{shown(environ, wrong)}, but {other.name} says {other.rank}={job.rank}, "
            f"{other.world_size}={job.world_size}: unset {' and '.join(wrong)}, or start the "
            f"ranks without {other.name}"
        )


# -- MPI ------------------------------------------------------------------------------------------


def read_open_mpi(environ: Environment) -> Job | None:
    """Read the variables of Open MPI's mpiexec; the job is the namespace of PMIx."""
    if not is_set(environ, OPEN_MPI.rank, OPEN_MPI.world_size):
        return None
    ranks = read_rank(environ, OPEN_MPI)
    name, hosts = f"openmpi-{_open_mpi_job(environ)}", show_difference(environ, OPEN_MPI)
    return _job(environ, OPEN_MPI, ranks, name, hosts, _mpi_bootstrap(environ))


def _mpi_bootstrap(environ: Environment) -> Bootstrap:
    """Choose how ranks of MPI meet between hosts: at an address if one is given, else by MPI."""
    return Bootstrap.MPI if try_master_endpoint(environ) is None else Bootstrap.SOCKETS


def _at_address_of_slurm(environ: Environment, job: Job) -> Job:
    """Let ranks of several hosts that srun has started meet where those of a plain step do.

    Many clusters set the variables of an MPI for every step; mpi4py need not be there.
    """
    if job.bootstrap is not Bootstrap.MPI or not (job.hosts and _slurm_hosts(environ)):
        return job
    endpoint = _slurm_endpoint(environ, job.name)
    return replace(job, bootstrap=Bootstrap.SOCKETS, endpoint=endpoint)


def _open_mpi_job(environ: Environment) -> str:
    """Return what all ranks of one mpiexec have in common, and no two mpiexecs."""
    servers = sorted(name for name in environ if name.startswith("PMIX_SERVER_URI"))
    candidates = [_NAMESPACE, "OMPI_MCA_ess_base_jobid", *servers]
    found = next((environ[name] for name in candidates if environ.get(name)), None)
    if found is None:
        raise InvalidArgument(
            f"{_NAMESPACE} not set, but {shown(environ, OPEN_MPI.required)}: nothing says which "
            f"job of {OPEN_MPI.name} this is; pass {_NAMESPACE} on to the ranks, or use 'ferrodist "
            "run -n N script.py'",
            missing=[_NAMESPACE],
        )
    return found


def read_pmix(environ: Environment) -> Job | None:
    """Read the variables of PMIx, which does not say how many ranks there are; SLURM does.

    Open MPI sets them too; then PMIx is not a second launcher.
    """
    if not is_set(environ, PMIX.rank) or is_set(environ, OPEN_MPI.rank, OPEN_MPI.world_size):
        return None
    ranks = read_rank(environ, PMIX)
    name, hosts = f"pmix-{environ[_NAMESPACE]}", _slurm_hosts(environ)
    job = _job(environ, PMIX, ranks, name, hosts, _mpi_bootstrap(environ))
    return _at_address_of_slurm(environ, replace(job, local_world_size=_slurm_local_size(environ)))


def read_pmi(environ: Environment) -> Job | Stale | None:
    """Read the variables of PMI, and look at who is at the other end of its socket.

    MPICH's launcher, Hydra, gives a job no name. But every rank holds a socket, PMI_FD, whose other
    end belongs to the one process that has started the ranks of this host: that process names the
    job. The socket is MPI's own; it is looked at, never read, written or closed. On several hosts
    there is such a process on each, and what names the job is where its ranks meet.
    """
    if not is_set(environ, PMI.rank, PMI.world_size):
        return None
    ranks = read_rank(environ, PMI)
    try:
        name = _pmi_job(environ, world_size=ranks[1])
    except OSError:
        return Stale(PMI, _why_pmi_is_stale(environ))
    hosts = show_difference(environ, PMI) or _slurm_hosts(environ)
    if hosts:
        name = environ.get(_PMI_NAMES[0]) or f"at-{try_master_endpoint(environ) or 'mpi'}"
    job = _job(environ, PMI, ranks, f"pmi-{name}", hosts, _mpi_bootstrap(environ))
    # If srun has started others, and those this one, the step has another number of tasks.
    is_of_step = try_number(environ, SLURM.world_size) == job.world_size
    is_of_srun = is_set(environ, _PMI_NAMES[0]) and is_of_step
    return _at_address_of_slurm(environ, job) if is_of_srun else job


def _pmi_job(environ: Environment, world_size: int) -> str:
    """Name the job; raises OSError if the socket that a variable names does not exist."""
    starter = _starter(number(environ[_PMI_SOCKET])) if is_set(environ, _PMI_SOCKET) else None
    if starter is not None:
        return starter
    if is_set(environ, *_PMI_NAMES):
        return "-".join(environ[name] for name in _PMI_NAMES if environ.get(name))
    if world_size == 1:
        return "alone"  # there is nobody to meet
    raise InvalidArgument(
        f"{', '.join([_PMI_SOCKET, *_PMI_NAMES])} not set, but {shown(environ, PMI.required)}: "
        "nothing says which job of MPI this is; use mpiexec or 'ferrodist run -n N script.py'",
        missing=[_PMI_SOCKET],
    )


def _starter(file: int) -> str | None:
    """Return pid and start time of the process behind a socket; None if it is not visible."""
    pid = _peer_pid(file)
    if pid == os.getpid():  # a socket of this process itself that has got the number of MPI's
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in brackets, which may hold anything, spaces too.
    fields_from_third = line.rpartition(")")[2].split()
    return f"{pid}-{fields_from_third[_START_TIME - 3]}"


def _peer_pid(file: int) -> int:
    if not stat.S_ISSOCK(os.fstat(file).st_mode):
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    # A socket object gives its file the default timeout, so it is made before the file is MPI's.
    with socket.socket(socket.AF_UNIX) as connection:
        os.dup2(file, connection.fileno(), inheritable=False)
        return peer_credentials(connection).pid


def _why_pmi_is_stale(environ: Environment) -> str:
    return (
        f"{shown(environ, [PMI.rank, PMI.world_size])} belong to another process: "
        f"{shown(environ, [_PMI_SOCKET])} is not an open socket here. This process was started by "
        "a rank and not by mpiexec: start it with 'ferrodist run -n 1 script.py' if it is to be a "
        f"world of its own, or without {PMI.rank} and {PMI.world_size}"
    )


# -- SLURM ----------------------------------------------------------------------------------------
#
# Only a step of several tasks, which srun has started, counts. A batch script, and whatever it
# starts without srun, has the variables of the whole allocation; they say nothing about one
# process.
#
# On several hosts rank 0 listens at MASTER_ADDR, otherwise on the first host of the step, where
# SLURM puts task 0 unless it is asked for an arbitrary distribution; the port is MASTER_PORT,
# otherwise one from 20000 to 29999 that follows from the numbers of job and step.

_HOST = re.compile(r"(?:[^\[\],\s]+|\[[0-9,\-]+\])+")
_PART = re.compile(r"\[([0-9,\-]+)\]|([^\[\],\s]+)")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?")
_MAX_DIGITS = 9
_MAX_RANGE = 1 << 16


def read_slurm(environ: Environment) -> Job | None:
    if number(environ.get(SLURM.world_size, "")) < 2:
        return None
    ranks = read_rank(environ, SLURM)
    restarts = environ.get("SLURM_RESTART_COUNT") or "0"
    name, hosts = f"slurm-{environ[_JOB]}.{environ[_STEP]}-{restarts}", _slurm_hosts(environ)
    endpoint = _slurm_endpoint(environ, name) if hosts else None
    job = _job(environ, SLURM, ranks, name, hosts)
    return replace(job, endpoint=endpoint, local_world_size=_slurm_local_size(environ))


def _slurm_hosts(environ: Environment) -> str:
    """Show that a step runs on several hosts; '' if it does not, or there is no step."""
    return shown(environ, [_NUM_HOSTS]) if number(environ.get(_NUM_HOSTS, "")) >= 2 else ""


def _slurm_local_size(environ: Environment) -> int | None:
    host = try_number(environ, _HOST_NUMBER)
    sizes = environ.get(_LOCAL_SIZES)
    if host is None or not sizes:
        return None
    try:
        return next(itertools.islice(expand_counts(sizes), host, None), None)
    except ValueError:
        return None


def _slurm_endpoint(environ: Environment, job: str) -> Endpoint:
    """Choose where rank 0 of a step on several hosts listens: the same on every rank."""
    digest = hashlib.sha256(job.encode(errors="surrogateescape")).digest()
    port = _PORTS[int.from_bytes(digest[:8]) % len(_PORTS)]
    if is_set(environ, MASTER_PORT):
        port = number(environ[MASTER_PORT])
    if is_set(environ, MASTER_ADDRESS):
        return Endpoint(without_brackets(environ[MASTER_ADDRESS]), port)
    require(environ, SLURM, _NUM_HOSTS, _HOSTS)
    try:
        first, *_ = itertools.islice(expand_hosts(environ[_HOSTS]), _MAX_HOSTS)
        return Endpoint(first, port)
    except ValueError as error:
        raise InvalidArgument(
            f"{quoted(environ, [_HOSTS])} ({SLURM.name}): expected hosts as node[01-03,7],gpu5, "
            f"got {error}"
        ) from error


def expand_hosts(text: str) -> Iterator[str]:
    """Yield the hosts of a list as ``node[01-03,7],gpu5``; raises ValueError if it is not one."""
    position = 0
    while True:
        found = _HOST.match(text, position)
        if found is None:
            raise ValueError(f"no host name at character {position}")
        parts = [
            list(_expand_range(numbers)) if numbers else [name]
            for numbers, name in _PART.findall(found.group())
        ]
        yield from map("".join, itertools.product(*parts))
        position = found.end()
        if position == len(text):
            return
        if text[position] != ",":
            raise ValueError(f"no comma at character {position}")
        position += 1


def expand_counts(text: str) -> Iterator[int]:
    """Yield the numbers of a list as ``4(x2),3``; raises ValueError if it is not one."""
    for word in text.split(","):
        found = _COUNT.fullmatch(word)
        if found is None:
            raise ValueError(f"{word!r} is not a number, or a number and how often")
        value, times = found.groups()
        yield from itertools.repeat(int(value), int(times or 1))


def _expand_range(text: str) -> Iterator[str]:
    """Yield the numbers between two brackets, padded with zeros as the first of each range is."""
    for span in text.split(","):
        first, dash, last = span.partition("-")
        ends = [first, last] if dash else [first, first]
        if not all(end.isdigit() and len(end) <= _MAX_DIGITS for end in ends):
            raise ValueError(f"[{text}] is not a list of numbers")
        low, high = map(int, ends)
        if high - low > _MAX_RANGE:
            raise ValueError(f"[{text}] has too many numbers")
        yield from (f"{value:0{len(first)}}" for value in range(low, high + 1))


JobReader = Callable[[Environment], Job | Stale | None]

# The innermost first: torchrun may run under srun, hardly the other way round.
READERS: tuple[JobReader, ...] = (
    read_torchrun,
    read_open_mpi,
    read_pmix,
    read_pmi,
    read_plain,
    read_slurm,
)
