# SPDX-License-Identifier: MIT OR Apache-2.0
"""Covering: few rows in which every legal pair of values of two parameters occurs.

Most bugs of a call need one or two particular values to show; a full product would take hours.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

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
