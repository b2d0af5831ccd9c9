# SPDX-License-Identifier: MIT OR Apache-2.0
"""The loop of examples/heat.py, for any library that exchanges the edges of blocks."""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Call = Callable[[], object]

LENGTH = 64  # of a block along each axis, without its halo
EXAMPLE = Path(__file__).parents[3] / "examples" / "heat.py"


@functools.cache
def load_example() -> Any:
    """Import the example; what it takes of ferrodist is not used where there is none."""
    if importlib.util.find_spec("ferrodist") is None:
        sys.modules["ferrodist"] = ModuleType("ferrodist")
    spec = importlib.util.spec_from_file_location("heat", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def grid_shape(world: int) -> tuple[int, int]:
    """Return the most square grid of so many ranks."""
    rows = max(n for n in range(1, math.isqrt(world) + 1) if world % n == 0)
    return rows, world // rows


def make_loop(rank: int, world: int, exchange: Callable[[Array], object]) -> Call:
    """Return one turn of the loop; refuse an exchange that fills the halo wrongly."""
    block = np.zeros((LENGTH + 2, LENGTH + 2))
    block[1:-1, 1:-1] = rank + 1
    exchange(block)
    ranks = np.pad(np.arange(world).reshape(grid_shape(world)) + 1, 1)
    row, column = (int(at) for at in np.argwhere(ranks == rank + 1)[0])
    around = ranks[[row - 1, row + 1, row, row], [column, column, column - 1, column + 1]]
    for halo, value in zip(halos_of(block), around, strict=True):
        if not (halo == value).all():
            raise ValueError(f"rank {rank}: wrong halo, expected {value}")
    step = load_example().step

    def turn() -> None:
        exchange(block)
        step(block)

    return turn


def edges_of(block: Array) -> list[Array]:
    """Return what neighbors get: the outermost rows and columns within the halo."""
    return [block[1, 1:-1], block[-2, 1:-1], block[1:-1, 1], block[1:-1, -2]]


def halos_of(block: Array) -> list[Array]:
    """Return the rows and columns that neighbors fill."""
    return [block[0, 1:-1], block[-1, 1:-1], block[1:-1, 0], block[1:-1, -1]]
