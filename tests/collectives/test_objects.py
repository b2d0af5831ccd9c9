"""Collectives of objects: what may travel, what may not, and that reading never runs code."""

import contextlib
import pickle
import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, ClassVar, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrodist
from ferrodist import ProtocolError, SimulatedBackend
from ferrodist.backends.framing import pack_array_header
from ferrodist.buffer import ArrayKind, DType
from ferrodist.collectives.codec import decode, encode
from ferrodist.testing import run_ranks
from helpers import errors_by_rank

try:
    import torch
except ImportError:
    torch = None
VALUES_OF_TORCH = [] if torch is None else [torch.Size([2, 3]), torch.bfloat16]

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
    bytearray(b"x\0"),
    [bytearray()],
    OrderedDict([("b", 1), ("a", {"c": bytearray(b"y")})]),
    range(3),
    range(9, -1, -2),
    slice(None, 3),
    datetime(2026, 11, 17, 8, 0, 0, 5),
    datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
    datetime(1, 1, 1, tzinfo=UTC),
    date(2024, 2, 29),
    time(23, 59, 59, 999999, tzinfo=timezone(timedelta(hours=-5), "east")),
    timedelta(days=-3, microseconds=7),
    Path("/a/b"),
    Path(),
    PurePosixPath("a/b"),
    PureWindowsPath("c:/a"),
    UUID(int=2**128 - 1),
    Decimal("-1.50"),
    Decimal("NaN"),
    Fraction(-(10**30), 7),
    np.dtype("float32"),
    np.dtype(">i2"),
    np.dtype("<M8[ns]"),
    *VALUES_OF_TORCH,
    {Path("key"): 1, Fraction(1, 3): 2, (date(2024, 1, 1),): 3},
]


@pytest.mark.parametrize("value", SAMPLES, ids=range(len(SAMPLES)))  # sets have no fixed order
def test_plain_objects_come_through_unchanged(value):
    again = decode(encode(value, False, "x"), False)
    assert repr(again) == repr(value) if value != value else again == value
    assert type(again) is type(value)
    assert getattr(again, "fold", 0) == getattr(value, "fold", 0)


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


@pytest.mark.slow
@given(PLAIN)
@settings(max_examples=200)
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
    ],
    ids=lambda a: f"{type(a).__name__}-{a.dtype}",
)
def test_arrays_come_back_as_the_same_kind(array):
    check_comes_back(array)


def test_torch_tensors_come_back_as_such():
    import torch

    check_comes_back(torch.arange(4, dtype=torch.bfloat16))
    check_comes_back(torch.tensor(True))


def test_jax_arrays_come_back_as_such():
    import jax.numpy as jnp

    check_comes_back(jnp.arange(3.0))
    check_comes_back(jnp.zeros(2, jnp.bfloat16))


def check_comes_back(array):
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
        (Counter("a"), "the object is a collections.Counter"),
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
        return ferrodist.all_gather_object(Counter([backend.rank]), backend, pickle=True)

    assert run_ranks(2, body)[0] == [Counter([0]), Counter([1])]


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("code from the network was run",)


def test_reading_never_runs_code():
    with pytest.raises(ProtocolError):
        decode(pickle.dumps(Bomb()), False)


@given(st.binary(max_size=200))
@settings(max_examples=500)
def test_any_bytes_are_an_object_or_a_protocol_error(data):
    with contextlib.suppress(ProtocolError):
        decode(data, False)


@pytest.mark.parametrize(
    "array",
    [
        pack_array_header(DType.FLOAT64, (3,), ArrayKind.NUMPY) + b"x" * 8,
        pack_array_header(DType.FLOAT64, (2**62, 4), ArrayKind.NUMPY),
        pack_array_header(DType.FLOAT64, (0, 2**62, 4), ArrayKind.TORCH),
        pack_array_header(DType.FLOAT64, (1,), ArrayKind.NUMBER) + b"x" * 8,
        bytes([99, 0, ArrayKind.NUMPY]) + b"x" * 8,
        bytes([DType.FLOAT64, 0, 99]) + b"x" * 8,
        bytes([DType.FLOAT64, 200, ArrayKind.NUMPY]),
        b"",
    ],
    ids=range(8),
)
def test_arrays_that_cannot_be_right_are_protocol_errors(array):
    with pytest.raises(ProtocolError):
        decode(msgpack.packb(msgpack.ExtType(4, array)), False)


@pytest.mark.parametrize("value", [memoryview(b"x"), msgpack.ExtType(1, b"x"), "\ud800"])
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
        with pytest.raises(ValueError, match="a list of 2 objects, one per rank, got list of 3"):
            ferrodist.scatter_object([1, 2, 3] if backend.rank == 0 else None, backend)
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


# -- types of the user's own -----------------------------------------------------------------------


@dataclass
class Step:
    number: int
    losses: list[float] = field(default_factory=list)
    made_by: str = field(default="here", init=False)

    def __post_init__(self) -> None:
        self.made_by = "__init__"


@dataclass(frozen=True, slots=True)
class Frozen:
    inner: Any


class Color(Enum):
    RED = object()


