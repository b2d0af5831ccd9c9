# SPDX-License-Identifier: MIT OR Apache-2.0
"""Exchange: a way to tell all ranks something, once, before any of them are connected.

On one host the ranks come to rank 0's Unix socket, between hosts to its TCP socket: see
``meeting.py``. Here is how they meet where somebody else has already brought them together: at a
store, such as torch's, which torchrun's agent keeps, or by MPI.

The only file of this package that imports torch or mpi4py, each when it is used; importing mpi4py
calls MPI_Init. torchrun's agent listens at MASTER_PORT, so rank 0 cannot. Its store asks nobody for
a secret; whoever reaches it can read and write there, and make the ranks fail to meet, but not be
taken for one. Through MPI only bytes of a fixed size travel, nothing is unpickled. Both end the
other ranks if this one fails, so there are no channels to learn of failures.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol, Self

from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    AuthenticationError,
    BackendUnavailable,
    InvalidArgument,
    ProtocolError,
    RendezvousError,
)
from ferrodist.rendezvous.job import (
    MASTER_ADDRESS,
    MASTER_PORT,
    Endpoint,
    Job,
    Launcher,
    how_to_make_secret,
    known_secret,
    secret_from_file,
)
from ferrodist.rendezvous.mesh import host_id
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


# -- a job whose ranks meet at a store of the program's --------------------------------------------


def job_at_store(
    store: Any, rank: int, world_size: int, launcher: Launcher, config: Config, deadline: Deadline
) -> tuple[Job, bool]:
    """Describe the job of those who share a store of torch's; every rank calls it.

    Also tells whether they pretend to be on several hosts. The ranks tell each other at the store
    which host they are on. Those of one host then meet at a Unix socket, where the kernel says
    whose process each is; those of several recognise each other by the secret file. No secret goes
    through the store.
    """
    # A program may join again by the same store: every rank counts its own tries.
    nth = store.add(f"ferrodist/{rank}", 1)
    name = f"torch-{secrets.token_hex(16)}"
    job = Job(name, rank, world_size, known_secret(name), launcher=launcher, has_secret=False)
    if config.secret_file:
        job = replace(job, secret=secret_from_file(config.secret_file), has_secret=True)
    if world_size == 1:
        return job, False
    at = TorchStore(store, f"ferrodist/{nth}/hosts/")
    facts = _tell_facts(StoreExchange(job, at, deadline, call=launcher.name), job, config)
    job = _with_facts(job, facts)
    at = TorchStore(store, f"ferrodist/{nth}/mesh/")
    exchange = StoreExchange(job, at, deadline, _host_of(store), launcher.name)
    return replace(job, exchange=exchange), len({fact["shown"] for fact in facts}) > 1


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


def open_store(
    address: str, is_server: bool, share: Callable[[str], str], deadline: Deadline
) -> Any:
    """Open a store of torch's that one rank serves, at its address only; all ranks call it.

    ``share`` gives all of them what the server passes. By itself torch listens at all addresses.
    """
    from torch.distributed import TCPStore

    timeout, store, told = timedelta(seconds=max(1.0, deadline.timeout())), None, ""
    if is_server:
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.create_server((address, 0), family=family, backlog=1024) as listener:
                port = listener.getsockname()[1]
                options = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
                store = TCPStore(address, port, is_master=True, timeout=timeout, **options)
            told = f"{address} {port}"
        except (OSError, RuntimeError) as error:  # told to all: they wait for it
            told = f"! {first_line(error)}"
    host, _, port_or_error = share(told).partition(" ")
    if host == "!":
        raise RendezvousError(f"no store of torch's could be served: {port_or_error}")
    return store or TCPStore(host, int(port_or_error), is_master=False, timeout=timeout)


def first_line(error: BaseException) -> str:
    """Return what an error of torch says, without its stack of C++ calls."""
    return (str(error).splitlines() or ["?"])[0][:200]


# -- MPI ------------------------------------------------------------------------------------------


class MpiExchange(Exchange):
    """The exchange through MPI itself, by mpi4py."""

    def __init__(self, job: Job, deadline: Deadline) -> None:
        self._job = job
        self._deadline = deadline
        self._mpi = _import_mpi(job)
        _check_same_world(job, self._mpi.COMM_WORLD)

    def gather(self, own: bytes) -> list[bytes]:
        job, byte = self._job, self._mpi.BYTE
        record = bytearray(_pack(own).ljust(_RECORD_NBYTES, b"\0"))
        records = bytearray(job.world_size * _RECORD_NBYTES)
        request = self._mpi.COMM_WORLD.Iallgather([record, byte], [records, byte])
        while not request.Test():
            if self._deadline.remaining() <= 0:
                raise RendezvousError(
                    f"not all {job.world_size} ranks of job {job.name!r} called ferrodist.init() "
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
