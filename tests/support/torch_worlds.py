"""Ranks that are processes and have called ``init_process_group("ferrodist")``."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ferrodist
import ferrodist.torch
from jobs import Job


def in_torch_world(
    fn: Callable[[int, Connection], Any],
    meeting: str,
    seconds: float,
    backend: ferrodist.Backend,
    pipe: Connection,
) -> Any:
    """Join a world of torch by a file, as the rank that this process is already."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "ferrodist",
        init_method=f"file://{meeting}",
        rank=backend.rank,
        world_size=backend.world_size,
        timeout=timedelta(seconds=seconds),
    )
    try:
        return fn(backend.rank, pipe)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def torch_job(
    start_job: Callable[..., Job],
    world: int | str,
    fn: Callable[[int, Connection], Any],
    *,
    seconds: float = 30.0,
    **environment: str,
) -> Job:
    """Start ranks that run ``fn(rank, pipe)`` in a world of torch, whose timeout is given."""
    meeting = str(Path(tempfile.mkdtemp(prefix="ferrodist-test-")) / "store")
    return start_job(world, functools.partial(in_torch_world, fn, meeting, seconds), **environment)
