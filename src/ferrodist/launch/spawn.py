# SPDX-License-Identifier: MIT OR Apache-2.0
"""run: one function on n processes of this host; no error is lost, no process left behind."""

from __future__ import annotations

import linecache
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ferrodist.backends.failures import describe, died
from ferrodist.config import check_timeout
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    CollectiveTimeout,
    InvalidArgument,
    InvalidWorldSize,
    RankLost,
    UnsupportedArray,
    is_consequence,
)
from ferrodist.launch.machine import usable_cores
from ferrodist.launch.output.console import console_of_streams
from ferrodist.launch.output.reader import Reader
from ferrodist.launch.output.streams import Streams
from ferrodist.launch.processes import (
    KILL_SECONDS,
    ProcessSpec,
    Worker,
    WorkerGroup,
    sooner,
    standard_files_taken,
)
from ferrodist.launch.worker import WorkerResult, pickled, try_read_result
from ferrodist.tracebacks import RemoteTraceback

T = TypeVar("T")

_WORKER = Path(__file__).with_name("worker.py")
_LONGEST_WAIT = 0.2  # at once: a Ctrl-C that came just before is noticed after it


class NoResult(NamedTuple):
    """Why a rank has no result."""

    rank: int
    when: float
    error: BaseException

    @property
    def is_consequence(self) -> bool:
        return is_consequence(self.error, self.rank)


def run(
    fn: Callable[..., T],
    ranks: int | None = None,
    *,
    args: tuple[Any, ...] = (),
    timeout: float | None = None,
    grace: float = 5.0,
    cluster: str | None = None,
    resources: Mapping[str, float] | None = None,
    placement: str = "pack",
) -> list[T]:
    """Run ``fn(backend, *args)`` on new processes of this host and return the results by rank.

    ``ranks`` is how many, by default one per core. The function, its arguments and the results are
    pickled; lambdas and closures may be passed, and the calling script is not imported again.

    If a rank fails, its error is raised here with its traceback as the cause; the first one, if
    several do. The others get ``grace`` seconds to notice and to finish, and are then ended. For a
    rank whose process dies, RankLost is raised. After ``timeout`` seconds all are ended, and
    CollectiveTimeout names those that had not finished. No process outlives this call, nor this
    process: what the ranks have started and left gets SIGTERM, and ``grace`` seconds later SIGKILL.

    With ``cluster="ray"`` the ranks are actors on the Ray cluster that this process is connected
    to. ``resources`` is what each needs on its node, by default ``{"CPU": 1}``; ``placement`` is
    "pack", "spread", "strict_pack" or "strict_spread". By default there are as many ranks as there
    is room for. NotInitialized without ``ray.init``, RendezvousError if there is no room in
    ``Config.join_timeout``.

    Example:
        >>> import ferrodist
        >>> ferrodist.run(lambda backend: ferrodist.allreduce(backend.rank), 2)
        [1, 1]
    """
    if ranks is not None and (not isinstance(ranks, int) or ranks < 1):
        raise InvalidWorldSize(f"run: ranks must be at least 1, got {ranks!r}", got=ranks)
    deadline = Deadline(check_timeout(timeout))
    if cluster not in (None, "ray"):
        raise InvalidArgument(f"run: cluster={cluster!r}: expected 'ray', or None", got=cluster)
    if cluster is not None:
        from ferrodist.launch.ray_cluster import run_on_ray

        return run_on_ray((fn, args), ranks, resources, placement, deadline, grace)
    if resources is not None or placement != "pack":
        raise InvalidArgument("run: resources= and placement= are of a cluster: cluster='ray'")
    num_ranks = usable_cores() if ranks is None else ranks
    console = console_of_streams(sys.stdout, sys.stderr)
    with ExitStack() as stack:
        stack.enter_context(standard_files_taken())
        stack.callback(console.finish)
        task = _open_task(fn, args)
        stack.callback(os.close, task)
        streams = stack.enter_context(Streams(num_ranks, console))
        inboxes = [_Inbox() for _ in range(num_ranks)]
        for inbox in inboxes:
            stack.callback(inbox.close)
        specs = []
        for rank, inbox in enumerate(inboxes):
            command = [sys.executable, str(_WORKER), str(task), str(inbox.end)]
            specs.append(ProcessSpec(command, streams.ranks[rank].files, [task, inbox.end]))
        workers = stack.enter_context(WorkerGroup(specs))
        for inbox in inboxes:
            inbox.attach(workers)
        streams.attach(workers)
        _wait(workers, inboxes, streams, deadline, grace=grace)
        streams.finish()
        console.finish(lambda: False)  # as any program waits for its reader
        results = results_of(_outcomes(inboxes), num_ranks, deadline)
        if isinstance(results, BaseException):
            raise results
        return results


