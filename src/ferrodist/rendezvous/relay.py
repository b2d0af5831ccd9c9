# SPDX-License-Identifier: MIT OR Apache-2.0
"""The relay: one thread of this process that keeps all its tunnels going.

It is there while there are tunnels. Whoever uses a link has one end of a pair of sockets and
notices nothing of it, except that it is slower, and that the thread needs the interpreter: a
process that holds the GIL for as long as ``Config.silence`` counts as lost to the others.
"""

from __future__ import annotations

import atexit
import os
import selectors
import socket
import ssl
import threading
import time
from contextlib import suppress
from typing import Any

from ferrodist.deadline import Deadline
from ferrodist.rendezvous.tunnel import Tunnel

_LOOK_SECONDS = 0.2  # how often sockets are looked at that nothing is awaited from
_PAUSE = 0.005
_LAST_SECONDS = 2.0  # for what is still on its way when the program ends


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


class Relay:
    """The tunnels of this process, and the thread that serves them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[Tunnel] = []
        self._tunnels: set[Tunnel] = set()
        self._unfinished: set[Tunnel] = set()  # with more to do, though nothing has happened
        self._thread: threading.Thread | None = None
        self._bell: tuple[socket.socket, socket.socket] | None = None  # wakes the thread

    def add(self, tunnel: Tunnel) -> None:
        """Take a tunnel; the thread is started if there is none."""
        with self._lock:
            self._new.append(tunnel)
            if self._thread is None:
                self._bell = socket.socketpair()
                self._thread = threading.Thread(
                    target=self._serve, args=self._bell[1:], name="ferrodist-relay", daemon=True
                )
                self._thread.start()
            elif self._bell is not None:
                with suppress(BlockingIOError):
                    self._bell[0].send(b"!", socket.MSG_DONTWAIT)

    def finish(self, seconds: float = _LAST_SECONDS) -> None:
        """Wait until what was written to closed links has left, but not for long."""
        deadline = Deadline(seconds)
        while deadline.remaining() > 0 and any(map(_is_leaving, list(self._tunnels))):
            time.sleep(_PAUSE)

    def close(self) -> None:
        """Close all sockets."""
        for tunnel in [*self._tunnels, *self._new]:
            tunnel.close()
        for one in self._bell or ():
            one.close()

    def _serve(self, heard: socket.socket) -> None:
        try:
            self._serve_until_none_is_left(heard)
        except BaseException:
            with self._lock:  # nobody shall wait for a thread that is gone
                self.close()
                self._tunnels, self._new, self._thread = set(), [], None
            raise

    def _serve_until_none_is_left(self, heard: socket.socket) -> None:
        next_look = Deadline(_LOOK_SECONDS)
        with selectors.DefaultSelector() as selector:
            selector.register(heard, selectors.EVENT_READ)
            while self._take_new():
                seconds = 0.0 if self._unfinished else max(0.0, next_look.remaining())
                touched = {key.data for key, _ in selector.select(seconds)} - {None}
                touched |= self._unfinished
                self._unfinished = {tunnel for tunnel in touched if tunnel.pump()}
                if next_look.remaining() <= 0:
                    next_look = Deadline(_LOOK_SECONDS)
                    touched = set(self._tunnels)
                    for tunnel in touched:
                        tunnel.look()
                for tunnel in touched:
                    self._watch(selector, tunnel)
                with suppress(BlockingIOError):
                    heard.recv(1 << 12, socket.MSG_DONTWAIT)

    def _take_new(self) -> bool:
        """Begin with new tunnels; False if there is none left, and the thread may end."""
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
        """Wait for what a tunnel can use, or be done with it."""
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


def _is_leaving(tunnel: Tunnel) -> bool:
    return not tunnel.is_over and not tunnel.has_all_left() and tunnel.is_inner_gone()


_relay = Relay()


def _finish() -> None:
    _relay.finish()


def _forget() -> None:
    """Leave the links to the process that this one was forked from, which has the thread."""
    global _relay
    _relay.close()
    _relay = Relay()


atexit.register(_finish)
os.register_at_fork(after_in_child=_forget)
