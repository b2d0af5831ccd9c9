# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ranks as threads of one process: frames go through mailboxes guarded by one lock per world.

Payloads of collectives are copied when sent, so a sender never waits. Point-to-point messages above
EAGER_NBYTES wait for their receiver on purpose: a program that would deadlock over a network must
not pass its tests on threads.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NoReturn

from ferrodist.transports.base import Expected, Watch
from ferrodist.transports.faulty import Faults, FaultyLinks
from ferrodist.transports.framing import POINT_TO_POINT, Frame

EAGER_NBYTES = 64 * 1024

# A signal that comes just before a thread blocks is noticed only when the thread wakes: Ctrl-C must
# not have to wait for a message.
_LONGEST_SLEEP = 0.2


class Letter:
    """A point-to-point message on its way; ``is_taken`` when the receiver has copied it."""

    __slots__ = ("frame", "is_taken", "is_withdrawn", "peer")

    def __init__(self, peer: int, frame: Frame, is_taken: bool) -> None:
        self.peer = peer
        self.frame = frame
        self.is_taken = is_taken
        self.is_withdrawn = False


class _Mailbox:
    """What has arrived for one rank."""

    def __init__(self, lock: Any) -> None:  # RLock is a function, not a type
        self.changed = threading.Condition(lock)
        self.frames: defaultdict[tuple[int, int], deque[Frame]] = defaultdict(deque)
        self.letters: defaultdict[tuple[int, int, int], deque[Letter]] = defaultdict(deque)
        self.damage: dict[int, str] = {}
        self.awaited: list[int] = []  # the peers that threads of this rank sleep for


class Switch:
    """What the ranks of one world share: the lock, the mailboxes, the counters of every link."""

    def __init__(self, size: int, faults: Faults | None = None) -> None:
        self.size = size
        # Reentrant: a finalizer or a signal handler may close or abort a backend at any point.
        self.lock = threading.RLock()
        self.mailboxes = [_Mailbox(self.lock) for _ in range(size)]
        self.sent = [[0] * size for _ in range(size)]
        self.received = [[0] * size for _ in range(size)]
        self.sent_nbytes = [0] * size
        self.received_nbytes = [0] * size
        self.on_kill: Callable[[int, str], NoReturn] = _no_kill
        self.links = FaultyLinks(faults, self) if faults is not None else None

    def is_locked_here(self) -> bool:
        """Tell whether this very thread holds the lock."""
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]  # Condition uses it too

    def wake_all(self) -> None:
        """Make every wait look again. The lock is held by the caller."""
        for mailbox in self.mailboxes:
            mailbox.changed.notify_all()

    def carry(self, source: int, target: int, item: Frame | Letter, watch: Watch) -> None:
        """Take an item to its mailbox, through the injected faults if there are any."""
        if self.links is not None:
            self.links.carry(source, target, item, watch)
            return
        with self.lock:
            self.sent[source][target] += 1
            self.deliver(source, target, item)

    def deliver(self, source: int, target: int, item: Frame | Letter) -> None:
        """Put an item into a mailbox. The lock is held by the caller."""
        mailbox = self.mailboxes[target]
        frame = item if isinstance(item, Frame) else item.frame
        self.received[source][target] += 1
        self.sent_nbytes[source] += len(frame.payload)
        self.received_nbytes[target] += len(frame.payload)
        if isinstance(item, Letter) and item.is_withdrawn:
            return
        if isinstance(item, Letter):
            mailbox.letters[source, frame.group, frame.tag].append(item)
        else:
            mailbox.frames[source, frame.group].append(item)
        if source in mailbox.awaited:  # waking a thread costs more than anything else here
            mailbox.changed.notify_all()

    def damage(self, source: int, target: int, reason: str) -> None:
        """Mark a link as broken by bytes that cannot be right. The lock is held by the caller."""
        mailbox = self.mailboxes[target]
        mailbox.damage[source] = reason
        mailbox.changed.notify_all()

    def undelivered(self, source: int, target: int) -> int:
        """Count the messages that were sent on a link and have not arrived."""
        return self.sent[source][target] - self.received[source][target]

    def forget(self, group: int) -> None:
        """Throw away what is left of a group that all have left. The lock is held by the caller."""
        for mailbox in self.mailboxes:
            for frame_key in [key for key in mailbox.frames if key[1] == group]:
                del mailbox.frames[frame_key]
            for letter_key in [key for key in mailbox.letters if key[1] == group]:
                del mailbox.letters[letter_key]

    def close(self) -> None:
        """End the thread that carries delayed messages, if there is one."""
        if self.links is not None:
            self.links.close()

    def waiting_tags(self, source: int, target: int, group: int) -> list[int]:
        """List the tags of messages that nobody has received. The lock is held by the caller."""
        letters = self.mailboxes[target].letters
        found = [key[2] for key, queue in letters.items() if key[:2] == (source, group) and queue]
        return sorted(found)

    def is_pending(self, source: int, target: int) -> bool:
        """Tell whether something sent on a link will still arrive."""
        return self.links is not None and self.links.is_pending(source, target)


