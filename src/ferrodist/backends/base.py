# SPDX-License-Identifier: MIT OR Apache-2.0
"""Backend: what a user holds and passes to collectives, and what all of them have in common.

A public function runs one or more whole collectives by ``backend._run_call(call, deadline, body)``:
they are one call with one sequence number. Calls of one group run one at a time, in the order they
were made, on whatever thread.
"""

from __future__ import annotations

import abc
import importlib
import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import numpy as np

from ferrodist import _native
from ferrodist.arrays import Form, InputArray, array_over, form_like, parse_form
from ferrodist.backends import failures
from ferrodist.backends.call_methods import CallMethods
from ferrodist.backends.failures import LeaveReason
from ferrodist.backends.running_call import Algorithm, CollectiveArgs, Prepared, RunningCall
from ferrodist.buffer import Buffer, DType
from ferrodist.call import Call, Kind, Leaf, as_index, caller_site
from ferrodist.config import DEFAULT, Config, Timeout, check_timeout
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    BackendClosed,
    CollectiveMismatch,
    DistributedError,
    InvalidArgument,
    InvalidRank,
    InvalidWorldSize,
    OutOfMemory,
    UnsupportedOp,
)
from ferrodist.message_status import Status
from ferrodist.work import Work

if TYPE_CHECKING:
    from ferrodist.backends.grid import Grid
    from ferrodist.backends.receive import Receive

logger = logging.getLogger("ferrodist")

T = TypeVar("T")

_NO_COLOR = -1 << 63  # of a rank that joins no group
_NO_KEY, _NO_MEMORY = -1, -2  # of a rank that takes no shared memory, and of one that cannot
_FAIL_SECONDS = 2.0  # for what a rank that failed still has to say, and for callbacks that run


class Statistics(NamedTuple):
    """What a rank has done so far, and which rank it waits for now (None if it does not wait).

    ``lateness[r]`` is the total time in seconds for which collectives waited for rank r, compared
    with the median rank; ``slowest`` is the rank with the largest lateness.
    """

    rank: int
    world_size: int
    collectives: int
    sent_nbytes: int
    received_nbytes: int
    waiting_for: int | None
    lateness: tuple[float, ...]

    @property
    def slowest(self) -> int | None:
        """The rank that the others waited for most; None if no rank was late."""
        latest = max(range(self.world_size), key=self.lateness.__getitem__)
        return latest if self.lateness[latest] > 0 else None


