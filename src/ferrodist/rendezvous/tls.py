# SPDX-License-Identifier: MIT OR Apache-2.0
"""TLS: links that nobody on the way can read, by TLS 1.3 with a certificate made for the job.

The certificate follows from the job's secret, byte for byte, so every rank makes the same one and
accepts no other. Each end shows it, and proves that it has the key. The keys of the encryption
itself are new for every connection: an attacker who learns the secret later cannot read what was
recorded before.

The bytes of a link pass through a *tunnel* between the connection, which is encrypted, and a pair
of sockets. One thread, the *relay*, keeps all tunnels of a process going; it exists while there are
any. The user of a link has one end of the pair and notices nothing, except that it is slower, and
that the thread needs the interpreter: a process that holds the GIL for as long as the heartbeat
timeout (``Config.heartbeat_timeout``) counts as lost to the others.

Needs the package cryptography (extra ``tls``), which is imported when the first link is made.
"""

from __future__ import annotations

import atexit
import fcntl
import hmac
import os
import select
import selectors
import socket
import ssl
import sys
import termios
import threading
import time
from contextlib import suppress
from datetime import datetime
from typing import Any

from ferrodist.config import variable
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendUnavailable

# Clocks of hosts differ, and the secret decides how long a job may be joined.
_FIRST_DAY, _LAST_DAY = datetime(2000, 1, 1), datetime(2999, 12, 31)

_CHUNK = 1 << 16  # bytes read at once; about as many wait in the tunnel in each direction
_MAX_ROUNDS = 16  # before other tunnels have their turn
_LINGER_SECONDS = 2.0  # for what is still on its way when a link is closed, or the program ends
_CHECK_SECONDS = 0.2  # how often sockets are checked that nothing is awaited from
_PAUSE = 0.005


class Tls:
    """Both sides of the encrypted links of one job."""

    def __init__(self, secret: bytes) -> None:
        key, certificate, self._pinned = _make_certificate(secret)
        self._accepting = _context(ssl.PROTOCOL_TLS_SERVER, key, certificate)
        self._accepting.num_tickets = 0  # no session is resumed
        self._connecting = _context(ssl.PROTOCOL_TLS_CLIENT, key, certificate)

    def accept(self, connection: socket.socket) -> socket.socket:
        return open_tunnel(connection, self._accepting, self._pinned, is_server=True)

    def connect(self, connection: socket.socket) -> socket.socket:
        return open_tunnel(connection, self._connecting, self._pinned, is_server=False)


