# SPDX-License-Identifier: MIT OR Apache-2.0
"""Point to point: send, recv, sendrecv and probe, of arrays and objects.

Messages between two ranks with one tag stay in order, whichever of these calls, blocking or not,
from any source or with any tag, receives them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, Unpack, overload

import numpy as np

from ferrodist.arrays import (
    InputArray,
    OutputArray,
    OverlapKind,
    as_input,
    as_output,
    as_output_of_its_form,
    is_writable_in_part,
    new_result,
    overlap,
    type_name,
)
from ferrodist.backends.base import Backend
from ferrodist.backends.call_methods import No, Peer, RecvOptions, SendOptions, Tag, Yes
from ferrodist.backends.receive import ANY, Receive
from ferrodist.backends.registry import current_backend
from ferrodist.buffer import ArrayKind
from ferrodist.call import MAX_TAG, as_index
from ferrodist.collectives.request import Group, check_keywords, open_backend, public
from ferrodist.config import DEFAULT, Timeout
from ferrodist.errors import InvalidArgument, ProtocolError, SelfSend, UnsupportedArray
from ferrodist.message_status import (
    ANY_SOURCE,
    ANY_TAG,
    NO_MESSAGE,
    PROC_NULL,
    Special,
    Status,
)
from ferrodist.work import Work


@overload
def send(
    x: Any, dst: Peer, backend: Group = None, *, async_op: Yes, **rest: Unpack[SendOptions]
) -> Work[None]: ...
@overload
def send(
    x: Any, dst: Peer, backend: Group = None, *, async_op: No = ..., **rest: Unpack[SendOptions]
) -> None: ...
@public()
def send(
    x: Any,
    dst: Peer,
    backend: Group = None,
    *,
    tag: int = 0,
    timeout: Timeout = DEFAULT,
    async_op: bool = False,
    **mistaken: Any,
) -> Work[None] | None:
    """Send an array to rank ``dst``; returns when ``x`` may change.

    Up to 64 KB it does not wait for the receiver, beyond that it may. Messages between two ranks
    with one tag stay in order. With ``async_op=True`` a rank may send to itself. To ``PROC_NULL``
    nothing is sent.

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
    if not mistaken:
        group = current_backend() if backend is None else backend
        if async_op:
            start = getattr(group, "_fast_isend", None)
            work = NotImplemented if start is None else start(group, x, dst, tag, timeout)
            if work is not NotImplemented:
                return work  # type: ignore[no-any-return] # it comes from native code
        else:
            fast = getattr(group, "_fast_send", None)
            if fast is not None and fast(group, x, dst, tag, timeout) is None:
                return None
    backend = _open("send", backend, dst, mistaken)
    peer = _check_destination(backend, dst, "send", async_op=async_op)
    deadline = backend._deadline(timeout)
    return _send(backend, as_input(x, "send: x"), peer, _check_tag(tag), deadline, async_op)


def _send(
    backend: Backend, source: InputArray, peer: int | None, tag: int, deadline: Any, async_op: bool
) -> Work[None] | None:
    if peer is None:
        return _done(None) if async_op else None
    start = backend._start_send if async_op else backend._send
    return start(source, peer, tag, deadline)


def _done(result: Any) -> Work[Any]:
    """Make the Work of a call that had nothing to do."""
    work: Work[Any] = Work("a call with PROC_NULL")
    work.set_result(result)
    return work


