# SPDX-License-Identifier: MIT OR Apache-2.0
"""The list of cases: everything for allreduce, every pair of circumstances for the other calls."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ferrodist.buffer import DTYPES_BY_LABEL
from ferrodist.call import Kind
from ferrodist.schedules import known
from ferrodist.testing.contract.case import Case
from ferrodist.testing.contract.grids import NEEDS_TWO as GRIDS_OF_TWO
from ferrodist.testing.contract.grids import SCENARIOS as GRIDS
from ferrodist.testing.contract.groups import NEEDS_TWO
from ferrodist.testing.contract.groups import SCENARIOS as GROUPS
from ferrodist.testing.contract.inputs import COUNTED, CUT, JOINED, PREFIXES, REDUCTIONS, ROOTED
from ferrodist.testing.contract.messages import LARGEST_EAGER, RINGS
from ferrodist.testing.contract.messages import SCENARIOS as MESSAGES
from ferrodist.testing.contract.mismatches import HAS_ROOT, MISMATCHES, SYNCHRONISING
from ferrodist.testing.contract.objects import OBJECT_FUNCTIONS, OBJECTS, TREE_FUNCTIONS
from ferrodist.testing.contract.reductions import custom_cases, pair_cases
from ferrodist.testing.contract.refusals import REFUSALS
from ferrodist.testing.contract.values import (
    BITS,
    COMPLEX,
    FLOATS,
    INTEGERS,
    LOGIC,
    NUMBERS,
    OPS,
    available_dtypes,
    available_libraries,
    can_hold,
    legal_ops,
)

# -- covering arrays -------------------------------------------------------------------------------
#
# Covering: few rows in which every legal pair of values of two parameters occurs.
#
# Most bugs of a call need one or two particular values to show; a full product would take hours.

Row = dict[str, Any]
Rule = tuple[tuple[str, ...], Callable[..., bool]]
"""The parameters a rule is about, and a function of their values that tells what is legal."""

_CANDIDATES = 4  # rows tried for each one taken; more give slightly fewer rows


def covering(
    parameters: Mapping[str, Sequence[Any]],
    rules: Sequence[Rule],
    seed: int,
    *,
    apart: Collection[tuple[str, str]] = (),
) -> list[Row]:
    """Return rows that hold every pair of values for which a legal row exists.

    Parameters that have nothing to do with each other may be kept ``apart``: each value of them
    occurs, but not each pair. It is quickest when the parameters most rules are about come first.
    """
    search = _Search(parameters, rules, random.Random(seed), {frozenset(pair) for pair in apart})
    rows = []
    while (pair := search.next_uncovered()) is not None:
        candidates = [search.complete(dict(pair)) for _ in range(_CANDIDATES)]
        legal = [row for row in candidates if row is not None]
        if legal:
            rows.append(max(legal, key=search.count_new))
            search.cover(rows[-1])
        else:
            search.drop(pair)
    return rows


Pair = tuple[tuple[str, Any], tuple[str, Any]]


class _Search:
    """What is still to be covered, and how to complete a row legally."""

    def __init__(
        self,
        parameters: Mapping[str, Sequence[Any]],
        rules: Sequence[Rule],
        chance: random.Random,
        apart: set[frozenset[str]],
    ) -> None:
        self._values = {name: list(values) for name, values in parameters.items()}
        self._rules: dict[str, list[Rule]] = {
            name: [rule for rule in rules if name in rule[0]] for name in parameters
        }
        self._chance = chance
        pairs = [
            ((a, x), (b, y))
            for a, b in itertools.combinations(self._values, 2)
            if frozenset((a, b)) not in apart
            for x in self._values[a]
            for y in self._values[b]
        ]
        chance.shuffle(pairs)
        self._uncovered: dict[Pair, None] = dict.fromkeys(pairs)

    def next_uncovered(self) -> Pair | None:
        """Return a pair that no row holds so far."""
        return next(iter(self._uncovered), None)

    def drop(self, pair: Pair) -> None:
        """Give up a pair that no legal row holds."""
        del self._uncovered[pair]

    def cover(self, row: Row) -> None:
        """Strike out the pairs a row holds."""
        for pair in self._pairs(row):
            self._uncovered.pop(pair, None)

    def count_new(self, row: Row) -> int:
        """Count the uncovered pairs a row holds."""
        return sum(pair in self._uncovered for pair in self._pairs(row))

    def _pairs(self, row: Row) -> Iterable[Pair]:
        return itertools.combinations([(name, row[name]) for name in self._values], 2)

    def complete(self, row: Row) -> Row | None:
        """Fill a row up at random, going back where it cannot be legal; None if it never can."""
        if not all(self._is_legal(row, name) for name in row):
            return None
        return self._fill(row, [name for name in self._values if name not in row])

    def _fill(self, row: Row, missing: list[str]) -> Row | None:
        if not missing:
            return row
        name, *rest = missing
        for value in self._chance.sample(self._values[name], len(self._values[name])):
            longer = {**row, name: value}
            if self._is_legal(longer, name):
                found = self._fill(longer, rest)
                if found is not None:
                    return found
        return None

    def _is_legal(self, row: Row, changed: str) -> bool:
        """Ask the rules about one parameter whose other parameters are decided."""
        return all(
            judge(*(row[name] for name in names))
            for names, judge in self._rules[changed]
            if all(name in row for name in names)
        )


# -- collectives on arrays -------------------------------------------------------------------------
#
# The cases of collectives of arrays: which circumstances there are, and which go together.

Form = tuple[tuple[int, ...], str]
"""A shape and a layout in memory."""

DENSE = (
    "allreduce",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "scan",
    "exscan",
    "all_gather_uneven",
    "all_to_all_uneven",
    "gather_uneven",
    "scatter_uneven",
    "reduce_scatter_uneven",
)
SHAPES = ((), (0,), (0, 3), (1,), (7,), (4097,), (12, 3))
_TRANSPOSED: Form = ((12, 3), "transposed")
_ODD_LAYOUTS: tuple[Form, ...] = (
    _TRANSPOSED,
    ((4097,), "strided"),
    ((12, 3), "reversed"),
    ((12, 3), "broadcast"),
    ((7,), "read_only"),
    ((7,), "unaligned"),
)
_LARGE = 140_001  # elements: in float16, the smallest used, more than 256 KB

_STYLES = {
    "allreduce": ("in_place", "twice"),
    "broadcast": ("in_place",),
    "reduce": ("in_place", "twice"),
    "all_gather": ("part", "list"),
    "gather": ("part",),
    "scatter": ("template",),
    "reduce_scatter": ("part", "twice"),
    "all_to_all": ("in_place",),
    "scan": ("in_place", "twice"),
    "exscan": ("in_place", "twice"),
    "all_gather_uneven": ("part", "list", "with_counts"),
    "all_to_all_uneven": ("counts", "list"),
    "gather_uneven": ("part", "list", "with_counts"),
    "scatter_uneven": ("template", "counts"),
    "reduce_scatter_uneven": ("part", "twice"),
}
_COMMON_STYLES = ("plain", "out", "async", "async_out", "reproducible")
_TREE_STYLES = ("tree", "tree_out", "tree_async")


# What happens to an element does not depend on where it lies or how the call is made, and where
# data is only moved an element is so many bytes. Allreduce has every dtype in every shape anyway.
_APART = tuple(
    (element, place) for element in ("dtype", "op", "values") for place in ("form", "style", "root")
)
_APART_WHEN_MOVED = (("dtype", "algorithm"), ("values", "algorithm"))


def full_allreduce(in_order: bool) -> Iterator[Case]:
    """Give every shape, and one with gaps, with every dtype and every operation it has."""
    plain: list[Form] = [(shape, "plain") for shape in SHAPES]
    for shape, layout in (*plain, _TRANSPOSED):
        for dtype in available_dtypes():
            for op in legal_ops(dtype):
                if op in LOGIC and shape not in ((), (7,), (4097,)):
                    continue  # as the bit operations, which are done in every shape
                yield Case(
                    "allreduce", shape=shape, layout=layout, dtype=dtype, op=op, in_order=in_order
                )


def dense_cases(
    world: int, seed: int, algorithms: bool, in_order: bool, libraries: Sequence[str]
) -> Iterator[Case]:
    """Give, for every function, cases in which each pair of circumstances meets."""
    for number, function in enumerate(DENSE):
        names = _algorithms(function) if algorithms else {}
        parameters = _parameters(function, world, list(names), libraries)
        rules = _rules(function, names)
        apart = _APART if function in REDUCTIONS else _APART + _APART_WHEN_MOVED
        for row in covering(parameters, rules, seed * len(DENSE) + number, apart=apart):
            yield _case(function, row, names, in_order)


def large_cases(world: int, algorithms: bool, in_order: bool) -> Iterator[Case]:
    """Give every function and algorithm arrays that do not fit one message."""
    for function in DENSE:
        names = _algorithms(function) if algorithms else {}
        shape = _divisible((_LARGE,), world) if function in CUT else (_LARGE,)
        op = "SUM" if function in REDUCTIONS else ""
        for algorithm in ("", *names):
            for dtype in ("float32", "float16"):
                row: Row = {"form": (shape, "plain"), "style": "plain", "algorithm": algorithm}
                row |= {"dtype": dtype, "op": op, "root": world - 1}
                yield _case(function, row, names, in_order)


def _algorithms(function: str) -> dict[str, bool]:
    """Name the algorithms of a function, and tell which reduce in rank order."""
    kind = Kind[function.removesuffix("_uneven").upper()]
    return {schedule.name: bool(schedule.in_order) for schedule in known(kind)}


def _case(function: str, row: Row, names: dict[str, bool], in_order: bool) -> Case:
    options = dict(row)
    shape, layout = options.pop("form")
    algorithm = options["algorithm"]
    keeps_order = names[algorithm] if algorithm else in_order
    is_exact = function not in REDUCTIONS or row["style"] == "reproducible" or keeps_order
    return Case(function, shape=shape, layout=layout, in_order=is_exact, **options)


def _parameters(
    function: str, world: int, algorithms: list[str], libraries: Sequence[str]
) -> dict[str, Sequence[Any]]:
    parameters: dict[str, Sequence[Any]] = {
        "library": _libraries(libraries),
        "form": _forms(function, world),
        "dtype": _dtypes(function),
        "op": _ops(function) if function in REDUCTIONS else ("",),  # the empty name is no op
        "values": ("distinct", "special", "tiny", "wrapping"),
        "style": _styles(function, world),
        "algorithm": ("", *algorithms),
    }
    if function in ROOTED:
        parameters["root"] = range(world)
    return parameters


_LIKE_THE_EVEN = ("gather_uneven", "scatter_uneven", "reduce_scatter_uneven")


def _dtypes(function: str) -> tuple[str, ...]:
    """Name the dtypes; those that go the way of an even call need not be all."""
    few = ("bool", "int8", "int64", "float16", "bfloat16", "float32", "complex128")
    some = few if function in _LIKE_THE_EVEN else available_dtypes()
    return tuple(dtype for dtype in some if dtype in available_dtypes())


def _ops(function: str) -> tuple[str, ...]:
    return ("SUM", "MEAN", "MAX", "LXOR") if function in _LIKE_THE_EVEN else OPS


def _libraries(libraries: Sequence[str]) -> list[str]:
    """Each alone, two that can be written, all together; numbers of Python and of NumPy."""
    mixed = {"+".join(libraries[:2]), "+".join(libraries)} - set(libraries)
    return [*libraries, *sorted(mixed), *NUMBERS]


def _styles(function: str, world: int) -> tuple[str, ...]:
    styles = (*_COMMON_STYLES, *_STYLES[function])
    if function in TREE_FUNCTIONS:
        styles += _TREE_STYLES
    if world == 1 and function in ("all_gather", "gather", "scatter", "reduce_scatter"):
        styles += ("in_place",)
    return styles


def _forms(function: str, world: int) -> list[Form]:
    forms: list[Form] = [(shape, "plain") for shape in SHAPES]
    forms += _ODD_LAYOUTS
    if function in CUT and world > 1:
        return [(_divisible(shape, world), layout) for shape, layout in forms if shape]
    if function in COUNTED or (function == "all_gather_uneven" and world == 1):
        return [form for form in forms if form[0]]
    return forms


def _divisible(shape: tuple[int, ...], world: int) -> tuple[int, ...]:
    return (math.ceil(shape[0] / world) * world, *shape[1:])


def _rules(function: str, algorithms: dict[str, bool]) -> list[Rule]:
    return [
        (("dtype", "op"), lambda dtype, op: not op or op in legal_ops(dtype)),
        (("op",), lambda op: op != "MEAN" or function not in PREFIXES),
        (("dtype", "values"), _has_values),
        (("values", "op"), _values_fit_op),
        (("library", "dtype"), can_hold),
        (("library", "form"), _can_lie),
        (("library", "style"), _can_be_called),
        (
            ("library", "values"),
            lambda library, values: library != "python" or values == "distinct",
        ),
        (("style", "form"), lambda style, form: _fits_style(function, style, form)),
        (
            ("algorithm", "style"),
            lambda name, style: style != "reproducible" or algorithms.get(name, True),
        ),
    ]


def _has_values(dtype: str, values: str) -> bool:
    if values == "wrapping":
        return dtype in INTEGERS
    return values == "distinct" or dtype in (*FLOATS, *COMPLEX)


def _values_fit_op(values: str, op: str) -> bool:
    """Tiny products vanish. The rest follows from the dtypes; said here, it saves a search."""
    without = {"special": BITS, "tiny": (*BITS, "PROD"), "wrapping": ("MEAN",)}
    return op not in without.get(values, ())


def _can_lie(library: str, form: Form) -> bool:
    """Numbers have no shape; torch has no negative strides, jax no strides at all."""
    shape, layout = form
    if library in NUMBERS:
        return shape == ()
    if library == "torch":
        return layout in ("plain", "strided", "transposed")
    return library == "numpy" or layout == "plain"


def _can_be_called(library: str, style: str) -> bool:
    if library in NUMBERS:
        return style in ("plain", "async", "reproducible", "twice", "list", "with_counts")
    return "jax" not in library or style not in ("in_place", "part")


def _fits_style(function: str, style: str, form: Form) -> bool:
    """What is written must be contiguous, and a gathered number has another shape."""
    if style == "in_place" and form[0] == () and function in JOINED:
        return False
    return style not in ("in_place", "part") or form[1] == "plain"


# -- all cases -------------------------------------------------------------------------------------


def contract_cases(
    world: int,
    seed: int = 0,
    *,
    algorithms: bool = True,
    in_order: bool = True,
    libraries: Sequence[str] | None = None,
) -> list[Case]:
    """Return the contract cases for a world of this size; always the same for a seed.

    Args:
        world: The number of ranks.
        seed: Decides the values, which pairs meet in one case, and the order of the list.
        algorithms: Whether the backend takes ``algorithm=``.
        in_order: Whether it reduces in rank order by default; if not, only calls with
            ``reproducible=True`` or an algorithm that keeps the order are compared bit for bit.
        libraries: The array libraries to use; by default those installed.
    """
    libraries = available_libraries() if libraries is None else tuple(libraries)
    cases = [
        *full_allreduce(in_order),
        *dense_cases(world, seed, algorithms, in_order, libraries),
        *large_cases(world, algorithms, in_order),
        *pair_cases(world, libraries),
        *custom_cases(world),
        *_empty_trees(world),
        *_synchronised(world),
        *_illegal_ops(),
        *_refusals(world, algorithms),
        *_objects(world),
        *_groups(world),
    ]
    if world > 1:
        cases += [*_mismatches(world, algorithms), *_messages(libraries)]
    # Shuffled, so that what a call leaves behind meets calls of every other kind.
    random.Random(seed).shuffle(cases)
    return [replace(case, seed=seed, number=number) for number, case in enumerate(cases)]


def _empty_trees(world: int) -> Iterator[Case]:
    for function in TREE_FUNCTIONS:
        op = "SUM" if function in REDUCTIONS else ""
        yield Case(function, style="empty_tree", op=op, root=world - 1)


def _synchronised(world: int) -> Iterator[Case]:
    if world == 1:
        return
    for number, function in enumerate(SYNCHRONISING):
        root = number % world if function in HAS_ROOT else 0
        for late in ("late_root", "late_other"):
            for style in ("plain", "empty"):
                yield Case(function, "synchronised", late, root=root, style=style)


def _illegal_ops() -> Iterator[Case]:
    for dtype in available_dtypes():
        for op in OPS:
            if op not in legal_ops(dtype):
                for function in REDUCTIONS:
                    yield Case(function, "refused", dtype=dtype, op=op)
    for function in PREFIXES:
        yield Case(function, "refused", dtype="float32", op="MEAN")


def _refusals(world: int, algorithms: bool) -> Iterator[Case]:
    for number, (name, refusal) in enumerate(REFUSALS.items()):
        if world < refusal.min_world or (refusal.needs_algorithms and not algorithms):
            continue
        yield Case("refused", "refused", name)
        if world > 1:
            yield Case("refused", "refused", name, style="one_rank", root=number % world)


def _mismatches(world: int, algorithms: bool) -> Iterator[Case]:
    for name, mismatch in MISMATCHES.items():
        if mismatch.needs_algorithms and not algorithms:
            continue
        for odd in sorted({1, world - 1}):
            yield Case("mismatch", "mismatch", name, root=odd)


def _messages(libraries: Sequence[str]) -> Iterator[Case]:
    mixed = "+".join(libraries)
    for name in MESSAGES:
        if name not in RINGS:
            yield Case("message", "message", name)
    for number, dtype in enumerate(available_dtypes()):
        for place, name in enumerate(RINGS):
            shape = ring_shape(number + place, dtype)
            library = mixed if can_hold(mixed, dtype) and name != "out_ring" else "numpy"
            yield Case("message", "message", name, shape=shape, dtype=dtype, library=library)


def ring_shape(number: int, dtype: str) -> tuple[int, ...]:
    """Pick a shape of which all ranks may send an array before any receives one."""
    large = min(4097, LARGEST_EAGER // DTYPES_BY_LABEL[dtype].itemsize - 1)
    return ((), (0, 3), (7,), (12, 3), (large,))[number % 5]


def _objects(world: int) -> Iterator[Case]:
    for number, function in enumerate(OBJECT_FUNCTIONS):
        for place, name in enumerate(OBJECTS):
            yield Case(function, "object", name, root=(number + place) % world)
        yield Case(function, "object", style="pickle", root=world - 1)


def _groups(world: int) -> Iterator[Case]:
    for name in GROUPS:
        if world > 1 or name not in NEEDS_TWO:
            yield Case("split", "group", name)
    for name in GRIDS:
        if world > 1 or name not in GRIDS_OF_TWO:
            yield Case("grid", "grid", name)
