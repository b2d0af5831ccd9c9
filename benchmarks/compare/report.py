# SPDX-License-Identifier: MIT OR Apache-2.0
"""Judge the results: who took how long, the ratio, the goal, and whether it is met.

Works on the document that ``--json`` writes, so a page can be made again without measuring again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from benchmarks.compare.engines import ENGINES, MPI, TCP_ENGINES
from benchmarks.compare.goals import (
    ASARRAY,
    IN_ALL,
    MORE,
    SPEED,
    Versus,
    copy_goal,
    ddp_goal,
    gloo_goal,
    itself_goal,
    mpi_goal,
    tcp_goal,
    versus,
)
from benchmarks.compare.plan import COLLECTIVES, DDP_MODELS, DDP_STEPS, OURS

Document = dict[str, Any]
Key = tuple[str, str, str, int, int]
"""Engine, call, variant, bytes and ranks."""
Times = dict[Key, float]
"""Microseconds, most often the median."""

VARIANTS = {
    "shared": "shared arrays",
    "new": "without out=",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "numpy": "NumPy array",
    "torch": "torch tensor",
    "torch new": "torch tensor without out=",
    "number": "float",
    "dict": "dict of two arrays",
    "jax": "JAX array",
    "asarray": "jnp.asarray of its result",
    "async": "async_op=True, then wait",
}
_CALLS = {
    "send_recv": "send/recv",
    "posted": "1 000 receives posted, then 1 000 sends",
    "window": "64 sends in flight, per message",
}


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio and its goal; ``is_most`` says that the goal is not to be exceeded.

    ``unit`` is for tables where it differs by row.
    """

    value: float | None
    goal: float | None
    is_most: bool = False
    unit: str = ""

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
class TcpRow:
    """One call over TCP against Gloo: medians and 99th percentiles by engine, ratio of speed."""

    call: str
    nbytes: int
    ranks: int
    times: dict[str, float]
    p99: dict[str, float]
    ratio: Ratio


@dataclass(frozen=True, slots=True)
class DdpRow:
    """One kind of training step: median, 99th percentile, ratio of times to no DDP at all."""

    model: str
    step: str
    ranks: int
    median: float
    p99: float
    ratio: Ratio


@dataclass(frozen=True, slots=True)
class VersusRow:
    """One call against another, in the unit of its goal."""

    key: Key
    against: Key
    ours: float
    our_p99: float
    theirs: float | None
    their_p99: float | None
    ratio: Ratio


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


def result_key(result: dict[str, Any]) -> Key:
    """Return what one result is the time of."""
    return (
        result["engine"], result["call"], result["variant"], result["nbytes"], result["ranks"],
    )  # fmt: skip


def times_of(document: Document, what: str = "median") -> Times:
    """Index the medians of a document, or another of its times."""
    return {result_key(one): one[what] for one in document["results"]}


