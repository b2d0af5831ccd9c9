# SPDX-License-Identifier: MIT OR Apache-2.0
"""The native part of ferrodist: reduction kernels, hashes, shared memory and TCP.

Codes are those of DType and ReduceOp. Buffers are C-contiguous, of any alignment, and taken as
bytes. A test holds names, parameters and docstrings against the module.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
from _typeshed import ReadableBuffer, WriteableBuffer
from numpy.typing import NDArray

from ferrodist.call import Site
from ferrodist.deadline import Deadline

def hash_text(text: str) -> int:
    """Hash text to 64 bits."""

def fingerprint(numbers: Sequence[int]) -> int:
    """Hash 64-bit numbers, signed or not, to 64 bits; order, length and sign matter."""

def local_reduce(
    dtype: int,
    op: int,
    into: WriteableBuffer,
    operands: Sequence[ReadableBuffer],
    divisor: int = 1,
) -> None:
    """Reduce the operands from left to right into one buffer; MEAN divides by divisor."""

def widen(dtype: int, into: WriteableBuffer, source: ReadableBuffer) -> None:
    """Convert 16-bit floats to float32."""

def narrow(dtype: int, into: WriteableBuffer, source: ReadableBuffer) -> None:
    """Round float32 to 16-bit floats, to nearest even."""

def pack_pairs(
    dtype: int,
    index_dtype: int,
    is_reversed: bool,
    into: WriteableBuffer,
    values: ReadableBuffer,
    indices: ReadableBuffer,
) -> None:
    """Write values and indices as pairs, of which minloc finds the least, or the largest."""

def unpack_pairs(
    dtype: int,
    index_dtype: int,
    is_reversed: bool,
    source: ReadableBuffer,
    values: WriteableBuffer,
    indices: WriteableBuffer,
) -> None:
    """Read values and indices back."""

def cpu_levels() -> list[str]:
    """Name the variants of the kernels this machine can run, best first."""

def cpu_level() -> str:
    """Name the variant of the kernels in use."""

def use_cpu_level(name: str) -> None:
    """Use another variant of the kernels; all give the same bits."""

class Status:
    """How a call ended, due to which rank, and what ended its wait."""

    def __init__(
        self, code: int, failed_rank: int = -1, error: BaseException | None = None
    ) -> None: ...
    @property
    def code(self) -> int:
        """A StatusCode."""

    @property
    def failed_rank(self) -> int:
        """The rank it is due to, or -1."""

    @property
    def error(self) -> BaseException | None:
        """The exception that ended a wait, or None."""

def register_torch(torch: object, table: object | None) -> None:
    """Let native code convert tensors of exactly torch.Tensor and torch.nn.Parameter."""

def register_adapted(
    kind: type, from_numpy: Callable[[Any, NDArray[Any]], Any], sent_kind: int
) -> None:
    """Let native code read arrays of exactly this type; from_numpy(x, array) makes its results."""

def set_hooks(**hooks: object) -> None:
    """Set what native code calls; every part sets those it has."""

def fast_path(
    kind: int, backend: Any, x: Any, out: Any, op: Any, root: Any, options: Any, /
) -> Any:
    """Do a call in native code: return its result, or NotImplemented for the general path."""

def fast_start(
    kind: int, backend: Any, x: Any, out: Any, op: Any, root: Any, options: Any, /
) -> Any:
    """Start a call in native code: return its Work, or NotImplemented for the general path."""

def set_site(site_type: type, folders: list[str]) -> None:
    """Set what caller_site() makes, and how the names of files begin that it leaves out."""

def caller_site() -> Site:
    """Return the innermost place in the user's program that led here."""

