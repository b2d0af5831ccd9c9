# SPDX-License-Identifier: MIT OR Apache-2.0
"""The guest's side: every rank but 0 comes to rank 0, and leaves with everybody's files."""

from __future__ import annotations

import os
import random
import struct
import time
from contextlib import suppress

from ferrodist.deadline import Deadline
from ferrodist.errors import ProtocolError, RendezvousError
from ferrodist.rendezvous import roster, start_errors
from ferrodist.rendezvous.early_ends import EarlyEnds
from ferrodist.rendezvous.failure import hear
from ferrodist.rendezvous.handshake import greet_host
from ferrodist.rendezvous.job import Job, Member
from ferrodist.rendezvous.link import Kind, Link, Talk, drive
from ferrodist.rendezvous.roster import Entry
from ferrodist.rendezvous.unix_socket import address_of, check_user, peer_of, try_connect
from ferrodist.rendezvous.watch import Lifeline

HELLO = struct.Struct("!Qd")  # pid, seconds within which the host has to decide

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02  # between two attempts to reach the host


def join(job: Job, arena: int, deadline: Deadline) -> list[Member]:
    """Go to rank 0 and return all members when everybody has them."""
    lifeline = Lifeline()
    is_held = False
    try:
        entries = _visit_until_heard(job, [arena, lifeline.watch], deadline)
        is_held = entries[job.rank].is_lifeline
    finally:
        if is_held:
            lifeline.keep()
        else:
            lifeline.close()
    return [entry.member for entry in entries]


def _visit_until_heard(job: Job, files: list[int], deadline: Deadline) -> list[Entry]:
    while True:
        link = _reach(job, deadline)
        try:
            return _visit(link, job, files, deadline)
        except BlockingIOError:  # too many visitors: we are asked to come again
            time.sleep(random.uniform(1, 5) * _LONGEST_PAUSE)  # not all at the same moment
        finally:
            link.close()


def _reach(job: Job, deadline: Deadline) -> Link:
    """Connect to rank 0, which may not have started yet."""
    pause, early_ends = _FIRST_PAUSE, EarlyEnds(job)
    while (connection := try_connect(job)) is None:
        if deadline.remaining() <= 0:
            raise start_errors.missing_host(job, address_of(job.name), deadline)
        early_ends.look(_others(job))
        time.sleep(min(pause, max(0.0, deadline.remaining())))
        pause = min(2 * pause, _LONGEST_PAUSE)
    return Link(connection)


def _visit(link: Link, job: Job, files: list[int], deadline: Deadline) -> list[Entry]:
    peer = peer_of(link.socket)
    check_user(peer)
    try:
        return drive(_talk(link, job, files, deadline), link, deadline)
    except EOFError as error:
        _hear_last_words(link)
        EarlyEnds(job).look_at_once(_others(job))
        raise start_errors.host_left(job, peer.pid) from error
    except TimeoutError as error:
        raise RendezvousError(
            f"rank 0 of job {job.name!r} (pid {peer.pid}) did not answer within {deadline}; "
            f"{start_errors.this_process(job)}",
            rank=0,
            this_rank=job.rank,
        ) from error


def _talk(link: Link, job: Job, files: list[int], deadline: Deadline) -> Talk[list[Entry]]:
    yield from greet_host(link, job)
    link.send(Kind.HELLO, HELLO.pack(os.getpid(), _patience(deadline)), files)
    entries: list[Entry] = []
    try:
        while len(entries) < job.world_size:
            entries += roster.unpack((yield from hear(link, Kind.ROSTER)))
            link.send(Kind.TAKEN)
        if [entry.member.rank for entry in entries] != list(range(job.world_size)):
            raise ProtocolError("rank 0 sent a roster that is not of this world", rank=0)
        yield from hear(link, Kind.GO)
    except BaseException:
        roster.close_entries(entries)
        raise
    return entries


def _hear_last_words(link: Link) -> None:
    """Raise what the host said while we were sending, if it said something before it left."""
    with suppress(EOFError, TimeoutError):
        drive(hear(link, Kind.BUSY), link, Deadline(0.0))


def _others(job: Job) -> list[int]:
    return [rank for rank in range(job.world_size) if rank != job.rank]


def _patience(deadline: Deadline) -> float:
    """Return when the host has to give up so that we hear its reasons in time."""
    remaining = deadline.remaining()
    return remaining - min(0.5, remaining / 10)
