"""Collectives of objects: what may travel, what may not, and that reading never runs code."""

import contextlib
import pickle
import threading
from fractions import Fraction
from typing import ClassVar

import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrodist
from ferrodist import ProtocolError, SimulatedBackend
from ferrodist.collectives.objects import decode, encode
from ferrodist.testing import run_ranks
from helpers import errors_by_rank

SAMPLES = [
    None,
    True,
    0,
    -(2**63),
    2**64 - 1,
    2**200,
    -(2**200) - 1,
    0.1,
    float("inf"),
    1 + 2j,
    "",
    "ü",
    b"",
    b"\0\xff",
    [],
    [1, [2, (3, None)]],
    (),
    (1, "a", (2,)),
    {},
    {"a": 1, 2: "b", (1, 2): [3], b"k": None, None: 1, 1.5: 2},
    set(),
    {1, "a", (2, 3)},
    frozenset({1}),
]


@pytest.mark.parametrize("value", SAMPLES, ids=range(len(SAMPLES)))  # sets have no fixed order
def test_plain_objects_come_through_unchanged(value):
    again = decode(encode(value, False, "x"), False)
    assert again == value
    assert type(again) is type(value)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=20,
)


@given(PLAIN)
@settings(max_examples=200, deadline=None)
def test_any_nesting_of_plain_objects_comes_through(value):
    again = decode(encode(value, False, "x"), False)
    assert again == value
    assert repr(again) == repr(value)  # tuples stay tuples, True stays True


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(12).reshape(3, 4).T,
        np.array(3.5),
        np.float16(2.5),
        np.zeros((0, 3), np.complex64),
        torch.arange(4, dtype=torch.bfloat16),
        torch.tensor(True),
        jnp.arange(3.0),
        jnp.zeros(2, jnp.bfloat16),
    ],
    ids=lambda a: f"{type(a).__name__}-{a.dtype}",
)
def test_arrays_come_back_as_the_same_kind(array):
    (again,) = decode(encode([array], False, "x"), False)
    assert type(again) is type(array)
    assert again.dtype == array.dtype
    assert again.shape == array.shape
    assert bool((again == array).all())


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_object_collective(world):
    def body(backend):
        mine = {
            "rank": backend.rank,
            "data": (np.full(backend.rank, 1.0).tolist(), "x" * backend.rank * 1000),
        }
        root = world - 1
        everyone = ferrodist.all_gather_object(mine, backend)
        return (
            [item["rank"] for item in everyone],
            [len(item["data"][1]) for item in everyone],
            ferrodist.broadcast_object(mine, backend, root)["rank"],
            ferrodist.gather_object(backend.rank, backend, root),
            ferrodist.scatter_object(
                [(r, r * r) for r in range(world)] if backend.rank == root else None, backend, root
            ),
        )

    for rank, (ranks, sizes, from_root, gathered, part) in enumerate(run_ranks(world, body)):
        assert ranks == list(range(world))
        assert sizes == [1000 * r for r in range(world)]
        assert from_root == world - 1
        assert gathered == (list(range(world)) if rank == world - 1 else None)
        assert part == (rank, rank * rank)


def test_asynchronous_object_collectives():
    def body(backend):
        works = [
            ferrodist.all_gather_object(n + backend.rank, backend, async_op=True) for n in range(3)
        ]
        return [work.wait(20) for work in works]

    assert run_ranks(2, body) == [[[0, 1], [1, 2], [2, 3]]] * 2


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Fraction(1, 2), "the object is a fractions.Fraction"),
        ({"a": [1, {2: object()}]}, "the object['a'][1][2] is a builtins.object"),
        ({"f": print}, "the object['f'] is a builtins.builtin_function_or_method"),
        ([np.array(["text"])], "the object[0]"),
    ],
)
def test_what_cannot_travel_is_a_type_error_with_its_place(value, words):
    def body(backend):
        with pytest.raises(TypeError) as caught:
            ferrodist.all_gather_object(value, backend)
        assert words in str(caught.value)
        return ferrodist.allreduce(1, backend)

    assert run_ranks(2, body) == [2, 2]


def test_an_object_that_contains_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(TypeError, match="nested more than 200 deep, or contains itself"):
        encode(value, False, "the object")


def test_pickle_only_on_request():
    def body(backend):
        return ferrodist.all_gather_object(Fraction(1, backend.rank + 1), backend, pickle=True)

    assert run_ranks(2, body)[0] == [Fraction(1), Fraction(1, 2)]


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("code from the network was run",)


def test_reading_never_runs_code():
    with pytest.raises(ProtocolError):
        decode(pickle.dumps(Bomb()), False)