class WorkBase:
    """The native half of a Work."""

    is_asked: bool
    """Whether anybody looked at the outcome."""

    @property
    def _facts(self) -> tuple[int, int, int, int]:
        """Kind (-1: a message), dst, src, and sequence number or tag."""

    def done(self) -> bool:
        """Tell whether the call is over."""

    def wait(self, timeout: float | timedelta | None = None) -> Any:
        """Return the result; after ``timeout`` raise TimeoutError and leave the call going."""

    def result(self, timeout: float | None = None) -> Any:
        """Return the result, waiting for it if necessary."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error of the call, None if it went well."""

    def _meet(self) -> bool:
        """Do a short call now if all ranks are about to; tell whether it is over."""

    def _is_next(self) -> bool:
        """Tell whether all calls of its group before it are over."""

    def _outcome(self) -> tuple[Any, BaseException | None]:
        """Return result and error of a call that is over."""

    def _wait_for_end(self, deadline: Deadline, /) -> bool:
        """Wait without asking for the outcome; tell whether the call is over."""

    def _cancel(self) -> bool:
        """Withdraw a receive that no message was matched with; False if it is too late."""

    def _hear(self) -> bool:
        """Have next_completions() give it; False if it is over."""

def set_work_type(work_type: type) -> None:
    """Set the class of Works, which derives from WorkBase."""

def works_of(group: object | None) -> list[Any]:
    """List the Works in flight of a group, or all."""

def forget_works() -> None:
    """In a forked child: the Works in flight are the parent's."""

def begin_listening() -> int:
    """Let a new thread get the completions; return what it passes to next_completions()."""

def end_listening() -> None:
    """Let the thread that gets the completions end, unless a Work is in flight."""

def next_completions(listener: int) -> list[Any] | None:
    """Wait for calls that are over and have callbacks, or errors; return their Works.

    None if another thread gets them.
    """

def wait_for_callbacks(seconds: float) -> bool:
    """Wait for callbacks that are running; tell whether none is."""

def guard(run: Callable[[], Any], on_error: Callable[[BaseException], None]) -> Any:
    """Return run(); if it raises, call on_error(error) until it returns, and raise."""

class Tickets:
    """Numbers calls from 1; each runs when all before it have ended."""

    def __init__(self) -> None: ...
    def take(self) -> int:
        """Draw the next number."""

    def run(self, running: Any, ticket: int = 0, in_background: bool = False) -> Any:
        """Do a call under the next number, or one drawn before.

        Calls running.run(number, in_background), then running.end(number, error or None) until it
        returns. Returns what run returned, or raises.
        """

    def wait(self, number: int, poll: Callable[[], float]) -> None:
        """Wait until all calls before have ended; poll() may raise, or says how long to sleep."""

    def end(self, number: int) -> None:
        """End a call, also one that never ran."""

    @property
    def inside(self) -> int:
        """The number of the call that this thread is in; 0 if in none."""

    @property
    def is_idle(self) -> bool:
        """Whether no call runs, or waits to."""

    @property
    def last_ended(self) -> int:
        """The number of the last call that ended with all before it."""

class Arena:
    """Memory that this process shows to the other ranks of its host."""

    def __init__(self, rank: int, world_size: int, nbytes: int = 0) -> None: ...
    @property
    def fd(self) -> int:
        """The file descriptor to hand to the other ranks."""

    @property
    def nbytes(self) -> int:
        """How large it may become."""

    @property
    def num_blocks(self) -> int:
        """How many blocks are in use."""

    @property
    def allocated_nbytes(self) -> int:
        """How much memory is in use."""

    def empty(self, nbytes: int) -> NDArray[np.uint8]:
        """Make a flat array of bytes in this arena."""

    def holds(self, buffer: ReadableBuffer) -> bool:
        """Tell whether memory lies in this arena."""

class World:
    """The processes of a host that share their arenas."""

    def __init__(
        self,
        rank: int,
        arena: Arena,
        fds: Sequence[tuple[int, int]],
        heartbeat: float,
        heartbeat_timeout: float,
    ) -> None: ...
    def first_group(self) -> SharedGroup:
        """Make the group of all."""

    def report(self, text: str) -> None:
        """Show the others what this process waits in."""

    def report_of(self, rank: int) -> str:
        """Read what a process waits in; empty if it does not."""

    def invitations_of(self, rank: int) -> list[list[int]]:
        """List the groups, as world ranks, that a process waits to join."""

    def is_dead(self, rank: int) -> bool:
        """Tell whether a process is gone."""

    def beats_of(self, rank: int) -> int:
        """Count the heartbeats of a process."""

    def sweep(self) -> None:
        """Free what is left of groups that all have left."""

    @property
    def sent_nbytes(self) -> int:
        """Bytes this process has shown to others."""

    @property
    def received_nbytes(self) -> int:
        """Bytes this process has read from others."""

