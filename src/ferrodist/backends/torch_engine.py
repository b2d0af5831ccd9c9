# SPDX-License-Identifier: MIT OR Apache-2.0
"""TorchDistributedBackend: the engines of torch, Gloo and NCCL. See ``docs/engines.md``.

It is a HybridBackend: ranks meet, compare their calls and send messages over ferrodist's own
connections and memory, so that errors name the rank that differs, is late or is lost. Once all
ranks are known to be in a call, the engine runs it, if its result meets our guarantees.
"""

from __future__ import annotations

import contextlib
import time
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, NoReturn, Self, cast

from ferrodist._native import Status
from ferrodist.arrays import as_input, as_output
from ferrodist.backends.engine_path import BoundCall, call_path
from ferrodist.backends.failures import LeaveReason, StatusCode
from ferrodist.backends.hybrid import HybridBackend
from ferrodist.backends.receive import Receive
from ferrodist.backends.registry import program_end
from ferrodist.backends.running_call import NO_ARGS, CollectiveArgs, RunningCall
from ferrodist.backends.torch_calls import FOREVER, Caller, EngineCall, torch
from ferrodist.buffer import Buffer, DeviceBuffer, DType
from ferrodist.call import MAX_TAG, Call, Kind, caller_site
from ferrodist.config import Config, DefaultTimeout, variable
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendUnavailable, DistributedError, InvalidArgument, RendezvousError
from ferrodist.reduce_op import CustomOp
from ferrodist.rendezvous import Job
from ferrodist.rendezvous.exchange import first_line
from ferrodist.rendezvous.job import Launcher
from ferrodist.rendezvous.torch_store import job_at_store, open_store, torch_timeout
from ferrodist.schedules import Lengths

CARRIED_NBYTES = 64 * 1024
"""Up to here the exchange before a call carries the array, and the engine has nothing to do."""

CARRIED_ON_ONE_HOST = 4 * 1024 * 1024
"""The same if all ranks share memory, which is several times as fast as Gloo.

Above it the check takes less than a tenth of Gloo's time, and the engine is what was asked for.
"""

_c10d = torch.distributed.distributed_c10d
_NUMBERS = (bool, int, float, complex)
_MANY = 1 << 62
_STORE_TAG = MAX_TAG + 3  # no user's: of the message that says where the store is
_STORE_NBYTES = 256
_LOOK = timedelta(milliseconds=20)  # between two looks at the other ranks, while the engine works
_EXPLAIN_SECONDS = 5.0  # until it is known which rank is gone when the engine has failed
_NAP = 1e-3
_FROM_GROUP = Launcher(
    name="TorchDistributedBackend.from_process_group",
    rank="rank",
    world_size="world_size",
    job="the store of the group",
    start="let all {size} ranks of the group call from_process_group",
)


