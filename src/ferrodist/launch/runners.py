# SPDX-License-Identifier: MIT OR Apache-2.0
"""Start ranks: one function per kind of backend, so that commands need not know what a rank is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ferrodist import Backend, InvalidArgument, run
from ferrodist.testing import run_ranks

T = TypeVar("T")


def run_on_ranks(backend: str, num_ranks: int, body: Callable[[Backend], T]) -> list[T]:
    """Run ``body`` on every rank of a new world and return the results in rank order."""
    if backend not in _RUNNERS:
        known = ", ".join(_RUNNERS)
        raise InvalidArgument(
            f"cannot start ranks of backend {backend!r} from here; can for: {known}", got=backend
        )
    results: list[T] = _RUNNERS[backend](num_ranks, body)
    return results


def _run_threads(num_ranks: int, body: Callable[[Backend], Any]) -> list[Any]:
    # A command runs as long as its user likes; a stuck rank is found by the calls themselves.
    return run_ranks(num_ranks, body, timeout=None)


def _run_processes(num_ranks: int, body: Callable[[Backend], Any]) -> list[Any]:
    return run(body, num_ranks)


_RUNNERS: dict[str, Callable[[int, Callable[[Backend], Any]], list[Any]]] = {
    "simulated": _run_threads,
    "shared_memory": _run_processes,
    "shm": _run_processes,
}
