"""The fast path against the general one: every kind of array, call and dtype.

A result must have the type, dtype, shape and bits that the general path gives it, and what is
refused must be refused in the same words, on shared memory, TCP and hybrid.
"""

from __future__ import annotations

import array
import contextlib
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import ferrodist
from ferrodist import (
    CollectiveMismatch,
    CollectiveTimeout,
    DistributedError,
    GroupAborted,
    ReduceOp,
    _native,
)
from ferrodist.buffer import ArrayKind
from ferrodist.config import DEFAULT
from ferrodist.testing import distinct_values
from ferrodist.testing.contract.values import DTYPES, can_hold, legal_ops, numpy_dtype, to_library

pytestmark = [pytest.mark.slow, pytest.mark.timeout(110)]

REDUCTIONS = ("allreduce", "reduce", "reduce_scatter", "scan", "exscan")
CALLS = (*REDUCTIONS, "broadcast", "all_gather", "gather", "all_to_all")
CUT = ("reduce_scatter", "all_to_all")
SHAPES = ((), (0,), (0, 2), (3,), (6, 2), (3, 1, 2), (6, 4099))


class Declined(Exception):
    """The fast path did not take a call."""


def make_call(path: str, name: str, backend: Any, x: Any, **options: Any) -> Any:
    """Make a call that must take the path it is told, from one line."""

    def decline(*args: Any) -> None:
        raise Declined(f"{name} of {type(x)} {options}")

    call_path = backend._call_path
    if path == "fast":
        backend._perform = decline
    elif path == "general":
        backend._call_path = None
    try:
        return getattr(ferrodist, name)(x, backend, **options)
    finally:
        backend._call_path = call_path
        vars(backend).pop("_perform", None)


# -- kinds of arrays -------------------------------------------------------------------------------


