# SPDX-License-Identifier: MIT OR Apache-2.0
"""Faults on the links between thread ranks: what comes over the wire, and nothing else.

Every direction of a link leads through a thread, which reads the headers of frames and counts
those that carry data, the pieces of collectives and the beginnings of messages: how many there are
depends on the program alone, while heartbeats and credits depend on time. So one seed is one log,
as far as the program sends the same: after a loss that may depend on when its ranks learn of it.
"""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ferrodist import _native
from ferrodist.errors import InvalidArgument, InvalidRank

Link = tuple[int, int]
"""Sender and receiver."""


@dataclass(frozen=True)
class Faults:
    """Faults to inject into the links of thread ranks; see ``testing.run_ranks``.

    Every data frame is delayed by ``delay`` seconds and up to ``jitter`` more. ``flip={(0, 1): 3}``
    inverts a bit of the third data frame from rank 0 to rank 1, ``cut={(0, 1): 3}`` ends that link
    there, in both directions. ``freeze={1: 5}`` lets nothing more through from or to rank 1 once it
    sends its fifth data frame, ``kill={1: 5}`` lets rank 1 die there (frames on different links may
    overtake each other). Which bit, and how long a
    jitter is, depends on ``seed``, link and frame alone. ``log`` lists what was done, by link; of
    kills and freezes, the link is that of a rank with itself.
    """

    seed: int = 0
    delay: float = 0.0
    jitter: float = 0.0
    flip: Mapping[Link, int] = field(default_factory=dict)
    cut: Mapping[Link, int] = field(default_factory=dict)
    freeze: Mapping[int, int] = field(default_factory=dict)
    kill: Mapping[int, int] = field(default_factory=dict)
    log: dict[Link, list[str]] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in ("delay", "jitter"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidArgument(f"{name}={getattr(self, name)!r}: expected seconds >= 0")
        for name, example in (("flip", "{(0, 1): 5}"), ("cut", "{(0, 1): 5}")):
            if not _counts_frames(getattr(self, name), _is_link):
                raise InvalidArgument(
                    f"{name} must map a link to one of its data frames: {example}"
                )
        for name in ("freeze", "kill"):
            if not _counts_frames(getattr(self, name), lambda rank: isinstance(rank, int)):
                raise InvalidArgument(f"{name} must map a rank to one of its data frames: {{1: 5}}")

    def check_world(self, size: int) -> None:
        """Raise if a rank that is named does not exist."""
        of_links = itertools.chain(*self.flip, *self.cut)
        for rank in itertools.chain(self.freeze, self.kill, of_links):
            if rank not in range(size):
                raise InvalidRank(f"faults: rank {rank} is not in a world of {size}", rank=rank)

    def lag(self, link: Link, number: int) -> float:
        """Choose the seconds by which a data frame is late; pure."""
        chance = _native.fingerprint([self.seed, *link, number]) / 2**64
        return self.delay + self.jitter * chance

    def flipped_bit(self, link: Link, number: int, num_bits: int) -> int:
        """Choose the bit that is inverted; pure."""
        return _native.fingerprint([self.seed, *link, number, num_bits]) % num_bits


def _is_link(link: Any) -> bool:
    is_pair = isinstance(link, tuple) and len(link) == 2
    return is_pair and all(isinstance(rank, int) for rank in link)


def _counts_frames(numbers: Any, is_key: Any) -> bool:
    return isinstance(numbers, Mapping) and all(
        is_key(key) and isinstance(number, int) and number >= 1 for key, number in numbers.items()
    )


_HEADER_NBYTES = 72
_KIND, _LENGTH = struct.Struct("<5xB"), struct.Struct("<48xQ")  # as in native/net/frame.hpp
_OF_DATA = (1, 3, 4)  # a piece of a collective, a whole message, the beginning of a large one


class FaultyLinks:
    """The links of a world, each with a thread that carries the frames of one direction.

    ``ends`` are the ranks' own ends, by rank and peer, and are replaced: what a rank sends comes
    here first. ``ended`` gets the ranks that are killed, and how.
    """

    def __init__(
        self, faults: Faults, ends: dict[Link, socket.socket], ended: dict[int, str]
    ) -> None:
        self._faults = faults
        self._ended = ended
        self._num_sent: defaultdict[int, int] = defaultdict(int)  # data frames, by rank
        self._silent: set[Link] = set()  # which let nothing through any more
        self._near: dict[Link, socket.socket] = {}  # the ends here, by the rank and its peer
        self._num_open: dict[frozenset[int], int] = {}  # directions that are still read
        self._lock = threading.Lock()
        self._locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)  # by sender
        for rank, peer in list(ends):
            ends[rank, peer].close()
            ends[rank, peer], self._near[rank, peer] = socket.socketpair()
            self._num_open[frozenset((rank, peer))] = 2
        for link in ends:
            name = f"ferrodist faults {link[0]} to {link[1]}"
            threading.Thread(target=self._carry, args=(link,), name=name, daemon=True).start()

    def _carry(self, link: Link) -> None:
        """Carry the frames of one direction, until the sender ends it."""
        source, sink = self._near[link], self._near[link[::-1]]
        number = 0
        with suppress(OSError):  # one of the two is gone
            while (frame := _read_frame(source)) is not None:
                if _KIND.unpack_from(frame)[0] in _OF_DATA:
                    number += 1
                    if link not in self._silent:
                        self._damage(link, number, frame)
                    with self._locks[link[0]]:  # what a rank sent before it dies arrives
                        self._strike(link, number)
                        if link not in self._silent:
                            sink.sendall(frame)
                elif link not in self._silent:
                    sink.sendall(frame)
        if link not in self._silent:
            with suppress(OSError):
                sink.shutdown(socket.SHUT_WR)
        self._close(link)

    def _damage(self, link: Link, number: int, frame: bytearray) -> None:
        """Do to a data frame what the faults say."""
        faults = self._faults
        if faults.flip.get(link) == number:
            bit = faults.flipped_bit(link, number, 8 * len(frame))
            frame[bit // 8] ^= 1 << bit % 8
            self._note(link, f"{number}: flip bit {bit}")
        if lag := faults.lag(link, number):
            self._note(link, f"{number}: delay {lag * 1e3:.3f} ms")
            time.sleep(lag)

    def _strike(self, link: Link, number: int) -> None:
        """Do to the link of a data frame, or to its sender, what the faults say."""
        faults, sender = self._faults, link[0]
        with self._lock:
            if link in self._silent:
                return
            self._num_sent[sender] += 1
            sent = self._num_sent[sender]
            if faults.kill.get(sender) == sent:
                self._ended[sender] = f"was killed by an injected fault at its message {sent}"
                self._end_rank(sender, f"{sent}: kill")
            elif faults.freeze.get(sender) == sent:
                self._silence(self._links_of(sender))
                self._note((sender, sender), f"{sent}: freeze")
            elif faults.cut.get(link) == number:
                self._note(link, f"{number}: cut")
                self._cut([link])

    def _end_rank(self, rank: int, what: str) -> None:
        self._note((rank, rank), what)
        self._cut(self._links_of(rank))

    def _links_of(self, rank: int) -> list[Link]:
        return [link for link in self._near if rank in link]

    def _silence(self, links: list[Link]) -> None:
        for link in links:
            self._silent |= {link, link[::-1]}

    def _cut(self, links: list[Link]) -> None:
        """End links; the ranks at both ends find that the other one is gone."""
        self._silence(links)
        for link in links:
            for end in (self._near[link], self._near[link[::-1]]):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _note(self, link: Link, what: str) -> None:
        self._faults.log.setdefault(link, []).append(what)

    def _close(self, link: Link) -> None:
        """Close the files of a link when neither direction is read any more."""
        with self._lock:
            self._num_open[frozenset(link)] -= 1
            if not self._num_open[frozenset(link)]:
                for end in (self._near[link], self._near[link[::-1]]):
                    end.close()


def _read_frame(source: socket.socket) -> bytearray | None:
    """Wait for the next frame; None if there is none."""
    header = source.recv(_HEADER_NBYTES, socket.MSG_WAITALL)
    if len(header) < _HEADER_NBYTES:
        return None
    frame = bytearray(_HEADER_NBYTES + _LENGTH.unpack_from(header)[0])
    frame[:_HEADER_NBYTES] = header
    rest = memoryview(frame)[_HEADER_NBYTES:]
    if rest and source.recv_into(rest, len(rest), socket.MSG_WAITALL) < len(rest):
        return None
    return frame
