# SPDX-License-Identifier: MIT OR Apache-2.0
"""The way the dense collectives go: take the arrays in, check, make room, hand the call over."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Literal

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
    check_number,
    find_crossing,
    flatten,
    is_on_device,
    is_tree,
    new_result,
    overlap,
    split_blocks,
)
from ferrodist.backends.base import Backend
from ferrodist.backends.call_methods import Op
from ferrodist.backends.registry import current_backend
from ferrodist.backends.running_call import CollectiveArgs, Part, Prepared, RunningCall
from ferrodist.buffer import DeviceBuffer
from ferrodist.call import Call, Kind, Leaf, caller_site
from ferrodist.collectives.fusing import Item, Packed, fuse
from ferrodist.collectives.methods import check_keywords
from ferrodist.collectives.reductions import (
    CustomReduction,
    Pairs,
    applying,
    open_pair,
    problem_of_dtype,
    problem_of_kind,
    problem_of_pair,
)
from ferrodist.config import DEFAULT
from ferrodist.errors import (
    InvalidArgument,
    InvalidShape,
    NotInitialized,
    SizeMismatch,
    UnsupportedArray,
    UnsupportedOp,
)
from ferrodist.reduce_op import CustomOp, ReduceOp

# -- requests --------------------------------------------------------------------------------------
#
# What every public call begins with: check the options, in the order SEMANTICS asks for.
#
# First the root or peer, then the arrays, then the shapes; nothing is sent and no sequence number
# is used before all of it has passed.

# Short names for the typed signatures of the public functions.
Group = Backend | None
Yes = Literal[True]
No = Literal[False]


class Request:
    """One public call on its way to the backend.

    ``options`` are those keyword arguments of the call that most calls have.
    """

    def __init__(
        self,
        kind: Kind,
        backend: Backend | None,
        options: Mapping[str, Any],
        *,
        root: int | None = None,
        op: Op | None = None,
        is_async: bool = False,
    ) -> None:
        check_keywords(kind.label, options)
        self.kind = kind
        self.backend = open_backend(backend, kind.label)
        self.root = None
        if kind.is_rooted:
            self.root = self.backend._check_rank(root, f"{kind.label}: root")
        self.deadline = self.backend._deadline(options.get("timeout", DEFAULT))
        self.op = ReduceOp.parse(op) if kind.is_reduction else None
        algorithm, reproducible = options.get("algorithm"), options.get("reproducible")
        self.reproducible = bool(
            self.backend.reproducible if reproducible is None else reproducible
        )
        # What its collectives are told, where they are not told otherwise.
        self.args = CollectiveArgs(
            self.op if isinstance(self.op, ReduceOp) else None,
            self.root or 0,
            algorithm=algorithm,
            in_order=self.reproducible,
        )
        self.algorithm_name = self.backend._check_algorithm(
            kind, algorithm, self.root or 0, self.reproducible
        )
        self.is_async = is_async or options.get("async_op", False)
        self.counts: list[int] | None = None  # rows of each rank, where all pass them
        self._check_kind(is_algorithm_named=algorithm is not None)

    def _check_kind(self, *, is_algorithm_named: bool) -> None:
        if self.op is None:
            return
        problem = problem_of_kind(self.kind, self.op, is_algorithm_named)
        if problem is not None:
            raise UnsupportedOp(
                f"{self.kind.label}: {self.op.label} {problem}",
                op=self.kind.label,
                this_rank=self.backend.rank,
            )

    @property
    def is_root(self) -> bool:
        """True on the rank a rooted call is about."""
        return self.root == self.backend.rank

    @property
    def takes_pairs(self) -> bool:
        """True where values are reduced together with their indices."""
        return self.op is not None and self.op.takes_pairs

    def call(
        self,
        leaves: tuple[Leaf, ...] = (),
        *,
        compared: tuple[Leaf, ...] | None = None,
        pickle: bool = False,
    ) -> Call:
        """Describe the call as ranks compare it."""
        return Call(
            self.kind,
            leaves,
            op=self.op,
            root=self.root,
            algorithm=self.algorithm_name,
            reproducible=self.reproducible,
            site=caller_site(),
            compared=compared,
            pickle=pickle,
            counts=None if self.counts is None else tuple(self.counts),
        )

    def execute(self, prepared: Prepared[Any]) -> Any:
        """Hand the call to the backend: return its result, or its Work if it is asynchronous."""
        return (self.backend._start if self.is_async else self.backend._perform)(prepared)

    def check_op(self, taken: InputArray, where: str) -> None:
        """Refuse a reduction that has no meaning for the dtype, and numbers that could wrap."""
        if self.op is None:
            return
        dtype = taken.buffer.dtype
        problem = problem_of_dtype(self.kind, self.op, dtype, taken.is_number)
        if problem is not None:
            raise UnsupportedOp(
                f"{self.kind.label}: {self.op.label} of {dtype.label} ({where}) {problem}",
                op=self.kind.label,
                got=dtype.label,
                this_rank=self.backend.rank,
            )
        if taken.is_number and isinstance(self.op, ReduceOp):
            check_number(taken, self.op, self.backend.world_size, f"{self.kind.label}: {where}")


def open_backend(backend: Backend | None, what: str) -> Backend:
    """Return the backend to use, or say what is wrong with it."""
    if backend is None:
        backend = current_backend()
    if backend is None:
        raise NotInitialized(f"{what}: call ferrodist.init() first, or pass a backend")
    if not isinstance(backend, Backend):
        raise InvalidArgument(
            f"{what}: backend must be a Backend, got {type(backend).__name__}"
            f"{_meant_instead(backend, what)}",
            got=backend,
        )
    if applying.backend is backend:
        raise InvalidArgument(f"{what}: called by a custom op, which must not communicate")
    backend._check_usable()
    return backend


def _meant_instead(backend: Any, what: str) -> str:
    """Guess what was meant by an argument that stands where the backend belongs."""
    kind = next((kind for kind in Kind if kind.label == what), None)
    if kind is not None and kind.is_reduction and isinstance(backend, (str, ReduceOp)):
        op = backend.label if isinstance(backend, ReduceOp) else backend
        return f"; the operation comes after it, or as {what}(x, op={op!r})"
    if kind is not None and kind.is_rooted and hasattr(backend, "__index__"):
        return f"; the root comes after it, or as {what}(x, root={backend})"
    if type(backend).__module__.startswith("torch."):
        return ", a group of torch; pass what init() or backend.split() gave"
    return ""


def leaf_of(taken: InputArray, path: str = "") -> Leaf:
    """Describe an array as ranks compare it."""
    return Leaf(path, taken.buffer.dtype, taken.buffer.shape)


# -- plans -----------------------------------------------------------------------------------------


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
    results = _make_room(request, inputs, shapes, paths, _outs(request, out, paths))
    items = [
        Item(taken, result, out is not None and is_in_place(request, taken, result))
        for taken, result in zip(inputs, results, strict=True)
    ]
    if out is not None:
        _refuse_crossing(request, paths, inputs, results)
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
    if is_tree(x) and request.kind not in _TAKES_TREES:
        raise UnsupportedArray(
            f"{request.kind.label}: x is a {type(x).__name__}, but this call takes a single array; "
            f"join its parts, or {advise_objects(request.kind.label + ':')}",
            got=type(x).__name__,
        )
    return flatten(x)


def _check_pair(request: Request, inputs: list[InputArray]) -> None:
    error = problem_of_pair(*inputs) if request.takes_pairs else None
    if error is not None:
        facts = {"op": request.kind.label, "this_rank": request.backend.rank}
        facts |= {"got": error.got, "expected": error.expected}
        raise type(error)(f"{request.kind.label}: {error}", **facts)


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


@dataclass(slots=True, eq=False)
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
    return UnsupportedArray(f"{request.kind.label}: x is None; {advice}", got="None")


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
    if request.kind is Kind.EXSCAN:
        return request.backend.rank > 0
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


def take_out(
    request: Request, out: Any, path: str, taken: InputArray, shape: tuple[int, ...]
) -> OutputArray:
    """Make ``out`` the place of a result, or say what is wrong with it."""
    try:
        make = as_device_output if isinstance(taken.buffer, DeviceBuffer) else as_output
        return make(out, taken.buffer.dtype, shape)
    except InvalidArgument as error:
        where = f"{request.kind.label}: in out{path}, " if path else f"{request.kind.label}: "
        raise InvalidArgument(f"{where}{error}", this_rank=request.backend.rank) from error


def result_shape(request: Request, taken: InputArray, path: str = "") -> tuple[int, ...]:
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
            f"evenly; pad it or use {request.kind.label}_uneven",
            expected=count,
            got=world,
            **facts,
        )
    if shape[0] % world:
        raise InvalidShape(
            f"{request.kind.label}: axis 0 of {where} has length {shape[0]}, which {world} ranks "
            f"cannot share evenly; pad it or use {request.kind.label}_uneven",
            expected=shape[0],
            got=world,
            **facts,
        )
    return (shape[0] // world, *shape[1:])


def is_in_place(request: Request, taken: InputArray, result: OutputArray | None) -> bool:
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
    request: Request, paths: list[str], inputs: list[InputArray], results: list[OutputArray | None]
) -> None:
    """Refuse an ``out`` of which one leaf is the memory of another leaf."""
    made = [result for result in results if result is not None]
    leaf = find_crossing(inputs, made) if len(made) == len(inputs) > 1 else None
    if leaf is not None:
        raise InvalidArgument(
            f"{request.kind.label}: out{paths[leaf]} overlaps another leaf of x or out in memory",
            this_rank=request.backend.rank,
        )


def _is_allowed(request: Request, taken: InputArray, result: OutputArray, found: Overlap) -> bool:
    if found.kind is OverlapKind.SAME:
        return True
    if request.kind is Kind.ALL_GATHER:
        return found.offset == request.backend.rank * taken.buffer.nbytes
    if found.offset is None:
        return False
    if request.kind is Kind.REDUCE_SCATTER_UNEVEN:
        assert request.counts is not None
        row_nbytes = taken.buffer.nbytes // max(1, taken.buffer.shape[0])
        return -found.offset == sum(request.counts[: request.backend.rank]) * row_nbytes
    if request.kind is Kind.REDUCE_SCATTER:
        return -found.offset == request.backend.rank * result.buffer.nbytes
    return False