@overload
def recv(
    src: Peer = ...,
    backend: Group = None,
    *,
    with_status: No = ...,
    async_op: Yes,
    **rest: Unpack[RecvOptions],
) -> Work[Any]: ...
@overload
def recv(
    src: Peer = ...,
    backend: Group = None,
    *,
    with_status: Yes,
    async_op: Yes,
    **rest: Unpack[RecvOptions],
) -> Work[tuple[Any, Status]]: ...
@overload
def recv(
    src: Peer = ...,
    backend: Group = None,
    *,
    with_status: Yes,
    async_op: No = ...,
    **rest: Unpack[RecvOptions],
) -> tuple[Any, Status]: ...
@overload
def recv(
    src: Peer = ...,
    backend: Group = None,
    *,
    with_status: bool = ...,
    async_op: bool = ...,
    **rest: Unpack[RecvOptions],
) -> Any: ...
@public()
def recv(
    src: Peer = ANY_SOURCE,
    backend: Group = None,
    *extra: Any,
    out: Any = None,
    like: Any = None,
    tag: Tag = 0,
    with_status: bool = False,
    timeout: Timeout = DEFAULT,
    async_op: bool = False,
    **mistaken: Any,
) -> Any:
    """Receive the next message of rank ``src``, or of any, with this tag; return what was sent.

    It has the dtype and shape of what was sent, and its kind where that library is imported here;
    else it is a NumPy array. ``out`` is filled and returned instead. ``like`` gives the dtype and
    shape that must come, and the kind of the result. A message that does not fit ``out`` or
    ``like`` raises SizeMismatch here, is dropped, and harms nobody else.

    ``with_status=True`` returns the array and a ``Status``; then a message may have fewer rows than
    ``out``, and the rows that came are returned. ``tag`` may be ``ANY_TAG``. From ``PROC_NULL``
    comes ``out`` as it is, or None.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def pass_on(backend):
        ...     if backend.rank == 0:
        ...         return ferrodist.send(2.5, 1, backend, tag=3)
        ...     return backend.recv(ferrodist.ANY_SOURCE, tag=3, with_status=True)
        >>> run_ranks(2, pass_on)
        [None, (2.5, Status(source=0, tag=3, dtype='float64', shape=()))]
    """
    if not extra and not mistaken:
        group = current_backend() if backend is None else backend
        fast = getattr(group, "_fast_irecv" if async_op else "_fast_recv", None)
        if fast is not None:
            done = fast(group, src, out, like, tag, with_status, timeout)
            if done is not NotImplemented:
                return done
    _refuse_array(src, "recv(src) returns what was sent, recv(src, out=x) fills x")
    if extra:
        raise TypeError(f"recv() takes src and backend by position, got {2 + len(extra)}")
    backend = _open("recv", backend, src, mistaken)
    peer = _check_source(backend, src, "recv")
    deadline = backend._deadline(timeout)
    number, target = _check_recv_tag(tag), _target(out, like, "recv")
    if peer is None:
        nothing = (out, NO_MESSAGE) if with_status else out
        return _done(nothing) if async_op else nothing
    takes_shorter = with_status and out is not None and is_writable_in_part(target)
    receive = Receive(peer, number, target, None, bool(with_status), takes_shorter)
    start = backend._start_recv if async_op else backend._recv
    return start(receive, deadline)


@public()
def sendrecv(
    x: Any,
    dst: Peer,
    src: Peer,
    backend: Group = None,
    *,
    out: Any = None,
    like: Any = None,
    tag: int = 0,
    recv_tag: Tag | None = None,
    with_status: bool = False,
    timeout: Timeout = DEFAULT,
    async_op: bool = False,
    **mistaken: Any,
) -> Any:
    """Send ``x`` to ``dst`` and receive from ``src`` at once: a ring of these never deadlocks.

    Returns what was received, as ``recv`` does: ``out`` is filled, and may be ``x``; ``like`` gives
    the dtype and shape that must come; ``with_status=True`` adds a ``Status``.
    What is received has the tag ``recv_tag``, or ``tag`` if that is not given. Either rank may be
    this one itself, or ``PROC_NULL``: then that half is left out.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def shift(backend):
        ...     right, left = (backend.rank + 1) % 3, (backend.rank - 1) % 3
        ...     return ferrodist.sendrecv(backend.rank, right, left, backend)
        >>> run_ranks(3, shift)
        [2, 0, 1]
    """
    if not (mistaken or with_status):
        group = current_backend() if backend is None else backend
        fast = getattr(group, "_fast_isendrecv" if async_op else "_fast_sendrecv", None)
        if fast is not None:
            done = fast(group, x, dst, src, out, like, tag, recv_tag, timeout)
            if done is not NotImplemented:
                return done
    _refuse_array(src, "sendrecv(x, dst, src, out=y) fills y")
    backend = _open("sendrecv", backend, dst, mistaken)
    to = _check_destination(backend, dst, "sendrecv", async_op=True)
    peer = _check_source(backend, src, "sendrecv")
    deadline = backend._deadline(timeout)
    source, number = as_input(x, "sendrecv: x"), _check_tag(tag)
    received = number if recv_tag is None else _check_recv_tag(recv_tag)
    target = _target(out, like, "sendrecv")
    if peer is None:
        nothing = (out, NO_MESSAGE) if with_status else out
        return _send_alone(backend, source, to, number, deadline, async_op, nothing)
    takes_shorter = with_status and out is not None and is_writable_in_part(target)
    receive = Receive(peer, received, target, None, bool(with_status), takes_shorter)
    if to is None:
        return (backend._start_recv if async_op else backend._recv)(receive, deadline)
    if target is not None and overlap(source, target).kind is not OverlapKind.NONE:
        source = source._replace(buffer=source.buffer.copy())  # what comes may come first
    start = backend._start_sendrecv if async_op else backend._sendrecv
    return start(source, to, number, receive, deadline)


