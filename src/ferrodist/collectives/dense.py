# SPDX-License-Identifier: MIT OR Apache-2.0
"""The collectives in which every rank passes arrays of one shape; most take trees of arrays too."""

from __future__ import annotations

from typing import Any, TypeVar, Unpack, overload

from ferrodist.arrays import split_blocks
from ferrodist.backends.call_methods import InPlaceOptions, No, Op, Options, Yes
from ferrodist.call import Kind
from ferrodist.collectives.fast_path import (
    ALL_GATHER,
    ALL_TO_ALL,
    ALLREDUCE,
    BARRIER,
    BROADCAST,
    EXSCAN,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCAN,
    fast_path,
    fast_start,
)
from ferrodist.collectives.plan import execute, execute_barrier
from ferrodist.collectives.request import (
    Group,
    Request,
    check_keywords,
    open_backend,
    public,
)
from ferrodist.config import DEFAULT, Timeout
from ferrodist.reduce_op import ReduceOp
from ferrodist.work import Work

T = TypeVar("T")


@overload
def allreduce(
    x: T, backend: Group = None, op: Op = ..., *, async_op: Yes, **rest: Unpack[Options]
) -> Work[T]: ...
@overload
def allreduce(
    x: T, backend: Group = None, op: Op = ..., *, async_op: No = ..., **rest: Unpack[Options]
) -> T: ...
@public(Options)
def allreduce(
    x: Any,
    backend: Group = None,
    op: Op = ReduceOp.SUM,
    *,
    out: Any = None,
    async_op: bool = False,
    **options: Unpack[InPlaceOptions],
) -> Any:
    """Combine the arrays of all ranks, element by element; every rank gets the result.

    Returns a new array of the caller's kind, or ``out``. ``x`` may be a tree: a list, tuple or dict
    of arrays, nested as you like. MEAN divides once, at the end.

    Example:
        >>> import numpy as np, ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> run_ranks(3, lambda b: ferrodist.allreduce(np.full(2, b.rank), b))[0]
        array([3, 3])
    """
    done = (fast_start if async_op else fast_path)(ALLREDUCE, backend, x, out, op, -1, options)
    if done is not NotImplemented:
        return done
    request = Request(Kind.ALLREDUCE, backend, options, is_async=async_op, op=op)
    return execute(request, x, out)


@overload
def allreduce_(
    x: T, backend: Group = None, op: Op = ..., *, async_op: Yes, **rest: Unpack[InPlaceOptions]
) -> Work[T]: ...
@overload
def allreduce_(
    x: T, backend: Group = None, op: Op = ..., *, async_op: No = ..., **rest: Unpack[InPlaceOptions]
) -> T: ...
@public(InPlaceOptions)
def allreduce_(
    x: Any,
    backend: Group = None,
    op: Op = ReduceOp.SUM,
    *,
    async_op: bool = False,
    **options: Unpack[InPlaceOptions],
) -> Any:
    """Combine the arrays of all ranks in place: ``allreduce`` with ``out=x``.

    Example:
        >>> import numpy as np, ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def fill(backend):
        ...     x = np.full(2, backend.rank)
        ...     ferrodist.allreduce_(x, backend)
        ...     return x
        >>> run_ranks(3, fill)[0]
        array([3, 3])
    """
    call: Any = allreduce  # which of its overloads is said by async_op
    if not options:  # to unpack none takes a third of the time of a call
        return call(x, backend, op, out=x, async_op=async_op)
    check_keywords("allreduce_", options)
    return call(x, backend, op, out=x, async_op=async_op, **options)


@overload
def broadcast(
    x: T, backend: Group = None, root: int = ..., *, async_op: Yes, **rest: Unpack[Options]
) -> Work[T]: ...
@overload
def broadcast(
    x: T, backend: Group = None, root: int = ..., *, async_op: No = ..., **rest: Unpack[Options]
) -> T: ...
@public(Options)
def broadcast(
    x: Any,
    backend: Group = None,
    root: int = 0,
    *,
    out: Any = None,
    async_op: bool = False,
    **options: Unpack[InPlaceOptions],
) -> Any:
    """Give every rank the array of ``root``; the others pass one of the same dtype and shape.

    Example:
        >>> import numpy as np, ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> run_ranks(3, lambda b: ferrodist.broadcast(np.full(2, b.rank), b, root=2))[0]
        array([2, 2])
    """
    done = (fast_start if async_op else fast_path)(BROADCAST, backend, x, out, None, root, options)
    if done is not NotImplemented:
        return done
    request = Request(Kind.BROADCAST, backend, options, is_async=async_op, root=root)
    return execute(request, x, out)


