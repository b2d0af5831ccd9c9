# SPDX-License-Identifier: MIT OR Apache-2.0
"""Case: one thing that a backend must get right, as plain data; Trial: a case on one rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

import ferrodist
from ferrodist import Backend, DistributedError
from ferrodist.testing.contract.values import Array, find_wrong_kind, real_view, to_numpy


@dataclass(frozen=True, slots=True, repr=False)
class Case:
    """One case of the contract suite: a call, its arguments, and what is checked.

    It can be pickled, printed and run alone: every rank derives its own input, and that of all
    others, from ``(seed, number, rank)``.

    Attributes:
        function: The public function, or the subject of a scenario.
        check: What is checked: ``result``, ``pair``, ``custom``, ``synchronised``, ``refused``,
            ``mismatch``, ``message``, ``object``, ``group`` or ``grid``.
        detail: The name of the scenario, where ``check`` has several.
        shape: The shape of the input. Uneven calls take from it how many rows a rank has.
        layout: How the input lies in memory.
        dtype: The name of the dtype.
        values: ``distinct``, ``special`` (NaN, infinities, signed zeros), ``tiny`` (subnormal) or
            ``wrapping`` (at the ends of an integer type).
        op: The name of the ReduceOp; empty for calls without one.
        root: The root of a rooted call, the odd rank out of a mismatch.
        style: How the call is made: ``plain``, ``out``, ``in_place``, ``part``, ``async`` ...
        library: Whose arrays; ``numpy+torch`` gives rank 0 the first, rank 1 the second, and so on.
        algorithm: The algorithm asked for by name; empty for the backend's own choice.
        in_order: Whether the reduction is promised to be in rank order, and so to the bit.
        seed: The seed of the list this case is from.
        number: Its place in that list.
    """

    function: str
    check: str = "result"
    detail: str = ""
    shape: tuple[int, ...] = ()
    layout: str = "plain"
    dtype: str = "float32"
    values: str = "distinct"
    op: str = ""
    root: int = 0
    style: str = "plain"
    library: str = "numpy"
    algorithm: str = ""
    in_order: bool = True
    seed: int = 0
    number: int = 0

    def library_of(self, rank: int) -> str:
        """Name the library a rank uses."""
        names = self.library.split("+")
        return names[rank % len(names)]

    def __repr__(self) -> str:
        given = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)[1:]
            if getattr(self, field.name) != field.default
        ]
        return f"Case({', '.join([repr(self.function), *given])})"


# -- one case on one rank --------------------------------------------------------------------------


def find_difference(
    got: Array, wanted: Array, bound: Array | None = None, *, signs_of_zero: bool = True
) -> str | None:
    """Say in which way ``got`` is not ``wanted``; None if it is."""
    if got.dtype != wanted.dtype:
        return f"dtype {got.dtype}, expected {wanted.dtype}"
    if got.shape != wanted.shape:
        return f"shape {got.shape}, expected {wanted.shape}"
    found, right = _parts(got), _parts(wanted)
    if bound is not None:
        is_wrong = _are_apart(found, right, bound)
    elif signs_of_zero:
        is_wrong = _bits(found) != _bits(right)
    else:
        is_wrong = ~((found == right) | (_is_nan(found) & _is_nan(right)))
    return _describe(found, right, is_wrong) if is_wrong.any() else None


def digest(array: Array, before: int = 0) -> int:
    """Hash an array's bits; arrays that differ in NaN payloads only have the same digest."""
    return zlib.crc32(_bits(_parts(array)).tobytes(), before)


def _parts(array: Array) -> Array:
    return np.ascontiguousarray(real_view(array)).reshape(-1)


def _bits(parts: Array) -> Array:
    if parts.dtype.kind not in "biu":
        parts = parts.copy()
        parts[_is_nan(parts)] = np.nan
    return parts.view(f"uint{8 * parts.dtype.itemsize}")


