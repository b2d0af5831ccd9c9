# SPDX-License-Identifier: MIT OR Apache-2.0
"""Links between ranks that are threads of one process: frames in mailboxes, guarded by one lock.

Payloads of collectives are copied when sent, so a sender never waits. Point-to-point messages above
EAGER_NBYTES wait for their receiver on purpose: a program that would deadlock over a network must
not pass its tests on threads.
"""

from __future__ import annotations

import abc
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from ferrodist import _native
from ferrodist.backends.framing import POINT_TO_POINT, Frame
from ferrodist.backends.receive import ANY, MatchQueue, Message, PostedReceive, is_object
from ferrodist.backends.thread_faults import Faults, FaultyLinks


class ProgressHook(abc.ABC):
    """The side of a wait that knows about deadlines, losses and group errors.

    Called by the transport while it holds its lock, each time a wait is about to sleep.
    """

    @abc.abstractmethod
    def poll(self, peer: int) -> float:
        """Raise if waiting for ``peer`` is over, else give the seconds until the next look."""

    def arrived(self) -> None:  # noqa: B027 -- most have nothing to do
        """Called when what was waited for has arrived."""

    def damaged(self, peer: int, reason: str) -> None:  # noqa: B027 -- where bytes are awaited
        """Called when bytes from ``peer`` are invalid; raises."""


class Expected(NamedTuple):
    """Which frame a collective waits for; older ones are dropped, newer ones left alone."""

    group: int
    sequence: int
    fingerprint: int


# -- mailboxes -------------------------------------------------------------------------------------


EAGER_NBYTES = 64 * 1024

# A signal that comes just before a thread blocks is noticed only when the thread wakes: Ctrl-C must
# not have to wait for a message.
_LONGEST_SLEEP = 0.2


@dataclass(slots=True, eq=False)
class SendRequest:
    """A point-to-point message on its way; ``is_taken`` when the receiver has copied it."""

    source: int
    peer: int
    frame: Frame
    tag: int
    taken: threading.Condition  # what its sender sleeps on
    is_object: bool
    is_taken: bool
    is_withdrawn: bool = False

    @property
    def payload(self) -> bytes | memoryview:
        return self.frame.payload

    def take(self) -> None:
        """Called when a receive has the message. Lock held."""
        self.is_taken = True
        self.taken.notify_all()


class _Mailbox:
    """What has arrived for one rank."""

    def __init__(self, lock: Any) -> None:  # RLock is a function, not a type
        self.changed = threading.Condition(lock)
        self.frames: defaultdict[tuple[int, int], deque[Frame]] = defaultdict(deque)
        self.queues: defaultdict[int, MatchQueue] = defaultdict(MatchQueue)  # by group
        self.damage: dict[int, str] = {}
        self.awaited: list[int] = []  # the peers that threads of this rank sleep for
        self.held: dict[int, float] = {}  # since when threads of this rank wait, each in one call


