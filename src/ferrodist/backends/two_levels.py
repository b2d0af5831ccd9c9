# SPDX-License-Identifier: MIT OR Apache-2.0
"""Collectives in two levels, as programs: inside hosts in shared memory, between them by TCP.

A HostMap says which ranks share a host. ``build`` writes the program of one kind of call; native
code (``native/hybrid``) executes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from ferrodist import _native
from ferrodist.backends.running_call import NO_ARGS, CollectiveArgs
from ferrodist.buffer import DType
from ferrodist.call import Kind
from ferrodist.reduce_op import ReduceOp
from ferrodist.schedules import LINKS, Lengths, LinkModel, choose, predict

if TYPE_CHECKING:
    from ferrodist.backends.hybrid import HybridBackend


@dataclass(frozen=True, slots=True)
class HostMap:
    """The hosts of a group, in the order of their lowest ranks; ``here`` is this rank's host."""

    hosts: tuple[tuple[int, ...], ...]
    here: int
    rank: int

    @classmethod
    def of(cls, names: Sequence[str], rank: int) -> HostMap:
        """Sort ranks by the names of their hosts; ``names[i]`` is that of rank i."""
        ranks: dict[str, list[int]] = {}
        for other, name in enumerate(names):
            ranks.setdefault(name, []).append(other)
        return cls(tuple(map(tuple, ranks.values())), list(ranks).index(names[rank]), rank)

    @property
    def local(self) -> tuple[int, ...]:
        return self.hosts[self.here]

    @property
    def local_rank(self) -> int:
        return self.local.index(self.rank)

    @property
    def are_equal(self) -> bool:
        """Whether every host has as many ranks as every other."""
        return len(set(map(len, self.hosts))) == 1

    @property
    def are_in_order(self) -> bool:
        """Whether the ranks of each host follow each other, so that its blocks lie together."""
        return all(ranks[-1] - ranks[0] == len(ranks) - 1 for ranks in self.hosts)

    def node_leaders(self, root: int | None = None) -> list[int]:
        """List one rank per host: the root for its own, the lowest for the others."""
        return [root if root is not None and root in ranks else ranks[0] for ranks in self.hosts]

    def host_of(self, rank: int) -> int:
        return next(host for host, ranks in enumerate(self.hosts) if rank in ranks)

    def rail(self) -> list[int]:
        """List the ranks that have this rank's number on their hosts."""
        return [ranks[self.local_rank] for ranks in self.hosts]


_RAILS_NBYTES = 1 << 16  # from here on a part each costs less than what is saved


class Space(IntEnum):
    """Whose memory an array of a program lies in; the numbers of native code."""

    NONE = 0
    INPUT = 1
    OUTPUT = 2
    SCRATCH = 3


class Array(NamedTuple):
    """Some elements of the caller's arrays, or of memory that is needed besides them."""

    space: Space
    dtype: DType
    begin: int  # in bytes
    num_elements: int

    def part(self, begin: int, end: int) -> Array:
        return self._replace(
            begin=self.begin + begin * self.dtype.itemsize, num_elements=end - begin
        )

    @property
    def span(self) -> tuple[int, int, int]:
        return self.space, self.begin, self.num_elements * self.dtype.itemsize


_NO_SPAN = (Space.NONE, 0, 0)


