# SPDX-License-Identifier: MIT OR Apache-2.0
"""How ``init_process_group("ferrodist")`` makes a group: its ranks meet at the store of torch.

Every form of init_process_group ends in a store (``rendezvous/torch_store.py``).
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d as torch_c10d

import ferrodist
from ferrodist import tracebacks
from ferrodist.backends.base import Backend
from ferrodist.backends.registry import join_job, program_end
from ferrodist.backends.tcp import TcpBackend
from ferrodist.config import AUTO, Config, DefaultTimeout, environment, variable
from ferrodist.deadline import Deadline
from ferrodist.errors import InvalidArgument
from ferrodist.rendezvous.interfaces import choose_address
from ferrodist.rendezvous.job import Launcher
from ferrodist.rendezvous.torch_store import job_at_store, open_store
from ferrodist.torch.process_group import ProcessGroup

_INIT = "torch.distributed.init_process_group"
_LAUNCHER = Launcher(
    name=_INIT,
    rank="rank",
    world_size="world_size",
    job="the store of torch",
    start=f"start all ranks, as by 'torchrun --nproc-per-node {{size}}', and let all call {_INIT}",
)


class _Given(threading.local):
    """The backend on which the next world of this thread is made; None to join by the store."""

    backend: Backend | None = None


_given = _Given()


@contextmanager
def over(backend: Backend) -> Iterator[None]:
    """Let init_process_group, in this thread, use an existing backend."""
    _given.backend = backend
    try:
        yield
    finally:
        _given.backend = None


def create(options: Any, backend_options: Any = None) -> ProcessGroup:
    """Create the process group that torch asks for, of all ranks or of some."""
    _refuse_other_devices()
    config = Config.from_environment()
    timeout = _timeout_of(options, config)
    backend = _open_backend(options, config, timeout)
    backend.timeout = timeout
    return ProcessGroup(backend)


def _open_backend(options: Any, config: Config, timeout: float) -> Backend:
    ranks, world = list(options.global_ranks_in_group), torch_c10d._world.default_pg
    if ranks and isinstance(world, ProcessGroup):
        return world.backend.split(ranks, timeout=timeout)
    if _given.backend is not None:
        return _given.backend
    if variable("join_timeout") not in environment():
        config = replace(config, join_timeout=timeout)
    tracebacks.install()
    backend = join(options.store, options.group_rank, options.group_size, config)
    program_end.watch(backend)
    return backend


def _timeout_of(options: Any, config: Config) -> float:
    """Return the deadline of calls: torch's, unless nobody chose it and there is a setting."""
    is_default = options.timeout == torch_c10d.default_pg_timeout
    if is_default and config.timeout and not isinstance(config.timeout, DefaultTimeout):
        return config.timeout
    return float(options.timeout.total_seconds())


def _refuse_other_devices() -> None:
    """Refuse "cpu:ferrodist,cuda:nccl": of a list torch would keep this group alone, in silence."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    asked = "" if frame is None else str(frame.f_locals.get("backend", ""))
    others = [name for name in asked.lower().split(",") if not name.endswith("ferrodist")]
    if ":" in asked and others:
        raise InvalidArgument(
            f"{asked!r}: torch keeps only one group where a backend is written in Python, so "
            f'{", ".join(others)} would be dropped; call init_process_group("ferrodist") for CPU '
            'tensors and dist.new_group(backend="nccl") for CUDA tensors',
            got=asked,
        )


# -- joining --------------------------------------------------------------------------------------


def join(store: Any, rank: int, world_size: int, config: Config) -> Backend:
    """Connect to the other ranks through a store of torch; every rank calls it.

    Raises RendezvousError naming the ranks that have not come by ``config.join_timeout``.
    """
    deadline = Deadline(config.join_timeout)
    job, pretends = job_at_store(store, rank, world_size, _LAUNCHER, config, deadline)
    asked = "hybrid" if config.backend == AUTO and pretends else config.backend
    return join_job(job, asked, replace(config, join_timeout=max(deadline.remaining(), 0.001)))


# -- a group over a backend that is there ---------------------------------------------------------


def process_group(backend: Backend) -> ProcessGroup:
    """Create a process group of torch on a backend of ferrodist; every rank of it calls it.

    It becomes the default group if torch.distributed has none; otherwise it is a group like those
    of ``new_group``. Its calls and the backend's must come in the same order on all ranks.

    Example:
        >>> import ferrodist, ferrodist.torch, torch
        >>> backend = ferrodist.init()  # doctest: +SKIP
        >>> group = ferrodist.torch.process_group(backend)  # doctest: +SKIP
        >>> torch.distributed.all_reduce(torch.ones(2), group=group)  # doctest: +SKIP
    """
    world = torch_c10d._world
    is_default = world.default_pg is None
    if is_default:
        _refuse_plain_store(backend)
    group = ProcessGroup(backend)
    own = backend.rank if is_default else world.default_pg.rank()
    ranks = ferrodist.all_gather(own, backend).tolist()
    name = torch_c10d._process_group_name(ranks, use_hashed_name=False)
    group._set_group_name(name)
    torch_c10d._register_pg_in_world(
        group,
        backend_name=group.name(),
        store=_store_for(backend) if is_default else torch.distributed.HashStore(),
        group_name=name,
        backend_config=f"cpu:{group.name()}",
        rank_mapping={rank: index for index, rank in enumerate(ranks)},
        add_to_default_tag=True,
    )
    if is_default:
        torch_c10d._update_default_pg(group)
    return group


def _refuse_plain_store(backend: Backend) -> None:
    """Refuse a default group whose store would send over a network what is to be encrypted."""
    if backend.config.tls and backend.local_world_size < backend.world_size:
        raise InvalidArgument(
            f"process_group: {variable('tls')}=1, the ranks are on several hosts, and the store of "
            "a default group, by which torch makes further groups, is torch's: it is not "
            f"encrypted. Call {_INIT} first, if a store that is not may be used: this group is "
            f"then one beside the default group; or unset {variable('tls')}",
            this_rank=backend.rank,
        )


def _store_for(backend: Backend) -> Any:
    """Make the store of a default group: groups of other libraries, as Gloo, meet there."""
    config = backend.config

    def find_address() -> str:
        if isinstance(backend, TcpBackend):
            return backend.own_address
        is_one_host = backend.local_world_size == backend.world_size
        return "127.0.0.1" if is_one_host else choose_address(config.socket_ifname)[1]

    share = functools.partial(ferrodist.broadcast_object, backend=backend)
    return open_store(find_address, backend.rank == 0, share, Deadline(config.join_timeout))
