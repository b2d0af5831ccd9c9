# SPDX-License-Identifier: MIT OR Apache-2.0
"""The roster: all members of a job, as they are handed to everybody."""

from __future__ import annotations

import resource
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ferrodist.errors import ProtocolError, RendezvousError
from ferrodist.rendezvous.job import Member
from ferrodist.rendezvous.link import RANKS_PER_ROSTER, Message, close_files

_ENTRY = struct.Struct("!IQ?")


class Entry(NamedTuple):
    """A member, and whether its watch is a lifeline, which it then has to hold."""

    member: Member
    is_lifeline: bool


def close_entries(entries: Sequence[Entry]) -> None:
    """Close the files of members that will not be used."""
    for entry in entries:
        close_files([entry.member.arena, entry.member.watch])


def pack(entries: Sequence[Entry]) -> Iterator[tuple[bytes, list[int]]]:
    """Cut a roster into messages: bytes and files."""
    for start in range(0, len(entries), RANKS_PER_ROSTER):
        part = entries[start : start + RANKS_PER_ROSTER]
        body = b"".join(_ENTRY.pack(e.member.rank, e.member.pid, e.is_lifeline) for e in part)
        yield body, [file for e in part for file in (e.member.arena, e.member.watch)]


def unpack(message: Message) -> list[Entry]:
    """Read one message of a roster."""
    body, files = message.body, message.files
    count, rest = divmod(len(body), _ENTRY.size)
    if rest or count == 0 or len(files) != 2 * count:
        close_files(files)
        if rest or count == 0 or len(files) > 2 * count:
            raise ProtocolError("rank 0 sent a roster that cannot be read", rank=0)
        raise no_room_for_files(f"{len(files)} of {2 * count} files of the other ranks arrived")
    return [
        Entry(Member(rank, pid, files[2 * i], files[2 * i + 1]), is_lifeline)
        for i, (rank, pid, is_lifeline) in enumerate(_ENTRY.iter_unpack(body))
    ]


def no_room_for_files(what: str) -> RendezvousError:
    """Make the error of a process that may open no further files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return RendezvousError(
        f"{what}: a process may open {limit} files here, and needs two per rank; raise the limit "
        "with ulimit -n"
    )
