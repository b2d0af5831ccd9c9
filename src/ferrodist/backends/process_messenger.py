# SPDX-License-Identifier: MIT OR Apache-2.0
"""ProcessMessenger: the point-to-point calls of one rank, by the messages of a native group."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from ferrodist.backends import message_errors, verdict
from ferrodist.backends.messaging import Lanes
from ferrodist.backends.native_group import Letter
from ferrodist.backends.outcome import Outcome
from ferrodist.backends.progress import ProgressThread
from ferrodist.backends.verdict import Departure
from ferrodist.buffer import Buffer
from ferrodist.call import Leaf, caller_site
from ferrodist.deadline import Deadline
from ferrodist.errors import ProtocolError, SizeMismatch
from ferrodist.transports.framing import FrameError, pack_array_header, unpack_shape

if TYPE_CHECKING:
    from ferrodist.backends.process_backend import ProcessBackend
    from ferrodist.backends.turns import Turns

_QUEUE_LOOK = 0.05  # seconds between looks while a receive waits for its turn


class _Mail:
    """One call: what errors name it, its deadline, and what becomes of a native outcome."""

    def __init__(self, backend: ProcessBackend, call: str, deadline: Deadline) -> None:
        self.backend = backend
        self.call = call
        self.deadline = deadline
        self._site = caller_site()

    @property
    def what(self) -> str:
        """The call as errors show it; made only for them."""
        return f"{self.call} at {self._site}{self.backend.group_name}"

    def look(self) -> None:
        """Let native code hear of signals."""

    def failure(self, outcome: int, peer: int, error: BaseException | None) -> BaseException:
        """Make the error that a native outcome means."""
        rank, tags = self.backend.rank, self.backend.group.waiting_tags(peer)
        if outcome == Outcome.INTERRUPTED and error is not None:
            return error
        if outcome == Outcome.VERDICT:
            given = self.backend.verdict_of(None)
            assert given is not None
            return given.later(rank)
        if outcome == Outcome.LATE:
            return message_errors.timed_out(self.what, peer, rank, self.deadline, tags)
        if outcome == Outcome.SILENT:
            how = verdict.died(self.backend.silence)
            return message_errors.lost(self.what, peer, rank, how, tags)
        if outcome == Outcome.LOST:
            return message_errors.lost(self.what, peer, rank, self._departure_of(peer), tags)
        reason = self.backend.damage_of(peer, "its queue")
        return message_errors.damaged(self.what, peer, rank, reason)

    def _departure_of(self, peer: int) -> Departure:
        is_gone = self.backend.group.is_gone(peer)
        return self.backend.departure_of(peer) if is_gone else verdict.closing()


class ProcessMessenger:
    """Sends and receives arrays; receives from one peer with one tag keep program order."""

    def __init__(self, backend: ProcessBackend) -> None:
        self._backend = weakref.proxy(backend)  # which holds on to this
        self._group = backend.group
        self._lanes = Lanes()

    def send(self, source: Buffer, peer: int, tag: int, deadline: Deadline) -> None:
        """Send a message and wait until ``source`` may change."""
        mail, letter = self._post(source, peer, tag, deadline, f"send(dst={peer}, tag={tag})")
        if letter is not None:
            self._settle(mail, letter, peer, holds_caller=True)

    def post(
        self, source: Buffer, peer: int, tag: int, deadline: Deadline
    ) -> tuple[str, Callable[[], None] | None]:
        """Send a message; return what to call it, and how to wait until ``source`` may change."""
        what = f"send(dst={peer}, tag={tag})"
        mail, letter = self._post(source, peer, tag, deadline, what)
        if letter is None:
            return what, None
        return what, lambda: self._settle(mail, letter, peer, holds_caller=False)

    def line_up(
        self, target: Buffer, peer: int, tag: int, deadline: Deadline
    ) -> tuple[str, Callable[[], None]]:
        """Take a place among the receivers; return what to call it, and how to receive."""
        what = f"recv(src={peer}, tag={tag})"
        mail = _Mail(self._backend, what, deadline)
        lane, number = self._draw(peer, tag)
        return what, lambda: self._receive(lane, number, target, peer, tag, mail, None)

    def sendrecv(
        self, source: Buffer, to: int, target: Buffer, peer: int, tag: int, deadline: Deadline
    ) -> None:
        """Send and receive at once; if nothing is received the message is taken back.

        A message that came but does not fit is this rank's own affair: its own goes out.
        """
        what = f"sendrecv(dst={to}, src={peer}, tag={tag})"
        mail, letter = self._post(source, to, tag, deadline, what)
        try:
            self._receive(*self._draw(peer, tag), target, peer, tag, mail, letter)
        except (SizeMismatch, ProtocolError):
            if letter is not None:
                self._settle(mail, letter, to, holds_caller=True)
            raise
        except BaseException:
            if letter is not None and not self._group.take_back(letter):
                self._group.abandon(letter)
            raise
        if letter is not None:
            self._settle(mail, letter, to, holds_caller=False)

    def _post(
        self, source: Buffer, peer: int, tag: int, deadline: Deadline, call: str
    ) -> tuple[_Mail, Letter | None]:
        """Send a message; the letter of a large one has to be settled."""
        mail = _Mail(self._backend, call, deadline)
        self._backend.refuse_if_aborted()
        if self._group.is_gone(peer):
            raise mail.failure(self._backend.loss_of(peer), peer, None)
        header = pack_array_header(source.dtype, source.shape)
        return mail, self._group.post(peer, tag, header, source.memory)

    def _settle(self, mail: _Mail, letter: Letter, peer: int, *, holds_caller: bool) -> None:
        """Wait until a large message is with its receiver, or take it back."""
        outcome, culprit, error = self._group.settle(
            letter, mail.deadline.end, holds_caller, _is_background(), mail.look
        )
        if outcome == Outcome.DONE:
            return
        ring = self._group.find_ring(peer) if holds_caller and outcome in _OF_RINGS else []
        if not self._group.take_back(letter):
            self._group.abandon(letter)
        if ring:
            raise message_errors.ring(mail.what, peer, self._backend.rank, ring)
        raise mail.failure(outcome, peer if culprit < 0 else culprit, error)

    def _draw(self, peer: int, tag: int) -> tuple[Turns, int]:
        self._group.line_up(1)
        return self._lanes.draw(peer, tag)

    def _receive(
        self,
        lane: Turns,
        number: int,
        target: Buffer,
        peer: int,
        tag: int,
        mail: _Mail,
        meanwhile: Letter | None,
    ) -> None:
        header = pack_array_header(target.dtype, target.shape)
        try:
            lane.wait(number, lambda: self._look_in_line(mail, peer))
            outcome, culprit, error, found = self._group.receive(
                peer,
                tag,
                header,
                target.memory,
                mail.deadline.end,
                _is_background(),
                mail.look,
                meanwhile,
            )
        finally:
            self._group.line_up(-1)
            self._lanes.leave(lane, number, peer, tag)
        if outcome != Outcome.DONE:
            expected = Leaf("", target.dtype, target.shape)
            raise self._why(mail, outcome, culprit, error, found, expected, peer)

    def receive_failure(
        self,
        outcome: int,
        culprit: int,
        error: BaseException | None,
        found: bytes,
        expected: Leaf,
        peer: int,
        tag: int,
        deadline: Deadline,
    ) -> BaseException:
        """Make the error of a receive that native code did on its own."""
        mail = _Mail(self._backend, f"recv(src={peer}, tag={tag})", deadline)
        return self._why(mail, outcome, culprit, error, found, expected, peer)

    def _why(
        self,
        mail: _Mail,
        outcome: int,
        culprit: int,
        error: BaseException | None,
        found: bytes,
        expected: Leaf,
        peer: int,
    ) -> BaseException:
        if outcome == Outcome.UNEXPECTED:
            try:
                leaf = Leaf("", *unpack_shape(found))
            except FrameError as flaw:
                return message_errors.damaged(mail.what, peer, self._backend.rank, str(flaw))
            return message_errors.unexpected(mail.what, peer, self._backend.rank, leaf, expected)
        return mail.failure(outcome, peer if culprit < 0 else culprit, error)

    def _look_in_line(self, mail: _Mail, peer: int) -> float:
        """Look round while another receive of the same lane has its turn."""
        self._backend.refuse_if_aborted()
        if mail.deadline.remaining() <= 0:
            raise mail.failure(Outcome.LATE, peer, None)
        return min(mail.deadline.remaining(), _QUEUE_LOOK)


_OF_RINGS = (Outcome.LATE, Outcome.LOST)


def _is_background() -> bool:
    return isinstance(threading.current_thread(), ProgressThread)
