# SPDX-License-Identifier: MIT OR Apache-2.0
"""Ends: how the processes of a job have ended, as they and their launcher saw it.

Only the parent of a process learns its exit code. The launcher notes it in a file of memory that
all ranks have open, so that the survivors can say more of a lost rank than that it is gone. A rank
whose program raises notes its last words there, so that the launcher knows who was first.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import time
from typing import NamedTuple

_CODE = struct.Struct("<i4x")
_RUNNING = 0
_BIAS = 1 << 16  # keeps the codes apart from that
_WORDS = struct.Struct("<d??2xI")  # followed by the words
_MOST_WORDS = 488
_RECORD_NBYTES = _CODE.size + _WORDS.size + _MOST_WORDS


class LastWords(NamedTuple):
    """What a rank said when its program raised.

    ``when`` is by the clock that all processes of a host share; ``is_consequence``: the error only
    says that another rank failed.
    """

    when: float
    is_consequence: bool
    words: str


class Ends:
    """One record per rank: what it said, and how its process ended."""

    def __init__(self, file: int) -> None:
        self.file = file

    @classmethod
    def create(cls, world_size: int) -> Ends:
        """Make the file, for a launcher."""
        file = os.memfd_create("ferrodist-ends", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, world_size * _RECORD_NBYTES)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return cls(file)

    def note(self, rank: int, code: int) -> None:
        """Write down how a process ended: its exit code, or minus the signal that killed it."""
        os.pwrite(self.file, _CODE.pack(code + _BIAS), rank * _RECORD_NBYTES)

    def how(self, rank: int) -> str | None:
        """Complete the sentence 'rank 2 ...'; None if it runs, as far as the launcher knows."""
        record = self._read(rank)
        (code,) = _CODE.unpack_from(record)
        return None if code == _RUNNING else how_ended(code - _BIAS)

    def say(self, rank: int, words: str, *, is_consequence: bool) -> None:
        """Write down the last words of this process."""
        text = words.encode(errors="replace")[:_MOST_WORDS]
        head = _WORDS.pack(time.monotonic(), True, is_consequence, len(text))
        os.pwrite(self.file, head + text, rank * _RECORD_NBYTES + _CODE.size)

    def last_words(self, rank: int) -> LastWords | None:
        """Read what a rank said at its end; None if it said nothing."""
        record = self._read(rank)
        when, is_there, is_consequence, length = _WORDS.unpack_from(record, _CODE.size)
        start = _CODE.size + _WORDS.size
        words = record[start : start + length].decode(errors="replace")
        return LastWords(when, is_consequence, words) if is_there else None

    def _read(self, rank: int) -> bytes:
        record = os.pread(self.file, _RECORD_NBYTES, rank * _RECORD_NBYTES)
        return record.ljust(_RECORD_NBYTES, b"\0")  # a file that is not ours says nothing

    def close(self) -> None:
        """Close the file; the others keep theirs."""
        os.close(self.file)


def how_ended(code: int) -> str:
    """Complete the sentence 'rank 2 ...', from an exit code or minus a signal."""
    if code < 0:
        return f"was killed by {_signal_name(-code)}"
    return f"ended with exit code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
