# SPDX-License-Identifier: MIT OR Apache-2.0
"""The errors of point-to-point calls: each is the caller's own, the group goes on.

``what`` is the call as errors show it, ``peer`` the rank at fault, ``this_rank`` the one that
raises, ``tags`` what has come from the peer and nobody received.
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrodist.backends.verdict import Departure, died
from ferrodist.call import Leaf
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    CollectiveTimeout,
    OutOfMemory,
    ProtocolError,
    RankLost,
    SizeMismatch,
)

GONE = died("is gone, and has not said why")
"""How a rank left of which nothing is known but that it cannot be reached."""


def timed_out(
    what: str, peer: int, this_rank: int, deadline: Deadline, tags: Sequence[int]
) -> CollectiveTimeout:
    """Make the error of a wait that took too long."""
    text = (
        f"{what}: rank {peer} did not answer within {deadline}{_other_tags(tags)}; look at that "
        "rank, or raise the limit with timeout=, backend.timeout or FERRODIST_TIMEOUT"
    )
    return CollectiveTimeout(text, missing=[peer], rank=peer, this_rank=this_rank)


def lost(
    what: str, peer: int, this_rank: int, departure: Departure, tags: Sequence[int]
) -> RankLost:
    """Make the error of a peer that is gone, or takes or sends nothing more."""
    text = f"{what}: rank {peer} {departure.how}{_other_tags(tags)}"
    return RankLost(text, rank=peer, this_rank=this_rank, how=departure.how)


def damaged(what: str, peer: int, this_rank: int, reason: str) -> ProtocolError:
    """Make the error of bytes that cannot be right."""
    text = f"{what}: bytes from rank {peer} cannot be right ({reason})"
    return ProtocolError(text, rank=peer, this_rank=this_rank, reason=reason)


def no_memory(what: str, peer: int, this_rank: int) -> OutOfMemory:
    """Make the error of a message that its receiver, or its sender, had no memory for."""
    text = (
        f"{what}: no memory for a message with rank {peer}, here or there; messages that nobody "
        "receives fill it, up to FERRODIST_UNEXPECTED_NBYTES for each rank"
    )
    return OutOfMemory(text, rank=peer, this_rank=this_rank)


def send_cycle(what: str, peer: int, this_rank: int, ranks: Sequence[int]) -> CollectiveTimeout:
    """Make the error of large sends that wait for each other."""
    path = " -> ".join(map(str, [*ranks, ranks[0]]))
    text = f"{what}: ranks {path} all send and none receives; use sendrecv"
    return CollectiveTimeout(text, missing=[peer], rank=peer, this_rank=this_rank)


def unexpected(what: str, peer: int, this_rank: int, found: Leaf, expected: Leaf) -> SizeMismatch:
    """Make the error of a message that is not what its receiver expects."""
    return SizeMismatch(
        f"{what}: rank {peer} sent {found}, this rank expected {expected}; the message was dropped",
        rank=peer,
        this_rank=this_rank,
        expected=str(expected),
        got=str(found),
    )


def _other_tags(tags: Sequence[int]) -> str:
    return f" (what it sent has other tags: {list(tags)})" if tags else ""
