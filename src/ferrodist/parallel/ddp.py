# SPDX-License-Identifier: MIT OR Apache-2.0
"""DDP: a torch module that is trained on all ranks as one, by means of its gradients."""

from __future__ import annotations

import dataclasses
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

import ferrodist
from ferrodist.call import NOT_THE_USERS
from ferrodist.parallel import backend_of, replicas
from ferrodist.parallel.bucket import MIB, BucketSizes, Hook, allreduce_bucket
from ferrodist.parallel.gradients import Gradients, adds_to_all_gradients, makes_sparse_gradients
from ferrodist.parallel.sync_batch_norm import adopt_layers, refuse_join
from ferrodist.profiler import profiled

NOT_THE_USERS.append(os.path.dirname(torch.__file__) + os.sep)  # errors name the line of backward()


class DDP(torch.nn.Module):  # type: ignore[misc]  # types of torch are not looked at
    """Wrap a torch module so that ``backward`` averages its gradients over all ranks.

    The constructor copies the parameters and buffers of rank 0 into those of the other ranks, in
    place, so the optimizer may be made before or after. Every rank wraps the same model. Attributes
    and ``state_dict`` are those of the wrapped module, without a prefix.

    Args:
        module: the model.
        backend: the group that trains together; by default the one that ``init`` made.
        bucket_mib: gradients are averaged in buckets of this size in MiB, while backward runs.
        first_bucket_mib: the size of the first bucket.
        overlap: if False, gradients are averaged only when ``sync_gradients`` is called.
        broadcast_buffers: whether the other ranks get rank 0's buffers after every backward.
        check_replicas: compare the parameters of all ranks, bit for bit, every so many steps.
        hook: reduces a bucket instead of a plain allreduce, for example ``Compress("bfloat16")``.
        ignored_parameters: parameters, or names of parameters or buffers, that are not averaged,
            copied or compared.

    Arguments of torch's DistributedDataParallel are accepted where they have a meaning here.

    Example:
        >>> import torch, ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def body(backend):
        ...     model = ferrodist.DDP(torch.nn.Linear(2, 1, bias=False), backend)
        ...     model(torch.full((1, 2), float(backend.rank))).backward()
        ...     return model.weight.grad.tolist()
        >>> run_ranks(3, body)
        [[[1.0, 1.0]], [[1.0, 1.0]], [[1.0, 1.0]]]
    """

    def __init__(
        self,
        module: torch.nn.Module,
        backend: ferrodist.Backend | None = None,
        *,
        overlap: bool = True,
        bucket_mib: float = 25,
        first_bucket_mib: float = 1,
        broadcast_buffers: bool = True,
        check_replicas: int = 0,
        hook: Hook = allreduce_bucket,
        ignored_parameters: Iterable[str | torch.nn.Parameter] = (),
        **of_torch: Any,
    ) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            text = f"DDP: expected a torch.nn.Module, got {type(module).__name__}"
            raise ferrodist.InvalidArgument(text, got=module)
        replicas.check_arguments(of_torch, module)
        replicas.check_shapes(module)
        if check_replicas < 0:
            text = f"DDP: check_replicas={check_replicas}; 0 is never"
            raise ferrodist.InvalidArgument(text, got=check_replicas)
        if of_torch.get("bucket_cap_mb") is not None:
            bucket_mib = of_torch["bucket_cap_mb"]
        backend = backend_of(backend or of_torch.get("process_group"), "DDP")
        self.module = module
        self._options = _WrapOptions(
            overlap,
            _check_sizes(first_bucket_mib, bucket_mib),
            broadcast_buffers,
            check_replicas,
            hook,
            replicas.names_of(module, ignored_parameters),
        )
        self._attach(backend)

    def _attach(self, backend: ferrodist.Backend | None) -> None:
        """Begin to train with others; None: not yet."""
        self._backend = backend
        self._join: replicas.Join | None = None
        if backend is None:
            return
        options, module = self._options, self.module
        replicas.check_devices(replicas.named_parameters(module, options.ignored))
        adopt_layers(module, backend)
        self._shared = replicas.SharedBuffers(
            backend, options.ignored, are_shared=options.broadcast_buffers
        )
        self._gradients = Gradients(
            backend,
            sizes=options.sizes,
            hook=options.hook,
            overlap=options.overlap,
            after_round=_after_round(module, self._shared, backend, options),
        )
        self.broadcast_parameters()
        self._gradients.hold(*self._trained())
        self._contents = self._shared.contents = replicas.Contents(module)

    @property
    def backend(self) -> ferrodist.Backend:
        """The group that trains together. After copying a DDP, set it before the first backward."""
        if self._backend is None:
            raise ferrodist.NotInitialized(
                "DDP: a copy of a wrapped module has no backend; set copy.backend on every rank, "
                "or use its .module"
            )
        return self._backend

    @backend.setter
    def backend(self, backend: ferrodist.Backend) -> None:
        if self._backend is not None:
            raise ferrodist.InvalidArgument("DDP: it has a backend; wrap its .module with another")
        self._attach(backend)

    # -- the module inside ----------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse another module: its gradients would not be averaged."""
        if name == "module" and self._modules.get(name, value) is not value:
            raise ferrodist.InvalidArgument(
                "DDP: the module cannot be replaced after it was wrapped: the parameters of the "
                f"new {type(value).__name__} would be neither copied nor averaged; wrap it with "
                "another ferrodist.DDP on every rank, or change parts of ddp.module instead"
            )
        super().__setattr__(name, value)

    def add_module(self, name: str, module: Any) -> None:
        """Add a part to the wrapper; the module itself cannot be replaced."""
        if name == "module":
            self.module = module
        else:
            super().add_module(name, module)

    def __getattr__(self, name: str) -> Any:
        """Look in the module for what is not here."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """Return the state_dict of the wrapped module, without a prefix."""
        return self.module.state_dict(*args, **options)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Load a state_dict of the module; the prefix ``module.`` of torch's DDP is removed."""
        return self.module.load_state_dict(
            _without_prefix(state_dict, self.module), *args, **options
        )

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        """Yield those of the module, under its own names."""
        return self.module.named_parameters(*args, **options)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load as a part of another module; torch looks for the module under its name in here."""
        own = {n.removeprefix(prefix): state.pop(n) for n in list(state) if n.startswith(prefix)}
        for name, value in _without_prefix(own, self.module).items():
            state[f"{prefix}module.{name}"] = value
        super()._load_from_state_dict(state, prefix, *rest)

    def named_buffers(self, *args: Any, **options: Any) -> Any:
        """Yield those of the module, under its own names."""
        return self.module.named_buffers(*args, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy, or pickle, the module in a wrapper that has no backend yet."""
        return _copy, (type(self), self.module, self._options)

    # -- training -------------------------------------------------------------------------------

    def forward(self, *args: Any, **options: Any) -> Any:
        """Run the module; backward of the outputs averages gradients."""
        if torch.compiler.is_compiling():
            return self._forward(_begin_uncompiled, _expect_uncompiled, args, options)
        with profiled("ferrodist.DDP.forward"):
            return self._forward(_begin, _expect, args, options)

    def _forward(self, begin: Any, expect: Any, args: Any, options: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*args, **options)
        begin(self, args, options)
        output = self.module(*args, **options)
        expect(self, output)
        return output

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward of the next forwards averages gradients; False inside ``no_sync``."""
        return self._backend is None or self._gradients.is_on

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        if self._backend is not None:
            self._gradients.is_on = bool(value)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: backward of forwards in this context does not average.

        The next backward of a forward outside averages the accumulated sum. As in torch, what
        counts is where forward runs, not backward.
        """
        was_on, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = was_on

    def sync_gradients(self) -> None:
        """Average the gradients over all ranks now; every rank calls it."""
        self.backend._check_usable()
        self._gradients.sync()

    def broadcast_parameters(self, root: int = 0) -> None:
        """Copy the parameters and buffers of rank ``root`` to all ranks, in place."""
        self.backend._check_rank(root, "DDP.broadcast_parameters: root")
        tensors = self._tensors()
        replicas.check_structure(tensors, self.backend)
        replicas.broadcast(list(tensors.values()), self.backend, root)

    @contextmanager
    def join(
        self,
        *,
        by_samples: bool = False,
        divide_by_initial_world_size: bool = False,
        throw_on_early_termination: bool = False,
        enable: bool = True,
    ) -> Iterator[None]:
        """Allow ranks to train for different numbers of steps; all ranks put their loop into it.

        A rank that has finished joins the averaging of the others without contributing: the mean
        is over the ranks that still train, weighted by the lengths of their batches if
        ``by_samples``. At the end all ranks have the parameters of the rank with the most steps;
        optimizers are not changed. The other arguments are those of torch: divide by the number of
        all ranks, raise on all ranks when the first one has finished, do nothing.
        """
        if not enable:
            yield
            return
        refuse_join(self.module)
        if by_samples and divide_by_initial_world_size:
            raise ferrodist.InvalidArgument(
                "DDP.join: by_samples=True divides by the number of samples, so "
                "divide_by_initial_world_size cannot be True too"
            )
        backend, raises_early = self.backend, throw_on_early_termination
        self._shared.broadcast()
        join = replicas.Join(
            backend, self._shared, by_samples=by_samples, raises_early=raises_early
        )
        gradients, first = self._gradients, self._gradients.num_rounds
        after_round, gradients.after_round = gradients.after_round, join.after_round
        gradients.weigh, self._join = join.weigh, join
        gradients.divisor = float(backend.world_size) if divide_by_initial_world_size else None
        try:
            yield
            num_steps = gradients.num_rounds - first
            join.is_done = True
            while gradients.shadow() > 0:  # until a round in which no rank trained
                pass
        finally:
            gradients.after_round, gradients.weigh, self._join = after_round, None, None
            gradients.divisor = None
        everybodys = ferrodist.all_gather_object(num_steps, backend)
        self.broadcast_parameters(everybodys.index(max(everybodys)))

    # -- inside ---------------------------------------------------------------------------------

    def _follow_changes(self) -> None:
        """Make new buckets if there are new parameters to train, which all ranks must have alike.

        What is frozen keeps its place; it counts as unused.
        """
        if self._contents.are_as_before():
            return
        self._contents = self._shared.contents = replicas.Contents(self.module)
        if not self._gradients.holds(one for named in self._trained() for _, one in named):
            replicas.check_structure(self._tensors(), self.backend)
            self._gradients.hold(*self._trained())

    def _trained(self) -> tuple[list[_Named], list[_Named]]:
        """List what is trained: with dense gradients, and with sparse ones."""
        modules = self.module.modules()
        sparse = {id(module.weight) for module in modules if makes_sparse_gradients(module)}
        dense_and_sparse: tuple[list[_Named], list[_Named]] = [], []
        for name, one in replicas.named_parameters(self.module, self._options.ignored).items():
            if one.requires_grad:
                dense_and_sparse[id(one) in sparse].append((name, one))
        return dense_and_sparse

    def _tensors(self) -> dict[str, torch.Tensor]:
        return replicas.named_tensors(self.module, self._options.ignored)


