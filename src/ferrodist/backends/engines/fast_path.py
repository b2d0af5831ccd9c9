# SPDX-License-Identifier: MIT OR Apache-2.0
"""The fast path of engines: a plain call on one array of NumPy or torch, in some microseconds.

What all calls of one kind, operation, root, dtype and shape share is made once. Every other call
returns NotImplemented and takes the general path, which also raises the errors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ferrodist import _native
from ferrodist.backends.running_call import CollectiveArgs, RunningCall
from ferrodist.buffer import DTYPES_BY_LABEL
from ferrodist.call import Call, Kind, Leaf, caller_site
from ferrodist.reduce_op import BY_NAME, ReduceOp

if TYPE_CHECKING:
    from ferrodist.backends.engines.engine import EngineCall, EngineCalls

Array = np.ndarray[Any, Any]
_MOST_BOUND = 1024  # calls that are remembered
_IN_PLACE = (Kind.ALLREDUCE, Kind.BROADCAST, Kind.SCAN)


class BoundCall(NamedTuple):
    """A call but for its arrays; ``shape`` is that of the result, None where there is none."""

    kind: Kind
    call: Call
    fingerprint: int
    shape: tuple[int, ...] | None
    run: Callable[[Any, Any, bool], EngineCall]


def call_path(
    backend: EngineCalls, kind: int, x: Any, out: Any, op: Any, root: Any, options: Any
) -> Any:
    """Run a blocking call by the engine, or return NotImplemented."""
    if options:
        return NotImplemented
    torch = sys.modules.get("torch")
    if torch is None or type(x) is not torch.Tensor:
        return _call(backend, kind, x, out, op, root)
    if type(out) not in (type(None), torch.Tensor):
        return NotImplemented
    try:  # which torch refuses for tensors that are more than memory of the host
        array = x.numpy()
        target = array if out is x else None if out is None else out.numpy()
    except (RuntimeError, TypeError):
        return NotImplemented
    done = _call(backend, kind, array, target, op, root)
    if done is NotImplemented or done is None:
        return done
    if out is None:
        return torch.from_numpy(done)
    torch.autograd.graph.increment_version(out)
    return out


def note_site(running: RunningCall) -> None:
    """Find out where a call was made that errors may have to show."""
    if running.call.site is None:
        running.call = running.call._replace(site=caller_site())


def _call(backend: EngineCalls, kind: int, x: Any, out: Any, op: Any, root: Any) -> Any:
    if type(x) is not np.ndarray or not (x.flags.c_contiguous and x.flags.aligned):
        return NotImplemented
    if x.nbytes <= backend._carried_nbytes or not _may_call(backend):
        return NotImplemented
    key = (kind, op, root, x.dtype, x.shape)
    try:
        bound = backend.bound_calls[key]
    except KeyError:
        bound = backend.bound_calls[key] = _bind(backend, Kind(kind), op, root, x)
    except TypeError:  # an op or a root that cannot be hashed
        return NotImplemented
    if bound is None:
        return NotImplemented
    in_place = False
    if bound.shape is None:
        out = None
    elif out is None:
        out = np.empty(bound.shape, x.dtype)
    elif out is x:
        in_place = True
        if bound.kind not in _IN_PLACE or not x.flags.writeable:
            return NotImplemented
    elif not _fits(out, bound, x):
        return NotImplemented
    found = bound  # which is not None

    def body(running: RunningCall) -> None:
        backend.run_bound(running, found, x, out, in_place)

    deadline, fingerprint = backend._deadline(), bound.fingerprint
    RunningCall(backend, bound.call, deadline, body, fingerprint=fingerprint).perform()
    return out


def _may_call(backend: EngineCalls) -> bool:
    is_open = not backend._is_closed and not backend.is_forked and not backend._reproducible
    is_user = not _native.is_progress_thread()
    return is_open and is_user and backend._tickets.is_idle


def _fits(out: Any, bound: BoundCall, x: Array) -> bool:
    """Tell whether a result goes there; what is wrong is said on the general path."""
    if type(out) is not np.ndarray or out.dtype != x.dtype or out.shape != bound.shape:
        return False
    flags = out.flags
    return flags.carray and not np.may_share_memory(out, x)


def _bind(backend: EngineCalls, kind: Kind, op: Any, root: Any, x: Any) -> BoundCall | None:
    """Make what calls like this one share; None if they take the general path."""
    engine = backend.engine
    if len(backend.bound_calls) > _MOST_BOUND:
        backend.bound_calls.clear()
    dtype = DTYPES_BY_LABEL.get(x.dtype.name) if x.dtype.isnative else None
    parsed = BY_NAME.get(op) if isinstance(op, str) else op
    world = backend.world_size
    is_root = type(root) is int and 0 <= root < world
    if engine is None or dtype is None or (kind.is_rooted and not is_root):
        return None
    if kind.is_reduction and not isinstance(parsed, ReduceOp):
        return None
    args = CollectiveArgs(parsed if kind.is_reduction else None, root if kind.is_rooted else 0)
    shape = _result_shape(kind, x.shape, world)
    if shape is None or not x.nbytes or not engine.does(kind, dtype, args):
        return None
    run = engine.bind(kind, dtype, x.shape, args)
    if run is None:
        return None
    call = Call(
        kind, (Leaf("", dtype, x.shape),), op=args.op, root=root if kind.is_rooted else None
    )
    has_result = kind.has_result(backend.rank, args.root)
    fingerprint = call.fingerprint(checks_site=backend.config.check_sites)
    return BoundCall(kind, call, fingerprint, shape if has_result else None, run)


def _result_shape(kind: Kind, shape: tuple[int, ...], world: int) -> tuple[int, ...] | None:
    """Apply the shape rule of a kind; None for kinds and shapes of the general path."""
    if kind in (Kind.ALLREDUCE, Kind.BROADCAST, Kind.REDUCE, Kind.SCAN):
        return shape
    if kind.input_is_block:
        return (world * shape[0], *shape[1:]) if shape else (world,)
    is_cut = kind in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)
    if is_cut and shape and shape[0] % world == 0:
        first = shape[0] if kind is Kind.ALL_TO_ALL else shape[0] // world
        return (first, *shape[1:])
    return None
