# SPDX-License-Identifier: MIT OR Apache-2.0
"""Collectives of plain Python objects.

None, bool, int of any size, float, complex, str, bytes, list, tuple, dict, set and arrays travel by
msgpack; anything else is refused unless every rank passes ``pickle=True``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ferrodist.backends.running_call import CollectiveArgs, Prepared, RunningCall
from ferrodist.buffer import Buffer, DType
from ferrodist.call import Kind
from ferrodist.collectives.codec import decode, encode
from ferrodist.collectives.request import Group, Request
from ferrodist.collectives.uneven import as_buffer, tell_numbers
from ferrodist.config import DEFAULT, Timeout
from ferrodist.errors import InvalidArgument


def broadcast_object(
    value: Any,
    backend: Group = None,
    root: int = 0,
    *,
    pickle: bool = False,
    timeout: Timeout = DEFAULT,
    async_op: bool = False,
) -> Any:
    """Give every rank the object of ``root``; what the others pass is not looked at.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> settings = {0: {"lr": 0.1}}  # the root has them, the others pass None
        >>> run_ranks(2, lambda b: ferrodist.broadcast_object(settings.get(b.rank), b))
        [{'lr': 0.1}, {'lr': 0.1}]
    """
    request = Request(Kind.BROADCAST_OBJECT, backend, root=root, timeout=timeout, is_async=async_op)
    data = encode(value, pickle, "the object") if request.is_root else b""
    return _execute(_BroadcastObject, request, [data], pickle)


def all_gather_object(
    value: Any,
    backend: Group = None,
    *,
    pickle: bool = False,
    timeout: Timeout = DEFAULT,
    async_op: bool = False,
) -> Any:
    """Give every rank the list of the objects of all, in rank order.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> run_ranks(2, lambda b: ferrodist.all_gather_object((b.rank, "ok"), b))[1]
        [(0, 'ok'), (1, 'ok')]
    """
    request = Request(Kind.ALL_GATHER_OBJECT, backend, timeout=timeout, is_async=async_op)
    data = encode(value, pickle, "the object")
    return _execute(_GatherObject, request, [data], pickle)


def gather_object(
    value: Any,
    backend: Group = None,
    root: int = 0,
    *,
    pickle: bool = False,
    timeout: Timeout = DEFAULT,
    async_op: bool = False,
) -> Any:
    """Give ``root`` the list of the objects of all ranks; the other ranks get None.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> run_ranks(2, lambda b: ferrodist.gather_object({b.rank}, b))
        [[{0}, {1}], None]
    """
    request = Request(Kind.GATHER_OBJECT, backend, root=root, timeout=timeout, is_async=async_op)
    data = encode(value, pickle, "the object")
    return _execute(_GatherObject, request, [data], pickle)


def scatter_object(
    values: Sequence[Any] | None,
    backend: Group = None,
    root: int = 0,
    *,
    pickle: bool = False,
    timeout: Timeout = DEFAULT,
    async_op: bool = False,
) -> Any:
    """Give rank r the object ``values[r]`` of ``root``; the other ranks pass None.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> parts = {0: ["a", "b"]}  # the root has them, the others pass None
        >>> run_ranks(2, lambda b: ferrodist.scatter_object(parts.get(b.rank), b))
        ['a', 'b']
    """
    request = Request(Kind.SCATTER_OBJECT, backend, root=root, timeout=timeout, is_async=async_op)
    parts = _encode_each(request, values, pickle) if request.is_root else []
    return _execute(_ScatterObject, request, parts, pickle)


@dataclass(slots=True, eq=False)
class _ObjectCall(Prepared[Any]):
    """A call on encoded objects: the sizes are told first, then the bytes travel."""

    request: Request
    data: list[bytes]
    pickle: bool
    found: Buffer | None = None
    sizes: list[int] = field(default_factory=list)

    @property
    def args(self) -> CollectiveArgs:
        return CollectiveArgs(root=self.request.args.root)

    def finish(self) -> Any:
        assert self.found is not None
        return decode(self.found.memory, self.pickle)

    def tell_sizes(self, running: RunningCall, num_sizes: int) -> list[int]:
        """Give every rank the sizes of the root's bytes."""
        sizes = np.array([len(one) for one in self.data] or [0] * num_sizes, np.int64)
        buffer = as_buffer(sizes)
        running.collective(Kind.BROADCAST, buffer, buffer, self.args._replace(in_place=True))
        told: list[int] = sizes.tolist()
        return told


class _BroadcastObject(_ObjectCall):
    def run(self, running: RunningCall) -> None:
        (size,) = self.tell_sizes(running, 1)
        found = _bytes(bytearray(self.data[0])) if self.request.is_root else _room(size)
        running.collective(Kind.BROADCAST, found, found, self.args._replace(in_place=True))
        self.found = found


class _GatherObject(_ObjectCall):
    def run(self, running: RunningCall) -> None:
        is_rooted = self.request.kind is Kind.GATHER_OBJECT
        self.sizes = tell_numbers(running, [len(self.data[0])])[:, 0].tolist()
        self.found = None if is_rooted and not self.request.is_root else _room(sum(self.sizes))
        kind, args = Kind.GATHER if is_rooted else Kind.ALL_GATHER, self.args
        running.collective(kind, _bytes(self.data[0]), self.found, args._replace(counts=self.sizes))

    def finish(self) -> list[Any] | None:
        return _decode_each(self.found, self.sizes, self.pickle)


class _ScatterObject(_ObjectCall):
    def run(self, running: RunningCall) -> None:
        backend = running.backend
        sizes = self.tell_sizes(running, backend.world_size)
        source = _bytes(b"".join(self.data)) if self.request.is_root else None
        self.found = _room(sizes[backend.rank])
        running.collective(Kind.SCATTER, source, self.found, self.args._replace(counts=sizes))


def _execute(prepared: type[_ObjectCall], request: Request, data: list[bytes], pickle: bool) -> Any:
    call = request.call(pickle=pickle)
    return request.execute(prepared(call, request.deadline, request, data, pickle))


def _encode_each(request: Request, values: Sequence[Any] | None, pickle: bool) -> list[bytes]:
    world = request.backend.world_size
    found = len(values) if isinstance(values, (list, tuple)) else None
    if values is None or found != world:
        raise InvalidArgument(
            f"scatter_object: the root must pass a list of {world} objects, one per rank, "
            f"got {type(values).__name__}{'' if found is None else f' of {found}'}",
            expected=world,
            got=found,
            this_rank=request.backend.rank,
        )
    return [
        encode(value, pickle, f"the object for rank {rank}") for rank, value in enumerate(values)
    ]


def _decode_each(joined: Buffer | None, sizes: Sequence[int], pickle: bool) -> list[Any] | None:
    if joined is None:
        return None
    values, place = [], 0
    for size in sizes:
        values.append(decode(joined.memory[place : place + size], pickle))
        place += size
    return values


def _bytes(data: bytes | bytearray) -> Buffer:
    return Buffer(memoryview(data), DType.UINT8, (len(data),), data)


def _room(size: int) -> Buffer:
    return Buffer.empty(DType.UINT8, (size,))
