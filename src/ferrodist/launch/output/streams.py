# SPDX-License-Identifier: MIT OR Apache-2.0
"""Streams: the output of all ranks of one attempt, on its way to the console and to log files.

Everything goes through the launcher, rank 0's too; otherwise lines would tear. Rank 0 gets a
terminal of its own for those of its streams that end at one.
"""

from __future__ import annotations

import math
from types import TracebackType
from typing import Self

from ferrodist.launch.output.console import Console
from ferrodist.launch.output.flow import Flow
from ferrodist.launch.output.logs import LogFiles, RankLogs
from ferrodist.launch.output.merging import Merging
from ferrodist.launch.output.rank_streams import Files, RankStreams
from ferrodist.launch.output.terminal import FOLLOW_SECONDS, Terminal
from ferrodist.launch.processes import Crew


class Streams(Merging):
    """The streams of all ranks. Leaving the context leaves the terminal as it was.

    Make one, start a crew with its ``files``, ``attach`` it; then, around every wait for the crew,
    wait no longer than ``wait_seconds``, ``write_due`` and tell which rank has ended. At the end
    of all, ``finish``. ``first_rank`` is the first of this host.
    """

    def __init__(
        self,
        num_ranks: int,
        console: Console,
        logs: LogFiles | None = None,
        *,
        attempt: int = 0,
        first_rank: int = 0,
    ) -> None:
        super().__init__(console)
        self._ranks: dict[int, RankStreams] = {}
        try:
            for rank in range(first_rank, first_rank + num_ranks):
                own = RankLogs() if logs is None else logs.of_rank(rank, attempt)
                self._ranks[rank] = RankStreams(rank, console, own)
        except BaseException:
            self.close()
            raise

    @property
    def _flows(self) -> list[Flow]:
        return [flow for rank in self._ranks.values() for flow in rank.flows]

    @property
    def _terminal(self) -> Terminal | None:
        return self._ranks[0].terminal if 0 in self._ranks else None

    def files(self, rank: int) -> Files:
        """Return the files to start a rank with; they are closed here by ``attach``."""
        return self._ranks[rank].files

    def attach(self, crew: Crew) -> None:
        """Leave their files to the ranks, and read while the crew is waited for."""
        for rank in self._ranks.values():
            rank.attach(crew)

    def wait_seconds(self) -> float:
        """Return how long ``write_due`` will have nothing to do, unless something is read."""
        longest = math.inf if self._terminal is None else FOLLOW_SECONDS
        return min(longest, super().wait_seconds())

    def write_due(self) -> None:
        """Write what has been held long enough, and look after the terminal."""
        super().write_due()
        if self._terminal is not None:
            self._terminal.follow()

    def rank_ended(self, rank: int) -> None:
        """Take all that a rank has written whose process has ended."""
        for flow in self._ranks[rank].flows:
            flow.retire()

    def last_words(self, rank: int) -> str:
        """Return the end of what a rank has written to stderr; also after all is closed."""
        return self._ranks[rank].last_words()

    def log_error(self) -> Exception | None:
        """Return why some log file is not complete, such as a full disk; None if all are."""
        logs = (flow.log for flow in self._flows)
        return next((log.error for log in logs if log is not None and log.error), None)

    def let_terminal_go(self) -> None:
        """Leave the terminal as it was, before this process is stopped; ``write_due`` takes it."""
        if self._terminal is not None:
            self._terminal.let_go()

    def close(self) -> None:
        """Finish, and close all files."""
        self.finish()
        for rank in self._ranks.values():
            rank.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
