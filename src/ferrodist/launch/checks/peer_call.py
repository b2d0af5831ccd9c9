# SPDX-License-Identifier: MIT OR Apache-2.0
"""``ferrodist doctor --peer``: call the doctor that listens on another host, and be called back."""

from __future__ import annotations

import errno
import secrets
import socket
from contextlib import ExitStack

from ferrodist.deadline import Deadline
from ferrodist.errors import AuthenticationError, RendezvousError
from ferrodist.launch.checks.peer_listen import plain
from ferrodist.launch.checks.peer_measure import (
    Measured,
    hear_speed,
    ping,
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
    padded,
    prove,
    unpadded,
)
from ferrodist.rendezvous.launch import Endpoint
from ferrodist.version import __version__

_CONNECT_SECONDS = 5.0
_GREETING_SECONDS = 45.0  # the listener may still be looking at its own machine
_TALK_SECONDS = 60.0
_BACK_SECONDS = 3.0  # after the listener has said that it is connected


def call(peer: Endpoint, code: str, ports: tuple[int, int] = (0, 0)) -> Measured:
    """Connect, prove to know the code, be called back at one of ``ports``, and measure.

    Raises:
        RendezvousError: if there is no way to the listener, or no port for it here.
        AuthenticationError: if one of the two does not know the code.
    """
    with ExitStack() as stack:
        connection = stack.enter_context(_connect(peer))
        link = Link(connection, Deadline(_GREETING_SECONDS))
        own = connection.getsockname()[0]
        door = stack.enter_context(_open_door(own, ports))
        measured = Measured(str(peer), own=plain(own), back_port=door.getsockname()[1])
        try:
            proof = _shake_hands(link, code, measured)
            link.deadline = Deadline(_TALK_SECONDS)
            _talk(link, door, proof, measured, stack)
        except AuthenticationError:
            raise
        except OSError as error:
            measured.problem = str(error)
    return measured


def _connect(peer: Endpoint) -> socket.socket:
    try:
        return socket.create_connection(peer, timeout=_CONNECT_SECONDS)
    except TimeoutError as error:
        raise RendezvousError(
            f"no answer within {_CONNECT_SECONDS:g} s", errno=errno.ETIMEDOUT
        ) from error
    except OSError as error:
        raise RendezvousError(error.strerror or str(error), errno=error.errno) from error


def _open_door(address: str, ports: tuple[int, int]) -> socket.socket:
    """Listen where the other doctor is to call back: on the way to it, and nowhere else."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in range(ports[0], ports[1] + 1):
        try:
            return socket.create_server((address, port), family=family, backlog=4)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise RendezvousError(
                    f"port {port} cannot be opened here: {error.strerror}"
                ) from error
    raise RendezvousError(f"no port of {ports[0]}-{ports[1]} is free here")


def _shake_hands(link: Link, code: str, measured: Measured) -> bytes:
    """Prove to know the code, and have it proved; return what the call back has to begin with."""
    magic, challenge = link.receive(GREETING)
    expect(magic == MAGIC, "its greeting is another")
    nonce, version = secrets.token_bytes(NONCE_NBYTES), padded(__version__, 24)
    port = measured.back_port or 0
    facts = challenge, nonce, port.to_bytes(2), version
    link.send(HELLO, MAGIC, nonce, port, version, prove(code, "peer", *facts))
    is_welcome, their_version, seen, proof = link.receive(WELCOME)
    if not is_welcome:
        raise AuthenticationError("the code is not the one that the listener shows")
    if not is_proof(proof, code, "listener", *facts, their_version, seen):
        raise AuthenticationError("the listener does not know the code: it is somebody else's")
    measured.other_version, measured.seen_as = unpadded(their_version), unpadded(seen)
    return prove(code, "back", *facts)


def _talk(
    link: Link, door: socket.socket, proof: bytes, measured: Measured, stack: ExitStack
) -> None:
    (result,) = link.receive(CALLED_BACK)
    expect(result < len(CALL_RESULTS), "an unknown result")
    measured.calls_back = CALL_RESULTS[result]
    second = link
    if not measured.calls_back:
        second = Link(stack.enter_context(_accept(door, proof)), link.deadline)
    measured.round_trip, measured.ahead = ping(link)
    link.send(RESULT, measured.round_trip, measured.ahead)
    send_much(link)
    measured.bytes_per_second_to = hear_speed(link)
    measured.bytes_per_second_from = receive_much(second, link)


def _accept(door: socket.socket, proof: bytes) -> socket.socket:
    """Take the listener's connection; whoever cannot prove to be it is sent away."""
    deadline = Deadline(_BACK_SECONDS)
    while (left := deadline.remaining()) > 0:
        door.settimeout(left)
        connection, _ = door.accept()
        if _is_from_listener(connection, proof, deadline):
            return connection
        connection.close()
    raise TimeoutError(f"the call back did not come within {deadline}")


def _is_from_listener(connection: socket.socket, proof: bytes, deadline: Deadline) -> bool:
    try:
        (shown,) = Link(connection, deadline).receive(BACK)
    except OSError:
        return False
    return secrets.compare_digest(shown, proof)
