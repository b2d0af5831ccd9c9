"""DDP in real processes that share memory, as users run it."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import ferrodist
from test_ddp_equality import SMALL
from test_ddp_faults import drifting, failing
from test_ddp_join import COUNTS, loss_of, uneven_alone
from test_ddp_unused import branches, differently
from training import MODELS, OPTIMIZERS, alone, batch, mlp, normed, same_bits, squares, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def in_bfloat16(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = (part.bfloat16() for part in batch(rank, step))
    return ((module(x) - y) ** 2).mean()


CASES = {
    **{f"{name} {update}": (*MODELS[name], update) for name in MODELS for update in OPTIMIZERS},
    "unused": (branches, differently, "sgd"),
    "bfloat16": (lambda seed: mlp(seed).bfloat16(), in_bfloat16, "sgd"),
}


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_train_as_one_process_bit_for_bit(start_job, num_ranks):
    """The one process is such a rank too: numbers depend on how many threads torch has."""

    def body(backend: ferrodist.Backend, _: Any) -> dict[str, bool]:
        results = {}
        for name, (make, loss, optimizer) in CASES.items():
            ddp = ferrodist.DDP(make(backend.rank), backend, check_replicas=1, **SMALL)
            state = train(ddp, loss, 3, optimizer)
            expected = alone(make(0), loss, backend.world_size, 3, optimizer)
            results[name] = same_bits(state, expected)
        return results

    with start_job(num_ranks, body) as job:
        assert job.results() == [dict.fromkeys(CASES, True)] * num_ranks


@pytest.mark.slow
@pytest.mark.long
def test_run_trains_as_one_process_bit_for_bit():
    """Of its two processes each imports torch; docs/ddp.md shows the same in the short tests."""

    def body(_: ferrodist.Backend) -> bool:
        ddp = ferrodist.DDP(mlp(ferrodist.init().rank), **SMALL)
        return same_bits(train(ddp, squares, 3), alone(mlp(), squares, 2, 3))

    assert ferrodist.run(body, 2, timeout=100) == [True, True]


def test_uneven_inputs_in_processes(start_job):
    every = COUNTS[:3]

    def body(backend: ferrodist.Backend, _: Any) -> list[bool]:
        results = []
        for counts in every:
            ddp = ferrodist.DDP(mlp(backend.rank), backend, **SMALL)
            update = OPTIMIZERS["sgd"](ddp.parameters())
            with ddp.join(by_samples=True):
                for step in range(counts[backend.rank]):
                    update.zero_grad()
                    loss_of(ddp, backend.rank, step).backward()
                    update.step()
            expected = uneven_alone(counts, by_samples=True)
            results.append(same_bits(ddp.state_dict(), expected))
        return results

    with start_job(3, body) as job:
        assert job.results() == [[True] * len(every)] * 3


def test_buckets_are_in_shared_memory_and_calls_are_few(start_job):
    def body(backend: ferrodist.Backend, _: Any) -> Any:
        ddp = ferrodist.DDP(normed(), backend)
        train(ddp, squares, 2)
        before = backend.statistics().collectives
        squares(ddp, backend.rank, 2).backward()
        places = {mapping_at(p.grad.data_ptr()) for p in ddp.parameters()}
        return (
            backend.statistics().collectives - before,
            places,
            mapping_at(ddp.module[0].bias.data_ptr()),
        )

    with start_job(2, body) as job:
        for calls, places, other in job.results():
            assert calls == 2  # one bucket, and the buffers
            assert all(" rw-s " in place for place in places), places
            assert " rw-p " in other


def mapping_at(address: int) -> str:
    """Return the line about the memory at an address."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        for line in lines:
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            if first <= address < last:
                return line
    raise AssertionError("there is no memory")


@pytest.mark.parametrize("step", [0, 2])
def test_a_backward_that_raises_is_known_to_the_others_within_a_second(start_job, step):
    def body(backend: ferrodist.Backend, _: Any) -> None:
        ddp = ferrodist.DDP(mlp(), backend, **SMALL)
        for number in range(3):
            if number == step and backend.rank == 1:
                failing(ddp, number)
            squares(ddp, backend.rank, number).backward()

    with start_job(3, body) as job:
        first, failed, last = (rank.end() for rank in job)
    assert isinstance(failed.error, ValueError)
    for end in (first, last):
        assert isinstance(end.error, ferrodist.RankLost)
        assert end.error.rank == 1
        assert "the graph is on fire" in str(end.error)
        assert end.when - failed.when < 1.0


def test_training_on_after_a_failed_backward_ends_in_processes_too(start_job):
    def body(backend: ferrodist.Backend, _: Any) -> None:
        ddp = ferrodist.DDP(mlp(), backend, **SMALL)
        for number in range(3):
            if number == 1 and backend.rank == 1:
                with pytest.raises(ValueError, match="on fire"):
                    failing(ddp, number)
            squares(ddp, backend.rank, number).backward()

    with start_job(3, body) as job:
        for error in job.errors():
            assert isinstance(error, ferrodist.GroupAborted)
            assert "a backward of rank 1 failed" in str(error)


def test_drift_is_named_in_processes_too(start_job):
    with start_job(2, lambda backend, _: drifting(backend, 1, 3, 1)) as job:
        for error in job.errors():
            assert isinstance(error, ferrodist.CollectiveMismatch)
            assert "2.weight of rank 1 differs from the others' in step 3" in str(error)


def test_a_module_that_differs_is_named_in_processes_too(start_job):
    with start_job(2, lambda b, _: ferrodist.DDP(nn.Linear(8, 4 + b.rank), b) and None) as job:
        for error in job.errors():
            assert isinstance(error, ferrodist.CollectiveMismatch)
            assert "weight: float32[5, 8]" in str(error)


def train_compiled(backend: ferrodist.Backend, make: Any, is_outside: bool) -> Any:
    """Train without and with torch.compile; return both states and how many graphs that makes."""
    results = []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for compiles in (False, True):
        module = make(backend.rank)
        inside = torch.compile(module, backend="aot_eager") if compiles else module
        ddp = ferrodist.DDP(module if is_outside else inside, backend, **SMALL)
        model = torch.compile(ddp, backend="aot_eager") if compiles and is_outside else ddp
        update = OPTIMIZERS["sgd"](module.parameters())
        for step in range(3):
            update.zero_grad()
            squares(model, backend.rank, step).backward()
            update.step()
        assert ddp._gradients.num_rounds == 3
        results.append({name: value.tolist() for name, value in module.state_dict().items()})
    return *results, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_compiled_modules_train_in_processes(start_job):
    """The wrapped module is compiled as one graph, with the sending outside of it."""
    cases = list(itertools.product((mlp, normed), (False, True)))

    def body(backend: ferrodist.Backend, _: Any) -> Any:
        warnings.simplefilter("ignore")  # of what torch has to say about itself
        return [train_compiled(backend, *case) for case in cases]

    with start_job(2, body) as job:
        first, second = job.results(60)
    for case, (plain, compiled, num_graphs), (_, other, _) in zip(
        cases, first, second, strict=True
    ):
        assert compiled == other, case
        assert num_graphs == 1, case
        for name, value in plain.items():
            found, expected = torch.tensor(compiled[name]), torch.tensor(value)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
