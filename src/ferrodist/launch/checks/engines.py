# SPDX-License-Identifier: MIT OR Apache-2.0
"""Engines: which libraries are installed and work, ferrodist's own backends included.

Each is tried in a process of its own, all side by side.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from ferrodist import _native
from ferrodist.backends.registry import backend_names
from ferrodist.config import variable
from ferrodist.launch.checks.background import start
from ferrodist.launch.checks.child import run_child
from ferrodist.launch.checks.finding import Finding, Subject
from ferrodist.launch.checks.situation import Situation

about = Subject("engines")

_SCRIPT = Path(__file__).with_name("probes.py")
_LIMIT = 20.0  # seconds for the import of a large library from a slow disk
_TRIED_BACKENDS = ("shared_memory", "tcp")
_EXTRAS = {"torch": "torch", "mpi4py": "mpi", "jax": "jax", "cryptography": "tls"}
# What would make a library believe that it is a rank of somebody's job.
_OF_LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "SLURM_", "MPI_", "HYDRA_", "FERRODIST_BACKEND")
_MPI_NAMES = {"open mpi": "Open MPI", "hydra": "MPICH", "mpich": "MPICH", "intel": "Intel MPI"}


class Outcome(NamedTuple):
    """What a probe has printed, or why it has not."""

    facts: Mapping[str, Any]
    error: str = ""


def check(situation: Situation, limit: float = _LIMIT) -> Iterator[Finding]:
    """Try everything at once, and tell it in order."""
    yield about.ok(_own_parts())
    running = {name: _start(situation, name, limit) for name in _EXTRAS if _is_installed(name)}
    backends = [name for name in _TRIED_BACKENDS if name in backend_names()]
    trials = {name: _start(situation, "ranks", limit, backend=name) for name in backends}
    launcher = start(_mpiexec, situation.environ, limit)
    for name, trial in trials.items():
        yield _judge_ranks(name, trial.result())
    for name, probe in running.items():
        yield _judge(name, probe.result())
        if name == "mpi4py":
            yield from _judge_launcher(probe.result(), launcher.result())
    yield from _missing(situation, [name for name in _EXTRAS if name not in running])


def _own_parts() -> str:
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "msgpack")]
    return f"{', '.join(versions)}; native code for {_native.cpu_level()}"


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _start(situation: Situation, name: str, limit: float, backend: str = "") -> Future[Outcome]:
    environ = {
        key: value for key, value in situation.environ.items() if not key.startswith(_OF_LAUNCHERS)
    }
    if backend:
        environ[variable("backend")] = backend
    return start(run_probe, [sys.executable, "-P", str(_SCRIPT), name], environ, limit)


def run_probe(command: list[str], environ: Mapping[str, str], limit: float) -> Outcome:
    """Run a probe; whatever it does, it has ended when this returns."""
    ending = run_child(command, environ, limit)
    if ending.code is None:
        return Outcome({}, f"it hangs: no end after {limit:g} s")
    if ending.code < 0:
        return Outcome({}, f"it ended by {signal.Signals(-ending.code).name}")
    if ending.code > 0:
        return Outcome({}, _last_line(ending.stderr) or f"it ended with code {ending.code}")
    facts: Mapping[str, Any] = json.loads(_last_line(ending.stdout) or "{}")
    if "error" in facts:
        return Outcome({}, facts["error"])
    return Outcome(facts) if facts else Outcome({}, "it ended without a word")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def _judge_ranks(name: str, outcome: Outcome) -> Finding:
    if outcome.facts.get("is_right"):
        return about.ok(f"{name}: two ranks add up their numbers")
    error = outcome.error or f"two ranks got {outcome.facts['totals']}, expected 3.0 twice"
    return about.error(
        f"{name} does not work: {error}",
        f"look at the findings above; '{variable('backend')}={name} ferrodist run -n 2 script.py' "
        "shows all of it",
    )


def _judge(name: str, outcome: Outcome) -> Finding:
    if outcome.error:
        return about.warning(
            f"{name} is installed but does not work: {outcome.error}",
            f"'python -c \"import {name}\"' shows all of it; reinstall or remove it",
        )
    facts = outcome.facts
    return about.ok(f"{name} {facts['version']}{_DETAILS.get(name, _no_details)(facts)}")


def _no_details(facts: Mapping[str, Any]) -> str:
    return ""


def _torch_details(facts: Mapping[str, Any]) -> str:
    parts = [f"{engine} {'yes' if facts[engine] else 'no'}" for engine in ("gloo", "nccl")]
    return f": {', '.join(parts)}, CUDA devices {facts['devices']}"


def _mpi_details(facts: Mapping[str, Any]) -> str:
    return f" with {facts['library']}"


_DETAILS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "torch": _torch_details,
    "mpi4py": _mpi_details,
    "cryptography": lambda facts: " for TLS",
}


def _mpiexec(environ: Mapping[str, str], limit: float) -> str:
    """Ask the mpiexec of this user's path whose it is; nothing if there is none."""
    path = shutil.which("mpiexec", path=environ.get("PATH"))
    return "" if path is None else _mpi_name(run_child([path, "--version"], environ, limit).stdout)


def _mpi_name(text: str) -> str:
    """Find the name of an MPI in what it says of itself; nothing if it is another."""
    return next((name for word, name in _MPI_NAMES.items() if word in text.lower()), "")


def _judge_launcher(outcome: Outcome, launcher: str) -> Iterator[Finding]:
    library = _mpi_name(outcome.facts.get("library", ""))
    if library and launcher and library != launcher:
        yield about.error(
            f"mpiexec is that of {launcher}, mpi4py uses {library}",
            "each process would be a world of its own: start ranks with the mpiexec of "
            f"{library}, or install mpi4py for {launcher}",
        )


def _missing(situation: Situation, names: list[str]) -> Iterator[Finding]:
    if "cryptography" in names and situation.config.tls:
        yield about.error(
            f"{variable('tls')} is set, and cryptography is not installed",
            "pip install 'ferrodist[tls]'",
        )
    if names:
        extras = ",".join(_EXTRAS[name] for name in names)
        yield about.note(
            f"not installed: {', '.join(names)}",
            f"only if you want them: pip install 'ferrodist[{extras}]'",
        )
