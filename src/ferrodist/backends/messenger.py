# SPDX-License-Identifier: MIT OR Apache-2.0
"""Messenger: the point-to-point calls of one rank in one group, over any transport."""

from __future__ import annotations

from collections.abc import Callable

from ferrodist import _native
from ferrodist.backends import message_errors
from ferrodist.backends.control import Control
from ferrodist.backends.messaging import Lanes
from ferrodist.backends.watches import MessageWatch, SendWatch
from ferrodist.buffer import Buffer
from ferrodist.call import Leaf
from ferrodist.deadline import Deadline
from ferrodist.errors import ProtocolError, SizeMismatch
from ferrodist.transports.base import Letter, Transport
from ferrodist.transports.framing import FrameError, pack_array_header, unpack_array_header

_QUEUE_LOOK = 0.05  # seconds between looks while a receive waits for its turn


class Messenger:
    """Sends and receives arrays; receives from one peer with one tag keep program order."""

    def __init__(self, transport: Transport, control: Control, rank: int) -> None:
        self._transport = transport
        self._control = control
        self._rank = rank
        self._desk = control.desks[rank]
        self._lanes = Lanes()

    def send(self, source: Buffer, peer: int, tag: int, deadline: Deadline) -> None:
        """Send a message and wait until ``source`` may change."""
        what = f"send(dst={peer}, tag={tag})"
        watch = SendWatch(self._control, self._rank, peer, what, deadline)
        letter = self._post(source, peer, tag, watch)
        sends = self._control.sends
        sends.append(watch)
        try:
            self._transport.settle(letter, watch)
        finally:
            sends.remove(watch)

    def post(
        self, source: Buffer, peer: int, tag: int, deadline: Deadline
    ) -> tuple[str, Callable[[], None] | None]:
        """Send a message; return what to call it, and how to wait until ``source`` may change."""
        what = f"send(dst={peer}, tag={tag})"
        watch = MessageWatch(self._control, self._rank, what, deadline)
        letter = self._post(source, peer, tag, watch)
        return what, None if letter.is_taken else lambda: self._transport.settle(letter, watch)

    def line_up(
        self, target: Buffer, peer: int, tag: int, deadline: Deadline
    ) -> tuple[str, Callable[[], None]]:
        """Take a place among the receivers; return what to call it, and how to receive."""
        what = f"recv(src={peer}, tag={tag})"
        watch = MessageWatch(self._control, self._rank, what, deadline)
        lane, number = self._draw(peer, tag)
        return what, lambda: self._receive(lane, number, target, peer, tag, watch)

    def sendrecv(
        self, source: Buffer, to: int, target: Buffer, peer: int, tag: int, deadline: Deadline
    ) -> None:
        """Send and receive at once; if nothing is received the message is taken back.

        A message that came but does not fit is this rank's own affair: its own goes out.
        """
        what = f"sendrecv(dst={to}, src={peer}, tag={tag})"
        sending = MessageWatch(self._control, self._rank, what, deadline)
        receiving = MessageWatch(self._control, self._rank, what, deadline)
        letter = self._post(source, to, tag, sending)
        try:
            self._receive(*self._draw(peer, tag), target, peer, tag, receiving)
        except (SizeMismatch, ProtocolError):
            self._transport.settle(letter, sending)
            raise
        except BaseException:
            self._transport.take_back(letter)
            raise
        self._transport.settle(letter, sending)

    def _post(self, source: Buffer, peer: int, tag: int, watch: MessageWatch) -> Letter:
        header = pack_array_header(source.dtype, source.shape)
        to = self._control.members[peer]
        return self._transport.post(to, self._control.group, tag, header, source.memory, watch)

    def _draw(self, peer: int, tag: int) -> tuple[_native.Tickets, int]:
        self._count_receive(1)
        return self._lanes.draw(peer, tag)

    def _receive(
        self,
        lane: _native.Tickets,
        number: int,
        target: Buffer,
        peer: int,
        tag: int,
        watch: MessageWatch,
    ) -> None:
        source = self._control.members[peer]
        watch.is_receiving = True
        try:
            lane.wait(number, lambda: min(self._look(watch, source), _QUEUE_LOOK))
            payload = self._transport.collect(source, self._control.group, tag, watch)
        finally:
            self._count_receive(-1)
            self._lanes.leave(lane, number, peer, tag)
        _unpack(memoryview(payload), target, peer, watch)

    def _count_receive(self, change: int) -> None:
        with self._control.switch.lock:
            self._desk.receives += change
            if self._desk.is_closing:  # senders may wait for a receive that never comes
                self._control.switch.wake_all()

    def _look(self, watch: MessageWatch, source: int) -> float:
        with self._control.switch.lock:
            return watch.look(source)


def _unpack(payload: memoryview, target: Buffer, peer: int, watch: MessageWatch) -> None:
    try:
        dtype, shape, content = unpack_array_header(payload)
    except FrameError as error:
        watch.damaged(watch.control.members[peer], str(error))
        raise
    found, expected = Leaf("", dtype, shape), Leaf("", target.dtype, target.shape)
    if found != expected:
        raise message_errors.unexpected(watch.what, peer, watch.rank, found, expected)
    target.memory[:] = content