def strided(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Hold the same values with gaps between them, and backwards."""
    if x.ndim == 0:
        return x
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    wide[..., ::2] = x
    return np.flip(np.flip(wide[..., ::2].copy(), -1)[..., :], -1) if x.size % 2 else wide[..., ::2]


def torch_strided(x: np.ndarray[Any, Any]) -> Any:
    tensor = to_library(x, "torch")
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.ndim > 1 else tensor


def torch_with_gradient(x: np.ndarray[Any, Any]) -> Any:
    tensor = to_library(x, "torch")
    return tensor.requires_grad_() if tensor.is_floating_point() or tensor.is_complex() else tensor


def torch_parameter(x: np.ndarray[Any, Any]) -> Any:
    import torch

    tensor = to_library(x, "torch")
    has_gradient = tensor.is_floating_point() or tensor.is_complex()
    return torch.nn.Parameter(tensor, requires_grad=has_gradient)


class Exporter:
    """An array of a library that only speaks DLPack."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.values.__dlpack_device__()


def typed(x: np.ndarray[Any, Any]) -> Any:
    return array.array(x.dtype.char, x.tobytes())


KINDS: dict[str, tuple[Callable[[Any], Any], Callable[[str, tuple[int, ...]], bool]]] = {
    "numpy": (lambda x: x, lambda dtype, shape: True),
    "numpy strided": (strided, lambda dtype, shape: True),
    "numpy scalar": (lambda x: x[()], lambda dtype, shape: shape == ()),
    "number": (
        lambda x: (x % 5).item() if x.dtype.kind in "iu" else x.item(),
        lambda dtype, shape: shape == () and can_hold("python", dtype),
    ),
    "torch": (lambda x: to_library(x, "torch"), lambda dtype, shape: True),
    "torch strided": (torch_strided, lambda dtype, shape: True),
    "torch with gradient": (torch_with_gradient, lambda dtype, shape: True),
    "torch parameter": (torch_parameter, lambda dtype, shape: True),
    "jax": (lambda x: to_library(x, "jax"), lambda dtype, shape: can_hold("jax", dtype)),
    "bytes": (lambda x: x.tobytes(), lambda dtype, shape: dtype == "uint8" and len(shape) == 1),
    "bytearray": (
        lambda x: bytearray(x.tobytes()),
        lambda dtype, shape: dtype == "uint8" and len(shape) == 1,
    ),
    "array": (
        typed,
        lambda dtype, shape: dtype in ("int8", "int32", "float32", "float64") and len(shape) == 1,
    ),
    "memoryview": (lambda x: x.data, lambda dtype, shape: dtype in ("int32", "float64")),
    "dlpack": (Exporter, lambda dtype, shape: dtype != "bfloat16"),
}
RARE = ("number", "numpy scalar", "bytes", "bytearray", "array", "memoryview")  # hold little


def combinations(kind: str, *others: Sequence[str], every: bool) -> Iterator[tuple[Any, ...]]:
    """Combine dtypes and shapes that a kind can hold with others.

    Unless every one is asked for: of three columns a third of the rows, in which all pairs are; of
    dtypes and shapes of JAX, which compiles for each of their pairs, a third.
    """
    columns = (DTYPES, SHAPES, *others)
    for places in itertools.product(*(range(len(column)) for column in columns)):
        dtype, shape, *rest = (column[at] for column, at in zip(columns, places, strict=True))
        thinned = places[:2] if kind == "jax" else places if others and kind not in RARE else ()
        if KINDS[kind][1](dtype, shape) and (every or sum(thinned) % 3 == 0):
            yield dtype, shape, *rest


def calls_of(
    kind: str, world: int, every: bool
) -> Iterator[tuple[str, str, tuple[int, ...], dict[str, Any]]]:
    """List calls, dtypes, shapes and options for a kind of array."""
    numbers = itertools.count()
    for dtype, shape, name in combinations(kind, CALLS, every=every):
        if name in CUT and (not shape or shape[0] % world):
            continue
        options: dict[str, Any] = {}
        if name in REDUCTIONS:
            ops = [op for op in legal_ops(dtype) if op != "MEAN" or "scan" not in name]
            options["op"] = ReduceOp[ops[next(numbers) % len(ops)]]
            if kind == "number" and options["op"] is ReduceOp.PROD:
                options["op"] = ReduceOp.SUM  # of large ints it is refused, on both paths
        if name in ("broadcast", "reduce", "gather"):
            options["root"] = next(numbers) % world
        yield name, dtype, shape, options


def described(x: Any) -> Any:
    """Say all there is to know of a result: type, dtype, shape, bits."""
    if x is None or isinstance(x, (bool, int, float, complex, bytes, bytearray)):
        return type(x), repr(x)
    if isinstance(x, Exporter):
        return Exporter, described(x.values)
    if type(x).__module__.partition(".")[0] == "torch":
        import torch

        bits = x.view(torch.int16) if x.dtype is torch.bfloat16 else x
        facts = (x.requires_grad, x.is_contiguous(), str(x.device))
        return type(x), str(x.dtype), tuple(x.shape), facts, bits.detach().numpy().tobytes()
    values = np.asarray(x)
    return type(x), values.dtype.name, values.shape, values.tobytes()


def compare_paths(backend: Any, kind: str, every: bool) -> tuple[int, list[Any]]:
    make, number, wrong = KINDS[kind][0], 0, []
    if kind.startswith(("torch", "jax", "dlpack")):  # whose types are registered when first seen
        ferrodist.broadcast(make(np.ones(1, np.float32)), backend)
    for name, dtype, shape, options in calls_of(kind, backend.world_size, every):
        values = distinct_values(backend.rank, shape, dtype, seed=number)
        number += 1
        usual = make_call("general", name, backend, make(values), **options)
        mixed = "fast" if (number + backend.rank) % 2 else "general"
        for path in ("fast", mixed):
            found = make_call(path, name, backend, make(values), **options)
            if described(found) != described(usual):
                wrong.append((name, dtype, shape, options, described(found), described(usual)))
    return number, wrong


@pytest.mark.parametrize("kind", KINDS)
def test_both_paths_give_the_same_results(start, kind):
    with start(3, lambda backend, pipe: compare_paths(backend, kind, every=False)) as job:
        for number, wrong in job.results():
            assert wrong == []
            assert number >= 4


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in RARE])
def test_both_paths_give_the_same_results_in_every_combination(start, kind):
    with start(3, lambda backend, pipe: compare_paths(backend, kind, every=True)) as job:
        for number, wrong in job.results():
            assert wrong == []
            assert number >= 4


def write_out(backend: Any, library: str) -> list[Any]:
    """Write into the caller's arrays, apart from x, x itself, and parts of each other."""
    rank, world, wrong = backend.rank, backend.world_size, []
    ferrodist.broadcast(to_library(np.ones(1), library), backend)
    for dtype, path in itertools.product(DTYPES, ("fast", "general")):
        values = [distinct_values(r, (6,), dtype, seed=1) for r in range(world)]
        x = to_library(values[rank].copy(), library)
        out = to_library(np.zeros(6, numpy_dtype(dtype)), library)
        found = make_call(path, "broadcast", backend, x, root=1, out=out)
        same = make_call(path, "broadcast", backend, x, root=2, out=x)
        parts = to_library(np.concatenate(values), library)
        mine = parts[6 * rank : 6 * rank + 6]
        joined = make_call(path, "all_gather", backend, mine, out=parts)
        wanted = [to_library(values[1], library), to_library(values[2], library)]
        wanted.append(to_library(np.concatenate(values), library))
        for got, expected in zip((found, same, joined), wanted, strict=True):
            if described(got) != described(expected):
                wrong.append((dtype, path, described(got), described(expected)))
        if found is not out or same is not x or joined is not parts:
            wrong.append((dtype, path, "another object came back"))
    return wrong


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_both_paths_write_to_out_in_place_and_to_parts(start, library):
    with start(3, lambda backend, pipe: write_out(backend, library)) as job:
        assert job.results() == [[], [], []]


