# SPDX-License-Identifier: MIT OR Apache-2.0
"""Refusal: something to attempt that must not be done, as the tables of refusals hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ferrodist import Backend, DistributedError

Attempt = Callable[[Backend], object]


@dataclass(frozen=True, slots=True)
class Refusal:
    """What to attempt, the error it must raise, words that must be in it, and where it applies."""

    error: type[DistributedError]
    attempt: Attempt
    says: str = ""
    min_world: int = 1
    needs_algorithms: bool = False


Refusals = Iterator[tuple[str, Refusal]]


def zeros(*shape: int) -> Any:
    """Make an array of float32."""
    return np.zeros(shape, np.float32)