class Request:
    """A send or receive that is waited for."""

    def wait(
        self, deadline: Deadline, holds_caller: bool, poll: Callable[[], None] | None
    ) -> Status:
        """Wait until it is complete; return a status."""

    def test(self) -> bool:
        """Make progress and tell whether it is complete."""

    def abandon(self, code: int) -> None:
        """End it, whatever has become of it."""

    def array(self) -> Any:
        """Return the array that came where there was no target; once, when it is complete."""

    @property
    def source(self) -> int:
        """Whose message came."""

    @property
    def tag(self) -> int:
        """The tag of what came."""

    @property
    def found(self) -> bytes:
        """The header of the message that came, or did not fit."""

class NativeGroup:
    """What all groups have: the calls of a group and how they wait."""

    @property
    def call_path(self) -> Callable[[Any, int, Any, Any, Any, Any, Any], Any]:
        """The fast path of a call: (backend, kind, x, out, op, root, options)."""

    @property
    def start_path(self) -> Callable[..., Any]:
        """The same in flight: (backend, kind, x, out, op, root, options) -> its Work."""

    @property
    def tickets(self) -> Tickets:
        """The order of its calls."""

    def stop_progress(self) -> None:
        """End the thread that runs calls in flight; it begins none any more."""

    def start_prepared(
        self, backend: Any, kind: int, running: Any, finish: Callable[[], Any]
    ) -> Any:
        """Put a call in flight that Tickets.run does."""

    @property
    def is_stopping(self) -> bool:
        """Whether calls in flight are to end."""

    def set_calls(
        self,
        is_open: bool,
        reproducible: bool,
        fuse_nbytes: int,
        carried_nbytes: int,
        timeout_ns: int,
        timeout: float,
        late_timeout: float,
    ) -> None:
        """Set whether calls may be made, how they are fingerprinted, and how long they wait."""