def _is_nan(parts: Array) -> Array:
    return np.asarray(parts != parts)


def _are_apart(got: Array, wanted: Array, bound: Array) -> Array:
    bound = bound.reshape(-1)
    with np.errstate(all="ignore"):
        distance = np.abs(got.astype(np.float64) - wanted.astype(np.float64))
        is_same = (got == wanted) | (_is_nan(got) & _is_nan(wanted))
    return np.asarray(~(is_same | (distance <= bound) | np.isinf(bound)))


def _describe(got: Array, wanted: Array, is_wrong: Array) -> str:
    place = int(np.argmax(is_wrong))
    number = f"{int(is_wrong.sum())} of {is_wrong.size} numbers"
    return (
        f"{number} differ, first at {place}: {_show(got[place])}, expected {_show(wanted[place])}"
    )


def _show(number: Any) -> str:
    return repr(number.item()) if number.dtype.kind in "biu" else f"{float(number)!r}"


class Trial:
    """What a check is given. Checks note problems and go on: the ranks must stay in step."""

    def __init__(self, backend: Backend, case: Case) -> None:
        self.backend = backend
        self.case = case
        self.problems: list[str] = []
        self.digest = 0  # of what all ranks must hold alike; 0 if there is no such thing

    @property
    def rank(self) -> int:
        """This rank."""
        return self.backend.rank

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.backend.world_size

    def expect(self, is_right: bool, problem: str) -> None:
        """Note a problem unless all is right."""
        if not is_right:
            self.problems.append(problem)

    def expect_equal(self, got: object, wanted: object, what: str) -> None:
        """Note a problem unless the two are equal."""
        self.expect(got == wanted, f"{what}: {got!r}, expected {wanted!r}")

    def expect_array(
        self,
        got: Any,
        wanted: Array | None,
        *,
        library: str = "numpy",
        dtype: str | None = None,
        bound: Array | None = None,
        signs_of_zero: bool = True,
        what: str = "result",
    ) -> None:
        """Note a problem unless ``got`` is the array wanted, of the library's kind."""
        if wanted is None or got is None:
            self.expect(got is wanted, f"{what}: {_short(got)}, expected {_short(wanted)}")
            return
        dtype = wanted.dtype.name if dtype is None else dtype
        wrong = find_wrong_kind(got, library, dtype)
        if wrong is None:
            wrong = find_difference(
                to_numpy(got, dtype), wanted, bound, signs_of_zero=signs_of_zero
            )
        self.expect(wrong is None, f"{what}: {wrong}")

    def note_same(self, got: Any, dtype: str) -> None:
        """Remember an array that every rank must hold with the same bits."""
        self.digest = digest(to_numpy(got, dtype), self.digest)

    def expect_error(
        self, error: type[DistributedError], attempt: Callable[[], object], says: str = ""
    ) -> DistributedError | None:
        """Note a problem unless the attempt raises this very error with these words."""
        try:
            result = attempt()
        except DistributedError as found:
            right = type(found) is error and says in str(found)
            self.expect(right, f"raised {describe_error(found)}, expected {error.__name__} {says}")
            return found
        self.expect(False, f"returned {_short(result)}, expected {error.__name__}")
        return None

    def expect_in_step(self, backend: Backend | None = None) -> None:
        """Note a problem unless the group, or a sub-group, still gives right results."""
        backend = self.backend if backend is None else backend
        got = ferrodist.allreduce(np.array([1 << backend.rank, 1]), backend)
        world = backend.world_size
        self.expect_array(got, np.array([(1 << world) - 1, world]), what="the call after it")


def describe_error(error: BaseException) -> str:
    """Name an error with its words."""
    return f"{type(error).__name__}: {error}"


def _short(x: object) -> str:
    text = "None" if x is None else f"{type(x).__name__} {x!r}"
    return text if len(text) <= 80 else text[:77] + "..."