def _send_alone(
    backend: Backend,
    source: InputArray,
    to: int | None,
    tag: int,
    deadline: Any,
    async_op: bool,
    nothing: Any,
) -> Any:
    """Send what sendrecv sends where nothing is received; ``nothing`` is what it returns."""
    if to == backend.rank and not async_op:
        text = "sendrecv: what this rank sends to itself is not received in this call"
        raise SelfSend(text, rank=to, this_rank=to)
    sending = _send(backend, source, to, tag, deadline, async_op)
    if not async_op or nothing is None:
        return sending if async_op else nothing
    assert sending is not None
    work: Work[Any] = Work(sending.describe)

    def finish(sent: Any) -> None:
        error = sent.exception()
        work.set_result(nothing) if error is None else work.set_exception(error)

    sending.add_done_callback(finish)
    return work


@public()
def probe(
    src: Peer = ANY_SOURCE,
    backend: Group = None,
    *,
    tag: Tag = ANY_TAG,
    timeout: Timeout = DEFAULT,
    **mistaken: Any,
) -> Status:
    """Wait for a message and tell what it is; it stays for ``recv`` or ``recv_object``.

    Example:
        >>> import numpy as np, ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def pass_on(backend):
        ...     if backend.rank == 0:
        ...         return backend.send(np.ones((2, 3)), 1, tag=7)
        ...     status = ferrodist.probe(backend=backend)
        ...     out = np.empty(status.shape, status.dtype)
        ...     return backend.recv(status.source, out=out, tag=status.tag).shape
        >>> run_ranks(2, pass_on)
        [None, (2, 3)]
    """
    backend = _open("probe", backend, src, mistaken)
    peer, number = _check_source(backend, src, "probe"), _check_recv_tag(tag)
    deadline = backend._deadline(timeout)
    return NO_MESSAGE if peer is None else backend._probe(peer, number, deadline)


@public()
def try_probe(
    src: Peer = ANY_SOURCE, backend: Group = None, *, tag: Tag = ANY_TAG, **mistaken: Any
) -> Status | None:
    """Tell what ``recv`` would get now, None if nothing is there; never waits.

    Raises RankLost if nothing can come any more.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def look(backend):
        ...     before = ferrodist.try_probe(backend.rank, backend)
        ...     backend.send(1.5, backend.rank, tag=2, async_op=True)  # to itself
        ...     return before, ferrodist.try_probe(backend.rank, backend)
        >>> run_ranks(1, look)
        [(None, Status(source=0, tag=2, dtype='float64', shape=()))]
    """
    backend = _open("try_probe", backend, src, mistaken)
    peer, number = _check_source(backend, src, "try_probe"), _check_recv_tag(tag)
    return NO_MESSAGE if peer is None else backend._try_probe(peer, number)


# -- objects ---------------------------------------------------------------------------------------


@public()
def send_object(
    obj: Any,
    dst: Peer,
    backend: Group = None,
    *,
    tag: int = 0,
    pickle: bool | None = None,
    timeout: Timeout = DEFAULT,
    async_op: bool = False,
    **mistaken: Any,
) -> Any:
    """Send a Python object to rank ``dst``, which takes it with ``recv_object``.

    Which objects travel is as for ``broadcast_object``; ``pickle=True`` sends any other.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def pass_on(backend):
        ...     if backend.rank == 0:
        ...         return ferrodist.send_object({"lr": 0.1}, 1, backend)
        ...     return ferrodist.recv_object(0, backend)
        >>> run_ranks(2, pass_on)
        [None, {'lr': 0.1}]
    """
    from ferrodist.collectives.codec import encode  # imports a dozen types that it knows

    backend = _open("send_object", backend, dst, mistaken)
    peer = _check_destination(backend, dst, "send_object", async_op=async_op)
    number, deadline = _check_tag(tag), backend._deadline(timeout)
    use_pickle = backend._pickle if pickle is None else bool(pickle)
    data = np.frombuffer(encode(obj, use_pickle, "the object"), np.uint8)
    kind = ArrayKind.PICKLE if use_pickle else ArrayKind.OBJECT
    source = as_input(data, "send_object: obj")._replace(kind=kind)
    return _send(backend, source, peer, number, deadline, async_op)


