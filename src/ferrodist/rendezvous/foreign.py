# SPDX-License-Identifier: MIT OR Apache-2.0
"""Other people's ways to bring ranks together: a store of torch's, as torchrun has one, and MPI.

The only file of this package that imports torch or mpi4py, each when it is used; importing mpi4py
calls MPI_Init.

torchrun's agent listens at MASTER_PORT, so rank 0 cannot. Its store asks nobody for a secret;
whoever reaches it can read and write there, and make the ranks fail to meet, but not be taken for
one. Through MPI only bytes of a fixed size travel, nothing is unpickled. Both end the other ranks
if this one fails, so there are no channels to learn of failures.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from ferrodist.deadline import Deadline
from ferrodist.errors import BackendUnavailable, InvalidArgument, RendezvousError
from ferrodist.rendezvous.job import MASTER_ADDRESS, MASTER_PORT, Endpoint, Job
from ferrodist.rendezvous.store import MAX_RECORD, Exchange, absent

_LENGTH_NBYTES = 2
_RECORD_NBYTES = _LENGTH_NBYTES + MAX_RECORD
_PAUSE = 0.001  # seconds between two looks whether all have told


class TorchStore:
    """A store of torch's, with our methods.

    All keys begin with ``prefix``, which no earlier meeting has had: what that left is not found.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._prefix = prefix
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        if self._store.compare_set(self._prefix + key, "", value) != value:
            raise InvalidArgument(f"key {key!r} of torch's store has another value already")

    def get(self, key: str, timeout: float) -> bytes:
        name = self._prefix + key
        seconds = timedelta(seconds=max(0.001, timeout))
        try:
            self._store.wait([name], seconds)
            return bytes(self._store.get(name))
        except RuntimeError as error:  # torch's own errors are all of this kind
            raise absent(key, Deadline(timeout)) from error

    def has(self, key: str) -> bool:
        """Tell whether somebody has set it, as far as the store still answers."""
        try:
            return bool(self._store.check([self._prefix + key]))
        except RuntimeError:
            return False

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(self._prefix + key, amount))


def connect_to_agent(job: Job, endpoint: Endpoint, deadline: Deadline) -> TorchStore:
    """Connect to the store of torchrun's agent.

    The name of its jobs holds the number of restarts.
    """
    try:
        from torch.distributed import TCPStore
    except ImportError as error:
        raise BackendUnavailable(
            f"job {job.name!r} is on several hosts, and torchrun's own store is in torch, which "
            "cannot be imported here: pip install 'ferrodist[torch]'",
            this_rank=job.rank,
        ) from error
    seconds = timedelta(seconds=max(1.0, deadline.remaining()))
    try:
        store = TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=seconds)
    except (RuntimeError, OSError) as error:
        first_line = (str(error).splitlines() or ["?"])[0]
        raise RendezvousError(
            f"job {job.name!r}: rank {job.rank} cannot reach the store of torchrun's agent at "
            f"{endpoint}: {first_line[:200]}",
            rank=0,
            this_rank=job.rank,
        ) from error
    return TorchStore(store, f"ferrodist/{job.name}/")


class MpiExchange(Exchange):
    """The exchange through MPI itself, by mpi4py."""

    def __init__(self, job: Job, deadline: Deadline) -> None:
        self._job = job
        self._deadline = deadline
        self._mpi = _import_mpi(job)
        _check_same_world(job, self._mpi.COMM_WORLD)

    def gather(self, own: bytes) -> list[bytes]:
        size = self._job.world_size
        record = bytearray((len(own).to_bytes(_LENGTH_NBYTES) + own).ljust(_RECORD_NBYTES, b"\0"))
        records = bytearray(size * _RECORD_NBYTES)
        byte = self._mpi.BYTE
        request = self._mpi.COMM_WORLD.Iallgather([record, byte], [records, byte])
        while not request.Test():
            if self._deadline.remaining() <= 0:
                raise self._late()
            time.sleep(_PAUSE)
        return [_content(records[rank * _RECORD_NBYTES :]) for rank in range(size)]

    def _late(self) -> RendezvousError:
        job = self._job
        return RendezvousError(
            f"not all {job.world_size} ranks of job {job.name!r} called ferrodist.init() within "
            f"{self._deadline}; MPI does not say which. This is rank {job.rank}: look at the "
            "output of the others",
            this_rank=job.rank,
        )


def _content(record: bytearray) -> bytes:
    end = _LENGTH_NBYTES + int.from_bytes(record[:_LENGTH_NBYTES])
    return bytes(record[_LENGTH_NBYTES:end])


def _import_mpi(job: Job) -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library to load
        why = (str(error).splitlines() or ["?"])[0]
        raise BackendUnavailable(
            f"job {job.name!r} is on several hosts ({job.hosts}), and its ranks find each other "
            f"through mpi4py, which cannot be imported ({why}): pip install 'ferrodist[mpi]', or "
            f"set {MASTER_ADDRESS} and {MASTER_PORT} to an address and a free port of rank 0's "
            "host on all ranks, which are then used instead",
            this_rank=job.rank,
        ) from error
    return MPI


def _check_same_world(job: Job, world: Any) -> None:
    """Refuse an MPI that is not the launcher's: it takes every process for a world of one."""
    found = world.Get_rank(), world.Get_size()
    if found != (job.rank, job.world_size):
        launcher = job.launcher
        raise RendezvousError(
            f"mpi4py says rank {found[0]} of {found[1]}, {launcher.name} says {launcher.rank}="
            f"{job.rank}, {launcher.world_size}={job.world_size}: mpi4py was built for another MPI "
            "than this mpiexec belongs to; install it with the mpicc of the same MPI, or start the "
            "ranks with the other mpiexec",
            this_rank=job.rank,
            got=list(found),
            expected=[job.rank, job.world_size],
        )