class TorchDistributedBackend(HybridBackend):
    """Ranks whose collectives run on torch.distributed: Gloo on the host, NCCL on GPUs.

    Made by ``ferrodist.init("gloo")``, ``ferrodist.init("nccl")`` or ``from_process_group``.
    """

    _has_nccl = False
    _device_engine = "nccl"
    engine: Caller | None = None  # of arrays of the host
    _gpu_engine: Caller | None = None
    _entry: Any = None  # the program of the exchange before a call
    num_engine_calls = 0  # collectives that the engine has run; ferrodist's own ran all others

    # -- joining --------------------------------------------------------------------------------

    @classmethod
    def join(cls, job: Job, *, config: Config | None = None) -> Self:
        """Connect to the other ranks of the job, without touching torch's default group."""
        if cls._has_nccl:
            _check_nccl()
        return cls._join(job, Config.from_environment() if config is None else config)

    @classmethod
    def _join(cls, job: Job, config: Config, host: Any = None, gpus: Any = None) -> Self:
        if config.tls:
            raise InvalidArgument(
                f"{variable('tls')}=1: what Gloo sends is not encrypted by ferrodist; unset it, or "
                "use another backend"
            )
        made = super().join(job, config=config)
        try:
            made._open_engines(host, gpus, Deadline(config.join_timeout))
        except BaseException as error:  # Ctrl-C too: the others wait for this rank
            made._fail(error)
            raise
        return made

    @staticmethod
    def from_process_group(
        process_group: Any, config: Config | None = None
    ) -> TorchDistributedBackend:
        """Make a backend from a process group of torch.distributed; all its ranks call it.

        Collectives run on the group: on its Gloo for host arrays, on its NCCL for CUDA tensors. The
        program's calls on the group and the backend's must come in the same order on all ranks.
        Everything else uses ferrodist's own connections. ``close()`` leaves the group to the
        program.

        Raises InvalidArgument if this is no process group, or one without Gloo and NCCL, and
        RendezvousError naming the ranks that have not called it by ``Config.join_timeout``.

        Example:
            >>> import torch.distributed as dist
            >>> from ferrodist import TorchDistributedBackend as Backend
            >>> dist.init_process_group("gloo")  # doctest: +SKIP
            >>> backend = Backend.from_process_group(dist.group.WORLD)  # doctest: +SKIP
        """
        config = Config.from_environment() if config is None else config
        if not isinstance(process_group, torch.distributed.ProcessGroup):
            name = type(process_group).__name__
            text = f"from_process_group: expected a group of torch.distributed, got {name}"
            raise InvalidArgument(text, got=name)
        host, gpus = _find_engine(process_group, "cpu"), _find_engine(process_group, "cuda")
        if host is None and gpus is None:
            found = process_group.name()
            text = f"from_process_group: expected a group of gloo or nccl, got one of {found}"
            raise InvalidArgument(text, got=found)
        deadline = Deadline(config.join_timeout)
        store, place = _store_of(process_group), (process_group.rank(), process_group.size())
        job, _ = job_at_store(store, *place, _FROM_GROUP, config, deadline)
        kind = GlooBackend if gpus is None else NcclBackend
        made = kind._join(job, config, host, gpus)
        program_end.watch(made)
        return made

    def _complete(self, parent: Self, identity: int, deadline: Deadline) -> None:
        super()._complete(parent, identity, deadline)
        if isinstance(deadline.seconds, DefaultTimeout):  # it may be over: ranks were waited for
            deadline = Deadline(self.config.join_timeout)
        self._open_engines(None, None, deadline)

    def _open_engines(self, host: Any, gpus: Any, deadline: Deadline) -> None:
        """Make process groups of torch's of the members, where none are given."""
        self._is_own = (host is None, gpus is None)
        self.bound_calls: dict[tuple[Any, ...], BoundCall | None] = {}
        place = (self.rank, self.world_size)
        try:
            store = None
            if host is None or (gpus is None and self._has_nccl):
                store = self._open_store(deadline)
            host = self._new_gloo_group(store, deadline) if host is None else host
            if gpus is None and self._has_nccl:
                options = _c10d.ProcessGroupNCCL.Options()
                options._timeout = FOREVER  # deadlines are ours
                nccl_store = torch.distributed.PrefixStore("nccl", store)
                gpus = _c10d.ProcessGroupNCCL(nccl_store, *place, options)
        except RuntimeError as error:  # torch has no narrower class
            if isinstance(error, DistributedError):
                raise
            raise RendezvousError(
                f"rank {self.rank} could not connect by Gloo at {self.own_address}: "
                f"{first_line(error)}{self.group_name}",
                this_rank=self.rank,
            ) from error
        self._await_all(deadline)
        self.engine = Caller(host, *place, on_device=False)
        self._gpu_engine = None if gpus is None else Caller(gpus, *place, on_device=True)

    def _open_store(self, deadline: Deadline) -> Any:
        if self.world_size == 1:
            return torch.distributed.HashStore()

        def share(told: str) -> str:
            if self.rank:
                return self._hear(0, deadline)
            for peer in range(1, self.world_size):
                self._tell(peer, told, deadline)
            return told

        return open_store(lambda: self.own_address, self.rank == 0, share, deadline)

    def _await_all(self, deadline: Deadline) -> None:
        """Let rank 0 wait for all ranks: it may not leave while they need its store."""
        if self.rank:
            self._tell(0, "", deadline)
        else:
            for peer in range(1, self.world_size):
                self._hear(peer, deadline)

    def _tell(self, peer: int, text: str, deadline: Deadline) -> None:
        message = as_input(text.encode().ljust(_STORE_NBYTES))
        self._send(message, peer, _STORE_TAG, deadline)

    def _hear(self, peer: int, deadline: Deadline) -> str:
        target = as_output(bytearray(_STORE_NBYTES), DType.UINT8, (_STORE_NBYTES,))
        found: bytearray = self._recv(Receive(peer, _STORE_TAG, target), deadline)
        return found.decode().rstrip()

    def _new_gloo_group(self, store: Any, deadline: Deadline) -> Any:
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=self.own_address)]
        options._threads = 2
        options._timeout = torch_timeout(deadline)
        gloo_store = torch.distributed.PrefixStore("gloo", store)
        return _c10d.ProcessGroupGloo(gloo_store, self.rank, self.world_size, options)

    def _leave(self, leave_reason: LeaveReason, deadline: Deadline) -> None:
        has_failed = self.error_of(None) is not None
        super()._leave(leave_reason, deadline)
        host, gpus = self.engine, self._gpu_engine
        self.engine = self._gpu_engine = None
        self.bound_calls.clear()
        if host is not None and self._is_own[0] and has_failed:
            _hang_up(host.group, self.rank)  # torch waits for its calls when the group is dropped
        if gpus is not None and self._is_own[1]:
            gpus.group.abort() if has_failed else gpus.group.shutdown()

    # -- collectives ----------------------------------------------------------------------------

    def _take_fast_path(self, group: Any) -> None:
        if not self.config.check_sites:
            self._call_path, self._start_path = cast(Any, _call_path), _start_path

    def carries(self, nbytes: int) -> bool:
        """Tell whether the exchange before a call carries an array of this size."""
        is_one_host = len(self.host_map.hosts) == 1
        limit = CARRIED_ON_ONE_HOST if is_one_host else CARRIED_NBYTES
        return self.config.check and nbytes <= limit

    @property
    def _device(self) -> str:  # type: ignore[override]  # a constant in the base
        return "" if self._gpu_engine is None else "cuda"

    def _runs_on_device(self, kind: Kind, dtype: DType, args: CollectiveArgs) -> bool:
        return self._gpu_engine is not None and self._gpu_engine.does(kind, dtype, args)

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
        is_on_device = isinstance(sample, DeviceBuffer)
        engine = self._gpu_engine if is_on_device else self.engine
        is_even = args.counts is None and not is_on_device
        if (
            engine is None
            or sample is None
            or not engine.does(kind, sample.dtype, args)
            or (is_even and self.carries(sample.nbytes))  # of the same size on all ranks
        ):
            self._run_by_messages(running, kind, input, output, args)
            return
        if self.config.check or not _is_plain(running.call):
            self._enter(running)
        with _using(getattr(sample, "stream", None)):
            self._await_engine(running, engine.start(kind, input, output, args), is_on_device)

    def _run_by_messages(self, running: RunningCall, kind: Kind, *rest: Any) -> None:
        super()._run_collective(running, kind, *rest)

    def run_bound(
        self, running: RunningCall, bound: BoundCall, x: Any, out: Any, in_place: bool
    ) -> None:
        """Run a call of the fast path on the engine, once all ranks are in it; for host arrays."""
        running.num_collectives += 1
        if self.config.check:
            self._enter(running)
        assert bound.run is not None
        started: Any = bound.run(x, out, in_place)
        self._await_engine(running, started, is_on_device=False)

    def _enter(self, running: RunningCall) -> None:
        """Wait until all ranks have come, with the same call."""
        if self._entry is None:
            lengths = Lengths(0)
            self._entry = self._program(Kind.BARRIER, DType.UINT8, lengths, NO_ARGS, None, None)
        status = self._two_levels.execute(
            self._entry,
            None,
            None,
            running.call.kind,
            running.sequence,
            running.fingerprint,
            running.num_collectives - 1,
            running.deadline,
            running.in_background,
            running.poll,
        )
        self._check(running, status)

    def _await_engine(self, running: RunningCall, call: EngineCall, is_on_device: bool) -> None:
        """Wait for the engine, and look at the other ranks if that lasts."""
        self.num_engine_calls += 1
        if call.work is not None:
            try:  # on a device the stream waits, not the program
                call.work.wait() if is_on_device else call.work.wait(_LOOK)
            except RuntimeError:  # time is up, or it has failed
                self._await_long(running, call.work)
        if call.finish is not None:
            call.finish()

    def _await_long(self, running: RunningCall, work: Any) -> None:
        # All have come, and whether bytes move is not known: time is counted anew, and a limit that
        # nobody has chosen ends nothing that may still be moving.
        deadline = Deadline(running.deadline.late_seconds or running.deadline.seconds)
        try:
            while not work.is_completed():
                self._look(running, deadline)
                with contextlib.suppress(RuntimeError):
                    work.wait(_LOOK)
            try:
                work.wait()
            except RuntimeError as error:
                self._raise_failure(running, error)
        except BaseException:  # Ctrl-C too: the call stays in Gloo
            if self.engine is not None and self._is_own[0]:
                _hang_up(self.engine.group, self.rank)  # else torch waits for it at the end
            raise

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

    def _raise_failure(self, running: RunningCall, error: RuntimeError) -> NoReturn:
        """Raise what an error of the engine means: most often that a rank is gone."""
        end = time.monotonic() + _EXPLAIN_SECONDS
        while time.monotonic() < end:
            self._look(running, Deadline(None))
            for peer in self._gone():
                raise self.failure_of(running, Status(self.loss_of(peer), peer)) from error
            time.sleep(_NAP)
        raise error

    # -- calls of the fast path, which do not know where they were made -------------------------

    def _poll(self, running: RunningCall) -> None:
        _note_site(running)
        super()._poll(running)

    def failure_of(self, running: RunningCall, status: Status) -> BaseException:
        """Return the error for a status, and see that all ranks get the same."""
        _note_site(running)
        return super().failure_of(running, status)


