# SPDX-License-Identifier: MIT OR Apache-2.0
"""Messages over a Gloo group of torch's, for all groups of a process at once.

Gloo sends nothing before the receiver has called recv with the right length; it has no probe, its
sends and receives cannot be polled, and a wait for one that runs out of time closes every
connection. So one thread per peer always receives, which also sees when the peer is gone, and one
per peer sends. A message is a frame of fixed size with its beginning, then the rest of it.
"""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch as torch
import torch.distributed

from ferrodist.backends.provider_link import EAGER_NBYTES

FOREVER = timedelta(days=3650)
"""A timeout of torch's that never passes: its own would close the connections."""

_FRAME_TAG, _REST_TAG, _NEVER_TAG = 1, 2, 3
_HEADER = struct.Struct("<16sqQ")  # the group, the tag, how many bytes
_FRAME_NBYTES = 512
_INLINE_NBYTES = _FRAME_NBYTES - _HEADER.size
_BYE = bytes(16)  # the group in the last frame of a rank that leaves
_DRAIN_SECONDS = 2.0  # for messages that are on their way when this rank leaves

T = TypeVar("T")
Key = tuple[bytes, int, int]  # group, world rank of the peer, tag


class Receive:
    """A posted receive; the thread that reads from the peer completes it."""

    __slots__ = ("_done", "_memory", "_messages", "_peer", "key")

    def __init__(self, messages: Messages, key: Key, memory: memoryview, peer: int) -> None:
        self._messages, self._memory, self.key, self._peer = messages, memory, key, peer
        self._done = threading.Event()

    def complete(self, data: memoryview) -> None:
        """Take a message, as much of it as fits."""
        fitting = data[: len(self._memory)]
        self._memory[: len(fitting)] = fitting
        self._done.set()

    def test(self) -> bool:
        """Tell whether the message is there; raises if it can never come."""
        is_lost = self.key[1] in self._messages.lost  # asked first: its last message may have come
        if is_lost and not self._done.is_set():
            raise ConnectionError(self._peer)
        return self._done.is_set()

    def wait(self, seconds: float) -> None:
        """Wait until it is there, or for a while."""
        self._done.wait(seconds)

    def cancel(self) -> bool:
        """Take it back; False if the message is there."""
        return self._messages.withdraw(self, self._done)


class Send:
    """A message on its way. A small one, which is copied, is done at once."""

    __slots__ = ("_done", "_is_cancelled", "_messages", "_peer", "_world_rank", "data", "frame")

    def __init__(
        self, messages: Messages, world_rank: int, frame: Any, data: memoryview, peer: int
    ) -> None:
        self._messages, self._world_rank, self._peer = messages, world_rank, peer
        self.frame, self.data = frame, data  # its beginning, and what does not fit there
        self._is_cancelled = False
        self._done = threading.Event()
        if len(data) <= EAGER_NBYTES - _INLINE_NBYTES:
            self.data = memoryview(bytes(data))
            self._done.set()

    def begin(self) -> bool:
        """Tell whether it is still to be sent; from now on it cannot be taken back."""
        with self._messages.lock:
            return not self._is_cancelled

    def finish(self) -> None:
        """Hear that Gloo has sent it."""
        self.frame, self.data = None, memoryview(b"")
        self._done.set()

    def test(self) -> bool:
        """Tell whether its memory may change; raises if its receiver is gone."""
        if not self._done.is_set() and self._world_rank in self._messages.lost:
            raise ConnectionError(self._peer)
        return self._done.is_set()

    def wait(self, seconds: float) -> None:
        """Wait until it is done, or for a while."""
        self._done.wait(seconds)

    def cancel(self) -> bool:
        """Give it up; one that has begun goes on, and keeps its memory until it is done."""
        with self._messages.lock:
            self._is_cancelled = not self._done.is_set()
            return self._is_cancelled


