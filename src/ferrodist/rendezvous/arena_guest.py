# SPDX-License-Identifier: MIT OR Apache-2.0
"""The guest's side on one host: it brings its files to rank 0, and leaves with everybody's."""

from __future__ import annotations

import os

from ferrodist.deadline import Deadline
from ferrodist.errors import ProtocolError
from ferrodist.rendezvous import roster
from ferrodist.rendezvous.failure import hear
from ferrodist.rendezvous.guest import Visit, patience
from ferrodist.rendezvous.host import HELLO
from ferrodist.rendezvous.job import Job, Member
from ferrodist.rendezvous.link import Kind, Link, Talk
from ferrodist.rendezvous.roster import Entry
from ferrodist.rendezvous.unix_socket import UnixPoint
from ferrodist.rendezvous.watch import Lifeline


def join(job: Job, arena: int, deadline: Deadline) -> list[Member]:
    """Go to rank 0 and return all members when everybody has them."""
    lifeline = Lifeline()
    is_held = False
    visit = Visit(job, UnixPoint(job), deadline)
    try:
        entries = visit.start(lambda link: _talk(link, job, [arena, lifeline.watch], deadline))
        is_held = entries[job.rank].is_lifeline
    finally:
        visit.close()
        if is_held:
            lifeline.keep()
        else:
            lifeline.close()
    return [entry.member for entry in entries]


def _talk(link: Link, job: Job, files: list[int], deadline: Deadline) -> Talk[list[Entry]]:
    link.send(Kind.HELLO, HELLO.pack(os.getpid(), patience(deadline)), files)
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
