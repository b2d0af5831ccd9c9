"""What several test files need: ranks that are expected to fail, threads in order, conversions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ferrodist import SimulatedBackend
from ferrodist.arrays import as_input, new_result
from ferrodist.testing import run_ranks


def errors_by_rank(
    num_ranks: int, fn: Callable[[SimulatedBackend], Any], **options: Any
) -> list[Any]:
    """Run ``fn`` on every rank and return each rank's error, or None where it went well."""

    def catch(backend: SimulatedBackend) -> BaseException | None:
        try:
            fn(backend)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the test looks at it
            return error
        return None

    return run_ranks(num_ranks, catch, **options)


class Gate:
    """A point that threads reach in a given order: ``pass_through(n)`` waits for 0..n-1."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = 0

    def pass_through(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._next >= number, timeout=20)
            self._next = max(self._next, number + 1)
            self._changed.notify_all()


def await_until(is_true: Callable[[], bool], seconds: float = 20) -> None:
    """Look again and again until something is so."""
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, f"still not so after {seconds:g} s"
        time.sleep(0.005)


def round_trip(x: Any) -> Any:
    """Convert an array as the input of a call, and a result of the same content back."""
    taken = as_input(x)
    result = new_result(taken, taken.buffer.shape)
    result.buffer.memory[:] = taken.buffer.memory
    return result.finish()


def address(x: Any) -> int:
    """Return where a buffer, or a NumPy array, begins."""
    x = x if isinstance(x, np.ndarray) else np.frombuffer(x, np.uint8)
    return int(x.ctypes.data)
