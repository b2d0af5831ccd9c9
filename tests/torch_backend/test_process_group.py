"""The process group: every call of torch.distributed on it, with values that depend on the rank."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import ReduceOp

import commands
import ferrodist
import ferrodist.torch
from ferrodist.backends.request_work import RequestWork
from ferrodist.collectives import dense
from ferrodist.torch.work import FuturesThread
from helpers import await_until
from torch_worlds import torch_job

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
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


def check_dtypes_that_only_move(rank: int, _: Any) -> None:
    """What ferrodist cannot add is refused by every reduction, and arrives by every copy."""
    world = dist.get_world_size()
    dtypes = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    dtypes -= {*DTYPES, torch.bool, torch.uint64, torch.complex64, torch.complex128}
    assert {torch.float8_e4m3fn, torch.complex32, torch.int4, torch.quint8} <= dtypes
    for dtype in dtypes:
        for is_async in (False, True):
            expect_refusals(rank, dtype, is_async)
        for pick in (lambda x: x, lambda x: x[0]):  # also without an axis
            found = [pick(bits(99, dtype)) for _ in range(world)]
            dist.all_gather(found, pick(bits(rank, dtype)))
            sent = [pick(bits(r, dtype)) for r in range(world)]
            assert list(map(bits_in, found)) == list(map(bits_in, sent)), dtype
            x = pick(bits(rank, dtype))
            dist.broadcast(x, world - 1)
            assert bits_in(x) == bits_in(sent[-1]), dtype


def expect_refusals(rank: int, dtype: torch.dtype, is_async: bool) -> None:
    world, group = dist.get_world_size(), dist.group.WORLD
    x, whole = bits(rank, dtype), bits(rank, dtype, 4 * world)
    # Calls of the group: those of dist split complex numbers first.
    opts = dist.AllreduceOptions(), dist.AllreduceCoalescedOptions()
    for one in opts:
        one.asyncOp = is_async

    def reduce_together() -> None:
        with dist._coalescing_manager(async_ops=is_async):
            dist.reduce_scatter_single(x, whole)
            dist.reduce_scatter_single(x, whole)

    reductions: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: group.allreduce([x], opts[0]),
        "all_reduce_coalesced": lambda: group.allreduce_coalesced([x, x], opts[1]),
        "reduce": lambda: dist.reduce(x, 0, async_op=is_async),
        "reduce_scatter": lambda: dist.reduce_scatter(x, [x] * world, async_op=is_async),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(x, whole, async_op=is_async),
        "reduce_scatter_single_coalesced": reduce_together,
    }
    for name, reduce in reductions.items():
        text = f"{name}: a {dtype} tensor can be sent but not reduced"
        with pytest.raises(ferrodist.UnsupportedOp, match=text):
            reduce()
    if dtype.is_floating_point:  # torch splits complex numbers, and cannot copy the others
        with pytest.raises(RuntimeError, match="can be sent but not reduced"):
            functional.all_reduce(x, "sum", group)
    assert bits_in(x) == bits_in(bits(rank, dtype))


def bits(rank: int, dtype: torch.dtype, length: int = 4) -> torch.Tensor:
    """Make a tensor of any dtype whose bits no other rank has."""
    return (torch.arange(length * dtype.itemsize, dtype=torch.uint8) + 9 * rank).view(dtype)


def bits_in(x: torch.Tensor) -> list[int]:
    return x.reshape(-1).view(torch.uint8).tolist()


def check_means_of_integers(rank: int, _: Any) -> None:
    """They are rounded toward zero, as by NCCL, and right where the sum does not fit."""
    world = dist.get_world_size()
    small = [torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32]
    for dtype in (*small, torch.int64, torch.uint64):
        limit = torch.iinfo(dtype)
        values = [[-(7 + r) if limit.min < 0 else 7 + r, r, 5] for r in range(world)]
        if dtype in small:
            values = [[*one, limit.max - r] for r, one in enumerate(values)]
        sums = [sum(column) for column in zip(*values, strict=True)]
        means = [abs(total) // world * (1 if total > 0 else -1) for total in sums]
        for is_async in (False, True):
            expect_means(torch.tensor(values[rank], dtype=dtype), means, is_async)
    x = torch.sparse_coo_tensor([[0, 1]], [7 + rank, -7 - rank], (3,))
    dist.all_reduce(x, ReduceOp.AVG)
    mean = sum(7 + r for r in range(world)) // world
    assert x.to_dense().tolist() == [mean, -mean, 0]
    for refused in ([torch.tensor([True])], [torch.ones(1), torch.ones(1, dtype=torch.int64)]):
        opts = dist.AllreduceCoalescedOptions()
        opts.reduceOp, opts.asyncOp = ReduceOp.AVG, False
        with pytest.raises(ferrodist.UnsupportedOp, match="mean"):
            dist.group.WORLD.allreduce_coalesced(refused, opts)


def expect_means(x: torch.Tensor, means: list[int], is_async: bool) -> None:
    """Make every reduction with AVG."""
    world, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    op, both = ReduceOp.AVG, [x.clone(), x.clone().reshape(1, -1)]
    strided, at_root, part = x.repeat_interleave(2)[::2], x.clone(), torch.zeros_like(x)
    uneven, whole = torch.zeros_like(x)[: rank % 2 + 1], x.repeat(world)
    opts = dist.AllreduceCoalescedOptions()
    opts.reduceOp, opts.asyncOp = op, is_async
    parts = [x[: r % 2 + 1] for r in range(world)]
    flat = x.clone()
    for call in (
        lambda: dist.all_reduce(flat, op, async_op=is_async),
        lambda: dist.all_reduce(strided, op, async_op=is_async),
        lambda: dist.reduce(at_root, 0, op, async_op=is_async),
        lambda: dist.reduce_scatter(part, [x] * world, op, async_op=is_async),
        lambda: dist.reduce_scatter(uneven, parts, op, async_op=is_async),
        lambda: group.allreduce_coalesced(both, opts),
    ):
        work = call()
        if work is not None:
            work.wait()
    assert flat.tolist() == strided.tolist() == part.tolist() == means, (x.dtype, flat)
    assert uneven.tolist() == means[: rank % 2 + 1]
    assert at_root.tolist() == (x.tolist() if rank else means)
    assert [both[0].tolist(), both[1][0].tolist()] == [means, means]
    dist.reduce_scatter_single(part.zero_(), whole, op)
    assert part.tolist() == means
    assert functional.all_reduce(x, "avg", group).tolist() == means


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


def check_what_is_only_read_is_not_marked_as_changed(rank: int, _: Any) -> None:
    """Autograd may have saved it for backward."""
    for lay_out in (LAYOUTS["flat"], LAYOUTS["matrix"], LAYOUTS["transposed"]):
        for is_async in (False, True):
            compare_versions(rank, lay_out, {"async_op": is_async})
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    dist.broadcast(weight.detach(), 0)
    if rank == 0:
        loss.backward()
        assert weight.grad.tolist() == [2.0] * 3


def compare_versions(rank: int, lay_out: Callable[[Any], Any], options: dict[str, Any]) -> None:
    """Make every call; what is read keeps its version, what is written gets another."""
    world = dist.get_world_size()
    x, outs = lay_out(own(rank)), [lay_out(own(rank)) for _ in range(world)]
    row, whole = own(rank), own(rank).repeat(world)
    whole_out, part = torch.empty(6 * world), torch.empty(6)
    at_root, elsewhere = ([], [x]) if rank else ([x], [])
    calls: list[tuple[Callable[[], Any], list[Any], list[Any]]] = [
        (lambda: dist.broadcast(x, 0, **options), at_root, elsewhere),
        (lambda: dist.reduce(x, 0, **options), elsewhere, at_root),
        (lambda: dist.all_reduce(x, **options), [], [x]),
        (lambda: dist.all_gather(outs, x, **options), [x], outs),
        (lambda: dist.gather(x, None if rank else outs, **options), [x], outs[rank:1]),
        (lambda: dist.scatter(x, None if rank else outs, **options), outs, [x]),
        (lambda: dist.reduce_scatter(x, outs, **options), outs, [x]),
        (lambda: dist.all_to_all(outs, [row] * world, **options), [row], outs),
        (lambda: dist.all_gather_single(whole_out, row, **options), [row], [whole_out]),
        (lambda: dist.reduce_scatter_single(part, whole, **options), [whole], [part]),
        (lambda: dist.all_to_all_single(whole_out, whole, **options), [whole], [whole_out]),
        (lambda: dist.isend(x, (rank + 1) % world), [x], []),
        (lambda: dist.irecv(x, (rank - 1) % world), [], [x]),
    ]
    for number, (call, read, written) in enumerate(calls):
        before = [[one._version for one in some] for some in (read, written)]
        work = call()
        if work is not None:
            work.wait()
        assert before[0] == [one._version for one in read], number
        assert all(map(int.__lt__, before[1], [one._version for one in written])), number


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


def check_futures_of_calls_that_are_over(rank: int, _: Any) -> None:
    for _ in range(30):
        work = dist.all_reduce(torch.ones(2), async_op=True)
        work.wait()
        threads: list[threading.Thread] = []
        future = work.get_future()
        assert future.done()
        future.add_done_callback(lambda _, seen=threads: seen.append(threading.current_thread()))
        assert threads == [threading.current_thread()]
        assert future.value()[0].tolist() == [dist.get_world_size()] * 2


def check_futures_of_short_calls_that_all_have_come_to(rank: int, _: Any) -> None:
    """They are done at once, on the thread that asks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestWork, "_meet", lambda work: work.wait() is not None)
        future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
        assert future.done()
        assert future.value()[0].tolist() == [dist.get_world_size()] * 2


