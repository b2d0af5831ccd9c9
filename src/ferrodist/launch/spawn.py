# SPDX-License-Identifier: MIT OR Apache-2.0
"""run: one function on n processes of this host; no error is lost, no process left behind."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ferrodist.config import check_timeout
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    CollectiveTimeout,
    DistributedError,
    InvalidWorldSize,
    RankLost,
    UnsupportedArray,
    is_consequence,
)
from ferrodist.launch.cores import usable_cores
from ferrodist.launch.output.console import console_of_streams
from ferrodist.launch.output.pipes import Pipe
from ferrodist.launch.output.rank_streams import Files
from ferrodist.launch.output.streams import Streams
from ferrodist.launch.processes import Crew, Order, Rank, sooner, standard_files_taken
from ferrodist.launch.task import Report, open_task, try_read_report, unpickled

T = TypeVar("T")

_WORKER = Path(__file__).with_name("worker.py")
_LONGEST_WAIT = 0.2  # at one go: a Ctrl-C that came just before is noticed after it


class RemoteTraceback(Exception):
    """The traceback of another process, as text; the cause of the error that it is about."""


class _Failure(NamedTuple):
    """Why a rank has no result."""

    rank: int
    when: float
    error: BaseException

    @property
    def is_consequence(self) -> bool:
        """True if the error only says that another rank failed."""
        return is_consequence(self.error, self.rank)


def run(
    fn: Callable[..., T],
    ranks: int | None = None,
    *,
    args: tuple[Any, ...] = (),
    timeout: float | None = None,
    grace: float = 5.0,
) -> list[T]:
    """Run ``fn(backend, *args)`` on new processes of this host and return the results by rank.

    ``ranks`` is how many, by default one per core. The function, its arguments and the results are
    pickled; lambdas and closures may be passed, and the calling script is not imported again.

    If a rank fails, its error is raised here with its traceback as the cause; the first one, if
    several do. The others get ``grace`` seconds to notice and to finish, and are then ended. A rank
    that dies without a word is RankLost. After ``timeout`` seconds all are ended, and
    CollectiveTimeout names those that had not finished. No process outlives this call, nor this
    process.

    Example:
        >>> import ferrodist
        >>> ferrodist.run(lambda backend: ferrodist.allreduce(backend.rank), 2)
        [1, 1]
    """
    num_ranks = usable_cores() if ranks is None else ranks
    if not isinstance(num_ranks, int) or num_ranks < 1:
        raise InvalidWorldSize(f"run: ranks must be at least 1, got {ranks!r}", got=ranks)
    deadline = Deadline(check_timeout(timeout))
    console = console_of_streams(sys.stdout, sys.stderr)
    with ExitStack() as stack:
        stack.enter_context(standard_files_taken())
        stack.callback(console.finish)
        task = open_task(fn, args)
        stack.callback(os.close, task)
        streams = stack.enter_context(Streams(num_ranks, console))
        inboxes = [_Inbox() for _ in range(num_ranks)]
        for inbox in inboxes:
            stack.callback(inbox.close)
        orders = [_order(task, inbox, streams.files(n)) for n, inbox in enumerate(inboxes)]
        crew = stack.enter_context(Crew(orders))
        for inbox in inboxes:
            inbox.attach(crew)
        streams.attach(crew)
        _wait(crew, inboxes, streams, deadline, grace=grace)
        streams.finish()
        console.finish(lambda: False)  # as any program waits for its reader
        return _results(inboxes, deadline)


class _Inbox:
    """What one rank reports, and how its process ended."""

    def __init__(self) -> None:
        self.pipe = Pipe(self._take)
        self.report: Report | None = None
        self.ended: Rank | None = None
        self.when = 0.0
        self._data = bytearray()

    def attach(self, crew: Crew) -> None:
        self.pipe.attach(crew)

    def close(self) -> None:
        self.pipe.close()

    def end(self, rank: Rank) -> None:
        """Note that the process has ended, after all that it has reported."""
        self.pipe.inlet.drain()
        self.ended, self.when = rank, time.monotonic()

    def _take(self, data: bytes) -> None:
        self._data += data
        if self.report is None:
            self.report = try_read_report(self._data)

    @property
    def has_failed(self) -> bool:
        """True if there will be no result."""
        if self.report is not None:
            return self.report.result is None
        return self.ended is not None


def _order(task: int, inbox: _Inbox, files: Files) -> Order:
    report = inbox.pipe.end
    command = [sys.executable, str(_WORKER), str(task), str(report)]
    return Order(command, [task, report], **files._asdict())


def _wait(
    crew: Crew, inboxes: list[_Inbox], streams: Streams, deadline: Deadline, *, grace: float
) -> None:
    """Wait for all processes; from the first failure on, or when all is done, only for a while."""
    is_hurried = False
    try:
        while crew.running and deadline.remaining() > 0:
            for rank in crew.wait(min(deadline.remaining(), _LONGEST_WAIT, streams.wait_seconds())):
                streams.rank_ended(rank.rank)
                inboxes[rank.rank].end(rank)
            streams.write_due()
            is_over = all(inbox.report is not None for inbox in inboxes)
            if not is_hurried and (is_over or any(inbox.has_failed for inbox in inboxes)):
                is_hurried, deadline = True, sooner(deadline, Deadline(grace))
    finally:
        crew.stop()


def _results(inboxes: list[_Inbox], deadline: Deadline) -> list[Any]:
    """Return all results, or raise the error that explains best why there are none."""
    outcomes = [_outcome(rank, inbox) for rank, inbox in enumerate(inboxes)]
    failures = [one for one in outcomes if isinstance(one, _Failure)]
    if failures:
        raise min(failures, key=lambda one: (one.is_consequence, one.when)).error
    unfinished = [rank for rank, inbox in enumerate(inboxes) if inbox.report is None]
    if unfinished:
        names = ", ".join(f"rank {rank}" for rank in unfinished)
        raise CollectiveTimeout(
            f"run gave up after {deadline}, its timeout=: {names} had not finished",
            missing=unfinished,
        )
    return outcomes


def _outcome(rank: int, inbox: _Inbox) -> Any:
    """Return the result of a rank, why it has none, or None if it was ended by us."""
    report = inbox.report
    if report is not None and report.result is not None:
        return _load_result(rank, report.result)
    if report is not None:
        return _Failure(rank, report.when, _load_error(rank, report))
    if inbox.ended is not None:
        is_quiet = inbox.ended.process.returncode >= 0
        how = f"{inbox.ended.how} without a result" if is_quiet else inbox.ended.how
        return _Failure(rank, inbox.when, _lost(rank, inbox.ended.process.pid, how))
    return None


def _load_result(rank: int, data: bytes) -> Any:
    try:
        return unpickled(data)
    except Exception as error:  # noqa: BLE001 -- it runs the user's code, which may raise anything
        text = f"run: the result of rank {rank} cannot be read here: {error}"
        failure = UnsupportedArray(text, rank=rank)
        failure.__cause__ = error
        return _Failure(rank, time.monotonic(), failure)


def _load_error(rank: int, report: Report) -> BaseException:
    """Make the error of a rank again, or say in other words what it was."""
    error: BaseException | None = None
    try:
        error = None if report.error is None else unpickled(report.error)
    except Exception:  # noqa: BLE001 -- it runs the user's code, which may raise anything
        error = None
    if not isinstance(error, BaseException):
        how = f"raised {report.words}"
        error = RankLost(f"rank {rank} {how}", rank=rank, how=how)
    error.add_note(f"on rank {rank}")
    error.__cause__ = RemoteTraceback(f"\n{report.trace}")
    return error


def _lost(rank: int, pid: int, how: str) -> DistributedError:
    return RankLost(f"rank {rank} (pid {pid}) {how}; look at its own output", rank=rank, how=how)