@overload
def broadcast_(
    x: T, backend: Group = None, root: int = ..., *, async_op: Yes, **rest: Unpack[InPlaceOptions]
) -> Work[T]: ...
@overload
def broadcast_(
    x: T,
    backend: Group = None,
    root: int = ...,
    *,
    async_op: No = ...,
    **rest: Unpack[InPlaceOptions],
) -> T: ...
@public(InPlaceOptions)
def broadcast_(
    x: Any,
    backend: Group = None,
    root: int = 0,
    *,
    async_op: bool = False,
    **options: Unpack[InPlaceOptions],
) -> Any:
    """Overwrite ``x`` with the array of ``root``: ``broadcast`` with ``out=x``.

    Example:
        >>> import numpy as np, ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def fill(backend):
        ...     x = np.full(2, backend.rank)
        ...     ferrodist.broadcast_(x, backend, root=2)
        ...     return x
        >>> run_ranks(3, fill)[0]
        array([2, 2])
    """
    call: Any = broadcast  # which of its overloads is said by async_op
    if not options:  # to unpack none takes a third of the time of a call
        return call(x, backend, root, out=x, async_op=async_op)
    check_keywords("broadcast_", options)
    return call(x, backend, root, out=x, async_op=async_op, **options)


@overload
def reduce(
    x: T,
    backend: Group = None,
    root: int = ...,
    op: Op = ...,
    *,
    async_op: Yes,
    **rest: Unpack[Options],
) -> Work[T | None]: ...
@overload
def reduce(
    x: T,
    backend: Group = None,
    root: int = ...,
    op: Op = ...,
    *,
    async_op: No = ...,
    **rest: Unpack[Options],
) -> T | None: ...
@public(Options)
def reduce(
    x: Any,
    backend: Group = None,
    root: int = 0,
    op: Op = ReduceOp.SUM,
    *,
    out: Any = None,
    async_op: bool = False,
    **options: Unpack[InPlaceOptions],
) -> Any:
    """Combine the arrays of all ranks on ``root``; the other ranks get None.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> run_ranks(3, lambda b: ferrodist.reduce(b.rank + 1, b, root=1, op="prod"))
        [None, 6, None]
    """
    done = (fast_start if async_op else fast_path)(REDUCE, backend, x, out, op, root, options)
    if done is not NotImplemented:
        return done
    request = Request(Kind.REDUCE, backend, options, is_async=async_op, root=root, op=op)
    return execute(request, x, out)


@overload
def all_gather(
    x: Any, backend: Group = None, *, as_list: bool = ..., async_op: Yes, **rest: Unpack[Options]
) -> Work[Any]: ...
@overload
def all_gather(
    x: Any,
    backend: Group = None,
    *,
    as_list: bool = ...,
    async_op: No = ...,
    **rest: Unpack[Options],
) -> Any: ...
@public(Options)
def all_gather(
    x: Any,
    backend: Group = None,
    *,
    as_list: bool = False,
    out: Any = None,
    async_op: bool = False,
    **options: Unpack[InPlaceOptions],
) -> Any:
    """Join the arrays of all ranks along axis 0, in rank order, on every rank.

    ``(d0, d1, ...)`` becomes ``(W * d0, d1, ...)``; numbers and 0-d arrays become ``(W,)``. ``x``
    may be part r of ``out``. ``as_list`` gives a list instead, with what each rank has passed:
    views of the joined array.

    Example:
        >>> import numpy as np, ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> run_ranks(3, lambda b: ferrodist.all_gather(np.array([b.rank]), b))[0]
        array([0, 1, 2])
        >>> run_ranks(3, lambda b: ferrodist.all_gather(np.array([b.rank]), b, as_list=True))[0]
        [array([0]), array([1]), array([2])]
    """
    if not (as_list and async_op):
        done = (fast_start if async_op else fast_path)(
            ALL_GATHER, backend, x, out, None, -1, options
        )
        if done is not NotImplemented:
            if not as_list:
                return done
            return split_blocks(done, x, open_backend(backend, "all_gather").world_size)
    request = Request(Kind.ALL_GATHER, backend, options, is_async=async_op)
    return execute(request, x, out, as_list=as_list)


@overload
def gather(
    x: Any, backend: Group = None, root: int = ..., *, async_op: Yes, **rest: Unpack[Options]
) -> Work[Any]: ...
@overload
def gather(
    x: Any, backend: Group = None, root: int = ..., *, async_op: No = ..., **rest: Unpack[Options]
) -> Any: ...
@public(Options)
def gather(
    x: Any,
    backend: Group = None,
    root: int = 0,
    *,
    out: Any = None,
    async_op: bool = False,
    **options: Unpack[InPlaceOptions],
) -> Any:
    """Join the arrays of all ranks along axis 0 on ``root``; the other ranks get None.

    ``x`` may be part r of ``out``.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> run_ranks(2, lambda b: ferrodist.gather(b.rank, b))
        [array([0, 1]), None]
    """
    done = (fast_start if async_op else fast_path)(GATHER, backend, x, out, None, root, options)
    if done is not NotImplemented:
        return done
    request = Request(Kind.GATHER, backend, options, is_async=async_op, root=root)
    return execute(request, x, out)


