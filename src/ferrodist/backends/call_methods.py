# SPDX-License-Identifier: MIT OR Apache-2.0
"""The public calls as methods of a backend, as type checkers and editors see them.

``collectives/`` attaches the methods themselves, with signatures and docstrings of the functions:
this package knows nothing of it. ``backend.allreduce(x)`` is ``ferrodist.allreduce(x, backend)``.
"""

# mypy: disable-error-code="no-overload-impl"
# The overloads have none here: collectives/ attaches what runs.

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, overload

from ferrodist.backends.running_call import Algorithm
from ferrodist.config import Timeout
from ferrodist.message_status import Special, Status
from ferrodist.reduce_op import CustomOp, ReduceOp

if TYPE_CHECKING:
    from ferrodist.work import Work

T = TypeVar("T")
Yes = Literal[True]
No = Literal[False]
Op = ReduceOp | CustomOp | str
Peer = int | Special
Tag = int | Special
Counts = Sequence[int]


class InPlaceOptions(TypedDict, total=False):
    """The keyword arguments of collectives that write into ``x``, for their typed signatures."""

    timeout: Timeout
    algorithm: Algorithm
    reproducible: bool | None


class Options(InPlaceOptions, total=False):
    """The keyword arguments that most collectives share, for their typed signatures."""

    out: Any


class AllOptions(Options, total=False):
    """The same, and ``async_op``, where the result type does not depend on it."""

    async_op: bool


class ObjectOptions(TypedDict, total=False):
    """The keyword arguments of collectives of objects."""

    pickle: bool | None
    timeout: Timeout
    async_op: bool


class SendOptions(TypedDict, total=False):
    """The keyword arguments of ``send`` on which its result type does not depend."""

    tag: int
    timeout: Timeout


class RecvOptions(TypedDict, total=False):
    """The keyword arguments of ``recv`` on which its result type does not depend."""

    out: Any
    like: Any
    tag: Tag
    timeout: Timeout


class SendrecvOptions(TypedDict, total=False):
    """The keyword arguments of ``sendrecv``."""

    out: Any
    like: Any
    tag: int
    recv_tag: Tag | None
    with_status: bool
    timeout: Timeout
    async_op: bool


