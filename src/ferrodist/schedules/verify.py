# SPDX-License-Identifier: MIT OR Apache-2.0
"""Verify: prove a schedule right at one world by running all ranks on formulas, not numbers.

What is proved, with no buffering at all: every send meets its receive and nobody waits for ever;
messages and reductions join cells of one size; nothing is read before it is written, inputs are
never written, nothing is overwritten while it is being sent; every rank ends with exactly what the
collective promises, each contribution once, and with the same bits as the others; and no rank ends
before it has heard, directly or through others, from every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import NoReturn

from ferrodist.call import Kind
from ferrodist.errors import InvalidArgument
from ferrodist.schedules.steps import (
    Cell,
    Cells,
    Copy,
    Recv,
    Reduce,
    Schedule,
    Send,
    Space,
    Step,
    mine,
    out,
)

# -- all ranks step by step ------------------------------------------------------------------------
#
# Execution: the steps of all ranks, advanced together with no buffering at all.
#
# A message moves only when its sender and its receiver both stand at it. Whatever order ready
# pairs are taken in, the same messages move and the same ranks get stuck, because every rank's
# steps are fixed.

NOBODY = -1


class Execution:
    """One run of a schedule. Subclasses say what a post, a message and the end of a step mean."""

    def __init__(self, schedule: Schedule, world: int, root: int) -> None:
        self.schedule, self.world, self.root = schedule, world, root
        self.cells = Cells.of(schedule, world, root)
        self.remaining: list[Iterator[Step]] = [
            iter(schedule.steps(rank, world, root)) for rank in range(world)
        ]
        self.current: list[Step | None] = [None] * world
        self.number = [-1] * world
        self.send_to = [NOBODY] * world
        self.recv_from = [NOBODY] * world
        self._fresh: list[int] = []
        # A generator that never ends must not hang the verifier; no sane schedule comes near this.
        self._most_steps = 64 * (world + 16)

    def on_post(self, rank: int, step: Step) -> None:
        """Look at a step before anything of it happens."""

    def on_message(self, sender: int, send: Send, receiver: int, recv: Recv) -> None:
        """Move one message."""

    def on_done(self, rank: int, step: Step) -> None:
        """Do the local part of a step whose messages have moved."""

    def run(self) -> list[int]:
        """Go as far as possible; return the ranks that got stuck."""
        for rank in range(self.world):
            self._advance(rank)
        while self._fresh:
            self._meet(self._fresh.pop())
        return [rank for rank, step in enumerate(self.current) if step is not None]

    def fail(self, rank: int, text: str) -> NoReturn:
        """Raise what is wrong with the current step of a rank."""
        raise self.error(f"rank {rank}, step {self.number[rank]} {text}", rank)

    def error(self, text: str, rank: int | None = None) -> InvalidArgument:
        """Make the error of this schedule at this world."""
        where = f"schedule {self.schedule.name!r} at world {self.world}"
        return InvalidArgument(f"{where}: {text}", rank=rank, world_size=self.world)

    def _advance(self, rank: int) -> None:
        for step in self.remaining[rank]:
            self._post(rank, step)
            if step.send is not None or step.recv is not None:
                self._fresh.append(rank)
                return
            self.on_done(rank, step)
        self.current[rank] = None

    def _post(self, rank: int, step: Step) -> None:
        self.current[rank] = step
        self.number[rank] += 1
        if not isinstance(step, Step):
            self.fail(rank, f"is {step!r}, expected a Step")
        if self.number[rank] > self._most_steps:
            self.fail(rank, "is still not the last: does the generator end?")
        self.send_to[rank] = (
            NOBODY if step.send is None else self._peer(rank, step.send, "sends to")
        )
        self.recv_from[rank] = (
            NOBODY if step.recv is None else self._peer(rank, step.recv, "receives from")
        )
        self.on_post(rank, step)

    def _peer(self, rank: int, message: Send | Recv, verb: str) -> int:
        if message.peer == rank:
            self.fail(rank, f"{verb} itself")
        if not 0 <= message.peer < self.world:
            self.fail(rank, f"{verb} rank {message.peer}, which is outside the world")
        return message.peer

    def _meet(self, rank: int) -> None:
        receiver = self.send_to[rank]
        if receiver != NOBODY and self.recv_from[receiver] == rank:
            self._deliver(rank, receiver)
        sender = self.recv_from[rank]
        if sender != NOBODY and self.send_to[sender] == rank:
            self._deliver(sender, rank)

    def _deliver(self, sender: int, receiver: int) -> None:
        sending, receiving = self.current[sender], self.current[receiver]
        assert sending is not None
        assert receiving is not None
        assert sending.send is not None
        assert receiving.recv is not None
        self.on_message(sender, sending.send, receiver, receiving.recv)
        self.send_to[sender] = self.recv_from[receiver] = NOBODY
        self._finish_step(sender, sending)
        self._finish_step(receiver, receiving)

    def _finish_step(self, rank: int, step: Step) -> None:
        if self.send_to[rank] == NOBODY and self.recv_from[rank] == NOBODY:
            self.on_done(rank, step)
            self._advance(rank)


# -- ranks that are stuck --------------------------------------------------------------------------


_LOOK_AHEAD = 100_000


def explain(execution: Execution, stuck: list[int]) -> InvalidArgument:
    """Return the error for an execution in which ``stuck`` ranks were left over."""
    later = [list(islice(steps, _LOOK_AHEAD)) for steps in execution.remaining]
    for rank in stuck:
        lonely = _lonely_message(execution, rank, later)
        if lonely:
            return execution.error(lonely, rank)
    return execution.error("deadlock: " + _circle(execution, stuck[0]), stuck[0])


def describe(cells: tuple[Cell, ...]) -> str:
    """Name the content of a message."""
    if not cells:
        return "a token"
    more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
    return f"{cells[0]}{more}"


def _lonely_message(execution: Execution, rank: int, later: list[list[Step]]) -> str | None:
    where, waits = f"rank {rank}, step {execution.number[rank]}", _waits(execution, rank)
    receiver, sender = execution.send_to[rank], execution.recv_from[rank]
    if receiver != NOBODY and not any(
        step.recv is not None and step.recv.peer == rank for step in later[receiver]
    ):
        return f"{where} {waits[0]}, which never receives it"
    if sender != NOBODY and not any(
        step.send is not None and step.send.peer == rank for step in later[sender]
    ):
        return f"{where} {waits[-1]}, which never sends it"
    return None


def _circle(execution: Execution, first: int) -> str:
    """Follow who waits for whom until a rank comes again."""
    path: list[int] = []
    rank = first
    while rank not in path:
        path.append(rank)
        rank = (
            execution.send_to[rank]
            if execution.send_to[rank] != NOBODY
            else execution.recv_from[rank]
        )
    circle = path[path.index(rank) :]
    return "; ".join(
        f"rank {rank}, step {execution.number[rank]} {_waits(execution, rank)[0]}"
        for rank in circle
    )


def _waits(execution: Execution, rank: int) -> list[str]:
    """Describe what the current step still waits for, the send first."""
    step = execution.current[rank]
    assert step is not None
    waits = []
    if step.send is not None and execution.send_to[rank] != NOBODY:
        waits.append(f"sends {describe(step.send.cells)} to rank {step.send.peer}")
    if step.recv is not None and execution.recv_from[rank] != NOBODY:
        waits.append(f"waits for {describe(step.recv.cells)} from rank {step.recv.peer}")
    return waits


# -- symbolic values -------------------------------------------------------------------------------
#
# Terms: what a cell holds, as a formula over the ranks' inputs instead of numbers.
#
# Equal formulas get one number, so two cells with one number hold the same bits. Terms 0 .. world
# - 1 are the raw inputs of the ranks.


class Terms:
    """All formulas met so far, by number."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.all_ranks = (1 << world) - 1
        # Per term: the ranks in it, as bits, and whether it is ((x_0 ∘ x_1) ∘ x_2) ... of the
        # lowest ones.
        self.ranks = [1 << rank for rank in range(world)]
        self.in_order = [rank == 0 for rank in range(world)]
        self._numbers: dict[tuple[int, ...], int] = {}

    def is_finished(self, term: int) -> bool:
        """Tell whether every rank is in it."""
        return self.ranks[term] == self.all_ranks

    def repeated(self, operands: tuple[int, ...]) -> int | None:
        """Return a rank that is in more than one of the operands, if there is any."""
        seen = 0
        for operand in operands:
            both = seen & self.ranks[operand]
            if both:
                return (both & -both).bit_length() - 1
            seen |= self.ranks[operand]
        return None

    def local_reduce(self, operands: tuple[int, ...]) -> int:
        """Return the term of reducing operands, none of them repeated, from left to right."""
        number = self._numbers.get(operands)
        if number is None:
            number = operands[0]
            for right in operands[1:]:
                number = self._reduce_two(number, right)
            self._numbers[operands] = number
        return number

    def _reduce_two(self, left: int, right: int) -> int:
        number = self._numbers.get((left, right))
        if number is None:
            number = self._numbers[left, right] = len(self.ranks)
            self.ranks.append(self.ranks[left] | self.ranks[right])
            next_raw = right < self.world and self.ranks[left] == self.ranks[right] - 1
            self.in_order.append(self.in_order[left] and next_raw)
        return number