_Named = tuple[str, torch.nn.Parameter]


class _WrapOptions(NamedTuple):
    """How a module is wrapped, which a copy takes over."""

    overlap: bool
    sizes: BucketSizes
    broadcast_buffers: bool
    check_every: int
    hook: Hook
    ignored: frozenset[str]


def _copy(cls: type[DDP], module: torch.nn.Module, options: _WrapOptions) -> DDP:
    copied = cls.__new__(cls)
    torch.nn.Module.__init__(copied)
    copied.module, copied._options = module, options
    copied._attach(None)
    return copied


def _begin(ddp: DDP, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Prepare for backward. Nothing is sent, unless there are new parameters to train."""
    if ddp._backend is None or torch._C._current_graph_task_id() != -1:
        return  # in the latter case backward computes a part again
    ddp._gradients.check_whole()
    ddp._follow_changes()
    if ddp._join is not None:
        ddp._join.count(args, options)


def _expect(ddp: DDP, output: Any) -> None:
    for tensor in _tensors_in(output):
        if ddp._backend is not None:
            ddp._gradients.expect(tensor)
        elif tensor.grad_fn is not None:  # of a copy: it raises, unless it only takes a slope
            tensor.grad_fn.register_prehook(lambda _: adds_to_all_gradients() and ddp.backend)


# In torch.compile(DDP(module)) the module is compiled, and these run between its graphs.
_begin_uncompiled = torch._disable_dynamo(_begin)
_expect_uncompiled = torch._disable_dynamo(_expect)


def _check_sizes(first_mib: float, rest_mib: float) -> BucketSizes:
    for mib in (first_mib, rest_mib):
        if not 0 < mib < math.inf:
            text = f"DDP: a bucket of {mib} MiB; bucket_mib and first_bucket_mib are above 0"
            raise ferrodist.InvalidArgument(text, got=mib)
    return BucketSizes(int(first_mib * MIB), int(rest_mib * MIB))


def _after_round(
    module: torch.nn.Module,
    shared: replicas.SharedBuffers,
    backend: ferrodist.Backend,
    options: _WrapOptions,
) -> Callable[[int], None]:
    """Return what shares buffers after a round, and compares replicas after every so many.

    It knows no DDP, so that one that is dropped is gone at once, with its hooks.
    """

    def after_round(step: int) -> None:
        shared.broadcast()
        if options.check_every and step % options.check_every == 0:
            named = replicas.named_parameters(module, options.ignored)
            replicas.check_values(named, backend, step)

    return after_round


def _without_prefix(state: Mapping[str, Any], module: torch.nn.Module) -> Mapping[str, Any]:
    """Take ``module.`` off all names, unless it is a part of the module that is called so."""
    if "module" in module._modules or not all(name.startswith("module.") for name in state):
        return state
    renamed = OrderedDict(state)
    renamed._metadata = OrderedDict(getattr(state, "_metadata", {}))  # type: ignore[attr-defined]  # torch's
    consume_prefix_in_state_dict_if_present(renamed, "module.")
    return renamed


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Find the tensors in what a module returns."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors_in(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors_in(value)
    elif dataclasses.is_dataclass(output):
        for field in dataclasses.fields(output):
            yield from _tensors_in(getattr(output, field.name))
