# SPDX-License-Identifier: MIT OR Apache-2.0
"""MpiBackend: the collectives of MPI, by mpi4py. See ``docs/engines.md``.

Its ranks meet through MPI, which also carries the job's secret from rank 0 to the others. After
that MPI only runs collectives, always those that can be polled: one that never ends is given up.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Self

from ferrodist import _native
from ferrodist.backends.engines.engine import EngineBackend, EngineFailure, refuse_tls
from ferrodist.backends.engines.mpi_calls import MPI, Plan, bind, does, plan_call
from ferrodist.backends.failures import names_of_ranks
from ferrodist.backends.registry import program_end
from ferrodist.backends.running_call import CollectiveArgs
from ferrodist.buffer import Buffer, DType
from ferrodist.call import Kind
from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.errors import InvalidArgument, RendezvousError
from ferrodist.rendezvous import Job
from ferrodist.rendezvous.exchange import MpiExchange, check_mpi_world
from ferrodist.rendezvous.job import SECRET_NBYTES, Launcher
from ferrodist.rendezvous.mesh import host_id

logger = logging.getLogger("ferrodist")

_FIRST_NAP, _LAST_NAP = 5e-5, 1e-3  # seconds between looks of a thread that nobody waits for
_FAILED_SECONDS = 1.0  # for MPI to find out about a rank that ferrodist knows to be lost
_SHRINK, _WITHOUT = b"shrink", b"without"  # or the tag of an ordinary split
_LONGEST_DECISION = 16
_MPI = Launcher(
    name="MPI",
    rank="rank",
    world_size="size",
    job="the communicator",
    start="let all {size} ranks of the communicator call it",
)


class Started:
    """A collective that MPI has started: its requests, and what is left to do after them."""

    __slots__ = ("_kept", "_requests", "finish")

    def __init__(self, comm: Any, plan: Plan, kept: object) -> None:
        _unfinished.add(self)  # first: a signal handler may raise at any of the next lines
        self._kept = plan, kept
        self.finish = plan.finish or _nothing
        try:
            self._requests = [getattr(comm, name)(*rest) for name, rest in plan.parts]
        except MPI.Exception as error:
            raise EngineFailure(str(error)) from error

    def wait(self, seconds: float) -> bool:
        """Wait for some seconds; tell whether it is done."""
        requests, end, nap = self._requests, time.monotonic() + seconds, 0.0
        if _native.is_progress_thread():
            nap = _FIRST_NAP
        try:
            while requests:
                if requests[-1].Test():
                    requests.pop()
                elif time.monotonic() > end:
                    return False
                elif nap:
                    time.sleep(nap)
                    nap = min(2 * nap, _LAST_NAP)
                else:  # MPI moves data only in its calls
                    os.sched_yield()
        except MPI.Exception as error:
            raise EngineFailure(str(error)) from error
        _unfinished.discard(self)
        return True

    def abandon(self) -> None:
        """Give it up: MPI cannot take it back."""


def _nothing() -> None:
    pass


# What MPI has not ended keeps its memory here, for good if it was given up.
_unfinished: set[Started] = set()


@cache
def _let_mpi_hold_unfinished() -> None:
    """Keep that memory until MPI is finalized, which is after Python has ended."""
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(), _unfinished)


class MpiEngine:
    """The collectives of one communicator, which is the engine's own."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self._num_splits = itertools.count()  # of which this rank is the first member
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._place = comm.Get_rank(), comm.Get_size()

    def does(self, kind: Kind, dtype: DType, args: CollectiveArgs) -> bool:
        """Tell whether MPI does this as we promise; the answer is the same on all ranks."""
        return does(kind, dtype, args, self._place[1])

    def prepare(
        self, kind: Kind, input: Buffer | None, output: Buffer | None, args: CollectiveArgs
    ) -> Callable[[], Started] | None:
        """Return what starts a collective on buffers; None if schedules do it."""
        plan = plan_call(kind, input, output, args, *self._place)
        return None if plan is None else lambda: Started(self.comm, plan, (input, output))

    def bind(
        self, kind: Kind, dtype: DType, shape: tuple[int, ...], args: CollectiveArgs
    ) -> Callable[[Any, Any, bool], Started] | None:
        """Return what starts such a collective on NumPy arrays, for the most common kinds."""
        plan_of = bind(kind, dtype, shape, args, *self._place)
        if plan_of is None:
            return None
        return lambda x, out, in_place: Started(self.comm, plan_of(x, out, in_place), (x, out))

    def find_failed(self, lost: set[int]) -> set[int]:
        """Wait for MPI to find out that ranks have failed; return all that it knows of.

        Without ULFM it never says any.
        """
        end = time.monotonic() + _FAILED_SECONDS
        while True:
            try:
                self.comm.Iprobe()  # MPI hears of failures in its calls, and not in the next one
                group, own = self.comm.Get_failed(), self.comm.Get_group()
            except (NotImplementedError, MPI.Exception):
                return set()
            found = set(group.Translate_ranks(None, own))
            group.Free()
            own.Free()
            if found >= lost or time.monotonic() > end:
                return found
            time.sleep(_LAST_NAP)

    def next_tag(self) -> int:
        """Return a tag that no other split of some rank of this group has at the same time."""
        rank, size = self._place
        largest = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB))
        tag: int = (next(self._num_splits) * size + rank) % largest
        return tag

    def split(self, members: Sequence[int], tag: int) -> MpiEngine:
        """Make a communicator of some ranks, which are all here."""
        own = self.comm.Get_group()
        group = own.Incl(members)
        comm = self.comm.Create_group(group, tag)
        own.Free()
        group.Free()
        return MpiEngine(comm)

    def shrink(self, rank: int) -> MpiEngine:
        """Make a communicator of all ranks that are left; this one has a given place in it."""
        self.comm.Revoke()  # ends what was given up in it
        shrunk = self.comm.Shrink()
        comm = shrunk.Split(0, rank)
        shrunk.Free()
        return MpiEngine(comm)

    def free(self) -> None:
        """Free the communicator, of which an MPI has some thousand; no rank waits for another."""
        comm, self.comm = self.comm, MPI.COMM_NULL
        if comm != MPI.COMM_NULL and not MPI.Is_finalized():
            comm.Free()


