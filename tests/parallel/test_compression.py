"""Hooks of DDP: fewer bytes on the wire, and what comes out of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import ferrodist
from ferrodist.parallel.bucket import (
    Bucket,
    BucketSizes,
    GradientSpec,
    Hook,
    HookSteps,
    allreduce_bucket,
)
from ferrodist.parallel.compression import Compress, PowerSGD, TopK
from ferrodist.parallel.ddp import DDP
from ferrodist.parallel.reducer import Reducer
from ferrodist.testing import run_ranks

pytestmark = pytest.mark.timeout(60)

HOOKS: dict[str, Callable[[], Hook]] = {
    "bfloat16": lambda: Compress("bfloat16"),
    "float16": lambda: Compress("float16"),
    "PowerSGD": lambda: PowerSGD(rank=2),
    "TopK": lambda: TopK(ratio=0.2),
}
SHAPES = ((12, 10), (10,), (3, 4, 5))
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}

every_hook = pytest.mark.parametrize("name", HOOKS)
both_dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


class Rounds:
    """A reducer of leaves with these shapes, all in one bucket, and a list of what came out."""

    def __init__(
        self,
        backend: Any,
        hook: Hook,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        dtype: Any = torch.float32,
    ) -> None:
        leaves = [
            GradientSpec(f"p{n}", shape, dtype, dtype.itemsize) for n, shape in enumerate(shapes)
        ]
        sizes = BucketSizes(1 << 20, 1 << 20)
        self.reducer = Reducer(
            leaves, backend, kind="torch", owner="a test", advice="", sizes=sizes, hook=hook
        )
        self.backend = backend

    def reduce(self, gradients: Sequence[Any], weight: float | None = None) -> list[Any]:
        """Do a round; None stands for no gradient, and comes out where no rank has one."""
        self.reducer.begin(weight)

        def fill(number: int) -> bool:
            gradient = gradients[number]
            self.reducer.view(number).copy_(torch.zeros(()) if gradient is None else gradient)
            return gradient is not None

        used = self.reducer.finish(fill)
        return [self.reducer.view(n).clone() if n in used else None for n in range(len(gradients))]


def gradients_of(
    rank: int, step: int, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: Any = torch.float32
) -> list[Any]:
    random = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=random, dtype=dtype) for shape in shapes]


def means_of(num_ranks: int, step: int) -> list[Any]:
    everybodys = [gradients_of(rank, step) for rank in range(num_ranks)]
    return [
        sum(part.double() for part in parts) / num_ranks for parts in zip(*everybodys, strict=True)
    ]


def largest(tensors: Sequence[Any]) -> float:
    return max(float(tensor.abs().max()) for tensor in tensors)


def assert_all_ranks_have_the_same(results: Sequence[Sequence[Any]]) -> None:
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# -- what comes out ------------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.float64], ids=str)
def test_16bit_mean_is_within_two_roundings_of_the_mean(world, dtype, gradient_dtype):
    def body(backend):
        rounds = Rounds(backend, Compress(dtype), dtype=gradient_dtype)
        rounds.reduce(gradients_of(backend.rank, 0))
        return rounds.reduce(gradients_of(backend.rank, 1))

    results = world.run(body)
    assert_all_ranks_have_the_same(results)
    everybodys = [gradients_of(rank, 1) for rank in range(world.size)]
    for at, mean in enumerate(means_of(world.size, 1)):
        assert results[0][at].dtype == gradient_dtype
        magnitude = sum(mine[at].double().abs() for mine in everybodys) / world.size
        # Once on every rank and once at the end; float32 sums in between; float16 has a floor.
        bound = ROUNDOFF[dtype] * 1.01 * (magnitude + mean.abs()) + 2.0**-24
        assert ((results[0][at] - mean).abs() <= bound).all()
    assert not torch.equal(results[0][0], means_of(world.size, 1)[0].to(gradient_dtype))


def test_16bit_sums_are_made_in_float32():
    """1 + 2**-8 + 2**-8 + 2**-8: added up in bfloat16 every addend would be lost."""

    def body(backend):
        mine = torch.full((4,), 1.0 if backend.rank == 0 else 2.0**-8)
        rounds = Rounds(backend, Compress("bfloat16"), [(4,)])
        return rounds.reduce([mine], weight=1.0)[0] * 4

    assert run_ranks(4, body)[0].tolist() == [1 + 2.0**-7 + 2.0**-7] * 4


@every_hook
def test_all_ranks_have_the_same_bits(world, name):
    hook = HOOKS[name]()  # ranks may even share one, as here

    def body(backend):
        rounds = Rounds(backend, hook)
        return [x for step in range(4) for x in rounds.reduce(gradients_of(backend.rank, step))]

    assert_all_ranks_have_the_same(world.run(body))


def test_powersgd_loses_nothing_of_a_matrix_of_its_rank(world):
    def body(backend):
        random = torch.Generator().manual_seed(5)
        left, right = torch.randn(20, 2, generator=random), torch.randn(2, 15, generator=random)
        rounds = Rounds(backend, PowerSGD(rank=2), [(20, 15), (7,)])
        gradients = [left @ right * (backend.rank + 1), torch.full((7,), 0.1 * backend.rank)]
        return [*rounds.reduce(gradients), left @ right]

    for matrix, vector, unit in world.run(body):
        assert torch.allclose(matrix, unit * (world.size + 1) / 2, rtol=1e-5, atol=1e-5)
        tenths = [torch.tensor(0.1 * rank) for rank in range(world.size)]
        assert torch.equal(vector, (sum(tenths) / world.size).expand(7))  # travels as it is


def test_powersgd_begins_a_round_where_the_last_one_ended():
    """Of gradients with one strong direction every round finds more than the one before."""

    def body(backend):
        random = torch.Generator().manual_seed(6)
        strong = torch.outer(torch.randn(40, generator=random), torch.randn(30, generator=random))
        losses = []
        rounds = Rounds(backend, PowerSGD(rank=1), [(40, 30)])
        for step in range(5):
            noise = gradients_of(0, step, [(40, 30)])[0]
            found = rounds.reduce([strong + 0.3 * noise])[0]
            losses.append(float((found - strong).norm() / strong.norm()))
        return losses

    first, *_, last = run_ranks(1, body)[0]
    assert last < 0.5 * first, (first, last)


def test_topk_is_the_sum_in_rank_order_of_what_was_largest(world):
    def body(backend):
        return Rounds(backend, TopK(ratio=0.1)).reduce(gradients_of(backend.rank, 0))

    expected = torch.zeros(sum(math.prod(shape) for shape in SHAPES))
    for rank in range(world.size):  # leaves are laid out in reverse
        flat = torch.cat([part.flatten() for part in reversed(gradients_of(rank, 0))])
        sent = flat.abs().argsort(descending=True)[: math.ceil(0.1 * len(flat))]
        expected[sent] += flat[sent]
    for result in world.run(body):
        flat = torch.cat([part.flatten() for part in reversed(result)])
        assert torch.equal(flat, expected / world.size)


# -- errors are fed back -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["PowerSGD", "TopK"])
def test_the_sum_over_steps_stays_close_to_that_of_the_means(name):
    """Without error feedback, what is left out adds up; with it, it comes some steps later."""
    num_ranks, num_steps = 2, 60

    def body(backend):
        rounds = Rounds(backend, HOOKS[name]())
        total, behind = [torch.zeros(shape) for shape in SHAPES], []
        for step in range(num_steps):
            for into, part in zip(total, rounds.reduce(gradients_of(backend.rank, 0)), strict=True):
                into += part
            exact = [mean * (step + 1) for mean in means_of(num_ranks, 0)]
            behind.append(largest([a - b for a, b in zip(total, exact, strict=True)]))
        return behind

    behind = run_ranks(num_ranks, body)[0]
    one_step = largest(means_of(num_ranks, 0))
    assert behind[-1] < 6 * one_step  # left out each time, the smallest would be 60 steps behind
    assert max(behind[30:]) < 1.5 * max(behind[:30])  # it does not grow


@pytest.mark.parametrize("name", ["PowerSGD", "TopK"])
def test_an_error_waits_while_nobody_uses_its_parameter(name):
    """The sum over all steps is what it would be without the steps in between."""

    def body(backend, gap):
        rounds = Rounds(backend, HOOKS[name]())
        mine = gradients_of(backend.rank, 0)
        rounds.reduce(mine)
        for _ in range(gap):
            assert rounds.reduce([None, mine[1], None])[::2] == [None, None]
        return rounds.reduce([mine[0], torch.zeros(10), mine[2]])

    with_gap, without = (run_ranks(2, lambda b, gap=gap: body(b, gap))[0] for gap in (3, 0))
    if name == "TopK":  # which chooses among all leaves: compare what is not sent for another
        with_gap, without = ([part[0, :2] for part in parts[::2]] for parts in (with_gap, without))
    for a, b in zip(with_gap, without, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@every_hook
def test_inf_comes_out_on_every_rank_and_leaves_no_trace(name):
    def body(backend, is_broken):
        rounds = Rounds(backend, HOOKS[name]())
        rounds.reduce(gradients_of(backend.rank, 0))
        if is_broken:
            broken = gradients_of(backend.rank, 1)
            broken[0][0, 0] = math.inf if backend.rank == 1 else 1
            assert not rounds.reduce(broken)[0].isfinite().all()
        return rounds.reduce(gradients_of(backend.rank, 2))

    with_inf, without = (run_ranks(2, lambda b, how=how: body(b, how)) for how in (True, False))
    assert_all_ranks_have_the_same([*with_inf, *without])


@pytest.mark.parametrize("name", ["PowerSGD", "TopK"])
def test_errors_end_where_join_begins_or_ends(name):
    """There gradients are multiplied by numbers of samples: their errors are of no use outside."""

    def body(backend):
        rounds = Rounds(backend, HOOKS[name]())
        rounds.reduce(gradients_of(backend.rank, 0), weight=100.0)
        return largest(rounds.reduce([torch.zeros(shape) for shape in SHAPES]))

    assert run_ranks(2, body) == [0.0, 0.0]


@every_hook
@pytest.mark.parametrize("weights", [None, [257.0, 1000.25, 3.0]], ids=["mean", "weighted"])
def test_tail_comes_out_as_without_a_hook(world, name, weights):
    def body(backend, hook):
        rounds = Rounds(backend, hook)
        weight = None if weights is None else weights[backend.rank]
        for step in range(2):
            first, *others = gradients_of(backend.rank, step)
            rounds.reduce([first if backend.rank == 0 else None, *others], weight)
        return rounds.reducer.buckets[0].tail.tolist()

    exact = world.run(lambda backend: body(backend, allreduce_bucket))
    assert world.run(lambda backend: body(backend, HOOKS[name]())) == exact


# -- float16 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("magnitude", [1e-12, 1e-6, 1.0, 1e6, 1e12])
def test_float16_keeps_eleven_digits_of_any_magnitude(magnitude):
    def body(backend):
        rounds = Rounds(backend, Compress("float16"))
        for step in range(2):
            result = rounds.reduce([magnitude * part for part in gradients_of(backend.rank, step)])
        return result

    for result, mean in zip(run_ranks(2, body)[0], means_of(2, 1), strict=True):
        assert torch.allclose(result.double() / magnitude, mean, rtol=0, atol=4 * 2.0**-10)


def test_float16_that_does_not_fit_travels_in_full():
    def body(backend):
        rounds = Rounds(backend, Compress("float16"))
        results, calls = [], []
        for step, factor in enumerate([1.0, 1.0, 1e9, 1e9]):
            before = backend.statistics().collectives
            results.append(rounds.reduce([factor * x for x in gradients_of(backend.rank, step)]))
            calls.append(backend.statistics().collectives - before)
        return results, calls

    results, calls = run_ranks(2, body)[0]
    assert calls == [1, 1, 2, 1]
    for result, mean in zip(results[2], means_of(2, 2), strict=True):
        assert torch.allclose(result.double() / 1e9, mean, rtol=0, atol=1e-6)


# -- what it costs -------------------------------------------------------------------------------

BIG = ((256, 128), (128,))


def cost_of(hook: Hook) -> tuple[int, int]:
    """Return the bytes all ranks send in a round, and the calls it takes."""

    def body(backend):
        rounds = Rounds(backend, hook, BIG)
        rounds.reduce(gradients_of(backend.rank, 0, BIG))
        before = backend.statistics()
        rounds.reduce(gradients_of(backend.rank, 1, BIG))
        after = backend.statistics()
        return after.sent_nbytes - before.sent_nbytes, after.collectives - before.collectives

    costs = run_ranks(2, body)
    return sum(nbytes for nbytes, _ in costs), costs[0][1]


@both_dtypes
def test_16bit_halves_the_bytes(dtype):
    nbytes, calls = cost_of(Compress(dtype))
    full, _ = cost_of(allreduce_bucket)
    tail = 0.01 * full  # headers, and the weight in float32
    assert full / 2 - tail <= nbytes <= full / 2 + tail
    assert calls == 1


def test_powersgd_sends_its_factors_in_two_calls():
    nbytes, calls = cost_of(PowerSGD(rank=2))
    full, _ = cost_of(allreduce_bucket)
    assert nbytes < 0.04 * full  # (256 + 128) * 2 + 128 of 256 * 128 + 128 numbers
    assert calls == 2


def test_topk_sends_its_share_in_one_call():
    nbytes, calls = cost_of(TopK(ratio=0.01))
    full, _ = cost_of(allreduce_bucket)
    assert nbytes < 0.025 * full  # a number and a value for each
    assert calls == 1


@every_hook
def test_shared_memory_is_taken_once_per_bucket(name):
    def body(backend):
        taken = []
        empty = backend.empty
        backend.empty = lambda *args: taken.append(args) or empty(*args)
        rounds = Rounds(backend, HOOKS[name]())
        rounds.reduce(gradients_of(backend.rank, 0))
        before = len(taken)
        rounds.reduce(gradients_of(backend.rank, 1))
        rounds.reduce(gradients_of(backend.rank, 2))
        return before, len(taken)

    before, after = run_ranks(1, body)[0]
    assert 0 < before == after


@every_hook
def test_memory_goes_with_the_bucket(name):
    def body(backend):
        hook = HOOKS[name]()
        rounds = Rounds(backend, hook)
        rounds.reduce(gradients_of(backend.rank, 0))
        (kept,) = [value for value in vars(hook).values() if hasattr(value, "keyrefs")]
        before = len(kept)
        rounds.reducer.use_order([0, 1, 2])
        return before, len(kept)

    assert run_ranks(1, body) == [(1, 0)]


# -- in DDP --------------------------------------------------------------------------------------


class Branches(torch.nn.Module):
    """One layer that all ranks use, one that rank 0 uses, and one for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(12, 12)
        self.mine = torch.nn.Linear(12, 12)
        self.nobodys = torch.nn.Linear(12, 12)

    def forward(self, x: Any, rank: int) -> Any:
        x = torch.tanh(self.body(x))
        return self.mine(x) if rank == 0 else x


