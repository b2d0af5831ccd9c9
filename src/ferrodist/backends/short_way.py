# SPDX-License-Identifier: MIT OR Apache-2.0
"""ShortWayBackend: where calls on plain NumPy arrays are one native function from check to result.

Native code calls the methods here by name: to look round in a wait that lasts, and to raise what
became of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar

from ferrodist.backends import verdict
from ferrodist.backends.process_backend import ProcessBackend, Wait
from ferrodist.backends.running_call import Prepared, RunningCall
from ferrodist.backends.status import Status
from ferrodist.buffer import DTYPES_BY_LABEL
from ferrodist.call import Call, Kind, Leaf, caller_site
from ferrodist.deadline import Deadline
from ferrodist.reduce_op import ReduceOp

T = TypeVar("T")


class ShortWayBackend(ProcessBackend):
    """A backend whose native group does whole calls; ``_at_once`` is how."""

    _at_once: Callable[[Any, int, Any, Any, Any, Any], Any] | None
    _at_once_wait: Wait | None = None

    def _look(self) -> None:
        """Look round in a call that went the short way and waits."""
        if self._at_once_wait is None:
            sequence, kind = self.group.last_call(self.rank)
            where = f"{Kind(kind).label} #{sequence} at {caller_site()}"
            self._at_once_wait = Wait(self, where)
        self._at_once_wait.look()

    def _stop_looking(self) -> None:
        if self._at_once_wait is not None:
            self._at_once_wait.end()
            self._at_once_wait = None

    def _wake_turns(self) -> None:
        """Let calls go on that were made while one went the short way."""
        self._turns.wake()

    def _fail_at_once(
        self,
        outcome: int,
        culprit: int,
        sequence: int,
        error: BaseException | None,
        kind: int,
        x: Any,
        op: Any,
        root: int,
        num_runs: int,
    ) -> None:
        """Raise what became of a call that went the short way, and end its ticket."""
        call = _call_of(Kind(kind), x, op, root, self.reproducible)
        deadline = Deadline(self.timeout)
        self._stop_looking()
        with _BegunCall(self, call, deadline, ticket=sequence, num_collectives=num_runs) as running:
            raise self._failure(running, Status(outcome, culprit, error))

    def resume(self, ticket: int, prepared: Prepared[T]) -> T:
        """Go on with a call that began on the short way, has its ticket, and did one collective."""
        self._stop_looking()
        call, deadline = prepared.call, prepared.deadline
        with _BegunCall(self, call, deadline, ticket=ticket, num_collectives=1) as running:
            prepared.run(running)
        return prepared.finish()

    def give_up_turn(self, number: int, error: BaseException) -> None:
        """End the ticket of a call that began on the short way and cannot go on."""
        self.abort(f"{verdict.words_of(error)} (in call #{number})")
        self._turns.end(number)


class _BegunCall(RunningCall):
    """A call whose ticket has come up, and which has begun, on the short way."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self


def _call_of(kind: Kind, x: Any, op: Any, root: int, reproducible: bool) -> Call:
    """Describe a call that went the short way."""
    leaves = () if x is None else (Leaf("", DTYPES_BY_LABEL[x.dtype.name], x.shape),)
    return Call(
        kind,
        leaves,
        op=ReduceOp(op) if kind.is_reduction else None,
        root=root if kind.is_rooted else None,
        reproducible=reproducible,
        site=caller_site(),
    )