class MpiBackend(EngineBackend):
    """The ranks of an MPI job, or of a communicator of mpi4py's."""

    finds_its_job = True  # by MPI itself
    engine: MpiEngine | None

    @classmethod
    def join(cls, job: Job | None, *, config: Config | None = None) -> Self:
        """Join the world of MPI; ``job`` is what the launcher says, if it says anything."""
        _start_mpi()
        check_mpi_world(job, MPI)
        return cls._open(MPI.COMM_WORLD, config, "ferrodist.init()")

    @classmethod
    def from_comm(cls, comm: Any, config: Config | None = None) -> Self:
        """Make a backend of a communicator; all its ranks call it.

        It has a communicator of its own: what the program does with ``comm`` stays apart.
        """
        if not isinstance(comm, MPI.Comm):
            text = f"from_comm: expected a communicator of mpi4py, got {type(comm).__name__}"
            raise InvalidArgument(text, got=type(comm).__name__)
        _start_mpi()
        if comm == MPI.COMM_NULL:
            raise InvalidArgument("from_comm: the communicator was freed, or is COMM_NULL here")
        if comm.Is_inter():
            raise InvalidArgument(
                "from_comm: expected a communicator within one group, got one "
                "between two; Merge() makes one of them"
            )
        made = cls._open(comm, config, "MpiBackend.from_comm()")
        program_end.watch(made)
        return made

    @classmethod
    def _open(cls, comm: Any, config: Config | None, call: str) -> Self:
        config = Config.from_environment() if config is None else config
        refuse_tls(config)
        deadline = Deadline(config.join_timeout)
        copy, request = comm.Idup()
        while not request.Test():
            if deadline.remaining() <= 0:
                raise RendezvousError(
                    f"not all {comm.Get_size()} ranks of the communicator called {call} within "
                    f"{deadline} (FERRODIST_JOIN_TIMEOUT), and MPI does not say which; look at "
                    "their output",
                    this_rank=comm.Get_rank(),
                )
            time.sleep(_FIRST_NAP)
        engine: MpiEngine | None = MpiEngine(copy)
        try:
            job, has_threads = _describe_job(copy, deadline, call)

            def open_engine(made: Self) -> None:
                nonlocal engine
                if has_threads and engine is not None:
                    made._keep_engine(engine)
                    engine = None  # it is the group's

            return cls._join_with(job, config, open_engine)
        finally:
            if engine is not None:
                engine.free()

    def _keep_engine(self, engine: MpiEngine) -> None:
        """Use an engine, and free it with this group."""
        self._use(engine)
        weakref.finalize(self, _free, engine, self.group).atexit = False  # if it is dropped

    def _split_engine(self, parent: Self, deadline: Deadline) -> None:
        """Make a communicator of the members, in a way on which all of them agree.

        After a loss MPI can only make one of all that are left, with ULFM; other members go on
        without an engine.
        """
        engine, size = parent.engine, parent.world_size
        if engine is None:
            return
        members = [parent.members.index(member) for member in self.members]
        outsiders = set(range(size)).difference(members)
        lost = {peer for peer in parent._gone() if not parent.leave_reason_of(peer).is_normal}
        failed = engine.find_failed(lost)
        own = bytes([bool(lost), *(rank in failed for rank in range(size))])

        def decide(told: Sequence[bytes]) -> bytes:
            failed = {rank for rank in range(size) if any(one[1 + rank] for one in told)}
            if not failed and not any(one[0] for one in told):
                return str(engine.next_tag()).encode()
            return _SHRINK if failed == outsiders else _WITHOUT

        decision = self._agree(own, decide, max(len(own), _LONGEST_DECISION), deadline).rstrip()
        if decision != _WITHOUT:
            is_smaller = decision == _SHRINK
            made = engine.shrink(self.rank) if is_smaller else engine.split(members, int(decision))
            self._keep_engine(made)

    def _close_engine(self, *, has_failed: bool) -> None:
        engine, self.engine = self.engine, None
        if engine is not None and not has_failed:
            engine.free()


