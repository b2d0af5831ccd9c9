# SPDX-License-Identifier: MIT OR Apache-2.0
"""Backends whose large collectives a library runs, an engine. See ``docs/engines.md``.

Ranks meet, compare their calls and send messages over ferrodist's own connections and memory, so
that errors name the rank that differs, is late or is lost. Once the native barrier has shown that
all ranks are in a call, the engine runs it, if its result meets our guarantees. The engine's call
is polled, and so are the other ranks: a rank that is lost meanwhile ends it for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol, Self, cast

from ferrodist._native import Status
from ferrodist.arrays import as_input, as_output
from ferrodist.backends.engines.fast_path import BoundCall, call_path, note_site
from ferrodist.backends.failures import LeaveReason, StatusCode
from ferrodist.backends.hybrid import HybridBackend
from ferrodist.backends.receive import Receive
from ferrodist.backends.running_call import NO_ARGS, CollectiveArgs, RunningCall
from ferrodist.backends.tcp import TcpBackend
from ferrodist.buffer import Buffer, DeviceBuffer, DType
from ferrodist.call import MAX_TAG, Call, Kind
from ferrodist.config import Config, DefaultTimeout, variable
from ferrodist.deadline import Deadline
from ferrodist.errors import InvalidArgument
from ferrodist.reduce_op import CustomOp
from ferrodist.rendezvous import Job

CARRIED_NBYTES = 64 * 1024
"""Up to here comparing the calls carries the array, too, and the engine has nothing to do."""

CARRIED_ON_ONE_HOST = 4 * 1024 * 1024
"""The same if all ranks share memory, which is several times as fast as Gloo, and faster than MPI.

Above it the check takes less than a tenth of Gloo's time, and the engine is what was asked for.
"""

_TAG = MAX_TAG + 3  # no user's: of what ranks tell each other while they open an engine
_LOOK = 0.02  # seconds between two looks at the other ranks, while the engine works
_EXPLAIN_SECONDS = 5.0  # until it is known which rank is gone when the engine has failed
_NAP = 1e-3


def refuse_tls(config: Config) -> None:
    if config.tls:
        raise InvalidArgument(
            f"{variable('tls')}=1: ferrodist does not encrypt what an engine sends; unset it, or "
            "use another backend"
        )


class EngineFailure(Exception):
    """A call of an engine has failed; ``__cause__`` is the library's own error."""


class EngineCall(Protocol):
    """A collective that an engine has started."""

    def wait(self, seconds: float) -> bool:
        """Wait until it is done, for some seconds; tell whether it is. Raises EngineFailure."""

    def finish(self) -> None:
        """Do what is left when it is done."""

    def abandon(self) -> None:
        """Give it up: the library may keep its memory, and nothing waits for it any more."""


class Engine(Protocol):
    """The collectives of a library, in one group."""

    def does(self, kind: Kind, dtype: DType, args: CollectiveArgs) -> bool:
        """Tell whether it does this as we promise; the answer is the same on all ranks."""

    def prepare(
        self, kind: Kind, input: Buffer | None, output: Buffer | None, args: CollectiveArgs
    ) -> Callable[[], EngineCall] | None:
        """Return what starts a collective; None, on all ranks, if it is not done as we promise."""

    def bind(
        self, kind: Kind, dtype: DType, shape: tuple[int, ...], args: CollectiveArgs
    ) -> Callable[[Any, Any, bool], EngineCall] | None:
        """Return what starts such a collective on NumPy arrays: ``run(x, out, in_place)``.

        None for those that take the general path.
        """


