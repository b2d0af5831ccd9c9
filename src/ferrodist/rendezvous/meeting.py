# SPDX-License-Identifier: MIT OR Apache-2.0
"""meet: all ranks of a job come together."""

from __future__ import annotations

import os

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, RendezvousError
from ferrodist.rendezvous import arena_guest, arena_host
from ferrodist.rendezvous.job import Job, Member
from ferrodist.rendezvous.start_errors import several_hosts
from ferrodist.rendezvous.watch import open_own_watch


def meet(job: Job, arena: int, timeout: float) -> list[Member]:
    """Exchange memory files with all ranks of the job; return all members, in rank order.

    Every rank calls it, and none returns before all have everything. ``arena`` stays the caller's;
    the files of the members, its own included, are new ones. Raises RendezvousError, naming the
    ranks at fault, AuthenticationError or ProtocolError, within ``timeout`` seconds; at once for a
    job on several hosts.
    """
    if job.several_hosts:
        raise several_hosts(job)
    if job.world_size == 1:
        return [Member(0, os.getpid(), os.dup(arena), open_own_watch())]
    come_together = arena_host.receive_all if job.rank == 0 else arena_guest.join
    try:
        return come_together(job, arena, Deadline(timeout))
    except DistributedError:
        raise
    except OSError as error:
        raise RendezvousError(
            f"rank {job.rank} could not join job {job.name!r}: {error}", this_rank=job.rank
        ) from error
