"""Training on n ranks is training in one process: bit for bit, shard by shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ferrodist
from ferrodist.testing import run_ranks
from training import (
    MODELS,
    alone,
    batch,
    bits,
    fill,
    gradients_of,
    mean_in_order,
    mlp,
    normed,
    same_bits,
    squares,
    tokens,
    train,
)

SMALL = {"first_bucket_mib": 1e-4, "bucket_mib": 4e-4}  # several buckets for small models
JOINED_BOUND = 2e-5  # parameters after five steps, against one process on the joined batch


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_gradients_are_the_mean_of_the_ranks_own(num_ranks):
    def body(backend: ferrodist.Backend) -> Any:
        backend.reproducible = True
        own = mlp()
        squares(own, backend.rank, 0).backward()
        ddp = ferrodist.DDP(mlp(backend.rank), backend, **SMALL)
        squares(ddp, backend.rank, 0).backward()
        return [p.grad for p in own.parameters()], [p.grad for p in ddp.parameters()]

    results = run_ranks(num_ranks, body, timeout=60)
    for number, parameter in enumerate(mlp().parameters()):
        mean = mean_in_order(parameter, [own[number] for own, _ in results])
        assert all(bits(ours[number]) == bits(mean) for _, ours in results)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_steps_equal_those_of_one_process_bit_for_bit(num_ranks, model, optimizer):
    make, loss = MODELS[model]
    expected = alone(make(0), loss, num_ranks, 4, optimizer)

    def body(backend: ferrodist.Backend) -> dict[str, Any]:
        backend.reproducible = True
        ddp = ferrodist.DDP(make(backend.rank), backend, check_replicas=1, **SMALL)
        return train(ddp, loss, 4, optimizer)

    assert all(same_bits(state, expected) for state in run_ranks(num_ranks, body, timeout=60))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("options", [SMALL, {}], ids=["many buckets", "one bucket"])
def test_bits_do_not_depend_on_how_it_is_done(options, overlap, set_to_none):
    expected = alone(mlp(), squares, 3, 4)

    def loss(ddp: nn.Module, rank: int, step: int) -> Any:
        return squares(ddp, rank, step) if overlap else _Explicit(ddp, squares(ddp, rank, step))

    def body(backend: ferrodist.Backend) -> dict[str, Any]:
        backend.reproducible = True
        ddp = ferrodist.DDP(mlp(backend.rank), backend, overlap=overlap, **options)
        return train(ddp, loss, 4, set_to_none=set_to_none)

    assert all(same_bits(state, expected) for state in run_ranks(3, body, timeout=60))


class _Explicit:
    """A loss whose gradients are averaged when all of them are there."""

    def __init__(self, ddp: Any, loss: torch.Tensor) -> None:
        self._ddp, self._loss = ddp, loss

    def backward(self) -> None:
        before = self._ddp.backend.statistics().collectives
        self._loss.backward()
        assert self._ddp.backend.statistics().collectives == before
        self._ddp.sync_gradients()


@pytest.mark.parametrize("model", MODELS)
def test_steps_equal_those_on_the_joined_batch_up_to_rounding(model):
    make, loss = MODELS[model]

    def joined(module: nn.Module, _: int, step: int) -> torch.Tensor:
        if model == "transformer":
            x = torch.cat([tokens(rank, step) for rank in range(3)])
            scores = module(x)[:, :-1].flatten(0, 1)
            return nn.functional.cross_entropy(scores, x[:, 1:].flatten())
        xs, ys = zip(*(batch(rank, step) for rank in range(3)), strict=True)
        return ((module(torch.cat(xs)) - torch.cat(ys)) ** 2).mean()

    expected = alone(make(0), joined, 1, 5)
    results = run_ranks(
        3, lambda backend: train(ferrodist.DDP(make(0), backend, **SMALL), loss, 5), timeout=60
    )
    for name, value in results[0].items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=JOINED_BOUND)


def test_batch_norm_has_the_statistics_of_rank_0_and_trains_shard_by_shard():
    module = normed()
    buffers = {name: b.clone() for name, b in module.named_buffers()}

    def shard(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        """Begin with what rank 0 had after its last forward, and keep only what it has now."""
        own = dict(module.named_buffers())
        for name, buffer in own.items():
            buffer.copy_(buffers[name])
        loss = squares(module, rank, step)
        if rank == 0:
            changed.update({name: buffer.clone() for name, buffer in own.items()})
        if rank == 2:
            buffers.update(changed)
        return loss

    changed: dict[str, torch.Tensor] = {}
    expected = alone(module, shard, 3, 4) | buffers

    def body(backend: ferrodist.Backend) -> dict[str, Any]:
        backend.reproducible = True
        ddp = ferrodist.DDP(normed(backend.rank), backend, **SMALL)
        return train(ddp, squares, 4)

    assert all(same_bits(state, expected) for state in run_ranks(3, body, timeout=60))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
def test_every_dtype_is_averaged_bit_for_bit(dtype):
    def linear() -> nn.Linear:
        return fill(nn.Linear(8, 4, dtype=dtype), 0)

    def gradients(backend: ferrodist.Backend, module: nn.Module) -> Any:
        x = batch(backend.rank, 0)[0].to(dtype)
        (module(x).abs() ** 2).mean().backward()
        return gradients_of(module)

    def body(backend: ferrodist.Backend) -> Any:
        backend.reproducible = True
        own = gradients(backend, linear())
        return own, gradients(backend, ferrodist.DDP(linear(), backend, **SMALL))

    results = run_ranks(3, body, timeout=60)
    for name, parameter in linear().named_parameters():
        mean = mean_in_order(parameter, [own[name] for own, _ in results])
        assert all(bits(ours[name]) == bits(mean) for _, ours in results)


def test_parameters_of_several_dtypes_have_buckets_of_their_own():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 6)
            self.second = nn.Linear(6, 5, dtype=torch.float64)
            self.third = nn.Linear(5, 4, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.third(self.second(self.first(x).double()).bfloat16()).float()

    expected = alone(fill(Mixed(), 0), squares, 3, 3)

    def body(backend: ferrodist.Backend) -> Any:
        backend.reproducible = True
        ddp = ferrodist.DDP(fill(Mixed(), backend.rank), backend)
        return train(ddp, squares, 3), [bucket.array.dtype for bucket in ddp._gradients.buckets]

    for state, dtypes in run_ranks(3, body, timeout=60):
        assert same_bits(state, expected)
        assert dtypes == [torch.bfloat16, torch.float64, torch.float32]


def test_an_optimizer_made_before_wrapping_works_as_one_made_after():
    expected = alone(mlp(), squares, 2, 3)

    def body(backend: ferrodist.Backend) -> dict[str, Any]:
        backend.reproducible = True
        module = mlp(backend.rank)
        update = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
        ddp = ferrodist.DDP(module, backend, **SMALL)
        for step in range(3):
            update.zero_grad()
            squares(ddp, backend.rank, step).backward()
            update.step()
        return module.state_dict()

    assert all(same_bits(state, expected) for state in run_ranks(2, body, timeout=60))
