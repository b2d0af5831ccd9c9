# SPDX-License-Identifier: MIT OR Apache-2.0
"""Make rows of the results: who took how long, the ratio, the goal, and whether it is met.

Works on the document that ``--json`` writes, so a page can be made again without measuring again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ferrodist.launch.bench.engines import ENGINES, MPI
from ferrodist.launch.bench.goals import copy_goal, gloo_goal, itself_goal, mpi_goal
from ferrodist.launch.bench.plan import OURS

Document = dict[str, Any]
Times = dict[tuple[str, str, str, int, int], float]
"""Median microseconds by engine, call, variant, bytes and ranks."""

VARIANTS = {
    "shared": "shared arrays",
    "new": "without out=",
    "float16": "float16",
    "bfloat16": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio and its goal; ``is_most`` says that the goal is not to be exceeded."""

    value: float | None
    goal: float | None
    is_most: bool = False

    @property
    def is_met(self) -> bool | None:
        """True or False where there is both a ratio and a goal."""
        if self.value is None or self.goal is None:
            return None
        return self.value <= self.goal if self.is_most else self.value >= self.goal


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One call against the peers: median microseconds by engine, ratios of speed."""

    call: str
    nbytes: int
    ranks: int
    times: dict[str, float]
    to_mpi: Ratio
    to_gloo: Ratio


@dataclass(frozen=True, slots=True)
class SelfRow:
    """An allreduce against another way to move the same elements: ratio of times."""

    what: str
    against: str
    nbytes: int
    ranks: int
    ours: float
    other: float
    ratio: Ratio


@dataclass(frozen=True, slots=True)
class OverlapRow:
    """An allreduce behind a computation: microseconds of each alone and of both together."""

    engine: str
    ranks: int
    compute: float
    alone: float
    both: float

    @property
    def hidden(self) -> float:
        """The share of the allreduce that cost the caller nothing."""
        return (self.compute + self.alone - self.both) / self.alone


def times_of(document: Document) -> Times:
    """Index the medians of a document."""
    names = ("engine", "call", "variant", "nbytes", "ranks")
    return {tuple(one[name] for name in names): one["median"] for one in document["results"]}


def peer_rows(document: Document) -> list[PeerRow]:
    """Return a row for every call that peers make too: by ranks, call and size."""
    times = times_of(document)
    keys = dict.fromkeys(
        (call, variant, nbytes, ranks)
        for _, call, variant, nbytes, ranks in times
        if call != "overlap" and variant in ("", "shared")
    )
    calls = list(dict.fromkeys(call for call, *_ in keys))
    ordered = sorted(keys, key=lambda key: (key[3], calls.index(key[0]), key[1], key[2]))
    return [_peer_row(times, *key) for key in ordered]


def _peer_row(times: Times, call: str, variant: str, nbytes: int, ranks: int) -> PeerRow:
    own: dict[str, float] = {}
    for engine in ENGINES:
        key = (engine, call, variant if engine == OURS else "", nbytes, ranks)
        own |= {engine: times[key]} if key in times else {}
    mpi = min((own[name] for name in MPI if name in own), default=None)
    return PeerRow(
        call=call_name(call, variant),
        nbytes=nbytes,
        ranks=ranks,
        times=own,
        to_mpi=Ratio(_speed(own, mpi), mpi_goal(call, variant, nbytes, ranks)),
        to_gloo=Ratio(_speed(own, own.get("gloo")), gloo_goal(call, nbytes, ranks)),
    )


def _speed(times: dict[str, float], theirs: float | None) -> float | None:
    """Return how many times as quick as a peer ferrodist is, if both were measured."""
    return theirs / times[OURS] if theirs is not None and OURS in times else None


def call_name(call: str, variant: str) -> str:
    """Write a call and how it differs from the plain one."""
    name = {"send_recv": "send/recv"}.get(call, call)
    return f"{name}, {VARIANTS[variant]}" if variant else name


def self_rows(document: Document) -> list[SelfRow]:
    """Return ferrodist's allreduce against one copy, and its variants against the plain one."""
    times = times_of(document)
    return sorted(
        [*_copy_rows(times), *_variant_rows(times)],
        key=lambda row: (row.ranks, row.against, row.what, row.nbytes),
    )


def _copy_rows(times: Times) -> Iterator[SelfRow]:
    for (engine, call, variant, nbytes, ranks), ours in times.items():
        copy = times.get((OURS, "allreduce", "copy", nbytes, ranks))
        if engine == OURS and call == "allreduce" and variant in ("", "shared") and copy:
            ratio = Ratio(ours / copy, copy_goal(variant, nbytes, ranks), is_most=True)
            name = call_name(call, variant)
            yield SelfRow(name, "one numpy.copyto", nbytes, ranks, ours, copy, ratio)


def _variant_rows(times: Times) -> Iterator[SelfRow]:
    for (_, call, variant, nbytes, ranks), ours in times.items():
        plain = times.get((OURS, call, "", nbytes, ranks))
        if variant in ("new", "float16", "bfloat16") and plain:
            ratio = Ratio(ours / plain, itself_goal(variant, nbytes, ranks), is_most=True)
            against = "float32 with out="
            yield SelfRow(call_name(call, variant), against, nbytes, ranks, ours, plain, ratio)


def overlap_rows(document: Document) -> list[OverlapRow]:
    """Return how much of an allreduce each engine hides behind a computation."""
    parts: dict[tuple[str, int], dict[str, float]] = {}
    for (engine, call, variant, _, ranks), median in times_of(document).items():
        if call == "overlap":
            parts.setdefault((engine, ranks), {})[variant] = median
    return [
        OverlapRow(*key, times["compute"], times["alone"], times["both"])
        for key, times in parts.items()
        if len(times) == 3
    ]


def count_goals(document: Document) -> tuple[int, int]:
    """Return how many goals are met, and how many there are results for."""
    ratios = [ratio for row in peer_rows(document) for ratio in (row.to_mpi, row.to_gloo)]
    ratios += [row.ratio for row in self_rows(document)]
    verdicts = [ratio.is_met for ratio in ratios if ratio.is_met is not None]
    return sum(verdicts), len(verdicts)