def name_ops(backend: Any) -> list[Any]:
    """Reduce by the names of operations, in both cases, and by a name there is none of."""
    x, wrong = np.array([backend.rank + 2]), []
    for op in ReduceOp:
        if op is ReduceOp.MEAN or op.takes_pairs:  # not of integers, not of one array
            continue
        for name in (op.name, op.name.lower()):
            found = make_call("fast", "allreduce", backend, x, op=name)
            if described(found) != described(make_call("general", "allreduce", backend, x, op=op)):
                wrong.append((name, found))
    with pytest.raises(ferrodist.InvalidArgument, match="unknown reduce op 'su'"):
        ferrodist.allreduce(x, backend, op="su")
    return wrong


def test_operations_may_be_named_on_the_fast_path(start):
    with start(2, lambda backend, pipe: name_ops(backend)) as job:
        assert job.results() == [[], []]


# -- torch: what its table does not show -----------------------------------------------------------


def lazy_views(backend: Any) -> list[Any]:
    import torch

    ferrodist.broadcast(torch.ones(1), backend)
    x = torch.arange(4.0) + 1j * (backend.rank + 1)
    kept = torch.ones(3, requires_grad=True)
    square = (kept * kept).sum()
    # Autograd must notice that a tensor it saved was written.
    saved = torch.full((2,), 3.0, requires_grad=True)
    product = saved.detach().clone().requires_grad_()
    out = torch.zeros(3)
    version = out._version
    ferrodist.allreduce(torch.ones(3), backend, out=out)
    large = ferrodist.allreduce(torch.ones(1 << 20), backend)
    large += 1  # memory of our own, handed to torch
    small = ferrodist.allreduce(torch.ones(2), backend)
    small.resize_(5)
    del square, product
    return [
        ferrodist.allreduce(x.conj(), backend).tolist(),
        ferrodist.allreduce(x.conj().imag, backend).tolist(),
        ferrodist.allreduce(torch._efficientzerotensor(3), backend).tolist(),
        out._version - version,
        float(large.sum()),
        tuple(small.shape),
    ]


def test_views_that_torch_conjugates_and_negates_when_read_are_resolved(start):
    with start(3, lambda backend, pipe: lazy_views(backend)) as job:
        for found in job.results():
            assert found[0] == [complex(3 * i, -6) for i in range(4)]
            assert found[1] == [-6.0] * 4
            assert found[2] == [0.0] * 3
            assert found[3:] == [1, 4.0 * (1 << 20), (5,)]


def refused_tensors() -> dict[str, Callable[[Any], Any]]:
    import torch
    from torch._subclasses import FakeTensorMode

    def computed(b: Any) -> Any:
        return ferrodist.allreduce(torch.ones(3), b, out=torch.ones(3, requires_grad=True) * 2)

    def faked(b: Any) -> Any:
        with FakeTensorMode():
            return ferrodist.allreduce(torch.ones(3), b)

    return {
        "out computed with gradients": computed,
        "out conjugated": lambda b: ferrodist.allreduce(
            torch.ones(3, dtype=torch.complex64), b, out=torch.ones(3, dtype=torch.complex64).conj()
        ),
        "out strided": lambda b: ferrodist.allreduce(torch.ones(3), b, out=torch.ones(6)[::2]),
        "out of another dtype": lambda b: ferrodist.allreduce(
            torch.ones(3), b, out=torch.ones(3, dtype=torch.float64)
        ),
        "out of another shape": lambda b: ferrodist.allreduce(torch.ones(3), b, out=torch.ones(4)),
        "fake": faked,
        "meta": lambda b: ferrodist.allreduce(torch.ones(3, device="meta"), b),
        "sparse": lambda b: ferrodist.allreduce(torch.ones(3).to_sparse(), b),
        "quantised": lambda b: ferrodist.allreduce(
            torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), b
        ),
        "inside vmap": lambda b: torch.vmap(lambda x: ferrodist.allreduce(x, b))(torch.ones(2, 2)),
        "inside grad": lambda b: torch.func.grad(lambda x: ferrodist.allreduce(x, b).sum())(
            torch.ones(2)
        ),
        "mean of integers": lambda b: ferrodist.allreduce(
            torch.ones(3, dtype=torch.int64), b, ReduceOp.MEAN
        ),
        "int that could wrap": lambda b: ferrodist.allreduce(1 << 62, b),
        "product that could wrap": lambda b: ferrodist.allreduce(1 << 40, b, ReduceOp.PROD),
        "int beyond int64": lambda b: ferrodist.broadcast(1 << 64, b),
    }


