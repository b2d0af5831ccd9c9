# SPDX-License-Identifier: MIT OR Apache-2.0
"""The exception tree: every error ferrodist raises, and nothing else.

::

    DistributedError(RuntimeError)
      InvalidArgument(ValueError)          your call is wrong here, whatever the others do
        InvalidWorldSize  InvalidRank  InvalidShape  SelfSend
      UnsupportedArray(TypeError)          this array cannot be sent
      UnsupportedOp(TypeError)             this operation has no meaning for this dtype
      CollectiveMismatch                   ranks called different things
        SizeMismatch(ValueError)           ... and only sizes differ
      CollectiveTimeout(TimeoutError)      a rank did not arrive in time
      RankLost(ConnectionError)            a rank is gone
      GroupAborted                         the group was given up, by a rank or after a timeout
        Evicted                            ... because of this rank: others may go on without it
      RendezvousError(ConnectionError)     the ranks did not find each other
      AuthenticationError(ConnectionError) a peer could not prove that it belongs to the job
      ProtocolError(ConnectionError)       bytes that cannot be right
      OutOfMemory(MemoryError)             no memory for an array, a copy or a message, on some rank
      BackendUnavailable(ImportError)      a dependency is missing
      BackendClosed                        used after close(), or in a forked child
      NotInitialized                       no backend was passed and init() was not called

Facts are keyword arguments and become attributes. ``rank`` is always the rank at fault,
``this_rank`` the one that raises. Every error pickles, facts included.
"""

from __future__ import annotations

from typing import Any

_LONGEST_CHAIN = 20  # of errors and their causes


class DistributedError(RuntimeError):
    """Base class of all errors that ferrodist raises.

    What an error is about is also in attributes: ``rank`` (the rank at fault), ``this_rank`` (the
    rank that raises), ``op``, ``sequence``, ``expected``, ``got``, ``missing``, ``reason``;
    attributes that do not apply are None.
    """

    # The facts users read most; absent ones are None rather than an AttributeError.
    rank: int | None = None
    this_rank: int | None = None
    world_size: int | None = None
    op: str | None = None
    sequence: int | None = None
    expected: Any = None
    got: Any = None
    missing: list[int] | None = None
    reason: str | None = None

    def __init__(self, message: str = "", **facts: Any) -> None:
        super().__init__(message)
        self._facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        facts = {name: _plain(value) for name, value in self._facts.items()}
        return _rebuild, (type(self), str(self), facts)


def _plain(value: Any) -> Any:
    """Keep what surely pickles; of anything else, what the user passed, keep how it looks."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (type(None), bool, int, float, str)) else repr(value)


def _rebuild(cls: type[DistributedError], message: str, facts: dict[str, Any]) -> DistributedError:
    return cls(message, **facts)


class InvalidArgument(DistributedError, ValueError):
    """An argument is invalid on this rank; nothing was sent."""


class InvalidWorldSize(InvalidArgument):
    """A group must have at least one rank."""


class InvalidRank(InvalidArgument):
    """Not a rank of the group; ``rank`` is the value passed."""


class InvalidShape(InvalidArgument):
    """An axis cannot be divided evenly among the ranks."""


class SelfSend(InvalidArgument):
    """A blocking send to, or receive from, this rank itself that could never end."""


class UnsupportedArray(DistributedError, TypeError):
    """The array, dtype or object cannot be communicated."""


class UnsupportedOp(DistributedError, TypeError):
    """This dtype, algorithm or backend does not support the operation."""


class CollectiveMismatch(DistributedError):
    """Ranks made different calls. All ranks raise this error, and the group stays usable."""


class SizeMismatch(CollectiveMismatch, ValueError):
    """Only sizes differ between ranks, or an array does not fit the number of ranks."""


class CollectiveTimeout(DistributedError, TimeoutError):
    """Ranks did not arrive before the deadline; ``missing`` lists them."""


class RankLost(DistributedError, ConnectionError):
    """A rank is gone; ``how`` says in which way. The group is unusable."""

    how: str | None = None


class GroupAborted(DistributedError):
    """The group was aborted; ``reason`` says why, ``rank`` by which rank."""


class Evicted(GroupAborted):
    """The other ranks have lost this one, which is alive, and may have gone on without it."""


class RendezvousError(DistributedError, ConnectionError):
    """The ranks of a job could not find or connect to each other."""


class AuthenticationError(DistributedError, ConnectionError):
    """A peer could not prove that it belongs to the job."""


class ProtocolError(DistributedError, ConnectionError):
    """A rank received invalid bytes and discarded them."""


class OutOfMemory(DistributedError, MemoryError):
    """A rank had no memory for an array, a copy or a message. The group stays usable.

    ``nbytes`` is how much was asked for, None where that is not known.
    """

    nbytes: int | None = None


def lacks_memory(error: BaseException) -> bool:
    """Tell whether NumPy, Python or torch raised this because there is no memory."""
    is_ours = isinstance(error, DistributedError)
    # torch raises a RuntimeError with these words.
    return not is_ours and (isinstance(error, MemoryError) or "can't allocate memory" in str(error))


def out_of_memory(nbytes: int) -> OutOfMemory:
    """Make the error of an array, or a copy, that there is no memory for."""
    return OutOfMemory(f"no memory for {nbytes} bytes ({nbytes >> 20} MiB)", nbytes=nbytes)


class BackendUnavailable(DistributedError, ImportError):
    """A backend needs a package or library that is not installed."""


class BackendClosed(DistributedError):
    """The backend was closed, or belongs to the process this one was forked from."""


class NotInitialized(DistributedError):
    """No backend was passed and ``ferrodist.init()`` has not been called."""


def is_consequence(error: BaseException | None, rank: int) -> bool:
    """Tell whether an error that this rank raised only says that another one failed.

    It may be the cause of the error, or what was being handled when that was raised.
    """
    return _names_another(error, rank, (RankLost, GroupAborted, RendezvousError))


def is_of_victim(error: BaseException | None, rank: int) -> bool:
    """Tell the same, also of an error that says that this rank has waited for another in vain."""
    kinds = (RankLost, GroupAborted, RendezvousError, CollectiveTimeout)
    return _names_another(error, rank, kinds)


def _names_another(
    error: BaseException | None, rank: int, kinds: tuple[type[DistributedError], ...]
) -> bool:
    for _ in range(_LONGEST_CHAIN):
        if error is None:
            break
        if isinstance(error, kinds) and error.rank is not None:
            return error.rank != rank
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
