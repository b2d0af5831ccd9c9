# SPDX-License-Identifier: MIT OR Apache-2.0
"""LinkedBackend: a backend whose ranks somebody else connects; see ``docs/own_backend.md``.

A third party brings one byte stream for each pair of ranks, and optionally an engine. Everything
else is what ranks over TCP have: native progress, comparing calls, deadlines, losses, messages.
"""

from __future__ import annotations

import abc
import socket
from collections.abc import Sequence
from typing import Self

from ferrodist.backends.engines.engine import Engine, EngineCalls
from ferrodist.backends.failures import LeaveReason
from ferrodist.backends.pump import Pump, Stream
from ferrodist.config import Config, variable
from ferrodist.deadline import Deadline
from ferrodist.errors import InvalidArgument
from ferrodist.rendezvous import Job
from ferrodist.rendezvous.links import join_links
from ferrodist.rendezvous.mesh import MeshPeer

__all__ = ["Engine", "LinkedBackend", "Stream"]

Link = socket.socket | Stream | None


class LinkedBackend(EngineCalls):
    """A group of processes over links of a third party, which writes ``connect``.

    What ``open_engine`` returns runs large collectives, once all ranks are in them.
    """

    _pumps: Sequence[Pump] = ()  # of the first group

    @classmethod
    @abc.abstractmethod
    def connect(cls, job: Job, config: Config) -> Sequence[Link]:
        """Connect this rank to all others; return a link for each rank, None for this one.

        Every rank calls it. A link is a connected stream socket, which the backend takes over, or
        a ``Stream``. It has ``config.join_timeout`` seconds. Links need not prove anything: ranks
        shake hands over them, with the job's secret.
        """

    def open_engine(self) -> Engine | None:
        """Make the engine of this group, the first one or one that was split off; None: none.

        Every rank of the group calls it, when all of them are connected.
        """
        return None

    def close_engine(self, engine: Engine, *, has_failed: bool) -> None:
        """Leave the engine's group; it may hold calls that were given up if the group failed."""

    @classmethod
    def join(cls, job: Job, *, config: Config | None = None) -> Self:
        """Join the job that the launcher has started; ``ferrodist.init`` calls it."""
        config = Config.from_environment() if config is None else config
        if config.tls:
            raise InvalidArgument(
                f"{variable('tls')}=1: ferrodist does not encrypt the links that "
                f"{cls.__name__}.connect() makes; unset it, or use another backend"
            )
        mesh_peers, pumps = cls._connect(job, config)
        made = cls._over(job, config, mesh_peers)
        made._pumps = pumps
        try:
            made._open_own_engine()
        except BaseException as error:  # Ctrl-C too: the others wait for this rank
            made._fail(error)
            raise
        return made

    @classmethod
    def _connect(cls, job: Job, config: Config) -> tuple[list[MeshPeer], Sequence[Pump]]:
        links = list(cls.connect(job, config))
        try:
            _check_links(cls.__name__, job, links)
            pumps = []
            for rank, link in enumerate(links):
                if link is not None and not isinstance(link, socket.socket):
                    pumps.append(Pump(link))
                    links[rank] = pumps[-1].socket
            sockets = [link for link in links if link is None or isinstance(link, socket.socket)]
            return join_links(job, config, sockets), pumps
        except BaseException:
            for link in links:
                if link is not None:
                    link.close()
            raise

    def _open_own_engine(self) -> None:
        engine = self.open_engine()
        if engine is not None:
            self._use(engine)

    def _split_engine(self, parent: Self, deadline: Deadline) -> None:
        self._open_own_engine()

    def _close_engine(self, *, has_failed: bool) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            self.close_engine(engine, has_failed=has_failed)

    def _leave(self, leave_reason: LeaveReason, deadline: Deadline) -> None:
        super()._leave(leave_reason, deadline)
        for pump in self._pumps:
            pump.finish(deadline)


def _check_links(name: str, job: Job, links: Sequence[Link]) -> None:
    found = [rank for rank, link in enumerate(links) if link is not None]
    expected = [rank for rank in range(job.world_size) if rank != job.rank]
    if len(links) != job.world_size or found != expected:
        raise InvalidArgument(
            f"{name}.connect() on rank {job.rank} of {job.world_size}: expected a link for each of "
            f"the ranks {expected} and None for its own, got {len(links)} with links for {found}",
            this_rank=job.rank,
        )
