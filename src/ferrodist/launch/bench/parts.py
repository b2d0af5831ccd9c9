# SPDX-License-Identifier: MIT OR Apache-2.0
"""The parts of a benchmark: each has libraries of its own, which take turns among themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ferrodist.launch.bench.driver import Effort, Outcome, Report, plan_bench, run_bench
from ferrodist.launch.bench.engines import (
    DDP_ENGINES,
    ENGINES,
    TCP_ENGINES,
    Engine,
    split_present,
)
from ferrodist.launch.bench.plan import Block, make_ddp_block, make_tcp_blocks

Blocks = Mapping[int, Sequence[Block]]
"""Blocks by the number of ranks."""


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
    """Engines that are compared, and what with; ``patience`` is for calls that take long."""

    engines: Sequence[Engine]
    blocks_by_ranks: Blocks
    patience: int = 1

    @property
    def num_blocks(self) -> int:
        """How many blocks there are to measure."""
        return sum(map(len, self.blocks_by_ranks.values()))


def _shared_memory_part(engines: Sequence[Engine], wish: Wish) -> Part:
    return Part(engines, plan_bench(engines, wish.ranks, wish.collectives, wish.sizes))


def _tcp_part(engines: Sequence[Engine], wish: Wish) -> Part:
    ranks = min(wish.ranks)
    names = [engine.name for engine in engines]
    return Part(engines, {ranks: make_tcp_blocks(names, ranks, wish.collectives, wish.sizes)})


def _ddp_part(engines: Sequence[Engine], wish: Wish) -> Part:
    ranks = min(wish.ranks)
    return Part(engines, {ranks: [make_ddp_block(ranks)]}, patience=4)


_KINDS: dict[str, tuple[dict[str, Engine], Callable[[Sequence[Engine], Wish], Part]]] = {
    "shared_memory": (ENGINES, _shared_memory_part),
    "tcp": (TCP_ENGINES, _tcp_part),
    "ddp": (DDP_ENGINES, _ddp_part),
}


def plan_parts(wish: Wish) -> tuple[list[Part], dict[str, str]]:
    """Return the parts that can be measured, and for each missing engine how to get it."""
    parts: list[Part] = []
    missing: dict[str, str] = {}
    for name in wish.parts:
        known, make_part = _KINDS[name]
        engines, reasons = split_present(wish.engines, known)
        missing |= reasons
        parts += [make_part(engines, wish)] if engines else []
    return parts, missing


def run_parts(parts: Sequence[Part], effort: Effort, report: Report) -> Outcome:
    """Measure one part after the other."""
    outcome = Outcome()
    for part in parts:
        own = effort.times(part.patience)
        outcome.add(run_bench(part.engines, part.blocks_by_ranks, own, report))
    return outcome