def refuse(backend: Any) -> dict[str, list[str]]:
    import torch

    ferrodist.broadcast(torch.ones(1), backend)
    found: dict[str, list[str]] = {}
    call_path = backend._call_path
    for name, call in refused_tensors().items() if backend.rank == 1 else ():
        for path in (None, call_path):
            backend._call_path = path
            try:
                text = f"returned {call(backend)!r}"
            except DistributedError as error:
                text = f"{type(error).__name__}: {error}"
            found.setdefault(name, []).append(text)
    assert ferrodist.allreduce(backend.rank, backend, timeout=60) == 3
    return found


def test_what_is_refused_is_refused_in_the_same_words_on_both_paths(start):
    with start(3, lambda backend, pipe: refuse(backend)) as job:
        refused = job.results()[1]
    for name, (general, fast) in refused.items():
        assert general == fast, name
        assert not general.startswith("returned"), name
    assert len(refused) == len(refused_tensors())


def misfit(backend: Any) -> list[str]:
    """Scatter parts that do not fit what one rank passes."""
    found = []
    for x in (np.ones(3, np.float32), np.ones(2, np.float64)):
        mine = {0: np.ones(6, np.float32), 1: x}.get(backend.rank)
        for path in ("general", "fast"):
            with pytest.raises(ferrodist.CollectiveMismatch) as caught:
                make_call(path if backend.rank == 1 else "any", "scatter", backend, mine)
            text = str(caught.value).replace(f"#{caught.value.sequence}:", "#:")
            found.append(f"{type(caught.value).__name__} {text}")
    assert ferrodist.scatter(np.arange(3) if backend.rank == 0 else None, backend) == [backend.rank]
    return found


def test_a_part_that_does_not_fit_is_told_in_the_same_words_on_both_paths(start):
    with start(3, lambda backend, pipe: misfit(backend)) as job:
        results = job.results()
    assert results[0] == results[1] == results[2]
    assert results[0][0] == results[0][1] != results[0][2] == results[0][3]
    assert results[0][0].startswith("SizeMismatch")


def test_at_most_four_python_calls_lead_to_native_code(start):
    def body(backend, pipe):
        import sys

        import torch

        x, out = torch.ones(2), torch.empty(2)
        for _ in range(2):  # the first loads what knows torch, the second plans the call
            ferrodist.allreduce(x, backend, out=out)
        found = []
        for _ in range(5):  # one that has to wait for long calls the hook for that
            events: list[str] = []
            sys.setprofile(lambda frame, event, arg, events=events: events.append(event))
            ferrodist.allreduce(x, backend, out=out)
            sys.setprofile(None)
            found.append(events.count("call"))
        return min(found)

    with start(2, body) as job:
        assert max(job.results()) <= 4


# -- trees -----------------------------------------------------------------------------------------


def trees(rank: int) -> dict[str, Any]:
    """Make trees of every shape; what the fast path takes of them is small and of one dtype."""
    import torch

    x, t = np.arange(6.0).reshape(2, 3) + rank, torch.full((2,), float(rank))
    return {
        "dict": {"b": x, "a": np.float64(rank), "c": x[:, ::2]},
        "list": [x, x[:0], rank + 0.5],
        "nested": ({"k": [x, (x,)]}, [{"q'": x}]),
        "tensors": [t, torch.nn.Parameter(t), {"x": t[:1]}],
    }


def compare_trees(backend: Any) -> list[Any]:
    wrong = []
    for number, (name, tree) in enumerate(trees(backend.rank).items()):
        for call, options in (("allreduce", {"op": ReduceOp.MAX}), ("broadcast", {"root": 1})):
            ferrodist.broadcast(tree, backend)  # lets the types of its arrays be registered
            usual = make_call("general", call, backend, tree, **options)
            mixed = "fast" if (number + backend.rank) % 2 else "general"
            for path in ("fast", mixed):
                found = make_call(path, call, backend, tree, **options)
                if describe_tree(found) != describe_tree(usual):
                    wrong.append((name, call, found, usual))
    return wrong


