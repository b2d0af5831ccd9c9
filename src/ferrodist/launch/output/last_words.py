# SPDX-License-Identifier: MIT OR Apache-2.0
"""Last words: the end of what a rank has written, and the traceback that is in it."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import NamedTuple

MOST_NBYTES = 1 << 16
_CLOSE_BY = 30  # lines after an exception that may be part of its message

# A progress bar or the name of a rank may stand before it in its line.
_HEADER = re.compile(
    r"(?P<prefix>.*?)"
    r"(?P<header>(  \+ Exception Group )?Traceback \(most recent call last\):"
    r"|Fatal Python error: .*)"
)
_NESTED = "  | "  # before a traceback that is part of a group's
_SYNTAX_ERROR = re.compile(r'(?P<prefix>)(?P<header>  File ".*", line \d+)')  # in the script itself
_TORCH_PREFIX = re.compile(r"\[rank\d+\]: ?")
_CHAINS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


class Tail:
    """The last bytes of a stream."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        """Remember these, and forget as many."""
        self._data += data
        if len(self._data) > 2 * MOST_NBYTES:
            del self._data[:-MOST_NBYTES]

    def read(self) -> bytes:
        """Return what is remembered."""
        return bytes(self._data[-MOST_NBYTES:])


class FileTail:
    """The last bytes of a file that a rank writes to itself."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> bytes:
        """Return what is there now; nothing if somebody has removed it."""
        try:
            with self._path.open("rb") as file:
                nbytes = file.seek(0, os.SEEK_END)
                file.seek(max(0, nbytes - MOST_NBYTES))
                return file.read(MOST_NBYTES)
        except OSError:
            return b""


class _Chain(NamedTuple):
    """Tracebacks, one the cause of the next, and which line begins the last of them."""

    lines: list[str]
    last: int


def traceback_in(text: str) -> str:
    """Return the last traceback of Python's, with those it is chained to; '' if there is none."""
    chain = _try_find(text.splitlines())
    return "" if chain is None else "\n".join(chain.lines[: _end(chain)])


def is_at_end(trace: str, text: str) -> bool:
    """Tell whether a text shows a traceback and then nothing else, but for the same of others."""
    header, *others = trace.rstrip().splitlines()
    lines = [_TORCH_PREFIX.sub("", line) for line in text.rstrip().splitlines()]
    known = {header, *others}
    shown = itertools.takewhile(lambda line: line in known or line.endswith(header), lines[::-1])
    return "\n".join([header, *others]) in "\n".join([*shown][::-1])


def _try_find(lines: list[str]) -> _Chain | None:
    headers = _headers(_HEADER, lines) or _headers(_SYNTAX_ERROR, lines)[-1:]
    if not headers:
        return None
    first = last = headers.pop()
    while headers and _is_chained(lines, first.number):
        first = headers.pop()
    rest = lines[first.number + 1 :]
    prefix = _repeated(first.prefix, rest[0]) if rest else ""
    rest = [line.removeprefix(prefix) for line in rest]
    return _Chain([first.text, *rest], last.number - first.number)


class _Header(NamedTuple):
    number: int
    prefix: str
    text: str


def _headers(pattern: re.Pattern[str], lines: list[str]) -> list[_Header]:
    found = [(number, pattern.fullmatch(line)) for number, line in enumerate(lines)]
    return [
        _Header(number, match["prefix"], match["header"])
        for number, match in found
        if match and not match["prefix"].endswith(_NESTED)
    ]


def _repeated(prefix: str, line: str) -> str:
    """Return what of a prefix stands before the next line too, such as the name of a rank."""
    ends = (prefix[start:] for start in range(len(prefix)))
    return next((end for end in ends if end.strip() and line.startswith(end)), "")


def _is_chained(lines: list[str], header: int) -> bool:
    return any(chain in line for chain in _CHAINS for line in lines[max(0, header - 3) : header])


def _frames_end(chain: _Chain) -> int:
    """Return the number of the first line after the frames, which are indented."""
    numbers = range(chain.last + 1, len(chain.lines))
    return next((at for at in numbers if chain.lines[at][:1] != " "), len(chain.lines))


def _end(chain: _Chain) -> int:
    """Return how many lines there are; a message may have several, and nothing marks its end."""
    num_lines, end = len(chain.lines), _frames_end(chain) + 1
    if chain.lines[chain.last].startswith("Fatal") or num_lines - end <= _CLOSE_BY:
        return num_lines
    return next((at for at in range(end, end + _CLOSE_BY) if not chain.lines[at]), end)