@overload
def reduce_scatter(
    x: T, backend: Group = None, op: Op = ..., *, async_op: Yes, **rest: Unpack[Options]
) -> Work[T]: ...
@overload
def reduce_scatter(
    x: T, backend: Group = None, op: Op = ..., *, async_op: No = ..., **rest: Unpack[Options]
) -> T: ...
@public(Options)
def reduce_scatter(
    x: Any,
    backend: Group = None,
    op: Op = ReduceOp.SUM,
    *,
    out: Any = None,
    async_op: bool = False,
    **options: Unpack[InPlaceOptions],
) -> Any:
    """Combine the arrays of all ranks; rank r gets part r of the result, cut along axis 0.

    ``out`` may be part r of ``x``.

    Example:
        >>> import numpy as np, ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> run_ranks(2, lambda b: ferrodist.reduce_scatter(np.arange(4), b))
        [array([0, 2]), array([4, 6])]
    """
    done = (fast_start if async_op else fast_path)(REDUCE_SCATTER, backend, x, out, op, -1, options)
    if done is not NotImplemented:
        return done
    request = Request(Kind.REDUCE_SCATTER, backend, options, is_async=async_op, op=op)
    return execute(request, x, out)


@overload
def scan(
    x: T, backend: Group = None, op: Op = ..., *, async_op: Yes, **rest: Unpack[Options]
) -> Work[T]: ...
@overload
def scan(
    x: T, backend: Group = None, op: Op = ..., *, async_op: No = ..., **rest: Unpack[Options]
) -> T: ...
@public(Options)
def scan(
    x: Any,
    backend: Group = None,
    op: Op = ReduceOp.SUM,
    *,
    out: Any = None,
    async_op: bool = False,
    **options: Unpack[InPlaceOptions],
) -> Any:
    """Combine the arrays of the ranks up to this one: rank r gets x_0 ∘ x_1 ∘ ... ∘ x_r.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> run_ranks(4, lambda b: ferrodist.scan(b.rank + 1, b))
        [1, 3, 6, 10]
    """
    done = (fast_start if async_op else fast_path)(SCAN, backend, x, out, op, -1, options)
    if done is not NotImplemented:
        return done
    request = Request(Kind.SCAN, backend, options, is_async=async_op, op=op)
    return execute(request, x, out)


@overload
def exscan(
    x: T, backend: Group = None, op: Op = ..., *, async_op: Yes, **rest: Unpack[Options]
) -> Work[T | None]: ...
@overload
def exscan(
    x: T, backend: Group = None, op: Op = ..., *, async_op: No = ..., **rest: Unpack[Options]
) -> T | None: ...
@public(Options)
def exscan(
    x: Any,
    backend: Group = None,
    op: Op = ReduceOp.SUM,
    *,
    out: Any = None,
    async_op: bool = False,
    **options: Unpack[InPlaceOptions],
) -> Any:
    """Combine the arrays of the ranks below this one; rank 0 gets None.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> run_ranks(4, lambda b: ferrodist.exscan(b.rank + 1, b))
        [None, 1, 3, 6]
    """
    done = (fast_start if async_op else fast_path)(EXSCAN, backend, x, out, op, -1, options)
    if done is not NotImplemented:
        return done
    request = Request(Kind.EXSCAN, backend, options, is_async=async_op, op=op)
    return execute(request, x, out)


@overload
def all_to_all(
    x: T, backend: Group = None, *, async_op: Yes, **rest: Unpack[Options]
) -> Work[T]: ...
@overload
def all_to_all(
    x: T, backend: Group = None, *, async_op: No = ..., **rest: Unpack[Options]
) -> T: ...
@public(Options)
def all_to_all(
    x: Any,
    backend: Group = None,
    *,
    out: Any = None,
    async_op: bool = False,
    **options: Unpack[InPlaceOptions],
) -> Any:
    """Send part i of ``x`` to rank i and join what the others sent here, in rank order.

    Example:
        >>> import numpy as np, ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> run_ranks(2, lambda b: ferrodist.all_to_all(np.arange(2) + 10 * b.rank, b))
        [array([ 0, 10]), array([ 1, 11])]
    """
    done = (fast_start if async_op else fast_path)(ALL_TO_ALL, backend, x, out, None, -1, options)
    if done is not NotImplemented:
        return done
    request = Request(Kind.ALL_TO_ALL, backend, options, is_async=async_op)
    return execute(request, x, out)


@public()
def barrier(
    backend: Group = None,
    *,
    timeout: Timeout = DEFAULT,
    async_op: bool = False,
    **mistaken: Any,
) -> Any:
    """Return when every rank has called it; with ``async_op`` a Work that is over by then.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> run_ranks(2, ferrodist.barrier)
        [None, None]
    """
    if mistaken:
        check_keywords("barrier", mistaken)
    options = None if timeout is DEFAULT else {"timeout": timeout}
    done = (fast_start if async_op else fast_path)(BARRIER, backend, None, None, None, -1, options)
    if done is not NotImplemented:
        return done
    options = options or {}
    return execute_barrier(Request(Kind.BARRIER, backend, options, is_async=async_op))