def rank_list(ranks: int) -> str:
    """Write a set of ranks, given as bits, for a message."""
    numbers = [rank for rank in range(ranks.bit_length()) if ranks >> rank & 1]
    shown = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {shown}{more}"


# -- the proof -------------------------------------------------------------------------------------


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


class _Proof(Execution):
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
            if isinstance(work, Reduce):
                self._write(rank, work.into, self._reduce(rank, work))
            else:
                self._write(rank, work.into, self._read(rank, work.source))
        self._check_one_size(rank, step.then)

    def check_result(self, rank: int) -> None:
        for chunk in self.cells.results(rank):
            term = self.values[rank].get(out(chunk))
            if term is None:
                raise self.error(f"rank {rank} ends without {out(chunk)}", rank)
            found, expected = self.terms.ranks[term], self._promised(rank, chunk)
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

    def _promised(self, rank: int, chunk: int) -> int:
        if self.schedule.kind.is_prefix:
            return (1 << rank + (self.schedule.kind is Kind.SCAN)) - 1
        if self.schedule.kind.is_reduction:
            return self.terms.all_ranks
        from_root = self.schedule.kind in (Kind.BROADCAST, Kind.SCATTER)
        return 1 << (self.root if from_root else chunk)

    def _check_order(self, rank: int, chunk: int, term: int) -> None:
        self.in_order = self.in_order and self.terms.in_order[term]
        if self.schedule.kind is Kind.ALLREDUCE and term != self.values[0][out(chunk)]:
            raise self.error(
                f"ranks 0 and {rank} reduce {out(chunk)} in different orders, so bits may differ",
                rank,
            )

    def _reduce(self, rank: int, work: Reduce) -> int:
        if not self.schedule.kind.is_reduction:
            self.fail(rank, f"reduces, but {self.schedule.kind.label} has nothing to reduce")
        if len(work.operands) < 2:
            self.fail(
                rank, f"reduces {len(work.operands)} cells into {work.into}, expected two or more"
            )
        operands = tuple([self._read(rank, cell) for cell in work.operands])
        twice = self.terms.repeated(operands)
        if twice is not None:
            self.fail(rank, f"reduces the contribution of rank {twice} into {work.into} twice")
        term = self.terms.local_reduce(operands)
        # In scans every reduction is the result of a rank: what counts is whether it is used again.
        self.partials = self.partials or (
            max(operands) >= self.world
            if self.schedule.kind.is_prefix
            else not self.terms.is_finished(term)
        )
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

    def _check_one_size(self, rank: int, then: tuple[Reduce | Copy, ...]) -> None:
        cells = [cell for work in then for cell in (work.into, *work.operands)]
        first = self.cells.size_key(rank, cells[0])
        for cell in cells:
            if self.cells.size_key(rank, cell) != first:
                self.fail(rank, f"works on {cells[0]} and {cell}, cells of different sizes")
