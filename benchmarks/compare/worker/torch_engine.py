# SPDX-License-Identifier: MIT OR Apache-2.0
"""torch.distributed over Gloo, or ferrodist, on tensors that share the memory of the arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

Array = np.ndarray[Any, Any]
Call = Callable[[], object]

_BATCH, _WIDTH, _LAYERS = 64, 2048, 3  # an MLP of 14.2 million parameters, with 800 outputs


class Engine:
    """A group of processes that meet through a file."""

    def __init__(self, meeting_file: str, rank: str, world: str, backend: str = "gloo") -> None:
        torch.set_num_threads(1)  # as torchrun does for several processes
        self.rank = int(rank)
        self.world = int(world)
        self.versions = {"torch": str(torch.__version__)}
        dist.init_process_group(
            backend, init_method=f"file://{meeting_file}", rank=self.rank, world_size=self.world
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
            "all_gather": lambda: dist.all_gather_single(got, given),
            "gather": lambda: dist.gather(given, parts_got),
            "scatter": lambda: dist.scatter(got, parts_given),
            "reduce_scatter": lambda: dist.reduce_scatter_single(got, given),
            "all_to_all": lambda: dist.all_to_all_single(got, given),
            "barrier": dist.barrier,
            "send_recv": self._ping_pong(given, got),
            "ddp_step": lambda: self._ddp_step(),
            "fsdp2_step": lambda: self._fsdp2_step(),
        }

    @functools.cached_property
    def _ddp_step(self) -> Call:
        return _make_step(DistributedDataParallel(_make_mlp()))

    @functools.cached_property
    def _fsdp2_step(self) -> Call:
        model = _make_mlp()
        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer)
        return _make_step(fully_shard(model))

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


def _make_mlp() -> Any:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(_LAYERS):
        layers += [torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(_WIDTH, 800))


def _make_step(model: Any) -> Call:
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(_BATCH, _WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step