@public()
def recv_object(
    src: Peer = ANY_SOURCE,
    backend: Group = None,
    *,
    tag: Tag = 0,
    pickle: bool | None = None,
    with_status: bool = False,
    timeout: Timeout = DEFAULT,
    async_op: bool = False,
    **mistaken: Any,
) -> Any:
    """Receive the next object of rank ``src``, or of any, with this tag.

    What was sent with ``pickle=True`` is only read with ``pickle=True``, or after
    ``init(pickle=True)``: unpickling runs code of the sender's choice.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> def pass_on(backend):
        ...     if backend.rank == 0:
        ...         return backend.send_object(["a", 1], 1)
        ...     return ferrodist.recv_object(backend=backend, with_status=True)
        >>> run_ranks(2, pass_on)
        [None, (['a', 1], Status(source=0, tag=0, dtype='object', shape=(4,)))]
    """
    backend = _open("recv_object", backend, src, mistaken)
    peer, number = _check_source(backend, src, "recv_object"), _check_recv_tag(tag)
    deadline = backend._deadline(timeout)
    if peer is None:
        nothing = (None, NO_MESSAGE) if with_status else None
        return _done(nothing) if async_op else nothing
    use_pickle = backend._pickle if pickle is None else bool(pickle)
    read = partial(_decode, may_unpickle=use_pickle, this_rank=backend.rank)
    receive = Receive(peer, number, None, read, bool(with_status))
    start = backend._start_recv if async_op else backend._recv
    return start(receive, deadline)


def _decode(
    data: memoryview, is_pickled: bool, source: int, *, may_unpickle: bool, this_rank: int
) -> Any:
    from ferrodist.collectives.codec import decode

    if is_pickled and not may_unpickle:
        raise InvalidArgument(
            f"recv_object: rank {source} sent a pickled object, which was dropped; unpickling runs "
            "code of the sender's choice, so this rank must say pickle=True, too",
            rank=source,
            this_rank=this_rank,
        )
    try:
        return decode(data, is_pickled)
    except ProtocolError as error:
        text = f"recv_object: of rank {source}: {error}"
        raise ProtocolError(text, rank=source, this_rank=this_rank) from error


# -- checks ----------------------------------------------------------------------------------------


def _open(what: str, backend: Group, peer: Any, mistaken: Mapping[str, Any]) -> Backend:
    """Return the backend of a call; answer those who pass it before the rank."""
    if mistaken:
        check_keywords(what, mistaken)
    if isinstance(peer, Backend):
        names = inspect.signature(getattr(Backend, what)).parameters.values()
        form = ", ".join(p.name for p in names if p.kind is p.POSITIONAL_OR_KEYWORD)
        form = f"{what}({form.removeprefix('self, ')}, backend)"
        raise InvalidArgument(f"the rank comes before the backend: {form}", got=type_name(peer))
    return open_backend(backend, what)


def _refuse_array(src: Any, advice: str) -> None:
    """Answer those who pass the array to be filled where the rank belongs, as in MPI and torch."""
    if hasattr(src, "dtype") and getattr(src, "shape", ()) != ():
        raise InvalidArgument(
            f"src is a rank, got a {type_name(src)}; {advice}", got=type_name(src)
        )


def _check_destination(backend: Backend, dst: Any, what: str, *, async_op: bool) -> int | None:
    """Return whom to send to; None if that is nobody."""
    if dst is PROC_NULL:
        return None
    _refuse_special(dst, f"{what}: dst", PROC_NULL)
    peer = backend._check_rank(dst, f"{what}: peer")
    if peer == backend.rank and not async_op:
        text = f"{what}: rank {peer} is this rank itself; pass async_op=True, or use sendrecv"
        raise SelfSend(text, rank=peer, this_rank=peer)
    return peer


def _check_source(backend: Backend, src: Any, what: str) -> int | None:
    """Return whom to receive from, or ANY; None if that is nobody."""
    if src is PROC_NULL:
        return None
    if src is ANY_SOURCE:
        return ANY
    _refuse_special(src, f"{what}: src", ANY_SOURCE)
    return backend._check_rank(src, f"{what}: peer")


def _refuse_special(peer: Any, what: str, meant: Special) -> None:
    if isinstance(peer, Special):
        raise InvalidArgument(f"{what} is {peer!r}; pass a rank or {meant!r}", got=repr(peer))


def _check_recv_tag(tag: Any) -> int:
    """Return the tag to receive, or ANY."""
    return ANY if tag is ANY_TAG else _check_tag(tag)


def _check_tag(tag: Any) -> int:
    number = as_index(tag)
    if number is None or not 0 <= number <= MAX_TAG:
        raise InvalidArgument(f"tag must be an integer from 0 to {MAX_TAG}, got {tag!r}", got=tag)
    return number


def _target(out: Any, like: Any, what: str) -> OutputArray | None:
    """Make room for what must come; None if it may be anything."""
    if like is not None:
        wanted = as_input(like, f"{what}: like")
        form = wanted.buffer.dtype, wanted.buffer.shape
        if out is None:
            return new_result(wanted, form[1])
    elif out is None:
        return None
    try:
        return as_output_of_its_form(out) if like is None else as_output(out, *form)
    except (InvalidArgument, UnsupportedArray) as error:
        text = f"{what}: {error}"
        raise type(error)(text, got=error.got, expected=error.expected) from error
