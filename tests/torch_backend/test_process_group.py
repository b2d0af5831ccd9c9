"""The process group: every call of torch.distributed on it, with values that depend on the rank."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import ferrodist
import ferrodist.torch
from torch_worlds import torch_job

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
]

DTYPES = [
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
]
LAYOUTS = {
    "flat": lambda x: x,
    "matrix": lambda x: x.reshape(2, 3),
    "transposed": lambda x: x.reshape(3, 2).t(),
    "every other": lambda x: x.repeat_interleave(2)[::2],
    "parameter": lambda x: torch.nn.Parameter(x) if x.is_floating_point() else x,
}


def ranks_in(x: Any) -> list[float]:
    return x.detach().double().flatten().tolist()


def own(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make six numbers that no other rank has."""
    return (torch.arange(6) + 10 * rank).to(dtype)


# -- reductions -----------------------------------------------------------------------------------


def check_all_reduce(rank: int, _: Any) -> None:
    world = dist.get_world_size()
    for dtype in DTYPES:
        for name, lay_out in LAYOUTS.items():
            for is_async in (False, True):
                x = lay_out(own(rank, dtype))
                work = dist.all_reduce(x, async_op=is_async)
                if is_async:
                    work.wait()
                total = sum(lay_out(own(r, torch.int64)) for r in range(world)).to(dtype)
                assert torch.equal(x.detach(), total), (dtype, name, is_async, x, total)


def check_operations(rank: int, _: Any) -> None:
    world, values = dist.get_world_size(), [own(r) + 1 for r in range(dist.get_world_size())]
    stacked = torch.stack(values)
    expected = {
        ReduceOp.SUM: stacked.sum(0),
        ReduceOp.AVG: stacked.mean(0),
        ReduceOp.PRODUCT: stacked.prod(0),
        ReduceOp.MIN: stacked.amin(0),
        ReduceOp.MAX: stacked.amax(0),
        dist._make_nccl_premul_sum(0.5): 0.5 * stacked.sum(0),
    }
    for op, result in expected.items():
        x = values[rank].clone()
        dist.all_reduce(x, op)
        assert torch.allclose(x, result), op
        x = values[rank].clone()
        dist.reduce(x, world - 1, op)
        assert rank < world - 1 or torch.allclose(x, result), op
        whole = values[rank].repeat_interleave(world)
        part = torch.empty(6)
        dist.reduce_scatter_single(part, whole, op)
        everything = torch.stack([value.repeat_interleave(world) for value in values])
        part_of_all = result.repeat_interleave(world)[6 * rank : 6 * rank + 6]
        assert torch.allclose(part, part_of_all), (op, everything)
    for op, combine in {
        ReduceOp.BAND: torch.bitwise_and,
        ReduceOp.BOR: torch.bitwise_or,
        ReduceOp.BXOR: torch.bitwise_xor,
    }.items():
        x, result = own(rank, torch.int32), own(0, torch.int32)
        for other in range(1, world):
            result = combine(result, own(other, torch.int32))
        dist.all_reduce(x, op)
        assert torch.equal(x, result), op


def check_odd_tensors(rank: int, _: Any) -> None:
    world = dist.get_world_size()
    x = torch.tensor([rank == 0, False])
    dist.all_reduce(x)
    assert x.tolist() == [True, False]
    x = torch.complex(own(rank), -own(rank))
    dist.all_reduce(x)
    total = sum(own(r) for r in range(world))
    assert torch.equal(x, torch.complex(total, -total))
    x = torch.tensor([float(rank)]).expand(3)
    dist.all_reduce(x)
    assert x.tolist() == [sum(range(world))] * 3
    x = torch.full((), float(rank)) if rank else torch.zeros(1)  # as many elements, another shape
    dist.all_reduce(x)
    assert ranks_in(x) == [sum(range(world))]
    x = torch.empty(0)
    dist.all_reduce(x)
    x = own(rank).to(torch.float8_e4m3fn)
    dist.broadcast(x, world - 1)
    assert torch.equal(x.float(), own(world - 1).to(torch.float8_e4m3fn).float())