class GlooBackend(TorchDistributedBackend):
    """Gloo for all arrays; those of a device go through host memory."""


class NcclBackend(TorchDistributedBackend):
    """NCCL for CUDA tensors, on their device; Gloo for everything else."""

    _has_nccl = True


def _call_path(
    backend: TorchDistributedBackend, kind: int, x: Any, out: Any, op: Any, root: Any
) -> Any:
    """Do a blocking call on the fast path: in native code, or by the engine."""
    if kind == Kind.BARRIER or backend.carries(_nbytes_of(kind, x)):
        return backend._two_levels.call_path(backend, kind, x, out, op, root)
    run = TorchDistributedBackend.run_bound
    return call_path(cast(Any, backend), kind, x, out, op, root, run)


def _start_path(backend: TorchDistributedBackend, kind: int, x: Any, *rest: Any) -> Any:
    """Start a call on the fast path, if it is done in native code."""
    if backend.carries(_nbytes_of(kind, x)):
        return backend._two_levels.start_path(backend, kind, x, *rest)
    return NotImplemented


def _nbytes_of(kind: int, x: Any) -> int:
    """Return the size of an array on all ranks, or one that is too large if it is not known here.

    It is not known of trees, nor in scatter, where only the root has the whole.
    """
    if kind == Kind.SCATTER:
        return _MANY
    if x is None or type(x) in _NUMBERS:
        return 0
    try:
        nbytes = x.nbytes
    except (AttributeError, RuntimeError):  # the latter of sparse tensors
        return _MANY
    return nbytes if type(nbytes) is int else _MANY


