# SPDX-License-Identifier: MIT OR Apache-2.0
"""Walk: the steps of all ranks, advanced together with no buffering at all.

A message moves only when its sender and its receiver both stand at it. Whatever order ready pairs
are taken in, the same messages move and the same ranks get stuck, because every rank's steps are
fixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from ferrodist.errors import InvalidArgument
from ferrodist.schedules.cells import Cells
from ferrodist.schedules.steps import Recv, Schedule, Send, Step

NOBODY = -1


class Walk:
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
