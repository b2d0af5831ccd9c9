"""The same wrong call on all ranks, or on one: every rank learns of it, and all stay in step.

A table of wrong arguments of every collective is generated. Where all ranks make the wrong call,
the next call must work. Where one rank makes it, either it raises alone and may make the call
again, or all ranks raise, because the others wait in the call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import ferrodist
from ferrodist.testing import run_ranks

pytestmark = pytest.mark.timeout(120)

WORLD = 3
ROOT, LAST = 1, 2


class Wrong(NamedTuple):
    """A call, its arguments as they are right, and those that are wrong in it."""

    function: str
    name: str
    right: Callable[[int], dict[str, Any]]
    wrong: dict[str, Any]
    all_raise: bool  # whether the others wait in the call for a rank that refuses


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


def read_only(*shape: int) -> Any:
    array = zeros(*shape)
    array.flags.writeable = False
    return array


ARRAYS: dict[str, Any] = {
    "a list": ["a", 1],
    "text": "text",
    "an object array": np.array([{}, None, 1]),
    "a string array": np.array(["a", "b", "c"]),
    "a class": np.float32,
    "an iterator": iter(()),
    "a big-endian array": np.zeros(3, ">f4"),
}
OUTS: dict[str, Any] = {
    "dtype": np.zeros(WORLD, np.int8),
    "shape": zeros(WORLD + 4, 2),
    "read-only": read_only(WORLD),
    "a number": 1.0,
    "a list of numbers": [0, 0, 0],
    "text": "text",
    "strided": zeros(2 * WORLD)[::2],
}
CUT = ("scatter", "scatter_uneven")
ROOTED = ("broadcast", "reduce", "gather", "gather_uneven", *CUT)
COUNTED = ("scatter_uneven", "reduce_scatter_uneven")
DENSE = (
    *("allreduce", "broadcast", "reduce", "all_gather", "gather", "reduce_scatter", "all_to_all"),
    *("scan", "exscan", "all_gather_uneven", "gather_uneven", "all_to_all_uneven"),
    *("reduce_scatter_uneven", *CUT),
)
# Where a rank has a result that others do not have, or of a size of its own.
OUT_REFUSED_IN_CALL = ("reduce", "gather", "exscan", "reduce_scatter_uneven", *CUT)
OUT_FOUND_WRONG_IN_CALL = ("all_gather_uneven", "gather_uneven", "all_to_all_uneven")


def arguments(function: str, **others: Any) -> dict[str, Any]:
    """Return what is right in a call, but for some."""
    found: dict[str, Any] = {"x": zeros(WORLD)}
    if function in COUNTED:
        found["counts"] = [1] * WORLD
    if function == "all_to_all_uneven":
        found["send_counts"] = [1] * WORLD
    if function in ROOTED:
        found["root"] = ROOT
    return found | others


def table() -> Iterator[Wrong]:
    for function in DENSE:

        def right(rank: int, function: str = function) -> dict[str, Any]:
            return arguments(function, x=None if function in CUT and rank != ROOT else zeros(WORLD))

        for name, x in ARRAYS.items():
            wrong = arguments(function, x=x)
            yield Wrong(function, f"x {name}", right, wrong, function in CUT)
        in_call = function in OUT_REFUSED_IN_CALL + OUT_FOUND_WRONG_IN_CALL
        for name, out in OUTS.items():
            wrong = arguments(function, out=out)
            yield Wrong(function, f"out {name}", right, wrong, in_call)
        for name, keyword in (
            ("timeout", {"timeout": -1.0}),
            ("algorithm", {"algorithm": "telepathy"}),
            ("keyword", {"group": None}),
        ):
            wrong = arguments(function, **keyword)
            yield Wrong(function, name, right, wrong, False)
        for name, counts in (("too many", [1] * 9), ("none", 5), ("a wrong sum", [7] * WORLD)):
            key = "send_counts" if function == "all_to_all_uneven" else "counts"
            if function in (*COUNTED, "all_to_all_uneven"):
                wrong = arguments(function, **{key: counts})
                told = function == "scatter_uneven"
                yield Wrong(function, f"counts {name}", right, wrong, told)
        if function in ROOTED:
            wrong = arguments(function, root=WORLD)
            yield Wrong(function, "root", right, wrong, False)
    yield from overlaps()
    for function in ("broadcast_object", "gather_object", "all_gather_object", "scatter_object"):
        key = "values" if function == "scatter_object" else "value"
        root = {} if function == "all_gather_object" else {"root": ROOT}
        good = {key: [1] * WORLD, **root}
        yield Wrong(
            function,
            "an object",
            lambda _, good=good: good,
            {**good, key: [object()] * WORLD},
            True,
        )


def overlaps() -> Iterator[Wrong]:
    """The part of rank 0 on all ranks: right on that rank, wrong on the others."""
    for function in ("all_gather", "gather", "all_gather_uneven", "gather_uneven"):
        out = zeros(WORLD)
        yield Wrong(
            function,
            "x is the part of rank 0 of out",
            lambda _, f=function: arguments(f, x=zeros(1)),
            arguments(function, x=out[:1], out=out),
            True,
        )
    for function in ("reduce_scatter", "reduce_scatter_uneven"):
        x = zeros(WORLD)
        yield Wrong(
            function,
            "out is the part of rank 0 of x",
            lambda _, f=function: arguments(f),
            arguments(function, x=x, out=x[:1]),
            True,
        )


TABLE = {(wrong.function, wrong.name): wrong for wrong in table()}


def attempt(backend: Any, function: str, arguments: dict[str, Any], is_async: bool) -> Any:
    """Make a call; return its error, or None."""
    try:
        work = getattr(ferrodist, function)(backend=backend, async_op=is_async, **arguments)
        if is_async:
            work.wait(20.0)
    except (ferrodist.DistributedError, TypeError) as error:
        return error
    return None


def step(backend: Any, what: str) -> None:
    got = ferrodist.allreduce(np.array([1 << backend.rank]), backend, timeout=20.0)
    assert got.tolist() == [(1 << WORLD) - 1], what


def make_wrong_calls(backend: Any) -> int:
    """Make every call of the table, on all ranks and on one, blocking and in flight."""
    backend.timeout = 20.0
    made = 0
    for wrong, is_async in itertools.product(TABLE.values(), (False, True)):
        what = f"{wrong.function}: {wrong.name}, in flight: {is_async}"
        assert attempt(backend, wrong.function, wrong.wrong, is_async) is not None, what
        step(backend, what)
        # Rank 0 has no result of exscan, and the overlaps are right there.
        for odd in (ROOT, LAST) if wrong.function in CUT else (ROOT,):
            make_it_on_one_rank(backend, wrong, odd, is_async)
        made += 1
    return made


def make_it_on_one_rank(backend: Any, wrong: Wrong, odd: int, is_async: bool) -> None:
    rank, function = backend.rank, wrong.function
    what = f"{function}: {wrong.name} on rank {odd}, in flight: {is_async}"
    arguments = wrong.wrong if rank == odd else wrong.right(rank)
    error = attempt(backend, function, arguments, is_async)
    if wrong.all_raise:
        assert isinstance(error, ferrodist.DistributedError), (what, error)
        assert not isinstance(error, TimeoutError | ConnectionError), (what, error)
        assert rank == odd or f"rank {odd}" in str(error), (what, error)
    elif rank == odd:
        assert error is not None, what
        assert attempt(backend, function, wrong.right(rank), is_async) is None, what
    else:
        assert error is None, (what, error)
    step(backend, what)


@pytest.mark.parametrize("function", [*dict.fromkeys(function for function, _ in TABLE)])
def test_the_table_has_every_collective_with_every_kind_of_argument(function: str) -> None:
    assert len([key for key in TABLE if key[0] == function]) >= (1 if "object" in function else 17)


def test_wrong_calls_on_threads_leave_all_ranks_in_step() -> None:
    assert run_ranks(WORLD, make_wrong_calls) == [2 * len(TABLE)] * WORLD


def test_wrong_calls_leave_all_ranks_in_step(start: Callable[..., Any]) -> None:
    with start(WORLD, lambda backend, pipe: make_wrong_calls(backend)) as job:
        assert job.results(90) == [2 * len(TABLE)] * WORLD
