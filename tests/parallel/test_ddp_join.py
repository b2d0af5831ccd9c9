"""Ranks with different numbers of steps: the mean is over those who took part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ferrodist
from ferrodist.parallel.bucket import allreduce_bucket
from ferrodist.testing import run_ranks
from helpers import errors_by_rank
from training import (
    OPTIMIZERS,
    alone,
    batch,
    bits,
    gradients_of,
    mlp,
    normed,
    same_bits,
    squares,
    train,
)

SMALL = {"first_bucket_mib": 1e-4, "bucket_mib": 4e-4}
COUNTS = [[2, 3, 1], [0, 3, 1], [3, 0, 0], [0, 0, 0], [2, 2, 2], [1, 0]]


def uneven_alone(counts: list[int], by_samples: bool = False) -> dict[str, Any]:
    """Train in one process on the shards there are, weighted, reduced in rank order."""
    module = mlp()
    parameters = list(module.parameters())
    update = OPTIMIZERS["sgd"](parameters)
    for step in range(max(counts)):
        totals = [torch.zeros_like(p) for p in parameters]
        weights = 0.0
        for rank, count in enumerate(counts):
            weight = (rows(rank, step) if by_samples else 1.0) if step < count else 0.0
            update.zero_grad()
            if weight:
                loss_of(module, rank, step).backward()
            own = [torch.zeros_like(p) if p.grad is None else p.grad * weight for p in parameters]
            totals = own if rank == 0 else [a + b for a, b in zip(totals, own, strict=True)]
            weights += weight
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total / weights
        update.step()
    return module.state_dict()


def rows(rank: int, step: int) -> int:
    return 2 + 3 * rank + step


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = batch(rank, step, rows(rank, step))
    return ((module(x) - y) ** 2).mean()


@pytest.mark.parametrize("by_samples", [False, True])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_uneven_inputs_train_as_in_one_process(counts, overlap, by_samples):
    def body(backend: ferrodist.Backend) -> dict[str, Any]:
        backend.reproducible = True
        ddp = ferrodist.DDP(mlp(backend.rank), backend, overlap=overlap, **SMALL)
        update = OPTIMIZERS["sgd"](ddp.parameters())
        with ddp.join(by_samples=by_samples):
            for step in range(counts[backend.rank]):
                update.zero_grad()
                loss_of(ddp, backend.rank, step).backward()
                if not overlap:
                    ddp.sync_gradients()
                update.step()
        return ddp.state_dict()

    results = run_ranks(len(counts), body, timeout=60)
    expected = uneven_alone(counts, by_samples) if max(counts) else mlp().state_dict()
    assert all(same_bits(state, expected) for state in results)


def test_by_samples_equals_the_joined_batch_up_to_rounding():
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(mlp(), backend, **SMALL)
        with ddp.join(by_samples=True):
            loss_of(ddp, backend.rank, 0).backward()
            return gradients_of(ddp)

    module = mlp()
    xs, ys = zip(*(batch(rank, 0, rows(rank, 0)) for rank in range(3)), strict=True)
    ((module(torch.cat(xs)) - torch.cat(ys)) ** 2).mean().backward()
    expected = gradients_of(module)
    for gradients in run_ranks(3, body, timeout=60):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)


def test_even_inputs_have_the_same_bits_with_join_and_without():
    expected = alone(mlp(), squares, 3, 3)

    def body(backend: ferrodist.Backend) -> dict[str, Any]:
        backend.reproducible = True
        ddp = ferrodist.DDP(mlp(backend.rank), backend, check_replicas=1, **SMALL)
        with ddp.join():
            return train(ddp, squares, 3)

    assert all(same_bits(state, expected) for state in run_ranks(3, body, timeout=60))


@pytest.mark.parametrize("counts", [[1, 3, 2], [3, 1, 0], [0, 2, 2]], ids=str)
def test_buffers_are_those_of_a_rank_that_still_trains(counts):
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(normed(backend.rank), backend, **SMALL)
        update = OPTIMIZERS["sgd"](ddp.parameters())
        with ddp.join():
            for step in range(counts[backend.rank]):
                update.zero_grad()
                squares(ddp, backend.rank, step).backward()
                update.step()
        return ddp.state_dict()

    first, *others = run_ranks(3, body, timeout=60)
    assert all(same_bits(first, other) for other in others)
    assert first["1.num_batches_tracked"].item() == max(counts)


def test_training_goes_on_after_join():
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(normed(backend.rank), backend, check_replicas=1, **SMALL)
        for _ in range(2):
            with ddp.join():
                train(ddp, squares, backend.rank)
            train(ddp, squares, 2)
        return ddp.state_dict(), ddp._gradients.num_rounds

    (first, rounds), *others = run_ranks(3, body, timeout=60)
    assert all(same_bits(first, other) and rounds == number for other, number in others)


def test_join_and_no_sync_with_several_forwards_per_step():
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(normed(), backend, **SMALL)
        update = OPTIMIZERS["sgd"](ddp.parameters())
        with ddp.join(by_samples=True):
            for step in range(1 + backend.rank):
                update.zero_grad()
                with ddp.no_sync():
                    loss_of(ddp, backend.rank, 10 * step).backward()
                with torch.no_grad():
                    ddp(torch.ones(50, 8))  # neither counted nor sent
                loss_of(ddp, backend.rank, 10 * step + 1).backward()
                update.step()
        return ddp.state_dict()

    first, *others = run_ranks(3, body, timeout=60)
    assert all(same_bits(first, other) for other in others)


def test_samples_inside_no_sync_count():
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(nn.Linear(1, 1, bias=False), backend)
        with ddp.join(by_samples=True):
            with ddp.no_sync():
                ddp(torch.ones(2 * backend.rank + 1, 1)).mean().mul(0).backward()
            ddp(torch.ones(1, 1)).mean().mul(backend.rank).backward()
            return ddp.weight.grad.item()

    # samples 2 and 4, gradients 0 and 1
    assert run_ranks(2, body, timeout=60) == [torch.tensor(4.0).div(6).item()] * 2


def test_a_second_backward_of_the_same_samples_counts_the_same():
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(nn.Linear(1, 1, bias=False), backend)
        with ddp.join(by_samples=True):
            out = ddp(torch.ones(1 + 2 * backend.rank, 1)).mean()
            (out * backend.rank).backward(retain_graph=True)
            first = ddp.weight.grad.item()
            (out * 4 * backend.rank).backward()
            return first, ddp.weight.grad.item()

    assert run_ranks(2, body, timeout=60) == [(0.75, 3.75)] * 2


def test_a_parameter_unused_everywhere_keeps_its_gradient_in_join():
    odd = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(odd * 5 / 5 * 7 / 7, odd)  # what weights would do to it

    def body(backend: ferrodist.Backend) -> None:
        module = nn.Sequential(nn.Linear(8, 4), nn.Linear(8, 4, bias=False))
        ddp = ferrodist.DDP(module, backend)
        module.forward = module[0].forward
        with ddp.join(by_samples=True):
            for step in range(backend.rank):
                module[1].weight.grad = odd.clone()
                loss_of(ddp, backend.rank, step).backward()
                assert bits(module[1].weight.grad) == bits(odd)

    run_ranks(5, body, timeout=60)


@pytest.mark.parametrize(
    ("args", "text"), [((), "no tensor with a length"), ((torch.ones(0, 8),), "of no samples")]
)
def test_by_samples_refuses_what_has_no_length(args, text):
    def body(backend: ferrodist.Backend) -> None:
        ddp = ferrodist.DDP(mlp(), backend)
        with ddp.join(by_samples=True):
            ddp(*args)

    (error,) = errors_by_rank(1, body, timeout=60)
    assert isinstance(error, ferrodist.InvalidArgument)
    assert text in str(error)


def test_an_error_inside_join_is_the_ranks_own_and_leaves_join():
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(mlp(), backend)
        with pytest.raises(KeyError), ddp.join():
            raise KeyError
        assert ddp._join is None
        assert ddp._gradients.weigh is None
        squares(ddp, backend.rank, 0).backward()

    run_ranks(1, body, timeout=60)


def test_large_batches_of_16_bit_gradients_stay_finite():
    def body(backend):
        ddp = ferrodist.DDP(torch.nn.Linear(1, 1, bias=False).half(), backend)
        with ddp.join(by_samples=True):
            ddp(torch.ones(40_000, 1, dtype=torch.float16)).mean().backward()
            return ddp.weight.grad.item()

    assert run_ranks(3, body) == pytest.approx([1.0, 1.0, 1.0], rel=1e-3)


@pytest.mark.parametrize("hook", [allreduce_bucket, ferrodist.PowerSGD(1), ferrodist.TopK(1.0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_of_samples_do_not_round_small_16_bit_gradients_away(dtype, hook):
    """The smallest numbers of float16 are kept, and a mean is rounded once."""

    def body(backend: ferrodist.Backend) -> list[float]:
        ddp = ferrodist.DDP(nn.Linear(8, 8, bias=False).to(dtype), backend, hook=hook)
        with ddp.join(by_samples=True):
            x = torch.ones(1 + 2 * backend.rank, 8, dtype=dtype)
            (ddp(x)[0].sum() * 2.0**-23 * (backend.rank + 1)).backward()
            return ddp.weight.grad.unique().tolist()

    mean = torch.tensor((1 * 1 + 3 * 2 + 5 * 3) / 9 * 2.0**-23).to(dtype).item()
    assert run_ranks(3, body, timeout=60) == [[mean]] * 3


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("counts", [[1, 3, 2], [2, 2, 2], [0, 1, 0]], ids=str)
def test_gradients_after_join_are_the_last_means_on_every_rank(counts, overlap):
    def body(backend: ferrodist.Backend) -> Any:
        backend.reproducible = True
        ddp = ferrodist.DDP(mlp(), backend, overlap=overlap, **SMALL)
        last = None
        with ddp.join():
            for step in range(counts[backend.rank]):
                ddp.zero_grad()
                squares(ddp, backend.rank, step).backward()
                if not overlap:
                    ddp.sync_gradients()
                last = gradients_of(ddp)
        after = gradients_of(ddp)
        torch.optim.SGD(ddp.parameters(), 0.1).step()
        return last, after, ddp.state_dict()

    results = run_ranks(3, body, timeout=60)
    expected = results[counts.index(max(counts))][0]
    for _, after, state in results:
        assert same_bits(after, expected)
        assert not same_bits(state, mlp().state_dict())


def test_torchs_division_by_all_ranks():
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(nn.Linear(1, 1, bias=False), backend)
        seen = []
        with ddp.join(divide_by_initial_world_size=True):
            for _ in range(1 + backend.rank):
                ddp.zero_grad()
                ddp(torch.ones(1, 1) * (backend.rank + 1)).sum().backward()
                seen.append(ddp.weight.grad.item())
        return seen

    assert run_ranks(2, body, timeout=60) == [[1.5], [1.5, 1.0]]


def test_one_rank_without_batches_ends_all_if_so_wished():
    def body(backend: ferrodist.Backend) -> None:
        ddp = ferrodist.DDP(mlp(), backend)
        with ddp.join(throw_on_early_termination=True, by_samples=True):
            for step in range(2 if backend.rank == 1 else 4):
                squares(ddp, backend.rank, step).backward()

    for error in errors_by_rank(3, body, timeout=60):
        assert "rank 1 ran out of batches before the others" in str(error)
        assert error.rank == 1


def test_even_inputs_raise_nothing_and_join_can_be_turned_off():
    def body(backend: ferrodist.Backend) -> int:
        ddp = ferrodist.DDP(mlp(), backend)
        with ddp.join(throw_on_early_termination=True):
            squares(ddp, backend.rank, 0).backward()
        before = backend.statistics().collectives
        with ddp.join(enable=False):
            squares(ddp, backend.rank, 0).backward()
        return backend.statistics().collectives - before

    assert run_ranks(2, body, timeout=60) == [1, 1]


def test_two_divisors_are_refused():
    def body(backend: ferrodist.Backend) -> None:
        ddp = ferrodist.DDP(mlp(), backend)
        with ddp.join(by_samples=True, divide_by_initial_world_size=True):
            pass

    (error,) = errors_by_rank(1, body, timeout=60)
    assert isinstance(error, ferrodist.InvalidArgument)
