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
from ferrodist.buffer import DTYPES_BY_LABEL, Buffer, DType
from ferrodist.call import Call, Kind, Leaf
from ferrodist.deadline import Deadline
from ferrodist.reduce_op import BY_NAME, ReduceOp

if TYPE_CHECKING:
    from ferrodist.backends.provider_backend import ProviderBackend

Array = np.ndarray[Any, Any]
_MOST_BOUND = 1024  # calls that are remembered
_NO_DEADLINE = Deadline(None)
_BARRIER = int(Kind.BARRIER)
_IN_PLACE = (Kind.ALLREDUCE, Kind.BROADCAST, Kind.SCAN)
_ROW_KINDS = (Kind.ALL_GATHER, Kind.GATHER)
_CUT_KINDS = (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)


class BoundCall(NamedTuple):
    """A call but for its arrays; ``shape`` is that of the result, None where there is none.

    ``run`` is the engine's own call, straight on the arrays, if it has one.
    """

    kind: Kind
    call: Call
    fingerprint: int
    args: CollectiveArgs
    dtype: DType
    shape: tuple[int, ...] | None
    run: Callable[[Any, Any, bool], None] | None


def call_path(
    backend: ProviderBackend,
    kind: int,
    x: Any,
    out: Any,
    op: Any,
    root: Any,
    run: Callable[..., None] | None = None,
) -> Any:
    """Run a blocking call, or return NotImplemented; ``run`` replaces ``_run`` if it is given."""
    torch = sys.modules.get("torch")
    if torch is None or type(x) is not torch.Tensor:
        return _call(backend, kind, x, out, op, root, run or _run)
    if type(out) not in (type(None), torch.Tensor):
        return NotImplemented
    try:  # which torch refuses for tensors that are more than memory of the host
        array = x.numpy()
        target = array if out is x else None if out is None else out.numpy()
    except (RuntimeError, TypeError):
        return NotImplemented
    done = _call(backend, kind, array, target, op, root, run or _run)
    if done is NotImplemented or done is None:
        return done
    if out is None:
        return torch.from_numpy(done)
    torch.autograd.graph.increment_version(out)
    return out


def _call(
    backend: ProviderBackend,
    kind: int,
    x: Any,
    out: Any,
    op: Any,
    root: Any,
    run: Callable[..., None],
) -> Any:
    if kind == _BARRIER:
        key: tuple[Any, ...] = (kind,)
    elif type(x) is np.ndarray and x.flags.c_contiguous and x.flags.aligned:
        key = (kind, op, root, x.dtype, x.shape)
    else:
        return NotImplemented
    if not _may_call(backend):
        return NotImplemented
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
    is_timed = backend.config.check or bound.run is None or run is not _run
    deadline = backend._deadline() if is_timed else _NO_DEADLINE

    def body(running: RunningCall) -> None:
        run(backend, running, bound, x, out, in_place)

    RunningCall(backend, bound.call, deadline, body, fingerprint=bound.fingerprint).perform()
    return out


def _may_call(backend: ProviderBackend) -> bool:
    is_open = not backend._is_closed and not backend.is_forked and not backend._reproducible
    is_user = not _native.is_progress_thread()
    return is_open and is_user and backend._tickets.is_idle


def _fits(out: Any, bound: BoundCall, x: Array) -> bool:
    """Tell whether a result goes there; what is wrong is said on the general path."""
    if type(out) is not np.ndarray or out.dtype != x.dtype or out.shape != bound.shape:
        return False
    flags = out.flags
    return flags.carray and not np.may_share_memory(out, x)


def _run(
    backend: ProviderBackend,
    running: RunningCall,
    bound: BoundCall,
    x: Any,
    out: Any,
    in_place: bool,
) -> None:
    run = bound.run
    try:
        if run is not None and backend.enter_plainly(running):
            if bound.kind is not Kind.BARRIER or not backend.config.check:  # else all have come
                run(x, out, in_place)
            return
    except BaseException as error:  # Ctrl-C too
        if run is not None and getattr(backend.engine, "is_awaited", False):
            run(x, out, in_place)  # the others are in it: this rank was interrupted just before
        if isinstance(error, ConnectionError | TimeoutError):
            backend.raise_named(running, error)
        raise
    args = bound.args._replace(in_place=in_place)
    sent = None if x is None else _buffer(x, bound.dtype)
    received = None if out is None else _buffer(out, bound.dtype)
    backend.run_entered(running, bound.kind, sent, received, args, is_entered=run is not None)


def _buffer(array: Array, dtype: DType) -> Buffer:
    return Buffer(array.reshape(-1).view(np.uint8).data, dtype, array.shape, array)


def _bind(backend: ProviderBackend, kind: Kind, op: Any, root: Any, x: Any) -> BoundCall | None:
    """Make what calls like this one share; None if they take the general path."""
    engine = backend.engine
    assert engine is not None
    if len(backend.bound_calls) > _MOST_BOUND:
        backend.bound_calls.clear()
    if kind is Kind.BARRIER:
        call = Call(kind)
        run = engine.bind(kind, DType.UINT8, (), CollectiveArgs())
        return BoundCall(kind, call, _hash(backend, call), CollectiveArgs(), DType.UINT8, None, run)
    dtype = DTYPES_BY_LABEL.get(x.dtype.name) if x.dtype.isnative else None
    parsed = BY_NAME.get(op) if isinstance(op, str) else op
    world = backend.world_size
    is_root = type(root) is int and 0 <= root < world
    if dtype is None or (kind.is_rooted and not is_root):
        return None
    if kind.is_reduction and not isinstance(parsed, ReduceOp):
        return None
    args = CollectiveArgs(parsed if kind.is_reduction else None, root if kind.is_rooted else 0)
    shape = _result_shape(kind, x.shape, world)
    if shape is None or not x.nbytes or not engine.does(kind, dtype, args):
        return None
    call = Call(
        kind, (Leaf("", dtype, x.shape),), op=args.op, root=root if kind.is_rooted else None
    )
    has_result = kind not in (Kind.REDUCE, Kind.GATHER) or root == backend.rank
    run = engine.bind(kind, dtype, x.shape, args)
    result = shape if has_result else None
    return BoundCall(kind, call, _hash(backend, call), args, dtype, result, run)


def _hash(backend: ProviderBackend, call: Call) -> int:
    return call.fingerprint(checks_site=backend.config.check_sites)


def _result_shape(kind: Kind, shape: tuple[int, ...], world: int) -> tuple[int, ...] | None:
    """Apply the shape rule of a kind; None for kinds and shapes of the general path."""
    if kind in (Kind.ALLREDUCE, Kind.BROADCAST, Kind.REDUCE, Kind.SCAN):
        return shape
    if kind in _ROW_KINDS:
        return (world * shape[0], *shape[1:]) if shape else (world,)
    if kind in _CUT_KINDS and shape and shape[0] % world == 0:
        first = shape[0] if kind is Kind.ALL_TO_ALL else shape[0] // world
        return (first, *shape[1:])
    return None