def peer_rows(document: Document) -> list[PeerRow]:
    """Return a row for every call that peers make too: by ranks, call and size."""
    times = times_of(document)
    keys = dict.fromkeys(
        (call, variant, nbytes, ranks)
        for _, call, variant, nbytes, ranks in times
        if call in COLLECTIVES and variant in ("", "shared")
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


def tcp_rows(document: Document) -> list[TcpRow]:
    """Return a row for every call over TCP: by ranks, call and size."""
    medians, p99 = times_of(document), times_of(document, "p99")
    keys = dict.fromkeys(
        (call, nbytes, ranks) for _, call, variant, nbytes, ranks in medians if variant == "tcp"
    )
    calls = list(dict.fromkeys(call for call, *_ in keys))
    ordered = sorted(keys, key=lambda key: (key[2], calls.index(key[0]), key[1]))
    return [_tcp_row(medians, p99, *key) for key in ordered]


def _tcp_row(medians: Times, p99: Times, call: str, nbytes: int, ranks: int) -> TcpRow:
    keys = {engine: (engine, call, "tcp", nbytes, ranks) for engine in TCP_ENGINES}
    times = {engine: medians[key] for engine, key in keys.items() if key in medians}
    return TcpRow(
        call=call,
        nbytes=nbytes,
        ranks=ranks,
        times=times,
        p99={engine: p99[keys[engine]] for engine in times},
        ratio=Ratio(_speed(times, times.get("gloo")), tcp_goal(call, nbytes, ranks)),
    )


def ddp_rows(document: Document) -> list[DdpRow]:
    """Return a row for every kind of training step: by ranks, the one without DDP first."""
    medians, p99 = times_of(document), times_of(document, "p99")
    rows = [_ddp_row(medians, p99, key) for key in medians if key[1] in DDP_STEPS]
    return sorted(
        rows,
        key=lambda row: (row.ranks, DDP_MODELS.index(row.model), DDP_STEPS.index(row.step)),
    )


def _ddp_row(medians: Times, p99: Times, key: Key) -> DdpRow:
    engine, step, model, nbytes, ranks = key
    plain = medians.get((engine, DDP_STEPS[0], model, nbytes, ranks))
    goal = ddp_goal(step, ranks, model)
    ratio = Ratio(medians[key] / plain if plain else None, goal, is_most=True)
    return DdpRow(model, step, ranks, medians[key], p99[key], ratio)


def versus_rows(document: Document) -> list[VersusRow]:
    """Return a row for every call that has a unit and a goal of its own: as measured, by size."""
    medians, p99 = times_of(document), times_of(document, "p99")
    groups = list(dict.fromkeys(key[:3] for key in medians))
    keys = sorted(medians, key=lambda key: (groups.index(key[:3]), key[3]))
    return [_versus_row(medians, p99, key, one) for key in keys for one in versus(*key[:4])]


def _versus_row(medians: Times, p99: Times, key: Key, one: Versus) -> VersusRow:
    nbytes, ranks = key[3:]
    against = (one.engine, one.call, one.variant, nbytes, ranks)
    asarray = medians.get((OURS, "allreduce", "asarray", nbytes, ranks))
    value = _in_unit(one.unit, medians[key], medians.get(against), asarray)
    goal = one.goal if ranks == 2 else None
    ratio = Ratio(value, goal, is_most=one.unit != SPEED, unit=one.unit)
    theirs = (medians.get(against), p99.get(against))
    return VersusRow(key, against, medians[key], p99[key], *theirs, ratio)


def _in_unit(unit: str, ours: float, theirs: float | None, asarray: float | None) -> float | None:
    """Return how a call compares in the unit of its goal, if all it needs was measured."""
    if unit == IN_ALL:
        return ours
    if theirs is None:
        return None
    if unit == SPEED:
        return theirs / ours
    if unit == MORE:
        return ours - theirs
    if unit == ASARRAY:
        return (ours - theirs) / asarray if asarray else None
    return ours / theirs


def call_name(call: str, variant: str) -> str:
    """Write a call and how it differs from the plain one."""
    name = _CALLS.get(call, call)
    return f"{name}, {VARIANTS[variant]}" if variant in VARIANTS else name


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
    ratios += [row.ratio for row in tcp_rows(document)]
    ratios += [row.ratio for row in ddp_rows(document)]
    ratios += [row.ratio for row in self_rows(document)]
    ratios += [row.ratio for row in versus_rows(document)]
    met = [ratio.is_met for ratio in ratios if ratio.is_met is not None]
    return sum(met), len(met)


def join_documents(documents: Sequence[Document]) -> Document:
    """Return one document; of results that are in several, the last one counts."""
    return reduce(_join, documents)


def _join(first: Document, second: Document) -> Document:
    results = {result_key(one): one for one in [*first["results"], *second["results"]]}
    return {
        "date": _both(first["date"], second["date"]),
        "machine": _join_facts(first["machine"], second["machine"]),
        "missing": first["missing"] | second["missing"],
        "results": list(results.values()),
        "versions": {
            engine: _join_facts(first["versions"].get(engine, {}), versions)
            for engine, versions in (first["versions"] | second["versions"]).items()
        },
        "failures": [*first["failures"], *second["failures"]],
    }


def _join_facts(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Merge facts by their names; where they differ, say both."""
    return {name: _both(first.get(name, fact), fact) for name, fact in second.items()}


def _both(first: Any, second: Any) -> Any:
    return first if str(second) in str(first).split(" and ") else f"{first} and {second}"
