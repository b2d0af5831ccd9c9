"""A wrapped module is the module: its tensors, names, state and attributes; what is refused."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ferrodist
from ferrodist.parallel.bucket import allreduce_bucket
from ferrodist.testing import run_ranks
from helpers import errors_by_rank
from training import (
    OPTIMIZERS,
    bits,
    fill,
    gradients_of,
    mlp,
    normed,
    same_bits,
    squares,
    train,
)


class Odd(nn.Module):
    """Parameters and buffers of every layout and size."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.zeros(3, 5).t())
        self.strided = nn.Parameter(torch.zeros(8, 6)[::2, ::3])
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.number = nn.Parameter(torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("whole", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("truth", torch.zeros(4, 2, dtype=torch.bool).t())
        self.register_buffer("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.convolution(x).square().mean() + self.turned.square().sum()
        return total + self.strided.sum() ** 2 + self.nothing.sum() + self.number**2


def odd(seed: int) -> Odd:
    module = fill(Odd(), seed)
    for buffer in module.buffers():
        buffer.fill_(seed % 2 == 0)
    return module


def test_parameters_and_buffers_come_into_the_tensors_that_are_there():
    def body(backend: ferrodist.Backend) -> Any:
        module = odd(backend.rank)
        tensors = [*module.parameters(), *module.buffers()]
        before = [(id(t), t.data_ptr(), t.stride()) for t in tensors]
        ddp = ferrodist.DDP(module, backend)
        tensors = [*ddp.parameters(), *ddp.buffers()]
        assert [(id(t), t.data_ptr(), t.stride()) for t in tensors] == before
        return module.state_dict()

    assert all(same_bits(state, odd(0).state_dict()) for state in run_ranks(3, body, timeout=60))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_odd_layouts_and_sizes_train_as_in_one_process(set_to_none):
    def images(rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return torch.randn(2, 3, 5, 5, generator=generator)

    def body(backend: ferrodist.Backend) -> dict[str, Any]:
        ddp = ferrodist.DDP(odd(backend.rank), backend, first_bucket_mib=1e-4)
        return train(ddp, lambda module, *when: module(images(*when)), 3, set_to_none=set_to_none)

    module = odd(0)
    update = OPTIMIZERS["sgd"](module.parameters())
    for step in range(3):
        update.zero_grad()
        torch.stack([module(images(rank, step)) for rank in range(3)]).mean().backward()
        update.step()
    results = run_ranks(3, body, timeout=60)
    assert all(same_bits(state, results[0]) for state in results)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(results[0][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_module_without_parameters_is_fine(overlap):
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(nn.ReLU(), backend, overlap=overlap, check_replicas=1)
        x = torch.tensor([-1.0, 2.0], requires_grad=True)
        ddp(x).sum().backward()
        ddp.sync_gradients()
        with ddp.join():
            pass
        return x.grad.tolist()

    assert run_ranks(2, body, timeout=60) == [[0.0, 1.0]] * 2


def test_all_parameters_frozen_is_fine():
    def body(backend: ferrodist.Backend) -> Any:
        module = mlp(backend.rank).requires_grad_(False)
        ddp = ferrodist.DDP(module, backend)
        x = torch.ones(1, 8, requires_grad=True)
        ddp(x).sum().backward()
        return ddp.state_dict()

    assert all(same_bits(state, mlp().state_dict()) for state in run_ranks(2, body, timeout=60))


def test_broadcast_parameters_takes_those_of_any_root():
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(normed(), backend)
        fill(ddp, 10 + backend.rank)
        ddp.get_buffer("1.running_mean").fill_(backend.rank)
        ddp.broadcast_parameters(1)
        return ddp.state_dict()

    first, *others = run_ranks(3, body, timeout=60)
    assert all(same_bits(first, other) for other in others)
    assert bits(first["0.weight"]) == bits(normed(11)[0].weight)
    assert first["1.running_mean"].unique().tolist() == [1.0]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_broadcast_parameters_refuses_a_root_that_is_no_rank(num_ranks):
    def body(backend: ferrodist.Backend) -> None:
        ferrodist.DDP(mlp(), backend).broadcast_parameters(2)

    errors = errors_by_rank(num_ranks, body, timeout=60)
    assert all(isinstance(error, ferrodist.InvalidRank) for error in errors)


def alone(module: nn.Module, **options: Any) -> ferrodist.DDP:
    """Wrap a module in a world of one."""
    return ferrodist.DDP(module, ferrodist.SimulatedBackend.create_group(1)[0], **options)


def test_names_and_state_are_those_of_the_module():
    module, plain = normed(3), normed(3)
    ddp = alone(module)
    assert ddp.module is module
    assert [name for name, _ in ddp.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [name for name, _ in ddp.named_buffers()] == [name for name, _ in plain.named_buffers()]
    assert same_bits(ddp.state_dict(), plain.state_dict())
    ddp.load_state_dict(normed(4).state_dict())
    assert same_bits(module.state_dict(), normed(4).state_dict())
    plain.load_state_dict(ddp.state_dict())


def test_modes_and_attributes_are_those_of_the_module():
    module = mlp()
    module.horizon = 7
    ddp = alone(module)
    assert ddp.horizon == 7
    assert ddp.get_submodule("module.0") is module[0]
    ddp.eval()
    assert not module[0].training
    ddp.train()
    assert module[0].training
    assert "Linear" in repr(ddp)
    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'nowhere'"):
        _ = ddp.nowhere


def test_state_of_a_module_with_a_wrapped_part_is_plain():
    def make(seed: int) -> nn.ModuleDict:
        return nn.ModuleDict({"inside": mlp(seed), "beside": fill(nn.Linear(2, 2), seed)})

    whole = make(1)
    whole["inside"] = alone(whole["inside"])
    assert same_bits(whole.state_dict(), make(1).state_dict())
    whole.load_state_dict(make(2).state_dict())
    assert same_bits(whole.state_dict(), make(2).state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        whole.load_state_dict({})


def test_a_wrapped_part_of_a_module_trains():
    def body(backend: ferrodist.Backend) -> Any:
        whole = nn.Sequential(mlp(backend.rank), nn.Tanh())
        whole[0] = ferrodist.DDP(whole[0], backend)
        squares(whole, backend.rank, 0).backward()
        return [p.grad for p in whole.parameters()]

    first, second = run_ranks(2, body, timeout=60)
    assert [bits(g) for g in first] == [bits(g) for g in second]


def saved_and_loaded(ddp: ferrodist.DDP) -> Any:
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Any] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda ddp: pickle.loads(pickle.dumps(ddp)),
    "torch.save": saved_and_loaded,
    "AveragedModel": lambda ddp: AveragedModel(ddp).module,
}
HOOKS: dict[str, Any] = {
    "none": allreduce_bucket,
    "Compress": ferrodist.Compress("float16"),
    "TopK": ferrodist.TopK(0.5),
    "PowerSGD": ferrodist.PowerSGD(2, seed=3),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_has_the_module_and_wants_a_backend_before_it_trains(way, hook):
    ddp = alone(normed(), hook=HOOKS[hook])
    squares(ddp, 0, 0).backward()
    copied = COPIES[way](ddp)
    assert isinstance(copied, ferrodist.DDP)
    assert same_bits(copied.state_dict(), ddp.state_dict())
    assert not {p.data_ptr() for p in copied.parameters()} & {
        p.data_ptr() for p in ddp.parameters()
    }
    with torch.no_grad():
        copied.eval()(torch.ones(2, 8))
    with copied.no_sync():
        loss = squares(copied.train(), 0, 0)
    for sync in (loss.backward, copied.sync_gradients, copied.broadcast_parameters):
        with pytest.raises(ferrodist.NotInitialized, match=r"set copy.backend on every rank"):
            sync()
    copied.backend = ddp.backend
    squares(copied, 0, 0).backward()
    assert copied._gradients.num_rounds == 1
    assert type(copied._options.hook) is type(ddp._options.hook)
    with pytest.raises(ferrodist.InvalidArgument, match="it has a backend"):
        copied.backend = ddp.backend


def test_copies_train_together_once_they_have_a_backend():
    def body(backend: ferrodist.Backend) -> Any:
        copied = copy.deepcopy(ferrodist.DDP(mlp(), backend))
        fill(copied, backend.rank)
        copied.backend = backend
        return train(copied, squares, 2)

    first, second = run_ranks(2, body, timeout=60)
    assert same_bits(first, second)


def test_a_shallow_copy_wraps_the_same_module():
    ddp = alone(mlp())
    assert copy.copy(ddp).module is ddp.module


def test_checkpoints_of_torchs_ddp_load():
    state = nn.DataParallel(normed(4)).state_dict()
    assert all(name.startswith("module.") for name in state)
    ddp = alone(normed(3))
    before = dict(state)
    ddp.load_state_dict(state)
    assert same_bits(ddp.state_dict(), normed(4).state_dict())
    assert list(state) == list(before)  # the program's own is left as it was
    with pytest.raises(RuntimeError, match="Missing key"):
        ddp.load_state_dict({"module.0.weight": state["module.0.weight"]})
    whole = nn.ModuleDict({"inside": alone(normed(3))})
    whole.load_state_dict({f"inside.{name}": value for name, value in state.items()})
    assert same_bits(whole["inside"].state_dict(), normed(4).state_dict())


def test_a_part_that_is_called_module_keeps_its_name():
    ddp = alone(nn.DataParallel(mlp(3)))
    ddp.load_state_dict(nn.DataParallel(mlp(4)).state_dict())
    assert same_bits(ddp.module.module.state_dict(), mlp(4).state_dict())


def test_outputs_are_saved_without_a_warning(recwarn):
    out = alone(mlp())(torch.ones(1, 8))
    torch.save(out, io.BytesIO())
    assert not recwarn.list


TAKEN = [
    {"find_unused_parameters": True, "gradient_as_bucket_view": True, "static_graph": True},
    {"device_ids": None, "output_device": None, "process_group": None, "init_sync": True},
    {"device_ids": ["cpu"], "find_unused_parameters": False},
    {"bucket_cap_mb": None},
]
REFUSED = {
    "device_ids": ([0], "but the module is on cpu; move it"),
    "output_device": ("cuda:0", "omit it"),
    "process_group": (object(), r"pass a backend of ferrodist, of some ranks backend.split"),
    "init_sync": (False, "omit it"),
    "mixed_precision": ("float16", "torch.autocast"),
    "device_mesh": ("mesh", r"backend.split\(ranks\)"),
}


@pytest.mark.parametrize("options", TAKEN, ids=str)
def test_arguments_of_torch_that_mean_the_same_are_taken(options):
    ddp = alone(mlp(), **options)
    squares(ddp, 0, 0).backward()
    assert ddp._gradients.num_rounds == 1


def test_buckets_and_group_by_torchs_names():
    backend = ferrodist.SimulatedBackend.create_group(1)[0]
    ddp = ferrodist.DDP(mlp(), process_group=backend, bucket_cap_mb=1e-6, first_bucket_mib=1e-6)
    assert ddp.backend is backend
    assert len(ddp._gradients.buckets) == 4


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_of_torch_that_mean_something_else_say_what_to_write(name):
    value, text = REFUSED[name]
    with pytest.raises(ferrodist.InvalidArgument, match=rf"DDP: {name}.*{text}"):
        alone(mlp(), **{name: value})
    with pytest.raises(TypeError, match="unexpected keyword argument 'buckets'"):
        alone(mlp(), buckets=3)


def test_a_parameter_on_another_device_is_named():
    with pytest.raises(ferrodist.UnsupportedArray, match=r"1.weight is on meta.*torch's DDP"):
        alone(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))


def test_lazy_layers_are_named():
    with pytest.raises(ferrodist.InvalidArgument, match=r"1.weight of LazyLinear has no shape yet"):
        alone(nn.Sequential(nn.ReLU(), nn.LazyLinear(3)))


@pytest.mark.parametrize("how", ["names", "tensors", "torch's"])
def test_ignored_parameters_are_left_to_each_rank(how):
    names = ["0.bias", "1.running_mean"]

    def body(backend: ferrodist.Backend) -> Any:
        module = normed(backend.rank)
        module[1].running_mean.fill_(backend.rank)
        ignored = names if how == "names" else [module[0].bias, "1.running_mean"]
        if how == "torch's":
            module._ddp_params_and_buffers_to_ignore = ignored = names
        options = {} if how == "torch's" else {"ignored_parameters": ignored}
        ddp = ferrodist.DDP(module, backend, check_replicas=1, **options)
        first = {name: one.clone() for name, one in module.state_dict().items()}
        squares(ddp, backend.rank, 0).backward()
        module[3].requires_grad_(False)  # so that it is looked at again what is trained
        squares(ddp, backend.rank, 1).backward()
        return first, dict(module.state_dict()), gradients_of(module)

    one, two = run_ranks(2, body, timeout=60)
    for first, second in zip(one, two, strict=True):
        differ = {name for name in first if bits(first[name]) != bits(second[name])}
        assert differ == {name for name in names if name in first}


def test_an_ignored_parameter_that_is_not_there_is_refused():
    with pytest.raises(ferrodist.InvalidArgument, match=r"\['nowhere'\] are not in the module"):
        alone(mlp(), ignored_parameters=["nowhere"])


def test_gradients_of_a_copy_stay_its_own():
    ddp = alone(mlp())
    squares(ddp, 0, 0).backward()
    before = ddp.backend.statistics().collectives
    squares(copy.deepcopy(ddp.module), 0, 0).backward()
    assert ddp.backend.statistics().collectives == before


def test_a_wrapper_that_is_dropped_leaves_the_module_alone():
    gc.disable()  # at once: later would be at a different time on each rank
    try:
        module = mlp()
        ddp = alone(module)
        backend, gone = ddp.backend, weakref.ref(ddp)
        squares(ddp, 0, 0).backward()
        del ddp
        assert gone() is None
    finally:
        gc.enable()
    before = backend.statistics().collectives
    squares(module, 0, 1).backward()
    assert backend.statistics().collectives == before


def test_frozen_and_thawed_after_wrapping():
    def body(backend: ferrodist.Backend) -> Any:
        backend.reproducible = True
        module = mlp(backend.rank)
        module[0].requires_grad_(False)
        ddp = ferrodist.DDP(module, backend, check_replicas=1)
        update = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        for step, is_frozen in enumerate([True, False, False, True, True, False]):
            module[0].requires_grad_(not is_frozen)
            update.zero_grad()
            squares(ddp, backend.rank, step).backward()
            assert (module[0].weight.grad is None) == is_frozen
            update.step()
        return module.state_dict(), ddp._gradients.num_rounds

    def one_process() -> dict[str, Any]:
        module = mlp()
        update = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        for step, is_frozen in enumerate([True, False, False, True, True, False]):
            module[0].requires_grad_(not is_frozen)
            update.zero_grad()
            (sum(squares(module, rank, step) for rank in range(2)) / 2).backward()
            update.step()
        return module.state_dict()

    expected = one_process()
    for state, num_rounds in run_ranks(2, body, timeout=60):
        assert num_rounds == 6
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)


def test_thawing_inside_no_sync_keeps_what_has_added_up():
    def body(backend: ferrodist.Backend) -> Any:
        module = mlp()
        module[0].requires_grad_(False)
        ddp = ferrodist.DDP(module, backend)
        with ddp.no_sync():
            squares(ddp, backend.rank, 0).backward()
            module[0].requires_grad_(True)
            before = backend.statistics().collectives
            squares(ddp, backend.rank, 1).backward()
            assert backend.statistics().collectives - before == 1  # compared what is trained
        module[2].requires_grad_(False)
        squares(ddp, backend.rank, 2).backward()
        return [p.grad for p in module.parameters()]

    first, second = run_ranks(2, body, timeout=60)
    assert [bits(g) for g in first] == [bits(g) for g in second]


def test_converted_after_wrapping():
    def body(backend: ferrodist.Backend) -> Any:
        ddp = ferrodist.DDP(mlp(backend.rank), backend)
        squares(ddp, backend.rank, 0).backward()
        ddp.zero_grad()
        ddp.double()
        loss = (ddp(torch.full((1, 8), float(backend.rank)).double()) ** 2).sum()
        loss.backward()
        return [p.grad for p in ddp.parameters()]

    first, second = run_ranks(2, body, timeout=60)
    assert first[0].dtype == torch.float64
    assert [bits(g) for g in first] == [bits(g) for g in second]


def test_wrong_arguments_are_refused():
    for name in ("bucket_mib", "first_bucket_mib"):
        for value in (0, -1, float("nan"), float("inf")):
            with pytest.raises(ferrodist.InvalidArgument, match="bucket"):
                alone(mlp(), **{name: value})
    with pytest.raises(
        ferrodist.InvalidArgument, match=r"expected a torch.nn.Module, got function"
    ):
        alone(mlp)
    with pytest.raises(ferrodist.InvalidArgument, match="check_replicas=-1"):
        alone(mlp(), check_replicas=-1)
    with pytest.raises(ferrodist.NotInitialized, match=r"ferrodist.init\(\)"):
        ferrodist.DDP(mlp())


def test_a_closed_backend_is_refused():
    backend = ferrodist.SimulatedBackend.create_group(1)[0]
    backend.close()
    with pytest.raises(ferrodist.BackendClosed):
        ferrodist.DDP(mlp(), backend)


DIFFERENT = {
    "one more": "'2.weight: float32[4, 4], trained' is there on it alone",
    "another shape": "'0.weight: float32[16, 9], trained' instead of '0.weight: float32[16, 8]",
    "another dtype": "'0.weight: float64[16, 8], trained' instead of '0.weight: float32[16, 8]",
    "frozen": "'0.weight: float32[16, 8]' instead of '0.weight: float32[16, 8], trained'",
    "turned": "'0.weight: float32[16, 8], trained, strides [1, 16]' instead of",
}


def different(what: str) -> nn.Sequential:
    """Make a module that is not as that of the others."""
    module = nn.Sequential(nn.Linear(9 if what == "another shape" else 8, 16), nn.ReLU())
    if what == "one more":
        module.append(nn.Linear(4, 4))
    if what == "another dtype":
        module.double()
    if what == "frozen":
        module.requires_grad_(False)
    if what == "turned":
        module[0].weight = nn.Parameter(torch.zeros(8, 16).t())
    return module


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_rank_with_another_module_is_named_on_every_rank(what):
    text = DIFFERENT[what]

    def body(backend: ferrodist.Backend) -> None:
        ferrodist.DDP(different(what if backend.rank == 1 else ""), backend)

    errors = errors_by_rank(3, body, timeout=60)
    assert all(isinstance(error, ferrodist.CollectiveMismatch) for error in errors)
    assert [error.this_rank for error in errors] == [0, 1, 2]
    for error in errors:
        assert error.rank == 1
        assert text in str(error)


def test_a_rank_with_one_parameter_less_is_named_on_every_rank():
    def body(backend: ferrodist.Backend) -> None:
        ferrodist.DDP(nn.Linear(2, 2, bias=backend.rank != 2), backend)

    for error in errors_by_rank(3, body, timeout=60):
        assert "rank 2" in str(error)
        assert "'bias: float32[2], trained' is there on rank 0 alone" in str(error)


@pytest.mark.parametrize("what", ["module", "parameter"])
def test_what_is_put_into_the_module_later_is_trained_too(what):
    def body(backend: ferrodist.Backend) -> Any:
        module = mlp()
        ddp = ferrodist.DDP(module, backend)
        squares(ddp, backend.rank, 0).backward()
        if what == "module":
            module[0] = fill(nn.Linear(8, 16), 5)
        else:
            module[0].weight = nn.Parameter(module[0].weight.detach() * 2)
        ddp.zero_grad()
        squares(ddp, backend.rank, 1).backward()
        return bits(module[0].weight.grad)

    first, second = run_ranks(2, body, timeout=60)
    assert first == second


def test_another_module_in_place_of_the_wrapped_one_is_refused():
    def body(backend: ferrodist.Backend) -> Any:
        module = fill(mlp(), 3)
        ddp = ferrodist.DDP(module, backend)
        other = fill(mlp(), backend.rank)
        for replace in (
            lambda: setattr(ddp, "module", other),
            lambda: ddp.add_module("module", other),
            lambda: ddp.register_module("module", other),
            lambda: setattr(ddp, "module", None),
        ):
            with pytest.raises(ferrodist.InvalidArgument, match="cannot be replaced after it was"):
                replace()
        ddp.module = module  # it is the same
        ddp.add_module("beside", nn.Identity())
        assert ddp.module is module
        copied = copy.deepcopy(ddp)
        with pytest.raises(ferrodist.InvalidArgument, match="wrap it with another"):
            copied.module = other
        ddp(torch.full((2, 8), float(backend.rank))).sum().backward()
        return list(map(bits, gradients_of(ddp).values()))

    first, *others = run_ranks(3, body)
    assert all(one == first for one in others)
