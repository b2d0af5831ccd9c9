# SPDX-License-Identifier: MIT OR Apache-2.0
"""The public calls as methods of a backend, as type checkers and editors see them.

``collectives/`` attaches the methods themselves, with signatures and docstrings of the functions:
this package knows nothing of it. ``backend.allreduce(x)`` is ``ferrodist.allreduce(x, backend)``.
"""

# ruff: noqa: D102 -- the docstrings are those of the functions

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ferrodist.backends.running_call import Algorithm
from ferrodist.config import Timeout
from ferrodist.reduce_op import ReduceOp


class CallMethods:
    """Every collective and point-to-point call, with this backend as the group."""

    if TYPE_CHECKING:

        def allreduce(
            self,
            x: Any,
            op: ReduceOp | str = ...,
            *,
            out: Any = ...,
            timeout: Timeout = ...,
            async_op: bool = ...,
            algorithm: Algorithm = ...,
            reproducible: bool | None = ...,
        ) -> Any: ...

        def allreduce_(
            self,
            x: Any,
            op: ReduceOp | str = ...,
            *,
            timeout: Timeout = ...,
            async_op: bool = ...,
            algorithm: Algorithm = ...,
            reproducible: bool | None = ...,
        ) -> Any: ...

        def broadcast(
            self,
            x: Any,
            root: int = ...,
            *,
            out: Any = ...,
            timeout: Timeout = ...,
            async_op: bool = ...,
            algorithm: Algorithm = ...,
            reproducible: bool | None = ...,
        ) -> Any: ...

        def broadcast_(
            self,
            x: Any,
            root: int = ...,
            *,
            timeout: Timeout = ...,
            async_op: bool = ...,
            algorithm: Algorithm = ...,
            reproducible: bool | None = ...,
        ) -> Any: ...

        def reduce(
            self,
            x: Any,
            root: int = ...,
            op: ReduceOp | str = ...,
            *,
            out: Any = ...,
            timeout: Timeout = ...,
            async_op: bool = ...,
            algorithm: Algorithm = ...,
            reproducible: bool | None = ...,
        ) -> Any: ...

        def all_gather(
            self,
            x: Any,
            *,
            out: Any = ...,
            timeout: Timeout = ...,
            async_op: bool = ...,
            algorithm: Algorithm = ...,
            reproducible: bool | None = ...,
        ) -> Any: ...

        def all_gather_uneven(
            self,
            x: Any,
            *,
            out: Any = ...,
            timeout: Timeout = ...,
            async_op: bool = ...,
            algorithm: Algorithm = ...,
            reproducible: bool | None = ...,
        ) -> Any: ...

        def gather(
            self,
            x: Any,
            root: int = ...,
            *,
            out: Any = ...,
            timeout: Timeout = ...,
            async_op: bool = ...,
            algorithm: Algorithm = ...,
            reproducible: bool | None = ...,
        ) -> Any: ...

        def scatter(
            self,
            x: Any,
            root: int = ...,
            *,
            out: Any = ...,
            timeout: Timeout = ...,
            async_op: bool = ...,
            algorithm: Algorithm = ...,
            reproducible: bool | None = ...,
        ) -> Any: ...

        def reduce_scatter(
            self,
            x: Any,
            op: ReduceOp | str = ...,
            *,
            out: Any = ...,
            timeout: Timeout = ...,
            async_op: bool = ...,
            algorithm: Algorithm = ...,
            reproducible: bool | None = ...,
        ) -> Any: ...

        def scan(
            self,
            x: Any,
            op: ReduceOp | str = ...,
            *,
            out: Any = ...,
            timeout: Timeout = ...,
            async_op: bool = ...,
            algorithm: Algorithm = ...,
            reproducible: bool | None = ...,
        ) -> Any: ...

        def exscan(
            self,
            x: Any,
            op: ReduceOp | str = ...,
            *,
            out: Any = ...,
            timeout: Timeout = ...,
            async_op: bool = ...,
            algorithm: Algorithm = ...,
            reproducible: bool | None = ...,
        ) -> Any: ...

        def all_to_all(
            self,
            x: Any,
            *,
            out: Any = ...,
            timeout: Timeout = ...,
            async_op: bool = ...,
            algorithm: Algorithm = ...,
            reproducible: bool | None = ...,
        ) -> Any: ...

        def all_to_all_uneven(
            self,
            x: Any,
            send_counts: Sequence[int],
            *,
            recv_counts: Sequence[int] | None = ...,
            out: Any = ...,
            timeout: Timeout = ...,
            async_op: bool = ...,
            algorithm: Algorithm = ...,
            reproducible: bool | None = ...,
        ) -> Any: ...

        def barrier(self, *, timeout: Timeout = ...) -> None: ...

        def send(
            self, x: Any, dst: int, *, tag: int = ..., timeout: Timeout = ..., async_op: bool = ...
        ) -> Any: ...

        def recv(
            self,
            src: int,
            *,
            out: Any = ...,
            like: Any = ...,
            tag: int = ...,
            timeout: Timeout = ...,
            async_op: bool = ...,
        ) -> Any: ...

        def sendrecv(
            self,
            x: Any,
            dst: int,
            src: int,
            *,
            out: Any = ...,
            like: Any = ...,
            tag: int = ...,
            timeout: Timeout = ...,
        ) -> Any: ...

        def broadcast_object(
            self,
            value: Any,
            root: int = ...,
            *,
            pickle: bool | None = ...,
            timeout: Timeout = ...,
            async_op: bool = ...,
        ) -> Any: ...

        def all_gather_object(
            self,
            value: Any,
            *,
            pickle: bool | None = ...,
            timeout: Timeout = ...,
            async_op: bool = ...,
        ) -> Any: ...

        def gather_object(
            self,
            value: Any,
            root: int = ...,
            *,
            pickle: bool | None = ...,
            timeout: Timeout = ...,
            async_op: bool = ...,
        ) -> Any: ...

        def scatter_object(
            self,
            values: Sequence[Any] | None,
            root: int = ...,
            *,
            pickle: bool | None = ...,
            timeout: Timeout = ...,
            async_op: bool = ...,
        ) -> Any: ...
