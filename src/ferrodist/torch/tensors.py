# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tensors of torch as the collectives take them: flat, contiguous, outside autograd.

torch compares numbers of elements between ranks, not shapes, so every tensor is passed as one row.
A tensor whose memory is not one block is copied, and what is received is copied back into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ferrodist.errors import UnsupportedArray

Finish = Callable[[Any], None]
"""What is left to do with the result of a call that is over."""

_ELSEWHERE = (
    "the process group is ferrodist's and for tensors in CPU memory, got one on {device}: call "
    'init_process_group("ferrodist") for those, and for CUDA tensors '
    'dist.new_group(backend="nccl"), whose group you pass to calls on them'
)
_STRIDED = torch.strided
# What ferrodist has no name for moves as integers of its size; it cannot be reduced.
OWN_DTYPES = {
    torch.bool,
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
}
_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def is_plain(x: Tensor) -> bool:
    """Tell whether a tensor may be passed as it is."""
    return (
        type(x) is Tensor
        and x.ndim == 1
        and x.is_cpu
        and x.layout is _STRIDED
        and x.is_contiguous()
        and not x.requires_grad
        and x.dtype in OWN_DTYPES
    )


def flat_input(x: Tensor) -> Tensor:
    """Return the elements of a tensor as one row, copied if they do not lie in one block."""
    return x if is_plain(x) else _bare(x).contiguous().view(-1)


def flat_output(x: Tensor) -> tuple[Tensor, Finish | None]:
    """Return a row that receives the elements of a tensor, and how they get there from it.

    The row holds what the tensor holds.
    """
    if is_plain(x):
        return x, None
    bare = _bare(x)
    flat = bare.contiguous().view(-1)
    if bare.is_contiguous():
        return flat, None
    return flat, lambda _: _write(bare, flat.view(bare.shape))


def flat_outputs(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Finish]]:
    """As flat_output, for several tensors."""
    pairs = [flat_output(x) for x in tensors]
    return [flat for flat, _ in pairs], [finish for _, finish in pairs if finish is not None]


def all_of(finishes: Sequence[Finish]) -> Finish | None:
    """Make one of several."""
    if not finishes:
        return None

    def finish(result: Any) -> None:
        for one in finishes:
            one(result)

    return finish


def join_inputs(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of several tensors as one row."""
    if len(tensors) == 1:
        return flat_input(tensors[0])
    return torch.cat([flat_input(x) for x in tensors])


def cut_into(tensors: Sequence[Tensor]) -> Finish:
    """Make what cuts a row into the tensors, one after the other."""
    bare = [_bare(x) for x in tensors]

    def cut(row: Tensor) -> None:
        start = 0
        for x in bare:
            end = start + x.numel()
            _write(x, row[start:end].view(x.shape))
            start = end

    return cut


def _bare(x: Tensor) -> Tensor:
    """Return a tensor without its history and class, refused if others' memory holds it."""
    if not x.is_cpu:
        raise UnsupportedArray(_ELSEWHERE.format(device=x.device), got=str(x.device))
    if x.layout is not torch.strided:
        text = f"expected a dense tensor, got one of layout {x.layout}; only all_reduce takes it"
        raise UnsupportedArray(text, got=str(x.layout))
    bare = x.detach()
    if type(bare) is not Tensor:
        bare = bare.as_subclass(Tensor)
    if bare.is_conj() or bare.is_neg():
        bare = bare.resolve_conj().resolve_neg()
    return bare if bare.dtype in OWN_DTYPES else bare.view(_BY_SIZE[bare.element_size()])


def _write(x: Tensor, value: Tensor) -> None:
    """Write into a tensor; where elements share memory, as after expand(), once."""
    shared = [axis for axis in range(x.ndim) if x.stride(axis) == 0 and x.shape[axis] > 1]
    for axis in shared:
        x, value = x.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
    x.copy_(value)
