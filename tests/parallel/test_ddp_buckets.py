"""Which gradients travel together, when, how often, and in how much memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ferrodist
from ferrodist.parallel.bucket import (
    MIB,
    Bucket,
    BucketSizes,
    GradientSpec,
    HookSteps,
    allreduce_bucket,
    lay_out,
)
from ferrodist.testing import run_ranks
from training import arrays_made, bits, fill, mlp, normed, same_bits, squares, train

EACH = {"first_bucket_mib": 1e-6, "bucket_mib": 1e-6}  # a bucket per parameter


def leaves(*nbytes: int, dtype: str = "float32") -> list[GradientSpec]:
    return [GradientSpec(f"leaf{n}", (size // 4,), dtype, 4) for n, size in enumerate(nbytes)]


def test_a_bucket_is_closed_by_the_leaf_that_fills_it():
    layouts = lay_out(leaves(8, 8, 8, 8, 8), [4, 3, 2, 1, 0], BucketSizes(8, 16))
    assert [layout.leaves for layout in layouts] == [(4,), (3, 2), (1, 0)]
    assert [layout.starts for layout in layouts] == [(0,), (0, 2), (0, 2)]
    assert [layout.size for layout in layouts] == [2, 4, 4]


def test_a_leaf_larger_than_a_bucket_has_one_of_its_own():
    layouts = lay_out(leaves(4, 400, 4), [0, 1, 2], BucketSizes(4, 16))
    assert [layout.leaves for layout in layouts] == [(0,), (1,), (2,)]


def test_the_usual_sizes_are_one_mib_and_then_25():
    layouts = lay_out(leaves(*[MIB] * 60), range(60), BucketSizes())
    assert [len(layout.leaves) for layout in layouts] == [1, 25, 25, 9]


def test_buckets_of_several_dtypes_are_sorted_by_when_they_are_full():
    one, two = leaves(8, 8, 8, 8), leaves(8, 8, 8, 8, dtype="float16")
    mixed = [one[0], two[1], one[2], two[3]]
    layouts = lay_out(mixed, [0, 1, 2, 3], BucketSizes(64, 64))
    assert [(layout.dtype, layout.leaves) for layout in layouts] == [
        ("float32", (0, 2)),
        ("float16", (1, 3)),
    ]


def test_no_leaves_have_no_buckets():
    assert lay_out([], [], BucketSizes()) == []


def test_many_leaves_are_laid_out_in_no_time():
    many = leaves(*[4] * 50_000)
    assert len(lay_out(many, range(len(many)), BucketSizes(4, MIB))) == 2  # quadratic: a minute


def calls_per_step(ddp: ferrodist.DDP, num_steps: int, loss: Any = squares) -> list[int]:
    counts = []
    for step in range(num_steps):
        before = ddp.backend.statistics().collectives
        loss(ddp, ddp.backend.rank, step).backward()
        counts.append(ddp.backend.statistics().collectives - before)
    return counts


@pytest.mark.parametrize(("options", "num_buckets"), [({}, 1), (EACH, 4)])
def test_a_step_takes_one_call_per_bucket(options, num_buckets):
    def body(backend: ferrodist.Backend) -> list[int]:
        ddp = ferrodist.DDP(mlp(), backend, **options)
        assert len(ddp._gradients.buckets) == num_buckets
        return calls_per_step(ddp, 4)

    # The first one also tells the order.
    assert run_ranks(2, body, timeout=60) == [[num_buckets + 1, *[num_buckets] * 3]] * 2


def test_a_forward_with_buffers_takes_one_call_more():
    def body(backend: ferrodist.Backend) -> list[int]:
        return calls_per_step(ferrodist.DDP(normed(), backend, **EACH), 3)[1:]

    assert run_ranks(2, body, timeout=60) == [[7, 7]] * 2


def test_buffers_are_left_alone_if_so_wished():
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(normed(), backend, broadcast_buffers=False)
        counts = calls_per_step(ddp, 3)[1:]
        return counts, ddp.get_buffer("module.1.running_mean").tolist()

    (counts, first), (_, second) = run_ranks(2, body, timeout=60)
    assert counts == [1, 1]
    assert first != second


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("has_graph", [False, True])
def test_a_forward_on_one_rank_needs_nobody_else_and_all_have_the_same_buffers(
    is_training, has_graph
):
    def body(backend: ferrodist.Backend) -> Any:
        backend.timeout = 5
        ddp = ferrodist.DDP(normed(backend.rank), backend)
        states = []
        for step in range(3):
            squares(ddp, backend.rank, step).backward()
            states.append({name: one.clone() for name, one in ddp.state_dict().items()})
            before = backend.statistics().collectives
            if backend.rank == step % 2:
                with torch.set_grad_enabled(has_graph):
                    ddp.train(is_training)(torch.ones(2, 8))
                    ddp(torch.ones(2, 8))
            assert backend.statistics().collectives == before
            ddp.train()
        return states

    first, second = run_ranks(2, body, timeout=60)
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))


def test_a_gradient_is_copied_once_after_set_to_none_and_else_never():
    def body(backend: ferrodist.Backend) -> list[int]:
        ddp = ferrodist.DDP(mlp(), backend, **EACH)
        copies = []
        for step, set_to_none in enumerate([True, True, False, False, True, False]):
            before = ddp._gradients.num_copies
            ddp.zero_grad(set_to_none=set_to_none)
            squares(ddp, backend.rank, step).backward()
            copies.append(ddp._gradients.num_copies - before)
        return copies

    assert run_ranks(2, body, timeout=60) == [[4, 4, 0, 0, 4, 0]] * 2


def test_gradients_are_views_of_one_set_of_buckets():
    def body(backend: ferrodist.Backend) -> None:
        ddp = ferrodist.DDP(mlp(), backend, **EACH)
        train(ddp, squares, 3)
        buckets = ddp._gradients.buckets
        for parameter in ddp.parameters():
            owners = [b for b in buckets if _is_inside(parameter.grad, b.array)]
            assert len(owners) == 1
        assert sum(b.gradients.nbytes for b in buckets) == sum(p.nbytes for p in ddp.parameters())
        tails = sum(len(b.tail) for b in buckets)
        assert tails == len(list(ddp.parameters())) + len(buckets)

    run_ranks(2, body, timeout=60)


def _is_inside(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return whole.data_ptr() <= part.data_ptr() < whole.data_ptr() + whole.nbytes


def test_buckets_are_made_once_more_and_the_first_ones_go():
    def body(backend: ferrodist.Backend) -> list[int]:
        sizes = arrays_made(backend)
        ddp = ferrodist.DDP(Crossed(), backend, first_bucket_mib=1e-5, bucket_mib=1e-5)
        train(ddp, crossed, 5)
        return sizes

    made = run_ranks(2, body, timeout=60)[0]
    assert len(made) == 4  # two buckets, and two in the order that was learned


def test_buckets_stay_if_the_order_was_right():
    def body(backend: ferrodist.Backend) -> bool:
        ddp = ferrodist.DDP(mlp(), backend)
        before = ddp._gradients.buckets
        train(ddp, squares, 2)
        return ddp._gradients.buckets is before

    assert run_ranks(2, body, timeout=60) == [True, True]


class Crossed(nn.Module):
    """Two parts that a rank uses in the order it is told, not in that of their names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        fill(self, 0)

    def forward(self, x: torch.Tensor, is_turned: bool = True) -> torch.Tensor:
        first, second = (self.two, self.one) if is_turned else (self.one, self.two)
        return second(first(x).tanh())