def check_futures_do_not_wait_for_each_other(rank: int, _: Any) -> None:
    """A future is done when its call is, whatever messages and other groups are in flight."""
    world = dist.get_world_size()
    groups = [dist.new_group(range(world)) for _ in range(2)]
    token = torch.tensor([float(rank)])
    if rank == 0:
        received = torch.zeros(1)
        message = dist.irecv(received, 1).get_future()
        first = dist.all_reduce(torch.ones(1), group=groups[0], async_op=True).get_future()
        dist.all_reduce(torch.ones(1), group=groups[1], async_op=True).get_future().wait()
        for other in range(1, world):
            dist.send(token, other)
        first.wait()
        message.wait()
        assert received.item() == 1
    else:
        dist.all_reduce(torch.ones(1), group=groups[1], async_op=True).get_future().wait()
        dist.recv(token, 0)
        dist.all_reduce(torch.ones(1), group=groups[0])
        if rank == 1:
            dist.send(torch.ones(1), 0)


def check_futures_end_with_their_calls_in_whatever_order_they_are_asked_for(
    rank: int, _: Any
) -> None:
    """The callback of the first call is what the other ranks wait for before the second one."""
    first, second = torch.full((200_000,), 1.0), torch.full((200_000,), 2.0)
    world = dist.get_world_size()
    if rank == 0:
        works = [dist.all_reduce(x, async_op=True) for x in (first, second)]
        last = works[1].get_future().then(lambda future: future.value()[0])
        told = (
            works[0]
            .get_future()
            .then(lambda _: [dist.send(torch.ones(1), other) for other in range(1, world)])
        )
        told.wait()
        assert last.wait()[0].item() == 2 * world
    else:
        dist.all_reduce(first)
        dist.recv(torch.zeros(1), 0)
        dist.all_reduce(second)
    assert first[-1].item() == world
    assert second[-1].item() == 2 * world


