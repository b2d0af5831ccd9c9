# SPDX-License-Identifier: MIT OR Apache-2.0
"""ProviderMessenger: the point-to-point calls of a rank whose messages a provider moves.

A message is the dtype and shape of an array and its bytes. What goes wrong is the caller's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ferrodist.backends import message_errors
from ferrodist.backends.provider import Request
from ferrodist.backends.provider_link import ProviderLink
from ferrodist.buffer import MAX_AXES, Buffer
from ferrodist.call import Leaf, caller_site
from ferrodist.deadline import Deadline
from ferrodist.errors import BackendClosed, DistributedError, ProtocolError, RankLost, SizeMismatch
from ferrodist.transports.framing import FrameError, pack_array_header, unpack_shape

_LARGEST_HEADER = len(pack_array_header(0, (0,) * MAX_AXES))  # type: ignore[arg-type]


class _Message:
    """One call: its name in errors, and what its waits look at."""

    def __init__(self, link: ProviderLink, name: str, deadline: Deadline) -> None:
        self.link = link
        self.deadline = deadline
        self._name = name
        self._site = caller_site()

    @property
    def what(self) -> str:
        """The call as errors show it; made only for them."""
        return f"{self._name} at {self._site}{self.link.group_name}"

    def wait(self, request: Request, peer: int) -> None:
        """Wait for a request."""
        with self.naming(peer):
            self.link.wait([(peer, request)], self._check, self.deadline)

    def _check(self, peers: list[int]) -> None:
        link, (peer,) = self.link, peers
        if link.has_left:
            raise BackendClosed(f"{self.what}: rank {link.rank} has left", this_rank=link.rank)
        link.refuse_if_aborted()
        if self.deadline.remaining() <= 0:
            raise message_errors.timed_out(self.what, peer, link.rank, self.deadline, [])
        if link.left(peer) is not None:
            raise self.lost(peer)

    @contextmanager
    def naming(self, peer: int) -> Iterator[None]:
        """Make a RankLost of the error of a provider that cannot reach a peer."""
        try:
            yield
        except DistributedError:
            raise
        except ConnectionError as error:
            raise self.lost(peer) from error

    def lost(self, peer: int) -> RankLost:
        """Make the error of a peer that is gone."""
        self.link.poll()
        departure = self.link.left(peer) or message_errors.GONE
        return message_errors.lost(self.what, peer, self.link.rank, departure, [])


class ProviderMessenger:
    """Sends and receives arrays."""

    def __init__(self, link: ProviderLink) -> None:
        self._link = link

    def send(self, source: Buffer, peer: int, tag: int, deadline: Deadline) -> None:
        """Send a message and wait until ``source`` may change."""
        settle = self.post(source, peer, tag, deadline)[1]
        if settle is not None:
            settle()

    def post(
        self, source: Buffer, peer: int, tag: int, deadline: Deadline
    ) -> tuple[str, Callable[[], None] | None]:
        """Send a message; return what to call it, and how to wait until ``source`` may change."""
        name = f"send(dst={peer}, tag={tag})"
        message = _Message(self._link, name, deadline)
        request = self._isend(message, source, peer, tag)
        return name, None if request.test() else lambda: message.wait(request, peer)

    def line_up(
        self, target: Buffer, peer: int, tag: int, deadline: Deadline
    ) -> tuple[str, Callable[[], None]]:
        """Post a receive; return what to call it, and how to wait for it."""
        name = f"recv(src={peer}, tag={tag})"
        return name, self._irecv(_Message(self._link, name, deadline), target, peer, tag)

    def sendrecv(
        self, source: Buffer, to: int, target: Buffer, peer: int, tag: int, deadline: Deadline
    ) -> None:
        """Send and receive at once; if nothing is received the message is taken back.

        A message that came but does not fit is this rank's own affair: its own goes out.
        """
        name = f"sendrecv(dst={to}, src={peer}, tag={tag})"
        message = _Message(self._link, name, deadline)
        request = self._isend(message, source, to, tag)
        try:
            self._irecv(message, target, peer, tag)()
        except (SizeMismatch, ProtocolError):
            message.wait(request, to)
            raise
        except BaseException:
            request.cancel()
            raise
        message.wait(request, to)

    def _isend(self, message: _Message, source: Buffer, peer: int, tag: int) -> Request:
        self._check_open()
        if self._link.left(peer) is not None:
            raise message.lost(peer)
        data = pack_array_header(source.dtype, source.shape) + source.memory
        with message.naming(peer):
            return self._link.isend(data, peer, tag)

    def _irecv(self, message: _Message, target: Buffer, peer: int, tag: int) -> Callable[[], None]:
        self._check_open()
        header = pack_array_header(target.dtype, target.shape)
        memory = bytearray(max(_LARGEST_HEADER, len(header) + target.nbytes))
        with message.naming(peer):
            request = self._link.irecv(memory, peer, tag)

        def receive() -> None:
            message.wait(request, peer)
            self._unpack(message, memoryview(memory), header, target, peer)

        return receive

    def _check_open(self) -> None:
        self._link.poll()
        self._link.refuse_if_aborted()

    def _unpack(
        self, message: _Message, memory: memoryview, header: bytes, target: Buffer, peer: int
    ) -> None:
        if memory[: len(header)] == header:
            target.memory[:] = memory[len(header) : len(header) + target.nbytes]
            return
        try:
            found = Leaf("", *unpack_shape(memory))
        except FrameError as error:
            text = str(error)
            raise message_errors.damaged(message.what, peer, self._link.rank, text) from error
        expected = Leaf("", target.dtype, target.shape)
        raise message_errors.unexpected(message.what, peer, self._link.rank, found, expected)