def crossed(module: nn.Module, rank: int, step: int, is_turned: bool = True) -> torch.Tensor:
    x = torch.full((1, 8), 0.1 + rank + step)
    return (module(x, is_turned) ** 2).sum()


def test_the_order_is_that_of_rank_0_in_its_first_backward():
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(Crossed(), backend, **EACH)
        names = [leaf.name for leaf in ddp._gradients._reducer.leaves]
        before = [names[b.layout.leaves[0]] for b in ddp._gradients.buckets]
        crossed(ddp, backend.rank, 0, is_turned=backend.rank == 0).backward()
        return before, [names[b.layout.leaves[0]] for b in ddp._gradients.buckets]

    expected = (["two.weight", "one.weight"], ["one.weight", "two.weight"])
    assert run_ranks(3, body, timeout=60) == [expected] * 3


def test_buckets_start_in_one_order_whatever_the_order_of_gradients():
    def body(backend: ferrodist.Backend) -> Any:
        started: list[int] = []

        def hook(bucket: Bucket) -> HookSteps:
            started.append(bucket.index)
            return allreduce_bucket(bucket)

        ddp = ferrodist.DDP(Crossed(), backend, hook=hook, **EACH)
        for step in range(3):  # rank 1 has them the other way round
            crossed(ddp, backend.rank, step, is_turned=backend.rank != 1).backward()
        return started, [bits(p.grad) for p in ddp.parameters()]

    results = run_ranks(3, body, timeout=60)
    assert results == [results[0]] * 3
    assert results[0][0] == [0, 1] * 3


