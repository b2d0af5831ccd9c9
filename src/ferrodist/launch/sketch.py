# SPDX-License-Identifier: MIT OR Apache-2.0
"""Draw a curve in the terminal, with braille dots: four rows of two dots to a character."""

from __future__ import annotations

import math
from collections.abc import Sequence

_EMPTY = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column in a character


def sketch(values: Sequence[float], *, end: str, width: int = 60, height: int = 8) -> str:
    """Draw ``values`` from left to right, over an axis from 0 to ``end``; leave out NaN."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return "nothing to draw"
    rows = _heights(values, 2 * width, 4 * height)
    cells = [[_EMPTY] * width for _ in range(height)]
    for column, row in enumerate(rows):
        before = rows[max(0, column - 1)]
        # The line runs on from the column before, so that steep parts have no gaps.
        for dot in range(min(row, before + 1), max(row, before - 1) + 1):
            cells[dot // 4][column // 2] |= _DOTS[dot % 4][column % 2]
    lines = ["".join(map(chr, line)) for line in cells]
    return "\n".join(_with_axes(lines, f"{max(values):.3f}", f"{min(values):.3f}", end))


def _heights(values: Sequence[float], columns: int, rows: int) -> list[int]:
    """Return the row of every column, counted from the top."""
    low, high = min(values), max(values)
    scale = (rows - 1) / (high - low) if high > low else 0.0
    last = len(values) - 1
    spread = [_between(values, column * last / (columns - 1)) for column in range(columns)]
    return [round((high - value) * scale) for value in spread]


def _between(values: Sequence[float], position: float) -> float:
    """Return the value at a position between two of them."""
    before, share = int(position), position % 1
    after = min(before + 1, len(values) - 1)
    return values[before] * (1 - share) + values[after] * share


def _with_axes(lines: list[str], high: str, low: str, end: str) -> list[str]:
    margin, width = max(len(high), len(low)), len(lines[0])
    labels = [high, *[""] * (len(lines) - 2), low]
    return [
        *(f"{label:>{margin}} │{line}" for label, line in zip(labels, lines, strict=True)),
        f"{'':>{margin}} └{'─' * width}",
        f"{'':>{margin}}  0{end:>{width - 1}}",
    ]