class Level(IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: float
    y: Any


@dataclass
class Unknown:
    value: int


@pytest.fixture
def registered():
    for kind in (Step, Frozen, Color, Level, Point):
        assert ferrodist.register_type(kind) is kind


@pytest.mark.parametrize(
    "value",
    [Step(3, [0.5]), Frozen(Frozen(Step(1))), Color.RED, Level.LOW, Point(1.0, Level.LOW)],
    ids=range(5),
)
def test_registered_types_come_through(registered, value):
    again = decode(encode([value], False, "x"), False)[0]
    assert again == value
    assert type(again) is type(value)


def test_objects_are_made_of_their_fields_without_init(registered):
    step = Step(1)
    step.made_by = "hand"
    assert decode(encode(step, False, "x"), False).made_by == "hand"


def test_a_type_that_is_not_registered_is_refused_with_what_to_do(registered):
    with pytest.raises(TypeError, match=r"the object\[0\] is a .*Unknown.*register_type"):
        encode([Unknown(1)], False, "the object")
    with pytest.raises(TypeError, match=r"the object\.inner is a .*Counter.*pickle=True"):
        encode(Frozen(Counter()), False, "the object")


def test_a_type_that_only_the_sender_knows_is_a_protocol_error():
    data = msgpack.packb([msgpack.ExtType(3, b"train.State"), 1])
    with pytest.raises(ProtocolError, match=r"'train\.State'.*register_type on all ranks"):
        decode(data, False)


def test_a_type_with_other_fields_here_is_a_protocol_error(registered):
    mark = msgpack.ExtType(3, f"{Step.__module__}.Step".encode())
    with pytest.raises(ProtocolError):
        decode(msgpack.packb([mark, 1]), False)


@pytest.mark.parametrize("kind", [int, Counter, "Step", object])
def test_only_dataclasses_enums_and_named_tuples_are_registered(kind):
    with pytest.raises(ferrodist.InvalidArgument, match="a dataclass, an Enum or a named tuple"):
        ferrodist.register_type(kind)


@pytest.mark.parametrize(
    "items",
    [
        [b"fraction", 1, 0],
        [b"decimal", "x"],
        [b"date", 2023, 2, 30],
        [b"zone", "../x"],
        [b"uuid", -1],
    ],
    ids=lambda items: items[0].decode(),
)
def test_values_that_cannot_be_made_are_protocol_errors(items):
    mark = msgpack.ExtType(3, items[0])
    with pytest.raises(ProtocolError):
        decode(msgpack.packb([mark, *items[1:]]), False)


@pytest.mark.skipif(torch is None, reason="torch is not installed")
def test_a_state_dict_travels():
    def body(backend):
        torch.manual_seed(backend.rank)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        optimizer = torch.optim.Adam(model.parameters())
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "shape": model[0].weight.shape,
        }
        found = ferrodist.broadcast_object(state, backend, root=1)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        return type(found["model"]), model[0].weight.sum().item(), found["shape"]

    first, second = run_ranks(2, body)
    assert first == second
    assert first[0] is OrderedDict
    assert first[2] == torch.Size([2, 3])


# -- what cannot be sent is told to those who wait -------------------------------------------------


REFUSED = {
    "broadcast_object": lambda b: ferrodist.broadcast_object(
        [print] if b.rank == 1 else None, b, 1
    ),
    "all_gather_object": lambda b: ferrodist.all_gather_object([print] if b.rank == 1 else 7, b),
    "gather_object": lambda b: ferrodist.gather_object([print] if b.rank == 1 else 7, b),
    "scatter_object": lambda b: ferrodist.scatter_object([print] if b.rank == 1 else None, b, 1),
    "in flight": lambda b: ferrodist.all_gather_object(
        [print] if b.rank == 1 else 7, b, async_op=True
    ).wait(30),
    "pickle": lambda b: ferrodist.all_gather_object(
        threading.Lock() if b.rank == 1 else 7, b, pickle=True
    ),
    "scatter of rows": lambda b: ferrodist.scatter(np.ones(4) if b.rank == 1 else None, b, 1),
    "scatter of a list": lambda b: ferrodist.scatter([1, 2, 3] if b.rank == 1 else None, b, 1),
    "scatter into a wrong out": lambda b: ferrodist.scatter(
        np.ones(3) if b.rank == 1 else None, b, 1, out=np.ones(2) if b.rank == 1 else None
    ),
    "scatter in flight": lambda b: ferrodist.scatter(
        np.ones(4) if b.rank == 1 else None, b, 1, async_op=True
    ).wait(30),
}


def refuse_all(backend, pipe=None):
    """Return what each call raises here, and that the group goes on with the next number."""
    found = {}
    for name, call in REFUSED.items():
        try:
            call(backend)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the test looks at it
            found[name] = (type(error).__name__, str(error), getattr(error, "rank", None))
    return found, ferrodist.allreduce(1, backend), backend.statistics().collectives


def check_refused(results):
    assert {(total, count) for _, total, count in results} == {(3, len(REFUSED) + 1)}
    first, refusing, last = (found for found, _, _ in results)
    assert first == last
    assert first.keys() == REFUSED.keys() == refusing.keys()
    for name, (kind, text, rank) in first.items():
        assert text.endswith("(on rank 1)"), name
        assert rank == 1
        assert name == "pickle" or (refusing[name][0] == kind and refusing[name][1] in text)
    assert first["scatter of rows"][0] == "SizeMismatch"
    assert "use scatter_object" in first["scatter of a list"][1]
    assert "a list of 3 objects" in first["scatter_object"][1]


@pytest.mark.slow
def test_what_one_rank_refuses_reaches_those_who_wait(start):
    with start(3, refuse_all) as job:
        check_refused(job.results())


def test_what_one_rank_refuses_reaches_those_who_wait_between_threads():
    check_refused(run_ranks(3, refuse_all))


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
        (ferrodist.all_gather_uneven, "or use all_gather_object"),
    ):
        with pytest.raises(TypeError, match=twin):
            call([np.array([None])], alone)