@given(st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
def test_any_bytes_are_an_object_or_a_protocol_error(data):
    with contextlib.suppress(ProtocolError):
        decode(data, False)


@pytest.mark.parametrize(
    ("header", "content"),
    [
        (["numpy", "float64", [3], False], b"x" * 8),
        (["numpy", "float64", [-1], False], b""),
        (["numpy", "object", [1], False], b"x" * 8),
        (["os", "float64", [1], False], b"x" * 8),
        (["numpy", "float64", [2**62, 4], False], b""),
        (["numpy", "float64", ["1"], False], b"x" * 8),
        (["numpy", "float64", [1], True], b"x" * 8),
        (["torch", "float64", [0, 2**62, 4], False], b""),
        (["numpy"], b""),
    ],
    ids=range(9),
)
def test_arrays_that_cannot_be_right_are_protocol_errors(header, content):
    packed = msgpack.packb(header)
    array = len(packed).to_bytes(4, "little") + packed + content
    with pytest.raises(ProtocolError):
        decode(msgpack.packb(msgpack.ExtType(4, array)), False)


@pytest.mark.parametrize(
    "value", [bytearray(b"x"), memoryview(b"x"), msgpack.ExtType(1, b"x"), "\ud800"]
)
def test_what_msgpack_would_change_on_the_way_is_refused(value):
    with pytest.raises(TypeError, match="the object"):
        encode([value], False, "the object")


@pytest.mark.parametrize("kind", [tuple, list])
def test_deep_nesting_comes_through_or_is_refused_and_never_crashes(kind):
    value = kind()
    for _ in range(190):
        value = kind((value,))
    assert decode(encode(value, False, "x"), False) == value
    for _ in range(20):
        value = kind((value,))
    with pytest.raises(TypeError, match="nested more than"):
        encode(value, False, "x")


@pytest.mark.parametrize("place", ["alone", "second", "value"])
def test_a_mark_out_of_place_is_a_protocol_error(place):
    mark = msgpack.ExtType(3, b"t")
    value = {"alone": mark, "second": [1, mark], "value": {"a": mark}}[place]
    with pytest.raises(ProtocolError):
        decode(msgpack.packb(value), False)


def test_bytes_nested_without_end_are_a_protocol_error():
    data = b""
    for _ in range(5000):
        data = b"\x91" + data
    with pytest.raises(ProtocolError):
        decode(data + b"\xc0", False)


def test_scatter_object_needs_one_object_per_rank():
    def body(backend):
        if backend.rank == 0:
            with pytest.raises(
                ValueError, match="a list of 2 objects, one per rank, got list of 3"
            ):
                ferrodist.scatter_object([1, 2, 3], backend)
        return ferrodist.scatter_object(["a", "b"] if backend.rank == 0 else None, backend)

    assert run_ranks(2, body) == ["a", "b"]


def test_a_bad_root_is_refused_before_anything_else():
    errors = errors_by_rank(2, lambda b: ferrodist.broadcast_object(object(), b, root=2))
    assert {type(error) for error in errors} == {ferrodist.InvalidRank}


def test_unpickling_runs_when_the_call_is_over():
    def body(backend):
        return ferrodist.all_gather_object(Rebuilds(backend), backend, pickle=True)

    assert run_ranks(2, body) == [[2, 2], [2, 2]]


class Rebuilds:
    """Makes a call of its own when it is rebuilt, which must not wait for the call it came with."""

    backends: ClassVar[dict[str, SimulatedBackend]] = {}

    def __init__(self, backend):
        self.backends[threading.current_thread().name] = backend

    def __reduce__(self):
        return _rebuild, ()


def _rebuild():
    backend = Rebuilds.backends[threading.current_thread().name]
    return ferrodist.allreduce(1, backend, timeout=5)


def test_an_array_of_objects_in_an_object_is_not_told_of_the_call_that_failed():
    for value in ([np.array([None])], [np.array(["text"])]):
        with pytest.raises(TypeError, match="pass pickle=True") as caught:
            encode(value, False, "the object")
        assert "_object" not in str(caught.value)


def test_the_advice_for_what_is_no_array_is_the_twin_of_the_call():
    (alone,) = SimulatedBackend.create_group(1)
    for call, twin in (
        (ferrodist.gather, "use gather_object"),
        (ferrodist.scatter, "use scatter_object"),
        (ferrodist.all_to_all, "use broadcast_object or all_gather_object"),
        (ferrodist.all_gather_uneven, "use broadcast_object or all_gather_object"),
    ):
        with pytest.raises(TypeError, match=twin):
            call([np.array([None])], alone)