class CallMethods:
    """Every collective and point-to-point call, with this backend as the group."""

    if TYPE_CHECKING:
        # fmt: off
        @overload
        def allreduce(
            self, x: T, op: Op = ..., *, async_op: Yes, **options: Unpack[Options]
        ) -> Work[T]: ...
        @overload
        def allreduce(
            self, x: T, op: Op = ..., *, async_op: No = ..., **options: Unpack[Options]
        ) -> T: ...
        @overload
        def allreduce_(
            self, x: T, op: Op = ..., *, async_op: Yes, **options: Unpack[InPlaceOptions]
        ) -> Work[T]: ...
        @overload
        def allreduce_(
            self, x: T, op: Op = ..., *, async_op: No = ..., **options: Unpack[InPlaceOptions]
        ) -> T: ...
        @overload
        def broadcast(
            self, x: T, root: int = ..., *, async_op: Yes, **options: Unpack[Options]
        ) -> Work[T]: ...
        @overload
        def broadcast(
            self, x: T, root: int = ..., *, async_op: No = ..., **options: Unpack[Options]
        ) -> T: ...
        @overload
        def broadcast_(
            self, x: T, root: int = ..., *, async_op: Yes, **options: Unpack[InPlaceOptions]
        ) -> Work[T]: ...
        @overload
        def broadcast_(
            self, x: T, root: int = ..., *, async_op: No = ..., **options: Unpack[InPlaceOptions]
        ) -> T: ...
        @overload
        def reduce(
            self, x: T, root: int = ..., op: Op = ..., *, async_op: Yes, **options: Unpack[Options]
        ) -> Work[T | None]: ...
        @overload
        def reduce(
            self, x: T, root: int = ..., op: Op = ..., *, async_op: No = ...,
            **options: Unpack[Options],
        ) -> T | None: ...
        def all_gather(
            self, x: Any, *, as_list: bool = ..., **options: Unpack[AllOptions]
        ) -> Any: ...
        def all_gather_uneven(
            self, x: Any, *, as_list: bool = ..., with_counts: bool = ...,
            **options: Unpack[AllOptions],
        ) -> Any: ...
        def gather(self, x: Any, root: int = ..., **options: Unpack[AllOptions]) -> Any: ...
        def gather_uneven(
            self, x: Any, root: int = ..., *, as_list: bool = ..., with_counts: bool = ...,
            **options: Unpack[AllOptions],
        ) -> Any: ...
        def scatter(self, x: Any, root: int = ..., **options: Unpack[AllOptions]) -> Any: ...
        def scatter_uneven(
            self, x: Any, counts: Counts | None, root: int = ..., **options: Unpack[AllOptions]
        ) -> Any: ...
        @overload
        def reduce_scatter(
            self, x: T, op: Op = ..., *, async_op: Yes, **options: Unpack[Options]
        ) -> Work[T]: ...
        @overload
        def reduce_scatter(
            self, x: T, op: Op = ..., *, async_op: No = ..., **options: Unpack[Options]
        ) -> T: ...
        def reduce_scatter_uneven(
            self, x: Any, counts: Counts, op: Op = ..., **options: Unpack[AllOptions]
        ) -> Any: ...
        @overload
        def scan(
            self, x: T, op: Op = ..., *, async_op: Yes, **options: Unpack[Options]
        ) -> Work[T]: ...
        @overload
        def scan(
            self, x: T, op: Op = ..., *, async_op: No = ..., **options: Unpack[Options]
        ) -> T: ...
        @overload
        def exscan(
            self, x: T, op: Op = ..., *, async_op: Yes, **options: Unpack[Options]
        ) -> Work[T | None]: ...
        @overload
        def exscan(
            self, x: T, op: Op = ..., *, async_op: No = ..., **options: Unpack[Options]
        ) -> T | None: ...
        @overload
        def all_to_all(
            self, x: T, *, async_op: Yes, **options: Unpack[Options]
        ) -> Work[T]: ...
        @overload
        def all_to_all(
            self, x: T, *, async_op: No = ..., **options: Unpack[Options]
        ) -> T: ...
        def all_to_all_uneven(
            self, x: Any, send_counts: Counts, *, recv_counts: Counts | None = ...,
            as_list: bool = ..., **options: Unpack[AllOptions],
        ) -> Any: ...
        def barrier(self, *, timeout: Timeout = ..., async_op: bool = ...) -> Any: ...

        def send(
            self, x: Any, dst: Peer, *, async_op: bool = ..., **options: Unpack[SendOptions]
        ) -> Any: ...
        def recv(
            self, src: Peer = ..., *, with_status: bool = ..., async_op: bool = ...,
            **options: Unpack[RecvOptions],
        ) -> Any: ...
        def sendrecv(
            self, x: Any, dst: Peer, src: Peer, **options: Unpack[SendrecvOptions]
        ) -> Any: ...
        def probe(self, src: Peer = ..., *, tag: Tag = ..., timeout: Timeout = ...) -> Status: ...
        def try_probe(self, src: Peer = ..., *, tag: Tag = ...) -> Status | None: ...
        def send_object(
            self, obj: Any, dst: Peer, *, tag: int = ..., **options: Unpack[ObjectOptions]
        ) -> Any: ...
        def recv_object(
            self, src: Peer = ..., *, tag: Tag = ..., with_status: bool = ...,
            **options: Unpack[ObjectOptions],
        ) -> Any: ...

        def broadcast_object(
            self, value: Any, root: int = ..., **options: Unpack[ObjectOptions]
        ) -> Any: ...
        def all_gather_object(self, value: Any, **options: Unpack[ObjectOptions]) -> Any: ...
        def gather_object(
            self, value: Any, root: int = ..., **options: Unpack[ObjectOptions]
        ) -> Any: ...
        def scatter_object(
            self, values: Sequence[Any] | None, root: int = ..., **options: Unpack[ObjectOptions]
        ) -> Any: ...
        # fmt: on
