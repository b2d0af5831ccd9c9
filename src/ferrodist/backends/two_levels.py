# SPDX-License-Identifier: MIT OR Apache-2.0
"""Collectives in two levels: what the ranks of a host do together, and what one per host does.

A *speaker* is the rank that speaks for its host. Where all hosts have the same number of ranks,
large allreduces are cut among them instead: ranks of the same number on their hosts, a *rail*, do
their part between hosts side by side. What is not here goes between all ranks directly: the calls
whose parts differ for every pair, and those that have to fold in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ferrodist import _native
from ferrodist.backends.running_call import CollectiveArgs, Counts, RunningCall
from ferrodist.buffer import Buffer, DType
from ferrodist.call import Kind
from ferrodist.reduce_op import ReduceOp
from ferrodist.schedules import LINKS, LinkModel, choose, predict

if TYPE_CHECKING:
    from ferrodist.backends.hybrid import HybridBackend


class Collective(NamedTuple):
    """One collective of a call: its buffers, and the two levels that it is made of."""

    backend: HybridBackend
    running: RunningCall
    input: Buffer | None
    output: Buffer | None
    args: CollectiveArgs

    @property
    def input_array(self) -> Buffer:
        """The input, in kinds where every rank has one."""
        assert self.input is not None
        return self.input

    @property
    def output_array(self) -> Buffer:
        """The result, in kinds where every rank has one."""
        assert self.output is not None
        return self.output

    @property
    def op(self) -> ReduceOp:
        """The operation of a reduction."""
        assert self.args.op is not None
        return self.args.op

    def intra_node(
        self,
        kind: Kind,
        input: Buffer | None = None,
        output: Buffer | None = None,
        *,
        op: ReduceOp | None = None,
        root: int = 0,
        in_place: bool = False,
    ) -> None:
        """Do a collective of the ranks of this host; ``root`` is a number among them."""
        args = CollectiveArgs(op, root, in_place=in_place)
        self.backend.intra_node(self.running, kind, input, output, args)

    def inter_node(
        self,
        ranks: Sequence[int],
        kind: Kind,
        input: Buffer | None = None,
        output: Buffer | None = None,
        *,
        op: ReduceOp | None = None,
        root: int = 0,
        counts: Counts | None = None,
        in_place: bool = False,
    ) -> None:
        """Do a collective of ranks on different hosts; ``root`` is a place in their list."""
        args = CollectiveArgs(op, root, counts, in_place=in_place)
        self.backend.inter_node(self.running, ranks, kind, input, output, args)


Steps = Callable[[Collective], None]

_RAILS_NBYTES = 1 << 16  # from here on a part each costs less than what is saved


def find(
    backend: HybridBackend, kind: Kind, sample: Buffer | None, args: CollectiveArgs
) -> Steps | None:
    """Return how to do a collective in two levels; None if it is not done so, or does not pay."""
    steps = _STEPS.get(kind)
    hosts = backend.host_map
    if steps is None or (args.in_order and kind.is_reduction):
        return None
    if kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER) and not hosts.are_in_order:
        return None
    dtype = sample.dtype if sample is not None else DType.UINT8
    if kind is Kind.REDUCE_SCATTER and dtype.is_half:
        return None  # its unfinished sums would be rounded
    nbytes = 0 if sample is None else sample.count * dtype.itemsize
    if kind is Kind.ALL_GATHER:
        nbytes *= backend.world_size
    return steps if _pays(backend, kind, nbytes, dtype.is_half) else None


def _pays(backend: HybridBackend, kind: Kind, nbytes: int, half: bool) -> bool:
    """Compare what both ways are predicted to cost."""
    hosts = backend.host_map
    if len(hosts.hosts) == backend.world_size:
        return False
    most, link, inside = max(map(len, hosts.hosts)), backend.link_model, LINKS["shared_memory"]

    def between(size: int, model: LinkModel) -> float:
        schedule = choose(kind, size, nbytes, half=half, in_order=False, model=model)
        return predict(schedule, size, nbytes, model)

    # All ranks of a host have one wire between them.
    directly = between(backend.world_size, link._replace(per_byte=link.per_byte * most))
    is_cut = kind is Kind.ALLREDUCE and hosts.are_equal and nbytes >= _RAILS_NBYTES
    copied = nbytes / most if is_cut else nbytes
    rounds = 2 * (inside.latency + 2 * inside.per_byte * copied)
    return between(len(hosts.hosts), link) + rounds < directly


# -- allreduce and reduce -------------------------------------------------------------------------


def _allreduce(collective: Collective) -> None:
    source, target, op = collective.input_array, collective.output_array, collective.op
    hosts, config = collective.backend.host_map, collective.backend.config
    num_local = len(hosts.local)
    for begin, end in _segments(source.count, source.dtype, config.segment_nbytes):
        step = _Step(collective, source, target, begin, end, collective.args.in_place)
        whole = 0
        if hosts.are_equal and (end - begin) * source.dtype.itemsize >= _RAILS_NBYTES:
            whole = (end - begin) // num_local * num_local
            _by_rails(step, whole, op)
        if whole < end - begin or begin == end:  # nothing to fold is compared all the same
            _by_speakers(step, whole, end - begin, op)
        step.finish()


class _Step:
    """One segment of a reduction; 16-bit floats are held as float32, and rounded at its end."""

    def __init__(
        self,
        collective: Collective,
        source: Buffer,
        target: Buffer | None,
        begin: int,
        end: int,
        in_place: bool,
    ) -> None:
        self.collective = collective
        self.is_wide = source.dtype.is_half
        self.in_place = in_place and not self.is_wide
        self.source = _part(source, begin, end)
        self._target = None if target is None else _part(target, begin, end)
        self.target = self._target
        if self.is_wide:
            wide = Buffer.empty(DType.FLOAT32, (end - begin,))
            _native.widen(source.dtype, wide.memory, self.source.memory)
            self.source = wide
            if target is not None:
                self.target = Buffer.empty(DType.FLOAT32, (end - begin,))

    def finish(self) -> None:
        """Round what is wide into the caller's array."""
        if self.is_wide and self._target is not None and self.target is not None:
            _native.narrow(self._target.dtype, self._target.memory, self.target.memory)


