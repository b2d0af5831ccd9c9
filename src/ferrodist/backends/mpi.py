# SPDX-License-Identifier: MIT OR Apache-2.0
"""MpiBackend: ranks of MPI, by mpi4py. ``docs/engines.md`` says what MPI does, what schedules do.

A group is two communicators: one for messages, and one for collectives, which is revoked when a
rank is lost (ULFM) while those left go on talking.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NoReturn, Self

from ferrodist import _native
from ferrodist.backends.deferred import DeferredBackend
from ferrodist.backends.mpi_calls import (
    AUTOMATIC,
    LARGEST_COUNT,
    MPI,
    EngineCall,
    does,
    find_op,
    make_call,
)
from ferrodist.backends.peers import describe_difference
from ferrodist.backends.provider import RankStatus
from ferrodist.backends.provider_link import CONTROL_TAG, EAGER_NBYTES
from ferrodist.backends.registry import program_end
from ferrodist.backends.running_call import CollectiveArgs
from ferrodist.buffer import Buffer, DType
from ferrodist.call import Kind
from ferrodist.config import Config, variable
from ferrodist.deadline import Deadline
from ferrodist.errors import InvalidArgument, InvalidRank, RendezvousError
from ferrodist.reduce_op import ReduceOp
from ferrodist.rendezvous import Job
from ferrodist.rendezvous.exchange import check_mpi_world

logger = logging.getLogger("ferrodist")

_NUM_TAGS = 16  # those of the base; above them are those of MPI_Comm_create_group
_SPINS = 2000  # looks at a request before the thread sleeps between them
_FIRST_NAP, _LAST_NAP = 5e-5, 1e-3  # seconds
_LONGEST_NAP = 0.05  # seconds between looks at sends that nobody waits for
_STATUS_AGE = 0.02  # seconds for which it is believed who lives
_EXIT_SECONDS = 2.0  # for messages that are on their way when the program ends
_LARGEST = (1 << 31) - 1  # bytes that all MPIs send at once
_BLOCK = 1 << 30
_LOST = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)


class MpiRequest:
    """Requests of MPI as one, and what is left to do when they are done.

    MPI may write into their memory as long as they are not: ``kept`` lives until then.
    """

    __slots__ = ("_finish", "_is_receive", "_kept", "_nap", "_peer", "_requests", "_spins")

    def __init__(
        self,
        requests: list[Any],
        kept: object,
        peer: int | None = None,
        finish: Any = None,
        is_receive: bool = False,
    ) -> None:
        self._requests, self._kept, self._peer = requests, kept, peer
        self._finish, self._is_receive = finish, is_receive
        self._spins, self._nap = _SPINS, _FIRST_NAP

    def test(self) -> bool:
        """Tell whether all are done; lets MPI advance them."""
        requests = self._requests
        while requests:
            try:
                if not requests[-1].Test():
                    return False
            except MPI.Exception as error:
                if error.Get_error_class() in _LOST:
                    raise lost(error, self._peer) from error
                if error.Get_error_class() != MPI.ERR_TRUNCATE:  # what did not fit is dropped
                    raise
            requests.pop()
            if not requests:
                self._end()
        return True

    def _end(self) -> None:
        self._kept = None
        if self._finish is not None:
            self._finish()

    def wait(self, seconds: float) -> None:
        """Wait until they are done, or for a while: first awake, for MPI advances only in calls."""
        end = time.monotonic() + seconds
        if _native.is_progress_thread():
            self._spins = 0
        while not self.test() and time.monotonic() < end:
            if self._spins > 0:
                self._spins -= 1
                os.sched_yield()
            else:
                time.sleep(self._nap)
                self._nap = min(2 * self._nap, _LAST_NAP)

    def cancel(self) -> bool:
        """Give them up. MPI only cancels receives: the rest keeps its memory until it is done."""
        if not self._requests:
            return False
        if self._is_receive:
            return self._cancel_receive()
        _unfinished.keep(self)
        return True

    def _cancel_receive(self) -> bool:
        status = MPI.Status()
        (request,) = self._requests
        try:
            request.Cancel()
            request.Wait(status)
        except MPI.Exception:  # its peer is gone, and so is the request
            self._requests.clear()
            return True
        self._requests.clear()
        return bool(status.Is_cancelled())


class _Done:
    """A send whose memory may change: MPI has it, or a copy of ours is on its way."""

    def test(self) -> bool:
        return True

    def cancel(self) -> bool:
        return False


_DONE = _Done()


def lost(error: Exception, peer: int | None) -> ConnectionError:
    """Make what the base takes for a rank that is gone; without its number if it is not known."""
    return ConnectionError(str(error)) if peer is None else ConnectionError(peer)


class _Closed:
    """The communicators of a group that this rank has left.

    MPI gives their numbers to new ones: so they are freed when nobody sends anything more, and
    stay for ever if a message was never received. MPI_Comm_free is a collective in name only: in
    MPICH and Open MPI it waits for nobody, and what is in flight ends as usual.
    """

    def __init__(self, comms: tuple[Any, ...], is_over: Callable[[], bool]) -> None:
        self._comms, self._is_over = comms, is_over

    def test(self) -> bool:
        """Free them if the time has come; tell whether it has."""
        if not self._is_over():
            return False
        if not self._comms[0].Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG):
            for comm in self._comms:
                comm.Free()
        return True


class _Unfinished:
    """What nobody waits for any more: sends on their way, what was given up, groups that were left.

    A thread advances them if MPI allows it; else any call does that sends.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._requests: list[MpiRequest | _Closed] = []
        self._thread: threading.Thread | None = None
        atexit.register(self._finish)

    def keep(self, request: MpiRequest | _Closed) -> None:
        """Hold a request and its memory until it is done."""
        self.advance()
        with self._lock:
            self._requests.append(request)
            if self._thread is None and has_threads():
                self._thread = threading.Thread(target=self._run, name="ferrodist-mpi", daemon=True)
                self._thread.start()

    def advance(self) -> bool:
        """Let MPI advance them; tell whether any is left."""
        with self._lock:
            for one in list(self._requests):  # a signal handler may add to it
                if (MPI.Is_finalized() or _is_over(one)) and one in self._requests:
                    self._requests.remove(one)
            return bool(self._requests)

    def _run(self) -> None:
        nap = _FIRST_NAP
        while True:
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)
            self.advance()
            with self._lock:
                if not self._requests:
                    self._thread = None
                    return

    def _finish(self) -> None:
        """At the end of the program: give messages a moment, no more; MPI then drops them.

        Those by which the others leave are among them: UCX prints a warning for each that is not
        received, on every rank.
        """
        end = time.monotonic() + _EXIT_SECONDS
        while self.advance() and time.monotonic() < end:
            time.sleep(_LAST_NAP)


