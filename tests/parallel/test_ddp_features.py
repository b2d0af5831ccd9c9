"""What else torch does with a module: checkpoints, compiling, autocast, clipping, outputs."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ferrodist
from ferrodist.testing import run_ranks
from helpers import errors_by_rank
from training import (
    OPTIMIZERS,
    alone,
    batch,
    bits,
    fill,
    gradients_of,
    mlp,
    normed,
    same_bits,
    squares,
    train,
)

EACH = {"first_bucket_mib": 1e-6, "bucket_mib": 1e-6}
SIZES = pytest.mark.parametrize("options", [{}, EACH], ids=["one bucket", "one each"])


def check_training(
    make: Callable[[int], nn.Module], loss: Any = squares, num_steps: int = 4, **options: Any
) -> None:
    """Compare three ranks with one process, bit for bit."""
    expected = alone(make(0), loss, 3, num_steps)

    def body(backend: ferrodist.Backend) -> dict[str, Any]:
        backend.reproducible = True
        ddp = ferrodist.DDP(make(backend.rank), backend, check_replicas=1, **options)
        return train(ddp, loss, num_steps)

    assert all(same_bits(state, expected) for state in run_ranks(3, body, timeout=100))


# -- activation checkpoints ---------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Layers of which some are computed again in backward, by number and in this order."""

    def __init__(self, order: list[int], again: set[int], use_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)])
        self._order, self._again, self._use_reentrant = order, again, use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at, number in enumerate(self._order):
            if at in self._again:
                x = checkpoint(self._layer, number, x, use_reentrant=self._use_reentrant)
            else:
                x = self._layer(number, x)
        return x

    def _layer(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return self.layers[number](x).tanh()


@pytest.mark.slow
@SIZES
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    ("order", "again"),
    [([0, 1, 2], {1}), ([0, 1, 2], {2}), ([0, 1, 2], {1, 2}), ([0, 1, 1, 2], {1, 2})],
    ids=["in the middle", "the last", "several", "one layer twice"],
)
def test_activation_checkpoints(order, again, use_reentrant, options):
    check_training(lambda seed: fill(Checkpointed(order, again, use_reentrant), seed), **options)


def test_more_of_a_gradient_after_it_was_sent_is_refused():
    """The order of the first step had nothing twice; then a layer is used in two checkpoints."""

    def body(backend: ferrodist.Backend) -> None:
        module = fill(Checkpointed([0, 1, 2], {1, 2}, use_reentrant=True), 0)
        ddp = ferrodist.DDP(module, backend, **EACH)
        squares(ddp, backend.rank, 0).backward()
        module._order, module._again = [0, 1, 1, 2], {1, 2, 3}
        squares(ddp, backend.rank, 1).backward()

    causes = [e for e in errors_by_rank(2, body, timeout=60) if "got more gradient" in str(e)]
    assert causes
    assert "layers.1" in str(causes[0])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_the_whole_module(use_reentrant):
    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        x, y = batch(rank, step)
        out = checkpoint(module, x.requires_grad_(), use_reentrant=use_reentrant)
        return ((out - y) ** 2).mean()

    check_training(mlp, loss, **EACH)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_a_module_with_buffers_shares_them_once(use_reentrant):
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(normed(), backend, **EACH)
        for step in range(3):
            before = backend.statistics().collectives
            x = batch(backend.rank, step)[0].requires_grad_()
            checkpoint(ddp, x, use_reentrant=use_reentrant).mean().backward()
            calls = backend.statistics().collectives - before
        return calls

    assert run_ranks(2, body, timeout=60) == [7] * 2


# -- compiled -----------------------------------------------------------------------------------


