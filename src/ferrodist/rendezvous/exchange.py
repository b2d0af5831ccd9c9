# SPDX-License-Identifier: MIT OR Apache-2.0
"""Exchange: a way to tell all ranks something, once, before any of them are connected.

On one host the ranks come to rank 0's Unix socket, between hosts to its TCP socket: see
``meeting.py``. Here is how they meet where somebody else has already brought them together: at a
store, such as torch's, which torchrun's agent keeps, or by MPI.

This file and ``torch_store.py`` import torch or mpi4py when they are used; importing mpi4py
calls MPI_Init. torchrun's agent listens at MASTER_PORT, so rank 0 cannot. Its store asks nobody for
a secret; a stranger who reaches it can read and write there, and make the ranks fail to meet, but
is not taken for one. Through MPI only bytes of a fixed size travel, nothing is unpickled. Both end
the other ranks if this one fails, so there are no channels to learn of failures.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol, Self

from ferrodist.config import environment
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendUnavailable, InvalidArgument, ProtocolError, RendezvousError
from ferrodist.rendezvous.job import MASTER_ADDRESS, MASTER_PORT, Endpoint, Job, number
from ferrodist.rendezvous.launchers import PMIX, SLURM
from ferrodist.rendezvous.wire import MAX_RECORD, Channel

_MAX_RANKS_SHOWN = 16
_LENGTH_NBYTES = 2
_RECORD_NBYTES = _LENGTH_NBYTES + MAX_RECORD
_RECORDS_PER_VALUE = 60  # of a store: less than 64 KB
_PAUSE = 0.001  # seconds between two looks whether all have told by MPI


class Exchange:
    """What all ways have in common. Leaving the context in an error tells the others why.

    It may be open to strangers: nobody trusts what comes from here before the handshake of the
    mesh.
    """

    _job: Job

    @property
    def secret(self) -> bytes:
        """The secret of the job, which the ranks may only have got here."""
        return self._job.secret

    @property
    def towards(self) -> str:
        """The address of rank 0, or of something on its host; '' if nothing is known about it."""
        return ""

    @property
    def failure_channels(self) -> Mapping[int, Channel]:
        """Channels on which a rank learns, after gathering, that another has failed or is gone."""
        return {}

    def gather(self, own: bytes) -> list[bytes]:
        """Return what all ranks have to tell, in rank order; every rank calls it."""
        raise NotImplementedError

    def give_up(self, error: BaseException) -> None:
        """Tell the others why this rank fails."""

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self.give_up(error)
        finally:
            self.close()


def check_record(job: Job, own: bytes) -> bytes:
    if len(own) > MAX_RECORD:
        raise RendezvousError(f"rank {job.rank} has {len(own)} bytes to tell", rank=job.rank)
    return own


def _pack(record: bytes) -> bytes:
    return len(record).to_bytes(_LENGTH_NBYTES) + record


def _unpack(data: bytes) -> tuple[bytes, bytes]:
    """Return the first record, and what follows it."""
    end = _LENGTH_NBYTES + int.from_bytes(data[:_LENGTH_NBYTES])
    return data[_LENGTH_NBYTES:end], data[end:]


# -- a store --------------------------------------------------------------------------------------


class Store(Protocol):
    """A store that somebody else keeps, who does not say which ranks have not come."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout: float) -> bytes:
        """Wait for a value; raises RendezvousError if nobody sets it in time."""

    def has(self, key: str) -> bool:
        """Tell whether somebody has set it, as far as the store still answers."""


class StoreExchange(Exchange):
    """The exchange through a store.

    ``towards`` is an address on the way to rank 0, ``call`` what every rank calls to come here.
    """

    def __init__(
        self,
        job: Job,
        store: Store,
        deadline: Deadline,
        towards: str = "",
        call: str = "ferrodist.init()",
    ) -> None:
        self._job = job
        self._store = store
        self._deadline = deadline
        self._towards = towards
        self._call = call

    @property
    def towards(self) -> str:
        return self._towards

    def gather(self, own: bytes) -> list[bytes]:
        """Give every rank the values of all; raises RendezvousError naming ranks that tell none.

        Rank 0 reads them one by one and writes them together, so that there are about two requests
        per rank and not one per pair of ranks.
        """
        own = check_record(self._job, own)
        self._store.set(f"address/{self._job.rank}", own)
        try:
            return self._collect(own) if self._job.rank == 0 else self._read_all()
        except RendezvousError as error:
            raise self._missing() from error

    def _get(self, key: str) -> bytes:
        return self._store.get(key, self._deadline.remaining())

    def _collect(self, own: bytes) -> list[bytes]:
        values = [own, *(self._get(f"address/{rank}") for rank in range(1, self._job.world_size))]
        for start in range(0, len(values), _RECORDS_PER_VALUE):
            part = values[start : start + _RECORDS_PER_VALUE]
            self._store.set(f"addresses/{start}", b"".join(map(_pack, part)))
        return values

    def _read_all(self) -> list[bytes]:
        values: list[bytes] = []
        while len(values) < self._job.world_size:
            rest = self._get(f"addresses/{len(values)}")
            if not rest:
                raise ProtocolError("rank 0 told nothing", rank=0)
            while rest:
                value, rest = _unpack(rest)
                values.append(value)
        return values

    def _missing(self) -> RendezvousError:
        job, ranks = self._job, range(self._job.world_size)
        missing = [rank for rank in ranks if not self._store.has(f"address/{rank}")]
        missing = [rank for rank in missing if rank != job.rank] or [0]
        shown = ", ".join(f"rank {rank}" for rank in missing[:_MAX_RANKS_SHOWN])
        return RendezvousError(
            f"{shown} of {job.world_size} did not join job {job.name!r} within {self._deadline}; "
            f"this is rank {job.rank}. Look at the output of those: they ended or hang before "
            f"{self._call}, or did not call it",
            missing=missing,
            rank=missing[0],
            this_rank=job.rank,
        )