class Messages:
    """The messages of a process, by the Gloo group of all ranks of its world."""

    def __init__(self, process_group: Any, rank: int, world_size: int) -> None:
        self.lock = threading.Lock()
        self.lost: set[int] = set()
        self._process_group = process_group
        self._messages: dict[Key, deque[memoryview]] = {}  # that nobody has received
        self._receives: dict[Key, deque[Receive]] = {}
        self._left: set[bytes] = set()  # groups
        self._unread: dict[tuple[bytes, int], int] = defaultdict(int)  # by group and tag
        self._outboxes: dict[int, queue.SimpleQueue[Send]] = {}
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._writers: list[threading.Thread] = []
        self._readers = [self._start(self._read, peer) for peer in self._peers]

    def _start(self, target: Callable[[int], None], peer: int) -> threading.Thread:
        thread = threading.Thread(target=target, args=[peer], name="ferrodist-gloo", daemon=True)
        thread.start()
        return thread

    # -- what has come --------------------------------------------------------------------------

    def _read(self, peer: int) -> None:
        """Take in all messages of a peer, until it leaves or is gone."""
        frame = torch.empty(_FRAME_NBYTES, dtype=torch.uint8)
        beginning = frame.numpy().data
        try:
            while True:
                self._process_group.recv([frame], peer, _FRAME_TAG).wait(FOREVER)
                group, tag, nbytes = _HEADER.unpack_from(beginning)
                if group == _BYE:
                    break
                inline = beginning[_HEADER.size : _HEADER.size + min(nbytes, _INLINE_NBYTES)]
                self._deliver((group, peer, tag), self._read_rest(peer, inline, nbytes))
        except RuntimeError:  # what Gloo raises: that process is gone
            pass
        with self.lock:
            self.lost.add(peer)

    def _read_rest(self, peer: int, inline: memoryview, nbytes: int) -> memoryview:
        whole = np.empty(nbytes, np.uint8)
        whole.data[: len(inline)] = inline
        if nbytes > len(inline):
            rest = torch.from_numpy(whole[len(inline) :])
            self._process_group.recv([rest], peer, _REST_TAG).wait(FOREVER)
        return whole.data

    def _deliver(self, key: Key, data: memoryview) -> None:
        with self.lock:
            receive = _take_first(self._receives, key)
            if receive is not None:
                receive.complete(data)
            elif key[0] not in self._left:
                self._messages.setdefault(key, deque()).append(data)
                self._unread[key[0], key[2]] += 1

    def irecv(self, key: Key, memory: memoryview, peer: int) -> Receive:
        """Receive the next message of this key; ``peer`` is the rank that errors name."""
        receive = Receive(self, key, memory, peer)
        with self.lock:
            data = _take_first(self._messages, key)
            if data is None:
                self._receives.setdefault(key, deque()).append(receive)
            else:
                self._unread[key[0], key[2]] -= 1
                receive.complete(data)
        return receive

    def iprobe(self, key: Key) -> int | None:
        """Return the length of the next message of this key; None if there is none."""
        with self.lock:
            found = self._messages.get(key)
            return len(found[0]) if found else None

    def has_message(self, group: bytes, tag: int) -> bool:
        """Tell whether a message has come that nobody receives."""
        return self._unread.get((group, tag), 0) > 0

    def withdraw(self, receive: Receive, done: threading.Event) -> bool:
        """Take a receive back; False if it has its message."""
        with self.lock:
            if not done.is_set() and receive in self._receives.get(receive.key, ()):
                self._receives[receive.key].remove(receive)
            return not done.is_set()

    def forget(self, group: bytes) -> None:
        """Drop what has come for a group that was left, and what will."""
        with self.lock:
            self._left.add(group)
            tables: list[dict[Any, Any]] = [self._messages, self._receives, self._unread]
            for table in tables:
                for key in [key for key in table if key[0] == group]:
                    del table[key]

    # -- what goes out --------------------------------------------------------------------------

    def isend(self, key: Key, data: memoryview, peer: int) -> Send:
        """Send a message with this key; Gloo reads a large one where it is."""
        group, world_rank, tag = key
        if world_rank in self.lost:
            raise ConnectionError(peer)
        frame = torch.empty(_FRAME_NBYTES, dtype=torch.uint8)
        beginning = frame.numpy().data
        _HEADER.pack_into(beginning, 0, group, tag, len(data))
        inline = data[:_INLINE_NBYTES]
        beginning[_HEADER.size : _HEADER.size + len(inline)] = inline
        send = Send(self, world_rank, frame, data[_INLINE_NBYTES:], peer)
        self._outbox(world_rank).put(send)
        return send

    def _outbox(self, peer: int) -> queue.SimpleQueue[Send]:
        with self.lock:
            if peer not in self._outboxes:
                self._outboxes[peer] = queue.SimpleQueue()
                self._writers.append(self._start(self._write, peer))
            return self._outboxes[peer]

    def _write(self, peer: int) -> None:
        """Send a peer its messages, one after the other, until the last."""
        outbox, group = self._outboxes[peer], self._process_group
        is_last = False
        try:
            while not is_last:
                send = outbox.get()
                if not send.begin():
                    continue
                is_last = _HEADER.unpack_from(send.frame.numpy().data)[0] == _BYE
                group.send([send.frame], peer, _FRAME_TAG).wait(FOREVER)
                if len(send.data):
                    group.send([tensor_over(send.data)], peer, _REST_TAG).wait(FOREVER)
                send.finish()
        except RuntimeError:  # what Gloo raises: that process is gone
            with self.lock:
                self.lost.add(peer)

    def close(self) -> None:
        """Leave: say good-bye when what was sent before is on its way, then close connections.

        No thread may be inside Gloo when the interpreter ends: it could not return to Python.
        """
        for peer in self._peers:
            last = torch.zeros(_FRAME_NBYTES, dtype=torch.uint8)
            self._outbox(peer).put(Send(self, peer, last, memoryview(b""), peer))
        end = time.monotonic() + _DRAIN_SECONDS
        for thread in self._writers:
            thread.join(max(0.0, end - time.monotonic()))
        hang_up(self._process_group, self._peers)
        for thread in self._readers + self._writers:
            thread.join(max(0.1, end - time.monotonic()))


