"""What stands on torch.distributed runs on ferrodist unchanged, with the results of one process.

All of it runs in one job of two ranks, one part after the other: starting ranks would take longer
than the parts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import ScheduleDualPipeV
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from torch_worlds import torch_job

pytestmark = pytest.mark.timeout(180)

WIDTH, BATCH = 8, 4


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def batch(rank: int) -> torch.Tensor:
    return torch.sin(torch.arange(float(BATCH * WIDTH)) + 100 * rank).reshape(BATCH, WIDTH)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def gradients_alone() -> list[torch.Tensor]:
    """Return the gradients of the loss over the batches of both ranks."""
    model = mlp()
    loss_of(model, torch.cat([batch(0), batch(1)])).backward()
    return [parameter.grad for parameter in model.parameters()]


def check_gradients(found: list[Any], tolerance: float = 1e-6) -> None:
    for one, expected in zip(found, gradients_alone(), strict=True):
        assert one.shape == expected.shape
        assert torch.allclose(one, expected, atol=tolerance), (one - expected).abs().max()


# -- data parallel --------------------------------------------------------------------------------


def check_ddp(rank: int) -> None:
    for options in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        ddp = DistributedDataParallel(mlp(), bucket_cap_mb=0.0005, **options)
        with ddp.no_sync():
            loss_of(ddp, batch(rank)).backward()
        ddp.zero_grad()
        loss_of(ddp, batch(rank)).backward()
        check_gradients([parameter.grad for parameter in ddp.parameters()])


def check_hooks(rank: int) -> None:
    hooks = {
        "allreduce": (None, default_hooks.allreduce_hook, 1e-6),
        "fp16": (None, default_hooks.fp16_compress_hook, 1e-3),
        "powersgd": (
            powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2),
            powerSGD_hook.powerSGD_hook,
            1e-4,
        ),
    }
    for name, (state, hook, tolerance) in hooks.items():
        ddp = DistributedDataParallel(mlp())
        ddp.register_comm_hook(state, hook)
        for _ in range(2 if name != "powersgd" else 4):
            ddp.zero_grad()
            loss_of(ddp, batch(rank)).backward()
        if name != "powersgd":  # which is an approximation
            check_gradients([parameter.grad for parameter in ddp.parameters()], tolerance)


def check_builtin_hook(rank: int) -> None:
    """That of torch's C++ code; its FP16_COMPRESS needs a future of a type Python cannot make."""
    ddp = DistributedDataParallel(mlp())
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    for _ in range(2):
        ddp.zero_grad()
        loss_of(ddp, batch(rank)).backward()
    check_gradients([parameter.grad for parameter in ddp.parameters()])


def check_local_sgd(rank: int) -> None:
    """Gradients of the first step are averaged, then those of a subgroup, here of one rank."""
    own = [dist.new_group([one]) for one in range(2)][rank]
    state = post_localSGD_hook.PostLocalSGDState(None, own, start_localSGD_iter=1)
    ddp = DistributedDataParallel(mlp())
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    loss_of(ddp, batch(rank)).backward()
    check_gradients([parameter.grad for parameter in ddp.parameters()])
    ddp.zero_grad()
    loss_of(ddp, batch(rank)).backward()
    alone = mlp()
    loss_of(alone, batch(rank)).backward()
    for one, other in zip(ddp.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-6)


def check_sparse_gradients(rank: int) -> None:
    def table() -> nn.Module:
        torch.manual_seed(0)
        return nn.Embedding(10, 3, sparse=True)

    words = torch.tensor([[0, 1, 2], [2, 7, 7]])  # of each rank; both have the third
    ddp, alone = DistributedDataParallel(table()), table()
    ddp(words[rank]).square().sum().backward()
    (alone(words).square().sum() / 2).backward()
    found = ddp.module.weight.grad
    assert found.is_sparse
    assert torch.allclose(found.to_dense(), alone.weight.grad.to_dense())


def check_join(rank: int) -> None:
    ddp = DistributedDataParallel(mlp())
    num_steps = 0
    with Join([ddp]):
        for _ in range(2 + rank):  # rank 1 has one batch more
            ddp.zero_grad()
            loss_of(ddp, batch(rank)).backward()
            num_steps += 1
    assert num_steps == 2 + rank
    weights = [torch.empty(2 * WIDTH, WIDTH) for _ in range(2)]
    dist.all_gather(weights, ddp.module[0].weight.detach())
    assert torch.equal(*weights)


