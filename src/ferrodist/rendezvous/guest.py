# SPDX-License-Identifier: MIT OR Apache-2.0
"""The guest's side: every rank but 0 comes to rank 0, wherever that listens."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from ferrodist.deadline import Deadline
from ferrodist.errors import RendezvousError
from ferrodist.rendezvous import start_errors
from ferrodist.rendezvous.early_ends import EarlyEnds
from ferrodist.rendezvous.failure import hear
from ferrodist.rendezvous.handshake import greet_host
from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.link import Kind, Link, Talk, drive
from ferrodist.rendezvous.meeting_point import MeetingPoint

T = TypeVar("T")

_FIRST_PAUSE = 0.001  # seconds between two attempts to reach the host; it doubles
_PAUSE_IF_BUSY = 0.02


class Visit:
    """A way to rank 0: ``talk`` goes there and says something; ``link`` is open until ``close``."""

    def __init__(self, job: Job, point: MeetingPoint, deadline: Deadline) -> None:
        self._job = job
        self._point = point
        self._deadline = deadline
        self._who = ""
        self.link: Link | None = None

    def start(self, talk: Callable[[Link], Talk[T]]) -> T:
        """Connect to rank 0, shake hands, and talk; again if rank 0 is too busy to listen."""
        while True:
            self.link = self._reach()
            try:
                return self.go_on(self._greet_and(talk), self._deadline)
            except BlockingIOError as error:  # too many visitors: we are asked to come again
                self.close()
                if self._deadline.remaining() <= 0:
                    raise self._no_answer(self._deadline) from error
                time.sleep(random.uniform(1, 5) * _PAUSE_IF_BUSY)  # not all at the same moment
            except BaseException:
                self.close()
                raise

    def go_on(self, talk: Callable[[Link], Talk[T]], deadline: Deadline) -> T:
        """Talk on an open link; raises RendezvousError if rank 0 is gone or does not answer."""
        link = self.link
        if link is None:
            raise RendezvousError(
                "the connection to rank 0 was closed", rank=0, this_rank=self._job.rank
            )
        try:
            return drive(talk(link), link, deadline)
        except EOFError as error:
            _hear_last_words(link)
            EarlyEnds(self._job).look_at_once(_others(self._job))
            raise start_errors.host_left(self._job, self._who) from error
        except TimeoutError as error:
            raise self._no_answer(deadline) from error

    def _nobody(self) -> RendezvousError:
        return start_errors.missing_host(self._job, self._point.address, self._deadline)

    def _no_answer(self, deadline: Deadline) -> RendezvousError:
        return RendezvousError(
            f"rank 0 of job {self._job.name!r} ({self._who}) did not answer within {deadline}; "
            f"{start_errors.this_process(self._job)}",
            rank=0,
            this_rank=self._job.rank,
        )

    def close(self) -> None:
        """End the connection; once is enough."""
        if self.link is not None:
            self.link.close()
            self.link = None

    def _greet_and(self, talk: Callable[[Link], Talk[T]]) -> Callable[[Link], Talk[T]]:
        def both(link: Link) -> Talk[T]:
            yield from greet_host(link, self._job, where=self._point.where())
            return (yield from talk(link))

        return both

    def _reach(self) -> Link:
        """Connect to rank 0, which may not have started yet."""
        pause, early_ends = _FIRST_PAUSE, EarlyEnds(self._job)
        while (connection := self._point.try_connect()) is None:
            if self._deadline.remaining() <= 0:
                raise self._no_answer(self._deadline) if self._who else self._nobody()
            early_ends.look(_others(self._job))
            time.sleep(min(pause, max(0.0, self._deadline.remaining())))
            pause = min(2 * pause, self._point.longest_pause)
        try:
            self._who = str(self._point.identify(connection))
        except BaseException:
            connection.close()
            raise
        return Link(connection)


def patience(deadline: Deadline) -> float:
    """Return when the host has to give up so that we hear its reasons in time."""
    remaining = deadline.remaining()
    return remaining - min(0.5, remaining / 10)


def _hear_last_words(link: Link) -> None:
    """Raise what the host said while we were sending, if it said something before it left."""
    with suppress(EOFError, TimeoutError):
        drive(hear(link, Kind.BUSY), link, Deadline(0.0))


def _others(job: Job) -> list[int]:
    return [rank for rank in range(job.world_size) if rank != job.rank]
