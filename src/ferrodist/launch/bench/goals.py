# SPDX-License-Identifier: MIT OR Apache-2.0
"""The goals: how many times as quick as a peer ferrodist means to be, per call and size."""

from __future__ import annotations

from ferrodist.launch.bench.plan import KB, MB

_ALL_REDUCING = ("allreduce", "reduce_scatter")
_SYMMETRIC = (*_ALL_REDUCING, "all_gather")
_LARGE = {"allreduce": 2.0, "reduce_scatter": 2.0, "all_gather": 1.5, "broadcast": 1.2}


def mpi_goal(call: str, variant: str, nbytes: int, ranks: int) -> float | None:
    """Return the least ratio of speed to the faster MPI; None where no goal is set."""
    if ranks != 2:
        return 1.0  # more ranks than cores: not to lose is enough
    if variant == "shared":
        return 5.0
    if call not in _LARGE:
        return 1.0
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


def ddp_goal(step: str, ranks: int) -> float | None:
    """Return the most times the step without DDP that a step may take."""
    return 1.15 if step == "ferrodist_step" and ranks == 2 else None


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
