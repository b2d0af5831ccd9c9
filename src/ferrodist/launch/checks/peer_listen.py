# SPDX-License-Identifier: MIT OR Apache-2.0
"""``ferrodist doctor --listen``: wait for one peer that knows the code, and answer it.

To others it is useless: who does not know the code gets one message and is dropped. The connection
back goes to the address that the peer came from, whatever it says, so nobody can aim it elsewhere.
"""

from __future__ import annotations

import errno
import math
import secrets
import socket
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from ferrodist.deadline import Deadline
from ferrodist.launch.checks.peer_measure import (
    Measured,
    answer_pings,
    hear_speed,
    receive_much,
    send_much,
)
from ferrodist.launch.checks.peer_wire import (
    BACK,
    CALL_RESULTS,
    CALLED_BACK,
    GREETING,
    HELLO,
    MAGIC,
    NONCE_NBYTES,
    RESULT,
    WELCOME,
    Link,
    expect,
    is_proof,
    new_code,
    padded,
    prove,
    unpadded,
)
from ferrodist.version import __version__

_HANDSHAKE_SECONDS = 3.0
_TALK_SECONDS = 60.0
_CALL_SECONDS = 5.0
_MOST_REMEMBERED = 5


@dataclass(slots=True)
class Visit:
    """Who has come: the peer, if it did, and how many others, with some of their addresses."""

    measured: Measured | None = None
    num_strangers: int = 0
    strangers: list[str] = field(default_factory=list)

    def send_away(self, address: str) -> None:
        """Count somebody who does not know the code."""
        self.num_strangers += 1
        if address not in self.strangers and len(self.strangers) < _MOST_REMEMBERED:
            self.strangers.append(address)


class _Hello(NamedTuple):
    """What a peer has said; ``proof`` is what the connection back has to begin with."""

    version: str
    port: int
    proof: bytes


class Listener:
    """A socket that waits for a peer at one address, or at all if that is None.

    ``code`` is what the peer has to know.
    """

    def __init__(self, port: int, address: str | None = None) -> None:
        self.code = new_code()
        self.address = address
        self._socket = _open(port, address)
        self.port: int = self._socket.getsockname()[1]

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def wait(self, seconds: float) -> Visit:
        """Wait for the peer and talk to it; strangers are sent away."""
        deadline, visit = Deadline(seconds), Visit()
        while visit.measured is None and (left := deadline.remaining()) > 0:
            self._socket.settimeout(left)
            try:
                connection, address = self._socket.accept()
            except TimeoutError:
                break
            with connection:
                visit.measured = self._receive(connection, plain(address[0]))
            if visit.measured is None:
                visit.send_away(plain(address[0]))
        return visit

    def _receive(self, connection: socket.socket, address: str) -> Measured | None:
        """Talk to whoever has come; None if it does not know the code."""
        link = Link(connection, Deadline(_HANDSHAKE_SECONDS))
        try:
            hello = self._shake_hands(link, address)
        except OSError:
            return None
        if hello is None:
            return None
        link.deadline = Deadline(_TALK_SECONDS)
        measured = Measured(address, hello.version, back_port=hello.port)
        _talk(link, measured, hello.proof)
        return measured

    def _shake_hands(self, link: Link, address: str) -> _Hello | None:
        challenge = secrets.token_bytes(NONCE_NBYTES)
        link.send(GREETING, MAGIC, challenge)
        magic, nonce, port, version, proof = link.receive(HELLO)
        expect(magic == MAGIC, "its hello is another")
        facts = challenge, nonce, port.to_bytes(2), version
        own_version, seen = padded(__version__, 24), padded(address, 46)
        if not is_proof(proof, self.code, "peer", *facts):
            link.send(WELCOME, 0, own_version, seen, bytes(32))
            return None
        mine = prove(self.code, "listener", *facts, own_version, seen)
        link.send(WELCOME, 1, own_version, seen, mine)
        return _Hello(unpadded(version), port, prove(self.code, "back", *facts))


def _open(port: int, address: str | None) -> socket.socket:
    """Listen at a port of one address, or of all, IPv4 and IPv6 where there is any."""
    if address is not None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=8)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=8
        )
    return socket.create_server(("", port), backlog=8)


def plain(address: str) -> str:
    """Write an IPv4 address as such, also where a socket of both kinds has met it."""
    return address.removeprefix("::ffff:") if "." in address else address


def _talk(link: Link, measured: Measured, proof: bytes) -> None:
    """Connect back, then take part in the measurements; note how far it went."""
    with ExitStack() as stack:
        try:
            back = _try_call_back(measured)
            link.send(CALLED_BACK, CALL_RESULTS.index(measured.calls_back or ""))
            second = link
            if back is not None:
                second = Link(stack.enter_context(back), link.deadline)
                second.send(BACK, proof)
            answer_pings(link)
            measured.round_trip, measured.ahead = _hear_result(link)
            measured.bytes_per_second_from = receive_much(link)
            send_much(second)
            measured.bytes_per_second_to = hear_speed(link)
        except OSError as error:
            measured.problem = str(error)


def _hear_result(link: Link) -> tuple[float, float]:
    """Receive the time of a round trip, and by how much the peer's clock is ahead."""
    trip, ahead = link.receive(RESULT)
    expect(math.isfinite(trip) and math.isfinite(ahead), "a time makes no sense")
    return trip, -ahead  # the peer has said it of our clock


def _try_call_back(measured: Measured) -> socket.socket | None:
    """Connect to where the peer has come from; note whether that works."""
    address = measured.other, measured.back_port or 0
    try:
        connection = socket.create_connection(address, timeout=_CALL_SECONDS)
    except TimeoutError:
        measured.calls_back = CALL_RESULTS[1]
    except OSError as error:
        measured.calls_back = CALL_RESULTS[_result_of(error)]
    else:
        measured.calls_back = CALL_RESULTS[0]
        return connection
    return None


def _result_of(error: OSError) -> int:
    if error.errno == errno.ECONNREFUSED:
        return 2
    return 3 if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH) else 4