class ThreadTransport:
    """One rank's end of a Switch."""

    def __init__(self, switch: Switch, rank: int) -> None:
        self.switch = switch
        self.rank = rank
        self.size = switch.size
        self._mailbox = switch.mailboxes[rank]

    def send(self, peer: int, frame: Frame, watch: Watch) -> None:
        """Copy the payload and hand it over; never waits for the receiver."""
        copied = Frame(frame.group, frame.sequence, frame.fingerprint, bytes(frame.payload))
        self.switch.carry(self.rank, peer, copied, watch)

    def recv(self, peer: int, expected: Expected, watch: Watch) -> memoryview:
        """Wait for the next frame of the call and return its payload."""
        with self.switch.lock:
            frames = self._mailbox.frames[peer, expected.group]
            while True:
                frame = _next_of_call(frames, expected)
                if frame is not None and frame.fingerprint == expected.fingerprint:
                    watch.arrived()
                    frames.popleft()
                    return memoryview(frame.payload)
                self.sleep(peer, watch)  # on a foreign fingerprint too: the verdict is on its way

    def exchange(
        self, to: int, frame: Frame, peer: int, expected: Expected, watch: Watch
    ) -> memoryview:
        """Send, which never waits here, then receive."""
        self.send(to, frame, watch)
        return self.recv(peer, expected, watch)

    def post(
        self, peer: int, group: int, tag: int, header: bytes, content: memoryview, watch: Watch
    ) -> Letter:
        """Send a point-to-point message; ``settle`` waits until its memory may change."""
        with self.switch.lock:
            watch.look(peer)
        frame = Frame(group, POINT_TO_POINT, 0, b"".join((header, content)), tag)
        letter = Letter(peer, frame, is_taken=len(content) <= EAGER_NBYTES)
        self.switch.carry(self.rank, peer, letter, watch)
        return letter

    def settle(self, letter: Letter, watch: Watch) -> None:
        """Wait until the receiver has the message; if that fails take the message back."""
        with self.switch.lock:
            try:
                while not letter.is_taken:
                    self.sleep(letter.peer, watch)
            except BaseException:
                self.take_back(letter)
                raise

    def collect(self, peer: int, group: int, tag: int, watch: Watch) -> bytes | memoryview:
        """Wait for the next point-to-point message with this tag and return its payload."""
        with self.switch.lock:
            while not (letters := self._mailbox.letters.get((peer, group, tag))):
                self.sleep(peer, watch)
            letter = letters.popleft()
            if not letters:  # tags may be many: an empty queue is not kept
                del self._mailbox.letters[peer, group, tag]
            letter.is_taken = True
            self.switch.mailboxes[peer].changed.notify_all()
            return letter.frame.payload

    def sleep(self, peer: int, watch: Watch) -> None:
        """Sleep until something changes or it is time to look. The lock is held by the caller."""
        if peer in self._mailbox.damage:
            watch.damaged(peer, self._mailbox.damage[peer])
        seconds = watch.look(peer)
        self._mailbox.awaited.append(peer)
        try:
            self._mailbox.changed.wait(min(seconds, _LONGEST_SLEEP))
        finally:
            self._mailbox.awaited.remove(peer)

    def take_back(self, letter: Letter) -> None:
        """Remove a message that its receiver has not looked at yet."""
        key = self.rank, letter.frame.group, letter.frame.tag
        with self.switch.lock:
            letter.is_withdrawn = not letter.is_taken  # it may still be on its way
            letters = self.switch.mailboxes[letter.peer].letters
            queue = letters.get(key)
            if letter.is_withdrawn and queue is not None and letter in queue:
                queue.remove(letter)
            if queue is not None and not queue:
                del letters[key]


def _no_kill(rank: int, how: str) -> NoReturn:
    raise AssertionError(f"rank {rank} {how}, but the world does not know how to bury it")


def _next_of_call(frames: deque[Frame], expected: Expected) -> Frame | None:
    """Drop frames of ended calls; return the head if it belongs to this call."""
    while frames and frames[0].sequence < expected.sequence:
        frames.popleft()
    if frames and frames[0].sequence == expected.sequence:
        return frames[0]
    return None