class Backend(CallMethods, abc.ABC):
    """A group of ranks, as seen from one of them: what MPI calls a communicator.

    ``rank`` is this rank's number in the group, ``world_size`` the number of ranks. Every
    collective is also a method: ``backend.allreduce(x)`` is ``ferrodist.allreduce(x, backend)``.
    Use it as a context manager, or call ``close()`` after this rank's last call.
    """

    # The fast paths, where a backend has them: they give the result, or NotImplemented for what
    # takes the general path.
    _call_path: Callable[..., Any] | None = None
    _start_path: Callable[..., Any] | None = None
    _engine_path: Callable[..., Any] | None = None  # takes what native code declines
    _fast_send: Callable[..., Any] | None = None
    _fast_recv: Callable[..., Any] | None = None
    _fast_sendrecv: Callable[..., Any] | None = None
    _fast_isend: Callable[..., Any] | None = None
    _fast_irecv: Callable[..., Any] | None = None
    _fast_isendrecv: Callable[..., Any] | None = None
    _fast_exchange: Callable[..., Any] | None = None

    # The type of devices on which an engine does collectives where their tensors are, and its name.
    _device = ""
    _device_engine = ""

    def __init__(self, rank: int, world_size: int, config: Config) -> None:
        importlib.import_module("ferrodist.collectives")  # adds the calls as methods, once
        self._rank = rank
        self._world_size = world_size
        self.config = config
        self._reproducible = config.reproducible
        self._timeout = config.timeout
        self._pickle = False  # whether object calls pickle that do not say otherwise
        self._late_timeout = config.late_timeout
        self._tickets = _native.Tickets()
        self._unasked: list[Work[Any]] = []
        self._second: Self | None = None
        self._lock = threading.RLock()
        self._is_closed = False
        self.is_forked = False
        _OPEN.add(self)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return self._world_size

    def __dir__(self) -> list[str]:
        """List what users call: whatever stands here without an underscore, and nothing below."""
        return sorted(name for name in vars(Backend) if not name.startswith("_"))

    # -- what subclasses write ------------------------------------------------------------------

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of this group in the world, in order: this one is ``members[rank]``.

        Example:
            >>> from ferrodist.testing import run_ranks
            >>> run_ranks(2, lambda backend: backend.split_by(0, key=-backend.rank).members)
            [(1, 0), (1, 0)]
        """
        return tuple(range(self.world_size))

    @property
    def local_rank(self) -> int:
        """This rank's number among the ranks on its host."""
        return self.rank

    @property
    def local_world_size(self) -> int:
        """The number of ranks on this host."""
        return self.world_size

    @abc.abstractmethod
    def _begin_call(self, running: RunningCall) -> None:
        """Enter a call whose ticket has come up; raises if this rank or the group is at its end."""

    @abc.abstractmethod
    def _run_collective(
        self,
        running: RunningCall,
        kind: Kind,
        input: Buffer | None,
        output: Buffer | None,
        args: CollectiveArgs,
    ) -> None:
        """Do one whole collective of a call; see ``RunningCall.collective``."""

    @abc.abstractmethod
    def _report_mismatch(
        self, running: RunningCall, error: type[CollectiveMismatch], text: str
    ) -> DistributedError:
        """Report a mismatch that fingerprints do not show to all ranks; return the error of all."""

    def _end_group(self, error: DistributedError) -> None:
        """End the group because of an error of this rank; all other calls of the group fail."""
        self.abort(f"{type(error).__name__}: {error}")

    @abc.abstractmethod
    def _end_call(self, running: RunningCall) -> None:
        """Leave a call whose turn it was, well or not; may be called twice."""

    @abc.abstractmethod
    def _look_while_queued(self, running: RunningCall) -> float:
        """Raise if waiting for a call's ticket is over, else say how long to wait on."""

    @abc.abstractmethod
    def _is_settled(self, sequence: int, in_background: bool) -> bool:
        """Tell whether the other ranks know how a call ends, or this rank has left."""

    def _poll(self, running: RunningCall) -> None:
        """Do what a long wait does besides waiting: log it, for example."""

    @abc.abstractmethod
    def _send(self, source: InputArray, peer: int, tag: int, deadline: Deadline) -> None:
        """Send a message; return when ``source`` may change."""

    @abc.abstractmethod
    def _start_send(
        self, source: InputArray, peer: int, tag: int, deadline: Deadline
    ) -> Work[None]:
        """Send a message; the Work is done when ``source`` may change."""

    @abc.abstractmethod
    def _recv(self, receive: Receive, deadline: Deadline) -> Any:
        """Receive the next message that matches."""

    @abc.abstractmethod
    def _start_recv(self, receive: Receive, deadline: Deadline) -> Work[Any]:
        """Receive in the background."""

    @abc.abstractmethod
    def _sendrecv(
        self, source: InputArray, to: int, tag: int, receive: Receive, deadline: Deadline
    ) -> Any:
        """Send and receive at once; a ring of these never deadlocks."""

    @abc.abstractmethod
    def _start_sendrecv(
        self, source: InputArray, to: int, tag: int, receive: Receive, deadline: Deadline
    ) -> Work[Any]:
        """Send and receive in the background."""

    @abc.abstractmethod
    def _probe(self, peer: int, tag: int, deadline: Deadline) -> Status:
        """Wait for a message that a receive would get, and leave it."""

    @abc.abstractmethod
    def _try_probe(self, peer: int, tag: int) -> Status | None:
        """Tell which message a receive would get now."""

    @abc.abstractmethod
    def split(self, ranks: Sequence[int], *, timeout: Timeout = DEFAULT) -> Self:
        """Make a new group of some ranks of this one.

        Only the members call it, all with the same list; their ranks in the new group follow the
        order of the list. Waits for all members; CollectiveTimeout names those that do not come.
        """

    def _sharing_ranks(self) -> Sequence[int]:
        """List the ranks that can share memory with this one, itself included; none by default."""
        return ()

    def _allocate_shared(self, nbytes: int) -> int:
        """Allocate shared memory on the first of the sharing ranks; return its key."""
        raise NotImplementedError

    def _open_shared(self, key: int, nbytes: int) -> np.ndarray[Any, Any]:
        """Return the memory that the first of the sharing ranks has taken."""
        raise NotImplementedError

    def _release_shared(self, key: int) -> None:
        """Free shared memory that no rank will open."""

    @abc.abstractmethod
    def abort(self, reason: str = "abort() was called") -> None:
        """Abort this group and its subgroups: calls on all ranks raise GroupAborted."""

    @abc.abstractmethod
    def statistics(self) -> Statistics:
        """Return what this rank has done so far, and which ranks were late."""

    @abc.abstractmethod
    def _check_algorithm(
        self, kind: Kind, algorithm: Algorithm, root: int, reproducible: bool
    ) -> str | None:
        """Return an algorithm's name; raise if it is unknown or, if required, not reproducible."""

    @abc.abstractmethod
    def _announce_closing(self) -> None:
        """Tell the others that nothing new comes from this rank."""

    @abc.abstractmethod
    def _leave(self, leave_reason: LeaveReason, deadline: Deadline) -> None:
        """Tell the others that this rank makes no further calls; what is in flight is cut short."""

    def _runs_on_device(self, kind: Kind, dtype: DType, args: CollectiveArgs) -> bool:
        """Tell whether the engine of ``_device`` does a collective as it is promised."""
        return False

    def _simplest(self) -> Backend:
        """Return the simplest backend for where the ranks are; this one is left for it."""
        return self

    # -- what all have in common ----------------------------------------------------------------

    @property
    def timeout(self) -> float | None:
        """The timeout in seconds of calls that are not given one; None waits for ever.

        The default of 60 s is not exact: a call waits longer, up to ``FERRODIST_LATE_TIMEOUT``, for
        ranks that are alive and not stuck in another call. A timeout that you set is exact.
        """
        return self._timeout

    @timeout.setter
    def timeout(self, value: float | timedelta | None) -> None:
        self._timeout = check_timeout(value)
        self._note_change()

    @property
    def reproducible(self) -> bool:
        """Whether calls reduce in rank order, with the same bits on every backend, by default."""
        return self._reproducible

    @reproducible.setter
    def reproducible(self, value: bool) -> None:
        self._reproducible = bool(value)
        self._note_change()

    def _inherit(self, parent: Backend) -> None:
        """Take over the settings of the group that this one was split from."""
        self.timeout, self.reproducible = parent.timeout, parent.reproducible
        self._pickle = parent._pickle

    def _deadline(self, timeout: Timeout = DEFAULT, *, start: float | None = None) -> Deadline:
        """Make the deadline of a call, by its own timeout or that of this backend."""
        if timeout is DEFAULT:
            return Deadline(self._timeout, self._late_timeout, start=start)
        return Deadline(check_timeout(timeout), start=start)

    def _note_change(self) -> None:
        """Called when timeout, reproducible or is_closed has changed."""

    def empty(self, shape: Any, dtype: Any, kind: str = "numpy") -> Any:
        """Make an array in memory from which collectives need no copy, if ranks share memory.

        A local call: other ranks need not make it. ``kind`` is ``"numpy"`` or ``"torch"``, and the
        result is an ordinary array of that library with undefined content. Collectives recognise
        it, its views and slices by their address. Without shared memory it is ordinary memory.
        Raises OutOfMemory if there is not enough.
        """
        return self._new_array(parse_form(shape, dtype, kind))

    def zeros(self, shape: Any, dtype: Any, kind: str = "numpy") -> Any:
        """Make an array like ``empty``, filled with zeros."""
        array = self.empty(shape, dtype, kind)
        array[...] = 0
        return array

    def like(self, x: Any) -> Any:
        """Make an array like ``empty``, with the dtype, shape and library of ``x``."""
        return self._new_array(form_like(x))

    def _new_array(self, form: Form) -> Any:
        self._check_usable()
        return array_over(self._new_memory(_nbytes_of(form)), form)

    def _new_memory(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Give flat memory for an array."""
        return np.asarray(Buffer.empty(DType.UINT8, (nbytes,)).memory)

    def shared(
        self, shape: Any, dtype: Any, kind: str = "numpy", *, timeout: Timeout = DEFAULT
    ) -> Any:
        """Make one array of zeros per host that all ranks of the host share; every rank calls it.

        What a rank writes before a ``barrier``, the others see after it. The memory is freed when
        all ranks of the host have dropped their array or ended. If a host has not enough memory,
        every rank raises OutOfMemory. A TcpBackend raises UnsupportedOp.

        Example:
            >>> from ferrodist.testing import run_ranks
            >>> def write(backend):
            ...     table = backend.shared(3, "int64")
            ...     table[backend.rank] = backend.rank + 1
            ...     backend.barrier()
            ...     return table.tolist()
            >>> run_ranks(3, write)
            [[1, 2, 3], [1, 2, 3], [1, 2, 3]]
        """
        self._check_usable()
        if not self._sharing_ranks():
            raise UnsupportedOp(
                f"shared: ranks of a {type(self).__name__} share no memory; use hybrid, which does "
                "within each host, or shared_memory on one host",
                this_rank=self.rank,
            )
        form = parse_form(shape, dtype, kind)
        nbytes = _nbytes_of(form)
        call = Call(Kind.SHARED, (Leaf("", form.dtype, form.shape),), site=caller_site())
        key, lacking, why, sequence = self._run_call(
            call, self._deadline(timeout), lambda running: self._offer_shared(running, nbytes)
        )
        if lacking is not None:
            text = f"shared #{sequence}: rank {lacking} could not take {nbytes} bytes{why}"
            raise OutOfMemory(text, rank=lacking, this_rank=self.rank, sequence=sequence)
        return array_over(self._open_shared(key, nbytes) if nbytes else self._new_memory(0), form)

    def _offer_shared(self, running: RunningCall, nbytes: int) -> tuple[int, int | None, str, int]:
        """Allocate memory on one rank per host; return its key, or which rank failed, and why.

        The last is the sequence number of the call.
        """
        first, key, why = self._sharing_ranks()[0], _NO_KEY, ""
        if self.rank == first and nbytes:
            try:
                key = self._allocate_shared(nbytes)
            except MemoryError as error:
                key, why = _NO_MEMORY, f": {error}"
        lacking = None
        try:
            keys: list[int] = running.tell_numbers(key)[:, 0].tolist()
            lacking = keys.index(_NO_MEMORY) if _NO_MEMORY in keys else None
        except BaseException:  # Ctrl-C too: no rank will open that memory
            lacking = self.rank
            raise
        finally:
            if lacking is not None and key >= 0:
                self._release_shared(key)
        return keys[first], lacking, why, running.sequence

    def split_by(
        self, color: int | None, key: int = 0, *, timeout: Timeout = DEFAULT
    ) -> Self | None:
        """Make one group per ``color`` of the ranks that pass it; every rank calls it.

        In the new group, ranks are ordered by ``key``, then by their rank here. A rank that passes
        None as color joins no group, and None is returned.

        Example:
            >>> from ferrodist.testing import run_ranks
            >>> def sum_of_parity(backend):
            ...     return backend.split_by(backend.rank % 2).allreduce(backend.rank)
            >>> run_ranks(4, sum_of_parity)
            [2, 4, 2, 4]
        """
        self._check_usable()
        mine = _NO_COLOR if color is None else _check_int64(color, "color", "an int or None")
        place = _check_int64(key, "key", "an int")
        call, deadline = Call(Kind.SPLIT_BY, site=caller_site()), self._deadline(timeout)

        def split() -> list[Self]:
            table = self._run_call(
                call, deadline, lambda running: running.tell_numbers(mine, place).tolist()
            )
            ranks = [rank for rank, (found, _) in enumerate(table) if found == mine]
            ranks.sort(key=lambda rank: table[rank][1])  # which keeps the order of equal keys
            rest = deadline.rest_of(timeout)
            return [] if color is None else [self.split(ranks, timeout=rest)]

        groups: list[Self] = self._abort_if_interrupted("split_by", split)
        return groups[0] if groups else None

    def dup(self, *, timeout: Timeout = DEFAULT) -> Self:
        """Make a group of the same ranks, with calls and messages separate from this group's.

        Example:
            >>> from ferrodist.testing import run_ranks
            >>> run_ranks(2, lambda backend: backend.dup().allreduce(1))
            [2, 2]
        """
        return self.split(range(self.world_size), timeout=timeout)

    def grid(
        self,
        shape: int | Sequence[int],
        periodic: bool | Sequence[bool] = False,
        *,
        timeout: Timeout = DEFAULT,
    ) -> Grid:
        """Make a group in which the ranks form a Cartesian grid, row by row; every rank calls it.

        See ``Grid`` for what it adds to a group. ``periodic`` says, for all axes or for each,
        whether the first and the last rank along it are neighbors. Raises InvalidWorldSize if
        ``shape`` does not have as many cells as there are ranks.

        Example:
            >>> from ferrodist.testing import run_ranks
            >>> def neighbors(backend):
            ...     grid = backend.grid((2, 2), periodic=(False, True))
            ...     return grid.coords, grid.neighbor_all_gather(grid.rank)
            >>> run_ranks(4, neighbors)[3]  # lower and higher along axis 0, then along axis 1
            ((1, 1), [1, None, 2, 2])
        """
        from ferrodist.backends.grid import make_grid  # whose Grid is a Backend

        return make_grid(self, shape, periodic, timeout)

    def _second_group(self) -> Self:
        """Return a group of the same ranks, for calls made in any order against this one's.

        It is made once, by the first call, which every rank makes.
        """
        if self._second is None:
            self._second = self.split(range(self.world_size))
        return self._second

    def _run_call(self, call: Call, deadline: Deadline, body: Callable[[RunningCall], T]) -> T:
        """Run a call after those made before it; return what ``body`` returns."""
        self._check_usable()
        if outer := self._tickets.inside:
            raise failures.nested(call.kind, outer, self.rank)
        result: T = RunningCall(self, call, deadline, body).perform()
        return result

    def _perform(self, prepared: Prepared[T]) -> T:
        """Run a call and return its result."""
        self._run_call(prepared.call, prepared.deadline, prepared.run)
        return prepared.finish()

    @abc.abstractmethod
    def _start(self, prepared: Prepared[T]) -> Work[T]:
        """Put a call in flight and return its handle at once."""

    def _in_flight(self, prepared: Prepared[T]) -> RunningCall:
        """Make what runs a call in flight, on a thread of its own or where it is waited for."""
        return RunningCall(self, prepared.call, prepared.deadline, prepared.run, is_in_flight=True)

    def _abort_if_interrupted(self, what: str, run: Callable[[], T]) -> T:
        """Do a call; abort the group if Ctrl-C or the like ends it.

        Native code sees to that: a signal handler may raise in ``except`` and ``__exit__``, too.
        """
        result: T = _native.guard(run, lambda error: self._abort_if_foreign(error, what))
        return result

    def _abort_if_foreign(self, error: BaseException, what: str) -> None:
        if not isinstance(error, DistributedError | CancelledError):
            self.abort(f"{failures.describe(error)} (in {what})")

    def _settle(
        self, kind: int, sequence: int, error: BaseException, in_background: bool = False
    ) -> None:
        """Abort the group because a call failed, unless the other ranks know how it ends."""
        if not self._is_settled(sequence, in_background):
            self.abort(f"{failures.describe(error)} (in {Kind(kind).label} #{sequence})")

    def _note_unasked(self, work: Work[Any], error: BaseException) -> None:
        """Log the error of a Work that was not asked for its result, and keep it for close()."""
        if isinstance(error, BackendClosed):
            return  # this rank left before the call was done, on purpose
        with self._lock:
            self._unasked = [*(w for w in self._unasked if not w.is_asked), work]
        logger.error("rank %d: %s failed: %s", self.rank, work.describe, failures.describe(error))

    def _check_rank(self, rank: Any, what: str) -> int:
        """Raise InvalidRank if this is not a rank of the group; return it as an int."""
        number = as_index(rank)
        if number is None or not 0 <= number < self.world_size:
            is_float = isinstance(rank, (float, np.floating))
            why = (
                "a float: pass int(...)" if is_float else f"they go from 0 to {self.world_size - 1}"
            )
            raise InvalidRank(
                f"{what} {rank!r} is not a rank: {why}",
                rank=rank,
                world_size=self.world_size,
                this_rank=self.rank,
            )
        return number

    @property
    def _group_name(self) -> str:
        """Whose ranks an error speaks of, where they are not those of the world; else empty."""
        return ""

    def _name_split(self, members: Sequence[Any]) -> str:
        """Name a call of split in errors; the ranks are those of this group."""
        return f"split({list(members)}){self._group_name}"

    def _check_members(self, ranks: Any) -> tuple[int, ...]:
        """Raise unless this is a list of distinct ranks that includes this one."""
        if not isinstance(ranks, Iterable):
            text = f"split({ranks!r}): expected a list of ranks"
            raise InvalidArgument(text, got=ranks, this_rank=self.rank)
        members = tuple(ranks)
        what = self._name_split(members)
        if not members:
            text = f"{what}: a group needs at least one rank"
            raise InvalidWorldSize(text, this_rank=self.rank)
        members = tuple(self._check_rank(rank, f"{what}: member") for rank in members)
        if len(set(members)) != len(members):
            twice = next(rank for rank in members if members.count(rank) > 1)
            raise InvalidRank(f"{what}: rank {twice} is named twice", rank=twice)
        if self.rank not in members:
            raise InvalidRank(
                f"{what}: called by rank {self.rank}, which is not a member; only members call "
                "split",
                rank=self.rank,
                this_rank=self.rank,
            )
        return members

    def _check_usable(self) -> None:
        """Raise unless this rank may still make calls, from this thread."""
        if self.is_forked:
            self._check_process()
        if self._is_closed:
            raise BackendClosed(f"rank {self.rank} has closed this backend", this_rank=self.rank)
        if _native.is_progress_thread():
            raise InvalidArgument(
                "called from a callback of a Work, which must not communicate; set an event there "
                "and call from your own thread",
                this_rank=self.rank,
            )

    def _check_process(self) -> None:
        """Raise in a forked child: the ranks it would talk to are in the parent."""
        if self.is_forked:
            raise BackendClosed(
                "this backend belongs to the process that this one was forked from; a process that "
                "is to be a rank of its own is started by a launcher",
                this_rank=self.rank,
            )

    @property
    def is_closed(self) -> bool:
        """Whether close() was called."""
        return self._is_closed

    def close(self) -> None:
        """Wait for calls in flight and leave the group.

        Raises the error of a failed call in flight whose Work was never asked for its result. Not
        collective: the other ranks continue as long as they need nothing more from this one.
        """
        self._finish_and_leave(f"closed at {caller_site()}", Deadline(None))

    def _end(self, how: str = "its program ended", timeout: float | None = None) -> None:
        """Leave as ``close`` does, because this rank's program came to its end.

        After ``timeout`` seconds what is still in flight is cut short.
        """
        self._finish_and_leave(how, Deadline(timeout))

    def _fail(self, error: BaseException) -> None:
        """Leave at once because this rank's program raised; the other ranks are told its error."""
        if not self.is_forked:
            self._shut()
            self._leave(failures.raised(error), Deadline(_FAIL_SECONDS))

    def _finish_and_leave(self, how: str, deadline: Deadline) -> None:
        if not self._shut():
            return
        self._leave_after_works(how, deadline)
        for work in self._unasked:
            if not work.is_asked and (error := work.exception()) is not None:
                raise error

    def _leave_after_works(self, how: str, deadline: Deadline) -> None:
        self._announce_closing()
        try:
            self._await_works(deadline)
        except BaseException as error:  # Ctrl-C too: the other ranks are told why
            self._leave(failures.raised(error), deadline)
            raise
        self._leave(failures.left(self._tickets.last_ended, how), deadline)

    def _shut(self) -> bool:
        """Take no further calls; tell whether this was the first time."""
        with self._lock:
            if self._is_closed or self.is_forked:
                return False
            self._is_closed = True
            self._note_change()
            return True

    @abc.abstractmethod
    def _await_works(self, deadline: Deadline) -> None:
        """Wait for what is in flight, each call by its own deadline and all by this one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._fail(error)

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ""
        return f"<{type(self).__name__} rank {self.rank} of {self.world_size}{state}>"


def _nbytes_of(form: Form) -> int:
    nbytes = math.prod(form.shape) * form.dtype.itemsize
    if nbytes > sys.maxsize:
        raise OutOfMemory(f"an array of {nbytes >> 20} MiB is beyond all address space")
    return nbytes


def _check_int64(value: Any, name: str, expected: str) -> int:
    number = as_index(value)
    if number is None or not _NO_COLOR < number < 1 << 63:
        fact = "" if number is None else " of at most 64 bits"
        raise InvalidArgument(
            f"split_by: {name} must be {expected}{fact}, got {value!r}", got=value
        )
    return number


_native.set_hooks(
    no_thread=failures.no_thread,
    nested=lambda backend, kind, outer: failures.nested(kind, outer, backend.rank),
    out_of_memory=lambda text, nbytes: OutOfMemory(text, nbytes=nbytes or None),
)

# Children of fork() must not use these; a flag set at fork costs nothing per call.
_OPEN: weakref.WeakSet[Backend] = weakref.WeakSet()


def _mark_forked() -> None:
    for backend in _OPEN:
        backend.is_forked = True


os.register_at_fork(after_in_child=_mark_forked)
