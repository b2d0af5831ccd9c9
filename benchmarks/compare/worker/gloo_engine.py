# SPDX-License-Identifier: MIT OR Apache-2.0
"""Gloo through torch.distributed, on tensors that share the memory of the arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

Array = np.ndarray[Any, Any]
Call = Callable[[], object]


class Engine:
    """A group of processes that meet through a file."""

    def __init__(self, meeting_file: str, rank: str, world: str) -> None:
        torch.set_num_threads(1)  # as torchrun does for several processes
        self.rank = int(rank)
        self.world = int(world)
        self.versions = {"torch": str(torch.__version__)}
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting_file}", rank=self.rank, world_size=self.world
        )

    def calls(self, x: Array, out: Array) -> dict[str, Call]:
        """Return the calls on these arrays; allreduce, broadcast and reduce work in place."""
        given, got = torch.from_numpy(x), torch.from_numpy(out)
        if len(x) == len(out):
            got.copy_(given)
        is_root = self.rank == 0
        parts_got = list(got.chunk(self.world)) if is_root else None
        parts_given = list(given.chunk(self.world)) if is_root else None
        return {
            "allreduce": lambda: dist.all_reduce(got),
            "broadcast": lambda: dist.broadcast(got, 0),
            "reduce": lambda: dist.reduce(got, 0),
            "all_gather": lambda: dist.all_gather_into_tensor(got, given),
            "gather": lambda: dist.gather(given, parts_got),
            "scatter": lambda: dist.scatter(got, parts_given),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(got, given),
            "all_to_all": lambda: dist.all_to_all_single(got, given),
            "barrier": dist.barrier,
            "send_recv": self._ping_pong(given, got),
        }

    def _ping_pong(self, given: Any, got: Any) -> Call:
        def ping() -> None:
            dist.send(given, 1)
            dist.recv(got, 1)

        def pong() -> None:
            dist.recv(got, 0)
            dist.send(given, 0)

        return ping if self.rank == 0 else pong

    def start_allreduce(self, x: Array, out: Array) -> Call:
        """Begin an allreduce in place and return what waits for its end."""
        wait: Call = dist.all_reduce(torch.from_numpy(out), async_op=True).wait
        return wait

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()
