# SPDX-License-Identifier: MIT OR Apache-2.0
"""The cases of collectives of arrays: which circumstances there are, and which go together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ferrodist.call import Kind
from ferrodist.schedules import known
from ferrodist.testing.contract.case import Case
from ferrodist.testing.contract.covering import Row, Rule, covering
from ferrodist.testing.contract.dtypes import (
    BITS,
    COMPLEX,
    FLOATS,
    INTEGERS,
    OPS,
    available_dtypes,
    legal_ops,
)
from ferrodist.testing.contract.inputs import CUT, JOINED, REDUCTIONS, ROOTED
from ferrodist.testing.contract.libraries import NUMBERS, can_hold
from ferrodist.testing.contract.trees import TREE_FUNCTIONS

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
    "all_gather_uneven",
    "all_to_all_uneven",
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
_SCHEDULED_AS = {"all_gather_uneven": "all_gather", "all_to_all_uneven": "all_to_all"}

_STYLES = {
    "allreduce": ("in_place", "twice"),
    "broadcast": ("in_place",),
    "reduce": ("in_place", "twice"),
    "all_gather": ("part",),
    "gather": (),
    "scatter": ("template",),
    "reduce_scatter": ("part", "twice"),
    "all_to_all": ("in_place",),
    "all_gather_uneven": (),
    "all_to_all_uneven": ("counts",),
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
    """Name the algorithms of a function, and tell which fold in rank order."""
    kind = Kind[_SCHEDULED_AS.get(function, function).upper()]
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
        "dtype": available_dtypes(),
        "op": OPS if function in REDUCTIONS else ("",),  # the empty name is no op
        "values": ("distinct", "special", "tiny", "wrapping"),
        "style": _styles(function, world),
        "algorithm": ("", *algorithms),
    }
    if function in ROOTED:
        parameters["root"] = range(world)
    return parameters


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
    if function == "all_to_all_uneven" or (function == "all_gather_uneven" and world == 1):
        return [form for form in forms if form[0]]
    return forms


def _divisible(shape: tuple[int, ...], world: int) -> tuple[int, ...]:
    return (math.ceil(shape[0] / world) * world, *shape[1:])


def _rules(function: str, algorithms: dict[str, bool]) -> list[Rule]:
    return [
        (("dtype", "op"), lambda dtype, op: not op or op in legal_ops(dtype)),
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
        return style in ("plain", "async", "reproducible", "twice")
    return "jax" not in library or style not in ("in_place", "part")


def _fits_style(function: str, style: str, form: Form) -> bool:
    """What is written must be contiguous, and a gathered number has another shape."""
    if style == "in_place" and form[0] == () and function in JOINED:
        return False
    return style not in ("in_place", "part") or form[1] == "plain"
