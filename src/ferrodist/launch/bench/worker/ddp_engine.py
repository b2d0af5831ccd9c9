# SPDX-License-Identifier: MIT OR Apache-2.0
"""A training step of an MLP: without DDP, with ferrodist's, and with torch's own over Gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ferrodist

Array = np.ndarray[Any, Any]
Call = Callable[[], object]

_WIDTH, _NUM_LAYERS, _NUM_RESULTS, _BATCH = 2048, 3, 800, 64  # 14.2 million parameters


class Engine:
    """The world that ``ferrodist run`` made, and torch's group of the same ranks."""

    def __init__(self, meeting_file: str) -> None:
        self.backend = ferrodist.init("shared_memory")
        self.rank = self.backend.rank
        self.world = self.backend.world_size
        self.versions = {"ferrodist": ferrodist.__version__, "torch": str(torch.__version__)}
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting_file}", rank=self.rank, world_size=self.world
        )
        self._steps = {
            "plain_step": _make_step(_make_model()),
            "ferrodist_step": _make_step(ferrodist.DDP(_make_model(), self.backend)),
            "torch_step": _make_step(torch.nn.parallel.DistributedDataParallel(_make_model())),
        }

    def calls(self, x: Array, out: Array) -> dict[str, Call]:
        """Return the kinds of step; they have arrays of their own."""
        return self._steps

    def close(self) -> None:
        """Leave both groups."""
        dist.destroy_process_group()
        self.backend.close()


def _make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(_NUM_LAYERS):
        layers += [torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(_WIDTH, _NUM_RESULTS))


def _make_step(model: torch.nn.Module) -> Call:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(_BATCH, _WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step
