"""Parameters that a backward does not use, and gradients that add up before they are averaged."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch
from torch import nn

import ferrodist
from ferrodist.testing import run_ranks
from training import (
    OPTIMIZERS,
    alone,
    batch,
    bits,
    fill,
    gradients_of,
    mlp,
    same_bits,
    squares,
    train,
)

EACH = {"first_bucket_mib": 1e-6, "bucket_mib": 1e-6}
SIZES = pytest.mark.parametrize("options", [{}, EACH], ids=["one bucket", "one each"])


class Branches(nn.Module):
    """A trunk, and branches of which a forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, *used: int) -> torch.Tensor:
        trunk = self.trunk(x).tanh()
        return trunk[:, :4] + sum(self.branches[number](trunk) for number in used)


def branches(seed: int = 0) -> Branches:
    return fill(Branches(), seed)


def loss_with(module: nn.Module, rank: int, step: int, *used: int) -> torch.Tensor:
    x, y = batch(rank, step)
    return ((module(x, *used) - y) ** 2).mean()


def differently(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Rank r uses branch r, later another; nobody uses branch 3 but in the second step."""
    used = [(rank + step) % 3] + ([3] if step == 1 else [])
    return loss_with(module, rank, step, *used)


@SIZES
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_ranks_with_different_unused_parameters_train_as_one_process(optimizer, options):
    expected = alone(branches(), differently, 3, 5, optimizer)

    def body(backend: ferrodist.Backend) -> dict[str, Any]:
        backend.reproducible = True
        ddp = ferrodist.DDP(branches(backend.rank), backend, check_replicas=1, **options)
        return train(ddp, differently, 5, optimizer)

    assert all(same_bits(state, expected) for state in run_ranks(3, body, timeout=60))


@SIZES
def test_unused_on_some_ranks_counts_as_zeros_there(options):
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]), backend, **options)
        ddp.module.forward = lambda x: ddp.module[x](torch.ones(1, 1))
        for _ in range(2):
            ddp.zero_grad()
            ddp(int(backend.rank == 2)).sum().backward()
        return [p.grad.item() for p in ddp.parameters()]

    third = torch.tensor(1.0).div(3).item()
    both = torch.tensor(2.0).div(3).item()
    assert run_ranks(3, body, timeout=60) == [[both, both, third, third]] * 3


@SIZES
def test_unused_everywhere_leaves_none_as_none(options):
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(branches(), backend, **options)
        is_none = []
        for step in range(3):
            ddp.zero_grad()
            loss_with(ddp, backend.rank, step, 1).backward()
            is_none.append([branch.weight.grad is None for branch in ddp.branches])
        return is_none

    assert run_ranks(2, body, timeout=60) == [[[True, False, True, True]] * 3] * 2


@SIZES
@pytest.mark.parametrize("set_to_none", [True, False])
def test_unused_everywhere_is_moved_by_momentum_as_in_one_process(set_to_none, options):
    """Used in the first step only: then None skips it, while zeros let momentum go on."""

    def once(module: nn.Module, _: int, step: int) -> torch.Tensor:
        return loss_with(module, 0, step, *([0, 2] if step == 0 else [0]))  # the same on all ranks

    def one_process() -> dict[str, Any]:
        module = branches()
        update = OPTIMIZERS["sgd"](module.parameters())
        for step in range(4):
            update.zero_grad(set_to_none=set_to_none)
            once(module, 0, step).backward()
            update.step()
        return module.state_dict()

    def body(backend: ferrodist.Backend) -> dict[str, Any]:
        ddp = ferrodist.DDP(branches(backend.rank), backend, **options)
        return train(ddp, once, 4, set_to_none=set_to_none)

    expected = one_process()
    assert all(same_bits(state, expected) for state in run_ranks(2, body, timeout=60))


@SIZES
def test_unused_everywhere_keeps_a_gradient_bit_for_bit(options):
    """The mean of equal numbers need not be that number: here it is not, for some of them."""
    odd = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(sum([odd] * 4, odd) / 5, odd)

    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(branches(), backend, **options)
        weight = ddp.branches[3].weight
        seen = []
        for step in range(3):
            weight.grad = odd.clone()
            loss_with(ddp, backend.rank, step, 0).backward()
            seen.append(bits(weight.grad))
        return seen

    assert run_ranks(5, body, timeout=60) == [[bits(odd)] * 3] * 5


@SIZES
def test_a_gradient_from_before_is_kept_where_only_others_add_to_it(options):
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(branches(), backend, **options)
        loss_with(ddp, backend.rank, 0, 0, 1).backward()
        first = gradients_of(ddp)
        loss_with(ddp, backend.rank, 1, backend.rank).backward()
        both = gradients_of(ddp)
        ddp.zero_grad()
        loss_with(ddp, backend.rank, 1, backend.rank).backward()
        second = gradients_of(ddp)
        return first, second, both

    results = run_ranks(2, body, timeout=60)
    for first, second, both in results:
        for name, gradient in both.items():
            if gradient is None:
                assert "branches.2" in name or "branches.3" in name
            else:
                torch.testing.assert_close(gradient, first[name] + second[name])
                assert bits(gradient) == bits(results[0][2][name])


def test_a_rank_that_uses_nothing_at_all_gets_the_others_mean():
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(mlp(), backend, **EACH)
        module = ddp.module
        plain = module.forward
        module.forward = lambda x: x[:, :4] * 1 if backend.rank == 1 else plain(x)
        for step in range(2):
            ddp.zero_grad()
            x = batch(backend.rank, step)[0].requires_grad_()
            ddp(x).square().mean().backward()
        return gradients_of(ddp)

    def own(backend: ferrodist.Backend) -> Any:
        module = mlp()
        module(batch(0, 1)[0]).square().mean().backward()
        return gradients_of(module)

    expected = run_ranks(1, own)[0]
    for gradients in run_ranks(2, body, timeout=60):
        for name, gradient in gradients.items():
            assert bits(gradient) == bits(expected[name] / 2)


def test_the_unused_are_named_in_the_log(caplog):
    def body(backend: ferrodist.Backend) -> None:
        ddp = ferrodist.DDP(branches(), backend)
        loss_with(ddp, backend.rank, 0, backend.rank).backward()

    with caplog.at_level(logging.DEBUG, "ferrodist"):
        run_ranks(2, body, timeout=60)
    lines = sorted(text for text in caplog.messages if "unused" in text)
    nobodys = [f"branches.{n}.{part}" for n in (2, 3) for part in ("weight", "bias")]
    for rank, line in enumerate(lines):
        mine = [f"branches.{1 - rank}.{part}" for part in ("weight", "bias")]
        assert line == (
            f"rank {rank}: DDP, step 1: unused on this rank alone: {mine}; on every rank: {nobodys}"
        )
    assert len(lines) == 2


# -- no_sync ------------------------------------------------------------------------------------


@SIZES
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_equals_the_sum_of_the_parts(set_to_none, options):
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(mlp(), backend, **options)
        results = []
        for step in range(0, 9, 3):
            ddp.zero_grad(set_to_none=set_to_none)
            before = backend.statistics().collectives
            with ddp.no_sync():
                for part in (step, step + 1):
                    squares(ddp, backend.rank, part).backward()
            assert backend.statistics().collectives == before
            squares(ddp, backend.rank, step + 2).backward()
            results.append(gradients_of(ddp))
        return results

    ranks = run_ranks(2, body, timeout=60)
    for number, step in enumerate(range(0, 9, 3)):
        module = mlp()
        for rank in range(2):
            for part in range(step, step + 3):
                (squares(module, rank, part) / 2).backward()
        for name, gradient in ranks[0][number].items():
            assert bits(gradient) == bits(ranks[1][number][name])
            torch.testing.assert_close(gradient, gradients_of(module)[name])


@SIZES
def test_accumulation_over_parts_equals_the_big_batch(options):
    def parts(ddp: ferrodist.DDP, step: int) -> None:
        x, y = batch(ddp.backend.rank, step, rows=8)
        for at in (0, 4):
            loss = ((ddp(x[at : at + 4]) - y[at : at + 4]) ** 2).mean() / 2
            if at == 0:
                with ddp.no_sync():
                    loss.backward()
            else:
                loss.backward()

    def body(backend: ferrodist.Backend) -> Any:
        ddp, big = (ferrodist.DDP(mlp(), backend, **options) for _ in range(2))
        for step in range(2):
            ddp.zero_grad()
            big.zero_grad()
            parts(ddp, step)
            x, y = batch(backend.rank, step, rows=8)
            ((big(x) - y) ** 2).mean().backward()
        for ours, theirs in zip(ddp.parameters(), big.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)

    run_ranks(2, body, timeout=60)


@SIZES
def test_a_parameter_used_only_inside_no_sync_is_averaged_too(options):
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(branches(), backend, **options)
        for step in range(2):
            ddp.zero_grad()
            with ddp.no_sync():
                loss_with(ddp, backend.rank, step, backend.rank).backward()
            own = gradients_of(ddp)
            loss_with(ddp, backend.rank, step).backward()
        return own, gradients_of(ddp)

    results = run_ranks(2, body, timeout=60)
    for _, mean in results:
        for rank in range(2):
            name = f"branches.{rank}.weight"
            torch.testing.assert_close(mean[name], results[rank][0][name] / 2)
        assert mean["branches.2.weight"] is None


@SIZES
def test_no_sync_is_about_where_forward_runs_as_in_torch(options):
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(mlp(), backend, **options)
        squares(ddp, backend.rank, 0).backward()
        ddp.zero_grad()
        before = backend.statistics().collectives
        with ddp.no_sync():
            inside = squares(ddp, backend.rank, 1)
        outside = squares(ddp, backend.rank, 2)
        inside.backward()
        assert backend.statistics().collectives == before
        own = gradients_of(ddp)
        with ddp.no_sync():
            outside.backward()
        assert backend.statistics().collectives - before == len(ddp._gradients.buckets)
        return own, gradients_of(ddp)

    (own, first), (other, second) = run_ranks(2, body, timeout=60)
    assert not same_bits(own, other)
    assert same_bits(first, second)


@SIZES
def test_a_backward_of_forwards_inside_and_outside_averages_all(options):
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(branches(), backend, **options)
        for step in range(2):
            ddp.zero_grad()
            with ddp.no_sync():
                inside = loss_with(ddp, backend.rank, step, 0)
            outside = loss_with(ddp, backend.rank, step, 1)
            (inside + outside if step else outside + inside).backward()
        return gradients_of(ddp)

    first, second = run_ranks(2, body, timeout=60)
    assert same_bits(first, second)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_flag_of_torch_is_that_of_no_sync(set_to_none):
    def body(backend: ferrodist.Backend) -> Any:
        flagged, inside = (ferrodist.DDP(mlp(), backend) for _ in range(2))
        for step in range(0, 6, 3):
            flagged.zero_grad(set_to_none=set_to_none)
            inside.zero_grad(set_to_none=set_to_none)
            for part in range(step, step + 3):
                flagged.require_backward_grad_sync = part == step + 2
                squares(flagged, backend.rank, part).backward()
                with contextlib.nullcontext() if part == step + 2 else inside.no_sync():
                    assert inside.require_backward_grad_sync == (part == step + 2)
                    squares(inside, backend.rank, part).backward()
        return same_bits(gradients_of(flagged), gradients_of(inside))

    assert run_ranks(2, body, timeout=60) == [True, True]


def test_no_sync_ends_with_an_error_and_nests():
    def body(backend: ferrodist.Backend) -> None:
        ddp = ferrodist.DDP(mlp(), backend)
        with ddp.no_sync():
            with ddp.no_sync():
                pass
            assert not ddp._gradients.is_on
        with pytest.raises(KeyError):
            with ddp.no_sync():
                raise KeyError
        assert ddp._gradients.is_on

    run_ranks(1, body, timeout=60)


def test_buffers_stay_inside_no_sync():
    def body(backend: ferrodist.Backend) -> Any:
        module = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        ddp = ferrodist.DDP(module, backend)
        before = backend.statistics().collectives
        with ddp.no_sync():
            squares(ddp, backend.rank, 0).backward()
        return backend.statistics().collectives - before

    assert run_ranks(2, body, timeout=60) == [0, 0]


# -- several backwards, several forwards --------------------------------------------------------


@SIZES
def test_two_backwards_of_one_graph_add_up(options):
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(mlp(), backend, **options)
        for step in range(2):
            ddp.zero_grad()
            out = ddp(batch(backend.rank, step)[0])
            out.square().mean().backward(retain_graph=True)
            out.sum().backward()
        both = gradients_of(ddp)
        ddp.zero_grad()
        out = ddp(batch(backend.rank, 1)[0])
        (out.square().mean() + out.sum()).backward()
        for name, gradient in gradients_of(ddp).items():
            torch.testing.assert_close(both[name], gradient)
        return both

    first, second = run_ranks(2, body, timeout=60)
    assert all(bits(first[name]) == bits(second[name]) for name in first)


@SIZES
@pytest.mark.parametrize("is_normed", [False, True])
def test_several_forwards_before_one_backward(is_normed, options):
    def body(backend: ferrodist.Backend) -> Any:
        module = mlp()
        if is_normed:
            module.insert(1, nn.BatchNorm1d(16))
        ddp = ferrodist.DDP(module, backend, **options)
        for step in range(2):
            ddp.zero_grad()
            before = backend.statistics().collectives
            losses = [squares(ddp, backend.rank, 10 * step + part) for part in range(3)]
            sum(losses).backward()
            calls = backend.statistics().collectives - before
        assert calls == len(ddp._gradients.buckets) + is_normed
        return gradients_of(ddp)

    def own(rank: int) -> Any:
        module = mlp()
        if is_normed:
            module.insert(1, nn.BatchNorm1d(16))
        sum(squares(module, rank, 10 + part) for part in range(3)).backward()
        return gradients_of(module)

    owns = [own(rank) for rank in range(2)]
    for gradients in run_ranks(2, body, timeout=60):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, (owns[0][name] + owns[1][name]) / 2)


def test_a_parameter_used_in_the_loss_without_forward():
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(branches(), backend, **EACH)
        for step in range(3):
            ddp.zero_grad()
            penalty = (ddp.branches[3].weight * (backend.rank + 1)).sum()
            (loss_with(ddp, backend.rank, step, 0) + penalty).backward()
            assert ddp.branches[3].weight.grad.unique().tolist() == [1.5]
            (ddp.branches[2].weight.sum() * backend.rank).backward()  # and with no forward at all
            assert ddp.branches[2].weight.grad.unique().tolist() == [0.5]
        return [bits(p.grad) for p in ddp.parameters()]

    first, second = run_ranks(2, body, timeout=60)
    assert first == second


def test_what_has_added_up_is_averaged_though_buckets_are_made_anew_in_between():
    def body(backend: ferrodist.Backend) -> Any:
        module = branches()
        module.trunk.requires_grad_(False)
        ddp = ferrodist.DDP(module, backend)
        with ddp.no_sync():
            loss_with(ddp, backend.rank, 0, 1).backward()
            own = module.branches[1].weight.grad.clone()
            module.trunk.requires_grad_(True)
            loss_with(ddp, backend.rank, 1, 0).backward()
        loss_with(ddp, backend.rank, 2, 0).backward()  # of branch 1 there is nothing new
        return own, module.branches[1].weight.grad

    (first, mean), (second, same) = run_ranks(2, body, timeout=60)
    assert bits(mean) == bits(same) == bits((first + second) / 2)