@pytest.fixture
def dynamo() -> Any:
    """Compiling, which is loaded here for it warns of things of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch._dynamo

        torch._dynamo.reset()
        yield torch._dynamo
        torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_a_compiled_module_trains(name):
    def body(backend: ferrodist.Backend) -> dict[str, Any]:
        backend.reproducible = True
        module = mlp()
        ddp = ferrodist.DDP(torch.compile(module, backend=name), backend, **EACH)
        train(ddp, squares, 3)
        return module.state_dict()

    (state,) = run_ranks(1, body, timeout=100)
    for key, value in alone(mlp(), squares, 1, 3).items():
        torch.testing.assert_close(state[key], value)


@pytest.mark.slow
@pytest.mark.usefixtures("dynamo")
def test_a_wrapped_module_that_is_compiled_trains():
    def body(backend: ferrodist.Backend) -> dict[str, Any]:
        module = mlp()
        ddp = ferrodist.DDP(module, backend, **EACH)
        compiled = torch.compile(ddp, backend="aot_eager")
        update = OPTIMIZERS["sgd"](module.parameters())
        for step in range(3):
            update.zero_grad()
            squares(compiled, 0, step).backward()
            update.step()
        assert ddp._gradients.num_rounds == 3
        return module.state_dict()

    (state,) = run_ranks(1, body, timeout=100)
    for key, value in alone(mlp(), squares, 1, 3).items():
        torch.testing.assert_close(state[key], value)


# -- mixed precision, clipping --------------------------------------------------------------------


def test_autocast_with_a_grad_scaler():
    def steps(module: nn.Module, ranks: list[int]) -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        update = OPTIMIZERS["sgd"](module.parameters())
        for step in range(4):
            update.zero_grad()
            for rank in ranks:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = squares(module, rank, step) / len(ranks)
                # In the third step one rank overflows, so that all leave it out.
                loss = loss * float("inf") if step == 2 and rank == 1 else loss
                scaler.scale(loss).backward()
            scaler.unscale_(update)
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            scaler.step(update)
            scaler.update()
        assert scaler.get_scale() == 2.0**9
        return module.state_dict()

    expected = steps(mlp(), [0, 1])
    first, second = run_ranks(
        2, lambda b: steps(ferrodist.DDP(mlp(b.rank), b, **EACH), [b.rank]), timeout=60
    )
    assert same_bits(first, second)
    for name, value in expected.items():
        torch.testing.assert_close(first[name], value)


@pytest.mark.parametrize("foreach", [False, True])
def test_clipping_sees_the_mean(foreach):
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(mlp(), backend, **EACH)
        squares(ddp, backend.rank, 0).backward()
        before = gradients_of(ddp)
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), 0.1, foreach=foreach)
        return norm, before, gradients_of(ddp)

    (norm, before, after), (other, _, _) = run_ranks(2, body, timeout=60)
    assert bits(norm) == bits(other)
    for name, gradient in before.items():
        torch.testing.assert_close(after[name], gradient * (0.1 / norm))


# -- outputs ------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(slots=True)
class Record:
    first: Any
    second: Any


@dataclasses.dataclass
class Plain:
    first: Any
    second: Any


class Unknown:
    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


OUTPUTS = {
    "tuple": (lambda a, b: (a, b), lambda out: out),
    "list": (lambda a, b: [a, {"b": b}], lambda out: (out[0], out[1]["b"])),
    "dict": (lambda a, b: {"a": a, "b": (b, None, 3)}, lambda out: (out["a"], out["b"][0])),
    "named tuple": (Pair, lambda out: out),
    "dataclass": (Plain, lambda out: (out.first, out.second)),
    "slotted": (Record, lambda out: (out.first, out.second)),
    "unknown": (Unknown, lambda out: (out.first, out.second)),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_of_every_kind(kind):
    pack, unpack = OUTPUTS[kind]

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return pack(self.one(x), self.two(x))

    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        x, y = batch(rank, step)
        one, two = unpack(module(x))
        return ((one - y) ** 2).mean() + (two.mean() if step != 1 else 0)

    check_training(lambda seed: fill(Two(), seed), loss, 3, **EACH)


def test_a_parameter_as_output_gets_no_hook_per_forward():
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self) -> torch.Tensor:
            return self.scale

    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(Bare(), backend)
        for _ in range(3):
            (ddp() * (1 + backend.rank)).sum().backward()
        return ddp.scale.grad.tolist(), len(ddp.scale._backward_hooks or ())

    assert run_ranks(2, body, timeout=60) == [([4.5, 4.5], 0)] * 2


def test_outputs_may_be_changed_in_place():
    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        x, y = batch(rank, step)
        return ((module(x).tanh_() - y) ** 2).mean()

    check_training(mlp, loss, **EACH)


# -- derivatives by something else than parameters ------------------------------------------------

SLOPES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "autograd.grad": torch.autograd.grad,
    "backward(inputs=)": lambda out, x: out.backward(inputs=[x]),
    "with a graph": lambda out, x: torch.autograd.grad(out, x, create_graph=True),
}


@SIZES
@pytest.mark.parametrize("how", SLOPES)
@pytest.mark.parametrize("step", [0, 1])
def test_slopes_by_the_input_on_one_rank_need_nobody_else(how, step, options):
    def body(backend: ferrodist.Backend) -> Any:
        backend.timeout = 5
        ddp = ferrodist.DDP(mlp(), backend, **options)
        for number in range(3):
            if number == step and backend.rank == 1:
                before = backend.statistics().collectives
                x = batch(1, number)[0].requires_grad_()
                SLOPES[how](ddp(x).sum(), x)
                assert backend.statistics().collectives == before
                assert (x.grad is None) == (how != "backward(inputs=)")
            ddp.zero_grad()
            squares(ddp, backend.rank, number).backward()
        return gradients_of(ddp)

    first, second = run_ranks(2, body, timeout=60)
    assert same_bits(first, second)


def test_slopes_by_parameters_are_the_ranks_own():
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(mlp(), backend)
        before = backend.statistics().collectives
        slopes = torch.autograd.grad(squares(ddp, backend.rank, 0), list(ddp.parameters()))
        assert backend.statistics().collectives == before
        own = mlp()
        squares(own, backend.rank, 0).backward()
        return [bits(a) == bits(p.grad) for a, p in zip(slopes, own.parameters(), strict=True)]

    assert run_ranks(2, body, timeout=60) == [[True] * 4] * 2


def test_backward_by_some_parameters_averages_those():
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(mlp(), backend, **EACH)
        for step in range(2):
            ddp.zero_grad()
            squares(ddp, backend.rank, step).backward(inputs=[ddp.module[0].weight])
        return gradients_of(ddp)

    first, second = run_ranks(2, body, timeout=60)
    assert same_bits(first, second)
    assert [name for name, gradient in first.items() if gradient is not None] == ["0.weight"]


# -- higher derivatives ---------------------------------------------------------------------------


def test_double_backward_is_refused():
    def body(backend: ferrodist.Backend) -> None:
        ddp = ferrodist.DDP(mlp(), backend)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about create_graph
            squares(ddp, backend.rank, 0).backward(create_graph=True)

    for error in errors_by_rank(2, body, timeout=60):
        assert isinstance(error, ferrodist.InvalidArgument)
        assert "create_graph=True" in str(error)


def test_a_gradient_penalty_by_autograd_grad_trains():
    """Higher derivatives of inputs are no gradients of parameters: they are averaged as usual."""

    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        x = batch(rank, step)[0].requires_grad_()
        out = module(x).tanh().sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return slope.square().mean() + 0.1 * out

    check_training(mlp, loss, **EACH)


def test_higher_derivatives_inside_no_sync_are_the_ranks_own():
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(mlp(), backend)
        with ddp.no_sync(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            squares(ddp, backend.rank, 0).backward(create_graph=True)
        assert all(p.grad.requires_grad for p in ddp.parameters())
        ddp.zero_grad()
        squares(ddp, backend.rank, 0).backward()
        return [bits(p.grad) for p in ddp.parameters()]

    first, second = run_ranks(2, body, timeout=60)
    assert first == second
