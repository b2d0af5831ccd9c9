"""Sparse gradients: tables of which each rank uses some rows."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import ferrodist
from ferrodist.testing import run_ranks
from helpers import errors_by_rank
from training import bits, fill

pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # torch's


class Table(nn.Module):
    """A sparse table, one more that some forwards use, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4, sparse=True)
        self.bag = nn.EmbeddingBag(7, 4, mode="sum", sparse=True)
        self.layer = nn.Linear(4, 2)

    def forward(self, rows: torch.Tensor, bag: torch.Tensor | None = None) -> torch.Tensor:
        found = self.table(rows)
        return self.layer(found if bag is None else found + self.bag(bag))


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    rows = torch.tensor([rank, (3 * rank + step) % 11, 5, 5])
    bag = torch.tensor([[rank, step]] * 4) if (rank + step) % 2 else None
    return module(rows, bag).square().sum()


def updates_of(module: Any) -> list[torch.optim.Optimizer]:
    tables = [module.table.weight, module.bag.weight]
    return [torch.optim.SparseAdam(tables, 0.1), torch.optim.SGD(module.layer.parameters(), 0.1)]


def in_one_process(num_ranks: int, num_steps: int) -> dict[str, Any]:
    module = fill(Table(), 0)
    updates = updates_of(module)
    for step in range(num_steps):
        module.zero_grad()
        (sum(loss_of(module, rank, step) for rank in range(num_ranks)) / num_ranks).backward()
        for update in updates:
            update.step()
    return module.state_dict()


def in_ranks(backend: ferrodist.Backend, num_steps: int, **options: Any) -> dict[str, Any]:
    ddp = ferrodist.DDP(fill(Table(), backend.rank), backend, check_replicas=1, **options)
    updates = updates_of(ddp)
    for step in range(num_steps):
        ddp.zero_grad()
        loss_of(ddp, backend.rank, step).backward()
        if options.get("overlap") is False:
            ddp.sync_gradients()
        assert ddp.table.weight.grad.is_sparse
        for update in updates:
            update.step()
    return ddp.state_dict()


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"bucket_mib": 1e-6}], ids=str)
def test_sparse_tables_train_as_in_one_process(options):
    expected = in_one_process(3, 4)
    for state in run_ranks(3, lambda backend: in_ranks(backend, 4, **options), timeout=60):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value)


@pytest.mark.slow
def test_sparse_tables_train_in_processes(start):
    def body(backend: ferrodist.Backend, _: Any) -> dict[str, Any]:
        warnings.simplefilter("ignore")
        return {name: value.tolist() for name, value in in_ranks(backend, 3).items()}

    with start(2, body) as job:
        first, second = job.results()
    assert first == second
    for name, value in in_one_process(2, 3).items():
        torch.testing.assert_close(torch.tensor(first[name]), value)


def test_a_table_that_no_rank_uses_keeps_its_gradient():
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(fill(Table(), 0), backend)
        ddp(torch.tensor([backend.rank])).sum().backward()
        return ddp.bag.weight.grad, ddp.table.weight.grad.coalesce().indices().tolist()

    assert run_ranks(2, body, timeout=60) == [(None, [[0, 1]])] * 2


def test_sparse_gradients_add_up_inside_no_sync():
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(nn.Embedding(5, 2, sparse=True), backend)
        before = backend.statistics().collectives
        with ddp.no_sync():
            ddp(torch.tensor([backend.rank])).sum().backward()
        assert backend.statistics().collectives == before
        ddp(torch.tensor([4])).sum().backward()
        return ddp.weight.grad.to_dense()[:, 0].tolist()

    assert run_ranks(2, body, timeout=60) == [[0.5, 0.5, 0.0, 0.0, 1.0]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_sparse_gradients_are_weighed_in_join(dtype):
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(nn.Embedding(3, 2, sparse=True).to(dtype), backend)
        rows = torch.full((1 + 2 * backend.rank, 1), backend.rank)
        seen = []
        with ddp.join(by_samples=True):
            for _ in range(1 + backend.rank):
                ddp.zero_grad()
                ddp(rows)[0].sum().backward()
                seen.append(ddp.weight.grad.to_dense()[:, 0].tolist())
        return seen[0], ddp.weight.grad.to_dense()[:, 0].tolist()

    assert run_ranks(2, body, timeout=60) == [([0.25, 0.75, 0.0], [0.0, 1.0, 0.0])] * 2


def test_a_dense_gradient_of_a_sparse_table_is_taken():
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(nn.Embedding(3, 2, sparse=True), backend)
        ddp.module.sparse = backend.rank == 1
        ddp(torch.tensor([backend.rank])).sum().backward()
        return ddp.weight.grad.to_dense()[:, 0].tolist()

    assert run_ranks(2, body, timeout=60) == [[0.5, 0.5, 0.0]] * 2


def test_sparse_gradients_from_elsewhere_are_refused():
    def body(backend: ferrodist.Backend) -> None:
        ddp = ferrodist.DDP(nn.Embedding(5, 2), backend)
        ddp.module.sparse = True
        ddp(torch.tensor([backend.rank])).sum().backward()

    for error in errors_by_rank(2, body, timeout=60):
        assert isinstance(error, ferrodist.UnsupportedArray)
        assert "weight is torch.sparse_coo; make it dense" in str(error)


def test_a_lost_rank_is_named_with_the_table():
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(nn.Embedding(5, 2, sparse=True), backend)
        if backend.rank == 0:
            ddp(torch.tensor([0])).sum().backward()
        backend.close()
        return bits(ddp.weight)

    error, _ = errors_by_rank(2, body, timeout=60)
    assert str(error).startswith("DDP: sparse gradients of weight: all_gather #")
    assert "model.join()" in str(error)
