# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tunnel: bytes pass between a connection that is encrypted and a socket that is not.

The *outer* socket leads to the other process, the *inner* one to whoever uses the link here. Little
is kept on the way: what one side does not take the other is not asked for.
"""

from __future__ import annotations

import select
import selectors
import socket
import ssl
from contextlib import suppress

from ferrodist.deadline import Deadline

_PIECE = 1 << 16  # bytes read at once; about as many wait on the way in each direction
_MOST_ROUNDS = 16  # before other tunnels have their turn
_LAST_SECONDS = 2.0  # that a connection stays after its user has closed it, to be taken in whole


class Tunnel:
    """One link; everything is done by ``pump``, which never waits."""

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
        self._has_said_end = False  # to the outer side
        self._has_told_end = False  # to the inner side
        self._is_inner_deaf = False  # it was closed: what arrives is for nobody
        self._is_cut = False  # the outer side is given up
        self._last_moment: Deadline | None = None

    def pump(self) -> bool:
        """Pass on what can be passed on now; True if there is more to do at once."""
        is_moving = True
        try:
            for _ in range(_MOST_ROUNDS):
                is_moving = self._pump_once()
                if not is_moving:
                    break
        except ssl.SSLError:
            self._cut()  # a stranger, or the connection ended without a word
            is_moving = False
        self._see_whether_over()
        return is_moving and not self.is_over

    def look(self) -> None:
        """Notice that the inner side was closed, while nothing is to be read from it."""
        if not self._is_trusted and self.is_inner_gone():
            self.is_over = True
        elif self._has_inner_ended:
            self._see_whether_over()

    def has_all_left(self) -> bool:
        """Tell whether all that the inner side will ever say is out of this process."""
        return self._has_said_end and not self._to_outer and not self._leaving.pending

    def is_inner_gone(self) -> bool:
        """Tell whether the inner side is closed, or has ended both ways."""
        poll = select.poll()
        try:
            poll.register(self.inner, 0)
        except ValueError:  # this end is closed as well
            return True
        return any(events & select.POLLHUP for _, events in poll.poll(0))

    def _see_whether_over(self) -> None:
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
            self._last_moment = Deadline(_LAST_SECONDS)
            self._is_inner_deaf = True
            self._to_inner.clear()
            with suppress(OSError):
                self.outer.shutdown(socket.SHUT_WR)
        return self._is_outer_closed or self._last_moment.remaining() <= 0

    def events(self) -> tuple[int, int]:
        """Say what to wait for at the outer and at the inner socket."""
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
        """Close both sockets."""
        self.outer.close()
        self.inner.close()

    def _pump_once(self) -> bool:
        """Do one round; True if anything has moved."""
        moves = [self._receive_outer(), self._shake_hands(), self._decrypt(), self._send_inner()]
        moves += [self._encrypt(), self._say_end(), self._send_outer()]
        return any(moves)

    # -- from the outer side to the inner ---------------------------------------------------------

    def _has_room_for_arrivals(self) -> bool:
        return self._arrived.pending < _PIECE and len(self._to_inner) < _PIECE

    def _receive_outer(self) -> bool:
        if self._is_cut or self._is_outer_closed or not self._has_room_for_arrivals():
            return False
        try:
            data = self.outer.recv(_PIECE)
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
        if not self._is_trusted or self._is_cut or len(self._to_inner) >= _PIECE:
            return False
        try:
            data = self._tls.read(_PIECE)
        except ssl.SSLWantReadError:
            self._is_all_read = True
            return False
        except ssl.SSLZeroReturnError:  # the other side has said that this is all
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
        """Tell the inner side that nothing more will come."""
        if self._has_told_end or not self._has_outer_ended:
            return False
        self._has_told_end = True
        with suppress(OSError):
            self.inner.shutdown(socket.SHUT_WR)
        return False

    # -- from the inner side to the outer ---------------------------------------------------------

    def _has_room_to_leave(self) -> bool:
        return self._leaving.pending + len(self._to_outer) < _PIECE

    def _encrypt(self) -> bool:
        is_open = self._is_trusted and not self._is_cut and not self._has_inner_ended
        if not is_open or not self._has_room_to_leave():
            return False
        try:
            data = self.inner.recv(_PIECE)
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
        """Say to the outer side that nothing more will come; what has arrived is read before.

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
        except OSError:  # it takes nothing more, but may have said something before
            sent, self._has_inner_ended, self._has_said_end = len(self._to_outer), True, True
        del self._to_outer[:sent]
        return sent > 0

    # -- the end ----------------------------------------------------------------------------------

    def _cut(self) -> None:
        """Give the outer side up; what has come from it is still passed on."""
        self._is_cut = self._is_outer_closed = self._has_outer_ended = True
        self._to_outer.clear()
        with suppress(OSError):
            self._send_inner()
        if not self._to_inner:
            with suppress(OSError):
                self.inner.shutdown(socket.SHUT_RDWR)