def _note_site(running: RunningCall) -> None:
    if running.call.site is None:
        running.call = running.call._replace(site=caller_site())


def _is_plain(call: Call) -> bool:
    """Tell whether a call is one collective of arrays, in which no rank finds faults on its own."""
    is_one = call.kind <= Kind.EXSCAN and call.kind is not Kind.SCATTER
    return is_one and not isinstance(call.op, CustomOp)


def _using(stream: Any) -> AbstractContextManager[Any]:
    """Make a stream of a device the current one, if there is one."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _hang_up(process_group: Any, rank: int) -> None:
    """Close the connections of a Gloo group, so that all that waits in it ends.

    Gloo has no call for that, but a receive that times out does it.
    """
    nothing = torch.empty(1, dtype=torch.uint8)
    for peer in range(process_group.size()):
        if peer != rank:  # one whose process is gone raises at once, and closes nothing
            with contextlib.suppress(RuntimeError):
                process_group.recv([nothing], peer, 0).wait(timedelta(milliseconds=1))


def _check_nccl() -> None:
    if not torch.distributed.is_nccl_available():
        raise BackendUnavailable(
            f"backend 'nccl' needs a torch that was built with NCCL, and this is torch "
            f"{torch.__version__}: install one for CUDA, or use backend 'gloo'"
        )
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            "backend 'nccl' needs a GPU, and torch finds none: 'ferrodist doctor' says what it "
            "sees; on CPUs use backend 'gloo'"
        )


def _find_engine(process_group: Any, device: str) -> Any:
    """Return the part of a group that serves a device, if it is one we know."""
    try:
        found = process_group._get_backend(torch.device(device))
    except RuntimeError:
        return None
    return found if found.name() == {"cpu": "gloo", "cuda": "nccl"}[device] else None


def _store_of(process_group: Any) -> Any:
    if hasattr(process_group, "get_group_store"):
        return process_group.get_group_store()
    return _c10d._world.pg_map[process_group][1]
