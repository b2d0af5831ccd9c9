# SPDX-License-Identifier: MIT OR Apache-2.0
"""Terms: what a cell holds, as a formula over the ranks' inputs instead of numbers.

Equal formulas get one number, so two cells with one number hold the same bits. Terms 0 .. world - 1
are the raw inputs of the ranks.
"""

from __future__ import annotations


class Terms:
    """All formulas met so far, by number."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.all_ranks = (1 << world) - 1
        # Per term: the ranks in it, as bits, and whether it is ((x_0 ∘ x_1) ∘ x_2) ... of the
        # lowest ones.
        self.ranks = [1 << rank for rank in range(world)]
        self.in_order = [rank == 0 for rank in range(world)]
        self._numbers: dict[tuple[int, ...], int] = {}

    def is_finished(self, term: int) -> bool:
        """Tell whether every rank is in it."""
        return self.ranks[term] == self.all_ranks

    def repeated(self, operands: tuple[int, ...]) -> int | None:
        """Return a rank that is in more than one of the operands, if there is any."""
        seen = 0
        for operand in operands:
            both = seen & self.ranks[operand]
            if both:
                return (both & -both).bit_length() - 1
            seen |= self.ranks[operand]
        return None

    def fold(self, operands: tuple[int, ...]) -> int:
        """Return the term of folding operands, none of them repeated, from left to right."""
        number = self._numbers.get(operands)
        if number is None:
            number = operands[0]
            for right in operands[1:]:
                number = self._fold_two(number, right)
            self._numbers[operands] = number
        return number

    def _fold_two(self, left: int, right: int) -> int:
        number = self._numbers.get((left, right))
        if number is None:
            number = self._numbers[left, right] = len(self.ranks)
            self.ranks.append(self.ranks[left] | self.ranks[right])
            next_raw = right < self.world and self.ranks[left] == self.ranks[right] - 1
            self.in_order.append(self.in_order[left] and next_raw)
        return number


def rank_list(ranks: int) -> str:
    """Write a set of ranks, given as bits, for a message."""
    numbers = [rank for rank in range(ranks.bit_length()) if ranks >> rank & 1]
    shown = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {shown}{more}"
