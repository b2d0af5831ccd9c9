# SPDX-License-Identifier: MIT OR Apache-2.0
"""RunningCall: one call while it runs, on any backend; and what a call is made of.

A public function prepares everything first, and then runs one or more whole collectives in the body
of ``backend._run_call(call, deadline, body)``. However many, they are one call with one ticket: one
sequence number, one fingerprint, one deadline.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ferrodist.buffer import Buffer
from ferrodist.call import Call, Kind
from ferrodist.deadline import Deadline
from ferrodist.errors import CollectiveMismatch, DistributedError
from ferrodist.reduce_op import ReduceOp

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
    from ferrodist.schedules import Schedule  # only what executes schedules loads them

T = TypeVar("T")
Counts = Sequence[int] | Sequence[Sequence[int]]
Algorithm: TypeAlias = "str | Schedule | None"


class CollectiveArgs(NamedTuple):
    """What a collective is told besides its kind and its buffers.

    ``counts`` gives the elements of each block where they differ: by rank for gathers and scatters,
    by sender and receiver for all_to_all. ``in_order`` asks for the reduction in rank order,
    ``in_place`` says that the two buffers share memory.
    """

    op: ReduceOp | None = None
    root: int = 0
    counts: Counts | None = None
    algorithm: Algorithm = None
    in_order: bool = False
    in_place: bool = False


NO_ARGS = CollectiveArgs()
_NO_FINGERPRINT = -1


class Part(NamedTuple):
    """One whole collective of a call, as plain data; a buffer is None where a rank has none."""

    kind: Kind
    input: Buffer | None = None
    output: Buffer | None = None
    args: CollectiveArgs = NO_ARGS


@dataclass(slots=True, eq=False, repr=False)
class Prepared(abc.ABC, Generic[T]):
    """A call that is ready to run: everything that can be refused on one rank alone has passed."""

    call: Call
    deadline: Deadline

    @abc.abstractmethod
    def run(self, running: RunningCall) -> None:
        """Do the collectives of the call."""

    @abc.abstractmethod
    def finish(self) -> T:
        """Make the result, when the ticket has ended: an error here concerns this rank alone."""


@dataclass(slots=True, eq=False, repr=False)
class RunningCall:
    """One call from its ticket to its end; ``body`` does its collectives.

    Native code draws the ticket, calls ``run`` and ``end``, and ends the ticket. A signal handler
    may raise at any instruction of Python code, in ``__exit__`` and ``finally`` too; a ticket that
    never ends would hold up every later call, and the other ranks.
    """

    backend: Backend
    call: Call
    deadline: Deadline
    body: Callable[[RunningCall], Any]
    _: KW_ONLY
    is_in_flight: bool = False
    sequence: int = 0  # until its ticket is drawn
    in_background: bool = False
    num_collectives: int = 0  # of this call so far
    fingerprint: int = _NO_FINGERPRINT
    hook: Any = None  # what the backend keeps for the waits of this call
    _has_turn: bool = False

    def __post_init__(self) -> None:
        if self.fingerprint == _NO_FINGERPRINT:
            checks_site = self.backend.config.check_sites
            self.fingerprint = self.call.fingerprint(checks_site=checks_site)

    @property
    def waiting(self) -> tuple[Deadline, bool, Callable[[], None]]:
        """How long native code waits in this call, on what thread, and what it polls meanwhile."""
        return self.deadline, self.in_background, self.poll

    def perform(self) -> Any:
        """Run the call after those made before it; return what its body returns."""
        return self.backend._tickets.run(self)

    def run(self, ticket: int, in_background: bool) -> Any:
        """Wait for the call's turn and do its collectives; called by native code."""
        self.sequence, self.in_background = ticket, in_background
        if self.is_in_flight and not in_background:  # it begins when a thread waits for it
            self.deadline = self.deadline.from_now()
        tickets = self.backend._tickets
        if tickets.last_ended + 1 < ticket:
            tickets.wait(ticket, self._look_while_queued)
            # Else it begins late, and takes ranks that were queued as well for stuck ones.
            self.deadline = self.deadline.from_now()
        self._has_turn = True
        self.backend._begin_call(self)
        return self.body(self)

    def end(self, ticket: int, error: BaseException | None) -> None:
        """Leave the call, well or not; called by native code, again if a signal interrupts it."""
        if self._has_turn:
            self.backend._end_call(self)
        if error is not None:
            self.backend._settle(self.call.kind, ticket, error, self.in_background)

    def _look_while_queued(self) -> float:
        return self.backend._look_while_queued(self)

    def collective(
        self,
        kind: Kind,
        input: Buffer | None = None,
        output: Buffer | None = None,
        args: CollectiveArgs = NO_ARGS,
    ) -> None:
        """Do one whole collective from ``input`` to ``output``; None where a rank has none."""
        self.num_collectives += 1
        self.backend._run_collective(self, kind, input, output, args)

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """Give every rank what ``root`` has in its buffer, in place."""
        self.collective(Kind.BROADCAST, buffer, buffer, CollectiveArgs(root=root, in_place=True))

    def tell_numbers(self, *numbers: int) -> Any:
        """Gather a few integers of every rank on every rank, one row per rank."""
        mine = Buffer.of_numbers(np.array(numbers, np.int64))
        table = np.empty((self.backend.world_size, len(numbers)), np.int64)
        self.collective(Kind.ALL_GATHER, mine, Buffer.of_numbers(table))
        return table

    def mismatch(self, error: type[CollectiveMismatch], text: str) -> DistributedError:
        """Report to all ranks a difference the fingerprints leave out; return what to raise."""
        return self.backend._report_mismatch(self, error, text)

    def poll(self) -> None:
        """Called by native code every 50 ms of a wait."""
        self.backend._poll(self)
