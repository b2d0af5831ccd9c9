# SPDX-License-Identifier: MIT OR Apache-2.0
"""Software: which libraries and backends work, and what the environment says to them.

Each library is tried in a process of its own, all side by side. Nothing is taken from a launcher:
the pipe with a job's secret stays full for the rank it is for.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from ferrodist import _native
from ferrodist.backends.registry import backend_names
from ferrodist.config import AUTO, Config, read_setting, unread_variables, variable
from ferrodist.errors import AuthenticationError, DistributedError, InvalidArgument
from ferrodist.launch.doctor.report import (
    CheckContext,
    Diagnostic,
    LogCollector,
    fail,
    note,
    ok,
    start,
    warn,
)
from ferrodist.launch.ray_cluster import show_resources
from ferrodist.rendezvous.exchange import srun_kind
from ferrodist.rendezvous.find_job import NO_SETTINGS, find_job, try_run_job
from ferrodist.rendezvous.job import brief, no_secret, secret_from_file
from ferrodist.rendezvous.munge import Munge, try_munge

_SCRIPT = Path(__file__).with_name("probes.py")
_LIMIT = 20.0  # seconds for the import of a large library from a slow disk
_MUNGE_SECONDS = 5.0
_TRIED_BACKENDS = ("shared_memory", "tcp")
_EXTRAS = {"torch": "torch", "mpi4py": "mpi", "ray": "ray", "jax": "jax", "cryptography": "tls"}
_USES = {
    "torch": "DDP, tensors, and the backends 'gloo' and 'nccl'",
    "jax": "JAX arrays",
    "mpi4py": "init(backend='mpi'), and mpiexec on several hosts without MASTER_ADDR (on one host "
    "mpiexec is enough for the other backends)",
    "ray": "ferrodist.run on a Ray cluster",
    "cryptography": "TLS",
}
# What would make a library believe that it is a rank of somebody's job.
_OF_LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "SLURM_", "MPI_", "HYDRA_", "FERRODIST_BACKEND")
_MPI_NAMES = {"open mpi": "Open MPI", "hydra": "MPICH", "mpich": "MPICH", "intel": "Intel MPI"}

_SETTINGS = {variable(one.name): one.name for one in fields(Config)}
_SECRET_FILE = variable("secret_file")
_FORMER_IFNAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


class Outcome(NamedTuple):
    """What a probe has printed, or why it has not."""

    facts: Mapping[str, Any]
    error: str = ""


def check_engines(context: CheckContext, limit: float = _LIMIT) -> Iterator[Diagnostic]:
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "msgpack")]
    yield ok(f"{', '.join(versions)}; native code for {_native.cpu_level()}")
    installed = [name for name in _EXTRAS if importlib.util.find_spec(name) is not None]
    running = {name: _start(context, name, limit) for name in installed}
    backends = [name for name in _TRIED_BACKENDS if name in backend_names()]
    trials = {name: _start(context, "ranks", limit, backend=name) for name in backends}
    commands = ("mpiexec --version", "srun --version", "srun --mpi=list", "scontrol show config")
    mpiexec, srun, kinds, conf = (start(_run, one, context.environ, limit) for one in commands)
    for name, trial in trials.items():
        yield _judge_ranks(name, trial.result())
    for name, probe in running.items():
        yield _judge(name, probe.result())
        if name == "torch":
            yield from _judge_torch(probe.result().facts)
        if name == "mpi4py":
            yield from _judge_launcher(probe.result(), _mpi_name(mpiexec.result()))
            default = context.environ.get("SLURM_MPI_TYPE") or _mpi_default(conf.result())
            yield from _judge_srun(probe.result(), kinds.result().split(), default)
    yield from check_slurm(context, _last_line(srun.result()))
    yield from _missing(context, [name for name in _EXTRAS if name not in running])


def _start(context: CheckContext, name: str, limit: float, backend: str = "") -> Future[Outcome]:
    environ = {
        key: value for key, value in context.environ.items() if not key.startswith(_OF_LAUNCHERS)
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
    return Outcome(facts) if facts else Outcome({}, "it ended without any output")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def _judge_ranks(name: str, outcome: Outcome) -> Diagnostic:
    if outcome.facts.get("is_right"):
        return ok(f"{name}: two ranks add up their numbers")
    error = outcome.error or f"two ranks got {outcome.facts['totals']}, expected 3.0 twice"
    return fail(
        f"{name} does not work: {error}",
        f"look at the diagnostics above; '{variable('backend')}={name} ferrodist run -n 2 "
        "script.py' shows all of it",
    )


def _judge(name: str, outcome: Outcome) -> Diagnostic:
    if outcome.error:
        return warn(
            f"{name} is installed but does not work: {outcome.error}",
            f"'python -c \"import {name}\"' shows all of it; reinstall or remove it",
        )
    return ok(f"{name} {outcome.facts['version']}{_details(name, outcome.facts)}")


def _details(name: str, facts: Mapping[str, Any]) -> str:
    if name == "torch":
        gloo = facts["gloo"] if facts["gloo"] in ("no", "works") else "fails"
        built = f"gloo {gloo}, nccl {facts['nccl']}, CUDA {facts['cuda']}"
        return f": {built}; GPUs that it sees: {facts['devices']}"
    if name == "mpi4py":
        threads = (
            "" if facts["threads"] else ", for one thread: calls in flight run when waited for"
        )
        return f" with {facts['library']}, MPI {facts['standard']}{threads}"
    if name == "ray":
        free = show_resources(facts.get("free", {}))
        is_there = facts["num_nodes"] > 0
        return f": a cluster of {facts['num_nodes']} nodes, free: {free}" if is_there else ""
    return " for TLS" if name == "cryptography" else ""


def _judge_torch(facts: Mapping[str, Any]) -> Iterator[Diagnostic]:
    if facts.get("gloo", "works") not in ("no", "works"):
        yield warn(
            f"two ranks of torch's Gloo on 127.0.0.1 fail: {facts['gloo']}",
            "this concerns backend 'gloo' and torch.distributed; see that loopback is up, and that "
            "no firewall closes its ports",
        )
    if facts.get("gpus") and not facts["devices"]:
        why = "was built without CUDA" if facts["cuda"] == "no" else "cannot use them"
        yield warn(
            f"this host has GPUs ({facts['gpus']}), and torch {facts['version']} {why}",
            "backend 'nccl' needs them: install the build of torch for your CUDA, or see why "
            "'python -c \"import torch; torch.cuda.init()\"' fails",
        )


def _run(command: str, environ: Mapping[str, str], limit: float) -> str:
    """Return what a program of this user's path prints; nothing if there is none, or it fails."""
    program, *options = command.split()
    path = shutil.which(program, path=environ.get("PATH"))
    if path is None:
        return ""
    ending = run_child([path, *options], environ, limit)
    return ending.stdout + ending.stderr if ending.code == 0 else ""