class Switch:
    """What the ranks of one world share: the lock, the mailboxes, the counters of every link."""

    def __init__(
        self, size: int, faults: Faults | None, on_kill: Callable[[int, str], NoReturn]
    ) -> None:
        self.size = size
        self.on_kill = on_kill  # called with a rank that a fault kills, and how
        # Reentrant: a finalizer or a signal handler may close or abort a backend at any point.
        self.lock = threading.RLock()
        self.mailboxes = [_Mailbox(self.lock) for _ in range(size)]
        self.sent = [[0] * size for _ in range(size)]
        self.received = [[0] * size for _ in range(size)]
        self.sent_nbytes = [0] * size
        self.received_nbytes = [0] * size
        self.links = FaultyLinks(faults, self) if faults is not None else None

    def wake_all(self) -> None:
        """Make every wait look again. Lock held."""
        for mailbox in self.mailboxes:
            mailbox.changed.notify_all()

    def carry(
        self, source: int, target: int, item: Frame | SendRequest, hook: ProgressHook
    ) -> None:
        """Take an item to its mailbox, through the injected faults if there are any."""
        if self.links is not None and source != target:
            self.links.carry(source, target, item, hook)
            return
        with self.lock:
            self.sent[source][target] += 1
            self.deliver(source, target, item)

    def deliver(self, source: int, target: int, item: Frame | SendRequest) -> None:
        """Put an item into a mailbox. Lock held."""
        mailbox = self.mailboxes[target]
        frame = item if isinstance(item, Frame) else item.frame
        self.received[source][target] += 1
        self.sent_nbytes[source] += len(frame.payload)
        self.received_nbytes[target] += len(frame.payload)
        if isinstance(item, SendRequest) and item.is_withdrawn:
            return
        if isinstance(item, SendRequest):
            is_awaited = mailbox.queues[frame.group].deliver(item)
        else:
            mailbox.frames[source, frame.group].append(item)
            is_awaited = source in mailbox.awaited
        if is_awaited:  # waking a thread costs more than anything else here
            mailbox.changed.notify_all()

    def damage(self, source: int, target: int, reason: str) -> None:
        """Mark a link as broken by bytes that cannot be right. Lock held."""
        mailbox = self.mailboxes[target]
        mailbox.damage[source] = reason
        mailbox.changed.notify_all()

    def forget(self, group: int) -> None:
        """Throw away what is left of a group that all have left. Lock held."""
        for mailbox in self.mailboxes:
            for frame_key in [key for key in mailbox.frames if key[1] == group]:
                del mailbox.frames[frame_key]
            mailbox.queues.pop(group, None)

    def close(self) -> None:
        if self.links is not None:
            self.links.close()

    def waiting_tags(self, sources: Iterable[int], target: int, group: int) -> list[int]:
        """List the tags of messages that are not received yet. Lock held."""
        queue = self.mailboxes[target].queues.get(group)
        return [] if queue is None else queue.tags_of(sources)

    @contextmanager
    def holding(self, rank: int) -> Iterator[None]:
        """Show that a call holds this thread of a rank; one that makes progress never shows."""
        held, thread = self.mailboxes[rank].held, threading.get_ident()
        is_shown = not _native.is_progress_thread() and thread not in held
        if is_shown:
            held[thread] = time.monotonic()
        try:
            yield
        finally:
            if is_shown:
                del held[thread]

    def seconds_held(self, rank: int) -> float:
        """Say how long a thread of a rank has been held in one call; zero if none is."""
        since = list(self.mailboxes[rank].held.values())
        return time.monotonic() - min(since) if since else 0.0

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

    def send(self, peer: int, frame: Frame, hook: ProgressHook) -> None:
        """Copy the payload and hand it over; never waits for the receiver."""
        copied = Frame(frame.group, frame.sequence, frame.fingerprint, bytes(frame.payload))
        self.switch.carry(self.rank, peer, copied, hook)

    def recv(self, peer: int, expected: Expected, hook: ProgressHook) -> memoryview:
        """Wait for the next frame of the call and return its payload."""

        def is_here() -> bool:  # not on a foreign fingerprint: the group error is on its way
            frame = _next_of_call(frames, expected)
            return frame is not None and frame.fingerprint == expected.fingerprint

        with self.switch.lock:
            frames = self._mailbox.frames[peer, expected.group]
            self.sleep_until(is_here, peer, hook)
            hook.arrived()
            return memoryview(frames.popleft().payload)

    def post(
        self,
        peer: int,
        group: int,
        tag: int,
        header: bytes,
        content: memoryview,
        hook: ProgressHook,
    ) -> SendRequest:
        """Send a point-to-point message; ``wait_taken`` waits until its memory may change."""
        with self.switch.lock:
            hook.poll(peer)
        frame = Frame(group, POINT_TO_POINT, 0, b"".join((header, content)), tag)
        is_eager = len(content) <= EAGER_NBYTES
        changed = self._mailbox.changed
        request = SendRequest(self.rank, peer, frame, tag, changed, is_object(header), is_eager)
        self.switch.carry(self.rank, peer, request, hook)
        return request

    def wait_taken(self, request: SendRequest, hook: ProgressHook) -> None:
        """Wait until the receiver has the message; if that fails take the message back."""
        with self.switch.lock:
            try:
                self.sleep_until(lambda: request.is_taken, request.peer, hook)
            except BaseException:  # Ctrl-C too: a message that was given up must not arrive
                self.withdraw_send(request)
                raise

    def post_receive(self, receive: PostedReceive, group: int) -> None:
        """Let a receive, or a probe, take its message or wait for it."""
        with self.switch.lock:
            self._mailbox.queues[group].post(receive)

    def withdraw(self, receive: PostedReceive, group: int) -> bool:
        """Take a receive back; False if it has its message."""
        with self.switch.lock:
            is_withdrawn = self._mailbox.queues[group].withdraw(receive)
            if is_withdrawn:
                self._mailbox.changed.notify_all()
            return is_withdrawn

    def find(self, peer: int, tag: int, group: int) -> Message | None:
        with self.switch.lock:
            return self._mailbox.queues[group].find(peer, tag)

    def sleep_until(self, is_ready: Callable[[], bool], peer: int, hook: ProgressHook) -> None:
        """Wait for what is one step of a call. Lock held."""
        if is_ready():
            return
        with self.switch.holding(self.rank):
            while not is_ready():
                self.sleep(peer, hook)

    def sleep(self, peer: int, hook: ProgressHook) -> None:
        """Sleep until something changes or it is time to look. Lock held."""
        for source, reason in list(self._mailbox.damage.items()):
            if peer in (ANY, source):
                hook.damaged(source, reason)
        seconds = hook.poll(peer)
        self._mailbox.awaited.append(peer)
        try:
            self._mailbox.changed.wait(min(seconds, _LONGEST_SLEEP))
        finally:
            self._mailbox.awaited.remove(peer)

    def withdraw_send(self, request: SendRequest) -> bool:
        """Remove a message that its receiver has not looked at yet; False if it has."""
        with self.switch.lock:
            request.is_withdrawn = not request.is_taken  # it may still be on its way
            if request.is_withdrawn:
                self.switch.mailboxes[request.peer].queues[request.frame.group].remove(request)
            return request.is_withdrawn


def _next_of_call(frames: deque[Frame], expected: Expected) -> Frame | None:
    """Drop frames of ended calls; return the head if it belongs to this call."""
    while frames and frames[0].sequence < expected.sequence:
        frames.popleft()
    if frames and frames[0].sequence == expected.sequence:
        return frames[0]
    return None
