"""The fast path of calls and the general one: one result, one fingerprint, the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import DistributedError, ReduceOp
from ferrodist.testing import distinct_values
from ferrodist.testing.contract.values import DTYPES, legal_ops

pytestmark = pytest.mark.timeout(100)

Call = Callable[..., Any]
SHAPES = [
    (),
    (0,),
    (0, 2),
    (1,),
    (6,),
    (3, 2),
    (6, 1, 2),
    (3, 2, 1, 2),
    (3, 1, 2, 1, 2),
    (3, 7001),  # more than 32 KB from 2 bytes on: without the GIL
]
KINDS = [
    "allreduce",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "reduce_scatter",
    "all_to_all",
]
CUT = ("reduce_scatter", "all_to_all")
WAYS = ["fast", "general", "timeout", "async"]


def go(way: str, name: str, backend: Any, *args: Any, **options: Any) -> Any:
    """Make a call on one of the paths, always from one line; the fast one takes no other."""
    call: Call = getattr(ferrodist, name)
    more = {"timeout": {"timeout": 30}, "async": {"async_op": True}}.get(way, {})
    call_path = backend._call_path
    if way == "fast":
        backend._perform = declined
    elif way == "general":
        backend._call_path = None
    try:
        result = call(*args, backend, **options, **more)
        return result.wait(30) if way == "async" else result
    finally:
        backend._call_path = call_path
        vars(backend).pop("_perform", None)


class Declined(Exception):
    """The fast path did not take a call."""


def declined(*args: Any) -> None:
    raise Declined


def calls_on(dtype: str, world: int) -> list[tuple[str, tuple[int, ...], dict[str, Any]]]:
    """List calls of every kind with arrays of every shape."""
    calls = []
    for name in KINDS:
        for number, shape in enumerate(SHAPES):
            if name in CUT and (not shape or shape[0] % world):
                continue
            options: dict[str, Any] = {}
            if name in ("allreduce", "reduce", "reduce_scatter"):
                ops = legal_ops(dtype)
                options["op"] = ReduceOp[ops[number % len(ops)]]
            if name in ("broadcast", "reduce", "gather"):
                options["root"] = number % world
            calls.append((name, shape, options))
    return calls


def ways_mixed(backend: Any) -> tuple[int, list[Any]]:
    """Make calls of every kind, each rank another way; list those that come to another result."""
    number, wrong = 0, []
    for dtype in sorted(set(DTYPES) - {"bfloat16"}):  # distinct_values has none
        for name, shape, options in calls_on(dtype, backend.world_size):
            x = distinct_values(backend.rank, shape, dtype, seed=number)
            usual = go("general", name, backend, x, **options)
            mixed = go(WAYS[(number + backend.rank) % 4], name, backend, x, **options)
            number += 1
            if type(usual) is not type(mixed) or not np.array_equal(usual, mixed):
                wrong.append((name, dtype, shape, options))
    go("general", "barrier", backend)
    for turn in range(len(WAYS)):  # a barrier is never asynchronous
        go(WAYS[(turn + backend.rank) % 3], "barrier", backend)
    return number, wrong


@pytest.mark.slow
@pytest.mark.parametrize("reproducible", [False, True])
def test_both_ways_have_one_fingerprint_and_one_result_and_mix_between_ranks(start, reproducible):
    """A rank goes each way in turn, beside ranks that go the others: a difference would show."""

    def body(backend, pipe):
        backend.reproducible = reproducible
        return ways_mixed(backend)

    with start(3, body) as job:
        for number, wrong in job.results():
            assert wrong == []
            assert number > 900


def test_both_ways_write_to_out_in_place_and_to_parts(start, backend_name):
    def body(backend, pipe):
        rank, world = backend.rank, backend.world_size
        found = []
        for turn in range(4):
            way = WAYS[(turn + rank) % 4]
            x = np.arange(6.0) + 10 * rank
            out = np.full(6, -1.0)
            go("general", "allreduce", backend, x)
            assert go(way, "allreduce", backend, x, out=out) is out
            if way == "fast" and backend_name != "shared_memory":
                way = "plain"  # not every algorithm may work in place
            assert go(way, "allreduce", backend, x, out=x) is x
            parts = np.full((world, 2), float(rank))
            gathered = go(way, "all_gather", backend, parts[rank], out=parts.reshape(-1))
            assert gathered.base is parts
            found.append((out.tolist(), x.tolist(), parts.tolist()))
        return found

    total = (3 * np.arange(6.0) + 30).tolist()
    with start(3, body) as job:
        assert job.results() == [[(total, total, [[0.0] * 2, [1.0] * 2, [2.0] * 2])] * 4] * 3


REFUSED: dict[str, Callable[[str, Any], Any]] = {
    "root too large": lambda w, b: go(w, "broadcast", b, np.ones(3), root=3),
    "root below zero": lambda w, b: go(w, "reduce", b, np.ones(3), root=-1),
    "root is a bool": lambda w, b: go(w, "gather", b, np.ones(3), root=True),
    "root is beyond int": lambda w, b: go(w, "gather", b, np.ones(3), root=1 << 40),
    "root is no number": lambda w, b: go(w, "gather", b, np.ones(3), root="1"),
    "op is a number": lambda w, b: go(w, "allreduce", b, np.ones(3), op=0),
    "op is unknown": lambda w, b: go(w, "allreduce", b, np.ones(3), op="no"),
    "op of another dtype": lambda w, b: go(w, "allreduce", b, np.ones(3), op=ReduceOp.BXOR),
    "mean of integers": lambda w, b: go(w, "reduce", b, np.ones(3, int), op=ReduceOp.MEAN),
    "strings": lambda w, b: go(w, "allreduce", b, np.array(["a"])),
    "big-endian": lambda w, b: go(w, "allreduce", b, np.ones(3, ">f8")),
    "long double": lambda w, b: go(w, "allreduce", b, np.ones(3, np.longdouble)),
    "rows do not fit the world": lambda w, b: go(w, "reduce_scatter", b, np.ones((4, 3))),
    "elements do not fit the world": lambda w, b: go(w, "all_to_all", b, np.ones(4)),
    "0-d array cut by rank": lambda w, b: go(w, "all_to_all", b, np.array(1.0)),
    "out of another shape": lambda w, b: go(w, "allreduce", b, np.ones(3), out=np.ones(4)),
    "out of another dtype": lambda w, b: go(w, "allreduce", b, np.ones(3), out=np.ones(3, int)),
    "out is read-only": lambda w, b: go(w, "allreduce", b, np.ones(3), out=read_only(3)),
    "out is strided": lambda w, b: go(w, "allreduce", b, np.ones(3), out=np.ones(6)[::2]),
    "out overlaps": lambda w, b: go(w, "allreduce", b, LONG[:3], out=LONG[1:4]),
    "out is no array": lambda w, b: go(w, "allreduce", b, np.ones(3), out=[1.0, 2.0, 3.0]),
}
LONG = np.ones(6)


def read_only(count: int) -> Any:
    x = np.ones(count)
    x.flags.writeable = False
    return x


def words_of_refusal(call: Callable[..., Any], *args: Any) -> str:
    try:
        return f"returned {call(*args)!r}"
    except DistributedError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.slow
def test_what_is_refused_is_refused_in_the_same_words_either_way(start):
    """The fast path declines what it does not take; it must not take what is refused."""

    def body(backend, pipe):
        refused = {}
        for name in ("allreduce", "broadcast", "reduce", "gather"):
            go("general", name, backend, np.ones(3))  # the fast path is open for such calls
        backend.timeout = 2
        for name, call in REFUSED.items() if backend.rank == 1 else ():
            refused[name] = [words_of_refusal(call, way, backend) for way in ("general", "plain")]
        return refused, ferrodist.allreduce(backend.rank, backend, timeout=30)

    with start(3, body) as job:
        (_, first), (refused, second), (_, third) = job.results()
    for name, (general, plain) in refused.items():
        assert general == plain, name
        assert not general.startswith("returned"), name
    assert [first, second, third] == [3, 3, 3]


DIFFERENT = {
    "shape": lambda w, b, odd: go(w, "allreduce", b, np.ones(4 if odd else 3)),
    "axes": lambda w, b, odd: go(w, "broadcast", b, np.ones((2, 3) if odd else (3, 2))),
    "number of axes": lambda w, b, odd: go(w, "gather", b, np.ones((1, 3) if odd else 3)),
    "dtype": lambda w, b, odd: go(w, "all_gather", b, np.ones(3, "f4" if odd else "i4")),
    "op": lambda w, b, odd: go(w, "reduce", b, np.ones(3), op=ReduceOp(4 if odd else 0)),
    "root": lambda w, b, odd: go(w, "broadcast", b, np.ones(3), root=int(odd)),
    "kind": lambda w, b, odd: go(w, "all_to_all" if odd else "all_gather", b, np.ones(3)),
    "large": lambda w, b, odd: go(w, "allreduce", b, np.ones(90_001 if odd else 90_000)),
}


def test_a_difference_is_told_in_the_same_words_either_way(start):
    def body(backend, pipe):
        found: dict[str, list[Any]] = {name: [] for name in DIFFERENT}
        for name, call in DIFFERENT.items():
            for is_odd in (True, False):
                call("general", backend, is_odd)
            for turn in range(5):
                way = WAYS[(turn + backend.rank) % 4] if turn < 4 else "fast"
                with pytest.raises(ferrodist.CollectiveMismatch) as caught:
                    call(way, backend, backend.rank == 2)
                text = str(caught.value).replace(f"#{caught.value.sequence}:", "#:")
                found[name].append((type(caught.value), text))
        assert ferrodist.allreduce(backend.rank, backend) == 3
        return found

    with start(3, body) as job:
        results = job.results()
    assert results[0] == results[1] == results[2]
    for name, texts in results[0].items():
        assert len(set(texts)) == 1, name
        assert "  rank 2  " in texts[0][1]
