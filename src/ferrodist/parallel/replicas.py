# SPDX-License-Identifier: MIT OR Apache-2.0
"""Replicas: the same module on every rank, and what is said when it is not.

``check_arguments`` knows those of torch's DDP: which mean something here, and what to write for the
others. ``check_structure`` compares what modules are made of, once; ``check_values`` their numbers.
``Contents`` tells in every step, in little time, whether the module of this rank has changed.
``Join`` is for ranks that make different numbers of steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch

import ferrodist
from ferrodist.backends.failures import names_of_ranks
from ferrodist.parallel.reducer import drifted_ranks, explain

DDP_ADVICE = (
    "ranks with different numbers of batches train inside model.join(), and a backward that one "
    "rank makes alone is one of model.module(x)"
)

_traits_of = attrgetter("requires_grad", "dtype")


_WITHOUT_EFFECT = {
    "find_unused_parameters",  # they are found in any case
    "gradient_as_bucket_view",  # they are, and a gradient that the program keeps does not change
    "static_graph",  # nothing depends on it
    "check_reduction",
    "skip_all_reduce_unused_params",
}

_BUCKETS = "buckets follow the order in which gradients come: omit it"
_INSTEAD: dict[str, tuple[Any, str]] = {  # what is taken, and what to write for all else
    "output_device": (None, "outputs are where the module puts them: omit it"),
    "dim": (0, "batches are cut by the program, see shard_indices: omit it"),
    "init_sync": (True, "parameters are always those of rank 0 at the start: omit it"),
    "mixed_precision": (None, "run the module under torch.autocast"),
    "device_mesh": (None, "pass a backend, of some ranks backend.split(ranks)"),
    "delay_all_reduce_named_params": (None, _BUCKETS),
    "param_to_hook_all_reduce": (None, _BUCKETS),
}


def check_arguments(arguments: Mapping[str, Any], module: torch.nn.Module) -> None:
    """Raise for arguments of torch's DDP that would mean something else here."""
    for name, value in arguments.items():
        if name in _INSTEAD:
            taken, instead = _INSTEAD[name]
            if value != taken:
                raise ferrodist.InvalidArgument(f"DDP: {name}={value!r}; {instead}", got=value)
        elif name == "device_ids":
            _check_devices(value, module)
        elif name == "process_group":
            _check_group(value)
        elif name not in _WITHOUT_EFFECT and name != "bucket_cap_mb":
            raise TypeError(f"DDP() got an unexpected keyword argument {name!r}")


def _check_devices(devices: Any, module: torch.nn.Module) -> None:
    found = {str(parameter.device) for parameter in module.parameters()}
    named = {f"cuda:{one}" if isinstance(one, int) else str(one) for one in devices or ()}
    if found and not named <= found:
        raise ferrodist.InvalidArgument(
            f"DDP: device_ids={devices!r}, but the module is on {', '.join(sorted(found))}; move "
            "it with module.to(device) and omit device_ids",
            got=devices,
        )


def _check_group(group: Any) -> None:
    if group is not None and not isinstance(group, ferrodist.Backend):
        raise ferrodist.InvalidArgument(
            f"DDP: process_group is a {type(group).__name__}; pass a backend of ferrodist, of some "
            "ranks backend.split(ranks)",
            got=group,
        )


class Contents:
    """The modules and parameters in a module, as they are now.

    Walking through a module as torch does takes longer than a layer of a small one.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        modules = list(module.modules())
        self._buffers = [one._buffers for one in modules]
        self._parts = [part for one in modules for part in (one._modules, one._parameters)]
        self._is_plain = all(isinstance(part, dict) for part in self._parts)  # else it is a script
        self._members = list(chain.from_iterable(part.values() for part in self._parts))
        self._parameters = list(module.parameters())
        self._traits = list(map(_traits_of, self._parameters))

    def are_as_before(self) -> bool:
        """Tell whether they still are the same ones, of the same dtypes, trained or not."""
        return (
            self._is_plain
            and sum(map(len, self._parts)) == len(self._members)
            and all(map(is_, chain.from_iterable(map(dict.values, self._parts)), self._members))
            and list(map(_traits_of, self._parameters)) == self._traits
        )

    def buffers(self, ignored: frozenset[str]) -> list[torch.Tensor]:
        """List the buffers; a module may have put new ones in place of old ones."""
        if ignored:
            named = self._module.named_buffers()
            return [buffer for name, buffer in named if name not in ignored]
        return [one for part in self._buffers for one in part.values() if one is not None]


def check_shapes(module: torch.nn.Module) -> None:
    """Refuse a module that learns its shapes from its first batch."""
    for path, part in module.named_modules():
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if torch.nn.parameter.is_lazy(tensor):
                raise ferrodist.InvalidArgument(
                    f"DDP: {path}{'.' if path else ''}{name} of {type(part).__name__} has no shape "
                    "yet; run the module once on a batch before it is wrapped, on every rank"
                )


def check_devices(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Refuse parameters whose gradients cannot be views of buckets in CPU memory."""
    for name, parameter in parameters.items():
        if parameter.device.type != "cpu":
            raise ferrodist.UnsupportedArray(
                f"DDP: {name} is on {parameter.device}, and gradients are averaged in CPU memory; "
                "call allreduce(gradients, op='mean', out=gradients) after backward instead, or "
                "use torch's DDP with NCCL",
                got=str(parameter.device),
            )


