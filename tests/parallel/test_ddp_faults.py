"""What goes wrong: a backward that raises, replicas that drift apart."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ferrodist
from ferrodist.parallel import replicas
from ferrodist.testing import run_ranks
from helpers import errors_by_rank
from training import OPTIMIZERS, batch, mlp, normed, squares

EACH = {"first_bucket_mib": 1e-6, "bucket_mib": 1e-6}


class Boom(torch.autograd.Function):
    """What passes a tensor on, and raises in backward."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("the graph is on fire")


def failing(ddp: ferrodist.DDP, step: int) -> None:
    """Raise in the middle of backward: the last layer has its gradients, the first has none."""
    x = batch(ddp.backend.rank, step)[0]
    layers = ddp.module
    plain = layers.forward
    layers.forward = lambda x: layers[2](Boom.apply(layers[0](x)))
    try:
        ddp(x).square().mean().backward()
    finally:
        layers.forward = plain


@pytest.mark.parametrize("options", [{}, EACH], ids=["one bucket", "one each"])
@pytest.mark.parametrize("step", [0, 2])
def test_a_backward_that_raises_is_the_others_error_too(step, options):
    def body(backend: ferrodist.Backend) -> None:
        ddp = ferrodist.DDP(mlp(), backend, **options)
        for number in range(3):
            if number == step and backend.rank == 1:
                failing(ddp, number)
            squares(ddp, backend.rank, number).backward()

    with pytest.raises(ExceptionGroup) as caught:
        run_ranks(3, body, timeout=60)
    cause, *consequences = caught.value.exceptions
    assert isinstance(cause, ValueError)
    assert len(consequences) == 2
    for error in consequences:
        assert isinstance(error, ferrodist.RankLost)
        assert error.rank == 1
        assert "the graph is on fire" in str(error)


@pytest.mark.parametrize("options", [{}, EACH], ids=["one bucket", "one each"])
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("then", ["forward", "backward", "sync"])
def test_training_on_after_a_failed_backward_ends_on_every_rank(then, step, options):
    """Its part of the round is lost, and whatever it sent next would be taken for that."""

    def body(backend: ferrodist.Backend) -> None:
        ddp = ferrodist.DDP(mlp(), backend, **options)
        for number in range(4):
            loss = squares(ddp, backend.rank, number)
            if number == step and backend.rank == 1:
                with pytest.raises(ValueError, match="on fire"):
                    failing(ddp, number)
                if then == "sync":
                    ddp.sync_gradients()
                if then == "forward":
                    ddp(batch(1, number)[0])
            loss.backward()
        backend.close()

    errors = errors_by_rank(3, body, timeout=60)
    assert all(isinstance(error, ferrodist.GroupAborted) for error in errors)
    assert all("a backward of rank 1 failed" in str(error) for error in errors)


def test_a_failed_backward_inside_no_sync_is_the_ranks_own_affair():
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(mlp(), backend, **EACH)
        if backend.rank == 1:
            with ddp.no_sync(), pytest.raises(ValueError, match="on fire"):
                failing(ddp, 0)
            ddp.zero_grad()
        for number in range(2):
            squares(ddp, backend.rank, number).backward()
        return [p.grad.tolist() for p in ddp.parameters()]

    first, second = run_ranks(2, body, timeout=60)
    assert first == second


def test_evaluation_after_a_failed_backward_works():
    def body(backend: ferrodist.Backend) -> None:
        ddp = ferrodist.DDP(mlp(), backend)
        with pytest.raises(ValueError, match="on fire"):
            failing(ddp, 0)
        with torch.no_grad():
            ddp(batch(0, 0)[0])

    run_ranks(1, body, timeout=60)


def test_an_error_of_a_bucket_is_raised_once():
    """One rank leaves after its first bucket; the other's close() has nothing left to raise."""

    def body(backend: ferrodist.Backend) -> None:
        ddp = ferrodist.DDP(mlp(), backend, **EACH)
        if backend.rank == 1:
            raise KeyError("gone")
        with pytest.raises(ferrodist.RankLost):
            squares(ddp, backend.rank, 0).backward()
        backend.close()

    first, second = errors_by_rank_with_fail(2, body)
    assert first is None
    assert isinstance(second, KeyError)


def errors_by_rank_with_fail(num_ranks: int, body: Any) -> list[BaseException | None]:
    """As errors_by_rank, but a rank that raises leaves the group by it."""

    def catch(backend: Any) -> BaseException | None:
        try:
            body(backend)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the test looks at it
            backend._fail(error)
            return error
        return None

    return run_ranks(num_ranks, catch, timeout=60)


# -- ranks that are not in step --------------------------------------------------------------------

ADVICE = "ranks with different numbers of batches train inside model.join()"


