# SPDX-License-Identifier: MIT OR Apache-2.0
"""The operators of c10d, for our groups.

torch's C++ code calls some methods of a process group that is written in Python directly. The
others it calls through operators, which know nothing of Python. Those are overridden here: a call
on one of our groups goes to its method, any other to the kernel that was there.

Either may happen while torch.compile watches the thread for functions to compile, as when DDP
is compiled; ours must run as they are.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from datetime import timedelta
from types import FunctionType
from typing import Any, NamedTuple

import torch

from ferrodist.torch.group_base import c10d
from ferrodist.torch.process_group import ProcessGroup
from ferrodist.torch.work import FinishedWork, PendingWork


class _Operator(NamedTuple):
    """An operator: its arguments are those of a method, the group, and fields of its options."""

    name: str
    method: str
    options: Callable[[], Any] | None
    fields: tuple[str, ...]
    num_arguments: int = 2
    gives_output: bool = False  # before the Work


_LAST = ("asyncOp", "timeout")
_OPERATORS = [
    _Operator("reduce_", "reduce", c10d.ReduceOptions,
              ("reduceOp", "rootRank", "rootTensor", *_LAST), 1),
    _Operator("_reduce_scatter_base_", "reduce_scatter_single", c10d.ReduceScatterOptions,
              ("reduceOp", *_LAST), gives_output=True),
    _Operator("_allgather_base_", "all_gather_single", c10d.AllgatherOptions, _LAST,
              gives_output=True),
    _Operator("allgather_coalesced_", "allgather_coalesced", c10d.AllgatherOptions, _LAST),
    _Operator("gather_", "gather", c10d.GatherOptions, ("rootRank", *_LAST)),
    _Operator("scatter_", "scatter", c10d.ScatterOptions, ("rootRank", *_LAST), gives_output=True),
    _Operator("alltoall_", "alltoall", c10d.AllToAllOptions, _LAST, gives_output=True),
    _Operator("recv_any_source_", "recv_anysource", None, (), 1),
]  # fmt: skip


@functools.cache
def install() -> Any:
    """Override the operators; the library that is returned keeps them so."""
    for kind in (*ProcessGroup.__mro__, PendingWork, FinishedWork):
        if kind.__module__.startswith("ferrodist."):
            _keep_from_compiler(kind)
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says of every kernel that it is overridden
        for operator in _OPERATORS:
            original = torch.library.get_kernel(f"c10d::{operator.name}", "CPU")
            kernel = functools.partial(_dispatch, operator, original)
            library.impl(operator.name, kernel, "CPU", with_keyset=True)
    return library


def _keep_from_compiler(kind: type) -> None:
    """Let torch.compile leave the methods of a class, and what they call, as they are.

    ``torch.compiler.disable`` does the same, but imports the compiler, which takes a second.
    """
    frames = torch._C._dynamo.eval_frame
    if not hasattr(frames, "_FrameExecStrategy"):  # another release: only compiled programs need it
        return
    skip = frames._FrameAction.SKIP
    strategy = frames._FrameExecStrategy(skip, skip)  # of the function, of those it calls
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            frames.set_code_exec_strategy(method.__code__, strategy)


def _dispatch(operator: _Operator, original: Any, keyset: Any, *args: Any) -> Any:
    group = c10d.ProcessGroup.unbox(args[operator.num_arguments])
    if not isinstance(group, ProcessGroup):
        return original.call_boxed(keyset, *args)
    passed, rest = args[: operator.num_arguments], args[operator.num_arguments + 1 :]
    if operator.options is not None:
        options = operator.options()
        for field, value in zip(operator.fields, rest, strict=False):  # defaults may be omitted
            setattr(options, field, _unboxed(field, value))
        rest = (options,)
    boxed = group.kept_by_torch(getattr(group, operator.method)(*passed, *rest)).boxed()
    return (passed[0], boxed) if operator.gives_output else boxed


def _unboxed(field: str, value: Any) -> Any:
    if field == "reduceOp":
        return c10d.ReduceOp(c10d.ReduceOp.RedOpType(value.op()))
    return timedelta(milliseconds=value) if field == "timeout" else value
