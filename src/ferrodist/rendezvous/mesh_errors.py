# SPDX-License-Identifier: MIT OR Apache-2.0
"""The errors of ranks that know of each other and cannot connect: who, whom, where, what to do."""

from __future__ import annotations

from collections.abc import Sequence

from ferrodist.config import variable
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, RendezvousError
from ferrodist.rendezvous import roster
from ferrodist.rendezvous.cards import Card
from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.launch import Endpoint

_SHOWN = 8  # ranks named in a text


def unreachable(job: Job, card: Card, why: str) -> RendezvousError:
    """Make the error of a rank that listens at an address where this one does not get through."""
    return RendezvousError(
        f"{card} of job {job.name!r} could not be reached from rank {job.rank} at {_where(card)}: "
        f"{why}; {_what_to_do()}",
        rank=card.rank,
        this_rank=job.rank,
        address=_where(card),
    )


def not_connected(
    job: Job, own: Card, cards: Sequence[Card], deadline: Deadline
) -> RendezvousError:
    """Make the error of ranks that have not come to this one."""
    return RendezvousError(
        f"{_listed(cards)} of job {job.name!r} did not connect to {own} at {_where(own)} within "
        f"{deadline}: look at the output of those; {_what_to_do()}",
        rank=cards[0].rank,
        this_rank=job.rank,
        missing=[card.rank for card in cards],
        address=_where(own),
    )


def not_ready(job: Job, cards: Sequence[Card], deadline: Deadline) -> RendezvousError:
    """Make the error of ranks that are connected to this one, but not to all."""
    return RendezvousError(
        f"{_listed(cards)} of job {job.name!r} did not say within {deadline} that all ranks are "
        f"connected: look at the output of those; {_what_to_do()}",
        rank=cards[0].rank,
        this_rank=job.rank,
        missing=[card.rank for card in cards],
    )


def left(job: Job, card: Card) -> RendezvousError:
    """Make the error of a rank that has ended its connection before all were connected."""
    how = (job.ends and job.ends.how(card.rank)) or "ended or gave up"
    return RendezvousError(
        f"{card} {how} before all ranks of job {job.name!r} were connected; look at its own output",
        rank=card.rank,
        this_rank=job.rank,
    )


def no_room_for_files(job: Job, card: Card) -> RendezvousError:
    """Make the error of a process that may open no further files."""
    error = roster.no_room_for_files(f"rank {job.rank} cannot connect to {card}")
    return RendezvousError(str(error), rank=job.rank, this_rank=job.rank)


def wrong_answer(job: Job, card: Card, error: DistributedError) -> DistributedError:
    """Make the error of an address where somebody else answers, or in another language."""
    return type(error)(
        f"rank {job.rank} looked for {card} at {_where(card)}: {error}",
        rank=card.rank,
        this_rank=job.rank,
        got=error.got,
        expected=error.expected,
    )


def _where(card: Card) -> str:
    return str(Endpoint(card.address, card.port))


def _listed(cards: Sequence[Card]) -> str:
    more = len(cards) - _SHOWN
    shown = ", ".join(map(str, cards[:_SHOWN]))
    return f"{shown} and {more} more" if more > 0 else shown


def _what_to_do() -> str:
    return (
        "let the hosts connect to each other at all ports, or set "
        f"{variable('ports')} to those that a firewall lets through; set "
        f"{variable('socket_ifname')} if this is the wrong network; 'ferrodist doctor' tries both"
    )
