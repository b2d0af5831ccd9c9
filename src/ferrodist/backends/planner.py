# SPDX-License-Identifier: MIT OR Apache-2.0
"""Planner: which schedule a collective walks, and what that needs besides the buffers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ferrodist import _native
from ferrodist.backends.running_call import Algorithm, CollectiveArgs
from ferrodist.backends.walk_plan import WalkPlan, lengths_of, make_plan
from ferrodist.backends.walker import Move, Task, walk
from ferrodist.buffer import Buffer, DType
from ferrodist.call import Kind
from ferrodist.config import Config
from ferrodist.errors import InvalidArgument, UnsupportedOp
from ferrodist.reduce_op import ReduceOp
from ferrodist.schedules import (
    Lengths,
    LinkModel,
    Schedule,
    choose,
    compile_table,
    find,
    traits,
)

_SCHEDULED_AS = {Kind.ALL_GATHER_UNEVEN: Kind.ALL_GATHER, Kind.ALL_TO_ALL_UNEVEN: Kind.ALL_TO_ALL}
MOST_PLANS = 256


class Planner:
    """Plans the walks of one rank.

    ``folds_in_order`` says whether reductions fold in rank order unless the caller names an
    algorithm that does not. ``peers`` are the ranks of the group that take part, unless all do.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        config: Config,
        model: LinkModel,
        *,
        folds_in_order: bool = True,
        peers: Sequence[int] = (),
    ) -> None:
        self._folds_in_order = folds_in_order
        self._rank = rank
        self._world = world
        self._config = config
        self._model = model
        self._peers = peers
        self._plans: dict[tuple[Any, ...], WalkPlan] = {}

    def check(self, kind: Kind, algorithm: Algorithm, root: int, reproducible: bool) -> str | None:
        """Refuse an algorithm that is unknown, wrong, or out of order where order is asked for."""
        if algorithm is None:
            return None
        schedule = find(_SCHEDULED_AS.get(kind, kind), algorithm)
        found = traits(schedule, self._world, root)
        if reproducible and kind.is_reduction and not found.in_order:
            raise UnsupportedOp(
                f"{kind.label}: algorithm {schedule.name!r} does not fold in rank order, which "
                "reproducible=True asks for; leave one of the two out",
                op=kind.label,
                this_rank=self._rank,
            )
        if kind is Kind.ALL_TO_ALL_UNEVEN and found.relays:
            raise InvalidArgument(
                f"{kind.label}: algorithm {schedule.name!r} relays blocks through ranks that do "
                "not know how large they are; name another",
                this_rank=self._rank,
            )
        if isinstance(algorithm, str):
            return schedule.name
        return _signed_name(schedule, self._world, root)

    def _pick(
        self, kind: Kind, nbytes: int, dtype: DType, algorithm: Algorithm, in_order: bool
    ) -> Schedule:
        """Take the algorithm asked for, or the cheapest that is allowed."""
        if algorithm is not None:
            return find(kind, algorithm)
        in_order = in_order or self._folds_in_order
        return choose(
            kind, self._world, nbytes, half=dtype.is_half, in_order=in_order, model=self._model
        )

    def plan(
        self, kind: Kind, input: Buffer | None, output: Buffer | None, args: CollectiveArgs
    ) -> WalkPlan:
        """Work out what a collective needs besides its buffers; kept, for it will come again."""
        lengths = lengths_of(kind, self._rank, self._world, input, output, args.counts)
        sample = input or output
        return self.plan_lengths(kind, sample.dtype if sample else DType.UINT8, lengths, args)

    def plan_lengths(
        self, kind: Kind, dtype: DType, lengths: Lengths, args: CollectiveArgs
    ) -> WalkPlan:
        """Do as ``plan`` does where only the lengths of the arrays are known."""
        op, root, _, algorithm, in_order, _ = args
        key = (kind, op, root, dtype, lengths, algorithm, in_order)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            schedule = self._pick(kind, lengths.count * dtype.itemsize, dtype, algorithm, in_order)
            table = compile_table(schedule, self._world, self._rank, root)
            found = traits(schedule, self._world, root)
            segment_nbytes = self._config.segment_nbytes
            plan = make_plan(table, found, op, dtype, lengths, segment_nbytes, self._peers)
            self._plans[key] = plan
        return plan


def walk_plan(
    plan: WalkPlan,
    input: Buffer | None,
    output: Buffer | None,
    in_place: bool,
    config: Config,
    exchange: Move,
) -> None:
    """Do one whole collective: walk its table over every segment."""
    if in_place and not plan.alias_safe and input is not None:
        in_place, input = False, input.copy()
    task = Task(
        plan.table,
        input,
        output,
        plan.dtype,
        plan.op,
        plan.divisor,
        plan.is_wide,
        in_place,
        config.piece_nbytes,
    )
    for layout in plan.layouts:
        walk(task, layout, exchange)
    if plan.divides_at_end and output is not None:
        _native.fold(plan.dtype, ReduceOp.MEAN, output.memory, [output.memory], plan.divisor)


@lru_cache(maxsize=256)
def _signed_name(schedule: Schedule, world: int, root: int) -> str:
    """Name a user's own schedule so that two different ones of one name do not match."""
    tables = [compile_table(schedule, world, rank, root) for rank in range(world)]
    steps = [number for table in tables for number in table.to_ints()]
    return f"{schedule.name}@{_native.fingerprint(steps) & 0xFFFFFFFF:08x}"
