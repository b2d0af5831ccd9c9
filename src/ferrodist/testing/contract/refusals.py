# SPDX-License-Identifier: MIT OR Apache-2.0
"""Check ``refused``: what is wrong on this rank is refused here, before anything is sent.

No sequence number is used: a rank that was refused is still in step with those that were not. What
other ranks may accept is refused in the call, and all ranks raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import ferrodist
from ferrodist import (
    Backend,
    DistributedError,
    InvalidArgument,
    InvalidRank,
    InvalidShape,
    InvalidWorldSize,
    ReduceOp,
    SelfSend,
    SizeMismatch,
    UnsupportedArray,
    UnsupportedOp,
)
from ferrodist.testing.contract.case import Trial
from ferrodist.testing.contract.inputs import COUNTED, CUT, ROOTED
from ferrodist.testing.contract.values import numpy_dtype

Attempt = Callable[[Backend], object]


@dataclass(frozen=True, slots=True)
class Refusal:
    """What to attempt, the error it must raise, words that must be in it, and where it applies.

    One that ``is_told`` is attempted by all ranks: the last one refuses what it passes while the
    others wait for it in the call, and all raise.
    """

    error: type[DistributedError]
    attempt: Attempt
    says: str = ""
    min_world: int = 1
    needs_algorithms: bool = False
    is_told: bool = False


Refusals = Iterator[tuple[str, Refusal]]


def zeros(*shape: int) -> Any:
    """Make an array of float32."""
    return np.zeros(shape, np.float32)


# -- out= that is refused --------------------------------------------------------------------------


def refused_outs() -> Refusals:
    """List them all."""
    yield from _wrong_kinds()
    yield from _wrong_sizes()
    yield from _overlaps()


_OUT_OF_ROOT = ("reduce", "gather")  # where only the root looks at out, so that the others wait


def _call_with(function: str, x: Any, out: Any) -> Attempt:
    def attempt(backend: Backend) -> object:
        if function not in _OUT_OF_ROOT:
            return getattr(ferrodist, function)(x, backend, out=out)
        return getattr(ferrodist, function)(x, backend, root=backend.world_size - 1, out=out)

    return attempt


def _refused_out(function: str, attempt: Attempt, says: str, min_world: int = 1) -> Refusal:
    is_told = function in _OUT_OF_ROOT
    return Refusal(InvalidArgument, attempt, says, min_world=min_world, is_told=is_told)


def _read_only(*shape: int) -> Any:
    array = zeros(*shape)
    array.flags.writeable = False
    return array


def _wrong_kinds() -> Refusals:
    """For calls whose result is as x, which is float32[4, 2]."""
    wrong = {
        "dtype": (np.zeros((4, 2)), "dtype"),
        "shape": (zeros(2, 4), "shape"),
        "too many axes": (zeros(4, 2, 1), "shape"),
        "read-only": (_read_only(4, 2), "read-only"),
        "transposed": (zeros(2, 4).T, "contiguous"),
        "with gaps": (zeros(4, 4)[:, ::2], "contiguous"),
        "a number": (1.0, "out"),
        "a list": ([zeros(4, 2)], "out"),
        "text": ("text", "out"),
    }
    for name, (out, says) in wrong.items():
        for function in ("allreduce", "broadcast", "reduce"):
            attempt = _call_with(function, zeros(4, 2), out)
            yield f"{function}: out {name}", _refused_out(function, attempt, says)


def _wrong_sizes() -> Refusals:
    for function in ("all_gather", "gather"):
        attempt = _call_with(function, zeros(4), zeros(4))
        yield f"{function}: out of one block", _refused_out(function, attempt, "shape", 2)
    for out, says in ((zeros(3), "shape"), (np.zeros(2), "dtype")):
        yield f"recv: out {says}", Refusal(InvalidArgument, _recv(out), says, min_world=2)
    names = _call_with("allreduce", {"a": zeros(2)}, {"b": zeros(2)})
    yield "allreduce: out of other keys", Refusal(InvalidArgument, names, "['b']")


def _recv(out: Any) -> Attempt:
    def attempt(backend: Backend) -> object:
        peer = (backend.rank + 1) % backend.world_size
        return ferrodist.recv(peer, backend, out=out, like=zeros(2))

    return attempt


# -- overlaps --------------------------------------------------------------------------------------


def _overlaps() -> Refusals:
    for function in ("allreduce", "broadcast", "reduce", "all_to_all"):
        yield f"{function}: out overlaps x", _refused_out(function, _shifted(function), "overlap")
    memory = zeros(8)
    backwards = _call_with("allreduce", memory[::-1], memory)
    yield "allreduce: out is x backwards", Refusal(InvalidArgument, backwards, "overlap")
    between = _call_with("allreduce", memory[::2], memory[:4])
    yield "allreduce: out between x", Refusal(InvalidArgument, between, "overlap")
    one, two = zeros(3), zeros(3)
    swapped = _call_with("allreduce", [one, two], [two, one])
    yield "allreduce: leaves of out are other leaves", Refusal(InvalidArgument, swapped, "overlap")
    twice = _call_with("broadcast", [one, two], [memory[:3], memory[:3]])
    yield "broadcast: one out for two leaves", Refusal(InvalidArgument, twice, "overlap")
    for function in ("all_gather", "gather", "reduce_scatter"):
        attempt = _first_part(function)
        other = Refusal(InvalidArgument, attempt, "overlap", min_world=2, is_told=True)
        yield f"{function}: the part of rank 0", other


def _shifted(function: str) -> Attempt:
    """Pass an out that begins one row behind x, in the same memory."""

    def attempt(backend: Backend) -> object:
        memory = zeros(2 * backend.world_size + 1, 3)
        return _call_with(function, memory[:-1], memory[1:])(backend)

    return attempt


def _first_part(function: str) -> Attempt:
    """Let x, or out, be the part of rank 0 in the other one: only the last rank is wrong in it."""

    def attempt(backend: Backend) -> object:
        large = zeros(backend.world_size, 2)
        place = 0 if _is_last(backend) else backend.rank
        small = large[place : place + 1]
        x, out = (large, small) if function == "reduce_scatter" else (small, large)
        return _call_with(function, x, out)(backend)

    return attempt


# -- calls that are refused ------------------------------------------------------------------------


def check_refused(trial: Trial) -> None:
    """Attempt it on every rank, or on one while the others go on; all stay in step."""
    case, backend = trial.case, trial.backend
    refusal = (
        REFUSALS[case.detail] if case.detail else illegal_op(case.function, case.dtype, case.op)
    )
    if case.style != "one_rank" or trial.rank == case.root or refusal.is_told:
        error = trial.expect_error(refusal.error, lambda: refusal.attempt(backend), refusal.says)
        if refusal.is_told and error is not None and not _is_last(backend):
            trial.expect_equal(error.rank, trial.world - 1, "the rank that refuses")
    trial.expect_in_step()


def illegal_op(function: str, dtype: str, op: str) -> Refusal:
    """Describe a reduction that has no meaning for a dtype."""
    x = np.ones(16, numpy_dtype(dtype))

    def attempt(backend: Backend) -> object:
        counts = [[16] + [0] * (backend.world_size - 1)] if function in COUNTED else []
        return getattr(ferrodist, function)(x, *counts, backend, op=op)

    return Refusal(UnsupportedOp, attempt, dtype)


def _call(function: str, make: Callable[[Backend], Any], **options: Any) -> Attempt:
    """Call a function with what ``make`` makes of the backend."""
    return lambda backend: getattr(ferrodist, function)(make(backend), backend, **options)


def _is_last(backend: Backend) -> bool:
    return backend.rank == backend.world_size - 1


def _call_of_last(function: str, wrong: Callable[[Backend], Any], right: Any = None) -> Attempt:
    """Let the last rank, which is the root if there is one, pass what is wrong."""

    def attempt(backend: Backend) -> object:
        x = wrong(backend) if _is_last(backend) else right
        is_rooted = not function.startswith("all_")
        options = {"root": backend.world_size - 1} if is_rooted else {}
        return getattr(ferrodist, function)(x, backend, **options)

    return attempt


def _next(backend: Backend) -> int:
    return (backend.rank + 1) % backend.world_size


# -- roots, peers, members: looked at before anything else -----------------------------------------


def _bad_root(function: str, root: Callable[[Backend], Any]) -> Attempt:
    wrong = np.array(["no array"])  # wrong too, but the root comes first
    counts = [None] if function in COUNTED else []
    return lambda backend: getattr(ferrodist, function)(wrong, *counts, backend, root=root(backend))


def _ranks() -> Refusals:
    for function in (*ROOTED, "broadcast_object", "gather_object", "scatter_object"):
        too_large = _bad_root(function, lambda backend: backend.world_size)
        yield f"{function}: root W", Refusal(InvalidRank, too_large)
        yield f"{function}: root -1", Refusal(InvalidRank, _bad_root(function, lambda b: -1), "-1")
    yield "root is a float", Refusal(InvalidRank, _bad_root("broadcast", lambda b: 0.0))
    yield "root is a bool", Refusal(InvalidRank, _bad_root("reduce", lambda b: False))
    yield "send to self", Refusal(SelfSend, lambda b: ferrodist.send(1, b.rank, b))
    yield "recv from self", Refusal(SelfSend, lambda b: ferrodist.recv(b.rank, b))
    yield "probe of self", Refusal(SelfSend, lambda b: ferrodist.probe(b.rank, b))
    yield "recv_object from self", Refusal(SelfSend, lambda b: ferrodist.recv_object(b.rank, b))
    any_rank = Refusal(InvalidArgument, lambda b: ferrodist.send(1, ferrodist.ANY_SOURCE, b))
    yield "send to any rank", any_rank
    wrong: Any = ferrodist.ANY_TAG
    any_tag = Refusal(InvalidArgument, lambda b: b.send(1, ferrodist.PROC_NULL, tag=wrong))
    yield "send with any tag", any_tag
    yield "recv from a tag", Refusal(InvalidArgument, lambda b: b.recv(ferrodist.ANY_TAG))
    yield "wait_any of nothing", Refusal(InvalidArgument, lambda b: ferrodist.wait_any([]))
    yield "wait_all of no Work", Refusal(InvalidArgument, lambda b: ferrodist.wait_all([wrong]))
    unsendable = Refusal(
        UnsupportedArray,
        lambda b: b.send_object(object(), (b.rank + 1) % b.world_size),
        min_world=2,
    )
    yield "send_object of an object", unsendable
    yield "send to rank W", Refusal(InvalidRank, lambda b: ferrodist.send(1, b.world_size, b))
    yield "recv from rank -1", Refusal(InvalidRank, lambda b: ferrodist.recv(-1, b))


def _members() -> Refusals:
    yield "split of no ranks", Refusal(InvalidWorldSize, lambda b: b.split([]))
    yield "split of a rank twice", Refusal(InvalidRank, lambda b: b.split([b.rank, b.rank]))
    yield "split with rank W", Refusal(InvalidRank, lambda b: b.split([b.rank, b.world_size]))
    outsider = Refusal(InvalidRank, lambda b: b.split([_next(b)]), min_world=2)
    yield "split by an outsider", outsider


# -- options ---------------------------------------------------------------------------------------


def _tagged(tag: Any) -> Attempt:
    return lambda backend: ferrodist.send(1, _next(backend), backend, tag=tag)


def _reduce_on_a_number(backend: Backend) -> object:
    wrong: Any = backend.rank
    return ferrodist.allreduce(1, wrong)


def _options() -> Refusals:
    for tag in (-1, 2**31, 1.5, True):
        yield f"tag {tag}", Refusal(InvalidArgument, _tagged(tag), "tag", min_world=2)
    for timeout in (0, -1.0, float("nan"), "soon", True):
        timed = _call("allreduce", lambda b: 1, timeout=timeout)
        yield f"timeout {timeout!r}", Refusal(InvalidArgument, timed, "timeout")
    unknown = _call("allreduce", lambda b: 1, op="median")
    yield "unknown op", Refusal(InvalidArgument, unknown, "bxor")
    yield "a number as backend", Refusal(InvalidArgument, _reduce_on_a_number, "Backend")
    unknown = _call("allreduce", lambda b: 1, algorithm="telepathy")
    yield "unknown algorithm", Refusal(InvalidArgument, unknown, "star", needs_algorithms=True)
    ring = _call("allreduce", lambda b: 1.0, algorithm="ring", reproducible=True)
    yield "reproducible ring", Refusal(UnsupportedOp, ring, "order", needs_algorithms=True)


# -- arrays, trees, objects ------------------------------------------------------------------------

_STRANGE: dict[str, Callable[[Backend], Any]] = {
    "an object array": lambda b: np.array([{}, None]),
    "a string array": lambda b: np.array(["a"]),
    "a structured array": lambda b: np.zeros(2, [("a", "i4")]),
    "a masked array": lambda b: np.ma.masked_array([1.0, 2.0], [True, False]),
    "a longdouble array": lambda b: np.zeros(2, np.longdouble),
    "a datetime array": lambda b: np.zeros(2, "M8[s]"),
    "a big-endian array": lambda b: np.zeros(2, ">f4"),
    "text": lambda b: "text",
    "a set": lambda b: {1, 2},
    "a class": lambda b: np.float32,
    "an int beyond int64": lambda b: 2**63,
}


def _arrays() -> Refusals:
    for name, make in _STRANGE.items():
        for function in ("broadcast", "gather", "all_gather_uneven"):
            yield f"{function}: {name}", Refusal(UnsupportedArray, _call(function, make))
    for function in ("gather", "all_to_all", "all_gather_uneven"):
        none = _call(function, lambda b: None)
        yield f"{function}: none", Refusal(UnsupportedArray, none)
        tree = _call(function, lambda b: [zeros(b.world_size)])
        yield f"{function}: a tree", Refusal(UnsupportedArray, tree)
    large = _call("allreduce", lambda b: 2**62)
    yield "a sum that may wrap", Refusal(UnsupportedArray, large, "int64", min_world=2)
    mean = _call("allreduce", lambda b: 1, op="mean")
    yield "a mean of ints", Refusal(UnsupportedOp, mean, "float(x)")


def _leaves() -> Refusals:
    text = _call("allreduce", lambda b: {"a": [zeros(2), "text"]})
    yield "a leaf that is text", Refusal(UnsupportedArray, text, "['a'][1]")
    objects = _call("broadcast", lambda b: (zeros(2), {"b": np.array([None])}))
    yield "a leaf of objects", Refusal(UnsupportedArray, objects, "[1]['b']")
    op = _call("allreduce", lambda b: {"c": zeros(2), "d": [np.zeros(2, int)]}, op="mean")
    yield "a leaf without a mean", Refusal(UnsupportedOp, op, "['d'][0]")
    uncut = _call("reduce_scatter", lambda b: {"e": zeros(b.world_size + 1)})
    yield "a leaf that cannot be cut", Refusal(SizeMismatch, uncut, "['e']", min_world=2)
    unsorted = _call("allreduce", lambda b: {"a": 1, 2: 1})
    yield "keys that cannot be sorted", Refusal(UnsupportedArray, unsorted)


def _objects() -> Refusals:
    unknown = _call_of_last("all_gather_object", lambda b: {"a": [1, object()]})
    yield "an unknown object", Refusal(UnsupportedArray, unknown, "['a'][1]", is_told=True)
    for function in ("gather_object", "broadcast_object"):
        advice = _call_of_last(function, lambda b: print)
        name = f"{function}: an object for pickle"
        yield name, Refusal(UnsupportedArray, advice, "pickle=True", is_told=True)
    many = _call_of_last("scatter_object", lambda b: [1] * (b.world_size + 1))
    yield "too many objects to scatter", Refusal(InvalidArgument, many, is_told=True)


# -- shapes ----------------------------------------------------------------------------------------


def _cut(function: str, shape_of: Callable[[int], tuple[int, ...]]) -> Attempt:
    """Pass an array whose shape depends on the world."""
    call = _call_of_last if function == "scatter" else _call
    return call(function, lambda backend: zeros(*shape_of(backend.world_size)))


def _shapes() -> Refusals:
    for function in CUT:
        options: dict[str, Any] = {"min_world": 2, "is_told": function == "scatter"}
        uneven, number = _cut(function, lambda w: (w + 1,)), _cut(function, lambda w: ())
        yield f"{function}: indivisible", Refusal(SizeMismatch, uneven, **options)
        yield f"{function}: a number", Refusal(SizeMismatch, number, **options)
        axis = _cut(function, lambda w: (w + 1, w))
        yield f"{function}: indivisible axis", Refusal(InvalidShape, axis, "axis 0", **options)
    lists = _call_of_last("scatter", lambda b: [1] * b.world_size)
    yield (
        "scatter: a list",
        Refusal(UnsupportedArray, lists, "use scatter_object", min_world=2, is_told=True),
    )


def _exchange(counts_of: Callable[[int], list[Any]]) -> Attempt:
    return lambda b: ferrodist.all_to_all_uneven(zeros(1), counts_of(b.world_size), b)


def _counts() -> Refusals:
    for name, counts_of in (
        ("too many counts", lambda w: [0] * w + [1]),
        ("negative counts", lambda w: [-1] * w),
        ("counts of another total", lambda w: [7] * w),
        ("counts that are no integers", lambda w: [1.0 / w] * w),
    ):
        yield name, Refusal(InvalidArgument, _exchange(counts_of), "counts")
        reduce = Refusal(InvalidArgument, _cut_by(counts_of), "counts")
        yield f"reduce_scatter_uneven: {name}", reduce
        told = Refusal(InvalidArgument, _scatter_by(counts_of), "counts", is_told=True)
        yield f"scatter_uneven: {name}", told
    none = Refusal(InvalidArgument, _scatter_by(lambda w: None), "None on the root", is_told=True)
    yield "scatter_uneven: no counts", none
    number = Refusal(InvalidShape, lambda b: b.reduce_scatter_uneven(1.0, [1] * b.world_size))
    yield "reduce_scatter_uneven: a number", number
    named = Refusal(InvalidArgument, _cut_by(lambda w: [2] * w), "rank 0: 2, rank 1: 2", 2)
    yield "counts are named by rank", named


def _cut_by(counts_of: Callable[[int], Any]) -> Attempt:
    return lambda b: ferrodist.reduce_scatter_uneven(zeros(1), counts_of(b.world_size), b)


def _scatter_by(counts_of: Callable[[int], Any]) -> Attempt:
    def attempt(backend: Backend) -> object:
        world, is_root = backend.world_size, _is_last(backend)
        x, counts = (zeros(1), counts_of(world)) if is_root else (None, None)
        return ferrodist.scatter_uneven(x, counts, backend, root=world - 1)

    return attempt


def _minloc(x: Any) -> Attempt:
    return _call("allreduce", lambda backend: x, op="minloc")


def _pairs() -> Refusals:
    two, wrong = zeros(2), "must be a pair"
    for name, x, error, says in (
        ("an array", two, UnsupportedArray, wrong),
        ("three arrays", (two, two, two), UnsupportedArray, wrong),
        ("a tree", ([two], two), UnsupportedArray, wrong),
        ("none", None, UnsupportedArray, wrong),
        ("a pair without indices", (two, None), UnsupportedArray, wrong),
        ("a pair of two shapes", (two, np.zeros(3, int)), InvalidShape, "(3,)"),
        ("indices that are floats", (two, two), UnsupportedOp, "integers"),
        ("complex values", (1j, 1), UnsupportedOp, "no order"),
    ):
        yield f"minloc of {name}", Refusal(error, _minloc(x), says)
    pair = _call("exscan", lambda b: (two, np.zeros(2, int)), op="maxloc")
    yield "maxloc in exscan", Refusal(UnsupportedOp, pair, "allreduce, reduce and scan")
    custom = ReduceOp.custom(max, name="largest")
    for options in ({}, {"algorithm": "star"}):
        function = "allreduce" if options else "reduce_scatter"
        attempt = _call(function, lambda b: zeros(b.world_size), op=custom, **options)
        refusal = Refusal(UnsupportedOp, attempt, "largest", needs_algorithms=bool(options))
        yield f"{function} by a function", refusal


def _all() -> Iterator[tuple[str, Refusal]]:
    for group in (_ranks, _members, _options, _arrays, _leaves, _objects, _shapes, _counts, _pairs):
        yield from group()
    yield from refused_outs()


REFUSALS: dict[str, Refusal] = dict(_all())
