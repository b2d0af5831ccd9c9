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
_WINDOW, _POSTED = 64, 1000  # messages in flight
_PAIR_CALLS = ("send_recv", "sendrecv", "window", "posted")  # between ranks 0 and 1
_HALO_VARIANTS = ("Sendrecv", "Neighbor_alltoall")  # the ways in which MPI can exchange halos
_WITHOUT_OUT = ("new", "torch new", "number", "dict", "jax")
_KINDS = (*_WITHOUT_OUT[1:], "torch")
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

    def convert(self, kind: str, x: Array) -> Any:
        """Return the array as another kind of object; only ferrodist is asked for it."""

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

    @property
    def name(self) -> str:
        """The name of the call in the engine."""
        if self.variant in ("async", "small", "many", *_HALO_VARIANTS):
            return f"{self.call} {self.variant}"
        return f"{self.call} new" if self.variant in _WITHOUT_OUT else self.call


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
    return count, count * {"window": _WINDOW, "posted": _POSTED}.get(call, 1)


def expected(call: str, rank: int, world: int) -> list[int] | None:
    """Return the value of each equal part of the result; None where a rank gets none."""
    ranks = range(1, world + 1)
    if call in ("reduce", "gather") and rank != 0:
        return None
    if call in ("window", "posted"):  # one way only
        return [1] if rank == 1 else None
    if call in ("all_gather", "gather", "all_to_all"):
        return list(ranks)
    if call in ("allreduce", "reduce", "reduce_scatter"):
        return [sum(ranks)]
    if call == "scan":
        return [sum(range(1, rank + 2))]
    swapped = [2 - rank]
    values = {"broadcast": [1], "scatter": [rank + 1], "send_recv": swapped, "sendrecv": swapped}
    return values.get(call)


def check(order: Order, out: Any, rank: int, world: int) -> None:
    """Refuse to time a call whose result is wrong."""
    values = expected(order.call, rank, world)
    if values is None:
        return
    array = np.asarray([*out.values()] if isinstance(out, dict) else out)
    parts = array.astype(np.float32).reshape(len(values), -1)
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
    if order.variant == "asarray":
        return prepare_asarray(order)
    if order.call in _PAIR_CALLS and engine.rank > 1:
        return None
    given, got = lengths(order.call, order.count, engine.world)
    x, out = new_array(engine, order, given), new_array(engine, order, got)
    if order.call == "overlap":
        return prepare_overlap(engine, order, x, out)
    if order.call == "scatter":  # the root has something else for every rank
        x.reshape(engine.world, -1)[:] = np.arange(1, engine.world + 1)[:, None]
    if order.variant in _KINDS:
        x, out = engine.convert(order.variant, x), engine.convert(order.variant, out)
    call = engine.calls(x, out)[order.name]
    result = call()
    has_result = order.variant in _WITHOUT_OUT
    check(order, result if has_result else out, engine.rank, engine.world)
    return call


def prepare_copy(count: int) -> Call:
    """Return a copy of so many float32 that goes through the alignments in turn."""
    nbytes = 4 * count
    source = np.ones(nbytes + 4096, np.uint8)
    destination = np.ones(nbytes + 4096, np.uint8)
    pairs = [(destination[shift : shift + nbytes], source[:nbytes]) for shift in _ALIGNMENTS]
    turns = itertools.cycle(pairs)
    return lambda: np.copyto(*next(turns))


def prepare_asarray(order: Order) -> Call:
    """Return what JAX does to make its array of a result in NumPy's memory."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    x = np.ones(order.count, order.dtype)
    return lambda: jax.numpy.asarray(x)


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
    trips = {"send_recv": 2, "window": _WINDOW}.get(order.call, 1)  # there and back; per message
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
