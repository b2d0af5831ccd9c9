# SPDX-License-Identifier: MIT OR Apache-2.0
"""The way the dense collectives go: take the arrays in, check, make room, hand the call over."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

from ferrodist.arrays import (
    InputArray,
    OutputArray,
    Overlap,
    OverlapKind,
    advise_objects,
    as_device_input,
    as_device_output,
    as_input,
    as_output,
    find_crossing,
    flatten,
    is_on_device,
    is_tree,
    new_result,
    overlap,
    split_blocks,
    type_name,
)
from ferrodist.backends.running_call import CollectiveArgs, Part, Prepared, RunningCall
from ferrodist.buffer import Buffer, DeviceBuffer, DType
from ferrodist.call import Kind
from ferrodist.collectives.reductions import CustomReduction, Pairs, open_pair, problem_of_pair
from ferrodist.collectives.request import Request, leaf_of
from ferrodist.errors import (
    InvalidArgument,
    InvalidShape,
    SizeMismatch,
    UnsupportedArray,
)
from ferrodist.reduce_op import CustomOp, ReduceOp

# Where some ranks have no result, and ignore the ``out`` that others refuse; and where it depends
# on the rank how ``x`` and ``out`` may overlap. Ranks that accept what one refuses are in the call.
_OUT_OF_SOME = (Kind.REDUCE, Kind.GATHER, Kind.EXSCAN)
_PLACED_BY_RANK = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)

_MOST_LEAVES_SHOWN = 4

_TAKES_TREES = (Kind.ALLREDUCE, Kind.BROADCAST, Kind.REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)


def execute(request: Request, x: Any, out: Any, *, as_list: bool = False) -> Any:
    """Take the arrays in, check them, make room for the results, hand the call to the backend.

    ``as_list`` cuts joined results into those of each rank.
    """
    named, rebuild = _take_apart(request, x)
    paths = [path for path, _ in named]
    inputs = _take_on_device(request, named, out)
    if inputs is None:
        inputs = [_take(request, path, leaf) for path, leaf in named]
    _check_pair(request, inputs)
    shapes = [result_shape(request, taken, path) for path, taken in zip(paths, inputs, strict=True)]
    try:
        results = _make_room(request, inputs, shapes, paths, _outs(request, out, paths))
    except InvalidArgument as error:
        if request.kind in _OUT_OF_SOME:
            return request.refuse(error)
        raise
    try:
        items = _join(request, paths, inputs, results, is_out_given=out is not None)
    except InvalidArgument as error:
        if request.kind in _OUT_OF_SOME + _PLACED_BY_RANK:
            return request.refuse(error)
        raise
    leaves = [leaf_of(taken, path) for path, taken in zip(paths, inputs, strict=True)]
    dense = DenseCall(request.call(tuple(leaves)), request.deadline)
    if isinstance(request.op, CustomOp):
        args = (request.op, request.kind, request.root or 0, inputs, results)
        dense.custom = CustomReduction(*args)
    else:
        dense.parts, dense.packed = _make_parts(request, items)
    if _has_result(request):
        dense.results, dense.rebuild, dense.out = results, rebuild, out
    if as_list:
        dense.listed, dense.num_parts = [leaf for _, leaf in named], request.backend.world_size
    return request.execute(dense)


Rebuild = Callable[[list[Any]], Any]


def _take_apart(request: Request, x: Any) -> tuple[list[tuple[str, Any]], Rebuild]:
    if request.takes_pairs:
        return open_pair(x, f"{request.kind.label}: x")
    if x is None:
        raise _refuse_none(request)
    if request.kind not in _TAKES_TREES:
        _refuse_tree(request, x)
    return flatten(x)


def take_single(request: Request, x: Any) -> InputArray:
    """Take an array in where trees are not taken."""
    _refuse_tree(request, x)
    return as_input(x, f"{request.kind.label}: x")


def _refuse_tree(request: Request, x: Any) -> None:
    if not is_tree(x):
        return
    kind, advice = type(x).__name__, advise_objects(request.kind.label + ":")
    if request.kind.is_reduction:  # of which objects have none
        advice = "call it for each"
    text = f"x is a {kind}, but this call takes a single array; join its parts, or {advice}"
    raise request.refusal(UnsupportedArray, text, got=kind)


def _check_pair(request: Request, inputs: list[InputArray]) -> None:
    error = problem_of_pair(*inputs) if request.takes_pairs else None
    if error is not None:
        facts = {"got": error.got, "expected": error.expected}
        raise request.refusal(type(error), str(error), **facts)


def _make_parts(request: Request, items: list[Item]) -> tuple[list[Part], Sequence[Packed | Pairs]]:
    """List the collectives of a call, and what to unpack when they are done."""
    if request.takes_pairs:
        assert isinstance(request.op, ReduceOp)
        inputs, results, _ = zip(*items, strict=True)
        pairs = Pairs.pack(request.op, inputs, results)
        return [pairs.part(request.kind, request.args)], [pairs]
    world, fuse_nbytes = request.backend.world_size, request.backend.config.fuse_nbytes
    parts, packed = fuse(items, request.kind, request.args, world, fuse_nbytes)
    return parts or [Part(Kind.BARRIER, args=request.args)], packed  # an empty tree synchronises


def execute_barrier(request: Request) -> Any:
    """Hand the call that has no arrays to the backend."""
    part = Part(Kind.BARRIER, args=request.args)
    return request.execute(DenseCall(request.call(), request.deadline, parts=[part]))


@dataclass(slots=True, eq=False, repr=False)
class DenseCall(Prepared[Any]):
    """A call whose arrays are known before it runs."""

    parts: list[Part] = field(default_factory=list)
    packed: Sequence[Packed | Pairs] = ()
    custom: CustomReduction | None = None  # instead of parts, by a user's function
    results: list[OutputArray | None] = field(default_factory=list)
    rebuild: Rebuild | None = None  # None where this rank has no result
    out: Any = None
    listed: Sequence[Any] = ()  # the inputs whose joined results are cut into ``num_parts``
    num_parts: int = 0

    def run(self, running: RunningCall) -> None:
        """Do the collectives of the call."""
        if self.custom is not None:
            self.custom.run(running)
        for part in self.parts:
            running.collective(*part)

    def finish(self) -> Any:
        """Unpack the results and put them together."""
        if self.custom is not None and self.custom.refused is not None:
            raise self.custom.refused
        if self.rebuild is None:
            return None
        for one in self.packed:
            one.unpack()
        leaves = [one.finish() for one in self.results if one is not None]
        if self.num_parts:
            blocks = map(split_blocks, leaves, self.listed, repeat(self.num_parts))
            return [self.rebuild(list(part)) for part in zip(*blocks, strict=True)] or (
                [self.rebuild([]) for _ in range(self.num_parts)]
            )
        finished = self.rebuild(leaves)
        return finished if self.out is None else self.out


def _refuse_none(request: Request) -> UnsupportedArray:
    """Only inside a tree None stays None."""
    advice = "pass an array or a number"
    if request.kind is Kind.BROADCAST:
        advice = "every rank passes an array of the root's dtype and shape"
    return request.refusal(UnsupportedArray, f"x is None; {advice}", got="None")


def _take(request: Request, path: str, leaf: Any) -> InputArray:
    where = f"x{path}" if path else "x"
    taken = as_input(leaf, f"{request.kind.label}: {where}")
    request.check_op(taken, where)
    return taken


def _take_on_device(
    request: Request, named: list[tuple[str, Any]], out: Any
) -> list[InputArray] | None:
    """Take tensors in on their device, if the engine does the whole call there.

    Ranks of which some have their arrays elsewhere do not match: the name of the engine stands in
    the call as that of an algorithm.
    """
    backend, device = request.backend, request.backend._device
    is_custom = request.op is not None and request.args.op is None
    if not device or not named or is_custom or request.takes_pairs:
        return None
    leaves = [leaf for _, leaf in named + (flatten(out, "out")[0] if out is not None else [])]
    if request.args.algorithm is not None or not all(is_on_device(one, device) for one in leaves):
        return None
    where = f"{request.kind.label}: x"
    inputs = [as_device_input(leaf, where + path) for path, leaf in named]
    for (path, _), taken in zip(named, inputs, strict=True):
        request.check_op(taken, f"x{path}")
        if not backend._runs_on_device(request.kind, taken.buffer.dtype, request.args):
            return None
    request.algorithm_name = backend._device_engine
    return inputs


def _has_result(request: Request) -> bool:
    return request.kind.has_result(request.backend.rank, request.root or 0)


def _outs(request: Request, out: Any, paths: list[str]) -> list[Any]:
    """Take ``out`` apart like ``x``; where there is no result it is ignored."""
    if out is None or not _has_result(request):
        return [None] * len(paths)
    named, _ = flatten(out, "out")
    found, kind = [path for path, _ in named], type_name(out)
    if found == paths:
        return [leaf for _, leaf in named]
    if paths == [""]:
        text = f"out is a {kind}, but x is a single array; pass a writable array"
    elif found == [""]:
        text = (
            f"out is a single {kind}, but x holds {_names_of_leaves('x', paths)}; pass writable "
            "arrays in the same structure"
        )
    else:
        text = (
            f"out must have the structure of x, which holds {_names_of_leaves('x', paths)}; out "
            f"holds {_names_of_leaves('out', found)}"
        )
    raise request.refusal(InvalidArgument, text, got=kind)


def _names_of_leaves(tree: str, paths: list[str]) -> str:
    shown = [tree + path for path in paths[:_MOST_LEAVES_SHOWN]]
    more = len(paths) - len(shown)
    return (", ".join(shown) or "no array") + (f" and {more} more" if more else "")


def _make_room(
    request: Request,
    inputs: list[InputArray],
    shapes: list[tuple[int, ...]],
    paths: list[str],
    outs: list[Any],
) -> list[OutputArray | None]:
    if not _has_result(request):
        return [None] * len(inputs)
    return [
        new_result(taken, shape) if out is None else take_out(request, out, path, taken, shape)
        for taken, shape, path, out in zip(inputs, shapes, paths, outs, strict=True)
    ]


def _join(
    request: Request,
    paths: list[str],
    inputs: list[InputArray],
    results: list[OutputArray | None],
    *,
    is_out_given: bool,
) -> list[Item]:
    """Put every input together with its result; refuse memory that they must not share."""
    items = [
        Item(taken, result, is_out_given and is_in_place(request, taken, result))
        for taken, result in zip(inputs, results, strict=True)
    ]
    if is_out_given:
        _refuse_crossing(request, paths, inputs, results)
    return items


def take_out(
    request: Request, out: Any, path: str, taken: InputArray, shape: tuple[int, ...]
) -> OutputArray:
    """Make ``out`` the place of a result, or say what is wrong with it."""
    try:
        make = as_device_output if isinstance(taken.buffer, DeviceBuffer) else as_output
        return make(out, taken.buffer.dtype, shape)
    except InvalidArgument as error:
        text = f"in out{path}, {error}" if path else str(error)
        raise request.refusal(InvalidArgument, text) from error


def result_shape(request: Request, taken: InputArray, path: str = "") -> tuple[int, ...]:
    """Apply the shape rule of the kind; raise where an array cannot be cut among the ranks."""
    shape, world = taken.buffer.shape, request.backend.world_size
    if request.kind.input_is_block:
        return (world * shape[0], *shape[1:]) if shape else (world,)
    if request.kind.result_is_block or request.kind is Kind.ALL_TO_ALL:
        part = _cut(request, shape, f"x{path}")
        return shape if request.kind is Kind.ALL_TO_ALL else part
    return shape


def _cut(request: Request, shape: tuple[int, ...], where: str) -> tuple[int, ...]:
    """Return the shape of one part; element counts are checked before axes, as in the seed."""
    world, count = request.backend.world_size, math.prod(shape)
    if world == 1:
        return shape
    advice = f"which {world} ranks cannot share evenly; pad it or use {request.kind.label}_uneven"
    facts = {"world_size": world, "got": world}
    if count % world:
        text = f"{where} has {count} elements, {advice}"
        raise request.refusal(SizeMismatch, text, expected=count, **facts)
    if shape[0] % world:
        text = f"axis 0 of {where} has length {shape[0]}, {advice}"
        raise request.refusal(InvalidShape, text, expected=shape[0], **facts)
    return (shape[0] // world, *shape[1:])


def is_in_place(
    request: Request,
    taken: InputArray,
    result: OutputArray | None,
    counts: Sequence[int] | None = None,
) -> bool:
    """Tell whether ``out`` is the memory of ``x``, or an allowed part; refuse other overlaps.

    ``counts`` are the rows of each rank where they differ.
    """
    if result is None or result.span is None:
        return False
    found = overlap(taken, result)
    if found.kind is OverlapKind.NONE:
        return False
    if found.kind is OverlapKind.SAME or _is_own_part(request, taken, result, found, counts):
        return found.in_place
    raise request.refusal(InvalidArgument, f"out overlaps x in memory; {_ADVICE[request.kind]}")


def _refuse_crossing(
    request: Request, paths: list[str], inputs: list[InputArray], results: list[OutputArray | None]
) -> None:
    """Refuse an ``out`` of which one leaf is the memory of another leaf."""
    made = [result for result in results if result is not None]
    leaf = find_crossing(inputs, made) if len(made) == len(inputs) > 1 else None
    if leaf is not None:
        text = f"out{paths[leaf]} overlaps another leaf of x or out in memory"
        raise request.refusal(InvalidArgument, text)


_JOINED = (Kind.ALL_GATHER, Kind.GATHER, Kind.ALL_GATHER_UNEVEN, Kind.GATHER_UNEVEN)
_CUT = (Kind.REDUCE_SCATTER, Kind.REDUCE_SCATTER_UNEVEN)
_ADVICE = {
    **dict.fromkeys(Kind, "pass x itself or memory of its own"),
    **dict.fromkeys(_JOINED, "x may only be the part of out that is this rank's"),
    **dict.fromkeys(_CUT, "out may only be the part of x that is this rank's"),
}


def _is_own_part(
    request: Request,
    taken: InputArray,
    result: OutputArray,
    found: Overlap,
    counts: Sequence[int] | None,
) -> bool:
    """Tell whether the smaller of ``x`` and ``out`` is this rank's part of the larger."""
    if found.offset is None or request.kind not in _JOINED + _CUT:
        return False
    is_joined, rank = request.kind in _JOINED, request.backend.rank
    offset, whole, part = (
        (found.offset, result.buffer, taken.buffer)
        if is_joined
        else (-found.offset, taken.buffer, result.buffer)
    )
    if counts is None:
        return offset == rank * part.nbytes
    return offset == sum(counts[:rank]) * (whole.nbytes // max(1, sum(counts)))


# -- fusing ----------------------------------------------------------------------------------------
#
# The leaves of a tree travel as few messages: small ones of one dtype are packed into one buffer,
# large and lone ones go as they are. In reduce_scatter the packing is by part, so that a rank's
# part of the packed buffer holds its part of every leaf; all_gather is unpacked block by block.


class Item(NamedTuple):
    """One leaf of a call: its input, where its result goes (None where there is none)."""

    taken: InputArray
    result: OutputArray | None
    in_place: bool = False

    def alone(self, kind: Kind, args: CollectiveArgs) -> Part:
        """Make the collective of a leaf that travels as it is."""
        output = None if self.result is None else self.result.buffer
        args = args._replace(in_place=True) if self.in_place else args
        return Part(kind, self.taken.buffer, output, args)


class Packed(NamedTuple):
    """Results of leaves that travel together."""

    leaves: list[Buffer]
    output: Buffer
    parts: int  # into how many equal parts each result is cut: W in all_gather, else 1

    def unpack(self) -> None:
        """Distribute the packed result to the leaves."""
        _copy(self.leaves, self.output, self.parts, is_packing=False)


def fuse(
    items: Sequence[Item], kind: Kind, args: CollectiveArgs, world: int, fuse_nbytes: int
) -> tuple[list[Part], list[Packed]]:
    """Make the collectives of a call and say what to unpack when they are done.

    Which leaves travel together depends only on what all ranks agree on.
    """
    if len(items) == 1:
        return [items[0].alone(kind, args)], []
    small: dict[DType, list[Item]] = {}
    parts: list[Part] = []
    packed: list[Packed] = []
    for item in items:
        is_packable = not isinstance(item.taken.buffer, DeviceBuffer)
        if is_packable and item.taken.buffer.memory.nbytes <= fuse_nbytes:
            small.setdefault(item.taken.buffer.dtype, []).append(item)
        else:
            parts.append(item.alone(kind, args))
    for dtype in sorted(small):
        if len(small[dtype]) == 1:
            parts.append(small[dtype][0].alone(kind, args))
            continue
        inputs = [item.taken.buffer for item in small[dtype]]
        outputs = [item.result.buffer for item in small[dtype] if item.result is not None]
        together, output = _room_for(inputs), _room_for(outputs) if outputs else None
        _copy(inputs, together, world if kind is Kind.REDUCE_SCATTER else 1, is_packing=True)
        parts.append(Part(kind, together, output, args))
        if output is not None:
            packed.append(Packed(outputs, output, world if kind is Kind.ALL_GATHER else 1))
    return parts, packed


def _room_for(buffers: Sequence[Buffer]) -> Buffer:
    nbytes, dtype = sum([buffer.memory.nbytes for buffer in buffers]), buffers[0].dtype
    return Buffer.empty(dtype, (nbytes // dtype.itemsize,))


def _copy(leaves: Sequence[Buffer], packed: Buffer, parts: int, *, is_packing: bool) -> None:
    """Copy leaves to packed memory or back: part 0 of every leaf, then part 1 of every leaf, ..."""
    place = 0
    for part in range(parts):
        for leaf in leaves:
            size = leaf.memory.nbytes // parts
            outer, inner = slice(place, place + size), slice(part * size, (part + 1) * size)
            if is_packing:
                packed.memory[outer] = leaf.memory[inner]
            else:
                leaf.memory[inner] = packed.memory[outer]
            place += size