def check_sparse(rank: int, _: Any) -> None:
    world = dist.get_world_size()
    x = torch.sparse_coo_tensor([[rank, 4]], [[1.0 + rank], [2.0]], (5, 1))
    dist.all_reduce(x)
    dense = torch.zeros(5, 1)
    for r in range(world):
        dense[r] += 1.0 + r
        dense[4] += 2.0
    assert torch.equal(x.to_dense(), dense)


def check_reduce_scatter(rank: int, _: Any) -> None:
    world = dist.get_world_size()
    parts = [own(rank) + 100 * r for r in range(world)]
    for is_async in (False, True):
        out = torch.empty(2, 3).t().reshape(3, 2).t()
        work = dist.reduce_scatter(out, [p.reshape(2, 3) for p in parts], async_op=is_async)
        if is_async:
            work.wait()
        assert ranks_in(out) == ranks_in(sum(own(r) + 100 * rank for r in range(world)))
    uneven = [torch.full((r + 1,), float(rank + r)) for r in range(world)]
    out = torch.empty(rank + 1)
    dist.reduce_scatter(out, uneven)
    assert ranks_in(out) == [sum(r + rank for r in range(world))] * (rank + 1)


# -- copies ---------------------------------------------------------------------------------------


def check_copies(rank: int, _: Any) -> None:
    world = dist.get_world_size()
    for root in range(world):
        x = LAYOUTS["transposed"](own(rank))
        dist.broadcast(x, root)
        assert torch.equal(x, LAYOUTS["transposed"](own(root)))
        parts = [torch.empty(3, 2).t() for _ in range(world)] if rank == root else None
        dist.gather(LAYOUTS["matrix"](own(rank)), parts, dst=root)
        assert parts is None or [ranks_in(p) for p in parts] == [
            ranks_in(own(r)) for r in range(world)
        ]
        part = torch.empty(6)
        dist.scatter(part, [own(r) + root for r in range(world)] if rank == root else None, root)
        assert torch.equal(part, own(rank) + root)
    parts = [torch.empty(6) for _ in range(world)]
    dist.all_gather(parts, own(rank))
    assert [ranks_in(p) for p in parts] == [ranks_in(own(r)) for r in range(world)]
    for shape in ((world * 2, 3), (world, 2, 3)):
        out = torch.empty(shape)
        dist.all_gather_single(out, own(rank).reshape(2, 3))
        assert ranks_in(out) == [number for r in range(world) for number in ranks_in(own(r))]
    parts = [torch.empty(r + 1) for r in range(world)]  # each rank another size
    dist.all_gather(parts, torch.full((rank + 1,), float(rank)))
    assert [ranks_in(p) for p in parts] == [[float(r)] * (r + 1) for r in range(world)]


def check_all_to_all(rank: int, _: Any) -> None:
    world = dist.get_world_size()
    out = torch.empty(world)
    dist.all_to_all_single(out, torch.arange(world) + 10.0 * rank)
    assert ranks_in(out) == [rank + 10.0 * r for r in range(world)]
    # From rank i to rank j go i + j rows.
    sends, receives = [rank + r for r in range(world)], [r + rank for r in range(world)]
    for is_async in (False, True):
        out = torch.empty(sum(receives), 2)
        work = dist.all_to_all_single(
            out, torch.full((sum(sends), 2), float(rank)), receives, sends, async_op=is_async
        )
        if is_async:
            work.wait()
        assert ranks_in(out) == [float(r) for r in range(world) for _ in range(2 * receives[r])]
    outs = [torch.empty(rank + r + 1) for r in range(world)]
    dist.all_to_all(outs, [torch.full((rank + r + 1,), float(rank)) for r in range(world)])
    assert [ranks_in(o) for o in outs] == [[float(r)] * (rank + r + 1) for r in range(world)]