def test_the_first_bucket_is_sent_while_backward_still_runs():
    """Every rank holds its backward up until the first bucket has come back from all."""

    def body(backend: ferrodist.Backend) -> list[str]:
        events: list[str] = []

        def hook(bucket: Bucket) -> HookSteps:
            events.append(f"start {bucket.index}")
            work = ferrodist.allreduce(
                bucket.array, backend, "mean", out=bucket.array, async_op=True
            )
            if bucket.index == 0:
                works.append(work)
            yield work

        works: list[Any] = []
        ddp = ferrodist.DDP(mlp(), backend, hook=hook, **EACH)
        squares(ddp, backend.rank, 0).backward()
        ddp.zero_grad()
        events.clear()
        works.clear()

        def hold(_: torch.Tensor) -> None:
            works[0].result(20)
            events.append("middle of backward")

        x = ddp.module[0].weight.new_ones(1, 8)
        out = ddp.module[0](x)
        out.register_hook(hold)
        ddp.module[0].forward = lambda _: out  # its output is what the hook waits at
        ddp(x).sum().backward()
        return events

    expected = ["start 0", "start 1", "middle of backward", "start 2", "start 3"]
    assert run_ranks(2, body, timeout=60) == [expected] * 2


def test_a_hook_that_yields_nothing_is_fine():
    def hook(bucket: Bucket) -> HookSteps:
        ferrodist.allreduce(bucket.array, bucket.backend, bucket.op, out=bucket.array)
        yield from ()

    def body(backend: ferrodist.Backend) -> list[Any]:
        ddp = ferrodist.DDP(mlp(), backend, hook=hook)
        squares(ddp, backend.rank, 0).backward()
        return [bits(p.grad) for p in ddp.parameters()]

    first, second = run_ranks(2, body, timeout=60)
    assert first == second


def test_a_hook_may_take_several_calls():
    def halves(bucket: Bucket) -> HookSteps:
        middle = len(bucket.array) // 2
        for part in (bucket.array[:middle], bucket.array[middle:]):
            result = yield ferrodist.allreduce(
                part, bucket.backend, bucket.op, out=part, async_op=True
            )
            assert result is part

    def body(backend: ferrodist.Backend) -> Any:
        ddp, other = (ferrodist.DDP(mlp(), backend, hook=h) for h in (halves, allreduce_bucket))
        return same_bits(train(ddp, squares, 3), train(other, squares, 3))

    assert run_ranks(2, body, timeout=60) == [True, True]
