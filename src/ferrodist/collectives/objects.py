# SPDX-License-Identifier: MIT OR Apache-2.0
"""Collectives of plain Python objects; ``codec`` says which, and how they become bytes.

A rank whose object cannot be sent refuses it in the call: all ranks raise, and the group goes on.

The codec knows types of many modules, which take a quarter of the time of ``import ferrodist``: it
is imported by the first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import numpy as np

from ferrodist.backends.call_methods import ObjectOptions
from ferrodist.backends.running_call import CollectiveArgs, Prepared, RunningCall
from ferrodist.buffer import Buffer, DType
from ferrodist.call import Kind
from ferrodist.collectives.request import Group, Request, public
from ferrodist.errors import InvalidArgument


@public(ObjectOptions)
def broadcast_object(
    value: Any,
    backend: Group = None,
    root: int = 0,
    **options: Unpack[ObjectOptions],
) -> Any:
    """Give every rank the object of ``root``; what the others pass is not looked at.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> settings = {0: {"lr": 0.1}}  # the root has them, the others pass None
        >>> run_ranks(2, lambda b: ferrodist.broadcast_object(settings.get(b.rank), b))
        [{'lr': 0.1}, {'lr': 0.1}]
    """
    request = Request(Kind.BROADCAST_OBJECT, backend, options, root=root)
    return _execute(request, [value] if request.is_root else [], options.get("pickle"))


@public(ObjectOptions)
def all_gather_object(
    value: Any,
    backend: Group = None,
    **options: Unpack[ObjectOptions],
) -> Any:
    """Give every rank the list of the objects of all, in rank order.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> run_ranks(2, lambda b: ferrodist.all_gather_object((b.rank, "ok"), b))[1]
        [(0, 'ok'), (1, 'ok')]
    """
    request = Request(Kind.ALL_GATHER_OBJECT, backend, options)
    return _execute(request, [value], options.get("pickle"))


@public(ObjectOptions)
def gather_object(
    value: Any,
    backend: Group = None,
    root: int = 0,
    **options: Unpack[ObjectOptions],
) -> Any:
    """Give ``root`` the list of the objects of all ranks; the other ranks get None.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> run_ranks(2, lambda b: ferrodist.gather_object({b.rank}, b))
        [[{0}, {1}], None]
    """
    request = Request(Kind.GATHER_OBJECT, backend, options, root=root)
    return _execute(request, [value], options.get("pickle"))


@public(ObjectOptions)
def scatter_object(
    values: Sequence[Any] | None,
    backend: Group = None,
    root: int = 0,
    **options: Unpack[ObjectOptions],
) -> Any:
    """Give rank r the object ``values[r]`` of ``root``; the other ranks pass None.

    Example:
        >>> import ferrodist
        >>> from ferrodist.testing import run_ranks
        >>> parts = {0: ["a", "b"]}  # the root has them, the others pass None
        >>> run_ranks(2, lambda b: ferrodist.scatter_object(parts.get(b.rank), b))
        ['a', 'b']
    """
    request = Request(Kind.SCATTER_OBJECT, backend, options, root=root)
    return _execute(request, values if request.is_root else [], options.get("pickle"))


@dataclass(slots=True, eq=False, repr=False)
class _ObjectCall(Prepared[Any]):
    """A call on encoded objects: the sizes are told first, then the bytes travel."""

    request: Request
    data: list[bytes]
    pickle: bool
    found: Buffer | None = None
    sizes: list[int] = field(default_factory=list)  # of the objects in what was found

    def run(self, running: RunningCall) -> None:
        root, is_told_by_root = self.request.args.root, self.request.kind in _FROM_ROOT
        self._move(running, self._tell_sizes(running, root if is_told_by_root else None))

    def _tell_sizes(self, running: RunningCall, root: int | None) -> list[int]:
        """Give every rank the sizes of the root's bytes, or those of all ranks."""
        world = running.backend.world_size if self.request.kind is Kind.SCATTER_OBJECT else 1
        sizes = [len(one) for one in self.data] or [0] * world
        if root is None:
            return list(running.tell_numbers(*sizes)[:, 0].tolist())
        numbers = np.array(sizes, np.int64)
        running.broadcast(Buffer.of_numbers(numbers), root)
        return list(numbers.tolist())

    def _move(self, running: RunningCall, sizes: list[int]) -> None:
        """Move the bytes, of which all know the sizes."""
        kind, is_root, root = self.request.kind, self.request.is_root, self.request.args.root
        self.sizes, source = sizes, None
        if kind is Kind.BROADCAST_OBJECT:
            self.found = _bytes(bytearray(self.data[0])) if is_root else _room(sizes[0])
            running.broadcast(self.found, root)
            return
        if kind is Kind.SCATTER_OBJECT:
            source = _bytes(b"".join(self.data)) if is_root else None
            self.sizes = [sizes[running.backend.rank]]
            self.found = _room(self.sizes[0])
        else:
            source = _bytes(self.data[0])
            self.found = _room(sum(sizes)) if is_root or kind is Kind.ALL_GATHER_OBJECT else None
        args = CollectiveArgs(root=root, counts=sizes)
        running.collective(_MOVED_AS[kind], source, self.found, args)

    def finish(self) -> Any:
        from ferrodist.collectives.codec import decode

        if self.found is None:
            return None
        values, place = [], 0
        for size in self.sizes:
            values.append(decode(self.found.memory[place : place + size], self.pickle))
            place += size
        return values[0] if self.request.kind in _FROM_ROOT else values


_FROM_ROOT = (Kind.BROADCAST_OBJECT, Kind.SCATTER_OBJECT)
_MOVED_AS = {
    Kind.SCATTER_OBJECT: Kind.SCATTER,
    Kind.GATHER_OBJECT: Kind.GATHER,
    Kind.ALL_GATHER_OBJECT: Kind.ALL_GATHER,
}


def _execute(request: Request, values: Any, pickle: bool | None) -> Any:
    use_pickle = request.backend._pickle if pickle is None else bool(pickle)
    try:
        data = _encode_each(request, values, use_pickle)
    except Exception as error:  # noqa: BLE001 -- an object may raise anything, and other ranks wait
        return request.refuse(error)
    call = request.call(pickle=use_pickle)
    return request.execute(_ObjectCall(call, request.deadline, request, data, use_pickle))


def _encode_each(request: Request, values: Any, pickle: bool) -> list[bytes]:
    from ferrodist.collectives.codec import encode

    if request.kind is not Kind.SCATTER_OBJECT or not request.is_root:
        return [encode(value, pickle, "the object") for value in values]
    world = request.backend.world_size
    found = len(values) if isinstance(values, (list, tuple)) else None
    if found != world:
        got = type(values).__name__ + ("" if found is None else f" of {found}")
        text = f"the root must pass a list of {world} objects, one per rank, got {got}"
        raise request.refusal(InvalidArgument, text, expected=world, got=found)
    return [
        encode(value, pickle, f"the object for rank {rank}") for rank, value in enumerate(values)
    ]


def _bytes(data: bytes | bytearray) -> Buffer:
    return Buffer(memoryview(data), DType.UINT8, (len(data),), data)


def _room(size: int) -> Buffer:
    return Buffer.empty(DType.UINT8, (size,))
