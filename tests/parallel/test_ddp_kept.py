"""Gradients that a program keeps stay what they are, as in bare torch, and cost nothing if not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ferrodist
from ferrodist.testing import run_ranks
from training import arrays_made, bits, gradients_of, mlp, squares

EACH = {"first_bucket_mib": 1e-6, "bucket_mib": 1e-6}
SIZES = pytest.mark.parametrize("options", [{}, EACH], ids=["one bucket", "one each"])
WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda gradient: gradient,
    "detach": torch.Tensor.detach,
    "view": lambda gradient: gradient.view(-1),
    "part": lambda gradient: gradient[:1],
    "data": lambda gradient: gradient.data,
    "numpy": torch.Tensor.numpy,
}


def tasks(ddp: ferrodist.DDP, keep: Callable[[torch.Tensor], Any], number: int) -> list[bool]:
    """Keep the gradients of several tasks; tell of each whether they are what they were."""
    kept, copies = [], []
    for task in range(number):
        ddp.zero_grad(set_to_none=True)
        squares(ddp, ddp.backend.rank, task).backward()
        kept.append([keep(p.grad) for p in ddp.parameters()])
        copies.append([torch.as_tensor(gradient).clone() for gradient in kept[-1]])
    return [
        all(bits(torch.as_tensor(a)) == bits(b) for a, b in zip(*pair, strict=True))
        for pair in zip(kept, copies, strict=True)
    ]


@SIZES
@pytest.mark.parametrize("way", WAYS)
def test_kept_gradients_stay_what_they_are(way, options):
    def body(backend: ferrodist.Backend) -> list[bool]:
        return tasks(ferrodist.DDP(mlp(), backend, **options), WAYS[way], 4)

    assert run_ranks(2, body, timeout=60) == [[True] * 4] * 2


@pytest.mark.slow
def test_kept_gradients_stay_what_they_are_in_processes(start):
    def body(backend: ferrodist.Backend, _: Any) -> list[bool]:
        return tasks(ferrodist.DDP(mlp(), backend), WAYS["itself"], 4)

    with start(2, body) as job:
        assert job.results() == [[True] * 4] * 2


@pytest.mark.parametrize("overlap", [True, False])
def test_tasks_whose_gradients_are_compared_train_as_in_one_process(overlap):
    """Project one task's gradient off another's, as PCGrad does."""

    def step(module: nn.Module, losses: list[torch.Tensor], sync: Callable[[], None]) -> None:
        each = []
        for loss in losses:
            module.zero_grad(set_to_none=True)
            loss.backward()
            sync()
            each.append([p.grad for p in module.parameters()])
        for parameter, one, other in zip(module.parameters(), *each, strict=True):
            share = (one * other).sum() / other.square().sum()
            parameter.grad = one + other - share * other
            parameter.data -= 0.1 * parameter.grad

    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(mlp(), backend, overlap=overlap)
        for number in range(3):
            losses = [squares(ddp, backend.rank, 10 * number + task) for task in range(2)]
            step(ddp, losses, (lambda: None) if overlap else ddp.sync_gradients)
        return ddp.state_dict()

    module = mlp()
    for number in range(3):
        each = [[squares(module, r, 10 * number + task) for r in range(2)] for task in range(2)]
        step(module, [sum(losses) / 2 for losses in each], lambda: None)
    for state in run_ranks(2, body, timeout=60):
        for name, value in module.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


@SIZES
def test_a_gradient_that_is_added_to_is_seen_to_change_by_who_holds_it(options):
    """So it is in bare torch: without zero_grad, .grad stays one tensor."""

    def body(backend: ferrodist.Backend) -> None:
        ddp = ferrodist.DDP(mlp(), backend, **options)
        for step in range(3):  # buckets are made anew after the first
            squares(ddp, backend.rank, step).backward()
            if step == 0:
                held = None
            elif held is None:
                held = [p.grad for p in ddp.parameters()]
        assert all(p.grad is one for p, one in zip(ddp.parameters(), held, strict=True))

    run_ranks(2, body, timeout=60)


# In processes: of ranks that are threads one may still look at another's array.


@pytest.mark.slow
@pytest.mark.parametrize("set_to_none", [True, False])
def test_who_keeps_nothing_pays_for_nothing(start_job, set_to_none):
    def body(backend: ferrodist.Backend, _: Any) -> int:
        ddp = ferrodist.DDP(mlp(), backend, **EACH)
        made = []
        for step in range(6):
            if step == 2:
                made = arrays_made(backend)
            ddp.zero_grad(set_to_none=set_to_none)
            squares(ddp, backend.rank, step).backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        return len(made)

    with start_job(2, body) as job:
        assert job.results() == [0, 0]


def test_who_keeps_the_last_gradients_pays_for_one_array_more(start_job):
    def body(backend: ferrodist.Backend, _: Any) -> Any:
        ddp = ferrodist.DDP(mlp(), backend)
        made: list[int] = []
        for step in range(6):
            if step == 1:
                made = arrays_made(backend)
            ddp.zero_grad()
            squares(ddp, backend.rank, step).backward()
            last = [p.grad for p in ddp.parameters()]  # until the next ones are there
        return len(made), len(last)

    with start_job(2, body) as job:
        assert job.results() == [(1, 4)] * 2


HOOKS: dict[str, Callable[[], Any]] = {
    "Compress": lambda: ferrodist.Compress("float16"),
    "TopK": lambda: ferrodist.TopK(0.5),
    "PowerSGD": lambda: ferrodist.PowerSGD(1),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_reduce_the_array_that_a_bucket_has_now(name):
    def last_gradients(backend: ferrodist.Backend, keeps: bool) -> list[bytes | None]:
        ddp = ferrodist.DDP(mlp(), backend, hook=HOOKS[name]())
        kept = []
        for step in range(4):
            ddp.zero_grad()
            squares(ddp, backend.rank, step).backward()
            kept += [p.grad for p in ddp.parameters()] if keeps else []
        return [bits(one) for one in gradients_of(ddp).values()]

    def body(backend: ferrodist.Backend) -> Any:
        return last_gradients(backend, keeps=True) == last_gradients(backend, keeps=False)

    assert run_ranks(2, body, timeout=60) == [True, True]
