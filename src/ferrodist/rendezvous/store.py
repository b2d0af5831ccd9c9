# SPDX-License-Identifier: MIT OR Apache-2.0
"""The store: a few small values that rank 0 keeps for all ranks while they meet.

    set(key, value)     a key is set once; the same value again does no harm
    get(key, timeout)   waits until somebody has set it
    add(key, amount)    counts, and returns the sum so far

Keys, values and their number are bounded. ``StoreTable`` is what rank 0 keeps, ``Server`` serves
it, ``Client`` is how every other rank uses it; other people's stores have the same methods.
``gather`` is what the ranks use a store for.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Protocol, Self

from ferrodist.deadline import Deadline
from ferrodist.errors import InvalidArgument, ProtocolError, RendezvousError
from ferrodist.rendezvous.job import Job
from ferrodist.rendezvous.wire import MAX_KEY, MAX_VALUE, Channel

_MAX_ENTRIES = 1 << 16
_KEY_LENGTH = struct.Struct("!H")
SECONDS = struct.Struct("!d")
AMOUNT = struct.Struct("!q")

_MAX_RANKS_SHOWN = 16
MAX_RECORD = 1024  # bytes that a rank tells the others
_LENGTH_NBYTES = 2
_PER_VALUE = MAX_VALUE // (_LENGTH_NBYTES + MAX_RECORD)


class Exchange:
    """A way to tell all ranks something, once, before any of them are connected.

    On one host the ranks come to rank 0's Unix socket, between hosts to its TCP socket. Where
    torchrun or MPI has already brought the ranks together, they use that. It may be open to
    strangers: nobody trusts what comes from here before the handshake of the mesh. Leaving the
    context in an error tells the others why.
    """

    _job: Job

    @property
    def secret(self) -> bytes:
        """The secret of the job, which the ranks may only have got here."""
        return self._job.secret

    @property
    def towards(self) -> str:
        """The address of rank 0, or of something on its host; '' if nothing is known about it."""
        return ""

    @property
    def failure_channels(self) -> Mapping[int, Channel]:
        """Channels on which a rank learns, after gathering, that another has failed or is gone."""
        return {}

    def gather(self, own: bytes) -> list[bytes]:
        """Return what all ranks have to tell, in rank order; every rank calls it."""
        raise NotImplementedError

    def give_up(self, error: BaseException) -> None:
        """Tell the others why this rank fails."""

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self.give_up(error)
        finally:
            self.close()


class Store(Protocol):
    """What ``gather`` needs of a store."""

    def set(self, key: str, value: bytes) -> None:
        """Keep a value; raises InvalidArgument if the key has another one."""

    def get(self, key: str, timeout: float) -> bytes:
        """Wait for a value; raises RendezvousError if nobody sets it in time."""


class ForeignStore(Store, Protocol):
    """A store that somebody else keeps, who does not say which ranks have not come."""

    def has(self, key: str) -> bool:
        """Tell whether somebody has set it, as far as the store still answers."""


class StoreExchange(Exchange):
    """The exchange through a store that somebody else keeps.

    ``towards`` is an address on the way to rank 0, ``call`` what every rank calls to come here.
    """

    def __init__(
        self,
        job: Job,
        store: ForeignStore,
        deadline: Deadline,
        towards: str = "",
        call: str = "ferrodist.init()",
    ) -> None:
        self._job = job
        self._deadline = deadline
        self._towards = towards
        self._store = store
        self._call = call

    @property
    def towards(self) -> str:
        """The address that was given."""
        return self._towards

    def gather(self, own: bytes) -> list[bytes]:
        """Return what all ranks have to tell; raises RendezvousError naming those that do not."""
        try:
            return gather(self._store, self._job, own, self._deadline)
        except RendezvousError as error:
            raise self._missing() from error

    def _missing(self) -> RendezvousError:
        """Make the error for ranks that have told nothing."""
        job = self._job
        keys = gather_keys(job.world_size)
        missing = [rank for rank, key in enumerate(keys) if not self._store.has(key)]
        missing = [rank for rank in missing if rank != job.rank] or [0]
        shown = ", ".join(f"rank {rank}" for rank in missing[:_MAX_RANKS_SHOWN])
        return RendezvousError(
            f"{shown} of {job.world_size} did not join job {job.name!r} within {self._deadline}; "
            f"this is rank {job.rank}. Look at the output of those: they ended or hang before "
            f"{self._call}, or did not call it",
            missing=missing,
            rank=missing[0],
            this_rank=job.rank,
        )


def gather(store: Store, job: Job, own: bytes, deadline: Deadline) -> list[bytes]:
    """Give every rank the values of all, in rank order, by a store.

    Rank 0 reads them one by one and writes them together, so that there are about two requests per
    rank and not one per pair of ranks.
    """
    if len(own) > MAX_RECORD:
        raise RendezvousError(f"rank {job.rank} has {len(own)} bytes to tell", rank=job.rank)
    store.set(f"address/{job.rank}", own)
    if job.rank != 0:
        return _read_all(store, job, deadline)
    others = (
        store.get(f"address/{rank}", deadline.remaining()) for rank in range(1, job.world_size)
    )
    values = [own, *others]
    for start in range(0, len(values), _PER_VALUE):
        part = values[start : start + _PER_VALUE]
        packed = (len(value).to_bytes(_LENGTH_NBYTES) + value for value in part)
        store.set(f"addresses/{start}", b"".join(packed))
    return values


def gather_keys(world_size: int) -> list[str]:
    """Return for each rank the key that shows, when it is set, that the rank has come."""
    return [f"address/{rank}" for rank in range(world_size)]


def _read_all(store: Store, job: Job, deadline: Deadline) -> list[bytes]:
    values: list[bytes] = []
    while len(values) < job.world_size:
        part = store.get(f"addresses/{len(values)}", deadline.remaining())
        if not part:
            raise ProtocolError("rank 0 told nothing", rank=0)
        while part:
            end = _LENGTH_NBYTES + int.from_bytes(part[:_LENGTH_NBYTES])
            values.append(part[_LENGTH_NBYTES:end])
            part = part[end:]
    return values


class StoreTable:
    """What rank 0 keeps."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._check(key, value)
        found = self._values.setdefault(key, value)
        if found != value:
            raise InvalidArgument(
                f"key {key!r} of the store has a value of {len(found)} bytes, and a key is set "
                f"once: got another of {len(value)} bytes",
                got=len(value),
            )

    def try_get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a number that starts at 0 and is kept as decimal digits; return the sum."""
        found = self._values.get(key, b"0")
        try:
            total = int(found) + amount
        except ValueError as error:
            raise InvalidArgument(f"key {key!r} of the store is not a number") from error
        value = str(total).encode()
        self._check(key, value)
        self._values[key] = value
        return total

    def _check(self, key: str, value: bytes) -> None:
        check_entry(key, value)
        if key not in self._values and len(self._values) >= _MAX_ENTRIES:
            raise InvalidArgument(f"key {key!r}: the store is full, with {_MAX_ENTRIES} keys")


def check_entry(key: str, value: bytes = b"") -> bytes:
    """Refuse what the store cannot hold; return the key as it travels."""
    name = key.encode()
    if not 0 < len(name) <= MAX_KEY:
        raise InvalidArgument(
            f"a key of the store has 1 to {MAX_KEY} bytes, got {len(name)}", got=len(name)
        )
    if len(value) > MAX_VALUE:
        raise InvalidArgument(
            f"key {key!r}: a value in the store has at most {MAX_VALUE} bytes, got {len(value)}",
            got=len(value),
        )
    return name


def absent(key: str, deadline: Deadline) -> RendezvousError:
    """Make the error for a value that nobody has set in time."""
    return RendezvousError(f"nobody has set {key!r} in the store within {deadline}")


# -- requests as they travel ----------------------------------------------------------------------


def pack_entry(key: str, value: bytes) -> bytes:
    name = check_entry(key, value)
    return _KEY_LENGTH.pack(len(name)) + name + value


def unpack_entry(body: bytes) -> tuple[str, bytes]:
    try:
        (length,) = _KEY_LENGTH.unpack(body[: _KEY_LENGTH.size])
        end = _KEY_LENGTH.size + length
        return body[_KEY_LENGTH.size : end].decode(), body[end:]
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError("a request to the store that cannot be decoded") from error


def unpack_number(form: struct.Struct, body: bytes) -> tuple[Any, str]:
    """Read a number and the key that follows it."""
    try:
        (number,) = form.unpack(body[: form.size])
        return number, body[form.size :].decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError("a request to the store that cannot be decoded") from error