@pytest.mark.parametrize("options", [{}, EACH], ids=["one bucket", "one each"])
@pytest.mark.parametrize("num_steps", [0, 2])
def test_one_batch_more_names_bucket_parameters_and_the_line_of_backward(num_steps, options):
    def body(backend: ferrodist.Backend) -> None:
        ddp = ferrodist.DDP(mlp(), backend, **options)
        for step in range(num_steps + (backend.rank == 0)):
            squares(ddp, backend.rank, step).backward()  # here
        backend.close()

    error, *others = errors_by_rank(3, body, timeout=60)
    assert others == [None, None]
    assert isinstance(error, ferrodist.RankLost)
    where = "2.bias (bucket 1 of 4)" if options else "2.bias to 0.weight (bucket 1 of 1)"
    assert str(error).startswith(f"DDP: gradients of {where}: allreduce #")
    assert f"({line_of(body, '# here')}): rank " in str(error)
    assert ADVICE in str(error)


def line_of(body: Any, mark: str) -> str:
    lines, first = inspect.getsourcelines(body)
    (found,) = (at for at, line in enumerate(lines) if mark in line)
    return f"{Path(__file__).name}:{first + found}"


def test_another_call_instead_of_backward_is_shown_with_both_lines():
    def body(backend: ferrodist.Backend) -> None:
        ddp = ferrodist.DDP(mlp(), backend)
        squares(ddp, backend.rank, 0).backward()
        if backend.rank == 1:
            ferrodist.allreduce(1.0, backend)  # there
        squares(ddp, backend.rank, 1).backward()  # here

    here, there = errors_by_rank(2, body, timeout=60)
    assert isinstance(here, ferrodist.CollectiveMismatch)
    assert str(here).startswith("DDP: gradients of 2.bias to 0.weight (bucket 1 of 1): allreduce #")
    for error in (here, there):
        assert line_of(body, "# here") in str(error)
        assert line_of(body, "# there") in str(error)
    assert ADVICE in str(here)


def test_a_rank_that_leaves_before_buffers_are_shared_is_told_so():
    def body(backend: ferrodist.Backend) -> None:
        ddp = ferrodist.DDP(normed(), backend)
        squares(ddp, backend.rank, 0).backward()
        if backend.rank == 1:
            ddp._gradients.after_round = lambda _: backend.close()
        squares(ddp, backend.rank, 1).backward()  # here

    error = errors_by_rank(2, body, timeout=60)[0]
    assert isinstance(error, ferrodist.RankLost)
    assert str(error).startswith("DDP: buffers of rank 0, after a backward: broadcast #")
    assert line_of(body, "# here") in str(error)


# -- replicas that drift apart --------------------------------------------------------------------


def flip(parameter: nn.Parameter) -> None:
    """Change the lowest bit of its last number."""
    parameter.data.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


def drifting(backend: ferrodist.Backend, every: int, when: int, who: int) -> list[int]:
    ddp = ferrodist.DDP(mlp(backend.rank), backend, check_replicas=every, **EACH)
    update = OPTIMIZERS["sgd"](ddp.parameters())
    done = []
    try:
        for step in range(1, 7):
            if step == when and backend.rank == who:
                flip(ddp.module[2].weight)
            update.zero_grad()
            squares(ddp, backend.rank, step).backward()
            done.append(step)
            update.step()
    except ferrodist.CollectiveMismatch as error:
        error.add_note(f"{done}")
        raise
    return done


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize(("every", "when", "named"), [(1, 1, 1), (1, 4, 4), (3, 2, 3), (2, 5, 6)])
def test_a_flipped_bit_is_named_the_same_step_on_every_rank(every, when, named, who):
    errors = errors_by_rank(3, lambda b: drifting(b, every, when, who), timeout=60)
    for rank, error in enumerate(errors):
        assert isinstance(error, ferrodist.CollectiveMismatch)
        assert error.rank == who
        assert error.this_rank == rank
        assert f"2.weight of rank {who} differs from the others' in step {named}" in str(error)
        assert error.__notes__ == [f"{list(range(1, named))}"]


def test_of_two_ranks_the_second_is_named():
    errors = errors_by_rank(2, lambda b: drifting(b, 1, 2, 0), timeout=60)
    assert all("rank 1 differs" in str(error) for error in errors)


def test_drift_guard_costs_nothing_when_off(monkeypatch):
    monkeypatch.setattr(replicas, "check_values", lambda *_: pytest.fail("was asked"))
    assert run_ranks(2, lambda b: drifting(b, 0, 2, 1), timeout=60) == [list(range(1, 7))] * 2


def test_drift_guard_sees_frozen_parameters_and_every_dtype():
    def body(backend: ferrodist.Backend) -> None:
        module = nn.Module()
        module.empty = nn.Parameter(torch.zeros(0))
        module.number = nn.Parameter(torch.zeros((), dtype=torch.complex64))
        module.short = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        module.turned = nn.Parameter(torch.zeros(3, 2).t())
        module.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        module.forward = lambda: module.short.sum()
        ddp = ferrodist.DDP(module, backend, check_replicas=1)
        ddp().backward()
        if backend.rank == 1:
            flip(module.frozen)
        ddp().backward()

    for error in errors_by_rank(2, body, timeout=60):
        assert "frozen of rank 1 differs from the others' in step 2" in str(error)


def test_buffers_may_differ_in_between():
    def body(backend: ferrodist.Backend) -> None:
        ddp = ferrodist.DDP(normed(), backend, check_replicas=1)
        for step in range(2):
            squares(ddp, backend.rank, step).backward()

    run_ranks(2, body, timeout=60)