def _take_first(queues: dict[Key, deque[T]], key: Key) -> T | None:
    """Take the first of a queue; an empty one is not kept, for tags of splits are used once."""
    found = queues.get(key)
    if found is None:
        return None
    first = found.popleft() if found else None
    if not found:
        del queues[key]
    return first


def hang_up(process_group: Any, peers: Sequence[int]) -> None:
    """Close the connections of a Gloo group, so that whatever waits in it ends.

    It has no call for that, but a receive that runs out of time does it.
    """
    if not peers:
        return
    nothing = torch.empty(1, dtype=torch.uint8)
    for peer in peers:  # one whose process is gone raises at once, and closes nothing
        with contextlib.suppress(RuntimeError):
            process_group.recv([nothing], peer, _NEVER_TAG).wait(timedelta(milliseconds=1))


def tensor_over(memory: memoryview) -> Any:
    """View bytes as a flat tensor, which keeps them; read-only memory is not to be written."""
    if not len(memory):
        return torch.empty(0, dtype=torch.uint8)
    readable = memory if not memory.readonly else np.asarray(_Unlocked(memory))
    return torch.frombuffer(readable, dtype=torch.uint8)


class _Unlocked:
    """Read-only memory as torch wants it: it warns of any that could not be written."""

    def __init__(self, memory: memoryview) -> None:
        self._owner = np.frombuffer(memory, np.uint8)
        address, _ = self._owner.__array_interface__["data"]
        self.__array_interface__ = {
            **self._owner.__array_interface__,
            "data": (address, False),
        }
