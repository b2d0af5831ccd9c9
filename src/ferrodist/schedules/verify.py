# SPDX-License-Identifier: MIT OR Apache-2.0
"""Verify: prove a schedule right at one world by running all ranks on formulas, not numbers.

What is proved, with no buffering at all: every send meets its receive and nobody waits for ever;
messages and folds join cells of one size; nothing is read before it is written, inputs are never
written, nothing is overwritten while it is being sent; every rank ends with exactly what the
collective promises, each contribution once, and with the same bits as the others; and no rank ends
before it has heard, directly or through others, from every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ferrodist.call import Kind
from ferrodist.schedules.steps import Cell, Copy, Fold, Recv, Schedule, Send, Space, Step, mine, out
from ferrodist.schedules.stuck import describe, explain
from ferrodist.schedules.terms import Terms, rank_list
from ferrodist.schedules.walk import Walk


@dataclass(frozen=True, slots=True)
class Facts:
    """What the verifier found out about a schedule at one world.

    ``in_order``, ``partials`` and ``alias_safe`` mean what they mean in Schedule.
    """

    in_order: bool
    partials: bool
    alias_safe: bool
    rounds: int
    """Messages on the longest chain in which each waits for the one before."""
    num_messages: int
    """Messages of all ranks together."""
    max_sent: Fraction
    """What the busiest sender sends, as a part of the whole array."""


def verify(schedule: Schedule, world: int, root: int = 0) -> Facts:
    """Prove that ``schedule`` does at this world what its kind promises, and say what else is true.

    Raises InvalidArgument if it does not: rank, step, what was found and what was expected.
    """
    proof = _Proof(schedule, world, root)
    stuck = proof.run()
    if stuck:
        raise explain(proof, stuck)
    for rank in range(world):
        proof.check_result(rank)
        proof.check_heard(rank)
    return proof.facts()


class _Proof(Walk):
    def __init__(self, schedule: Schedule, world: int, root: int) -> None:
        super().__init__(schedule, world, root)
        self.terms = Terms(world)
        self.inputs = [self.cells.inputs(rank) for rank in range(world)]
        self.values: list[dict[Cell, int]] = [
            {mine(chunk): rank for chunk in self.inputs[rank]} for rank in range(world)
        ]
        # Inputs that are gone if input and result are the same memory.
        self.overwritten: list[set[int]] = [set() for _ in range(world)]
        self.heard = [1 << rank for rank in range(world)]
        self.heard_at_post = list(self.heard)
        self.round = [0] * world
        self.round_at_post = [0] * world
        self.num_sent = [0] * world
        self.num_messages = 0
        self.in_order = self.alias_safe = True
        self.partials = False

    def facts(self) -> Facts:
        return Facts(
            in_order=self.in_order,
            partials=self.partials,
            alias_safe=self.alias_safe,
            rounds=max(self.round),
            num_messages=self.num_messages,
            max_sent=Fraction(max(self.num_sent), self.cells.num_chunks or 1),
        )

    def on_post(self, rank: int, step: Step) -> None:
        self.heard_at_post[rank] = self.heard[rank]
        self.round_at_post[rank] = self.round[rank]
        if step.send is not None:
            self.num_sent[rank] += len(step.send.cells)
            for cell in step.send.cells:
                self._read(rank, cell)
        if step.recv is not None:
            self._check_targets(rank, step.recv.cells)
            if step.send is not None:
                self._check_apart(rank, set(step.send.cells), step.recv.cells)

    def on_message(self, sender: int, send: Send, receiver: int, recv: Recv) -> None:
        self._check_sizes(sender, send, receiver, recv)
        values = self.values[sender]
        for source, target in zip(send.cells, recv.cells, strict=True):
            self._write(receiver, target, values[source])
        self.heard[receiver] |= self.heard_at_post[sender]
        later = 1 + max(self.round_at_post[sender], self.round_at_post[receiver])
        self.round[sender] = max(self.round[sender], later)
        self.round[receiver] = max(self.round[receiver], later)
        self.num_messages += 1

    def on_done(self, rank: int, step: Step) -> None:
        if not step.then:
            return
        for work in step.then:
            if isinstance(work, Fold):
                self._write(rank, work.into, self._fold(rank, work))
            else:
                self._write(rank, work.into, self._read(rank, work.source))
        self._check_one_size(rank, step.then)

    def check_result(self, rank: int) -> None:
        for chunk in self.cells.results(rank):
            term = self.values[rank].get(out(chunk))
            if term is None:
                raise self.error(f"rank {rank} ends without {out(chunk)}", rank)
            found, expected = self.terms.ranks[term], self._promised(chunk)
            if found != expected:
                raise self.error(
                    f"rank {rank} ends with {out(chunk)} made of {rank_list(found)}, "
                    f"expected {rank_list(expected)}",
                    rank,
                )
            if self.schedule.kind.is_reduction:
                self._check_order(rank, chunk, term)

    def check_heard(self, rank: int) -> None:
        missing = self.terms.all_ranks & ~self.heard[rank]
        if missing:
            raise self.error(
                f"rank {rank} ends without having heard from {rank_list(missing)}, "
                "directly or through others; send tokens",
                rank,
            )

    def _promised(self, chunk: int) -> int:
        if self.schedule.kind.is_reduction:
            return self.terms.all_ranks
        from_root = self.schedule.kind in (Kind.BROADCAST, Kind.SCATTER)
        return 1 << (self.root if from_root else chunk)

    def _check_order(self, rank: int, chunk: int, term: int) -> None:
        self.in_order = self.in_order and self.terms.in_order[term]
        if self.schedule.kind is Kind.ALLREDUCE and term != self.values[0][out(chunk)]:
            raise self.error(
                f"ranks 0 and {rank} fold {out(chunk)} in different orders, so bits may differ",
                rank,
            )

    def _fold(self, rank: int, work: Fold) -> int:
        if not self.schedule.kind.is_reduction:
            self.fail(rank, f"folds, but {self.schedule.kind.label} has nothing to fold")
        if len(work.operands) < 2:
            self.fail(
                rank, f"folds {len(work.operands)} cells into {work.into}, expected two or more"
            )
        operands = tuple([self._read(rank, cell) for cell in work.operands])
        twice = self.terms.repeated(operands)
        if twice is not None:
            self.fail(rank, f"folds the contribution of rank {twice} into {work.into} twice")
        term = self.terms.fold(operands)
        self.partials = self.partials or not self.terms.is_finished(term)
        return term

    def _read(self, rank: int, cell: Cell) -> int:
        value = self.values[rank].get(cell)
        if value is None:
            self._check_exists(rank, cell)
            self.fail(rank, f"reads {cell} before anything was written to it")
        if cell.space is Space.MINE and cell.chunk in self.overwritten[rank]:
            self.alias_safe = False
        return value

    def _write(self, rank: int, cell: Cell, value: int) -> None:
        self._check_target(rank, cell)
        self.values[rank][cell] = value
        if cell.space is Space.OUT and value != rank and cell.chunk in self.inputs[rank]:
            self.overwritten[rank].add(cell.chunk)

    def _check_targets(self, rank: int, cells: tuple[Cell, ...]) -> None:
        for cell in cells:
            self._check_target(rank, cell)
        if len(set(cells)) != len(cells):
            self.fail(rank, "receives into one cell twice in one message")

    def _check_target(self, rank: int, cell: Cell) -> None:
        if cell.space is Space.MINE:
            self.fail(rank, f"writes {cell}, but inputs are never written")
        if cell not in self.values[rank]:
            self._check_exists(rank, cell)

    def _check_exists(self, rank: int, cell: Cell) -> None:
        if cell.chunk not in self.cells.chunks(rank, cell.space) or cell.slot < 0:
            label = self.schedule.kind.label
            self.fail(rank, f"names {cell}, which a rank of {label} does not have there")

    def _check_apart(self, rank: int, sent: set[Cell], received: tuple[Cell, ...]) -> None:
        for cell in received:
            if cell in sent:
                self.fail(rank, f"receives into {cell} while it is being sent")
            if cell.space is Space.OUT and mine(cell.chunk) in sent:
                self.alias_safe = False

    def _check_sizes(self, sender: int, send: Send, receiver: int, recv: Recv) -> None:
        if len(send.cells) != len(recv.cells):
            self.fail(
                sender,
                f"sends {describe(send.cells)} to rank {receiver}, whose step "
                f"{self.number[receiver]} expects {describe(recv.cells)}",
            )
        key = self.cells.size_key
        for source, target in zip(send.cells, recv.cells, strict=True):
            if key(sender, source) != key(receiver, target):
                self.fail(
                    sender,
                    f"sends {source} to rank {receiver}, whose step {self.number[receiver]} "
                    f"receives it into {target}, a cell of another size",
                )

    def _check_one_size(self, rank: int, then: tuple[Fold | Copy, ...]) -> None:
        cells: list[Cell] = []
        for work in then:
            cells.append(work.into)
            cells.extend(work.operands if isinstance(work, Fold) else (work.source,))
        first = self.cells.size_key(rank, cells[0])
        for cell in cells:
            if self.cells.size_key(rank, cell) != first:
                self.fail(rank, f"works on {cells[0]} and {cell}, cells of different sizes")