def _by_rails(step: _Step, count: int, op: ReduceOp) -> None:
    collective, hosts = step.collective, step.collective.backend.host_map
    assert step.target is not None
    source = _part(step.source, 0, count)
    target = _part(step.target, 0, count)
    size = count // len(hosts.local)
    mine = _part(target, hosts.local_rank * size, (hosts.local_rank + 1) * size)
    collective.intra_node(
        Kind.REDUCE_SCATTER, source, mine, op=_unfinished(op), in_place=step.in_place
    )
    rail = hosts.rail()
    collective.inter_node(rail, Kind.ALLREDUCE, mine, mine, op=_unfinished(op), in_place=True)
    _divide(mine, op, collective.backend.world_size)
    collective.intra_node(Kind.ALL_GATHER, mine, target, in_place=True)


def _by_speakers(step: _Step, begin: int, end: int, op: ReduceOp) -> None:
    collective, hosts = step.collective, step.collective.backend.host_map
    assert step.target is not None
    source = _part(step.source, begin, end)
    target = _part(step.target, begin, end)
    is_speaker = hosts.local_rank == 0
    collective.intra_node(
        Kind.REDUCE,
        source,
        target if is_speaker else None,
        op=_unfinished(op),
        in_place=step.in_place and is_speaker,
    )
    if is_speaker:
        speakers = hosts.speakers()
        collective.inter_node(
            speakers, Kind.ALLREDUCE, target, target, op=_unfinished(op), in_place=True
        )
        _divide(target, op, collective.backend.world_size)
    _hand_out(collective, target, 0)


def _hand_out(collective: Collective, target: Buffer, speaker: int) -> None:
    """Give what a rank of this host has to all of it."""
    is_mine = collective.backend.host_map.local_rank == speaker
    source = target if is_mine else None
    collective.intra_node(Kind.BROADCAST, source, target, root=speaker, in_place=is_mine)


def _reduce(collective: Collective) -> None:
    source, target, op = collective.input_array, collective.output, collective.op
    root = collective.args.root
    backend, hosts = collective.backend, collective.backend.host_map
    speakers, home = hosts.speakers(root), hosts.host_of(root)
    speaker = hosts.local.index(speakers[hosts.here])
    is_speaker = hosts.local_rank == speaker
    for begin, end in _segments(source.count, source.dtype, backend.config.segment_nbytes):
        step = _Step(collective, source, target, begin, end, collective.args.in_place)
        result = step.target
        if is_speaker and result is None:
            result = Buffer.empty(step.source.dtype, (end - begin,))
        collective.intra_node(
            Kind.REDUCE,
            step.source,
            result if is_speaker else None,
            op=_unfinished(op),
            root=speaker,
            in_place=step.in_place and is_speaker,
        )
        if is_speaker:
            is_root = backend.rank == root
            final = result if is_root else None
            collective.inter_node(
                speakers,
                Kind.REDUCE,
                result,
                final,
                op=_unfinished(op),
                root=home,
                in_place=is_root,
            )
            if final is not None:
                _divide(final, op, backend.world_size)
        step.finish()
    collective.intra_node(Kind.BARRIER)


