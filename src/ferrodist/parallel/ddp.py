# SPDX-License-Identifier: MIT OR Apache-2.0
"""DDP: a torch module that is trained on all ranks as one, by means of its gradients."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

import ferrodist
from ferrodist.backends.registry import current_backend
from ferrodist.call import NOT_THE_USERS
from ferrodist.parallel import replicas
from ferrodist.parallel.bucket import MIB, BucketSizes, Hook, allreduce_bucket
from ferrodist.parallel.gradients import Gradients
from ferrodist.parallel.join import Join

NOT_THE_USERS.append(os.path.dirname(torch.__file__) + os.sep)  # errors name the line of backward()


class DDP(torch.nn.Module):  # type: ignore[misc]  # types of torch are not looked at
    """Wrap a module; after ``backward`` every rank has the mean of all ranks' gradients.

    The parameters and buffers of rank 0 are copied into those of the others, so an optimizer made
    before or after works. Gradients are averaged in buckets of ``bucket_mib`` MiB, the first of
    ``first_bucket_mib``, while backward still runs. ``overlap=False``: only when ``sync_gradients``
    is called. ``broadcast_buffers``: after every round the others get rank 0's buffers.
    ``check_replicas=k`` compares all parameters every k steps, bit for bit. ``hook`` reduces a
    bucket, instead of a plain allreduce.

    Attributes, ``state_dict`` and the like are those of the module inside.

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
    ) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            text = f"DDP: expected a torch.nn.Module, got {type(module).__name__}"
            raise ferrodist.InvalidArgument(text, got=module)
        backend = backend or current_backend()
        if backend is None:
            raise ferrodist.NotInitialized("DDP: call ferrodist.init() first, or pass a backend")
        self.module = module
        self.backend = backend
        self._shared = replicas.SharedBuffers(backend, are_shared=broadcast_buffers)
        self._join: Join | None = None
        self._gradients = Gradients(
            backend,
            sizes=_check_sizes(first_bucket_mib, bucket_mib),
            hook=hook,
            overlap=overlap,
            after_round=_after_round(module, self._shared, backend, check_replicas),
        )
        self.broadcast_parameters()
        self._gradients.hold(self._trained())
        self._contents = self._shared.contents = replicas.Contents(module)

    # -- the module inside ----------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Look in the module for what is not here."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """Return that of the module, as if it had never been wrapped."""
        return self.module.state_dict(*args, **options)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        """Load that of the module."""
        return self.module.load_state_dict(*args, **options)

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        """Yield those of the module, under its own names."""
        return self.module.named_parameters(*args, **options)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load as a part of another module; torch looks for the module under its name in here."""
        for name in [name for name in state if name.startswith(prefix)]:
            state[f"{prefix}module.{name.removeprefix(prefix)}"] = state.pop(name)
        super()._load_from_state_dict(state, prefix, *rest)

    def named_buffers(self, *args: Any, **options: Any) -> Any:
        """Yield those of the module, under its own names."""
        return self.module.named_buffers(*args, **options)

    def __reduce__(self) -> NoReturn:
        raise ferrodist.InvalidArgument(
            "DDP: cannot be copied or pickled, its backend belongs to this process; copy or save "
            "its .module, or its state_dict()"
        )

    # -- training -------------------------------------------------------------------------------

    def forward(self, *args: Any, **options: Any) -> Any:
        """Run the module; its outputs are where backward will begin."""
        if not torch.is_grad_enabled():
            return self.module(*args, **options)
        is_compiling = torch.compiler.is_compiling()
        (_begin_uncompiled if is_compiling else _begin)(self, args, options)
        output = self.module(*args, **options)
        (_expect_uncompiled if is_compiling else _expect)(self, output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on this rank alone; the next backward outside averages the sum."""
        was_on, self._gradients.is_on = self._gradients.is_on, False
        try:
            yield
        finally:
            self._gradients.is_on = was_on

    def sync_gradients(self) -> None:
        """Make every gradient the mean of all ranks'; every rank calls it."""
        self._gradients.sync()

    def broadcast_parameters(self, root: int = 0) -> None:
        """Copy the parameters and buffers of ``root`` into those of all ranks, in place."""
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
        """Let ranks have different numbers of steps; all enter it, around their whole loop.

        A rank that is done takes part in the others' rounds with nothing: the mean is over those
        who still train, weighted by their batches' lengths if ``by_samples``. At the end all have
        the parameters of the rank with the most steps; optimizers are left as they are. The others
        are torch's: to divide by the number of all ranks, to raise on all ranks when the first one
        is done, and to do nothing of all this.
        """
        if not enable:
            yield
            return
        if by_samples and divide_by_initial_world_size:
            raise ferrodist.InvalidArgument(
                "DDP.join: by_samples=True divides by the number of samples, so "
                "divide_by_initial_world_size cannot be True too"
            )
        self._shared.broadcast()
        raises_early = throw_on_early_termination
        join = Join(self.backend, self._shared, by_samples=by_samples, raises_early=raises_early)
        gradients, first = self._gradients, self._gradients.num_rounds
        after_round, gradients.after_round = gradients.after_round, join.after_round
        gradients.weigh, self._join = join.weigh, join
        gradients.divisor = float(self.backend.world_size) if divide_by_initial_world_size else None
        try:
            yield
            num_steps = gradients.num_rounds - first
            join.is_done = True
            while gradients.shadow() > 0:  # until a round in which nobody trained
                pass
        finally:
            gradients.after_round, gradients.weigh, self._join = after_round, None, None
            gradients.divisor = None
        everybodys = ferrodist.all_gather_object(num_steps, self.backend)
        self.broadcast_parameters(everybodys.index(max(everybodys)))

    # -- inside ---------------------------------------------------------------------------------

    def _follow_changes(self) -> None:
        """Make new buckets if there are new parameters to train, which all ranks must have alike.

        What is frozen keeps its place; it counts as unused.
        """
        if self._contents.are_as_before():
            return
        self._contents = self._shared.contents = replicas.Contents(self.module)
        if not self._gradients.holds(p for p in self.module.parameters() if p.requires_grad):
            replicas.check_structure(self._tensors(), self.backend)
            self._gradients.hold(self._trained())

    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}


def _begin(ddp: DDP, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Prepare for backward. Nothing is sent, unless there are new parameters to train."""
    if torch._C._current_graph_task_id() != -1:  # backward computes a part again
        return
    ddp._gradients.check_whole()
    ddp._follow_changes()
    if ddp._join is not None:
        ddp._join.count(args, options)


def _expect(ddp: DDP, output: Any) -> None:
    for tensor in _tensors_in(output):
        ddp._gradients.expect(tensor)


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
    every: int,
) -> Callable[[int], None]:
    """Return what shares buffers after a round, and compares replicas after every so many.

    It knows no DDP, so that one that is dropped is gone at once, with its hooks.
    """
    if every < 0:
        raise ferrodist.InvalidArgument(f"DDP: check_replicas={every}; 0 is never", got=every)

    def after_round(step: int) -> None:
        shared.broadcast()
        if every and step % every == 0:
            replicas.check_values(dict(module.named_parameters()), backend, step)

    return after_round


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