def _mpi_name(text: str) -> str:
    return next((name for word, name in _MPI_NAMES.items() if word in text.lower()), "")


def _judge_launcher(outcome: Outcome, launcher: str) -> Iterator[Diagnostic]:
    library = _mpi_name(outcome.facts.get("library", ""))
    if library and launcher and library != launcher:
        yield warn(
            f"mpiexec is that of {launcher}, mpi4py uses {library}",
            "for mpi4py each process would be a world of its own, which concerns backend 'mpi', "
            f"programs that use mpi4py, and jobs on several hosts: take the mpiexec of {library}, "
            f"or mpi4py for {launcher}. On one host the other backends need mpiexec alone",
        )


def _mpi_default(configuration: str) -> str:
    """Return how srun starts steps of this SLURM unless it is told, from its configuration."""
    found = re.search(r"^MpiDefault\s*=\s*(\S+)", configuration, re.MULTILINE)
    return found[1] if found else ""


def _judge_srun(outcome: Outcome, kinds: list[str], default: str) -> Iterator[Diagnostic]:
    """Say how srun has to start ranks of the MPI of mpi4py, if this SLURM can; it may not say."""
    library = _mpi_name(outcome.facts.get("library", ""))
    if not library or not kinds:
        return
    kind, option = srun_kind(library), f"srun --mpi={srun_kind(library)}"
    if default.startswith(kind):
        yield ok(f"srun starts ranks of {library}, which mpi4py uses (MpiDefault={default})")
    elif kind in kinds:
        yield note(
            f"for {library}, which mpi4py uses, a step is started with '{option}'",
            f"without it (MpiDefault={default or 'not known'}) every task would be a world of its "
            "own for MPI, which init(backend='mpi') refuses; other backends need no option",
        )
    else:
        yield warn(
            f"this SLURM has no '{option}', which {library} needs, and mpi4py uses {library}",
            "init(backend='mpi') works under mpiexec, and the other backends under srun; "
            "'srun --mpi=list' shows what there is",
        )


