# SPDX-License-Identifier: MIT OR Apache-2.0
"""Provider: the interface of a third-party backend; ``docs/own_backend.md`` explains an example.

A provider moves messages, and does those collectives that it can do faster than messages do. All
else is the work of ``ProviderBackend``, which holds it: tickets, calls in flight, comparing calls,
deadlines, naming who is missing or lost, splitting, closing, arrays, trees and objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from ferrodist.backends.running_call import CollectiveArgs
from ferrodist.buffer import Buffer
from ferrodist.call import Kind
from ferrodist.deadline import Deadline

RankStatus = Literal["alive", "lost", "unknown"]
"""What a provider knows of a rank."""


class Request(Protocol):
    """A message on its way. It may also have ``wait(seconds)``, to sleep until it may be done.

    Without ``wait`` the base polls ``test``, more and more slowly.
    """

    def test(self) -> bool:
        """Tell whether it is done; never waits.

        A send is done when its memory may change, a receive when its message is there. Raises
        ``ConnectionError(rank)`` if it can never be done because that rank is gone; a message that
        had come before is there all the same.
        """

    def cancel(self) -> bool:
        """Give it up; False if it is too late, because it is done.

        From then on its memory is not touched. A message that is not received stays where it is,
        for the next receive.
        """


class Provider(Protocol):
    """One rank of a group, and how it reaches the others. Called by several threads at once.

    Messages of one rank to another become visible in the order they were sent. Receives from one
    rank with one tag take them in the order they were posted. A rank sends nothing to itself.
    """

    @property
    def rank(self) -> int:
        """This rank's number in the group."""

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""

    @property
    def local_rank(self) -> int:
        """This rank's number among those of the group on its host."""

    @property
    def local_world_size(self) -> int:
        """How many ranks of the group are on its host."""

    def collective(
        self,
        kind: Kind,
        input: Buffer | None,
        output: Buffer | None,
        args: CollectiveArgs,
        deadline: Deadline,
    ) -> Any:
        """Do one whole collective, or return NotImplemented: then the base does it by messages.

        All ranks give the same answer, by what is the same on all of them: ``kind``, ``args``, the
        dtype. They come here one collective at a time, in the same order, after the base has seen
        that their calls agree. ``kind`` is one up to EXSCAN of ``Kind``. A buffer is None
        where a rank has none; ``CollectiveArgs`` says what the options mean: a provider that does
        not know an operation, or ``counts``, returns NotImplemented. The operation of a user's own
        never comes here; MINLOC does, of ``DType.PAIR``: pairs of unsigned 64-bit numbers, of which
        the least wins, by the first and then by the second. Raises
        ``TimeoutError(rank)`` after the deadline, without the rank if it is not known who is late;
        ``ConnectionError(rank)`` if one is gone; either of them after ``abort``.
        """

    def isend(self, data: memoryview, peer: int, tag: int) -> Request:
        """Send bytes. ``data`` does not change before the request is done.

        A message of up to 64 KB is done without its receiver. Tags go from 0 to 2**63 - 1; negative
        ones are free for messages of the provider's own.
        """

    def irecv(self, memory: memoryview, peer: int, tag: int) -> Request:
        """Receive the next message of a rank with this tag.

        A message may be shorter than ``memory``, which is then written in part. Of one that is
        longer, what fits is written and the rest is dropped.
        """

    def iprobe(self, peer: int, tag: int) -> int | None:
        """Return the length of the next message that no receive was posted for; None if none came.

        It is in the nature of a question: it never waits, and the message stays.
        """

    def split(self, ranks: Sequence[int]) -> Provider:
        """Make a group of some ranks of this one, numbered in this order.

        All members call it with the same list, after the base has seen that all are there. Messages
        of the two groups never mix, nor those of two groups that were made of one list.
        """

    def abort(self, reason: str) -> None:
        """Let the collectives of the group raise, on all ranks; messages go on.

        The base tells the other ranks why. Without collectives of its own there is nothing to do.
        """

    def close(self) -> None:
        """Leave the group. What was sent before still arrives. No other method is called after."""

    def status(self, rank: int) -> RankStatus:
        """Return "alive", "lost" if the process of a rank has ended, or "unknown".

        Ranks that close their backend say so themselves: this is about those that cannot. Where it
        is unknown, a call that needs such a rank ends by its deadline.
        """
