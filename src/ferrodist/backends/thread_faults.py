# SPDX-License-Identifier: MIT OR Apache-2.0
"""Faults on the links between threads, decided by a seed and by nothing else.

What happens to a message is a function of (seed, sender, receiver, message number), so the log of a
link is the same for one seed whatever the threads do. Frames pass through the real wire layout
here.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ferrodist import _native
from ferrodist.backends.framing import Frame, FrameError, decode, encode
from ferrodist.errors import InvalidArgument, InvalidRank

if TYPE_CHECKING:
    from ferrodist.backends.thread_links import ProgressHook, SendRequest, Switch

_LONGEST_SLEEP = 0.2  # so that Ctrl-C is noticed in a frozen rank too
_REORDER_SECONDS = 0.005  # long enough for the messages behind it to overtake


class Fate(NamedTuple):
    """What happens to one message."""

    drop: bool = False
    corrupt: bool = False
    duplicate: bool = False
    reorder: bool = False
    delay: float = 0.0

    def __str__(self) -> str:
        words = [
            name for name in ("drop", "corrupt", "duplicate", "reorder") if getattr(self, name)
        ]
        if self.delay:
            words.append(f"delay {self.delay * 1e3:.2f} ms")
        return ", ".join(words) or "deliver"


@dataclass(frozen=True)
class Faults:
    """Faults to inject into a simulated world: a probability per message, ranks to kill or freeze.

    ``kill={1: 5}`` lets rank 1 die when it is about to send its fifth message; ``freeze`` stops it
    there. ``log[sender, receiver]`` lists what happened to each message of a link, in order.
    """

    seed: int = 0
    delay: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    drop: float = 0.0
    corrupt: float = 0.0
    max_delay: float = 0.005
    kill: Mapping[int, int] = field(default_factory=dict)
    freeze: Mapping[int, int] = field(default_factory=dict)
    log: dict[tuple[int, int], list[str]] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in ("delay", "duplicate", "reorder", "drop", "corrupt"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidArgument(f"{name}={getattr(self, name)!r}: expected a probability")
        for name in ("kill", "freeze"):
            if not isinstance(getattr(self, name), Mapping):
                raise InvalidArgument(f"{name} must map a rank to one of its messages, as {{1: 5}}")

    def check_world(self, size: int) -> None:
        """Raise if a rank to kill or freeze does not exist."""
        for rank in (*self.kill, *self.freeze):
            if rank not in range(size):
                raise InvalidRank(f"faults: rank {rank} is not in a world of {size}", rank=rank)

    def fate(self, sender: int, receiver: int, number: int) -> Fate:
        """Decide what happens to a message; pure."""

        def chance(salt: int) -> float:
            return _native.fingerprint([self.seed, sender, receiver, number, salt]) / 2**64

        return Fate(
            drop=chance(0) < self.drop,
            corrupt=chance(1) < self.corrupt,
            duplicate=chance(2) < self.duplicate,
            reorder=chance(3) < self.reorder,
            delay=chance(5) * self.max_delay if chance(4) < self.delay else 0.0,
        )


class _HeldFrame(NamedTuple):
    """An encoded frame on its way; ``request`` is set for point-to-point messages."""

    source: int
    target: int
    number: int
    data: bytearray
    request: SendRequest | None


class FaultyLinks:
    """Carries items between mailboxes as the faults say, and puts each link back in order."""

    def __init__(self, faults: Faults, switch: Switch) -> None:
        faults.check_world(switch.size)
        self._faults = faults
        self._switch = switch
        self._sent_by: defaultdict[int, int] = defaultdict(int)
        self._pending: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._early: defaultdict[tuple[int, int], dict[int, _HeldFrame]] = defaultdict(dict)
        self._deliverer = _Deliverer(self._arrive)

    def close(self) -> None:
        """End the deliverer thread; what it still carries is lost."""
        self._deliverer.close()

    def is_pending(self, source: int, target: int) -> bool:
        """Tell whether the deliverer still carries something on this link."""
        return self._pending[source, target] > 0

    def carry(
        self, source: int, target: int, item: Frame | SendRequest, hook: ProgressHook
    ) -> None:
        self._strike_sender(source, hook)
        switch = self._switch
        with switch.lock:
            switch.sent[source][target] += 1
            number = switch.sent[source][target]
            fate = self._faults.fate(source, target, number)
            self._faults.log.setdefault((source, target), []).append(str(fate))
            if not fate.drop:
                self._dispatch(_pack(source, target, number, item), fate)

    def _strike_sender(self, source: int, hook: ProgressHook) -> None:
        with self._switch.lock:
            self._sent_by[source] += 1
            number = self._sent_by[source]
        if self._faults.kill.get(source) == number:
            self._switch.on_kill(source, f"killed by an injected fault at its message {number}")
        if number >= self._faults.freeze.get(source, number + 1):
            changed = self._switch.mailboxes[source].changed
            with self._switch.lock:
                while True:  # left only by the error that poll() raises
                    changed.wait(min(hook.poll(source), _LONGEST_SLEEP))

    def _dispatch(self, held: _HeldFrame, fate: Fate) -> None:
        if fate.corrupt:
            place = _native.fingerprint([self._faults.seed, held.number]) % (8 * len(held.data))
            held.data[place // 8] ^= 1 << place % 8
        seconds = fate.delay or (_REORDER_SECONDS if fate.reorder else 0.0)
        for copy in range(1 + fate.duplicate):
            self._pending[held.source, held.target] += 1
            if seconds and copy == 0:
                self._deliverer.take(held, seconds)
            else:
                self._arrive_locked(held)

    def _arrive(self, held: _HeldFrame) -> None:
        with self._switch.lock:
            self._arrive_locked(held)
            self._switch.wake_all()  # a wait may have been kept up by what was pending

    def _arrive_locked(self, held: _HeldFrame) -> None:
        link = held.source, held.target
        self._pending[link] -= 1
        early = self._early[link]
        early[held.number] = held
        while (number := self._switch.received[held.source][held.target] + 1) in early:
            if not self._deliver(early.pop(number)):
                return
        for number in [
            number for number in early if number <= self._switch.received[link[0]][link[1]]
        ]:
            del early[number]  # a copy of what was delivered before

    def _deliver(self, held: _HeldFrame) -> bool:
        try:
            frame = decode(held.data, held.source, held.number)
        except FrameError as error:
            self._switch.damage(held.source, held.target, f"message {held.number}: {error}")
            return False
        if held.request is not None:
            held.request.frame = frame
        self._switch.deliver(held.source, held.target, held.request or frame)
        return True


def _pack(source: int, target: int, number: int, item: Frame | SendRequest) -> _HeldFrame:
    if isinstance(item, Frame):
        return _HeldFrame(source, target, number, encode(item, source, number), None)
    return _HeldFrame(source, target, number, encode(item.frame, source, number), item)


class _Deliverer:
    """One thread that hands held frames over when their time has come."""

    def __init__(self, arrive: Callable[[_HeldFrame], None]) -> None:
        self._arrive = arrive
        self._changed = threading.Condition()
        self._bag: list[tuple[float, int, _HeldFrame]] = []
        self._order = itertools.count()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def take(self, held: _HeldFrame, seconds: float) -> None:
        with self._changed:
            heapq.heappush(self._bag, (time.monotonic() + seconds, next(self._order), held))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="ferrodist-deliverer", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        while (held := self._next()) is not None:
            self._arrive(held)

    def _next(self) -> _HeldFrame | None:
        with self._changed:
            while not self._is_closed:
                if not self._bag:
                    self._changed.wait()
                elif (seconds := self._bag[0][0] - time.monotonic()) > 0:
                    self._changed.wait(seconds)
                else:
                    return heapq.heappop(self._bag)[2]
            return None