def names_of(
    module: torch.nn.Module, tensors: Iterable[str | torch.nn.Parameter]
) -> frozenset[str]:
    """Name the tensors of a module that were given, and those torch was told to ignore."""
    names = {id(tensor): name for name, tensor in named_tensors(module, frozenset()).items()}
    told = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    found = {one if isinstance(one, str) else names.get(id(one), "?") for one in tensors}
    unknown = found.difference(names.values())
    if unknown:
        raise ferrodist.InvalidArgument(
            f"DDP: ignored_parameters: {sorted(unknown)} are not in the module; pass its "
            "parameters, or names as of named_parameters() and named_buffers()"
        )
    return frozenset(found.union(told))


def named_parameters(
    module: torch.nn.Module, ignored: frozenset[str]
) -> dict[str, torch.nn.Parameter]:
    """Give the parameters that all ranks have alike, by name."""
    return {name: one for name, one in module.named_parameters() if name not in ignored}


def named_tensors(module: torch.nn.Module, ignored: frozenset[str]) -> dict[str, torch.Tensor]:
    """Give the parameters and buffers that all ranks have alike, by name."""
    buffers = {name: one for name, one in module.named_buffers() if name not in ignored}
    return {**named_parameters(module, ignored), **buffers}


class SharedBuffers:
    """Buffers that become those of one rank on all of them, after every round.

    So forward makes no calls. ``contents`` are those of the module now.
    """

    def __init__(
        self, backend: ferrodist.Backend, ignored: frozenset[str], *, are_shared: bool
    ) -> None:
        self._backend = backend
        self._ignored = ignored
        self._are_shared = are_shared
        self.contents: Contents | None = None

    def tensors(self) -> list[torch.Tensor]:
        """List them; data, so that no graph takes it for a change."""
        if self.contents is None or not self._are_shared:
            return []
        return [buffer.data for buffer in self.contents.buffers(self._ignored)]

    def broadcast(self, root: int = 0) -> None:
        """Copy the buffers of ``root`` into those of all ranks."""
        try:
            broadcast(self.tensors(), self._backend, root)
        except ferrodist.DistributedError as error:
            explain(error, f"DDP: buffers of rank {root}, after a backward", DDP_ADVICE)
            raise


