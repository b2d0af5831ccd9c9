# SPDX-License-Identifier: MIT OR Apache-2.0
"""What native code offers to a rank that is a process, whatever its ranks are connected by.

Only shapes, for the type checker: the classes themselves are in ``_native``, and its stub says what
their methods do. What a single kind of group can do is not here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ferrodist.backends.status import NativeStatus

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

    from ferrodist import _native

NativeRequest: TypeAlias = "_native.Request"


class NativeWorld(Protocol):
    """All processes of a job; ranks are those of the world."""

    @property
    def sent_nbytes(self) -> int:
        """Bytes this process has sent."""

    @property
    def received_nbytes(self) -> int:
        """Bytes this process has received."""

    def report(self, text: str) -> None:
        """Show the others what this process waits in."""

    def report_of(self, rank: int) -> str:
        """Read what a process waits in; empty if it does not."""

    def invitations_of(self, rank: int) -> Sequence[Sequence[int]]:
        """List the groups, as world ranks, that a process waits to join."""


class NativeGroup(Protocol):
    """Some ranks, seen from one of them; ranks are those of the group."""

    is_open: bool
    reproducible: bool
    timeout_ns: int
    fuse_nbytes: int

    # -- messages -------------------------------------------------------------------------------

    def isend(self, peer: int, tag: int, header: bytes, payload: ReadableBuffer) -> NativeRequest:
        """Post a send to be waited for."""

    def irecv(self, peer: int, tag: int, header: bytes, target: WriteableBuffer) -> NativeRequest:
        """Post a receive to be waited for."""

    def start_send(
        self,
        backend: Any,
        peer: int,
        tag: int,
        header: bytes,
        payload: ReadableBuffer,
        deadline: float,
        timeout: float | None,
    ) -> Any:
        """Post a send and return its Work; it fails by itself at the deadline."""

    def start_recv(
        self,
        backend: Any,
        peer: int,
        tag: int,
        header: bytes,
        target: WriteableBuffer,
        deadline: float,
        timeout: float | None,
        finish: Callable[[], Any],
    ) -> Any:
        """Post a receive, as start_send does; finish() makes the result of the Work."""

    def unexpected_tags(self, peer: int) -> list[int]:
        """List the tags of messages that have come and nobody received."""

    def find_send_cycle(self, peer: int) -> list[int]:
        """Return the cycle of sends that a send is part of, or nothing."""

    def set_unexpected_limit(self, nbytes: int) -> None:
        """Bound the bytes of eager messages that a rank may leave unreceived."""

    @property
    def fast_send(self) -> Callable[..., Any]:
        """The fast path of send: (backend, x, dst, tag)."""

    @property
    def fast_recv(self) -> Callable[..., Any]:
        """The fast path of recv: (backend, like, src, out, tag)."""

    @property
    def fast_sendrecv(self) -> Callable[..., Any]:
        """The fast path of sendrecv: (backend, x, dst, like, src, out, tag)."""

    @property
    def fast_isend(self) -> Callable[..., Any]:
        """The fast path of an async send: (backend, x, dst, tag) -> its Work."""

    @property
    def fast_irecv(self) -> Callable[..., Any]:
        """The fast path of an async recv: (backend, like, src, out, tag) -> its Work."""

    # -- calls in flight -------------------------------------------------------------------------

    @property
    def is_stopping(self) -> bool:
        """Whether calls in flight are to end."""

    def start_prepared(
        self, backend: Any, kind: int, run: Callable[..., None], finish: Callable[[], Any]
    ) -> Any:
        """Put a call in flight whose collectives run(ticket, in_background) does."""

    def stop_progress(self) -> None:
        """End the thread that runs calls in flight; it begins none any more."""

    @property
    def tickets(self) -> _native.Tickets:
        """The order of its calls."""

    # -- ranks and verdicts ---------------------------------------------------------------------

    @property
    def has_left(self) -> bool:
        """Whether this rank has left."""

    def missing(self) -> list[int]:
        """List the ranks that have not come to where this one is."""

    def expire(self) -> tuple[int, int]:
        """Bar ranks from the current call, whose deadline is over; DONE if it goes on."""

    def last_call(self, rank: int) -> tuple[int, int]:
        """Return sequence and kind of a rank's last call."""

    def waited(self, rank: int, for_rank: int) -> float:
        """Return how long a rank has slept for another, in seconds."""

    def is_gone(self, rank: int) -> bool:
        """Tell whether a rank has left or died."""

    def departure_of(self, rank: int) -> bytes | None:
        """Return how a rank left, None if it did not say."""

    def verdict(self, sequence: int | None) -> bytes | None:
        """Return the verdict that concerns a call, or any."""

    def give_verdict(self, sequence: int, text: bytes) -> bool:
        """Give the verdict; False if there is one."""

    def announce_closing(self) -> None:
        """Say that no new calls come from this rank."""

    def leave(self, departure: bytes) -> None:
        """Say that nothing more comes from this rank, and how it left."""


class NativeSplit(Protocol):
    """Some ranks of a group on their way to be a group."""

    def wait(self, deadline: float, look: Callable[[], None]) -> NativeStatus:
        """Wait for all members; return outcome, culprit and the error that ended the wait."""

    def absent(self) -> list[int]:
        """List the members that have not come."""

    def group(self) -> Any:
        """Return the group, of its parent's class, when all members have come."""
