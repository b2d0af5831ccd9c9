# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a rank refuses in a call on which others wait: it is told in the call, and all raise it.

Where all ranks are told a size before data moves, a size below zero says that there is no data, and
how long the reason is. The call ends well as far as the group is concerned, which goes on.
"""

from __future__ import annotations

import json

from ferrodist import errors
from ferrodist.backends.running_call import CollectiveArgs, RunningCall
from ferrodist.buffer import Buffer, DType
from ferrodist.call import Kind
from ferrodist.errors import DistributedError, UnsupportedArray

_LONGEST = 10_000  # characters of a reason


def size_of_refusal(error: BaseException) -> int:
    """Return what a rank tells instead of a size."""
    return -len(_pack(error))


def share_refusal(
    running: RunningCall, rank: int, size: int, mine: BaseException | None
) -> BaseException:
    """Give all ranks the reason of the one that refuses; return what to raise after the call.

    ``size`` is what that rank told. One that refuses itself raises its own error.
    """
    is_told_here = mine is not None and rank == running.backend.rank
    words = bytearray(_pack(mine)) if is_told_here else bytearray(-size)
    buffer = Buffer(memoryview(words), DType.UINT8, (len(words),), words)
    args = CollectiveArgs(root=rank, in_place=True)
    running.collective(Kind.BROADCAST, buffer, buffer, args)
    return _unpack(words, running, rank) if mine is None else mine


def _pack(error: BaseException | None) -> bytes:
    text = str(error) if isinstance(error, DistributedError) else f"{type(error).__name__}: {error}"
    return json.dumps([type(error).__name__, text[:_LONGEST]]).encode()


def _unpack(words: bytearray, running: RunningCall, rank: int) -> DistributedError:
    name, text = json.loads(words)
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, DistributedError)):
        kind = UnsupportedArray  # what an object raised that is no error of ours
    where = f" (on rank {rank})"
    return kind(
        text.removesuffix(where) + where,
        rank=rank,
        this_rank=running.backend.rank,
        op=running.call.kind.label,
        sequence=running.sequence,
    )