def check_callbacks_communicate(rank: int, _: Any) -> None:
    world = dist.get_world_size()

    def again(future: Any) -> Any:
        (x,) = future.value()
        dist.all_reduce(x)
        return dist.all_reduce(x, async_op=True).get_future().wait()[0]

    future = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(again)
    assert future.wait().item() == world**3


def check_futures_of_a_group_take_one_thread(rank: int, _: Any) -> None:
    """The thread of ferrodist's callbacks has no part in it: the one that did the call goes on."""
    made, make = [], RequestWork.make_state
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestWork, "make_state", lambda self: (made.append(self), make(self)))
        for size in (2, 40_000):
            work = dist.all_reduce(torch.ones(size), async_op=True)
            work.get_future().then(lambda future: future.value()).wait()
    assert made == []


def check_functional_collectives_take_the_fast_path(rank: int, _: Any) -> None:
    world, group = dist.get_world_size(), dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "execute", pytest.fail)
        x = functional.all_gather_single(torch.tensor([float(rank)]), 0, group)
        assert x.tolist() == list(range(world))
        x = functional.reduce_scatter_single(torch.arange(float(world)), "sum", 0, group)
        assert x.tolist() == [float(rank * world)]
        x = functional.all_reduce(torch.tensor([float(rank)]), "sum", group)
        assert x.tolist() == [sum(range(world))]


