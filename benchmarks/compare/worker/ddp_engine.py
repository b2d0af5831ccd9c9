# SPDX-License-Identifier: MIT OR Apache-2.0
"""A training step of some models: without DDP, with ferrodist's, with torch's own over Gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ferrodist

Array = np.ndarray[Any, Any]
Call = Callable[[], object]

_BATCH = 64
_NUM_TENSORS, _NUM_ELEMENTS = 2000, 100


class Sums(torch.nn.Module):  # type: ignore[misc]  # types of torch are not looked at
    """Many small tensors, each of which gets its gradient alone."""

    def __init__(self) -> None:
        super().__init__()
        tensors = [torch.zeros(_NUM_ELEMENTS) for _ in range(_NUM_TENSORS)]
        self.tensors = torch.nn.ParameterList(tensors)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add all tensors to ``x``, one after the other."""
        for tensor in self.tensors:
            x = x + tensor
        return x


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
            **self._make_steps("", lambda: _make_mlp(2048, 3, 800), 2048),  # 14.2 M parameters
            **self._make_steps(" small", lambda: _make_mlp(64, 4, 64), 64),  # 0.02 M, 10 tensors
            **self._make_steps(" many", Sums, _NUM_ELEMENTS),
        }

    def _make_steps(
        self, suffix: str, make_model: Callable[[], torch.nn.Module], width: int
    ) -> dict[str, Call]:
        """Return the kinds of step; a short one without DDP has a barrier, to wait as DDP does."""
        x, backend = torch.randn(_BATCH, width), self.backend
        plain = _make_step(make_model(), x)

        def with_barrier() -> None:
            plain()
            ferrodist.barrier(backend)

        return {
            f"plain_step{suffix}": with_barrier if suffix else plain,
            f"ferrodist_step{suffix}": _make_step(ferrodist.DDP(make_model(), backend), x),
            f"torch_step{suffix}": _make_step(
                torch.nn.parallel.DistributedDataParallel(make_model()), x
            ),
        }

    def calls(self, x: Array, out: Array) -> dict[str, Call]:
        """Return the kinds of step; they have arrays of their own."""
        return self._steps

    def close(self) -> None:
        """Leave both groups."""
        dist.destroy_process_group()
        self.backend.close()


def _make_mlp(width: int, num_layers: int, num_results: int) -> torch.nn.Module:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(num_layers):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, num_results))


def _make_step(model: torch.nn.Module, x: torch.Tensor) -> Call:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step
