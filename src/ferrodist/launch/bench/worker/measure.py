# SPDX-License-Identifier: MIT OR Apache-2.0
"""One rank of a benchmark: take orders from a socket, make calls, answer with their times.

Run as a script by the Python of the engine that is measured, which has NumPy but perhaps no
ferrodist. The loop is the same for every engine; an engine is a file with a class ``Engine``.
Between orders a rank blocks in the kernel, so that it costs the engine under test nothing.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import platform
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]
Call = Callable[[], object]

_ALIGNMENTS = (0, 64, 1024, 2080)  # bytes by which source and destination of a copy are shifted
_COMPUTE_COUNT, _COMPUTE_ROUNDS = 1 << 14, 1500  # some milliseconds on an array that stays cached


class Engine(Protocol):
    """What a library must do to be measured."""

    rank: int
    world: int
    versions: dict[str, str]

    def calls(self, x: Array, out: Array) -> dict[str, Call]:
        """Return the calls on these arrays by name; each leaves its result in ``out``."""

    def start_allreduce(self, x: Array, out: Array) -> Call:
        """Begin an allreduce and return what waits for its end."""

    def empty(self, count: int, dtype: Any) -> Array:
        """Return an array in memory that ranks share; only ferrodist is asked for it."""

    def close(self) -> None:
        """Leave the group."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to measure; ``count`` is the number of elements a size stands for."""

    call: str
    variant: str
    count: int
    warm: int
    repeats: int

    @property
    def dtype(self) -> Any:
        """The dtype of the arrays: a variant may be named after one."""
        return np.dtype(self.variant if "float" in self.variant else "float32")


def load_engine(path: str, arguments: list[str]) -> Engine:
    """Import the file at ``path`` and open its engine."""
    spec = importlib.util.spec_from_file_location("engine", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    engine: Engine = module.Engine(*arguments)
    return engine


def lengths(call: str, count: int, world: int) -> tuple[int, int]:
    """Return the elements of input and output; a gather's size is what each rank gives."""
    if call in ("all_gather", "gather"):
        return count, count * world
    if call == "scatter":
        return count * world, count
    if call == "reduce_scatter":
        return count, count // world
    return count, count


def expected(call: str, rank: int, world: int) -> list[int] | None:
    """Return the value of each equal part of the result; None where a rank gets none."""
    ranks = range(1, world + 1)
    if call in ("reduce", "gather") and rank != 0:
        return None
    if call in ("all_gather", "gather", "all_to_all"):
        return list(ranks)
    if call in ("allreduce", "reduce", "reduce_scatter"):
        return [sum(ranks)]
    return {"broadcast": [1], "scatter": [rank + 1], "send_recv": [2 - rank]}.get(call)


def check(order: Order, out: Array, rank: int, world: int) -> None:
    """Refuse to time a call whose result is wrong."""
    values = expected(order.call, rank, world)
    if values is None:
        return
    parts = out.astype(np.float32).reshape(len(values), -1)
    if not (parts == np.array(values, np.float32)[:, None]).all():
        raise ValueError(f"rank {rank}: wrong result of {order.call}, expected parts of {values}")


def new_array(engine: Engine, order: Order, count: int) -> Array:
    """Return an array whose every page has been written: pages of zeros are read from cache."""
    empty = engine.empty if order.variant == "shared" else np.empty
    array: Array = empty(count, order.dtype)
    array.fill(engine.rank + 1)
    return array


def prepare(engine: Engine, order: Order) -> Call | None:
    """Return the call to time, made once and its result checked; None if this rank has no part."""
    if order.variant == "copy":
        return prepare_copy(order.count) if engine.rank == 0 else None
    if order.call == "send_recv" and engine.rank > 1:
        return None
    given, got = lengths(order.call, order.count, engine.world)
    x, out = new_array(engine, order, given), new_array(engine, order, got)
    if order.call == "overlap":
        return prepare_overlap(engine, order, x, out)
    if order.call == "scatter":  # the root has something else for every rank
        x.reshape(engine.world, -1)[:] = np.arange(1, engine.world + 1)[:, None]
    name = f"{order.call} new" if order.variant == "new" else order.call
    call = engine.calls(x, out)[name]
    result = call()
    check(order, result if isinstance(result, np.ndarray) else out, engine.rank, engine.world)
    return call


def prepare_copy(count: int) -> Call:
    """Return a copy of so many float32 that goes through the alignments in turn."""
    nbytes = 4 * count
    source = np.ones(nbytes + 4096, np.uint8)
    destination = np.ones(nbytes + 4096, np.uint8)
    pairs = [(destination[shift : shift + nbytes], source[:nbytes]) for shift in _ALIGNMENTS]
    turns = itertools.cycle(pairs)
    return lambda: np.copyto(*next(turns))


def prepare_overlap(engine: Engine, order: Order, x: Array, out: Array) -> Call:
    """Return an allreduce, a computation, or the one behind the other."""
    if order.variant == "alone":
        return engine.calls(x, out)["allreduce"]
    if order.variant == "compute":
        return compute

    def both() -> None:
        wait = engine.start_allreduce(x, out)
        compute()
        wait()

    return both


def compute() -> None:
    """Keep one core busy for some milliseconds, without touching much memory."""
    numbers = np.ones(_COMPUTE_COUNT, np.float32)
    for _ in range(_COMPUTE_ROUNDS):
        np.sqrt(numbers, out=numbers)


def time_calls(call: Call, repeats: int) -> list[int]:
    """Return the nanoseconds each call took."""
    clock = time.perf_counter_ns
    times = []
    for _ in range(repeats):
        start = clock()
        call()
        times.append(clock() - start)
    return times


def carry_out(engine: Engine, order: Order) -> dict[str, Any]:
    """Measure what the order says and return the answer to it."""
    call = prepare(engine, order)
    if call is None:
        return {"microseconds": []}
    gc.disable()
    time_calls(call, order.warm)
    times = time_calls(call, order.repeats)
    gc.enable()
    trips = 2 if order.call == "send_recv" else 1  # there and back
    return {"microseconds": [time / 1000 / trips for time in times]}


def answer(engine: Engine, line: str) -> dict[str, Any]:
    """Carry out one order; an error is an answer too."""
    try:
        return carry_out(engine, Order(**json.loads(line)))
    except Exception as error:  # noqa: BLE001 -- the top of this process: the driver reports it
        return {"error": f"{type(error).__name__}: {error}"}


def main(address: str, engine_file: str, *arguments: str) -> None:
    """Serve one rank until the driver hangs up."""
    engine = load_engine(engine_file, list(arguments))
    versions = engine.versions | {"numpy": np.__version__, "python": platform.python_version()}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rw", encoding="utf-8") as lines:
            print(json.dumps({"rank": engine.rank, "versions": versions}), file=lines, flush=True)
            for line in lines:
                print(json.dumps(answer(engine, line)), file=lines, flush=True)
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