def describe_tree(x: Any) -> Any:
    if isinstance(x, dict):
        return [(key, describe_tree(value)) for key, value in x.items()]
    if isinstance(x, (list, tuple)):
        return type(x), [describe_tree(value) for value in x]
    return described(x)


def test_both_paths_give_the_same_trees(start):
    with start(3, lambda backend, pipe: compare_trees(backend)) as job:
        assert job.results() == [[], [], []]


class Emptier:
    """An array in a tree that is emptied while the results are made."""

    def __init__(self, x: np.ndarray[Any, Any], tree: Any) -> None:
        self.x, self.tree = x, tree

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    @staticmethod
    def from_numpy(x: Emptier, result: Any) -> Any:
        x.tree.clear()
        return result


def test_a_tree_that_changes_during_its_call_gives_the_result_of_what_it_was(start):
    def body(backend, pipe):
        _native.register_adapted(Emptier, Emptier.from_numpy, ArrayKind.NUMPY)
        a_list, a_dict, x = [], {}, np.full(2, backend.rank + 1.0)
        a_list += [Emptier(x, a_list), x, (x,)]
        a_dict |= {"b": [x, x], "a": Emptier(x, a_dict)}
        found = [make_call("fast", "allreduce", backend, tree) for tree in (a_list, a_dict)]
        return describe_tree(found), a_list, a_dict

    total = np.full(2, 3.0)
    expected = describe_tree([[total, total, (total,)], {"b": [total, total], "a": total}])
    with start(2, body) as job:
        assert job.results() == [(expected, [], {})] * 2


def test_a_difference_between_trees_is_told_in_the_same_words_on_both_paths(start):
    def body(backend, pipe):
        x, texts = np.ones(3), set()
        for path in ("general", "fast"):
            tree = {"a": x, "b": x if backend.rank else x[:2]}
            with pytest.raises(ferrodist.SizeMismatch) as caught:
                make_call(path, "allreduce", backend, tree)
            texts.add(str(caught.value).replace(f"#{caught.value.sequence}:", "#:"))
        return texts

    with start(2, body) as job:
        first, second = job.results()
    assert first == second
    assert len(first) == 1
    assert "['b']: float64[2]" in first.pop()


# -- messages --------------------------------------------------------------------------------------

FAST_MESSAGES = (
    "_fast_send",
    "_fast_recv",
    "_fast_sendrecv",
    "_fast_isend",
    "_fast_irecv",
    "_fast_isendrecv",
)
GENERAL_MESSAGES = (
    "_send",
    "_recv",
    "_sendrecv",
    "_start_send",
    "_start_recv",
    "_start_sendrecv",
)


@contextlib.contextmanager
def messages_on(path: str, backend: Any) -> Iterator[None]:
    """Let point-to-point calls take the path that is told and no other, or any."""

    def decline(*args: Any) -> None:
        raise Declined("the fast path did not take a message")

    fields = vars(backend)
    fast = {name: fields[name] for name in FAST_MESSAGES}
    if path == "fast":
        fields.update(dict.fromkeys(GENERAL_MESSAGES, decline))
    elif path == "general":
        fields.update(dict.fromkeys(FAST_MESSAGES))
    try:
        yield
    finally:
        fields.update(fast)
        for name in GENERAL_MESSAGES:
            fields.pop(name, None)


def exchange(path: str, backend: Any, x: Any) -> list[Any]:
    """Exchange arrays with the other rank of two, by all calls there are, some with a timeout."""
    peer = 1 - backend.rank
    with messages_on(path, backend):
        found = [ferrodist.sendrecv(x, peer, peer, backend, like=x)]
        receive = ferrodist.recv(peer, backend, like=x, tag=1, async_op=True, timeout=60)
        send = ferrodist.send(x, peer, backend, tag=1, async_op=True, timeout=60.5)
        found += [receive.wait(60), send.wait(60)]
        if backend.rank == 0:
            ferrodist.send(x, peer, backend, tag=2, timeout=60)
        found.append(ferrodist.recv(peer, backend, like=x, tag=2, timeout=60))
        if backend.rank == 1:
            ferrodist.send(x, peer, backend, tag=2)
        # From anybody, with any tag, to oneself, and both ways in flight.
        other = ferrodist.sendrecv(x, peer, peer, backend, like=x, async_op=True, timeout=None)
        send = ferrodist.send(x, peer, backend, tag=3, async_op=True)
        array, status = backend.recv(like=x, tag=3, with_status=True)
        send.wait(60)
        assert status[:2] == (peer, 3)
        found += [other.wait(60), array]
        coming = backend.recv(backend.rank, tag=ferrodist.ANY_TAG, async_op=True)
        ferrodist.send(x, backend.rank, backend, tag=4, async_op=True).wait(60)
        found.append(coming.wait(60))
    return [described(one) for one in found]