def check_slurm(context: CheckContext, version: str) -> Iterator[Diagnostic]:
    """Look at SLURM, and at MUNGE, by which the ranks of a step on several hosts get a secret."""
    if version:
        yield ok(f"srun is there: {version}")
    setting, path = variable("munge_socket"), context.config.munge_socket
    munge = try_munge(path)
    if munge is not None:
        try:
            yield start(_try_credential, munge).result(_MUNGE_SECONDS)
        except TimeoutError:
            yield fail(
                f"MUNGE, at {munge.socket_path}, has not answered within {_MUNGE_SECONDS:g} s",
                "munged hangs: restart it, or make a secret file for jobs on several hosts",
            )
    elif path:
        yield fail(
            f"{setting}={brief(path)}: MUNGE cannot be reached there",
            f"expected the socket of munged, and libmunge.so.2; unset {setting} for the usual one",
        )
    elif version:
        yield note(
            "srun is there, and no MUNGE",
            "ranks of a step on several hosts then need a secret file, as "
            f"{variable('secret_file')} names one: is munged running, and libmunge2 installed?",
        )


def _try_credential(munge: Munge) -> Diagnostic:
    try:
        content, uid = munge.decode(munge.encode(b"ferrodist doctor"))
    except AuthenticationError as error:
        return warn(
            f"MUNGE does not work: {error}",
            f"is munged running? otherwise make a secret file, as {variable('secret_file')} names "
            "one, for jobs on several hosts",
        )
    if (content, uid) != (b"ferrodist doctor", os.geteuid()):
        return warn(
            f"MUNGE takes this process, of user {os.geteuid()}, for one of user {uid}",
            "in a user namespace ranks cannot prove themselves by MUNGE: make a secret file",
        )
    return ok(f"MUNGE, at {munge.socket_path}: a credential is made and read")


def _missing(context: CheckContext, names: list[str]) -> Iterator[Diagnostic]:
    if "cryptography" in names and context.config.tls:
        yield fail(
            f"{variable('tls')} is set, and cryptography is not installed",
            "pip install 'ferrodist[tls]'",
        )
    if names:
        extras = ",".join(_EXTRAS[name] for name in names)
        uses = "; ".join(f"{name} is for {_USES[name]}" for name in names)
        yield note(
            f"not installed: {', '.join(names)}",
            f"none is needed: {uses}. pip install 'ferrodist[{extras}]'",
        )


class Ending(NamedTuple):
    """How a child ended: its exit code, minus a signal, or None if its time was up."""

    code: int | None
    stdout: str
    stderr: str