class MessageGroup(NativeGroup):
    """A group whose ranks send each other messages, and how it ends."""

    def isend(self, peer: int, tag: int, header: bytes, payload: ReadableBuffer) -> Request:
        """Post a send to be waited for."""

    def irecv(
        self,
        peer: int,
        tag: int,
        header: bytes,
        target: WriteableBuffer | None,
        takes_object: bool,
        takes_shorter: bool,
    ) -> Request:
        """Post a receive; without a target it takes whatever comes, -1 is any source or any tag."""

    def iprobe(self, peer: int, tag: int) -> Request:
        """Post a probe to be waited for."""

    def peek(self, peer: int, tag: int) -> tuple[int, int, bytes] | None:
        """Return source, tag and header of the message that a receive would get, or None."""

    def start_send(
        self,
        backend: Any,
        peer: int,
        tag: int,
        header: bytes,
        payload: ReadableBuffer,
        deadline: Deadline,
    ) -> Any:
        """Post a send and return its Work; it fails by itself at the deadline."""

    def start_recv(
        self,
        backend: Any,
        peer: int,
        tag: int,
        header: bytes,
        target: WriteableBuffer | None,
        takes_object: bool,
        takes_shorter: bool,
        deadline: Deadline,
        finish: Callable[[Any, int, int, bytes], Any],
    ) -> Any:
        """Post a receive, as start_send does.

        finish(array or None, source, tag, header) makes the result.
        """

    def start_sendrecv(
        self,
        backend: Any,
        dst: int,
        tag: int,
        sent_header: bytes,
        payload: ReadableBuffer,
        peer: int,
        recv_tag: int,
        header: bytes,
        target: WriteableBuffer | None,
        takes_object: bool,
        takes_shorter: bool,
        deadline: Deadline,
        finish: Callable[[Any, int, int, bytes], Any],
    ) -> Any:
        """Post a send and a receive and return the Work of both."""

    def unexpected_tags(self, peer: int) -> list[int]:
        """List the tags of messages that have come and nobody received."""

    def find_send_cycle(self, peer: int) -> list[int]:
        """Return the cycle of sends that a send is part of, or nothing."""

    def set_unexpected_limit(self, nbytes: int) -> None:
        """Bound the bytes of eager messages that a rank may leave unreceived."""

    @property
    def fast_send(self) -> Callable[..., Any]:
        """The fast path of send: (backend, x, dst, tag, timeout)."""

    @property
    def fast_recv(self) -> Callable[..., Any]:
        """The fast path of recv: (backend, src, out, like, tag, with_status, timeout)."""

    @property
    def fast_sendrecv(self) -> Callable[..., Any]:
        """The fast path of sendrecv: (backend, x, dst, src, out, like, tag, recv_tag, timeout)."""

    @property
    def fast_exchange(self) -> Callable[..., Any]:
        """An exchange with neighbors: (backend, peers, first tag, parts, list of out or None)."""

    @property
    def fast_isend(self) -> Callable[..., Any]:
        """The fast path of an async send: as of send -> its Work."""

    @property
    def fast_irecv(self) -> Callable[..., Any]:
        """The fast path of an async recv: as of recv -> its Work."""

    @property
    def fast_isendrecv(self) -> Callable[..., Any]:
        """The fast path of an async sendrecv, as of sendrecv -> its Work."""

    @property
    def num_requests(self) -> int:
        """How many requests are in flight."""

    def missing(self) -> list[int]:
        """List the ranks that hold up the current call; over TCP all are asked."""

    def expire(self, deadline: Deadline) -> Status:
        """Bar ranks from the current call, which is late; done if it goes on all the same."""

    def last_call(self, rank: int) -> tuple[int, int]:
        """Return sequence and kind of a rank's last call, as far as is known."""

    def waited(self, rank: int, for_rank: int) -> float:
        """Return how long a rank has waited for another, in seconds, as far as is known."""

    def is_gone(self, rank: int) -> bool:
        """Tell whether a rank has left or died."""

    def leave_reason_of(self, rank: int) -> bytes | None:
        """Return how a rank left, None if it did not say."""

    def group_error(self, sequence: int | None) -> bytes | None:
        """Return the group error that concerns a call, or any."""

    def set_error(self, sequence: int, text: bytes) -> bool:
        """Set the group error, False if there is one; over TCP the first proposed stands."""

    def announce_closing(self) -> None:
        """Say that no new calls come from this rank."""

    def leave(self, leave_reason: bytes) -> None:
        """Say that nothing more comes from this rank, and how it left."""

    @property
    def has_left(self) -> bool:
        """Whether this rank has left."""

class SharedGroup(MessageGroup):
    """Ranks that do collectives in shared memory."""

    def run(
        self,
        kind: int,
        dtype: int,
        op: int,
        root: int,
        source: ReadableBuffer | None,
        target: WriteableBuffer | None,
        count: int,
        counts: Sequence[int] | None,
        in_place: bool,
        sequence: int,
        fingerprint: int,
        deadline: Deadline,
        in_background: bool,
        poll: Callable[[], None],
    ) -> Status:
        """Do one whole collective; return its status."""

    def fence(self, rank: int) -> bool:
        """Keep a rank out of what this one has shown; tell whether it may be using that already."""

    def take_back_shown(self) -> None:
        """Let what was shown in a call that failed be memory of this process alone."""

    def note_move(self) -> None:
        """Let the others see that the current call gets on."""

    def allocate_block(self, nbytes: int) -> int:
        """Take zeroed memory that all ranks are to index; return its offset."""

    def free_block(self, offset: int) -> None:
        """Give back what nobody has opened."""

    def open_block(self, owner: int, offset: int, nbytes: int) -> np.ndarray[Any, Any]:
        """Return memory that a rank has taken, as a flat array of bytes."""

    @property
    def num_rounds(self) -> int:
        """How often this rank has synchronised with the others."""

