"""SyncBatchNorm does on several ranks what BatchNorm does with all their batches joined."""

from __future__ import annotations

import copy
import io
import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

import ferrodist
from ferrodist import SyncBatchNorm, convert_sync_batchnorm
from ferrodist.testing import run_ranks
from jobs import error_and_time
from training import fill

pytestmark = pytest.mark.timeout(120)

CHANNELS = 3
BATCHES = {  # how many samples each rank has, by world
    2: [(4, 4), (1, 6), (0, 5), (1, 1)],
    3: [(2, 2, 2), (5, 1, 3), (3, 0, 2), (0, 2, 0)],
}
CASES = [(world, counts) for world, every in BATCHES.items() for counts in every]
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.05, torch.float16: 0.01}
OPTIONS = {
    "plain": {},
    "cumulative": {"momentum": None},
    "not affine": {"affine": False},
    "no bias": {"bias": False},
    "no tracking": {"track_running_stats": False},
    "eps and momentum": {"eps": 0.1, "momentum": 0.7},
}


def samples(rank: int, step: int, count: int, *space: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    shape = (count, CHANNELS, *space)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * (rank + 1) + rank - 5


def layer_of(kind: type[nn.Module], dtype: torch.dtype, **options: Any) -> nn.Module:
    return fill(kind(CHANNELS, **options), 3).to(dtype)


def train(layer: nn.Module, batches: list[torch.Tensor]) -> tuple[list[Any], ...]:
    """Return the outputs, and the gradients by inputs and parameters, of a step per batch."""
    outputs, of_inputs, of_parameters = [], [], []
    for x in batches:
        x = x.clone().requires_grad_()
        layer.zero_grad()
        y = layer(x)
        (y.double() ** 3 + y.double()).sum().backward()  # differs by sample and channel
        outputs.append(y.detach().double())
        of_inputs.append(x.grad.double())
        of_parameters.append([p.grad.double().clone() for p in layer.parameters()])
    return outputs, of_inputs, of_parameters


def assert_close(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound * scale)


def check(
    counts: tuple[int, ...], dtype: torch.dtype = torch.float64, space: Any = (2, 2), **options: Any
) -> None:
    """Compare two steps of all ranks with one process that has all their samples."""
    world, bound = len(counts), BOUNDS[dtype]
    every = [[samples(r, s, n, *space).to(dtype) for s in range(2)] for r, n in enumerate(counts)]

    def body(backend: ferrodist.Backend) -> Any:
        layer = layer_of(SyncBatchNorm, dtype, backend=backend, **options)
        return train(layer, every[backend.rank]), layer.state_dict()

    found = run_ranks(world, body)
    # float16 itself loses more than is compared here: the one process has what the ranks were given
    kind = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[len(space)]
    alone = layer_of(kind, dtype, **options).double()
    outputs, of_inputs, of_parameters = train(
        alone, [torch.cat([one[step] for one in every]).double() for step in range(2)]
    )
    for step in range(2):
        for which, expected in ((0, outputs[step]), (1, of_inputs[step])):
            assert_close(torch.cat([one[0][which][step] for one in found]), expected, bound)
        for number, expected in enumerate(of_parameters[step]):
            total = sum(one[0][2][step][number] for one in found)
            assert_close(total, expected, bound)
    for _, state in found:
        assert state.keys() == alone.state_dict().keys()
        for name, expected in alone.state_dict().items():
            assert_close(state[name].double(), expected.double(), bound)


@pytest.mark.parametrize(("world", "counts"), CASES)
def test_it_is_batch_norm_over_the_joined_batch(world, counts):
    check(counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("counts", [(4, 4), (1, 6), (3, 0, 2)])
def test_it_is_so_for_shorter_floats(dtype, counts):
    check(counts, dtype)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_mean_what_they_mean_in_torch(options):
    check((1, 6), **options)
    check((5, 1, 3), torch.float32, **options)


@pytest.mark.parametrize("space", [(), (5,), (2, 1, 3)])
def test_inputs_may_have_any_number_of_dimensions(space):
    check((3, 4), space=space)


def test_layouts_and_sizes_may_differ_by_rank():
    shapes = [(2, CHANNELS, 4, 4), (3, CHANNELS, 2, 5)]
    every = [samples(r, 0, n, *space).float() for r, (n, _, *space) in enumerate(shapes)]

    def body(backend):
        layer = layer_of(SyncBatchNorm, torch.float32, backend=backend)
        x = every[backend.rank]
        if backend.rank:
            x = x.contiguous(memory_format=torch.channels_last)
        return layer(x), layer.running_var

    found = run_ranks(2, body)
    flat = torch.cat([x.transpose(1, 0).flatten(1).T for x in every])
    alone = layer_of(nn.BatchNorm1d, torch.float32)
    expected = alone(flat)
    both = torch.cat([y.transpose(1, 0).flatten(1).T for y, _ in found])
    assert_close(both, expected, 2e-5)
    assert all(torch.equal(var, found[0][1]) for _, var in found)
    assert_close(found[0][1], alone.running_var, 2e-5)


def test_no_digits_are_lost_far_from_zero():
    """The mean of squares less the square of the mean would be all rounding here."""
    far = [samples(rank, 0, 50).float() / 10 + 3000 for rank in range(2)]

    def body(backend):
        layer = SyncBatchNorm(CHANNELS, momentum=1.0, backend=backend)
        layer(far[backend.rank])
        return layer.running_var.double()

    expected = torch.cat(far).double().var(0)
    for found in run_ranks(2, body):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_a_world_of_one_has_the_bits_of_batch_norm():
    x = [samples(0, step, 5, 2).float() for step in range(2)]
    (found,) = run_ranks(
        1, lambda backend: train(layer_of(SyncBatchNorm, torch.float32, backend=backend), x)
    )
    for ours, theirs in zip(found, train(layer_of(nn.BatchNorm1d, torch.float32), x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_evaluation_makes_no_call():
    def body(backend):
        layers = [
            layer_of(SyncBatchNorm, torch.float32, track_running_stats=tracks, backend=backend)
            for tracks in (True, False)
        ]
        if backend.rank == 0:  # alone: a call would wait for the other ranks
            for layer in layers:
                layer.eval()(samples(0, 0, 4).float())
        return backend.statistics().collectives

    assert run_ranks(3, body, timeout=10) == [0, 0, 0]


def test_evaluation_needs_no_backend_and_training_says_how_to_have_one():
    layer = SyncBatchNorm(CHANNELS)
    layer.eval()(torch.zeros(1, CHANNELS))
    with pytest.raises(ferrodist.NotInitialized, match=r"^SyncBatchNorm: call ferrodist\.init"):
        layer.train()(torch.zeros(2, CHANNELS))


def test_an_input_that_needs_no_gradient_makes_no_call_in_backward():
    def body(backend):
        layer = layer_of(SyncBatchNorm, torch.float64, backend=backend)
        y = layer(samples(backend.rank, 0, 4))
        before = backend._second_group().statistics().collectives
        y.square().sum().backward()
        return backend._second_group().statistics().collectives - before

    assert run_ranks(2, body) == [0, 0]


def test_batches_that_are_empty_on_all_ranks_change_nothing():
    def body(backend):
        layer = layer_of(SyncBatchNorm, torch.float32, backend=backend)
        x = torch.zeros(0, CHANNELS, 2, requires_grad=True)
        layer(x).sum().backward()
        return x.grad.shape, layer.weight.grad.tolist(), layer.running_var.tolist()

    assert run_ranks(2, body) == [(torch.Size([0, CHANNELS, 2]), [0.0] * 3, [1.0] * 3)] * 2


def test_one_value_of_all_ranks_together_is_refused_on_all():
    def body(backend):
        layer = SyncBatchNorm(CHANNELS, backend=backend)
        return str(error_and_time(layer, torch.ones(backend.rank, CHANNELS))[0])

    text = "SyncBatchNorm: the batches of all 2 ranks have one value per channel together"
    assert all(text in found for found in run_ranks(2, body))


@pytest.mark.parametrize("shape", [(CHANNELS,), (2, CHANNELS + 1)])
def test_shapes_that_do_not_fit_are_refused_before_any_call(shape):
    def body(backend):
        with pytest.raises(ferrodist.InvalidArgument, match=r"3 channels, \[N, 3, ...\], got"):
            SyncBatchNorm(CHANNELS, backend=backend)(torch.zeros(shape))
        return backend.statistics().collectives

    assert run_ranks(2, body) == [0, 0]


# -- in DDP ----------------------------------------------------------------------------------------


def network(norm: Any) -> nn.Sequential:
    """Two convolutions, each normalized; small buckets come between the calls of the layers."""
    layers = [
        nn.Conv2d(2, 4, 3),
        norm(4),
        nn.ReLU(),
        nn.Conv2d(4, 3, 2),
        norm(3),
        nn.Flatten(),
        nn.Linear(12, 2),
    ]
    return fill(nn.Sequential(*layers), 8).double()


def images(rank: int, step: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(500 + 10 * step + rank)
    return torch.randn(count, 2, 5, 5, generator=generator, dtype=torch.float64) + rank


def losses(net: nn.Module, counts: tuple[int, ...], step: int, ranks: Any) -> list[torch.Tensor]:
    """One loss per rank, of a forward of all its samples together."""
    y = net(torch.cat([images(rank, step, counts[rank]) for rank in ranks]))
    parts = y.split([counts[rank] for rank in ranks])
    return [(part - rank).square().sum() for rank, part in zip(ranks, parts, strict=True)]


def train_ddp(backend: ferrodist.Backend, counts: tuple[int, ...]) -> Any:
    net = convert_sync_batchnorm(network(nn.BatchNorm2d))
    small = 1e-4  # MiB: a bucket per layer
    ddp = ferrodist.DDP(net, backend, bucket_mib=small, first_bucket_mib=small, check_replicas=1)
    update = torch.optim.SGD(ddp.parameters(), 1e-3, momentum=0.9)
    for step in range(3):
        update.zero_grad()
        sum(losses(ddp, counts, step, [backend.rank])).backward()
        update.step()
    return ddp.state_dict()


def train_alone(counts: tuple[int, ...]) -> Any:
    net = network(nn.BatchNorm2d)
    update = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9)
    for step in range(3):
        update.zero_grad()
        every = losses(net, counts, step, range(len(counts)))
        (sum(every) / len(counts)).backward()
        update.step()
    return net.state_dict()


def assert_trained_alike(found: list[Any], counts: tuple[int, ...]) -> None:
    expected = train_alone(counts)
    for state in found:
        assert list(state) == list(expected)
        for name, tensor in expected.items():
            assert_close(torch.as_tensor(state[name]).double(), tensor.double(), 1e-10)


@pytest.mark.parametrize("counts", [(3, 3), (1, 4), (2, 0, 3)])
def test_a_network_in_ddp_is_trained_as_by_one_process(counts):
    found = run_ranks(len(counts), lambda backend: train_ddp(backend, counts))
    assert_trained_alike(found, counts)


@pytest.mark.slow
def test_a_network_is_trained_so_by_processes(start):
    def body(backend, _):
        state = train_ddp(backend, (2, 0, 3))
        return {name: tensor.numpy() for name, tensor in state.items()}

    with start(3, body) as job:
        assert_trained_alike(job.results(), (2, 0, 3))


class Branched(nn.Module):
    """A branch after the layer, which not every rank takes: its bucket may come before or after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(CHANNELS, 6), SyncBatchNorm(6)
        self.second, self.branch = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, takes_branch):
        x = self.second(self.norm(self.first(x)))
        return self.branch(x) if takes_branch else x


def test_buckets_and_layers_may_come_in_different_orders_on_different_ranks():
    def body(backend: ferrodist.Backend) -> list[float]:
        net = fill(Branched(), 5)
        ddp = ferrodist.DDP(net, backend, bucket_mib=1e-4, first_bucket_mib=1e-4)
        for step in range(4):
            takes_branch = step == 0 or backend.rank != 1
            ddp.zero_grad()
            ddp(samples(backend.rank, step, 4).float(), takes_branch).square().mean().backward()
        return net.norm.weight.grad.tolist()

    first, *others = run_ranks(3, body, timeout=30)
    assert others == [first] * 2


@pytest.mark.slow
def test_a_compiled_network_has_the_same_gradients(start_job):
    def body(backend: ferrodist.Backend, _: Any) -> bool:
        found = []
        for compiled in (True, False):
            layers = [nn.Linear(CHANNELS, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)]
            net = convert_sync_batchnorm(fill(nn.Sequential(*layers), 2), backend)
            run = torch.compile(net, backend="eager") if compiled else net
            run(samples(backend.rank, 0, 4).float()).square().sum().backward()
            found.append([p.grad.clone() for p in net.parameters()])
        return all(map(torch.allclose, *found))

    with start_job(2, body) as job:
        assert job.results(60) == [True, True]


def test_a_rank_that_raises_between_layers_is_named_to_those_who_wait(start):
    def body(backend, _):
        layer = SyncBatchNorm(CHANNELS, backend=backend)
        layer(samples(backend.rank, 0, 2).float())
        if backend.rank == 1:
            raise ValueError("bad file")
        layer(samples(backend.rank, 1, 2).float())

    with start(3, body) as job:
        errors = job.errors()
    assert isinstance(errors[1], ValueError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, ferrodist.RankLost)
        assert error.rank == 1
        assert "ValueError: bad file" in str(error)


def test_survivors_of_a_lost_rank_train_on_with_the_same_network(start):
    """What the pages advise: a group of those who are left, and in it a new DDP and sampler."""

    def body(backend, _):
        net = convert_sync_batchnorm(network(nn.BatchNorm2d))
        ddp, group, lost = ferrodist.DDP(net, backend), backend, None
        sampler = ferrodist.ShardedSampler(range(12), group)
        seen = []
        while len(seen) < 4:
            if backend.rank == 1 and len(seen) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                ddp.zero_grad()
                sum(losses(ddp, (3, 3, 3), len(seen), [backend.rank])).backward()
                seen.append(list(sampler))
            except ferrodist.RankLost as error:
                lost = error.rank
                group = backend.split([0, 2])
                ddp = ferrodist.DDP(ddp.module, group)
                state = ferrodist.broadcast_object(sampler.state_dict(), group)
                sampler = ferrodist.ShardedSampler(range(12), group)
                sampler.load_state_dict(state)
        gradients = [p.grad.tolist() for p in ddp.parameters()]
        return lost, gradients, list(map(len, seen)), seen[-1]

    with start(3, body) as job:
        ends = [job[rank].end() for rank in (0, 2)]
    (lost, gradients, lengths, last), other = (end.result for end in ends)
    assert (lost, lengths) == (1, [4, 4, 6, 6])
    assert other[:3] == (lost, gradients, lengths)
    assert sorted([*last, *other[3]]) == list(range(12))


def test_ddp_refuses_torchs_own_layers_and_says_what_to_do():
    net = nn.Sequential(nn.Linear(2, 3), nn.SyncBatchNorm(3))
    with pytest.raises(ExceptionGroup) as raised:
        run_ranks(1, lambda backend: ferrodist.DDP(net, backend))
    text = str(raised.value.exceptions[0])
    assert "layer '1' is torch's SyncBatchNorm" in text
    assert "ferrodist.convert_sync_batchnorm(module)" in text


def test_ddp_takes_torchs_own_layers_where_a_process_group_serves_them(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    net = nn.Sequential(nn.Linear(2, 3), nn.SyncBatchNorm(3))
    run_ranks(1, lambda backend: ferrodist.DDP(net, backend))


def test_join_is_refused_because_layers_need_every_rank():
    def body(backend):
        ddp = ferrodist.DDP(nn.Sequential(SyncBatchNorm(2)), backend)
        with ddp.join():
            pass

    with pytest.raises(ExceptionGroup) as raised:
        run_ranks(2, body)
    assert "DDP.join: layer '0' is a SyncBatchNorm" in str(raised.value.exceptions[0])


# -- converting ------------------------------------------------------------------------------------


def test_converting_keeps_parameters_buffers_hooks_and_mode():
    net = nn.Sequential(
        nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm2d(4, affine=False)), nn.ReLU()
    )
    net[1].eval()
    seen = []
    net[0].register_forward_hook(lambda *_: seen.append("called"))
    before, state = list(net.parameters()), net.state_dict()
    converted = convert_sync_batchnorm(net)
    assert converted is net
    assert [type(net[0]), type(net[1][0]), type(net[2])] == [SyncBatchNorm, SyncBatchNorm, nn.ReLU]
    assert all(ours is theirs for ours, theirs in zip(net.parameters(), before, strict=True))
    assert net.state_dict().keys() == state.keys()
    assert (net[0].training, net[1][0].training, net[1][0].affine) == (True, False, False)
    net.eval()
    net[0](torch.zeros(1, 3))
    assert seen == ["called"]


def test_a_layer_in_two_places_stays_one_and_a_lone_one_is_returned():
    shared = nn.BatchNorm1d(3)
    net = convert_sync_batchnorm(nn.Sequential(shared, nn.Sequential(shared)))
    assert net[0] is net[1][0]
    assert type(convert_sync_batchnorm(shared)) is SyncBatchNorm
    assert type(convert_sync_batchnorm(nn.SyncBatchNorm(3))) is SyncBatchNorm
    ours = SyncBatchNorm(3)
    assert convert_sync_batchnorm(ours) is ours


class Doubled(nn.BatchNorm1d):
    """A layer that torch's conversion would make a plain one."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (Doubled(3), "layer '0.1' is a Doubled, whose forward does something else than BatchNorm"),
        (nn.LazyBatchNorm1d(), "layer '0.1' is a LazyBatchNorm1d that has seen no batch yet"),
    ],
)
def test_layers_that_cannot_be_converted_are_named(layer, text):
    with pytest.raises(ferrodist.InvalidArgument) as raised:
        convert_sync_batchnorm(nn.Sequential(nn.Sequential(nn.ReLU(), layer)))
    assert text in str(raised.value)


def test_copies_and_pickles_leave_the_backend_behind():
    def body(backend):
        layer = SyncBatchNorm(CHANNELS, backend=backend)
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        for one in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
            assert (one.backend, one.backend_of_ddp) == (None, None)
            ferrodist.DDP(nn.Sequential(one), backend)  # which gives it one
            one(samples(backend.rank, 0, 2).float())
        return layer.backend is backend

    assert run_ranks(2, body) == [True, True]