class Builder:
    """Writes the program of one collective."""

    def __init__(
        self,
        backend: HybridBackend,
        args: CollectiveArgs,
        input: Array | None,
        output: Array | None,
    ) -> None:
        self.program = _native.Program()
        self.backend = backend
        self.hosts = backend.host_map
        self.args = args
        self._input = input
        self._output = output
        self._scratch_nbytes = 0

    @property
    def input(self) -> Array:
        """The input, in kinds where every rank has one."""
        assert self._input is not None
        return self._input

    @property
    def output(self) -> Array:
        """The result, in kinds where every rank has one."""
        assert self._output is not None
        return self._output

    @property
    def op(self) -> ReduceOp:
        assert self.args.op is not None
        return self.args.op

    @property
    def partial_op(self) -> ReduceOp:
        """How partial results are reduced: a mean is divided at the end."""
        return ReduceOp.SUM if self.op is ReduceOp.MEAN else self.op

    # -- instructions ---------------------------------------------------------------------------

    def scratch(self, dtype: DType, count: int) -> Array:
        """Take memory besides the caller's arrays."""
        begin = -(-self._scratch_nbytes // 64) * 64
        self._scratch_nbytes = begin + count * dtype.itemsize
        return Array(Space.SCRATCH, dtype, begin, count)

    def reuse_scratch(self) -> None:
        """Let what follows have all scratch memory again."""
        self._scratch_nbytes = 0

    def intra_node(
        self,
        kind: Kind,
        source: Array | None = None,
        target: Array | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        root: int = 0,
        in_place: bool = False,
    ) -> None:
        """Do a collective of the ranks of this host; ``root`` is a rank among them."""
        sized = target if kind.result_is_block else source or target
        self.program.add_intra_node(
            kind,
            sized.dtype if sized is not None and kind.is_reduction else DType.UINT8,
            op,
            root,
            _NO_SPAN if source is None else source.span,
            _NO_SPAN if target is None else target.span,
            0 if sized is None else sized.num_elements * sized.dtype.itemsize,
            in_place,
        )

    def inter_node(
        self,
        ranks: Sequence[int],
        kind: Kind,
        lengths: Lengths,
        source: Array | None = None,
        target: Array | None = None,
        args: CollectiveArgs = NO_ARGS,
    ) -> None:
        """Do a collective of ranks on different hosts; its root is a place in their list."""
        sample = source or target
        dtype = DType.UINT8 if sample is None else sample.dtype
        plan = self.backend.planner_of(ranks).plan_lengths(kind, dtype, lengths, args)
        in_place = args.in_place
        if in_place and not plan.alias_safe and source is not None:
            in_place, copy = False, self.scratch(source.dtype, source.num_elements)
            self.program.add_copy(source.span, copy.span)
            source = copy
        self.program.add_inter_node(
            plan.native,
            _NO_SPAN if source is None else source.span,
            _NO_SPAN if target is None else target.span,
            in_place,
        )

    def divide(self, result: Array) -> None:
        if self.op is ReduceOp.MEAN:
            self.program.add_divide(result.dtype, result.span, self.backend.world_size)

    def broadcast_from(self, local_root: int, target: Array) -> None:
        """Give what a rank of this host has to all of it."""
        is_mine = self.hosts.local_rank == local_root
        source = target if is_mine else None
        self.intra_node(Kind.BROADCAST, source, target, root=local_root, in_place=is_mine)


def build(
    backend: HybridBackend,
    kind: Kind,
    dtype: DType,
    lengths: Lengths,
    args: CollectiveArgs,
    num_input: int | None,
    num_output: int | None,
) -> _native.Program:
    """Write the program of a collective on arrays of so many elements; None where there is none."""
    input = None if num_input is None else Array(Space.INPUT, dtype, 0, num_input)
    output = None if num_output is None else Array(Space.OUTPUT, dtype, 0, num_output)
    to = Builder(backend, args, input, output)
    write = _WRITERS.get(kind)
    if (
        write is not None
        and _is_allowed(backend, kind, dtype, args)
        and _pays(backend, kind, lengths.count * dtype.itemsize, dtype.is_half)
    ):
        write(to)
    else:
        to.intra_node(Kind.BARRIER)
        to.inter_node(range(backend.world_size), kind, lengths, input, output, args)
    return to.program


def _is_allowed(backend: HybridBackend, kind: Kind, dtype: DType, args: CollectiveArgs) -> bool:
    if args.algorithm is not None or args.counts is not None:
        return False
    if args.in_order and kind.is_reduction:
        return False
    if kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER) and not backend.host_map.are_in_order:
        return False
    return kind is not Kind.REDUCE_SCATTER or not dtype.is_half  # partial sums would be rounded