def check_coalesced(rank: int, _: Any) -> None:
    world = dist.get_world_size()
    tensors = [own(rank), own(rank, torch.int64).reshape(2, 3), own(rank).reshape(3, 2).t()]
    with dist._coalescing_manager():
        for x in tensors:
            dist.all_reduce(x)
    total = sum(own(r) for r in range(world))
    assert all(sorted(ranks_in(x)) == ranks_in(total) for x in tensors)
    outs = [torch.empty(6 * world), torch.empty(6 * world)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out in outs:
            dist.all_gather_single(out, own(rank))
    manager.wait()
    assert all(ranks_in(out)[6 * rank : 6 * rank + 6] == ranks_in(own(rank)) for out in outs)
    outs = [torch.empty(6), torch.empty(6)]
    with dist._coalescing_manager():
        for out in outs:
            dist.reduce_scatter_single(out, own(rank).repeat(world))
    assert all(torch.equal(out, total) for out in outs)


def check_objects(rank: int, _: Any) -> None:
    world = dist.get_world_size()
    found: list[Any] = [None] * world
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank})
    assert found == [{"rank": r, "text": "x" * r} for r in range(world)]
    given = [("a", rank), None]
    dist.broadcast_object_list(given, world - 1)
    assert given == [("a", world - 1), None]
    taken: list[Any] = [None]
    dist.scatter_object_list(taken, [f"for {r}" for r in range(world)], src=0)
    assert taken == [f"for {rank}"]


# -- point to point, works, groups ----------------------------------------------------------------


def check_messages(rank: int, _: Any) -> None:
    world = dist.get_world_size()
    right, left = (rank + 1) % world, (rank - 1) % world
    for size in (6, 300_000):  # the second is more than a send holds by itself
        x = torch.full((size,), float(rank))
        y = torch.empty(2 * size)[::2]
        works = [dist.isend(x, right, tag=7), dist.irecv(y, left, tag=7)]
        for work in works:
            work.wait()
        assert y.unique().tolist() == [left]
        y = torch.empty(size)
        ops = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert y.unique().tolist() == [left]
    if rank == 0:  # from any: whoever it was is named
        senders = {}
        for _ in range(1, world):
            y = torch.empty(3, 2).t()
            source = dist.recv(y)
            senders[source] = y.unique().tolist()
        assert senders == {r: [float(r)] for r in range(1, world)}
    else:
        dist.send(torch.full((2, 3), float(rank)), 0)
    if rank == 0:
        dist.send(torch.ones(2, 3), 1)
    elif rank == 1:
        flat = torch.zeros(6)
        assert dist.recv(flat, 0) == 0
        assert ranks_in(flat) == [1.0] * 6


def check_works(rank: int, _: Any) -> None:
    world = dist.get_world_size()
    x = own(rank)
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future().then(lambda one: one.value()[0] * 2)
    total = sum(own(r) for r in range(world))
    assert torch.equal(future.wait(), 2 * total)
    assert work.wait(timedelta(seconds=5))
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert torch.equal(work.result()[0], total)
    works = [dist.all_reduce(torch.full((4,), float(i)), async_op=True) for i in range(20)]
    assert [work.get_future().wait()[0][0].item() for work in works] == [
        float(i * world) for i in range(20)
    ]
    group = dist.group.WORLD
    group.allreduce(x).wait()  # the short forms
    assert torch.equal(x, world * total)
    group.broadcast(x, root=0).wait()
    group.reduce(x, root=0, op=ReduceOp.SUM).wait()
    out = [torch.empty(2) for _ in range(world)]
    group.allgather(out, torch.full((2,), float(rank))).wait()
    assert [one[0].item() for one in out] == list(range(world))
    group.barrier(timeout=timedelta(seconds=5)).wait()
    group.monitored_barrier(timedelta(seconds=5))
    group._allgather_base(torch.empty(2 * world), torch.ones(2)).wait()


