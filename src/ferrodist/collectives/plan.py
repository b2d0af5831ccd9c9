# SPDX-License-Identifier: MIT OR Apache-2.0
"""The way the dense collectives go: take the arrays in, check, make room, hand the call over."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ferrodist.arrays import (
    Overlap,
    OverlapKind,
    Result,
    Taken,
    find_crossing,
    flatten,
    is_tree,
    new_result,
    overlap,
    take,
    take_out,
)
from ferrodist.backends.running_call import Part, Prepared, RunningCall
from ferrodist.call import Kind
from ferrodist.collectives.fusing import Item, Packed, fuse
from ferrodist.collectives.request import Request, leaf_of
from ferrodist.errors import InvalidArgument, InvalidShape, SizeMismatch, UnsupportedArray

_TAKES_TREES = (Kind.ALLREDUCE, Kind.BROADCAST, Kind.REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)


def execute(request: Request, x: Any, out: Any) -> Any:
    """Take the arrays in, check them, make room for the results, hand the call to the backend."""
    if x is None:
        raise _refuse_none(request)
    if is_tree(x) and request.kind not in _TAKES_TREES:
        raise UnsupportedArray(
            f"{request.kind.label}: x is a {type(x).__name__}, but this call takes a single array",
            got=type(x).__name__,
        )
    named, rebuild = flatten(x)
    paths = [path for path, _ in named]
    inputs = [_take(request, path, leaf) for path, leaf in named]
    shapes = [result_shape(request, taken, path) for path, taken in zip(paths, inputs, strict=True)]
    results = _make_room(request, inputs, shapes, paths, _outs(request, out, paths))
    items = [
        Item(taken, result, out is not None and is_in_place(request, taken, result))
        for taken, result in zip(inputs, results, strict=True)
    ]
    if out is not None:
        _refuse_crossing(request, paths, inputs, results)
    world, fuse_nbytes = request.backend.world_size, request.backend.config.fuse_nbytes
    parts, packed = fuse(items, request.kind, request.args, world, fuse_nbytes)
    leaves = [leaf_of(taken, path) for path, taken in zip(paths, inputs, strict=True)]
    call = request.call(tuple(leaves))
    parts = parts or [Part(Kind.BARRIER, args=request.args)]  # an empty tree synchronises too
    dense = _DenseCall(call, request.deadline, parts)
    if _has_result(request):
        dense.packed, dense.results, dense.rebuild, dense.out = packed, results, rebuild, out
    return request.execute(dense)


def execute_barrier(request: Request) -> None:
    """Hand the call that has no arrays to the backend."""
    part = Part(Kind.BARRIER, args=request.args)
    request.execute(_DenseCall(request.call(), request.deadline, [part]))


@dataclass(slots=True, eq=False)
class _DenseCall(Prepared[Any]):
    """A call whose collectives are known before it runs."""

    parts: list[Part]
    packed: list[Packed] = field(default_factory=list)
    results: list[Result | None] = field(default_factory=list)
    rebuild: Callable[[list[Any]], Any] | None = None  # None where this rank has no result
    out: Any = None

    def run(self, running: RunningCall) -> None:
        for part in self.parts:
            running.collective(*part)

    def finish(self) -> Any:
        if self.rebuild is None:
            return None
        for one in self.packed:
            one.unpack()
        finished = self.rebuild([one.finish() for one in self.results if one is not None])
        return finished if self.out is None else self.out


def _refuse_none(request: Request) -> UnsupportedArray:
    """Only inside a tree None stays None."""
    advice = "pass an array or a number"
    if request.kind is Kind.BROADCAST:
        advice = "every rank passes an array of the root's dtype and shape"
    return UnsupportedArray(f"{request.kind.label}: x is None; {advice}", got="None")


def _take(request: Request, path: str, leaf: Any) -> Taken:
    where = f"x{path}" if path else "x"
    taken = take(leaf, f"{request.kind.label}: {where}")
    request.check_op(taken, where)
    return taken


def _has_result(request: Request) -> bool:
    return request.kind not in (Kind.REDUCE, Kind.GATHER) or request.is_root


def _outs(request: Request, out: Any, paths: list[str]) -> list[Any]:
    """Take ``out`` apart like ``x``; where there is no result it is ignored."""
    if out is None or not _has_result(request):
        return [None] * len(paths)
    named, _ = flatten(out, "out")
    if [path for path, _ in named] != paths:
        raise InvalidArgument(
            f"{request.kind.label}: out must have the structure of x; x has leaves {paths}, "
            f"out has {[path for path, _ in named]}",
            this_rank=request.backend.rank,
        )
    return [leaf for _, leaf in named]


def _make_room(
    request: Request,
    inputs: list[Taken],
    shapes: list[tuple[int, ...]],
    paths: list[str],
    outs: list[Any],
) -> list[Result | None]:
    if not _has_result(request):
        return [None] * len(inputs)
    return [
        new_result(taken, shape) if out is None else _take_out(request, out, path, taken, shape)
        for taken, shape, path, out in zip(inputs, shapes, paths, outs, strict=True)
    ]


def _take_out(
    request: Request, out: Any, path: str, taken: Taken, shape: tuple[int, ...]
) -> Result:
    try:
        return take_out(out, taken.buffer.dtype, shape)
    except InvalidArgument as error:
        where = f"{request.kind.label}: in out{path}, " if path else f"{request.kind.label}: "
        raise InvalidArgument(f"{where}{error}", this_rank=request.backend.rank) from error


def result_shape(request: Request, taken: Taken, path: str = "") -> tuple[int, ...]:
    """Apply the shape rule of the kind; raise where an array cannot be cut among the ranks."""
    shape, world = taken.buffer.shape, request.backend.world_size
    if request.kind in (Kind.ALL_GATHER, Kind.GATHER):
        return (world * shape[0], *shape[1:]) if shape else (world,)
    if request.kind in (Kind.REDUCE_SCATTER, Kind.SCATTER, Kind.ALL_TO_ALL):
        part = _cut(request, shape, f"x{path}")
        return shape if request.kind is Kind.ALL_TO_ALL else part
    return shape


def _cut(request: Request, shape: tuple[int, ...], where: str) -> tuple[int, ...]:
    """Return the shape of one part; element counts are checked before axes, as in the seed."""
    world, count = request.backend.world_size, math.prod(shape)
    if world == 1:
        return shape
    facts = {"op": request.kind.label, "world_size": world, "this_rank": request.backend.rank}
    if count % world:
        raise SizeMismatch(
            f"{request.kind.label}: {where} has {count} elements, which {world} ranks cannot share "
            f"evenly; pad it{_or_uneven(request)}",
            expected=count,
            got=world,
            **facts,
        )
    if shape[0] % world:
        raise InvalidShape(
            f"{request.kind.label}: axis 0 of {where} has length {shape[0]}, which {world} ranks "
            f"cannot share evenly; pad it{_or_uneven(request)}",
            expected=shape[0],
            got=world,
            **facts,
        )
    return (shape[0] // world, *shape[1:])


def _or_uneven(request: Request) -> str:
    return " or use all_to_all_uneven" if request.kind is Kind.ALL_TO_ALL else ""


def is_in_place(request: Request, taken: Taken, result: Result | None) -> bool:
    """Tell whether ``out`` is the memory of ``x``, or an allowed part; refuse other overlaps."""
    if result is None or result.span is None:
        return False
    found = overlap(taken, result)
    if found.kind is OverlapKind.NONE:
        return False
    if _is_allowed(request, taken, result, found):
        return found.in_place
    raise InvalidArgument(
        f"{request.kind.label}: out overlaps x in memory; pass x itself or memory of its own",
        this_rank=request.backend.rank,
    )


def _refuse_crossing(
    request: Request, paths: list[str], inputs: list[Taken], results: list[Result | None]
) -> None:
    """Refuse an ``out`` of which one leaf is the memory of another leaf."""
    made = [result for result in results if result is not None]
    leaf = find_crossing(inputs, made) if len(made) == len(inputs) > 1 else None
    if leaf is not None:
        raise InvalidArgument(
            f"{request.kind.label}: out{paths[leaf]} overlaps another leaf of x or out in memory",
            this_rank=request.backend.rank,
        )


def _is_allowed(request: Request, taken: Taken, result: Result, found: Overlap) -> bool:
    if found.kind is OverlapKind.SAME:
        return True
    if request.kind is Kind.ALL_GATHER:
        return found.offset == request.backend.rank * taken.buffer.nbytes
    if request.kind is Kind.REDUCE_SCATTER and found.offset is not None:
        return -found.offset == request.backend.rank * result.buffer.nbytes
    return False
