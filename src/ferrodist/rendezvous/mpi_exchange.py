# SPDX-License-Identifier: MIT OR Apache-2.0
"""MpiExchange: the ranks of mpiexec tell each other by MPI itself, through mpi4py.

Only bytes of a fixed size travel, nothing is unpickled. The only file of this room that imports
mpi4py, which calls MPI_Init.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

from ferrodist.deadline import Deadline
from ferrodist.errors import BackendUnavailable, RendezvousError
from ferrodist.rendezvous.exchange import LARGEST_RECORD
from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.link import Link
from ferrodist.rendezvous.sources.place import MASTER_ADDRESS, MASTER_PORT

_LENGTH_NBYTES = 2
_RECORD_NBYTES = _LENGTH_NBYTES + LARGEST_RECORD
_PAUSE = 0.001  # seconds between two looks whether all have told


class MpiExchange:
    """The way through MPI."""

    towards = ""
    lines: Mapping[int, Link] = MappingProxyType({})  # mpiexec ends the others if this rank fails

    def __init__(self, job: Job, deadline: Deadline) -> None:
        self._job = job
        self._deadline = deadline
        self._mpi = _import_mpi(job)
        _check_same_world(job, self._mpi.COMM_WORLD)

    def gather(self, own: bytes) -> list[bytes]:
        """Return what all ranks have to tell."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave; there is nothing to close."""

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
        source = job.source
        raise RendezvousError(
            f"mpi4py says rank {found[0]} of {found[1]}, {source.name} says {source.rank}="
            f"{job.rank}, {source.world_size}={job.world_size}: mpi4py was built for another MPI "
            "than this mpiexec is of; install it with the mpicc of the same MPI, or start the "
            "ranks with the other mpiexec",
            this_rank=job.rank,
            got=list(found),
            expected=[job.rank, job.world_size],
        )