def check_profiler(rank: int, _: Any) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(2))
        out = torch.ones(dist.get_world_size())
        dist.all_gather_single(out, torch.ones(1), async_op=True).wait()
        # Rank 0 enters a call that the others enter when it tells them to.
        token = torch.ones(1)
        if rank:
            dist.recv(token, 0)
        work = dist.all_reduce(torch.ones(2), async_op=True)
        if rank == 0:
            with torch.profiler.record_function("meanwhile"):
                for other in range(1, dist.get_world_size()):
                    dist.send(token, other)
        work.get_future().wait()
    events = {event.name: event.time_range for event in profile.events()}
    assert {"ferrodist:all_reduce", "ferrodist:all_gather_single"} <= events.keys()
    if rank == 0:  # the last of that name is shown for as long as it takes
        shown, told = events["ferrodist:all_reduce"], events["meanwhile"]
        assert shown.start < told.start < shown.end


def check_groups(rank: int, _: Any) -> None:
    world = dist.get_world_size()
    assert type(dist.group.WORLD) is ferrodist.torch.ProcessGroup
    assert dist.get_backend() == "ferrodist"
    odd = dist.new_group(range(1, world, 2))
    back = dist.new_group(list(reversed(range(world))), timeout=timedelta(seconds=7))
    x = torch.tensor([float(rank)])
    if rank % 2:
        dist.all_reduce(x, group=odd)
        assert x.item() == sum(range(1, world, 2))
        assert dist.get_rank(odd) == rank // 2
    backend = ferrodist.torch.backend_of(back)
    assert (backend.world_size, backend.timeout) == (world, 7.0)
    own_group = dist.group.WORLD.split_group([rank])
    dist.all_reduce(x, group=own_group)
    dist.destroy_process_group(back)
    dist.barrier()
    made = ferrodist.torch.process_group(ferrodist.torch.backend_of().split(range(world)))
    y = torch.ones(1)
    dist.all_reduce(y, group=made)
    assert y.item() == world
    assert dist.get_process_group_ranks(made) == list(range(world))
    with pytest.raises(ferrodist.InvalidArgument, match="expected a process group of ferrodist's"):
        ferrodist.torch.backend_of(object())


def check_threads(rank: int, _: Any) -> None:
    """Two groups, used by two threads in opposite orders."""
    world = dist.get_world_size()
    groups = [dist.new_group(range(world)) for _ in range(2)]
    found: list[float] = [0.0, 0.0]

    def use(number: int) -> None:
        for _ in range(50):
            x = torch.tensor([float(number + 1)])
            dist.all_reduce(x, group=groups[number])
            found[number] = x.item()

    threads = [threading.Thread(target=use, args=(n,)) for n in ((0, 1) if rank else (1, 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [world, 2.0 * world]


CHECKS = {name: fn for name, fn in globals().items() if name.startswith("check_")}


def check_all(rank: int, pipe: Any) -> None:
    for name, check in CHECKS.items():
        if name != "check_all":
            try:
                check(rank, pipe)
            except BaseException as error:  # of any kind: raised again, with a note
                error.add_note(f"in {name}")
                raise


@pytest.mark.parametrize(
    ("world", "environment", "kind"),
    [
        (3, {}, "SharedMemoryBackend"),
        pytest.param(1, {}, "SharedMemoryBackend", marks=pytest.mark.slow),
        pytest.param("010", {}, "HybridBackend", marks=pytest.mark.slow),
        pytest.param(2, {"FERRODIST_BACKEND": "tcp"}, "TcpBackend", marks=pytest.mark.slow),
    ],
    ids=["shared_memory", "alone", "hybrid", "tcp"],
)
def test_every_call_of_torch_has_the_right_result(start_job, world, environment, kind):
    def body(rank: int, pipe: Any) -> str:
        if dist.get_world_size() > 1:
            check_all(rank, pipe)
        else:
            check_all_reduce(rank, pipe)
        return type(ferrodist.torch.backend_of()).__name__

    with torch_job(start_job, world, body, **environment) as job:
        assert set(job.results()) == {kind}