def check_works_of_operators_outlive_their_call(rank: int, _: Any) -> None:
    """C++ code holds them, and waits when it likes."""
    world = dist.get_world_size()
    outs = [torch.zeros(world) for _ in range(20)]
    works = [
        dist.all_gather_single(out, torch.tensor([float(rank + i)]), async_op=True)
        for i, out in enumerate(outs)
    ]
    gc.collect()
    for i, (work, out) in enumerate(zip(works, outs, strict=True)):
        work.wait()
        assert out.tolist() == [float(r + i) for r in range(world)]
    assert all(work.is_completed() for work in works)


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


@pytest.mark.slow
def test_a_program_that_ends_while_a_callback_of_a_future_runs_ends_well(tmp_path):
    """The thread of the futures is inside torch's C++ code then, where Python must not end it."""
    script = tmp_path / "train.py"
    script.write_text(
        "import threading, torch, torch.distributed as dist\n"
        "dist.init_process_group('ferrodist')\n"
        "begun, is_over = threading.Event(), threading.Event()\n"
        "def callback(future):\n"
        "    begun.set()\n"
        "    is_over.wait(0.3)\n"
        "    print('called back')\n"
        "work = dist.all_reduce(torch.ones(100_000), async_op=True)\n"
        "later = work.get_future().then(callback)\n"
        "assert begun.wait(60)\n"
    )
    ended = commands.run("-n", "2", str(script))
    assert ended.returncode == 0, ended.stderr
    assert commands.lines_of(ended.stdout) == ["called back"] * 2


class FakeWork:
    """A call in flight that is next in its group, and over when it is told so."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def done(self) -> bool:
        return self.over.is_set()

    def _is_next(self) -> bool:
        return True


def test_a_future_whose_call_is_over_does_not_wait_behind_one_that_is_waited_for() -> None:
    """The other ranks may wait for its callback before they make the later call."""
    thread, later, is_waiting = FuturesThread(), FakeWork(), threading.Event()
    second: Any = torch.futures.Future()

    def wait(_: Any) -> bool:
        is_waiting.set()
        return later.over.wait(20)

    ended = second.then(wait)
    thread.finish(second, later)
    assert is_waiting.wait(20)
    first: Any = torch.futures.Future()
    told = first.then(lambda _: later.over.set())
    thread.finish(first)  # which was over before, and is asked for now
    told.wait()
    assert ended.wait()


def test_two_futures_of_one_call_leave_the_thread_asleep() -> None:
    thread, pending = FuturesThread(), FakeWork()
    callbacks: list[Any] = []
    pending.add_done_callback = callbacks.append  # type: ignore[attr-defined]
    futures: list[Any] = [torch.futures.Future() for _ in range(2)]
    told = [one.then(lambda _: pending.over.wait(20)) for one in futures]
    for one in futures:
        thread.finish(one, pending)
    await_until(lambda: thread._is_waiting)
    assert len(callbacks) == 1 or thread._futures.qsize() == 1
    pending.over.set()
    for callback in callbacks:
        callback(pending)
    assert all(one.wait() for one in told)
