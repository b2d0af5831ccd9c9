# SPDX-License-Identifier: MIT OR Apache-2.0
"""Point-to-point calls of ranks that are threads: posting, matching, waiting, and their errors."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

from ferrodist.arrays import InputArray
from ferrodist.backends import failures
from ferrodist.backends.framing import FrameError, split_message
from ferrodist.backends.p2p import Posted, header_of
from ferrodist.backends.receive import ANY, Message, Misfit, PostedReceive, Receive, status_of
from ferrodist.backends.request_work import NO_PEER, name_of_message, source_of
from ferrodist.backends.thread_control import Control, LoggingHook
from ferrodist.backends.thread_links import SendRequest, ThreadTransport
from ferrodist.call import caller_site
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    BackendClosed,
    CollectiveTimeout,
    InvalidArgument,
    ProtocolError,
    SelfSend,
    SizeMismatch,
)
from ferrodist.message_status import Status


class Messenger:
    """Sends and receives arrays."""

    def __init__(self, transport: ThreadTransport, control: Control, rank: int) -> None:
        self._transport = transport
        self._control = control
        self._rank = rank
        self._status = control.statuses[rank]

    def send(self, source: InputArray, peer: int, tag: int, deadline: Deadline) -> None:
        what = name_of_message(peer, NO_PEER, tag, 0)
        hook = SendHook(self._control, self._rank, peer, what, deadline)
        request = self._post(source, peer, tag, hook)
        sends = self._control.sends
        sends.append(hook)
        try:
            self._transport.wait_taken(request, hook)
        finally:
            sends.remove(hook)

    def post(self, source: InputArray, peer: int, tag: int, deadline: Deadline) -> Posted:
        what = name_of_message(peer, NO_PEER, tag, 0)
        hook = MessageHook(self._control, self._rank, what, deadline)
        request = self._post(source, peer, tag, hook)
        wait_taken = partial(self._transport.wait_taken, request, hook)
        withdraw_send = partial(self._transport.withdraw_send, request)
        return Posted(what, wait_taken, withdraw_send, request.is_taken)

    def post_receive(self, receive: Receive, deadline: Deadline) -> Posted:
        name = "recv_object" if receive.takes_object else "recv"
        hook = self._hook(receive.peer, receive.tag, deadline, name)
        posted = self._post_receive(receive)
        finish = partial(self._finish, posted, receive, hook)
        cancel = partial(self._cancel, posted)
        return Posted(hook.call, finish, cancel, posted.is_over, is_receive=True)

    def sendrecv(
        self, source: InputArray, to: int, tag: int, receive: Receive, deadline: Deadline
    ) -> Any:
        """Send and receive at once; if nothing is received the message is withdrawn.

        A message that came but does not fit is this rank's own affair: its own goes out.
        """
        what = name_of_message(to, source_of(receive.peer), tag, receive.tag)
        sending = MessageHook(self._control, self._rank, what, deadline)
        receiving = MessageHook(self._control, self._rank, what, deadline, is_receiving=True)
        request = self._post(source, to, tag, sending)
        try:
            posted = self._post_receive(receive)
            if receive.peer == self._rank and not posted.is_over:
                self._cancel(posted)
                text = f"{receiving.what}: rank {self._rank} has sent itself nothing with that tag"
                raise SelfSend(text, rank=self._rank, this_rank=self._rank)
            received = self._finish(posted, receive, receiving)
        except (SizeMismatch, ProtocolError, InvalidArgument):
            self._transport.wait_taken(request, sending)
            raise
        except BaseException:  # Ctrl-C too: a message that was given up must not arrive
            self._transport.withdraw_send(request)
            raise
        self._transport.wait_taken(request, sending)
        return received

    def probe(self, peer: int, tag: int, deadline: Deadline) -> Status:
        hook = self._hook(peer, tag, deadline, "probe")
        source, group = self._world_rank(peer), self._control.group
        posted = PostedReceive(source, tag, is_probe=True)
        self._transport.post_receive(posted, group)
        self._await(posted, hook)
        return self._status_of(posted.message)

    def try_probe(self, peer: int, tag: int) -> Status | None:
        """Tell what a receive would get now; raise if nothing can come any more."""
        source, control = self._world_rank(peer), self._control
        with control.switch.lock:
            found = self._transport.find(source, tag, control.group)
            if found is None:
                control.refuse_if_aborted(self._rank)
                self._hook(peer, tag, Deadline(None), "try_probe").raise_if_lost(source)
                return None
        return self._status_of(found)

    def _status_of(self, message: Message | None) -> Status:
        assert message is not None
        header, _ = split_message(memoryview(message.payload))
        return status_of(self._control.rank_of(message.source), message.tag, header)

    def _world_rank(self, peer: int) -> int:
        return ANY if peer == ANY else self._control.members[peer]

    def _hook(self, peer: int, tag: int, deadline: Deadline, name: str) -> MessageHook:
        call = name_of_message(NO_PEER, source_of(peer), 0, tag, name)
        return MessageHook(self._control, self._rank, call, deadline, is_receiving=True)

    def _post(self, source: InputArray, peer: int, tag: int, hook: MessageHook) -> SendRequest:
        to, group, memory = self._control.members[peer], self._control.group, source.buffer.memory
        return self._transport.post(to, group, tag, header_of(source), memory, hook)

    def _post_receive(self, receive: Receive) -> PostedReceive:
        self._count_receive(1)
        peer = self._world_rank(receive.peer)
        posted = PostedReceive(peer, receive.tag, takes_object=receive.takes_object)
        self._transport.post_receive(posted, self._control.group)
        return posted

    def _finish(self, posted: PostedReceive, receive: Receive, hook: MessageHook) -> Any:
        try:
            self._await(posted, hook)
        finally:
            if not posted.is_cancelled:
                self._count_receive(-1)
        message = posted.message
        assert message is not None
        source = self._control.rank_of(message.source)
        if posted.is_refused:
            is_object = message.is_object
            raise failures.other_kind(hook.what, source, self._rank, is_object=is_object)
        try:
            return receive.finish_message(memoryview(message.payload), source, message.tag)
        except Misfit as error:
            found, expected = error.found, error.expected
            raise failures.unexpected(hook.what, source, self._rank, found, expected) from None
        except FrameError as error:
            hook.damaged(message.source, str(error))
            raise

    def _await(self, posted: PostedReceive, hook: MessageHook) -> None:
        """Wait for the message of a receive; one that fails is withdrawn."""
        transport, group = self._transport, self._control.group
        with self._control.switch.lock:
            try:
                transport.sleep_until(lambda: posted.is_over, posted.peer, hook)
            except BaseException:  # Ctrl-C too: else it would take a later message
                if transport.withdraw(posted, group):
                    posted.is_cancelled = False  # it was not cancelled by its caller
                raise
        if posted.is_cancelled:
            raise CancelledError(f"{hook.what} was cancelled")

    def _cancel(self, posted: PostedReceive) -> bool:
        """Take a receive back, unless it has its message."""
        is_withdrawn = self._transport.withdraw(posted, self._control.group)
        if is_withdrawn:
            self._count_receive(-1)
        return is_withdrawn

    def _count_receive(self, change: int) -> None:
        with self._control.switch.lock:
            self._status.receives += change
            if self._status.is_closing:  # senders may wait for a receive that never comes
                self._control.switch.wake_all()


# -- waits -----------------------------------------------------------------------------------------


class MessageHook(LoggingHook):
    """The waits of one rank in a point-to-point call: its errors are its own, the group goes on."""

    def __init__(
        self,
        control: Control,
        rank: int,
        call: str,
        deadline: Deadline,
        *,
        is_receiving: bool = False,
    ) -> None:
        super().__init__(control, rank, deadline)
        self.call = call
        self.is_receiving = is_receiving
        self._site = caller_site()

    @property
    def what(self) -> str:
        """The call as errors show it; made only for them."""
        return f"{self.call} at {self._site}{self.control.group_name}"

    def poll(self, peer: int) -> float:
        """Raise if the group was given up, the peer is gone or the time is over."""
        peers = self._others() if peer == ANY else [self.control.rank_of(peer)]
        self.control.refuse_if_aborted(self.rank)
        if self.is_over(peers):
            raise self.timed_out(peers)
        self.raise_if_lost(peer)
        return self._sleep_limit(lambda: f"{self.call} at {self._site}", lambda: peers)

    def raise_if_lost(self, peer: int) -> None:
        """Raise if nothing can be had any more of a rank, or of any."""
        if peer == ANY:
            self._raise_if_any_lost()
            return
        group_peer = self.control.rank_of(peer)
        status = self.control.statuses[group_peer]
        if group_peer == self.rank:
            if status.is_closing:
                raise BackendClosed(f"{self.what}: this rank is closing", this_rank=self.rank)
            return
        leave_reason = status.sends_no_more() if self.is_receiving else status.takes_no_more()
        if leave_reason is not None and not self._is_pending(group_peer):
            tags = self.control.waiting_tags([group_peer], self.rank)
            raise failures.lost(self.what, group_peer, self.rank, leave_reason, tags)

    def _raise_if_any_lost(self) -> None:
        """Raise if a rank has died, or all others have left, and nothing is on its way."""
        others = self._others()
        reasons = {rank: self.control.statuses[rank].sends_no_more() for rank in others}
        left = {rank: why for rank, why in reasons.items() if why and not self._is_pending(rank)}
        tags = self.control.waiting_tags(others, self.rank)
        for rank, leave_reason in left.items():
            if not leave_reason.is_normal:
                raise failures.lost(self.what, rank, self.rank, leave_reason, tags)
        if others and len(left) == len(others):
            last = others[-1]
            raise failures.lost_all(self.what, last, self.rank, left[last], tags)

    def _others(self) -> list[int]:
        return [rank for rank in range(len(self.control.members)) if rank != self.rank]

    def _is_pending(self, peer: int) -> bool:
        members = self.control.members
        return self.control.switch.is_pending(members[peer], members[self.rank])

    def is_over(self, peers: Sequence[int]) -> bool:
        """Tell whether the deadline ends the wait for a rank, or for any of several."""
        is_late = self.deadline.remaining() <= 0
        may_come = (self.control.may_still_come([peer], self.deadline) for peer in peers)
        return is_late and not any(may_come)

    def damaged(self, peer: int, reason: str) -> None:
        rank = self.control.rank_of(peer)
        raise failures.damaged(self.what, rank, self.rank, reason)

    def timed_out(self, peers: Sequence[int]) -> CollectiveTimeout:
        tags = self.control.waiting_tags(peers, self.rank)
        return failures.timed_out(self.what, peers, self.rank, self.deadline, tags)


class SendHook(MessageHook):
    """The wait of a large send that holds its caller: a cycle of these is called by its name."""

    def __init__(
        self, control: Control, rank: int, peer: int, call: str, deadline: Deadline
    ) -> None:
        super().__init__(control, rank, call, deadline)
        self.peer = peer
        self.cycle: list[int] = []

    def poll(self, peer: int) -> float:
        """Raise as a message does; the first to find a send cycle tells the others in it."""
        if not self.cycle and self.is_over([self.peer]):
            self._find_cycle()
        leave_reason = self.control.statuses[self.peer].takes_no_more()
        if self.cycle and (leave_reason is not None or self.is_over([self.peer])):
            raise failures.send_cycle(self.what, self.peer, self.rank, self.cycle)
        return super().poll(peer)

    def _find_cycle(self) -> None:
        """Follow the sends that wait; a way back to this one is a cycle."""
        sends = {hook.rank: hook for hook in self.control.sends}
        cycle = [self]
        while (after := sends.get(cycle[-1].peer)) is not None and after not in cycle:
            cycle.append(after)
        if after is self:
            ranks = [hook.rank for hook in cycle]
            start = ranks.index(min(ranks))
            for hook in cycle:
                hook.cycle = ranks[start:] + ranks[:start]
