# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is measured: blocks of lanes, where the lanes of a block take turns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

KB, MB = 1 << 10, 1 << 20
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
    "barrier",
    "send_recv",
)
_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Lane:
    """One call of one engine; a variant is what the peers are not measured with."""

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


def size_name(nbytes: int) -> str:
    """Write a size as people say it."""
    for unit, name in ((MB, "MB"), (KB, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def make_blocks(
    engines: Sequence[str], ranks: int, collectives: Iterable[str], sizes: Sequence[int]
) -> list[Block]:
    """List all blocks of one number of ranks, the quick ones first."""
    collectives = list(collectives)
    blocks = [
        _block(engines, ranks, call, nbytes)
        for nbytes in sorted(sizes)
        for call in collectives
        if call != "barrier"
    ]
    if "barrier" in collectives:
        blocks.insert(0, _block(engines, ranks, "barrier", 0))
    if "allreduce" in collectives and OVERLAP_SIZE in sizes:
        blocks.append(_overlap_block(engines, ranks))
    return blocks


def _block(engines: Sequence[str], ranks: int, call: str, nbytes: int) -> Block:
    lanes = [Lane(engine, call) for engine in engines]
    if OURS in engines:
        lanes += [Lane(OURS, call, variant) for variant in _variants(call, nbytes)]
    size = f" of {size_name(nbytes)}" if nbytes else ""
    return Block(f"{call}{size} on {ranks} ranks", ranks, nbytes, tuple(lanes))


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
