# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compute a value once, also when the ranks are threads that all ask for it at the same time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def computed_once(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Cache ``function``; while one thread computes, the others wait for its result."""
    cached = functools.lru_cache(maxsize=4096)(function)
    lock = threading.RLock()

    @functools.wraps(function)
    def locked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with lock:
            return cached(*args, **kwargs)  # type: ignore[arg-type]  # lru_cache wants Hashable

    return locked