def check_zero(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of itself

    ddp, alone = DistributedDataParallel(mlp()), mlp()
    sharded = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.1)
    plain = torch.optim.Adam(alone.parameters(), lr=0.1)
    for _ in range(2):
        sharded.zero_grad()
        loss_of(ddp, batch(rank)).backward()
        sharded.step()
        plain.zero_grad()
        loss_of(alone, torch.cat([batch(0), batch(1)])).backward()
        plain.step()
    for one, other in zip(ddp.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    sharded.consolidate_state_dict(to=0)


def check_fsdp1(rank: int) -> None:
    model = FullyShardedDataParallel(mlp(), use_orig_params=True, device_id=torch.device("cpu"))
    loss_of(model, batch(rank)).backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        check_gradients([parameter.grad for parameter in model.parameters()])


def check_fsdp2(rank: int) -> None:
    model = mlp()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    loss_of(model, batch(rank)).backward()
    check_gradients([parameter.grad.full_tensor() for parameter in model.parameters()])
    optimizer.step()


def check_hsdp(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model, policy = mlp(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    loss_of(model, batch(rank)).backward()
    check_gradients([parameter.grad.full_tensor() for parameter in model.parameters()], 2e-2)


# -- tensors in parts -----------------------------------------------------------------------------


def check_dtensor(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(30.0).reshape(5, 6)  # not even by rank
    for before in (Shard(0), Shard(1), Replicate()):
        for after in (Shard(0), Shard(1), Replicate()):
            moved = distribute_tensor(whole, mesh, [before]).redistribute(mesh, [after])
            assert torch.equal(moved.full_tensor(), whole), (before, after)
    halves = torch.distributed.tensor.DTensor.from_local(whole / 2, mesh, [Partial()])
    assert torch.equal(halves.full_tensor(), whole)
    product = distribute_tensor(whole, mesh, [Shard(1)]) @ distribute_tensor(
        whole.t().contiguous(), mesh, [Shard(0)]
    )
    assert torch.allclose(product.full_tensor(), whole @ whole.t())


def check_tensor_parallel(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    loss_of(model, torch.cat([batch(0), batch(1)])).backward()
    check_gradients([parameter.grad.full_tensor() for parameter in model.parameters()])


def check_sequence_parallel(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    norm, alone = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
    whole = torch.stack([batch(0), batch(1)])
    model = parallelize_module(nn.Sequential(norm), mesh, {"0": SequenceParallel()})
    out = model(whole.chunk(2, dim=1)[rank])  # a rank has a part of the sequence
    assert torch.allclose(out.full_tensor(), alone(whole), atol=1e-5)


def check_loss_parallel(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    logits, target = batch(0), torch.tensor([0, 3, 5, 7])
    sharded = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    plain = logits.clone().requires_grad_()
    with loss_parallel():
        loss = nn.functional.cross_entropy(sharded, target)
        loss.backward()
    expected = nn.functional.cross_entropy(plain, target)
    expected.backward()
    assert torch.allclose(loss.full_tensor() if hasattr(loss, "full_tensor") else loss, expected)
    assert torch.allclose(sharded.grad.full_tensor(), plain.grad, atol=1e-6)


def check_functional(rank: int) -> None:
    group, x = dist.group.WORLD, torch.arange(4.0) + 10 * rank
    total = torch.arange(4.0) * 2 + 10
    both = torch.cat([torch.arange(4.0), torch.arange(4.0) + 10])
    assert torch.equal(functional.all_reduce(x, "sum", group), total)
    assert torch.equal(functional.all_gather_single(x, 0, group), both)
    part = functional.reduce_scatter_single(x, "sum", 0, group)
    assert torch.equal(part, total[2 * rank : 2 * rank + 2])
    assert torch.equal(functional.broadcast(x, 1, group), torch.arange(4.0) + 10)
    swapped = functional.all_to_all_single(x, [2, 2], [2, 2], group)
    assert torch.equal(swapped, both.reshape(2, 2, 2)[:, rank].flatten())
    sums = functional.all_reduce_coalesced([x, x + 1], "sum", group)
    assert torch.equal(sums[1], total + 2)


def check_pipelining(rank: int) -> None:
    model, whole = mlp(), torch.cat([batch(0), batch(1)])

    def loss_fn(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    def stages(count: int, is_v: bool) -> list[PipelineStage]:
        parts = [nn.Sequential(model[0], model[1]), model[2]]
        if count == 4:
            parts = [model[0], model[1], nn.Identity(), model[2]]
        numbers: Sequence[int] = range(rank, count, 2)
        if is_v:  # there and back: the first rank has the last stage, too
            parts, numbers = [model[0], model[1], nn.Identity(), model[2]], (rank, 3 - rank)
        return [PipelineStage(parts[n], n, count, torch.device("cpu")) for n in numbers]

    v_shaped = (ScheduleZBVZeroBubble, ScheduleDualPipeV)
    schedules: list[tuple[Any, int]] = [
        (ScheduleGPipe, 2),
        (Schedule1F1B, 2),
        (ScheduleInterleaved1F1B, 4),
        (ScheduleLoopedBFS, 4),
        (ScheduleInterleavedZeroBubble, 4),
        *((kind, 4) for kind in v_shaped),
    ]
    for kind, count in schedules:
        model.zero_grad()
        own = stages(count, kind in v_shaped)
        schedule = kind(own[0] if count == 2 else own, 4, loss_fn=loss_fn)
        last = 0 if kind in v_shaped else 1
        schedule.step(*[whole] * (rank == 0), **{"target": whole} if rank == last else {})
        for place, part, expected in (
            (0, model[0], gradients_alone()[:2]),
            (last, model[2], gradients_alone()[2:]),
        ):
            for parameter, gradient in zip(part.parameters(), expected, strict=True):
                is_right = rank != place or torch.allclose(parameter.grad, gradient, atol=1e-5)
                assert is_right, kind


def check_checkpoints(rank: int) -> None:
    names = [tempfile.mkdtemp() if rank == 0 else None for _ in range(2)]
    dist.broadcast_object_list(names)
    model = mlp()
    fully_shard(model)
    before = {name: one.full_tensor() for name, one in model.state_dict().items()}
    for folder, save in zip(names, (checkpoint.save, checkpoint.async_save), strict=True):
        done = save(model.state_dict(), checkpoint_id=folder)
        if save is checkpoint.async_save:
            done.result()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        state = model.state_dict()
        checkpoint.load(state, checkpoint_id=folder)
        model.load_state_dict(state)
        for name, one in model.state_dict().items():
            assert torch.equal(one.full_tensor(), before[name]), (save, name)


def check_compile(rank: int) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        return functional.all_gather_single(y + 1, 0, dist.group.WORLD)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), step(torch.ones(3)))


class Own(nn.Module):
    """As mlp(), with a forward of its own: torch.compile leaves that of a bare Sequential alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def check_inductor(rank: int) -> None:
    """Compile to C++, which the counters of torch prove: what is not compiled has results, too."""
    from torch._dynamo.utils import counters

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        group = dist.group.WORLD
        total = functional.all_reduce(x * 2, "sum", group)
        whole = functional.all_gather_single(total + 1, 0, group)
        part = functional.reduce_scatter_single(whole * 3, "sum", 0, group)
        swapped = functional.all_to_all_single(part * 2, [2, 2], [2, 2], group)
        return functional.broadcast(swapped - 1, 1, group), functional.all_reduce(x, "avg", group)

    x = torch.arange(4.0) + 10 * rank
    found = torch.compile(step, fullgraph=True)(x)
    assert all(torch.equal(one, other) for one, other in zip(found, step(x), strict=True))
    assert counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_hit"]
    wraps: dict[str, Callable[[nn.Module], Any]] = {
        "compiled in DDP": lambda model: DistributedDataParallel(torch.compile(model)),
        "DDP compiled": lambda model: torch.compile(DistributedDataParallel(model)),
        "FSDP2 compiled": lambda model: torch.compile(fully_shard(model)),
    }
    for name, wrap in wraps.items():
        torch._dynamo.reset()
        counters.clear()
        model = Own()
        wrapped = wrap(model)
        for _ in range(2):
            wrapped.zero_grad()
            loss_of(wrapped, batch(rank)).backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            check_gradients(
                [getattr(one, "full_tensor", lambda one=one: one)() for one in gradients]
            )
        assert counters["stats"]["unique_graphs"], name
        assert counters["inductor"], name


CHECKS = {name: fn for name, fn in globals().items() if name.startswith("check_")}
SLOW = {"check_compile", "check_pipelining", "check_hooks"}
LONG = {"check_inductor"}  # the C++ compiler of each rank takes most of a minute
NOT_CHECKS = {"check_gradients"}


def run_checks(names: list[str], rank: int, _: Any) -> None:
    for name in names:
        try:
            with nullcontext():
                CHECKS[name](rank)
        except BaseException as error:  # of any kind: raised again, with a note
            error.add_note(f"in {name}")
            raise
        dist.barrier()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "names",
    [
        sorted(CHECKS.keys() - SLOW - LONG - NOT_CHECKS),
        pytest.param(sorted(SLOW), marks=pytest.mark.slow),
        pytest.param(sorted(LONG), marks=[pytest.mark.long, pytest.mark.timeout(600)]),
    ],
    ids=["quick", "slow", "long"],
)
def test_what_stands_on_torch_distributed_runs_unchanged(start_job, names, tmp_path):
    def body(rank: int, pipe: Any) -> None:
        import warnings

        warnings.simplefilter("ignore")
        run_checks(names, rank, pipe)

    # With no compiled code of an earlier run; a rank that still compiles is waited for.
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    with torch_job(start_job, 2, body, seconds=300.0, **cache) as job:
        for rank in job:
            end = rank.hear(500 if names == sorted(LONG) else 150)
            if end.error is not None:
                end.error.add_note(end.trace)
                raise end.error
