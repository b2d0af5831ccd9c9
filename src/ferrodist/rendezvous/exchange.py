# SPDX-License-Identifier: MIT OR Apache-2.0
"""Exchange: every rank gets a few bytes of every other, before any of them are connected.

On one host the ranks come to rank 0's Unix socket, between hosts to its TCP socket. Where somebody
else has brought the ranks together already, torchrun or MPI, they use that. It may be open to
strangers: what comes from here is believed by nobody before the handshake of the mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, Self

from ferrodist.config import Config
from ferrodist.deadline import Deadline
from ferrodist.errors import InvalidArgument, ProtocolError, RendezvousError
from ferrodist.rendezvous.interfaces import is_loopback
from ferrodist.rendezvous.job import Job, Through
from ferrodist.rendezvous.job_secret import no_secret
from ferrodist.rendezvous.link import LARGEST_VALUE, Link
from ferrodist.rendezvous.meeting_point import MeetingPoint
from ferrodist.rendezvous.store import Store, StoreGuest, StoreHost
from ferrodist.rendezvous.tcp_point import TcpPoint
from ferrodist.rendezvous.unix_socket import UnixPoint

LARGEST_RECORD = 1024  # bytes that a rank tells the others
_LENGTH_NBYTES = 2
_PER_VALUE = LARGEST_VALUE // (_LENGTH_NBYTES + LARGEST_RECORD)


class Exchange(Protocol):
    """A way to tell all ranks something, once. Leaving it in an error tells the others why."""

    @property
    def towards(self) -> str:
        """The address of rank 0, or of somebody on its host; '' if nothing is known of it."""

    @property
    def lines(self) -> Mapping[int, Link]:
        """Links on which a rank hears, after gathering, that another has failed or is gone."""

    def gather(self, own: bytes) -> list[bytes]:
        """Return what all ranks have to tell, in rank order; every rank calls it."""

    def __enter__(self) -> Self:
        """Use it; the ranks have not met yet."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave."""


def open_exchange(job: Job, config: Config, deadline: Deadline) -> Exchange:
    """Choose the way for a job; raises AuthenticationError if its ranks could be anybody."""
    if not job.several_hosts:
        return SocketExchange(job, UnixPoint(job), deadline)
    endpoint = job.endpoint
    if not job.has_secret and (endpoint is None or not is_loopback(endpoint.host)):
        raise no_secret(job.name, job.source.name, job.hosts, job.rank)
    if job.through is Through.MPI:
        from ferrodist.rendezvous.mpi_exchange import MpiExchange  # imports mpi4py

        return MpiExchange(job, deadline)
    if endpoint is None:
        raise InvalidArgument(
            f"job {job.name!r} is on several hosts, and nothing says where rank 0 listens",
            this_rank=job.rank,
        )
    if job.through is Through.TORCH_STORE:
        from ferrodist.rendezvous.torch_store import TorchExchange  # imports torch

        return TorchExchange(job, endpoint, deadline)
    return SocketExchange(job, TcpPoint(job, endpoint, config, deadline), deadline)


class SocketExchange:
    """The way through the store of rank 0."""

    def __init__(self, job: Job, point: MeetingPoint, deadline: Deadline) -> None:
        self._job = job
        self._point = point
        self._deadline = deadline
        kind = StoreHost if job.rank == 0 else StoreGuest
        self._store: StoreHost | StoreGuest = kind(job, point, deadline)

    @property
    def towards(self) -> str:
        """The address of rank 0."""
        return self._point.towards

    @property
    def lines(self) -> Mapping[int, Link]:
        """The links that lead to rank 0 from everywhere, until this is left."""
        return self._store.lines()

    def gather(self, own: bytes) -> list[bytes]:
        """Return what all ranks have to tell."""
        values = gather(self._store, self._job, own, self._deadline)
        self._store.leave()
        return values

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._store.give_up(error)
        self._store.close()


def gather(store: Store, job: Job, own: bytes, deadline: Deadline) -> list[bytes]:
    """Give every rank the values of all, in rank order, by a store.

    Rank 0 reads them one by one and writes them together, so that there are about two requests per
    rank and not one per pair of ranks.
    """
    if len(own) > LARGEST_RECORD:
        raise RendezvousError(f"rank {job.rank} has {len(own)} bytes to tell", rank=job.rank)
    if job.rank != 0:
        store.set(f"card/{job.rank}", own)
        return _read_all(store, job, deadline)
    others = (store.get(f"card/{rank}", deadline.remaining()) for rank in range(1, job.world_size))
    values = [own, *others]
    for start in range(0, len(values), _PER_VALUE):
        part = values[start : start + _PER_VALUE]
        store.set(f"cards/{start}", b"".join(map(_with_length, part)))
    return values


def _read_all(store: Store, job: Job, deadline: Deadline) -> list[bytes]:
    values: list[bytes] = []
    while len(values) < job.world_size:
        part = store.get(f"cards/{len(values)}", deadline.remaining())
        if not part:
            raise ProtocolError("rank 0 told nothing", rank=0)
        while part:
            end = _LENGTH_NBYTES + int.from_bytes(part[:_LENGTH_NBYTES])
            values.append(part[_LENGTH_NBYTES:end])
            part = part[end:]
    return values


def _with_length(value: bytes) -> bytes:
    return len(value).to_bytes(_LENGTH_NBYTES) + value
