# SPDX-License-Identifier: MIT OR Apache-2.0
"""Cost: how long a schedule takes on a kind of link, by a model of four numbers, in virtual time.

A message costs ``overhead`` at either end, ``latency`` on the way and ``per_byte`` for its bytes,
which pass the receiver one message at a time, so a hub with many senders is as slow as it really
is. A reduction costs ``per_reduced_byte`` for every byte of every operand after the first, a copy
that for every byte. ``nbytes`` is always the whole array: all chunks, or the blocks of all ranks
together.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

from ferrodist.schedules.steps import Copy, Recv, Schedule, Send, Step
from ferrodist.schedules.verify import Execution, explain

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


class LinkModel(NamedTuple):
    """What a link costs, in seconds.

    ``is_serial`` says that ranks are threads of one interpreter: handling and copying messages adds
    up over all of them, only waiting and reducing go on side by side.
    """

    latency: float
    per_byte: float
    per_reduced_byte: float
    overhead: float
    is_serial: bool = False


# Rough figures of one two-core machine: a thread wakes another in tens of microseconds, a flag in
# shared memory is seen in one, TCP takes 10 us on loopback, some more through a switch, and moves
# 2 GB/s. Memory is copied and reduced at 5 to 10 GB/s. Only their ratios decide what is chosen.
LINKS = {
    "threads": LinkModel(2e-5, 2e-10, 1e-10, 2e-5, is_serial=True),
    "shared_memory": LinkModel(1e-6, 1e-10, 1e-10, 2e-7),
    "tcp": LinkModel(2.5e-5, 5e-10, 1e-10, 5e-6),
}


class Line(NamedTuple):
    """Time as a function of size: ``fixed + per_byte * nbytes``."""

    fixed: float
    per_byte: float


def predict(schedule: Schedule, world: int, nbytes: float, model: LinkModel) -> float:
    """Return about how many seconds the schedule takes; cheap, because its line is cached."""
    fixed, per_byte = line(schedule, world, model)
    return fixed + per_byte * nbytes


@computed_once
def line(schedule: Schedule, world: int, model: LinkModel) -> Line:
    """Return the time at size zero and the time per byte, each by itself on its slowest way.

    Their sum can only be too slow: the slowest way at size zero may be another.
    """
    first, last = _work(schedule, 0, world), _work(schedule, world - 1, world)
    if max(first, last) > _HOPELESS:
        return Line(math.inf, 0.0)
    estimate = simulate if first + (world - 1) * last <= _MOST_WORK else _one_rank
    no_bytes = model._replace(per_byte=0.0, per_reduced_byte=0.0)
    only_bytes = model._replace(latency=0.0, overhead=0.0)
    return Line(
        _rounded(estimate(schedule, world, 0, no_bytes)),
        _rounded(estimate(schedule, world, 1, only_bytes)),
    )


def _rounded(seconds: float) -> float:
    # Schedules that cost the same must compare equal, in whatever order their terms were added.
    return float(f"{seconds:.9g}")


def simulate(
    schedule: Schedule, world: int, nbytes: float, model: LinkModel, *, root: int = 0
) -> float:
    """Return when the last rank is done if all start at 0: every step of every rank is executed.

    With a serial model no sooner than all messages are handled, one after the other.
    """
    clocks = _Clocks(schedule, world, root, nbytes, model)
    stuck = clocks.run()
    if stuck:
        raise explain(clocks, stuck)
    return max(*clocks.time, clocks.busy if model.is_serial else 0.0)


class _Clocks(Execution):
    def __init__(
        self, schedule: Schedule, world: int, root: int, nbytes: float, model: LinkModel
    ) -> None:
        super().__init__(schedule, world, root)
        self.model = model
        self.chunk_nbytes = nbytes / (self.cells.num_chunks or 1)
        self.time = [0.0] * world
        self.time_at_post = [0.0] * world
        self.busy = 0.0  # what handling and copying all messages takes together

    def on_post(self, rank: int, step: Step) -> None:
        self.time_at_post[rank] = self.time[rank]

    def on_message(self, sender: int, send: Send, receiver: int, recv: Recv) -> None:
        model, moving = self.model, self.model.per_byte * self.chunk_nbytes * len(send.cells)
        self.busy += 2 * model.overhead + moving
        sent = self.time_at_post[sender] + model.overhead
        arrives = max(self.time_at_post[receiver], sent + model.latency)
        self.time[sender] = max(self.time[sender], sent + moving)
        self.time[receiver] = max(self.time[receiver], arrives + model.overhead + moving)

    def on_done(self, rank: int, step: Step) -> None:
        if step.then:
            self.time[rank] += _local_work(step) * self.chunk_nbytes * self.model.per_reduced_byte


def _local_work(step: Step) -> int:
    return sum(1 if isinstance(work, Copy) else len(work.operands) - 1 for work in step.then)


# A world in which a schedule has more to do than this is not simulated rank by rank: it would take
# longer than the call it is for. One rank stands for all, as if every step were a round of the
# whole world. That is exact where all ranks do the same (ring, direct, pairwise, bruck, halving)
# and close for trees; a hub or a chain, whose messages overlap, comes out too slow. The busiest
# rank of every built-in schedule is rank 0, or in scans the last or one in the middle.
_MOST_WORK = 5_000
_HOPELESS = 50_000  # a rank with more to do than this would not even be done listing it in time
_CELLS_PER_STEP = 8  # naming so many cells takes as long as one more step


def _work(schedule: Schedule, rank: int, world: int) -> float:
    """Count the steps of a rank, as far as it matters."""
    total = 0.0
    for step in schedule.steps(rank, world, 0):
        total += 1 + (_cells_sent(step) + _cells_received(step)) / _CELLS_PER_STEP
        if total > _HOPELESS:
            break
    return total


def _one_rank(schedule: Schedule, world: int, nbytes: float, model: LinkModel) -> float:
    ranks = {0, world // 2, world - 1}
    return max(_as_rounds(schedule, rank, world, nbytes, model) for rank in ranks)


def _as_rounds(schedule: Schedule, rank: int, world: int, nbytes: float, model: LinkModel) -> float:
    chunk_nbytes = nbytes / (schedule.num_chunks(world) or 1)
    total = 0.0
    for step in schedule.steps(rank, world, 0):
        if step.send is not None or step.recv is not None:
            cells = max(_cells_sent(step), _cells_received(step))
            total += model.latency + 2 * model.overhead + model.per_byte * chunk_nbytes * cells
        total += _local_work(step) * chunk_nbytes * model.per_reduced_byte
    return total


def _cells_sent(step: Step) -> int:
    return len(step.send.cells) if step.send is not None else 0


def _cells_received(step: Step) -> int:
    return len(step.recv.cells) if step.recv is not None else 0
