# SPDX-License-Identifier: MIT OR Apache-2.0
"""Case: one thing that a backend must get right, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, repr=False)
class Case:
    """One thing to check: a call, what it is given, and what is looked at.

    It can be pickled, printed and run alone: every rank derives its own input, and that of all
    others, from ``(seed, number, rank)``.

    Attributes:
        function: The public function, or the subject of a scenario.
        check: What is looked at: ``result``, ``pair``, ``custom``, ``synchronised``, ``refused``,
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