def _pays(backend: HybridBackend, kind: Kind, nbytes: int, half: bool) -> bool:
    """Compare what both ways are predicted to cost."""
    hosts = backend.host_map
    if len(hosts.hosts) == backend.world_size:
        return False
    most, link, inside = max(map(len, hosts.hosts)), backend.link_model, LINKS["shared_memory"]

    def inter_node(size: int, model: LinkModel) -> float:
        schedule = choose(kind, size, nbytes, half=half, in_order=False, model=model)
        return predict(schedule, size, nbytes, model)

    # All ranks of a host have one wire between them.
    directly = inter_node(backend.world_size, link._replace(per_byte=link.per_byte * most))
    is_cut = kind is Kind.ALLREDUCE and hosts.are_equal and nbytes >= _RAILS_NBYTES
    copied = nbytes / most if is_cut else nbytes
    rounds = 2 * (inside.latency + 2 * inside.per_byte * copied)
    return inter_node(len(hosts.hosts), link) + rounds < directly


# -- allreduce and reduce -------------------------------------------------------------------------


class _Step:
    """One segment of a reduction; 16-bit floats are accumulated as float32, rounded at its end."""

    def __init__(self, to: Builder, source: Array, target: Array | None) -> None:
        self._to = to
        self._half = source.dtype if source.dtype.is_half else None
        self.in_place = to.args.in_place and self._half is None
        self._target = target
        self.source, self.target = source, target
        if self._half is not None:
            to.reuse_scratch()
            self.source = to.scratch(DType.FLOAT32, source.num_elements)
            to.program.add_to_float32(self._half, source.span, self.source.span)
            if target is not None:
                self.target = to.scratch(DType.FLOAT32, source.num_elements)

    def finish(self) -> None:
        """Round float32 results into the caller's array."""
        if self._half is not None and self._target is not None and self.target is not None:
            program = self._to.program
            program.add_from_float32(self._half, self.target.span, self._target.span)


def _allreduce(to: Builder) -> None:
    hosts, num_local = to.hosts, len(to.hosts.local)
    for begin, end in _segments(to.input, to.backend.config.chunk_nbytes):
        step = _Step(to, to.input.part(begin, end), to.output.part(begin, end))
        whole = 0
        if hosts.are_equal and (end - begin) * to.input.dtype.itemsize >= _RAILS_NBYTES:
            whole = (end - begin) // num_local * num_local
            _by_rails(to, step, whole)
        if whole < end - begin or begin == end:  # nothing to reduce is compared all the same
            _by_node_leaders(to, step, whole, end - begin)
        step.finish()


def _by_rails(to: Builder, step: _Step, count: int) -> None:
    hosts, op = to.hosts, to.partial_op
    assert step.target is not None
    source, target = step.source.part(0, count), step.target.part(0, count)
    size = count // len(hosts.local)
    mine = target.part(hosts.local_rank * size, (hosts.local_rank + 1) * size)
    to.intra_node(Kind.REDUCE_SCATTER, source, mine, op=op, in_place=step.in_place)
    args = CollectiveArgs(op, in_place=True)
    to.inter_node(hosts.rail(), Kind.ALLREDUCE, Lengths(size), mine, mine, args)
    to.divide(mine)
    to.intra_node(Kind.ALL_GATHER, mine, target, in_place=True)


def _by_node_leaders(to: Builder, step: _Step, begin: int, end: int) -> None:
    assert step.target is not None
    source, target = step.source.part(begin, end), step.target.part(begin, end)
    is_leader = to.hosts.local_rank == 0
    to.intra_node(
        Kind.REDUCE,
        source,
        target if is_leader else None,
        op=to.partial_op,
        in_place=step.in_place and is_leader,
    )
    if is_leader:
        leaders, args = to.hosts.node_leaders(), CollectiveArgs(to.partial_op, in_place=True)
        to.inter_node(leaders, Kind.ALLREDUCE, Lengths(end - begin), target, target, args)
        to.divide(target)
    to.broadcast_from(0, target)


