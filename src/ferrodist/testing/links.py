# SPDX-License-Identifier: MIT OR Apache-2.0
"""The links of a FaultProxy, and how they suffer its faults.

A *link* is one connection through the proxy, with a socket on either side; a *pipe* is one
direction of it. Nothing here blocks: proxy.py has the thread that waits for sockets.
"""

from __future__ import annotations

import fcntl
import math
import random
import select
import socket
import struct
import termios
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from selectors import EVENT_READ, EVENT_WRITE
from typing import Literal, get_args

from ferrodist.errors import InvalidArgument

Direction = Literal["both", "to_target", "from_target"]

BLOCK = 64 * 1024  # bytes that share one jitter


@dataclass(frozen=True, kw_only=True)
class LinkFaults:
    """Faults of every connection through a FaultProxy.

    ``delay`` seconds and up to ``jitter`` more are added to all data, which stays in order;
    ``rate`` limits the bytes per second. The others happen after N bytes: ``freeze_after`` stops
    forwarding in both directions and keeps the sockets open, ``cut_after`` closes both sides,
    ``reset_after`` resets them, ``flip_after`` flips a bit in the next byte. ``direction`` says
    which direction is slowed, counted and damaged.
    """

    seed: int = 0
    delay: float = 0.0
    jitter: float = 0.0
    rate: float | None = None
    freeze_after: int | None = None
    cut_after: int | None = None
    reset_after: int | None = None
    flip_after: int | None = None
    direction: Direction = "both"

    def __post_init__(self) -> None:
        for name in ("delay", "jitter"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidArgument(f"{name}={getattr(self, name)!r}: expected seconds >= 0")
        if self.rate is not None and not self.rate > 0:
            raise InvalidArgument(f"rate={self.rate!r}: expected bytes per second, or None")
        for name in ("freeze_after", "cut_after", "reset_after", "flip_after"):
            count = getattr(self, name)
            if count is not None and not (isinstance(count, int) and count >= 0):
                raise InvalidArgument(f"{name}={count!r}: expected a number of bytes, or None")
        if self.direction not in get_args(Direction):
            known = ", ".join(get_args(Direction))
            raise InvalidArgument(f"direction={self.direction!r}: expected one of {known}")

    def flipped_bit(self, direction: Direction) -> int:
        """Choose the bit that flip_after flips; pure."""
        return random.Random(f"{self.seed} {direction} flip").randrange(8)

    def lag(self, direction: Direction, offset: int) -> float:
        """Choose the seconds added to the byte at ``offset`` of a connection; pure."""
        if not self.jitter:
            return self.delay
        chance = random.Random(f"{self.seed} {direction} {offset // BLOCK}").random()
        return self.delay + self.jitter * chance


_ROOM = 4 * 1024 * 1024  # bytes a pipe holds back before it stops reading
_TICK = 0.01  # seconds' worth of bytes that a rate lets through at once
_RETRY = 0.002  # seconds until the next look at what the kernel still has to deliver
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER


class _Strike(Enum):
    FREEZE = "freeze_after"
    CUT = "cut_after"
    RESET = "reset_after"


class _Pipe:
    """One direction of a link: what was read from ``source`` and is not yet written to ``sink``."""

    def __init__(
        self, direction: Direction, source: socket.socket, sink: socket.socket, faults: LinkFaults
    ) -> None:
        self.direction, self.source, self.sink = direction, source, sink
        self.faults = faults if faults.direction in ("both", direction) else LinkFaults()
        due = [
            (n, strike)
            for strike in _Strike
            if (n := getattr(self.faults, strike.value)) is not None
        ]
        self.strikes = deque(sorted(due, key=lambda one: one[0]))
        self.queue: deque[tuple[float, memoryview]] = deque()  # when due, what; the end is empty
        self.taken = self.passed = self.counted = 0
        self.free_at = 0.0  # when the rate allows the next piece
        self.is_reading = True
        self.is_full = False  # the sink takes no more at the moment
        self.is_broken = False  # the source ends with an error, and so shall the sink
        self.is_discarding = self.is_done = False

    def wants_to_read(self) -> bool:
        """Tell whether there is room, or need for none."""
        return self.is_reading and (self.is_discarding or self.taken - self.passed < _ROOM)

    def take(self) -> None:
        """Read once, never across the border of two blocks; the end queues behind the bytes."""
        try:
            data = bytearray(self.source.recv(BLOCK - self.taken % BLOCK))
        except BlockingIOError:
            return
        except OSError:
            data, self.is_broken = bytearray(), True
        flip = self.faults.flip_after
        if flip is not None and self.taken <= flip < self.taken + len(data):
            data[flip - self.taken] ^= 1 << self.faults.flipped_bit(self.direction)
        due = time.monotonic() + self.faults.lag(self.direction, self.taken)
        self.queue.append((due, memoryview(data)))
        self.taken += len(data)
        self.is_reading = bool(data)

    def ready_at(self) -> float:
        """Say when the next piece may be written."""
        if not self.queue or self.is_full or self.struck() is not None:
            return math.inf
        return max(self.queue[0][0], self.free_at)

    def give(self, now: float) -> None:
        """Write one piece, or the end; raises OSError when the sink is gone."""
        due, data = self.queue.popleft()
        if not data:
            return self._end()
        try:
            sent = self.sink.send(data[: self._allowance()])
        except BlockingIOError:
            sent, self.is_full = 0, True
        if self.faults.rate is not None:
            self.free_at = max(self.free_at, now) + sent / self.faults.rate
        self.passed += sent
        if sent < len(data):
            self.queue.appendleft((due, data[sent:]))
        return None

    def struck(self) -> _Strike | None:
        """Tell which fault is due at this very byte."""
        return self.strikes[0][1] if self.strikes and self.strikes[0][0] == self.passed else None

    def has_delivered(self) -> bool:
        """Tell whether the sink has everything or is gone; a reset would drop what it has not."""
        waiting, poll = bytearray(4), select.poll()
        poll.register(self.sink, 0)
        with suppress(OSError):
            fcntl.ioctl(self.sink, termios.TIOCOUTQ, waiting)
        return not any(waiting) or bool(poll.poll(0))  # a dead socket never gets rid of its bytes

    def fail(self) -> None:
        """Give up: the sink is gone."""
        self.queue.clear()
        self.is_reading, self.is_done = False, True

    def discard(self) -> None:
        """Throw away what was and will be read; done when the source has ended."""
        self.queue.clear()
        self.is_discarding = True
        self.is_done = not self.is_reading

    def _allowance(self) -> int:
        limit = BLOCK
        if self.strikes:
            limit = min(limit, self.strikes[0][0] - self.passed)
        if self.faults.rate is not None:
            limit = min(limit, max(1, int(self.faults.rate * _TICK)))
        return limit

    def _end(self) -> None:
        if self.is_broken:
            self.strikes.appendleft((self.passed, _Strike.RESET))
            return
        with suppress(OSError):
            self.sink.shutdown(socket.SHUT_WR)
        self.is_done = True


class Link:
    """One connection through the proxy; ``is_over`` asks for close()."""

    def __init__(self, client: socket.socket, target: socket.socket, faults: LinkFaults) -> None:
        self.sockets = client, target
        self.pipes = (
            _Pipe("to_target", client, target, faults),
            _Pipe("from_target", target, client, faults),
        )
        self.is_connected = self.is_frozen = self.is_cut = self.is_over = False
        self._retry_at = math.inf
        if any(pipe.struck() is _Strike.FREEZE for pipe in self.pipes):
            self._freeze()  # at byte 0: without waiting for the target

    def events_of(self, one: socket.socket) -> int:
        """Say what to wait for on a socket; nothing at all while the link is frozen."""
        if self.is_over or (self.is_frozen and not self.is_cut):
            return 0
        if not self.is_connected:
            return EVENT_WRITE if one is self.sockets[1] else 0
        reads = any(pipe.source is one and pipe.wants_to_read() for pipe in self.pipes)
        writes = any(pipe.sink is one and pipe.is_full for pipe in self.pipes)
        return EVENT_READ * reads | EVENT_WRITE * writes

    def handle(self, one: socket.socket, events: int) -> None:
        """Take note of a socket that is ready."""
        if not self.is_connected:
            self.is_connected = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
            if not self.is_connected:
                self.reset()
            return
        for pipe in self.pipes:
            if pipe.sink is one and events & EVENT_WRITE:
                pipe.is_full = False
            if pipe.source is one and events & EVENT_READ:
                pipe.take()

    def advance(self, now: float) -> None:
        """Write what is due and strike where a fault is due."""
        self._retry_at = math.inf
        for pipe in self.pipes:
            while self._is_flowing() and self._step(pipe, now):
                pass
        if self.is_cut:
            for pipe in self.pipes:
                pipe.discard()
        if all(pipe.is_done for pipe in self.pipes):
            self.is_over = True

    def wake_at(self) -> float:
        """Say when advance() has something to do, if no socket becomes ready before."""
        if not self._is_flowing():
            return math.inf
        return min(self._retry_at, *(pipe.ready_at() for pipe in self.pipes))

    def cut(self) -> None:
        """End both sides cleanly.

        A socket closed with unread bytes sends a reset, so these are read and thrown away until the
        two sides have ended as well.
        """
        self.is_cut = True
        self.is_over = self.is_over or not self.is_connected
        for one in self.sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """End both sides with a reset, at once."""
        self.is_over = True
        for one in self.sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)

    def close(self) -> None:
        """Close the sockets."""
        for one in self.sockets:
            one.close()

    def _is_flowing(self) -> bool:
        return self.is_connected and not (self.is_frozen or self.is_cut or self.is_over)

    def _step(self, pipe: _Pipe, now: float) -> bool:
        """Do the next thing on a pipe; false if there is nothing to do now."""
        strike = pipe.struck()
        if strike is _Strike.RESET and not pipe.has_delivered():
            self._retry_at = now + _RETRY
            return False
        if strike is not None:
            if strike is _Strike.FREEZE:
                self._freeze()
            elif strike is _Strike.CUT:
                self.cut()
            else:
                self.reset()
            return True
        if pipe.ready_at() > now:
            return False
        try:
            pipe.give(now)
        except OSError:
            # The source is to feel that its sink is gone, after what the sink still said.
            pipe.fail()
            (back,) = (other for other in self.pipes if other is not pipe)
            back.is_broken = True
            if back.is_done:
                self.reset()
        return True

    def _freeze(self) -> None:
        """Stop here, once: after a thaw the bytes of the other pipe do not stop it again."""
        self.is_frozen = True
        for pipe in self.pipes:
            pipe.strikes = deque(one for one in pipe.strikes if one[1] is not _Strike.FREEZE)
