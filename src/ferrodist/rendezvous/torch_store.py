# SPDX-License-Identifier: MIT OR Apache-2.0
"""TorchExchange: the ranks of torchrun tell each other by the store of torchrun's own agent.

The agent listens at MASTER_PORT, so rank 0 cannot. Its store asks nobody for a secret; whoever
reaches it can read and write there, and make the ranks fail to meet, but not be taken for one. The
only file of this room that imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Self

from ferrodist.deadline import Deadline
from ferrodist.errors import BackendUnavailable, InvalidArgument, RendezvousError
from ferrodist.rendezvous import exchange
from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.launch import Endpoint
from ferrodist.rendezvous.link import Link
from ferrodist.rendezvous.store import absent


class TorchStore:
    """The store of torchrun's agent, with our verbs; keys begin with the name of the job.

    That name holds the number of restarts, so what earlier attempts have left is not found.
    """

    def __init__(self, job: Job, endpoint: Endpoint, deadline: Deadline) -> None:
        self._prefix = f"ferrodist/{job.name}/"
        self._store = _connect(job, endpoint, deadline)

    def set(self, key: str, value: bytes) -> None:
        """Keep a value; raises InvalidArgument if the key has another one."""
        if self._store.compare_set(self._prefix + key, "", value) != value:
            raise InvalidArgument(f"key {key!r} of torchrun's store has another value already")

    def get(self, key: str, timeout: float) -> bytes:
        """Wait for a value; raises RendezvousError if nobody sets it in time."""
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
        """Add to a number that starts at 0, and return the sum."""
        return int(self._store.add(self._prefix + key, amount))


class TorchExchange:
    """The way through the store of torchrun's agent."""

    def __init__(self, job: Job, endpoint: Endpoint, deadline: Deadline) -> None:
        self._job = job
        self._deadline = deadline
        self._store = TorchStore(job, endpoint, deadline)
        self.towards = endpoint.host
        self.lines: Mapping[int, Link] = {}  # torchrun ends the others if this rank fails

    def gather(self, own: bytes) -> list[bytes]:
        """Return what all ranks have to tell; raises RendezvousError naming those that do not."""
        try:
            return exchange.gather(self._store, self._job, own, self._deadline)
        except RendezvousError as error:
            raise self._missing() from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave; the agent's store lives on."""

    def _missing(self) -> RendezvousError:
        """Make the error of ranks that have told nothing."""
        job = self._job
        keys = ["cards/0", *(f"card/{rank}" for rank in range(1, job.world_size))]
        missing = [rank for rank, key in enumerate(keys) if not self._store.has(key)]
        missing = [rank for rank in missing if rank != job.rank] or [0]
        words = ", ".join(f"rank {rank}" for rank in missing[:16])
        return RendezvousError(
            f"{words} of {job.world_size} did not join job {job.name!r} within {self._deadline}; "
            f"this is rank {job.rank}. Look at the output of those: they ended or hang before "
            "ferrodist.init(), or did not call it",
            missing=missing,
            rank=missing[0],
            this_rank=job.rank,
        )


def _connect(job: Job, endpoint: Endpoint, deadline: Deadline) -> Any:
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
        return TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=seconds)
    except (RuntimeError, OSError) as error:
        first_line = (str(error).splitlines() or ["?"])[0]
        raise RendezvousError(
            f"job {job.name!r}: rank {job.rank} cannot reach the store of torchrun's agent at "
            f"{endpoint}: {first_line[:200]}",
            rank=0,
            this_rank=job.rank,
        ) from error
