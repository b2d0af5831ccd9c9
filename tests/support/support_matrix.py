"""The support matrix of engines: what the engine does, what schedules do, what is refused.

It is found out by running every call with every dtype and operation, on every rank of a world of
three, and looking who did it. ``render`` makes the tables of docs/engines.md of it, and the tests
of an engine compare them; after a change of an engine, copy what the test shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np

from ferrodist import ReduceOp, UnsupportedOp
from ferrodist.arrays import array_over, parse_form
from ferrodist.backends.hybrid import HybridBackend
from ferrodist.buffer import ARRAY_DTYPES, DType
from ferrodist.call import Kind

REDUCTIONS = ("allreduce", "reduce", "reduce_scatter", "reduce_scatter_uneven", "scan", "exscan")
MOVES = (
    *("broadcast", "all_gather", "all_gather_uneven", "gather", "gather_uneven"),
    *("scatter", "scatter_uneven", "all_to_all", "all_to_all_uneven"),
)
NAMES = {"native": "engine", "scheduled": "schedule", "refused": "-"}
PLAIN_OPS = [op for op in ReduceOp if not op.takes_pairs]

Cell = tuple[str, str, str]  # call, dtype, op


def measure(backend: Any) -> dict[Cell, str]:
    """Run everything; every rank calls it."""
    scheduled: list[Any] = []
    run_collective = HybridBackend._run_collective

    def note(self: Any, running: Any, kind: Kind, *rest: Any) -> None:
        if kind is not Kind.BARRIER:  # of the ranks, before the engine's call
            scheduled.append(kind)
        run_collective(self, running, kind, *rest)

    found: dict[Cell, str] = {}
    with patch.object(HybridBackend, "_run_collective", note):
        for call in REDUCTIONS:
            for op in PLAIN_OPS:
                for dtype in ARRAY_DTYPES:
                    found[call, dtype.label, op.label] = _try(backend, call, dtype, op, scheduled)
        for call in MOVES:
            for dtype in ARRAY_DTYPES:
                found[call, dtype.label, ""] = _try(backend, call, dtype, None, scheduled)
    return found


def _try(backend: Any, call: str, dtype: DType, op: ReduceOp | None, scheduled: list[Any]) -> str:
    scheduled.clear()
    try:
        _make(backend, call, dtype, op)()
    except UnsupportedOp:
        return "refused"
    return "scheduled" if scheduled else "native"


def _make(backend: Any, call: str, dtype: DType, op: ReduceOp | None) -> Callable[[], Any]:
    """Make a call on an array with three rows."""
    x = array_over(np.zeros(3 * dtype.itemsize, np.uint8), parse_form(3, dtype.label, "numpy"))
    function = getattr(backend, call)
    if call.startswith("scatter") and backend.rank:
        return lambda: function(None) if call == "scatter" else function(None, None)
    if call in ("scatter_uneven", "reduce_scatter_uneven", "all_to_all_uneven"):
        options = {} if op is None else {"op": op}
        return lambda: function(x, [1, 1, 1], **options)
    return lambda: function(x) if op is None else function(x, op=op)


def render(found: dict[Cell, str]) -> str:
    """Write the tables; calls whose tables are the same share one."""
    tables: dict[str, list[str]] = {}
    for call in REDUCTIONS:
        tables.setdefault(_reductions(found, call), []).append(call)
    parts = [f"{_calls(calls)}:\n\n{table}" for table, calls in tables.items()]
    by_engine = [
        call
        for call in MOVES
        if all(found[call, dtype.label, ""] == "native" for dtype in ARRAY_DTYPES)
    ]
    others = [call for call in MOVES if call not in by_engine]
    if by_engine:
        parts.append(f"Every dtype by the engine: {_calls(by_engine)}.")
    rows = [f"| `{call}` | {_split(found, call)} |" for call in others]
    if rows:
        parts.append("\n".join(["| call | schedules do |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def _calls(calls: list[str]) -> str:
    return ", ".join(f"`{call}`" for call in calls)


def _split(found: dict[Cell, str], call: str) -> str:
    labels = [dtype.label for dtype in ARRAY_DTYPES]
    return ", ".join(label for label in labels if found[call, label, ""] == "scheduled")


def _reductions(found: dict[Cell, str], call: str) -> str:
    """Lay out dtypes against operations; dtypes whose rows are the same share one."""
    rows: dict[str, list[str]] = {}
    for dtype in ARRAY_DTYPES:
        cells = (NAMES[found[call, dtype.label, op.label]] for op in PLAIN_OPS)
        rows.setdefault(" | ".join(cells), []).append(dtype.label)
    head = " | ".join(op.label for op in PLAIN_OPS)
    lines = [f"| | {head} |", "|---" * (len(PLAIN_OPS) + 1) + "|"]
    return "\n".join([*lines, *(f"| {', '.join(names)} | {row} |" for row, names in rows.items())])
