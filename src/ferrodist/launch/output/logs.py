# SPDX-License-Identifier: MIT OR Apache-2.0
"""Log files: what each rank writes, also or only in files, in the folders torchrun's users know.

``<log dir>/<name of the run>/attempt_<k>/<rank>/stdout.log`` and ``stderr.log``. Where rank 0 has a
terminal for both streams, these are one, and it is in stdout.log.
"""

from __future__ import annotations

import enum
import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ferrodist.errors import InvalidArgument


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
        """Return the streams of one rank."""
        return self.by_rank.get(rank, self.everywhere)

    def to_text(self) -> str:
        """Write it as ``parse_choice`` reads it."""
        pairs = ",".join(f"{rank}:{int(which)}" for rank, which in self.by_rank.items())
        return pairs or str(int(self.everywhere))


def parse_choice(text: str) -> Choice:
    """Read a choice as torchrun writes it: '3' for all ranks, or '0:1,1:3' for some.

    Raises:
        InvalidArgument: if it is none.
    """
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
            f"{text!r} does not say which streams ({error}). Give 0 for none, 1 for stdout, 2 for "
            "stderr or 3 for both, or that for some ranks, as in 0:1,1:3"
        ) from error
    return Choice(Which.NONE, by_rank)


def _parse_number(text: str, most: int | None = None) -> int:
    if not (text.isascii() and text.isdigit()) or (most is not None and int(text) > most):
        raise ValueError(f"{text!r} is no number from 0 to {most or 'N - 1'}")
    return int(text)


class RankLogs(NamedTuple):
    """The files of one rank: streams that go there as well, and streams that go there only."""

    folder: Path = Path()
    teed: Which = Which.NONE
    redirected: Which = Which.NONE

    def path(self, stream: Which) -> Path:
        """Return where a stream is written."""
        return self.folder / f"{'stdout' if stream == Which.STDOUT else 'stderr'}.log"

    def open(self, stream: Which) -> int:
        """Make the file of a stream; nothing that exists is overwritten."""
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
        """Return the files of one rank."""
        folder = self.directory / f"attempt_{attempt}" / str(rank)
        teed = self._tee.of(rank)
        return RankLogs(folder, teed, self._redirects.of(rank) & ~teed)


def _make_new(directory: Path) -> Path:
    """Make a folder named after the time and this process, though another host may do the same."""
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