def _reduce(to: Builder) -> None:
    hosts, root = to.hosts, to.args.root
    leaders, home = hosts.node_leaders(root), hosts.host_of(root)
    leader = hosts.local.index(leaders[hosts.here])
    is_leader, is_root = hosts.local_rank == leader, to.backend.rank == root
    for begin, end in _segments(to.input, to.backend.config.chunk_nbytes):
        to.reuse_scratch()
        target = to.output.part(begin, end) if is_root else None
        step = _Step(to, to.input.part(begin, end), target)
        result = step.target
        if is_leader and result is None:
            result = to.scratch(step.source.dtype, end - begin)
        to.intra_node(
            Kind.REDUCE,
            step.source,
            result if is_leader else None,
            op=to.partial_op,
            root=leader,
            in_place=step.in_place and is_root,
        )
        if is_leader:
            final = result if is_root else None
            args = CollectiveArgs(to.partial_op, home, in_place=is_root)
            to.inter_node(leaders, Kind.REDUCE, Lengths(end - begin), result, final, args)
            if final is not None:
                to.divide(final)
        step.finish()
    to.intra_node(Kind.BARRIER)


def _segments(array: Array, nbytes: int) -> Iterator[tuple[int, int]]:
    """Cut an array so that what is held besides it is bounded; at least one part, maybe empty."""
    size = max(1, nbytes // array.dtype.itemsize)
    for begin in range(0, max(array.num_elements, 1), size):
        yield begin, min(begin + size, array.num_elements)


# -- the others -----------------------------------------------------------------------------------


def _broadcast(to: Builder) -> None:
    hosts, root, target = to.hosts, to.args.root, to.output
    leaders = hosts.node_leaders(root)
    to.intra_node(Kind.BARRIER)
    if to.backend.rank in leaders:
        args = CollectiveArgs(root=hosts.host_of(root), in_place=to.args.in_place)
        source = to.input if to.backend.rank == root else None
        to.inter_node(leaders, Kind.BROADCAST, Lengths(target.num_elements), source, target, args)
    to.broadcast_from(hosts.local.index(leaders[hosts.here]), target)


def _all_gather(to: Builder) -> None:
    hosts, size, target = to.hosts, to.input.num_elements, to.output
    is_leader = hosts.local_rank == 0
    here = target.part(hosts.local[0] * size, (hosts.local[-1] + 1) * size)
    to.intra_node(
        Kind.GATHER,
        to.input,
        here if is_leader else None,
        in_place=to.args.in_place and is_leader,
    )
    if is_leader:
        args = CollectiveArgs(in_place=True)
        to.inter_node(
            hosts.node_leaders(), Kind.ALL_GATHER, _by_host(hosts, size), here, target, args
        )
    to.broadcast_from(0, target)


def _reduce_scatter(to: Builder) -> None:
    hosts, size, dtype = to.hosts, to.output.num_elements, to.input.dtype
    is_leader = hosts.local_rank == 0
    whole = to.scratch(dtype, to.input.num_elements) if is_leader else None
    here = to.scratch(dtype, len(hosts.local) * size) if is_leader else None
    to.intra_node(Kind.REDUCE, to.input, whole, op=to.partial_op)
    if here is not None:
        lengths, args = _by_host(hosts, size), CollectiveArgs(to.partial_op)
        to.inter_node(hosts.node_leaders(), Kind.REDUCE_SCATTER, lengths, whole, here, args)
        to.divide(here)
    to.intra_node(Kind.SCATTER, here, to.output)


def _barrier(to: Builder) -> None:
    to.intra_node(Kind.BARRIER)
    if to.hosts.local_rank == 0:
        to.inter_node(to.hosts.node_leaders(), Kind.BARRIER, Lengths(0))
    to.intra_node(Kind.BARRIER)


def _by_host(hosts: HostMap, size: int) -> Lengths:
    """Say how many elements each host has, if every rank has ``size``."""
    blocks = tuple(len(ranks) * size for ranks in hosts.hosts)
    return Lengths(sum(blocks), blocks)


_WRITERS = {
    Kind.ALLREDUCE: _allreduce,
    Kind.REDUCE: _reduce,
    Kind.BROADCAST: _broadcast,
    Kind.ALL_GATHER: _all_gather,
    Kind.REDUCE_SCATTER: _reduce_scatter,
    Kind.BARRIER: _barrier,
}