def compare_messages(backend: Any, kind: str, every: bool) -> tuple[int, list[Any]]:
    make, number, wrong = KINDS[kind][0], 0, []
    if kind.startswith(("torch", "jax", "dlpack")):  # whose types are registered when first seen
        ferrodist.broadcast(make(np.ones(1, np.float32)), backend)
    for dtype, shape in combinations(kind, every=every):
        x = make(distinct_values(backend.rank, shape, dtype, seed=number))
        number += 1
        usual = exchange("general", backend, x)
        mixed = "fast" if (number + backend.rank) % 2 else "general"
        for path in ("fast", mixed):
            found = exchange(path, backend, x)
            if found != usual:
                wrong.append((dtype, shape, path, found, usual))
        if kind == "numpy":
            sent = described(distinct_values(1 - backend.rank, shape, dtype, seed=number - 1))
            if usual[:-1] != [sent, sent, described(None), sent, sent, sent]:
                wrong.append((dtype, shape, usual, sent))
    return number, wrong


@pytest.mark.parametrize("kind", KINDS)
def test_both_paths_give_the_same_messages(start, kind):
    with start(2, lambda backend, pipe: compare_messages(backend, kind, every=False)) as job:
        for number, wrong in job.results():
            assert wrong == []
            assert number >= 1


@pytest.mark.slow
@pytest.mark.long
def test_both_paths_give_the_same_messages_in_every_combination(start):
    with start(2, lambda backend, pipe: compare_messages(backend, "jax", every=True)) as job:
        assert [wrong for _, wrong in job.results()] == [[], []]


def receive_into(backend: Any, library: str) -> list[Any]:
    """Receive into the caller's arrays, blocking and in flight."""
    peer, wrong = 1 - backend.rank, []
    ferrodist.broadcast(to_library(np.ones(1), library), backend)
    for dtype, path in itertools.product(DTYPES, ("fast", "general")):
        mine, theirs = (
            to_library(distinct_values(rank, (3, 2), dtype, seed=1), library)
            for rank in (backend.rank, peer)
        )
        outs = [to_library(np.zeros((3, 2), numpy_dtype(dtype)), library) for _ in range(3)]
        with messages_on(path, backend):
            found = [ferrodist.sendrecv(mine, peer, peer, backend, out=outs[0], like=mine)]
            work = ferrodist.recv(peer, backend, out=outs[1], like=mine, async_op=True)
            ferrodist.send(mine, peer, backend)
            ferrodist.send(mine, peer, backend)
            found += [work.wait(60), ferrodist.recv(peer, backend, out=outs[2], like=mine)]
        if any(got is not out for got, out in zip(found, outs, strict=True)):
            wrong.append((dtype, path, "another object came back"))
        if any(described(got) != described(theirs) for got in found):
            wrong.append((dtype, path, found))
        with messages_on(path, backend):  # fewer rows than there is room for
            work = ferrodist.send(mine[:2], peer, backend, async_op=True)
            long = to_library(np.zeros((9, 2), numpy_dtype(dtype)), library)
            rows, status = ferrodist.recv(peer, backend, out=long, with_status=True)
            work.wait(60)
        if described(rows) != described(theirs[:2]) or described(long[:2]) != described(rows):
            wrong.append((dtype, path, rows, long))
        if status != (peer, 0, dtype, (2, 2)) or long[2:].any():
            wrong.append((dtype, path, status, "or more was written"))
        if library == "torch" and [out._version for out in outs] != [1, 1, 1]:
            wrong.append((dtype, path, "autograd does not know that they were written"))
    return wrong


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_both_paths_receive_into_out(start, library):
    with start(2, lambda backend, pipe: receive_into(backend, library)) as job:
        assert job.results() == [[], []]


