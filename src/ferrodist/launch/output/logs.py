# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is kept of the output of ranks: log files, and the end of each stream with its traceback.

Log files are in the folders that users of torchrun know:
``<log dir>/<name of the run>/attempt_<k>/<rank>/stdout.log`` and ``stderr.log``. Where rank 0 has a
terminal for both streams, these are one, and it is in stdout.log.
"""

from __future__ import annotations

import enum
import itertools
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ferrodist.errors import InvalidArgument

MOST_NBYTES = 1 << 16  # of a stream that are remembered
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


class Which(enum.IntFlag):
    """Streams of a rank, by torchrun's numbers."""

    NONE = 0
    STDOUT = 1
    STDERR = 2
    BOTH = 3


class Choice(NamedTuple):
    """Which streams of which rank."""

    everywhere: Which
    by_rank: Mapping[int, Which] = MappingProxyType({})

    def of(self, rank: int) -> Which:
        return self.by_rank.get(rank, self.everywhere)

    def to_text(self) -> str:
        pairs = ",".join(f"{rank}:{int(which)}" for rank, which in self.by_rank.items())
        return pairs or str(int(self.everywhere))


def parse_choice(text: str) -> Choice:
    """Read a choice as torchrun writes it: '3' for all ranks, or '0:1,1:3' for some."""
    try:
        if ":" not in text:
            return Choice(Which(_parse_number(text, most=3)))
        pairs = [pair.split(":") for pair in text.split(",")]
        by_rank = {
            _parse_number(rank): Which(_parse_number(streams, most=3)) for rank, streams in pairs
        }
        if len(by_rank) < len(pairs):
            raise ValueError("a rank is named twice")
    except ValueError as error:
        raise InvalidArgument(
            f"{text!r} does not name streams ({error}). Give 0 for none, 1 for stdout, 2 for "
            "stderr or 3 for both, or one of these for some ranks, as in 0:1,1:3"
        ) from error
    return Choice(Which.NONE, by_rank)


def _parse_number(text: str, most: int | None = None) -> int:
    if not (text.isascii() and text.isdigit()) or (most is not None and int(text) > most):
        raise ValueError(f"{text!r} is not a number from 0 to {most or 'N - 1'}")
    return int(text)


class RankLogs(NamedTuple):
    """The files of one rank: for streams that go there too, and those that go there only."""

    folder: Path = Path()
    teed: Which = Which.NONE
    redirected: Which = Which.NONE

    def path(self, stream: Which) -> Path:
        return self.folder / f"{'stdout' if stream == Which.STDOUT else 'stderr'}.log"

    def open(self, stream: Which) -> int:
        """Create the file of a stream; an existing one is not overwritten."""
        self.folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        return os.open(self.path(stream), flags, 0o666)


class LogFiles:
    """The files of one run, in a new folder of their own.

    ``tee``: streams that go to a file as well. ``redirects``: streams that go there only. With
    neither, all streams of all ranks go to files as well.
    """

    def __init__(
        self, directory: Path, *, tee: Choice | None = None, redirects: Choice | None = None
    ) -> None:
        is_all = tee is None and redirects is None
        self._tee = tee or Choice(Which.BOTH if is_all else Which.NONE)
        self._redirects = redirects or Choice(Which.NONE)
        self.directory = _make_new(directory)

    def of_rank(self, rank: int, attempt: int) -> RankLogs:
        folder = self.directory / f"attempt_{attempt}" / str(rank)
        teed = self._tee.of(rank)
        return RankLogs(folder, teed, self._redirects.of(rank) & ~teed)


def _make_new(directory: Path) -> Path:
    """Create a folder named after the time and this process; another host may do the same."""
    name = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.getpid()}"
    for more in itertools.count(1):
        path = directory / (name if more == 1 else f"{name}_{more}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.is_dir():
                raise  # the directory itself is a file
        else:
            return path
    raise AssertionError


# -- the end of a stream, and the traceback in it -------------------------------------------------


class Tail:
    """The last bytes of a stream."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > 2 * MOST_NBYTES:
            del self._data[:-MOST_NBYTES]

    def read(self) -> bytes:
        return bytes(self._data[-MOST_NBYTES:])


class FileTail:
    """The last bytes of a file that a rank writes to itself."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> bytes:
        """Return what is there now; nothing if the file was removed."""
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
    """Return the last Python traceback, with those it is chained to; '' if there is none."""
    chain = _try_find(text.splitlines())
    return "" if chain is None else "\n".join(chain.lines[: _end(chain)])


def is_at_end(trace: str, text: str) -> bool:
    """Tell whether a text ends with a traceback, or with the same one of several ranks."""
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
    while headers and any(
        chain in line
        for chain in _CHAINS
        for line in lines[max(0, first.number - 3) : first.number]
    ):
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
    ends = (prefix[start:] for start in range(len(prefix)))
    return next((end for end in ends if end.strip() and line.startswith(end)), "")


def _end(chain: _Chain) -> int:
    """Return how many lines there are; a message may have several, and nothing marks its end."""
    num_lines = len(chain.lines)
    after = (at for at in range(chain.last + 1, num_lines) if chain.lines[at][:1] != " ")
    end = next(after, num_lines) + 1  # the frames are indented, the line after them is the error
    if chain.lines[chain.last].startswith("Fatal") or num_lines - end <= _CLOSE_BY:
        return num_lines
    return next((at for at in range(end, end + _CLOSE_BY) if not chain.lines[at]), end)
