# SPDX-License-Identifier: MIT OR Apache-2.0
"""Collectives in two levels: what the ranks of a host do together, and what one per host does.

A *speaker* is the rank that speaks for its host. Where all hosts have the same number of ranks,
large allreduces are cut among them instead: ranks of the same number on their hosts, a *rail*, do
their part between hosts side by side. What is not here goes between all ranks directly: the calls
whose parts differ for every pair, and those that have to fold in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ferrodist import _native
from ferrodist.backends import hybrid_talk
from ferrodist.buffer import Buffer, DType
from ferrodist.call import Kind
from ferrodist.reduce_op import ReduceOp
from ferrodist.schedules import LINKS, LinkModel, choose, predict

if TYPE_CHECKING:
    from ferrodist.backends.hybrid import HybridBackend
    from ferrodist.backends.hybrid_talk import HybridTalk


class Order(NamedTuple):
    """What a collective is to do."""

    source: Buffer | None
    target: Buffer | None
    op: ReduceOp | None
    root: int
    in_place: bool

    @property
    def source_array(self) -> Buffer:
        """The input, in kinds where every rank has one."""
        assert self.source is not None
        return self.source

    @property
    def target_array(self) -> Buffer:
        """The result, in kinds where every rank has one."""
        assert self.target is not None
        return self.target

    @property
    def fold(self) -> ReduceOp:
        """The operation of a reduction."""
        assert self.op is not None
        return self.op


Work = Callable[["HybridTalk", Order], None]

_RAILS_NBYTES = 1 << 16  # from here on a part each costs less than what is saved


def find(
    backend: HybridBackend, kind: Kind, sample: Buffer | None, op: ReduceOp | None, in_order: bool
) -> Work | None:
    """Return how to do a collective in two levels; None if it is not done so, or does not pay."""
    work = _WORKS.get(kind)
    hosts = backend.host_map
    if work is None or (in_order and kind.is_reduction):
        return None
    if kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER) and not hosts.are_in_order:
        return None
    dtype = sample.dtype if sample is not None else DType.UINT8
    if kind is Kind.REDUCE_SCATTER and dtype.is_half:
        return None  # its unfinished sums would be rounded
    nbytes = 0 if sample is None else sample.count * dtype.itemsize
    if kind is Kind.ALL_GATHER:
        nbytes *= backend.world_size
    return work if _pays(backend, kind, nbytes, dtype.is_half) else None


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


def _allreduce(talk: HybridTalk, order: Order) -> None:
    source, target, op = order.source_array, order.target_array, order.fold
    hosts, config = talk.backend.host_map, talk.backend.config
    num_local = len(hosts.local)
    for begin, end in _segments(source.count, source.dtype, config.segment_nbytes):
        step = _Step(talk, source, target, begin, end, order.in_place)
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
        talk: HybridTalk,
        source: Buffer,
        target: Buffer | None,
        begin: int,
        end: int,
        in_place: bool,
    ) -> None:
        self.talk = talk
        self.is_wide = source.dtype.is_half
        self.in_place = in_place and not self.is_wide
        self.source = hybrid_talk.part(source, begin, end)
        self._target = None if target is None else hybrid_talk.part(target, begin, end)
        self.target = self._target
        if self.is_wide:
            wide = hybrid_talk.new_buffer(DType.FLOAT32, end - begin)
            _native.widen(source.dtype, wide.memory, self.source.memory)
            self.source = wide
            if target is not None:
                self.target = hybrid_talk.new_buffer(DType.FLOAT32, end - begin)

    def finish(self) -> None:
        """Round what is wide into the caller's array."""
        if self.is_wide and self._target is not None and self.target is not None:
            _native.narrow(self._target.dtype, self._target.memory, self.target.memory)


def _by_rails(step: _Step, count: int, op: ReduceOp) -> None:
    talk, hosts = step.talk, step.talk.backend.host_map
    assert step.target is not None
    source = hybrid_talk.part(step.source, 0, count)
    target = hybrid_talk.part(step.target, 0, count)
    size = count // len(hosts.local)
    mine = hybrid_talk.part(target, hosts.local_rank * size, (hosts.local_rank + 1) * size)
    talk.inside(
        Kind.REDUCE_SCATTER, source, mine, op=_unfinished(op), count=size, in_place=step.in_place
    )
    rail = hosts.rail()
    talk.between(rail, Kind.ALLREDUCE, mine, mine, op=_unfinished(op), in_place=True)
    _divide(mine, op, talk.backend.world_size)
    talk.inside(Kind.ALL_GATHER, mine, target, count=size, in_place=True)