def refused_messages() -> dict[str, Callable[[Any], Any]]:
    import torch

    x, t = np.ones(3), torch.ones(3)
    return {
        "to itself": lambda b: ferrodist.send(t, b.rank, b),
        "to nobody": lambda b: ferrodist.send(t, 2, b, async_op=True),
        "tag": lambda b: ferrodist.recv(0, b, like=t, tag=-1),
        "large tag": lambda b: ferrodist.recv(0, b, like=t, tag=1 << 31, async_op=True),
        "no array": lambda b: ferrodist.send("text", 0, b),
        "sparse": lambda b: ferrodist.send(t.to_sparse(), 0, b, async_op=True),
        "meta": lambda b: ferrodist.recv(0, b, like=torch.ones(3, device="meta")),
        "int beyond int64": lambda b: ferrodist.sendrecv(1 << 64, 0, 0, b),
        "out of another dtype": lambda b: ferrodist.recv(0, b, out=x, like=t),
        "out of another shape": lambda b: ferrodist.recv(
            0, b, out=np.ones(4), like=x, async_op=True
        ),
        "out strided": lambda b: ferrodist.recv(
            0, b, out=torch.ones(6)[::2], like=t, async_op=True
        ),
        "out computed": lambda b: ferrodist.sendrecv(
            t, 0, 0, b, out=torch.ones(3, requires_grad=True) * 2, like=t
        ),
    }


def misfits(backend: Any) -> dict[str, list[str]]:
    """Refuse calls, and receive messages that do not fit, on both paths."""
    import torch

    ferrodist.broadcast(torch.ones(1), backend)
    found: dict[str, list[str]] = {}
    like, recv = torch.ones(5), ferrodist.recv

    def note(name: str, call: Callable[[Any], Any]) -> None:
        try:
            text = f"returned {call(backend)!r}"
        except DistributedError as error:
            text = f"{type(error).__name__}: {error}"
        found.setdefault(name, []).append(text)

    for path in ("general", "fast"):
        for name, call in refused_messages().items() if backend.rank == 1 else ():
            with messages_on("general" if path == "general" else "any", backend):
                note(name, call)
        if backend.rank == 0:
            for _ in range(3):
                ferrodist.send(torch.ones(4), 1, backend)
        else:
            with messages_on(path, backend):
                note("misfit", lambda b: recv(0, b, like=like))
                note("misfit in flight", lambda b: recv(0, b, like=like, async_op=True).result(60))
                note("misfit of both", lambda b: ferrodist.sendrecv(like, 0, 0, b, like=like))
        ferrodist.barrier(backend)
    return found


def test_messages_are_refused_in_the_same_words_on_both_paths(start):
    with start(2, lambda backend, pipe: misfits(backend)) as job:
        refused = job.results()[1]
    assert len(refused) == len(refused_messages()) + 3
    for name, (general, fast) in refused.items():
        assert general == fast, name
        assert not general.startswith("returned"), name
        if "misfit" in name:
            assert "rank 0 sent float32[4], this rank expected float32[5]" in general
            assert "test_call_paths.py:" in general


# -- what a caller chooses -------------------------------------------------------------------------


def test_a_timeout_and_reproducible_stay_on_the_fast_path(start):
    def body(backend, pipe):
        x, total = np.arange(3.0) + backend.rank, 3 * np.arange(3.0) + 3
        for options in ({"timeout": 5}, {"timeout": 0.5}, {"timeout": None}, {"timeout": DEFAULT}):
            found = make_call("fast", "allreduce", backend, x, **options)
            assert found.tolist() == total.tolist()
        for reproducible in (True, False, None):
            options = {"reproducible": reproducible, "timeout": 60, "algorithm": None}
            found = make_call("fast", "allreduce", backend, x, **options)
            assert found.tolist() == total.tolist()
            work = backend.allreduce(x, async_op=True, **options)
            assert work.wait(60).tolist() == total.tolist()
        backend.barrier(timeout=5)

    with start(3, body) as job:
        job.results()


def test_ranks_may_mix_the_paths_of_calls_with_options(start):
    def body(backend, pipe):
        for number, options in enumerate(({"timeout": 20}, {"reproducible": True})):
            path = "general" if backend.rank == number else "fast"
            x = np.array([1e30, 1.0, -1e30])[(np.arange(3) + backend.rank) % 3]
            found = make_call(path, "allreduce", backend, x, **options)
            if options.get("reproducible"):
                parts = [np.array([1e30, 1.0, -1e30])[(np.arange(3) + r) % 3] for r in range(3)]
                assert found.tolist() == ((parts[0] + parts[1]) + parts[2]).tolist()
        with pytest.raises(
            CollectiveMismatch, match=r"rank 1  allreduce\(float64\[3\], sum, reproducible\)"
        ) as caught:
            backend.allreduce(np.ones(3), reproducible=backend.rank == 1)
        with pytest.raises(CollectiveMismatch):
            backend.allreduce(np.ones(3), reproducible=backend.rank == 1, async_op=True).wait()
        assert backend.allreduce(1.0, timeout=20) == 3
        return str(caught.value)

    with start(3, body) as job:
        assert len(set(job.results())) == 1