def first_line(error: BaseException) -> str:
    """Return what an error of torch says, without its stack of C++ calls."""
    return (str(error).splitlines() or ["?"])[0][:200]


def absent(key: str, deadline: Deadline) -> RendezvousError:
    return RendezvousError(f"nobody has set {key!r} in the store within {deadline}")


class TorchStore:
    """A store of torch's.

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
        try:
            return bool(self._store.check([self._prefix + key]))
        except RuntimeError:
            return False


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
        raise RendezvousError(
            f"job {job.name!r}: rank {job.rank} cannot reach the store of torchrun's agent at "
            f"{endpoint}: {first_line(error)}",
            rank=0,
            this_rank=job.rank,
        ) from error
    return TorchStore(store, f"ferrodist/{job.name}/")


# -- MPI ------------------------------------------------------------------------------------------


class MpiExchange(Exchange):
    """The exchange through MPI itself, by mpi4py: in its world, or in another communicator.

    ``call`` is what every rank calls to come here.
    """

    def __init__(
        self, job: Job, deadline: Deadline, comm: Any = None, call: str = "ferrodist.init()"
    ) -> None:
        self._job = job
        self._deadline = deadline
        self._mpi = _import_mpi(job)
        self._call = call
        if comm is None:
            check_mpi_world(job, self._mpi)
            comm = self._mpi.COMM_WORLD
        self._comm = comm

    def gather(self, own: bytes) -> list[bytes]:
        job, byte = self._job, self._mpi.BYTE
        record = bytearray(_pack(own).ljust(_RECORD_NBYTES, b"\0"))
        records = bytearray(job.world_size * _RECORD_NBYTES)
        request = self._comm.Iallgather([record, byte], [records, byte])
        while not request.Test():
            if self._deadline.remaining() <= 0:
                raise RendezvousError(
                    f"not all {job.world_size} ranks of job {job.name!r} called {self._call} "
                    f"within {self._deadline}; MPI does not say which. This is rank {job.rank}: "
                    "look at the output of the others",
                    this_rank=job.rank,
                )
            time.sleep(_PAUSE)
        starts = range(0, len(records), _RECORD_NBYTES)
        return [_unpack(bytes(records[at : at + _RECORD_NBYTES]))[0] for at in starts]


def _import_mpi(job: Job) -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library to load
        why = first_line(error)
        raise BackendUnavailable(
            f"job {job.name!r} is on several hosts ({job.hosts}), and its ranks find each other "
            f"through mpi4py, which cannot be imported ({why}): pip install 'ferrodist[mpi]', or "
            f"set {MASTER_ADDRESS} and {MASTER_PORT} to an address and a free port of rank 0's "
            "host on all ranks, which are then used instead",
            this_rank=job.rank,
        ) from error
    return MPI


def check_mpi_world(job: Job | None, mpi: Any) -> None:
    """Refuse an MPI that is not the launcher's: it takes every process for a world of one.

    ``job`` is None if no launcher says anything that can be used; a step of SLURM's is still seen.
    """
    found = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    num_tasks = number(environment().get(SLURM.world_size, ""))
    if job is not None:
        launcher, expected = job.launcher, [job.rank, job.world_size]
        is_right = list(found) == expected
        said = f"{launcher.rank}={job.rank}, {launcher.world_size}={job.world_size}"
    else:
        launcher, expected = SLURM, [num_tasks]
        is_right = found[1] > 1 or num_tasks < 2
        said = f"{launcher.world_size}={num_tasks}"
    if is_right:
        return
    is_step = launcher in (SLURM, PMIX) or expected[-1] == num_tasks
    raise RendezvousError(
        f"MPI says rank {found[0]} of {found[1]}, {launcher.name} says {said}; "
        f"{_how_to_start(mpi_library(mpi), is_step)}",
        this_rank=None if job is None else job.rank,
        got=list(found),
        expected=expected,
    )


def _how_to_start(library: str, is_step: bool) -> str:
    if not is_step:
        return (
            f"start the ranks with the mpiexec of {library}, which mpi4py uses here, or install "
            "mpi4py for the other MPI"
        )
    return (
        f"mpi4py uses {library} here: start the step with 'srun --mpi={srun_kind(library)}' "
        "('srun --mpi=list' shows what this SLURM has), or start the ranks with its mpiexec"
    )


def srun_kind(library: str) -> str:
    """Return how srun has to start ranks of an MPI: as the ones that pip installs were built."""
    return "pmix" if "open mpi" in library.lower() else "pmi2"


def mpi_library(mpi: Any) -> str:
    first_line = str(mpi.Get_library_version()).strip("\0").splitlines()[0]
    return " ".join(first_line.partition(",")[0].replace("Version:", "").split())
