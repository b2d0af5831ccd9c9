# SPDX-License-Identifier: MIT OR Apache-2.0
"""Take turns: one engine measures while all others sleep, round after round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from ferrodist import DistributedError, RankLost
from ferrodist.launch.bench.engines import Engine
from ferrodist.launch.bench.job import Job
from ferrodist.launch.bench.plan import Block, Lane, make_blocks

Report = Callable[[str], None]
"""Called with the title of every block when it is done."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: per lane and round, and per lane in all."""

    rounds: int = 5
    round_seconds: float = 0.08
    lane_seconds: float = 1.5
    most_repeats: int = 4000

    def times(self, factor: int) -> Self:
        """Return the effort with so many times the rounds."""
        return replace(self, rounds=factor * self.rounds, lane_seconds=factor * self.lane_seconds)


@dataclass(frozen=True, slots=True)
class Result:
    """The times of one lane in microseconds; the slowest rank counts."""

    engine: str
    call: str
    variant: str
    nbytes: int
    ranks: int
    median: float
    p99: float
    mean: float
    samples: int


@dataclass(slots=True)
class Outcome:
    """All that was measured, and what could not be."""

    results: list[Result] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Take over what was measured elsewhere."""
        self.results += other.results
        self.versions |= other.versions
        self.failures += other.failures

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


@dataclass(slots=True)
class _Samples:
    """What one lane has measured so far."""

    lane: Lane
    by_rank: list[list[float]]
    warm: int = 2
    repeats: int = 3  # the first turn finds out how many fit into the time
    rounds: int = 0
    seconds: float = 0.0
    has_failed: bool = False

    def add(self, times: list[list[float]], seconds: float, effort: Effort) -> None:
        """Keep the times of one round and set the length of the next by them."""
        for own, more in zip(self.by_rank, times, strict=True):
            own.extend(more)
        self.seconds += seconds
        self.rounds += 1
        call_seconds = max(_median(own) for own in times) / 1e6
        fitting = effort.round_seconds / max(call_seconds, 1e-9)
        self.repeats = int(min(max(fitting, 2), effort.most_repeats))
        self.warm = max(1, self.repeats // 10)

    def is_done(self, effort: Effort) -> bool:
        """Tell whether the lane failed, or is slow and has had enough time."""
        return self.has_failed or (self.rounds >= 2 and self.seconds > effort.lane_seconds)

    def result(self, block: Block) -> Result:
        slowest = max(self.by_rank, key=_median)
        return Result(
            engine=self.lane.engine,
            call=self.lane.call,
            variant=self.lane.variant,
            nbytes=block.nbytes,
            ranks=block.ranks,
            median=_median(slowest),
            p99=max(_percentile(own, 0.99) for own in self.by_rank),
            mean=max(statistics.fmean(own or [0.0]) for own in self.by_rank),
            samples=len(slowest),
        )


def _median(times: Sequence[float]) -> float:
    """Return the median; a rank that took no part has 0."""
    return statistics.median(times) if times else 0.0


def _percentile(times: Sequence[float], part: float) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


def run_bench(
    engines: Sequence[Engine],
    blocks_by_ranks: Mapping[int, Sequence[Block]],
    effort: Effort,
    report: Report,
) -> Outcome:
    """Measure all blocks, one number of ranks after the other."""
    outcome = Outcome()
    for ranks, blocks in blocks_by_ranks.items():
        with ExitStack() as stack:
            jobs = dict(_open_jobs(engines, ranks, stack, outcome))
            for block in blocks:
                outcome.results += _run_block(block, jobs, effort, outcome)
                report(block.title)
    return outcome


def plan_bench(
    engines: Sequence[Engine],
    ranks: Sequence[int],
    collectives: Sequence[str],
    sizes: Sequence[int],
) -> dict[int, list[Block]]:
    """List the blocks for every number of ranks."""
    names = [engine.name for engine in engines]
    return {number: make_blocks(names, number, collectives, sizes) for number in ranks}


def _open_jobs(
    engines: Sequence[Engine], ranks: int, stack: ExitStack, outcome: Outcome
) -> Iterator[tuple[str, Job]]:
    for engine in engines:
        try:
            job = stack.enter_context(Job(engine, ranks))
        except (DistributedError, OSError) as error:
            outcome.failures.append(f"{engine.label} on {ranks} ranks: {error}")
            continue
        outcome.versions[engine.name] = job.versions
        yield engine.name, job


def _run_block(
    block: Block, jobs: dict[str, Job], effort: Effort, outcome: Outcome
) -> Iterator[Result]:
    """Measure the lanes of a block in turn, beginning each round with another one."""
    lanes = [_Samples(lane, [[] for _ in range(block.ranks)]) for lane in block.lanes]
    for number in range(effort.rounds + 1):  # the first finds the number of repeats
        first = number % len(lanes)
        for samples in lanes[first:] + lanes[:first]:
            if samples.lane.engine in jobs and not samples.is_done(effort):
                _take_turn(samples, block, jobs, effort, outcome)
    return (samples.result(block) for samples in lanes if samples.rounds)


def _take_turn(
    samples: _Samples, block: Block, jobs: dict[str, Job], effort: Effort, outcome: Outcome
) -> None:
    lane = samples.lane
    order = {
        "call": lane.call,
        "variant": lane.variant,
        "count": block.count,
        "warm": samples.warm,
        "repeats": samples.repeats,
    }
    start = time.monotonic()
    try:
        times = jobs[lane.engine].measure(order)
    except (ValueError, RankLost, OSError) as error:
        samples.has_failed = True
        what = f"{lane.engine} {lane.variant}".strip()
        outcome.failures.append(f"{block.title}, {what}: {error}")
        if not isinstance(error, ValueError):
            jobs.pop(lane.engine).close()  # the others go on without it
    else:
        samples.add(times, time.monotonic() - start, effort)
