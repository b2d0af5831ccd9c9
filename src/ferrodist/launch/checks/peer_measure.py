# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measure a connection: small round trips, the other host's clock, and how fast data flows."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from ferrodist.errors import ProtocolError
from ferrodist.launch.checks.peer_wire import CHUNK_NBYTES, PING, PONG, RECEIVED, Link, expect

NUM_PINGS = 41
_MOST_CHUNKS = 256  # 16 MiB
_MOST_SECONDS = 2.0  # of sending, however slow the link is
_MORE, _LAST = 0, 1


@dataclass(slots=True)
class Measured:
    """What two doctors have learned of the way between them; None where they did not get to it.

    ``calls_back`` is why the listener could not connect to the peer, empty if it could. Clocks:
    ``ahead`` is by how many seconds that of the other host is. ``own`` is the address that this
    host has on the connection, ``seen_as`` the one that the other host sees.
    """

    other: str
    other_version: str | None = None
    own: str | None = None
    seen_as: str | None = None
    calls_back: str | None = None
    back_port: int | None = None
    round_trip: float | None = None
    ahead: float | None = None
    bytes_per_second_to: float | None = None
    bytes_per_second_from: float | None = None
    problem: str | None = None


def ping(link: Link) -> tuple[float, float]:
    """Return the median of some round trips, and by how much the other clock is ahead."""
    trips = []
    for number in range(NUM_PINGS):
        sent, begin = time.time_ns(), time.perf_counter_ns()
        link.send(PING, number)
        echo, there = link.receive(PONG)
        trip = time.perf_counter_ns() - begin
        expect(echo == number, "a round trip came back with another number")
        trips.append((trip, there - (sent + trip // 2)))
    # The offset is best known from the trip that was held up least.
    return statistics.median(trip for trip, _ in trips) / 1e9, min(trips)[1] / 1e9


def answer_pings(link: Link) -> None:
    """Do the other side's half of ``ping``."""
    for expected in range(NUM_PINGS):
        (number,) = link.receive(PING)
        expect(number == expected, "a round trip has the wrong number")
        link.send(PONG, number, time.time_ns())


def send_much(link: Link) -> None:
    """Send chunks until it is enough, or has taken long; the first byte says which is the last."""
    chunk = bytearray(CHUNK_NBYTES)
    end = time.monotonic() + _MOST_SECONDS
    for number in range(1, _MOST_CHUNKS + 1):
        is_last = number == _MOST_CHUNKS or time.monotonic() > end
        chunk[0] = _LAST if is_last else _MORE
        link.send_bytes(memoryview(chunk))
        if is_last:
            return


def receive_much(link: Link, report_on: Link | None = None) -> float:
    """Do the other side's half of ``send_much``, tell it the speed, and return it."""
    memory = memoryview(bytearray(CHUNK_NBYTES))
    begin = None
    for number in range(1, _MOST_CHUNKS + 1):
        link.receive_into(memory[:1])
        begin = begin or time.perf_counter()  # when the first byte is there, not before
        link.receive_into(memory[1:])
        if memory[0] == _LAST:
            seconds = max(time.perf_counter() - begin, 1e-9)
            (report_on or link).send(RECEIVED, number * CHUNK_NBYTES, seconds)
            return number * CHUNK_NBYTES / seconds
        expect(memory[0] == _MORE, "a chunk begins with an unknown mark")
    raise ProtocolError("the other side is no ferrodist doctor: it sends without end")


def hear_speed(link: Link) -> float:
    """Receive how fast the other side has got our data, in bytes per second."""
    nbytes, seconds = link.receive(RECEIVED)
    expect(0 < nbytes <= _MOST_CHUNKS * CHUNK_NBYTES and seconds > 0, "a speed makes no sense")
    return float(nbytes / seconds)