def _is_over(request: MpiRequest | _Closed) -> bool:
    try:
        return request.test()
    except (ConnectionError, MPI.Exception):
        return True


_unfinished = _Unfinished()


def has_threads() -> bool:
    """Tell whether several threads may call MPI at once."""
    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


# -- the engine ------------------------------------------------------------------------------------


class MpiEngine:
    """One rank of a group; ``hosts`` names the host of each of its ranks."""

    def __init__(self, comm: Any, collectives: Any, hosts: Sequence[str]) -> None:
        self._comm, self._collectives, self._hosts = comm, collectives, hosts
        self.rank, self.world_size = comm.Get_rank(), comm.Get_size()
        for one in (comm, collectives):
            one.Set_errhandler(MPI.ERRORS_RETURN)
        self.has_threads = has_threads()
        self.is_awaited = False
        self._num_splits = itertools.count()  # of which this rank is the first member
        self._looked_at = 0.0
        self._lost: frozenset[int] = frozenset()

    @cached_property
    def local_rank(self) -> int:
        """This rank's number among those on its host."""
        return list(self._hosts[: self.rank]).count(self._hosts[self.rank])

    @cached_property
    def local_world_size(self) -> int:
        """How many ranks of the group are on its host."""
        return list(self._hosts).count(self._hosts[self.rank])

    # -- collectives ----------------------------------------------------------------------------

    def start_minimum(self, words: memoryview) -> MpiRequest:
        """Start the exchange of an entry."""
        try:
            request = self._collectives.Iallreduce(MPI.IN_PLACE, [words, MPI.INT64_T], MPI.MIN)
        except MPI.Exception as error:
            self._raise_lost(error)
        return MpiRequest([request], words)

    def collective(
        self,
        kind: Kind,
        input: Buffer | None,
        output: Buffer | None,
        args: CollectiveArgs,
        deadline: Deadline,
    ) -> Any:
        """Do a collective that MPI does as we promise; it blocks."""
        call = self._make_call(kind, input, output, args)
        if call is None:
            return NotImplemented
        with self._naming():
            methods = [(getattr(self._collectives, name), rest) for name, rest in call.parts]
            interrupt = None
            self.is_awaited = False
            for method, arguments in methods:
                try:
                    method(*arguments)
                except KeyboardInterrupt as error:  # when this part was done: others do the next
                    interrupt = error
            if interrupt is not None:
                raise interrupt
        if call.finish is not None:
            call.finish()
        return None

    def start(
        self, kind: Kind, input: Buffer | None, output: Buffer | None, args: CollectiveArgs
    ) -> Any:
        """Start the same."""
        call = self._make_call(kind, input, output, args)
        if call is None:
            return NotImplemented
        with self._naming():
            requests = [
                getattr(self._collectives, f"I{name.lower()}")(*arguments)
                for name, arguments in call.parts
            ]
        request = MpiRequest(requests, (input, output, call), finish=call.finish)
        if not requests and call.finish is not None:
            call.finish()
        return request

    def does(self, kind: Kind, dtype: DType, args: CollectiveArgs) -> bool:
        """Tell whether MPI does this as we promise."""
        return does(kind, dtype, args, self.world_size)

    def bind(
        self, kind: Kind, dtype: DType, shape: tuple[int, ...], args: CollectiveArgs
    ) -> Callable[[Any, Any, bool], None] | None:
        """Return the call of mpi4py on arrays as they are, for the kinds that are called most."""
        comm, is_root = self._collectives, self.rank == args.root
        is_plain = math.prod(shape) <= LARGEST_COUNT and dtype in AUTOMATIC
        op = MPI.SUM
        if kind.is_reduction:
            op = find_op(kind, dtype, args.op, args.in_order, self.world_size)
            is_plain = is_plain and args.op is not ReduceOp.MEAN

        def allreduce(x: Any, out: Any, in_place: bool) -> None:
            source = MPI.IN_PLACE if in_place else x
            self.is_awaited = False  # from here on nothing interrupts
            try:
                comm.Allreduce(source, out, op)
            except MPI.Exception as error:
                self._raise_lost(error)

        def broadcast(x: Any, out: Any, in_place: bool) -> None:
            self.is_awaited = False
            try:
                comm.Bcast(x if is_root else out, args.root)
            except MPI.Exception as error:
                self._raise_lost(error)
            if is_root and not in_place:
                out[...] = x

        def barrier(x: Any, out: Any, in_place: bool) -> None:
            with self._naming():
                comm.Barrier()

        if kind is Kind.BARRIER:
            return barrier
        if not is_plain:
            return None
        return {Kind.ALLREDUCE: allreduce, Kind.BROADCAST: broadcast}.get(kind)

    def _make_call(
        self, kind: Kind, input: Buffer | None, output: Buffer | None, args: CollectiveArgs
    ) -> EngineCall | None:
        return make_call(kind, input, output, args, self.rank, self.world_size)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Make ConnectionError of what ULFM raises."""
        try:
            yield
        except MPI.Exception as error:
            self._raise_lost(error)

    def _raise_lost(self, error: Any) -> NoReturn:
        if error.Get_error_class() not in _LOST:
            raise error
        raise lost(error, min(self._find_lost(), default=None)) from error

    # -- messages -------------------------------------------------------------------------------

    def isend(self, data: memoryview, peer: int, tag: int) -> MpiRequest | _Done:
        """Send bytes."""
        is_small = len(data) <= EAGER_NBYTES
        kept: Any = bytes(data) if is_small else data
        made = MpiRequest([_start(self._comm.Isend, kept, peer, tag)], kept, peer)
        if not is_small:
            return made
        if not made.test():
            _unfinished.keep(made)
        return _DONE

    def irecv(self, memory: memoryview, peer: int, tag: int) -> MpiRequest:
        """Receive the next message of a rank with this tag."""
        request = _start(self._comm.Irecv, memory, peer, tag)
        return MpiRequest([request], memory, peer, is_receive=True)

    def iprobe(self, peer: int, tag: int) -> int | None:
        """Return the length of the next message; None if none came."""
        status = MPI.Status()
        try:
            if not self._comm.Iprobe(peer, tag - CONTROL_TAG, status):
                return None
        except MPI.Exception as error:
            if error.Get_error_class() in _LOST:
                return None  # what it had sent before is gone with it
            raise
        return int(status.Get_elements(MPI.BYTE))

    def has_message(self, tag: int) -> bool:
        """Tell whether anybody has sent something with this tag that nobody receives."""
        try:
            return bool(self._comm.Iprobe(MPI.ANY_SOURCE, tag - CONTROL_TAG))
        except MPI.Exception:
            return True  # a rank is lost: each is asked

    # -- groups and ends ------------------------------------------------------------------------

    def propose_split(self, lost: set[int]) -> bytes:
        """Tell which ranks are lost, and a tag for MPI_Comm_create_group.

        Open MPI sends its messages on the communicator of the parent like those of users: no tag
        of ours, and not that of another split that some member is in at the same time. That of the
        first member is taken: it has not given it away before, nor has anybody else.
        """
        lost = lost | self._find_lost()
        flags = bytes(rank in lost for rank in range(self.world_size))
        largest = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB))
        tag = next(self._num_splits) * self.world_size + self.rank
        return bytes(flags + (_NUM_TAGS + tag % (largest - _NUM_TAGS)).to_bytes(4, "little"))

    def split(self, ranks: Sequence[int], told: Sequence[bytes] = ()) -> MpiEngine:
        """Make a group of some ranks of this one; after a loss first of all that are left."""
        size = self.world_size
        gone = {rank for one in told for rank in range(size) if one[rank]}
        self._lost |= gone
        with self._naming():
            if gone:
                comm = self._shrink(ranks, gone)
            else:
                own = self._comm.Get_group()
                group = own.Incl(list(ranks))
                comm = self._comm.Create_group(group, int.from_bytes(told[0][size:], "little"))
                own.Free()
                group.Free()
            return MpiEngine(comm, comm.Dup(), [self._hosts[rank] for rank in ranks])

    def _shrink(self, ranks: Sequence[int], gone: set[int]) -> Any:
        left = [rank for rank in range(self.world_size) if rank not in gone]
        if sorted(ranks) != left:
            raise InvalidRank(
                f"split({list(ranks)}): after the loss of {sorted(gone)} MPI first makes a "
                f"group of all ranks that are left: split({left}), and from that further",
                this_rank=self.rank,
            )
        shrunk = self._comm.Shrink()
        comm = shrunk.Split(0, list(ranks).index(self.rank))
        shrunk.Free()
        return comm

    def abort(self, reason: str) -> None:
        """Let collectives that wait for a lost rank raise; without ULFM there are none."""
        if self._find_lost() and not self._collectives.Is_revoked():
            self._collectives.Revoke()

    def close(self) -> None:
        """Leave; the communicators stay until all have left."""

    def free_after(self, is_over: Callable[[], bool]) -> None:
        """Free the communicators when all have left."""
        _unfinished.keep(_Closed((self._comm, self._collectives), is_over))

    def status(self, rank: int) -> RankStatus:
        """Tell whether a rank is lost, as far as MPI knows."""
        if time.monotonic() > self._looked_at + _STATUS_AGE:
            self._find_lost()
        return "lost" if rank in self._lost else "unknown"

    def _find_lost(self) -> frozenset[int]:
        """Ask MPI which ranks have failed; one without fault tolerance never says any."""
        self._looked_at = time.monotonic()
        try:
            failed = self._comm.Get_failed()
            if failed.Get_size():
                own = self._comm.Get_group()
                self._lost |= frozenset(failed.Translate_ranks(None, own))
                own.Free()
            failed.Free()
        except (NotImplementedError, MPI.Exception):
            pass
        return self._lost


def _start(call: Any, data: memoryview | bytes, peer: int, tag: int) -> Any:
    """Start to send or receive bytes, however many."""
    try:
        if len(data) <= _LARGEST:
            return call([data, MPI.BYTE], peer, tag - CONTROL_TAG)
        blocks, rest = divmod(len(data), _BLOCK)
        block = MPI.BYTE.Create_contiguous(_BLOCK)
        whole = MPI.Datatype.Create_struct([blocks, rest], [0, blocks * _BLOCK], [block, MPI.BYTE])
        whole.Commit()
        try:
            return call([data, 1, whole], peer, tag - CONTROL_TAG)
        finally:
            block.Free()
            whole.Free()
    except MPI.Exception as error:
        if error.Get_error_class() in _LOST:
            raise lost(error, peer) from error
        raise


# -- joining ---------------------------------------------------------------------------------------


class MpiBackend(DeferredBackend):
    """The ranks of an MPI job, or of a communicator of mpi4py's."""

    finds_its_job = True  # by MPI itself

    @classmethod
    def join(cls, job: Job | None, *, config: Config) -> Self:
        """Join the world of MPI; ``job`` is what the launcher says, if it says anything."""
        _start_mpi()
        check_mpi_world(job, MPI)
        return cls._open(MPI.COMM_WORLD, config)

    @classmethod
    def from_comm(cls, comm: Any, config: Config | None = None) -> Self:
        """Make a backend of a communicator; all its ranks call it.

        It has communicators of its own: what the program does with ``comm`` stays apart.
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
        made = cls._open(comm, Config.from_environment() if config is None else config)
        program_end.watch(made)
        return made

    @classmethod
    def _open(cls, comm: Any, config: Config) -> Self:
        if config.tls:
            raise InvalidArgument(
                f"{variable('tls')}=1: what MPI sends is not encrypted by ferrodist; unset it, or "
                "use another backend"
            )
        deadline = Deadline(config.join_timeout)
        copies: list[Any] = []
        for _ in range(2):
            copy, request = comm.Idup()
            _wait_for_all(request, comm, deadline)
            copies.append(copy)
        told = _gather(copies[1], {"host": MPI.Get_processor_name(), **config.shared()}, deadline)
        hosts = [str(one.pop("host")) for one in told]
        difference = describe_difference(told)
        if difference:
            raise InvalidArgument(f"{difference}; set it to the same on all ranks")
        return cls(MpiEngine(copies[0], copies[1], hosts), config)


def _start_mpi() -> None:
    """See that MPI runs, and say what is lost where it allows no threads."""
    if MPI.Is_finalized():
        raise InvalidArgument("backend 'mpi': MPI was finalized, and cannot be started again")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if not has_threads():
        logger.warning(
            "MPI was initialised without MPI_THREAD_MULTIPLE: only the main thread may "
            "communicate, and calls with async_op=True run when they are waited for"
        )


def _wait_for_all(request: Any, comm: Any, deadline: Deadline) -> None:
    while not request.Test():
        if deadline.remaining() <= 0:
            raise RendezvousError(
                f"not all {comm.Get_size()} ranks of the communicator came within {deadline} "
                "(FERRODIST_JOIN_TIMEOUT), and MPI does not say which; look at their output",
                this_rank=comm.Get_rank(),
            )
        time.sleep(_FIRST_NAP)


def _gather(comm: Any, facts: dict[str, Any], deadline: Deadline) -> list[dict[str, Any]]:
    """Gather what each rank has to tell."""
    own = json.dumps(facts).encode()
    lengths = memoryview(bytearray(8 * comm.Get_size())).cast("q")
    mine = memoryview(bytearray(len(own).to_bytes(8, "little"))).cast("q")
    request = comm.Iallgather([mine, MPI.INT64_T], [lengths, MPI.INT64_T])
    _wait_for_all(request, comm, deadline)
    everything = bytearray(sum(lengths))
    request = comm.Iallgatherv([own, MPI.BYTE], [everything, list(lengths), MPI.BYTE])
    _wait_for_all(request, comm, deadline)
    ends = [sum(lengths[: rank + 1]) for rank in range(len(lengths))]
    texts = [everything[end - n : end] for end, n in zip(ends, lengths, strict=True)]
    return [json.loads(text) for text in texts]