class EngineCalls(TcpBackend):
    """Ranks whose large collectives an engine runs; without ``engine``, ferrodist does all."""

    engine: Engine | None = None  # of arrays of the host
    num_engine_calls = 0  # collectives that the engine has run; ferrodist's own ran all others

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.bound_calls: dict[tuple[Any, ...], BoundCall | None] = {}

    # -- joining and leaving --------------------------------------------------------------------

    def _complete(self, parent: Self, identity: int, deadline: Deadline) -> None:
        super()._complete(parent, identity, deadline)
        if isinstance(deadline.seconds, DefaultTimeout):  # it may be over: ranks were waited for
            deadline = Deadline(self.config.join_timeout)
        self._split_engine(parent, deadline)

    def _split_engine(self, parent: Self, deadline: Deadline) -> None:
        """Open the engine of this group, whose ranks are connected."""
        raise NotImplementedError

    def _close_engine(self, *, has_failed: bool) -> None:
        """Leave the engine's group; it may hold calls that were given up if the group failed."""
        raise NotImplementedError

    def _leave(self, leave_reason: LeaveReason, deadline: Deadline) -> None:
        has_failed = self.error_of(None) is not None
        super()._leave(leave_reason, deadline)
        self.bound_calls.clear()
        self._close_engine(has_failed=has_failed)

    # -- collectives ----------------------------------------------------------------------------

    def _use(self, engine: Engine) -> None:
        """Leave large collectives to an engine, from now on."""
        self.engine = engine
        self._note_change()
        if not self.config.check_sites:
            self._engine_path = cast(Any, call_path)

    @property
    def _carried_nbytes(self) -> int:  # type: ignore[override]  # a constant in the base
        """Up to which size ferrodist moves an array itself, and no engine."""
        return super()._carried_nbytes if self.engine is None else CARRIED_NBYTES

    def _engine_of(self, sample: Buffer) -> Engine | None:
        """Return the engine for arrays where this one is."""
        return self.engine

    def _run_collective(
        self,
        running: RunningCall,
        kind: Kind,
        input: Buffer | None,
        output: Buffer | None,
        args: CollectiveArgs,
    ) -> None:
        """Run a collective on the engine, once all ranks are in it, or as hybrid does."""
        sample = input if input is not None and kind is not Kind.SCATTER else output
        engine = start = None
        if sample is not None and args.algorithm is None:
            engine = self._engine_of(sample)
        if engine is not None and sample is not None:
            is_even = args.counts is None and not isinstance(sample, DeviceBuffer)
            is_carried = is_even and sample.nbytes <= self._carried_nbytes
            if not is_carried:  # on any rank
                start = engine.prepare(kind, input, output, args)
        if start is None:
            super()._run_collective(running, kind, input, output, args)
            return
        if self.config.check or not _is_plain(running.call):
            self._enter(running)
        self._await_engine(running, start)

    def run_bound(
        self, running: RunningCall, bound: BoundCall, x: Any, out: Any, in_place: bool
    ) -> None:
        """Run a call of the fast path on the engine, once all ranks are in it."""
        running.num_collectives += 1
        if self.config.check:
            self._enter(running)
        self._await_engine(running, lambda: bound.run(x, out, in_place))

    def _enter(self, running: RunningCall) -> None:
        """Wait until all ranks have come, with the same call."""
        super()._run_collective(running, Kind.BARRIER, None, None, NO_ARGS)

    def _await_engine(self, running: RunningCall, start: Callable[[], EngineCall]) -> None:
        """Start a call of the engine and wait for it; look at the other ranks if that lasts."""
        self.num_engine_calls += 1
        call = deadline = None
        try:
            call = start()
            while not call.wait(_LOOK):
                # All have come, and whether bytes move is not known: time is counted anew, and a
                # limit that nobody has chosen ends nothing that may still be moving.
                seconds = running.deadline.late_seconds or running.deadline.seconds
                deadline = deadline or Deadline(seconds)
                self._look(running, deadline)
        except BaseException as error:  # Ctrl-C too
            if call is not None:
                call.abandon()
            if isinstance(error, EngineFailure):
                self._raise_failure(running, error)
            raise
        call.finish()

    def _look(self, running: RunningCall, deadline: Deadline) -> None:
        """Raise if a call that the engine does cannot succeed, or its time is up."""
        running.poll()
        if running.in_background and self.group.is_stopping:
            raise self.cut_short(running.call.kind, running.sequence)
        if self.error_of(running.sequence) is not None:
            raise self.failure_of(running, Status(StatusCode.GROUP_ERROR))
        for peer in self._gone():
            if not self.leave_reason_of(peer).is_normal:  # else it was through
                raise self.failure_of(running, Status(self.loss_of(peer), peer))
        if deadline.remaining() <= 0:
            raise self.failure_of(running, Status(StatusCode.LATE))

    def _gone(self) -> list[int]:
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        return [rank for rank in others if self.group.is_gone(rank)]

    def _raise_failure(self, running: RunningCall, failure: EngineFailure) -> NoReturn:
        """Raise what an error of the engine means: most often that a rank is gone."""
        error = failure.__cause__
        assert error is not None
        end = time.monotonic() + _EXPLAIN_SECONDS
        while time.monotonic() < end:
            self._look(running, Deadline(None))
            for peer in self._gone():
                raise self.failure_of(running, Status(self.loss_of(peer), peer)) from error
            time.sleep(_NAP)
        raise error

    # -- calls of the fast path, which do not know where they were made -------------------------

    def _poll(self, running: RunningCall) -> None:
        note_site(running)
        super()._poll(running)

    def failure_of(self, running: RunningCall, status: Status) -> BaseException:
        """Return the error for a status, and see that all ranks get the same."""
        note_site(running)
        return super().failure_of(running, status)


class EngineBackend(EngineCalls, HybridBackend):
    """Ranks that share memory on each host, and leave large collectives to an engine."""

    @classmethod
    def _join_with(cls, job: Job, config: Config, open_engine: Callable[[Self], None]) -> Self:
        """Connect the ranks of a job, and let each open its engine."""
        refuse_tls(config)
        made = super().join(job, config=config)
        try:
            open_engine(made)
        except BaseException as error:  # Ctrl-C too: the others wait for this rank
            made._fail(error)
            raise
        return made

    @property
    def _carried_nbytes(self) -> int:  # type: ignore[override]  # a constant in the base
        is_on_one_host = self.engine is not None and len(self.host_map.hosts) == 1
        return CARRIED_ON_ONE_HOST if is_on_one_host else super()._carried_nbytes

    def _tell(self, peer: int, words: bytes, nbytes: int, deadline: Deadline) -> None:
        """Send a rank what it needs to open the engine, filled up to ``nbytes``."""
        self._send(as_input(words.ljust(nbytes)), peer, _TAG, deadline)

    def _hear(self, peer: int, nbytes: int, deadline: Deadline) -> bytes:
        target = as_output(bytearray(nbytes), DType.UINT8, (nbytes,))
        return bytes(self._recv(Receive(peer, _TAG, target), deadline))

    def _agree(
        self, own: bytes, decide: Callable[[Sequence[bytes]], bytes], nbytes: int, wait: Deadline
    ) -> bytes:
        """Let the first rank decide by what all have to tell; return its decision on all."""
        if self.rank:
            self._tell(0, own, nbytes, wait)
            return self._hear(0, nbytes, wait)
        peers = range(1, self.world_size)
        decision = decide([own, *(self._hear(peer, nbytes, wait) for peer in peers)]).ljust(nbytes)
        for peer in peers:
            self._tell(peer, decision, nbytes, wait)
        return decision


def _is_plain(call: Call) -> bool:
    """Tell whether a call is one collective of arrays, in which no rank finds faults on its own."""
    is_one = call.kind <= Kind.EXSCAN and call.kind is not Kind.SCATTER
    return is_one and not isinstance(call.op, CustomOp)