def _unfinished(op: ReduceOp) -> ReduceOp:
    """Return how unfinished results are folded: a mean is divided at the end."""
    return ReduceOp.SUM if op is ReduceOp.MEAN else op


def _divide(result: Buffer, op: ReduceOp, divisor: int) -> None:
    if op is ReduceOp.MEAN:
        _native.fold(result.dtype, ReduceOp.MEAN, result.memory, [result.memory], divisor)


def _segments(count: int, dtype: DType, nbytes: int) -> Iterator[tuple[int, int]]:
    """Cut an array so that what is held besides it is bounded; at least one part, maybe empty."""
    size = max(1, nbytes // dtype.itemsize)
    for begin in range(0, max(count, 1), size):
        yield begin, min(begin + size, count)


# -- the others -----------------------------------------------------------------------------------


def _broadcast(collective: Collective) -> None:
    target, root = collective.output_array, collective.args.root
    hosts = collective.backend.host_map
    speakers = hosts.speakers(root)
    collective.intra_node(Kind.BARRIER)
    if collective.backend.rank in speakers:
        home = hosts.host_of(root)
        collective.inter_node(
            speakers,
            Kind.BROADCAST,
            collective.input,
            target,
            root=home,
            in_place=collective.args.in_place,
        )
    _hand_out(collective, target, hosts.local.index(speakers[hosts.here]))


def _all_gather(collective: Collective) -> None:
    source, target = collective.input_array, collective.output_array
    hosts, size = collective.backend.host_map, source.count
    is_speaker = hosts.local_rank == 0
    here = _part(target, hosts.local[0] * size, (hosts.local[-1] + 1) * size)
    collective.intra_node(
        Kind.GATHER,
        source,
        here if is_speaker else None,
        in_place=collective.args.in_place and is_speaker,
    )
    if is_speaker:
        counts = [len(ranks) * size for ranks in hosts.hosts]
        speakers = hosts.speakers()
        collective.inter_node(speakers, Kind.ALL_GATHER, here, target, counts=counts, in_place=True)
    _hand_out(collective, target, 0)


def _reduce_scatter(collective: Collective) -> None:
    source, target, op = collective.input_array, collective.output_array, collective.op
    hosts, size, dtype = collective.backend.host_map, target.count, source.dtype
    is_speaker = hosts.local_rank == 0
    whole = Buffer.empty(dtype, (source.count,)) if is_speaker else None
    here = Buffer.empty(dtype, (len(hosts.local) * size,)) if is_speaker else None
    collective.intra_node(Kind.REDUCE, source, whole, op=_unfinished(op))
    if here is not None:
        counts = [len(ranks) * size for ranks in hosts.hosts]
        speakers = hosts.speakers()
        collective.inter_node(
            speakers, Kind.REDUCE_SCATTER, whole, here, op=_unfinished(op), counts=counts
        )
        _divide(here, op, collective.backend.world_size)
    collective.intra_node(Kind.SCATTER, here, target)


def _barrier(collective: Collective) -> None:
    hosts = collective.backend.host_map
    collective.intra_node(Kind.BARRIER)
    if hosts.local_rank == 0:
        collective.inter_node(hosts.speakers(), Kind.BARRIER)
    collective.intra_node(Kind.BARRIER)


def _part(buffer: Buffer, begin: int, end: int) -> Buffer:
    """Show some elements of an array."""
    size = buffer.dtype.itemsize
    memory = buffer.memory[begin * size : end * size]
    return Buffer(memory, buffer.dtype, (end - begin,), buffer.owner)


_STEPS: dict[Kind, Steps] = {
    Kind.ALLREDUCE: _allreduce,
    Kind.REDUCE: _reduce,
    Kind.BROADCAST: _broadcast,
    Kind.ALL_GATHER: _all_gather,
    Kind.REDUCE_SCATTER: _reduce_scatter,
    Kind.BARRIER: _barrier,
}
