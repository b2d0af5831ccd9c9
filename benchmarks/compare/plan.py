# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is measured: parts of blocks of lanes, where the lanes of a block take turns."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from benchmarks.compare.engines import (
    BUSY_ENGINES,
    CALLS_ENGINES,
    DDP_ENGINES,
    ENGINES,
    MESSAGES_ENGINES,
    MPI,
    TCP_ENGINES,
    TORCH_ENGINES,
    Engine,
    missing_module,
    split_present,
)

from ferrodist.launch.bench import KB, MB, size_name

SIZES = (8, KB, 64 * KB, MB, 16 * MB, 64 * MB)
QUICK_SIZES = (8, 64 * KB, MB)
OVERLAP_SIZE = 16 * MB
OURS = "ferrodist"
COLLECTIVES = (
    "allreduce",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "scan",
    "barrier",
    "send_recv",
)
TCP_COLLECTIVES = ("allreduce", "all_gather", "reduce_scatter", "broadcast", "barrier")
DDP_STEPS = ("plain_step", "ferrodist_step", "torch_step")
DDP_MODELS = ("", "small", "many")
KINDS = ("numpy", "torch", "torch new", "number", "dict", "jax", "asarray", "async")
MESSAGES = ("sendrecv", "posted", "window")
HALO_NBYTES = 64 * 64 * 8  # a block of float64 per rank
MPI_HALOS = ("Sendrecv", "Neighbor_alltoall")
BUSY_COLLECTIVES = ("allreduce", "broadcast")
TORCH = "torch.distributed"
TORCH_COLLECTIVES = ("allreduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
TORCH_STEPS = ("ddp_step", "fsdp2_step")
PARTS = ("shared_memory", "tcp", "ddp", "calls", "messages", "busy", "torch")
_FLOAT32 = 4
_LACKING = (("gloo", "scan"),)


@dataclass(frozen=True, slots=True)
class Lane:
    """One call of one engine; a variant is another way to make it, or what it runs over."""

    engine: str
    call: str
    variant: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """Lanes that are compared, so they are measured in turn."""

    title: str
    ranks: int
    nbytes: int
    lanes: tuple[Lane, ...]

    @property
    def count(self) -> int:
        """The elements a size stands for: float32, at least one per rank, the same for each."""
        count = max(self.nbytes // _FLOAT32, self.ranks)
        return count - count % self.ranks


def make_blocks(
    engines: Sequence[str], ranks: int, collectives: Iterable[str], sizes: Sequence[int]
) -> list[Block]:
    """List all blocks of one number of ranks, the quick ones first."""
    collectives = list(collectives)
    blocks = [_block(engines, ranks, *one) for one in _calls(collectives, sizes)]
    if "allreduce" in collectives and OVERLAP_SIZE in sizes:
        blocks.append(_overlap_block(engines, ranks))
    return blocks


def make_tcp_blocks(
    engines: Sequence[str], ranks: int, collectives: Iterable[str], sizes: Sequence[int]
) -> list[Block]:
    """List the blocks of those collectives that are compared over TCP, the quick ones first."""
    own = [call for call in collectives if call in TCP_COLLECTIVES]
    return [_tcp_block(engines, ranks, *one) for one in _calls(own, sizes)]


def make_ddp_block(ranks: int, model: str = "") -> Block:
    """Compare a training step without DDP, with ours and with torch's."""
    lanes = tuple(Lane("ddp", step, model) for step in DDP_STEPS)
    return Block(f"DDP step on {ranks} ranks {model}".rstrip(), ranks, 0, lanes)


def make_calls_block(ranks: int, missing: Container[str]) -> Block:
    """Compare an allreduce of 8 B of each kind of array that there is, and one in flight."""
    module = {"asarray": "jax"}
    kinds = [kind for kind in KINDS if module.get(kind, kind.split()[0]) not in missing]
    lanes = tuple(Lane(OURS, "allreduce", kind) for kind in kinds)
    return Block(f"{_title('allreduce', 8, ranks)}, every kind", ranks, 8, lanes)


def make_messages_blocks(engines: Sequence[str], ranks: int) -> list[Block]:
    """Compare messages and a loop of halo exchanges with MPI, and the barrier with Open MPI."""
    barrier = tuple(Lane(engine, "barrier", "pair") for engine in engines if engine != "mpich")
    blocks = [_block(engines, ranks, call, 8) for call in MESSAGES]
    lanes = [Lane(OURS, "halo")] if OURS in engines else []
    lanes += [Lane(mpi, "halo", way) for mpi in engines if mpi in MPI for way in MPI_HALOS]
    return [
        *blocks,
        Block(_title("halo", HALO_NBYTES, ranks), ranks, HALO_NBYTES, tuple(lanes)),
        Block(f"{_title('barrier', 0, ranks)}, pair", ranks, 0, barrier),
    ]


def make_busy_blocks(
    engines: Sequence[str], ranks: int, hogs: int, calls: Iterable[tuple[str, int]]
) -> list[Block]:
    """Compare calls of some sizes while so many other processes compute for ever."""
    busy = f"{hogs} hogs"
    return [
        Block(
            f"{_title(call, nbytes, ranks)} with {busy}", ranks, nbytes,
            tuple(Lane(engine, call, busy) for engine in engines),
        )
        for call, nbytes in calls
    ]  # fmt: skip


def make_torch_blocks(
    engines: Sequence[str], ranks: int, calls: Iterable[tuple[str, int]], variant: str = TORCH
) -> list[Block]:
    """Compare calls, and training steps, through torch.distributed with those on Gloo."""
    return [
        Block(
            f"{_title(call, nbytes, ranks)} through {variant}", ranks, nbytes,
            tuple(Lane(engine, call, variant) for engine in engines),
        )
        for call, nbytes in [*calls, *((step, 0) for step in TORCH_STEPS)]
    ]  # fmt: skip


def _calls(collectives: Sequence[str], sizes: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Pair every call with every size, barrier with none."""
    if "barrier" in collectives:
        yield "barrier", 0
    for nbytes in sorted(sizes):
        yield from ((call, nbytes) for call in collectives if call != "barrier")


def _block(engines: Sequence[str], ranks: int, call: str, nbytes: int) -> Block:
    lanes = [Lane(engine, call) for engine in engines if (engine, call) not in _LACKING]
    if OURS in engines:
        lanes += [Lane(OURS, call, variant) for variant in _variants(call, nbytes)]
    return Block(_title(call, nbytes, ranks), ranks, nbytes, tuple(lanes))


def _tcp_block(engines: Sequence[str], ranks: int, call: str, nbytes: int) -> Block:
    lanes = tuple(Lane(engine, call, "tcp") for engine in engines)
    return Block(f"{_title(call, nbytes, ranks)} over TCP", ranks, nbytes, lanes)


def _title(call: str, nbytes: int, ranks: int) -> str:
    size = f" of {size_name(nbytes)}" if nbytes else ""
    return f"{call}{size} on {ranks} ranks"


def _variants(call: str, nbytes: int) -> list[str]:
    """Name what only ferrodist is measured with; "copy" is one numpy.copyto of as many bytes."""
    shared = ["shared"] if nbytes >= MB and call in ("allreduce", "reduce_scatter") else []
    others = ["new", "float16", "bfloat16", "copy"] if call == "allreduce" else []
    return shared + others


def _overlap_block(engines: Sequence[str], ranks: int) -> Block:
    """Compare an allreduce, a computation, and the one while the other runs."""
    lanes = [
        Lane(engine, "overlap", variant)
        for engine in engines
        for variant in ("compute", "alone", "both")
    ]
    return Block(f"overlap on {ranks} ranks", ranks, OVERLAP_SIZE, tuple(lanes))


def plan_bench(
    engines: Sequence[Engine],
    ranks: Sequence[int],
    collectives: Sequence[str],
    sizes: Sequence[int],
) -> dict[int, list[Block]]:
    """List the blocks for every number of ranks."""
    names = [engine.name for engine in engines]
    return {number: make_blocks(names, number, collectives, sizes) for number in ranks}


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
    blocks_by_ranks: Mapping[int, Sequence[Block]]
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


def _torch_parts(engines: Sequence[Engine], wish: Wish) -> list[Part]:
    """Measure through torch.distributed on an idle machine, and with every core busy."""
    ranks, cores = min(wish.ranks), len(os.sched_getaffinity(0))
    own = [call for call in wish.collectives if call in TORCH_COLLECTIVES]
    calls = list(_calls(own, wish.sizes))
    few = [(call, nbytes) for call, nbytes in calls if call == "allreduce"]
    names, busy = _names(engines), f"{TORCH}, {cores} hogs"
    return [
        Part(engines, {ranks: make_torch_blocks(names, ranks, calls)}, patience=2),
        Part(engines, {ranks: make_torch_blocks(names, ranks, few, busy)}, 2, cores),
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
    "torch": (TORCH_ENGINES, _torch_parts),
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
