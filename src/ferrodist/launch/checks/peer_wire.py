# SPDX-License-Identifier: MIT OR Apache-2.0
"""What two doctors say to each other: messages of fixed sizes, and proofs that both know the code.

The listener shows a random code, which people carry to the other host. It never travels: each side
proves by HMAC that it knows it, over numbers that both have drawn, so nothing can be played again.
Before that proof the listener reads one message of fixed size and does nothing for anybody.
"""

from __future__ import annotations

import base64
import hmac
import secrets
import socket
import struct
from typing import Any

from ferrodist.deadline import Deadline
from ferrodist.errors import ProtocolError

MAGIC = b"fdoctor1"
NONCE_NBYTES = 16
CHUNK_NBYTES = 1 << 16

GREETING = struct.Struct("!8s16s")  # magic, the listener's nonce
HELLO = struct.Struct("!8s16sH24s32s")  # magic, nonce, port to call back, version, proof
WELCOME = struct.Struct("!B24s46s32s")  # 1 if welcome, version, address seen, proof
CALLED_BACK = struct.Struct("!B")  # index into CALL_RESULTS
BACK = struct.Struct("!32s")  # proof, the first on the connection back
PING = struct.Struct("!I60x")  # number
PONG = struct.Struct("!Iq52x")  # number, nanoseconds of the listener's clock
RECEIVED = struct.Struct("!Qd")  # bytes, seconds
RESULT = struct.Struct("!dd")  # seconds of a round trip, by which the listener's clock is ahead

CALL_RESULTS = ("", "no answer", "refused", "no route", "failed")


def new_code() -> str:
    """Draw a code of 80 bits, as letters and digits in groups of four."""
    letters = base64.b32encode(secrets.token_bytes(10)).decode().lower()
    return "-".join(letters[start : start + 4] for start in range(0, len(letters), 4))


def prove(code: str, role: str, *facts: bytes) -> bytes:
    """Prove that one knows the code, for one role and what has been said so far."""
    key = code.replace("-", "").strip().lower().encode()
    lengths = struct.pack(f"!{len(facts)}I", *map(len, facts))  # no two lists of facts are alike
    return hmac.digest(key, role.encode() + b"\0" + lengths + b"".join(facts), "sha256")


def is_proof(proof: bytes, code: str, role: str, *facts: bytes) -> bool:
    """Tell whether somebody has proved to know the code."""
    return hmac.compare_digest(proof, prove(code, role, *facts))


def padded(text: str, nbytes: int) -> bytes:
    """Make a field of fixed size of a text."""
    return text.encode("ascii", "replace")[:nbytes].ljust(nbytes, b"\0")


def unpadded(field: bytes) -> str:
    """Read a text from a field of fixed size; what cannot be printed is left out."""
    text = field.rstrip(b"\0").decode("ascii", "replace")
    return "".join(letter for letter in text if letter.isprintable())


class Link:
    """A connection on which every message has a known size and everything a deadline."""

    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        self.connection = connection
        self.deadline = deadline
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, form: struct.Struct, *fields: Any) -> None:
        """Send one message."""
        self.send_bytes(form.pack(*fields))

    def receive(self, form: struct.Struct) -> tuple[Any, ...]:
        """Receive one message."""
        message = bytearray(form.size)
        self.receive_into(memoryview(message))
        return form.unpack(message)

    def send_bytes(self, data: bytes | memoryview) -> None:
        """Send bytes; raises TimeoutError when the deadline passes."""
        self._set_limit()
        self.connection.sendall(data)

    def receive_into(self, memory: memoryview) -> None:
        """Fill a memory; raises TimeoutError when the deadline passes."""
        while memory:
            self._set_limit()
            count = self.connection.recv_into(memory)
            if count == 0:
                raise ConnectionResetError("the other side has ended the connection")
            memory = memory[count:]

    def _set_limit(self) -> None:
        left = self.deadline.remaining()
        if left <= 0:
            raise TimeoutError(f"no answer within {self.deadline}")
        self.connection.settimeout(left)

    def close(self) -> None:
        """End the connection."""
        self.connection.close()


def expect(is_right: bool, what: str) -> None:
    """Refuse what no doctor would send."""
    if not is_right:
        raise ProtocolError(f"the other side is no ferrodist doctor: {what}")
