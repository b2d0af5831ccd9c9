# SPDX-License-Identifier: MIT OR Apache-2.0
"""The parts of a benchmark: each has libraries of its own, which take turns among themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product

from ferrodist.launch.bench.driver import Effort, Outcome, Report, plan_bench, run_bench
from ferrodist.launch.bench.engines import (
    BUSY_ENGINES,
    CALLS_ENGINES,
    DDP_ENGINES,
    ENGINES,
    MESSAGES_ENGINES,
    TCP_ENGINES,
    Engine,
    missing_module,
    split_present,
)
from ferrodist.launch.bench.plan import (
    BUSY_COLLECTIVES,
    DDP_MODELS,
    MB,
    Block,
    make_busy_blocks,
    make_calls_block,
    make_ddp_block,
    make_messages_blocks,
    make_tcp_blocks,
)

Blocks = Mapping[int, Sequence[Block]]
"""Blocks by the number of ranks."""

_HOG = """
import os, sys
while os.getppid() == int(sys.argv[1]):  # a benchmark that was killed takes it along
    for _ in range(1_000_000):
        pass
"""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for: names of parts, engines and collectives, numbers of ranks, sizes."""

    parts: Sequence[str]
    engines: Sequence[str]
    ranks: Sequence[int]
    collectives: Sequence[str]
    sizes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Part:
    """Engines that are compared, and what with.

    ``patience`` is for calls that take long, ``hogs`` is how many processes compute meanwhile,
    ``missing`` says how to get what some rows need beside the engines.
    """

    engines: Sequence[Engine]
    blocks_by_ranks: Blocks
    patience: int = 1
    hogs: int = 0
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """How many blocks there are to measure."""
        return sum(map(len, self.blocks_by_ranks.values()))


def _shared_memory_parts(engines: Sequence[Engine], wish: Wish) -> list[Part]:
    return [Part(engines, plan_bench(engines, wish.ranks, wish.collectives, wish.sizes))]


def _tcp_parts(engines: Sequence[Engine], wish: Wish) -> list[Part]:
    ranks = min(wish.ranks)
    blocks = make_tcp_blocks(_names(engines), ranks, wish.collectives, wish.sizes)
    return [Part(engines, {ranks: blocks})]


def _ddp_parts(engines: Sequence[Engine], wish: Wish) -> list[Part]:
    ranks = min(wish.ranks)
    blocks = [make_ddp_block(ranks, model) for model in DDP_MODELS]
    return [Part(engines, {ranks: blocks}, patience=4)]


def _calls_parts(engines: Sequence[Engine], wish: Wish) -> list[Part]:
    ranks = min(wish.ranks)
    reasons = {name: missing_module(name) for name in ("torch", "jax")}
    missing = {name: reason for name, reason in reasons.items() if reason is not None}
    return [Part(engines, {ranks: [make_calls_block(ranks, missing)]}, missing=missing)]


def _messages_parts(engines: Sequence[Engine], wish: Wish) -> list[Part]:
    ranks = min(wish.ranks)
    return [Part(engines, {ranks: make_messages_blocks(_names(engines), ranks)})]


def _busy_parts(engines: Sequence[Engine], wish: Wish) -> list[Part]:
    """Make every core busy once, and for one large broadcast twice."""
    ranks, cores = min(wish.ranks), len(os.sched_getaffinity(0))
    own = [call for call in wish.collectives if call in BUSY_COLLECTIVES]
    calls = list(product(own, sorted(wish.sizes)))
    twice = [("broadcast", 16 * MB)] if ("broadcast", 16 * MB) in calls else []
    return [
        Part(engines, {ranks: make_busy_blocks(_names(engines), ranks, hogs, some)}, 2, hogs)
        for hogs, some in ((cores, calls), (2 * cores, twice))
        if some
    ]


def _names(engines: Sequence[Engine]) -> list[str]:
    return [engine.name for engine in engines]


_KINDS: dict[str, tuple[dict[str, Engine], Callable[[Sequence[Engine], Wish], list[Part]]]] = {
    "shared_memory": (ENGINES, _shared_memory_parts),
    "tcp": (TCP_ENGINES, _tcp_parts),
    "ddp": (DDP_ENGINES, _ddp_parts),
    "calls": (CALLS_ENGINES, _calls_parts),
    "messages": (MESSAGES_ENGINES, _messages_parts),
    "busy": (BUSY_ENGINES, _busy_parts),
}


def plan_parts(wish: Wish) -> tuple[list[Part], dict[str, str]]:
    """Return the parts that can be measured, and for each missing engine how to get it."""
    parts: list[Part] = []
    missing: dict[str, str] = {}
    for name in wish.parts:
        known, make_parts = _KINDS[name]
        engines, reasons = split_present(wish.engines, known)
        missing |= reasons
        parts += make_parts(engines, wish) if engines else []
    for part in parts:
        missing |= part.missing
    return parts, missing


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