class Split:
    """Some ranks of a group on their way to be a group."""

    def __init__(self, parent: SharedGroup, members: Sequence[int], identity: int) -> None: ...
    def wait(self, deadline: Deadline, poll: Callable[[], None]) -> Status:
        """Wait for all members; return a status."""

    def absent(self) -> list[int]:
        """List the members that have not come."""

    def group(self) -> SharedGroup:
        """Return the group, when all members have come."""

def is_traced(pidfd: int) -> bool:
    """Tell whether a debugger holds a process."""

def is_progress_thread() -> bool:
    """Tell whether the calling thread runs callbacks."""

def mark_progress_thread() -> None:
    """Say that the calling thread runs callbacks, which must not communicate."""

class Mesh:
    """A process's connections to all other ranks."""

    def __init__(
        self,
        rank: int,
        links: Sequence[tuple[int, bytes, int]],
        heartbeat: float,
        heartbeat_timeout: float,
        piece_nbytes: int,
        is_of_thread: bool = False,
    ) -> None: ...
    def first_group(self) -> TcpGroup:
        """Make the group of all."""

    def report(self, text: str) -> None:
        """Keep what this process waits in for those who ask."""

    def report_of(self, rank: int) -> str:
        """Return what a process was last heard to wait in; empty if it did not."""

    def invitations_of(self, rank: int) -> list[list[int]]:
        """List the groups, as world ranks, that a process waits to join."""

    def start_trace(self) -> None:
        """Begin to write down the pieces of collectives."""

    def stop_trace(self) -> list[tuple[bool, int, int, int]]:
        """Return the pieces since: is_sent, peer, sequence, nbytes."""

    def finish(self, deadline: Deadline) -> None:
        """End all connections in order: what was sent arrives, unless the deadline comes first."""

    @property
    def sent_nbytes(self) -> int:
        """Bytes this process has sent."""

    @property
    def received_nbytes(self) -> int:
        """Bytes this process has received."""

class Plan:
    """The steps of one rank, where its cells lie, and how to reduce."""

    def __init__(
        self,
        table: ReadableBuffer,
        ranges: ReadableBuffer,
        scratch_nbytes: ReadableBuffer,
        dtype: int,
        op: int,
        divisor: int,
        is_float32: bool,
        last_op: int | None,
        peers: Sequence[int],
    ) -> None: ...

class TcpGroup(MessageGroup):
    """Ranks that do collectives over TCP."""

    def enter(self, kind: int, sequence: int, fingerprint: int) -> int:
        """Enter a call whose first part is done elsewhere; return a status code."""

    def exit(self) -> None:
        """Leave a call whose last part was done elsewhere."""

    def give_up_split(self, text: bytes) -> None:
        """End a group that not all members have yet, with this group error."""

    @property
    def leaves_deaths(self) -> bool:
        """Whether it shows elsewhere if a rank that died is still needed."""
    @leaves_deaths.setter
    def leaves_deaths(self, value: bool) -> None: ...
    def execute(
        self,
        plan: Plan,
        source: ReadableBuffer | None,
        target: WriteableBuffer | None,
        in_place: bool,
        sequence: int,
        fingerprint: int,
        deadline: Deadline,
        in_background: bool,
        poll: Callable[[], None],
    ) -> Status:
        """Do what a plan says; return its status."""

    def exchange(
        self,
        kind: int,
        to: int,
        outgoing: ReadableBuffer | None,
        peer: int,
        incoming: WriteableBuffer | None,
        sequence: int,
        fingerprint: int,
        deadline: Deadline,
        in_background: bool,
        poll: Callable[[], None],
    ) -> Status:
        """Send one piece of a collective and receive one at once; either may be None."""

    def exchange_descriptors(
        self,
        sequence: int,
        descriptor: bytes,
        deadline: Deadline,
        in_background: bool,
        poll: Callable[[], None],
    ) -> tuple[Status, list[bytes]]:
        """Tell all ranks what this one has called; return a status, and what all have."""

    @property
    def has_barred(self) -> bool:
        """Whether the last call that was given up was for ranks that are barred from it."""

    def loss_of(self, rank: int) -> int:
        """Return the status code of a wait for a rank that is gone."""

    def flaw_of(self, rank: int) -> str:
        """Say what is wrong with the connection to a rank; empty if nothing is."""