def _free(engine: MpiEngine, group: _native.TcpGroup) -> None:
    """Free what a group holds in MPI, unless it failed: then its number must not be used again."""
    if group.group_error(None) is None:
        engine.free()


def _start_mpi() -> None:
    if MPI.Is_finalized():
        raise InvalidArgument("backend 'mpi': MPI was finalized, and cannot be started again")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        atexit.register(_finalize)  # as mpi4py does for an MPI that it starts itself
    _let_mpi_hold_unfinished()


def _finalize() -> None:
    if not MPI.Is_finalized():
        MPI.Finalize()


def _describe_job(comm: Any, deadline: Deadline, call: str) -> tuple[Job, bool]:
    """Describe the ranks of a communicator as a job, and tell whether all may use MPI in threads.

    MPI decides who belongs to it: rank 0's secret, by which the ranks then recognise each other,
    goes to all of them by MPI.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    job = Job(f"mpi-{secrets.token_hex(8)}", rank, size, os.urandom(SECRET_NBYTES), launcher=_MPI)
    exchange = MpiExchange(job, deadline, comm, call)
    has_threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    own = [job.name, job.secret.hex(), host_id(), has_threads]
    facts = [json.loads(record) for record in exchange.gather(json.dumps(own).encode())]
    name, secret, hosts = facts[0][0], bytes.fromhex(facts[0][1]), len({fact[2] for fact in facts})
    without = [rank for rank, fact in enumerate(facts) if not fact[3]]
    if without:
        logger.warning(
            "MPI was initialised without MPI_THREAD_MULTIPLE on %s: ferrodist carries all data "
            "itself, and MPI none",
            names_of_ranks(without),
        )
    where = f"{hosts} hosts" if hosts > 1 else ""
    return replace(job, name=name, secret=secret, hosts=where, exchange=exchange), not without
