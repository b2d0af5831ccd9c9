# SPDX-License-Identifier: MIT OR Apache-2.0
"""ArenaHost: rank 0 takes everybody's files and hands them to everybody, on one host."""

from __future__ import annotations

import os
from contextlib import suppress

from ferrodist.deadline import Deadline
from ferrodist.errors import RendezvousError
from ferrodist.rendezvous import roster
from ferrodist.rendezvous.host import Host
from ferrodist.rendezvous.job import Job, Member
from ferrodist.rendezvous.link import Kind, Link, Talk, drive
from ferrodist.rendezvous.reception import Peer
from ferrodist.rendezvous.roster import Entry
from ferrodist.rendezvous.unix_socket import UnixPoint
from ferrodist.rendezvous.watch import open_own_watch, try_peer_pidfd


def receive_all(job: Job, arena: int, deadline: Deadline) -> list[Member]:
    """Wait for all ranks and return the members when everybody has them."""
    host = ArenaHost(job, arena, deadline)
    try:
        host.serve_until(host.is_full)
        return host.hand_out()
    except BaseException as error:
        host.give_up(error)
        raise
    finally:
        host.close()


class ArenaHost(Host):
    """Rank 0 while the ranks exchange their memory."""

    hello = Kind.HELLO

    def __init__(self, job: Job, arena: int, deadline: Deadline) -> None:
        super().__init__(job, UnixPoint(job), deadline)
        own = Member(0, os.getpid(), os.dup(arena), open_own_watch())
        self._entries = {0: Entry(own, is_lifeline=False)}

    def _take(self, link: Link, peer: Peer, rank: int, pid: int, files: list[int]) -> None:
        if len(files) != 2:
            raise roster.no_room_for_files(f"{len(files)} of 2 files of a rank arrived")
        arena, lifeline = files
        pidfd = try_peer_pidfd(link.socket, peer.pid)
        if pidfd is not None:
            os.close(lifeline)
        watch = lifeline if pidfd is None else pidfd
        self._entries[rank] = Entry(Member(rank, peer.pid or pid, arena, watch), pidfd is None)

    def hand_out(self) -> list[Member]:
        """Give everybody all files, one guest after the other, and let all go."""
        self._reception.close()
        entries = [self._entries[rank] for rank in range(self._job.world_size)]
        for rank, guest in self._guests.items():
            try:
                drive(_give(guest.link, entries), guest.link, self._deadline)
            except EOFError as error:
                raise self._left(rank) from error
            except TimeoutError as error:
                raise RendezvousError(
                    f"rank {rank} ({guest.who}) has joined and then not answered", rank=rank
                ) from error
        for guest in self._guests.values():
            with suppress(EOFError):  # who dies from now on is found by the watches
                guest.link.send(Kind.GO)
        return [entry.member for entry in entries]

    def give_up(self, error: BaseException) -> None:
        """Tell all guests why the ranks will not meet, and close their files."""
        super().give_up(error)
        roster.close_entries(list(self._entries.values()))


def _give(link: Link, entries: list[Entry]) -> Talk[None]:
    """Hand a roster over; each part is taken before the next is sent.

    The kernel bounds how many files a user may have on their way.
    """
    for body, files in roster.pack(entries):
        link.send(Kind.ROSTER, body, files)
        yield from link.receive(Kind.TAKEN)