def _by_speakers(step: _Step, begin: int, end: int, op: ReduceOp) -> None:
    talk, hosts = step.talk, step.talk.backend.host_map
    assert step.target is not None
    source = hybrid_talk.part(step.source, begin, end)
    target = hybrid_talk.part(step.target, begin, end)
    is_speaker, count = hosts.local_rank == 0, end - begin
    talk.inside(
        Kind.REDUCE,
        source,
        target if is_speaker else None,
        op=_unfinished(op),
        count=count,
        in_place=step.in_place and is_speaker,
    )
    if is_speaker:
        speakers = hosts.speakers()
        talk.between(speakers, Kind.ALLREDUCE, target, target, op=_unfinished(op), in_place=True)
        _divide(target, op, talk.backend.world_size)
    _hand_out(talk, target, 0, count)


def _hand_out(talk: HybridTalk, target: Buffer, speaker: int, count: int) -> None:
    """Give what a rank of this host has to all of it."""
    is_mine = talk.backend.host_map.local_rank == speaker
    source = target if is_mine else None
    talk.inside(Kind.BROADCAST, source, target, root=speaker, count=count, in_place=is_mine)


def _reduce(talk: HybridTalk, order: Order) -> None:
    source, target, op, root = order.source_array, order.target, order.fold, order.root
    backend, hosts = talk.backend, talk.backend.host_map
    speakers, home = hosts.speakers(root), hosts.host_of(root)
    speaker = hosts.local.index(speakers[hosts.here])
    is_speaker = hosts.local_rank == speaker
    for begin, end in _segments(source.count, source.dtype, backend.config.segment_nbytes):
        step = _Step(talk, source, target, begin, end, order.in_place)
        result = step.target
        if is_speaker and result is None:
            result = hybrid_talk.new_buffer(step.source.dtype, end - begin)
        talk.inside(
            Kind.REDUCE,
            step.source,
            result if is_speaker else None,
            op=_unfinished(op),
            root=speaker,
            count=end - begin,
            in_place=step.in_place and is_speaker,
        )
        if is_speaker:
            is_root = backend.rank == root
            final = result if is_root else None
            talk.between(
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
    talk.inside(Kind.BARRIER)


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


def _broadcast(talk: HybridTalk, order: Order) -> None:
    target, root = order.target_array, order.root
    hosts = talk.backend.host_map
    speakers = hosts.speakers(root)
    talk.inside(Kind.BARRIER)
    if talk.backend.rank in speakers:
        home = hosts.host_of(root)
        talk.between(
            speakers, Kind.BROADCAST, order.source, target, root=home, in_place=order.in_place
        )
    _hand_out(talk, target, hosts.local.index(speakers[hosts.here]), target.count)


def _all_gather(talk: HybridTalk, order: Order) -> None:
    source, target = order.source_array, order.target_array
    hosts, size = talk.backend.host_map, source.count
    is_speaker = hosts.local_rank == 0
    here = hybrid_talk.part(target, hosts.local[0] * size, (hosts.local[-1] + 1) * size)
    talk.inside(
        Kind.GATHER,
        source,
        here if is_speaker else None,
        count=size,
        in_place=order.in_place and is_speaker,
    )
    if is_speaker:
        counts = [len(ranks) * size for ranks in hosts.hosts]
        speakers = hosts.speakers()
        talk.between(speakers, Kind.ALL_GATHER, here, target, counts=counts, in_place=True)
    _hand_out(talk, target, 0, target.count)


def _reduce_scatter(talk: HybridTalk, order: Order) -> None:
    source, target, op = order.source_array, order.target_array, order.fold
    hosts, size, dtype = talk.backend.host_map, target.count, source.dtype
    is_speaker = hosts.local_rank == 0
    whole = hybrid_talk.new_buffer(dtype, source.count) if is_speaker else None
    here = hybrid_talk.new_buffer(dtype, len(hosts.local) * size) if is_speaker else None
    talk.inside(Kind.REDUCE, source, whole, op=_unfinished(op), count=source.count)
    if here is not None:
        counts = [len(ranks) * size for ranks in hosts.hosts]
        speakers = hosts.speakers()
        talk.between(speakers, Kind.REDUCE_SCATTER, whole, here, op=_unfinished(op), counts=counts)
        _divide(here, op, talk.backend.world_size)
    talk.inside(Kind.SCATTER, here, target, count=size)


def _barrier(talk: HybridTalk, order: Order) -> None:
    hosts = talk.backend.host_map
    talk.inside(Kind.BARRIER)
    if hosts.local_rank == 0:
        talk.between(hosts.speakers(), Kind.BARRIER)
    talk.inside(Kind.BARRIER)


_WORKS: dict[Kind, Work] = {
    Kind.ALLREDUCE: _allreduce,
    Kind.REDUCE: _reduce,
    Kind.BROADCAST: _broadcast,
    Kind.ALL_GATHER: _all_gather,
    Kind.REDUCE_SCATTER: _reduce_scatter,
    Kind.BARRIER: _barrier,
}
