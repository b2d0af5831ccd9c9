# SPDX-License-Identifier: MIT OR Apache-2.0
"""FaultProxy: a TCP proxy between ranks that delays, freezes, cuts and damages what it forwards.

One thread owns all sockets; what others ask of it, it does between two looks at them. What a
connection suffers is in links.py.
"""

from __future__ import annotations

import errno
import math
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Self

from ferrodist.testing.links import Direction, Link, LinkFaults

_PAUSE = 0.05  # seconds without accepting when the process is out of files


class ForwardedBytes(NamedTuple):
    """Payload forwarded so far, over all connections."""

    to_target: int
    from_target: int


class FaultProxy:
    """A TCP proxy that forwards connections from ``address`` to ``target`` and injects ``faults``.

    It forwards until close() or the end of the ``with`` block. Faults count the bytes of each
    connection separately. freeze(), thaw(), cut() and reset() affect all connections and have
    taken effect when they return.

    Example:
        >>> import socket
        >>> from ferrodist.testing import FaultProxy, LinkFaults
        >>> listener = socket.create_server(("127.0.0.1", 0))
        >>> with FaultProxy(listener.getsockname(), faults=LinkFaults(cut_after=5)) as proxy:
        ...     client = socket.create_connection(proxy.address)
        ...     server, _ = listener.accept()
        ...     client.sendall(b"hello world")
        ...     [server.recv(5, socket.MSG_WAITALL), server.recv(1)]
        [b'hello', b'']
        >>> for one in (listener, client, server):
        ...     one.close()
    """

    def __init__(
        self,
        target: tuple[str, int],
        *,
        faults: LinkFaults | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.faults = faults or LinkFaults()
        self._target = _resolve(*target[:2])
        self._listener = socket.create_server((host, 0), family=_resolve(host, 0)[0], backlog=1024)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._links: list[Link] = []
        self._watched: dict[socket.socket, int] = {}
        self._selector = selectors.DefaultSelector()
        self._alarm, self._doorbell = socket.socketpair()
        self._doorbell.setblocking(False)
        self._orders: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]]
        self._orders = queue.SimpleQueue()
        self._rings = 0
        self._accept_at = math.inf  # set while no connection is accepted
        self._is_frozen = self._is_closing = False
        self._changed = threading.Condition()  # guards what is below; only the thread writes it
        self._is_closed = False
        self._made = self._open = 0
        self._passed: dict[Direction, int] = {"to_target": 0, "from_target": 0}
        self._watch(self._listener, selectors.EVENT_READ, self._accept)
        self._watch(self._doorbell, selectors.EVENT_READ, self._hear)
        self._thread = threading.Thread(target=self._run, name="ferrodist-proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    @property
    def connections(self) -> int:
        """The number of connections made so far."""
        self._order(lambda: None)
        with self._changed:
            return self._made

    @property
    def open_connections(self) -> int:
        """The number of connections that are still open."""
        with self._changed:
            return self._open

    @property
    def forwarded(self) -> ForwardedBytes:
        """The number of bytes forwarded so far."""
        with self._changed:
            return ForwardedBytes(self._passed["to_target"], self._passed["from_target"])

    def wait_for_bytes(
        self, count: int, timeout: float = 30.0, *, direction: Direction = "both"
    ) -> None:
        """Wait until this many bytes in total were forwarded, or raise TimeoutError."""

        def passed() -> int:
            return sum(self._passed.values()) if direction == "both" else self._passed[direction]

        with self._changed:
            if not self._changed.wait_for(lambda: passed() >= count, timeout):
                raise TimeoutError(
                    f"fault proxy: {passed()} of {count} bytes ({direction}) after {timeout:g} s"
                )

    def wait_for_end(self, timeout: float = 30.0) -> None:
        """Wait until no connection is open, or raise TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._open == 0, timeout):
                raise TimeoutError(
                    f"fault proxy: {self._open} connections open after {timeout:g} s"
                )

    def freeze(self) -> None:
        """Stop forwarding, on new connections too; all sockets stay open."""
        self._order(partial(self._set_frozen, True))

    def thaw(self) -> None:
        """Resume forwarding, also of connections that ``freeze_after`` stopped."""
        self._order(partial(self._set_frozen, False))

    def cut(self) -> None:
        """Close all connections in both directions; data not yet forwarded is lost."""
        self._order(partial(self._strike, Link.cut))

    def reset(self) -> None:
        """Reset (RST) all connections in both directions."""
        self._order(partial(self._strike, Link.reset))

    def close(self) -> None:
        """End the thread and close all sockets."""
        self._order(self._stop)
        self._thread.join()

    def _order(self, act: Callable[[], None]) -> None:
        """Let the thread do something and wait until it has; nothing is left to do after close."""
        done = threading.Event()
        with self._changed:
            if self._is_closed:
                return
            self._orders.put((act, done))
            self._alarm.send(b"!")
        while self._thread.is_alive() and not done.wait(0.2):
            pass

    # Everything below runs in the thread.

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
        finally:
            with self._changed:
                self._is_closed = True
                self._open = 0
                self._changed.notify_all()
            for link in self._links:
                link.close()
            for one in (self._listener, self._alarm, self._doorbell, self._selector):
                one.close()

    def _turn(self) -> None:
        """Wait until something can be done, and do it for every connection."""
        wake_at = min((link.wake_at() for link in self._links), default=math.inf)
        seconds = min(wake_at, self._accept_at) - time.monotonic()
        for key, events in self._selector.select(None if seconds == math.inf else max(0, seconds)):
            key.data(events)
        done = self._obey()
        now = time.monotonic()
        if self._accept_at <= now:
            self._accept_at = math.inf
            self._watch(self._listener, selectors.EVENT_READ, self._accept)
        for link in self._links:
            link.advance(now)
            self._settle(link)
        self._links = [link for link in self._links if not link.is_over]
        for event in done:
            event.set()

    def _obey(self) -> list[threading.Event]:
        """Do what was asked for; the askers may know when all connections have felt it.

        One request per ring: a client that connected before the ring has been accepted by now.
        """
        done = []
        for _ in range(self._rings):
            act, event = self._orders.get()
            act()
            done.append(event)
        self._rings = 0
        return done

    def _set_frozen(self, is_frozen: bool) -> None:
        self._is_frozen = is_frozen
        for link in self._links:
            link.is_frozen = is_frozen

    def _strike(self, act: Callable[[Link], None]) -> None:
        for link in self._links:
            act(link)

    def _stop(self) -> None:
        self._is_closing = True

    def _hear(self, _events: int) -> None:
        self._rings += len(self._doorbell.recv(4096))

    def _accept(self, _events: int) -> None:
        try:
            while True:
                self._open_link(self._listener.accept()[0])
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # out of files: looking again at once would be a busy loop
            self._accept_at = time.monotonic() + _PAUSE
            self._watch(self._listener, 0, self._accept)

    def _open_link(self, client: socket.socket) -> None:
        family, address = self._target
        try:
            target = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            client.close()
            raise
        for one in (client, target):
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = Link(client, target, self.faults)
        link.is_frozen |= self._is_frozen
        if target.connect_ex(address) not in (0, errno.EINPROGRESS):
            link.reset()
        self._links.append(link)
        with self._changed:
            self._made += 1
            self._open += 1

    def _settle(self, link: Link) -> None:
        """Wait for what the link waits for, count what it has forwarded, close it when over."""
        for one in link.sockets:
            self._watch(one, link.events_of(one), partial(link.handle, one))
        if link.is_over:
            link.close()
        with self._changed:
            for pipe in link.pipes:
                self._passed[pipe.direction] += pipe.passed - pipe.counted
                pipe.counted = pipe.passed
            self._open -= link.is_over
            self._changed.notify_all()

    def _watch(self, one: socket.socket, events: int, call: Callable[[int], None]) -> None:
        """Wait for these events only: for none, the selector must not know the socket at all."""
        before = self._watched.get(one, 0)
        if events == before:
            return
        if not before:
            self._selector.register(one, events, call)
        elif events:
            self._selector.modify(one, events, call)
        else:
            self._selector.unregister(one)
        self._watched[one] = events
        if not events:
            del self._watched[one]


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Find the first address of a host; once, so that all connections go to the same one."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, address
