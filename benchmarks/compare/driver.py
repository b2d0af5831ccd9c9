# SPDX-License-Identifier: MIT OR Apache-2.0
"""Start the ranks of every engine and take turns: one measures while all others sleep."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Self

from benchmarks.compare.engines import Engine
from benchmarks.compare.plan import Block, Lane, Part

from ferrodist import DistributedError, RankLost, RendezvousError

Report = Callable[[str], None]
"""Called with the title of every block when it is done."""

START_SECONDS = 120  # importing torch on an oversubscribed machine is slow
ANSWER_SECONDS = 180
_END_SECONDS = 10
_POLL_SECONDS = 0.2

_HOG = """
import os, sys
while os.getppid() == int(sys.argv[1]):  # a benchmark that was killed takes it along
    for _ in range(1_000_000):
        pass
"""


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
        for engine, versions in other.versions.items():
            self.versions[engine] = self.versions.get(engine, {}) | versions
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


def run_parts(parts: Sequence[Part], effort: Effort, report: Report) -> Outcome:
    """Measure one part after the other."""
    outcome = Outcome()
    for part in parts:
        own = effort.times(part.patience)
        with _run_hogs(part.hogs):
            outcome.add(run_bench(part.engines, part.blocks_by_ranks, own, report))
    return outcome


@contextmanager
def _run_hogs(number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Have so many processes compute for ever, and end them whatever happens."""
    command = [sys.executable, "-c", _HOG, str(os.getpid())]
    hogs: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(number):
            hogs.append(subprocess.Popen(command, process_group=0))
        yield hogs
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


class Job:
    """All ranks of one engine, asleep in the kernel unless they carry out an order."""

    def __init__(self, engine: Engine, ranks: int) -> None:
        self.engine = engine
        self.ranks = ranks
        self.versions: dict[str, str] = {}
        self._lines: list[IO[str]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:  # Ctrl-C too: ranks that were started must not be left behind
            self.close()
            raise
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def _start(self) -> None:
        folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        self._output = self._open.enter_context((folder / "output").open("w+b"))
        listener = self._open.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(folder / "driver"))
        listener.listen(self.ranks)
        listener.settimeout(_POLL_SECONDS)
        for command in self.engine.start_commands(self.ranks, folder / "driver"):
            # Its own session: Ctrl-C reaches the driver alone, which then ends everything in order.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                process_group=0,  # no session: Linux shares the cores out by session
            )
            self._processes.append(process)
        self._greet(listener)

    def _greet(self, listener: socket.socket) -> None:
        """Wait until every rank has called back."""
        deadline = time.monotonic() + START_SECONDS
        by_rank: dict[int, IO[str]] = {}
        while len(by_rank) < self.ranks:
            if any(process.poll() is not None for process in self._processes):
                raise RendezvousError(
                    f"{self.engine.label} ended at its start: {self._last_words()}"
                )
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"{self.engine.label}: {len(by_rank)} of {self.ranks} ranks came within "
                    f"{START_SECONDS} s: {self._last_words()}"
                )
            with suppress(TimeoutError):
                connection = self._open.enter_context(listener.accept()[0])
                connection.settimeout(ANSWER_SECONDS)
                lines = self._open.enter_context(connection.makefile("rw", encoding="utf-8"))
                hello = json.loads(lines.readline())
                by_rank[hello["rank"]] = lines
                self.versions = hello["versions"]
        self._lines = [by_rank[rank] for rank in range(self.ranks)]

    def measure(self, order: dict[str, Any]) -> list[list[float]]:
        """Have all ranks carry out an order; return the microseconds of each call, by rank.

        Raises ``ValueError`` if the ranks could not do it but live on, ``RankLost`` if one is gone.
        """
        for lines in self._lines:
            print(json.dumps(order), file=lines, flush=True)
        answers = [self._answer(rank, lines) for rank, lines in enumerate(self._lines)]
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise ValueError(errors[0])
        return [answer["microseconds"] for answer in answers]

    def _answer(self, rank: int, lines: IO[str]) -> dict[str, Any]:
        try:
            line = lines.readline()
        except OSError:  # took too long, or the connection broke
            line = ""
        if not line:
            raise RankLost(
                f"{self.engine.label}: rank {rank} gave no answer: {self._last_words()}", rank=rank
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return " | ".join([line for line in lines if line.strip()][-6:]) or "it said nothing"

    def close(self) -> None:
        """Hang up, which ends the ranks; end those that do not go by themselves."""
        with suppress(OSError):  # an order that could not be sent cannot be sent at the end either
            self._open.close()
        deadline = time.monotonic() + _END_SECONDS
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
