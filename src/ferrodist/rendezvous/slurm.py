# SPDX-License-Identifier: MIT OR Apache-2.0
"""SLURM: what the variables of a step say, and the lists they are written as.

Only a step of several tasks, which srun has started, counts. A batch script, and whatever it starts
without srun, has the variables of the whole allocation; they say nothing about one process.

On several hosts rank 0 listens at MASTER_ADDR, otherwise on the first host of the step, where SLURM
puts task 0 unless it is asked for an arbitrary distribution; the port is MASTER_PORT, otherwise one
from 20000 to 29999 that follows from the numbers of job and step.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator

from ferrodist.errors import InvalidArgument
from ferrodist.rendezvous.job import (
    MASTER_ADDRESS,
    MASTER_PORT,
    Endpoint,
    Environment,
    Launcher,
    is_set,
    number,
    quoted,
    require,
    shown,
    try_number,
    without_brackets,
)

_JOB, _STEP, _RESTARTS = "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"
_NUM_HOSTS, _HOSTS = "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST"
_HOST_NUMBER, _LOCAL_SIZES = "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"
_MAX_HOSTS = 1 << 16
_PORTS = range(20_000, 30_000)  # below those the kernel gives to outgoing connections

SLURM = Launcher(
    name="SLURM",
    rank="SLURM_PROCID",
    world_size="SLURM_STEP_NUM_TASKS",
    job="srun (SLURM_JOB_ID, SLURM_STEP_ID)",
    start="start all ranks with 'srun -n {size} python script.py'",
    local_rank="SLURM_LOCALID",
    required=("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", _JOB, _STEP, _NUM_HOSTS),
)

_HOST = re.compile(r"(?:[^\[\],\s]+|\[[0-9,\-]+\])+")
_PART = re.compile(r"\[([0-9,\-]+)\]|([^\[\],\s]+)")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?")
_MAX_DIGITS = 9
_MAX_RANGE = 1 << 16


def job_name(environ: Environment) -> str:
    return f"slurm-{environ[_JOB]}.{environ[_STEP]}-{environ.get(_RESTARTS) or '0'}"


def show_hosts(environ: Environment) -> str:
    return shown(environ, [_NUM_HOSTS]) if number(environ.get(_NUM_HOSTS, "")) >= 2 else ""


def has_tasks(environ: Environment, count: int) -> bool:
    """Tell whether a step has so many tasks: if srun has started others, it has not."""
    return try_number(environ, SLURM.world_size) == count


def try_local_size(environ: Environment) -> int | None:
    host = try_number(environ, _HOST_NUMBER)
    sizes = environ.get(_LOCAL_SIZES)
    if host is None or not sizes:
        return None
    try:
        return next(itertools.islice(expand_counts(sizes), host, None), None)
    except ValueError:
        return None


def endpoint_of(environ: Environment, job: str) -> Endpoint:
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
