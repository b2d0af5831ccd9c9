# SPDX-License-Identifier: MIT OR Apache-2.0
"""Speakers: how the bytes of one stream become output. Rank 0 is left as it is, others get names.

A stream is *retired* when its process has ended, though what that has started may still write to
it, and *ended* when nothing can come any more.
"""

from __future__ import annotations

import math
from typing import Protocol

from ferrodist.launch.output.outlet import QUIET_SECONDS, Outlet

LONGEST_LINE = 1 << 20
FULL_BUFFER = 4096  # the least that C and Python collect before they write to a pipe
FULL_PIPE = 1 << 15  # a pipe that holds less can take more: its writer is not in mid-write


class Speaker(Protocol):
    """What takes the bytes of a stream; ``waits_for_lines`` if it likes lines whole."""

    waits_for_lines: bool

    @property
    def has_room(self) -> bool:
        """False if no more should be read for now."""
        ...

    def take(self, data: bytes) -> None:
        """Take what has been read."""
        ...

    def write_due(self) -> None:
        """Hand on what was held long enough."""
        ...

    def wait_seconds(self) -> float:
        """Return how long ``write_due`` will have nothing to do, unless something comes."""
        ...

    def retire(self) -> None:
        """Let nobody wait for this stream."""
        ...

    def end(self) -> None:
        """Take note that there is no more."""
        ...


class PassThrough:
    """A stream of rank 0: written as it comes, except for what is certainly not meant so.

    A long write that ends in mid-line is a buffer that was full. The begun line is held for the
    rest to come, and others can speak meanwhile. If that does not come soon the line is a prompt.
    On a terminal, where people wait, nothing is held.
    """

    def __init__(self, outlet: Outlet, *, is_terminal: bool = False) -> None:
        self._outlet = outlet
        self._is_terminal = is_terminal
        self.waits_for_lines = not is_terminal
        self._is_retired = False
        self._held = b""
        self._last_nbytes = 0
        self._last_taken = 0.0
        outlet.open_passing()

    @property
    def has_room(self) -> bool:
        """False if nobody takes what it has written already."""
        return self._outlet.has_room

    def take(self, data: bytes) -> None:
        """Write what has come, and what was held before it."""
        is_buffer = self._is_full_buffer(len(data))
        self._last_nbytes = len(data)
        self._last_taken = self._outlet.clock()
        data = self._held + data
        cut = data.rfind(b"\n") + 1 if is_buffer else len(data)
        if len(data) - cut > LONGEST_LINE:
            cut = len(data)
        self._held = data[cut:]
        self._outlet.pass_through(data[:cut])

    def _is_full_buffer(self, nbytes: int) -> bool:
        """Tell a buffer from a prompt; what follows a full pipe is the rest of what filled it."""
        is_long = nbytes >= FULL_BUFFER or self._last_nbytes >= FULL_PIPE
        return is_long and not self._is_terminal

    def write_due(self) -> None:
        """Write what was held if the rest has not come."""
        if self.wait_seconds() <= 0:
            self._write_held()

    def wait_seconds(self) -> float:
        """Return how long the rest may still take."""
        if not self._held:
            return math.inf
        return max(0.0, self._last_taken + QUIET_SECONDS - self._outlet.clock())

    def retire(self) -> None:
        """Let nobody wait for the end of its line."""
        if not self._is_retired:
            self._is_retired = True
            self._outlet.close_passing()

    def end(self) -> None:
        """Write what was held."""
        self._write_held()
        self.retire()

    def _write_held(self) -> None:
        held, self._held = self._held, b""
        self._outlet.pass_through(held)


class Prefixed:
    """A stream of another rank: whole lines, each after the name of the rank."""

    waits_for_lines = False  # it makes whole ones itself

    def __init__(self, rank: int, outlet: Outlet) -> None:
        self._rank = rank
        self._outlet = outlet
        self._lines = LineSplitter()
        self._is_retired = False
        outlet.open_lines(rank)

    @property
    def has_room(self) -> bool:
        """False if too many lines wait already."""
        return self._outlet.has_room_for_lines

    def take(self, data: bytes) -> None:
        """Hand on the lines that are whole now."""
        self._outlet.add_lines(self._rank, self._lines.split(data))

    def write_due(self) -> None:
        """Do nothing: the outlet does that."""

    def wait_seconds(self) -> float:
        """Return no limit."""
        return math.inf

    def retire(self) -> None:
        """Let no other rank's lines wait for this one's."""
        if not self._is_retired:
            self._is_retired = True
            self._outlet.close_lines(self._rank)

    def end(self) -> None:
        """Hand on a last line that has no newline."""
        self._outlet.add_lines(self._rank, self._lines.end())
        self.retire()


class Named:
    """A stream of another launcher: whole lines, which name their ranks already."""

    waits_for_lines = False  # it makes whole ones itself

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet
        self._lines = LineSplitter()

    @property
    def has_room(self) -> bool:
        """False if too many lines wait already."""
        return self._outlet.has_room_for_lines

    def take(self, data: bytes) -> None:
        """Hand on the lines that are whole now."""
        self._outlet.add_unnamed_lines(self._lines.split(data))

    def write_due(self) -> None:
        """Do nothing: the outlet does that."""

    def wait_seconds(self) -> float:
        """Return no limit."""
        return math.inf

    def retire(self) -> None:
        """Do nothing: nobody waits for it."""

    def end(self) -> None:
        """Hand on a last line that has no newline."""
        self._outlet.add_unnamed_lines(self._lines.end())


class LineSplitter:
    """Cuts bytes into lines, as a terminal would show them: a carriage return starts again."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def split(self, data: bytes) -> list[bytes]:
        """Return the lines that these bytes complete, without their newlines."""
        self._rest += data
        lines: list[bytes] = []
        if b"\n" in data:
            whole, _, self._rest = self._rest.rpartition(b"\n")
            lines = bytes(whole).split(b"\n")
            if b"\r" in whole:
                lines = [_shown(line).rstrip(b"\r") for line in lines]
        if b"\r" in data:
            self._rest = bytearray(_shown(bytes(self._rest)))
        if len(self._rest) > LONGEST_LINE:
            lines += self.end()
        return lines

    def end(self) -> list[bytes]:
        """Return the line that was begun, if one was."""
        rest, self._rest = bytes(self._rest).rstrip(b"\r"), bytearray()
        return [rest] if rest else []


def _shown(line: bytes) -> bytes:
    """Leave out what has been overwritten; keep a carriage return that ends the line."""
    text = line.rstrip(b"\r")
    return text[text.rfind(b"\r") + 1 :] + line[len(text) : len(text) + 1]
