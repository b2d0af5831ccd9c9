# SPDX-License-Identifier: MIT OR Apache-2.0
"""A second, plain executor of schedules, which shares no code with the verifier.

It moves real elements, takes messages in random order and looks at what every rank holds at the
end. Here it runs the built-in schedules; test_schedules_mutants.py holds the verifier against it.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from ferrodist.call import Kind
from ferrodist.schedules import BUILT_IN, Cell, Reduce, Schedule, Space, Step, mine, out

Plan = list[list[Step]]
"""The steps of every rank."""


def plan_of(schedule: Schedule, world: int, root: int = 0) -> Plan:
    return [list(schedule.steps(rank, world, root)) for rank in range(world)]


# An element is a formula: (rank, size, index) of an input, or ("reduce", left, right).


class Wrong(Exception):
    """The plan does not do what its kind promises."""


class Executor:
    def __init__(self, schedule: Schedule, plan: Plan, root: int, alias: bool, seed: int) -> None:
        self.kind, self.plan, self.root = schedule.kind, plan, root
        self.world = len(plan)
        self.num_chunks = schedule.num_chunks(self.world)
        self.random = random.Random(seed)
        self.memory: list[dict[Cell, list[Any]]] = [self.start(rank) for rank in range(self.world)]
        self.alias = alias
        self.heard = [{rank} for rank in range(self.world)]
        self.position = [0] * self.world
        self.open: list[set[str]] = [set() for _ in range(self.world)]
        self.told: list[set[int]] = [set() for _ in range(self.world)]

    def names(self, rank: int, space: Space) -> range:
        every, own, none = range(self.num_chunks), range(rank, rank + 1), range(0)
        is_root = rank == self.root
        table = {
            Kind.ALLREDUCE: (every, every),
            Kind.BROADCAST: (every, every),
            Kind.REDUCE: (every, every if is_root else none),
            Kind.ALL_GATHER: (own, every),
            Kind.GATHER: (own, every if is_root else none),
            Kind.SCATTER: (every if is_root else none, own),
            Kind.REDUCE_SCATTER: (every, own),
            Kind.ALL_TO_ALL: (every, every),
            Kind.BARRIER: (none, none),
            Kind.SCAN: (every, every),
            Kind.EXSCAN: (every, every if rank > 0 else none),
        }
        if space is Space.SCRATCH:
            return range(self.num_chunks ** (2 if self.kind is Kind.ALL_TO_ALL else 1))
        return table[self.kind][space]

    def size(self, rank: int, cell: Cell) -> int:
        """Every size is different, so that what does not fit shows."""
        if self.kind is Kind.ALL_TO_ALL and cell.space is Space.MINE:
            return 1 + rank * self.world + cell.chunk
        if self.kind is Kind.ALL_TO_ALL and cell.space is Space.OUT:
            return 1 + cell.chunk * self.world + rank
        return 1 + cell.chunk

    def start(self, rank: int) -> dict[Cell, list[Any]]:
        cells = [mine(chunk) for chunk in self.names(rank, Space.MINE)]
        sizes = [self.size(rank, cell) for cell in cells]
        return {
            cell: [(rank, size, index) for index in range(size)]
            for cell, size in zip(cells, sizes, strict=True)
        }

    def at(self, rank: int, cell: Cell) -> Cell:
        """With input and result in one memory, every out(i) is mine(i)."""
        shared = self.alias and cell.space is Space.OUT
        return mine(cell.chunk) if shared and cell.chunk in self.names(rank, Space.MINE) else cell

    def read(self, rank: int, cell: Cell) -> list[Any]:
        if self.at(rank, cell) not in self.memory[rank]:
            raise Wrong(f"unwritten {cell}")
        return self.memory[rank][self.at(rank, cell)]

    def write(self, rank: int, cell: Cell, elements: list[Any]) -> None:
        if cell.space is Space.MINE or cell.chunk not in self.names(rank, cell.space):
            raise Wrong(f"not to be written: {cell}")
        if len(elements) != self.size(rank, cell):
            raise Wrong(f"wrong size: {cell}")
        self.memory[rank][self.at(rank, cell)] = list(elements)

    def run(self) -> None:
        for rank in range(self.world):
            self.begin_steps(rank)
        while pairs := self.ready_pairs():
            self.move(*self.random.choice(pairs))
        if any(self.open):
            raise Wrong("stuck")

    def step(self, rank: int) -> Step:
        return self.plan[rank][self.position[rank]]

    def begin_steps(self, rank: int) -> None:
        while self.position[rank] < len(self.plan[rank]):
            step = self.step(rank)
            self.check_step(rank, step)
            self.told[rank] = set(self.heard[rank])
            self.open[rank] = {name for name in ("send", "recv") if getattr(step, name) is not None}
            if self.open[rank]:
                return
            self.end_step(rank)

    def check_step(self, rank: int, step: Step) -> None:
        sent = step.send.cells if step.send else ()
        received = step.recv.cells if step.recv else ()
        for message in (step.send, step.recv):
            if message is not None and (message.peer == rank or message.peer >= self.world):
                raise Wrong("impossible peer")
        if set(sent) & set(received) or len(set(received)) < len(received):
            raise Wrong("one cell at once for two things")
        for cell in sent:
            self.read(rank, cell)

    def ready_pairs(self) -> list[tuple[int, int]]:
        pairs = []
        for sender in range(self.world):
            if "send" in self.open[sender]:
                send = self.step(sender).send
                assert send is not None
                if "recv" in self.open[send.peer]:
                    recv = self.step(send.peer).recv
                    assert recv is not None
                    if recv.peer == sender:
                        pairs.append((sender, send.peer))
        return pairs

    def move(self, sender: int, receiver: int) -> None:
        send, recv = self.step(sender).send, self.step(receiver).recv
        assert send is not None
        assert recv is not None
        if len(send.cells) != len(recv.cells):
            raise Wrong("different numbers of cells")
        for source, target in zip(send.cells, recv.cells, strict=True):
            self.write(receiver, target, self.read(sender, source))
        self.heard[receiver] |= self.told[sender]
        self.open[sender].remove("send")
        self.open[receiver].remove("recv")
        for rank in (sender, receiver):
            if not self.open[rank]:
                self.end_step(rank)
                self.begin_steps(rank)

    def end_step(self, rank: int) -> None:
        sizes = set()
        for work in self.step(rank).then:
            operands = work.operands if isinstance(work, Reduce) else (work.source,)
            columns = [self.read(rank, cell) for cell in operands]
            sizes |= {len(column) for column in columns}
            if len(sizes) > 1 or (len(operands) > 1 and not self.kind.is_reduction):
                raise Wrong("cannot be reduced")
            self.write(rank, work.into, [local_reduce(row) for row in zip(*columns, strict=True)])
        self.position[rank] += 1

    def expected(self, rank: int, chunk: int) -> set[int]:
        if self.kind.is_prefix:
            return set(range(rank + 1 if self.kind is Kind.SCAN else rank))
        if self.kind.is_reduction:
            return set(range(self.world))
        return {self.root if self.kind in (Kind.BROADCAST, Kind.SCATTER) else chunk}

    def check_end(self) -> bool:
        """Return whether every reduction was in rank order."""
        formulas: dict[int, Any] = {}
        in_order = True
        for rank in range(self.world):
            if self.heard[rank] != set(range(self.world)):
                raise Wrong("has not heard from all")
            for chunk in self.names(rank, Space.OUT):
                elements = self.read(rank, out(chunk))
                self.check_elements(rank, chunk, elements)
                formula = formulas.setdefault(chunk, elements)
                if self.kind is Kind.ALLREDUCE and formula != elements:
                    raise Wrong("ranks differ")
                in_order = in_order and elements[0] == in_rank_order(leaves(elements[0]))
        return in_order

    def check_elements(self, rank: int, chunk: int, elements: list[Any]) -> None:
        size = self.size(rank, out(chunk))
        for index, element in enumerate(elements):
            wanted = [(source, size, index) for source in sorted(self.expected(rank, chunk))]
            if sorted(leaves(element)) != wanted:
                raise Wrong("wrong contributions")


def local_reduce(row: tuple[Any, ...]) -> Any:
    result = row[0]
    for right in row[1:]:
        result = ("local_reduce", result, right)
    return result


def leaves(element: Any) -> list[tuple[int, int, int]]:
    return leaves(element[1]) + leaves(element[2]) if element[0] == "local_reduce" else [element]


def in_rank_order(inputs: list[tuple[int, int, int]]) -> Any:
    return local_reduce(tuple(sorted(inputs)))


def executed(schedule: Schedule, plan: Plan, root: int, *, alias: bool, seed: int) -> bool | None:
    """Return whether the reductions were in order; None if the outcome is wrong."""
    executor = Executor(schedule, plan, root, alias, seed)
    try:
        executor.run()
        return executor.check_end()
    except Wrong:
        return None


@pytest.mark.slow
def test_undamaged_schedules_run_right_also_in_place() -> None:
    for schedule in BUILT_IN:
        for world in (1, 2, 3, 4, 5, 8):
            plan = plan_of(schedule, world)
            for seed in range(3):
                assert executed(schedule, plan, 0, alias=False, seed=seed) is not None
                if schedule.alias_safe:
                    assert executed(schedule, plan, 0, alias=True, seed=seed) is not None


def test_all_to_all_in_place_really_goes_wrong() -> None:
    for schedule in BUILT_IN:
        if not schedule.alias_safe:
            plan = plan_of(schedule, 3)
            wrong = [executed(schedule, plan, 0, alias=True, seed=seed) for seed in range(9)]
            assert None in wrong
