"""Programs of torch.distributed on threads of this process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ferrodist
from ferrodist.testing import run_torch_ranks

pytestmark = pytest.mark.timeout(60)


def test_every_thread_is_a_rank_with_groups_of_its_own():
    def program(rank: int) -> tuple[float, float, int]:
        x = torch.tensor([float(rank)])
        dist.all_reduce(x)
        pair = dist.new_subgroups(2)[0]
        y = torch.tensor([float(rank)])
        work = dist.all_reduce(y, group=pair, async_op=True)
        work.wait()
        found: list[int] = [0] * 4
        dist.all_gather_object(found, rank)
        assert found == [0, 1, 2, 3]
        return x.item(), y.item(), dist.get_world_size()

    assert run_torch_ranks(4, program) == [(6.0, 1.0, 4)] * 2 + [(6.0, 5.0, 4)] * 2
    assert not dist.is_initialized()


def test_dtensor_on_threads():
    def program(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (3,))
        whole = torch.arange(6.0).reshape(6, 1)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        assert isinstance(sharded, DTensor)
        assert sharded.to_local().flatten().tolist() == [2.0 * rank, 2.0 * rank + 1]
        return sharded.redistribute(mesh, [Replicate()]).to_local().flatten().tolist()

    assert run_torch_ranks(3, program) == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 3


def test_fsdp2_on_threads_trains_as_one_process_does():
    torch.manual_seed(0)
    weights = nn.Linear(4, 3).state_dict()

    def gradient(num_ranks: int) -> torch.Tensor:
        def program(rank: int) -> torch.Tensor:
            model = nn.Linear(4, 3)
            model.load_state_dict(weights)
            fully_shard(model)
            x = torch.arange(8.0).reshape(2, 4)[rank * 2 // num_ranks : (rank + 1) * 2 // num_ranks]
            model(x).square().mean().backward()
            return model.weight.grad.full_tensor()

        return run_torch_ranks(num_ranks, program)[0]

    assert torch.allclose(gradient(2), gradient(1))


def test_errors_of_threads_are_told_as_by_run_ranks():
    def program(rank: int) -> None:
        if rank == 1:
            raise ValueError("out of cheese")
        dist.all_reduce(torch.ones(2))

    with pytest.raises(
        ExceptionGroup, match="first, on rank 1: ValueError: out of cheese"
    ) as caught:
        run_torch_ranks(2, program)
    assert caught.group_contains(ferrodist.RankLost, match="out of cheese")
    assert run_torch_ranks(2, lambda rank: dist.get_rank()) == [0, 1]
