# SPDX-License-Identifier: MIT OR Apache-2.0
"""Collectives of plain Python objects.

None, bool, int of any size, float, complex, str, bytes, list, tuple, dict, set and arrays travel by
msgpack; anything else is refused unless every rank passes ``pickle=True``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ferrodist.backends.base import Conversation
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

    def body(talk: Conversation) -> Any:
        size = np.array([len(data)], np.int64)
        _run(talk, request, Kind.BROADCAST, as_buffer(size), as_buffer(size), in_place=True)
        found = _bytes(bytearray(data)) if request.is_root else _room(int(size[0]))
        _run(talk, request, Kind.BROADCAST, found, found, in_place=True)
        return found

    return request.execute(body, lambda found: decode(found.memory, pickle), pickle=pickle)


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

    def body(talk: Conversation) -> Any:
        sizes = _tell_sizes(talk, request, len(data))
        joined = _room(sum(sizes))
        _run(talk, request, Kind.ALL_GATHER, _bytes(data), joined, counts=sizes)
        return joined, sizes

    return request.execute(
        body, lambda found: _decode_each(found[0], found[1], pickle), pickle=pickle
    )


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

    def body(talk: Conversation) -> Any:
        sizes = _tell_sizes(talk, request, len(data))
        joined = _room(sum(sizes)) if request.is_root else None
        _run(talk, request, Kind.GATHER, _bytes(data), joined, counts=sizes)
        return joined, sizes

    return request.execute(
        body, lambda found: _decode_each(found[0], found[1], pickle), pickle=pickle
    )


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

    def body(talk: Conversation) -> Any:
        sizes = np.array(
            [len(part) for part in parts] or [0] * request.backend.world_size, np.int64
        )
        _run(talk, request, Kind.BROADCAST, as_buffer(sizes), as_buffer(sizes), in_place=True)
        source = _bytes(b"".join(parts)) if request.is_root else None
        mine = _room(int(sizes[request.backend.rank]))
        _run(talk, request, Kind.SCATTER, source, mine, counts=sizes.tolist())
        return mine

    return request.execute(body, lambda mine: decode(mine.memory, pickle), pickle=pickle)


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


def _tell_sizes(talk: Conversation, request: Request, size: int) -> list[int]:
    sizes: list[int] = tell_numbers(talk, request, [size])[:, 0].tolist()
    return sizes


def _run(
    talk: Conversation,
    request: Request,
    kind: Kind,
    source: Buffer | None,
    target: Buffer | None,
    **options: Any,
) -> None:
    talk.run(kind, source, target, root=request.root or 0, **options)


def _bytes(data: bytes | bytearray) -> Buffer:
    return Buffer(memoryview(data), DType.UINT8, (len(data),), data)


def _room(size: int) -> Buffer:
    return Buffer.empty(DType.UINT8, (size,))
