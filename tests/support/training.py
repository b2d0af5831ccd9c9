"""What the tests of DDP train: small models, their data, and one process that does it all.

Everything is made from numbers of its own, never from torch's global generator: simulated ranks are
threads and share that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import ferrodist

Loss = Callable[[nn.Module, int, int], torch.Tensor]  # of a module, a rank and a step

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
}


def fill(module: nn.Module, seed: int) -> Any:
    """Give a module parameters that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


def mlp(seed: int = 0) -> nn.Sequential:
    return fill(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), seed)


def normed(seed: int = 0) -> nn.Sequential:
    """A model with buffers that forward changes."""
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)]
    return fill(nn.Sequential(*layers), seed)


class Transformer(nn.Module):
    """One block between an embedding and itself: tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding(tokens)))


def transformer(seed: int = 0) -> Transformer:
    return fill(Transformer(), seed)


def batch(rank: int, step: int, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + 100 * step + rank)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)


def tokens(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2000 + 100 * step + rank)
    return torch.randint(11, (3, 7), generator=generator)


def squares(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The loss of an mlp."""
    x, y = batch(rank, step)
    return ((module(x) - y) ** 2).mean()


def next_tokens(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The loss of a transformer."""
    x = tokens(rank, step)
    return nn.functional.cross_entropy(module(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


MODELS: dict[str, tuple[Callable[[int], nn.Module], Loss]] = {
    "mlp": (mlp, squares),
    "transformer": (transformer, next_tokens),
}


def alone(
    module: nn.Module, loss: Loss, num_ranks: int, num_steps: int, optimizer: str = "sgd"
) -> dict[str, Any]:
    """Train in one process, shard after shard, and average the gradients in rank order."""
    parameters = list(module.parameters())
    update = OPTIMIZERS[optimizer](parameters)
    for step in range(num_steps):
        shards = []
        for rank in range(num_ranks):
            update.zero_grad()
            loss(module, rank, step).backward()
            shards.append([p.grad for p in parameters])
        for parameter, gradients in zip(parameters, zip(*shards, strict=True), strict=True):
            parameter.grad = mean_in_order(parameter, gradients)
        update.step()
    return module.state_dict()


def mean_in_order(
    parameter: nn.Parameter, gradients: Iterable[torch.Tensor | None]
) -> torch.Tensor | None:
    """Average in rank order, 16-bit floats in float32; None if no rank has a gradient."""
    parts = list(gradients)
    if all(part is None for part in parts):
        return None
    accumulator = torch.float32 if parameter.element_size() == 2 else parameter.dtype
    total, *others = (torch.zeros_like(parameter) if p is None else p for p in parts)
    total = total.to(accumulator)
    for part in others:
        total = total + part.to(accumulator)
    if total.is_complex():  # by a real number: each part for itself
        return torch.view_as_complex(torch.view_as_real(total) / len(parts))
    return (total / len(parts)).to(parameter.dtype)


def train(
    ddp: ferrodist.DDP, loss: Loss, num_steps: int, optimizer: str = "sgd", **zero_grad: bool
) -> dict[str, Any]:
    """Train on this rank among all."""
    update = OPTIMIZERS[optimizer](ddp.parameters())
    for step in range(num_steps):
        update.zero_grad(**zero_grad)
        loss(ddp, ddp.backend.rank, step).backward()
        update.step()
    return ddp.state_dict()


def bits(tensor: torch.Tensor | None) -> bytes | None:
    """The bytes of a tensor, by which also zeros of different sign are told apart."""
    if tensor is None:
        return None
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same_bits(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return list(first) == list(second) and all(
        bits(first[name]) == bits(second[name]) for name in first
    )


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()
    }


def arrays_made(backend: ferrodist.Backend) -> list[Any]:
    """Note the shapes of the arrays that a backend makes from now on."""
    shapes, empty = [], backend.empty

    def noting(shape: Any, *rest: Any) -> Any:
        shapes.append(shape)
        return empty(shape, *rest)

    backend.empty = noting
    return shapes
