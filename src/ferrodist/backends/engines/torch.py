# SPDX-License-Identifier: MIT OR Apache-2.0
"""TorchDistributedBackend: the engines of torch, Gloo and NCCL. See ``docs/engines.md``."""

from __future__ import annotations

from typing import Any, Self

from ferrodist.backends.engines.engine import EngineBackend
from ferrodist.backends.engines.torch_calls import FOREVER, Caller, torch
from ferrodist.backends.registry import program_end
from ferrodist.backends.running_call import CollectiveArgs
from ferrodist.buffer import Buffer, DeviceBuffer, DType
from ferrodist.call import Kind
from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendUnavailable, DistributedError, InvalidArgument, RendezvousError
from ferrodist.rendezvous import Job
from ferrodist.rendezvous.exchange import first_line
from ferrodist.rendezvous.job import Launcher
from ferrodist.rendezvous.torch_store import job_at_store, open_store, torch_timeout

_c10d = torch.distributed.distributed_c10d
_STORE_NBYTES = 256  # of the text that says where the store is
_FROM_GROUP = Launcher(
    name="TorchDistributedBackend.from_process_group",
    rank="rank",
    world_size="world_size",
    job="the store of the group",
    start="let all {size} ranks of the group call from_process_group",
)


class TorchDistributedBackend(EngineBackend):
    """Ranks whose collectives run on torch.distributed: Gloo on the host, NCCL on GPUs.

    Made by ``ferrodist.init("gloo")``, ``ferrodist.init("nccl")`` or ``from_process_group``.
    """

    _has_nccl = False
    _device_engine = "nccl"
    engine: Caller | None = None
    _gpu_engine: Caller | None = None

    # -- joining --------------------------------------------------------------------------------

    @classmethod
    def join(cls, job: Job, *, config: Config | None = None) -> Self:
        """Connect to the other ranks of the job, without touching torch's default group."""
        if cls._has_nccl:
            _check_nccl()
        return cls._join(job, Config.from_environment() if config is None else config)

    @classmethod
    def _join(cls, job: Job, config: Config, host: Any = None, gpus: Any = None) -> Self:
        def open_engines(made: Self) -> None:
            made._open_engines(host, gpus, Deadline(config.join_timeout))

        return cls._join_with(job, config, open_engines)

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

    def _split_engine(self, parent: Self, deadline: Deadline) -> None:
        self._open_engines(None, None, deadline)

    def _open_engines(self, host: Any, gpus: Any, deadline: Deadline) -> None:
        """Make process groups of torch's of the members, where none are given."""
        owns_host, owns_gpus = host is None, gpus is None
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
        # Rank 0 may not leave while the others need its store.
        self._agree(b"", lambda told: b"", _STORE_NBYTES, deadline)
        self._use(Caller(host, *place, on_device=False, is_own=owns_host))
        if gpus is not None:
            self._gpu_engine = Caller(gpus, *place, on_device=True, is_own=owns_gpus)

    def _open_store(self, deadline: Deadline) -> Any:
        if self.world_size == 1:
            return torch.distributed.HashStore()

        def share(told: str) -> str:
            decision = self._agree(b"", lambda _: told.encode(), _STORE_NBYTES, deadline)
            return decision.decode().rstrip()

        return open_store(lambda: self.own_address, self.rank == 0, share, deadline)

    def _new_gloo_group(self, store: Any, deadline: Deadline) -> Any:
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=self.own_address)]
        options._threads = 2
        options._timeout = torch_timeout(deadline)
        gloo_store = torch.distributed.PrefixStore("gloo", store)
        return _c10d.ProcessGroupGloo(gloo_store, self.rank, self.world_size, options)

    def _close_engine(self, *, has_failed: bool) -> None:
        host, gpus = self.engine, self._gpu_engine
        self.engine = self._gpu_engine = None
        if host is not None and host.is_own and has_failed:
            host.hang_up()  # torch waits for its calls when the group is dropped
        if gpus is not None and gpus.is_own:
            gpus.group.abort() if has_failed else gpus.group.shutdown()

    # -- tensors on a device --------------------------------------------------------------------

    @property
    def _device(self) -> str:  # type: ignore[override]  # a constant in the base
        return "" if self._gpu_engine is None else "cuda"

    def _runs_on_device(self, kind: Kind, dtype: DType, args: CollectiveArgs) -> bool:
        return self._gpu_engine is not None and self._gpu_engine.does(kind, dtype, args)

    def _engine_of(self, sample: Buffer) -> Caller | None:
        return self._gpu_engine if isinstance(sample, DeviceBuffer) else self.engine


class GlooBackend(TorchDistributedBackend):
    """Gloo for all arrays; those of a device go through host memory."""


class NcclBackend(TorchDistributedBackend):
    """NCCL for CUDA tensors, on their device; Gloo for everything else."""

    _has_nccl = True


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