def describe(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Say what a module is made of, a line per tensor."""
    return [f"{name}: {_describe(tensor)}" for name, tensor in tensors.items()]


def _describe(tensor: torch.Tensor) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if not tensor.requires_grad:
        return text
    # Gradients travel in the layout of their parameters.
    is_turned = is_dense(tensor) and not tensor.is_contiguous()
    return f"{text}, trained" + (f", strides {list(tensor.stride())}" if is_turned else "")


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether it fills its memory without gaps, in whatever order of dimensions."""
    return bool(torch.empty_like(tensor, device="meta").stride() == tensor.stride())


def check_structure(tensors: Mapping[str, torch.Tensor], backend: ferrodist.Backend) -> None:
    """Raise on every rank if the modules do not have the same tensors."""
    everybodys = ferrodist.all_gather_object(describe(tensors), backend)
    for rank, lines in enumerate(everybodys):
        if lines != everybodys[0]:
            raise ferrodist.CollectiveMismatch(
                f"DDP: the module of rank {rank} differs from that of rank 0: "
                f"{_first_difference(everybodys[0], lines)}; every rank needs the same module",
                rank=rank,
                this_rank=backend.rank,
            )


def _first_difference(first: Sequence[str], other: Sequence[str]) -> str:
    """Name the first tensor in which two modules differ."""
    for mine, theirs in zip(first, other, strict=False):
        if mine != theirs:
            return f"'{theirs}' instead of '{mine}'"
    longer, shorter = max(first, other, key=len), min(first, other, key=len)
    return f"'{longer[len(shorter)]}' is there on {'rank 0' if longer is first else 'it'} alone"


def broadcast(tensors: Sequence[torch.Tensor], backend: ferrodist.Backend, root: int) -> None:
    """Copy the tensors of ``root`` into those of all ranks, in one call."""
    values = [tensor.detach() for tensor in tensors]  # no part of a graph: they may be written to
    if not values or backend.world_size == 1:
        return
    received = ferrodist.broadcast(values, backend, root)
    if backend.rank != root:
        for tensor, value in zip(values, received, strict=True):
            tensor.copy_(value)


def check_values(
    tensors: Mapping[str, torch.Tensor], backend: ferrodist.Backend, step: int
) -> None:
    """Raise on every rank if the replicas are not the same, bit for bit."""
    hashes = np.array([_hash(tensor) for tensor in tensors.values()], np.uint64)
    everybodys = ferrodist.all_gather(hashes[None], backend)
    for at, name in enumerate(tensors):
        if ranks := drifted_ranks(everybodys[:, at]):
            raise ferrodist.CollectiveMismatch(
                f"DDP: the replicas have drifted apart: {name} of rank {ranks[0]} differs from "
                f"the others' in step {step} (differing ranks: {ranks}). Something changes "
                "parameters on that rank alone, or its hardware is at fault",
                rank=ranks[0],
                this_rank=backend.rank,
            )


def _hash(tensor: torch.Tensor) -> int:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


# -- ranks with different numbers of steps, and what each counts for in the mean -------------------


class Join:
    """Weighs this rank's gradients: 1 for a step, or the samples it has seen since the last.

    ``is_done``: this rank has no further steps. ``raises_early``: the first rank that is done makes
    all raise.
    """

    def __init__(
        self,
        backend: ferrodist.Backend,
        buffers: SharedBuffers,
        *,
        by_samples: bool,
        raises_early: bool,
    ) -> None:
        self._backend = backend
        self._buffers = buffers
        self._by_samples = by_samples
        self._raises_early = raises_early
        self._num_samples = 0
        self._is_weighed = False
        self.is_done = False

    def count(self, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        """See a batch: its length is that of the first tensor."""
        if not self._by_samples:
            return
        batch = next((x for x in [*args, *options.values()] if isinstance(x, torch.Tensor)), None)
        if batch is None or batch.dim() == 0:
            raise ferrodist.InvalidArgument(
                "DDP.join(by_samples=True): forward was given no tensor with a length, so there "
                "is no telling how many samples it has"
            )
        if len(batch) == 0:
            raise ferrodist.InvalidArgument(
                "DDP.join(by_samples=True): forward was given a batch of no samples; leave such "
                "a step out, ranks need not have the same number of steps here"
            )
        self._num_samples = len(batch) + (0 if self._is_weighed else self._num_samples)
        self._is_weighed = False

    def weigh(self) -> float:
        """Return what this rank counts for now; a further backward counts the same."""
        self._is_weighed = True
        return float(self._num_samples) if self._by_samples else 1.0

    def after_round(self, _: int) -> None:
        """Give all ranks the buffers of the first one that still trains."""
        if self._raises_early:
            self._check_all_train()
        if not self._buffers.tensors():
            return
        num_ranks = self._backend.world_size
        candidate = num_ranks if self.is_done else self._backend.rank
        root = ferrodist.allreduce(candidate, self._backend, op="min")
        if root < num_ranks:
            self._buffers.broadcast(root)

    def _check_all_train(self) -> None:
        are_done = ferrodist.all_gather(np.array([self.is_done]), self._backend)
        if are_done.any() and not are_done.all():
            ranks = np.flatnonzero(are_done).tolist()
            raise ferrodist.DistributedError(
                f"DDP.join(throw_on_early_termination=True): {names_of_ranks(ranks)} ran out of "
                "batches before the others; every rank raises this",
                rank=ranks[0],
                this_rank=self._backend.rank,
            )