class Program:
    """One rank's part of a collective in two levels; a span is (space, begin, nbytes)."""

    def __init__(self) -> None: ...
    def add_intra_node(
        self,
        kind: int,
        dtype: int,
        op: int,
        root: int,
        source: tuple[int, int, int],
        target: tuple[int, int, int],
        nbytes: int,
        in_place: bool,
    ) -> None:
        """Add a collective of the ranks of this host."""

    def add_inter_node(
        self,
        plan: Plan,
        source: tuple[int, int, int],
        target: tuple[int, int, int],
        in_place: bool,
    ) -> None:
        """Add a collective of ranks on different hosts."""

    def add_copy(self, source: tuple[int, int, int], target: tuple[int, int, int]) -> None:
        """Add a copy of as many bytes as the target has."""

    def add_to_float32(
        self, half: int, source: tuple[int, int, int], target: tuple[int, int, int]
    ) -> None:
        """Add a conversion of 16-bit floats."""

    def add_from_float32(
        self, half: int, source: tuple[int, int, int], target: tuple[int, int, int]
    ) -> None:
        """Add the rounding to 16-bit floats."""

    def add_divide(self, dtype: int, target: tuple[int, int, int], divisor: int) -> None:
        """Add the division of a mean."""

class HybridGroup(NativeGroup):
    """Ranks that share memory inside hosts and use TCP between them."""

    def __init__(
        self,
        inter_node: TcpGroup,
        intra_node: SharedGroup,
        local: Sequence[int],
        mismatch_fingerprint: int,
    ) -> None: ...
    def execute(
        self,
        program: Program,
        source: ReadableBuffer | None,
        target: WriteableBuffer | None,
        call_kind: int,
        sequence: int,
        fingerprint: int,
        index: int,
        deadline: Deadline,
        in_background: bool,
        poll: Callable[[], None],
    ) -> Status:
        """Execute a program; return its status."""

    def tell_mismatch(
        self,
        call_kind: int,
        sequence: int,
        fingerprint: int,
        deadline: Deadline,
        in_background: bool,
        poll: Callable[[], None],
    ) -> Status:
        """Tell the ranks of this host of a mismatch that was found elsewhere."""

class TcpSplit:
    """Some ranks of a group on their way to be a group."""

    def __init__(self, parent: TcpGroup, members: Sequence[int], identity: int) -> None: ...
    def wait(self, deadline: Deadline, poll: Callable[[], None]) -> Status:
        """Wait for all members; return a status."""

    def absent(self) -> list[int]:
        """List the members that have not come."""

    def group(self) -> TcpGroup:
        """Return the group, when all members have come."""

    def give_up(self, text: bytes) -> None:
        """Let this group error end the group for members that have it already."""

    @property
    def error(self) -> bytes | None:
        """The group error of a member that has given up, or None."""

def encode_frame(
    kind: int,
    group: int,
    sequence: int,
    fingerprint: int,
    tag: int,
    payload: ReadableBuffer,
    key: bytes,
    source: int,
    number: int,
) -> bytearray:
    """Lay a frame out as bytes, signed with a key of 32 bytes."""

def decode_frame(
    data: ReadableBuffer, key: bytes, source: int, number: int, piece_nbytes: int
) -> tuple[int, int, int, int, int, memoryview]:
    """Check a frame; return kind, group, sequence, fingerprint, tag and payload."""
