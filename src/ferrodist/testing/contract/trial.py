# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trial: one case on one rank, and the problems found so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import ferrodist
from ferrodist import Backend, DistributedError
from ferrodist.testing.contract.case import Case
from ferrodist.testing.contract.compare import digest, find_difference
from ferrodist.testing.contract.dtypes import Array
from ferrodist.testing.contract.libraries import find_wrong_kind, to_numpy


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
