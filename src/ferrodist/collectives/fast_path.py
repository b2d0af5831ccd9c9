# SPDX-License-Identifier: MIT OR Apache-2.0
"""The fast path of a collective, and what native code calls of Python on it.

A backend whose ranks are processes does a whole call on one array in native code, from the check of
its arguments to the result. Python is asked only how a call is to be executed that was not made
before, about every 50 ms of a wait, and when the call fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ferrodist import _native
from ferrodist.arrays import as_input, flatten
from ferrodist.backends.registry import current_backend
from ferrodist.backends.running_call import RunningCall
from ferrodist.buffer import DType
from ferrodist.call import Call, Kind, Leaf, Site, caller_site
from ferrodist.collectives.request import leaf_of
from ferrodist.config import Timeout
from ferrodist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from ferrodist.backends.process_backend import ProcessBackend

fast_path, fast_start = _native.fast_path, _native.fast_start

# The kinds as plain numbers: on this path an enum costs more than the call it names.
ALLREDUCE, BROADCAST, REDUCE, ALL_GATHER, GATHER = 0, 1, 2, 3, 4
SCATTER, REDUCE_SCATTER, ALL_TO_ALL, BARRIER, SCAN, EXSCAN = 5, 6, 7, 8, 9, 10


def _on_error(
    backend: ProcessBackend,
    status: int,
    failed_rank: int,
    error: BaseException | None,
    sequence: int,
    kind: int,
    dtype: int,
    shape: tuple[int, ...] | None,
    op: int,
    root: int,
    num_collectives: int,
    part: bytes | None,
    x: Any,
    out: Any,
    site: Site | None,
    timeout: Timeout,
    reproducible: int,
) -> NoReturn:
    """Raise what became of a call; where ranks differ, all learn of it before.

    ``part`` is what the root of a scatter has told if ``x`` or ``out`` does not fit it.
    """
    call = Call(
        Kind(kind),
        _leaves_of(x) if shape is None else (Leaf("", DType(dtype), shape),),
        op=None if op < 0 else ReduceOp(op),
        root=None if root < 0 else root,
        reproducible=bool(reproducible),
        site=site or caller_site(),
        compared=() if kind == SCATTER else None,
    )

    deadline = backend._deadline(timeout, start=backend.end_wait())
    running = RunningCall(
        backend, call, deadline, _no_body, sequence=sequence, num_collectives=num_collectives
    )
    try:
        if part is not None:
            from ferrodist.collectives.scatter import refuse_part  # which is above this file

            refuse_part(running, root, part, x, out)
        raise backend.failure_of(running, _native.Status(status, failed_rank, error))
    finally:
        backend._end_call(running)


def _no_body(running: RunningCall) -> None:
    """Do nothing: the collectives of the call are over."""


def _leaves_of(x: Any) -> tuple[Leaf, ...]:
    """Describe the arrays of a tree; nothing where there is none."""
    return () if x is None else tuple(leaf_of(as_input(leaf), path) for path, leaf in flatten(x)[0])


_native.set_hooks(
    on_wait=lambda backend, site: backend.look_in_wait(site),
    on_wait_end=lambda backend: backend.end_wait(),
    on_error=_on_error,
    settle=lambda backend, kind, sequence, error: backend._settle(kind, sequence, error),
    make_plan=lambda backend, kind, dtype, op, root, nbytes, in_place, in_order: backend.plan_of(
        *backend.describe(
            Kind(kind), DType(dtype), ReduceOp(op), root, nbytes, bool(in_place), bool(in_order)
        )
    ),
    left_error=lambda backend, kind, sequence: backend.cut_short(kind, sequence),
    current_backend=current_backend,
)