@every_hook
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "explicit"])
@pytest.mark.parametrize("bucket_mib", [25, 0.0001], ids=["one bucket", "several"])
def test_unused_parameters_are_found(name, overlap, bucket_mib):
    def body(backend):
        options = {"bucket_mib": bucket_mib, "first_bucket_mib": bucket_mib}
        model = DDP(Branches(), backend, overlap=overlap, hook=HOOKS[name](), **options)
        found = []
        for step in range(3):
            model.zero_grad()
            x = gradients_of(backend.rank, step, [(4, 12)])[0]
            model(x, backend.rank).square().sum().backward()
            if not overlap:
                model.sync_gradients()
            found.append([p.grad is not None for p in model.parameters()])
        return found, [p.grad for p in model.parameters()][:4]

    results = run_ranks(2, body)
    for found, _ in results:
        assert found == [[True, True, True, True, False, False]] * 3
    assert_all_ranks_have_the_same([gradients for _, gradients in results])
    assert results[0][1][2].abs().max() > 0  # that of rank 0 alone


def train(backend: Any, hook: Hook, *, overlap: bool = True) -> tuple[list[float], list[Any]]:
    """Train a small net on all ranks' batches; return losses and parameters."""
    torch.set_num_threads(1)  # in this rank's thread: two for every rank would wait for each other
    layers = [torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 6)]
    for at, parameter in enumerate(p for layer in layers for p in layer.parameters()):
        parameter.data = 0.3 * gradients_of(backend.rank, at, [parameter.shape])[0]
    options = {"bucket_mib": 0.001, "first_bucket_mib": 0.0005, "check_replicas": 5}
    model = DDP(torch.nn.Sequential(*layers), backend, overlap=overlap, hook=hook, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    losses = []
    for step in range(60):
        (x,) = gradients_of(backend.rank, step, [(32, 12)])
        loss = (model(x) - x[:, :6] + x[:, 6:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if not overlap:
            model.sync_gradients()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


@functools.cache
def train_exactly(world: Any) -> list[tuple[list[float], list[Any]]]:
    results: list[Any] = world.run(lambda backend: train(backend, allreduce_bucket))
    return results


@pytest.mark.slow
@every_hook
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "explicit"])
def test_training_is_not_much_worse(world, name, overlap):
    exact = train_exactly(world)
    results = world.run(lambda backend: train(backend, HOOKS[name](), overlap=overlap))
    assert_all_ranks_have_the_same([parameters for _, parameters in results])
    for (losses, _), (exact_losses, _) in zip(results, exact, strict=True):
        assert sum(losses[-20:]) < 1.15 * sum(exact_losses[-20:])
        assert sum(losses[-20:]) < 0.5 * sum(losses[:20])


@pytest.mark.slow
def test_processes_have_the_bits_of_simulated_ranks(start_job):
    def body(backend, pipe=None):
        trained = [train(backend, make()) for make in HOOKS.values()]
        return [(losses, [p.numpy() for p in parameters]) for losses, parameters in trained]

    with start_job(2, body) as job:
        processes, simulated = job.results(60), run_ranks(2, body)
    for rank, trained in enumerate(processes):
        for at, (losses, parameters) in enumerate(trained):
            assert losses == simulated[rank][at][0], list(HOOKS)[at]
            for found, expected in zip(parameters, simulated[rank][at][1], strict=True):
                assert found.tobytes() == expected.tobytes()


@every_hook
def test_join_weighs_by_samples_as_it_does_without_a_hook(name):
    hooks = {**HOOKS, "PowerSGD": lambda: PowerSGD(rank=5), "TopK": lambda: TopK(ratio=1.0)}

    def body(backend, hook):
        model = DDP(torch.nn.Linear(12, 12, bias=False), backend, hook=hook)
        seen = []
        with model.join(by_samples=True):
            for step in range(3 - backend.rank):
                model.zero_grad()
                (x,) = gradients_of(backend.rank, step, [(257 - 100 * backend.rank, 12)])
                (x @ torch.ones(12, 12) * 0.1 * model(x[:, :12])).mean().backward()
                seen.append(model.weight.grad.clone())
        return seen

    exact = run_ranks(2, lambda backend: body(backend, allreduce_bucket))
    for mine, others in zip(run_ranks(2, lambda b: body(b, hooks[name]())), exact, strict=True):
        for a, b in zip(mine, others, strict=True):
            assert torch.allclose(a, b, rtol=0.01, atol=0.01 * float(b.abs().max()))


@every_hook
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64], ids=str)
def test_other_dtypes_travel_as_they_are(name, dtype):
    def body(backend, hook):
        rounds = Rounds(backend, hook, dtype=dtype)
        return rounds.reduce(gradients_of(backend.rank, 0, dtype=dtype))

    exact = run_ranks(2, lambda backend: body(backend, allreduce_bucket))
    results = run_ranks(2, lambda backend: body(backend, HOOKS[name]()))
    assert_all_ranks_have_the_same([*exact, *results])


