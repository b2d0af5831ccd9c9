# SPDX-License-Identifier: MIT OR Apache-2.0
"""Point to point: send, recv and sendrecv, with tags to keep conversations apart."""

from __future__ import annotations

import operator
from typing import Any, TypeVar, overload

from ferrodist.arrays import OutputArray, as_input, as_output, new_result
from ferrodist.backends.base import Backend
from ferrodist.backends.registry import current_backend
from ferrodist.call import MAX_TAG
from ferrodist.collectives.plan import Group, No, Yes, open_backend, open_deadline
from ferrodist.config import DEFAULT, Timeout
from ferrodist.errors import InvalidArgument, SelfSend
from ferrodist.work import Work

T = TypeVar("T")


@overload
def send(
    x: Any,
    dst: int,
    backend: Group = None,
    *,
    tag: int = ...,
    timeout: Timeout = ...,
    async_op: Yes,
) -> Work[None]: ...
@overload
def send(
    x: Any,
    dst: int,
    backend: Group = None,
    *,
    tag: int = ...,
    timeout: Timeout = ...,
    async_op: No = ...,
) -> None: ...
def send(
    x: Any,
    dst: int,
    backend: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = DEFAULT,
    async_op: bool = False,
) -> Work[None] | None:
    """Send an array to rank ``dst``; returns when ``x`` may change.

    Up to 64 KB it does not wait for the receiver, beyond that it may. Messages between two ranks
    with one tag stay in order.

    Example:
        >>> import numpy as np, ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def pass_on(backend):
        ...     if backend.rank == 0:
        ...         return ferrodist.send(np.arange(3), 1, backend)
        ...     return ferrodist.recv(np.empty(3, int), 0, backend)
        >>> run_ranks(2, pass_on)
        [None, array([0, 1, 2])]
    """
    if timeout is DEFAULT:
        group = current_backend() if backend is None else backend
        if async_op:
            start = getattr(group, "_fast_isend", None)
            work = NotImplemented if start is None else start(group, x, dst, tag)
            if work is not NotImplemented:
                return work  # type: ignore[no-any-return] # it comes from native code
        else:
            fast = getattr(group, "_fast_send", None)
            if fast is not None and fast(group, x, dst, tag) is None:
                return None
    backend = open_backend(backend, "send")
    peer = _check_peer(backend, dst, "send")
    deadline = open_deadline(backend, timeout)
    source = as_input(x, "send: x").buffer
    start = backend._start_send if async_op else backend._send
    return start(source, peer, _check_tag(tag), deadline)


@overload
def recv(
    like: T,
    src: int,
    backend: Group = None,
    *,
    out: Any = ...,
    tag: int = ...,
    timeout: Timeout = ...,
    async_op: Yes,
) -> Work[T]: ...
@overload
def recv(
    like: T,
    src: int,
    backend: Group = None,
    *,
    out: Any = ...,
    tag: int = ...,
    timeout: Timeout = ...,
    async_op: No = ...,
) -> T: ...
def recv(
    like: Any,
    src: int,
    backend: Group = None,
    *,
    out: Any = None,
    tag: int = 0,
    timeout: Timeout = DEFAULT,
    async_op: bool = False,
) -> Any:
    """Receive the next message of rank ``src`` with this tag.

    ``like`` gives kind, dtype and shape and is not written. A message of another dtype or shape
    raises SizeMismatch here, is dropped, and harms nobody else.
    """
    if timeout is DEFAULT:
        group = current_backend() if backend is None else backend
        fast = getattr(group, "_fast_irecv" if async_op else "_fast_recv", None)
        done = NotImplemented if fast is None else fast(group, like, src, out, tag)
        if done is not NotImplemented:
            return done
    backend = open_backend(backend, "recv")
    peer = _check_peer(backend, src, "recv")
    deadline = open_deadline(backend, timeout)
    result = _room_like(like, out)
    tag = _check_tag(tag)
    if async_op:
        return backend._start_recv(result.buffer, peer, tag, deadline, result.finish)
    backend._recv(result.buffer, peer, tag, deadline)
    return result.finish()


def sendrecv(
    x: Any,
    dst: int,
    like: T,
    src: int,
    backend: Group = None,
    *,
    out: Any = None,
    tag: int = 0,
    timeout: Timeout = DEFAULT,
) -> T:
    """Send ``x`` to ``dst`` and receive from ``src`` at once: a ring of these never deadlocks.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def shift(backend):
        ...     right, left = (backend.rank + 1) % 3, (backend.rank - 1) % 3
        ...     return ferrodist.sendrecv(backend.rank, right, 0, left, backend)
        >>> run_ranks(3, shift)
        [2, 0, 1]
    """
    if timeout is DEFAULT:
        group = current_backend() if backend is None else backend
        fast = getattr(group, "_fast_sendrecv", None)
        done = NotImplemented if fast is None else fast(group, x, dst, like, src, out, tag)
        if done is not NotImplemented:
            return done  # type: ignore[no-any-return] # it comes from native code
    backend = open_backend(backend, "sendrecv")
    to, peer = _check_peer(backend, dst, "sendrecv"), _check_peer(backend, src, "sendrecv")
    deadline = open_deadline(backend, timeout)
    source = as_input(x, "sendrecv: x").buffer
    result = _room_like(like, out)
    backend._sendrecv(source, to, result.buffer, peer, _check_tag(tag), deadline)
    answer: T = result.finish()
    return answer


def _check_peer(backend: Backend, peer: int, what: str) -> int:
    peer = backend._check_rank(peer, f"{what}: peer")
    if peer == backend.rank:
        raise SelfSend(f"{what}: rank {peer} is this rank itself", rank=peer, this_rank=peer)
    return peer


def _check_tag(tag: int) -> int:
    try:
        number = -1 if isinstance(tag, bool) else operator.index(tag)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_TAG:
        raise InvalidArgument(f"tag must be an integer from 0 to {MAX_TAG}, got {tag!r}", got=tag)
    return number


def _room_like(like: Any, out: Any) -> OutputArray:
    taken = as_input(like, "recv: like")
    if out is None:
        return new_result(taken, taken.buffer.shape)
    return as_output(out, taken.buffer.dtype, taken.buffer.shape)
