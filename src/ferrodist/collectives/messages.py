# SPDX-License-Identifier: MIT OR Apache-2.0
"""Point to point: send, recv and sendrecv, with tags to keep conversations apart."""

from __future__ import annotations

import operator
from typing import Any, overload

from ferrodist.arrays import (
    OutputArray,
    OverlapKind,
    as_input,
    as_output,
    new_result,
    overlap,
    type_name,
)
from ferrodist.backends.base import Backend
from ferrodist.backends.registry import current_backend
from ferrodist.call import MAX_TAG
from ferrodist.collectives.methods import hide_mistaken, refuse_keyword
from ferrodist.collectives.plan import Group, No, Yes, open_backend, open_deadline
from ferrodist.config import DEFAULT, Timeout
from ferrodist.errors import InvalidArgument, SelfSend
from ferrodist.work import Work


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
@hide_mistaken
def send(
    x: Any,
    dst: int,
    backend: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = DEFAULT,
    async_op: bool = False,
    **mistaken: Any,
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
        ...     return ferrodist.recv(0, backend)
        >>> run_ranks(2, pass_on)
        [None, array([0, 1, 2])]
    """
    if mistaken:
        raise refuse_keyword("send", mistaken)
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
    _refuse_backend(dst, "send(x, dst, backend)")
    backend = open_backend(backend, "send")
    peer = _check_peer(backend, dst, "send")
    deadline = open_deadline(backend, timeout)
    source = as_input(x, "send: x")
    start = backend._start_send if async_op else backend._send
    return start(source, peer, _check_tag(tag), deadline)


@overload
def recv(
    src: int,
    backend: Group = None,
    *,
    out: Any = ...,
    like: Any = ...,
    tag: int = ...,
    timeout: Timeout = ...,
    async_op: Yes,
) -> Work[Any]: ...
@overload
def recv(
    src: int,
    backend: Group = None,
    *,
    out: Any = ...,
    like: Any = ...,
    tag: int = ...,
    timeout: Timeout = ...,
    async_op: No = ...,
) -> Any: ...
@hide_mistaken
def recv(
    src: int,
    backend: Group = None,
    *extra: Any,
    out: Any = None,
    like: Any = None,
    tag: int = 0,
    timeout: Timeout = DEFAULT,
    async_op: bool = False,
    **mistaken: Any,
) -> Any:
    """Receive the next message of rank ``src`` with this tag and return what was sent.

    It has the dtype and shape of what was sent, and its kind where that library is imported here;
    else it is a NumPy array. ``out`` is filled and returned instead. ``like`` gives the dtype and
    shape that must come, and the kind of the result. A message that does not fit ``out`` or
    ``like`` raises SizeMismatch here, is dropped, and harms nobody else.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def pass_on(backend):
        ...     if backend.rank == 0:
        ...         return ferrodist.send(2.5, 1, backend)
        ...     return ferrodist.recv(0, backend)
        >>> run_ranks(2, pass_on)
        [None, 2.5]
    """
    if mistaken:
        raise refuse_keyword("recv", mistaken)
    if timeout is DEFAULT and not extra:
        group = current_backend() if backend is None else backend
        fast = getattr(group, "_fast_irecv" if async_op else "_fast_recv", None)
        done = NotImplemented if fast is None else fast(group, src, out, like, tag)
        if done is not NotImplemented:
            return done
    _refuse_backend(src, "recv(src, backend)")
    _refuse_array(src, "recv(src) returns what was sent, recv(src, out=x) fills x")
    if extra:
        raise TypeError(f"recv() takes src and backend by position, got {2 + len(extra)}")
    backend = open_backend(backend, "recv")
    peer = _check_peer(backend, src, "recv")
    deadline = open_deadline(backend, timeout)
    target = _target(out, like, "recv")
    start = backend._start_recv if async_op else backend._recv
    return start(target, peer, _check_tag(tag), deadline)


@hide_mistaken
def sendrecv(
    x: Any,
    dst: int,
    src: int,
    backend: Group = None,
    *,
    out: Any = None,
    like: Any = None,
    tag: int = 0,
    timeout: Timeout = DEFAULT,
    **mistaken: Any,
) -> Any:
    """Send ``x`` to ``dst`` and receive from ``src`` at once: a ring of these never deadlocks.

    Returns what was received, as ``recv`` does. ``out`` may be ``x``.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def shift(backend):
        ...     right, left = (backend.rank + 1) % 3, (backend.rank - 1) % 3
        ...     return ferrodist.sendrecv(backend.rank, right, left, backend)
        >>> run_ranks(3, shift)
        [2, 0, 1]
    """
    if mistaken:
        raise refuse_keyword("sendrecv", mistaken)
    if timeout is DEFAULT:
        group = current_backend() if backend is None else backend
        fast = getattr(group, "_fast_sendrecv", None)
        done = NotImplemented if fast is None else fast(group, x, dst, src, out, like, tag)
        if done is not NotImplemented:
            return done
    _refuse_backend(dst, "sendrecv(x, dst, src, backend)")
    _refuse_array(src, "sendrecv(x, dst, src, out=y) fills y")
    backend = open_backend(backend, "sendrecv")
    to, peer = _check_peer(backend, dst, "sendrecv"), _check_peer(backend, src, "sendrecv")
    deadline = open_deadline(backend, timeout)
    source = as_input(x, "sendrecv: x")
    target = _target(out, like, "sendrecv")
    if target is not None and overlap(source, target).kind is not OverlapKind.NONE:
        source = source._replace(buffer=source.buffer.copy())  # what comes may come first
    return backend._sendrecv(source, to, target, peer, _check_tag(tag), deadline)


def _refuse_backend(peer: Any, form: str) -> None:
    """Answer those who pass the backend before the rank."""
    if isinstance(peer, Backend):
        raise InvalidArgument(f"the rank comes before the backend: {form}", got=type_name(peer))


def _refuse_array(src: Any, advice: str) -> None:
    """Answer those who pass the array to be filled where the rank belongs, as in MPI and torch."""
    if hasattr(src, "dtype") and getattr(src, "shape", ()) != ():
        raise InvalidArgument(
            f"src is a rank, got a {type_name(src)}; {advice}", got=type_name(src)
        )


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


def _target(out: Any, like: Any, what: str) -> OutputArray | None:
    """Make room for what must come; None if it may be anything."""
    if like is not None:
        wanted = as_input(like, f"{what}: like")
        form = wanted.buffer.dtype, wanted.buffer.shape
        return new_result(wanted, form[1]) if out is None else as_output(out, *form)
    if out is None:
        return None
    buffer = as_input(out, f"{what}: out").buffer
    return as_output(out, buffer.dtype, buffer.shape)