@every_hook
def test_a_parameter_without_elements_is_no_trouble(world, name):
    def body(backend):
        rounds = Rounds(backend, HOOKS[name](), [(0, 5), (0,)])
        return [rounds.reduce([torch.zeros(0, 5), None])[1] for _ in range(3)]

    assert world.run(body) == [[None] * 3] * world.size


def test_a_hook_of_your_own_is_a_function_of_the_bucket(world):
    def reduce_in_double(bucket: Bucket) -> HookSteps:
        wire = bucket.array.double()
        yield ferrodist.allreduce(wire, bucket.backend, op=bucket.op, out=wire, async_op=True)
        bucket.array.copy_(wire)

    def body(backend):
        return Rounds(backend, reduce_in_double).reduce(gradients_of(backend.rank, 0))

    for result in world.run(body):
        for found, mean in zip(result, means_of(world.size, 0), strict=True):
            assert torch.equal(found, mean.float())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Compress("int8"), "Compress: dtype 'int8' is not one of 'bfloat16', 'float16'"),
        (lambda: PowerSGD(rank=0), "PowerSGD: rank is 0; it must be at least 1"),
        (lambda: TopK(ratio=0.0), r"TopK: ratio is 0.0; it must be in \(0, 1\]"),
        (lambda: TopK(ratio=1.5), r"TopK: ratio is 1.5; it must be in \(0, 1\]"),
    ],
)
def test_what_makes_no_sense_is_refused(make, words):
    with pytest.raises(ferrodist.InvalidArgument, match=words):
        make()