class _Inbox:
    """The result of one rank, and how its process ended.

    ``end`` is the end of a pipe that the rank writes to; it is closed here by ``attach``.
    """

    def __init__(self) -> None:
        read, self.end = os.pipe()
        self._reader = Reader(read, self._take)
        self.result: WorkerResult | None = None
        self.ended: Worker | None = None
        self.when = 0.0
        self._data = bytearray()

    def attach(self, workers: WorkerGroup) -> None:
        self._close_end()
        workers.watch(self._reader.file, self._reader.read)

    def see_end(self, worker: Worker) -> None:
        self._reader.drain()
        self.ended, self.when = worker, time.monotonic()

    def close(self) -> None:
        """Read the rest, without waiting for anybody who may still hold the other end."""
        self._close_end()
        self._reader.drain()
        self._reader.close()

    def _close_end(self) -> None:
        if self.end >= 0:
            os.close(self.end)
            self.end = -1

    def _take(self, data: bytes) -> None:
        self._data += data
        if self.result is None:
            self.result = try_read_result(self._data)

    @property
    def has_failed(self) -> bool:
        if self.result is not None:
            return self.result.result is None
        return self.ended is not None


def _open_task(fn: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Write what the ranks are to do to an anonymous file; return its descriptor.

    The call itself is pickled on its own: to read it a rank needs this process's path.
    """
    call = pickled_call(fn, args)
    file = os.memfd_create("ferrodist-task")
    with open(file, "wb", closefd=False) as stream:
        pickle.dump((sys.path, sys.argv, sources_in_no_file(), call), stream)
    return file


def pickled_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickled((fn, args))
    except Exception as error:  # a pickler calls the user's code, which may raise anything
        raise UnsupportedArray(
            f"run: the function or its arguments cannot be pickled: {describe(error)}"
        ) from error


def sources_in_no_file() -> dict[str, Any]:
    """Return the code that is in no file, as in a notebook: tracebacks show it."""
    return {name: entry for name, entry in linecache.cache.items() if entry[1:2] == (None,)}


def _wait(
    workers: WorkerGroup,
    inboxes: list[_Inbox],
    streams: Streams,
    deadline: Deadline,
    *,
    grace: float,
) -> None:
    """Wait for all processes; from the first failure on, or when all is done, only for a while."""
    is_hurried, seconds = False, KILL_SECONDS
    try:
        while workers.running and deadline.remaining() > 0:
            longest = min(deadline.remaining(), _LONGEST_WAIT, streams.wait_seconds())
            for worker in workers.wait(longest):
                streams.ranks[worker.rank].retire()
                inboxes[worker.rank].see_end(worker)
            streams.write_due()
            is_over = all(inbox.result is not None for inbox in inboxes)
            if not is_hurried and (is_over or any(inbox.has_failed for inbox in inboxes)):
                is_hurried, deadline = True, sooner(deadline, Deadline(grace))
        if not workers.running and not any(inbox.has_failed for inbox in inboxes):
            seconds = grace  # for what ranks have started
    finally:
        workers.stop(seconds)


def _outcomes(inboxes: list[_Inbox]) -> dict[int, Any]:
    outcomes: dict[int, Any] = {}
    for rank, inbox in enumerate(inboxes):
        if inbox.result is not None:
            outcomes[rank] = load_outcome(rank, inbox.result)
        elif inbox.ended is not None:
            is_quiet = (inbox.ended.returncode or 0) >= 0
            how = f"{inbox.ended.how} without a result" if is_quiet else inbox.ended.how
            outcomes[rank] = NoResult(rank, inbox.when, lost(rank, f"pid {inbox.ended.pid}", how))
    return outcomes


def lost(rank: int, process: str, how: str) -> RankLost:
    return RankLost(f"rank {rank} ({process}) {how}; {died(how).advice}", rank=rank, how=how)


def results_of(
    outcomes: Mapping[int, Any], num_ranks: int, deadline: Deadline
) -> list[Any] | BaseException:
    """Return all results, or the error that best explains why there are none."""
    failures = [one for one in outcomes.values() if isinstance(one, NoResult)]
    if failures:
        return min(failures, key=lambda one: (one.is_consequence, one.when)).error
    unfinished = [rank for rank in range(num_ranks) if rank not in outcomes]
    if unfinished:
        names = ", ".join(f"rank {rank}" for rank in unfinished)
        return CollectiveTimeout(
            f"run gave up after {deadline}, its timeout=: {names} had not finished",
            missing=unfinished,
        )
    return [outcomes[rank] for rank in range(num_ranks)]


def load_outcome(rank: int, result: WorkerResult) -> Any:
    if result.result is None:
        return NoResult(rank, result.when, _load_error(rank, result))
    try:
        return pickle.loads(result.result)
    except Exception as error:  # noqa: BLE001 -- it runs the user's code, which may raise anything
        text = f"run: the result of rank {rank} cannot be read here: {error}"
        failure = UnsupportedArray(text, rank=rank)
        failure.__cause__ = error
        return NoResult(rank, time.monotonic(), failure)


def _load_error(rank: int, result: WorkerResult) -> BaseException:
    error: BaseException | None = None
    try:
        error = None if result.error is None else pickle.loads(result.error)
    except Exception:  # noqa: BLE001 -- it runs the user's code, which may raise anything
        error = None
    if not isinstance(error, BaseException):
        how = f"raised {result.text}"
        error = RankLost(f"rank {rank} {how}", rank=rank, how=how)
    error.add_note(f"on rank {rank}")
    error.__cause__ = RemoteTraceback(f"\n{result.trace}")
    return error
