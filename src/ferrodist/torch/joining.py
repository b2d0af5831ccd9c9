# SPDX-License-Identifier: MIT OR Apache-2.0
"""How ``init_process_group("ferrodist")`` makes a group: its ranks meet at the store of torch.

Every form of init_process_group ends in a store; the ranks tell each other there which host they
are on. Those of one host then meet at a Unix socket, where the kernel says whose process each is;
those of several recognise each other by the secret file. No secret goes through the store.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
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
from ferrodist.config import AUTO, Config, DefaultTimeout, environment, variable
from ferrodist.deadline import Deadline
from ferrodist.errors import AuthenticationError, InvalidArgument, ProtocolError
from ferrodist.rendezvous.exchange import StoreExchange, TorchStore
from ferrodist.rendezvous.job import (
    Job,
    Launcher,
    how_to_make_secret,
    known_secret,
    secret_from_file,
)
from ferrodist.rendezvous.mesh import host_id
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
    """The backend that the next world of this thread is made over, if somebody gives one."""

    backend: Backend | None = None


_given = _Given()


@contextmanager
def over(backend: Backend) -> Iterator[None]:
    """Let init_process_group, in this thread, make its group over a backend that is there."""
    _given.backend = backend
    try:
        yield
    finally:
        _given.backend = None


def create(options: Any, backend_options: Any = None) -> ProcessGroup:
    """Make the process group that torch asks for: of all ranks, or a part of those."""
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
    """Meet the other ranks at a store of torch's and make the group of all; every rank calls it.

    Raises RendezvousError naming the ranks that have not come by ``config.join_timeout``.
    """
    # A program may join again by the same store: every rank counts its own tries.
    nth = store.add(f"ferrodist/{rank}", 1)
    deadline = Deadline(config.join_timeout)
    name = f"torch-{secrets.token_hex(16)}"
    job = Job(name, rank, world_size, known_secret(name), launcher=_LAUNCHER, has_secret=False)
    if config.secret_file:
        job = replace(job, secret=secret_from_file(config.secret_file), has_secret=True)
    if world_size > 1:
        at = TorchStore(store, f"ferrodist/{nth}/hosts/")
        facts = _tell_facts(StoreExchange(job, at, deadline, call=_INIT), job, config)
        job = _with_facts(job, facts)
        at = TorchStore(store, f"ferrodist/{nth}/mesh/")
        job = replace(job, exchange=StoreExchange(job, at, deadline, _host_of(store), _INIT))
    pretends = len({fact["shown"] for fact in facts}) > 1 if world_size > 1 else False
    asked = "hybrid" if config.backend == AUTO and pretends else config.backend
    return join_job(job, asked, replace(config, join_timeout=max(deadline.remaining(), 0.001)))


def _tell_facts(exchange: StoreExchange, job: Job, config: Config) -> list[dict[str, Any]]:
    """Tell all ranks where this one is, and hear the same of all, in rank order."""
    here = host_id()
    own = {
        "host": here,
        "shown": config.host_id or here,
        "name": job.name,
        "has_secret": job.has_secret,
    }
    found = exchange.gather(json.dumps(own).encode())
    try:
        facts = [json.loads(record) for record in found]
        if not all(fact.keys() == own.keys() for fact in facts):
            raise ValueError("other facts than ours")
    except (ValueError, AttributeError) as error:
        raise ProtocolError(
            f"what another rank wrote to the store of torch cannot be decoded ({error}); do all "
            "ranks have the same version of ferrodist?"
        ) from error
    return facts


def _with_facts(job: Job, facts: list[dict[str, Any]]) -> Job:
    """Name the job as rank 0 does, and say whether it is on several hosts."""
    name, hosts = facts[0]["name"], len({fact["host"] for fact in facts})
    secret = job.secret if job.has_secret else known_secret(name)
    job = replace(job, name=name, secret=secret, hosts=f"{hosts} hosts" if hosts > 1 else "")
    without = [rank for rank, fact in enumerate(facts) if not fact["has_secret"]]
    if hosts > 1 and without:
        raise AuthenticationError(
            f"the ranks are on {hosts} hosts, and ranks {without} have no secret: without one they "
            f"could not tell each other from strangers on the network; {how_to_make_secret()}",
            this_rank=job.rank,
            missing=without,
        )
    return job


def _host_of(store: Any) -> str:
    """Return the host of a store, if it has one: it shows which network leads to the others."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


# -- a group over a backend that is there ---------------------------------------------------------


def process_group(backend: Backend) -> ProcessGroup:
    """Make a process group of torch over a backend of ferrodist; every rank of it calls it.

    It becomes the default group if torch.distributed has none, and else a group like those that
    ``new_group`` makes. Its calls and those of the backend must come in one order on all ranks.

    Example:
        >>> import ferrodist, ferrodist.torch, torch
        >>> backend = ferrodist.init()  # doctest: +SKIP
        >>> group = ferrodist.torch.process_group(backend)  # doctest: +SKIP
        >>> torch.distributed.all_reduce(torch.ones(2), group=group)  # doctest: +SKIP
    """
    group, world = ProcessGroup(backend), torch_c10d._world
    is_default = world.default_pg is None
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


def _store_for(backend: Backend) -> Any:
    """Make the store of a default group: groups of other libraries, as Gloo, meet there."""
    if backend.local_world_size < backend.world_size:
        return _NoStore()
    path = ""
    if backend.rank == 0:
        handle, path = tempfile.mkstemp(prefix="ferrodist-torch-")
        os.close(handle)
    # torch removes the file when the last rank lets go of it.
    return torch.distributed.FileStore(
        ferrodist.broadcast_object(path, backend), backend.world_size
    )


class _NoStore(torch.distributed.Store):  # type: ignore[misc] # torch has no types
    """The store of a default group on several hosts: there is none that all could reach."""

    def _refuse(self, *_: Any) -> Any:
        raise InvalidArgument(
            "new_group: the default group was made by ferrodist.torch.process_group on several "
            "hosts and has no store where a group of another backend could meet; call "
            'init_process_group("ferrodist") instead'
        )

    set = get = add = wait = check = compare_set = delete_key = num_keys = _refuse