def test_a_timeout_on_the_fast_path_is_exact_and_named(start):
    def body(backend, pipe):
        if backend.rank == 1:
            assert pipe.recv() == "go on"
            with pytest.raises(GroupAborted):
                backend.allreduce(1.0)
            return None
        begin = time.monotonic()
        with pytest.raises(CollectiveTimeout, match=r"within 0\.3 s") as caught:
            backend.allreduce(np.ones(3), timeout=0.3 if backend.rank else 30)
        pipe.send("late")
        return caught.value.missing, 0.25 < time.monotonic() - begin < 3

    with start(3, body) as job:
        assert [rank.hear() for rank in job.others(1)] == ["late"] * 2
        job[1].tell("go on")
        assert job.results() == [([1], True), None, ([1], True)]


@pytest.mark.parametrize("name", ["allreduce", "broadcast"])
def test_trees_of_several_dtypes_are_one_call_in_native_code(start, name):
    def body(backend, pipe):
        rank = backend.rank
        tree = {
            "w": [np.arange(5, dtype=np.float32) + rank, np.arange(3.0) * (rank + 1)],
            "b": (np.array(rank, np.int8), np.full((2, 2), rank, np.float64)),
            "empty": np.empty(0, np.int32),
            "last": np.array([rank] * 7, np.int8),
        }
        expected = {
            "allreduce": lambda leaf, all_of: sum(all_of[1:], start=all_of[0]),
            "broadcast": lambda leaf, all_of: all_of[0],
        }[name]
        found = make_call("general" if rank == 1 else "fast", name, backend, tree)
        trees = backend.all_gather_object(tree)
        assert list(found) == list(tree)
        assert type(found["b"]) is tuple
        for path in (("w", 0), ("w", 1), ("b", 0), ("b", 1), ("empty",), ("last",)):
            leaves = [functools.reduce(lambda t, key: t[key], path, one) for one in (found, *trees)]
            result, own = leaves[0], leaves[1 + rank]
            assert (result.dtype, result.shape) == (own.dtype, own.shape)
            assert result.tolist() == expected(own, leaves[1:]).tolist()
        before = backend.statistics().collectives
        make_call("fast", name, backend, tree)
        assert backend.statistics().collectives == before + 1
        with pytest.raises(CollectiveMismatch):
            getattr(backend, name)(
                {**tree, "last": tree["last"].astype(np.int16 if rank else "i1")}
            )

    with start(3, body) as job:
        job.results()


def test_calls_with_options_enter_python_as_rarely_as_those_without(start):
    def body(backend, pipe):
        x, tree = np.ones(3), {"a": np.ones(2, np.float32), "b": np.ones(2)}
        counts = []
        for call in (
            lambda: backend.allreduce(x),
            lambda: backend.allreduce(x, timeout=5),
            lambda: backend.allreduce(x, reproducible=True),
            lambda: backend.allreduce(tree),
        ):
            call()
            numbers = []
            for _ in range(20):  # in a long wait Python is asked
                entered = []
                sys.setprofile(lambda frame, event, what, entered=entered: entered.append(event))
                call()
                sys.setprofile(None)
                numbers.append(entered.count("call") - 1)  # that of the lambda
            counts.append(min(numbers))
        return counts

    with start(2, body) as job:
        assert job.results() == [[2, 2, 2, 2]] * 2


def test_a_chosen_timeout_of_a_call_that_waits_for_its_turn_is_exact(start):
    def body(backend, pipe):
        if backend.rank == 1:
            assert pipe.recv() == "go on"
            return None
        begin = time.monotonic()
        first = backend.allreduce(1.0, async_op=True)
        with pytest.raises(CollectiveTimeout) as caught:
            backend.allreduce(1.0, async_op=True, timeout=0.3).wait()
        assert isinstance(first.exception(20), CollectiveTimeout)
        pipe.send("late")
        return caught.value.missing, time.monotonic() - begin < 5

    with start(2, body) as job:
        assert job[0].hear() == "late"
        job[1].tell("go on")
        assert job[0].end().result == ([1], True)
        job[1].end()


def test_a_barrier_takes_no_option_but_its_own(start):
    def body(backend, pipe):
        for option in ({"reproducible": True}, {"algorithm": None}, {"op": "sum"}):
            with pytest.raises(TypeError, match="unexpected keyword argument"):
                backend.barrier(**option)
        backend.barrier(timeout=5)

    with start(2, body) as job:
        job.results()
