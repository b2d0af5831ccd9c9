# SPDX-License-Identifier: MIT OR Apache-2.0
"""The goals: how many times as quick as a peer ferrodist means to be, per call and size."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.compare.engines import MPI
from benchmarks.compare.plan import MPI_HALOS, OURS, TORCH, TORCH_STEPS

from ferrodist.launch.bench import KB, MB

_ALL_REDUCING = ("allreduce", "reduce_scatter")
_SYMMETRIC = (*_ALL_REDUCING, "all_gather")
SPEED, TIME, MORE, IN_ALL = "x its speed", "x its time", "µs more", "µs in all"
ASARRAY = "x jnp.asarray more"
_LARGE = {"allreduce": 2.0, "reduce_scatter": 2.0, "all_gather": 1.5, "broadcast": 1.2}


def mpi_goal(call: str, variant: str, nbytes: int, ranks: int) -> float | None:
    """Return the least ratio of speed to the faster MPI; None where no goal is set."""
    if ranks != 2:
        return 1.0  # more ranks than cores: not to lose is enough
    if variant == "shared":
        return 5.0
    if call not in _LARGE:
        return 1.2 if call in ("send_recv", "scatter") and nbytes == 64 * KB else 1.0
    if nbytes <= KB:
        return 1.2 if call in _SYMMETRIC else 1.0
    return _LARGE[call] if nbytes >= 64 * KB else None


def gloo_goal(call: str, nbytes: int, ranks: int) -> float | None:
    """Return the least ratio of speed to Gloo; None where no goal is set."""
    if ranks != 2:
        return None
    if call == "broadcast":
        return 5.0 if nbytes > 64 * KB else None
    if call not in _SYMMETRIC:
        return None
    steps = ((KB, 100.0), (64 * KB, 30.0), (MB, 10.0))
    return next((goal for most, goal in steps if nbytes <= most), 6.0)


def tcp_goal(call: str, nbytes: int, ranks: int) -> float | None:
    """Return the least ratio of speed to Gloo when both use TCP; None where no goal is set."""
    if ranks != 2:
        return None
    is_small = nbytes <= 64 * KB
    if call in _SYMMETRIC:
        return 4.0 if is_small else 2.0 if nbytes >= 16 * MB else None
    return 1.5 if is_small else 1.1


def ddp_goal(step: str, ranks: int, model: str = "") -> float | None:
    """Return the most times the step without DDP that a step may take."""
    most = {"": 1.15, "small": 1.25, "many": 1.3}
    return most[model] if step == "ferrodist_step" and ranks == 2 else None


def copy_goal(variant: str, nbytes: int, ranks: int) -> float | None:
    """Return the most times one copy of the bytes that an allreduce may take."""
    if ranks != 2 or nbytes < 64 * MB:
        return None
    return {"": 1.5, "shared": 0.8}.get(variant)


def itself_goal(variant: str, nbytes: int, ranks: int) -> float | None:
    """Return the most times the plain allreduce that a variant of it may take."""
    if ranks != 2:
        return None
    if variant == "new":
        return 1.3
    if "float" in variant and nbytes >= 64 * KB:
        return 0.8 if nbytes >= 16 * MB else 1.2
    return None


@dataclass(frozen=True, slots=True)
class Versus:
    """What a call is held against, in which unit, and the goal in that unit."""

    engine: str
    call: str
    variant: str
    unit: str
    goal: float | None


def _versus_numpy(unit: str, goal: float | None) -> list[Versus]:
    return [Versus(OURS, "allreduce", "numpy", unit, goal)]


_VERSUS = {
    ("allreduce", "torch"): _versus_numpy(TIME, 2.0),
    ("allreduce", "torch new"): _versus_numpy(MORE, 1.0),
    ("allreduce", "number"): _versus_numpy(TIME, 2.0),
    ("allreduce", "dict"): _versus_numpy(TIME, 10.0),
    ("allreduce", "jax"): _versus_numpy(ASARRAY, 1.5),
    ("allreduce", "asarray"): _versus_numpy(TIME, None),
    ("allreduce", "async"): _versus_numpy(IN_ALL, 15.0),
    ("barrier", "pair"): [Versus("openmpi", "barrier", "pair", SPEED, 0.8)],
    ("halo", ""): [Versus(mpi, "halo", way, SPEED, 0.9) for mpi in MPI for way in MPI_HALOS],
} | {
    (call, ""): [
        Versus("mpich", call, "", SPEED, goal),
        Versus("openmpi", call, "", SPEED, None),
    ]
    for call, goal in (("sendrecv", 1.0), ("posted", 0.5), ("window", 0.5))
}


def torch_goal(call: str, nbytes: int) -> float:
    """Return the least ratio of speed to Gloo when both are called by torch.distributed."""
    if call in TORCH_STEPS:
        return 1.5
    steps = ((8, 15.0), (64 * KB, 10.0), (MB, 4.0))
    return next((goal for most, goal in steps if nbytes <= most), 2.0)


def versus(engine: str, call: str, variant: str, nbytes: int = 0) -> list[Versus]:
    """Return what a call that is not in the tables of peers is held against."""
    if variant == TORCH and engine == OURS:
        return [Versus("gloo", call, variant, SPEED, torch_goal(call, nbytes))]
    if variant.endswith(" hogs") and engine.startswith(OURS):
        return [Versus("gloo", call, variant, SPEED, 1.0)]
    return _VERSUS.get((call, variant), []) if engine == OURS else []