def run_child(command: list[str], environ: Mapping[str, str], limit: float) -> Ending:
    ours, lifeline = os.pipe()
    try:
        with subprocess.Popen(
            command,
            env=dict(environ),
            stdin=ours,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as child:
            try:
                stdout, stderr = child.communicate(timeout=limit)
                return Ending(child.returncode, stdout, stderr)
            except subprocess.TimeoutExpired:
                return Ending(None, "", "")
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
    finally:
        os.close(ours)
        os.close(lifeline)


def check_environment(context: CheckContext) -> Iterator[Diagnostic]:
    environ = dict(context.environ)
    yield from _launchers(environ)
    yield from _misspelt(environ)
    good = {}
    for name in sorted(environ.keys() & _SETTINGS.keys()):
        try:
            good[name] = read_setting(_SETTINGS[name], environ)
        except DistributedError as error:
            yield _wrong(str(error))
    yield from _changed(environ, good)
    yield from _odd(good)
    own = variable("socket_ifname")
    found = [name for name in _FORMER_IFNAMES if environ.get(name)]
    if found and own not in environ:
        shown = ", ".join(f"{name}={brief(environ[name])}" for name in found)
        yield note(
            f"{shown} is for other libraries; ferrodist does not follow it",
            f"set {own} too if its ranks are to use the same interface",
        )


def _wrong(text: str) -> Diagnostic:
    """Make a diagnostic of an error whose first half says what, and the second what to do."""
    what, _, advice = text.partition("; ")
    return fail(what, advice or "correct it, or unset it")


def _launchers(environ: Mapping[str, str]) -> Iterator[Diagnostic]:
    try:
        started = try_run_job(environ)
        if started is not None:
            yield ok(
                f"'ferrodist run' has set its variables: rank {started.rank} of "
                f"{started.world_size} in job {brief(started.name)!r}"
            )
            return
        with LogCollector() as log:
            is_pipe = _is_pipe(environ.get(_SECRET_FILE, ""))  # it could be read only once
            job = find_job({n: v for n, v in environ.items() if not is_pipe or n != _SECRET_FILE})
    except AuthenticationError as error:
        if not environ.get(_SECRET_FILE):  # if there is one, it is looked at by itself
            yield _wrong(str(error))
        return
    except DistributedError as error:
        yield _wrong(str(error))
        return
    for record in log.records:
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            yield warn(text, "each process would compute alone: is that meant?")
        else:
            yield ok(text)
    if not (job.meets_here or job.has_secret or job.uses_munge or environ.get(_SECRET_FILE)):
        yield _wrong(str(no_secret(job)))


def _misspelt(environ: Mapping[str, str]) -> Iterator[Diagnostic]:
    for name, meant in unread_variables(environ, NO_SETTINGS).items():
        yield warn(
            f"{name} is no setting of this version, and nobody reads it",
            f"did you mean {meant}?" if meant else f"unset {name}",
        )


def _changed(environ: Mapping[str, str], values: Mapping[str, object]) -> Iterator[Diagnostic]:
    usual = Config()
    changed = [n for n, value in values.items() if value != getattr(usual, _SETTINGS[n])]
    if changed:
        yield ok("set: " + ", ".join(f"{name}={brief(environ[name])}" for name in changed))
    else:
        yield ok("all settings have their defaults")


def _odd(values: Mapping[str, object]) -> Iterator[Diagnostic]:
    """Find settings that are right by themselves and make no sense here."""
    settings: dict[str, Any] = {_SETTINGS[name]: value for name, value in values.items()}
    try:
        Config(**settings)
    except InvalidArgument as error:
        yield _wrong(str(error))
    names, asked = backend_names(), settings.get("backend", AUTO)
    if asked not in (AUTO, *names):
        yield fail(
            f"{variable('backend')}={brief(asked)}: no such backend",
            f"known: auto, {', '.join(names)}",
        )
    if path := settings.get("secret_file"):
        yield from _secret(path)


def _is_pipe(path: str) -> bool:
    try:
        return stat.S_ISFIFO(Path(path).expanduser().stat().st_mode)
    except (OSError, ValueError):
        return False


def _secret(path: str) -> Iterator[Diagnostic]:
    """Judge the file with the job's secret as a rank would."""
    if _is_pipe(path):  # what is read from it would be missing for the rank
        yield note(f"{_SECRET_FILE}={brief(path)} is a pipe, and was not read")
        return
    try:
        secret_from_file(path)
    except DistributedError as error:
        yield _wrong(str(error))