def _context(protocol: int, key: bytes, certificate: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # it belongs to the job, not to a host
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    file = os.memfd_create("ferrodist-tls", os.MFD_CLOEXEC)  # Python's ssl insists on a file
    try:
        os.write(file, certificate + key)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context


def _make_certificate(secret: bytes) -> tuple[bytes, bytes, bytes]:
    """Return key and certificate of a job as PEM, and the certificate as DER."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise BackendUnavailable(
            f"{variable('tls')}=1 needs the package cryptography: pip install 'ferrodist[tls]'"
        ) from error
    key = Ed25519PrivateKey.from_private_bytes(hmac.digest(secret, b"tls key", "sha256"))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a job of ferrodist")])
    number = int.from_bytes(hmac.digest(secret, b"tls number", "sha256")[:16]) | 1
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(number)
        .not_valid_before(_FIRST_DAY)
        .not_valid_after(_LAST_DAY)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, None)  # Ed25519 signs the same in the same way, without randomness
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    text, binary = (
        certificate.public_bytes(encoding)
        for encoding in (serialization.Encoding.PEM, serialization.Encoding.DER)
    )
    return private, text, binary


# -- tunnels --------------------------------------------------------------------------------------


def open_tunnel(
    connection: socket.socket, context: ssl.SSLContext, pinned: bytes, *, is_server: bool
) -> socket.socket:
    """Return a socket whose bytes pass encrypted through a connection, which is the relay's now.

    If the other side shows another certificate than the pinned one, the socket comes to its end.
    """
    ours, inner = socket.socketpair()
    for one in (connection, inner, ours):
        one.setblocking(False)
    _relay.add(Tunnel(connection, inner, context, pinned, is_server=is_server))
    return ours


class Tunnel:
    """One link: bytes pass between a connection that is encrypted and a socket that is not.

    The *outer* socket leads to the other process, the *inner* one to the user of the link here.
    Little is kept on the way: what one side does not take, the other is not asked for. Everything
    is done by ``pump``, which never blocks.
    """

    def __init__(
        self,
        outer: socket.socket,
        inner: socket.socket,
        context: ssl.SSLContext,
        pinned: bytes,
        *,
        is_server: bool,
    ) -> None:
        self.outer, self.inner = outer, inner
        self.is_over = False
        self._pinned = pinned
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()  # encrypted
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=is_server)
        self._to_inner, self._to_outer = bytearray(), bytearray()
        self._is_trusted = False  # after the handshake
        self._is_all_read = False  # of what has arrived
        self._is_outer_closed = False  # nothing more arrives
        self._has_outer_ended = False  # and all of it is read
        self._has_inner_ended = False
        self._has_said_end = False  # to the outer side (close_notify)
        self._has_told_end = False  # to the inner side
        self._is_inner_deaf = False  # it was closed: nobody reads what arrives
        self._is_cut = False  # the outer side is abandoned
        self._last_moment: Deadline | None = None

    def pump(self) -> bool:
        """Pass on what can be passed on now; True if there is more to do immediately."""
        is_moving = True
        try:
            for _ in range(_MAX_ROUNDS):
                is_moving = self._pump_once()
                if not is_moving:
                    break
        except ssl.SSLError:
            self._cut()  # a stranger, or the connection ended without a close_notify
            is_moving = False
        self._check_over()
        return is_moving and not self.is_over

    def check(self) -> None:
        """Notice that the inner side was closed, while nothing is to be read from it."""
        if not self._is_trusted and self.is_inner_gone():
            self.is_over = True
        elif self._has_inner_ended:
            self._check_over()

    def has_all_left(self) -> bool:
        """Tell whether all that the inner side will ever send has left this process."""
        return self._has_said_end and not self._to_outer and not self._leaving.pending

    def has_arrived(self) -> bool:
        """Tell whether all of it has reached the other host, too.

        When a process ends, a connection with something unread in it is reset, and what the kernel
        has not sent by then is lost.
        """
        return self.has_all_left() and _num_unacknowledged(self.outer) == 0

    def is_inner_gone(self) -> bool:
        """Tell whether the inner side was closed."""
        return self._poll_inner(select.POLLHUP)

    def is_inner_silent(self) -> bool:
        """Tell whether the inner side will send nothing more; it may still listen."""
        return self._poll_inner(select.POLLHUP | select.POLLRDHUP)

    def _poll_inner(self, wanted: int) -> bool:
        poll = select.poll()
        try:
            poll.register(self.inner, wanted)
        except ValueError:  # this end is closed as well
            return True
        return any(events & wanted for _, events in poll.poll(0))

    def _check_over(self) -> None:
        has_all_arrived = self._has_outer_ended and not self._to_inner
        if self._is_cut:
            self.is_over = not self._to_inner or self.is_inner_gone()
        elif self.has_all_left():
            self.is_over = has_all_arrived or (self.is_inner_gone() and self._has_lingered())

    def _has_lingered(self) -> bool:
        """Wait a little for the other side to close as well.

        A connection that is closed with something unread in it is reset, and what was sent last may
        be lost with it.
        """
        if self._last_moment is None:
            self._last_moment = Deadline(_LINGER_SECONDS)
            self._is_inner_deaf = True
            self._to_inner.clear()
            with suppress(OSError):
                self.outer.shutdown(socket.SHUT_WR)
        return self._is_outer_closed or self._last_moment.remaining() <= 0

    def events(self) -> tuple[int, int]:
        outer = inner = 0
        if not self._is_cut:
            if self._has_room_for_arrivals() and not self._is_outer_closed:
                outer |= selectors.EVENT_READ
            if self._to_outer or self._leaving.pending:
                outer |= selectors.EVENT_WRITE
            if self._is_trusted and not self._has_inner_ended and self._has_room_to_leave():
                inner |= selectors.EVENT_READ
        if self._to_inner:
            inner |= selectors.EVENT_WRITE
        return outer, inner

    def close(self) -> None:
        self.outer.close()
        self.inner.close()

    def _pump_once(self) -> bool:
        moves = [self._receive_outer(), self._shake_hands(), self._decrypt(), self._send_inner()]
        moves += [self._encrypt(), self._say_end(), self._send_outer()]
        return any(moves)

    # -- from the outer side to the inner ---------------------------------------------------------

    def _has_room_for_arrivals(self) -> bool:
        return self._arrived.pending < _CHUNK and len(self._to_inner) < _CHUNK

    def _receive_outer(self) -> bool:
        if self._is_cut or self._is_outer_closed or not self._has_room_for_arrivals():
            return False
        try:
            data = self.outer.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError:  # it was reset; what has arrived before is good
            data = b""
        if data:
            self._arrived.write(data)
        else:
            self._arrived.write_eof()
            self._is_outer_closed = True
        self._is_all_read = False
        return True

    def _shake_hands(self) -> bool:
        if self._is_trusted or self._is_cut:
            return False
        with suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
            if self._tls.getpeercert(binary_form=True) != self._pinned:
                raise ssl.SSLError("another certificate than the job's")
            self._is_trusted = True
        return self._is_trusted

    def _decrypt(self) -> bool:
        if not self._is_trusted or self._is_cut or len(self._to_inner) >= _CHUNK:
            return False
        try:
            data = self._tls.read(_CHUNK)
        except ssl.SSLWantReadError:
            self._is_all_read = True
            return False
        except ssl.SSLZeroReturnError:  # the other side has sent close_notify
            data = b""
        if not data:
            is_new = not self._has_outer_ended
            self._has_outer_ended = self._is_outer_closed = True
            return is_new
        if not self._is_inner_deaf:
            self._to_inner += data
        return True

    def _send_inner(self) -> bool:
        if not self._to_inner:
            return self._tell_end()
        try:
            sent = self.inner.send(self._to_inner, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:  # nobody is there to take it
            self._to_inner.clear()
            self._is_inner_deaf = True
            return True
        del self._to_inner[:sent]
        return sent > 0

    def _tell_end(self) -> bool:
        if self._has_told_end or not self._has_outer_ended:
            return False
        self._has_told_end = True
        with suppress(OSError):
            self.inner.shutdown(socket.SHUT_WR)
        return False

    # -- from the inner side to the outer ---------------------------------------------------------

    def _has_room_to_leave(self) -> bool:
        return self._leaving.pending + len(self._to_outer) < _CHUNK

    def _encrypt(self) -> bool:
        is_open = self._is_trusted and not self._is_cut and not self._has_inner_ended
        if not is_open or not self._has_room_to_leave():
            return False
        try:
            data = self.inner.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            self._tls.write(data)
        else:
            self._has_inner_ended = True
        return True

    def _say_end(self) -> bool:
        """Tell the outer side that nothing more will come; what has arrived is read before.

        OpenSSL takes data that it finds unread at this point for an error.
        """
        if self._has_said_end or not self._has_inner_ended or self._is_cut:
            return False
        if self._is_trusted and not self._is_all_read and not self._has_outer_ended:
            return False
        self._has_said_end = True
        if self._is_trusted:
            with suppress(ssl.SSLError):
                self._tls.unwrap()
        return True

    def _send_outer(self) -> bool:
        if self._is_cut:
            return False
        self._to_outer += self._leaving.read()
        if not self._to_outer:
            return False
        try:
            sent = self.outer.send(self._to_outer, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:  # it takes nothing more, but may have sent something before
            sent, self._has_inner_ended, self._has_said_end = len(self._to_outer), True, True
        del self._to_outer[:sent]
        return sent > 0

    # -- the end ----------------------------------------------------------------------------------

    def _cut(self) -> None:
        """Abandon the outer side; what has come from it is still passed on."""
        self._is_cut = self._is_outer_closed = self._has_outer_ended = True
        self._to_outer.clear()
        with suppress(OSError):
            self._send_inner()
        if not self._to_inner:
            with suppress(OSError):
                self.inner.shutdown(socket.SHUT_RDWR)


def _num_unacknowledged(connection: socket.socket) -> int:
    room = bytearray(4)
    try:
        fcntl.ioctl(connection, termios.TIOCOUTQ, room)
    except (OSError, ValueError):  # it is closed
        return 0
    return int.from_bytes(room, sys.byteorder)


# -- the relay ------------------------------------------------------------------------------------


class Relay:
    """The tunnels of this process, and the thread that serves them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[Tunnel] = []
        self._tunnels: set[Tunnel] = set()
        self._unfinished: set[Tunnel] = set()  # with more to do without an event
        self._thread: threading.Thread | None = None
        self._doorbell: tuple[socket.socket, socket.socket] | None = None  # wakes the thread

    def add(self, tunnel: Tunnel) -> None:
        """Add a tunnel; the thread is started if there is none."""
        with self._lock:
            self._new.append(tunnel)
            if self._thread is None:
                self._doorbell = socket.socketpair()
                self._thread = threading.Thread(
                    target=self._serve, args=self._doorbell[1:], name="ferrodist-relay", daemon=True
                )
                self._thread.start()
            elif self._doorbell is not None:
                with suppress(BlockingIOError):
                    self._doorbell[0].send(b"!", socket.MSG_DONTWAIT)

    def finish(self, seconds: float = _LINGER_SECONDS) -> None:
        """Wait until what was written to links that have ended has arrived, but not for long.

        A link has ended that says no more: its socket may well be open until the process is gone.
        """
        deadline = Deadline(seconds)
        while deadline.remaining() > 0 and any(
            not tunnel.is_over and not tunnel.has_arrived() and tunnel.is_inner_silent()
            for tunnel in list(self._tunnels)
        ):
            time.sleep(_PAUSE)

    def close(self) -> None:
        for tunnel in [*self._tunnels, *self._new]:
            tunnel.close()
        for one in self._doorbell or ():
            one.close()

    def _serve(self, doorbell: socket.socket) -> None:
        try:
            self._serve_until_none_is_left(doorbell)
        except BaseException:  # whatever ends this thread, links must not wait for it
            with self._lock:  # nobody must wait for a thread that is gone
                self.close()
                self._tunnels, self._new, self._thread = set(), [], None
            raise

    def _serve_until_none_is_left(self, doorbell: socket.socket) -> None:
        next_check = Deadline(_CHECK_SECONDS)
        with selectors.DefaultSelector() as selector:
            selector.register(doorbell, selectors.EVENT_READ)
            while self._take_new():
                seconds = 0.0 if self._unfinished else max(0.0, next_check.remaining())
                touched = {key.data for key, _ in selector.select(seconds)} - {None}
                touched |= self._unfinished
                self._unfinished = {tunnel for tunnel in touched if tunnel.pump()}
                if next_check.remaining() <= 0:
                    next_check = Deadline(_CHECK_SECONDS)
                    touched = set(self._tunnels)
                    for tunnel in touched:
                        tunnel.check()
                for tunnel in touched:
                    self._watch(selector, tunnel)
                with suppress(BlockingIOError):
                    doorbell.recv(1 << 12, socket.MSG_DONTWAIT)

    def _take_new(self) -> bool:
        """Begin with new tunnels; False if none is left, and the thread may end."""
        with self._lock:
            new, self._new = self._new, []
            self._tunnels.update(new)
            self._unfinished.update(new)
            if not self._tunnels:
                self._thread = None
                self.close()
                return False
        return True

    def _watch(self, selector: selectors.BaseSelector, tunnel: Tunnel) -> None:
        wanted = (0, 0) if tunnel.is_over else tunnel.events()
        for one, events in zip((tunnel.outer, tunnel.inner), wanted, strict=True):
            _change(selector, one, events, tunnel)
        if tunnel.is_over:
            self._tunnels.discard(tunnel)
            tunnel.close()


def _change(selector: selectors.BaseSelector, one: socket.socket, events: int, data: Any) -> None:
    found = selector.get_map().get(one)
    if found is None and events:
        selector.register(one, events, data)
    elif found is not None and not events:
        selector.unregister(one)
    elif found is not None and found.events != events:
        selector.modify(one, events, data)


_relay = Relay()


def _forget() -> None:
    """Leave the links to the parent process, which has the thread."""
    global _relay
    _relay.close()
    _relay = Relay()


atexit.register(lambda: _relay.finish())  # of then: a fork has another
os.register_at_fork(after_in_child=_forget)
